"""Products that Blackwell's tensor cores scale themselves, by `tl.dot_scaled` under the interpreter: the three-way
rule, as for the others."""

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kernels import gemm, grouped_gemm, launch, operands
from kernels.gate import excess
from ref import quant as ref
from ref.formats import e2m1_decode, e4m3_decode, e8m0_decode

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMS = [("mxfp8", "mxfp8"), ("nvfp4-token", "mxfp8")]
SHAPES = {
    "one": (1, 1, 1),
    "odd": (33, 17, 150),
    "a tile": (128, 128, 128),
    "beyond a tile": (129, 20, 300),
    "wide": (20, 130, 70),
}
CASES = {name: (*shape, torch.float32) for name, shape in SHAPES.items()} | {
    "bfloat16": (*SHAPES["odd"], torch.bfloat16)
}
ROUNDING = torch.finfo(torch.float32).eps / 2
pytestmark = pytest.mark.usefixtures("native")


def run(module, call, x, weight, up, *rest, device="cpu"):
    a, b = x.to(device).requires_grad_(), weight.to(device).requires_grad_()
    y = getattr(module, call)(a, b, *(t.to(device) if isinstance(t, torch.Tensor) else t for t in rest))
    return y, *torch.autograd.grad(y, (a, b), up.to(device))


@pytest.mark.parametrize("N, O, D, dtype", CASES.values(), ids=CASES)
@pytest.mark.parametrize("forms", FORMS, ids=lambda f: "-".join(f))
def test_linear(exactly, forms, N, O, D, dtype):
    x, weight, up = (torch.randn(*shape).to(dtype) for shape in ((N, D), (O, D), (N, O)))
    forward, backward = forms
    true = (
        exactly(x, forward, 1) @ exactly(weight, forward, 1, True).T,
        exactly(up, backward, 1) @ exactly(weight, backward, 0, True),
        exactly(up, backward, 0).T @ exactly(x, backward, 0),
    )
    assert operands.operand(x.to(DEVICE), forward).swizzled
    for a, b, c in zip(
        run(gemm, "linear", x, weight, up, *forms, device=DEVICE),
        run(ref, "linear", x, weight, up, *forms),
        true,
        strict=True,
    ):
        assert excess(a, b, c) <= 1


@settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.integers(0, 140), min_size=1, max_size=4),
    st.integers(1, 140),
    st.integers(1, 140),
    st.sampled_from(FORMS),
    st.integers(0, 2**20),
)
@example([59], 12, 1, FORMS[0], 1)  # sums that cancel: the reference happens to be nine times closer than the kernel
def test_experts(exactly, counts, O, D, forms, seed):
    """Any split of rows, experts without one included. Rows and columns differ by powers of two, so every scale has to
    be applied where it belongs. Errors count by what a number is the sum of, as sums may cancel. In the mean square the
    kernel's is at most twice the reference's and a rounding. No number is off by more than K additions in any order,
    and four roundings more for the scales of NVFP4, can be: (K + 4)/2 eps."""
    generator = torch.Generator().manual_seed(seed)
    x, w, up = (torch.randn(*s, generator=generator) for s in ((sum(counts), D), (len(counts), O, D), (sum(counts), O)))
    for t in (x, up):
        t.mul_(torch.exp2(torch.randint(-8, 9, (len(t), 1), generator=generator).float()))
    ends = torch.tensor(counts).cumsum(0)
    y, dx, dw = [], [], []
    for a, b, g in zip(x.split(counts), w, up.split(counts), strict=True):
        y.append((exactly(a, forms[0], 1), exactly(b, forms[0], 1, True).T))
        dx.append((exactly(g, forms[1], 1), exactly(b, forms[1], 0, True)))
        dw.append((exactly(g, forms[1], 0).T, exactly(a, forms[1], 0)))
    found = (
        run(m, "grouped_linear", x, w, up, ends, *forms, device=d) for m, d in ((grouped_gemm, DEVICE), (ref, "cpu"))
    )
    for a, b, products, join in zip(*found, (y, dx, dw), (torch.cat, torch.cat, torch.stack), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype == torch.float32
        true = join([left @ right for left, right in products])
        size = join([left.abs() @ right.abs() for left, right in products]).clamp(min=1e-300)
        most = join([torch.full_like(left @ right, left.shape[-1] + 4) for left, right in products]) * ROUNDING
        a, b = ((some.detach().cpu().double() - true).abs() / size for some in (a, b))
        assert (a <= most).all() and (b <= most).all()
        assert not a.numel() or a.square().mean().sqrt() <= 2 * b.square().mean().sqrt() + ROUNDING


@pytest.mark.parametrize("form", ["mxfp8", "nvfp4-token"])
def test_a_token_with_nan_spoils_its_own_row_only(form):
    x, weight = torch.randn(9, 200), torch.randn(5, 200)
    x[4, 7] = torch.nan
    y = gemm.linear(x.to(DEVICE), weight.to(DEVICE), form).cpu()
    assert y[4].isnan().all() and y[[0, 1, 2, 3, 5, 6, 7, 8]].isfinite().all()


def test_the_way_is_the_devices(monkeypatch):
    monkeypatch.undo()
    x = torch.zeros(2, 32)
    assert launch.path(x) == ("expanded" if launch.INTERPRETED else "ref")
    monkeypatch.setattr(launch, "INTERPRETED", False)
    assert launch.path(x) == "ref"
    for capability, way in (((9, 0), "expanded"), ((10, 0), "native"), ((10, 3), "native")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        assert launch.path(type("Far", (), {"is_cuda": True, "device": "cuda:0"})()) == way


@triton.jit
def one_dot_kernel(x, s, z, t, out, FORM: tl.constexpr, K: tl.constexpr, B: tl.constexpr):
    r, k, b = tl.arange(0, 256), tl.arange(0, K), tl.arange(0, B)
    c = tl.arange(0, 16)
    left, right = tl.load(x + r[:, None] * K + k[None, :]), tl.load(z + c[None, :] * K + k[:, None])
    y = tl.dot_scaled(
        left, tl.load(s + r[:, None] * B + b[None, :]), FORM, right, tl.load(t + c[:, None] * B + b[None, :]), FORM
    )
    tl.store(out + r[:, None] * 16 + c[None, :], y)


@pytest.mark.skipif(torch.cuda.is_available(), reason="about the interpreter")
def test_what_the_interpreter_can_and_cannot():
    """It decodes every code of E4M3 and E2M1 and every E8M0 scale, NaN included; E4M3 scales once the fixture helps."""
    every, out = torch.arange(256, dtype=torch.uint8), torch.empty(256, 16)
    ones = torch.zeros(16, 64, dtype=torch.uint8)
    ones[:, 0], unit = 0x38, torch.full((256, 2), 127, dtype=torch.uint8)
    codes = torch.zeros(256, 64, dtype=torch.uint8)
    codes[:, 0] = every
    e4m3 = torch.float8_e4m3fn
    one_dot_kernel[(1,)](codes.view(e4m3), unit, ones.view(e4m3), unit[:16], out, FORM="e4m3", K=64, B=2)
    torch.testing.assert_close(out[:, 0], e4m3_decode(every), rtol=0, atol=0, equal_nan=True)
    codes[:, 0], scales = 0x38, unit.clone()
    scales[:, 0] = every
    one_dot_kernel[(1,)](codes.view(e4m3), scales, ones.view(e4m3), unit[:16], out, FORM="e4m3", K=64, B=2)
    torch.testing.assert_close(out[:, 0], e8m0_decode(every), rtol=0, atol=0, equal_nan=True)
    two, pairs = torch.zeros(16, 32, dtype=torch.uint8), torch.zeros(256, 32, dtype=torch.uint8)
    two[:, 0], pairs[:, 0] = 0x42, every  # 1 and 2
    four = torch.full((256, 4), 0x38, dtype=torch.uint8)
    one_dot_kernel[(1,)](pairs, four.view(e4m3), two, four[:16].view(e4m3), out, FORM="e2m1", K=32, B=4)
    torch.testing.assert_close(out[:, 0], e2m1_decode(every & 15) + 2 * e2m1_decode(every >> 4), rtol=0, atol=0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="about the interpreter")
def test_the_interpreters_fault(monkeypatch):
    """It takes E4M3 scales for E8M0 ones. When this fails, Triton has mended that, and the fixture `native` need not
    any more."""
    monkeypatch.undo()
    two, four, out = (
        torch.full((256, 32), 0x22, dtype=torch.uint8),
        torch.full((256, 4), 0x38, dtype=torch.uint8),
        torch.empty(256, 16),
    )
    e4m3 = torch.float8_e4m3fn
    one_dot_kernel[(1,)](two, four.view(e4m3), two[:16], four[:16].view(e4m3), out, FORM="e2m1", K=32, B=4)
    assert (out != 64.0).all(), "64 ones times ones, with scales of 1"
