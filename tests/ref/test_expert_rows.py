"""Tokens to their experts and back, beside loops over tokens."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ref.expert_rows import permute, sort_by_expert, unpermute


@settings(max_examples=40, deadline=None)
@given(N=st.integers(0, 12), K=st.integers(1, 3), E=st.integers(3, 6), seed=st.integers(0, 2**20))
def test_rows_lie_sorted_by_expert_in_the_order_in_which_they_came(N, K, E, seed):
    g = torch.Generator().manual_seed(seed)
    experts = torch.rand(N, E, generator=g).argsort(-1)[:, :K]
    order, place, ends = sort_by_expert(experts, E)
    assignments = [(e, n * K + k) for n, row in enumerate(experts.tolist()) for k, e in enumerate(row)]
    assert order.tolist() == [number for _, number in sorted(assignments)]
    assert ends.tolist() == [sum(e <= last for e, _ in assignments) for last in range(E)]
    assert all(order[place[n, k]] == n * K + k for n in range(N) for k in range(K))
    x = torch.randn(N, 4, generator=g)
    rows = permute(x, order, place)
    assert all(torch.equal(rows[r], x[number // K]) for r, number in enumerate(order.tolist()))
    gates = torch.rand(N, K, generator=g)
    back = unpermute(rows * (1 + torch.arange(N * K)[:, None]), order, place, gates)
    for n in range(N):
        wanted = sum(gates[n, k].double() * x[n].double() * (1 + int(place[n, k])) for k in range(K))
        torch.testing.assert_close(back[n].double(), wanted, rtol=1e-5, atol=1e-5)


def test_sums_are_in_float32():
    """In bfloat16 256 + 1 + 1 would be 256."""
    experts = torch.tensor([[0, 1, 2]])
    order, place, _ = sort_by_expert(experts, 3)
    rows = torch.tensor([[256.0], [1.0], [1.0]]).bfloat16()
    assert unpermute(rows, order, place, torch.ones(1, 3).bfloat16()).item() == 258


def test_products_with_gates_are_not_rounded_before_they_are_added():
    """(1 + 2⁻⁷)² is 1 + 2⁻⁶ + 2⁻¹⁴, of which bfloat16 holds all but the last."""
    order, place, _ = sort_by_expert(torch.tensor([[0, 1]]), 2)
    rows, gates = torch.tensor([[1 + 2**-7], [-1 - 2**-6]]).bfloat16(), torch.tensor([[1 + 2**-7, 1.0]]).bfloat16()
    assert unpermute(rows, order, place, gates).item() == 2**-14


@pytest.mark.parametrize("bad", [-1, 3])
def test_experts_that_there_are_not(bad):
    with pytest.raises(ValueError, match="experts must lie between 0 and 2"):
        sort_by_expert(torch.tensor([[0, bad]]), 3)
