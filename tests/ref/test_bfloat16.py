"""Products of bfloat16 matrices are fast, rounded once and differentiable on every processor."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ref import muon
from ref.network import bfloat16
from ref.network.bfloat16 import NATIVE

SIZES = st.integers(0, 9)


def near(found, exact, size):
    """Rounded once: within half a step of bfloat16, and what float32 sums of `size` terms of this size can lose."""
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-5 * max(size, 1))


@given(m=SIZES, k=SIZES, n=SIZES, batch=st.integers(1, 3), turned=st.booleans(), seed=st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_products_are_float32_products_rounded_once(m, k, n, batch, turned, seed):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=generator).bfloat16()

    a, b, c = draw(batch, m, k), draw(batch, k, n), draw(batch, m, n)
    if turned:
        b = b.transpose(1, 2).contiguous().transpose(1, 2)
    exact = a.double() @ b.double()
    near(torch.bmm(a, b), exact, k)
    near(a[0] @ b[0], exact[0], k)
    near(torch.nn.functional.linear(a, b[0].t()), a.double() @ b[0].double(), k)
    near(torch.baddbmm(c, a, b), exact + c.double(), k)
    near(torch.addmm(c[0], a[0], b[0], beta=0.5, alpha=2.0), 2 * exact[0] + 0.5 * c[0].double(), k)


def test_the_same_bits_as_in_float32_where_the_processor_has_no_instructions():
    a, b = torch.randn(33, 70).bfloat16(), torch.randn(70, 41).bfloat16()
    wanted = (a.float() @ b.float()).bfloat16()
    near(a @ b, a.double() @ b.double(), 70)
    assert NATIVE or torch.equal(a @ b, wanted) and torch.equal(torch.bmm(a[None], b[None])[0], wanted)


def test_gradients_are_products_too():
    a, b = (torch.randn(*shape).bfloat16().requires_grad_() for shape in ((5, 7), (7, 3)))
    g = torch.randn(5, 3).bfloat16()
    (a @ b).backward(g)
    near(a.grad, g.double() @ b.detach().double().t(), 3)
    near(b.grad, a.detach().double().t() @ g.double(), 5)


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_other_dtypes_are_multiplied_as_before(kind):
    a, b, c = torch.randn(6, 5, dtype=kind), torch.randn(5, 4, dtype=kind), torch.randn(6, 4, dtype=kind)
    assert torch.equal(a @ b, torch.mm(a, b, out=torch.empty(6, 4, dtype=kind)))
    assert torch.equal(torch.addmm(c, a, b), torch.addmm(c, a, b, out=torch.empty(6, 4, dtype=kind)))


def test_dtypes_are_not_mixed():
    with pytest.raises(RuntimeError):
        torch.randn(3, 4).bfloat16() @ torch.randn(4, 5)
    with pytest.raises(RuntimeError):
        torch.randn(3, 4).bfloat16() @ torch.randn(5, 6).bfloat16()


def test_muon_has_them_without_a_network():
    """The one technique that multiplies in bfloat16 and needs nothing else of `ref.network`."""
    assert muon.bfloat16 is bfloat16
