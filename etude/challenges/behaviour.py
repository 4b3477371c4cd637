"""Scorer of challenge 17: how far prices move three habits in exact training, if success may fall by no more than a point.

A policy chooses between ways of working. Each way succeeds with a chance of its own, and shows each habit so often. Training is exact: the softmax
policy follows the gradient of the expected reward, success minus the priced habits, for so many steps.
"""

from __future__ import annotations

import numpy as np

from etude.challenges import answers
from etude.challenges.solution import Solves
from kit.settings import RunError

__all__ = ["drawn", "score", "trained"]

WAYS, HABITS, ROLLOUTS, STEPS, RATE, LOST, WORLDS, HIGHEST = 8, 3, 1500, 120, 1.0, 0.01, 16, 100.0


def drawn(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The policy before training [WAYS], success of each way [WAYS], and how often it shows each habit [WAYS, HABITS], in the mean."""
    policy = rng.dirichlet(np.full(WAYS, 3.0))
    habits = rng.gamma(2.0, 1.0, (WAYS, HABITS))
    success = (0.35 + 0.06 * habits[:, 0] - 0.02 * habits[:, 1] + rng.normal(0, 0.08, WAYS)).clip(0.05, 0.95)
    success[0], habits[0] = 0.0, 0.0  # doing nothing has no bad habits
    return policy, success, habits


def trained(policy: np.ndarray, rewards: np.ndarray) -> np.ndarray:
    """The policy after STEPS exact steps of the policy gradient; policy and rewards: [WAYS]."""
    logits = np.log(policy)
    for _ in range(STEPS):
        policy = np.exp(logits - logits.max())
        policy /= policy.sum()
        logits = logits + RATE * policy * (rewards - policy @ rewards)
    return policy


def score(solution: Solves, seed: int) -> float:
    """Share of the habits that training without prices leaves and training with them takes away: the mean over habits and worlds."""
    rng, saved, lost = np.random.default_rng(seed), [], []
    for _ in range(WORLDS):
        policy, success, habits = drawn(rng)
        ways = rng.choice(WAYS, ROLLOUTS, p=policy)
        seen = rng.random(ROLLOUTS) < success[ways], rng.poisson(habits[ways])
        prices = answers.array("prices", solution("prices", ways, *seen), HABITS)
        if prices.min() < 0:
            raise RunError("prices must not be negative: a reward for a habit would be earned for its own sake")
        if prices.max() > HIGHEST:
            raise RunError(f"prices must not be above {HIGHEST:g}; got {prices.max():g}")
        free, priced = trained(policy, success), trained(policy, success - habits @ prices)
        saved.append(1 - (priced @ habits) / (free @ habits))
        lost.append(float((free - priced) @ success))
    if not (mean := float(np.mean(lost))) <= LOST:
        raise RunError(f"prices cost too much success: {100 * mean:.2f} points in the mean over {WORLDS} worlds, 1 is allowed")
    return float(np.mean(saved))
