"""The trainer of asynchronous RL as a group of ranks over a mesh, where one process and its memory are too few.

    rank 0     is the trainer that the reconciler knows; it tells the others what comes next
    others     follow
    all        read the groups of their share from the store, take one step of `scaled/rl.py`, write their part of the
               checkpoint (DCP) and their
               shard of the version; rank 0 commits both

    local to a rank      its conversations, its rows of the weights and of the optimiser's state, its shard of every
                         version
    known to all         the metrics of a step, and what became of it: a step or a version counts for all ranks or for
                         none

A rank that dies ends the group, and all of it begins again from the last checkpoint with the next epoch (`local.py`,
`cluster.py`). On one machine ranks meet by a file of the run's meeting place, and on CPUs they speak over the loopback
device. On a Ray cluster they meet at a port, and speak over the interface that leads there.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kit.settings import RunError
from ref.rollout import Rollout
from scaled import weight_sync
from scaled.async_rl.messages import Batch
from scaled.async_rl.services import Log, Publisher, Stores, own_versions, read, retry_store_call, watch_step
from scaled.network import checkpoint
from scaled.network.model import Transformer
from scaled.rl import Rl, improve, means, share
from scaled.runtime import sharding
from scaled.runtime.checkpoint import CheckpointError, Checkpoints
from scaled.runtime.comm import all_reduce_max, all_reduce_sum
from scaled.runtime.mesh import Compute, Layout, computing, current, mesh
from scaled.watching import Look

__all__ = ["Rank", "Sharded", "TrainerGroup", "interface_to", "joined", "restored"]

SIOCGIFADDR = 0x8915
"""The request for an interface's IPv4 address (man 7 netdevice)."""
IDLE = timedelta(days=30)
"""How long ranks wait for the first one's word. It waits for workers meanwhile, and a rank that dies ends the group at
once."""


@dataclass(frozen=True)
class TrainerGroup:
    """The ranks that are the trainer."""

    layout: Layout
    """How they share rows, tokens and experts; `layout.world` is their number."""
    learner: Callable[[], Sharded]
    """Makes what a rank trains, under the mesh; it is sent to each rank's process."""
    compute: Compute = field(default_factory=Compute)
    """Formats of computation and communication."""
    backend: Literal["gloo", "nccl"] = "gloo"
    """gloo: CPUs. nccl: GPUs, one for each rank."""
    timeout: float = 900.0
    """Seconds that a rank may keep the others waiting in the middle of a step."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of the processes, by rank."""
        return "trainer", *(f"trainer-{rank}" for rank in range(1, self.layout.world))


class Sharded:
    """RL on this rank's part of a network. reference: the policy before RL, if drift from it is paid for."""

    def __init__(self, c: Rl, model: Transformer, reference: Transformer | None = None):
        self.c, self.model, self.reference, self.done = c, model, reference, 0
        self.optimizers = c.optimizers(model)
        self.rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in self.optimizers]

    def step(self, rollouts: Sequence[Rollout], first: int = 0) -> dict[str, float]:
        """One optimiser step; all ranks call it together. rollouts: conversations `first`, `first` + 1, … of the step,
        this rank's `share` of them included. Returns metrics of all ranks' conversations."""
        c, own_rollouts = self.c, [rollouts[n - first] for n in share(self.c.rl.prompts * self.c.rl.rollouts).tolist()]
        result = improve(c, self.model, self.reference, own_rollouts)
        factor = c.schedule.rate(self.done)
        for optimizer, rates in zip(self.optimizers, self.rates, strict=True):
            for group, lr in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = lr * factor
        norm = sharding.clip(self.model, c.max_norm)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.done += 1
        ratio, clip = result.gap.exp(), c.rl.objective
        outside = ((ratio < 1 - clip.clip_low) | (ratio > 1 + clip.clip_high)).double().sum()
        num_failed = all_reduce_sum(
            torch.tensor(float(sum(bool(rollout.failure) for rollout in own_rollouts)), device=current().device)
        ).item()
        metrics = (
            {"reward": result.rewards.nanmean().item()}
            | means(own_rollouts)
            | ({"failed": num_failed} if num_failed else {})
        )
        metrics |= {"kl": result.drift.nanmean().item(), "grad_norm": norm}
        if result.divergence is not None:
            metrics |= {"distilled": float(result.distilled), "divergence": result.divergence}
        return metrics | {"outside_clip": all_reduce_sum(outside).item() / result.tokens, "imbalance": result.load}

    def state(self) -> dict[str, Tensor]:
        """All that a checkpoint holds: this rank's part, which it shares memory with."""
        sharding.reshard(self.model)
        return checkpoint.state(self.model, self.optimizers)


class Rank:
    """`trainer.Work` of a rank. The first one's methods tell the others to do the same; the others `follow`."""

    def __init__(
        self, folder: Path, learner: Sharded, stores: Stores, log: Log, patience: float, look: Look | None = None
    ):
        """As `trainer.Alone`; all ranks call it together, under their mesh."""
        self.learner, self.stores, self.log, self.patience, self.look = learner, stores, log, patience, look
        self.is_first = dist.get_rank() == 0
        control_group = dist.new_group(backend="gloo", timeout=IDLE)
        assert not isinstance(control_group, int)  # every rank is a member
        self.control_group = control_group
        self.checkpoints = Checkpoints(folder / "trainer")
        self.publisher = Publisher(stores.weights, learner, log, patience, weight_sync)

    def restored(self) -> tuple[int, tuple[int, ...]]:
        self._tell("restored")
        if not self.checkpoints.steps():
            return 0, ()
        try:
            checkpoint.create_optimizer_state(self.learner.model, self.learner.optimizers, self.checkpoints.names())
            meta = self.checkpoints.load(self.learner.state())
        except CheckpointError as error:
            raise RunError(str(error)) from None
        self.learner.done = meta["step"]
        return meta["step"], tuple(meta["groups"])

    def step(self, version: int, batch: Batch) -> dict[str, float]:
        self._tell("step", version, batch)
        rollouts = self.learner.c.rl.rollouts
        numbers = share(self.learner.c.rl.prompts * rollouts).tolist()
        # The groups that this rank's conversations belong to.
        group_slice = slice(numbers[0] // rollouts, numbers[-1] // rollouts + 1)
        group_rollouts = retry_store_call(
            lambda: read(self.stores.groups, batch.keys[group_slice], batch.digests[group_slice]),
            "reading groups",
            self.log,
            self.patience,
        )
        begin = group_slice.start * rollouts
        own_rollouts = [group_rollouts[n - begin] for n in numbers]
        metrics = self.learner.step(group_rollouts, begin) | ages(own_rollouts, version)
        metrics |= watch_step(self.look, version, numbers, own_rollouts)
        self.checkpoints.save(version + 1, self.learner.state(), {"groups": list(batch.groups)})
        self.checkpoints.finish()
        return metrics

    def publish(self, version: int, anew: bool = False) -> None:
        self._tell("publish", version, anew)
        sharding.reshard(self.learner.model)
        self.publisher.publish(version, anew)

    def start(self, version: int, on_visible: Callable[[], None] = lambda: None) -> None:
        self._tell("start", version)
        self.publisher.start(version, on_visible)

    def stop(self) -> None:
        """Lets the others end."""
        self._tell("")

    def follow(self) -> None:
        """Does what the first rank tells, until it tells to stop."""
        while True:
            message: list[Any] = [None]
            dist.broadcast_object_list(message, 0, group=self.control_group)
            method, *arguments = message[0]
            if not method:
                return self.publisher.wait()
            getattr(self, method)(*arguments)

    def _tell(self, *command: Any) -> None:
        if self.is_first:
            dist.broadcast_object_list([command], 0, group=self.control_group)


def ages(rollouts: Sequence[Rollout], version: int) -> dict[str, float]:
    """`services.ages` of the conversations of all ranks, this rank's given."""
    # Age v − u (ref/async_rl.py).
    age = version - own_versions(rollouts).to(current().device).double()
    total, tokens = all_reduce_sum(torch.stack((age.sum(), torch.ones_like(age).sum()))).tolist()
    oldest = age.max() if len(age) else age.new_tensor(-math.inf)  # this rank's environments have all failed
    return {"age": total / tokens, "oldest": all_reduce_max(oldest).item(), "tokens": tokens}


def interface_to(host: str, port: int) -> str:
    """The network interface by which this machine reaches another one. Linux only. Raises RunError where none has the
    address that it speaks from."""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.connect((host, port))  # sends nothing
        own_address = s.getsockname()[0]
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no address
                if (
                    socket.inet_ntoa(fcntl.ioctl(s.fileno(), SIOCGIFADDR, name.encode().ljust(256, b"\0"))[20:24])
                    == own_address
                ):
                    return name
    raise RunError(
        f"no network interface of {socket.gethostname()} has the address {own_address}, by which it "
        f"reaches the other ranks at {host}"
    )


@contextmanager
def joined(
    group: TrainerGroup, rank: int, meeting: Path | tuple[str, int], epoch: int, patience: float
) -> Iterator[None]:
    """This process as a rank of the group. meeting: how the ranks find each other. On one machine it is the beginning
    of a file's name; on several it is the host and port of a `TCPStore`. Ranks of different epochs do not meet.
    patience: seconds that a rank may wait for the store while others wait for it."""
    device = None
    if group.backend == "nccl":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    else:
        loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
        os.environ["GLOO_SOCKET_IFNAME"] = loopback if isinstance(meeting, Path) else interface_to(*meeting)
    if isinstance(meeting, Path):
        store = dist.FileStore(f"{meeting}-{epoch}", group.layout.world)
    else:
        store = dist.PrefixStore(
            str(epoch), dist.TCPStore(*meeting, is_master=False, timeout=timedelta(seconds=group.timeout))
        )
    wait = timedelta(seconds=group.timeout + patience)
    dist.init_process_group(
        group.backend, store=store, rank=rank, world_size=group.layout.world, timeout=wait, device_id=device
    )
    layout = group.layout
    with mesh(layout.dp, layout.cp, layout.ep), computing(**vars(group.compute)):
        yield
    dist.destroy_process_group()  # not after an error: others may still wait in a collective


def restored(folder: Path, network: nn.Module) -> int:
    """Fills a whole network with the weights that a group of any layout saved last in a run's folder. Returns the
    number of its steps. Raises CheckpointError where there are none, or where a file is damaged."""
    return Checkpoints(folder / "trainer").load(checkpoint.state(network))["step"]
