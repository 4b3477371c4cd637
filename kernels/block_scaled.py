"""Products whose codes and scales go into the tensor cores as they are: MXFP8 and NVFP4 on Blackwell, plain and grouped
by experts.

    codes     [rows, K] in tiles of 128 rows; a dot takes BK of the sum
    scales    tiles of 128 rows by 4 blocks in the tensor core's own layout (kernels/swizzle.py): loaded as 512
              contiguous bytes, and reshaped
              to [rows, blocks] only in name; the compiler recognises this, and copies them from shared to tensor memory
              unchanged
    NVFP4     the float32 scale of a token is applied after the sum, in the epilogue

`tl.dot_scaled` becomes `tcgen05.mma` with `kind::mxf8f6f4.block_scale.block32` for MXFP8, and with
`kind::mxf4nvf4.block_scale.block16` for NVFP4 (tests/kernels/test_compiled_native.py reads it in the compiled code).
The sum is kept in float32 in tensor memory.

Experts' rows start at multiples of 128, so that no tile of scales belongs to two experts: `kernels/expert_rows.py`
sorts tokens like that, and `kernels/orientations.py` quantises them in their places. `kernels/gemm.py` and
`kernels/grouped_gemm.py` choose this way or the expanded one.

Neither persistent nor warp-specialised: both overlap a tile's epilogue with the next tile's loads, and change no byte
and no operation of what is counted here; whether they gain time only a GPU can tell.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import INTERPRETED, configs, fitting
from .operands import Operand
from .tiles import banded, expert_tile, store_tile

__all__ = ["matmul", "rows_of_experts", "weights_of_experts"]

BM = 128
"""Rows of a tile: those of a tile of scales, and of the tensor core."""
# BN, and BK in bytes; warps; stages. With BN = 256, Triton 3.9 would lay two tiles of scales out in shared memory such
# that they had to pass through registers.
TILES = (
    {"BN": 128, "BK": 128},
    ({"BN": 128, "BK": 128}, 4, 4),
    ({"BN": 128, "BK": 128}, 8, 4),
    ({"BN": 128, "BK": 256}, 4, 3),
)


@triton.jit
def scale_tiles(scales, first, last, k, last_k, across, NONE: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr):
    """[128 · ROWS, 4 · WIDE] scales of the tiles from (first, k) on, NONE (a zero of their type) beyond last_k. Beyond
    the last row of tiles it is read again: nobody stores what it scales. The compiler copies scales to tensor memory as
    they are (`tcgen05.cp`) if they are loaded like this: two axes, whole tiles along the inner one, and then named
    again in this order."""
    i = tl.minimum(first + tl.arange(0, ROWS), last).to(tl.int64)
    offsets = tl.arange(0, WIDE * 512)
    inside = offsets < (last_k + 1 - k) * 512
    values = tl.load(
        scales + (i[:, None] * across + k) * 512 + offsets[None, :],
        tl.broadcast_to(inside[None, :], (ROWS, WIDE * 512)),
        other=NONE,
    )
    return tl.reshape(tl.trans(tl.reshape(values, (ROWS, WIDE, 32, 4, 4)), 0, 3, 2, 1, 4), (ROWS * 128, WIDE * 4))


@triton.jit
def scaled_product(
    a,
    a_scales,
    b,
    b_scales,
    m,
    m_here,
    n,
    n_here,
    first_m,
    last_m,
    first_n,
    last_n,
    begin,
    end,
    a_stride,
    b_stride,
    a_across,
    b_across,
    FORM: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """float32 [BM, BN]: Σ over bytes begin ≤ k < end of the rows of a and b, begin a multiple of 128; a byte is one
    number of MXFP8, or two of NVFP4, and BK counts bytes. Rows and columns begin at tiles of scales first_m and
    first_n; last_m and last_n are the last ones."""
    TILE: tl.constexpr = 32 if FORM == 3 else 128  # bytes whose scales are in one tile
    CODE: tl.constexpr = 0 if FORM == 3 else 0.0  # zeros of the types that are loaded
    SCALE: tl.constexpr = 0.0 if FORM == 3 else 0
    y = tl.zeros((BM, BN), tl.float32)
    last_k = tl.cdiv(end, TILE) - 1
    for start in range(begin, end, BK):
        k = start + tl.arange(0, BK)
        inside = k < end
        x = tl.load(a + m[:, None] * a_stride + k[None, :], m_here[:, None] & inside[None, :], other=CODE)
        z = tl.load(b + n[None, :] * b_stride + k[:, None], n_here[None, :] & inside[:, None], other=CODE)
        s = scale_tiles(a_scales, first_m, last_m, start // TILE, last_k, a_across, SCALE, BM // 128, BK // TILE)
        t = scale_tiles(b_scales, first_n, last_n, start // TILE, last_k, b_across, SCALE, BN // 128, BK // TILE)
        if FORM == 3:
            y = tl.dot_scaled(x, s, "e2m1", z, t, "e2m1", y)
        else:
            y = tl.dot_scaled(x, s, "e4m3", z, t, "e4m3", y)
    return y


@triton.autotune(
    configs=configs(*TILES),
    key=["M", "N", "K", "FORM"],
    prune_configs_by=fitting("block_scaled.scaled_matmul_kernel", "FORM"),
)
@triton.jit
def scaled_matmul_kernel(
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
    a_stride,
    b_stride,
    a_across,
    b_across,
    FORM: tl.constexpr,
    UPCAST: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """out [M, N] = A Bᵀ."""
    row, column = banded(tl.program_id(0), tl.cdiv(M, BM), tl.cdiv(N, BN))
    m, n = row.to(tl.int64) * BM + tl.arange(0, BM), column.to(tl.int64) * BN + tl.arange(0, BN)
    y = scaled_product(
        a,
        a_scales,
        b,
        b_scales,
        m,
        m < M,
        n,
        n < N,
        row * (BM // 128),
        (M + 127) // 128 - 1,
        column * (BN // 128),
        (N + 127) // 128 - 1,
        0,
        K,
        a_stride,
        b_stride,
        a_across,
        b_across,
        FORM,
        BM,
        BN,
        BK,
    )
    store_tile(out, y, a_whole, b_whole, m, m, m < M, n, n < N, N, FORM, UPCAST)


@triton.autotune(
    configs=configs(*TILES), key=["O", "K", "FORM"], prune_configs_by=fitting("block_scaled.scaled_rows_kernel", "FORM")
)
@triton.jit
def scaled_rows_kernel(
    a,
    a_scales,
    a_whole,
    b,
    b_scales,
    b_whole,
    ends,
    out_ends,
    out,
    P,
    O,
    K,
    E,
    b_step,
    b_scales_step,
    a_stride,
    b_stride,
    a_across,
    b_across,
    EP: tl.constexpr,
    FORM: tl.constexpr,
    UPCAST: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Rows of a [P, K], of which expert e has those up to ends[e], all multiples of 128, times their experts' b [E, O,
    K]. The results of expert e are the rows of out up to out_ends[e]: the same places, or closed up."""
    across = tl.cdiv(O, BN)
    is_valid, expert, first, last, column = expert_tile(tl.program_id(0), ends, E, across, EP, BM)
    if is_valid:
        m, n = first + tl.arange(0, BM), column.to(tl.int64) * BN + tl.arange(0, BN)
        y = scaled_product(
            a,
            a_scales,
            b + expert * b_step,
            b_scales + expert * b_scales_step,
            m,
            m < P,
            n,
            n < O,
            first // 128,
            P // 128 - 1,
            column * (BN // 128),
            (O + 127) // 128 - 1,
            0,
            K,
            a_stride,
            b_stride,
            a_across,
            b_across,
            FORM,
            BM,
            BN,
            BK,
        )
        begin, out_begin = tl.zeros((), tl.int64), tl.zeros((), tl.int64)
        if expert > 0:
            begin, out_begin = tl.load(ends + expert - 1).to(tl.int64), tl.load(out_ends + expert - 1).to(tl.int64)
        r = m - begin + out_begin
        store_tile(
            out, y, a_whole, b_whole + expert * O, m, r, r < tl.load(out_ends + expert), n, n < O, O, FORM, UPCAST
        )


@triton.autotune(
    configs=configs(*TILES),
    key=["O", "D", "FORM"],
    prune_configs_by=fitting("block_scaled.scaled_weights_kernel", "FORM"),
)
@triton.jit
def scaled_weights_kernel(
    a,
    a_scales,
    b,
    b_scales,
    bounds,
    out,
    O,
    D,
    a_stride,
    b_stride,
    a_across,
    b_across,
    FORM: tl.constexpr,
    UPCAST: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """out [E, O, D]: a bᵀ over columns bounds[e] to bounds[e + 1] of a [O, P] and b [D, P]; zeros for an expert without
    columns."""
    down, across = tl.cdiv(O, BM), tl.cdiv(D, BN)
    e = (tl.program_id(0) // (down * across)).to(tl.int64)
    row, column = banded(tl.program_id(0) % (down * across), down, across)
    m, n = row.to(tl.int64) * BM + tl.arange(0, BM), column.to(tl.int64) * BN + tl.arange(0, BN)
    y = scaled_product(
        a,
        a_scales,
        b,
        b_scales,
        m,
        m < O,
        n,
        n < D,
        row * (BM // 128),
        (O + 127) // 128 - 1,
        column * (BN // 128),
        (D + 127) // 128 - 1,
        tl.multiple_of(tl.load(bounds + e).to(tl.int32), 128),
        tl.multiple_of(tl.load(bounds + e + 1).to(tl.int32), 128),
        a_stride,
        b_stride,
        a_across,
        b_across,
        FORM,
        BM,
        BN,
        BK,
    )
    store_tile(out + e * O * D, y, a, b, m, m, m < O, n, n < D, D, FORM, UPCAST)


def typed(operand: Operand) -> tuple[Tensor, Tensor, Tensor]:
    """An operand's tensors as their formats: the tensor core takes a tile from shared memory only if nothing
    reinterprets it on the way."""
    data, scales, token_scales = operand.tensors()
    if operand.token_scales is not None:
        return data, scales.view(torch.float8_e4m3fn), token_scales
    return data.view(torch.float8_e4m3fn), scales, token_scales


def matmul(a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
    """A Bᵀ of two operands with swizzled scales, [M, K] and [N, K] → [M, N]."""
    M, N = len(a.data), len(b.data)
    out = torch.empty(M, N, dtype=dtype, device=a.data.device)
    if out.numel():
        grid = lambda tile: (triton.cdiv(M, BM) * triton.cdiv(N, tile["BN"]),)
        strides = a.data.stride(0), b.data.stride(0), a.across(), b.across()
        scaled_matmul_kernel[grid](
            *typed(a),
            *typed(b),
            out,
            M,
            N,
            a.data.shape[1],
            *strides,
            FORM=3 if a.token_scales is not None else 2,
            UPCAST=INTERPRETED,
            BM=BM,
        )
    return out


def rows_of_experts(a: Operand, b: Operand, ends: Tensor, out_ends: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """Rows of a [P, K], expert e's up to ends[e], a multiple of 128, times b [E, O, K] → [rows, O], expert e's up to
    out_ends[e]."""
    P, (E, O) = len(a.data), b.data.shape[:2]
    out = torch.empty(rows, O, dtype=dtype, device=a.data.device)
    if out.numel():
        assert b.scales is not None
        grid = lambda tile: (P // BM * triton.cdiv(O, tile["BN"]),)
        scaled_rows_kernel[grid](
            *typed(a),
            *typed(b),
            ends,
            out_ends,
            out,
            P,
            O,
            a.data.shape[1],
            E,
            b.data.stride(0),
            b.scales.stride(0),
            a.data.stride(0),
            b.data.stride(1),
            a.across(),
            b.across(),
            EP=triton.next_power_of_2(E),
            FORM=3 if a.token_scales is not None else 2,
            UPCAST=INTERPRETED,
            BM=BM,
        )
    return out


def weights_of_experts(a: Operand, b: Operand, bounds: Tensor, dtype: torch.dtype) -> Tensor:
    """a bᵀ over each expert's columns, bounds[e] to bounds[e + 1] of a [O, P] and b [D, P] → [E, O, D]."""
    O, D, E = len(a.data), len(b.data), len(bounds) - 1
    out = torch.empty(E, O, D, dtype=dtype, device=a.data.device)
    if out.numel():
        grid = lambda tile: (E * triton.cdiv(O, BM) * triton.cdiv(D, tile["BN"]),)
        strides = a.data.stride(0), b.data.stride(0), a.across(), b.across()
        scaled_weights_kernel[grid](
            *typed(a)[:2], *typed(b)[:2], bounds, out, O, D, *strides, FORM=2, UPCAST=INTERPRETED, BM=BM
        )
    return out
