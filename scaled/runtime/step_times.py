"""Where the seconds of a training step go, and what it reaches: FOLDER/speed/NAME.jsonl, one line for each step,
written by rank 0. Metrics are the same however often a run is interrupted, and these are not, so they lie apart.

    with StepTimes(path, device, dtype) as times:
        for step in range(steps):
            with part("sample"): …          what a part within another one takes does not count in the outer one
            count(model, lengths)           documents that this rank trains on
            times.end(step + 1)             all ranks together

Keys of a line, in seconds, bytes, and tokens a second:

    seconds             of the step, on the slowest rank
    sample, train,      rollouts; forward and backward; clipping and optimisers; perplexity; staging of a checkpoint:
    update, look, save  means over ranks
    wait                of ranks that have sampled for those that have not, mean
    tokens_per_second   of one rank: tokens trained on, without padding, over the seconds of the step
    mfu                 FLOPs of the forward and backward passes of these tokens over what the peak of all ranks would
                        do in `train`
    memory, peak        allocated at the end of the step, and at most within it; on a CPU what the process has in
                        memory, and has had at most since it began; of the rank that has most
    reserved            by torch's allocator on the GPU, at most; null on a CPU

MFU follows PaLM (arXiv:2204.02311, appendix B): recomputed activations, draft layers, the KL's reference and hints
count in the seconds, not in the FLOPs. The peak is the data sheet's for GPUs in `scaled.plan.HARDWARE`. For others, and
on a CPU, it is what one large product reaches, on one thread as a rank has it there."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ref.lora import rank_of
from scaled.plan import chip_named, flops

__all__ = ["PARTS", "StepTimes", "count", "count_rows", "document_lengths", "measure_peak", "part"]

PARTS: tuple[str, ...] = ("sample", "wait", "train", "update", "look", "save")


class StepTimes:
    """Times the steps of a training. Parts and documents that nobody times are not counted."""

    active: StepTimes | None = None
    """That of this process now."""

    def __init__(self, path: Path, device: torch.device, dtype: torch.dtype):
        self.path, self.device, self.dtype = path, device, dtype
        self.is_writer, self.num_ranks = dist.get_rank() == 0, dist.get_world_size()
        self._begin()

    def _begin(self) -> None:
        self.seconds, self.stack = dict.fromkeys(PARTS, 0.0), list[str]()
        self.tokens = self.flops = 0.0
        self.started = self.mark = self.read_clock()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def read_clock(self) -> float:
        """Seconds of a clock, once the GPU has finished all kernels that were launched."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def _charge(self) -> None:
        """The seconds since the last mark belong to the innermost part."""
        mark = self.read_clock()
        if self.stack:
            self.seconds[self.stack[-1]] += mark - self.mark
        self.mark = mark

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """See `part`."""
        self._charge()
        self.stack.append(name)
        try:
            yield
        finally:
            self._charge()
            self.stack.pop()

    def end(self, step: int) -> None:
        """Writes the line of a step, and begins the next one. A collective."""
        values = [self.read_clock() - self.started, *self.seconds.values(), self.tokens, self.flops, *self._memory()]
        rows = torch.tensor([values], dtype=torch.float64)
        if self.num_ranks > 1:
            parts = [torch.empty_like(rows, device=self.device) for _ in range(self.num_ranks)]
            dist.all_gather(parts, rows.to(self.device))
            rows = torch.cat(parts).cpu()
        if self.is_writer:
            with open(self.path, "a") as file:
                file.write(json.dumps({"step": step, **self._summarise(rows)}) + "\n")
        self._begin()

    def _summarise(self, rows: Tensor) -> dict[str, float | None]:
        """Keys of a line from the values of each rank [ranks, values]."""
        step_seconds, means = rows[:, 0].max().item(), rows.mean(0).tolist()
        mean_seconds = dict(zip(PARTS, means[1:], strict=False))
        tokens, total_flops = rows[:, 1 + len(PARTS) : 3 + len(PARTS)].sum(0).tolist()
        memory, peak, reserved = rows[:, 3 + len(PARTS) :].max(0)[0].tolist()
        peak_flops = measure_peak(self.device, self.dtype) * self.num_ranks
        train = mean_seconds["train"]
        return {
            "seconds": step_seconds,
            **mean_seconds,
            "tokens_per_second": tokens / step_seconds / self.num_ranks,
            "mfu": total_flops / (train * peak_flops) if train else 0.0,
            "memory": memory,
            "peak": peak,
            "reserved": reserved if self.device.type == "cuda" else None,
        }

    def _memory(self) -> tuple[float, float, float]:
        if self.device.type == "cuda":
            cuda = torch.cuda
            return (
                cuda.memory_allocated(self.device),
                cuda.max_memory_allocated(self.device),
                cuda.max_memory_reserved(self.device),
            )
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
        # Linux counts both now and then, so the peak may lag behind.
        return resident, max(resident, 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss), 0

    def __enter__(self) -> StepTimes:
        measure_peak(self.device, self.dtype)  # on all ranks at once, before the first step
        StepTimes.active = self
        self._begin()
        return self

    def __exit__(self, *_: object) -> None:
        StepTimes.active = None


@contextmanager
def part(name: str) -> Iterator[None]:
    """The seconds inside belong to this part of the step, one of PARTS; does nothing where nobody times."""
    if StepTimes.active is None:
        yield
        return
    with StepTimes.active.measure(name):
        yield


def count(model: nn.Module, lengths: Tensor, is_trained: bool = True) -> None:
    """Counts documents of these lengths [documents], which `model` reads now: forward and backward passes, or without
    `is_trained` only forward ones. Does nothing where nobody times."""
    times = StepTimes.active
    if times is None or not len(lengths):
        return
    tokens = lengths.double().sum().item()
    mean_length = lengths.double().square().sum().item() / tokens  # Σ T² / Σ T: attention's share is quadratic
    computed = flops(model.config, 1, mean_length, False, rank_of(model))  # pyright: ignore[reportArgumentType]
    times.tokens += tokens
    times.flops += tokens * computed / (1 if is_trained else 3)


def count_rows(model: nn.Module, doc: Tensor, is_trained: bool = True) -> None:
    """`count` for the packed rows of a step that all ranks read together, of which this one counts its share."""
    if StepTimes.active is not None:
        count(model, document_lengths(doc)[dist.get_rank() :: dist.get_world_size()], is_trained)


def document_lengths(doc: Tensor) -> Tensor:
    """Lengths of the documents of packed rows: `doc` [B, T] is the same within a document, and negative on padding."""
    rows = torch.arange(len(doc), device=doc.device)[:, None] * (doc.max() + 2)
    runs, lengths = torch.where(doc < 0, -1, doc + rows).flatten().unique_consecutive(return_counts=True)
    return lengths[runs >= 0]


@lru_cache
def measure_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Peak FLOPs a second of a device in a dtype: the data sheet's, or that of a product of large matrices."""
    chip = chip_named(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    if chip is not None:
        return chip.computing_in(str(dtype).removeprefix("torch.")).flops
    n = 4096 if device.type == "cuda" else 768
    matrix, fastest = torch.ones(n, n, device=device, dtype=dtype), float("inf")
    for _ in range(5):
        start = time.perf_counter()
        (matrix @ matrix)[0, 0].item()
        fastest = min(fastest, time.perf_counter() - start)
    return 2 * n**3 / fastest
