"""Shapes of claims, and of the records of experiments that hold them, in JSON files."""

from typing import Any

__all__ = ["CLAIMS", "RECORD", "STORED_CLAIMS"]

NUMBER = (int, float)
TEXTS = ("name", "claim", "source", "unit", "verdict", "note")


def _interval(value: Any) -> Any:
    """None, or two numbers."""
    return [NUMBER] if isinstance(value, list) and len(value) == 2 else type(None)


CLAIM: dict[str, Any] = {
    **dict.fromkeys(TEXTS, str),
    "measured": (*NUMBER, type(None)),
    "interval": _interval,
    "rule": {"kind": str},
    "needs": dict,
}
CLAIMS = [CLAIM]
"""The claims that an experiment judges."""
STORED_CLAIMS = [{**CLAIM, "experiment": str, "command": str}]
"""The claims in the file that `etude claims` writes."""
RECORD = {
    "experiment": str,
    "command": str,
    "quick": bool,
    "config": {"seed": int},
    "machine": dict.fromkeys(("cpu", "threads", "torch", "commit"), (str, int, float, type(None))),
    "seconds": {...: NUMBER},
}
"""The record of an experiment, NAME.json."""
