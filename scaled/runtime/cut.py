"""Which rank holds which part of a batch: rows over dp, the tokens of a row over cp.

With causal attention, a token attends to all earlier ones, so equal numbers of consecutive tokens are not equal work.
Each row of T tokens is split in 2·cp chunks of T/(2·cp). Rank i of the cp group takes chunks i and 2·cp − 1 − i
(Composer 2 technical report, §6.1): an early one and a late one.

    cp = 2        chunks   0 1 2 3        rank 0: 0 3        rank 1: 1 2
    causal pairs           1 3 5 7                8                  8        (in half squares of a chunk)

    cut(x)        the whole batch [B, T, …] → this rank's [B/dp, T/cp, …]; [B] → [B/dp]
    joined(x)     the reverse, on every rank, without gradient
    places(T)     positions of this rank's tokens in the row, [T/cp]
    full(x)       this rank's rows with all their tokens, in order, [B/dp, T/cp, …] → [B/dp, T, …], with gradient
    ahead(x, k)   x of the k-th token after each of this rank's, zero past the end of the row, with gradient
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from scaled.runtime.comm import all_gather, gathered
from scaled.runtime.mesh import current

__all__ = ["ahead", "cut", "full", "joined", "places"]


def places(T: int) -> Tensor:
    """Positions of this rank's tokens in a row of T, [T/cp] int64. Raises ValueError unless T is a multiple of 2·cp."""
    group = current().group("cp")
    if group.size == 1:
        return torch.arange(T)
    if T % (2 * group.size):
        raise ValueError(
            f"rows must be a multiple of 2 · cp = {2 * group.size} tokens long, got {T}; pad them (doc −1)"
        )
    chunks = torch.arange(T).view(2 * group.size, -1)
    return chunks[[group.rank, 2 * group.size - 1 - group.rank]].flatten()


def cut(x: Tensor) -> Tensor:
    """This rank's part of a complete batch: rows and tokens of [B, T, …], rows of [B]. Raises ValueError unless B is a
    multiple of dp and T of 2·cp."""
    group = current().group("dp")
    if len(x) % group.size:
        raise ValueError(f"rows must be a multiple of dp = {group.size}, got {len(x)}; add empty ones")
    rows = x.chunk(group.size)[group.rank] if len(x) else x
    return rows if x.ndim == 1 or current().group("cp").size == 1 else rows[:, places(x.shape[1]).to(x.device)]


def _chunk_order(cp: int) -> list[int]:
    """Index of chunk 0, 1, … in the concatenated parts of ranks 0, 1, …, two chunks each."""
    return [2 * c if c < cp else 2 * (2 * cp - 1 - c) + 1 for c in range(2 * cp)]


def _reorder_chunks(parts: Tensor) -> Tensor:
    """[cp, B, T/cp, …] → [B, T, …]."""
    cp, B, Tl = parts.shape[:3]
    chunks = parts.unflatten(2, (2, Tl // 2)).transpose(0, 1).flatten(1, 2)  # B, 2·cp, chunk, …
    return chunks[:, _chunk_order(cp)].flatten(1, 2)


def full(x: Tensor) -> Tensor:
    """This rank's rows with all their tokens in order."""
    return x if current().group("cp").size == 1 else _reorder_chunks(all_gather(x, "cp"))


def joined(x: Tensor) -> Tensor:
    """The complete batch, on every rank, without gradient."""
    if x.ndim > 1 and current().group("cp").size > 1:
        x = _reorder_chunks(torch.stack(gathered(x, "cp")))
    return torch.cat(gathered(x, "dp"))


def ahead(x: Tensor, k: int = 1) -> Tensor:
    """[B, T/cp, …] → for each token, the x of the k-th token after it in the row; zero past the end."""
    pad = (0, 0) * (x.ndim - 2)
    cp = current().group("cp")
    size = x.shape[1] // 2
    if cp.size == 1:
        return F.pad(x[:, k:], (*pad, 0, min(k, x.shape[1])))
    if k > size:
        rows = full(x)
        rows = F.pad(rows[:, k:], (*pad, 0, min(k, rows.shape[1])))
        return rows[:, places(rows.shape[1]).to(x.device)]
    # A chunk needs the first k tokens of the next one, and nothing else.
    chunks = x.unflatten(1, (2, size))
    heads = all_gather(chunks[:, :, :k], "cp").transpose(0, 1).flatten(1, 2)[:, _chunk_order(cp.size)]  # B, 2·cp, k, …
    heads = F.pad(heads, (*pad, 0, 0, 0, 1))
    next_heads = heads[:, [cp.rank + 1, 2 * cp.size - cp.rank]]
    return torch.cat((chunks[:, :, k:], next_heads), 2).flatten(1, 2)
