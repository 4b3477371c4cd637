"""The tasks of the small world for whoever trains or evaluates: a `ref.environment.TaskSet`, and a curriculum over
it."""

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from recipe.microrepo import MicroRepo, Session, Task
from recipe.microrepo.disk import DiskSession
from recipe.microrepo.environment import TextSession
from recipe.microrepo.task import MAX_HOPS
from recipe.small.agent import Language
from recipe.small.data import task_stream
from recipe.small.hints import hint_rollouts
from recipe.small.settings import Recipe
from recipe.small.transcripts import TOOLS, transcript_of
from ref.rollout import Rollout, RolloutResult, hash_seed
from ref.textual_feedback import Hint
from ref.transcript import Transcript

__all__ = ["Depths", "Hinting", "MicroTasks", "OpenSession"]

OpenSession = Callable[[Task, int], TextSession]
"""Begins an episode of a task with so many turns at most."""
Hinting = Callable[[Sequence[Rollout], int], list[list[list[Hint]]]]
"""The hints of finished rollouts, for every context of every chain; the number is a seed."""
N_KINDS = MAX_HOPS + 1
"""Kinds of tasks, by depth: how many helpers a task's docstring refers to, or how many references lead to its body."""


class MicroTasks:
    """Tasks of a recipe's world. An experiment with a world of its own says how an episode begins (`open_session`),
    what the transcript of a rollout is (`record`), and which hints rollouts get (`hinting`); by default it is the world
    of `rl.world`, with the hints of `recipe/small/hints.py`."""

    # answers take microseconds; on disk they take longer, and processes sample batches side by side in the same order
    # every run
    is_slow = False
    tools: Sequence[str] = TOOLS

    def __init__(
        self,
        config: Recipe,
        language: Language,
        open_session: OpenSession | None = None,
        record: Callable[[Rollout], Transcript] | None = None,
        hinting: Hinting | None = None,
    ):
        self.config, self.language = config, language
        self.open_session: OpenSession = open_session or (DiskSession if config.rl.world == "disk" else Session)
        self.record = record or (None if open_session else transcript_of)
        self.hinting = hinting or partial(hint_rollouts, language=language, settings=config.rl.feedback)
        self.streams: dict[str, tuple[Iterator[Task], list[Task]]] = {}

    def task(self, stream: str, number: int) -> Task:
        """A task of a stream. Generates all earlier tasks on the way, which costs nothing compared with an episode."""
        use = "evaluation" if stream == "heldout" else stream
        source, generated_tasks = self.streams.setdefault(stream, (iter(task_stream(self.config, use)), []))
        generated_tasks += itertools.islice(source, max(0, number + 1 - len(generated_tasks)))
        return generated_tasks[number]

    def environment(self, task: Task, number: int) -> MicroRepo:
        return MicroRepo(self.open_session(task, self.config.rl.max_turns))

    def transcript(self, rollout: Rollout) -> Transcript | None:
        return None if self.record is None else self.record(rollout)

    def hints(self, rollouts: Sequence[Rollout], seed: int) -> list[list[list[Hint]]]:
        return self.hinting(rollouts, seed)


class Depths:
    """A curriculum: in the later steps (`rl.later`) harder tasks are upsampled (report §4.1). The kinds of tasks are
    the world's depths, and the rollouts so far tell which are hard (`compute_keep_probabilities`)."""

    def __init__(self, config: Recipe):
        self.config, self.consumed, self.kind_totals = config, 0, np.zeros((N_KINDS, 3))
        self.tasks: Iterator[Task] | None = None

    @property
    def metrics(self) -> dict[str, float]:
        return {}

    def choose(self, step: int, count: int) -> list[Task]:
        r = self.config.rl
        if self.tasks is None:
            self.tasks = itertools.islice(task_stream(self.config, "rl"), self.consumed, None)
        keep_probabilities = (
            compute_keep_probabilities(self.kind_totals, r.upsampling)
            if step >= r.steps * (1 - r.later)
            else np.ones(N_KINDS)
        )
        selected_tasks, dropped_count = sample_tasks(
            self.tasks, count, keep_probabilities, random.Random(hash_seed(self.config.seed, "harder", step))
        )
        self.consumed += len(selected_tasks) + dropped_count
        return selected_tasks

    def update(self, tasks: Sequence[Any], outcomes: Sequence[RolloutResult]) -> None:
        for outcome in outcomes:
            if not outcome.failure:
                self.kind_totals[outcome.task.depth] += 1, outcome.metrics["turns"], outcome.num_sampled_tokens

    def state(self) -> dict:
        """What a stage saves."""
        return {"consumed": self.consumed, "played": self.kind_totals}

    def restore(self, state: dict) -> None:
        self.consumed, saved_totals = state["consumed"], state["played"]
        self.kind_totals = np.zeros((N_KINDS, 3))
        self.kind_totals[: len(saved_totals)] = saved_totals  # earlier versions knew three kinds


def compute_keep_probabilities(kind_totals: np.ndarray, power: float) -> np.ndarray:
    """The probability of keeping a task of each kind, 1 for the hardest. The difficulty of a kind follows from its
    rollouts (§4.1: "number of turns, thinking tokens"): their turns and tokens relative to those of all kinds, averaged
    over the two.

    played: [kinds, (rollouts, turns, tokens)], sums. A kind that was never played is kept."""
    has_rollouts = kind_totals[:, 0] > 0
    if not has_rollouts.any():
        return np.ones(len(kind_totals))
    kind_means = kind_totals[has_rollouts, 1:] / kind_totals[has_rollouts, :1]
    difficulty = (kind_means / kind_means.mean(0).clip(min=1e-9)).mean(1)
    keep_probabilities = np.ones(len(kind_totals))
    keep_probabilities[has_rollouts] = (difficulty / difficulty.max().clip(min=1e-9)) ** power
    return keep_probabilities


def sample_tasks(
    tasks: Iterator[Task], n: int, keep_probabilities: np.ndarray, rng: random.Random
) -> tuple[list[Task], int]:
    """The next n tasks, each kept with the probability of its kind, and the number of dropped tasks."""
    selected_tasks, dropped_count = [], 0
    while len(selected_tasks) < n:
        task = next(tasks)
        if rng.random() < keep_probabilities[task.depth]:
            selected_tasks.append(task)
        else:
            dropped_count += 1
    return selected_tasks, dropped_count
