"""Whether a kernel computes, or `ref`: kernels on GPUs, `ref` elsewhere. With `INTERPRETED` set, and TRITON_INTERPRET=1
in the environment, kernels everywhere: that is how their place in the network is tested where there is no GPU.

    fast(x)              whether a kernel is to take this tensor
    kernel("experts")    the module kernels/experts.py, under the name that its folder has here

The folder `kernels/` has two names. In a checkout on the path it is `kernels`. The Hub has a distribution of that name
as well, so an installed etude brings the folder as `etude_kernels` (pyproject.toml) and leaves `kernels` to the Hub.
"""

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from torch import Tensor

__all__ = ["fast", "kernel"]

INTERPRETED = False
"""Whether to use interpreted kernels: they are correct, but thousands of times slower."""


def fast(x: Tensor) -> bool:
    """Whether a kernel should process this tensor."""
    return (x.is_cuda or INTERPRETED) and kernel("launch").available(x)


def kernel(name: str) -> ModuleType:
    """A module of the folder `kernels/`. Triton is imported here, and not before."""
    return import_module(f"{_kernels_package()}.{name}")


@cache
def _kernels_package() -> str:
    """What the folder is called in this process: one name only, because a module under two names would be two
    modules."""
    root = Path(__file__).resolve().parents[2]
    if (root / "etude_kernels").is_dir():  # a wheel, where a `kernels` that also lies beside `scaled` is the Hub's
        return "etude_kernels"
    spec = find_spec("kernels")
    is_ours = spec and spec.origin and Path(spec.origin).resolve() == root / "kernels" / "__init__.py"
    return "kernels" if is_ours else "etude_kernels"
