"""Scorer of challenge 7: how many questions about a long session its last summary can answer.

A session is read in segments. Every segment is summarised by an interpreter that knows the summary before it and
nothing else, and the questions go to one that knows only the last summary.
"""

from __future__ import annotations

import itertools

import numpy as np

from kit.settings import RunError
from lessons.challenges import answers
from lessons.challenges.solution import Solves

__all__ = ["draw_session", "score"]

SESSIONS, SEGMENTS, LINES, NAMES, LONGEST, QUESTIONS = 30, 6, 25, 48, 120, 25
WORDS = ["".join(word) for word in itertools.product("bdfgklmnprst", "aeiou", "bdfgklmnprst", "aeiou")]


def draw_session(rng: np.random.Generator) -> tuple[list[list[str]], dict[str, str]]:
    """Lines of every segment, and for each name that is asked about its value at the end; names that are used often are
    asked about often."""
    names, weights = rng.choice(WORDS, NAMES, replace=False).tolist(), 1 / np.arange(2, NAMES + 2)
    weights, values, lines = weights / weights.sum(), dict.fromkeys(names, 0), []
    for name in rng.choice(names, SEGMENTS * LINES, p=weights).tolist():
        if rng.random() < 0.25:
            lines.append(f"look {name}")
        elif rng.random() < 0.5 and values[name]:
            values[name] += (increment := int(rng.integers(1, 100)))
            lines.append(f"add {name} {increment}")
        else:
            values[name] = int(rng.integers(1, 5000))
            lines.append(f"set {name} {values[name]}")
    question_names = rng.choice(names, QUESTIONS, p=weights, replace=False).tolist()
    return (
        [lines[at : at + LINES] for at in range(0, len(lines), LINES)],
        {name: str(values[name]) for name in question_names},
    )


def score(solution: Solves, seed: int) -> float:
    """Share of the questions that are answered rightly."""
    rng = np.random.default_rng(seed)
    sessions = [draw_session(rng) for _ in range(SESSIONS)]
    summaries = [""] * SESSIONS
    for segment in range(SEGMENTS):
        with solution.fresh() as reader:
            summaries = [
                check_summary(reader("summarise", summary, lines[segment], LONGEST))
                for summary, (lines, _) in zip(summaries, sessions, strict=True)
            ]
    questions = [expected_answers for _, expected_answers in sessions]
    with solution.fresh() as reader:
        right = [
            answers.text("answer", reader("answer", summary, name)) == value
            for summary, expected_answers in zip(summaries, questions)
            for name, value in expected_answers.items()
        ]
    return float(np.mean(right))


def check_summary(value: object) -> str:
    """A summary. Raises RunError for one that is too long, or has other characters."""
    summary = answers.text("summarise", value)
    if len(summary) > LONGEST:
        raise RunError(f"summarise may return {LONGEST} characters; it returned {len(summary)}")
    if not (summary.isascii() and summary.isprintable()):
        raise RunError("summarise must return printable ASCII, so that a character is a byte")
    return summary
