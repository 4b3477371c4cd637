"""What changed between two versions of the weights: positions and new values, nothing lost.

Papers: Composer 2 technical report (arXiv:2603.24477v2), §4.1 and §6.2; arXiv:2602.03839.

With learning rates near 1e-6 an Adam step moves a weight by less than half of its last bfloat16 place, and 98 to 99% of the weights
that an inference engine holds are the same bits after it. So a trainer sends the others. Bits, not numbers, are compared and sent:
−0 and 0 are equal as numbers, a NaN is not equal to itself, and an engine that is to compute what the trainer computed needs both.

Run it
    kernels/delta.py is the same on a GPU
"""

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from ref.checks import expect

__all__ = ["apply_delta", "encode_delta"]


def encode_delta(old: Shaped[Tensor, "*shape"], new: Shaped[Tensor, "*shape"]) -> tuple[Int[Tensor, " C"], Shaped[Tensor, " C"]]:
    """Where the bits of `new` are not those of `old`: positions in the flattened tensor, rising, int64, and the values there. ValueError
    for other shapes or dtypes and for what has not 16 bits (bfloat16, float16)."""
    check_versions(old, new)
    positions = (old.flatten().view(torch.int16) != new.flatten().view(torch.int16)).nonzero()[:, 0]
    return positions, new.flatten()[positions]


def apply_delta(old: Shaped[Tensor, "*shape"], positions: Int[Tensor, " C"], values: Shaped[Tensor, " C"]) -> Shaped[Tensor, "*shape"]:
    """The new version, bit for bit; `old` stays as it is. ValueError for positions that there are not, and for values of another dtype
    or number."""
    check_delta(old, positions, values)
    new = old.flatten().clone()
    # As integers: arithmetic units are free to change a NaN's payload, a copy of bits is not.
    new.view(torch.int16)[positions.long()] = values.view(torch.int16)
    return new.view(old.shape)


# What there can be a delta of; kernels/delta.py asks the same.


def check_versions(old: Tensor, new: Tensor) -> None:
    if old.shape != new.shape or old.dtype != new.dtype or old.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"old and new must be bfloat16 or float16 of one shape; got {old.dtype} {list(old.shape)} and {new.dtype} {list(new.shape)}")


def check_delta(old: Tensor, positions: Tensor, values: Tensor) -> None:
    """Positions are looked at on the CPU only: a GPU would have to be waited for, and raises by itself."""
    expect("positions", positions, "int", "C")
    if values.dtype != old.dtype or values.shape != positions.shape:
        raise ValueError(f"values must be {old.dtype}, shape {list(positions.shape)}; got {values.dtype} {list(values.shape)}")
    if not old.is_cuda and len(positions) and not 0 <= int(positions.min()) <= int(positions.max()) < old.numel():
        raise ValueError(f"positions must lie in the {old.numel()} weights, got {int(positions.min())} to {int(positions.max())}")
