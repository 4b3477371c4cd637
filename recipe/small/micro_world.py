"""The small world as the tasks of a full or asynchronous run of RL, which starts from a checkpoint."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from kit.disk import read_json
from kit.settings import RunError, fill
from recipe.microrepo import MicroRepo, Task
from recipe.small.agent import Language
from recipe.small.demonstrations import context
from recipe.small.settings import Recipe
from recipe.small.tasks import MicroTasks
from ref.cpt import load_tokenizer
from ref.environment import Environment, StepResult
from ref.messages import Message
from ref.rl import Settings
from ref.rollout import Limits

__all__ = ["CheckpointTasks"]


class RunSettings(Protocol):
    """The settings of a training run that the tasks need."""

    @property
    def checkpoint(self) -> str | None: ...

    @property
    def length(self) -> int: ...

    @property
    def join(self) -> Any: ...

    @property
    def rl(self) -> Settings: ...


class CheckpointTasks(MicroTasks):
    """Tasks of repairing tiny programs, with the tokens of the checkpoint's tokenizer. Contexts and tasks are as in
    `recipe`; without it, as in the run of the recipe that the checkpoint comes from (`origin`), else the recipe's
    defaults. Raises RunError for a tokenizer without role tokens, or if `c.length` is too short for a context; `length`
    is what the user calls that setting. `tool_s`: mean time of a tool in seconds, log-normal with σ = 1, for runs that
    do not wait for each other; a tool of the small world itself takes microseconds."""

    limits: Limits
    """How long rollouts may be."""

    def __init__(self, c: RunSettings, recipe: Recipe | None = None, length: str = "length", tool_s: float = 0.0):
        assert c.checkpoint is not None
        path = Path(c.checkpoint) / "tokenizer.json"
        language = Language(load_tokenizer(path))
        if None in (language.env, language.agent):
            raise RunError(
                f"{path} has no tokens <|env|> and <|agent|>, nor those of a chat: the small world "
                f"needs a policy that was trained in it; "
                "etude run recipe --scale small writes one to checkpoints/sft"
            )
        self.root, settings = origin(Path(c.checkpoint))
        self.recipe = recipe or fill(Recipe, settings)
        memory = replace(self.recipe.rl, world="memory")
        super().__init__(replace(self.recipe, rl=memory), language)
        rl = replace(self.recipe.rl, max_len=c.rl.max_len)
        chaining = context(language, replace(self.recipe, rl=rl, context=replace(self.recipe.context, join=c.join)))
        if chaining.limit > c.length:
            raise RunError(
                f"{length} must hold a context of {chaining.limit} tokens, got {c.length}; see --set {length}=…"
            )
        if c.rl.feedback.weight and self.recipe.rl.feedback.source == "shuffled":
            raise RunError(
                "rl.feedback.source=shuffled exchanges hints between all rollouts of a step, which no rank and no "
                "worker sees; use etude run recipe --scale small"
            )
        prompt = len(language.encode_opening(MicroRepo(self.open_session(self.task("rl", 0), 1)).reset()))
        if prompt + 1 >= chaining.limit:
            raise RunError(
                f"a prompt has about {prompt} tokens; contexts of {chaining.limit} leave no room for "
                f"an answer; see --set rl.max_len=…"
            )
        self.limits = c.rl.limits(chaining)
        self.tool_s, self.is_slow = tool_s, tool_s > 0

    def environment(self, task: Task, number: int) -> Environment:
        inner = super().environment(task, number)
        return SlowEnvironment(inner, partial(self.latency, task, number)) if self.is_slow else inner

    def latency(self, task: Task, number: int, turn: int) -> float:
        """Seconds that the tools of a turn take; the same whenever they are called."""
        return self.tool_s * random.Random(f"{task.key}-{number}-{turn}").lognormvariate(-0.5, 1.0)


class SlowEnvironment:
    """An environment whose steps take so many seconds, `latency(turn)`; the last one, after which nothing is sampled,
    takes none."""

    def __init__(self, inner: MicroRepo, latency: Callable[[int], float]):
        self.inner, self.session, self.latency, self.turns = inner, inner.session, latency, 0
        self.reset, self.reward, self.close = inner.reset, inner.reward, inner.close

    def step(self, message: Message) -> StepResult:
        result = self.inner.step(message)
        if not result.done:
            time.sleep(self.latency(self.turns))
        self.turns += 1
        return result


def origin(checkpoint: Path) -> tuple[Path | None, dict]:
    """The run of the recipe that a checkpoint comes from, and its settings: the run that it is in,
    RUN/checkpoints/NAME, or that of the checkpoint from which its full run started. None and no settings if there is no
    such run."""
    visited_roots: set[Path] = set()
    while (root := checkpoint.resolve().parent.parent) not in visited_roots:
        visited_roots.add(root)
        try:
            record = read_json(root / "config.json", {"technique": str, "config": dict})
            if record["technique"] in ("recipe", "recipe full"):
                field_names = {field.name for field in fields(Recipe)}
                return root, {name: value for name, value in record["config"].items() if name in field_names}
            checkpoint = Path(record["config"]["checkpoint"])
        except (OSError, ValueError, KeyError, TypeError):
            break
    return None, {}
