"""Scorer of challenge 6: how much effort a penalty saves among agents that weigh it against success, at no more than a
point of success.

An agent that knows how hard its task is chooses the effort x ≥ 0 that maximises 1 − exp(−x/d) minus the penalty, with d
the task's scale. It does that exactly, on a grid: no training, no luck. Without a penalty it stops where a unit more
adds less than 1e-5."""

from __future__ import annotations

import numpy as np

from kit.settings import RunError
from lessons.challenges import answers
from lessons.challenges.solution import Solves
from ref.length_penalty import length_penalty

__all__ = ["score"]

TASKS, FREE, MAX_LOSS = 400, 1e-5, 0.01
EFFORTS = np.concatenate([[0.0], np.geomspace(1.0, 1e5, 1200)])


def draw_scales(rng: np.random.Generator, tasks: int) -> np.ndarray:
    """Scales d of tasks, in token equivalents: most are easy, some are hard."""
    hard = rng.random(tasks) < 0.25
    return np.where(hard, rng.lognormal(np.log(2500), 0.5, tasks), rng.lognormal(np.log(60), 0.7, tasks))


def choose_efforts(scales: np.ndarray, penalty: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Effort and chance of success of every task; penalty: of each of EFFORTS."""
    success = -np.expm1(-EFFORTS / scales[:, None])
    best = (success - penalty).argmax(1)
    return EFFORTS[best], np.take_along_axis(success, best[:, None], 1)[:, 0]


def score(solution: Solves, seed: int) -> float:
    """Share of the effort that is saved on tasks that the solution has not seen: the mean over tasks, easy ones as much
    as hard ones."""
    rng = np.random.default_rng(seed)
    visible_scales, hidden_scales = draw_scales(rng, TASKS), draw_scales(rng, TASKS)
    price, k, q = answers.array("penalty", solution("penalty", visible_scales), 3).tolist()
    if min(price, k, q) < 0 or max(price, k) > 1e6 or q > 100:
        raise RunError(
            f"penalty must return price and k from 0 to a million, and q from 0 to 100; got {price:g}, {k:g} and {q:g}"
        )
    effort, success = choose_efforts(hidden_scales, FREE * EFFORTS + price * length_penalty(EFFORTS, k, q))
    free_effort, free_success = choose_efforts(hidden_scales, FREE * EFFORTS)
    lost_success = float((free_success - success).mean())
    if lost_success > MAX_LOSS:
        gave_up = int(((effort == 0) & (free_effort > 0)).sum())
        raise RunError(
            f"penalty costs too much success: {100 * lost_success:.2f} points, 1 is allowed; agents "
            f"give up {gave_up} of {TASKS} tasks at once"
        )
    return float((1 - effort / free_effort).mean())
