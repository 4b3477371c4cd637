"""The network on many ranks: `ref/network/fast.py` under FSDP2, expert parallelism and context parallelism.

The layout is that of the Composer 2 technical report, §6.1 (see `runtime/mesh.py` and `runtime/cut.py` for what each
rank holds):

    weights outside the experts   sharded over all ranks by FSDP, gathered for a block's forward and backward
    experts                       each rank of an ep group owns E/ep whole experts; their weights are sharded over efsdp
    tokens of a row               this rank's two chunks; keys and values of a layer are gathered over cp, queries stay

    router → sort by expert → all-to-all → own experts → all-to-all → gates · rows, at home

The network is defined in `ref`. This file has only the two products that need tokens of other ranks, in attention
(`Attention.product`) and in the mixture of experts (`MoE.mix`), and the distribution of the weights.

What to know
1. `Transformer(config)` under a mesh creates only this rank's part, on the mesh's device. A seed gives the same network
   for every layout, but not the network that `ref` creates from that seed, because `ref` draws weights while it creates
   its layers.
2. Losses are sums over ranks, so FSDP sums gradients without dividing.
3. `Compute` in `runtime/mesh.py` sets the formats of dispatched tokens and of the experts' products. `dispatch.py`
   sends the tokens.
4. A KV cache (sampling) works with data and expert parallelism, but not with cp.

| symbol | here | shape |
|---|---|---|
| this rank's tokens | `ids` | B/dp, T/cp |
| its part of the experts | `gate_up_proj`, `down_proj` | E/ep 2I D, E/ep D I |
"""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.utils.checkpoint import checkpoint

from ref.lora import draw_adapters, replace_projections, weights
from ref.network import CheckpointError, Config, KVCache, Output, load_extra
from ref.network import fast as ref
from ref.network.checkpoint import write_checkpoint
from ref.network.gradients import experts_swiglu
from ref.network.model import config_of, rope_table
from scaled.network.checkpoint import load_folder, save_folder
from scaled.network.dispatch import on_owners
from scaled.quant import experts_swiglu as quantised_experts_swiglu
from scaled.router_replay import route
from scaled.runtime.comm import all_reduce_sum, total
from scaled.runtime.cut import full, places
from scaled.runtime.engine import fast, kernel
from scaled.runtime.mesh import current
from scaled.runtime.sharding import EXPERTS, initialise, load_slice, shard

__all__ = [
    "Block",
    "CheckpointError",
    "Config",
    "KVCache",
    "Output",
    "Transformer",
    "load_balancing_loss",
    "load_extra",
    "load_hf",
    "save_hf",
]


class Attention(ref.Attention):
    """Queries of this rank's tokens, keys and values of all."""

    def product(self, q: Tensor, k: Tensor, v: Tensor, mask: ref.Mask, causal: bool) -> Tensor:
        cp = current().group("cp")
        if cp.size == 1:
            return super().product(q, k, v, mask, causal)
        keys_values = full(torch.cat((k, v), 1).transpose(1, 2)).transpose(1, 2)
        k, v = keys_values.chunk(2, 1)
        if mask is not None:
            return super().product(q, k, v, mask, causal=False)
        # On a GPU, a chunk sees the keys up to its own end: two products of a flash kernel, no mask in memory.
        size, outputs = q.shape[3] // 2, []
        for queries, chunk in zip(q.flatten(1, 2).chunk(2, 2), (cp.rank, 2 * cp.size - 1 - cp.rank), strict=True):
            end = (chunk + 1) * size
            bias = causal_lower_right(size, end)
            outputs.append(
                F.scaled_dot_product_attention(
                    queries, k[:, :, :end], v[:, :, :end], bias, scale=1.0, enable_gqa=self.heads != self.kv_heads
                )
            )
        return rearrange(torch.cat(outputs, 2), "b h t d -> b t (h d)")


class MoE(ref.MoE):
    """The complete router, and this rank's experts."""

    def __init__(self, c: Config):
        super().__init__(c)
        ep = current().group("ep")
        if c.num_experts % ep.size:
            raise ValueError(f"num_experts must be a multiple of ep = {ep.size}, got {c.num_experts}")
        for name in EXPERTS if ep.size > 1 else ():
            setattr(self, name, nn.Parameter(getattr(self, name).chunk(ep.size)[ep.rank].clone()))

    def route(self, x: Tensor, experts=None) -> tuple[Tensor, Tensor, Tensor]:
        """As in `ref`; the router's own choice on GPUs by `kernels/router_replay.py`."""
        if experts is not None or not fast(x) or x.dtype not in (torch.float32, torch.bfloat16):
            return super().route(x, experts)
        logits: Tensor = self.gate(x)
        gates, experts = route(logits.float(), self.top_k, normalise=self.normalise)
        return logits, gates.to(x.dtype), experts

    def mix(self, x: Tensor, gates: Tensor, experts: Tensor) -> Tensor:
        if (form := current().compute.experts) != "model":
            return quantised_experts_swiglu(x, gates, self.gate_up_proj, self.down_proj, experts, form)
        ep = current().group("ep")
        if ep.size == 1:
            return super().mix(x, gates, experts)
        return on_owners(
            x,
            gates,
            experts,
            self.gate.out_features,
            lambda rows, ones, local: experts_swiglu(rows, ones, self.gate_up_proj, self.down_proj, local),
        )


class Block(ref.Block):
    """`ref.network.fast.Block` with the two products above."""

    Attention, MoE = Attention, MoE

    def forward(self, x, rope, mask=None, cache=None, layer=0, experts=None):
        if current().compute.rematerialise and torch.is_grad_enabled() and cache is None:
            return checkpoint(super().forward, x, rope, mask, cache, layer, experts, use_reentrant=False)
        return super().forward(x, rope, mask, cache, layer, experts)


class Transformer(ref.Transformer):
    """This rank's part of the network; same call as `ref.network.Transformer`, with this rank's rows and tokens."""

    Block = Block

    def __init__(self, config: Config, *, init_weights: bool = True, lora: int = 0):
        """`init_weights=False` leaves the weights uninitialised, which saves time before loading others. `lora`: rank
        of adapters (`ref/lora.py`), whose values are not set."""
        is_single_rank = current().layout.world == 1
        if is_single_rank and init_weights:
            super().__init__(config)
            replace_projections(self, lora)
            self.to(current().device)
            return
        with torch.device("meta"):
            super().__init__(config)
            replace_projections(self, lora)
        if not is_single_rank:
            shard(self, self.layers)
        self.to_empty(device=current().device)
        if init_weights:
            initialise(self, config)

    def logprob(self, hidden: Tensor, targets: Tensor, chunk: int = 2048) -> Tensor:
        """As in `ref`; on GPUs by `kernels/linear_logprob.py`, without a row of logits in memory."""
        if not fast(hidden):
            return super().logprob(hidden, targets, chunk)
        table = self.embed_tokens if self.config.tie_word_embeddings else self.lm_head
        return kernel("linear_logprob").linear_logprob(hidden, table.weight, targets)[0]

    def forward(self, ids, positions=None, doc=None, cache=None, experts=None, logits=True) -> Output:
        """As in `ref`: ids, positions and doc [B/dp, T/cp], experts per layer [B·T/(dp·cp), K] or functions."""
        cp, T = current().group("cp"), ids.shape[1]
        if cp.size == 1:
            return super().forward(ids, positions, doc, cache, experts, logits)
        if cache is not None:
            raise ValueError("cache must be None under context parallelism: sample with cp = 1")
        token_positions = places(T * cp.size).to(ids.device)
        x = self.embed_tokens(ids)
        rope = rope_table(self.config, token_positions if positions is None else positions, x.dtype)
        mask = attention_mask(self.config, token_positions, doc, x)
        router_logits, layer_experts = [], []
        for i, block in enumerate(self.layers):
            x, block_logits, block_experts = block(x, rope, mask, None, i, None if experts is None else experts[i])
            if block_logits is not None:
                router_logits.append(block_logits)
                layer_experts.append(block_experts)
        hidden = self.norm(x)
        return Output(self.head(hidden) if logits else None, hidden, x, router_logits, layer_experts)


def attention_mask(config: Config, query_positions: Tensor, doc: Tensor | None, like: Tensor) -> ref.Mask:
    """`ref.network.fast.attention_mask` for queries at positions `query_positions` of a row and keys from the complete
    row. On a GPU, None stands for plain causal attention; on a CPU, a row without documents is one document."""
    Tl, T = len(query_positions), len(query_positions) * current().group("cp").size
    is_explicit = Tl * T <= ref.EXPLICIT_ATTENTION and not like.is_cuda
    if doc is None and like.is_cuda:
        return None
    full_doc = torch.zeros(1, T, dtype=torch.long) if doc is None else full(doc)
    if not is_explicit:
        return ref.make_document_mask(full_doc, query_positions)
    visible = (query_positions[:, None] >= torch.arange(T))[None]
    if doc is not None:
        visible = visible & (doc[:, :, None] == full_doc[:, None, :])
    bias = torch.zeros(visible.shape, dtype=like.dtype).masked_fill_(~visible, float("-inf"))
    bias = bias.repeat(1, config.num_attention_heads // config.num_key_value_heads, 1)
    return bias if doc is None else bias.repeat_interleave(config.num_key_value_heads, 0)


def load_balancing_loss(router_logits: list[Tensor], experts: list[Tensor]) -> Tensor:
    """`ref.network.model.load_balancing_loss` of all ranks' tokens: shares and mean probabilities are global."""
    wide_dtype = torch.promote_types(router_logits[0].dtype, torch.float32)
    loss = router_logits[0].new_zeros((), dtype=wide_dtype)
    for logits, layer_experts in zip(router_logits, experts, strict=True):
        E, K = logits.shape[-1], layer_experts.shape[-1]
        counts = all_reduce_sum(torch.bincount(layer_experts.flatten(), minlength=E).to(wide_dtype))
        # Eq. 4 of arXiv:2101.03961: E · Σ_e f_e · P_e, with f and P over the tokens of all ranks.
        loss = loss + E * K * (counts / counts.sum().square() * logits.to(wide_dtype).softmax(-1).sum(0)).sum()
    return total(loss / len(router_logits))


def load_hf(path: str | Path, dtype: torch.dtype = torch.float32, *, lora: int = 0, seed: int = 0) -> Transformer:
    """`ref.network.model.load_hf`; each rank reads its part. `lora`, `seed`: rank and seed of adapters, as in
    `ref.lora.adapt`. Raises CheckpointError as there."""
    model = Transformer(config_of(path), init_weights=False, lora=lora)
    if current().layout.world == 1:
        model.to(dtype).load_state_dict(ref.load_hf(path, dtype).state_dict(), strict=not lora)
    else:
        load_folder(model, path, dtype)
    parameters = dict(model.named_parameters())
    for name, values in draw_adapters(model, seed):
        load_slice(name, parameters[name], values)
    return model


def save_hf(
    model: Transformer,
    path: str | Path,
    max_shard_bytes: int = 5 * 2**30,
    extra: Mapping[str, Tensor] | None = None,
    sidecar_files: Mapping[str, bytes] | None = None,
) -> None:
    """`ref.network.model.save_hf`, adapters merged; each rank writes its part to its own files. Rank 0 writes the other
    files."""
    if current().layout.world == 1:
        state = {name: weight.cpu() for name, weight in weights(model)}  # merged ones take no second place on a GPU
        write_checkpoint(path, asdict(model.config), state, max_shard_bytes, extra, sidecar_files)
    else:
        save_folder(model, model.config, path, max_shard_bytes, extra, sidecar_files)
