"""Which tile of its result a program of a product computes, and how it stores the tile.

The order keeps operands in the L2 cache. A band of eight tiles of rows goes through all columns before the next band
begins, and within a band rows change first: eight pieces of A stay while B passes by once. With experts, every expert
has its own bands, because its weights serve nobody else: they are read, used by all of the expert's rows, and never
needed again ("supergrouping"). `kernels/launches.py` counts what that saves."""

import triton
import triton.language as tl

from .bits import round_bfloat16

__all__ = ["BAND", "banded", "expert_tile", "store_tile"]

BAND = tl.constexpr(8)
"""Tiles of rows that go through all columns together."""


@triton.jit
def banded(t, down, across):
    """Row and column of the t-th tile of down × across."""
    band = t // (BAND * across)
    rows = tl.minimum(down - band * BAND, BAND)
    index_in_band = t % (BAND * across)
    return band * BAND + index_in_band % rows, index_in_band // rows


@triton.jit
def expert_tile(t, ends, E, across, EP: tl.constexpr, BM: tl.constexpr):
    """The t-th tile of all experts' rows, expert e's ending at ends[e]: whether there is one, its expert, its first
    row, the end of the expert's rows, and its column. Experts follow each other, each in bands."""
    e = tl.arange(0, EP)
    end = tl.load(ends + e, e < E, other=0).to(tl.int64)
    start = tl.where(e > 0, tl.load(ends + e - 1, (e > 0) & (e < E), other=0).to(tl.int64), 0)
    tiles = tl.where(e < E, (end - start + BM - 1) // BM, 0) * across
    behind = tl.cumsum(tiles, 0)
    # The expert that tile t belongs to; after the last tile there is no such expert.
    is_owner = (behind > t) & (behind - tiles <= t)
    is_valid = tl.sum(is_owner.to(tl.int32), 0) > 0
    expert = tl.sum(tl.where(is_owner, e, 0), 0).to(tl.int64)
    index_in_expert = tl.sum(tl.where(is_owner, t - (behind - tiles), 0), 0)
    down = tl.maximum(tl.sum(tl.where(is_owner, tiles // across, 0), 0), 1)
    row, column = banded(index_in_expert, down, across)
    first = tl.sum(tl.where(is_owner, start, 0), 0) + row * BM
    return is_valid, expert, first, tl.sum(tl.where(is_owner, end, 0), 0), column


@triton.jit
def store_tile(out, y, a_whole, b_whole, a, m, m_here, n, n_here, N, FORM: tl.constexpr, UPCAST: tl.constexpr):
    """y, scaled by the tokens' scales (NVFP4) of rows a of the left side, to rows m and columns n of out [·, N]."""
    if FORM == 3:
        y = y * tl.load(a_whole + a, m_here, other=0.0)[:, None] * tl.load(b_whole + n, n_here, other=0.0)[None, :]
    if UPCAST and out.dtype.element_ty == tl.bfloat16:
        y = round_bfloat16(y)
    tl.store(out + m[:, None] * N + n[None, :], y.to(out.dtype.element_ty), m_here[:, None] & n_here[None, :])
