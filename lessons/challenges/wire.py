"""Plain data between a scorer and the process of a solution: one line of JSON a message, with bytes and arrays of NumPy
among it.

Nothing else crosses: an object that runs code where it is unpacked (a pickle) could write its own score.
"""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np

from kit.disk import parse_json

__all__ = ["packed", "unpacked"]

KINDS = ("bool", "uint8", "uint16", "int16", "int32", "int64", "float32", "float64")


def packed(value: Any) -> str:
    """A value as one line. Tensors of torch become arrays. Raises TypeError for anything that is not plain data."""
    return json.dumps(_to_plain(value))


def unpacked(line: str) -> Any:
    """The value that `packed` wrote; tuples come back as lists. Raises ValueError for a line that it did not write."""
    return parse_json(line, object_hook=_decode_object)


def _to_plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes | bytearray):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, list | tuple):
        return [_to_plain(part) for part in value]
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise TypeError("the keys of a dictionary must be text")
        return {"items": {key: _to_plain(part) for key, part in value.items()}}
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray) and value.dtype.name in KINDS:
        return {
            "array": base64.b64encode(value.tobytes()).decode(),
            "dtype": value.dtype.name,
            "shape": list(value.shape),
        }
    kind = f"an array of {value.dtype}" if isinstance(value, np.ndarray) else f"a value of type {type(value).__name__}"
    raise TypeError(f"{kind} is no plain data: return numbers, text, bytes, lists, dictionaries or arrays")


def _decode_object(fields: dict) -> Any:
    if set(fields) == {"items"}:
        return fields["items"]
    if set(fields) == {"bytes"}:
        return base64.b64decode(fields["bytes"])
    if set(fields) == {"array", "dtype", "shape"} and fields["dtype"] in KINDS:
        return np.frombuffer(base64.b64decode(fields["array"]), dtype=fields["dtype"]).reshape(fields["shape"]).copy()
    return fields
