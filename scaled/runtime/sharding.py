"""Which part of which weight a rank holds.

    weights outside the experts    FSDP2 over all ranks, along the first dimension
    experts                        whole experts to the ranks of an ep group in order, each then FSDP2 over efsdp

Outside its own ep group a rank's experts are other tensors under the same names: `owned` says which those are, `whole_shape` what
they are part of, `put` and `wholes` go from the whole to the part and back.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ref.network import Config
from ref.network.model import initial_std
from scaled.runtime.comm import summed
from scaled.runtime.mesh import current

__all__ = ["EXPERTS", "clip", "initialise", "owned", "place", "put", "rest", "shard", "whole_shape", "wholes"]

EXPERTS = ("gate_up_proj", "down_proj")
"""Parameters of a mixture that belong to experts."""


def shard(model: nn.Module, blocks: Iterable[nn.Module], reshard_after_forward: bool = True) -> None:
    """FSDP2 over each block and over the rest: experts on their own mesh, all else on all ranks. Gradients are summed."""
    mesh = current()
    dtype = mesh.compute.dtype
    policy = MixedPrecisionPolicy() if dtype is None else MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    how: dict[str, Any] = {"mp_policy": policy, "reshard_after_forward": reshard_after_forward}
    for block in blocks:
        for part in block.modules():
            if all(hasattr(part, name) for name in EXPERTS) and mesh.layout.ep > 1:
                # The router is every rank's, and is managed apart from the experts beside which it lies.
                assert mesh.experts is not None
                fully_shard(part.get_submodule("gate"), mesh=mesh.weights, **how)
                fully_shard(part, mesh=mesh.experts["efsdp"], shard_placement_fn=along, **how)
        fully_shard(block, mesh=mesh.weights, **how)
    fully_shard(model, mesh=mesh.weights, mp_policy=policy, reshard_after_forward=False)
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)


def along(p: nn.Parameter):
    """The dimension along which expert weights are sharded: whole experts where they can be dealt out evenly, else their rows."""
    n = current().layout.efsdp
    return Shard(1) if len(p) % n and p.shape[1] % n == 0 else Shard(0)


@torch.no_grad()
def initialise(module: nn.Module, config: Config) -> None:
    """Weights as `ref.network.model.initialise` draws them; `config` is its. Every rank draws every weight whole, one after the other, and
    keeps its part: one seed is one network, and nothing is sent."""
    for name, p in module.named_parameters():
        whole = torch.empty(whole_shape(name, p), device=current().device)
        if p.ndim < 2:
            whole.fill_(1.0)
        else:
            whole.normal_(0.0, initial_std(name, config))
        put(name, p, whole)


@torch.no_grad()
def clip(model: nn.Module, most: float) -> float:
    """Scales the gradients down to norm `most` where they are longer, all ranks' parts of all weights together (0: does nothing); the
    norm before. FloatingPointError where it is not finite: no step should be taken."""
    parts = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters() if p.grad is not None]
    # Every weight is spread over all ranks, an expert over its own and those that hold the same ones: nothing counts twice.
    norm = summed(sum((part.double().square().sum() for part in parts), torch.zeros((), dtype=torch.float64, device=current().device))).sqrt().item()
    if not math.isfinite(norm):
        raise FloatingPointError(f"gradient norm is {norm}; the step was not taken")
    if most and norm > most:
        torch._foreach_mul_(parts, most / (norm + 1e-6))
    return norm


def owned(name: str) -> bool:
    """Whether a parameter belongs to experts that only this rank's efsdp group has."""
    return name.rpartition(".")[2] in EXPERTS and ".mlp." in name and current().layout.ep > 1


def whole_shape(name: str, p: Tensor) -> tuple[int, ...]:
    """Shape of a parameter over all ranks."""
    return (p.shape[0] * current().layout.ep, *p.shape[1:]) if owned(name) else tuple(p.shape)


def put(name: str, p: Tensor, whole: Tensor) -> None:
    """This rank's part of `whole` into parameter p."""
    ep = current().group("ep")
    place(name, p, whole.chunk(ep.size)[ep.rank] if owned(name) else whole)


@torch.no_grad()
def place(name: str, p: Tensor, part: Tensor) -> None:
    """The tensor that p is sharded from, of experts those of this rank's ep group, into p."""
    if isinstance(p, DTensor):
        part = distribute_tensor(part.to(p.device), p.device_mesh, p.placements, src_data_rank=None).to_local()
        p.to_local().copy_(part)
    else:
        p.copy_(part)


def rest(model: nn.Module) -> None:
    """Leaves nothing gathered: after a forward pass without a backward one the outermost weights still are, in the dtype that is computed
    in, and whoever read them would read them rounded."""
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def wholes(model: nn.Module, grad: bool = False) -> Iterator[tuple[str, Tensor]]:
    """(name, whole tensor) of every parameter, or of its gradient, one after the other, on every rank: all ranks must walk together."""
    ep = current().group("ep")
    rest(model)
    for name, p in model.named_parameters():
        x = p.grad if grad else p.detach()
        if x is None:
            continue
        x = x.full_tensor() if isinstance(x, DTensor) else x
        if owned(name):
            parts = [torch.empty_like(x) for _ in range(ep.size)]
            dist.all_gather(parts, x.contiguous(), group=ep.handle)
            x = torch.cat(parts)
        yield name, x
