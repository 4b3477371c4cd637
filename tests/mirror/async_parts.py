"""What the tests of asynchronous RL play: a tiny network and made-up conversations, in processes that import this
file."""

import copy
from dataclasses import dataclass

import torch

from lessons.talks import Ids
from ref.async_rl import Rules
from ref.engine.sampler import Sampler
from ref.environment import Reward
from ref.length_penalty import EffortWeights
from ref.rl import RewardCoefficients, Settings
from ref.rollout import Limits
from scaled.async_rl.learner import Trained
from scaled.async_rl.player import Player, Setup
from tests.mirror.test_player import HOW, Heard, Quiz
from tests.ref.test_continuous import network

LESS = RewardCoefficients(
    effort_price=0.1,
    k=0.0,
    q=0.0,
    weights=EffortWeights(tool_call_tokens=1.0, tool_output_tokens=0.0, tool_calls=0.0, turns=0.0),
    invalid_call=0.0,
    kl=0.0,
)
"""A tenth is lost with each token that is written."""


@dataclass(frozen=True)
class Tiny:
    """A policy of nine tokens that learns to stop early."""

    groups: int = 4
    rollouts: int = 2
    steps: int = 5
    seconds: float = 0.0
    """Mean time of a tool."""
    lr: float = 0.01

    def sampler(self):
        return Sampler(network().float(), torch.bfloat16)

    @property
    def rl(self):
        how = dict(
            steps=self.steps,
            prompts=self.groups,
            rollouts=self.rollouts,
            lr=self.lr,
            warmup=0,
            decay=0,
            budget_tokens=20,
        )
        return Settings(**how, payment=LESS)

    def tasks(self):
        return Paid(self.seconds)

    def setup(self):
        return Setup(self.tasks(), Ids((0,)), Limits(HOW), self.rl)

    def learner(self):
        return Trained(self.rl, network().float().requires_grad_(True))

    def evaluate(self):
        return measure


def measure(sampler):
    """A number that the weights decide."""
    return float(sum(p.double().sum() for p in sampler.model.parameters()))


class Unpaid(Heard):
    """Earns nothing itself."""

    def reward(self):
        return Reward({}, {"success": 1.0})


class Paid(Quiz):
    """Earns more for less (`LESS`)."""

    kind = Unpaid


def synchronous(parts: Tiny, rules: Rules, workers: int, seed: int = 0) -> Trained:
    """The loop without services: n players take their shares of a step in turn, and the trainer waits for all."""
    torch.set_num_threads(1)
    learner = parts.learner()
    players = [
        Player(parts.sampler(), parts.setup(), rules.groups * parts.rollouts, parts.rollouts, seed)
        for _ in range(workers)
    ]
    for step in range(rules.steps):
        played = {}
        for n, player in enumerate(players):
            player.load(copy.deepcopy(learner.model), step)
            player.give([step * rules.groups + g for g in range(rules.groups) if g * workers // rules.groups == n])
            while player.groups:
                played |= player.tick()
        learner.step([one for group in sorted(played) for one in played[group]])
    return learner
