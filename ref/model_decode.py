"""The network once more, laid out for decoding one context on a CPU: the same numbers from fewer calls.

A pass over one to forty tokens of a small network spends its time between the products, and on fetching weights. `Stack` runs
the blocks of `ref.model` (the trunk's, or those of multi-token-prediction layers) on the rows of one context. What it does differently:
1. Norm weights are multiplied into the products behind them, 1/√d into the query norm, QK-norm weights into the rotary tables;
   gate beside up, and all weights transposed, as `mm` likes them.
2. Rotary tables and the causal mask are computed once for `max_len` positions.
3. Keys and values of a layer share one cache: one copy a pass.
4. All experts are multiplied, in one product, with a gate of zero for those not chosen, as `ref.model` does for a handful of
   rows. One row alone would be served sooner by its own two experts; several rows together soon want most of them.
5. float32 unless told otherwise: on a CPU a bfloat16 product of a few rows costs more than its float32 twin.

Tests hold it to `Transformer.forward` (float32, 1e-5), position by position.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from ref.model import Block, Config, rope_table

__all__ = ["Stack", "unit"]


def unit(x: Tensor, eps: Tensor) -> Tensor:
    """x / √(mean x² + ε) over the last dimension: RMSNorm without its weight."""
    norm = torch.linalg.vector_norm(x, 2, -1, True)
    return torch.addcmul(eps, norm, norm, value=1.0 / x.shape[-1]).rsqrt_().mul(x)


class Stack:
    """Blocks with a KV cache for one context. Weights are copied when it is made."""

    def __init__(self, config: Config, blocks: list[Block], max_len: int, dtype: torch.dtype = torch.float32):
        H, G, d = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.heads, self.kv_heads, self.head_dim = H, G, d
        self.experts, self.top_k, self.normalise = config.num_experts, config.num_experts_per_tok, config.norm_topk_prob
        device = blocks[0].input_layernorm.weight.device
        cos, sin = rope_table(config, torch.arange(max_len, device=device), torch.float32)
        self.weights, tables = [], []
        with torch.no_grad():
            for block in blocks:
                a, mlp = block.self_attn, block.mlp
                before, after = block.input_layernorm.weight.float(), block.post_attention_layernorm.weight.float()
                qkv = torch.cat((a.q_proj.weight, a.k_proj.weight, a.v_proj.weight)).float() * before
                scale = torch.cat((a.q_norm.weight.expand(H, -1) * d**-0.5, a.k_norm.weight.expand(G, -1))).float()
                tables.append(torch.stack((scale * cos, scale.roll(d // 2, -1) * sin)))
                if self.experts:
                    gate_up = (mlp.gate_up_proj.float() * after).unflatten(1, (2, -1)).transpose(0, 1).flatten(0, 2)
                    router, down = mlp.gate.weight.float() * after, mlp.down_proj.transpose(1, 2).flatten(0, 1)
                else:
                    gate_up = torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight)).float() * after
                    router, down = None, mlp.down_proj.weight.t()
                columns = (qkv.t(), a.o_proj.weight.t(), None if router is None else router.t(), gate_up.t(), down)
                self.weights.append([None if w is None else w.to(dtype).contiguous() for w in columns])
        self.tables = torch.stack(tables).to(dtype)  # L 2 max_len H+G d
        self.kv = torch.zeros(len(blocks), max_len, 2 * G, d, dtype=dtype, device=device)
        self.eps = torch.tensor(config.rms_norm_eps, dtype=dtype, device=device)
        self.mask = torch.full((max_len, max_len), float("-inf"), dtype=dtype, device=device).triu_(1)

    def frame(self, start: int, count: int) -> tuple[Tensor | None, list[tuple]]:
        """What the blocks need to know of rows start … start+count−1, cut out once for all blocks: the mask, and per block its
        weights, rotary tables, and views of its cache (to be written, keys up to here, values up to here)."""
        end, G = start + count, self.kv_heads
        mask = self.mask[start:end, :end].repeat(self.heads // G, 1) if count > 1 else None
        cos, sin = self.tables[:, :, start:end].unbind(1)
        kv = self.kv[:, :end]
        keys, values = kv[:, :, :G].permute(0, 2, 3, 1), kv[:, :, G:].transpose(1, 2)
        return mask, list(zip(self.weights, *map(Tensor.unbind, (cos, sin, kv[:, start:], keys, values)), strict=True))

    def run(self, x: Float[Tensor, "N D"], mask: Tensor | None, blocks: list[tuple]) -> Float[Tensor, "N D"]:
        """Rows through some blocks of a frame. The cache's entries at these rows are overwritten, and nothing behind a frame's rows is
        looked at: to forget tokens is to begin the next frame earlier."""
        N, H, G, d = len(x), self.heads, self.kv_heads, self.head_dim
        for (qkv, o, router, gate_up, down), cos, sin, fresh, k, v in blocks:
            heads = torch.mm(unit(x, self.eps), qkv).view(N, H + 2 * G, d)
            qk = heads[:, : H + G]
            y = unit(qk, self.eps)
            torch.addcmul(y * cos, y.roll(d // 2, -1), sin, out=qk)
            fresh.copy_(heads[:, H:])
            q = heads[:, :H].transpose(0, 1).reshape(G, H // G * N, d)
            scores = torch.bmm(q, k) if mask is None else torch.baddbmm(mask, q, k)
            y = torch.bmm(scores.softmax(-1), v).view(H, N, d).transpose(0, 1).reshape(N, H * d)
            x = torch.addmm(x, y, o)
            y = unit(x, self.eps)
            gate, up = torch.mm(y, gate_up).chunk(2, -1)
            inner = F.silu(gate).mul_(up)
            if router is not None:
                inner = (inner.view(N, self.experts, -1) * self.gates(torch.mm(y, router))).view(N, -1)
            x = torch.addmm(x, inner, down)
        return x

    def gates(self, logits: Float[Tensor, "N E"]) -> Float[Tensor, "N E 1"]:
        """The router's gates, zero for experts not chosen. Normalised gates are a softmax over the chosen logits."""
        best, chosen = logits.topk(self.top_k, -1)
        gates = best.softmax(-1) if self.normalise else logits.softmax(-1).gather(-1, chosen)
        return torch.zeros_like(logits).scatter_(1, chosen, gates).unsqueeze(2)
