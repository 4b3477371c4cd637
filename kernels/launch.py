"""Where kernels run: on CUDA, or interpreted on the CPU. Every kernel's wrapper checks this first."""

import os
from typing import Literal

import torch
from torch import Tensor

from .unfit import UNFIT

try:
    import triton
except ImportError:  # Triton exists only for Linux, and only the scaled path needs it
    triton = None

__all__ = [
    "EXACT",
    "INTERPRETED",
    "Configurations",
    "Fitting",
    "available",
    "configs",
    "fitting",
    "need",
    "path",
    "tile",
]

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
"""Set by TRITON_INTERPRET=1 in the environment, before the first kernel is imported."""

EXACT = {"enable_fp_fusion": False}
"""The launch option of every kernel that promises bits. Triton fuses a multiplication and an addition unless it is told
not to, and a fused pair rounds once where `ref` rounds twice. The interpreter never fuses, so it cannot show the
difference."""


def available(x: Tensor) -> bool:
    """Whether a kernel can run on this tensor."""
    return triton is not None and (x.is_cuda or INTERPRETED)


def path(x: Tensor) -> Literal["native", "expanded", "ref"]:
    """How a product of MXFP8 or NVFP4 is computed where this tensor is: "native", codes and scales go into the tensor
    cores as they are, which GPUs of compute capability 10 or newer can; "expanded", to bfloat16 when loaded, on other
    GPUs and under the interpreter; "ref", by the functions of `ref`, where no kernel runs."""
    if not available(x):
        return "ref"
    return "native" if x.is_cuda and torch.cuda.get_device_capability(x.device) >= (10, 0) else "expanded"


def need(x: Tensor) -> None:
    """Raise a one-line RuntimeError unless a kernel can run on this tensor."""
    if triton is None:
        raise RuntimeError("kernels need Triton: pip install triton (Linux); the functions of ref/ do not need it")
    if not available(x):
        raise RuntimeError(
            f"kernels run on CUDA, or on the CPU with TRITON_INTERPRET=1 in the environment; this "
            f"tensor is on {x.device}"
        )


class Configurations(list):
    """What the autotuner chooses from in this process; `large` and `plain` hold what it chooses from on a GPU, also
    where there is none."""

    def __init__(self, candidates: list, large: list, plain: list):
        super().__init__(candidates)
        self.large, self.plain = large, plain

    def candidates(self, dtype: torch.dtype) -> list:
        """`plain` for float32, if there are any: no tensor core multiplies float32 exactly, and tiles that suit one
        overflow the registers."""
        return self.plain if dtype == torch.float32 and self.plain else self.large


def configs(
    small: dict, *large: tuple[dict, int, int], plain: tuple[tuple[dict, int, int], ...] = ()
) -> Configurations:
    """The configurations to autotune over: one small tile under the interpreter, which cannot measure time; on a GPU
    all of `large` (tile, warps, stages), or `plain` for float32 where `fitting` is asked."""
    wide, narrow = (
        [triton.Config(tile, num_warps=warps, num_stages=stages) for tile, warps, stages in specs]
        for specs in (large, plain)
    )
    return Configurations(
        wide + narrow if torch.cuda.is_available() and not INTERPRETED else [triton.Config(small)], wide, narrow
    )


class Fitting:
    """Leaves out configurations that spill registers or exceed shared memory on this GPU (kernels/unfit.py)."""

    def __init__(self, kernel: str, *constants: str):
        self.kernel, self.constants = kernel, constants

    def form(self, arguments: dict) -> str:
        """What a launch's registers hang on: the dtype of its first tensor, and some constants: "uint8 FORM 1 BBLOCK
        128"."""
        return " ".join(
            [
                str(first(arguments).dtype).removeprefix("torch."),
                *(f"{name} {int(arguments[name])}" for name in self.constants),
            ]
        )

    def __call__(self, offered: Configurations, arguments: dict, **constants) -> list:
        unfit = UNFIT.get((self.kernel, architecture(first(arguments)), self.form({**arguments, **constants})), ())
        return [config for config in offered.candidates(first(arguments).dtype) if tile(config) not in unfit]


def fitting(kernel: str, *constants: str) -> dict[str, Fitting]:
    """For `prune_configs_by` of triton.autotune. kernel: its file and name; constants: those that change how many
    registers it needs."""
    return {"early_config_prune": Fitting(kernel, *constants)}


def first(arguments: dict) -> Tensor:
    """The first tensor among a launch's arguments."""
    return next(value for value in arguments.values() if isinstance(value, Tensor))


def tile(config: "triton.Config") -> str:
    """A configuration in words: "BM 64 BN 128, 4 warps, 3 stages"."""
    sizes = " ".join(f"{name} {size}" for name, size in config.kwargs.items())
    return f"{sizes or 'fixed'}, {config.num_warps} warps, {config.num_stages} stages"


def architecture(x: Tensor) -> str:
    """sm_90, sm_100, gfx950: the GPU that this tensor lies on."""
    if torch.version.hip is not None:
        return torch.cuda.get_device_properties(x.device).gcnArchName.partition(":")[0]
    major, minor = torch.cuda.get_device_capability(x.device)
    return f"sm_{major}{minor}"
