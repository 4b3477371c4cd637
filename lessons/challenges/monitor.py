"""Scorer of challenge 18: how long an alarm takes to see that a rate has changed, if it may cry wolf in one run of a
hundred.

A run is watched by counts: each step grades 16 rollouts. Quiet runs keep their rate; in others it rises for good at
some step, by an amount that nobody knows. Only the past is shown, at every fourth step.
"""

from __future__ import annotations

import numpy as np

from kit.settings import RunError
from lessons.challenges import answers
from lessons.challenges.solution import Solves

__all__ = ["score"]

QUIET, CHANGED, STEPS, ROLLOUTS, EVERY = 3000, 1000, 120, 16, 4
FALSE = 0.0145
"""What share of the quiet runs may raise an alarm: one in a hundred, and what luck adds among 3,000 of them."""
RATE = (0.1, 0.3)


def draw_runs(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Counts [runs, STEPS], the rate of each run before a change, and the step of the change, STEPS where there is
    none."""
    runs = QUIET + CHANGED
    rates, begins = rng.uniform(*RATE, runs), np.full(runs, STEPS)
    begins[QUIET:] = rng.integers(10, 70, CHANGED)
    rises = np.concatenate(
        [np.zeros(QUIET), np.linspace(0.08, 0.4, CHANGED)]
    )  # evenly, since luck with the small ones would rule the mean delay
    after = rates + rises * (1 - rates)
    late = np.arange(STEPS) >= begins[:, None]
    counts = rng.binomial(ROLLOUTS, np.where(late, after[:, None], rates[:, None]))
    order = rng.permutation(runs)
    return counts[order].astype(np.uint8), rates[order], begins[order]


def score(solution: Solves, seed: int) -> float:
    """Mean number of steps from a change to the alarm, STEPS − change where none comes; an alarm before the change
    counts as none."""
    counts, rates, begins = draw_runs(np.random.default_rng(seed))
    alarms = np.full(len(counts), STEPS)
    for step in range(EVERY, STEPS + 1, EVERY):
        flags = answers.wholes("alarms", solution("alarms", counts[:, :step], rates, ROLLOUTS), 0, 1, len(counts))
        alarms = np.where((flags == 1) & (alarms == STEPS), step - 1, alarms)
    quiet = begins == STEPS
    if (false := float((alarms[quiet] < STEPS).mean())) > FALSE:
        raise RunError(
            f"alarms are false too often: {100 * false:.1f}% of the quiet runs raise one; 1% may, and "
            f"luck allows {100 * FALSE:g}%"
        )
    changed = ~quiet & (alarms >= begins)
    delays = np.where(changed, alarms + 1 - begins, STEPS - begins)[~quiet]
    return float(np.minimum(delays, (STEPS - begins)[~quiet]).mean())
