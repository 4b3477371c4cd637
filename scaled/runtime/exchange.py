"""Sends sequences to the ranks that train on them."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from scaled.runtime.mesh import current

__all__ = ["exchange"]


def exchange(sequences: Sequence[Tensor], rank_of: Tensor) -> list[Tensor]:
    """Sends per-token data [T, …] of this rank's sequences to the given dp ranks; returns those for this rank, from
    rank 0 first, in each rank's order. A rank without sequences passes an empty list; another rank then determines
    dtype and shape after T."""
    group, device = current().group("dp"), current().device
    if group.size == 1:
        return list(sequences)
    rank_of = rank_of.to(device)
    order = rank_of.argsort(stable=True).tolist()
    lengths = torch.tensor([len(sequences[i]) for i in order], dtype=torch.long, device=device)
    counts = rank_of.bincount(minlength=group.size)
    incoming_counts = torch.empty_like(counts)
    dist.all_to_all_single(incoming_counts, counts, group=group.handle)
    incoming_lengths = lengths.new_empty(int(incoming_counts.sum()))
    dist.all_to_all_single(incoming_lengths, lengths, incoming_counts.tolist(), counts.tolist(), group=group.handle)
    send = [int(part.sum()) for part in lengths.split(counts.tolist())]
    receive = [int(part.sum()) for part in incoming_lengths.split(incoming_counts.tolist())]
    kinds: list = [None] * group.size
    dist.all_gather_object(
        kinds, (sequences[0].dtype, sequences[0].shape[1:]) if len(sequences) else None, group=group.handle
    )
    present_kinds = [kind for kind in kinds if kind is not None]
    if not present_kinds:
        return []
    if len(set(present_kinds)) > 1:
        raise ValueError(
            f"sequences must have one dtype and, after their length, one shape on all ranks; got "
            f"{sorted(map(str, set(present_kinds)))}"
        )
    dtype, trailing_shape = present_kinds[0]
    flat_tokens = (
        torch.cat([sequences[i] for i in order])
        if len(sequences)
        else torch.empty(0, *trailing_shape, dtype=dtype, device=device)
    )
    out = flat_tokens.new_empty(sum(receive), *trailing_shape)
    dist.all_to_all_single(out, flat_tokens, receive, send, group=group.handle)
    return list(out.split(incoming_lengths.tolist()))
