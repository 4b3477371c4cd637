"""Causal attention inside the documents of packed rows, without a mask: memory and time follow the documents' lengths,
not T².

A packed row holds several documents, and a token sees only its own (`ref/packing.py`). A Boolean mask that says so
takes T² bytes for each row: 17 GB at T = 131,072. But the queries of a document follow each other, and so do its keys.
n queries see a triangle, which is plain causal attention, and everything of their document before them. There is
something before them only where a rank holds a part of a row (context parallelism) and the document began in another
part.

    keys      start · · · · · · end − n · · · · · · end
    queries         all n see these        triangle

Both are calls of a flash kernel without a mask. Their outputs are weighted means over different keys, and each call
also returns the logarithm of the sum of its weights, so that the mean over all keys is

    o = e^(l₁ − l) · o₁ + e^(l₂ − l) · o₂,    l = log(e^l₁ + e^l₂)

Source: FlashAttention (arXiv:2205.14135), §3.1, algorithm 1. Its backward pass (§B.2) takes from the forward pass only
o and l. Given those of all keys, each call's backward pass therefore yields its own part of the gradient, as in ring
attention (arXiv:2310.01889).

On a GPU, FlexAttention (arXiv:2412.05496) skips the blocks in which no query sees a key: `make_block_mask` and
`attend_blocks`. Tests compare what its mask and its blocks say; tests/gpu trains with them.

The trap: a document number that returns later in a row. Such a document does not lie in one piece, and `find_runs`
returns None: only a mask describes that row.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

__all__ = ["SPARSE", "BlockMask", "Run", "attend_blocks", "attend_documents", "make_block_mask", "find_runs"]


SPARSE = 128
"""Queries, and keys, of a block."""


@dataclass(frozen=True)
class Run:
    """Consecutive queries of one document, and the keys that the last of them sees. The first sees all but the last n −
    1."""

    rows: slice
    queries: slice
    """Places among the queries that are given, n of them."""
    keys: slice
    """Places in the complete row."""


def find_runs(doc: Tensor, positions: Tensor | None = None) -> tuple[Run, ...] | None:
    """Who sees whom in rows whose tokens belong to the documents doc [B, T] (int64; padding counts as a document): each
    query is in one run for its row. `positions` [T'] holds the places of the queries in the row, in rising order within
    each chunk; by default there is a query for every token. A `doc` of one row stands for all rows of the batch. None
    if a document does not lie in one piece."""
    place = torch.arange(doc.shape[1])
    positions = place if positions is None else positions
    is_first = torch.ones_like(doc, dtype=torch.bool)
    is_first[:, 1:] = doc[:, 1:] != doc[:, :-1]
    distinct = (doc.sort(1).values.diff(dim=1) != 0).sum(1) + 1
    if (distinct != is_first.sum(1)).any():
        return None
    start = torch.where(is_first, place, 0).cummax(1).values[:, positions]
    is_run_start = torch.ones_like(start, dtype=torch.bool)
    is_run_start[:, 1:] = (start[:, 1:] != start[:, :-1]) | (positions[1:] != positions[:-1] + 1)
    row, first_query = is_run_start.nonzero(as_tuple=True)
    end = torch.cat((first_query[1:], first_query.new_zeros(1)))
    end = torch.where(end > 0, end, len(positions))  # the next run of the row, or the row's end
    table = torch.stack((row, first_query, end, start[row, first_query], positions[end - 1] + 1), 1)
    rows = [slice(None)] if len(doc) == 1 else [slice(row_index, row_index + 1) for row_index in range(len(doc))]
    return tuple(Run(rows[row_index], slice(q0, q1), slice(k0, k1)) for row_index, q0, q1, k0, k1 in table.tolist())


def attend_documents(q: Tensor, k: Tensor, v: Tensor, runs: tuple[Run, ...]) -> Tensor:
    """softmax(q kᵀ) v of queries q [B, H, T', d] (scaled already) over the keys that the runs allow them: k and v [B,
    G, T, d], where each key head serves H/G consecutive query heads → [B, H, T', d]. On a CPU."""
    return AttendDocuments.apply(q, k, v, runs)


FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class AttendDocuments(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, runs: tuple[Run, ...]) -> Tensor:
        out = torch.empty_like(q)
        total = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
        for run in runs:
            queries = q[run.rows, :, run.queries]
            (o, l), *prefix_outputs = (
                FORWARD(
                    queries,
                    repeat_heads(k, run.rows, keys, q),
                    repeat_heads(v, run.rows, keys, q),
                    is_causal=causal,
                    scale=1.0,
                )
                for keys, causal in split_keys(run)
            )
            for prefix_o, prefix_l in prefix_outputs:
                total_l = torch.logaddexp(l, prefix_l)  # l = log(e^l₁ + e^l₂)
                # o = e^(l₁ − l) · o₁ + e^(l₂ − l) · o₂
                o = (o * (l - total_l).exp()[..., None] + prefix_o * (prefix_l - total_l).exp()[..., None]).to(o.dtype)
                l = total_l
            out[run.rows, :, run.queries], total[run.rows, :, run.queries] = o, l
        ctx.runs = runs
        ctx.save_for_backward(q, k, v, out, total)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, total = ctx.saved_tensors
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        group = q.shape[1] // k.shape[1]
        for run in ctx.runs:
            index = (run.rows, slice(None), run.queries)
            for keys, causal in split_keys(run):
                gradients = BACKWARD(
                    grads[0][index],
                    q[index],
                    repeat_heads(k, run.rows, keys, q),
                    repeat_heads(v, run.rows, keys, q),
                    out[index],
                    total[index],
                    0.0,
                    causal,
                    scale=1.0,
                )
                dq[index] += gradients[0]
                for gradient, gradient_part in zip((dk, dv), gradients[1:], strict=True):
                    gradient[run.rows, :, keys] += gradient_part.unflatten(1, (-1, group)).sum(2)
        return dq, dk, dv, None


def split_keys(run: Run) -> list[tuple[slice, bool]]:
    """The keys of the triangle, and, if there are any, those before it that every query sees; whether each is
    causal."""
    middle = run.keys.stop - (run.queries.stop - run.queries.start)
    triangle = [(slice(middle, run.keys.stop), True)]
    return triangle if middle == run.keys.start else [*triangle, (slice(run.keys.start, middle), False)]


def repeat_heads(x: Tensor, rows: slice, keys: slice, q: Tensor) -> Tensor:
    """Those rows and keys of x [B, G, T, d], each head as often as query heads share it."""
    return x[rows, :, keys].repeat_interleave(q.shape[1] // x.shape[1], 1)


def make_block_mask(doc: Tensor, positions: Tensor | None = None) -> BlockMask:
    """The same as `find_runs` for FlexAttention: blocks of 128 × 128 query-key pairs that hold anything to be seen,
    (T/128)² numbers a row. Documents may lie in several pieces. A block is left out if its documents or its places
    cannot meet, and needs no mask if all its pairs are seen."""
    T, device = doc.shape[1], doc.device
    positions = torch.arange(T, device=device) if positions is None else positions.to(device)
    query_doc, place = doc[:, positions], torch.arange(T, device=device)[None]
    order = torch.where(doc < 0, doc.amax() + 1, doc)  # padding stands behind the documents
    (low_q, high_q), (low_k, high_k) = (block_ranges(x) for x in (order[:, positions], order))
    (first_q, last_q), (first_k, last_k) = (block_ranges(x) for x in (positions[None], place))
    meets = (
        (high_q[:, :, None] >= low_k[:, None])
        & (low_q[:, :, None] <= high_k[:, None])
        & (last_q[:, :, None] >= first_k[:, None])
    )
    is_one_document = (low_q == high_q)[:, :, None] & (low_k == high_k)[:, None] & (low_q[:, :, None] == low_k[:, None])
    is_full = is_one_document & (first_q[:, :, None] >= last_k[:, None])
    for axis, length in ((1, len(positions)), (2, T)):  # a block that the row's end cuts needs the mask
        if length % SPARSE:
            is_full.select(axis, -1).fill_(False)
    return BlockMask.from_kv_blocks(
        *order_key_blocks(meets & ~is_full),
        *order_key_blocks(is_full),
        BLOCK_SIZE=SPARSE,
        mask_mod=lambda b, _, query, key: (positions[query] >= key) & (query_doc[b, query] == doc[b, key]),
        seq_lengths=(len(positions), T),
    )


def block_ranges(x: Tensor) -> tuple[Tensor, Tensor]:
    """Least and greatest number of each block of a row, [B, T] → twice [B, T/128]; a block that the row's end cuts has
    its last number again."""
    padding = -x.shape[1] % SPARSE
    return torch.cat((x, x[:, -1:].expand(-1, padding)), 1).unflatten(1, (-1, SPARSE)).aminmax(dim=2)


def order_key_blocks(is_visible: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of keys each block of queries takes, [B, 1, Q], and which, those first, [B, 1, Q, K]."""
    return (
        is_visible.sum(2, dtype=torch.int32)[:, None],
        is_visible.int().sort(dim=2, descending=True, stable=True).indices.int()[:, None],
    )


def attend_blocks(q: Tensor, k: Tensor, v: Tensor, block_mask: BlockMask) -> Tensor:
    """`attend_documents` on a GPU."""
    attend = compile_attention() if q.is_cuda else flex_attention
    output = attend(q, k, v, block_mask=block_mask, scale=1.0, enable_gqa=q.shape[1] != k.shape[1])
    assert isinstance(output, Tensor)
    return output


@cache
def compile_attention() -> Any:
    """With sizes as variables: torch compiles a function anew for eight sizes (`recompile_limit`), then runs it
    uncompiled, all scores in memory."""
    return torch.compile(flex_attention, dynamic=True)
