"""Four pieces of the network with their gradients written out, because a small model spends its time between
the products.

Autograd would build each from eight to twenty element-wise calls and save their results; written out, forward
and backward take about a third of the time on a CPU (`etude bench model` measures the whole). Each is also
what a fused kernel of the scaled path computes, so the formulas below are the ones to check a kernel against.
All are exact: `gradcheck` in float64 holds every one to its definition, and tests hold them to autograd's.

| function | value | gradient |
|---|---|---|
| `rms_norm` | y = x̂·w, x̂ = x/√(mean x² + ε) | dx = r(ŷ − x̂·mean(ŷ·x̂)), ŷ = dy·w, r = 1/√(…); dw = Σ dy·x̂ |
| `norm_rope` | R(x̂·w), R turns pairs by the position's angle | the same with dy ← R⁻¹ dy |
| `experts_swiglu` | Σ_k g_k · W2_e(silu(W1_e x)·W3_e x) over a token's experts e | products grouped by expert (dgrad, wgrad) |
| `linear_logprob` | log softmax(W h)[t] | dh = (W[t] − Wᵀp)·g, dW = Σ g(1_t − p)hᵀ, p = softmax(W h) computed again |
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

__all__ = ["experts_swiglu", "linear_logprob", "norm_rope", "rms_norm"]


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """1/√(mean x² + ε) over the last dimension, kept, in at least float32."""
    wide = torch.promote_types(x.dtype, torch.float32)
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
    return norm.square_().mul_(1.0 / x.shape[-1]).add_(eps).rsqrt_()


def norm_backward(d: Tensor, unit: Tensor, r: Tensor) -> Tensor:
    """Gradient through x̂ = x·r(x): r(d − x̂·mean(d·x̂))."""
    along = (d * unit).sum(-1, keepdim=True).mul_(-1.0 / unit.shape[-1])
    return torch.addcmul(d, unit, along).mul_(r.to(d.dtype))


class RMSNormFunction(Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        r = inverse_rms(x, eps)
        unit = (x * r).to(x.dtype)
        ctx.save_for_backward(unit, r, weight)
        return unit * weight

    @staticmethod
    def backward(ctx, dy):
        unit, r, weight = ctx.saved_tensors
        dw = (dy * unit).flatten(0, -2).sum(0)
        return norm_backward(dy * weight, unit, r), dw, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / √(mean x² + ε) · weight; x [..., D], weight [D]."""
    return RMSNormFunction.apply(x, weight, eps)


class NormRope(Function):
    @staticmethod
    def forward(ctx, x, weight, cos, sin, eps):
        r = inverse_rms(x, eps)
        unit = (x * r).to(x.dtype)
        y = unit * weight
        ctx.save_for_backward(unit, r, weight, cos, sin)
        return torch.addcmul(y * cos, y.roll(x.shape[-1] // 2, -1), sin)

    @staticmethod
    def backward(ctx, dy):
        unit, r, weight, cos, sin = ctx.saved_tensors
        d = torch.add(dy * cos, (dy * sin).roll(dy.shape[-1] // 2, -1))
        dw = (d * unit).flatten(0, -3).sum(0)
        return norm_backward(d * weight, unit, r), dw, None, None, None


def norm_rope(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """QK-norm, then rotary embedding: x [B, T, H, d], weight [H, d], cos and sin [(B,) T, 1, d] as
    `rope_table` gives them (the sine's first half negated, so that turning is y·cos + swap(y)·sin, the swap
    being a roll by d/2)."""
    return NormRope.apply(x, weight, cos, sin, eps)


class ExpertsSwiGLU(Function):
    @staticmethod
    def forward(ctx, x, gates, w13, w2, experts):
        N, K = experts.shape
        flat = experts.flatten()
        order = flat.argsort(stable=True)
        back = torch.empty_like(order).scatter_(0, order, torch.arange(N * K, device=order.device))
        ends = torch.bincount(flat, minlength=w13.shape[0]).cumsum(0).to(torch.int32)
        tokens = order // K
        rows = x.index_select(0, tokens)
        up = F.grouped_mm(rows, w13.transpose(1, 2), offs=ends)
        gate, value = up.chunk(2, -1)
        inner = F.silu(gate).mul_(value)
        # Back in token order a token's K results lie side by side: a gather and a product instead of a
        # scatter, and the same sum each run.
        y = F.grouped_mm(inner, w2.transpose(1, 2), offs=ends).index_select(0, back).view(N, K, -1)
        ctx.save_for_backward(rows, gates, w13, w2, order, back, tokens, ends, up, inner, y)
        return (y * gates.unsqueeze(2)).sum(1)

    @staticmethod
    def backward(ctx, dout):
        rows, gates, w13, w2, order, back, tokens, ends, up, inner, y = ctx.saved_tensors
        N, K, D = y.shape
        d_gates = (y * dout.unsqueeze(1)).sum(2)
        dy = dout.index_select(0, tokens).mul_(gates.flatten().index_select(0, order).unsqueeze(1))
        d_inner = F.grouped_mm(dy, w2, offs=ends)
        d_w2 = F.grouped_mm(dy.t(), inner, offs=ends)
        gate, value = up.chunk(2, -1)
        d_up = torch.empty_like(up)
        d_gate, d_value = d_up.chunk(2, -1)
        torch.mul(d_inner, F.silu(gate), out=d_value)
        d_gate.copy_(torch.ops.aten.silu_backward(d_inner.mul_(value), gate))
        d_rows = F.grouped_mm(d_up, w13, offs=ends)
        d_w13 = F.grouped_mm(d_up.t(), rows, offs=ends)
        return d_rows.index_select(0, back).view(N, K, D).sum(1), d_gates, d_w13, d_w2, None


def experts_swiglu(x: Tensor, gates: Tensor, w13: Tensor, w2: Tensor, experts: Tensor) -> Tensor:
    """Mixture of SwiGLU experts on sorted tokens: x [N, D], gates [N, K], w13 [E, 2I, D] (gate rows above up
    rows), w2 [E, D, I], experts [N, K] int64 → [N, D]. No loop over tokens or experts, no synchronisation."""
    return ExpertsSwiGLU.apply(x, gates, w13, w2, experts)


class LinearLogprob(Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, chunk):
        wide = torch.promote_types(hidden.dtype, torch.float32)
        logp = hidden.new_empty(len(targets), dtype=wide)
        for start in range(0, len(targets), chunk):
            at = slice(start, start + chunk)
            scores = F.linear(hidden[at], weight).log_softmax(-1, dtype=wide)
            logp[at] = scores.gather(1, targets[at, None])[:, 0]
        ctx.save_for_backward(hidden, weight, targets)
        ctx.chunk = chunk
        return logp

    @staticmethod
    def backward(ctx, g):
        hidden, weight, targets = ctx.saved_tensors
        d_hidden, d_weight = torch.empty_like(hidden), torch.zeros_like(weight, dtype=g.dtype)
        for start in range(0, len(targets), ctx.chunk):
            at = slice(start, start + ctx.chunk)
            d = F.linear(hidden[at], weight).softmax(-1, dtype=g.dtype).mul_(-g[at, None])
            d = d.scatter_add_(1, targets[at, None], g[at, None]).to(hidden.dtype)
            d_hidden[at] = d @ weight
            d_weight += d.t() @ hidden[at]
        return d_hidden, d_weight.to(weight.dtype), None, None


def linear_logprob(hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int = 1024) -> Tensor:
    """Log-probability in nats (float32 or wider) of targets [N] under softmax(hidden [N, D] · weight [V,
    D]ᵀ), `chunk` rows at a time: the N × V logits never exist at once, in either direction."""
    return LinearLogprob.apply(hidden, weight, targets, chunk)
