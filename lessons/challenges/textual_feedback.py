"""Scorer of challenge 16: what a student gains on new tasks when it learns from a teacher that was told hints, position
by position.

A student has a distribution over words for each situation. In half of the situations one word is right, always: a hint
that says so mends a habit. In the others what is right depends on the task, and a hint that knows the task's answer
gives it away: the student cannot learn that, and what it learns instead is a few tasks by heart.
"""

from __future__ import annotations

import numpy as np

from kit.settings import RunError
from lessons.challenges import answers
from lessons.challenges.solution import Solves

__all__ = ["draw_situations", "score"]

SITUATIONS, WORDS, MAX_POSITIONS, PRIOR, MAX_WEIGHT = 2000, 12, 6, 1.0, 10.0
HABIT, CONFUSED = 0.5, 0.2
"""Share of situations in which one word is right; how often a hint there names another word."""


def draw_situations(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Student [situations, words], what is right on new tasks [situations, words], and at each position situation [P]
    and teacher [P, words]."""
    student = rng.dirichlet(np.full(WORDS, 0.4), SITUATIONS)
    student = 0.97 * student + 0.03 / WORDS
    habit = rng.random(SITUATIONS) < HABIT
    words = np.array([rng.choice(WORDS, p=p) for p in 0.5 * student + 0.5 / WORDS])
    right = np.where(habit[:, None], np.eye(WORDS)[words], student)
    situations = np.repeat(np.arange(SITUATIONS), rng.integers(1, MAX_POSITIONS + 1, SITUATIONS))
    named = np.array(
        [words[situation] if habit[situation] else rng.choice(WORDS, p=student[situation]) for situation in situations]
    )
    named = np.where(rng.random(len(situations)) < CONFUSED, rng.integers(0, WORDS, len(situations)), named)
    sure = rng.uniform(0.3, 0.95, len(situations))[:, None]
    teacher = (1 - sure) * student[situations] + sure * np.eye(WORDS)[named]
    order = rng.permutation(len(situations))
    return student, right, situations[order], teacher[order]


def score(solution: Solves, seed: int) -> float:
    """Gain in log-probability of what is right on new tasks, over what knowing all habits would gain: the student
    becomes the weighted mean of itself and its teachers."""
    student, right, situations, teacher = draw_situations(np.random.default_rng(seed))
    weights = answers.array("weights", solution("weights", student[situations], teacher), len(situations))
    if weights.min() < 0 or weights.max() > MAX_WEIGHT:
        raise RunError(f"weights must lie between 0 and {MAX_WEIGHT:g}; got {weights.min():g} to {weights.max():g}")
    learned = PRIOR * student
    np.add.at(learned, situations, weights[:, None] * teacher)
    learned /= learned.sum(1, keepdims=True)
    gain = (right * (np.log(learned) - np.log(student))).sum()
    best_gain = (right * (np.log(right.clip(1e-12)) - np.log(student))).sum()
    return float(gain / best_gain)
