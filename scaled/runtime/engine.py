"""Whether a kernel computes, or `ref`: kernels on GPUs, `ref` elsewhere. With `INTERPRETED` set, and TRITON_INTERPRET=1 in the environment,
kernels everywhere: that is how their place in the network is tested where there is no GPU."""

from torch import Tensor

from kernels.launch import available

__all__ = ["fast"]

INTERPRETED = False
"""Whether interpreted kernels count: they are right, and thousands of times slower."""


def fast(x: Tensor) -> bool:
    """Whether a kernel is to take this tensor."""
    return available(x) and (x.is_cuda or INTERPRETED)
