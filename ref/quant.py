"""Low precision: MXFP8, NVFP4 and blockwise FP8 bit by bit, and products that use one format forward and another
backward.

Papers: Composer 2 technical report (arXiv:2603.24477v2), §6.1, and the kernels post; OCP Microscaling Formats 1.0;
Recipes for pre-training LLMs with MXFP8, arXiv:2506.08027; DeepSeek-V3, arXiv:2412.19437, §3.3.

A block of numbers shares a scale, so a few bits per number are enough. The formats differ in what shares a scale:

    MXFP8            32 values along the reduced axis share a power of two (E8M0); values are E4M3
    NVFP4            16 values share an E4M3 scale, and a token (or the tensor) shares one float32 scale; values are
                     E2M1
    FP8, blockwise   128 activations of a token, or 128 × 128 weights, share one float32 scale; values are E4M3

    x ≈ value · 2^(byte − 127)        x ≈ value · block · s,  s = amax / (448 · 6)        x ≈ value · s,  s = amax / 448

Composer 2 trains its experts with NVFP4 in the forward pass and MXFP8 in the backward pass, and uses one float32 scale
per token, not per tensor. `demo` shows why: a scale per tensor depends on everything else in the batch, later tokens
included. Training then sees through the causal mask, and an engine with another batch computes another policy.

Where this file departs from the papers
1. The report names the formats, not their corner cases. Ours: scale bytes are rounded up (RCEIL), so nothing saturates.
   One NaN or Inf turns its MXFP8 block, its FP8 block, or everything that shares its NVFP4 float32 scale into NaN.
   Where a scale is zero, so is the data.
2. Products are those of the decoded values in float32: what tensor cores compute, up to the order of the sum.
3. The report quantises the experts' products; `linear` does the same for one matrix. Values are rounded to nearest,
   never stochastically, and rounding has the gradient of the identity (straight-through).
4. "Fast" division is x · fl(1/s): one more rounding than IEEE division, as on a GPU with approximate division.

Run it
    etude run quant --scale small            a second; the same as: python -m ref.quant
    etude run quant --scale full             scaled/quant.py

Glossary
    symbol   variable    shape          where
    x        x           … n            what is quantised
             codes       … n            E4M3 codes, uint8
             packed      … n/2          two E2M1 codes per byte, the earlier in the low half
    byte     scales      … n/32         E8M0 codes, uint8
    block    blocks      … n/16         E4M3 codes, uint8
    s        scale       … 1, or 1      float32
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor
from torch.nn import functional as F

from ref.checks import expect
from ref.formats import E4M3_MAX, e2m1_decode, e2m1_encode, e4m3_decode, e4m3_encode, e8m0_decode, power_of_two

__all__ = [
    "FORMATS",
    "Demo",
    "blockwise_fp8_dequantize",
    "blockwise_fp8_quantize",
    "demo",
    "experts_swiglu",
    "grouped_linear",
    "linear",
    "mxfp8_dequantize",
    "mxfp8_quantize",
    "mxfp8_quantize_both",
    "nvfp4_dequantize",
    "nvfp4_quantize",
    "rounded",
]

Mode = Literal["rceil", "floor", "ceil", "even"]
MODES = get_args(Mode)


def mxfp8_quantize(
    x: Float[Tensor, "*shape"], axis: int = -1, mode: Mode = "rceil"
) -> tuple[UInt8[Tensor, "*shape"], UInt8[Tensor, "*blocks"]]:
    """E4M3 codes in the shape of x, and E8M0 scales, one per 32 values along `axis` (the last block may be short).

    mode "rceil" rounds amax / 448 up to a power of two; "floor" is the OCP's minimum, 2^(⌊log2 amax⌋ − 8), where an
    amax above 1.75 · 2^e saturates; "ceil" is the next power of two; "even" uses amax rounded to 3 bits of mantissa. A
    block with NaN or Inf has scale 255 and data NaN. A block of zeros has scale 0 and zeros with their signs. Raises
    ValueError if x is not float or has no such axis. OCP MX 1.0, §6.3; arXiv:2506.08027, Alg. 1."""
    check_mxfp8(x, axis, mode)
    groups = _split(x, axis, 32)
    amax = groups.abs().amax(-1)
    if mode == "rceil":
        d = (amax * (1 / E4M3_MAX)).view(torch.int32)
        # Round up to the next power of two. A subnormal d, read as an integer, counts 2^-149; byte 0 is 2^-127 =
        # 0x400000 · 2^-149.
        scales = ((d + 0x7FFFFF) >> 23) - (d <= 0x400000).int()
    else:
        extra = {"floor": 0, "ceil": 0x7FFFFF, "even": 1 << 19}[mode]
        scales = ((amax.view(torch.int32) + extra) >> 23) - 8
    scales = scales.clamp_(0, 254)
    codes = e4m3_encode(groups * power_of_two(127 - scales)[..., None])  # value = x / 2^(byte − 127)
    scales, is_invalid = scales.to(torch.uint8), ~amax.isfinite()
    if is_invalid.any():
        codes.masked_fill_(is_invalid[..., None], 0x7F)
        scales.masked_fill_(is_invalid, 255)
    return _join(codes, axis, x.shape), scales.movedim(-1, axis)


def mxfp8_quantize_both(
    x: Float[Tensor, "M N"], mode: Mode = "rceil"
) -> tuple[UInt8[Tensor, "M N"], UInt8[Tensor, "M rows"], UInt8[Tensor, "M N"], UInt8[Tensor, "cols N"]]:
    """Quantise along the rows (axis 1) and along the columns (axis 0). Weights, gradients and activations each need
    both, since a training step sums over both axes. Raises ValueError if x is not a matrix."""
    check_mxfp8(x, -1, mode, matrix=True)
    return *mxfp8_quantize(x, 1, mode), *mxfp8_quantize(x, 0, mode)


def mxfp8_dequantize(
    codes: UInt8[Tensor, "*shape"], scales: UInt8[Tensor, "*blocks"], axis: int = -1
) -> Float[Tensor, "*shape"]:
    """float32, exactly value · 2^(byte − 127). Raises ValueError unless there is one scale per 32 values along
    `axis`."""
    _check_scales("scales", scales, codes.shape, axis, 32)
    groups = _split(e4m3_decode(codes), axis, 32)
    # x ≈ value · 2^(byte − 127)
    return _join(groups * e8m0_decode(scales.movedim(axis, -1))[..., None], axis, codes.shape)


def nvfp4_quantize(
    x: Float[Tensor, "*rows n"], scale: Literal["token", "tensor"] = "token", division: Literal["ieee", "fast"] = "ieee"
) -> tuple[UInt8[Tensor, "*rows half"], UInt8[Tensor, "*rows blocks"], Float[Tensor, "..."]]:
    """Two E2M1 codes per byte; E4M3 scales, one per 16 values of the last axis; float32 scales, one per token [*rows,
    1] or one [].

    A token or tensor with NaN or Inf has float32 scale NaN, block scales NaN and codes 0. If n is odd, the last half
    byte is 0. Raises ValueError if x is not float or has no axis. NVFP4 is NVIDIA's; per token: Composer 2, §6.1."""
    check_nvfp4(x, scale, division)
    groups = _split(x, -1, 16)
    largest = groups.abs().amax(-1)
    amax = largest.amax(-1, keepdim=True) if scale == "token" else F.pad(largest.flatten(), (0, 1)).amax()
    s = amax / (E4M3_MAX * 6)  # s = amax / (448 · 6)
    s = torch.where(s.isfinite(), s, torch.nan)
    # block = (largest of 16 values / 6) / s
    blocks = e4m3_encode(torch.where(s == 0, 0.0, _divide(_divide(largest, 6.0, division), s, division)))
    step = e4m3_decode(blocks) * s
    codes = e2m1_encode(_divide(groups, step[..., None], division))  # value = x / (block · s)
    is_zero = ~(step > 0)
    if is_zero.any():
        codes.masked_fill_(is_zero[..., None], 0)
    codes = F.pad(_join(codes, -1, x.shape), (0, x.shape[-1] % 2))
    return codes[..., ::2] | (codes[..., 1::2] << 4), blocks, s


def nvfp4_dequantize(
    packed: UInt8[Tensor, "*rows half"],
    blocks: UInt8[Tensor, "*rows blocks"],
    scale: Float[Tensor, "..."],
    size: int | None = None,
) -> Float[Tensor, "*rows n"]:
    """float32, value · (block · scale); pass `size` = n if n is odd. Raises ValueError unless there is one block scale
    per 16 values, and either one float32 scale or one per token."""
    n = 2 * packed.shape[-1] if size is None else size
    if (n + 1) // 2 != packed.shape[-1]:
        raise ValueError(f"size must be {2 * packed.shape[-1]} or one less for {packed.shape[-1]} bytes; got {n}")
    if scale.ndim:
        expect("scale", scale, "float", *packed.shape[:-1], 1)
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)[..., :n]
    _check_scales("blocks", blocks, codes.shape, -1, 16)
    step = e4m3_decode(blocks) * scale
    return _join(_split(e2m1_decode(codes), -1, 16) * step[..., None], -1, codes.shape)  # x ≈ value · block · s


def blockwise_fp8_quantize(
    x: Float[Tensor, "*rows n"], block: tuple[int, int] = (1, 128)
) -> tuple[UInt8[Tensor, "*rows n"], Float[Tensor, "*blocks"]]:
    """E4M3 codes, and a float32 scale amax / 448 per `block` of the last two axes: (1, 128) for activations, (128, 128)
    for weights. Blocks at the ends may be short. A block with NaN or Inf becomes NaN. Raises ValueError for fewer than
    two axes. DeepSeek-V3, §3.3.2."""
    check_blocks(x, block)
    wide = x.float()
    rows, cols = wide.shape[-2:]
    padded = F.pad(wide, (0, -cols % block[1], 0, -rows % block[0]))
    tiles = padded.unflatten(-1, (-1, block[1])).unflatten(-3, (-1, block[0]))  # … R r C c
    scale = tiles.abs().amax((-3, -1)) / E4M3_MAX  # s = amax / 448
    scale = torch.where(scale.isfinite(), scale, torch.nan)
    divisor = scale[..., :, None, :, None]
    codes = e4m3_encode(torch.where(divisor == 0, 0.0, tiles / divisor))  # value = x / s
    return codes.flatten(-4, -3).flatten(-2, -1)[..., :rows, :cols], scale


def blockwise_fp8_dequantize(
    codes: UInt8[Tensor, "*rows n"], scale: Float[Tensor, "*blocks"], block: tuple[int, int] = (1, 128)
) -> Float[Tensor, "*rows n"]:
    """float32, value · scale. Raises ValueError unless there is one scale per block."""
    rows, cols = codes.shape[-2:]
    expect("scale", scale, "float", *codes.shape[:-2], -(-rows // block[0]), -(-cols // block[1]))
    wide = scale.repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)[..., :rows, :cols]
    return e4m3_decode(codes) * wide  # x ≈ value · s


def _round_nvfp4(
    x: Tensor, axis: int, scale: Literal["token", "tensor"] = "token", division: Literal["ieee", "fast"] = "ieee"
) -> Tensor:
    last = x.movedim(axis, -1)
    return nvfp4_dequantize(*nvfp4_quantize(last, scale, division), size=last.shape[-1]).movedim(-1, axis)


FORMATS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "float32": lambda x, axis: x.float(),
    "bfloat16": lambda x, axis: x.bfloat16().float(),
    "mxfp8": lambda x, axis: mxfp8_dequantize(*mxfp8_quantize(x, axis), axis),
    "nvfp4-token": lambda x, axis: _round_nvfp4(x, axis),
    "nvfp4-tensor": lambda x, axis: _round_nvfp4(x, axis, scale="tensor"),
    "nvfp4-fast": lambda x, axis: _round_nvfp4(x, axis, division="fast"),
    "fp8": lambda x, axis: blockwise_fp8_dequantize(*blockwise_fp8_quantize(x.movedim(axis, -1))).movedim(-1, axis),
}
"""Formats of a product's operands. Each entry maps a matrix and the axis that the product sums over to the rounded
matrix in float32."""


def rounded(x: Float[Tensor, "*shape"], form: str, axis: int = -1, weight: bool = False) -> Float[Tensor, "*shape"]:
    """x rounded to the format `form` for a product that sums over `axis`, as float32. A weight has one FP8 scale per
    128 × 128 block, so one set of codes serves both axes (DeepSeek-V3, §3.3.2). Raises ValueError for an unknown
    format."""
    if form not in FORMATS:
        raise ValueError(f"form must be one of {', '.join(FORMATS)}; got {form!r}")
    if not x.numel():  # an expert without tokens
        return x.float()
    if weight and form == "fp8":
        return blockwise_fp8_dequantize(*blockwise_fp8_quantize(x, (128, 128)), (128, 128))
    return FORMATS[form](x, axis)


def linear(
    x: Float[Tensor, "N D"], weight: Float[Tensor, "O D"], forward: str = "nvfp4-token", backward: str = "mxfp8"
) -> Float[Tensor, "N O"]:
    """x @ weightᵀ with both operands in the format `forward`, and gradients from products in the format `backward`.
    Every operand is quantised again along the axis that its product sums over. Returns the dtype of x; sums are in
    float32, or in float64 for float64 inputs. Composer 2, §6.1."""
    expect("x", x, "float", "N", "D")
    expect("weight", weight, "float", "O", x.shape[1])
    for form in (forward, backward):
        if form not in FORMATS:
            raise ValueError(f"forward and backward must each be one of {', '.join(FORMATS)}; got {form!r}")
    return Linear.apply(x, weight, forward, backward)


class Linear(torch.autograd.Function):
    """The three products of `linear`, each of operands that are quantised for it."""

    @staticmethod
    def forward(ctx, x, weight, forward, backward):
        ctx.save_for_backward(x, weight)
        ctx.form = backward
        # y = x Wᵀ
        return _product(rounded(x, forward, 1), rounded(weight, forward, 1, weight=True).T, x.dtype)

    @staticmethod
    def backward(ctx, grad):
        (x, weight), form = ctx.saved_tensors, ctx.form
        grad_x = (  # dx = dy W
            _product(rounded(grad, form, 1), rounded(weight, form, 0, weight=True), x.dtype)
            if ctx.needs_input_grad[0]
            else None
        )
        grad_w = (  # dW = dyᵀ x
            _product(rounded(grad, form, 0).T, rounded(x, form, 0), weight.dtype) if ctx.needs_input_grad[1] else None
        )
        return grad_x, grad_w, None, None


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b of float32 matrices whose operands had this dtype before they were rounded."""
    return a.double() @ b.double() if dtype == torch.float64 else (a @ b).to(dtype)


def grouped_linear(
    x: Float[Tensor, "N D"],
    weight: Float[Tensor, "E O D"],
    ends: Int[Tensor, " E"],
    forward: str = "nvfp4-token",
    backward: str = "mxfp8",
) -> Float[Tensor, "N O"]:
    """Every expert's `linear` on its tokens. x is sorted by expert; expert e has rows ends[e − 1] to ends[e] (no rows
    if they are equal). No block of tokens spans two experts. Raises ValueError unless ends rise to N. Composer 2,
    §6.1."""
    expect("weight", weight, "float", "E", "O", x.shape[-1])
    expect("ends", ends, "int", len(weight))
    counts = torch.diff(ends, prepend=ends.new_zeros(1)).tolist()
    if min(counts) < 0 or sum(counts) != len(x):
        raise ValueError(f"ends must rise to the {len(x)} tokens of x; got {ends.tolist()}")
    return torch.cat(
        [
            linear(rows, expert_weight, forward, backward)
            for rows, expert_weight in zip(x.split(counts), weight, strict=True)
        ]
    )


def experts_swiglu(
    x: Float[Tensor, "N D"],
    gates: Float[Tensor, "N K"],
    w13: Float[Tensor, "E J D"],
    w2: Float[Tensor, "E D I"],
    experts: Int[Tensor, "N K"],
    forward: str = "nvfp4-token",
    backward: str = "mxfp8",
) -> Float[Tensor, "N D"]:
    """Σ_k g_k · W2_e(silu(W1_e x) · W3_e x) over a token's experts e, with all three products quantised; J = 2I, W1
    above W3. Values between the products and the gates are not quantised. Raises ValueError for other shapes."""
    expect("gates", gates, "float", len(x), "K")
    expect("experts", experts, "int", *gates.shape)
    expect("w2", w2, "float", len(w13), x.shape[1], w13.shape[1] // 2)
    order = experts.flatten().argsort(stable=True)
    ends = experts.flatten().bincount(minlength=len(w13)).cumsum(0)
    token = order // gates.shape[1]
    gate, up = grouped_linear(x[token], w13, ends, forward, backward).chunk(2, -1)
    y = grouped_linear(F.silu(gate) * up, w2, ends, forward, backward)  # W2_e(silu(W1_e x) · W3_e x)
    return torch.zeros_like(x).index_add(0, token, y * gates.flatten()[order, None])  # Σ_k g_k · y_k


# Checks of what a format accepts; kernels/quant.py uses them too.


def check_mxfp8(x: Tensor, axis: int, mode: str, matrix: bool = False) -> None:
    _check_axis(x, axis)
    if mode not in MODES:
        raise ValueError(f"mode must be rceil, floor, ceil or even; got {mode!r}")
    if matrix and x.ndim != 2:
        raise ValueError(f"x must be a matrix; got shape {list(x.shape)}")


def check_nvfp4(x: Tensor, scale: str, division: str) -> None:
    _check_axis(x, -1)
    for name, value, allowed in (("scale", scale, ("token", "tensor")), ("division", division, ("ieee", "fast"))):
        if value not in allowed:
            raise ValueError(f"{name} must be {allowed[0]} or {allowed[1]}; got {value!r}")
    if not x.shape[-1]:
        raise ValueError(f"the last axis of x must not be empty; got shape {list(x.shape)}")


def check_blocks(x: Tensor, block: tuple[int, int]) -> None:
    _check_axis(x, -1)
    if x.ndim < 2 or min(block) < 1:
        raise ValueError(
            f"x must have rows and columns, and block sizes must be at least 1; got {list(x.shape)} and {block}"
        )


def _check_axis(x: Tensor, axis: int) -> None:
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise ValueError(f"x must be a float tensor; got {getattr(x, 'dtype', type(x).__name__)}")
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"x must have an axis {axis}; got shape {list(x.shape)}")


def _split(x: Tensor, axis: int, size: int) -> Float[Tensor, "... blocks size"]:
    """x in float32, with `axis` moved last and cut into blocks; the last block is padded with zeros."""
    last = x.movedim(axis, -1).float()
    return F.pad(last, (0, -last.shape[-1] % size)).unflatten(-1, (-1, size)).contiguous()


def _join(groups: Tensor, axis: int, shape: torch.Size) -> Tensor:
    """The reverse of `_split`, in the dtype of its argument."""
    return groups.flatten(-2)[..., : shape[axis]].movedim(-1, axis)


def _check_scales(name: str, scales: Tensor, shape: torch.Size, axis: int, size: int) -> None:
    blocks = list(shape)
    blocks[axis] = -(-blocks[axis] // size)
    expect(name, scales, "int", *blocks)


def _divide(x: Tensor, divisor: Tensor | float, division: str) -> Tensor:
    return x / divisor if division == "ieee" else x * (1 / torch.as_tensor(divisor, dtype=torch.float32))


@dataclass(frozen=True)
class Demo:
    """Random activations with outliers, rounded to each format."""

    tokens: int = 64
    """Tokens of a sequence."""
    width: int = 256
    """Activations per token."""
    outlier: float = 100.0
    """How many times larger the last token is."""
    seed: int = 0
    """Seed of the activations."""


def demo(config: Demo = Demo(), log: Callable[..., None] = lambda *_, **__: None) -> dict[str, float]:
    """Signal-to-quantisation-noise ratio of each format, in dB, and the share of earlier tokens' numbers that change
    when the last token does. That share is zero unless all tokens share a scale."""
    generator = torch.Generator().manual_seed(config.seed)
    x = torch.randn(config.tokens, config.width, generator=generator)
    scaled_x = x.clone()
    scaled_x[-1] *= config.outlier
    metrics: dict[str, float] = {}
    for step, form in enumerate(FORMATS, 1):
        rounded_x = rounded(x, form)
        noise = (rounded_x - x).double().square().sum()
        metrics[f"sqnr_{form}"] = (10 * (x.double().square().sum() / noise).log10()).item() if noise else float("inf")
        metrics[f"leak_{form}"] = (rounded(scaled_x, form)[:-1] != rounded_x[:-1]).double().mean().item()
        log(step, len(FORMATS), **metrics)
    return metrics


if __name__ == "__main__":
    for name, value in demo().items():
        print(f"{name:20s} {value:.4f}")
