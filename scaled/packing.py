"""Global sequence packing on many ranks: `ref/packing.py`, which explains cost, rule and bound.

Every dp rank knows the costs of its own sequences. All costs are gathered (eight bytes per sequence). Every rank
assigns all sequences and gets the same result, because the rule is deterministic. `runtime/exchange.py` then sends the
sequences.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ref import packing as ref
from ref.checks import expect
from ref.packing import Cost, lay, rows
from scaled.runtime.comm import all_reduce_sum, gathered
from scaled.runtime.mesh import current

__all__ = ["Cost", "balance", "imbalance", "lay", "rows"]


def balance(costs: Float[Tensor, " S"], ranks: int) -> Int[Tensor, " S"]:
    """The target rank of each of this rank's sequences, with the sequences of all ranks assigned together. Raises
    ValueError as in `ref`."""
    expect("costs", costs, "float", "S")
    parts = gathered(costs.double(), "dp")
    # Eq. 2 (ref/packing.py): LPT over the sequences of all ranks.
    rank_of = ref.balance(torch.cat(parts), ranks)
    return rank_of.split([len(part) for part in parts])[current().group("dp").rank]


def imbalance(costs: Float[Tensor, " S"], rank_of: Int[Tensor, " S"], ranks: int) -> float:
    """The highest load of a rank over the mean load, for the sequences of all ranks."""
    loads = all_reduce_sum(
        torch.zeros(ranks, dtype=torch.float64, device=costs.device).index_add_(
            0, rank_of.to(costs.device), costs.double()
        ),
        "dp",
    )
    max_load = loads.max()
    # Not max_load / mean: the mean of the smallest loads underflows to zero.
    return 1 / float((loads / max_load).mean()) if float(max_load) else 1.0
