"""Where kernels run: on CUDA, or interpreted on the CPU. Every kernel's wrapper checks this first."""

import os
from typing import Literal

import torch
from torch import Tensor

try:
    import triton
except ImportError:  # Triton exists only for Linux, and only the scaled path needs it
    triton = None

__all__ = ["INTERPRETED", "available", "configs", "need", "path"]

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
"""Set by TRITON_INTERPRET=1 in the environment, before the first kernel is imported."""


def available(x: Tensor) -> bool:
    """Whether a kernel can run on this tensor."""
    return triton is not None and (x.is_cuda or INTERPRETED)


def path(x: Tensor) -> Literal["native", "expanded", "ref"]:
    """How a product of MXFP8 or NVFP4 is computed where this tensor is: "native", codes and scales go into the tensor cores as they are, which
    GPUs of compute capability 10 or newer can; "expanded", to bfloat16 when loaded, on other GPUs and under the interpreter; "ref", by the functions
    of `ref`, where no kernel runs."""
    if not available(x):
        return "ref"
    return "native" if x.is_cuda and torch.cuda.get_device_capability(x.device) >= (10, 0) else "expanded"


def need(x: Tensor) -> None:
    """Raise a one-line RuntimeError unless a kernel can run on this tensor."""
    if triton is None:
        raise RuntimeError("kernels need Triton: pip install triton (Linux); the functions of ref/ do not need it")
    if not available(x):
        raise RuntimeError(f"kernels run on CUDA, or on the CPU with TRITON_INTERPRET=1 in the environment; this tensor is on {x.device}")


def configs(small: dict, *large: tuple[dict, int, int]) -> list:
    """The configurations to autotune over: one small tile under the interpreter, which cannot measure time; on a GPU all of `large`
    (tile, warps, stages)."""
    if INTERPRETED or not torch.cuda.is_available():
        return [triton.Config(small)]
    return [triton.Config(tile, num_warps=warps, num_stages=stages) for tile, warps, stages in large]
