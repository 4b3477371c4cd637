"""Checks for dataclasses of settings."""

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["check_ranges"]


def check_ranges(
    config: Any, least: Mapping[str, float] = {}, shares: Sequence[str] = (), mixes: Sequence[str] = ()
) -> None:
    """Raises ValueError, starting with the name of the invalid field, unless every field of `least` is at least its
    number, `shares` are between 0 and 1, and `mixes` hold shares that are not all zero."""
    for name, minimum in least.items():
        if getattr(config, name) < minimum:
            raise ValueError(f"{name} must be at least {minimum}, got {getattr(config, name)}")
    for name in shares:
        if not 0 <= getattr(config, name) <= 1:
            raise ValueError(f"{name} must lie between 0 and 1, got {getattr(config, name)}")
    for name in mixes:
        values = getattr(config, name)
        if min(values) < 0 or sum(values) <= 0:
            raise ValueError(f"{name} must not be negative or all zero, got {values}")
