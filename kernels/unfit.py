"""Configurations that are not offered to the autotuner: they do not compile, spill registers, or need more shared memory than a block may use.

Written by `python -m etude.kernels` from what the compiler says (results/kernels-compiled.json). Keys: kernel, target, and the form of a launch
as `kernels.launch.Fitting` names it. A target that is not here is offered everything.
"""

__all__ = ["UNFIT"]

UNFIT: dict[tuple[str, str, str], tuple[str, ...]] = {}
