"""Triton kernels behind `ref.quant.linear`: products whose operands are read in a few bits.

Every operand is [rows, K], contiguous along K, which the product sums over (kernels/operands.py). On Blackwell,
`kernels/block_scaled.py` takes those of MXFP8 and NVFP4. Elsewhere, `product` computes a tile of A Bᵀ in four forms:

    PLAIN    bfloat16 or float32
    FP8      E4M3 codes and float32 scales per 1 × 128, or per 128 × 128 of a weight. Codes go to the tensor cores
             unchanged. Hopper's
             keep 14 bits of a sum, so every 128 of K are a new dot, scaled and added in float32 (kernels/gate.py)
    MXFP8    E4M3 codes, a power of two per 32: a value times its scale is exact in bfloat16, and the dot runs in
             bfloat16
    NVFP4    E2M1 codes, an E4M3 scale per 16: their product is exact in bfloat16 too; the token's scale is applied
             after the sum

`kernels/grouped_gemm.py` uses the same tile for experts.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ref.checks import expect

from . import block_scaled
from .bits import decode_e2m1, decode_e4m3, power_of_two
from .launch import INTERPRETED, configs, fitting, need
from .operands import FORMS, Operand, make_operands, operand, paired, restored, saved
from .tiles import banded, store_tile

__all__ = ["FORMS", "Operand", "linear", "matmul", "operand"]


@triton.jit
def operand_tile(
    data, scales, row, row_mask, k, inside, stride, step, scale_stride, FORM: tl.constexpr, UPCAST: tl.constexpr
):
    """[rows, BK] of an operand, including the scales that must be applied before the dot. UPCAST: in float32, since the
    interpreter's bfloat16 products are wrong."""
    mask = row_mask[:, None] & inside[None, :]
    if FORM == 3:
        byte = tl.load(data + row[:, None] * stride + (k // 2)[None, :], mask, other=0).to(tl.int32)
        scale = decode_e4m3(tl.load(scales + row[:, None] * scale_stride + (k // 16)[None, :], mask, other=0))
        value = decode_e2m1((byte >> (4 * (k % 2))[None, :]) & 15) * scale
        value = value if UPCAST else value.to(tl.bfloat16)
    elif FORM == 2:
        byte = tl.load(scales + row[:, None] * scale_stride + (k // 32)[None, :], mask, other=127).to(tl.int32)
        value = decode_e4m3(tl.load(data + row[:, None] * stride + k[None, :], mask, other=0)) * power_of_two(
            byte - 127
        )
        value = value if UPCAST else value.to(tl.bfloat16)
    elif FORM == 1:
        code = tl.load(data + row[:, None] * stride + k[None, :] * step, mask, other=0)
        value = decode_e4m3(code) if UPCAST else code.to(tl.float8e4nv, bitcast=True)
    else:
        value = tl.load(data + row[:, None] * stride + k[None, :] * step, mask, other=0)
        value = value.to(tl.float32) if UPCAST else value
    return value


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
    """float32 [BM, BN]: Σ a[m, k] b[n, k] over begin ≤ k < end. FORM FP8: begin is a multiple of 128, and BBLOCK rows
    of b share a scale."""
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
                y += (
                    part
                    * over[:, None]
                    * tl.load(b_scales + (n // BBLOCK) * lb + start // 128, n_here, other=0.0)[None, :]
                )
        else:
            y = tl.dot(x, z, y, input_precision="ieee")
    return y


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
    """out [M, N] = A Bᵀ."""
    row, column = banded(tl.program_id(0), tl.cdiv(M, BM), tl.cdiv(N, BN))
    m = row.to(tl.int64) * BM + tl.arange(0, BM)
    first_n = column.to(tl.int64) * BN
    n = first_n + tl.arange(0, BN)
    y = product(
        a,
        a_scales,
        b,
        b_scales,
        m,
        m < M,
        n,
        n < N,
        first_n,
        0,
        K,
        sa,
        ka,
        la,
        sb,
        kb,
        lb,
        FORM,
        BBLOCK,
        UPCAST,
        BM,
        BN,
        BK,
    )
    store_tile(out, y, a_whole, b_whole, m, m, m < M, n, n < N, N, FORM, UPCAST)


def matmul(a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
    """A Bᵀ of two operands of one form, [M, K] and [N, K] → [M, N]. `a` has one row per token: only b's rows may share
    scales."""
    if a.form == "float32" or a.form == "bfloat16" and dtype == torch.bfloat16:
        return (a.data @ b.data.T).to(dtype)  # the library's product
    if a.swizzled:
        return block_scaled.matmul(a, b, dtype)
    M, N = len(a.data), len(b.data)
    out = torch.empty(M, N, dtype=dtype, device=a.data.device)
    if out.numel():
        grid = lambda tile: (triton.cdiv(M, tile["BM"]) * triton.cdiv(N, tile["BN"]),)
        matmul_kernel[grid](
            *a.tensors(),
            *b.tensors(),
            out,
            M,
            N,
            a.size,
            *a.strides(),
            *b.strides(),
            FORM=FORMS[a.form],
            BBLOCK=b.block,
            UPCAST=INTERPRETED,
        )
    return out


class Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, forward, backward):
        """Where one kernel quantises both orientations, what the backward pass needs along columns is kept: a byte a
        number, and read once."""
        ctx.form, ctx.dtypes = backward, (x.dtype, weight.dtype)
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        is_joint = paired(forward, backward)
        x_rows, x_columns = make_operands(x, forward, backward if needs_weight and is_joint else None)
        w_rows, w_columns = make_operands(weight, forward, backward if needs_x and is_joint else None, weight=True)
        assert x_rows is not None and w_rows is not None
        tensors, ctx.operand_specs = saved(x_columns, w_columns)
        ctx.save_for_backward(*((None, None) if is_joint else (x, weight)), *tensors)
        return matmul(x_rows, w_rows, x.dtype)

    @staticmethod
    def backward(ctx, dy):
        (x, weight, *tensors), form = ctx.saved_tensors, ctx.form
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        x_columns, w_columns = restored(tuple(tensors), ctx.operand_specs)
        dy_rows, dy_columns = make_operands(dy.contiguous(), form if needs_x else None, form if needs_weight else None)
        dx = matmul(dy_rows, w_columns or operand(weight, form, -2, True), ctx.dtypes[0]) if dy_rows else None
        dw = matmul(dy_columns, x_columns or operand(x, form, -2), ctx.dtypes[1]) if dy_columns else None
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
