"""What runs inside of a sandbox, as its first process. The root file system has a copy; nothing here imports more than
the standard library, and what loads slowly (dataclasses, hashlib, shutil) only where it is used."""
