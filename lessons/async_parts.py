"""What lesson 13 gives the services to play and to train: a policy of nine tokens that is paid for saying little.

Services are processes, and what a notebook defines no other process can import. So it stands here, with the interfaces of `scaled.async_rl`:

    Brief(...)       `local.Parts`: sampler, scene and learner, made anew in each process that needs one
    Room             `player.Scene`: conversations of three turns, in which a tool takes a while
"""

import random
from dataclasses import dataclass

import torch

from ref.engine.sampler import Sampler
from ref.network import Config, Transformer
from ref.rl import Played, Settings
from ref.self_summary import Chain, Chaining
from scaled.async_rl.learner import Trained

__all__ = ["Brief", "Room", "network"]

SHAPE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 32}


def network() -> Transformer:
    """A dense policy of nine tokens, always with the same random weights."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return Transformer(Config.tiny(9, num_experts=0, initializer_range=0.4, **SHAPE))


@dataclass
class Talk:
    """Three turns, each ended by token 0; the environment answers with two tokens."""

    prompt: list[int]
    stop: int = 0
    turns: int = 0

    def reply(self, turn: list[int]) -> list[int] | None:
        self.turns += 1
        return [7, 8] if self.turns < 3 else None


@dataclass
class Room:
    """A tool takes `tool_s` seconds on the average, log-normal with σ = 1."""

    tool_s: float
    how: Chaining = Chaining(trigger=40, longest_summary=1, room=0, join="none")

    def open(self, stream: str, task: int) -> Talk:
        return Talk([1 + task % 6])

    def latency(self, stream: str, task: int, rollout: int, turn: int) -> float:
        return self.tool_s * random.Random(f"{stream}-{task}-{rollout}-{turn}").lognormvariate(-0.5, 1.0)

    def settle(self, conversation: Talk, chain: Chain) -> Played:
        """A tenth is lost with each token that is written, and one if the end is not reached."""
        return Played(chain, -0.1 * chain.written - (not chain.finished), {"success": float(chain.finished)})


@dataclass(frozen=True)
class Brief:
    """Groups of a step, rollouts of a group, steps; mean seconds of a tool; learning rate."""

    groups: int = 4
    rollouts: int = 4
    steps: int = 8
    tool_s: float = 0.0
    lr: float = 0.02

    def sampler(self) -> Sampler:
        return Sampler(network(), torch.bfloat16)

    def scene(self) -> Room:
        return Room(self.tool_s)

    def learner(self) -> Trained:
        return Trained(Settings(self.steps, self.groups, self.rollouts, self.lr, warmup=0, decay=0), network())
