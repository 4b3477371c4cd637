"""JSON that pages read from files which somebody else may write: whether a file is another one by now, and whether what it holds is what a
page needs."""

import json
from pathlib import Path
from typing import Any

__all__ = ["NUMBER", "parsed", "stamp", "unlike"]

NUMBER = (int, float)
"""A float that is whole may have been written without its point."""


def stamp(path: Path) -> tuple[Path, int, int]:
    """A file, and what is another once it has been written again. OSError where it is missing."""
    now = path.stat()
    return path, now.st_mtime_ns, now.st_size


def parsed(path: Path, shape: dict) -> dict:
    """The JSON object in a file. OSError or ValueError where there is none of this shape."""
    found = json.loads(path.read_text(encoding="utf-8"))
    if wrong := unlike(found, shape):
        raise ValueError(wrong)
    return found


def unlike(value: Any, shape: Any) -> str:
    """Where a value out of JSON is not of this shape, in words; empty where it is.

    A shape is a type, or a tuple of them; a list of the shape of its elements, and of ... where there has to be one; a dict of the shapes of
    what has to be there, and under ... of everything; or a function that says the shape for a value."""
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            return "no JSON object"
        wanted = [(key, inner) for named, inner in shape.items() for key in (value if named is ... else [named])]
        wrong = ((key, unlike(value[key], inner) if key in value else "missing") for key, inner in wanted)
    elif isinstance(shape, list):
        if not isinstance(value, list) or len(shape) > len(value) + 1:
            return "empty" if value == [] else "no list"
        wrong = ((place, unlike(inner, shape[0])) for place, inner in enumerate(value))
    elif isinstance(shape, type | tuple):
        return "" if type(value) in (shape if isinstance(shape, tuple) else (shape,)) else f"not what it should be, {json.dumps(value)[:40]}"
    else:
        return unlike(value, shape(value))
    return next((f"{where}: {what}" for where, what in wrong if what), "")
