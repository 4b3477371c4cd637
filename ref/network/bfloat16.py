"""Products of bfloat16 matrices on processors that have no instructions for them.

torch multiplies bfloat16 matrices with oneDNN, which needs AVX-512. On any other x86 processor, including most laptops,
it falls back to a plain loop, thirty to sixty times slower than the same product in float32. Here such a product
converts its factors to float32, multiplies, and rounds once. The instructions do the same: factors of eight bits,
float32 sums, one rounding at the end. Only the order of the sums may differ.

`import ref.network` replaces torch's products with these if the processor needs it, and does nothing otherwise.
Products in autograd's backward pass are included. float32, float64 and everything on a GPU is multiplied as before.
"""

import warnings

import torch
from torch import Tensor

__all__ = ["NATIVE"]


def native() -> bool:
    """Whether this processor multiplies bfloat16 matrices natively."""
    try:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    except (AttributeError, RuntimeError):  # a torch without oneDNN
        return False


NATIVE: bool = native()
"""Whether this processor multiplies bfloat16 matrices natively."""

aten = torch.ops.aten


def wide(*tensors: Tensor) -> list[Tensor]:
    # If the dtypes differ, torch itself refuses the product.
    return [x.float() for x in tensors] if all(x.dtype is torch.bfloat16 for x in tensors) else [*tensors]


def mm(a: Tensor, b: Tensor) -> Tensor:
    x, y = wide(a, b)
    return aten.mm.out(x, y, out=x.new_empty(a.shape[0], b.shape[1])).to(a.dtype)


def bmm(a: Tensor, b: Tensor) -> Tensor:
    x, y = wide(a, b)
    return aten.bmm.out(x, y, out=x.new_empty(*a.shape[:2], b.shape[2])).to(a.dtype)


def addmm(c: Tensor, a: Tensor, b: Tensor, beta=1, alpha=1) -> Tensor:
    z, x, y = wide(c, a, b)
    return aten.addmm.out(z, x, y, beta=beta, alpha=alpha, out=x.new_empty(a.shape[0], b.shape[1])).to(a.dtype)


def baddbmm(c: Tensor, a: Tensor, b: Tensor, beta=1, alpha=1) -> Tensor:
    z, x, y = wide(c, a, b)
    return aten.baddbmm.out(z, x, y, beta=beta, alpha=alpha, out=x.new_empty(*a.shape[:2], b.shape[2])).to(a.dtype)


if not NATIVE:
    PRODUCTS = torch.library.Library("aten", "IMPL")  # registrations last as long as this object
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that its own kernel is replaced, which is intended
        for product in (mm, bmm, addmm, baddbmm):
            PRODUCTS.impl(product.__name__, product, "CPU")
