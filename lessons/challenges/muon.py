"""Scorer of challenge 2: how far singular values are from one after rounds of odd polynomials that cost fifteen matrix
products.

A polynomial of A = XXᵀ times X acts on the singular values of X alone, so the worst of them is found on numbers. A
matrix then checks it."""

from __future__ import annotations

import numpy as np
import torch

from kit.settings import RunError
from lessons.challenges import answers
from lessons.challenges.solution import Solves

__all__ = ["score"]

PRODUCTS, LEAST, POINTS, SIZE = 15, 0.002, 20_000, 64
COSTS = {2: 2, 3: 3, 4: 4, 5: 4, 6: 5, 7: 5}
"""Products of a round by its number of coefficients, that with X included; five need as few as four: (a + bA + cA²) +
A²(dA + eA²)."""


def score(solution: Solves, seed: int) -> float:
    """The largest |σ − 1| over singular values from LEAST to 1, after the rounds in float64."""
    rounds, rng = request_rounds(solution), np.random.default_rng(seed)
    values = np.exp(np.log(LEAST) * rng.random(POINTS))
    values = np.concatenate([values, np.linspace(LEAST, 1.0, POINTS), [LEAST, 1.0]])
    with np.errstate(over="ignore", invalid="ignore"):
        for coefficients in rounds:
            values = values * np.polynomial.polynomial.polyval(values**2, coefficients)
    worst = float(np.abs(values - 1).max())
    if not worst < 1e3:
        raise RunError("rounds send singular values away from one: at the end, one of them is beyond 1000")
    off = measure_matrix_error(rounds, rng)
    if off > worst + 0.05:
        raise RunError(
            f"rounds are not stable: on a matrix in float32 a singular value ends {off:.2g} from one, "
            f"on numbers {worst:.2g}"
        )
    return worst


def request_rounds(solution: Solves) -> list[np.ndarray]:
    """The coefficients of every round. Raises RunError if they cost too much."""
    rounds = solution("rounds", PRODUCTS)
    if (
        not isinstance(rounds, list)
        or not rounds
        or not all(isinstance(coefficients, list | np.ndarray) for coefficients in rounds)
    ):
        raise RunError("rounds must return a list of rounds, each a list of coefficients")
    if wrong := [len(coefficients) for coefficients in rounds if len(coefficients) not in COSTS]:
        raise RunError(f"a round of rounds must have from {min(COSTS)} to {max(COSTS)} coefficients; got {wrong[0]}")
    if (cost := sum(COSTS[len(coefficients)] for coefficients in rounds)) > PRODUCTS:
        raise RunError(
            f"rounds may cost {PRODUCTS} products; got rounds of "
            f"{[len(coefficients) for coefficients in rounds]} coefficients, which cost {cost}"
        )
    return [answers.array("rounds", coefficients, len(coefficients)) for coefficients in rounds]


def measure_matrix_error(rounds: list[np.ndarray], rng: np.random.Generator) -> float:
    """The largest |σ − 1| of a matrix after the same rounds in float32, by Horner's rule."""
    left, right = (torch.linalg.qr(torch.from_numpy(rng.normal(size=(SIZE, SIZE)))).Q for _ in range(2))
    x, identity = (left * torch.from_numpy(np.geomspace(LEAST, 1.0, SIZE)) @ right).float(), torch.eye(SIZE)
    for coefficients in rounds:
        gram, *highest_first = x @ x.mT, *reversed(coefficients.tolist())
        total = highest_first[0] * gram + highest_first[1] * identity
        for coefficient in highest_first[2:]:
            total = total @ gram + coefficient * identity
        x = total @ x
    return float((torch.linalg.svdvals(x.double()) - 1).abs().max()) if bool(x.isfinite().all()) else float("inf")
