"""The training loop on many ranks, and the settings of every full run; `scaled/pretrain.py` and `scaled/rl.py` use it.

FOLDER/state/       checkpoints of the training (`runtime/checkpoint.py`), the last two
FOLDER/metrics/NAME.jsonl   one line per step; a resumed run first cuts off the steps that it repeats, so no step
                            appears twice
FOLDER/speed/NAME.jsonl     seconds, tokens a second, MFU and memory of each step (`runtime/step_times.py`)
FOLDER/ranks/       process ids, and diagnostics of each rank if one hangs

A group that died resumes from its last checkpoint and repeats the same numbers, bit for bit on the same layout: all
random numbers of a step depend only on the seed and the step number.
"""

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import nn

from kit.disk import atomic_write, read_lines
from scaled.network import checkpoint
from scaled.runtime import preemption, sharding
from scaled.runtime.checkpoint import Checkpoints
from scaled.runtime.launch import Watchdog
from scaled.runtime.mesh import computing, current
from scaled.runtime.step_times import StepTimes, part

__all__ = ["Log", "Ranks", "Schedule", "training_context", "keep_lines", "optimise", "make_card_facts"]

Log = Callable[..., None]


class Schedule(Protocol):
    """What `optimise` needs of a training's own settings; `ref.rl.Settings` is one."""

    @property
    def steps(self) -> int:
        """Optimiser steps."""
        ...

    def rate(self, step: int) -> float:
        """Share of the learning rates at a step."""
        ...


@dataclass(frozen=True)
class Ranks(ABC):
    """Settings of every full run; what is trained, a subclass says."""

    checkpoint: str | None = None
    """Hugging Face folder to start from: weights and tokenizer.json."""
    length: int = 32_768
    """Tokens per row."""
    cp: int = 2
    """Ranks that split the tokens of each row."""
    ep: int = 8
    """Ranks that split the experts of each layer."""
    max_norm: float = 1.0
    """Maximum gradient norm over all weights together; 0 disables clipping."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Compute dtype; weights, gradient sums and moments are float32."""
    rematerialise: bool = True
    """Recompute the activations of each block in the backward pass instead of keeping them."""
    dispatch: Literal["model", "fp8", "mxfp8"] = "model"
    """Format of tokens sent to their experts: the dtype above, E4M3 with a scale per 128 values, or MXFP8 (per 32),
    which is the report's."""
    experts: Literal["model", "mxfp8", "nvfp4-token"] = "model"
    """Format of the experts' products: the dtype above, or quantised (then MXFP8 in the backward pass, as in the
    report)."""
    checkpoint_every: int = 50
    """Steps between two checkpoints."""
    timeout: float = 900.0
    """Seconds that a step may take before the run stops and names the hanging rank."""
    restarts: int = 3
    """Number of restarts after a rank dies."""
    seed: int = 0
    """Seed of weights and of all other random numbers."""

    def __post_init__(self):
        self.at_least(1, "length", "cp", "ep", "checkpoint_every", "timeout")
        self.at_least(0, "max_norm", "restarts", "seed")
        if self.length % (2 * self.cp):
            raise ValueError(f"length must be a multiple of 2 · cp = {2 * self.cp}, got {self.length}")

    def at_least(self, least: float, *names: str) -> None:
        """Raises ValueError that names a setting below `least`."""
        for name in names:
            if not getattr(self, name) >= least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")

    @property
    @abstractmethod
    def schedule(self) -> Schedule:
        """How many steps, and how the learning rates run along them."""

    @abstractmethod
    def optimizers(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        """The optimisers of the network, with their full learning rates."""

    @abstractmethod
    def check(self, dp: int) -> None:
        """Raises ValueError if this many groups of ranks cannot split the work of a step."""


CPU: dict[str, Any] = {
    "cp": 1,
    "ep": 1,
    "dtype": "float32",
    "rematerialise": False,
    "checkpoint_every": 10,
    "timeout": 120.0,
}
"""Settings of the ranks that a rehearsal on CPUs changes."""


@contextmanager
def training_context(c: Ranks, folder: Path, rank: int) -> Iterator[None]:
    """Context of a training run: sets compute and communication formats and the seed, and writes this process's id to a
    file."""
    torch.manual_seed(c.seed)
    (folder / "ranks").mkdir(parents=True, exist_ok=True)
    (folder / "ranks" / f"{rank}.pid").write_text(str(os.getpid()))
    dtype = torch.bfloat16 if c.dtype == "bfloat16" else None
    with computing(dtype=dtype, rematerialise=c.rematerialise, dispatch=c.dispatch, experts=c.experts):
        yield


def optimise(
    c: Ranks,
    folder: Path,
    name: str,
    model: nn.Module,
    gradients: Callable[[int], dict[str, float]],
    log: Log,
    look: Callable[[int], dict[str, float]] = lambda step: {},
) -> dict[str, float]:
    """Runs all steps. `gradients(step)` leaves the gradients of a step in `model` and returns its metrics, the same on
    all ranks. The parts of an nn.ModuleDict have their gradients clipped one by one; the first one's norm is logged.
    `look(step)` returns more metrics after that many steps. `log(step, steps, **metrics)` is called on rank 0. Returns
    the metrics of the last step."""
    rank, modules = dist.get_rank(), [*model.values()] if isinstance(model, nn.ModuleDict) else [model]
    steps, optimizers = c.schedule.steps, c.optimizers(model)
    base = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    checkpoints, first_step = Checkpoints(folder / "state"), 0
    if checkpoints.steps():
        checkpoint.create_optimizer_state(model, optimizers, checkpoints.names())
        first_step = checkpoints.load(checkpoint.state(model, optimizers))["step"]
    metrics_file, speed_file = (folder / kind / f"{name}.jsonl" for kind in ("metrics", "speed"))
    step_metrics = {}
    if rank == 0:
        keep_lines(metrics_file, first_step)
        keep_lines(speed_file, first_step)
    last_lines = read_lines(metrics_file)[-1:] if rank == 0 else []
    saved_step = first_step

    def save(step: int) -> None:
        nonlocal saved_step
        if step > saved_step:
            checkpoints.save(step, checkpoint.state(model, optimizers))
            saved_step = step

    def save_and_finish(step: int) -> None:
        save(step)
        checkpoints.finish()

    dtype = torch.bfloat16 if c.dtype == "bfloat16" else torch.float32
    with Watchdog(folder / "ranks", c.timeout) as watch, StepTimes(speed_file, current().device, dtype) as times:
        for step in range(first_step, steps):
            preemption.check(partial(save_and_finish, step))
            factor = c.schedule.rate(step)
            for optimizer, rates in zip(optimizers, base, strict=True):
                for group, lr in zip(optimizer.param_groups, rates, strict=True):
                    group["lr"] = lr * factor
            with part("train"):
                step_metrics = gradients(step)
            with part("update"):
                step_metrics["grad_norm"] = [sharding.clip(module, c.max_norm) for module in modules][0]
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            with part("look"):
                if extra_metrics := look(step + 1):
                    step_metrics |= extra_metrics
                    sharding.reshard(model)
            if rank == 0:
                with open(metrics_file, "a") as file:
                    file.write(json.dumps({"step": step + 1, **step_metrics}) + "\n")
                log(step + 1, steps, **step_metrics)
            with part("save"):
                if (step + 1) % c.checkpoint_every == 0 or step + 1 == steps:
                    save(step + 1)
            times.end(step + 1)
            watch.beat(step + 1)
        checkpoints.finish()
    return step_metrics or {
        name: value for name, value in (last_lines[0] if last_lines else {}).items() if name != "step"
    }


def make_card_facts(technique: str, c: Ranks, metrics: dict[str, float]) -> dict[str, str]:
    """Text of the model card about a training run: how it ran, and what was measured."""
    start = "/".join(Path(c.checkpoint).parts[-3:]) if c.checkpoint else "random weights"
    return {"training": f"{technique}, {c.schedule.steps:,} steps from {start}"} | {
        name: f"{value:.4g}" for name, value in metrics.items()
    }


def keep_lines(path: Path, step: int) -> None:
    """Truncates a file of a line per step after the complete lines up to a step."""
    lines = [line for line in read_lines(path) if line["step"] <= step]
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, "".join(json.dumps(line) + "\n" for line in lines))
