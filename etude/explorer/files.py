"""Files that pages read and other programs may write: detects changes, and checks the content."""

import csv
import io
from pathlib import Path

from kit.disk import DamagedFile, read_json

__all__ = ["NUMBER", "parse_csv", "parsed", "stamp"]

NUMBER = (int, float)
"""A float without a fraction may have been written without its decimal point."""


def stamp(path: Path) -> tuple[Path, int, int]:
    """A key that changes whenever the file is written. Raises OSError if the file is missing."""
    status = path.stat()
    return path, status.st_mtime_ns, status.st_size


def parse_csv(text: str) -> list[dict]:
    """The rows of a CSV file; every value is a string."""
    return list(csv.DictReader(io.StringIO(text, newline="")))


def parsed(path: Path, shape: dict) -> dict:
    """The JSON object in a file. Raises OSError or ValueError if the file does not hold one of this shape."""
    try:
        return read_json(path, shape)
    except DamagedFile as error:
        raise ValueError(error.reason) from None
