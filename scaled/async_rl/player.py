"""Plays groups of conversations with one engine, as many at a time as it has seats, and takes new weights between two tokens.

No process, no clock: `tick(now)` makes one step of the engine. A worker calls it in a loop, and tests call it in virtual time. A tool that takes a
while occupies its seat, but the engine goes on without it. One that takes longer than `deadline` ends its rollout, as a context that is full does:
the rollout earns what its state is worth. Whether that happens depends on the tool alone, so the group stays the same if it is played anew.

What a rollout samples depends on its group, its number and the weights, not on what else is played: its random numbers are its own. So a group
that is played anew, by whomever, is the same group if the weights are the same.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from ref.engine.continuous import Engine
from ref.engine.sampler import Conversation, Sampler, uniform
from ref.engine.sampler import Rollout as Sampled
from ref.network import Transformer
from ref.rl import Played
from ref.self_summary import Chain, Chaining, Link

__all__ = ["Follows", "Player", "Scene", "Seats"]

C = TypeVar("C", bound=Conversation)


class Follows(Protocol):
    """An engine's weights, which follow what the trainer publishes."""

    def fetch(self, want: int) -> None:
        """Builds version `want` beside the one that serves. Called in a thread of its own while the engine decodes. Raises OSError or SyncError if
        that may work later."""
        ...

    def anew(self) -> None:
        """Nothing that was read of the store counts any more: a manifest may be replaced by one with a new anchor."""
        ...

    def swap(self) -> dict[str, float | str]:
        """Puts what is built in place of what serves, between two steps. Returns its `version`, and what else is to be told of it."""
        ...


class Seats(Follows, Protocol):
    """Another engine than ours, whose seats are those of `ref.engine.continuous.Engine`. It computes by itself: `step` says what has happened, and
    may wait for that for some milliseconds."""

    max_len: int
    serving: int

    @property
    def state(self) -> Sequence[str]: ...

    @property
    def full(self) -> Sequence[int]: ...

    @property
    def free(self) -> int: ...

    def join(self, prompt: Sequence[int], stop: int, draws: Tensor) -> int: ...

    def answer(self, seat: int, tokens: Sequence[int]) -> None: ...

    def turn(self, seat: int) -> list[int] | None: ...

    def leave(self, seat: int, finished: bool = True) -> Sampled: ...

    def step(self) -> list[int]: ...


class Scene(Protocol[C]):
    """The environment, one conversation at a time. `ref.rl.World` plays whole batches instead."""

    how: Chaining
    """How contexts are joined."""

    def open(self, stream: str, task: int) -> C:
        """A new conversation about a task of a stream."""
        ...

    def latency(self, stream: str, task: int, rollout: int, turn: int) -> float:
        """Seconds that the environment takes for its answer to a turn; the same whenever it is asked."""
        ...

    def settle(self, conversation: C, chain: Chain) -> Played:
        """What a finished conversation earned."""
        ...


@dataclass(eq=False)
class Rollout(Generic[C]):
    """A rollout under way."""

    group: int
    number: int
    conversation: C
    link: Link
    draws: torch.Generator
    turns: int = 0
    seat: int = -1


class Player(Generic[C]):
    """`sampler`: one that our engine decodes with, or an engine with seats of its own, to which `slots`, `temperature` and `budget` mean nothing.
    `rollouts`: conversations of a group. Task g of the stream is group g's. `deadline`: seconds that a tool may take."""

    def __init__(
        self,
        sampler: Sampler | Seats,
        scene: Scene[C],
        slots: int,
        rollouts: int,
        seed: int,
        temperature: float = 1.0,
        stream: str = "rl",
        budget: int = 512,
        deadline: float = math.inf,
    ):
        self.scene, self.rollouts, self.seed, self.stream, self.deadline = scene, rollouts, seed, stream, deadline
        self.engine: Engine | Seats = Engine(sampler, slots, scene.how.limit, temperature, budget) if isinstance(sampler, Sampler) else sampler
        self.waiting: list[Rollout[C]] = []  # without a seat
        self.seated: dict[int, Rollout[C]] = {}
        self.due: list[tuple[float, int, Rollout[C], list[int] | None]] = []  # answers that come later; None: the deadline passes first
        self.order, self.late = itertools.count(), 0  # rollouts that a deadline ended
        self.played: dict[int, dict[int, Played]] = {}

    @property
    def version(self) -> int:
        """Of the weights."""
        return self.engine.serving

    @property
    def groups(self) -> tuple[int, ...]:
        """The groups under way."""
        return tuple(self.played)

    def give(self, groups: Sequence[int]) -> None:
        """Begin some groups. Raises ValueError for one that is under way."""
        for group in groups:
            if group in self.played:
                raise ValueError(f"group {group} is under way")
            self.played[group] = {}
            for number in range(self.rollouts):
                conversation = self.scene.open(self.stream, group)
                draws = torch.Generator().manual_seed(seed_of(self.seed, self.stream, group, number))
                self.waiting.append(Rollout(group, number, conversation, Link(conversation, self.scene.how), draws))

    def forget(self, groups: Sequence[int]) -> None:
        """Give groups up; those that are not under way are none of its business."""
        for group in groups:
            self.played.pop(group, None)
        self.waiting = [r for r in self.waiting if r.group in self.played]
        self.due = [one for one in self.due if one[2].group in self.played]
        heapq.heapify(self.due)
        for seat, rollout in list(self.seated.items()):
            if rollout.group not in self.played:
                self.engine.leave(seat)
                del self.seated[seat]

    def load(self, model: Transformer, version: int, cache: Literal["keep", "recompute"] = "keep") -> None:
        """New weights for our engine, in the middle of whatever is under way."""
        assert isinstance(self.engine, Engine)
        self.engine.load(model, version, cache)

    def renewed(self, version: int, cache: Literal["keep", "recompute"] = "keep") -> None:
        """The same, after somebody has written new weights into the sampler's network."""
        assert isinstance(self.engine, Engine)
        self.engine.renewed(version, cache)

    def slots(self) -> dict[str, int]:
        """How many seats decode, how many wait for a tool, how many are free, and how many rollouts wait for a seat."""
        tools = len(self.due)
        return {"decoding": len(self.seated) - tools, "tools": tools, "free": self.engine.free, "queued": len(self.waiting)}

    def idle(self, now: float) -> float:
        """Seconds until there is something to do; 0 if there is something, infinity if nothing is under way."""
        if self.engine.full or any(state == "ready" for state in self.engine.state) or self.waiting and self.engine.free:
            return 0.0
        return max(0.0, self.due[0][0] - now) if self.due else float("inf")

    def tick(self, now: float) -> dict[int, list[Played]]:
        """One step. Returns the groups that are now finished, each with its rollouts in order."""
        finished: dict[int, list[Played]] = {}
        while self.due and self.due[0][0] <= now:
            _, _, rollout, answer = heapq.heappop(self.due)
            if answer is None:
                self.late += 1
                self._leave(rollout, False, finished)
            else:
                self.engine.answer(rollout.seat, answer)
        while self.waiting and self.engine.free:
            rollout = self.waiting.pop(0)
            draws = uniform([rollout.draws], 1, self.engine.max_len)[0]
            rollout.seat = self.engine.join(rollout.link.prompt, rollout.link.stop, draws)
            self.seated[rollout.seat] = rollout
        for seat in self.engine.step():
            rollout = self.seated[seat]
            turn = self.engine.turn(seat)
            answer = None if turn is None else rollout.link.reply(turn)
            if answer is None:
                self._leave(rollout, turn is not None, finished)
                continue
            seconds = self.scene.latency(self.stream, rollout.group, rollout.number, rollout.turns)
            rollout.turns += 1
            if seconds > self.deadline:
                heapq.heappush(self.due, (now + self.deadline, next(self.order), rollout, None))
            elif seconds > 0:
                heapq.heappush(self.due, (now + seconds, next(self.order), rollout, answer))
            else:
                self.engine.answer(seat, answer)
        return finished

    def _leave(self, rollout: Rollout[C], ended: bool, finished: dict[int, list[Played]]) -> None:
        """A context is over. `ended`: it came to its end by itself. `finished` receives its group if that is over with it."""
        del self.seated[rollout.seat]
        if rollout.link.take(self.engine.leave(rollout.seat, finished=ended)):
            self.waiting.insert(0, rollout)
            return
        of_group = self.played[rollout.group]
        of_group[rollout.number] = self.scene.settle(rollout.conversation, rollout.link.chain)
        if len(of_group) == self.rollouts:
            finished[rollout.group] = [of_group[number] for number in range(self.rollouts)]
            del self.played[rollout.group]


def seed_of(*parts: object) -> int:
    """A 63-bit seed from words and numbers, the same in every process."""
    return int.from_bytes(hashlib.sha256("-".join(map(str, parts)).encode()).digest()[:8], "little") >> 1
