"""Self-summarisation on many ranks: `ref/self_summary.py`, which explains chains.

Each dp rank samples its own rollouts with its own sampler, so `ChainBuilder` is that of `ref`. In training,
chains are split: packing (`scaled/packing.py`) puts segments wherever they fit, so the segments of one chain may be on
different ranks.

    advantages [C]   of all chains, the same on every rank (`scaled.dr_grpo.group_advantages` over chains)
    chains           the same C chains on every rank, each with the segments on this rank, possibly none
    spread(…)        one advantage for each segment here

Nothing is ever divided by the number of segments, so their location does not matter: the sum over ranks of A_c ·
(tokens of c here) is A_c · (tokens of c).
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from ref.checks import expect
from ref.self_summary import Chain, ChainBuilder, Chaining, Demo, Segment, demo
from scaled.runtime.comm import all_reduce_sum

__all__ = ["Chain", "ChainBuilder", "Chaining", "Demo", "Segment", "demo", "spread"]


def spread(advantages: Float[Tensor, " C"], chains: Sequence[Chain]) -> Float[Tensor, " S"]:
    """Advantages of C chains → one for each of their segments on this rank, in order. Raises ValueError as in `ref`; a
    chain has no segments if no rank holds one."""
    if not chains:
        raise ValueError("chains must hold at least one chain")
    expect("advantages", advantages, "float", len(chains))
    if not bool(advantages.isfinite().all()):
        raise ValueError(f"advantages must be finite, got {advantages.tolist()}")
    counts = torch.tensor([len(c.segments) for c in chains], device=advantages.device)
    global_counts = all_reduce_sum(counts, "dp")
    if not bool((global_counts > 0).all()):
        raise ValueError(f"chains must have segments, and chain {int(global_counts.argmin())} has none")
    # A_c (ref/self_summary.py), once for each segment of chain c on this rank.
    return advantages.repeat_interleave(counts)
