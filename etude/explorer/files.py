"""JSON files that pages read and other programs may write: detects whether a file has changed, and whether it holds
what a page needs."""

from pathlib import Path

from kit.disk import DamagedFile, read_json

__all__ = ["NUMBER", "parsed", "stamp"]

NUMBER = (int, float)
"""A float without a fraction may have been written without its decimal point."""


def stamp(path: Path) -> tuple[Path, int, int]:
    """A key that changes whenever the file is written. Raises OSError if the file is missing."""
    status = path.stat()
    return path, status.st_mtime_ns, status.st_size


def parsed(path: Path, shape: dict) -> dict:
    """The JSON object in a file. Raises OSError or ValueError if the file does not hold one of this shape."""
    try:
        return read_json(path, shape)
    except DamagedFile as error:
        raise ValueError(error.reason) from None
