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

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

__all__ = ["attend", "experts_swiglu", "linear_logprob", "rms_norm", "turned_heads"]


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """1/√(mean x² + ε) over the last dimension, kept; the squares are summed in at least float32."""
    norm = torch.linalg.vector_norm(
        x, dim=-1, keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32)
    )
    return norm.square_().mul_(1.0 / x.shape[-1]).add_(eps).rsqrt_()


class RMSNormFunction(Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        r = inverse_rms(x, eps)
        ctx.save_for_backward(x, weight, r)
        return (x * r.to(x.dtype)).mul_(weight)

    @staticmethod
    def backward(ctx, dy):
        x, weight, r = ctx.saved_tensors
        g = dy * r.to(dy.dtype)
        along = g * x
        dw = along.flatten(0, -2).sum(0)
        scale = (along @ weight.unsqueeze(1)).mul_(-1.0 / x.shape[-1]) * r.square()
        return torch.addcmul(g.mul_(weight), x, scale.to(x.dtype)), dw, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / √(mean x² + ε) · weight; x [..., D], weight [D]."""
    return RMSNormFunction.apply(x, weight, eps)


def chunks(rows: int, numbers_per_row: int) -> list[slice]:
    """Slices of so many rows that a pass over one finds in the processor's cache what the pass before left
    there."""
    step = max(1, CACHED // numbers_per_row)
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


CACHED = 2**18
"""Numbers in a chunk: two or three such buffers fit in a core's second-level cache."""


class TurnedHeads(Function):
    @staticmethod
    def forward(ctx, qkv, weight, cos, sin, kv_heads, eps):
        B, T, _, d = qkv.shape
        C, G = len(weight), kv_heads
        R, half = C // G - 1, d // 2
        cos_w, sin_w = cos * weight, sin * weight.roll(half, -1)
        q, k, v = (qkv.new_empty(B, G, n, T, d) for n in (R, 1, 1))
        r = qkv.new_empty(B, T, C, 1)
        for at in chunks(B, T * C * d):
            x = qkv[at, :, :C]
            r[at] = inverse_rms(x, eps)
            z = x * (cos_w if cos.ndim == 3 else cos_w[at])
            z.addcmul_(x.roll(half, -1), sin_w if sin.ndim == 3 else sin_w[at])
            for heads, some in ((slice(0, C - G), q), (slice(C - G, C), k)):
                by_group = (part[:, :, heads].unflatten(2, (G, -1)) for part in (z, r[at]))
                torch.mul(*by_group, out=some[at].permute(0, 3, 1, 2, 4))
            v[at].permute(0, 3, 1, 2, 4).copy_(qkv[at, :, C:].unsqueeze(3))
        ctx.save_for_backward(qkv, weight, cos, sin, r)
        return q, k.squeeze(2), v.squeeze(2)

    @staticmethod
    def backward(ctx, dq, dk, dv):
        qkv, weight, cos, sin, r = ctx.saved_tensors
        B, T, _, d = qkv.shape
        C, G, half = len(weight), dk.shape[1], d // 2
        back = sin.roll(half, -1)
        d_qkv = torch.empty_like(qkv)
        dw = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
        for at in chunks(B, T * C * d):
            x = qkv[at, :, :C]
            g = torch.empty_like(x)
            for heads, some in ((slice(0, C - G), dq), (slice(C - G, C), dk.unsqueeze(2))):
                out = g[:, :, heads].unflatten(2, (G, -1))
                torch.mul(some[at].permute(0, 3, 1, 2, 4), r[at, :, heads].unflatten(2, (G, -1)), out=out)
            u = g * (cos if cos.ndim == 3 else cos[at])
            u.addcmul_(g.roll(half, -1), back if back.ndim == 3 else back[at])
            along = u * x
            dw += along.flatten(0, 1).sum(0)
            scale = (along * weight).sum(-1, keepdim=True).mul_(-1.0 / d).mul_(r[at].square())
            torch.addcmul(u.mul_(weight), x, scale, out=d_qkv[at, :, :C])
            d_qkv[at, :, C:].unsqueeze(3).copy_(dv[at].unsqueeze(2).permute(0, 3, 1, 2, 4))
        return d_qkv, dw.to(weight.dtype), None, None, None, None


def turned_heads(
    qkv: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, kv_heads: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """QK-norm and rotary embedding, heads to the front: qkv [B, T, H + 2G, d] → q [B, G, H/G, T, d], k and v
    [B, G, T, d].

    weight [H + G, d] (any factor for the scores included), cos and sin [(B,) T, 1, d] as `rope_table` gives
    them: the sine's first half negated, so that turning is y·cos + swap(y)·sin, the swap being a roll by
    d/2."""
    return TurnedHeads.apply(qkv, weight, cos, sin, kv_heads, eps)


class Attend(Function):
    @staticmethod
    def forward(ctx, q, k, v, bias):
        B, G, R, T, d = q.shape
        S = k.shape[2]
        rows, k, v = q.reshape(B * G, R * T, d), k.reshape(B * G, S, d), v.reshape(B * G, S, d)
        out = q.new_empty(B, T, G * R * d)
        weights = q.new_empty(B * G, R * T, S)
        for at in chunks(B, G * R * T * S):
            some = slice(at.start * G, at.stop * G)
            if bias is None:
                scores = torch.bmm(rows[some], k[some].transpose(1, 2))
            else:
                scores = torch.baddbmm(
                    bias if len(bias) == 1 else bias[some], rows[some], k[some].transpose(1, 2)
                )
            torch.softmax(scores, -1, out=weights[some])
            y = torch.bmm(weights[some], v[some])
            out[at].view(-1, T, G, R, d).copy_(y.view(-1, G, R, T, d).permute(0, 3, 1, 2, 4))
        ctx.save_for_backward(rows, k, v, weights)
        ctx.shape = q.shape
        return out

    @staticmethod
    def backward(ctx, dout):
        rows, k, v, weights = ctx.saved_tensors
        B, G, R, T, d = ctx.shape
        dq, dk, dv = torch.empty_like(rows), torch.empty_like(k), torch.empty_like(v)
        for at in chunks(B, G * R * T * k.shape[1]):
            some = slice(at.start * G, at.stop * G)
            p = weights[some]
            dy = dout[at].view(-1, T, G, R, d).permute(0, 2, 3, 1, 4).reshape(-1, R * T, d)
            ds = torch.bmm(dy, v[some].transpose(1, 2))
            ds = torch.ops.aten._softmax_backward_data(ds, p, -1, p.dtype)
            torch.bmm(ds, k[some], out=dq[some])
            torch.bmm(ds.transpose(1, 2), rows[some], out=dk[some])
            torch.bmm(p.transpose(1, 2), dy, out=dv[some])
        return dq.view(B, G, R, T, d), dk.view(B, G, -1, d), dv.view(B, G, -1, d), None


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    """softmax(q kᵀ + bias) v with its weights stored: q [B, G, R, T, d] (scaled already; the R query heads
    that share a key head stand one below another, so that nothing is repeated), k and v [B, G, S, d], bias [1
    or B·G, R·T, S] → [B, T, G·R·d]."""
    return Attend.apply(q, k, v, bias)


class Bunches:
    """The N·K rows of a mixture sorted by expert, experts of like load side by side, so that a bunch of them
    is one batched product. Groups are padded to the largest of their bunch and that to a multiple of `pad`:
    in bfloat16 on a CPU a product's code is compiled for each new shape (by oneDNN, in 1.5 ms; the product
    itself takes 0.05), and unpadded groups are new shapes in every step."""

    def __init__(self, experts: Tensor, num_experts: int):
        N, K = experts.shape
        flat = experts.flatten()
        pad = 2 ** max(4, (N * K // num_experts // 16).bit_length() - 1)
        load, self.experts = torch.bincount(flat, minlength=num_experts).sort(descending=True, stable=True)
        """Experts, the busiest first."""
        self.members, self.lengths = [], []
        """Of every bunch, how many experts it holds and how many rows each of them has."""
        for size in load.tolist():
            if size and (not self.lengths or size < 0.75 * self.lengths[-1]):
                self.members.append(0)
                self.lengths.append(-(-size // pad) * pad)
            if size:
                self.members[-1] += 1
        starts, total = [], 0
        for members, length in zip(self.members, self.lengths, strict=True):
            starts += range(total, total + members * length, length)
            total += members * length
        start = torch.tensor(starts + [0] * (num_experts - len(starts)), device=flat.device)
        # The j-th of the rows in expert order belongs at start[its expert] + j − (rows of the experts before).
        order = self.experts.argsort()[flat].argsort(stable=True)
        shift = (start - (load.cumsum(0) - load)).repeat_interleave(load)
        rank = torch.arange(N * K, device=flat.device)
        self.rows = torch.empty_like(order).scatter_(0, order, rank + shift).view(N, K)
        """[N, K] row of token n's k-th expert."""
        self.tokens = order.new_zeros(total).scatter_(0, self.rows.flatten(), rank // K)
        """Token of every row; the rows between the groups hold token 0, with gate 0."""

    def weights(self, *weights: Tensor) -> list[tuple[Tensor, ...]]:
        """Per bunch, its experts' part of each weight."""
        experts = self.experts.split([*self.members, len(self.experts) - sum(self.members)])[
            : len(self.members)
        ]
        return [tuple(w.index_select(0, e) for w in weights) for e in experts]

    def scatter(self, like: Tensor, parts: list[Tensor]) -> Tensor:
        """The bunches' parts back in the order of experts, zero for an expert without rows."""
        whole = torch.zeros_like(like)
        whole[self.experts[: sum(self.members)]] = torch.cat(parts)
        return whole

    def batched(self, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Per bunch, its part of each tensor of rows, as [experts, rows of each, ...]."""
        sizes = [members * length for members, length in zip(self.members, self.lengths, strict=True)]
        parts = zip(*(t.split(sizes) for t in tensors), strict=True)
        for members, part in zip(self.members, parts, strict=True):
            yield tuple(t.unflatten(0, (members, -1)) for t in part)


class ExpertsSwiGLU(Function):
    @staticmethod
    def forward(ctx, x, gates, w13, w2, experts):
        bunches = Bunches(experts, len(w13))
        up, y = (x.new_empty(len(bunches.tokens), w.shape[1]) for w in (w13, w2))
        for (a, b), (tokens, up_b, y_b) in zip(
            bunches.weights(w13, w2), bunches.batched(bunches.tokens, up, y)
        ):
            torch.bmm(rows_of(x, tokens), a.transpose(1, 2), out=up_b)
            gate, value = up_b.chunk(2, -1)
            torch.bmm(F.silu(gate).mul_(value), b.transpose(1, 2), out=y_b)
        ctx.save_for_backward(x, gates, w13, w2, up, y)
        ctx.bunches = bunches
        return gather_sum(y, bunches.rows, gates)

    @staticmethod
    def backward(ctx, dout):
        x, gates, w13, w2, up, y = ctx.saved_tensors
        bunches = ctx.bunches
        g = gates.new_zeros(len(y), 1)
        g[bunches.rows] = gates.unsqueeze(2)
        dg, d_rows, d_w13, d_w2 = torch.empty_like(g), torch.empty_like(y), [], []
        parts = bunches.batched(bunches.tokens, up, y, g, dg, d_rows)
        for (a, b), (tokens, up_b, y_b, g_b, dg_b, d_rows_b) in zip(bunches.weights(w13, w2), parts):
            dy = rows_of(dout, tokens)
            torch.sum(dy * y_b, -1, keepdim=True, out=dg_b)
            dy.mul_(g_b)
            gate, value = up_b.chunk(2, -1)
            d_up = torch.empty_like(up_b)
            d_gate, d_value = d_up.chunk(2, -1)
            act, d_inner = F.silu(gate), torch.bmm(dy, b)
            d_w2.append(torch.bmm(dy.transpose(1, 2), act * value))
            torch.mul(d_inner, act, out=d_value)
            torch.ops.aten.silu_backward.grad_input(d_inner.mul_(value), gate, grad_input=d_gate)
            d_w13.append(torch.bmm(d_up.transpose(1, 2), rows_of(x, tokens)))
            torch.bmm(d_up, a, out=d_rows_b)
        d_w13, d_w2 = (bunches.scatter(w, d) for w, d in ((w13, d_w13), (w2, d_w2)))
        return gather_sum(d_rows, bunches.rows), dg[bunches.rows].squeeze(2), d_w13, d_w2, None


def rows_of(x: Tensor, index: Tensor) -> Tensor:
    """x[index] for an index of two dimensions, by the faster call."""
    return x.index_select(0, index.flatten()).view(*index.shape, -1)


def gather_sum(rows: Tensor, index: Tensor, weight: Tensor | None = None) -> Tensor:
    """Σ_k weight[n, k] · rows[index[n, k]], in one pass; the same sum each run, for nothing is scattered."""
    return F.embedding_bag(index, rows, mode="sum", per_sample_weights=weight)


def experts_swiglu(x: Tensor, gates: Tensor, w13: Tensor, w2: Tensor, experts: Tensor) -> Tensor:
    """Mixture of SwiGLU experts on sorted tokens: x [N, D], gates [N, K], w13 [E, 2I, D] (gate rows above up
    rows), w2 [E, D, I], experts [N, K] int64 → [N, D]. Expert by expert, so that a group's intermediate
    results stay in the cache; no loop over tokens."""
    return ExpertsSwiGLU.apply(x, gates, w13, w2, experts)


class LinearLogprob(Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, chunk):
        wide = torch.promote_types(hidden.dtype, torch.float32)
        logp = hidden.new_empty(len(targets), dtype=wide)
        for h, t, out in zip(hidden.split(chunk), targets.split(chunk), logp.split(chunk), strict=True):
            scores = F.linear(h, weight).to(wide)
            torch.sub(scores.gather(1, t[:, None])[:, 0], scores.logsumexp(-1), out=out)
        ctx.save_for_backward(hidden, weight, targets, logp)
        ctx.chunk = chunk
        return logp

    @staticmethod
    def backward(ctx, g):
        hidden, weight, targets, logp = ctx.saved_tensors
        minus_g = g.neg().unsqueeze(1).to(hidden.dtype)
        d_hidden, d_weight = torch.empty_like(hidden), torch.zeros_like(weight, dtype=g.dtype)
        parts = (x.split(ctx.chunk) for x in (hidden, targets, logp, minus_g, d_hidden))
        for h, t, lp, mg, dh in zip(*parts, strict=True):
            p = F.linear(h, weight).softmax(-1)
            # p − 1 at the target, from its log-probability: of a sure token bfloat16 would leave nothing.
            p.scatter_(1, t[:, None], lp.expm1().to(p.dtype)[:, None])
            torch.mul(p @ weight, mg, out=dh)
            d_weight += p.t() @ (h * mg)
        return d_hidden, d_weight.to(weight.dtype), None, None


def linear_logprob(hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int = 1024) -> Tensor:
    """Log-probability in nats (float32 or wider) of targets [N] under softmax(hidden [N, D] · weight [V,
    D]ᵀ), `chunk` rows at a time: the N × V logits never exist at once, in either direction."""
    return LinearLogprob.apply(hidden, weight, targets, chunk)
