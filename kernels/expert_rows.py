"""Triton kernels of a mixture of experts, except for its products: `route` of `ref/router_replay.py`, and `ref/expert_rows.py`.

    route             a program loads some tokens' scores into registers and picks k times: first the kept experts of a replay, by
                      score, then the router's own best. The K-th score, which the filter needs, is found the same way; then the gates
    sort_by_expert    a counting sort: programs count their assignments per expert, and counts are summed over programs. An
                      assignment's row is the count of earlier programs plus its own rank. No atomics, so the order is fixed
    permute, unpermute    gathers, in both directions and for all gradients

No number goes to the host: group sizes stay on the device as `ends`.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.bits import round_bfloat16
from kernels.launch import INTERPRETED, need

__all__ = ["permute", "route", "sort_by_expert", "unpermute"]

NOBODY = tl.constexpr(-2147483648)
"""Below every score's key."""


@triton.jit
def key(x):
    """float32 → int32 that sorts like the number; −0 is 0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def route_kernel(
    scores,
    replayed,
    experts,
    gates,
    N,
    E,
    log_alpha,
    K: tl.constexpr,
    KP: tl.constexpr,
    EP: tl.constexpr,
    BM: tl.constexpr,
    REPLAY: tl.constexpr,
    FILTER: tl.constexpr,
    NORMALISE: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    e, here = tl.arange(0, EP), n < N
    inside = here[:, None] & (e < E)[None, :]
    s = tl.load(scores + n[:, None] * E + e[None, :], inside, other=float("-inf")).to(tl.float32)
    own = tl.where(inside, key(s), NOBODY)
    kept = tl.zeros((BM, EP), tl.int32)
    if REPLAY:
        for i in range(K):
            r = tl.load(replayed + n * K + i, here, other=0)
            kept = tl.where((r[:, None] == e[None, :]) & inside, 1, kept)
        if FILTER:
            left, floor = own, tl.full((BM,), float("-inf"), tl.float32)
            for i in range(K):
                best = tl.argmax(left, 1, tie_break_left=True)
                at = best[:, None] == e[None, :]
                floor = tl.sum(tl.where(at, tl.where(s == float("-inf"), 0.0, s), 0.0), 1)
                none = tl.sum((at & (s == float("-inf"))).to(tl.int32), 1) > 0
                floor = tl.where(none, float("-inf"), floor)
                left = tl.where(at, NOBODY, left)
            kept = tl.where(s >= (floor + log_alpha)[:, None], kept, 0)
    i, chosen, picked = tl.arange(0, KP), tl.zeros((BM, KP), tl.int32), tl.full((BM, KP), float("-inf"), tl.float32)
    for j in range(K):
        first = tl.where(kept > 0, own, NOBODY)
        some = tl.sum(tl.where(own == NOBODY, 0, kept), 1) > 0
        best = tl.argmax(tl.where(some[:, None], first, own), 1, tie_break_left=True)
        at = best[:, None] == e[None, :]
        value = tl.max(tl.where(at, s, float("-inf")), 1)
        chosen = tl.where((i == j)[None, :], best[:, None], chosen)
        picked = tl.where((i == j)[None, :], value[:, None], picked)
        own, kept = tl.where(at, NOBODY, own), tl.where(at, 0, kept)
    real = (i < K)[None, :]
    weighed = tl.where(real, picked, float("-inf")) if NORMALISE else s
    top = tl.max(weighed, 1)
    safe = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp(weighed - safe[:, None]), 1)
    g = tl.exp(picked - safe[:, None]) / total[:, None]
    out = n[:, None] * K + i[None, :]
    tl.store(experts + out, chosen.to(tl.int64), here[:, None] & real)
    tl.store(gates + out, g.to(gates.dtype.element_ty), here[:, None] & real)


class Route(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scores, k, replayed, alpha, normalise):
        N, E = scores.shape
        experts = torch.empty(N, k, dtype=torch.int64, device=scores.device)
        gates = torch.empty(N, k, dtype=torch.float32, device=scores.device)
        EP, KP = triton.next_power_of_2(E), triton.next_power_of_2(k)
        BM = 32 if INTERPRETED else max(1, min(16, 2048 // EP))
        if N:
            route_kernel[(triton.cdiv(N, BM),)](
                scores,
                experts if replayed is None else replayed,
                experts,
                gates,
                N,
                E,
                math.log(alpha) if alpha else -math.inf,
                K=k,
                KP=KP,
                EP=EP,
                BM=BM,
                REPLAY=replayed is not None,
                FILTER=replayed is not None and alpha > 0,
                NORMALISE=normalise,
            )
        ctx.save_for_backward(scores, gates, experts)
        ctx.normalise = normalise
        ctx.mark_non_differentiable(experts)
        return gates.to(scores.dtype), experts

    @staticmethod
    def backward(ctx, dg, *_):
        scores, gates, experts = ctx.saved_tensors
        dg = dg.float()
        along = (dg * gates).sum(1, keepdim=True)
        if ctx.normalise:
            d = torch.zeros(scores.shape, dtype=torch.float32, device=scores.device).scatter_(1, experts, gates * (dg - along))
        else:
            d = -along * scores.float().softmax(-1)
            d.scatter_add_(1, experts, gates * dg)
        return d.to(scores.dtype), None, None, None, None


def route(scores: Tensor, k: int, replayed: Tensor | None = None, alpha: float = 0.0, normalise: bool = True) -> tuple[Tensor, Tensor]:
    """Same as `ref.router_replay.route`, for float32 or bfloat16 scores. Errors in the values (NaN among the scores, repeated experts)
    raise ValueError on the CPU; on a GPU the check would have to wait, so it is skipped. If all gates have weight zero, they are NaN."""
    if scores.ndim != 2 or scores.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"scores must be float32 or bfloat16 of shape [N, E]; got {scores.dtype} of shape {list(scores.shape)}")
    N, E = scores.shape
    if not 1 <= k <= E:
        raise ValueError(f"k must lie between 1 and the {E} experts; got {k}")
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha must lie between 0 and 1; got {alpha}")
    if replayed is not None and (replayed.shape != (N, k) or replayed.is_floating_point()):
        raise ValueError(f"replayed must be an int tensor of shape [{N}, {k}]; got {replayed.dtype} of shape {list(replayed.shape)}")
    replayed = None if replayed is None else replayed.contiguous()
    if not scores.is_cuda and N:
        if not bool((scores < math.inf).all() and (scores > -math.inf).any(1).all()):
            raise ValueError("scores must be finite or -inf, with a finite one in each row")
        some = torch.arange(k) if replayed is None else replayed.sort(1)[0]
        if int(some.min()) < 0 or int(some.max()) >= E or bool((some.diff(dim=-1) == 0).any()):
            raise ValueError(f"replayed must be {k} distinct experts of the {E} in each row")
    need(scores)
    return Route.apply(scores.contiguous(), k, replayed, alpha, normalise)


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
        count_kernel[(programs,)](flat, counts, total, EP=EP, BLOCK=BLOCK)
    ends = counts.sum(0).cumsum(0)
    if total:
        before = counts.cumsum(0) - counts + (ends - counts.sum(0))
        place_kernel[(programs,)](flat, before, order, place, total, EP=EP, BLOCK=BLOCK)
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
        gather_kernel[(triton.cdiv(len(index), BM), triton.cdiv(x.shape[1], BD))](x, index, out, len(index), x.shape[1], K=K, BM=BM, BD=BD)
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
