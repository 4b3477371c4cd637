"""Answers of runs of tests, checked. The process that answers ran code of a package, so its answer may be anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypedDict

from kit.disk import parse_json

__all__ = ["SILENT", "Answer", "parse_answer", "parse_answers"]

SILENT = "the run"
"""The name under which a run that gave no answer is in error."""
OUTCOMES = ("passed", "failed", "skipped", "error")


class Answer(TypedDict):
    """What a run found."""

    outcomes: dict[str, str]
    """Test → "passed", "failed", "skipped" or "error"."""
    lines: dict[str, dict[str, list[int]]]
    """Test → file → lines that it executed."""
    took: dict[str, float]
    """Test → seconds."""


def parse_answers(text: str, count: int) -> list[Answer] | None:
    """The answers of so many runs, as inside/run.py prints them; None for a text that is no list of so many."""
    try:
        answers = parse_json(text)
    except ValueError:
        return None
    return [parse_answer(answer) for answer in answers] if isinstance(answers, list) and len(answers) == count else None


def parse_answer(text: object) -> Answer:
    """The answer of a run. One that has another shape is the same as none: the run is in error, and nothing else is."""
    try:
        answer = parse_json(text) if isinstance(text, str) else None
    except ValueError:
        answer = None
    if isinstance(answer, dict) and answer.keys() == Answer.__annotations__.keys():
        outcomes, lines, durations = answer["outcomes"], answer["lines"], answer["took"]
        is_table = _has_valid_values(lines, lambda files: _has_valid_values(files, _is_lines))
        is_text = _has_valid_values(outcomes, lambda outcome: outcome in OUTCOMES) and all(
            map(str.isprintable, outcomes)
        )
        if is_table and is_text and _has_valid_values(durations, _is_duration):
            return Answer(outcomes=outcomes, lines=lines, took=durations)
    return Answer(outcomes={SILENT: "error"}, lines={}, took={})


def _has_valid_values(table: object, is_valid: Callable[[object], bool]) -> bool:
    """Whether something is an object of JSON all of whose values fit."""
    return isinstance(table, dict) and all(map(is_valid, table.values()))


def _is_lines(lines: object) -> bool:
    return isinstance(lines, list) and all(type(line) is int and line >= 0 for line in lines)


def _is_duration(seconds: object) -> bool:
    return isinstance(seconds, int | float) and type(seconds) is not bool and 0 <= seconds < float("inf")
