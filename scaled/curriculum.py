"""A curriculum on many ranks: every rank follows it by itself, and all choose the same tasks.

The rollouts of a step lie on several ranks, in order of their number (`share` of `scaled/rl.py`). Ranks tell each other
how their rollouts ended, and each of them tells its own curriculum of all.

FOLDER/outcomes.jsonl    one line per step: how its rollouts ended, in order

This journal is all that a curriculum knows: it depends on nothing but its settings and what it was told. A group of
ranks that resumes goes through the steps up to its checkpoint again, and cuts off the others, so it chooses what an
undisturbed run chooses.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from kit.disk import read_lines
from ref.rl import Curriculum
from ref.rollout import Rollout, RolloutResult
from scaled.optimise import keep_lines
from scaled.runtime.mesh import current

__all__ = ["JOURNAL", "FollowedCurriculum"]

JOURNAL = "outcomes.jsonl"


class FollowedCurriculum:
    """`curriculum` in steps of `prompts` groups of `rollouts`, with its journal in `folder`. All ranks make the same
    calls, for one step after the other; the first one may be any step whose predecessors are in the journal."""

    def __init__(self, curriculum: Curriculum, folder: Path, prompts: int, rollouts: int):
        self.curriculum, self.journal, self.prompts, self.rollouts = curriculum, folder / JOURNAL, prompts, rollouts
        self.next_step: int | None = None

    def choose(self, step: int) -> list[Any]:
        """The tasks of a step, counted from 0. Raises ValueError where the journal lacks a step before it."""
        if self.next_step is None:
            previous_steps = self._read_previous_steps(step)
            if len(previous_steps) < step:
                raise ValueError(f"{self.journal} has {len(previous_steps)} steps; step {step} needs all before it")
            for number, outcomes in enumerate(previous_steps):
                self._update(self.curriculum.choose(number, self.prompts), outcomes)
            self.next_step = step
        if step != self.next_step:
            raise ValueError(f"steps come one after the other: {self.next_step} comes next, not {step}")
        return self.curriculum.choose(step, self.prompts)

    def update(self, step: int, tasks: Sequence[Any], rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Tells how this rank's rollouts of a step ended. `tasks`: those of the step. Returns what is logged of it."""
        metrics = self.curriculum.metrics
        group, outcomes = current().group("all"), [replace(rollout.outcome, task=None) for rollout in rollouts]
        by_rank: list[Any] = [outcomes]
        if group.size > 1:
            by_rank *= group.size
            dist.all_gather_object(by_rank, outcomes)
        lines = [
            {"failure": outcome.failure, "metrics": dict(outcome.metrics), "tokens": outcome.num_sampled_tokens}
            for rank_outcomes in by_rank
            for outcome in rank_outcomes
        ]
        if group.rank == 0:
            with open(self.journal, "a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step + 1, "outcomes": lines}) + "\n")
        self._update(tasks, lines)
        self.next_step = step + 1
        return metrics

    def _update(self, tasks: Sequence[Any], lines: Sequence[dict[str, Any]]) -> None:
        outcomes = [
            RolloutResult(tasks[number // self.rollouts], line["failure"], line["metrics"], line["tokens"])
            for number, line in enumerate(lines)
        ]
        self.curriculum.update(tasks, outcomes)

    def _read_previous_steps(self, step: int) -> list[list[dict[str, Any]]]:
        """How the rollouts of the steps before ended; rank 0 reads them, and cuts off the steps that are repeated."""
        group, steps = current().group("all"), [[]]
        if group.rank == 0:
            keep_lines(self.journal, step)
            steps = [[line["outcomes"] for line in read_lines(self.journal)]]
        if group.size > 1:
            dist.broadcast_object_list(steps, 0)
        return steps[0]
