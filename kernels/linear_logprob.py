"""Triton kernels behind `ref/network/linear_logprob.py`: per-token log-prob, entropy and KL without the logits.

Forward: a program takes BM tokens and a slice of the vocabulary, goes over it BV tokens at a time and keeps a running
maximum, sum and weighted sum; slices are combined afterwards. Backward: for one slice of the vocabulary at a time, one
kernel recomputes the logits and writes their gradient, and two library products turn that into the gradients of hidden
and weight. Extra memory: the gradient of one slice, a sixteenth of the vocabulary, in the dtype of hidden. For bfloat16
that is 3% of the float32 logits.
"""

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from .bits import round_bfloat16
from .launch import INTERPRETED, configs, fitting, need

__all__ = ["linear_kl", "linear_logprob"]

SLICES = 3 if INTERPRETED else 16
"""Slices of the vocabulary: parallel programs in the forward pass, successive steps in the backward pass."""


@triton.jit
def logits_tile(
    hidden, weight, n, v, N, V, D, UPCAST: tl.constexpr, BM: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr
):
    """hidden[n] @ weight[v]ᵀ in float32 [BM, BV]; both are contiguous."""
    z = tl.zeros((BM, BV), tl.float32)
    for start in range(0, D, BK):
        k = start + tl.arange(0, BK)
        h = tl.load(hidden + n[:, None] * D + k[None, :], (n[:, None] < N) & (k[None, :] < D), other=0.0)
        w = tl.load(weight + v[None, :] * D + k[:, None], (v[None, :] < V) & (k[:, None] < D), other=0.0)
        if UPCAST:  # the interpreter's bfloat16 products are wrong
            h, w = h.to(tl.float32), w.to(tl.float32)
        z = tl.dot(h, w, z, input_precision="ieee")
    return z


@triton.jit
def running(z, values, m, l, s, OWN: tl.constexpr):
    """Add a tile [BM, BV] of logits to a running maximum m, l = Σ e^(z − m), and s = Σ e^(z − m) · values, or with OWN
    Σ e^(z − m) · (z − m): logits of a trained head are far from zero, and only their differences matter."""
    top = tl.maximum(m, tl.max(z, 1))
    # A row whose tile is all padding keeps −inf, and −inf − −inf is NaN.
    safe = tl.where(top == float("-inf"), 0.0, top)
    down = tl.where(m == float("-inf"), 0.0, m - safe)
    old = tl.where(m == float("-inf"), 0.0, tl.exp(down))
    away = z - safe[:, None]
    e = tl.exp(away)
    if OWN:
        return top, l * old + tl.sum(e, 1), (s + l * down) * old + tl.sum(tl.where(e > 0, e * away, 0.0), 1)
    return top, l * old + tl.sum(e, 1), s * old + tl.sum(tl.where(e > 0, e * values, 0.0), 1)


TILES = (
    {"BM": 32, "BV": 64, "BK": 32},
    ({"BM": 128, "BV": 128, "BK": 64}, 8, 3),
    ({"BM": 64, "BV": 256, "BK": 64}, 8, 3),
    ({"BM": 64, "BV": 128, "BK": 64}, 8, 3),
    ({"BM": 64, "BV": 128, "BK": 64}, 4, 4),
    ({"BM": 64, "BV": 64, "BK": 64}, 4, 4),
)
PLAIN = ({"BM": 64, "BV": 64, "BK": 32}, 4, 3), ({"BM": 32, "BV": 64, "BK": 32}, 4, 3)


@triton.autotune(
    configs=configs(*TILES, plain=PLAIN),
    key=["N", "V", "D", "C"],
    prune_configs_by=fitting("linear_logprob.forward_kernel", "KL"),
)
@triton.jit
def forward_kernel(
    hidden,
    weight,
    targets,
    other_hidden,
    other_weight,
    out,
    N,
    V,
    D,
    C,
    width,
    KL: tl.constexpr,
    UPCAST: tl.constexpr,
    BM: tl.constexpr,
    BV: tl.constexpr,
    BK: tl.constexpr,
):
    """out [slices, 4 or 6, N]: m, l, Σ e (z − m), the target's logit; with KL: m, l, Σ e (z − y), and the other's m, l,
    Σ e' (y − z)."""
    n = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    part = tl.program_id(1).to(tl.int64)
    m, l, s = tl.full((BM,), float("-inf"), tl.float32), tl.zeros((BM,), tl.float32), tl.zeros((BM,), tl.float32)
    m2, l2, s2 = m, l, s
    if not KL:
        target = tl.load(targets + n, n < N, other=-1)
    end = tl.minimum((part + 1) * width, V)
    for start in range(part * width, end, BV):
        v = start + tl.arange(0, BV)
        vocab_mask = (v < end)[None, :]
        z = logits_tile(hidden, weight, n, v, N, V, D, UPCAST, BM, BV, BK)
        if KL:
            y = logits_tile(other_hidden, other_weight, n, v, N, V, C, UPCAST, BM, BV, BK)
            m, l, s = running(tl.where(vocab_mask, z, float("-inf")), z - y, m, l, s, False)
            m2, l2, s2 = running(tl.where(vocab_mask, y, float("-inf")), y - z, m2, l2, s2, False)
        else:
            m, l, s = running(tl.where(vocab_mask, z, float("-inf")), z, m, l, s, True)
            m2 = tl.where(
                (target >= start) & (target < tl.minimum(start + BV, end)),
                tl.sum(tl.where(v[None, :] == target[:, None], z, 0.0), 1),
                m2,
            )
    rows: tl.constexpr = 6 if KL else 4
    to = out + part * rows * N + n
    tl.store(to, m, n < N)
    tl.store(to + N, l, n < N)
    tl.store(to + 2 * N, s, n < N)
    tl.store(to + 3 * N, m2, n < N)
    if KL:
        tl.store(to + 4 * N, l2, n < N)
        tl.store(to + 5 * N, s2, n < N)


@triton.autotune(
    configs=configs(*TILES, plain=PLAIN),
    key=["N", "V", "D", "C"],
    prune_configs_by=fitting("linear_logprob.backward_kernel", "MODE"),
)
@triton.jit
def backward_kernel(
    hidden,
    weight,
    targets,
    other_hidden,
    other_weight,
    top,
    log_sum,
    value,
    other_top,
    other_log_sum,
    g,
    g2,
    out,
    N,
    V,
    D,
    C,
    first,
    width,
    MODE: tl.constexpr,
    UPCAST: tl.constexpr,
    BM: tl.constexpr,
    BV: tl.constexpr,
    BK: tl.constexpr,
):
    """Gradient with respect to the logits of `width` tokens from `first` on, [N, width]. MODE 0: of g · log p + g2 ·
    entropy (value: entropy); 1: of g · KL(q‖p); 2: of g · KL(p‖q) (value: KL). log Σ e^z comes in two parts, the
    largest logit and the rest."""
    n = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    column = tl.program_id(1).to(tl.int64) * BV + tl.arange(0, BV)
    v = first + column
    z = logits_tile(hidden, weight, n, v, N, V, D, UPCAST, BM, BV, BK)
    logp = z - tl.load(top + n, n < N, other=0.0)[:, None] - tl.load(log_sum + n, n < N, other=0.0)[:, None]
    p, up = tl.exp(logp), tl.load(g + n, n < N, other=0.0)[:, None]
    if MODE == 0:
        # 1 − p of a likely target, computed from its log-probability: the subtraction would cancel nearly all digits.
        small = -logp * (1 + logp * (0.5 + logp * (0.16666667 + logp * 0.041666668)))
        left = tl.where(logp > -0.06, small, 1 - p)
        target = tl.load(targets + n, n < N, other=-1)[:, None]
        entropy = tl.load(value + n, n < N, other=0.0)[:, None]
        d = up * tl.where(v[None, :] == target, left, -p) - tl.load(g2 + n, n < N, other=0.0)[:, None] * p * (
            logp + entropy
        )
    else:
        y = logits_tile(other_hidden, other_weight, n, v, N, V, C, UPCAST, BM, BV, BK)
        logq = (
            y
            - tl.load(other_top + n, n < N, other=0.0)[:, None]
            - tl.load(other_log_sum + n, n < N, other=0.0)[:, None]
        )
        if MODE == 1:
            d = up * (p - tl.exp(logq))
        else:
            d = up * p * (logp - logq - tl.load(value + n, n < N, other=0.0)[:, None])
    if UPCAST and out.dtype.element_ty == tl.bfloat16:  # the interpreter's cast does not round to nearest even
        d = round_bfloat16(d)
    tl.store(
        out + n[:, None] * width + column[None, :],
        d.to(out.dtype.element_ty),
        (n[:, None] < N) & (column[None, :] < width),
    )


def stats(hidden: Tensor, weight: Tensor, targets: Tensor, other_head: tuple[Tensor, Tensor] | None) -> Tensor:
    """The output of `forward_kernel` for all slices: [slices, 4 or 6, N]."""
    need(hidden)
    (N, D), V = hidden.shape, len(weight)
    width = -(-V // SLICES)
    slices = -(-V // width)
    out = torch.empty(slices, 6 if other_head else 4, N, dtype=torch.float32, device=hidden.device)
    x, w = other_head or (hidden, weight)
    grid = lambda tile: (triton.cdiv(N, tile["BM"]), slices)
    if N:
        forward_kernel[grid](
            hidden,
            weight,
            targets,
            x,
            w,
            out,
            N,
            V,
            D,
            x.shape[1],
            width,
            KL=other_head is not None,
            UPCAST=INTERPRETED,
        )
    return out


def together(m: Tensor, l: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Slices [slices, N] → log Σ e^z in float64, and the same in two float32 parts, the largest logit and the rest."""
    top = m.amax(0)
    lse = (m.double() + l.double().log()).logsumexp(0)
    return lse, (top, (lse - top).float())


def gradients(
    needed, hidden, weight, targets, other_head, parts, value, other_parts, g, g2, mode
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of hidden and weight, slice by slice of the vocabulary."""
    (N, D), V = hidden.shape, len(weight)
    width = -(-V // SLICES)
    x, w = other_head or (hidden, weight)
    to_hidden = torch.zeros(N, D, dtype=torch.float32, device=hidden.device) if needed[0] else None
    to_weight = torch.zeros_like(weight) if needed[1] else None
    g, g2 = (t.float().contiguous() for t in (g, g2))
    for first in range(0, V if N else 0, width):
        wide = min(width, V - first)
        d = torch.empty(N, wide, dtype=hidden.dtype, device=hidden.device)
        grid = lambda tile: (triton.cdiv(N, tile["BM"]), triton.cdiv(wide, tile["BV"]))  # noqa: B023
        backward_kernel[grid](
            hidden,
            weight,
            targets,
            x,
            w,
            *parts,
            value,
            *other_parts,
            g,
            g2,
            d,
            N,
            V,
            D,
            x.shape[1],
            first,
            wide,
            MODE=mode,
            UPCAST=INTERPRETED,
        )
        if needed[0]:
            # Slices are summed in float32: rounding each of them would lose more than rounding the sum.
            weight_slice = weight[first : first + wide]
            to_hidden += (
                torch.mm(d, weight_slice, out_dtype=torch.float32) if d.is_cuda else d.float() @ weight_slice.float()
            )
        if needed[1]:
            torch.mm(d.T, hidden, out=to_weight[first : first + wide])
    return None if to_hidden is None else to_hidden.to(hidden.dtype), to_weight


class LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets):
        m, l, s, t = stats(hidden, weight, targets, None).unbind(1)
        lse, parts = together(m, l)
        entropy = (lse - ((s + l.double() * m) * (m - lse).exp()).sum(0)).float()
        ctx.save_for_backward(hidden, weight, targets, *parts, entropy)
        return (t.amax(0) - lse).float(), entropy

    @staticmethod
    def backward(ctx, g, g2):
        hidden, weight, targets, top, log_sum, entropy = ctx.saved_tensors
        parts = top, log_sum
        return *gradients(ctx.needs_input_grad, hidden, weight, targets, None, parts, entropy, parts, g, g2, 0), None


class LinearKL(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, x, w, mode):
        m, l, s, m2, l2, s2 = stats(hidden, weight, hidden, (x, w)).unbind(1)
        (lse, parts), (other_lse, other_parts) = together(m, l), together(m2, l2)
        if mode == 1:
            kl = (s2 * (m2 - other_lse).exp()).sum(0) - other_lse + lse
        else:
            kl = (s * (m - lse).exp()).sum(0) - lse + other_lse
        kl = kl.float()
        ctx.save_for_backward(hidden, weight, x, w, *parts, kl, *other_parts)
        ctx.mode = mode
        return kl

    @staticmethod
    def backward(ctx, g):
        hidden, weight, x, w, top, log_sum, kl, *other_parts = ctx.saved_tensors
        grads = gradients(
            ctx.needs_input_grad, hidden, weight, hidden, (x, w), (top, log_sum), kl, other_parts, g, g, ctx.mode
        )
        return *grads, None, None, None


def linear_logprob(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Same as `ref.network.linear_logprob.linear_logprob`, for float32 and bfloat16."""
    hidden, weight = _ready(hidden, weight)
    if targets.shape != hidden.shape[:1] or targets.is_floating_point():
        raise ValueError(
            f"targets must be an int tensor of shape [{len(hidden)}]; got {targets.dtype} of shape "
            f"{list(targets.shape)}"
        )
    if not targets.is_cuda and targets.numel() and not 0 <= int(targets.min()) <= int(targets.max()) < len(weight):
        raise ValueError(
            f"targets must be tokens 0 to {len(weight) - 1}; got {int(targets.min())} to {int(targets.max())}"
        )
    return LinearLogprob.apply(hidden, weight, targets.long().contiguous())


def linear_kl(
    hidden: Tensor,
    weight: Tensor,
    other_hidden: Tensor,
    other_weight: Tensor,
    target_kind: Literal["teacher", "reference"] = "teacher",
) -> Tensor:
    """Same as `ref.network.linear_logprob.linear_kl`, for float32 and bfloat16."""
    hidden, weight = _ready(hidden, weight)
    x, w = _ready(other_hidden.detach(), other_weight.detach())
    if len(x) != len(hidden) or len(w) != len(weight):
        raise ValueError(
            f"other_hidden and other_weight must have {len(hidden)} and {len(weight)} rows; got {len(x)} and {len(w)}"
        )
    if target_kind not in ("teacher", "reference"):
        raise ValueError(f"target_kind must be teacher or reference, got {target_kind!r}")
    return LinearKL.apply(hidden, weight, x, w, 1 if target_kind == "teacher" else 2)


def _ready(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1] or not weight.numel():
        raise ValueError(
            f"hidden and weight must be [N, D] and [V, D]; got {list(hidden.shape)} and {list(weight.shape)}"
        )
    if hidden.dtype != weight.dtype or hidden.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"hidden and weight must both be float32 or bfloat16; got {hidden.dtype} and {weight.dtype}")
    return hidden.contiguous(), weight.contiguous()
