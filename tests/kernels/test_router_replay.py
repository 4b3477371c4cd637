"""Routing: experts exactly those of the reference, for ties and −inf; gates and their gradients by the three-way
rule."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import router_replay as kernels
from ref import router_replay as ref

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LEVELS = st.sampled_from([-math.inf, -3.0, -1.0, -0.0, 0.0, 0.5, 0.5000001, 2.0, 1e30])


@st.composite
def routings(draw):
    """Scores with ties and −inf, one finite at least; replayed experts or none; k, alpha."""
    E, N = draw(st.integers(1, 9)), draw(st.integers(1, 6))
    k = draw(st.integers(1, E))
    scores = torch.tensor(draw(st.lists(st.lists(LEVELS, min_size=E, max_size=E), min_size=N, max_size=N)))
    replayed = (
        torch.tensor([draw(st.permutations(range(E)))[:k] for _ in range(N)], dtype=torch.long)
        if draw(st.booleans())
        else None
    )
    # Something that is weighed has to be finite.
    scores[torch.arange(N), 0 if replayed is None else replayed[:, 0]] = 0.25
    return scores, k, replayed, draw(st.sampled_from([0.0, 1e-6, 0.3, 0.99, 1.0])), draw(st.booleans())


@settings(max_examples=60, deadline=None)
@given(routings())
def test_the_same_experts_for_any_scores(case):
    scores, k, replayed, alpha, normalise = case
    gates, experts = ref.route(scores, k, replayed, alpha, normalise)
    ours = kernels.route(scores.to(DEVICE), k, None if replayed is None else replayed.to(DEVICE), alpha, normalise)
    assert torch.equal(ours[1].cpu(), experts)
    torch.testing.assert_close(ours[0].cpu(), gates)


@pytest.mark.parametrize("E, k", [(8, 2), (128, 8), (3, 3), (60, 1)])
@pytest.mark.parametrize("alpha", [None, 0.0, 0.5])
@pytest.mark.parametrize("normalise", [True, False])
def test_gates_and_their_gradient(E, k, alpha, normalise):
    scores, up = torch.randn(37, E), torch.randn(37, k)
    replayed = None if alpha is None else torch.stack([torch.randperm(E)[:k] for _ in range(37)])

    def run(module, x):
        x = x.detach().requires_grad_()
        where = x.device
        gates, experts = module.route(x, k, None if replayed is None else replayed.to(where), alpha or 0.0, normalise)
        (grad,) = torch.autograd.grad((gates * up.to(where, gates.dtype)).sum(), x)
        return gates.double().cpu(), grad.double().cpu(), experts.cpu()

    exact, theirs, ours = run(ref, scores.double()), run(ref, scores), run(kernels, scores.to(DEVICE))
    assert torch.equal(ours[2], theirs[2])
    for a, b, c in zip(exact[:2], theirs, ours, strict=False):
        assert (c - a).abs().max() <= 2 * (b - a).abs().max() + torch.finfo(torch.float32).eps


BAD = {
    "NaN": ([[0.0, math.nan]], None, "scores must be finite or -inf"),
    "inf": ([[0.0, math.inf]], None, "scores must be finite or -inf"),
    "nothing finite": ([[-math.inf] * 2], None, "in each row finite for some"),
    "repeated": ([[0.0, 1.0]], [[1, 1]], "replayed must be 2 distinct experts of the 2"),
    "no such expert": ([[0.0, 1.0]], [[0, 2]], "replayed must be 2 distinct experts of the 2"),
}


@pytest.mark.parametrize("scores, replayed, says", BAD.values(), ids=BAD)
def test_bad_values(scores, replayed, says):
    """Tensors on the CPU, on any machine: values are looked at before anything is launched."""
    with pytest.raises(ValueError, match=says):
        kernels.route(torch.tensor(scores), 2, None if replayed is None else torch.tensor(replayed))
