"""What the tests of asynchronous RL play: a tiny network and made-up conversations, in processes that import this file."""

import copy
from dataclasses import dataclass

import torch

from ref.async_rl import Rules
from ref.engine.sampler import Sampler
from ref.rl import Settings
from scaled.async_rl.learner import Trained
from scaled.async_rl.player import Player
from tests.mirror.test_player import HOW, Quiz
from tests.ref.test_continuous import network


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

    def scene(self):
        return Paid(self.seconds, HOW)

    def learner(self):
        c = Settings(steps=self.steps, prompts=self.groups, rollouts=self.rollouts, lr=self.lr, warmup=0, decay=0, budget_tokens=20)
        return Trained(c, network().float().requires_grad_(True))

    def evaluate(self):
        return measure


def measure(sampler):
    """A number that the weights decide."""
    return float(sum(p.double().sum() for p in sampler.model.parameters()))


class Paid(Quiz):
    """Earns more for less."""

    def settle(self, conversation, chain):
        played = super().settle(conversation, chain)
        played.reward = -0.1 * chain.written
        return played


def synchronous(parts: Tiny, rules: Rules, workers: int, seed: int = 0) -> Trained:
    """The loop without services: n players take their shares of a step in turn, and the trainer waits for all."""
    torch.set_num_threads(1)
    learner = parts.learner()
    players = [Player(parts.sampler(), parts.scene(), rules.groups * parts.rollouts, parts.rollouts, seed) for _ in range(workers)]
    for step in range(rules.steps):
        played = {}
        for n, player in enumerate(players):
            player.load(copy.deepcopy(learner.model), step)
            player.give([step * rules.groups + g for g in range(rules.groups) if g * workers // rules.groups == n])
            while player.groups:
                played |= player.tick(0.0)
        learner.step([one for group in sorted(played) for one in played[group]])
    return learner
