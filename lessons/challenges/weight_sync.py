"""Scorer of challenge 12: bits per weight of a lossless difference between two versions of bfloat16 weights.

The versions are what Adam with float32 masters leaves: every master moves by about the learning rate, and its bfloat16
rarely does."""

from __future__ import annotations

import numpy as np
import torch

from kit.settings import RunError
from lessons.challenges import answers
from lessons.challenges.solution import Solves

__all__ = ["draw_versions", "score"]

WEIGHTS, RATE, STEPS = 200_000, 3e-7, 8


def draw_versions(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """The bits of two versions, uint16, [WEIGHTS] each: Adam's steps on float32 masters lie between them."""
    masters = rng.normal(0.0, 0.02, WEIGHTS) * rng.lognormal(0.0, 0.5, WEIGHTS)
    drift = rng.normal(size=WEIGHTS)
    moved = masters.copy()
    for _ in range(STEPS):
        moved -= RATE * np.clip(0.5 * drift + 0.6 * rng.normal(size=WEIGHTS), -2, 2)
    return to_bits(masters), to_bits(moved)


def to_bits(values: np.ndarray) -> np.ndarray:
    """Values rounded to bfloat16, as bits."""
    return torch.from_numpy(values).float().bfloat16().view(torch.int16).numpy().view(np.uint16)


def score(solution: Solves, seed: int) -> float:
    """Bits sent per weight. Raises RunError unless the new version comes back bit for bit."""
    old, new = draw_versions(np.random.default_rng(seed))
    delta = answers.data("encode", solution("encode", old, new))
    with solution.fresh() as fresh_solution:
        decoded = answers.wholes("decode", fresh_solution("decode", old, delta), 0, 0xFFFF, WEIGHTS)
    if wrong := int((decoded != new).sum()):
        raise RunError(f"decode must return the new version bit for bit; {wrong} of {WEIGHTS} weights are wrong")
    return 8 * len(delta) / WEIGHTS
