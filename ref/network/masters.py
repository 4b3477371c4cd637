"""Mixed precision with master weights: compute in bfloat16, accumulate updates in float32 (arXiv:1710.03740).

The network that runs (`Masters.model`) holds weights in the compute dtype. Each has a float32 master, which the
optimisers update. A step copies the gradients to the masters, lets the optimisers update the masters, and copies the
rounded result back. With learning rates near 1e-6 most bfloat16 weights do not change at all in a step, though their
masters do.
"""

import copy
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

__all__ = ["Masters"]

M = TypeVar("M", bound=nn.Module)


class Masters(Generic[M]):
    """Float32 masters for every parameter of `model`: `model` itself becomes the masters, and a copy in `dtype` runs.
    Float64 has float64 masters.

    `masters` is a module of the same structure and names: give its parameters to the optimisers and save its state.
    """

    def __init__(self, model: M, dtype: torch.dtype = torch.bfloat16):
        self.masters = model.to(torch.promote_types(dtype, torch.float32))
        self.model = copy.deepcopy(model).to(dtype)
        self.pairs = list(zip(self.masters.parameters(), self.model.parameters(), strict=True))

    @torch.no_grad()
    def step(
        self,
        optimisers: list[torch.optim.Optimizer],
        max_norm: float = 1.0,
        gradients: list[Tensor | None] | None = None,
    ) -> Tensor:
        """Apply the gradients accumulated in `model`, clipped to a global norm, and clear them. Or apply `gradients`
        computed elsewhere: one per parameter, in order, of any dtype; None for a parameter without a gradient.

        Returns the norm before clipping. If it is not finite, raises FloatingPointError and does not take the step."""
        if gradients is None:
            gradients = [param.grad for _, param in self.pairs]
        used_pairs = [
            (master, gradient)
            for (master, _), gradient in zip(self.pairs, gradients, strict=True)
            if gradient is not None
        ]
        for master, gradient in used_pairs:
            master.grad = gradient.to(master.dtype)
        for _, param in self.pairs:
            param.grad = None
        norm = nn.utils.clip_grad_norm_([m for m, _ in used_pairs], max_norm)
        if not torch.isfinite(norm):
            for master, _ in used_pairs:  # a parameter without a gradient in the next step must not reuse this one
                master.grad = None
            raise FloatingPointError(f"gradient norm is {norm.item()}; the step was not taken")
        for optimiser in optimisers:
            optimiser.step()
        self.copy_down()
        for master, _ in used_pairs:
            master.grad = None
        return norm

    @torch.no_grad()
    def copy_down(self) -> None:
        """Copy the masters, rounded, into the working weights: after a step or after loading a state."""
        torch._foreach_copy_([w for _, w in self.pairs], [m for m, _ in self.pairs])
