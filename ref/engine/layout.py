"""The network laid out for decoding. `Stack` decodes a few rows of one context (`ref/engine/decoder.py` is the loop
around it); `Rows` decodes one row of each of many contexts (`ref/engine/sampler.py`).

`Stack` agrees with `Transformer.forward` within 1e-5 in float32. It differs in five ways:
1. Norm weights are folded into the products after them, and QK-norm weights, where there are any, and the scores'
   1/√d into the rotary tables. All weights are laid out in the order that is fastest for the products.
2. Rotary tables and the causal mask are computed once for `max_len` positions.
3. Keys and values of a layer share one cache: one copy per pass.
4. All experts are multiplied, with a gate of zero for those not chosen, as `ref.network.model` does for a few rows.
   On two cores, one row would run slightly faster with only its own two experts; several rows need most of them.
5. The default is float32: on a CPU a bfloat16 product of a few rows costs more than its float32 counterpart.

`Rows` does 1 and 2 for attention only, and leaves cache and experts to `ref.network.model`.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from ref.network import Config, KVCache, Transformer
from ref.network.model import MLP, Block, rope_table

__all__ = ["Rows", "Stack", "copied", "entrance", "projected", "unit"]


def unit(x: Tensor, eps: Tensor) -> Tensor:
    """x / √(mean x² + ε) over the last dimension: RMSNorm without its weight."""
    norm = torch.linalg.vector_norm(x, 2, -1, True)
    return torch.addcmul(eps, norm, norm, value=1.0 / x.shape[-1]).rsqrt_().mul(x)  # x / √(mean x² + ε)


def copied(weight: Tensor, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """A contiguous copy in another dtype, by default on the CPU, that optimiser steps do not change."""
    return weight.detach().to(device, dtype).clone(memory_format=torch.contiguous_format)


def entrance(block: Block, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor | None, Tensor]:
    """A block's attention weights in the dtype of the rotary tables `rope`: the QKV projection with the norm before it
    folded in [(H+2G)d, D], its bias [(H+2G)d] if there is one, and the tables with QK-norm weights, if there are any,
    and the scores' 1/√d folded in [2, max_len, H+G, d]."""
    a, (cos, sin) = block.self_attn, rope
    qkv = torch.cat((a.q_proj.weight, a.k_proj.weight, a.v_proj.weight)).to(cos.dtype)
    bias = None if a.q_proj.bias is None else torch.cat((a.q_proj.bias, a.k_proj.bias, a.v_proj.bias)).to(cos.dtype)
    q_norm, k_norm = (
        cos.new_ones(a.head_dim) if norm is None else norm.weight.to(cos.dtype) for norm in (a.q_norm, a.k_norm)
    )
    # The scores' 1/√d goes into the queries' norm
    scale = torch.cat(((q_norm * a.head_dim**-0.5).expand(a.heads, -1), k_norm.expand(a.kv_heads, -1)))
    table = torch.stack((scale * cos, scale.roll(a.head_dim // 2, -1) * sin))
    return qkv * block.input_layernorm.weight.to(cos.dtype), bias, table


def projected(x: Float[Tensor, "N D"], qkv: Float[Tensor, "D HGGd"], bias: Tensor | None) -> Float[Tensor, "N HGGd"]:
    """Queries, keys and values of some rows."""
    return torch.mm(x, qkv) if bias is None else torch.addmm(bias, x, qkv)


class Stack:
    """Blocks with a KV cache for one context. Weights are copied at construction."""

    def __init__(self, config: Config, blocks: Sequence[Block], max_len: int, dtype: torch.dtype = torch.float32):
        H, G, d = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.heads, self.kv_heads, self.head_dim = H, G, d
        self.experts, self.top_k = config.num_experts, config.num_experts_per_tok
        self.normalise, self.qk_norm = config.norm_topk_prob, config.qk_norm
        rope = rope_table(config, torch.arange(max_len), torch.float32)
        self.weights, tables = [], []
        with torch.no_grad():
            for block in blocks:
                mlp, post_norm = block.mlp, block.post_attention_layernorm.weight.float()
                qkv, bias, table = entrance(block, rope)
                tables.append(table)
                if not isinstance(mlp, MLP):
                    gate_up = mlp.gate_up_proj.unflatten(1, (2, -1)).transpose(0, 1).flatten(1, 2)
                    router = (mlp.gate.weight.float() * post_norm).t()
                    down = mlp.down_proj.transpose(0, 1).flatten(1)
                else:
                    gate_up = torch.stack((mlp.gate_proj.weight, mlp.up_proj.weight))
                    router, down = None, mlp.down_proj.weight
                gate_up = (gate_up.float() * post_norm).transpose(1, 2)
                layout = (qkv.t(), bias, block.self_attn.o_proj.weight.t(), router, gate_up, down)
                self.weights.append([None if weight is None else copied(weight, dtype) for weight in layout])
        self.tables = torch.stack(tables).to(dtype)  # L 2 max_len H+G d
        self.kv = torch.zeros(len(blocks), max_len, 2 * G, d, dtype=dtype)
        self.eps = torch.tensor(config.rms_norm_eps, dtype=dtype)
        mask = torch.full((max_len, max_len), float("-inf"), dtype=dtype).triu_(1)
        self.mask = mask.repeat_interleave(H // G, 0)  # query heads of a group are adjacent, row by row

    def frame(self, start: int, count: int) -> tuple[Tensor | None, list[tuple]]:
        """What the blocks need for rows start … start+count−1, sliced once for all blocks: the mask, and per
        block its weights, rotary tables, and views of its cache (entries to write, keys up to here, values up
        to here)."""
        end, G = start + count, self.kv_heads
        group = self.heads // G
        mask = self.mask[start * group : end * group, :end] if count > 1 else None
        cos, sin = self.tables[:, :, start:end].unbind(1)
        kv = self.kv[:, :end]
        keys, values = kv[:, :, :G].permute(0, 2, 3, 1), kv[:, :, G:].transpose(1, 2)
        return mask, list(zip(self.weights, *map(Tensor.unbind, (cos, sin, kv[:, start:], keys, values)), strict=True))

    def run(self, x: Float[Tensor, "N D"], mask: Tensor | None, blocks: list[tuple]) -> Float[Tensor, "N D"]:
        """Run rows through some blocks of a frame. The cache entries at these rows are overwritten, and entries
        after a frame's rows are never read: to forget tokens, start the next frame earlier."""
        N, H, G, d = len(x), self.heads, self.kv_heads, self.head_dim
        for (qkv, bias, o, router, gate_up, down), cos, sin, fresh, k, v in blocks:
            heads = projected(unit(x, self.eps), qkv, bias).view(N, H + 2 * G, d)
            qk = heads[:, : H + G]
            y = unit(qk, self.eps) if self.qk_norm else qk
            torch.addcmul(y * cos, y.roll(d // 2, -1), sin, out=qk)  # y·cos + swap(y)·sin
            fresh.copy_(heads[:, H:])
            q = heads[:, :H].view(N, G, -1, d).transpose(0, 1).reshape(G, -1, d)
            scores = torch.bmm(q, k) if mask is None else torch.baddbmm(mask, q, k)  # q kᵀ + mask
            y = torch.bmm(scores.softmax(-1), v).view(G, N, -1).transpose(0, 1).reshape(N, -1)
            x = torch.addmm(x, y, o)
            y = unit(x, self.eps)
            gate, up = torch.bmm(y.expand(2, -1, -1), gate_up).unbind(0)
            inner = F.silu(gate, inplace=True).mul_(up)  # silu(gate x) · up x
            if router is not None:
                inner.view(N, self.experts, -1).mul_(self.gates(torch.mm(y, router)))
            x = F.linear(inner, down).add_(x)
        return x

    def gates(self, logits: Float[Tensor, "N E"]) -> Float[Tensor, "N E 1"]:
        """The router's gates; zero for experts that were not chosen. Normalised gates are a softmax over the
        chosen logits."""
        top_logits, top_experts = logits.topk(self.top_k, -1)
        # Softmax over the chosen logits, or their share of the softmax over all
        gates = top_logits.softmax(-1) if self.normalise else logits.softmax(-1).gather(-1, top_experts)
        return torch.zeros_like(logits).scatter_(1, top_experts, gates).unsqueeze(2)


class Rows:
    """Decodes one token for each of B contexts that share a position and continue `model`'s KV cache. Attention
    weights are copied at construction, in the model's dtype; all other weights stay the model's own."""

    def __init__(self, model: Transformer, max_len: int):
        self.model, dtype, device = model, model.embed_tokens.weight.dtype, model.embed_tokens.weight.device
        wide = torch.promote_types(dtype, torch.float32)
        rope = rope_table(model.config, torch.arange(max_len, device=device), wide)
        with torch.no_grad():
            layouts = [entrance(block, rope) for block in model.layers]
            self.qkv = [copied(qkv.t(), dtype, device) for qkv, _, _ in layouts]
            self.bias = [None if bias is None else copied(bias, dtype, device) for _, bias, _ in layouts]
            self.tables = [copied(table, dtype, device).unbind() for _, _, table in layouts]
        self.eps = torch.tensor(model.config.rms_norm_eps, dtype=dtype, device=device)
        # Modules look their parameters up by name: once here, not in each step.
        self.post_attention = [
            (block.self_attn.o_proj.weight, block.post_attention_layernorm.weight, block.mlp) for block in model.layers
        ]

    def step(self, ids: Int[Tensor, " B"], cache: KVCache) -> tuple[Float[Tensor, "B D"], list[Tensor]]:
        """Final hidden states, which `model.head` turns into logits, and the experts of each MoE layer [B, K].
        The cache grows by one position."""
        B, x, t, c = len(ids), self.model.embed_tokens(ids), cache.length, self.model.config
        H, G, d = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        layer_experts = []
        for layer, (qkv, bias, (cos, sin), (o, norm, mlp)) in enumerate(
            zip(self.qkv, self.bias, self.tables, self.post_attention, strict=True)
        ):
            heads = projected(unit(x, self.eps), qkv, bias).view(B, H + 2 * G, d)
            qk = heads[:, : H + G]
            y = unit(qk, self.eps) if c.qk_norm else qk
            torch.addcmul(y * cos[t], y.roll(d // 2, -1), sin[t], out=qk)
            k, v = cache.append(layer, heads[:, H : H + G, None], heads[:, H + G :, None])
            q = heads[:, :H].reshape(B, G, H // G, d)
            scores = torch.matmul(q, k.transpose(2, 3))  # q kᵀ
            x = torch.addmm(x, torch.matmul(scores.softmax(-1), v).view(B, H * d), o.t())
            y = unit(x, self.eps) * norm
            if isinstance(mlp, MLP):
                x = x + mlp(y)
            else:
                y, _, experts = mlp(y)
                x = x + y
                layer_experts.append(experts)
        cache.length = t + 1
        return unit(x, self.eps) * self.model.norm.weight, layer_experts
