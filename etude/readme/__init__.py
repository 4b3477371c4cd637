"""Blocks and tables of README.md and docs/ that are made from files."""
