"""Packing: the bound of (4) on any costs, the imbalance that heavy tails leave, and rows that lose nothing."""

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from ref.network import Config
from ref.packing import Cost, balance, imbalance, lay, rows

costs = st.lists(st.floats(0, 1e6), min_size=1, max_size=60).map(lambda x: torch.tensor(x, dtype=torch.float64))


@example(torch.tensor([5e-324], dtype=torch.float64), 2)  # the mean of which is zero
@given(costs, st.integers(1, 12))
def test_the_bound(costs, ranks):
    """(4): the fullest rank is over the mean by at most 1 − 1/R of the cheapest sequence it has."""
    rank_of = balance(costs, ranks)
    loads = torch.zeros(ranks, dtype=torch.float64).index_add_(0, rank_of, costs)
    fullest = int(loads.argmax())
    assert bool(((0 <= rank_of) & (rank_of < ranks)).all())
    if float(loads.max()):
        last = float(costs[rank_of == fullest].min())
        assert float(loads.max()) <= float(loads.mean()) + (1 - 1 / ranks) * last + 1e-6
        k = int((rank_of == fullest).sum())
        assert imbalance(costs, rank_of, ranks) <= max(k / (k - 1 + 1 / ranks), 1) + 1e-9


def test_by_hand():
    assert balance(torch.tensor([1.0, 5.0, 3.0, 3.0]), 2).tolist() == [0, 0, 1, 1]
    assert balance(torch.tensor([2.0, 2.0, 2.0]), 3).tolist() == [0, 1, 2]
    assert imbalance(torch.tensor([1.0, 5.0]), torch.tensor([0, 1]), 2) == 5 / 3
    assert imbalance(torch.zeros(2), torch.tensor([0, 1]), 2) == 1.0


@pytest.mark.parametrize("median", [150, 1800])
@pytest.mark.parametrize("sigma", [0.5, 1.0, 1.5])
def test_lognormal_lengths_on_64_ranks(median, sigma):
    """16 sequences a rank: at most 1.05 wherever no sequence alone costs more than a mean share, and where one does,
    nothing but that sequence is to blame. Dealt in turn they are off by far more."""
    free = 0
    for seed in range(20):
        lengths = (
            torch.from_numpy(np.random.default_rng(seed).lognormal(np.log(median), sigma, 1024))
            .long()
            .clamp(1, 262_144)
        )
        cost = Cost.of(Config.qwen3_30b_a3b())(lengths)
        largest, off = float(cost.max()) * 64 / float(cost.sum()), imbalance(cost, balance(cost, 64), 64)
        free += largest <= 1
        assert off <= 1.05 if largest <= 1 else off <= 1.05 * largest
        assert largest > 1 or imbalance(cost, torch.arange(1024) % 64, 64) > 1.15 * off
    assert free >= {(150, 0.5): 20, (150, 1.0): 5, (1800, 0.5): 20}.get((median, sigma), 0), free


def test_cost_counts_attention():
    """At which length attention's quadratic part is as much as all else: for Qwen3-30B-A3B some 15 thousand tokens."""
    cost = Cost.of(Config.qwen3_30b_a3b())
    assert cost.linear / 2 == pytest.approx(3_353_032_704 - 151_936 * 2048, rel=1e-9)
    assert 14_000 < cost.linear / cost.quadratic < 17_000
    a, b = (float(cost(torch.tensor([1000] * n + [32_000] * m)).sum()) for n, m in ((32, 0), (0, 1)))
    assert b > 2.5 * a


lengths = st.lists(st.integers(1, 20), min_size=1, max_size=40).map(torch.tensor)


@given(lengths, st.integers(20, 50))
def test_rows_hold_every_token_once(lengths, width):
    row, start = rows(lengths, width)
    sequences = [torch.full((n,), i) for i, n in enumerate(lengths.tolist())]
    R = int(row.max()) + 1
    laid = lay(sequences, row, start, (R, width), -1)
    assert torch.equal(torch.bincount(laid[laid >= 0], minlength=len(lengths)), lengths)
    assert (laid >= 0).any(1).all()
    full = (laid >= 0).sum(1)
    assert R == 1 or int((full <= width // 2).sum()) <= 1  # two half-empty rows would have been one


def test_rows_of_nothing_and_what_does_not_fit():
    row, start = rows(torch.zeros(0, dtype=torch.long), 8)
    assert len(row) == len(start) == 0
    with pytest.raises(ValueError, match="lengths must lie between 1 and the width 8; got 9 to 9"):
        rows(torch.tensor([9]), 8)
    with pytest.raises(ValueError, match="got 0"):
        rows(torch.tensor([0]), 8)


@pytest.mark.parametrize("row, start, width", [(0, 6, 8), (1, 0, 8), (-1, 0, 8), (0, -1, 8), (0, -3, 8), (0, 0, 2)])
def test_no_sequence_is_laid_outside(row, start, width):
    """A negative place counts from the end in a tensor: where a sequence would silently lie in another row, or in two
    pieces."""
    with pytest.raises(
        ValueError,
        match=rf"shape must hold every sequence; got \[1, {width}\] for a sequence of 3 tokens in row {row} at {start}",
    ):
        lay([torch.arange(3)], torch.tensor([row]), torch.tensor([start]), (1, width), 0)


@pytest.mark.parametrize(
    ("costs", "ranks", "says"),
    [
        (torch.tensor([1.0]), 0, "ranks must be at least 1"),
        (torch.tensor([-1.0]), 2, "costs must be"),
        (torch.tensor([float("nan")]), 2, "costs must be"),
        (torch.ones(2, 2), 2, "costs must be a float tensor of shape"),
    ],
)
def test_bad_costs(costs, ranks, says):
    with pytest.raises(Exception, match=says) as raised:
        balance.__wrapped__(costs, ranks) if hasattr(balance, "__wrapped__") else balance(costs, ranks)
    assert isinstance(raised.value, ValueError)
    with pytest.raises(ValueError, match="linear and quadratic"):
        Cost(-1.0, 0.0)


def test_a_sequence_goes_into_the_fullest_row_that_has_room():
    """3 would fit behind the 5 and behind the 6 too, and fills the row of the 7; then 2 goes behind the 6, and not
    behind the 5."""
    row, start = rows(torch.tensor([6, 7, 3, 2, 5]), 10)
    assert row.tolist() == [1, 0, 0, 1, 2] and start.tolist() == [0, 0, 7, 6, 0]
