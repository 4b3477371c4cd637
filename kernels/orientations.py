"""Triton kernels that quantise an operand in both orientations while they read it once, or while they compute it.

A step of training sums over both axes of every operand: over the rows' axis in one product, over the columns' in
another. Each product wants codes that are contiguous along its sum, and a scale per block of it. Here one program reads
a piece and writes both. What it reads may be

    MATRIX       x [B, M, N]: weights
    GATHERED     row r is x[index[r] // K], and zeros where index[r] is −1: tokens, sorted by their experts
    WEIGHTED     the same, times gates[index[r]]: the gradient of the layer's output, on its way back to the experts
    SWIGLU       silu(h[:, :N]) · h[:, N:] of h [M, 2N], in float32
    CODES        GATHERED, of MXFP8 codes and scales instead of numbers: tokens that were quantised before they were
                 sent. Rows are copied
                 byte by byte; along columns the decoded values are quantised again, since there they share other scales

Rows are MXFP8 or NVFP4 with a scale per token, columns are MXFP8. With SWIZZLE, scales are written in the layout of
`kernels/swizzle.py`. The bits are those of `ref/quant.py`; the arithmetic is that of `kernels/quant.py`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .bits import decode_e4m3, encode_e2m1, power_of_two, size_bits
from .launch import EXACT, INTERPRETED, configs, fitting
from .quant import e4m3_block_scale, e8m0_byte, mx_codes
from .swizzle import tiles

__all__ = ["SOURCES", "quantise_both", "quantise_swiglu_gradient"]

SOURCES = {"matrix": 0, "gathered": 1, "weighted": 2, "swiglu": 3, "codes": 4}
"""What the numbers are, by name."""


@triton.jit
def scale_at(row, block, across):
    """The place of a row's block among swizzled tiles, `across` of which lie side by side (kernels/swizzle.py)."""
    return ((row // 128) * across + block // 4) * 512 + (row % 32) * 16 + (row % 128 // 32) * 4 + block % 4


@triton.jit
def piece(x, index, gates, m, n, M, N, K, sm, sn, SOURCE: tl.constexpr):
    """float32 [rows m, columns n] of a source; 0 outside of it. CODES have their scales in place of gates."""
    inside = (m < M)[:, None] & (n < N)[None, :]
    row = m
    if SOURCE == 1 or SOURCE == 2 or SOURCE == 4:
        place = tl.load(index + m, m < M, other=-1)
        inside = inside & (place >= 0)[:, None]
        row = tl.where(place >= 0, place // K, 0)
    at = row[:, None] * sm + n[None, :] * sn
    if SOURCE == 4:
        byte = tl.load(gates + row[:, None] * ((N + 31) // 32) + (n // 32)[None, :], inside, other=127).to(tl.int32)
        value = decode_e4m3(tl.load(x + at, inside, other=0))
        v = tl.where(byte == 255, float("nan"), value * power_of_two(tl.minimum(byte, 254) - 127))
    else:
        v = tl.load(x + at, inside, other=0.0).to(tl.float32)
    if SOURCE == 2:
        v = v * tl.load(gates + place, (m < M) & (place >= 0), other=0.0).to(tl.float32)[:, None]
    if SOURCE == 3:
        v = v / (1.0 + tl.exp(-v)) * tl.load(x + at + N * sn, inside, other=0.0).to(tl.float32)
    return v


@triton.jit
def store_mx_rows(
    v,
    codes,
    scales,
    first_m,
    first_n,
    M,
    N,
    NATIVE: tl.constexpr,
    SWIZZLE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """MXFP8 along the rows of v [BM, BN]."""
    m, n, b = first_m + tl.arange(0, BM), first_n + tl.arange(0, BN), first_n // 32 + tl.arange(0, BN // 32)
    byte = e8m0_byte(tl.max(tl.reshape(size_bits(v), (BM, BN // 32, 32)), 2), 0)
    code = tl.reshape(mx_codes(tl.reshape(v, (BM, BN // 32, 32)), byte, 2, NATIVE), (BM, BN))
    tl.store(codes + m[:, None] * N + n[None, :], code, (m < M)[:, None] & (n < N)[None, :])
    blocks = (N + 31) // 32
    # Padding of a tile along the sum belongs to real rows, so it is written: 0 is a scale that keeps zeros zero.
    wide = (blocks + 3) // 4 * 4 if SWIZZLE else blocks
    at = scale_at(m[:, None], b[None, :], wide // 4) if SWIZZLE else m[:, None] * blocks + b[None, :]
    tl.store(scales + at, byte.to(tl.uint8), (m < M)[:, None] & (b < wide)[None, :])


@triton.jit
def copy_mx_rows(
    x,
    x_scales,
    index,
    codes,
    scales,
    first_m,
    first_n,
    M,
    N,
    K,
    sm,
    sn,
    SWIZZLE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Codes and scales of CODES, in their rows' places."""
    m, n, b = first_m + tl.arange(0, BM), first_n + tl.arange(0, BN), first_n // 32 + tl.arange(0, BN // 32)
    place = tl.load(index + m, m < M, other=-1)
    real, token = (place >= 0)[:, None], tl.where(place >= 0, place // K, 0)[:, None]
    inside = (m < M)[:, None] & (n < N)[None, :]
    tl.store(
        codes + m[:, None] * N + n[None, :], tl.load(x + token * sm + n[None, :] * sn, inside & real, other=0), inside
    )
    blocks = (N + 31) // 32
    wide = (blocks + 3) // 4 * 4 if SWIZZLE else blocks
    at = scale_at(m[:, None], b[None, :], wide // 4) if SWIZZLE else m[:, None] * blocks + b[None, :]
    byte = tl.load(x_scales + token * blocks + b[None, :], real & (b < blocks)[None, :], other=0)
    tl.store(scales + at, byte, (m < M)[:, None] & (b < wide)[None, :])


@triton.jit
def store_mx_columns(
    v,
    codes,
    scales,
    first_m,
    first_n,
    M,
    N,
    NATIVE: tl.constexpr,
    SWIZZLE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """MXFP8 along the columns of v [BM, BN]: codes [N, M], scales of N rows."""
    m, n, b = first_m + tl.arange(0, BM), first_n + tl.arange(0, BN), first_m // 32 + tl.arange(0, BM // 32)
    byte = e8m0_byte(tl.max(tl.reshape(size_bits(v), (BM // 32, 32, BN)), 1), 0)
    code = tl.reshape(mx_codes(tl.reshape(v, (BM // 32, 32, BN)), byte, 1, NATIVE), (BM, BN))
    tl.store(codes + n[None, :] * M + m[:, None], code, (m < M)[:, None] & (n < N)[None, :])
    blocks = (M + 31) // 32
    wide = (blocks + 3) // 4 * 4 if SWIZZLE else blocks
    at = scale_at(n[None, :], b[:, None], wide // 4) if SWIZZLE else n[None, :] * blocks + b[:, None]
    tl.store(scales + at, byte.to(tl.uint8), (n < N)[None, :] & (b < wide)[:, None])


@triton.jit
def store_nvfp4_rows(
    v, s, packed, scales, first_m, first_n, M, N, SWIZZLE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):
    """NVFP4 of v [BM, BN], whose rows have float32 scales s [BM]."""
    m, b, h = first_m + tl.arange(0, BM), first_n // 16 + tl.arange(0, BN // 16), first_n // 2 + tl.arange(0, BN // 2)
    groups = tl.reshape(v, (BM, BN // 16, 16))
    largest = tl.max(size_bits(groups), 2).to(tl.float32, bitcast=True)
    code, step = e4m3_block_scale(largest, tl.broadcast_to(s[:, None], (BM, BN // 16)), False)
    blocks, half = (N + 15) // 16, (N + 1) // 2
    wide_blocks = (blocks + 3) // 4 * 4 if SWIZZLE else blocks
    at = scale_at(m[:, None], b[None, :], wide_blocks // 4) if SWIZZLE else m[:, None] * blocks + b[None, :]
    # A block beyond the row has no numbers; of a row with NaN its scale would be NaN like the others.
    code = tl.where((b < blocks)[None, :], code, 0).to(tl.uint8)
    tl.store(scales + at, code, (m < M)[:, None] & (b < wide_blocks)[None, :])
    wide = tl.broadcast_to(tl.expand_dims(step, 2), (BM, BN // 16, 16))
    low, high = tl.split(
        tl.reshape(encode_e2m1(tl.where(wide > 0, tl.div_rn(groups, wide), 0.0)), (BM, BN // 16, 8, 2))
    )
    tl.store(
        packed + m[:, None] * half + h[None, :],
        tl.reshape(low | (high << 4), (BM, BN // 2)).to(tl.uint8),
        (m < M)[:, None] & (h < half)[None, :],
    )


@triton.jit
def token_scale(x, index, gates, m, M, N, K, sm, sn, SOURCE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """NVFP4's float32 scale of each row, which needs the complete row."""
    running_max = tl.zeros((BM, BN), tl.int32)
    for start in range(0, N, BN):
        running_max = tl.maximum(
            running_max,
            size_bits(piece(x, index, gates, m, start + tl.arange(0, BN).to(tl.int64), M, N, K, sm, sn, SOURCE)),
        )
    top = tl.max(running_max, 1)
    s = tl.div_rn(top.to(tl.float32, bitcast=True), 2688.0)
    return tl.where(top >= 0x7F800000, 0x7FC00000, s.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.autotune(
    configs=configs(
        {"BM": 128, "BN": 128},
        *(
            ({"BM": m, "BN": n}, w, 1)
            for m, n, w in ((32, 128, 4), (32, 128, 8), (64, 128, 4), (128, 128, 8), (32, 256, 4))
        ),
    ),
    key=["N", "SOURCE", "ROWS", "COLUMNS"],
    prune_configs_by=fitting("orientations.both_kernel", "SOURCE", "ROWS", "COLUMNS", "SWIZZLE"),
)
@triton.jit
def both_kernel(
    x,
    index,
    gates,
    limit,
    row_codes,
    row_scales,
    row_whole,
    column_codes,
    column_scales,
    M,
    N,
    K,
    sb,
    sm,
    sn,
    row_stride,
    column_stride,
    SOURCE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SWIZZLE: tl.constexpr,
    LIMITED: tl.constexpr,
    NATIVE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """ROWS: 0 nothing, 2 MXFP8, 3 NVFP4; COLUMNS: 0 or 2. Rows from `limit` on belong to no expert, and stay unwritten.
    A program takes one piece of BM × BN, or complete rows if they are NVFP4. Matrix b has its scales from b ·
    row_stride and b · column_stride."""
    first_m = tl.program_id(0).to(tl.int64) * BM
    batch = tl.program_id(2).to(tl.int64)
    used = first_m + 1
    if LIMITED:
        used = tl.load(limit)
    if first_m < used:
        m = first_m + tl.arange(0, BM)
        x += batch * sb
        half = (N + 1) // 2
        row_codes += batch * M * (half if ROWS == 3 else N)
        row_scales += batch * row_stride
        column_codes += batch * M * N
        column_scales += batch * column_stride
        begin, end = tl.program_id(1) * BN, tl.program_id(1) * BN + 1
        s = tl.zeros((BM,), tl.float32)
        if ROWS == 3:
            begin, end = 0, N
            s = token_scale(x, index, gates, m, M, N, K, sm, sn, SOURCE, BM, BN)
            tl.store(row_whole + batch * M + m, s, m < M)
        for start in range(begin, end, BN):
            first_n = tl.cast(start, tl.int64)
            v = piece(x, index, gates, m, first_n + tl.arange(0, BN), M, N, K, sm, sn, SOURCE)
            if ROWS == 2 and SOURCE == 4:
                copy_mx_rows(x, gates, index, row_codes, row_scales, first_m, first_n, M, N, K, sm, sn, SWIZZLE, BM, BN)
            if ROWS == 2 and SOURCE != 4:
                store_mx_rows(v, row_codes, row_scales, first_m, first_n, M, N, NATIVE, SWIZZLE, BM, BN)
            if ROWS == 3:
                store_nvfp4_rows(v, s, row_codes, row_scales, first_m, first_n, M, N, SWIZZLE, BM, BN)
            if COLUMNS == 2:
                store_mx_columns(v, column_codes, column_scales, first_m, first_n, M, N, NATIVE, SWIZZLE, BM, BN)


def scale_room(batch: int, rows: int, size: int, block: int, swizzled: bool, like: Tensor) -> Tensor:
    """Unwritten scales of [batch, rows, size]: row-major, or in tiles."""
    blocks = -(-size // block)
    shape = (batch, *tiles(rows, blocks), 32, 4, 4) if swizzled else (batch, rows, blocks)
    return torch.empty(shape, dtype=torch.uint8, device=like.device)


def code_room(is_needed: bool, *shape: int, like: Tensor) -> Tensor:
    return torch.empty(shape if is_needed else (0,), dtype=torch.uint8, device=like.device)


def quantise_both(
    source: str,
    x: Tensor,
    rows: str | None,
    columns: str | None,
    swizzled: bool,
    index: Tensor | None = None,
    K: int = 1,
    gates: Tensor | None = None,
    limit: Tensor | None = None,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Codes [B, M, N], scales (and NVFP4's scales per row [B, M]) along rows, if `rows` names a format, and codes [B,
    N, M] and scales along columns, if `columns` does: the arrays that a product reads, B = 1 unless x is [B, M, N].
    `gates` [N, K] of WEIGHTED, or the scales of CODES. `limit` [1]: how many rows are used; the others stay
    unwritten."""
    kind = SOURCES[source]
    strides = (0, *x.stride()) if x.ndim == 2 else x.stride()
    B, M, N = (1, *x.shape) if x.ndim == 2 else x.shape
    if kind in (1, 2, 4):
        assert index is not None
        M = len(index)
    if kind == 3:
        N //= 2
    fp4 = rows == "nvfp4-token"
    by_rows = (
        code_room(rows is not None, B, M, -(-N // 2) if fp4 else N, like=x),
        scale_room(B, M if rows else 0, N, 16 if fp4 else 32, swizzled, x),
        torch.empty(B, M if fp4 else 0, dtype=torch.float32, device=x.device),
    )
    by_columns = code_room(columns is not None, B, N, M, like=x), scale_room(B, N if columns else 0, M, 32, swizzled, x)
    if B * M * N:
        # Along columns the sum is over rows: tiles of scales end at a multiple of 128 of them.
        last = -(-M // 128) * 128 if swizzled and columns else M
        grid = lambda tile: (triton.cdiv(last, tile["BM"]), 1 if fp4 else triton.cdiv(N, tile["BN"]), B)
        both_kernel[grid](
            x,
            x if index is None else index,
            x if gates is None else gates,
            x if limit is None else limit,
            *by_rows,
            *by_columns,
            M,
            N,
            K,
            *strides,
            by_rows[1].stride(0),
            by_columns[1].stride(0),
            SOURCE=kind,
            ROWS={None: 0, "mxfp8": 2, "nvfp4-token": 3}[rows],
            COLUMNS=2 if columns else 0,
            SWIZZLE=swizzled,
            LIMITED=limit is not None,
            NATIVE=not INTERPRETED,
            **EXACT,
        )
    return by_rows, by_columns


@triton.autotune(
    configs=configs(
        {"BM": 128, "BN": 128}, *(({"BM": m, "BN": n}, w, 1) for m, n, w in ((32, 128, 4), (64, 128, 4), (128, 128, 8)))
    ),
    key=["I"],
    prune_configs_by=fitting("orientations.swiglu_gradient_kernel", "SWIZZLE"),
)
@triton.jit
def swiglu_gradient_kernel(
    h,
    d,
    limit,
    row_codes,
    row_scales,
    column_codes,
    column_scales,
    activation_codes,
    activation_scales,
    M,
    I,
    SWIZZLE: tl.constexpr,
    NATIVE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """The gradient dh [M, 2I] of silu(gate) · up, h [M, 2I], from d [M, I], as MXFP8 along rows and columns; and the
    activation along columns. A piece of gate's columns and the piece of up's that reads the same numbers are neighbours
    in the launch, so the cache reads them once."""
    first_m = tl.program_id(1).to(tl.int64) * BM
    if first_m < tl.load(limit):
        pieces = tl.num_programs(0)
        t = tl.program_id(0)
        first_n = (t // 2 + (t % 2) * ((pieces + 1) // 2)).to(tl.int64) * BN
        m, n = first_m + tl.arange(0, BM), first_n + tl.arange(0, BN)
        i = n % I
        inside = (m < M)[:, None] & (n < 2 * I)[None, :]
        gate = tl.load(h + m[:, None] * (2 * I) + i[None, :], inside, other=0.0).to(tl.float32)
        up = tl.load(h + m[:, None] * (2 * I) + (I + i)[None, :], inside, other=0.0).to(tl.float32)
        dy = tl.load(d + m[:, None] * I + i[None, :], inside, other=0.0).to(tl.float32)
        sigmoid = 1.0 / (1.0 + tl.exp(-gate))
        dh = tl.where((n < I)[None, :], dy * up * sigmoid * (1.0 + gate * (1.0 - sigmoid)), dy * gate * sigmoid)
        store_mx_rows(dh, row_codes, row_scales, first_m, first_n, M, 2 * I, NATIVE, SWIZZLE, BM, BN)
        store_mx_columns(dh, column_codes, column_scales, first_m, first_n, M, 2 * I, NATIVE, SWIZZLE, BM, BN)
        if first_n < I:
            store_mx_columns(
                gate / (1.0 + tl.exp(-gate)) * up,
                activation_codes,
                activation_scales,
                first_m,
                first_n,
                M,
                I,
                NATIVE,
                SWIZZLE,
                BM,
                BN,
            )


def quantise_swiglu_gradient(
    h: Tensor, d: Tensor, limit: Tensor, swizzled: bool
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], tuple[Tensor, ...]]:
    """MXFP8 codes and scales of dh along rows and along columns, and of the activation along columns; h [M, 2I], d [M,
    I]."""
    M, I = d.shape
    by_rows = code_room(True, 1, M, 2 * I, like=h), scale_room(1, M, 2 * I, 32, swizzled, h)
    by_columns = code_room(True, 1, 2 * I, M, like=h), scale_room(1, 2 * I, M, 32, swizzled, h)
    activation = code_room(True, 1, I, M, like=h), scale_room(1, I, M, 32, swizzled, h)
    if M * I:
        grid = lambda tile: (triton.cdiv(2 * I, tile["BN"]), triton.cdiv(M, tile["BM"]))
        swiglu_gradient_kernel[grid](
            h, d, limit, *by_rows, *by_columns, *activation, M, I, SWIZZLE=swizzled, NATIVE=not INTERPRETED, **EXACT
        )
    return by_rows, by_columns, activation
