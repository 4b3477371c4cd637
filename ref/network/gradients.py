"""Five pieces of the network with their gradients written out, because a small model spends its time between
the products.

Autograd would build each from eight to twenty element-wise calls and save their results; written out, forward
and backward take about a third of the time on a CPU (`etude bench model` measures the whole). Each is also
what a fused kernel of the scaled path computes, so the formulas below are the ones to check a kernel against.
All are exact: `gradcheck` in float64 holds every one to its definition, and tests hold them to autograd's.

| function | value | gradient |
|---|---|---|
| `rms_norm` | y = x̂·w, x̂ = x/√(mean x² + ε) | dx = r(ŷ − x̂·mean(ŷ·x̂)), ŷ = dy·w, r = 1/√(…); dw = Σ dy·x̂ |
| `turned_heads` | R(x̂·w), or R(x·w), R turns pairs by the position's angle | the same with dy ← Rᵀ dy |
| `attend` | softmax(q kᵀ + bias) v, its weights p stored | ds = p∘(dp − Σ p∘dp), dp = dy vᵀ |
| `experts_swiglu` | Σ_k g_k · W2_e(silu(W1_e x)·W3_e x) over a token's experts e | products by expert (dgrad, wgrad) |
| `chunked_logprob` | log softmax(W h)[t] | dh = (W[t] − Wᵀp)·g, dW = Σ g(1_t − p)hᵀ, p = softmax(W h) computed again |
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from ref.network.bfloat16 import NATIVE

__all__ = ["attend", "experts_swiglu", "chunked_logprob", "rms_norm", "turned_heads"]


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """1/√(mean x² + ε) over the last dimension, kept; the squares are summed in at least float32."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32))
    return norm.square_().mul_(1.0 / x.shape[-1]).add_(eps).rsqrt_()  # r = 1/√(mean x² + ε)


class RMSNormFunction(Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        r = inverse_rms(x, eps)
        ctx.save_for_backward(x, weight, r)
        return (x * r.to(x.dtype)).mul_(weight)  # y = x̂·w, x̂ = r·x

    @staticmethod
    def backward(ctx, dy):
        x, weight, r = ctx.saved_tensors
        g = dy * r.to(dy.dtype)
        along = g * x
        dw = along.flatten(0, -2).sum(0)  # dw = Σ dy·x̂
        scale = (along @ weight.unsqueeze(1)).mul_(-1.0 / x.shape[-1]) * r.square()  # −r² · mean(ŷ·x̂)
        return torch.addcmul(g.mul_(weight), x, scale.to(x.dtype)), dw, None  # dx = r(ŷ − x̂·mean(ŷ·x̂))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / √(mean x² + ε) · weight; x [..., D], weight [D]."""
    return RMSNormFunction.apply(x, weight, eps)


class TurnedHeads(Function):
    @staticmethod
    def forward(ctx, qkv, weight, cos, sin, kv_heads, eps):
        B, T, _, d = qkv.shape
        C, G = len(weight), kv_heads
        q, k, v = (qkv.new_empty(B, G, n, T, d) for n in (C // G - 1, 1, 1))
        x = qkv[:, :, :C]
        r = x.new_ones(1, 1, C, 1) if eps is None else inverse_rms(x, eps).to(x.dtype)
        z = x * (cos * weight)  # R(x·w), its cosine part
        z.addcmul_(x.roll(d // 2, -1), sin * weight.roll(d // 2, -1))  # R(x·w), its sine part
        for heads, output in ((slice(0, C - G), q), (slice(C - G, C), k)):
            head_groups = (part[:, :, heads].unflatten(2, (G, -1)) for part in (z, r))
            torch.mul(*head_groups, out=output.permute(0, 3, 1, 2, 4))
        v.permute(0, 3, 1, 2, 4).copy_(qkv[:, :, C:].unsqueeze(3))
        ctx.save_for_backward(qkv, weight, cos, sin, r)
        ctx.normed = eps is not None
        return q, k.squeeze(2), v.squeeze(2)

    @staticmethod
    def backward(ctx, dq, dk, dv):
        qkv, weight, cos, sin, r = ctx.saved_tensors
        C, G, d = len(weight), dk.shape[1], qkv.shape[3]
        d_qkv, x = torch.empty_like(qkv), qkv[:, :, :C]
        g = torch.empty_like(x)
        for heads, grad_heads in ((slice(0, C - G), dq), (slice(C - G, C), dk.unsqueeze(2))):
            out = g[:, :, heads].unflatten(2, (G, -1))
            torch.mul(grad_heads.permute(0, 3, 1, 2, 4), r[:, :, heads].unflatten(2, (G, -1)), out=out)
        u = (g * cos).addcmul_(g.roll(d // 2, -1), sin.roll(d // 2, -1))  # r · Rᵀ dy
        if ctx.normed:
            along = u * x
            dw = along.flatten(0, 1).sum(0)
            # −r² · mean(ŷ·x̂)
            scale = (along * weight).sum(-1, keepdim=True).mul_(-1.0 / d).mul_(r.square())
            torch.addcmul(u.mul_(weight), x, scale, out=d_qkv[:, :, :C])  # dx as for RMSNorm
        else:
            dw = (u * x).sum((0, 1)) if ctx.needs_input_grad[1] else None
            torch.mul(u, weight, out=d_qkv[:, :, :C])
        d_qkv[:, :, C:].unsqueeze(3).copy_(dv.unsqueeze(2).permute(0, 3, 1, 2, 4))
        return d_qkv, dw, None, None, None, None


def turned_heads(
    qkv: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, kv_heads: int, eps: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """QK-norm and rotary embedding, heads to the front: qkv [B, T, H + 2G, d] → q [B, G, H/G, T, d], k and v
    [B, G, T, d]. Without `eps` there is no norm: x·w takes the place of x̂·w.

    weight [H + G, d] (any factor for the scores included), cos and sin [(B,) T, 1, d] as `rope_table` gives
    them: the sine's first half negated, so that turning is y·cos + swap(y)·sin, the swap being a roll by
    d/2."""
    return TurnedHeads.apply(qkv, weight, cos, sin, kv_heads, eps)


class Attend(Function):
    @staticmethod
    def forward(ctx, q, k, v, bias, block):
        B, G, R, T, d = q.shape
        out, ctx.blocks, weights = q.new_empty(B, T, G, R, d), query_blocks(T, k.shape[2], block), []
        for rows, num_keys in ctx.blocks:
            q_block = q[:, :, :, rows].reshape(B * G, -1, d)
            k_block, v_block = (tensor[:, :, :num_keys].flatten(0, 1) for tensor in (k, v))
            if bias is None:
                p = torch.bmm(q_block, k_block.transpose(1, 2))  # q kᵀ
            else:
                bias_block = bias.unflatten(1, (R, T))[:, :, rows, :num_keys].flatten(1, 2)
                p = torch.baddbmm(bias_block, q_block, k_block.transpose(1, 2))  # q kᵀ + bias
            weights.append(torch.softmax(p, -1, out=p))  # p = softmax(q kᵀ + bias)
            # p v
            out[:, rows] = torch.bmm(p, v_block).view(B, G, R, -1, d).permute(0, 3, 1, 2, 4)
        ctx.save_for_backward(q, k, v, *weights)
        return out.flatten(2)

    @staticmethod
    def backward(ctx, dout):
        q, k, v, *weights = ctx.saved_tensors
        B, G, R, _, d = q.shape
        dout = dout.unflatten(2, (G, R, d)).permute(0, 2, 3, 1, 4)
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for (rows, num_keys), p in zip(ctx.blocks, weights, strict=True):
            q_block, dy = (tensor[:, :, :, rows].reshape(B * G, -1, d) for tensor in (q, dout))
            k_block, v_block = (tensor[:, :, :num_keys].flatten(0, 1) for tensor in (k, v))
            ds = torch.bmm(dy, v_block.transpose(1, 2))  # dp = dy vᵀ
            ds = torch.ops.aten._softmax_backward_data(ds, p, -1, p.dtype)  # ds = p∘(dp − Σ p∘dp)
            dq[:, :, :, rows] = torch.bmm(ds, k_block).view(B, G, R, -1, d)  # dq = ds k
            dk[:, :, :num_keys] += torch.bmm(ds.transpose(1, 2), q_block).unflatten(0, (B, G))  # dk = dsᵀ q
            dv[:, :, :num_keys] += torch.bmm(p.transpose(1, 2), dy).unflatten(0, (B, G))  # dv = pᵀ dy
        return dq, dk, dv, None, None


def query_blocks(T: int, S: int, block: int) -> list[tuple[slice, int]]:
    """The T queries behind S − T older keys in blocks, each with the number of keys that its last one sees:
    of four blocks' products, three eighths need not be computed."""
    return [(slice(t, min(t + block, T)), S - T + min(t + block, T)) for t in range(0, T, block)]


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool = False, block: int = 64) -> Tensor:
    """softmax(q kᵀ + bias) v with its weights stored: q [B, G, R, T, d] (scaled already; the R query heads
    that share a key head stand one below another, so that nothing is repeated), k and v [B, G, S, d], bias [1
    or B·G, R·T, S] → [B, T, G·R·d]. `causal` promises that the bias hides from each query all keys behind its
    own; scores are then computed for `block` queries at a time, without the keys that none of them sees."""
    return Attend.apply(q, k, v, bias, block if causal else q.shape[3])


class Groups:
    """The N·K rows of a mixture, ordered by expert. Each group is padded to a multiple of `pad` rows: in
    bfloat16 on a CPU a product's code is compiled for each new shape (by oneDNN, in 1.5 ms; the product
    itself takes 0.1), and unpadded groups are new shapes in every step."""

    def __init__(self, experts: Tensor, num_experts: int):
        N, K = experts.shape
        flat = experts.flatten()
        pad = 2 ** max(4, (N * K // num_experts // 16).bit_length() - 1)
        expert_ids = torch.arange(num_experts, device=flat.device)
        rank = (flat == expert_ids.unsqueeze(1)).cumsum(1, dtype=torch.int32)
        self.lengths = [-(-load // pad) * pad for load in rank[:, -1].tolist()]
        """Rows of every expert, padding included."""
        length = torch.tensor(self.lengths, device=flat.device)
        last = length.cumsum(0)
        first = last - length
        self.ends = last.int()
        """[E] behind the last row of every expert."""
        rows = first.index_select(0, flat) + rank.gather(0, flat[None])[0] - 1
        self.rows = rows.view(N, K)
        """[N, K] row of token n's k-th expert."""
        token = torch.arange(N * K, device=flat.device) // K
        self.tokens = flat.new_zeros(sum(self.lengths)).index_copy_(0, rows, token)
        """Token of every row; the rows that pad hold token 0, with gate 0."""

    def mm(self, a: Tensor, b: Tensor) -> Tensor:
        """Every group's product: rows a [R, P] by b [E, P, Q] → [R, Q], or columns a [P, R] by rows b [R, Q]
        → [E, P, Q]."""
        width, by_rows = a.element_size(), b.ndim == 3
        aligned = a.shape[by_rows] * width % 16 == 0 and b.shape[-1] * width % 16 == 0
        is_fast = a.is_cuda or NATIVE or a.dtype is not torch.bfloat16
        if aligned and a.dtype != torch.float64 and is_fast:  # `aligned` is the library's condition
            return F.grouped_mm(a, b, offs=self.ends)
        if by_rows:
            return torch.cat([x @ y for x, y in zip(a.split(self.lengths), b, strict=True)])
        parts = zip(a.split(self.lengths, 1), b.split(self.lengths), strict=True)
        return torch.stack([x @ y for x, y in parts])


class ExpertsSwiGLU(Function):
    @staticmethod
    def forward(ctx, x, gates, w13, w2, experts):
        if not len(x):  # a rank of expert parallelism that no token chose: its weights get zeros, not nothing
            ctx.groups = None
            ctx.save_for_backward(gates, w13, w2)
            return x.new_zeros(x.shape)
        groups = Groups(experts, len(w13))
        rows = x.index_select(0, groups.tokens)
        up = groups.mm(rows, w13.transpose(1, 2))
        gate, value = up.chunk(2, -1)
        act = F.silu(gate)
        inner = act * value  # silu(W1_e x) · W3_e x
        y = groups.mm(inner, w2.transpose(1, 2))  # W2_e(silu(W1_e x) · W3_e x)
        ctx.save_for_backward(rows, gates, w13, w2, up, act, inner, y)
        ctx.groups = groups
        return gather_sum(y, groups.rows, gates)  # Σ_k g_k · y_k

    @staticmethod
    def backward(ctx, dout):
        if ctx.groups is None:
            return dout, *map(torch.zeros_like, ctx.saved_tensors), None
        rows, gates, w13, w2, up, act, inner, y = ctx.saved_tensors
        groups, token_rows = ctx.groups, ctx.groups.rows.flatten()
        dy = dout.index_select(0, groups.tokens)
        dg = (dy * y).sum(-1).index_select(0, token_rows).view_as(gates)  # dg = dy · y
        dy.mul_(gates.new_zeros(len(y)).index_copy_(0, token_rows, gates.flatten()).unsqueeze(1))
        d_w2 = groups.mm(dy.t(), inner) if ctx.needs_input_grad[3] else None  # wgrad of W2: (g·dy)ᵀ inner
        d_inner, d_up = groups.mm(dy, w2), torch.empty_like(up)
        (gate, value), (d_gate, d_value) = up.chunk(2, -1), d_up.chunk(2, -1)
        torch.mul(d_inner, act, out=d_value)
        # through silu, to the gate
        torch.ops.aten.silu_backward.grad_input(d_inner.mul_(value), gate, grad_input=d_gate)
        d_w13 = groups.mm(d_up.t(), rows) if ctx.needs_input_grad[2] else None  # wgrad of W1, W3
        d_rows = groups.mm(d_up, w13)  # dgrad
        return gather_sum(d_rows, groups.rows), dg, d_w13, d_w2, None


def gather_sum(rows: Tensor, index: Tensor, weight: Tensor | None = None) -> Tensor:
    """Σ_k weight[n, k] · rows[index[n, k]], in one pass; the same sum each run, for nothing is scattered."""
    return F.embedding_bag(index, rows, mode="sum", per_sample_weights=weight)


def experts_swiglu(x: Tensor, gates: Tensor, w13: Tensor, w2: Tensor, experts: Tensor) -> Tensor:
    """Mixture of SwiGLU experts on sorted tokens: x [N, D], gates [N, K], w13 [E, 2I, D] (gate rows above up
    rows), w2 [E, D, I], experts [N, K] int64 → [N, D]. No loop over tokens."""
    return ExpertsSwiGLU.apply(x, gates, w13, w2, experts)


class LinearLogprob(Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, chunk):
        wide = torch.promote_types(hidden.dtype, torch.float32)
        logp = hidden.new_empty(len(targets), dtype=wide)
        for h, t, out in zip(hidden.split(chunk), targets.split(chunk), logp.split(chunk), strict=True):
            # log softmax(W h)[t]
            out.copy_(F.linear(h, weight).to(wide).log_softmax(-1).gather(1, t[:, None])[:, 0])
        ctx.save_for_backward(hidden, weight, targets, logp)
        ctx.chunk = chunk
        return logp

    @staticmethod
    def backward(ctx, g):
        hidden, weight, targets, logp = ctx.saved_tensors
        minus_g = g.neg().unsqueeze(1).to(hidden.dtype)
        d_hidden = torch.empty_like(hidden)
        d_weight = (
            torch.zeros_like(weight, dtype=g.dtype) if ctx.needs_input_grad[1] else None
        )  # a frozen head has none
        parts = (x.split(ctx.chunk) for x in (hidden, targets, logp, minus_g, d_hidden))
        for h, t, lp, mg, dh in zip(*parts, strict=True):
            p = F.linear(h, weight).softmax(-1)  # p = softmax(W h), computed again
            # p − 1 at the target, from its log-probability: of a sure token bfloat16 would leave nothing.
            target = torch.arange(len(t), device=t.device) * p.shape[1] + t
            p.view(-1).index_copy_(0, target, lp.expm1().to(p.dtype))
            torch.mul(p @ weight, mg, out=dh)  # dh = (W[t] − Wᵀp)·g
            if d_weight is not None:
                d_weight += p.t() @ (h * mg)  # dW = Σ g(1_t − p)hᵀ
        return d_hidden, None if d_weight is None else d_weight.to(weight.dtype), None, None


def chunked_logprob(hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int = 2048) -> Tensor:
    """Log-probability in nats (float32 or wider) of targets [N] under softmax(hidden [N, D] · weight [V,
    D]ᵀ), `chunk` rows at a time: the N × V logits never exist at once, in either direction."""
    return LinearLogprob.apply(hidden, weight, targets, chunk)
