"""The program that runs a package's tests within a sandbox. It stands alone there, without the rest of the project."""
