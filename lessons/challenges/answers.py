"""What a solution may return: each function here returns it in the type that a scorer computes with, or raises RunError
with one line."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import numpy as np

from kit.settings import RunError

__all__ = ["array", "data", "number", "text", "check_integer", "wholes"]


def describe(value: Any) -> str:
    """A value in a few words."""
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype} of shape {list(value.shape)}"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, int) and abs(value) >= 10**40:
        return "a whole number of more than 40 digits"
    representation = repr(value)
    return representation if len(representation) < 40 else f"{representation[:37]}…"


def number(name: str, value: Any) -> float:
    """A finite number."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):
            if math.isfinite(value):
                return float(value)
    raise RunError(f"{name} must return a finite number; got {describe(value)}")


def check_integer(name: str, value: Any, low: int, high: int) -> int:
    """A whole number from `low` to `high`; True and False are 1 and 0 where these two are what is wanted."""
    if isinstance(value, bool) and (low, high) == (0, 1):
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise RunError(f"{name} must return a whole number from {low} to {high}; got {describe(value)}")
    return value


def array(name: str, value: Any, *shape: int) -> np.ndarray:
    """Finite numbers of this shape, float64; from a list, or an array of any kind."""
    try:
        values = np.asarray(value, dtype=np.float64)
    except OverflowError:
        raise RunError(f"{name} must return finite numbers; one of them is larger than a float can be") from None
    except (TypeError, ValueError):
        raise RunError(f"{name} must return numbers of shape {list(shape)}; got {describe(value)}") from None
    if values.shape != shape:
        raise RunError(f"{name} must return numbers of shape {list(shape)}; got shape {list(values.shape)}")
    if not np.isfinite(values).all():
        raise RunError(
            f"{name} must return finite numbers; the one at place "
            f"{int(np.flatnonzero(~np.isfinite(values.ravel()))[0])} is not"
        )
    return values


def wholes(name: str, value: Any, low: int, high: int, *shape: int) -> np.ndarray:
    """Whole numbers from `low` to `high` of this shape, int64."""
    values = array(name, value, *shape)
    if not ((values == np.round(values)) & (values >= low) & (values <= high)).all():
        raise RunError(f"{name} must return whole numbers from {low} to {high}")
    return values.astype(np.int64)


def text(name: str, value: Any) -> str:
    """Text."""
    if not isinstance(value, str):
        raise RunError(f"{name} must return text; got {describe(value)}")
    return value


def data(name: str, value: Any) -> bytes:
    """Bytes."""
    if not isinstance(value, bytes):
        raise RunError(f"{name} must return bytes; got {describe(value)}")
    return value
