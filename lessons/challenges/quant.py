"""Scorer of challenge 10: signal-to-noise ratio of numbers after a coder and a decoder that meet in bytes alone."""

from __future__ import annotations

import numpy as np

from kit.settings import RunError
from lessons.challenges import answers
from lessons.challenges.solution import Solves

__all__ = ["draw_activations", "score"]

ROWS, WIDTH, BITS, MAX_DB = 64, 1024, 4.5, 45.0
"""The last one: dB that so few bits cannot reach."""


def draw_activations(rng: np.random.Generator) -> np.ndarray:
    """Activations [ROWS, WIDTH], float32: Student's t with four degrees of freedom, tokens of several sizes, and a few
    loud channels."""
    x = rng.standard_t(4, (ROWS, WIDTH)) * rng.lognormal(0.0, 0.5, (ROWS, 1)) * rng.lognormal(0.0, 0.3, (1, WIDTH))
    x[:, rng.choice(WIDTH, 8, replace=False)] *= 12.0
    return x.astype(np.float32)


def score(solution: Solves, seed: int) -> float:
    """Signal over quantisation noise, in dB. Raises RunError for a code that is too long."""
    x = draw_activations(np.random.default_rng(seed))
    code = answers.data("encode", solution("encode", x))
    if not code:
        raise RunError("encode must return some bytes; got none")
    if (bits := 8 * len(code) / x.size) > BITS:
        raise RunError(f"encode may use {BITS} bits a number; it used {bits:.3f}")
    with solution.fresh() as fresh_solution:
        decoded = answers.array("decode", fresh_solution("decode", code, ROWS, WIDTH), ROWS, WIDTH)
    with np.errstate(over="ignore"):
        noise = float(np.square(decoded - x).sum())
    if not np.isfinite(noise):
        raise RunError(
            "decode must return numbers near those that were encoded; they are so far off that the noise is infinite"
        )
    signal = float(np.square(x, dtype=np.float64).sum())
    if noise <= signal / 10 ** (MAX_DB / 10):
        raise RunError(f"decode returned the numbers to more than {MAX_DB:g} dB, which so few bits cannot do")
    return float(10 * np.log10(signal / noise))
