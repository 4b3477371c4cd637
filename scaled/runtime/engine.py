"""Chooses between kernels and `ref`: kernels on GPUs, `ref` elsewhere. With `INTERPRETED` and TRITON_INTERPRET=1 in the environment, kernels
run everywhere, so tests can check them in the network without a GPU."""

from torch import Tensor

from kernels.launch import available

__all__ = ["fast"]

INTERPRETED = False
"""Whether to use interpreted kernels: they are correct, but thousands of times slower."""


def fast(x: Tensor) -> bool:
    """Whether a kernel should process this tensor."""
    return available(x) and (x.is_cuda or INTERPRETED)
