"""A layer of experts whose activation is quantised on the way: the same codes as from the activation, and the three-way
rule for the layer."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from kernels import experts as kernels
from kernels import quant as kernel_quant
from kernels.gate import excess
from ref import quant as ref
from ref.router_replay import route

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMS = [("nvfp4-token", "mxfp8"), ("mxfp8", "mxfp8"), ("fp8", "fp8"), ("bfloat16", "bfloat16"), ("float32", "float32")]


@pytest.mark.parametrize("form", ["fp8", "mxfp8", "nvfp4-token"])
@pytest.mark.parametrize("N, I", [(1, 1), (7, 40), (33, 130)])
def test_codes_are_those_of_the_activation(form, N, I):
    """All but those that a last place of exp can move: a value next to a rounding midpoint."""
    h = (3 * torch.randn(N, 2 * I)).to(DEVICE)
    ours = kernels.activation(h, form)
    theirs = kernels.operand(F.silu(h[:, :I]) * h[:, I:], form)
    for a, b in ((ours.data, theirs.data), (ours.scales, theirs.scales), (ours.token_scales, theirs.token_scales)):
        if a is not None:
            assert a.shape == b.shape and a.dtype == b.dtype
            assert (a != b).double().mean() <= 0.002 if a.dtype == torch.uint8 else torch.allclose(a, b, rtol=1e-6)


def layer(module, arguments, forms, up, device):
    x, gates, w13, w2, experts = (t.to(device) for t in arguments)
    leaves = [t.clone().requires_grad_() for t in (x, gates, w13, w2)]
    y = module.experts_swiglu(*leaves, experts, *forms)
    return y, *torch.autograd.grad(y, leaves, up.to(device))


@pytest.mark.parametrize("popular", [False, True])
@pytest.mark.parametrize(
    "forms, way", [(f, "expanded") for f in FORMS[:3]] + [(f, "native") for f in FORMS[:2]], ids=str
)
def test_layer(forms, way, popular, request):
    """The format's noise is the reference's, and the kernel's distance to the reference is small beside it: now and
    then a last place of exp moves a value across a midpoint. A popular expert takes half of all places, one takes
    none."""
    if way == "native":
        request.getfixturevalue("native")
    N, K, E, D, I = 20, 2, 3, 48, 40
    experts = torch.rand(N, E).argsort(1)[:, :K] if not popular else torch.tensor([[0, 1]]).repeat(N, 1)
    x, gates, up = torch.randn(N, D), torch.rand(N, K), torch.randn(N, D)
    w13, w2 = torch.randn(E, 2 * I, D) / D**0.5, torch.randn(E, D, I) / I**0.5
    arguments = x, gates, w13, w2, experts
    ours, theirs = layer(kernels, arguments, forms, up, DEVICE), layer(ref, arguments, forms, up, "cpu")
    true = layer_in_float64([t.double() if t.is_floating_point() else t for t in arguments], up.double())
    for a, b, c in zip(ours, theirs, true, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        noise = (b - c).norm()
        assert (a.cpu() - b).norm() <= noise / 4 and noise > 0


@settings(max_examples=6)
@given(
    st.integers(0, 40),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 70),
    st.integers(1, 40),
    st.integers(0, 2**20),
)
def test_any_layer(N, K, E, D, I, seed):
    """Of any size, experts without tokens and layers without any included: in float32, values and gradients of the
    reference."""
    torch.manual_seed(seed)
    K = min(K, E)
    experts = torch.rand(N, E).argsort(1)[:, :K]
    arguments = (
        torch.randn(N, D),
        torch.rand(N, K),
        torch.randn(E, 2 * I, D) / D**0.5,
        torch.randn(E, D, I) / I**0.5,
        experts,
    )
    up = torch.randn(N, D)
    for ours, theirs in zip(
        *(layer(m, arguments, ("float32", "float32"), up, d) for m, d in ((kernels, DEVICE), (ref, "cpu"))), strict=True
    ):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("forward, way", [("mxfp8", "expanded"), ("mxfp8", "native"), ("nvfp4-token", "expanded")])
def test_received_codes(forward, way, request):
    """Tokens that came as MXFP8: an MXFP8 product takes the bytes as they are, with the bits that it has of the tokens
    themselves; NVFP4 quantises what they decode to. The first weights' gradient is that of decoded tokens, whose three
    bits of mantissa survive a second power of two."""
    if way == "native":
        request.getfixturevalue("native")
    N, K, E, D, I = 12, 2, 2, 48, 40
    x, gates, experts = torch.randn(N, D), torch.rand(N, K), torch.rand(N, E).argsort(1)[:, :K]
    w13, w2, up = torch.randn(E, 2 * I, D) / D**0.5, torch.randn(E, D, I) / I**0.5, torch.randn(N, D)
    codes, scales = kernel_quant.mxfp8_quantize(x.to(DEVICE))

    class Received:
        @staticmethod
        def experts_swiglu(x, *rest):
            return kernels.received_swiglu(x, codes, scales, *rest)

    decoded = ref.mxfp8_dequantize(codes.cpu(), scales.cpu())
    # x has no values here: what is read is what came.
    ours = layer(Received, (torch.full_like(x, torch.nan), gates, w13, w2, experts), (forward, "mxfp8"), up, DEVICE)
    again = layer(kernels, (decoded, gates, w13, w2, experts), (forward, "mxfp8"), up, DEVICE)
    assert all(torch.equal(a, b) for a, b in zip(ours, again, strict=True))
    if forward == "mxfp8":
        plain = layer(kernels, (x, gates, w13, w2, experts), (forward, "mxfp8"), up, DEVICE)
        for place, (a, b) in enumerate(zip(ours, plain, strict=True)):
            assert torch.equal(a, b) or place == 3 and (a - b).norm() <= 0.02 * b.norm()


def test_the_complete_layer():
    """From the router's scores: the same as its parts."""
    x, scores = torch.randn(9, 32), torch.randn(9, 4)
    w13, w2 = torch.randn(4, 16, 32), torch.randn(4, 32, 8)
    gates, experts = route(scores, 2)
    wanted = ref.experts_swiglu(x, gates, w13, w2, experts, "float32", "float32")
    ours = kernels.mixture(*(t.to(DEVICE) for t in (x, scores)), 2, w13.to(DEVICE), w2.to(DEVICE), "float32", "float32")
    torch.testing.assert_close(ours.cpu(), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("N, I", [(1, 1), (33, 70)])
def test_activation_and_its_gradient(N, I, dtype):
    h, dy = (3 * torch.randn(N, 2 * I)).to(dtype), torch.randn(N, I).to(dtype)

    def autograd(h, dy):
        h = h.clone().requires_grad_()
        y = F.silu(h[:, :I]) * h[:, I:]
        return y, torch.autograd.grad(y, h, dy)[0]

    for a, b, c in zip(
        kernels.swiglu(h.to(DEVICE), dy.to(DEVICE)), autograd(h, dy), autograd(h.double(), dy.double()), strict=True
    ):
        assert excess(a, b, c) <= 1


def test_bfloat16_and_float32_are_no_worse_than_the_reference():
    """Of several draws together: the largest error of a few hundred float32 numbers is an accident of the order in
    which a library sums."""
    N, K, E, D, I = 90, 2, 3, 33, 20
    for dtype, form in ((torch.float32, "float32"), (torch.bfloat16, "bfloat16")):
        draws = []
        for _ in range(2):
            experts = torch.rand(N, E).argsort(1)[:, :K]
            arguments = (
                torch.randn(N, D),
                torch.rand(N, K),
                torch.randn(E, 2 * I, D) / D**0.5,
                torch.randn(E, D, I) / I**0.5,
                experts,
            )
            up = torch.randn(N, D).to(dtype)
            rounded = [t.to(dtype) if t.is_floating_point() else t for t in arguments]
            true = layer_in_float64([t.double() if t.is_floating_point() else t for t in rounded], up.double())
            draws.append(
                [*(layer(m, rounded, (form, form), up, d) for m, d in ((kernels, DEVICE), (ref, "cpu"))), true]
            )
        for ours, theirs, true in zip(*(zip(*each, strict=True) for each in zip(*draws, strict=True)), strict=True):
            assert excess(*(torch.stack([t.cpu() for t in each]) for each in (ours, theirs, true))) <= 1


def layer_in_float64(arguments, up):
    *leaves, experts = arguments
    leaves = [t.clone().requires_grad_() for t in leaves]
    x, gates, w13, w2 = leaves
    gate, up_half = torch.einsum("nd,nkjd->nkj", x, w13[experts]).chunk(2, -1)
    y = torch.einsum("nki,nkdi,nk->nd", F.silu(gate) * up_half, w2[experts], gates)
    return y, *torch.autograd.grad(y, leaves, up)


WRONG = {
    "w13": (
        (torch.zeros(2, 3), torch.zeros(2, 1), torch.zeros(2, 5, 3), torch.zeros(2, 3, 2), torch.zeros(2, 1).long()),
        r"w13 must be a float tensor of shape \[2, 4, 3\]",
    ),
    "gates": (
        (torch.zeros(2, 3), torch.zeros(3, 1), torch.zeros(2, 4, 3), torch.zeros(2, 3, 2), torch.zeros(2, 1).long()),
        "gates must be a float tensor",
    ),
    "format": (
        (
            torch.zeros(2, 3),
            torch.zeros(2, 1),
            torch.zeros(2, 4, 3),
            torch.zeros(2, 3, 2),
            torch.zeros(2, 1).long(),
            "int4",
        ),
        "forward and backward must each be one of",
    ),
    "backward": (
        (
            torch.zeros(2, 3),
            torch.zeros(2, 1),
            torch.zeros(2, 4, 3),
            torch.zeros(2, 3, 2),
            torch.zeros(2, 1).long(),
            "mxfp8",
            "nvfp4-token",
        ),
        "backward must be float32, bfloat16, fp8 or mxfp8",
    ),
}


@pytest.mark.parametrize("args, says", WRONG.values(), ids=WRONG)
def test_bad_input(args, says):
    with pytest.raises(ValueError, match=says):
        kernels.experts_swiglu(*args)


def test_codes_of_another_size():
    x, *rest = (
        t.to(DEVICE)
        for t in (
            torch.zeros(2, 3),
            torch.zeros(2, 1),
            torch.zeros(2, 4, 3),
            torch.zeros(2, 3, 2),
            torch.zeros(2, 1).long(),
        )
    )
    codes, scales = (
        torch.zeros(2, 3, dtype=torch.uint8, device=DEVICE),
        torch.zeros(2, 1, dtype=torch.uint8, device=DEVICE),
    )
    with pytest.raises(ValueError, match=r"scales must be an int tensor of shape \[2, 1\]"):
        kernels.received_swiglu(x, codes, codes, *rest)
    with pytest.raises(
        ValueError, match="codes need forward mxfp8 or nvfp4-token and backward mxfp8; got fp8 and mxfp8"
    ):
        kernels.received_swiglu(x, codes, scales, *rest, "fp8", "mxfp8")
