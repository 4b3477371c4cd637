"""Triton kernels behind `ref/quant.py`: the same codes and scales, bit for bit, each number read once.

    mxfp8_quantize            a tile is cut into blocks of 32 along its rows or its columns
    mxfp8_quantize_both       the same along both at once: all that a weight or a gradient needs, in one pass over
                              memory
    nvfp4_quantize            a program handles complete tokens: it finds their scales and those of their blocks before
                              it writes
    blockwise_fp8_quantize    a tile is one block (128 × 128), or each of its rows is one (1 × 128)

Maxima compare the bits of |x| as integers: this is exact, and NaN is the largest. Divisions are IEEE (`div_rn`), unlike
a GPU's default."""

import math
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from ref.quant import MODES, check_blocks, check_mxfp8, check_nvfp4

from .bits import decode_e4m3, encode_e2m1, encode_e4m3, power_of_two, size_bits
from .launch import EXACT, INTERPRETED, configs, fitting, need

__all__ = ["blockwise_fp8_quantize", "mxfp8_quantize", "mxfp8_quantize_both", "nvfp4_quantize"]


@triton.jit
def e8m0_byte(largest, MODE: tl.constexpr):
    """Bits of a block's largest |x| → its E8M0 scale; 255 if the block has NaN or Inf."""
    if MODE == 0:
        d = (largest.to(tl.float32, bitcast=True) * 0.002232142857142857).to(tl.int32, bitcast=True)
        field, mantissa = d >> 23, d & 0x7FFFFF
        byte = field + tl.where(field > 0, mantissa > 0, mantissa > 0x400000).to(tl.int32)
    else:
        extra: tl.constexpr = 0 if MODE == 1 else 0x7FFFFF if MODE == 2 else 0x80000
        byte = tl.minimum(tl.maximum(((largest + extra) >> 23) - 8, 0), 254)
    byte = tl.where(largest > 0, byte, 0)
    return tl.where(largest >= 0x7F800000, 255, byte)


@triton.jit
def mx_codes(blocks, byte, AXIS: tl.constexpr, NATIVE: tl.constexpr):
    """Blocks [a, b, c], each along AXIS, and their scales → codes."""
    scaled = blocks * tl.expand_dims(power_of_two(127 - byte), AXIS)
    codes = encode_e4m3(scaled, NATIVE)
    return tl.where(tl.expand_dims(byte == 255, AXIS), 0x7F, codes.to(tl.int32)).to(tl.uint8)


@triton.jit
def load_numbers(x, at, offset, inside, SWIGLU: tl.constexpr):
    """The numbers at `at` in float32; SWIGLU: their silu times the numbers `offset` further on."""
    v = tl.load(x + at, inside, other=0.0).to(tl.float32)
    if SWIGLU:
        v = v / (1.0 + tl.exp(-v)) * tl.load(x + at + offset, inside, other=0.0).to(tl.float32)
    return v


@triton.autotune(
    configs=configs(
        {"BM": 32, "BN": 128},
        *(
            ({"BM": m, "BN": n}, w, 1)
            for m, n, w in ((32, 128, 4), (64, 64, 4), (64, 128, 4), (128, 128, 8), (32, 256, 4))
        ),
    ),
    key=["M", "N", "ROWS", "COLS"],
    prune_configs_by=fitting("quant.mxfp8_kernel", "ROWS", "COLS", "SWIGLU"),
)
@triton.jit
def mxfp8_kernel(
    x,
    row_codes,
    row_scales,
    col_codes,
    col_scales,
    M,
    N,
    sm,
    sn,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    MODE: tl.constexpr,
    NATIVE: tl.constexpr,
    SWIGLU: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    m = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    n = tl.program_id(1).to(tl.int64) * BN + tl.arange(0, BN)
    inside = (m[:, None] < M) & (n[None, :] < N)
    v = load_numbers(x, m[:, None] * sm + n[None, :] * sn, N * sn, inside, SWIGLU)
    size = size_bits(v)
    if ROWS:
        byte = e8m0_byte(tl.max(tl.reshape(size, (BM, BN // 32, 32)), 2), MODE)
        codes = tl.reshape(mx_codes(tl.reshape(v, (BM, BN // 32, 32)), byte, 2, NATIVE), (BM, BN))
        tl.store(row_codes + m[:, None] * N + n[None, :], codes, inside)
        b = tl.program_id(1).to(tl.int64) * (BN // 32) + tl.arange(0, BN // 32)
        blocks = (N + 31) // 32
        tl.store(
            row_scales + m[:, None] * blocks + b[None, :], byte.to(tl.uint8), (m[:, None] < M) & (b[None, :] < blocks)
        )
    if COLS:
        byte = e8m0_byte(tl.max(tl.reshape(size, (BM // 32, 32, BN)), 1), MODE)
        codes = tl.reshape(mx_codes(tl.reshape(v, (BM // 32, 32, BN)), byte, 1, NATIVE), (BM, BN))
        # The next product sums along columns, so they are contiguous in memory.
        tl.store(col_codes + n[None, :] * M + m[:, None], codes, inside)
        b = tl.program_id(0).to(tl.int64) * (BM // 32) + tl.arange(0, BM // 32)
        blocks = (M + 31) // 32
        tl.store(
            col_scales + n[None, :] * blocks + b[:, None], byte.to(tl.uint8), (b[:, None] < blocks) & (n[None, :] < N)
        )


def mxfp8_matrix(
    x: Tensor, rows: bool, cols: bool, mode: str = "rceil", swiglu: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes and scales along rows and along columns of x [M, N], the latter as transposed views; unwanted ones are
    empty. With `swiglu`, x is [M, 2N], and silu of its first half times the second half is quantised, in float32."""
    need(x)
    M, N = len(x), x.shape[1] // (2 if swiglu else 1)

    def room(is_needed: bool, *shape: int) -> Tensor:
        return torch.empty(shape if is_needed else (0,), dtype=torch.uint8, device=x.device)

    out = room(rows, M, N), room(rows, M, -(-N // 32)), room(cols, N, M), room(cols, N, -(-M // 32))
    if x.numel():
        grid = lambda tile: (triton.cdiv(M, tile["BM"]), triton.cdiv(N, tile["BN"]))
        mode_number, native = MODES.index(mode), not INTERPRETED
        mxfp8_kernel[grid](
            x, *out, M, N, *x.stride(), ROWS=rows, COLS=cols, MODE=mode_number, NATIVE=native, SWIGLU=swiglu, **EXACT
        )
    return out[0], out[1], *(t.T if cols else t for t in out[2:])


def mxfp8_quantize(x: Tensor, axis: int = -1, mode: str = "rceil") -> tuple[Tensor, Tensor]:
    """Same as `ref.quant.mxfp8_quantize`."""
    check_mxfp8(x, axis, mode)
    if x.ndim == 2:
        along = axis % 2
        return mxfp8_matrix(x, along == 1, along == 0, mode)[2 * (1 - along) :][:2]
    last = x.movedim(axis, -1)
    codes, scales, *_ = mxfp8_matrix(last.reshape(-1, last.shape[-1]), True, False, mode)
    shape = (*last.shape[:-1], -1) if x.numel() else (*last.shape[:-1], -(-last.shape[-1] // 32))
    return codes.view(last.shape).movedim(-1, axis), scales.view(shape).movedim(-1, axis)


def mxfp8_quantize_both(x: Tensor, mode: str = "rceil") -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Same as `ref.quant.mxfp8_quantize_both`; the second pair is stored column by column."""
    check_mxfp8(x, -1, mode, matrix=True)
    return mxfp8_matrix(x, True, True, mode)


@triton.jit
def e4m3_block_scale(largest, s, FAST: tl.constexpr):
    """NVFP4: a block's largest |x| and the float32 scale → the code of its E4M3 scale, and the step that E2M1 codes
    multiply."""
    if FAST:
        over = largest * tl.div_rn(1.0, 6.0)
        ratio = over * tl.div_rn(1.0, s)
    else:
        over = tl.div_rn(largest, 6.0)
        ratio = tl.div_rn(over, s)
    code = encode_e4m3(tl.where(s == 0, 0.0, ratio), False)
    return code, decode_e4m3(code) * s


@triton.jit
def nvfp4_kernel(
    x,
    packed,
    blocks,
    scales,
    tensor_max,
    rows,
    N,
    half,
    sm,
    sn,
    TENSOR: tl.constexpr,
    FAST: tl.constexpr,
    SWIGLU: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """BM tokens per program, BN numbers of each at a time. Tokens are read once for the scales (unless TENSOR) and once
    to write; if a token is not longer than BN, the second read hits the cache."""
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    n, b, row_mask = tl.arange(0, BN), tl.arange(0, BN // 16), row < rows
    if TENSOR:
        top = tl.zeros((BM,), tl.int32) + tl.load(tensor_max)
    else:
        running_max = tl.zeros((BM, BN), tl.int32)
        for start in range(0, N, BN):
            inside = row_mask[:, None] & (start + n < N)[None, :]
            v = load_numbers(x, row[:, None] * sm + (start + n).to(tl.int64)[None, :] * sn, N * sn, inside, SWIGLU)
            running_max = tl.maximum(running_max, size_bits(v))
        top = tl.max(running_max, 1)
    s = tl.div_rn(top.to(tl.float32, bitcast=True), 2688.0)
    s = tl.where(top >= 0x7F800000, 0x7FC00000, s.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    tl.store(scales + row, s, row_mask & (row == 0) if TENSOR else row_mask)
    for start in range(0, N, BN):
        inside = row_mask[:, None] & (start + n < N)[None, :]
        v = load_numbers(x, row[:, None] * sm + (start + n).to(tl.int64)[None, :] * sn, N * sn, inside, SWIGLU)
        groups = tl.reshape(v, (BM, BN // 16, 16))
        largest = tl.max(size_bits(groups), 2).to(tl.float32, bitcast=True)
        code, step = e4m3_block_scale(largest, tl.broadcast_to(s[:, None], (BM, BN // 16)), FAST)
        number = (N + 15) // 16
        tl.store(
            blocks + row[:, None] * number + (start // 16 + b)[None, :],
            code,
            row_mask[:, None] & (start // 16 + b < number)[None, :],
        )
        wide = tl.broadcast_to(tl.expand_dims(step, 2), (BM, BN // 16, 16))
        divided = groups * tl.div_rn(1.0, wide) if FAST else tl.div_rn(groups, wide)
        low, high = tl.split(tl.reshape(encode_e2m1(tl.where(wide > 0, divided, 0.0)), (BM, BN // 16, 8, 2)))
        h = start // 2 + tl.arange(0, BN // 2)
        pairs = tl.reshape(low | (high << 4), (BM, BN // 2)).to(tl.uint8)
        tl.store(packed + row[:, None] * half + h[None, :], pairs, row_mask[:, None] & (h < half)[None, :])


@triton.jit
def largest_kernel(x, parts, total, BLOCK: tl.constexpr):
    """The bits of the largest |x| in a contiguous piece."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + i, i < total, other=0.0).to(tl.float32)
    tl.store(parts + tl.program_id(0), tl.max(size_bits(v), 0))


def nvfp4_quantize(
    x: Tensor, scale: Literal["token", "tensor"] = "token", division: Literal["ieee", "fast"] = "ieee"
) -> tuple[Tensor, Tensor, Tensor]:
    """Same as `ref.quant.nvfp4_quantize`."""
    check_nvfp4(x, scale, division)
    return nvfp4_rows(x, scale == "tensor", division == "fast")


def nvfp4_rows(
    x: Tensor, tensor: bool = False, fast: bool = False, swiglu: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, block scales and float32 scales of x [*, N]. With `swiglu` (and one scale per token), x is [*, 2N], and
    silu of its first half times the second half is quantised, in float32."""
    need(x)
    flat, N = x.reshape(-1, x.shape[-1]), x.shape[-1] // (2 if swiglu else 1)
    rows, half = len(flat), -(-N // 2)
    packed = torch.empty(rows, half, dtype=torch.uint8, device=x.device)
    blocks = torch.empty(rows, -(-N // 16), dtype=torch.uint8, device=x.device)
    scales = torch.zeros(1 if tensor else rows, dtype=torch.float32, device=x.device)
    top = torch.zeros(1, dtype=torch.int32, device=x.device)
    if tensor and x.numel():
        x_contiguous = x.contiguous()
        parts = torch.empty(triton.cdiv(x.numel(), 16384), dtype=torch.int32, device=x.device)
        largest_kernel[(len(parts),)](x_contiguous, parts, x.numel(), BLOCK=16384, **EXACT)
        top = parts.max().view(1)  # the kernel divides it by 2688: on a GPU, torch would multiply by a rounded 1/2688
    if rows:
        BN = min(max(triton.next_power_of_2(N), 16), 1024 if INTERPRETED else 4096)
        BM = max(1, (8192 if INTERPRETED else 2048) // BN)
        nvfp4_kernel[(triton.cdiv(rows, BM),)](
            flat,
            packed,
            blocks,
            scales,
            top,
            rows,
            N,
            half,
            *flat.stride(),
            TENSOR=tensor,
            FAST=fast,
            SWIGLU=swiglu,
            BM=BM,
            BN=BN,
            **EXACT,
        )
    shape = x.shape[:-1]
    return (
        packed.view(*shape, half),
        blocks.view(*shape, -(-N // 16)),
        scales.view(()) if tensor else scales.view(*shape, 1),
    )


@triton.jit
def fp8_kernel(
    x,
    codes,
    scales,
    M,
    N,
    sb,
    sm,
    sn,
    BM: tl.constexpr,
    BN: tl.constexpr,
    RM: tl.constexpr,
    NATIVE: tl.constexpr,
    SWIGLU: tl.constexpr,
    PM: tl.constexpr,
    PN: tl.constexpr,
):
    """One program quantises a column of RM blocks of BM × BN numbers of one matrix; PM and PN are the next powers of
    two."""
    batch = tl.program_id(2).to(tl.int64)
    block = tl.program_id(1).to(tl.int64)
    n = block * BN + tl.arange(0, PN)
    wide_n = (tl.arange(0, PN) < BN) & (n < N)
    down = tl.arange(0, RM * PM)
    m = (tl.program_id(0).to(tl.int64) * RM + down // PM) * BM + down % PM
    inside = ((down % PM < BM) & (m < M))[:, None] & wide_n[None, :]
    v = load_numbers(x, batch * sb + m[:, None] * sm + n[None, :] * sn, N * sn, inside, SWIGLU)
    tiles = tl.reshape(v, (RM, PM * PN))
    largest = tl.max(size_bits(tiles), 1)
    s = tl.div_rn(largest.to(tl.float32, bitcast=True), 448.0)
    s = tl.where(largest >= 0x7F800000, 0x7FC00000, s.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    r = tl.program_id(0).to(tl.int64) * RM + tl.arange(0, RM)
    down_blocks, across = (M + BM - 1) // BM, (N + BN - 1) // BN
    tl.store(scales + (batch * down_blocks + r) * across + block, s, r < down_blocks)
    wide = tl.broadcast_to(tl.expand_dims(s, 1), (RM, PM * PN))
    code = encode_e4m3(tl.where(wide == 0, 0.0, tl.div_rn(tiles, wide)), NATIVE)
    tl.store(codes + batch * M * N + m[:, None] * N + n[None, :], tl.reshape(code, (RM * PM, PN)), inside)


def blockwise_fp8_quantize(x: Tensor, block: tuple[int, int] = (1, 128)) -> tuple[Tensor, Tensor]:
    """Same as `ref.quant.blockwise_fp8_quantize`."""
    check_blocks(x, block)
    return fp8_blocks(x, block)


def fp8_blocks(x: Tensor, block: tuple[int, int] = (1, 128), swiglu: bool = False) -> tuple[Tensor, Tensor]:
    """Codes and scales of x [*, M, N]. With `swiglu`, x is [*, M, 2N], and silu of its first half times the second half
    is quantised, in float32."""
    need(x)
    (*batch, M, N), (BM, BN) = x.shape, block
    flat, N = x.reshape(math.prod(batch), M, N), N // (2 if swiglu else 1)
    down, across = -(-M // BM), -(-N // BN)
    codes = torch.empty(*batch, M, N, dtype=torch.uint8, device=x.device)
    scales = torch.empty(*batch, down, across, dtype=torch.float32, device=x.device)
    if x.numel():
        PM, PN = triton.next_power_of_2(BM), triton.next_power_of_2(BN)
        RM = max(1, 32 // PM)
        fp8_kernel[(triton.cdiv(down, RM), across, len(flat))](
            flat,
            codes,
            scales,
            M,
            N,
            *flat.stride(),
            BM,
            BN,
            RM,
            NATIVE=not INTERPRETED,
            SWIGLU=swiglu,
            PM=PM,
            PN=PN,
            **EXACT,
        )
    return codes, scales
