"""The monitor beside RL on many ranks: ranks put together what the groups of a step did, and each of them watches all
groups.

The rollouts of a group lie on several ranks, cut without regard to groups (`share` of `scaled/rl.py`). What they did is
summed before it is divided (`scaled/monitor.py`), so a group has one value of each statistic, the same on every rank.
Each rank then tells its own monitor of all groups, and raises the same alarms as the others. Rank 0 says them.

FOLDER/watched.jsonl    one line per step: the statistics of its groups, null where a group has none

This journal is all that a monitor knows. A group of ranks that resumes tells its monitors the lines up to its
checkpoint again, and cuts off the others: what is said from there on is what an undisturbed run says. Nothing is drawn
and no weight is touched.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from kit.disk import read_lines
from ref.rollout import Rollout
from ref.transcript import Transcript
from scaled.monitor import statistics
from scaled.optimise import keep_lines
from scaled.runtime.comm import all_reduce_sum
from scaled.runtime.mesh import current

__all__ = ["Group", "Look", "Watcher", "shortened", "watching"]

Group = Mapping[str, float | None]
"""The statistics of a group; None where it has none."""
LOGGED_PREFIXES = ("watch_", "low_", "high_", "evidence_", "alarm_")
"""How the names of what a monitor logs begin (`recipe/small/monitoring.py`)."""


@dataclass(frozen=True)
class Watcher:
    """The monitor of one rank."""

    step: Callable[[Sequence[Group]], tuple[dict[str, float], list[str]]]
    """One more step: what is logged of it, and a line for each new alarm."""
    tools: Sequence[str]
    """The tools of the world."""
    longest: int
    """Tokens that a rollout's length is a share of."""
    say: Callable[[str], None]
    """Shows a line; called on rank 0."""


Look = Callable[[int, Sequence[int], Sequence[Rollout]], dict[str, float]]
"""(step, counted from 0; numbers of this rank's rollouts; the rollouts) → what is logged."""


def watching(watcher: Watcher, folder: Path, prompts: int, rollouts: int) -> Look:
    """A function that watches a step; all ranks call it together, for one step after the other. The first call tells
    the watcher the steps before, from the journal. A group whose environments have all failed is left out. Raises
    ValueError for rollouts without a transcript."""
    journal, is_replayed = folder / "watched.jsonl", False

    def look(step: int, numbers: Sequence[int], step_rollouts: Sequence[Rollout]) -> dict[str, float]:
        nonlocal is_replayed
        is_first_rank = current().group("all").rank == 0
        if not is_replayed:
            previous_steps = read_previous_steps(journal, step)
            if is_first_rank and len(previous_steps) < step:
                watcher.say(
                    f"monitor: it begins with step {step + 1 - len(previous_steps)} of the run; "
                    f"{journal.name} does not have all steps before"
                )
            for groups in previous_steps:
                watcher.step(groups)
            is_replayed = True
        by_group: list[list[Transcript]] = [[] for _ in range(prompts)]
        for number, rollout in zip(numbers, step_rollouts, strict=True):
            if rollout.failure:
                continue
            if rollout.transcript is None:
                raise ValueError("a task set that is watched must give every rollout its transcript")
            by_group[number // rollouts].append(rollout.transcript)
        counts = all_reduce_sum(
            torch.tensor([len(transcripts) for transcripts in by_group], device=current().device)
        ).tolist()
        groups = [
            statistics(transcripts, watcher.tools, watcher.longest, axis="all")
            for transcripts, count in zip(by_group, counts, strict=True)
            if count
        ]
        if is_first_rank:
            with open(journal, "a") as file:
                file.write(json.dumps({"step": step + 1, "groups": groups}) + "\n")
        logged_metrics, lines = watcher.step(groups)
        for line in lines if is_first_rank else ():
            watcher.say(line)
        return logged_metrics

    return look


def read_previous_steps(journal: Path, step: int) -> list[list[Group]]:
    """The groups of the steps so far, the same on every rank; rank 0 reads them, and cuts off the steps that are
    repeated."""
    group, steps = current().group("all"), [[]]
    if group.rank == 0:
        keep_lines(journal, step)
        steps = [[line["groups"] for line in read_lines(journal)]]
    if group.size > 1:
        dist.broadcast_object_list(steps, 0)
    return steps[0]


def shortened(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics of a step with the number of alarms so far in place of all that the monitor logs."""
    logged_metrics = {name: value for name, value in metrics.items() if not name.startswith(LOGGED_PREFIXES)}
    if "alarm_at" in metrics:
        logged_metrics["alarms"] = float(
            sum(name.startswith("alarm_") and name != "alarm_at" and value != 0 for name, value in metrics.items())
        )
    return logged_metrics
