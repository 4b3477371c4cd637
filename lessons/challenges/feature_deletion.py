"""Scorer of challenge 14: how many valid tasks a choice of deletions makes of a package, from the table of which test
executes which function."""

from __future__ import annotations

import itertools

import numpy as np

from kit.settings import RunError
from lessons.challenges.solution import Solves

__all__ = ["draw_coverage", "score", "what_is_wrong"]

PACKAGES, FUNCTIONS, TESTS, LEAST, LARGEST = 6, 60, 80, 3, 6


def draw_coverage(rng: np.random.Generator) -> np.ndarray:
    """Which test executes which function, [TESTS, FUNCTIONS]: functions call functions, and a test executes all that
    its own two reach."""
    calls = np.triu(rng.random((FUNCTIONS, FUNCTIONS)) < 1.3 / FUNCTIONS, 1)
    calls[:, -3:] |= rng.random((FUNCTIONS, 3)) < 0.15  # what nearly everybody uses
    reached = np.eye(FUNCTIONS, dtype=bool) | np.triu(calls, 1)
    for _ in range(6):
        reached = reached @ reached
    return np.stack([reached[rng.choice(FUNCTIONS, 2, replace=False)].any(0) for _ in range(TESTS)])


def what_is_wrong(table: np.ndarray, deleted: list[int]) -> str:
    """Why a set of functions makes no task; empty if it makes one."""
    if (
        not deleted
        or len(set(deleted)) < len(deleted)
        or len(deleted) > LARGEST
        or not all(0 <= function < FUNCTIONS for function in deleted)
    ):
        return f"it is no set of one to {LARGEST} functions"
    failing = table[:, deleted].any(1)
    if failing.sum() < LEAST or failing.mean() > 0.5:
        return f"{int(failing.sum())} of {TESTS} tests fail: at least {LEAST} must, and at most half may"
    if not table[:, deleted].any(0).all():
        return "a deleted function is executed by no test"
    left = np.setdiff1d(np.flatnonzero(table.any(0)), deleted)
    if (orphans := left[~table[~failing][:, left].any(0)]).size:
        return (
            f"only failing tests execute function {int(orphans[0])}, which stays: what is left behind "
            f"would tell the answer"
        )
    return ""


def score(solution: Solves, seed: int) -> float:
    """Number of tasks a package, averaged; a deletion that is no task, or whose failing tests overlap with another
    one's, is refused."""
    rng, tasks = np.random.default_rng(seed), 0
    for _ in range(PACKAGES):
        table = draw_coverage(rng)
        deletions = solution("deletions", table)
        if not isinstance(deletions, list) or not all(
            isinstance(deletion, list) and all(type(function) is int for function in deletion) for deletion in deletions
        ):
            raise RunError("deletions must return a list of lists of functions, by their number")
        for deletion in deletions:
            if reason := what_is_wrong(table, deletion):
                raise RunError(f"{deletion} makes no task: {reason}")
        if len(functions := [function for deletion in deletions for function in deletion]) > len(set(functions)):
            raise RunError("deletions must not share a function: each may be taken out in one task only")
        failing = [table[:, deletion].any(1) for deletion in deletions]
        for (i, a), (j, b) in itertools.combinations(enumerate(failing), 2):
            if 2 * (a & b).sum() > (a | b).sum():
                raise RunError(
                    f"{deletions[i]} and {deletions[j]} are nearly the same task: more than half of "
                    f"their failing tests are the same"
                )
        tasks += len(deletions)
    return tasks / PACKAGES
