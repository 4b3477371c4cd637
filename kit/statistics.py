"""Estimates with uncertainty, for every experiment."""

from collections.abc import Callable
from math import comb
from typing import Any

import numpy as np
from scipy import stats

__all__ = ["bootstrap", "pass_at_k", "share", "student"]


def bootstrap(
    values: Any, statistic: Callable[[np.ndarray], float] = np.mean, n: int = 2000, seed: int = 0, level: float = 0.95
) -> dict[str, float]:
    """The statistic of `values` with its percentile bootstrap interval: {value, low, high}.

    values: array whose first axis was sampled independently (the tasks); the samples of one task stay together.
    Raises ValueError if it is empty."""
    values = np.asarray(values, dtype=float)
    if len(values) == 0:
        raise ValueError("bootstrap needs at least one value")
    rng = np.random.default_rng(seed)
    resampled_values = [float(statistic(values[rng.integers(0, len(values), len(values))])) for _ in range(n)]
    low, high = np.quantile(resampled_values, [(1 - level) / 2, (1 + level) / 2])
    return {"value": float(statistic(values)), "low": float(low), "high": float(high)}


def student(values: Any, level: float = 0.95) -> dict[str, float]:
    """The mean of a few independent numbers, one per training run, with Student's interval: {value, low, high}. Raises
    ValueError for fewer than two."""
    values = np.asarray(values, dtype=float)
    if values.ndim != 1 or len(values) < 2:
        raise ValueError(f"student needs at least two numbers, got {values.tolist()}")
    half = stats.t.ppf((1 + level) / 2, len(values) - 1) * values.std(ddof=1) / len(values) ** 0.5
    return {"value": float(values.mean()), "low": float(values.mean() - half), "high": float(values.mean() + half)}


def share(values: Any, level: float = 0.95) -> dict[str, float]:
    """The share of true values among independent ones, with Clopper and Pearson's exact interval: {value, low, high}.
    Where all are alike, a bootstrap would give an interval of length zero, however few they are. Raises ValueError if
    there are none."""
    values = np.asarray(values, dtype=bool)
    if values.ndim != 1 or len(values) == 0:
        raise ValueError(f"share needs at least one value, got {values.tolist()}")
    interval = stats.binomtest(int(values.sum()), len(values)).proportion_ci(level)
    return {"value": float(values.mean()), "low": float(interval.low), "high": float(interval.high)}


def pass_at_k(successes: Any, n: int, k: int) -> np.ndarray:
    """Unbiased estimate per task of the probability that at least one of k rollouts succeeds, from c successes among n
    (arXiv:2107.03374, eq. 1): 1 − C(n−c, k)/C(n, k). ValueError unless 1 ≤ k ≤ n."""
    if not 1 <= k <= n:
        raise ValueError(f"pass@k needs 1 ≤ k ≤ n; got k={k}, n={n}")
    return np.array([1.0 - comb(n - int(c), k) / comb(n, k) for c in np.ravel(successes)])
