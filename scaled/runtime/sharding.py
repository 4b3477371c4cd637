"""Which part of each weight a rank holds.

    weights outside the experts    FSDP2 over all ranks, along the first dimension
    experts                        complete experts to the ranks of an ep group in order, then FSDP2 over efsdp for each

On different ranks of an ep group, expert parameters of the same name are different tensors: `owned` tells which
parameters these are. `whole_shape` gives the full shape, `slice_of` a rank's part and its place. `load_slice` and
`wholes` convert from the full tensor to the part and back."""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ref import lora
from ref.network import Config
from ref.network.model import initial_std
from scaled.runtime.comm import all_reduce_sum
from scaled.runtime.mesh import current

__all__ = [
    "EXPERTS",
    "adapters",
    "clip",
    "gathered_tensor",
    "initialise",
    "merged",
    "owned",
    "place",
    "load_slice",
    "reshard",
    "shard",
    "slice_of",
    "whole_shape",
    "wholes",
]

EXPERTS = ("gate_up_proj", "down_proj")
"""Parameters of a mixture of experts that belong to experts."""


def shard(model: nn.Module, blocks: Iterable[nn.Module], reshard_after_forward: bool = True) -> None:
    """Applies FSDP2 to each block and to the rest: experts on their own mesh, all else on all ranks. Gradients are
    summed."""
    mesh = current()
    dtype = mesh.compute.dtype
    policy = (
        MixedPrecisionPolicy() if dtype is None else MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    )
    fsdp_options: dict[str, Any] = {"mp_policy": policy, "reshard_after_forward": reshard_after_forward}
    for block in blocks:
        for module in block.modules():
            if all(hasattr(module, name) for name in EXPERTS) and mesh.layout.ep > 1:
                # Every rank needs the router, so it is managed separately from the experts.
                assert mesh.experts is not None
                fully_shard(module.get_submodule("gate"), mesh=mesh.weights, **fsdp_options)
                fully_shard(module, mesh=mesh.experts["efsdp"], shard_placement_fn=expert_placement, **fsdp_options)
        fully_shard(block, mesh=mesh.weights, **fsdp_options)
    fully_shard(model, mesh=mesh.weights, mp_policy=policy, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def expert_placement(p: nn.Parameter):
    """The dimension along which expert weights are sharded: complete experts if they divide evenly, else their rows."""
    n = current().layout.efsdp
    return Shard(1) if len(p) % n and p.shape[1] % n == 0 else Shard(0)


@torch.no_grad()
def initialise(module: nn.Module, config: Config) -> None:
    """Initial weights as in `ref.network.model.initialise`, with its `config`. Every rank draws every full weight in
    turn and keeps its part, so a seed gives one network and nothing is sent."""
    for name, p in module.named_parameters():
        full_weight = torch.empty(whole_shape(name, p), device=current().device)
        if p.ndim < 2:
            full_weight.fill_(0.0 if name.endswith(".bias") else 1.0)
        else:
            full_weight.normal_(0.0, initial_std(name, config))
        load_slice(name, p, full_weight)


@torch.no_grad()
def clip(model: nn.Module, max_norm: float) -> float:
    """Clips the gradients of all weights on all ranks to a joint norm of `max_norm` (0: no clipping); returns the norm
    before clipping. Raises FloatingPointError if it is not finite, so that no step is taken."""
    grads = [
        p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters() if p.grad is not None
    ]
    # Each weight is sharded over all ranks, and an expert over its efsdp group, so nothing counts twice.
    norm = (
        all_reduce_sum(
            sum(
                (grad.double().square().sum() for grad in grads),
                torch.zeros((), dtype=torch.float64, device=current().device),
            )
        )
        .sqrt()
        .item()
    )
    if not math.isfinite(norm):
        raise FloatingPointError(f"gradient norm is {norm}; the step was not taken")
    if max_norm and norm > max_norm:
        torch._foreach_mul_(grads, max_norm / (norm + 1e-6))
    return norm


def owned(name: str) -> bool:
    """Whether a parameter belongs to experts that only this rank's efsdp group holds."""
    return name.rpartition(".")[2] in EXPERTS and ".mlp." in name and current().layout.ep > 1


def whole_shape(name: str, p: Tensor) -> tuple[int, ...]:
    """Shape of a parameter over all ranks."""
    return (p.shape[0] * current().layout.ep, *p.shape[1:]) if owned(name) else tuple(p.shape)


def slice_of(name: str, p: Tensor) -> tuple[list[int], Tensor]:
    """This rank's part of a parameter, and where it begins in the tensor over all ranks, per dimension."""
    offset = [0] * p.ndim
    if isinstance(p, DTensor):
        offset = list(compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)[1])
    if owned(name):
        offset[0] += current().group("ep").rank * len(p)
    return offset, p.to_local() if isinstance(p, DTensor) else p


def load_slice(name: str, p: Tensor, full_weight: Tensor) -> None:
    """Copies this rank's part of `full_weight` into parameter p."""
    ep = current().group("ep")
    place(name, p, full_weight.chunk(ep.size)[ep.rank] if owned(name) else full_weight)


@torch.no_grad()
def place(name: str, p: Tensor, part: Tensor) -> None:
    """Copies into p its part of the tensor that p is sharded from; for experts, that tensor has only those of this
    rank's efsdp group."""
    if isinstance(p, DTensor):
        part = distribute_tensor(part.to(p.device), p.device_mesh, p.placements, src_data_rank=None).to_local()
        p.to_local().copy_(part)
    else:
        p.copy_(part)


def reshard(model: nn.Module) -> None:
    """Reshards all weights. After a forward pass without a backward pass, the outermost weights are still gathered in
    the compute dtype, and reading them would give rounded values."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def gathered_tensor(x: Tensor) -> Tensor:
    """The full tensor; all ranks call it together."""
    return x.full_tensor() if isinstance(x, DTensor) else x


@torch.no_grad()
def merged(model: nn.Module, name: str, p: Tensor) -> Tensor:
    """This rank's part of a weight of the network without adapters: of W + (α/r) · B A where parameter p has an adapter
    (`ref/lora.py`), and p itself elsewhere. All ranks call it together. W and B are cut alike: only A is gathered."""
    layer = model.get_submodule(name.rpartition(".")[0])
    if not isinstance(layer, lora.AdaptedLinear) or not name.endswith(".weight"):
        return p.detach()
    weight, B = (x.to_local() if isinstance(x, DTensor) else x for x in (p.detach(), layer.lora_B))
    part = lora.merge_weight(weight, gathered_tensor(layer.lora_A), B, layer.scale)
    if not isinstance(p, DTensor):
        return part
    return DTensor.from_local(part, p.device_mesh, p.placements, shape=p.shape, stride=p.stride(), run_check=False)


def adapters(model: nn.Module) -> dict[str, Tensor]:
    """All adapters by name, complete on every rank; all ranks call it together."""
    reshard(model)
    return {name: gathered_tensor(p.detach()) for name, p in model.named_parameters() if lora.is_adapter(name)}


def wholes(model: nn.Module, grad: bool = False) -> Iterator[tuple[str, Tensor]]:
    """(name, full tensor) of every weight, adapters merged, or of the gradient of every parameter, in turn on every
    rank: all ranks must iterate together."""
    ep = current().group("ep")
    reshard(model)
    for name, p in model.named_parameters():
        if not grad and lora.is_adapter(name):
            continue
        x = p.grad if grad else merged(model, name, p)
        if x is None:
            continue
        x = gathered_tensor(x)
        if owned(name):
            parts = [torch.empty_like(x) for _ in range(ep.size)]
            dist.all_gather(parts, x.contiguous(), group=ep.handle)
            x = torch.cat(parts)
        yield name, x
