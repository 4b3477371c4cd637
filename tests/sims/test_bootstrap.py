"""Bootstrap intervals: they cover the truth, and tasks are what is drawn."""

import numpy as np
import pytest

from kit.groups import bootstrap_groups
from kit.statistics import bootstrap, share, student


def test_bootstrap_covers_the_truth():
    """A 95% interval of a mean holds the true mean in about 95 of 100 draws, tasks being the unit."""
    draw, held = np.random.default_rng(1), 0
    for seed in range(200):
        tasks = draw.beta(0.5, 0.8, size=100)
        samples = draw.random((100, 8)) < tasks[:, None]
        found = bootstrap(samples, n=300, seed=seed)
        held += found["low"] <= 0.5 / 1.3 <= found["high"]
    assert 0.90 <= held / 200 <= 0.99


def test_bootstrap_resamples_tasks_not_samples():
    """Eight copies of one answer are one observation: the interval must not shrink by √8."""
    values = np.random.default_rng(0).random((50, 1)) < 0.5
    once, eight = bootstrap(values), bootstrap(np.repeat(values, 8, axis=1))
    assert once == pytest.approx(eight)
    assert bootstrap(values, seed=0) == once


def test_groups_are_drawn_before_their_values():
    """Groups that differ widen the interval beyond that of all their values together; equal groups do not shrink it to
    a point."""
    draw = np.random.default_rng(0)
    apart = [draw.normal(mean, 0.1, 50) for mean in (0.0, 0.5, 1.0, 1.5)]
    wide, pooled = bootstrap_groups(apart), bootstrap(np.concatenate(apart))
    assert wide["value"] == pytest.approx(pooled["value"])
    assert wide["high"] - wide["low"] > 2 * (pooled["high"] - pooled["low"])
    alike = [draw.normal(0.0, 1.0, 50)] * 4
    one = bootstrap_groups(alike)
    assert one["value"] == pytest.approx(np.mean(alike[0])) and 0.1 < one["high"] - one["low"] < 0.6
    assert bootstrap_groups([[1.0], [1.0, 1.0]]) == {"value": 1.0, "low": 1.0, "high": 1.0}
    for groups in ([], [[1.0], []]):
        with pytest.raises(ValueError, match="needs at least one group, and a value in each"):
            bootstrap_groups(groups)


def test_the_interval_over_groups_covers_the_truth():
    """With 20 groups whose means vary, a 95% interval holds the mean of all groups in about 95 of 100 draws."""
    draw, held = np.random.default_rng(2), 0
    for seed in range(150):
        found = bootstrap_groups([draw.normal(mean, 1.0, 10) for mean in draw.normal(0.3, 0.5, 20)], n=300, seed=seed)
        held += found["low"] <= 0.3 <= found["high"]
    assert 0.88 <= held / 150 <= 1.0


def test_bootstrap_of_nothing():
    with pytest.raises(ValueError):
        bootstrap([])


def test_students_interval_by_hand():
    """Of three numbers: t at two degrees of freedom is 4.30265; and it covers the truth where a bootstrap of so few
    would not."""
    found = student([1.0, 2.0, 6.0])
    assert found["value"] == 3 and found["high"] - 3 == pytest.approx(4.302653 * 7**0.5 / 3**0.5) == 3 - found["low"]
    draw = np.random.default_rng(0)
    assert 0.93 <= np.mean([(s := student(x))["low"] <= 0 <= s["high"] for x in draw.normal(size=(1000, 3))]) <= 0.97
    with pytest.raises(ValueError, match="at least two numbers"):
        student([1.0])


def test_a_share_by_hand():
    """All of six: the smallest share under which that still happens once in forty times, 0.025^(1/6)."""
    assert share([True] * 6) == pytest.approx({"value": 1.0, "low": 0.025 ** (1 / 6), "high": 1.0})
    assert share([0, 0, 0]) == pytest.approx({"value": 0.0, "low": 0.0, "high": 1 - 0.025 ** (1 / 3)})
    assert share([True, False])["value"] == 0.5
    with pytest.raises(ValueError, match="at least one value"):
        share([])


@pytest.mark.parametrize("p", [0.02, 0.3, 0.5, 0.95])
def test_the_interval_of_a_share_holds_the_truth_often_enough(p):
    """Exactly computed: the probability, over all numbers of successes of 12, that the interval holds p."""
    from scipy import stats

    holds = [share([True] * k + [False] * (12 - k)) for k in range(13)]
    assert sum(stats.binom.pmf(k, 12, p) for k, one in enumerate(holds) if one["low"] <= p <= one["high"]) >= 0.95
