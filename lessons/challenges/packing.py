"""Scorer of challenge 9: how much longer steps take than they have to when sequences are dealt to ranks."""

from __future__ import annotations

import numpy as np
import torch

from lessons.challenges import answers
from lessons.challenges.solution import Solves
from ref.network import Config
from ref.packing import Cost, imbalance

__all__ = ["score"]

STEPS, RANKS, PER_RANK, MEDIAN, SIGMA, LONGEST = 12, 32, 5, 3000, 0.5, 12_288


def score(solution: Solves, seed: int) -> float:
    """Highest load over what no dealing can beat (the mean load, or the longest sequence), minus one, in percent;
    averaged over steps."""
    rng, cost, excesses = np.random.default_rng(seed), Cost.of(Config.qwen3_30b_a3b()), []
    for _ in range(STEPS):
        lengths = np.clip(
            np.exp(np.log(MEDIAN) + SIGMA * rng.normal(size=RANKS * PER_RANK)).astype(np.int64), 1, LONGEST
        )
        costs = cost(torch.from_numpy(lengths)).double()
        costs /= costs.sum() / RANKS
        rank_of = answers.wholes("deal", solution("deal", costs.numpy(), RANKS), 0, RANKS - 1, len(lengths))
        excesses.append(imbalance(costs, torch.from_numpy(rank_of), RANKS) / max(1.0, float(costs.max())) - 1)
    return 100 * float(np.mean(excesses))
