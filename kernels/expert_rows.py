"""Triton kernels behind `ref/expert_rows.py`: tokens to their experts and back.

    sort_by_expert    a counting sort: programs count their assignments per expert, and counts are summed over programs. An
                      assignment's row is the count of earlier programs plus its own rank. No atomics, so the order is fixed
    permute, unpermute    gathers, in both directions and for all gradients

No number goes to the host: group sizes stay on the device as `ends`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .bits import round_bfloat16
from .launch import EXACT, INTERPRETED, need

__all__ = ["permute", "sort_by_expert", "unpermute"]


@triton.jit
def count_kernel(experts, counts, total, EP: tl.constexpr, BLOCK: tl.constexpr):
    """Assignments per expert among BLOCK of them: counts [programs, EP]."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    e = tl.load(experts + i, i < total, other=-1).to(tl.int32)
    one = (e[:, None] == tl.arange(0, EP)[None, :]).to(tl.int32)
    tl.store(counts + tl.program_id(0).to(tl.int64) * EP + tl.arange(0, EP), tl.sum(one, 0))


@triton.jit
def place_kernel(experts, first, order, place, total, EP: tl.constexpr, BLOCK: tl.constexpr):
    """Rows of BLOCK assignments; `first` [programs, EP] is the first row of each expert."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    e = tl.load(experts + i, i < total, other=-1).to(tl.int32)
    one = (e[:, None] == tl.arange(0, EP)[None, :]).to(tl.int32)
    base = tl.load(first + tl.program_id(0).to(tl.int64) * EP + tl.arange(0, EP))
    row = tl.sum(one * (tl.cumsum(one, 0) - one), 1).to(tl.int64) + tl.sum(one.to(tl.int64) * base[None, :], 1)
    tl.store(place + i, row, i < total)
    tl.store(order + row, i, i < total)


def sort_by_expert(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Same as `ref.expert_rows.sort_by_expert`. That experts exist is checked only on the CPU, to avoid waiting for a GPU."""
    if experts.ndim != 2 or experts.is_floating_point():
        raise ValueError(f"experts must be an int tensor of shape [N, K]; got {experts.dtype} of shape {list(experts.shape)}")
    flat, total = experts.contiguous(), experts.numel()
    if not experts.is_cuda and total and not 0 <= int(flat.min()) <= int(flat.max()) < num_experts:
        raise ValueError(f"experts must lie between 0 and {num_experts - 1}; got {int(flat.min())} to {int(flat.max())}")
    need(experts)
    EP = triton.next_power_of_2(num_experts)
    BLOCK = 64 if INTERPRETED else max(16, min(128, 16384 // EP))
    programs = triton.cdiv(total, BLOCK)
    order, place = (torch.empty(total, dtype=torch.int64, device=flat.device) for _ in range(2))
    counts = torch.zeros(programs, EP, dtype=torch.int32, device=flat.device)
    if total:
        count_kernel[(programs,)](flat, counts, total, EP=EP, BLOCK=BLOCK, **EXACT)
    ends = counts.sum(0).cumsum(0)
    if total:
        before = counts.cumsum(0) - counts + (ends - counts.sum(0))
        place_kernel[(programs,)](flat, before, order, place, total, EP=EP, BLOCK=BLOCK, num_warps=8, **EXACT)
    return order, place.view(experts.shape), ends[:num_experts]


@triton.jit
def gather_kernel(x, index, out, N, D, K: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr):
    """out[r] = x[index[r] // K]."""
    r = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    token = tl.load(index + r, r < N, other=0) // K
    inside = (r < N)[:, None] & (d < D)[None, :]
    tl.store(out + r[:, None] * D + d[None, :], tl.load(x + token[:, None] * D + d[None, :], inside, other=0.0), inside)


@triton.jit
def combine_kernel(rows, place, gates, out, N, D, K: tl.constexpr, GATES: tl.constexpr, ROUND: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr):
    """out[n] = Σ_k gates[n, k] · rows[place[n, k]], summed in float32 in the order of k."""
    n = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    inside = (n < N)[:, None] & (d < D)[None, :]
    y = tl.zeros((BM, BD), tl.float32)
    for k in range(K):
        row = tl.load(place + n * K + k, n < N, other=0)
        v = tl.load(rows + row[:, None] * D + d[None, :], inside, other=0.0).to(tl.float32)
        if GATES:
            v = v * tl.load(gates + n * K + k, n < N, other=0.0).to(tl.float32)[:, None]
        y += v
    if ROUND:  # the interpreter's cast to bfloat16 does not round to nearest even
        y = round_bfloat16(y)
    tl.store(out + n[:, None] * D + d[None, :], y.to(out.dtype.element_ty), inside)


def gather(x: Tensor, index: Tensor, K: int) -> Tensor:
    x, out = x.contiguous(), torch.empty(len(index), x.shape[1], dtype=x.dtype, device=x.device)
    if out.numel():
        BM, BD = (32, 64) if INTERPRETED else (4, 1024)
        grid = triton.cdiv(len(index), BM), triton.cdiv(x.shape[1], BD)
        gather_kernel[grid](x, index, out, len(index), x.shape[1], K=K, BM=BM, BD=BD, **EXACT)
    return out


def combine(rows: Tensor, place: Tensor, gates: Tensor | None) -> Tensor:
    rows, (N, K), D = rows.contiguous(), place.shape, rows.shape[1]
    out = torch.empty(N, D, dtype=rows.dtype, device=rows.device)
    if out.numel():
        BM, BD = (32, 64) if INTERPRETED else (4, 512)
        combine_kernel[(triton.cdiv(N, BM), triton.cdiv(D, BD))](
            rows,
            place,
            place if gates is None else gates.contiguous(),
            out,
            N,
            D,
            K=K,
            GATES=gates is not None,
            ROUND=INTERPRETED and rows.dtype == torch.bfloat16,
            BM=BM,
            BD=BD,
        )
    return out


class Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, order, place):
        ctx.save_for_backward(place)
        return gather(x, order, place.shape[1])

    @staticmethod
    def backward(ctx, d_rows):
        return combine(d_rows, ctx.saved_tensors[0], None), None, None


class Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, order, place, gates):
        ctx.save_for_backward(rows, order, place, gates)
        return combine(rows, place, gates)

    @staticmethod
    def backward(ctx, dy):
        rows, order, place, gates = ctx.saved_tensors
        spread = gather(dy, order, place.shape[1])
        d_gates = (spread.float() * rows.float()).sum(1)[place].to(gates.dtype)
        return (spread.float() * gates.flatten()[order].float()[:, None]).to(rows.dtype), None, None, d_gates


def permute(x: Tensor, order: Tensor, place: Tensor) -> Tensor:
    """Same as `ref.expert_rows.permute`."""
    _match(order, place)
    if x.ndim != 2 or len(x) != len(place):
        raise ValueError(f"x must have shape [{len(place)}, D]; got {list(x.shape)}")
    need(x)
    return Permute.apply(x, order, place.contiguous())


def unpermute(rows: Tensor, order: Tensor, place: Tensor, gates: Tensor) -> Tensor:
    """Same as `ref.expert_rows.unpermute`."""
    _match(order, place)
    if rows.ndim != 2 or len(rows) != place.numel():
        raise ValueError(f"rows must have shape [{place.numel()}, D]; got {list(rows.shape)}")
    if gates.shape != place.shape:
        raise ValueError(f"gates must have shape {list(place.shape)}; got {list(gates.shape)}")
    need(rows)
    return Unpermute.apply(rows, order, place.contiguous(), gates)


def _match(order: Tensor, place: Tensor) -> None:
    if place.ndim != 2 or order.shape != (place.numel(),):
        raise ValueError(f"order and place must have shapes [N·K] and [N, K]; got {list(order.shape)} and {list(place.shape)}")
