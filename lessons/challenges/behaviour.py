"""Scorer of challenge 17: how far prices move three habits in exact training, less what they cost in success.

A policy chooses between ways of working. Each way succeeds with a chance of its own, and shows each habit so often.
Training is exact: the softmax policy follows the gradient of the expected reward, success minus the priced habits, for
so many steps.

Worlds differ widely in what can be gained, so that a gain alone would say more of its worlds than of the prices. It is
divided by what the best of 125 prices gain in the same worlds, found with the true policy, success and habits.
"""

from __future__ import annotations

import itertools

import numpy as np

from kit.settings import RunError
from lessons.challenges import answers
from lessons.challenges.solution import Solves

__all__ = ["draw_world", "gains", "score", "trained"]

WAYS, HABITS, ROLLOUTS, STEPS, RATE, WORLDS, HIGHEST = 8, 3, 6000, 120, 1.0, 64, 1.0
WORTH = 5.0
"""How many points of a habit one point of success is worth."""
CANDIDATE_PRICES = np.array(list(itertools.product((0.0, 0.01, 0.025, 0.06, 0.15), repeat=HABITS)))
"""The prices among which one who knows the world chooses, [125, HABITS]."""


def draw_world(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The policy before training [WAYS], success of each way [WAYS], and how often it shows each habit [WAYS, HABITS],
    in the mean."""
    policy = rng.dirichlet(np.full(WAYS, 3.0))
    habits = rng.gamma(2.0, 1.0, (WAYS, HABITS))
    success = (0.35 + 0.06 * habits[:, 0] - 0.02 * habits[:, 1] + rng.normal(0, 0.08, WAYS)).clip(0.05, 0.95)
    success[0], habits[0] = 0.0, 0.0  # doing nothing has no bad habits
    return policy, success, habits


def trained(policy: np.ndarray, rewards: np.ndarray) -> np.ndarray:
    """The policy after STEPS exact steps of the policy gradient, for each of several rewards; policy: [WAYS], rewards:
    [WAYS, …]."""
    logits = np.log(policy).reshape(-1, *[1] * (rewards.ndim - 1)) + np.zeros_like(rewards)
    for _ in range(STEPS):
        after = np.exp(logits - logits.max(0))
        after /= after.sum(0)
        logits = logits + RATE * after * (rewards - (after * rewards).sum(0))
    return after


def gains(policy: np.ndarray, success: np.ndarray, habits: np.ndarray, prices: np.ndarray) -> np.ndarray:
    """Of each of several prices [prices, HABITS]: the share of the habits that goes away, less WORTH times the success
    that is lost."""
    after = trained(policy, success[:, None] - habits @ np.concatenate([np.zeros((1, HABITS)), prices]).T).T
    without_prices, with_prices = after[0], after[1:]
    return (1 - (with_prices @ habits) / (without_prices @ habits)).mean(1) - WORTH * (
        without_prices - with_prices
    ) @ success


def score(solution: Solves, seed: int) -> float:
    """What prices gain in all worlds, as a share of what one who knows the worlds gains."""
    rng, gained, best_gain = np.random.default_rng(seed), 0.0, 0.0
    for _ in range(WORLDS):
        world = policy, success, habits = draw_world(rng)
        ways = rng.choice(WAYS, ROLLOUTS, p=policy)
        observations = rng.random(ROLLOUTS) < success[ways], rng.poisson(habits[ways]).astype(np.int16)
        prices = answers.array("prices", solution("prices", ways.astype(np.int16), *observations), HABITS)
        if prices.min() < 0:
            raise RunError("prices must not be negative: a reward for a habit would be earned for its own sake")
        if prices.max() > HIGHEST:
            raise RunError(f"prices must not be above {HIGHEST:g}; got {prices.max():g}")
        world_gains = gains(*world, np.concatenate([prices[None], CANDIDATE_PRICES]))
        gained, best_gain = gained + world_gains[0], best_gain + world_gains[1:].max()
    return float(gained / best_gain)
