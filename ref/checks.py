"""Checks of arguments and of JSON texts. Each error names the argument, says what was expected, and says what came."""

import json
import math
from typing import Any

import torch
from torch import Tensor

__all__ = ["expect", "expect_choice", "expect_positive", "expect_text", "parse_json", "refuse"]

MAX_DEPTH = 100
"""Upper bound of nesting in a JSON text. Code that walks a value recursively then stays far from Python's own limit."""


def expect(name: str, x: object, kind: str, *shape: int | str) -> None:
    """Raise ValueError unless x is a tensor of this kind ("float", "int", "bool" or "any") and shape. A letter in the
    shape allows any size."""
    type_name = type(x).__name__
    description = "None" if x is None else f"{'an' if type_name[0].lower() in 'aeiou' else 'a'} {type_name}"
    if isinstance(x, Tensor):
        dtype = "float" if x.is_floating_point() else "bool" if x.dtype == torch.bool else "int"
        sizes = len(shape) == x.ndim and all(
            isinstance(wanted_size, str) or wanted_size == size for wanted_size, size in zip(shape, x.shape)
        )
        if sizes and kind in (dtype, "any"):
            return
        description = f"{x.dtype} of shape {list(x.shape)}"
    tensor = {"float": "a float tensor", "int": "an int tensor", "bool": "a bool tensor", "any": "a tensor"}[kind]
    raise ValueError(f"{name} must be {tensor} of shape [{', '.join(map(str, shape))}]; got {description}")


def expect_text(ids: object, doc: object, weight: object, B: int, T: int, vocab: int) -> None:
    """Raise ValueError for arguments on which a loss on packed text cannot be computed. ids [B, T] must be tokens of
    the vocabulary. doc, which numbers the documents, and weight, which must be finite, are optional and have the same
    shape."""
    expect("ids", ids, "int", B, T)
    assert isinstance(ids, Tensor)
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < vocab:
        raise ValueError(f"ids must be tokens 0 to {vocab - 1}; got {int(ids.min())} to {int(ids.max())}")
    if doc is not None:
        expect("doc", doc, "int", B, T)
    if weight is not None:
        expect("weight", weight, "any", B, T)
        assert isinstance(weight, Tensor)
        if not bool(weight.isfinite().all()):
            raise ValueError("weight must be finite")


def expect_positive(name: str, value: int | float) -> None:
    """Refuse what is not above zero, inf, and NaN."""
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be positive and finite; got {value}")


def expect_choice(name: str, value: str, *allowed: str) -> None:
    """Refuse all but these words."""
    if value not in allowed:
        raise ValueError(f"{name} must be {' or '.join(allowed)}; got {value!r}")


def refuse(message: str, rows: Tensor) -> None:
    """ValueError that names the first row that is True, if any is."""
    if bool(rows.any()):
        raise ValueError(f"{message}; row {int(rows.nonzero()[0])} of {len(rows)} is not")


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text; `kit.disk.parse_json` for a room that imports no other. Raises UnicodeDecodeError
    or json.JSONDecodeError, which are ValueErrors, for anything else and for nesting deeper than `MAX_DEPTH`."""
    try:
        value = json.loads(text)
    except RecursionError:
        value, level = None, [[]]
    else:
        level = [value] if isinstance(value, dict | list) else []
        for _ in range(MAX_DEPTH):
            level = [
                part
                for group in level
                for part in (group.values() if isinstance(group, dict) else group)
                if isinstance(part, dict | list)
            ]
    if level:
        raise json.JSONDecodeError(f"Nested deeper than {MAX_DEPTH} levels", "", 0)
    return value
