"""The network laid out for continuous batching (`ref/engine/continuous.py`): tokens at different positions of different
contexts in one pass.

Attention's weights are laid out as in `ref/engine/layout.py`. The keys and values of a context are a row of the cache
(`ref/engine/pages.py`). Most rows have one new token, and their queries multiply the cache as it lies. Rows with more,
a prompt or an answer, have theirs padded to one block."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from ref.engine.layout import copied, entrance, projected, unit
from ref.engine.pages import Pages
from ref.network import Transformer
from ref.network.model import MLP, rope_table

__all__ = ["Ragged"]

DENSE = 64
"""Up to this many tokens, all experts are multiplied, instead of sorting tokens by theirs."""


class Ragged:
    """Decodes tokens at different positions of different contexts in one pass. It owns the keys and values of `rows`
    contexts of at most `max_len` tokens. Attention weights are copied at construction, in the model's dtype, and so are
    those of the experts, as one matrix for all of them; `copy` renews the copies.

    Up to `DENSE` tokens go through all experts in two products, with a gate of zero for those not chosen."""

    def __init__(self, model: Transformer, rows: int, max_len: int):
        config, weight = model.config, model.embed_tokens.weight
        self.model, self.dtype, self.device = model, weight.dtype, weight.device
        self.pages = Pages(config, rows, max_len, self.dtype, self.device)
        self.keys, self.values = (x.unbind(0) for x in self.pages.memory)
        self.eps = torch.tensor(config.rms_norm_eps, dtype=self.dtype, device=self.device)
        self.positions = torch.arange(max_len, device=self.device)
        # Modules look their parameters up by name: once here, not in each step.
        self.post_attention = [
            (block.self_attn.o_proj.weight, block.post_attention_layernorm.weight, block.mlp) for block in model.layers
        ]
        self.copy()

    @torch.no_grad()
    def copy(self) -> None:
        """Take the model's present weights."""
        model, wide = self.model, torch.promote_types(self.dtype, torch.float32)
        layouts = [entrance(block, rope_table(model.config, self.positions, wide)) for block in model.layers]
        self.qkv = [copied(qkv.t(), self.dtype, self.device) for qkv, _, _ in layouts]
        self.bias = [None if bias is None else copied(bias, self.dtype, self.device) for _, bias, _ in layouts]
        # max_len L 2 H+G d: one lookup serves all layers of a token. Without QK-norm one table serves all layers.
        tables = torch.stack([table for _, _, table in (layouts if model.config.qk_norm else layouts[:1])], 0)
        self.table = copied(tables.permute(2, 0, 1, 3, 4), self.dtype, self.device)
        self.experts = []
        for block in model.layers:
            if isinstance(block.mlp, MLP):
                continue
            gate_up, down = block.mlp.gate_up_proj, block.mlp.down_proj
            gate_up_matrix = gate_up.unflatten(1, (2, -1)).permute(3, 1, 0, 2).flatten(1)  # D, then gate or up, E, I
            self.experts.append(
                (
                    copied(gate_up_matrix, self.dtype, self.device),
                    copied(down.transpose(1, 2).flatten(0, 1), self.dtype, self.device),
                )
            )

    def step(
        self, ids: Int[Tensor, " N"], row: Int[Tensor, " N"], position: Int[Tensor, " N"], rows: int
    ) -> tuple[Float[Tensor, "N D"], list[Tensor]]:
        """Final hidden states of N tokens, which `model.head` turns into logits, and the experts of each MoE layer [N,
        K]. The first tokens are the last ones of the rows 0 to `rows` − 1, one each; the others go before these, sorted
        by row. Every token sees its row up to its own position."""
        A, S = rows, int(position.max()) + 1
        x, tables = self.model.embed_tokens(ids), self.table[position].expand(-1, len(self.qkv), -1, -1, -1)
        # The same for all heads: rows, 1, 1, keys
        mask = torch.zeros(A, 1, 1, S, dtype=self.dtype, device=self.device).masked_fill_(
            self.positions[:S] > position[:A, None, None, None], float("-inf")
        )
        config, expert_weights, earlier_tokens = self.model.config, iter(self.experts), None
        H, G, d = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        if len(ids) > A:
            earlier_tokens = EarlierTokens(row[A:], position[A:], self.positions[:S], H // G, self.dtype)
        layer_experts, layers = (
            [],
            zip(self.qkv, self.bias, tables.unbind(1), self.keys, self.values, self.post_attention, strict=True),
        )
        for qkv, bias, table, keys, values, (o, norm, mlp) in layers:
            cos, sin = table.unbind(1)
            heads = projected(unit(x, self.eps), qkv, bias).view(-1, H + 2 * G, d)
            qk = heads[:, : H + G]
            y = unit(qk, self.eps) if config.qk_norm else qk
            rotated_qk = torch.addcmul(y * cos, y.roll(d // 2, -1), sin)  # y·cos + swap(y)·sin
            keys[row, :, position], values[row, :, position] = rotated_qk[:, H:], heads[:, H + G :]
            q = rotated_qk[:, :H].unflatten(1, (G, -1))
            # softmax(q kᵀ + mask) v: the heads of a group are the rows of one query, so keys are read where they lie
            attention = F.scaled_dot_product_attention(q[:A], keys[:A, :, :S], values[:A, :, :S], mask, scale=1.0)
            attention = attention.reshape(A, H * d)
            if earlier_tokens is not None:
                attention = torch.cat((attention, earlier_tokens.attend(q[A:], keys, values, S)))
            x = torch.addmm(x, attention, o.t())
            y = unit(x, self.eps) * norm
            if isinstance(mlp, MLP):
                x = x + mlp(y)
                continue
            _, gates, experts = mlp.route(y, None)
            x = x + (
                self.mix_dense(y, gates, experts, *next(expert_weights))
                if len(y) <= DENSE
                else mlp.mix(y, gates, experts)
            )
            layer_experts.append(experts)
        return unit(x, self.eps) * self.model.norm.weight, layer_experts

    def mix_dense(self, x: Tensor, gates: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        weight = torch.zeros(len(x), self.model.config.num_experts, dtype=x.dtype, device=x.device).scatter_(
            1, experts, gates
        )
        gate, up = torch.mm(x, gate_up).chunk(2, -1)
        # Σ_e g_e · W2_e(silu(W1_e x) · W3_e x), g zero for those not chosen
        return torch.mm(
            (F.silu(gate).mul_(up).unflatten(1, (weight.shape[1], -1)) * weight[:, :, None]).flatten(1), down
        )


class EarlierTokens:
    """Tokens that precede their rows' last ones: how their queries are padded to one block, [rows, longest], and who
    sees what. `heads`: of a group."""

    def __init__(
        self,
        row: Int[Tensor, " M"],
        position: Int[Tensor, " M"],
        key_pos: Int[Tensor, " S"],
        heads: int,
        dtype: torch.dtype,
    ):
        self.rows, index, counts = row.unique_consecutive(return_inverse=True, return_counts=True)
        rank = torch.arange(len(row), device=row.device) - (counts.cumsum(0) - counts)[index]
        self.shape, self.index = (len(self.rows), int(counts.max())), index * int(counts.max()) + rank
        query_pos = position.new_full(self.shape, 0).flatten().index_copy_(0, self.index, position).view(self.shape)
        mask = torch.zeros(*self.shape, len(key_pos), dtype=dtype, device=row.device).masked_fill_(
            key_pos > query_pos[..., None], float("-inf")
        )
        self.mask = mask.repeat(1, heads, 1)[:, None]  # rows, groups, heads of a group times queries, keys

    def attend(self, q: Float[Tensor, "M G R d"], keys: Tensor, values: Tensor, S: int) -> Float[Tensor, "M Hd"]:
        (P, n), (_, G, R, d) = self.shape, q.shape
        padded = q.new_zeros(P * n, G, R, d).index_copy_(0, self.index, q).view(P, n, G, R, d).permute(0, 2, 3, 1, 4)
        k, v = keys[self.rows, :, :S], values[self.rows, :, :S]
        # softmax(q kᵀ + mask) v, the heads of a group one below the other
        output = F.scaled_dot_product_attention(padded.reshape(P, G, R * n, d), k, v, self.mask, scale=1.0)
        return output.view(P, G, R, n, d).permute(0, 3, 1, 2, 4).reshape(P * n, G * R * d)[self.index]
