"""Communication between ranks, with gradients. Each function is the identity on a group of one rank.

The loss is the sum of what the ranks compute from their shards, and every rank calls backward on its own part; FSDP
then sums the gradients of the weights. A gradient here is therefore that of the *sum over ranks*: a rank receives the
gradients that all other ranks have for what it sent:

    forward                            backward
    total        Σ over ranks          the gradient itself: the sum is the loss, and each rank owns its part
    sum_over     Σ over ranks          Σ over ranks: every rank goes on computing with the sum
    all_gather   parts, in order       Σ over ranks of the gradients of this rank's part (reduce-scatter)
    all_to_all   rows to their ranks   rows back

`total` is for the last step, a scalar that all ranks report. In place of `sum_over` it would lose the gradients from
other ranks; `sum_over` in place of `total` would count the loss once per rank.

`Traffic` counts the bytes that a rank sends through torch.distributed, including FSDP's own collectives.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.utils._python_dispatch import TorchDispatchMode

from scaled.runtime.mesh import Group, current

# torch 2.13 renamed them.
gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

__all__ = [
    "Traffic",
    "all_gather",
    "all_to_all",
    "gathered",
    "all_reduce_min",
    "all_reduce_max",
    "moved",
    "all_reduce_sum",
    "sum_over",
    "total",
]


def all_reduce_sum(x: Tensor, axis: str = "all", op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """Σ over the ranks of an axis (or another `op`), without gradient; x is not changed."""
    group = current().group(axis)
    return _all_reduce(x, group, op) if group.size > 1 else x.detach().clone()


def _all_reduce(x: Tensor, group: Group, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    y = x.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(y, op, group=group.handle)
    return y


def all_reduce_min(x: Tensor, axis: str = "all") -> Tensor:
    """The minimum over the ranks of an axis, without gradient."""
    return all_reduce_sum(x, axis, dist.ReduceOp.MIN)


def all_reduce_max(x: Tensor, axis: str = "all") -> Tensor:
    """The maximum over the ranks of an axis, without gradient."""
    return all_reduce_sum(x, axis, dist.ReduceOp.MAX)


def gathered(x: Tensor, axis: str = "all") -> list[Tensor]:
    """x of every rank of an axis, without gradient; sizes may differ along the first dimension."""
    group = current().group(axis)
    if group.size == 1:
        return [x.detach()]
    sizes = [torch.zeros(1, dtype=torch.long, device=x.device) for _ in range(group.size)]
    dist.all_gather(sizes, torch.tensor([len(x)], device=x.device), group=group.handle)
    lengths = [int(size) for size in sizes]
    longest = max(lengths)
    padded_rows = x.detach().new_zeros(longest, *x.shape[1:])
    padded_rows[: len(x)] = x.detach()
    parts = [torch.empty_like(padded_rows) for _ in lengths]
    dist.all_gather(parts, padded_rows.contiguous(), group=group.handle)
    return [part[:n] for part, n in zip(parts, lengths, strict=True)]


class Total(Function):
    """Σ over ranks; back, the gradient as it is."""

    @staticmethod
    def forward(ctx, x, group):
        return _all_reduce(x, group)

    @staticmethod
    def backward(ctx, g):
        # Plain form: y = Σ x over ranks, and each rank owns its x; test_runtime.py::test_cutting_and_joining.
        return g, None


def total(x: Tensor, axis: str = "all") -> Tensor:
    """Σ over ranks of what each computed, the same value on all ranks. The gradient goes only to this rank's own
    part."""
    group = current().group(axis)
    return x if group.size == 1 else Total.apply(x, group)


class SumOver(Function):
    """Σ over ranks; back, the Σ of what all ranks made of it."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return _all_reduce(x, group)

    @staticmethod
    def backward(ctx, g):
        # Plain form: y = Σ x, used on every rank, so Σ g over ranks; test_runtime.py::test_cutting_and_joining.
        return _all_reduce(g, ctx.group), None


def sum_over(x: Tensor, axis: str) -> Tensor:
    """Σ over the ranks of an axis, for further computation on each rank."""
    group = current().group(axis)
    return x if group.size == 1 else SumOver.apply(x, group)


class _AllGather(Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        out = x.new_empty(group.size, *x.shape)
        gather_single(out.view(-1), x.contiguous().view(-1), group=group.handle)
        return out

    @staticmethod
    def backward(ctx, g):
        # Plain form: torch.stack of all ranks' x, so Σ g[this rank]; test_runtime.py::test_cutting_and_joining.
        out = torch.empty_like(g[0], memory_format=torch.contiguous_format)
        scatter_single(out.view(-1), g.contiguous().view(-1), group=ctx.group.handle)
        return out, None


def all_gather(x: Tensor, axis: str) -> Tensor:
    """x of every rank of an axis, [ranks, *x.shape]; all must have the same shape."""
    group = current().group(axis)
    return x[None] if group.size == 1 else _AllGather.apply(x, group)


class _AllToAll(Function):
    @staticmethod
    def forward(ctx, x, send, receive, group):
        ctx.splits, ctx.group = (send, receive), group
        return moved(x, send, receive, group)

    @staticmethod
    def backward(ctx, g):
        # Plain form: a permutation of rows over ranks; test_runtime.py::test_rows_to_their_owners_and_back.
        send, receive = ctx.splits
        return moved(g, receive, send, ctx.group), None, None, None


def moved(x: Tensor, send: Sequence[int], receive: Sequence[int], group: Group) -> Tensor:
    """`all_to_all` without gradient."""
    out = x.new_empty(sum(receive), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), list(receive), list(send), group=group.handle)
    return out


def all_to_all(x: Tensor, send: Sequence[int], receive: Sequence[int], axis: str) -> Tensor:
    """Sends the first send[0] rows to rank 0 of the axis, the next send[1] to rank 1, …; returns receive[0] rows from
    rank 0, then receive[1] from rank 1, …. Any number may be zero."""
    group = current().group(axis)
    return x if group.size == 1 else _AllToAll.apply(x, send, receive, group)


class Traffic(TorchDispatchMode):
    """Counts what this rank sends inside the context: `sent[name]` in bytes, by collective.

    It counts the minimum volume of any algorithm. With n ranks, all-gather sends (n − 1) parts, reduce-scatter n − 1 of
    the n parts, all-reduce both, all-to-all everything but the rank's own part, a broadcast the tensor (from its
    source)."""

    def __init__(self):
        super().__init__()
        self.bytes_sent: dict[str, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name.startswith("c10d::"):
            self.count(name.removeprefix("c10d::").strip("_"), args)
        return out

    def count(self, name: str, args: Sequence[Any]) -> None:
        group = next(
            (dist.ProcessGroup.unbox(a) for a in args if isinstance(a, torch.ScriptObject) and _is_group(a)), None
        )
        if group is None:
            return
        n, rank = group.size(), group.rank()
        if name == "allgather_base":
            size = (n - 1) * _num_bytes(args[1])
        elif name == "allgather":
            size = (n - 1) * sum(map(_num_bytes, args[1]))
        elif name == "reduce_scatter_base":
            size = (n - 1) * _num_bytes(args[0])
        elif name == "allreduce":
            size = 2 * (n - 1) * sum(map(_num_bytes, args[0])) // n
        elif name == "alltoall_base":
            x, splits = args[1], args[4]
            rows = splits or [len(x) // n] * n
            size = (sum(rows) - rows[rank]) * (_num_bytes(x) // max(len(x), 1))
        elif name == "broadcast":
            size = sum(map(_num_bytes, args[0])) if rank == args[2] else 0
        else:
            return
        self.bytes_sent[name] = self.bytes_sent.get(name, 0) + size


def _num_bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def _is_group(x: torch.ScriptObject) -> bool:
    return "ProcessGroup" in str(x._type())
