"""Triton kernels behind `ref.quant.linear`: products whose operands are read in a few bits.

Every operand is [rows, K], contiguous along K, which the product sums over. `product` computes a tile of A Bᵀ in four forms:

    PLAIN    bfloat16 or float32
    FP8      E4M3 codes and float32 scales per 1 × 128, or per 128 × 128 of a weight. Codes go to the tensor cores unchanged. Hopper's
             accumulate with about 22 bits, so every 128 of K are a new dot, scaled and added in float32
    MXFP8    E4M3 codes, a power of two per 32: a value times its scale is exact in bfloat16, and the dot runs in bfloat16
    NVFP4    E2M1 codes, an E4M3 scale per 16: their product is exact in bfloat16 too; the token's scale is applied after the sum

`kernels/grouped_gemm.py` uses the same tile for experts.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ref.checks import expect

from .bits import decode_e2m1, decode_e4m3, power_of_two, round_bfloat16
from .launch import INTERPRETED, configs, fitting, need
from .quant import blockwise_fp8_quantize, mxfp8_quantize, nvfp4_quantize

__all__ = ["FORMS", "Operand", "linear", "matmul", "operand"]

FORMS = {"float32": 0, "bfloat16": 0, "fp8": 1, "mxfp8": 2, "nvfp4-token": 3}
"""The formats that the kernels support, by their names in `ref.quant.FORMATS`."""


@triton.jit
def operand_tile(data, scales, row, here, k, inside, stride, step, scale_stride, FORM: tl.constexpr, UPCAST: tl.constexpr):
    """[rows, BK] of an operand, including the scales that must be applied before the dot. UPCAST: in float32, since the interpreter's
    bfloat16 products are wrong."""
    mask = here[:, None] & inside[None, :]
    if FORM == 3:
        byte = tl.load(data + row[:, None] * stride + (k // 2)[None, :], mask, other=0).to(tl.int32)
        scale = decode_e4m3(tl.load(scales + row[:, None] * scale_stride + (k // 16)[None, :], mask, other=0))
        value = decode_e2m1((byte >> (4 * (k % 2))[None, :]) & 15) * scale
        tile = value if UPCAST else value.to(tl.bfloat16)
    elif FORM == 2:
        byte = tl.load(scales + row[:, None] * scale_stride + (k // 32)[None, :], mask, other=127).to(tl.int32)
        value = decode_e4m3(tl.load(data + row[:, None] * stride + k[None, :], mask, other=0)) * power_of_two(byte - 127)
        tile = value if UPCAST else value.to(tl.bfloat16)
    else:
        value = tl.load(data + row[:, None] * stride + k[None, :] * step, mask, other=0)
        if FORM == 1:
            tile = decode_e4m3(value) if UPCAST else value.to(tl.float8e4nv, bitcast=True)
        else:
            tile = value.to(tl.float32) if UPCAST else value
    return tile  # only one return: a kernel's returns must agree in type, also those that no form reaches


@triton.jit
def product(
    a,
    a_scales,
    b,
    b_scales,
    m,
    m_here,
    n,
    n_here,
    first_n,
    begin,
    end,
    sa,
    ka,
    la,
    sb,
    kb,
    lb,
    FORM: tl.constexpr,
    BBLOCK: tl.constexpr,
    UPCAST: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """float32 [BM, BN]: Σ a[m, k] b[n, k] over begin ≤ k < end. FORM FP8: begin is a multiple of 128, and BBLOCK rows of b share a scale."""
    STEP: tl.constexpr = 128 if FORM == 1 else BK
    y = tl.zeros((BM, BN), tl.float32)
    for start in range(begin, end, STEP):
        k = start + tl.arange(0, STEP)
        x = operand_tile(a, a_scales, m, m_here, k, k < end, sa, ka, la, FORM, UPCAST)
        z = tl.trans(operand_tile(b, b_scales, n, n_here, k, k < end, sb, kb, lb, FORM, UPCAST))
        if FORM == 1:
            part = tl.dot(x, z, input_precision="ieee")
            over = tl.load(a_scales + m * la + start // 128, m_here, other=0.0)
            if BBLOCK % BN == 0:  # one scale of b for the whole tile
                y += part * (over * tl.load(b_scales + (first_n // BBLOCK) * lb + start // 128))[:, None]
            else:
                y += part * over[:, None] * tl.load(b_scales + (n // BBLOCK) * lb + start // 128, n_here, other=0.0)[None, :]
        else:
            y = tl.dot(x, z, y, input_precision="ieee")
    return y


@triton.jit
def store_tile(out, y, a_whole, b_whole, m, m_here, n, n_here, N, FORM: tl.constexpr, UPCAST: tl.constexpr):
    """y, scaled by the tokens' scales (NVFP4), to rows m and columns n of out [·, N]."""
    if FORM == 3:
        y = y * tl.load(a_whole + m, m_here, other=0.0)[:, None] * tl.load(b_whole + n, n_here, other=0.0)[None, :]
    if UPCAST and out.dtype.element_ty == tl.bfloat16:
        y = round_bfloat16(y)
    tl.store(out + m[:, None] * N + n[None, :], y.to(out.dtype.element_ty), m_here[:, None] & n_here[None, :])


@triton.autotune(
    configs=configs(
        {"BM": 64, "BN": 64, "BK": 128},
        *(
            ({"BM": m, "BN": n, "BK": k}, w, s)
            for m, n, k, w, s in (
                (128, 128, 64, 4, 4),
                (128, 128, 128, 8, 3),
                (128, 128, 64, 8, 3),
                (64, 128, 64, 4, 4),
                (128, 64, 64, 4, 4),
                (64, 64, 64, 4, 3),
            )
        ),
    ),
    key=["M", "N", "K", "FORM"],
    prune_configs_by=fitting("gemm.matmul_kernel", "FORM", "BBLOCK"),
)
@triton.jit
def matmul_kernel(
    a,
    a_scales,
    a_whole,
    b,
    b_scales,
    b_whole,
    out,
    M,
    N,
    K,
    sa,
    ka,
    la,
    sb,
    kb,
    lb,
    FORM: tl.constexpr,
    BBLOCK: tl.constexpr,
    UPCAST: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """out [M, N] = A Bᵀ. Tiles go down eight rows before the next column starts, so that their inputs stay in the L2 cache."""
    down, across = tl.cdiv(M, BM), tl.cdiv(N, BN)
    band = tl.program_id(0) // (8 * across)
    rows = tl.minimum(down - band * 8, 8)
    within = tl.program_id(0) % (8 * across)
    m = (band * 8 + within % rows).to(tl.int64) * BM + tl.arange(0, BM)
    first_n = (within // rows).to(tl.int64) * BN
    n = first_n + tl.arange(0, BN)
    y = product(a, a_scales, b, b_scales, m, m < M, n, n < N, first_n, 0, K, sa, ka, la, sb, kb, lb, FORM, BBLOCK, UPCAST, BM, BN, BK)
    store_tile(out, y, a_whole, b_whole, m, m < M, n, n < N, N, FORM, UPCAST)


@dataclass(frozen=True)
class Operand:
    """One side of a product: rows [*, R, K] in a format."""

    form: str
    """Its name in FORMS."""
    data: Tensor
    """Numbers, codes, or two codes per byte: [*, R, K] or [*, R, K / 2]."""
    size: int
    """K."""
    scales: Tensor | None = None
    """Scales along K: [*, R / block, K / 128], [*, R, K / 32] or [*, R, K / 16]."""
    whole: Tensor | None = None
    """NVFP4: one scale per row [*, R]."""
    block: int = 1
    """FP8: how many rows share a scale."""

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """data, scales and whole as kernel arguments; data is a placeholder for those that the format does not have."""
        return tuple(self.data if t is None else t for t in (self.data, self.scales, self.whole))

    def strides(self) -> tuple[int, int, int]:
        """Strides of a row, of K, and of a row of scales."""
        return *self.data.stride()[-2:], self.tensors()[1].stride(-2)


def operand(x: Tensor, form: str, axis: int = -1, weight: bool = False) -> Operand:
    """x [*, R, K] (axis −1) or [*, K, R] (axis −2), quantised along K. A weight has one FP8 scale per 128 × 128 block."""
    rows = x if axis == -1 else x.mT
    size = rows.shape[-1]
    if FORMS[form] == 0:
        return Operand(form, rows.to(getattr(torch, form)), size)
    if form == "mxfp8":
        codes, scales = (t if axis == -1 else t.mT for t in mxfp8_quantize(x, axis))
        return Operand(form, codes.contiguous(), size, scales.contiguous())
    if form == "fp8":
        block = 128 if weight else 1
        codes, scales = blockwise_fp8_quantize(rows, (block, 128))
        return Operand(form, codes, size, scales, block=block)
    packed, scales, whole = nvfp4_quantize(rows)
    return Operand(form, packed, size, scales, whole[..., 0])


def matmul(a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
    """A Bᵀ of two operands of one form, [M, K] and [N, K] → [M, N]. `a` has one row per token: only b's rows may share scales."""
    if a.form == "float32" or a.form == "bfloat16" and dtype == torch.bfloat16:
        return (a.data @ b.data.T).to(dtype)  # the library's product
    M, N = len(a.data), len(b.data)
    out = torch.empty(M, N, dtype=dtype, device=a.data.device)
    if out.numel():
        grid = lambda tile: (triton.cdiv(M, tile["BM"]) * triton.cdiv(N, tile["BN"]),)
        matmul_kernel[grid](
            *a.tensors(), *b.tensors(), out, M, N, a.size, *a.strides(), *b.strides(), FORM=FORMS[a.form], BBLOCK=b.block, UPCAST=INTERPRETED
        )
    return out


class Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, forward, backward):
        ctx.save_for_backward(x, weight)
        ctx.form = backward
        return matmul(operand(x, forward), operand(weight, forward, weight=True), x.dtype)

    @staticmethod
    def backward(ctx, dy):
        (x, weight), form = ctx.saved_tensors, ctx.form
        dx = matmul(operand(dy, form), operand(weight, form, -2, True), x.dtype) if ctx.needs_input_grad[0] else None
        dw = matmul(operand(dy, form, -2), operand(x, form, -2), weight.dtype) if ctx.needs_input_grad[1] else None
        return dx, dw, None, None


def check_forms(forward: str, backward: str) -> None:
    for form in (forward, backward):
        if form not in FORMS:
            raise ValueError(f"forward and backward must each be one of {', '.join(FORMS)}; got {form!r}")


def linear(x: Tensor, weight: Tensor, forward: str = "nvfp4-token", backward: str = "mxfp8") -> Tensor:
    """Same as `ref.quant.linear`, for the formats in FORMS."""
    expect("x", x, "float", "N", "D")
    expect("weight", weight, "float", "O", x.shape[1])
    check_forms(forward, backward)
    need(x)
    return Linear.apply(x, weight, forward, backward)
