"""JSON files that pages read and other programs may write: detects whether a file has changed, and whether it holds what a page
needs."""

import json
from pathlib import Path
from typing import Any

__all__ = ["NUMBER", "parsed", "stamp", "unlike"]

NUMBER = (int, float)
"""A float without a fraction may have been written without its decimal point."""


def stamp(path: Path) -> tuple[Path, int, int]:
    """A key that changes whenever the file is written. Raises OSError if the file is missing."""
    now = path.stat()
    return path, now.st_mtime_ns, now.st_size


def parsed(path: Path, shape: dict) -> dict:
    """The JSON object in a file. Raises OSError or ValueError if the file does not hold one of this shape."""
    found = json.loads(path.read_text(encoding="utf-8"))
    if wrong := unlike(found, shape):
        raise ValueError(wrong)
    return found


def unlike(value: Any, shape: Any) -> str:
    """Describes where a JSON value differs from this shape; empty if it matches.

    A shape is a type or a tuple of types; a list with the shape of its elements, and ... if it must not be empty; a dict with the shapes of
    the required keys, or under ... the shape of every value; or a function from a value to its shape."""
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            return "not a JSON object"
        wanted = [(key, inner) for named, inner in shape.items() for key in (value if named is ... else [named])]
        wrong = ((key, unlike(value[key], inner) if key in value else "missing") for key, inner in wanted)
    elif isinstance(shape, list):
        if not isinstance(value, list) or len(shape) > len(value) + 1:
            return "empty" if value == [] else "not a list"
        wrong = ((place, unlike(inner, shape[0])) for place, inner in enumerate(value))
    elif isinstance(shape, type | tuple):
        return "" if type(value) in (shape if isinstance(shape, tuple) else (shape,)) else f"unexpected value {json.dumps(value)[:40]}"
    else:
        return unlike(value, shape(value))
    return next((f"{where}: {what}" for where, what in wrong if what), "")
