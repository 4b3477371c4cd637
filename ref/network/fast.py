"""The network of `model.py`, computed with fewer and larger operations: what every other room trains and samples.

A small network spends its time between the matrix products. This file therefore does four things that `model.py`, the
definition, does not. The gradients are written out in `gradients.py`. Tests hold values and gradients equal to the
definition's to float64 rounding; `etude bench model` measures what it saves.

1. The three projections of attention are one product. The QK-norms of queries and keys, where there are any, are one
   norm over the heads of both.
2. Attention over short rows stores its weights and multiplies the query heads of a group with their shared keys in one
   product. Long rows are left to the library's flash kernel, packed ones document by document (`documents.py`).
3. Tokens are sorted by expert, and each expert multiplies its own rows. Nothing loops over tokens or experts. A handful
   of tokens (decoding) goes through all experts in one batched product, with a gate of zero for those not chosen:
   sorting four rows costs more than multiplying them.
4. Log-probabilities under the head are computed for a chunk of rows at a time. All logits never exist at once, in
   either direction.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from ref.network import model
from ref.network.documents import SPARSE, BlockMask, Run, attend_blocks, attend_documents, find_runs, make_block_mask
from ref.network.gradients import attend, chunked_logprob, experts_swiglu, rms_norm, turned_heads
from ref.network.model import Config, KVCache, visible

__all__ = ["Attention", "Block", "MoE", "RMSNorm", "Transformer", "attention_mask", "load_hf"]


ROWS = 256
"""On a CPU, the head multiplies a multiple of this many rows, filled up with zeros. oneDNN compiles code for each size
of a bfloat16 product, and the number of tokens that are scored differs from step to step."""
EXPLICIT_ATTENTION = 512 * 512
"""On a CPU, up to this many query-key pairs per head, attention is two plain products and stores its weights: at T =
128, forward and backward take a fifth of the flash kernel's time. The query heads of a group are stacked and share one
product with their keys, so that grouped-query attention repeats nothing."""


Mask = Tensor | tuple[Run, ...] | BlockMask | None
"""Who may look at whom, in the form that `Attention.product` wants."""


class RMSNorm(model.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Attention(model.Attention):
    """With q, k, v, biases, norms and rotary embedding in one product and one function."""

    def forward(self, x, rope: tuple[Tensor, Tensor], mask, cache: KVCache | None, layer: int) -> Tensor:
        B, T, _ = x.shape
        H, G, d = self.heads, self.kv_heads, self.head_dim
        qkv = self.project(x).view(B, T, H + 2 * G, d)
        # The scores' factor 1/√d goes into the queries' norm, or stands in its place.
        if self.q_norm is not None and self.k_norm is not None:
            norm, eps = (
                torch.cat((self.q_norm.weight.mul(d**-0.5).expand(H, d), self.k_norm.weight.expand(G, d))),
                self.q_norm.eps,
            )
        else:
            norm, eps = torch.cat((x.new_full((H, d), d**-0.5), x.new_ones(G, d))), None
        q, k, v = turned_heads(qkv, norm, *rope, G, eps)
        if cache is not None:
            k, v = cache.append(layer, k, v)
        return self.o_proj(self.product(q, k, v, mask, cache is None))

    def project(self, x: Tensor) -> Tensor:
        """Queries, keys and values of x [B, T, D], one behind the other: [B, T, (H + 2G)·d]."""
        projections = self.q_proj, self.k_proj, self.v_proj
        if any(type(projection) is not nn.Linear for projection in projections):  # with adapters (`ref/lora.py`)
            return torch.cat([projection(x) for projection in projections], -1)
        weight = torch.cat(tuple(projection.weight for projection in projections))
        biases = tuple(projection.bias for projection in projections if projection.bias is not None)
        return F.linear(x, weight, torch.cat(biases) if biases else None)

    def product(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, causal: bool) -> Tensor:
        """Attention of the queries q [B, G, H/G, T, d] to k and v [B, G, S, d] → [B, T, H·d]. `causal` promises that no
        query sees a key behind its own."""
        H, G, T = self.heads, self.kv_heads, q.shape[3]
        if isinstance(mask, tuple):
            return attend_documents(q.flatten(1, 2), k, v, mask).transpose(1, 2).flatten(2)
        if isinstance(mask, BlockMask):
            return attend_blocks(q.flatten(1, 2), k, v, mask).transpose(1, 2).flatten(2)
        if mask is not None and mask.dtype == torch.bool or T > 1 and mask is None:
            y = F.scaled_dot_product_attention(
                q.flatten(1, 2), k, v, mask, is_causal=mask is None, scale=1.0, enable_gqa=H != G
            )
            return y.transpose(1, 2).flatten(2)
        return attend(q, k, v, mask, causal)


class MoE(model.MoE):
    """With tokens sorted by expert, or all experts at once for a handful of tokens."""

    def mix(
        self, x: Float[Tensor, "N D"], gates: Float[Tensor, "N K"], experts: Int[Tensor, "N K"]
    ) -> Float[Tensor, "N D"]:
        if experts.numel() <= 12 * len(self.gate_up_proj) and not torch.is_grad_enabled():
            return self.all_experts(x, gates, experts)
        return experts_swiglu(x, gates, self.gate_up_proj, self.down_proj, experts)

    def all_experts(self, x: Tensor, gates: Tensor, experts: Tensor) -> Tensor:
        weight = torch.zeros(x.shape[0], len(self.gate_up_proj), dtype=x.dtype, device=x.device).scatter_(
            1, experts, gates
        )
        gate, up = torch.matmul(x, self.gate_up_proj.transpose(1, 2)).chunk(2, -1)  # E N 2I
        y = torch.bmm(F.silu(gate) * up, self.down_proj.transpose(1, 2))  # E N D
        return torch.einsum("ne,end->nd", weight, y)


class Block(model.Block):
    """`model.Block` of the parts above."""

    Norm, Attention, MoE = RMSNorm, Attention, MoE


class Transformer(model.Transformer):
    """Same parameters, same call and same numbers as `model.Transformer`."""

    Block = Block

    def mask(self, T: int, start: int, doc: Tensor | None, x: Tensor) -> Mask:
        return attention_mask(self.config, T, start, doc, x)

    def logprob(
        self, hidden: Float[Tensor, "N D"], targets: Int[Tensor, " N"], chunk: int = 2048
    ) -> Float[Tensor, " N"]:
        """Log-probability (nats, float32) of each target under the head's distribution at the same row."""
        table = self.embed_tokens if self.config.tie_word_embeddings else self.lm_head
        N = len(targets)
        if N % ROWS and not hidden.is_cuda:
            hidden, targets = F.pad(hidden, (0, 0, 0, -N % ROWS)), F.pad(targets, (0, -N % ROWS))
        return chunked_logprob(hidden, table.weight, targets, chunk)[:N]


def attention_mask(config: Config, T: int, start: int, doc: Tensor | None, like: Tensor) -> Mask:
    """`visible`, in the form that `Attention.product` wants. An additive bias [1 or B·G, H/G·T, S] where the product is
    explicit. In longer rows None where plain causal attention is left to the library; for packed ones the documents,
    which take no T² bytes; behind a cache, or if a document lies in several pieces, a Boolean mask [B, 1, T, S]. None
    also for one query, which sees all keys."""
    explicit = T * (start + T) <= EXPLICIT_ATTENTION and not like.is_cuda
    if start == 0 and not explicit:
        return None if doc is None else make_document_mask(doc)
    mask = visible(T, start, doc, like.device)
    if mask is None or not explicit:
        return mask
    bias = torch.zeros(mask[:, 0].shape, dtype=like.dtype).masked_fill_(~mask[:, 0], float("-inf"))
    bias = bias.repeat(1, config.num_attention_heads // config.num_key_value_heads, 1)
    return bias if doc is None else bias.repeat_interleave(config.num_key_value_heads, 0)


def make_document_mask(doc: Int[Tensor, "B T"], positions: Int[Tensor, " Q"] | None = None) -> Mask:
    """What queries at the places `positions` of the row see in the documents of packed rows. On a GPU, rows shorter
    than a block take a Boolean mask: the test of such a row failed on an H200 (torch 2.11), for a reason that was not
    recorded; those of 1,024 and 1,500 tokens passed."""
    if doc.is_cuda and doc.shape[1] >= SPARSE:
        return make_block_mask(doc, positions)
    if not doc.is_cuda and (runs := find_runs(doc, positions)) is not None:
        return runs
    mask = visible(doc.shape[1], 0, doc, doc.device)
    return mask if mask is None or positions is None else mask[:, :, positions]


def load_hf(path: str | Path, dtype: torch.dtype = torch.float32) -> Transformer:
    """`model.load_hf`, of this class."""
    return model.loaded(Transformer, path, dtype)
