"""Continued pretraining on many ranks: `ref/cpt.py`, where corpus, packing, schedule and losses are explained.

What a rank needs from others: the target of the last token in its chunk is the first token of the next chunk, which
another rank has; and sums over tokens are sums over ranks. The head runs on blocks of rows, so the logits of all tokens
of a rank never exist at once.

Read files, held-out codebase, tokenizer, packed rows and schedule are the same on every rank: those functions are
`ref`'s."""

import math
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ref.checks import expect, expect_text
from ref.cpt import (
    SPECIAL_TOKENS,
    CodebaseNLL,
    Corpus,
    hold_out_codebase,
    pack,
    read_corpus,
    train_tokenizer,
    windows,
    wsd,
)
from scaled.network.model import Transformer
from scaled.runtime.comm import all_reduce_sum, total
from scaled.runtime.cut import ahead, cut, places
from scaled.runtime.mesh import current

__all__ = [
    "SPECIAL_TOKENS",
    "CodebaseNLL",
    "Corpus",
    "codebase_nll",
    "hold_out_codebase",
    "next_token_loss",
    "pack",
    "read_corpus",
    "train_tokenizer",
    "wsd",
]


def next_token_loss(
    model: Transformer,
    hidden: Float[Tensor, "B T D"],
    ids: Int[Tensor, "B T"],
    doc: Int[Tensor, "B T"] | None = None,
    weight: Tensor | None = None,
) -> tuple[Float[Tensor, ""], int | float]:
    """Summed negative log-likelihood (nats) and number of scored tokens of all ranks, the same on every rank, from this
    rank's rows and tokens. ValueError as in `ref`."""
    expect("hidden", hidden, "float", "B", "T", model.config.hidden_size)
    expect_text(ids, doc, weight, *hidden.shape[:2], vocab=model.config.vocab_size)
    wide_dtype = torch.promote_types(hidden.dtype, torch.float32)
    T = ids.shape[1] * current().group("cp").size
    loss_weight = (places(T).to(ids.device) < T - 1).to(wide_dtype).expand(ids.shape).clone()
    if doc is not None:
        next_doc = ahead(doc)
        loss_weight *= (next_doc == doc) & (next_doc >= 0)
    if weight is not None:
        loss_weight *= ahead(weight.to(wide_dtype))
    states, targets, loss_weight = hidden.flatten(0, 1), ahead(ids).flatten(), loss_weight.flatten()
    scored_rows = loss_weight.nonzero()[:, 0]
    logp = model.logprob(states[scored_rows], targets[scored_rows])
    # Eq. L (ref/cpt.py): −Σ w · log p, this rank's part.
    loss = -(logp * loss_weight[scored_rows]).sum()
    if not bool(loss.isfinite()):
        raise ValueError("hidden must give finite log-probs; some are not finite")
    return total(loss), all_reduce_sum(loss_weight.sum()).item()


@torch.no_grad()
def codebase_nll(
    model: Transformer,
    tokenizer,
    path: str | Path | Corpus,
    window: int = 256,
    stride: int | None = None,
    max_tokens: int | None = None,
    batch: int = 32,
) -> CodebaseNLL:
    """`ref.cpt.codebase_nll`: windows over dp, tokens of a window over cp, `batch` windows at a time on all ranks
    together."""
    token_windows = windows(model.config, tokenizer, path, window, stride, max_tokens, batch)
    dp, cp = current().group("dp").size, current().group("cp").size
    nll = torch.zeros((), dtype=torch.float64, device=current().device)
    for first in range(0, len(token_windows.starts), batch):
        rows, scored_mask = token_windows.rows(first, batch)
        # Padding with unscored rows and tokens, so the ranks get equal shares.
        fill = (0, -rows.shape[1] % (2 * cp if cp > 1 else 1), 0, -len(rows) % dp)
        rows, scored_mask = (torch.nn.functional.pad(x, fill) for x in (rows, scored_mask))
        ids, is_scored = cut(rows).to(nll.device), cut(scored_mask).to(nll.device)
        out = model(ids, logits=False)
        targets, is_scored = ahead(ids), ahead(is_scored.long()) > 0
        logp = model.logprob(out.hidden[is_scored], targets[is_scored])
        # Eq. NLL (ref/cpt.py): −Σ log p of each token under its window.
        nll -= logp.double().sum()
    value = all_reduce_sum(nll).item()
    if not math.isfinite(value):
        raise ValueError("model must give finite log-probs; some are not finite")
    return CodebaseNLL(value, token_windows.tokens, token_windows.bytes)
