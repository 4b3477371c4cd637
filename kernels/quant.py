"""Triton kernels behind `ref/quant.py`: the same codes and scales, bit for bit, each number read once.

    mxfp8_quantize            a tile is cut into blocks of 32 along its rows or its columns
    mxfp8_quantize_both       the same along both at once: what a weight or a gradient needs, from one pass over memory
    nvfp4_quantize            a program per token, which finds the token's scale and its blocks' before it writes
    blockwise_fp8_quantize    a tile is one block (128 × 128) or a row of it is (1 × 128)

Maxima are taken of the bits of |x| as integers: exact, and NaN is the largest. Divisions are IEEE (`div_rn`); the default of a GPU is not.
"""

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.bits import decode_e4m3, encode_e2m1, encode_e4m3, power_of_two, size_bits
from kernels.launch import INTERPRETED, configs, need

__all__ = ["blockwise_fp8_quantize", "mxfp8_quantize", "mxfp8_quantize_both", "nvfp4_quantize"]

MODES = {"rceil": 0, "floor": 1, "ceil": 2, "even": 3}


@triton.jit
def e8m0_byte(largest, MODE: tl.constexpr):
    """Bits of a block's largest |x| → its E8M0 scale; 255 where the block has NaN or Inf."""
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
    """Blocks [a, b, c], reduced along AXIS, and their scales → codes."""
    scaled = blocks * tl.expand_dims(power_of_two(127 - byte), AXIS)
    codes = encode_e4m3(scaled, NATIVE)
    return tl.where(tl.expand_dims(byte == 255, AXIS), 0x7F, codes.to(tl.int32)).to(tl.uint8)


@triton.autotune(
    configs=configs(
        {"BM": 32, "BN": 128}, *(({"BM": m, "BN": n}, w, 1) for m, n, w in ((32, 128, 4), (64, 64, 4), (64, 128, 4), (128, 128, 8), (32, 256, 4)))
    ),
    key=["M", "N", "ROWS", "COLS"],
)
@triton.jit
def mxfp8_kernel(
    x, row_codes, row_scales, col_codes, col_scales, M, N, sm, sn, ROWS: tl.constexpr, COLS: tl.constexpr, MODE: tl.constexpr,
    NATIVE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    n = tl.program_id(1).to(tl.int64) * BN + tl.arange(0, BN)
    inside = (m[:, None] < M) & (n[None, :] < N)
    v = tl.load(x + m[:, None] * sm + n[None, :] * sn, inside, other=0.0).to(tl.float32)
    size = size_bits(v)
    if ROWS:
        byte = e8m0_byte(tl.max(tl.reshape(size, (BM, BN // 32, 32)), 2), MODE)
        codes = tl.reshape(mx_codes(tl.reshape(v, (BM, BN // 32, 32)), byte, 2, NATIVE), (BM, BN))
        tl.store(row_codes + m[:, None] * N + n[None, :], codes, inside)
        b = tl.program_id(1).to(tl.int64) * (BN // 32) + tl.arange(0, BN // 32)
        blocks = (N + 31) // 32
        tl.store(row_scales + m[:, None] * blocks + b[None, :], byte.to(tl.uint8), (m[:, None] < M) & (b[None, :] < blocks))
    if COLS:
        byte = e8m0_byte(tl.max(tl.reshape(size, (BM // 32, 32, BN)), 1), MODE)
        codes = tl.reshape(mx_codes(tl.reshape(v, (BM // 32, 32, BN)), byte, 1, NATIVE), (BM, BN))
        # Columns are what the next product sums along: they lie together in memory.
        tl.store(col_codes + n[None, :] * M + m[:, None], codes, inside)
        b = tl.program_id(0).to(tl.int64) * (BM // 32) + tl.arange(0, BM // 32)
        blocks = (M + 31) // 32
        tl.store(col_scales + n[None, :] * blocks + b[:, None], byte.to(tl.uint8), (b[:, None] < blocks) & (n[None, :] < N))


def _mxfp8(x: Tensor, rows: bool, cols: bool, mode: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes and scales along rows and along columns of x [M, N], the latter as transposed views; those not wanted are empty."""
    need(x)
    M, N = x.shape

    def room(wanted: bool, *shape: int) -> Tensor:
        return torch.empty(shape if wanted else (0,), dtype=torch.uint8, device=x.device)

    out = room(rows, M, N), room(rows, M, -(-N // 32)), room(cols, N, M), room(cols, N, -(-M // 32))
    if x.numel():
        grid = lambda tile: (triton.cdiv(M, tile["BM"]), triton.cdiv(N, tile["BN"]))  # noqa: E731
        mxfp8_kernel[grid](x, *out, M, N, *x.stride(), ROWS=rows, COLS=cols, MODE=MODES[mode], NATIVE=not INTERPRETED)
    return out[0], out[1], *(t.T if cols else t for t in out[2:])


def mxfp8_quantize(x: Tensor, axis: int = -1, mode: str = "rceil") -> tuple[Tensor, Tensor]:
    """As `ref.quant.mxfp8_quantize`."""
    _check(x, axis)
    if mode not in MODES:
        raise ValueError(f"mode must be rceil, floor, ceil or even, got {mode!r}")
    if x.ndim == 2:
        along = axis % 2
        return _mxfp8(x, along == 1, along == 0, mode)[2 * (1 - along) :][:2]
    last = x.movedim(axis, -1)
    codes, scales, *_ = _mxfp8(last.reshape(-1, last.shape[-1]), True, False, mode)
    shape = (*last.shape[:-1], -1) if x.numel() else (*last.shape[:-1], -(-last.shape[-1] // 32))
    return codes.view(last.shape).movedim(-1, axis), scales.view(shape).movedim(-1, axis)


def mxfp8_quantize_both(x: Tensor, mode: str = "rceil") -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `ref.quant.mxfp8_quantize_both`; the second pair lies in memory column by column."""
    _check(x, -1)
    if x.ndim != 2:
        raise ValueError(f"x must be a matrix, got shape {list(x.shape)}")
    if mode not in MODES:
        raise ValueError(f"mode must be rceil, floor, ceil or even, got {mode!r}")
    return _mxfp8(x, True, True, mode)


@triton.jit
def e4m3_block_scale(largest, s, FAST: tl.constexpr):
    """NVFP4: a block's largest |x| and the float32 scale → its E4M3 scale's code, and the step that codes count."""
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
    x, packed, blocks, scales, whole, rows, N, half, sm, sn, TENSOR: tl.constexpr, FAST: tl.constexpr, BN: tl.constexpr
):
    """A token a program, BN numbers at a time: once over it for the scale (not TENSOR), and once to write; where a token is not
    longer than BN the second reading comes from registers."""
    row = tl.program_id(0).to(tl.int64)
    n, b = tl.arange(0, BN), tl.arange(0, BN // 16)
    if TENSOR:
        top = tl.load(whole)
    else:
        most = tl.zeros((BN,), tl.int32)
        for start in range(0, N, BN):
            v = tl.load(x + row * sm + (start + n).to(tl.int64) * sn, start + n < N, other=0.0).to(tl.float32)
            most = tl.maximum(most, size_bits(v))
        top = tl.max(most, 0)
    s = tl.div_rn(top.to(tl.float32, bitcast=True), 2688.0)
    s = tl.where(top >= 0x7F800000, 0x7FC00000, s.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    if not TENSOR:
        tl.store(scales + row, s)
    for start in range(0, N, BN):
        v = tl.load(x + row * sm + (start + n).to(tl.int64) * sn, start + n < N, other=0.0).to(tl.float32)
        groups = tl.reshape(v, (BN // 16, 16))
        largest = tl.max(size_bits(groups), 1).to(tl.float32, bitcast=True)
        code, step = e4m3_block_scale(largest, s, FAST)
        tl.store(blocks + row * ((N + 15) // 16) + start // 16 + b, code, start // 16 + b < (N + 15) // 16)
        wide = tl.expand_dims(step, 1)
        divided = groups * tl.div_rn(1.0, wide) if FAST else tl.div_rn(groups, tl.broadcast_to(wide, (BN // 16, 16)))
        low, high = tl.split(tl.reshape(encode_e2m1(tl.where(wide > 0, divided, 0.0)), (BN // 16, 8, 2)))
        h = start // 2 + tl.arange(0, BN // 2)
        tl.store(packed + row * half + h, tl.reshape(low | (high << 4), (BN // 2,)).to(tl.uint8), h < half)


@triton.jit
def largest_kernel(x, parts, total, BLOCK: tl.constexpr):
    """The bits of the largest |x| of a contiguous piece."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + i, i < total, other=0.0).to(tl.float32)
    tl.store(parts + tl.program_id(0), tl.max(size_bits(v), 0))


def nvfp4_quantize(
    x: Tensor, scale: Literal["token", "tensor"] = "token", division: Literal["ieee", "fast"] = "ieee"
) -> tuple[Tensor, Tensor, Tensor]:
    """As `ref.quant.nvfp4_quantize`."""
    _check(x, -1)
    for name, value, known in (("scale", scale, ("token", "tensor")), ("division", division, ("ieee", "fast"))):
        if value not in known:
            raise ValueError(f"{name} must be {known[0]} or {known[1]}, got {value!r}")
    if not x.shape[-1]:
        raise ValueError(f"x must have something on its last axis, got shape {list(x.shape)}")
    need(x)
    flat, N, tensor = x.reshape(-1, x.shape[-1]), x.shape[-1], scale == "tensor"
    rows, half = len(flat), -(-N // 2)
    packed = torch.empty(rows, half, dtype=torch.uint8, device=x.device)
    blocks = torch.empty(rows, -(-N // 16), dtype=torch.uint8, device=x.device)
    scales = torch.zeros(rows if not tensor else 1, dtype=torch.float32, device=x.device)
    top = torch.zeros(1, dtype=torch.int32, device=x.device)
    if tensor and x.numel():
        whole = x.contiguous()
        parts = torch.empty(triton.cdiv(x.numel(), 16384), dtype=torch.int32, device=x.device)
        largest_kernel[(len(parts),)](whole, parts, x.numel(), BLOCK=16384)
        top = parts.max().view(1)
        # What is not finite is no scale; division by 2688 is the kernel's, once more, so that it is the same.
        value = top.view(torch.float32) / 2688
        scales = torch.where(value.isfinite(), value, torch.nan)
    if rows:
        BN = min(max(triton.next_power_of_2(N), 16), 1024 if INTERPRETED else 4096)
        nvfp4_kernel[(rows,)](
            flat, packed, blocks, scales, top, rows, N, half, *flat.stride(), TENSOR=tensor, FAST=division == "fast", BN=BN
        )
    shape = x.shape[:-1]
    return packed.view(*shape, half), blocks.view(*shape, -1 if rows else -(-N // 16)), scales.view(()) if tensor else scales.view(*shape, 1)


@triton.jit
def fp8_kernel(
    x, codes, scales, M, N, sm, sn, BM: tl.constexpr, BN: tl.constexpr, RM: tl.constexpr, NATIVE: tl.constexpr, PM: tl.constexpr, PN: tl.constexpr
):
    """A column of RM blocks of BM × BN numbers a program; PM and PN are the next powers of two."""
    block = tl.program_id(1).to(tl.int64)
    n = block * BN + tl.arange(0, PN)
    wide_n = (tl.arange(0, PN) < BN) & (n < N)
    down = tl.arange(0, RM * PM)
    m = (tl.program_id(0).to(tl.int64) * RM + down // PM) * BM + down % PM
    inside = ((down % PM < BM) & (m < M))[:, None] & wide_n[None, :]
    v = tl.load(x + m[:, None] * sm + n[None, :] * sn, inside, other=0.0).to(tl.float32)
    tiles = tl.reshape(v, (RM, PM * PN))
    largest = tl.max(size_bits(tiles), 1)
    s = tl.div_rn(largest.to(tl.float32, bitcast=True), 448.0)
    s = tl.where(largest >= 0x7F800000, 0x7FC00000, s.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    r = tl.program_id(0).to(tl.int64) * RM + tl.arange(0, RM)
    down_blocks, across = (M + BM - 1) // BM, (N + BN - 1) // BN
    tl.store(scales + r * across + block, s, r < down_blocks)
    wide = tl.broadcast_to(tl.expand_dims(s, 1), (RM, PM * PN))
    code = encode_e4m3(tl.where(wide == 0, 0.0, tl.div_rn(tiles, wide)), NATIVE)
    tl.store(codes + m[:, None] * N + n[None, :], tl.reshape(code, (RM * PM, PN)), inside)


def blockwise_fp8_quantize(x: Tensor, block: tuple[int, int] = (1, 128)) -> tuple[Tensor, Tensor]:
    """As `ref.quant.blockwise_fp8_quantize`."""
    _check(x, -1)
    if x.ndim < 2 or min(block) < 1:
        raise ValueError(f"x must have rows and columns, and block sizes of 1 or more; got {list(x.shape)}, {block}")
    need(x)
    if x.ndim > 2:
        each = [blockwise_fp8_quantize(part, block) for part in x.unbind(0)]
        if not each:
            return x.to(torch.uint8), x.new_zeros(*x.shape[:-2], -(-x.shape[-2] // block[0]), -(-x.shape[-1] // block[1]), dtype=torch.float32)
        return torch.stack([codes for codes, _ in each]), torch.stack([scales for _, scales in each])
    (M, N), (BM, BN) = x.shape, block
    down, across = -(-M // BM), -(-N // BN)
    codes = torch.empty(M, N, dtype=torch.uint8, device=x.device)
    scales = torch.empty(down, across, dtype=torch.float32, device=x.device)
    if x.numel():
        PM, PN = triton.next_power_of_2(BM), triton.next_power_of_2(BN)
        RM = max(1, 32 // PM)
        fp8_kernel[(triton.cdiv(down, RM), across)](x, codes, scales, M, N, *x.stride(), BM, BN, RM, NATIVE=not INTERPRETED, PM=PM, PN=PN)
    return codes, scales


def _check(x: Tensor, axis: int) -> None:
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise ValueError(f"x must be a float tensor, got {getattr(x, 'dtype', type(x).__name__)}")
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"x must have an axis {axis}, got shape {list(x.shape)}")
