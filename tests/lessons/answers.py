"""Answers to the exercises of the lessons by which their checks are tested: plausible mistakes and other ways to be
right.

    of("05_kl")          the answers to each exercise of a lesson: {1: [Answer, …], …}

They stand in `answers_00_02.py` to `answers_18.py`, one text for each exercise. A heading opens every answer:

    # wrong: NAME        the check has to refuse it with a sentence of its own
    # stops: NAME        it has to refuse it; that the answer stops with an exception is enough
    # right: NAME        it has to accept it
"""

import re
from dataclasses import dataclass

from tests.lessons import (
    answers_00_02,
    answers_03_05,
    answers_06_08,
    answers_09_11,
    answers_12,
    answers_13,
    answers_14,
    answers_15,
    answers_16,
    answers_17,
    answers_18,
)

__all__ = ["KINDS", "Answer", "of", "read", "stems"]

KINDS = ("wrong", "stops", "right")
TEXTS = answers_00_02.TEXTS | answers_03_05.TEXTS | answers_06_08.TEXTS | answers_09_11.TEXTS | answers_12.TEXTS
TEXTS |= answers_13.TEXTS | answers_14.TEXTS | answers_15.TEXTS | answers_16.TEXTS | answers_17.TEXTS | answers_18.TEXTS


@dataclass(frozen=True)
class Answer:
    """One answer to an exercise."""

    kind: str
    """One of KINDS."""
    name: str
    """What it gets wrong, or how it is right."""
    source: str
    """Its code, to be run in the namespace of the lesson."""


def read(text: str) -> list[Answer]:
    """The answers in a text. ValueError where something stands before the first heading, a source is empty or a name
    comes twice."""
    before, *parts = re.split(rf"^# ({'|'.join(KINDS)}): (.+)\n", text, flags=re.MULTILINE)
    found = [Answer(*(part.strip() for part in parts[at : at + 3])) for at in range(0, len(parts), 3)]
    if (
        before.strip()
        or not all(answer.source for answer in found)
        or len({answer.name for answer in found}) < len(found)
    ):
        raise ValueError(f"no list of answers with a heading and a name each: {text}")
    return found


def of(stem: str) -> dict[int, list[Answer]]:
    """The answers to the exercises of a lesson."""
    return {number: read(text) for number, text in TEXTS.get(stem, {}).items()}


def stems() -> set[str]:
    """The lessons to which there are answers."""
    return set(TEXTS)
