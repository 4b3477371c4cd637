"""The cells of `etude figure async-rl` (`sims/async_rl/experiment.py`): what each one plays, and what is read out of it
afterwards."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from kit.disk import read_lines
from kit.process import cores
from kit.runs import Run
from kit.settings import RunError
from recipe.asynchronous import timeline as async_timeline
from recipe.asynchronous.run import Async, successes
from recipe.small.micro_world import CheckpointTasks
from ref import weight_sync
from ref.network import load_hf
from ref.rollout import Rollout
from scaled.async_rl import services
from scaled.async_rl.local import play
from sims.async_rl import clock as async_clock

__all__ = ["ARMS", "Experiment", "cell", "settings"]

ARMS = {"synchronous": 1, "equal": 1, "more": 2, "one": 2, "wide": 2}
"""Slots for each rollout of a step."""
LONG_ONLY = ("one", "wide")
"""What is played at one latency alone."""


@dataclass(frozen=True)
class Experiment:
    """Sizes of the cells."""

    checkpoint: str = "runs/small/checkpoints/sft"
    """Hugging Face folder of a policy that was trained in the small world (empty: first run a tiny recipe that has
    learned nothing)."""
    tools: tuple[float, ...] = (0.0, 0.05, 0.2, 0.5)
    """Mean times of a tool in seconds, log-normal with σ = 1."""
    steps: int = 10
    """Steps of each cell."""
    long: float = 0.2
    """The latency at which success is compared, and other bounds on age are played too."""
    long_steps: int = 20
    """Steps of its cells."""
    every: int = 5
    """Versions from one whose success is measured to the next."""
    staleness: int = 2
    """S where nobody waits."""
    prompts: int = 16
    """Groups per step."""
    rollouts: int = 8
    """Rollouts per group."""
    heldout: int = 200
    """Held-out tasks."""
    samples: int = 4
    """Rollouts of each."""
    seeds: int = 3
    """Cells of each kind, two or more."""
    seed: int = 0
    """Seed of all random numbers."""

    def __post_init__(self):
        if self.seeds < 2 or self.staleness < 2 or self.long not in self.tools or self.long_steps % self.every:
            raise ValueError(
                "seeds and staleness must be at least 2, long one of tools, and long_steps a multiple of every; "
                f"got {self.seeds}, {self.staleness}, {self.long} of {self.tools}, {self.long_steps} and {self.every}"
            )

    @classmethod
    def quick(cls) -> Experiment:
        return cls(
            "",
            (0.0, 0.05),
            steps=2,
            long=0.05,
            long_steps=2,
            every=1,
            prompts=2,
            rollouts=2,
            heldout=2,
            samples=1,
            seeds=2,
        )

    @property
    def cells(self) -> list[tuple[str, float, int]]:
        """Arm, latency and number of the seed; what is compared is played one after the other."""
        kinds = [(arm, tool) for tool in self.tools for arm in ARMS if arm not in LONG_ONLY or tool == self.long]
        return [(arm, tool, number) for number in range(self.seeds) for arm, tool in kinds]


def settings(c: Experiment, checkpoint: Path, arm: str, tool: float, number: int) -> Async:
    """What a cell plays."""
    bounds = {"synchronous": 0, "one": 1, "wide": 2 * c.staleness}
    steps = c.long_steps if tool == c.long else c.steps
    base = Async(str(checkpoint), seed=1000 * c.seed + number, tool_s=tool, heldout=c.heldout, samples=c.samples)
    return replace(
        base,
        staleness=bounds.get(arm, c.staleness),
        workers=cores(),
        slots=ARMS[arm] * -(-c.prompts // cores()) * c.rollouts,
        rl=replace(base.rl, steps=steps, decay=steps // 2, prompts=c.prompts, rollouts=c.rollouts),
    )


def cell(run: Run, name: str, config: Async, every: int) -> dict:
    """One run of the services; with `every`, success of every so many versions against the seconds at which they were
    saved."""
    stage = run.stage(name, config.rl.steps, "tokens")
    if stage.finished:
        return stage.result()
    folder, tokens = run.path("cells", name), 0.0
    shutil.rmtree(folder, ignore_errors=True)  # a cell that was interrupted says nothing about time

    def show(step: int, step_metrics: dict[str, float]) -> None:
        nonlocal tokens
        tokens += step_metrics["tokens"]
        stage.progress(step, tokens, success=step_metrics["success"], age=step_metrics["age"])

    play(async_clock.plan_of(folder, config), show)
    metrics = compute_metrics(folder)
    versions = range(0, config.rl.steps + 1, every) if every else ()
    save_times = [0.0, *metrics.pop("at")]
    success_rates = [measure_heldout(folder, config, version) for version in versions]  # each of them on all cores
    shutil.rmtree(folder)
    return stage.finish(
        {
            **metrics,
            "curve": [
                {"version": v, "seconds": save_times[v], "success": s}
                for v, s in zip(versions, success_rates, strict=True)
            ],
        }
    )


def compute_metrics(folder: Path) -> dict:
    """Seconds of a cell, when each version was saved, shares of the time, and ages. `publishing`: that in which the
    next step could not begin because a version was copied, or the one before was still on its way."""
    service_events = async_timeline.events(folder)
    steps = async_timeline.trainings(service_events["trainer"])
    restarts = sum(max(line["epoch"] for line in lines) for lines in service_events.values())
    if restarts:
        raise RunError(f"{restarts} services of {folder} died; its times say nothing. Run it again with --resume")
    start_time = min(
        line["at"]
        for lines in async_timeline.workers(service_events).values()
        for line in lines
        if line["what"] == "work"
    )
    seconds = steps[-1]["at"] - start_time
    thirds = [
        thirds_of(version, rollout)
        for version, rollouts in services.trained(folder)
        for rollout in rollouts
        if not rollout.failure
    ]
    tokens = sum(step["tokens"] for step in steps)
    return {
        "seconds": seconds,
        "at": [step["at"] - start_time for step in steps],
        "tokens_per_s": tokens / seconds,
        "publishing": sum(step["sent"] - step["at"] for step in steps) / seconds,
        "published_s": float(
            np.mean([line["seconds"] for line in service_events["trainer"] if line["what"] == "published"])
        ),
        "trainer_busy": sum(step["at"] - step["began"] for step in steps) / seconds,
        "age": sum(step["age"] * step["tokens"] for step in steps) / tokens,
        "oldest": max(step["oldest"] for step in steps),
        "first_third": float(np.nanmean([first for first, _ in thirds])),
        "last_third": float(np.nanmean([last for _, last in thirds])),
        "dropped": sum(line["kind"] == "drop" for line in read_lines(folder / "journal.jsonl")),
    }


def thirds_of(version: int, rollout: Rollout) -> tuple[float, float]:
    """Mean age of a rollout's first third of own tokens, and of its last."""
    ages = np.concatenate([version - s.version[s.sampled].numpy() for s in rollout.chain.segments])
    n = -(-len(ages) // 3)
    return float(ages[:n].mean()), float(ages[-n:].mean())


def measure_heldout(folder: Path, config: Async, version: int) -> float:
    """Success on the held-out tasks with a version that the run has published."""
    model = load_hf(config.checkpoint).bfloat16()
    reader = weight_sync.Reader(services.open_stores(str(folder)).weights, weight_sync.parts(model), "figure")
    reader.fetch(version)
    reader.swap()
    return float(successes(config, CheckpointTasks(config), model).mean())
