"""What the tests of asynchronous RL play: a tiny network and made-up conversations, in processes that import this
file."""

import copy
from dataclasses import dataclass

import torch

from kit.disk import read_lines
from lessons.talks import Ids
from recipe.small.monitoring import Watching
from ref.async_rl import Rules
from ref.engine.sampler import Sampler
from ref.environment import Reward
from ref.length_penalty import EffortWeights
from ref.monitor import statistics
from ref.rl import Feedback, MonitorSettings, RewardCoefficients, Settings
from ref.rollout import Limits
from ref.textual_feedback import Hint
from ref.transcript import Call, Transcript, Turn
from scaled.async_rl import services
from scaled.async_rl.learner import Trained
from scaled.async_rl.player import Player, Setup
from scaled.watching import Watcher
from tests.mirror.layouts import close
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
EAGER = MonitorSettings(learn=2, tolerance=0.01, error=0.5)
TOOLS, LONGEST = ("even", "odd"), 20
"""What the transcripts of these conversations are made of, and the tokens that a length is a share of."""


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
        return Settings(**how, payment=LESS, feedback=Feedback(0.5), monitor=EAGER)

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
    """Earns more for less (`LESS`). The last turn of each context gets a hint, and a transcript says of each token that
    was written whether it is even."""

    kind = Unpaid

    def hints(self, rollouts, seed):
        return [[[hint(s)] if s.sampled.any() else [] for s in one.chain.segments] for one in rollouts]

    def transcript(self, rollout):
        written = [token for s in rollout.chain.segments for token in s.tokens[s.sampled].tolist()]
        calls = tuple(Call(TOOLS[token % 2], valid=token != 5) for token in written)
        return Transcript((Turn("user"), Turn("assistant", "done", calls)), tokens=len(written))


def hint(segment):
    """A token in front of the last turn of a context, which is distilled."""
    end = int(segment.sampled.nonzero().max()) + 1
    begin = end - 1
    while begin > 1 and segment.sampled[begin - 1]:
        begin -= 1
    return Hint(begin, (7,), begin, end)


def watched(say):
    """`local.Plan.watch`."""
    return Watcher(Watching.recipe(EAGER, LONGEST).step, TOOLS, LONGEST, say)


def check_watched(folder, steps, rollouts=2):
    """The monitor's journal has every step once, with the statistics of the groups that were trained on. Returns the
    lines that they make a monitor say."""
    monitor, lines = Watching.recipe(EAGER, LONGEST), []
    journal = read_lines(folder / "watched.jsonl")
    assert [line["step"] for line in journal] == [*range(1, steps + 1)]
    for line, (_, played) in zip(journal, services.trained(folder), strict=True):
        records = [one.transcript for one in played]
        groups = [statistics(records[n : n + rollouts], TOOLS, LONGEST) for n in range(0, len(records), rollouts)]
        for found, wanted in zip(line["groups"], groups, strict=True):
            assert found.keys() == wanted.keys() and [*found.values()].count(None) == [*wanted.values()].count(None)
            for name, value in wanted.items():
                close(found[name] or 0.0, value or 0.0)
        lines += monitor.step(groups)[1]
    return lines


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
