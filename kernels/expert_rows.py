"""Triton kernels behind `ref/expert_rows.py`: tokens to their experts and back.

    sort_by_expert    a counting sort: programs count their assignments per expert, and counts are summed over programs.
                      An
                      assignment's row is the count of earlier programs plus its own rank. No atomics, so the order is
                      fixed
    aligned           the same sort for products of quantised rows, where every expert's rows start at a multiple of 128
    permute, unpermute    gathers, in both directions and for all gradients

No number goes to the host: group sizes stay on the device as `ends`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .bits import round_bfloat16
from .launch import EXACT, INTERPRETED, need

__all__ = ["aligned", "combine", "gate_gradient", "gather", "permute", "sort_by_expert", "unpermute"]


@triton.jit
def count_kernel(experts, counts, total, EP: tl.constexpr, BLOCK: tl.constexpr):
    """Assignments per expert among BLOCK of them: counts [programs, EP]."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    e = tl.load(experts + i, i < total, other=-1).to(tl.int32)
    one_hot = (e[:, None] == tl.arange(0, EP)[None, :]).to(tl.int32)
    tl.store(counts + tl.program_id(0).to(tl.int64) * EP + tl.arange(0, EP), tl.sum(one_hot, 0))


@triton.jit
def place_kernel(experts, first, order, place, total, EP: tl.constexpr, BLOCK: tl.constexpr):
    """Rows of BLOCK assignments; `first` [programs, EP] is the first row of each expert."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    e = tl.load(experts + i, i < total, other=-1).to(tl.int32)
    one_hot = (e[:, None] == tl.arange(0, EP)[None, :]).to(tl.int32)
    base = tl.load(first + tl.program_id(0).to(tl.int64) * EP + tl.arange(0, EP))
    row = tl.sum(one_hot * (tl.cumsum(one_hot, 0) - one_hot), 1).to(tl.int64) + tl.sum(
        one_hot.to(tl.int64) * base[None, :], 1
    )
    tl.store(place + i, row, i < total)
    tl.store(order + row, i, i < total)


@triton.jit
def offsets_kernel(counts, first, bounds, programs, E, ALIGN: tl.constexpr, EP: tl.constexpr, BLOCK: tl.constexpr):
    """From counts [programs, EP]: where every expert's rows begin, bounds [E + 1], at multiples of ALIGN; and the first
    row of each program's assignments, first [programs, EP]. One program, since every number depends on all before
    it."""
    e, p = tl.arange(0, EP), tl.arange(0, BLOCK)
    total = tl.zeros((EP,), tl.int64)
    for start in range(0, programs, BLOCK):
        mask = (start + p < programs)[:, None] & (e < EP)[None, :]
        total += tl.sum(
            tl.load(counts + (start + p).to(tl.int64)[:, None] * EP + e[None, :], mask, other=0).to(tl.int64), 0
        )
    room = (total + ALIGN - 1) // ALIGN * ALIGN
    behind = tl.cumsum(room, 0)
    tl.store(bounds + 1 + e, behind, e < E)
    tl.store(bounds + e, tl.zeros((EP,), tl.int64), e == 0)
    running = behind - room
    for start in range(0, programs, BLOCK):
        at = (start + p).to(tl.int64)[:, None] * EP + e[None, :]
        mask = (start + p < programs)[:, None] & (e < EP)[None, :]
        block_counts = tl.load(counts + at, mask, other=0).to(tl.int64)
        tl.store(first + at, running[None, :] + tl.cumsum(block_counts, 0) - block_counts, mask)
        running += tl.sum(block_counts, 0)


def checked(experts: Tensor, num_experts: int) -> Tensor:
    """experts, contiguous. Raises ValueError unless it is [N, K] of experts that exist."""
    if experts.ndim != 2 or experts.is_floating_point():
        raise ValueError(
            f"experts must be an int tensor of shape [N, K]; got {experts.dtype} of shape {list(experts.shape)}"
        )
    flat, total = experts.contiguous(), experts.numel()
    if not experts.is_cuda and total and not 0 <= int(flat.min()) <= int(flat.max()) < num_experts:
        raise ValueError(
            f"experts must lie between 0 and {num_experts - 1}; got {int(flat.min())} to {int(flat.max())}"
        )
    need(experts)
    return flat


def sorted_places(flat: Tensor, num_experts: int, align: int, order: Tensor) -> tuple[Tensor, Tensor]:
    """The row of every assignment [N·K], and the experts' bounds [E + 1]; the assignment of every row is written to
    `order`."""
    total, EP = flat.numel(), triton.next_power_of_2(num_experts)
    BLOCK = 64 if INTERPRETED else max(16, min(128, 16384 // EP))
    programs = triton.cdiv(total, BLOCK)
    counts = torch.empty(programs, EP, dtype=torch.int32, device=flat.device)
    first = torch.empty(programs, EP, dtype=torch.int64, device=flat.device)
    bounds, place = (torch.empty(n, dtype=torch.int64, device=flat.device) for n in (num_experts + 1, total))
    if total:
        count_kernel[(programs,)](flat, counts, total, EP=EP, BLOCK=BLOCK, **EXACT)
    offsets_kernel[(1,)](
        counts, first, bounds, programs, num_experts, ALIGN=align, EP=EP, BLOCK=max(16, 4096 // EP), **EXACT
    )
    if total:
        place_kernel[(programs,)](flat, first, order, place, total, EP=EP, BLOCK=BLOCK, num_warps=8, **EXACT)
    return place, bounds


def sort_by_expert(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Same as `ref.expert_rows.sort_by_expert`. That experts exist is checked only on the CPU, to avoid waiting for a
    GPU."""
    flat = checked(experts, num_experts)
    order = torch.empty(flat.numel(), dtype=torch.int64, device=flat.device)
    place, bounds = sorted_places(flat, num_experts, 1, order)
    return order, place.view(experts.shape), bounds[1:]


def aligned(experts: Tensor, num_experts: int, align: int = 128) -> tuple[Tensor, Tensor, Tensor]:
    """As `sort_by_expert`, where every expert's rows start at a multiple of `align`. source [P]: the assignment of each
    row, −1 on padding. place [N, K]: the row of each assignment. bounds [E + 1]. P = align · (⌈N·K / align⌉ + E) is
    enough for any split, so the host waits for nothing; with align 1 it is N·K, and nothing is padding."""
    flat = checked(experts, num_experts)
    if align == 1:
        source = torch.empty(flat.numel(), dtype=torch.int64, device=flat.device)
    else:
        source = torch.full(
            ((-(-flat.numel() // align) + num_experts) * align,), -1, dtype=torch.int64, device=flat.device
        )
    place, bounds = sorted_places(flat, num_experts, align, source)
    return source, place.view(experts.shape), bounds


@triton.jit
def gather_kernel(
    x,
    index,
    gates,
    out,
    N,
    D,
    K: tl.constexpr,
    GATES: tl.constexpr,
    ROUND: tl.constexpr,
    BM: tl.constexpr,
    BD: tl.constexpr,
):
    """out[r] = x[index[r] // K], times gates[index[r]] if there are gates; zeros where index[r] is −1."""
    r = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    place = tl.load(index + r, r < N, other=-1)
    real, inside = (place >= 0)[:, None] & (d < D)[None, :], (r < N)[:, None] & (d < D)[None, :]
    v = tl.load(x + (place // K)[:, None] * D + d[None, :], real, other=0.0)
    if GATES:
        v = v.to(tl.float32) * tl.load(gates + place, place >= 0, other=0.0).to(tl.float32)[:, None]
        if ROUND:
            v = round_bfloat16(v)
    tl.store(out + r[:, None] * D + d[None, :], v.to(out.dtype.element_ty), inside)


@triton.jit
def combine_kernel(
    rows,
    place,
    gates,
    out,
    N,
    D,
    K: tl.constexpr,
    GATES: tl.constexpr,
    ROUND: tl.constexpr,
    BM: tl.constexpr,
    BD: tl.constexpr,
):
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


def gather(x: Tensor, index: Tensor, K: int, gates: Tensor | None = None) -> Tensor:
    """The row x[i // K] for every i of index, times gates[i] if there are gates; zeros for −1."""
    x, out = x.contiguous(), torch.empty(len(index), x.shape[1], dtype=x.dtype, device=x.device)
    if out.numel():
        BM, BD = (32, 64) if INTERPRETED else (4, 1024)
        grid = triton.cdiv(len(index), BM), triton.cdiv(x.shape[1], BD)
        gates_argument = index if gates is None else gates.contiguous()
        ROUND = INTERPRETED and x.dtype == torch.bfloat16
        gather_kernel[grid](
            x,
            index,
            gates_argument,
            out,
            len(index),
            x.shape[1],
            K=K,
            GATES=gates is not None,
            ROUND=ROUND,
            BM=BM,
            BD=BD,
            **EXACT,
        )
    return out


def combine(rows: Tensor, place: Tensor, gates: Tensor | None) -> Tensor:
    """Σ_k gates[n, k] · rows[place[n, k]], in the dtype of rows; without gates, each counts once."""
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


@triton.jit
def gate_gradient_kernel(
    dy, rows, place, out, N, D, K: tl.constexpr, ROUND: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr
):
    """out[n, k] = Σ_d dy[n, d] · rows[place[n, k], d]."""
    n = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    for k in range(K):
        row = tl.load(place + n * K + k, n < N, other=0)
        y = tl.zeros((BM, BD), tl.float32)
        for start in range(0, D, BD):
            d = start + tl.arange(0, BD)
            inside = (n < N)[:, None] & (d < D)[None, :]
            v = tl.load(dy + n[:, None] * D + d[None, :], inside, other=0.0).to(tl.float32)
            y += v * tl.load(rows + row[:, None] * D + d[None, :], inside, other=0.0).to(tl.float32)
        g = tl.sum(y, 1)
        if ROUND:
            g = round_bfloat16(g)
        tl.store(out + n * K + k, g.to(out.dtype.element_ty), n < N)


def gate_gradient(dy: Tensor, rows: Tensor, place: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradient [N, K] of gates in Σ_k gates[n, k] · rows[place[n, k]], from that of the sum, dy [N, D]."""
    (N, K), D = place.shape, dy.shape[1]
    out = torch.empty(N, K, dtype=dtype, device=dy.device)
    if out.numel():
        BM, BD = (32, 64) if INTERPRETED else (4, 512)
        ROUND = INTERPRETED and dtype == torch.bfloat16
        gate_gradient_kernel[(triton.cdiv(N, BM),)](
            dy.contiguous(), rows.contiguous(), place, out, N, D, K=K, ROUND=ROUND, BM=BM, BD=BD
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
        d_gates = gate_gradient(dy, rows, place, gates.dtype)
        return gather(dy.to(rows.dtype), order, place.shape[1], gates), None, None, d_gates


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
        raise ValueError(
            f"order and place must have shapes [N·K] and [N, K]; got {list(order.shape)} and {list(place.shape)}"
        )
