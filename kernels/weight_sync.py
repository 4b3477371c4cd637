"""Triton kernels behind `ref/weight_sync.py`: compare, count, write positions and steps in order; and apply them.

Both versions are read once to count changes per block and once to write them, 8 bytes per weight, because the position
of a block's changes is known only after all earlier blocks are counted. The host waits only for the number of changes,
the size of the result."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ref.weight_codec import check_delta, check_versions

from .launch import EXACT, INTERPRETED, need

__all__ = ["apply_delta", "encode_delta"]

BLOCK = 1024 if INTERPRETED else 8192


@triton.jit
def count_kernel(old, new, counts, total, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    a, b = tl.load(old + i, i < total, other=0), tl.load(new + i, i < total, other=0)
    tl.store(counts + tl.program_id(0), tl.sum((a != b).to(tl.int32), 0))


@triton.jit
def ordered(bits):
    """int16 bit patterns of floats as places on one line, int32, and back."""
    wide = bits.to(tl.int32)
    return tl.where(wide < 0, wide ^ 0x7FFF, wide)


@triton.jit
def write_kernel(old, new, first, positions, steps, total, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    a, b = tl.load(old + i, i < total, other=0), tl.load(new + i, i < total, other=0)
    changed = a != b
    to = tl.load(first + tl.program_id(0)) + tl.cumsum(changed.to(tl.int32), 0) - 1
    tl.store(positions + to, i, changed)
    tl.store(steps + to, ordered(b) - ordered(a), changed)


@triton.jit
def scatter_kernel(new, positions, steps, changes, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < changes
    at = new + tl.load(positions + i, mask, other=0)
    place = ordered(tl.load(at, mask, other=0)) + tl.load(steps + i, mask, other=0)
    tl.store(at, ordered(place).to(tl.int16), mask)


def encode_delta(old: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """Same as `ref.weight_sync.encode_delta`."""
    check_versions(old, new)
    need(new)
    a, b = (t.contiguous().view(torch.int16).flatten() for t in (old, new))
    programs = triton.cdiv(b.numel(), BLOCK)
    counts = torch.zeros(programs, dtype=torch.int32, device=b.device)
    if programs:
        count_kernel[(programs,)](a, b, counts, b.numel(), BLOCK=BLOCK, **EXACT)
    behind = counts.cumsum(0)
    changes = int(behind[-1]) if programs else 0
    positions = torch.empty(changes, dtype=torch.int64, device=b.device)
    steps = torch.empty(changes, dtype=torch.int32, device=b.device)
    if changes:
        write_kernel[(programs,)](a, b, behind - counts, positions, steps, b.numel(), BLOCK=BLOCK, num_warps=8, **EXACT)
    return positions, steps


def apply_delta(old: Tensor, positions: Tensor, steps: Tensor) -> Tensor:
    """Same as `ref.weight_sync.apply_delta`. Positions are checked only on the CPU, to avoid waiting for a GPU; where
    steps lead, nowhere."""
    check_delta(old, positions, steps)
    need(old)
    new = old.contiguous().clone()
    if len(positions):
        scatter_kernel[(triton.cdiv(len(positions), BLOCK),)](
            new.view(torch.int16).flatten(),
            positions.contiguous(),
            steps.contiguous(),
            len(positions),
            BLOCK=BLOCK,
            num_warps=8,
            **EXACT,
        )
    return new
