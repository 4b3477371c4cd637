"""Triton kernel behind `ref.router_replay.route`: the experts of every token, and their gates.

A program takes some tokens' scores into registers and picks k times: what is kept of a replay first, by score, then the
router's own best; the K-th score, which the filter needs, comes from the same picking. Gates follow.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import EXACT, INTERPRETED, need

__all__ = ["route"]

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
    e, row_mask = tl.arange(0, EP), n < N
    inside = row_mask[:, None] & (e < E)[None, :]
    s = tl.load(scores + n[:, None] * E + e[None, :], inside, other=float("-inf")).to(tl.float32)
    own = tl.where(inside, key(s), NOBODY)
    replay_mask = tl.zeros((BM, EP), tl.int32)
    if REPLAY:
        for i in range(K):
            r = tl.load(replayed + n * K + i, row_mask, other=0)
            replay_mask = tl.where((r[:, None] == e[None, :]) & inside, 1, replay_mask)
        if FILTER:
            left, floor = own, tl.full((BM,), float("-inf"), tl.float32)
            for i in range(K):
                best = tl.argmax(left, 1, tie_break_left=True)
                at = best[:, None] == e[None, :]
                floor = tl.sum(tl.where(at, tl.where(s == float("-inf"), 0.0, s), 0.0), 1)
                none = tl.sum((at & (s == float("-inf"))).to(tl.int32), 1) > 0
                floor = tl.where(none, float("-inf"), floor)
                left = tl.where(at, NOBODY, left)
            replay_mask = tl.where(s >= (floor + log_alpha)[:, None], replay_mask, 0)
    i, expert_ids, picked = tl.arange(0, KP), tl.zeros((BM, KP), tl.int32), tl.full((BM, KP), float("-inf"), tl.float32)
    for j in range(K):
        first = tl.where(replay_mask > 0, own, NOBODY)
        has_replay = tl.sum(tl.where(own == NOBODY, 0, replay_mask), 1) > 0
        best = tl.argmax(tl.where(has_replay[:, None], first, own), 1, tie_break_left=True)
        at = best[:, None] == e[None, :]
        value = tl.max(tl.where(at, s, float("-inf")), 1)
        expert_ids = tl.where((i == j)[None, :], best[:, None], expert_ids)
        picked = tl.where((i == j)[None, :], value[:, None], picked)
        own, replay_mask = tl.where(at, NOBODY, own), tl.where(at, 0, replay_mask)
    real = (i < K)[None, :]
    weighed = tl.where(real, picked, float("-inf")) if NORMALISE else s
    top = tl.max(weighed, 1)
    safe = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp(weighed - safe[:, None]), 1)
    g = tl.exp(picked - safe[:, None]) / total[:, None]
    out = n[:, None] * K + i[None, :]
    tl.store(experts + out, expert_ids.to(tl.int64), row_mask[:, None] & real)
    tl.store(gates + out, g.to(gates.dtype.element_ty), row_mask[:, None] & real)


class Route(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scores, k, replayed, alpha, normalise):
        N, E = scores.shape
        experts = torch.empty(N, k, dtype=torch.int64, device=scores.device)
        gates = torch.empty(N, k, dtype=torch.float32, device=scores.device)
        EP, KP = triton.next_power_of_2(E), triton.next_power_of_2(k)
        BM = 32 if INTERPRETED else max(1, min(16, 1024 // EP))
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
                **EXACT,
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
            d = torch.zeros(scores.shape, dtype=torch.float32, device=scores.device).scatter_(
                1, experts, gates * (dg - along)
            )
        else:
            d = -along * scores.float().softmax(-1)
            d.scatter_add_(1, experts, gates * dg)
        return d.to(scores.dtype), None, None, None, None


def route(
    scores: Tensor, k: int, replayed: Tensor | None = None, alpha: float = 0.0, normalise: bool = True
) -> tuple[Tensor, Tensor]:
    """As `ref.router_replay.route`, scores float32 or bfloat16. What only the values tell (NaN among the scores,
    repeated experts) raises ValueError on the CPU; on a GPU it would cost a wait, and is not looked at. Gates of which
    none weighs anything are NaN."""
    if scores.ndim != 2 or scores.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"scores must be float32 or bfloat16, shape [N, E]; got {scores.dtype} {list(scores.shape)}")
    N, E = scores.shape
    if not 1 <= k <= E:
        raise ValueError(f"k must lie between 1 and the {E} experts, got {k}")
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha must lie between 0 and 1, got {alpha}")
    if replayed is not None and (replayed.shape != (N, k) or replayed.is_floating_point()):
        raise ValueError(f"replayed must be int, shape [{N}, {k}]; got {replayed.dtype} {list(replayed.shape)}")
    replayed = None if replayed is None else replayed.contiguous()
    if not scores.is_cuda and N:
        if not bool((scores < math.inf).all() and (scores > -math.inf).any(1).all()):
            raise ValueError("scores must be finite or -inf, and in each row finite for some expert")
        sorted_experts = torch.arange(k) if replayed is None else replayed.sort(1)[0]
        if (
            int(sorted_experts.min()) < 0
            or int(sorted_experts.max()) >= E
            or bool((sorted_experts.diff(dim=-1) == 0).any())
        ):
            raise ValueError(f"replayed must be {k} distinct experts of the {E} in each row")
    need(scores)
    return Route.apply(scores.contiguous(), k, replayed, alpha, normalise)
