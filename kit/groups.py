"""Estimates with uncertainty over groups, such as training runs, each with values of its own."""

from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["bootstrap_groups"]


def bootstrap_groups(groups: Sequence[Any], n: int = 2000, seed: int = 0, level: float = 0.95) -> dict[str, float]:
    """The mean over groups of their means, with the percentile interval of a bootstrap in two steps: {value, low,
    high}.

    groups: an array of each (the tasks of a training run). Groups are resampled, and within every one that is drawn its
    values. Raises ValueError if there is no group or an empty one."""
    arrays = [np.asarray(group, dtype=float) for group in groups]
    if not arrays or any(len(array) == 0 for array in arrays):
        raise ValueError("bootstrap_groups needs at least one group, and a value in each")
    rng = np.random.default_rng(seed)

    def resample(array: np.ndarray) -> float:
        return float(array[rng.integers(0, len(array), len(array))].mean())

    resampled_means = [
        np.mean([resample(arrays[group]) for group in rng.integers(0, len(arrays), len(arrays))]) for _ in range(n)
    ]
    low, high = np.quantile(resampled_means, [(1 - level) / 2, (1 + level) / 2])
    return {"value": float(np.mean([array.mean() for array in arrays])), "low": float(low), "high": float(high)}
