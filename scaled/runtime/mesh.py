"""Groups of ranks. The current mesh is set globally, so no function of `scaled/` takes it as an argument.

    with mesh(dp=2, cp=2, ep=4):
        loss = scaled.dr_grpo.policy_loss(...)      # of this rank's shard

A world of dp·cp ranks, rank = dp_index · cp + cp_index, is divided in two ways (Composer 2 technical report, §6.1):

    axis     ranks of a group                split over the axis
    dp       same cp_index                   rows of the batch
    cp       same dp_index, neighbours       tokens of a row (context parallelism; a row's two chunks, see `cut.py`)
    all      every rank                      weights outside the experts (FSDP), including cp ranks
    ep       ep neighbours                   experts: each rank of a group owns num_experts/ep of them
    efsdp    same index in its ep group      the weights of those experts (FSDP)

The mesh also sets the formats of computation and communication: `with computing(dispatch="fp8"):`.

Expert parallelism thus uses the same ranks as data and context parallelism, but is independent of both: only dp·cp must
be a multiple of ep. Without a mesh, or on one rank, every axis has one rank, no process group is needed, and `scaled`
is `ref`."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

__all__ = ["AXES", "Compute", "Group", "Layout", "Mesh", "computing", "current", "mesh"]

AXES = ("dp", "cp", "all", "ep", "efsdp")


@dataclass(frozen=True)
class Layout:
    """Sizes of the axes. Raises ValueError that names the invalid one."""

    dp: int = 1
    """Groups of ranks, each with its own rows."""
    cp: int = 1
    """Ranks that split the tokens of each row."""
    ep: int = 1
    """Ranks that split the experts of each layer."""

    def __post_init__(self):
        for name in ("dp", "cp", "ep"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {value}")
        if self.world % self.ep:
            raise ValueError(f"ep must divide dp · cp = {self.world}, got {self.ep}")

    @property
    def world(self) -> int:
        """Ranks."""
        return self.dp * self.cp

    @property
    def efsdp(self) -> int:
        """Ranks that hold the same experts, each with a part of their weights."""
        return self.world // self.ep


@dataclass(frozen=True)
class Group:
    """The ranks that share one axis with this one."""

    size: int = 1
    """Ranks."""
    rank: int = 0
    """This rank's index in the group."""
    handle: dist.ProcessGroup | None = None
    """Process group for collectives; None for a group of one."""


@dataclass(frozen=True)
class Compute:
    """Formats of computation and communication."""

    dtype: torch.dtype | None = None
    """Dtype of gathered weights and computation; None: the storage dtype. Gradients are always summed in float32 or
    wider."""
    rematerialise: bool = False
    """Whether the activations of a block are recomputed in the backward pass instead of kept (activation
    checkpointing)."""
    dispatch: Literal["model", "fp8", "mxfp8"] = "model"
    """Format of tokens sent to their experts: the compute dtype, E4M3 with a scale per 128 values, or MXFP8 (one per
    32)."""
    combine: Literal["model", "bf16"] = "model"
    """Format of the results sent back."""
    experts: str = "model"
    """Format of the experts' products: "model", or a format of `ref.quant.FORMATS` in the forward pass and MXFP8 in the
    backward pass."""


@dataclass(frozen=True)
class Mesh:
    """A layout on this rank, with its formats."""

    layout: Layout = Layout()
    compute: Compute = Compute()
    groups: tuple[tuple[str, Group], ...] = ()
    weights: DeviceMesh | None = None
    """One dimension, `all`, over which FSDP shards weights outside the experts."""
    experts: DeviceMesh | None = None
    """Two dimensions, `ep` and `efsdp`: an expert tensor is split over the first, then over the second."""

    def group(self, axis: str) -> Group:
        """The group of an axis. Raises KeyError for a name that is not in AXES."""
        return dict(self.groups)[axis] if self.groups else {name: Group() for name in AXES}[axis]

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        if dist.is_initialized() and dist.get_backend() == "nccl":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")


# One per process, not a ContextVar: on a GPU, the backward pass runs in a thread of autograd, where recomputed
# activations need the mesh.
_current = Mesh()


def current() -> Mesh:
    """The current mesh; a single rank if none is set."""
    return _current


@contextmanager
def set_to(new: Mesh) -> Iterator[Mesh]:
    """Sets the mesh for the calls inside."""
    global _current
    previous_mesh, _current = _current, new
    try:
        yield new
    finally:
        _current = previous_mesh


@contextmanager
def computing(**changes) -> Iterator[Mesh]:
    """Changes fields of `Compute` in the current mesh for the calls inside."""
    base = current()
    with set_to(replace(base, compute=replace(base.compute, **changes))) as new_mesh:
        yield new_mesh


@contextmanager
def mesh(dp: int = 1, cp: int = 1, ep: int = 1) -> Iterator[Mesh]:
    """Sets the mesh for the calls inside. The first use of a layout creates its process groups, on all ranks together.

    Raises ValueError for an invalid layout, or one with a different number of ranks."""
    layout = Layout(dp, cp, ep)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if layout.world != ranks:
        start = "" if dist.is_initialized() else f"; start that many with torchrun --nproc-per-node {layout.world}"
        raise ValueError(f"dp · cp must be the number of ranks: got {dp} · {cp} for {ranks} ranks{start}")
    with set_to(_build(layout, id(dist.group.WORLD)) if ranks > 1 else Mesh(layout)) as new_mesh:
        yield new_mesh


@lru_cache(None)
def _build(layout: Layout, world: int) -> Mesh:
    """The mesh of a layout in this process group (`world`: its identity, part of the cache's key)."""
    kind = "cuda" if dist.get_backend() == "nccl" else "cpu"
    ranks = torch.arange(layout.world)
    rows = DeviceMesh(kind, ranks.view(layout.dp, layout.cp), mesh_dim_names=("dp", "cp"))
    weights = DeviceMesh(kind, ranks, mesh_dim_names=("all",))
    experts = DeviceMesh(kind, ranks.view(layout.efsdp, layout.ep).t().contiguous(), mesh_dim_names=("ep", "efsdp"))
    groups = []
    for name, part in (("dp", rows), ("cp", rows), ("all", weights), ("ep", experts), ("efsdp", experts)):
        handle = part.get_group(name)
        groups.append((name, Group(dist.get_world_size(handle), dist.get_rank(handle), handle)))
    return Mesh(layout, groups=tuple(groups), weights=weights, experts=experts)
