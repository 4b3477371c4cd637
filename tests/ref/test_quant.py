"""MXFP8, NVFP4 and blockwise FP8 by their laws and by hand; torchao as a second opinion; products forward in one format
and back in another; and what a scale per tensor leaks."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from ref.formats import E2M1, e4m3_decode, e4m3_encode
from ref.network.gradients import experts_swiglu as network_swiglu
from ref.quant import (
    FORMATS,
    Demo,
    blockwise_fp8_dequantize,
    blockwise_fp8_quantize,
    demo,
    experts_swiglu,
    grouped_linear,
    linear,
    mxfp8_dequantize,
    mxfp8_quantize,
    nvfp4_dequantize,
    nvfp4_quantize,
    rounded,
)

INF, NAN = math.inf, math.nan
MODES = ("rceil", "floor", "ceil", "even")
QUANTISED = [name for name in FORMATS if name not in ("float32", "bfloat16")]


@st.composite
def matrices(draw, low=-40, high=40):
    """Rows of very unlike size, with zeros among them; odd sizes; float32 or bfloat16; not always contiguous."""
    rows, cols = draw(st.integers(1, 5)), draw(st.sampled_from([1, 2, 15, 16, 17, 31, 32, 33, 64, 127, 130]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    x = torch.randn(rows, cols, generator=generator)
    x = x * torch.exp2(torch.randint(low, high + 1, (rows, 1), generator=generator).float())
    x[torch.rand(rows, cols, generator=generator) < draw(st.sampled_from([0.0, 0.3, 0.95]))] = draw(
        st.sampled_from([0.0, -0.0])
    )
    x = x.to(draw(st.sampled_from([torch.float32, torch.bfloat16])))
    return x.T.contiguous().T if draw(st.booleans()) else x


# ------------------------------------------------------------------------ MXFP8


@settings(max_examples=150, deadline=None)
@given(matrices(), st.sampled_from([0, 1, -1, -2]))
def test_mxfp8_scale_is_the_least_power_of_two_that_saturates_nothing(x, axis):
    codes, scales = mxfp8_quantize(x, axis)
    last, bytes_ = x.float().movedim(axis, -1), scales.movedim(axis, -1).double()
    for block in range(bytes_.shape[-1]):
        amax = last[..., 32 * block : 32 * (block + 1)].abs().amax(-1).double()
        scale = torch.exp2(bytes_[..., block] - 127)
        # fl(1/448) lies a little above 1/448, and the product is rounded: what is at the very edge may go one up.
        assert (amax <= 448 * scale).all()
        assert ((amax >= 224 * scale * (1 - 2**-22)) | (bytes_[..., block] == 0)).all()


@settings(max_examples=150, deadline=None)
@given(matrices(), st.sampled_from([0, 1]))
def test_mxfp8_error_is_half_a_step(x, axis):
    codes, scales = mxfp8_quantize(x, axis)
    back, wide = mxfp8_dequantize(codes, scales, axis).double(), x.double()
    scale = torch.exp2(scales.double() - 127).repeat_interleave(32, axis).narrow(axis, 0, x.shape[axis])
    step = torch.maximum(
        torch.exp2(torch.floor(torch.log2(wide.abs() / scale).clamp(min=-6)) - 3), torch.tensor(2.0**-9)
    )
    assert ((back - wide).abs() <= step * scale / 2).all()
    assert torch.equal(torch.signbit(back), torch.signbit(wide))


@settings(max_examples=100, deadline=None)
@given(matrices(), st.sampled_from(MODES), st.integers(-30, 30))
def test_mxfp8_laws(x, mode, k):
    codes, scales = mxfp8_quantize(x, 1, mode)
    back = mxfp8_dequantize(codes, scales, 1)
    assert torch.equal(mxfp8_dequantize(*mxfp8_quantize(back, 1, mode), 1), back), "what is quantised stays"
    turned = mxfp8_quantize(x.T, 0, mode)
    assert torch.equal(turned[0], codes.T) and torch.equal(turned[1], scales.T), "an axis is an axis"
    assert torch.equal(mxfp8_quantize(-x, 1, mode)[0], codes ^ 0x80)
    moved = mxfp8_quantize(x.float() * 2.0**k, 1, mode)
    assert torch.equal(moved[0], codes), "powers of two go into the scale"
    nonzero = scales > 0
    assert torch.equal(moved[1].int()[nonzero], scales.int()[nonzero] + k)


def one_block(*values):
    x = torch.zeros(1, 32)
    x[0, : len(values)] = torch.tensor(values)
    return x


@pytest.mark.parametrize(
    "amax, mode, scale, code",
    [
        (448.0, "rceil", 127, 0x7E),  # exactly the largest
        (448.0001, "rceil", 128, 0x76),  # one float32 beyond: twice the scale, 224
        (1.0, "rceil", 119, 0x78),  # 1 / 448 → 2^-8: 256
        (1.75, "rceil", 119, 0x7E),  # 1.75 · 256 = 448
        (1.75, "floor", 119, 0x7E),
        (2 - 2**-20, "floor", 119, 0x7E),  # 512 saturates
        (2 - 2**-20, "even", 120, 0x78),  # rounded to 2: 256
        (1.0, "ceil", 119, 0x78),
        (1.0001, "ceil", 120, 0x70),
        (2.0**-149, "rceil", 0, 0x00),
        (2.0**-127, "rceil", 0, 0x38),
        (2.0**-118, "rceil", 1, 0x78),
        (3.4028234663852886e38, "rceil", 247, 0x78),
        (3.4028234663852886e38, "floor", 246, 0x7E),
    ],
)
def test_mxfp8_by_hand(amax, mode, scale, code):
    codes, scales = mxfp8_quantize(one_block(amax), -1, mode)
    assert (scales.item(), codes[0, 0].item()) == (scale, code)


def test_mxfp8_subnormal_scales_round_up():
    """d = amax / 448 where float32 is subnormal: byte 0 is 2^-127, the next 2^-126, and nothing saturates."""
    for mantissa, scale in ((0x3FFFFF, 0), (0x400000, 0), (0x400001, 1), (0x7FFFFF, 1)):
        d = torch.tensor(mantissa, dtype=torch.int32).view(torch.float32).item()
        amax = torch.tensor(d * 448.0, dtype=torch.float32)
        if (amax * torch.tensor(1 / 448)).view(torch.int32).item() == mantissa:
            assert mxfp8_quantize(one_block(amax.item()))[1].item() == scale


@pytest.mark.parametrize("mode", MODES)
def test_mxfp8_special_blocks(mode):
    x = torch.cat([one_block(1.0, NAN), one_block(INF, 1.0), one_block(-INF), one_block(0.0, -0.0), one_block(1.0)], 1)
    codes, scales = mxfp8_quantize(x, -1, mode)
    assert scales[0, :4].tolist() == [255, 255, 255, 0] and 0 < scales[0, 4] < 255
    assert (codes[0, :96] == 0x7F).all()
    assert codes[0, 96:98].tolist() == [0, 0x80]
    back = mxfp8_dequantize(codes, scales)[0]
    assert back[:96].isnan().all() and not back[96:].isnan().any() and back[128] == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", MODES)
def test_torchao_gives_the_same_mxfp8(mode, dtype):
    """On ordinary blocks; where the two differ (NaN, Inf, the ends of float32), ours is the contract."""
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    x = (torch.randn(500, 256) * torch.exp2(torch.randint(-60, 60, (500, 1)).float())).to(dtype)
    scales, codes = to_mx(x, torch.float8_e4m3fn, 32, ScaleCalculationMode[mode.upper()])
    ours = mxfp8_quantize(x, -1, mode)
    assert torch.equal(ours[0], codes.view(torch.uint8)) and torch.equal(ours[1], scales.view(torch.uint8))


def test_torchao_gives_the_same_nvfp4():
    """With one scale per tensor, on numbers that are exact, since torchao multiplies by reciprocals: E2M1 values times
    E4M3 scales times a power of two, the largest of both among them."""
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize as theirs

    x = torch.tensor(E2M1)[torch.randint(0, 8, (64, 16, 16))] * (1 - 2 * torch.randint(0, 2, (64, 16, 16)))
    x[..., 0] = 6
    step = e4m3_decode(torch.randint(0x20, 0x7E, (64, 16, 1)).to(torch.uint8))
    step[0, 0] = 448
    x = (x * step / 64).flatten(1)
    packed, blocks, scale = nvfp4_quantize(x, "tensor")
    assert scale == 1 / 64
    other_blocks, other_packed = theirs(x, 16, scale)
    assert torch.equal(packed, other_packed) and torch.equal(blocks.flatten(), other_blocks.view(torch.uint8).flatten())
    assert torch.equal(nvfp4_dequantize(packed, blocks, scale), x)


# ------------------------------------------------------------------------ NVFP4


def test_nvfp4_by_hand():
    """One token whose largest number is 2688: s = 1, its block's scale 448; a second block of scale 1 holds the whole
    grid."""
    x = torch.zeros(1, 32)
    x[0, 0] = 2688
    x[0, 16:31] = torch.tensor([0.25, 0.26, 0.74, 0.75, 1.25, 1.26, 1.75, 2.5, 2.6, 3.5, 5.0, 5.1, 6.0, -0.2, -6.0])
    packed, blocks, scale = nvfp4_quantize(x)
    assert scale.tolist() == [[1.0]] and blocks.tolist() == [[0x7E, 0x38]]
    back = nvfp4_dequantize(packed, blocks, scale)[0]
    assert back[0] == 2688
    assert back[16:31].tolist() == [0, 0.5, 0.5, 1, 1, 1.5, 2, 2, 3, 4, 4, 6, 6, 0, -6]
    assert packed[0, 0] == 7 and packed[0, 8] == 0x10, "the earlier of two is the low half"


@settings(max_examples=150, deadline=None)
@given(matrices(), st.data())
def test_nvfp4_per_token_knows_nothing_of_other_tokens(x, data):
    packed, blocks, scale = nvfp4_quantize(x)
    order = torch.tensor(data.draw(st.permutations(range(len(x)))))
    mixed = nvfp4_quantize(torch.cat((x[order], torch.full_like(x[:1], 1e30))))
    for one, other in zip((packed, blocks, scale), mixed, strict=True):
        assert torch.equal(one[order], other[:-1])


def test_nvfp4_per_tensor_leaks_the_future():
    """A later token, ten times larger, changes what earlier ones are taken for; per token nothing changes."""
    x = torch.randn(8, 64)
    later = x.clone()
    later[-1] *= 10
    assert not torch.equal(rounded(later, "nvfp4-tensor")[:-1], rounded(x, "nvfp4-tensor")[:-1])
    assert torch.equal(rounded(later, "nvfp4-token")[:-1], rounded(x, "nvfp4-token")[:-1])


@settings(max_examples=150, deadline=None)
@given(matrices(), st.sampled_from(["token", "tensor"]), st.integers(-30, 30))
def test_nvfp4_laws(x, scale, k):
    packed, blocks, s = nvfp4_quantize(x, scale)
    moved = nvfp4_quantize(x.float() * 2.0**k, scale)
    assert torch.equal(moved[0], packed) and torch.equal(moved[1], blocks) and torch.equal(moved[2], s * 2.0**k)
    back = nvfp4_dequantize(packed, blocks, s, size=x.shape[-1])
    minus = nvfp4_dequantize(*nvfp4_quantize(-x, scale), size=x.shape[-1])
    assert back.shape == x.shape and torch.equal(minus, -back)
    wide = F.pad(x.double(), (0, -x.shape[-1] % 16)).unflatten(-1, (-1, 16))
    step = e4m3_decode(blocks).double() * s.double()
    error = (F.pad(back.double(), (0, -x.shape[-1] % 16)).unflatten(-1, (-1, 16)) - wide).abs()
    # A block's scale is at most a sixteenth too small, or half of E4M3's smallest step; then 6 falls short of the
    # largest.
    amax = wide.abs().amax(-1)
    short = (amax - 6 * step).clamp(min=0)
    assert (short <= amax / 16 * (1 + 1e-6) + 6 * 2.0**-10 * s.double() * (1 + 1e-6)).all()
    assert (error <= torch.maximum(step, short)[..., None] * (1 + 1e-6)).all(), "half the widest gap of the grid, 2"


def test_nvfp4_special_tokens():
    x = torch.ones(5, 20)
    x[0, 3], x[1, 17], x[2], x[3, 16:] = NAN, INF, 0, 1e-6
    packed, blocks, scale = nvfp4_quantize(x)
    back = nvfp4_dequantize(packed, blocks, scale)
    assert scale[:2].isnan().all() and (blocks[:2] == 0x7F).all() and (packed[:2] == 0).all() and back[:2].isnan().all()
    assert scale[2] == 0 and (blocks[2] == 0).all() and (packed[2] == 0).all() and (back[2] == 0).all()
    assert blocks[3, 1] == 0 and (back[3, 16:] == 0).all(), "a block scale of zero gives zero data"
    assert (back[4] - 1).abs().max() < 1e-6
    assert nvfp4_dequantize(*nvfp4_quantize(x, "tensor")).isnan().all()


def test_fast_division_moves_codes():
    """The codes that one more rounding changes lie next to a midpoint; per million numbers a few do."""
    x = torch.randn(2000, 512).bfloat16()
    ieee, fast = nvfp4_quantize(x), nvfp4_quantize(x, division="fast")
    other = (ieee[0] != fast[0]) | (ieee[1] != fast[1]).repeat_interleave(8, 1)
    assert 0 < other.double().mean() < 1e-2


def test_products_of_small_values_are_exact_in_bfloat16():
    """What lets a kernel multiply decoded values in bfloat16: E2M1 · E4M3 and E4M3 · 2^k have 8 bits at most."""
    every = e4m3_decode(torch.arange(0x7F).to(torch.uint8))
    product = torch.outer(torch.tensor(E2M1), every)
    assert torch.equal(product.bfloat16().float(), product)
    shifted = torch.outer(torch.exp2(torch.arange(-100.0, 100.0)), every)
    assert torch.equal(shifted.bfloat16().float(), shifted)


# ------------------------------------------------------------------------ blockwise FP8


@settings(max_examples=100, deadline=None)
@given(matrices(), st.sampled_from([(1, 128), (128, 128), (2, 16)]), st.integers(-30, 30))
def test_blockwise_fp8_laws(x, block, k):
    codes, scale = blockwise_fp8_quantize(x, block)
    back = blockwise_fp8_dequantize(codes, scale, block)
    assert codes.shape == x.shape and torch.equal(
        torch.signbit(e4m3_decode(codes)), torch.signbit(x) & (scale_at(scale, block, x) > 0)
    )
    moved = blockwise_fp8_quantize(x.float() * 2.0**k, block)
    assert torch.equal(moved[0], codes) and torch.equal(moved[1], scale * 2.0**k)
    at = scale_at(scale, block, x).double()
    assert (
        (back.double() - x.double()).abs() <= torch.maximum(x.double().abs() / 16, at * 2.0**-10) * (1 + 1e-6)
    ).all()


def scale_at(scale, block, x):
    rows, cols = (torch.arange(n) // size for n, size in zip(x.shape, block, strict=True))
    return scale[rows][:, cols]


def test_blockwise_fp8_by_hand():
    x = torch.ones(130, 129)
    x[129, 128], x[0, 0], x[1, 128] = NAN, 448 * 4, 0.5
    codes, scale = blockwise_fp8_quantize(x, (128, 128))
    assert scale.shape == (2, 2) and scale[0, 0] == 4 and scale[0, 1] == torch.tensor(1.0) / 448 and scale[1, 1].isnan()
    assert codes[0, 0] == 0x7E and codes[1, 1] == e4m3_encode(torch.tensor(0.25)) and codes[2, 128] == 0x7E
    assert blockwise_fp8_dequantize(codes, scale, (128, 128))[128:, 128].isnan().all()
    per_token = blockwise_fp8_quantize(x)
    assert per_token[1].shape == (130, 2) and per_token[1].isnan().sum() == 1


# ------------------------------------------------------------------------ products


def test_linear_in_float32_is_the_linear_layer():
    x, w = torch.randn(7, 20, requires_grad=True), torch.randn(5, 20, requires_grad=True)
    grad = torch.randn(7, 5)
    ours = torch.autograd.grad(linear(x, w, "float32", "float32"), (x, w), grad)
    theirs = torch.autograd.grad(F.linear(x, w), (x, w), grad)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_product_is_quantised_along_its_own_sum(dtype):
    x, w, grad = (torch.randn(*shape).to(dtype) for shape in ((70, 40), (50, 40), (70, 50)))
    x.requires_grad_(), w.requires_grad_()
    y = linear(x, w)
    assert y.dtype == dtype and torch.equal(y, (rounded(x, "nvfp4-token") @ rounded(w, "nvfp4-token").T).to(dtype))
    to_x, to_w = torch.autograd.grad(y, (x, w), grad)
    back = {
        (name, axis): mxfp8_dequantize(*mxfp8_quantize(t, axis), axis)
        for name, t in (("x", x), ("w", w), ("g", grad))
        for axis in (0, 1)
    }
    assert torch.equal(to_x, (back["g", 1] @ back["w", 0]).to(dtype))
    assert torch.equal(to_w, (back["g", 0].T @ back["x", 0]).to(dtype))


@pytest.mark.parametrize("form", QUANTISED)
def test_a_format_is_about_as_good_as_its_bits(form):
    """Relative noise of Gaussian numbers: 3 bits of mantissa leave about 2.6%, E2M1 about 10%."""
    x = torch.randn(64, 256)
    noise = ((rounded(x, form) - x).norm() / x.norm()).item()
    assert (0.07 < noise < 0.13) if "nvfp4" in form else (0.02 < noise < 0.035)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.sampled_from(["nvfp4-token", "mxfp8", "fp8"]))
def test_experts_are_products_of_their_own(counts, forward):
    """Empty experts, experts of one token, of more than a block."""
    N, E, D, O = sum(counts), len(counts), 33, 18
    x, w, grad = torch.randn(N, D, requires_grad=True), torch.randn(E, O, D, requires_grad=True), torch.randn(N, O)
    ends = torch.tensor(counts).cumsum(0)
    y = grouped_linear(x, w, ends, forward)
    to_x, to_w = torch.autograd.grad(y, (x, w), grad)
    start = 0
    for e, n in enumerate(counts):
        rows = slice(start, start := start + n)
        part, one = x.detach()[rows].requires_grad_(), w.detach()[e].requires_grad_()
        z = linear(part, one, forward)
        alone = torch.autograd.grad(z, (part, one), grad[rows])
        assert torch.equal(y[rows], z) and torch.equal(to_x[rows], alone[0]) and torch.equal(to_w[e], alone[1])


def test_experts_unquantised_are_the_networks():
    """In the formats that change nothing, values and gradients of `ref.network.model.MoE`; an expert that nobody chose
    among them."""
    x, gates = torch.randn(9, 12, requires_grad=True), torch.rand(9, 2, requires_grad=True)
    w13, w2 = torch.randn(4, 10, 12, requires_grad=True), torch.randn(4, 12, 5, requires_grad=True)
    experts = torch.stack([torch.randperm(3)[:2] for _ in range(9)])
    inputs, grad = (x, gates, w13, w2), torch.randn(9, 12)

    def found(function, *how):
        y = function(x, gates, w13, w2, experts, *how)
        return y, *torch.autograd.grad(y, inputs, grad)

    for a, b in zip(found(experts_swiglu, "float32", "float32"), found(network_swiglu), strict=True):
        torch.testing.assert_close(a, b)


def test_a_later_token_changes_no_earlier_output_unless_tokens_share_a_scale():
    x, w = torch.randn(40, 64), torch.randn(24, 64)
    later = x.clone()
    later[-1] *= 50
    for form in QUANTISED:
        same = torch.equal(linear(later, w, form)[:-1], linear(x, w, form)[:-1])
        assert same == (form != "nvfp4-tensor"), form


def test_demo_tells_leaks_and_noise():
    figures = demo(Demo(tokens=8, width=64))
    assert figures["leak_nvfp4-tensor"] > 0.1
    assert all(v == 0 for k, v in figures.items() if k.startswith("leak_") and k != "leak_nvfp4-tensor")
    assert figures["sqnr_mxfp8"] > figures["sqnr_nvfp4-token"] + 8


def test_a_weight_in_fp8_is_the_same_numbers_whichever_axis_is_summed_over():
    """Its scales are per 128 × 128, so one set of codes serves forward and backward; an activation's, per 1 × 128, are
    not."""
    w = torch.randn(150, 200) * 10 ** torch.linspace(-2, 2, 150)[:, None]
    assert torch.equal(rounded(w, "fp8", 0, weight=True), rounded(w, "fp8", 1, weight=True))
    assert not torch.equal(rounded(w, "fp8", 0), rounded(w, "fp8", 1))
    x = torch.randn(5, 200)
    torch.testing.assert_close(linear(x, w, "fp8"), rounded(x, "fp8") @ rounded(w, "fp8", weight=True).T)


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_an_expert_without_tokens_has_zero_gradients(form):
    """Both ways in every format: what sums over no token is zero."""
    x, weight = torch.randn(5, 32, requires_grad=True), torch.randn(3, 16, 32, requires_grad=True)
    grouped_linear(x, weight, torch.tensor([2, 2, 5]), form, form).square().sum().backward()
    assert not weight.grad[1].any() and bool(weight.grad[[0, 2]].any()) and bool(x.grad.isfinite().all())


@pytest.mark.parametrize("forward", ["nvfp4-token", "mxfp8", "fp8"])
@pytest.mark.parametrize("unlike", ["rows", "columns"])
def test_each_product_is_quantised_along_its_own_sum_where_sizes_differ(unlike, forward):
    """By 2^±20: among numbers of one size the powers of two in a scale look alike along either axis, and a wrong one
    goes unseen."""
    x, w, grad = (torch.randn(*shape) for shape in ((70, 40), (50, 40), (70, 50)))
    for t in (x, w, grad):
        size = (len(t), 1) if unlike == "rows" else (1, t.shape[1])
        t.mul_(torch.exp2(torch.randint(-20, 21, size).float()))
    back = {
        (name, axis): mxfp8_dequantize(*mxfp8_quantize(t, axis), axis)
        for name, t in (("x", x), ("w", w), ("g", grad))
        for axis in (0, 1)
    }
    assert all((back[name, 0] != back[name, 1]).double().mean() > 0.1 for name in "xwg"), "the axes must differ"
    y = linear(x.requires_grad_(), w.requires_grad_(), forward)
    assert torch.equal(y, rounded(x, forward, 1) @ rounded(w, forward, 1, weight=True).T)
    to_x, to_w = torch.autograd.grad(y, (x, w), grad)
    assert torch.equal(to_x, back["g", 1] @ back["w", 0])
    assert torch.equal(to_w, back["g", 0].T @ back["x", 0])


@pytest.mark.parametrize("form", QUANTISED)
def test_a_format_along_an_axis_is_it_along_the_last_of_the_transpose(form):
    x = torch.randn(40, 70) * torch.exp2(torch.randint(-20, 21, (40, 1)).float())
    assert torch.equal(rounded(x, form, 0), rounded(x.T.contiguous(), form, 1).T)
    assert not torch.equal(rounded(x, form, 0), rounded(x, form, 1))


def test_a_weight_in_fp8_has_one_scale_for_a_square_of_128_by_128():
    """One large number wipes out what is far smaller in its square, in its own row and in others, and nothing
    outside."""
    w = torch.full((130, 130), 1.0)
    w[3, 5] = 448 * 2.0**12
    seen = rounded(w, "fp8", weight=True)
    assert seen[3, 5] == w[3, 5] and (seen[:128, :128] == 0).sum() == 128 * 128 - 1
    torch.testing.assert_close(seen[128:], w[128:]), torch.testing.assert_close(seen[:, 128:], w[:, 128:])
    as_activation = rounded(w, "fp8")
    assert (as_activation[3, :128] == 0).sum() == 127
    torch.testing.assert_close(as_activation[4], w[4])
    x = torch.randn(3, 130, requires_grad=True)
    grad = torch.randn(3, 130)
    (to_x,) = torch.autograd.grad(linear(x, w, "fp8", "fp8"), x, grad)
    assert torch.equal(to_x, rounded(grad, "fp8") @ seen), "the gradient is of the weight that the product used"
