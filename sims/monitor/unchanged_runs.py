"""Runs in which nothing changes: steps drawn again and again from groups that one policy played, and who raises an
alarm in them."""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from recipe.small.agent import hash_seed
from recipe.small.monitoring import Group, Watching
from ref.monitor import Band, Evidence, advance, log_evidence

__all__ = ["Size", "false_alarms", "known_means"]

ERROR = 0.01
"""Probability of a false alarm in a run that the bets against known means may have at most."""


class Size(Protocol):
    """How much is drawn."""

    @property
    def seed(self) -> int: ...

    @property
    def prompts(self) -> int: ...

    @property
    def unchanged(self) -> int: ...

    @property
    def watched(self) -> int: ...

    @property
    def exact(self) -> int: ...


def false_alarms(
    pool: Sequence[Group], c: Size, make_monitor: Callable[[], Watching], progress: Callable[[int], None]
) -> dict[str, int]:
    """Runs with an alarm: of `unchanged` runs with the recipe's monitor, of `exact` runs with known means and with a
    threshold. `make_monitor` begins a monitor that has to learn what is usual."""
    rng, alarm_count = np.random.default_rng(hash_seed(c.seed, "unchanged")), 0
    for number in range(c.unchanged):
        watch = make_monitor()
        for _ in range(watch.config.learn + c.watched):
            watch.step([pool[i] for i in rng.integers(0, len(pool), c.prompts)])
            if watch.alarms:
                alarm_count += 1
                break
        progress(number + 1)
    bets, threshold = known_means(pool, c.exact, 100, c.prompts, rng)
    return {
        "runs": c.unchanged,
        "recipe": alarm_count,
        "exact_runs": c.exact,
        "exact": int(bets.sum()),
        "threshold": int(threshold.sum()),
    }


def known_means(
    pool: Sequence[Group], runs: int, steps: int, groups: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Which of `runs` runs raise an alarm [runs]: by bets against the exact means of all statistics, at `ERROR`, and by
    a step's mean that lies three of its deviations away from it. A statistic that is always 0 or always 1 has nothing
    to bet on."""
    values = {
        name: np.array([np.nan if group[name] is None else group[name] for group in pool], dtype=float)
        for name in pool[0]
    }
    values = {
        name: statistic_values
        for name, statistic_values in values.items()
        if not np.isnan(statistic_values).all() and 0 < np.nanmean(statistic_values) < 1
    }
    evidence = dict.fromkeys(values, Evidence())
    bets, threshold = np.zeros((2, runs), dtype=bool)
    for _ in range(steps):
        indices = rng.integers(0, len(pool), (runs, groups))
        for name, statistic_values in values.items():
            mean, sampled_values = float(np.nanmean(statistic_values)), statistic_values[indices]
            evidence[name] = advance(evidence[name], sampled_values, Band(mean, mean))
            bets |= log_evidence(evidence[name]) >= np.log(len(values) / ERROR)
            is_present = ~np.isnan(sampled_values)
            count = is_present.sum(1)
            deviation = np.abs(np.where(is_present, sampled_values - mean, 0.0).sum(1))
            threshold |= (count > 0) & (deviation > 3 * np.nanstd(statistic_values) * np.sqrt(count))
    return bets, threshold
