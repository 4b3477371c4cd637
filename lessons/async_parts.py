"""What lesson 13 gives the services to sample and to train: a policy of nine tokens that is rewarded for saying little.

Services are processes, and what a notebook defines no other process can import. So it stands here, with the interfaces
of `scaled.async_rl`:

    Brief(...)       `local.Parts`: sampler, setup and learner, made anew in each process that needs one
    Room             `ref.environment.TaskSet`: conversations of three turns, in which a tool takes a while
"""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from lessons.talks import Ids, Parrot, Talk
from ref.engine.sampler import Sampler
from ref.environment import Environment, Reward, StepResult
from ref.messages import Message
from ref.network import Config, Transformer
from ref.rl import Settings
from ref.rollout import Limits
from ref.self_summary import Chaining
from scaled.async_rl.learner import Trained
from scaled.async_rl.player import Setup

__all__ = ["Brief", "Room", "network"]

SHAPE = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "intermediate_size": 32,
}


def network() -> Transformer:
    """A dense policy of nine tokens, always with the same random weights."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return Transformer(Config.tiny(9, num_experts=0, initializer_range=0.4, **SHAPE))


class NumberedTask(NamedTuple):
    """A task: its number."""

    stream: str
    number: int

    @property
    def key(self) -> str:
        return f"{self.stream}-{self.number}"


class Brevity(Talk):
    """Three turns, each answered with two tokens. A tenth is lost with each token that is written, and one if the end
    is not reached."""

    def __init__(self, task: NumberedTask, rollout: int, tool_s: float):
        super().__init__(Parrot([1 + task.number % 6], [7, 8], 3))
        self.name, self.tool_s, self.token_count, self.is_finished = f"{task.key}-{rollout}", tool_s, 0, False

    def step(self, message: Message) -> StepResult:
        if self.tool_s:
            turn = len(self.inner.turns_seen)  # pyright: ignore[reportAttributeAccessIssue]
            time.sleep(self.tool_s * random.Random(f"{self.name}-{turn}").lognormvariate(-0.5, 1.0))
        self.token_count += len((message.content or "").split()) + 1
        result = super().step(message)
        self.is_finished = result.done
        return result

    def reward(self) -> Reward:
        return Reward(
            {"brevity": -0.1 * self.token_count, "end": float(self.is_finished) - 1},
            {"success": float(self.is_finished)},
        )


@dataclass
class Room:
    """A tool takes `tool_s` seconds on the average, log-normal with σ = 1."""

    tool_s: float
    tools: Sequence[str] = ()

    @property
    def is_slow(self) -> bool:
        return self.tool_s > 0

    def task(self, stream: str, number: int) -> NumberedTask:
        return NumberedTask(stream, number)

    def environment(self, task: NumberedTask, number: int) -> Environment:
        return Brevity(task, number, self.tool_s)

    def transcript(self, rollout: object) -> None:
        """There are no calls to make a record of."""

    def hints(self, rollouts: Sequence[object], seed: int) -> list:
        return [[] for _ in rollouts]


@dataclass(frozen=True)
class Brief:
    """Groups of a step, rollouts of a group, steps; mean seconds of a tool; learning rate."""

    groups: int = 4
    rollouts: int = 4
    steps: int = 8
    tool_s: float = 0.0
    lr: float = 0.02

    @property
    def settings(self) -> Settings:
        return Settings(self.steps, self.groups, self.rollouts, self.lr, warmup=0, decay=0)

    def sampler(self) -> Sampler:
        return Sampler(network(), torch.bfloat16)

    def setup(self) -> Setup:
        return Setup(
            Room(self.tool_s),
            Ids(),
            Limits(Chaining(trigger=40, longest_summary=1, room=0, join="none")),
            self.settings,
        )

    def learner(self) -> Trained:
        return Trained(self.settings, network())
