"""What changed between two versions of the weights: positions and new values, lossless.

Papers: Composer 2 technical report (arXiv:2603.24477v2), §4.1 and §6.2; arXiv:2602.03839.

With learning rates near 1e-6 an Adam step moves most weights by less than half a bfloat16 ulp: 98 to 99% of the weights in an
inference engine keep the same bits. So a trainer sends only the others. It compares and sends bits, not numbers: −0 and 0 are equal as
numbers, and a NaN is not equal to itself, but an engine that must compute what the trainer computed needs both exactly.

Run it
    kernels/delta.py does the same on a GPU
"""

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from ref.checks import expect

__all__ = ["apply_delta", "encode_delta"]


def encode_delta(old: Shaped[Tensor, "*shape"], new: Shaped[Tensor, "*shape"]) -> tuple[Int[Tensor, " C"], Shaped[Tensor, " C"]]:
    """Where the bits of `new` differ from those of `old`: positions in the flattened tensor, ascending, int64, and the new values there.
    Raises ValueError if shapes or dtypes differ, and for dtypes other than bfloat16 and float16."""
    check_versions(old, new)
    positions = (old.flatten().view(torch.int16) != new.flatten().view(torch.int16)).nonzero()[:, 0]
    return positions, new.flatten()[positions]


def apply_delta(old: Shaped[Tensor, "*shape"], positions: Int[Tensor, " C"], values: Shaped[Tensor, " C"]) -> Shaped[Tensor, "*shape"]:
    """The new version, bit for bit; `old` is not changed. Raises ValueError for positions out of range, and for values of another dtype
    or length."""
    check_delta(old, positions, values)
    new = old.flatten().clone()
    # As integers: floating-point hardware may change a NaN's payload; a copy of bits does not.
    new.view(torch.int16)[positions.long()] = values.view(torch.int16)
    return new.view(old.shape)


# Checks of arguments; kernels/delta.py uses them too.


def check_versions(old: Tensor, new: Tensor) -> None:
    if old.shape != new.shape or old.dtype != new.dtype or old.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(
            f"old and new must be bfloat16 or float16 of the same shape; got {old.dtype} {list(old.shape)} and {new.dtype} {list(new.shape)}"
        )


def check_delta(old: Tensor, positions: Tensor, values: Tensor) -> None:
    """Positions are checked only on the CPU: checking them on a GPU would wait for it, and the GPU raises by itself."""
    expect("positions", positions, "int", "C")
    if values.dtype != old.dtype or values.shape != positions.shape:
        raise ValueError(f"values must be {old.dtype} of shape {list(positions.shape)}; got {values.dtype} of shape {list(values.shape)}")
    if not old.is_cuda and len(positions) and not 0 <= int(positions.min()) <= int(positions.max()) < old.numel():
        raise ValueError(f"positions must lie in the {old.numel()} weights; got {int(positions.min())} to {int(positions.max())}")
