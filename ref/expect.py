"""What the public functions of this room say of a tensor that cannot be right."""

import torch
from torch import Tensor

__all__ = ["expect"]


def expect(name: str, x: object, kind: str, *shape: int | str) -> None:
    """Refuse all but a "float", "int", "bool" or "any" tensor of this shape, where letters are any size."""
    got = None if x is None else type(x).__name__
    if isinstance(x, Tensor):
        dtype = "float" if x.is_floating_point() else "bool" if x.dtype == torch.bool else "int"
        sizes = len(shape) == x.ndim and all(isinstance(n, str) or n == m for n, m in zip(shape, x.shape))
        if sizes and kind in (dtype, "any"):
            return
        got = f"{x.dtype} {list(x.shape)}"
    raise ValueError(f"{name} must be {kind}, shape [{', '.join(map(str, shape))}]; got {got}")
