"""Samples groups of rollouts with one engine, as many at a time as it has slots, and takes new weights between two
tokens.

No process, no clock: `tick()` makes one step of the engine, and a worker calls it in a loop. Environments that take a
while run in threads beside the engine (`ref.rollout.Driver`). One that fails, or that takes longer than
`Limits.seconds`, is tried again; after that its rollout is left out of the group's mean and of the loss.

What a rollout samples depends on its group, its number and the weights, not on what else is sampled: its random numbers
are its own. So a group that is sampled again, by whomever, is the same group if the weights are the same and
environments answer the same."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

from ref.engine.continuous import Continuous
from ref.engine.sampler import Engine, Sampler
from ref.environment import ChatFormat, TaskSet
from ref.network import Transformer
from ref.rl import Settings, score_rollouts
from ref.rollout import Driver, Limits, Rollout, hash_seed

__all__ = ["Follows", "Player", "Setup"]


class Follows(Protocol):
    """An engine's weights, which follow what the trainer publishes."""

    def fetch(self, want: int) -> None:
        """Builds version `want` beside the one that serves. Called in a thread of its own while the engine decodes.
        Raises OSError or SyncError if that may work later."""
        ...

    def anew(self) -> None:
        """Nothing that was read of the store counts any more: a manifest may be replaced by one with a new anchor."""
        ...

    def swap(self) -> dict[str, float | str]:
        """Puts what is built in place of what serves, between two steps. Returns its `version`, and what else is to be
        told of it."""
        ...


@dataclass(frozen=True)
class Setup:
    """What is sampled: tasks, the format of their messages, limits, and how rollouts are rewarded."""

    tasks: TaskSet
    chat_format: ChatFormat
    limits: Limits
    settings: Settings


TRIES = 3
"""How often a group is begun if the environments of all its rollouts fail. After that it has failed: there is nothing
in it to train on."""


class Player:
    """`sampler`: one that our engine decodes with, or another engine, to which `slots`, `temperature` and `budget` mean
    nothing. `rollouts`: of a group. Task g of the stream is group g's."""

    def __init__(
        self,
        sampler: Sampler | Engine,
        setup: Setup,
        slots: int,
        rollouts: int,
        seed: int,
        temperature: float = 1.0,
        stream: str = "rl",
        budget: int = 512,
    ):
        self.setup, self.rollouts, self.seed, self.stream, self.capacity = setup, rollouts, seed, stream, slots
        limits, tasks = setup.limits, setup.tasks
        own = isinstance(sampler, Sampler)
        self.engine: Engine = Continuous(sampler, slots, limits.chaining.limit, temperature, budget) if own else sampler
        self.driver = Driver(self.engine, setup.chat_format, limits, tasks.is_slow, temperature)
        self.finished: dict[int, dict[int, Rollout]] = {}
        self.tries: Counter[int] = Counter()

    @property
    def version(self) -> int:
        """Of the weights."""
        return self.engine.version

    @property
    def groups(self) -> tuple[int, ...]:
        """The groups under way."""
        return tuple(self.finished)

    @property
    def failures(self) -> int:
        """Episodes whose environment failed, so far."""
        return self.driver.failures

    def give(self, groups: Sequence[int]) -> None:
        """Begins some groups. Raises ValueError for one that is under way."""
        for group in groups:
            if group in self.finished:
                raise ValueError(f"group {group} is under way")
            self._begin(group)

    def _begin(self, group: int) -> None:
        self.finished[group] = {}
        self.tries[group] += 1
        task = self.setup.tasks.task(self.stream, group)
        for number in range(self.rollouts):
            make = partial(self.setup.tasks.environment, task, number)
            self.driver.add((group, number), make, seed_of(self.seed, self.stream, group, number))

    def forget(self, groups: Sequence[int]) -> None:
        """Gives groups up; those that are not under way are none of its business."""
        for group in groups:
            self.finished.pop(group, None)
            self.tries.pop(group, None)
        self.driver.cancel(lambda key: key[0] not in self.finished)

    def load(self, model: Transformer, version: int, cache: Literal["keep", "recompute"] = "keep") -> None:
        """New weights for our engine, in the middle of whatever is under way."""
        assert isinstance(self.engine, Continuous)
        self.engine.load(model, version, cache)

    def slots(self) -> dict[str, int]:
        """How many slots decode, how many wait for a tool, how many are free, and how many rollouts wait for a slot."""
        return self.driver.slots()

    def idle(self) -> float:
        """Seconds until there may be something to do; 0 if there is something, infinity if nothing is under way."""
        if not self.driver.is_blocked:
            return 0.0
        return POLL if self.driver.calls else float("inf")

    def tick(self) -> dict[int, list[Rollout]]:
        """One step. Returns the groups that are now finished, each with its rollouts in order."""
        finished: dict[int, list[Rollout]] = {}
        for key, rollout in self.driver.step():
            group, number = key
            group_rollouts = self.finished[group]
            rollout.task = self.setup.tasks.task(self.stream, group)
            group_rollouts[number] = rollout
            if len(group_rollouts) < self.rollouts:
                continue
            rollouts = [group_rollouts[number] for number in range(self.rollouts)]
            if all(member.failure for member in rollouts) and self.tries[group] < TRIES:
                self._begin(group)
                continue
            score_rollouts(
                self.setup.settings, self.setup.tasks, rollouts, hash_seed(self.seed, "hints", self.stream, group)
            )
            finished[group] = rollouts
            del self.finished[group], self.tries[group]
        return finished


POLL = 0.005
"""Seconds between two looks at environments that are under way."""


def seed_of(*parts: object) -> int:
    """A 63-bit seed from words and numbers, the same in every process."""
    return int.from_bytes(hashlib.sha256("-".join(map(str, parts)).encode()).digest()[:8], "little") >> 1
