"""The symmetric product and the iteration on it: against float64 and the reference in the same dtype; the result's
singular values."""

import pytest
import torch

from kernels import muon as kernels
from kernels.gate import excess
from ref import muon

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("B, M, K", [(1, 1, 1), (2, 33, 70), (1, 65, 20), (3, 32, 32), (0, 4, 4)])
@pytest.mark.parametrize("turned", [False, True])
def test_symmetric_product(B, M, K, turned, dtype):
    a = torch.randn(B, K, M).to(dtype).mT if turned else torch.randn(B, M, K).to(dtype)
    c = torch.randn(B, M, M)
    c = (c + c.mT).to(dtype)
    exact = 2.0 * a.double() @ a.double().mT - 0.5 * c.double()
    theirs = torch.baddbmm(c, a, a.mT, beta=-0.5, alpha=2.0)
    ours = kernels.symmetric_product(a.to(DEVICE), c.to(DEVICE), 2.0, -0.5)
    assert torch.equal(ours, ours.mT), "a tile below the diagonal is one above it"
    assert excess(ours, theirs, exact) <= 1


@pytest.mark.parametrize("shape", [(20, 40), (40, 20), (2, 33, 65), (3, 5, 5), (1, 1)], ids=str)
def test_newton_schulz(shape):
    """float32 like the reference; bfloat16 at most twice as far from float64 as the reference."""
    G = torch.randn(shape)
    torch.testing.assert_close(kernels.newton_schulz(G.to(DEVICE)).cpu(), muon.newton_schulz(G), rtol=1e-4, atol=1e-5)
    exact = muon.newton_schulz(G.double())
    errors = [
        (f(G.to(d), dtype=torch.bfloat16).double().cpu() - exact).norm()
        for f, d in ((muon.newton_schulz, "cpu"), (kernels.newton_schulz, DEVICE))
    ]
    assert errors[1] <= 2 * errors[0]
    values = torch.linalg.svdvals(kernels.newton_schulz(G.to(DEVICE)).cpu())
    assert values.max() < 1.21


def test_matrices_whose_squares_overflow():
    G = torch.randn(2, 5, 9)
    wanted = kernels.newton_schulz(G.to(DEVICE)).cpu()
    G[1] *= 2.0**84
    torch.testing.assert_close(kernels.newton_schulz(G.to(DEVICE)).cpu(), wanted, rtol=1e-4, atol=1e-5)


def test_bad_input():
    for call, says in (
        (lambda: kernels.symmetric_product(torch.zeros(2, 2)), r"shape \[B, M, K\]"),
        (
            lambda: kernels.symmetric_product(torch.zeros(1, 2, 3), torch.zeros(1, 3, 3)),
            r"c must be torch.float32 of shape \[1, 2, 2\]",
        ),
        (lambda: kernels.newton_schulz(torch.zeros(3)), r"G must have shape \[\*, m, n\]"),
    ):
        with pytest.raises(ValueError, match=says):
            call()
