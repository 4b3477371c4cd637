"""Evaluations in which sandboxes have failed: means, pass@k and differences of what is left."""

import itertools
import json
import math
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.statistics import pass_at_k
from recipe.packages import evaluation
from recipe.packages.evaluation import MEASURES
from ref.environment import EnvironmentFailure

NAN = math.nan


def make_grids(success, greedy):
    """All measures are the success."""
    grid = np.array(success, dtype=float)
    return {name: grid for name in MEASURES} | {"greedy": np.array(greedy, dtype=float)}


grids = st.integers(1, 4).flatmap(
    lambda samples: st.lists(
        st.tuples(st.lists(st.sampled_from([0.0, 1.0, NAN]), min_size=samples, max_size=samples), st.just(0.0)),
        min_size=1,
        max_size=6,
    )
)


@pytest.mark.parametrize("rate", [0.05, 0.6])
def test_estimates_are_unbiased_by_enumeration(rate):
    """Of a task with success q and n = 4 samples, each of which fails with the same probability whatever its outcome:
    E[mean] = q over what has a sample, and E[pass@k] = 1 − (1 − q)^k over what has k of them."""
    q, n = 0.3, 4
    chances = {0.0: (1 - rate) * (1 - q), 1.0: (1 - rate) * q, NAN: rate}
    sums, weights = defaultdict(float), defaultdict(float)
    for row in itertools.product(chances, repeat=n):
        probability = math.prod(chances[value] for value in row)
        grid = np.array([row])
        values = {"mean": evaluation.average_samples(grid)[0]}
        values |= {k: evaluation.estimate_pass_at_k(grid, k)[0] for k in range(1, n + 1)}
        for name, value in values.items():
            if math.isfinite(value):
                sums[name] += probability * value
                weights[name] += probability
    assert sums["mean"] / weights["mean"] == pytest.approx(q, abs=1e-12)
    for k in range(1, n + 1):
        assert sums[k] / weights[k] == pytest.approx(1 - (1 - q) ** k, abs=1e-12)


@settings(max_examples=30)
@given(grids)
def test_a_summary_is_that_of_what_is_left(rows):
    """Each number is what the tasks and samples without failures give by themselves; what nobody has is None."""
    success, greedy = [row for row, _ in rows], [NAN if any(map(math.isnan, row)) else row[0] for row, _ in rows]
    packages = [f"p{number % 2}" for number in range(len(rows))]
    found = evaluation.summarise(make_grids(success, greedy), packages, 3)
    valid = [[value for value in row if not math.isnan(value)] for row in success]
    means = [sum(row) / len(row) for row in valid if row]
    for name in MEASURES:
        assert (found[name] is None) == (not means)
        assert not means or found[name]["value"] == pytest.approx(sum(means) / len(means))
    for k in range(1, len(success[0]) + 1):
        curve = [pass_at_k(sum(row), len(row), k)[0] for row in valid if len(row) >= k]
        assert found["pass_at_k"][k - 1] == (pytest.approx(sum(curve) / len(curve)) if curve else None)
    assert found["failed"] == sum(math.isnan(value) for value in [*itertools.chain(*success), *greedy])


@settings(max_examples=30)
@given(grids, st.data())
def test_differences_are_paired(rows, data):
    """A task that has no value before or after is in neither."""
    before, samples = [row for row, _ in rows], len(rows[0][0])
    after = [data.draw(st.lists(st.sampled_from([0.0, 1.0, NAN]), min_size=samples, max_size=samples)) for _ in rows]
    found = evaluation.compare(
        make_grids(before, [0.0] * len(rows)), make_grids(after, [1.0] * len(rows)), ["p"] * len(rows), 3
    )
    pairs = [
        [np.nanmean(row) for row in pair]
        for pair in zip(before, after, strict=True)
        if all(not all(map(math.isnan, row)) for row in pair)
    ]
    assert (found["success"] is None) == (not pairs)
    assert not pairs or found["success"]["value"] == pytest.approx(np.mean([b - a for a, b in pairs]))
    assert found["greedy"]["value"] == 1


def test_an_evaluation_comes_back_from_json():
    part = make_grids([[1.0, NAN], [NAN, NAN]], [NAN, 1.0]) | {"tasks": ["a", "b"]}
    text = json.dumps(evaluation.as_lists(part), allow_nan=False)
    again = evaluation.as_arrays(json.loads(text))
    assert all(np.array_equal(again[name], part[name], equal_nan=True) for name in again)


@pytest.mark.parametrize(
    ("share", "success", "says"),
    [
        (0.25, [[1.0, NAN], [NAN, 0.0]], "the environments of 2 of 6 rollouts failed, more than max_failed_share=0.25"),
        (0.34, [[1.0, NAN], [NAN, 0.0]], None),
        (1.0, [[NAN, NAN], [NAN, NAN]], "no rollout of the evaluation is left: it was killed"),
    ],
)
def test_too_many_failures_stop_the_run(share, success, says):
    part = make_grids(success, [0.0, 0.0])
    reasons = ["it was killed"] * evaluation.count_failed(part)
    if says is None:
        evaluation.check_evaluation(part, share, reasons)
    else:
        with pytest.raises(EnvironmentFailure, match=says):
            evaluation.check_evaluation(part, share, reasons)


def test_calls_are_judged_by_what_is_left():
    part = make_grids([[1.0, NAN], [NAN, NAN]], [NAN, NAN]) | {"replies": []}
    assert evaluation.check_calls(part, 0.5) == ""
    part["valid_calls"] = np.array([[0.0, NAN]])
    assert "after SFT 0% of the calls are valid" in evaluation.check_calls(part, 0.5)
