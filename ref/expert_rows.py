"""Tokens to their experts and back: the order that grouped products need, and its inverse.

A mixture of experts sends each of N tokens to K experts. Sorted by expert, the N·K assignments become E dense products.
Sorted back, each token sums the outputs of its experts, weighted by its gates:

    sort_by_expert    experts [N, K] → order, place, ends     a stable counting sort; place is the inverse of order
    permute           x [N, D] → rows [N·K, D]                rows[r] = x[order[r] // K]
    unpermute         rows [N·K, D] → [N, D]                  Σ_k gates[n, k] · rows[place[n, k]]

No operation adds into a shared location, so two runs give the same bits; every gradient is a gather too.
`kernels/expert_rows.py` does the same without a comparison sort and never waits for the GPU to report group sizes.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ref.checks import expect

__all__ = ["permute", "sort_by_expert", "unpermute"]


def sort_by_expert(
    experts: Int[Tensor, "N K"], num_experts: int
) -> tuple[Int[Tensor, " NK"], Int[Tensor, "N K"], Int[Tensor, " E"]]:
    """order: the assignment n·K + k of each row; rows are sorted by expert, and ties keep their order. place: the row
    of token n's k-th expert. ends: one past each expert's last row. All are int64. Raises ValueError for an expert
    index out of range."""
    expect("experts", experts, "int", "N", "K")
    flat = experts.flatten().long()
    if flat.numel() and not 0 <= int(flat.min()) <= int(flat.max()) < num_experts:
        raise ValueError(
            f"experts must lie between 0 and {num_experts - 1}; got {int(flat.min())} to {int(flat.max())}"
        )
    order = flat.argsort(stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)  # the inverse of order
    return order, place.view(experts.shape), flat.bincount(minlength=num_experts).cumsum(0)


def permute(x: Float[Tensor, "N D"], order: Int[Tensor, " NK"], place: Int[Tensor, "N K"]) -> Float[Tensor, "NK D"]:
    """The row of x for every assignment. Raises ValueError if the shapes do not match."""
    expect("place", place, "int", len(x), "K")
    expect("order", order, "int", place.numel())
    return x[order // place.shape[1]]  # rows[r] = x[order[r] // K]


def unpermute(
    rows: Float[Tensor, "NK D"], order: Int[Tensor, " NK"], place: Int[Tensor, "N K"], gates: Float[Tensor, "N K"]
) -> Float[Tensor, "N D"]:
    """Every token's rows, weighted by its gates and summed in float32 or wider; returned in the dtype of rows. Raises
    ValueError if the shapes do not match."""
    expect("rows", rows, "float", place.numel(), "D")
    expect("order", order, "int", place.numel())
    expect("gates", gates, "float", *place.shape)
    wide = torch.promote_types(rows.dtype, torch.float32)
    # Σ_k gates[n, k] · rows[place[n, k]]
    return (rows[place].to(wide) * gates.to(wide)[..., None]).sum(1).to(rows.dtype)
