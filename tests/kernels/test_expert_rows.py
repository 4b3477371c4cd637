"""Sorting by expert and back: places exactly those of the reference, for empty experts and experts of one token, Zipf's
popularity; sums and gradients by the three-way rule."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import expert_rows as kernels
from kernels.gate import excess
from ref import expert_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 90), st.integers(1, 4), st.integers(1, 9), st.integers(0, 2**20))
def test_the_same_order(N, K, E, seed):
    """Popularity like 1/rank, so that some experts have all and some nobody."""
    generator = torch.Generator().manual_seed(seed)
    experts = torch.multinomial(1 / torch.arange(1.0, E + 1), max(1, N * K), replacement=True, generator=generator)[
        : N * K
    ].view(N, K)
    ours, theirs = kernels.sort_by_expert(experts.to(DEVICE), E), expert_rows.sort_by_expert(experts, E)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a.cpu(), b) and a.dtype == b.dtype


def test_order_by_hand():
    order, place, ends = expert_rows.sort_by_expert(torch.tensor([[2, 0], [0, 2]]), 4)
    assert order.tolist() == [1, 2, 0, 3] and place.tolist() == [[2, 0], [1, 3]] and ends.tolist() == [2, 2, 4, 4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("N, K, E, D", [(1, 1, 1, 1), (33, 2, 8, 65), (70, 3, 5, 130)])
def test_there_and_back(dtype, N, K, E, D):
    """Rows are copies; sums and all gradients by the three-way rule."""
    experts = torch.stack([torch.randperm(E)[:K] for _ in range(N)])
    x, gates, up, scale = torch.randn(N, D).to(dtype), torch.rand(N, K), torch.randn(N, D), torch.randn(N * K, 1)

    def run(module, wide, device="cpu"):
        order, place, _ = module.sort_by_expert(experts.to(device), E)
        a, g = (
            x.to(device, wide).requires_grad_(),
            gates.to(device, torch.promote_types(wide, torch.float32)).requires_grad_(),
        )
        rows = module.permute(a, order, place)
        y = module.unpermute(rows * scale.to(device, wide), order, place, g)
        return [t.detach().cpu() for t in (rows, y, *torch.autograd.grad((y.double() * up.to(device)).sum(), (a, g)))]

    exact, theirs, ours = run(expert_rows, torch.float64), run(expert_rows, dtype), run(kernels, dtype, DEVICE)
    assert torch.equal(ours[0], theirs[0])
    for a, b, c in zip(exact, theirs, ours, strict=True):
        assert excess(c, b, a) <= 1


WRONG = {
    "experts": (lambda m: m.sort_by_expert(torch.tensor([[4]]), 4), "experts must lie between 0 and 3; got 4 to 4"),
    "rows": (
        lambda m: m.unpermute(torch.zeros(3, 2), torch.arange(4), torch.zeros(2, 2).long(), torch.zeros(2, 2)),
        "rows must have shape",
    ),
    "gates": (
        lambda m: m.unpermute(torch.zeros(4, 2), torch.arange(4), torch.zeros(2, 2).long(), torch.zeros(2, 1)),
        "gates must have shape",
    ),
}


@pytest.mark.parametrize("call, says", WRONG.values(), ids=WRONG)
def test_bad_shapes(call, says):
    with pytest.raises(ValueError, match=says):
        call(kernels)
