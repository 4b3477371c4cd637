"""Weight sync on many ranks: every rank publishes its own rows, and a reader with any layout fetches the shards that it
needs.

    local to a rank      `parts`, the difference of its rows, its shard of every version, the digest of its rows
    known to all         the manifest, which rank 0 creates last; digests of whole tensors; the way that readers take to
                         a version

Rows have the names and shapes of a Hugging Face folder, whatever the layout (`scaled/network/checkpoint.py`), so a
manifest says the same for 1, 2 and 4 ranks, but for the shards. All ranks of a writer call `publish` together, and all
ranks of a reader `fetch`, `swap`. A rank that fails says so to the others, and all of them raise.

On a GPU `kernels/weight_sync.py` compares and applies. On a CPU words of four weights are compared: in a step at a
learning rate near 1e-6, 99 in a hundred are equal.
"""

import threading
from collections.abc import MutableMapping, Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ref import weight_sync as ref
from ref.lora import is_adapter
from ref.network.checkpoint import tensor_parts
from ref.weight_codec import check_delta, check_versions, ordered
from ref.weight_sync import Demo, Part, SyncError, changed_share, demo, digest, merge_deltas, pack, ulp, unpack
from scaled.runtime import sharding
from scaled.runtime.engine import fast, kernel

__all__ = [
    "Demo",
    "Part",
    "Reader",
    "SyncError",
    "Writer",
    "apply_delta",
    "changed_share",
    "demo",
    "digest",
    "encode_delta",
    "merge_deltas",
    "pack",
]
__all__ += ["parts", "prune", "ulp", "unpack"]


def encode_delta(old: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """`ref.weight_sync.encode_delta` of this rank's rows."""
    if fast(new):
        return kernel("weight_sync").encode_delta(old, new)
    check_versions(old, new)
    if new.is_cuda:
        return ref.encode_delta(old, new)
    a, b = (x.flatten().view(torch.int16) for x in (old, new))
    aligned_size = len(a) // 4 * 4
    x, y = (v.numpy()[:aligned_size].view(np.int64) for v in (a, b))
    words = np.flatnonzero(x != y)
    x, y = x[words], y[words]
    lanes = np.flatnonzero((x ^ y).view(np.int16) != 0)
    aligned_delta = (
        torch.from_numpy(4 * words[lanes >> 2] + (lanes & 3)),
        *(torch.from_numpy(v.view(np.int16)[lanes]) for v in (x, y)),
    )
    tail_positions, _ = ref.encode_delta(old.flatten()[aligned_size:], new.flatten()[aligned_size:])
    positions = torch.cat((aligned_delta[0], aligned_size + tail_positions))
    before, after = (
        torch.cat((v, weights[aligned_size:][tail_positions])) for v, weights in zip(aligned_delta[1:], (a, b))
    )
    return positions, ordered(after).int() - ordered(before).int()


def apply_delta(old: Tensor, positions: Tensor, steps: Tensor) -> Tensor:
    """`ref.weight_sync.apply_delta` of this rank's rows."""
    if fast(old):
        check_delta(old, positions, steps)
        return kernel("weight_sync").apply_delta(old, positions, steps)
    return ref.apply_delta(old, positions, steps)


def parts(model: nn.Module) -> list[Part]:
    """This rank's rows of every tensor of a sharded network, adapters merged; all ranks call it together if there are
    any. Raises SyncError for a tensor that is not split by rows."""
    local_parts = []
    sharding.reshard(model)
    for name, p in model.named_parameters():
        if is_adapter(name):
            continue
        full_shape = sharding.whole_shape(name, p)
        offset, local = sharding.slice_of(name, sharding.merged(model, name, p))
        for part, index in tensor_parts(name, full_shape).items():
            # Per dimension of the parameter: what this tensor covers of it, and what of that this rank holds.
            spans = [
                (i, i + 1) if type(i) is int else (i.start or 0, i.stop or n)
                for i, n in zip((*index, *[slice(None)] * len(full_shape)), full_shape)
            ]
            overlaps = [(max(a, f), min(b, f + n)) for (a, b), f, n in zip(spans, offset, local.shape)]
            if any(a >= b for a, b in overlaps):
                continue
            dims = [i for i in range(len(full_shape)) if i >= len(index) or type(index[i]) is not int]
            shape = tuple(spans[i][1] - spans[i][0] for i in dims)
            if any(overlaps[i] != spans[i] for i in dims[1:]):
                raise SyncError(f"{part} is split along another dimension than its first; a shard holds rows")
            rows = local[tuple(slice(a - f, b - f) for (a, b), f in zip(overlaps, offset))].view(
                [overlaps[i][1] - overlaps[i][0] for i in dims]
            )
            local_parts.append(Part(part, shape, overlaps[dims[0]][0] - spans[dims[0]][0] if dims else 0, rows))
    return local_parts


class RankGroup:
    """The ranks of this process, which call everything together, in a group of their own: so a thread may do it while
    training goes on."""

    encode, apply = staticmethod(encode_delta), staticmethod(apply_delta)
    is_distributed = False
    group: dist.ProcessGroup | None = None

    def join(self) -> None:
        self.is_distributed = dist.is_initialized() and dist.get_world_size() > 1
        group = dist.new_group(backend="gloo") if self.is_distributed else None
        assert not isinstance(group, int)  # every rank is a member
        self.group = group

    @property
    def rank(self) -> int:
        return dist.get_rank() if self.is_distributed else 0

    def gather_objects(self, value):
        """What every rank said, by rank."""
        if not self.is_distributed:
            return [value]
        answers: list = [None] * dist.get_world_size()
        dist.all_gather_object(answers, value, group=self.group)
        return answers


class Writer(RankGroup, ref.Writer):
    """`ref.weight_sync.Writer`, every rank with its own rows. `publish` returns once the version is visible; `start`
    returns once the rows are copied, and `finish` waits for the rest."""

    def __init__(self, store: MutableMapping[str, bytes], anchor_every: int = 25, merge_every: int = 8, level: int = 1):
        """As `ref.weight_sync.Writer`; all ranks call it together."""
        super().__init__(store, anchor_every, merge_every, level)
        self.thread: threading.Thread | None = None
        self.failure: BaseException | None = None
        self.join()

    def start(self, version: int, parts: Sequence[Part]) -> None:
        """Publishes in the background, after the version before. All ranks call it together. Raises the error of the
        version before, if any."""
        self.finish()
        copies = [replace(part, weights=part.weights.detach().to(torch.bfloat16, copy=True)) for part in parts]
        self.thread = threading.Thread(target=self.run_publish, args=(version, copies))
        self.thread.start()

    def run_publish(self, version: int, parts: Sequence[Part]) -> None:
        try:
            self.publish(version, parts)
        except BaseException as error:
            self.failure = error

    def finish(self) -> None:
        """Waits until the version that was started is visible; raises its error, if any."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure


class Reader(RankGroup, ref.Reader):
    """`ref.weight_sync.Reader`, every rank with its own rows. The ranks take the same way to a version, and check its
    digest together."""

    def __init__(self, store: MutableMapping[str, bytes], parts: Sequence[Part], name: str = "reader"):
        """As `ref.weight_sync.Reader`; all ranks call it together."""
        super().__init__(store, parts, name)
        self.join()


def prune(store: MutableMapping[str, bytes]) -> int:
    """`ref.weight_sync.prune`, done by rank 0; all ranks call it together."""
    outcome: list = [None, None]
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            outcome = [ref.prune(store), None]
        except (OSError, SyncError) as error:  # the others would wait forever
            outcome = [0, str(error)]
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(outcome, 0)
    if outcome[1]:
        raise SyncError(outcome[1])
    return outcome[0]
