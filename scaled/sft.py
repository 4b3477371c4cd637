"""SFT on conversations on many ranks: `ref/sft.py`, where format, mask, traps and glossary are explained.

Conversations are read, rendered and packed once, before ranks start: those functions are `ref`'s. A rank has its rows
(dp) and its tokens of each row (cp), as `scaled/runtime/cut.py` splits them. What it needs from others: whether the
next token of a chunk's last one belongs to the same context, n, and the sum of the loss.

| quantity | local or global |
|---|---|
| ids, doc, weight | local: [B/dp, T/cp] |
| n_tokens | global: counted over all ranks, before the first forward pass |
| L, balance loss | the same on every rank; gradients are reduced by FSDP |
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ref.sft import Chat, Message, Render, ToolCall, fitted, pack, read_conversations, tokens_and_mask
from scaled.cpt import next_token_loss
from scaled.network.model import Transformer, load_balancing_loss
from scaled.runtime.comm import all_reduce_sum
from scaled.runtime.cut import ahead, places
from scaled.runtime.mesh import current

__all__ = [
    "Chat",
    "Message",
    "Render",
    "ToolCall",
    "fitted",
    "pack",
    "read_conversations",
    "count_learned",
    "sft_loss",
    "sft_step",
    "tokens_and_mask",
]


def count_learned(doc: Int[Tensor, "B T"], weight: Float[Tensor, "B T"]) -> float:
    """`ref.sft.count_learned` of all ranks' rows, from this rank's part of them."""
    T = doc.shape[1] * current().group("cp").size
    next_doc = ahead(doc)
    has_target = (next_doc == doc) & (next_doc >= 0) & (places(T).to(doc.device) < T - 1)
    # n (ref/sft.py): Σ w over the scored tokens of all ranks.
    return all_reduce_sum((ahead(weight) * has_target).sum(dtype=torch.float64)).item()


def sft_loss(
    model: Transformer, ids: Int[Tensor, "B T"], doc: Int[Tensor, "B T"], weight: Float[Tensor, "B T"], n_tokens: float
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """`ref.sft.sft_loss` of all ranks' micro-batches together, the same on every rank."""
    out = model(ids, doc=doc, logits=False)
    nll, _ = next_token_loss(model, out.hidden, ids, doc, weight)
    balance = (
        load_balancing_loss(out.router_logits, out.experts) if out.router_logits else torch.zeros((), device=nll.device)
    )
    # Eq. L (ref/sft.py): −(1/n) Σ w · log p.
    return nll / (n_tokens or 1.0), balance


def sft_step(
    model: Transformer,
    optimizers: Sequence[torch.optim.Optimizer],
    ids: Int[Tensor, "B T"],
    doc: Int[Tensor, "B T"],
    weight: Float[Tensor, "B T"],
    micro_rows: int = 1,
) -> dict[str, float]:
    """`ref.sft.sft_step`, with `micro_rows` rows of each dp rank at a time. All ranks must have the same number of
    rows."""
    n_tokens, loss = count_learned(doc, weight), 0.0
    parts = range(0, len(ids), micro_rows)
    for first in parts:
        row_slice = slice(first, first + micro_rows)
        part, balance = sft_loss(model, ids[row_slice], doc[row_slice], weight[row_slice], n_tokens)
        (part + model.config.router_aux_loss_coef * balance / len(parts)).backward()
        loss += part.item()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return {"loss": loss, "n_tokens": n_tokens}
