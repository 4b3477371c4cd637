"""What is proposed and tried: a step is a command and the check that tells whether it did what it should."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

__all__ = ["CHARACTERS", "MAX_STEPS", "Step", "format_steps", "deduplicate_steps", "parse_steps"]

MAX_STEPS = 10
"""Steps of a proposal."""
CHARACTERS = 1000
"""Of a command or a check."""


@dataclass(frozen=True)
class Step:
    """Either may be empty, not both. A step has worked where both end with exit code 0, the command first."""

    command: str
    check: str
    source: str = ""
    """Where it was found."""
    needed: bool = True
    """Whether a folder is set up only if it works."""


def deduplicate_steps(steps: Iterable[Step], max_steps: int = MAX_STEPS) -> list[Step]:
    """The first `max_steps` steps, without those whose command, or whose check where there is no command, stands there
    already."""
    steps_by_key: dict[str, Step] = {}
    for step in steps:
        steps_by_key.setdefault(step.command or f"check: {step.check}", step)
    return [*steps_by_key.values()][:max_steps]


def format_steps(steps: Iterable[Step]) -> list[dict]:
    return [asdict(step) for step in steps]


def parse_steps(rows: object, max_steps: int = 100) -> list[Step]:
    """Steps from JSON: a list of objects with `command`, `check` or both. Raises ValueError, in one line, for anything
    else."""
    if not isinstance(rows, list) or not 0 < len(rows) <= max_steps:
        raise ValueError(f"steps must be a list of 1 to {max_steps} objects")
    return [_parse_step(number, row) for number, row in enumerate(rows, 1)]


def _parse_step(number: int, row: object) -> Step:
    if not isinstance(row, Mapping):
        raise ValueError(f"step {number} must be an object with a command and a check")
    command, check, source = (row.get(name, "") for name in ("command", "check", "source"))
    is_needed = row.get("needed", True)
    if not all(isinstance(value, str) for value in (command, check, source)) or not isinstance(is_needed, bool):
        raise ValueError(f"step {number}: command, check and source must be text, and needed true or false")
    if not command.strip() and not check.strip():
        raise ValueError(f"step {number} has neither a command nor a check")
    if max(len(command), len(check)) > CHARACTERS or "\0" in command + check:
        raise ValueError(f"step {number}: a command has at most {CHARACTERS} characters, none of them null")
    return Step(command.strip(), check.strip(), source, is_needed)
