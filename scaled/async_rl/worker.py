"""A worker: it plays the groups that the reconciler gives it, stores them, and loads new weights between two steps of
its engine.

What the store takes a while for happens beside the engine, in threads: the next version is built while the present one
decodes, and a group is written while the next ones are played. So a store that hangs silences nobody, and one that is
down stops a worker only where the bound on age does. A version that cannot be loaded leaves the old one in service; it
is tried again, with pauses that grow, and the trainer is asked to publish it anew."""

from __future__ import annotations

import copy
import hashlib
import time
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch

from kit.settings import RunError
from ref import weight_sync
from ref.engine.continuous import Continuous
from scaled.async_rl.background import BackgroundCall, BackgroundThread
from scaled.async_rl.messages import (
    Beat,
    Done,
    Forget,
    Hello,
    Loaded,
    LoadFailed,
    Refused,
    Stop,
    Update,
    Work,
    decode,
    encode,
)
from scaled.async_rl.player import Follows, Player
from scaled.async_rl.records import oldest, pack
from scaled.async_rl.services import BEAT, GivenUp, Log, no_room, open_stores, pause
from scaled.async_rl.wire import ConnectionLost, Line, Port

__all__ = ["work"]

MOST_DONE = 256
"""Groups of which a worker says again that they are done, when it connects again."""


class RetryPolicy:
    """When something that failed may be tried again. Raises RunError once it has failed for `max_seconds` seconds."""

    def __init__(self, action: str, max_seconds: float):
        self.action, self.max_seconds, self.failures, self.first, self.next = action, max_seconds, 0, 0.0, 0.0

    def record_failure(self, error: Exception) -> None:
        if no_room(error) or not isinstance(error, (OSError, weight_sync.SyncError)):
            raise error
        time_now = time.monotonic()
        self.first = self.first if self.failures else time_now
        self.failures += 1
        self.next = time_now + pause(self.failures)
        if time_now - self.first > self.max_seconds:
            raise RunError(f"{self.action} failed for {self.max_seconds:g} seconds; the last error: {error}")

    def record_success(self) -> None:
        self.failures, self.next = 0, 0.0

    @property
    def is_due(self) -> bool:
        return time.monotonic() >= self.next


@dataclass
class Storing:
    """A finished group on its way into the store."""

    done: Done
    data: bytes
    tokens: int
    errand: BackgroundCall | None = None


class Own:
    """The weights of this project's engine."""

    def __init__(self, store: MutableMapping[str, bytes], name: str, engine: Continuous):
        # What is synchronised is bfloat16, whatever the sampler computes in.
        self.engine, sampler = engine, engine.sampler
        self.served_model = (
            sampler.model if sampler.dtype is torch.bfloat16 else copy.deepcopy(sampler.model).bfloat16()
        )
        self.reader = weight_sync.Reader(store, weight_sync.parts(self.served_model), name)
        sampler.version = -1

    def fetch(self, want: int) -> None:
        self.reader.fetch(want)

    def anew(self) -> None:
        self.reader.manifests.clear()

    def swap(self) -> dict[str, float | str]:
        version = self.reader.swap()
        assert version is not None
        if self.served_model is self.engine.sampler.model:
            self.engine.renewed(version)
        else:
            self.engine.load(self.served_model, version)
        return {"version": version}


class Weights:
    """The version that an engine serves, and the one that is built beside it."""

    def __init__(self, follows: Follows, max_seconds: float):
        self.engine_weights, self.background = follows, BackgroundThread()
        self.errand: BackgroundCall | None = None
        self.served_version = self.wanted_version = -1
        self.tries = RetryPolicy("loading weights from the store", max_seconds)

    def go_on(self) -> Exception | bool:
        """Begins to build what is wanted. True once it is built; an error if that failed."""
        if self.errand is None:
            if self.wanted_version > self.served_version and self.tries.is_due:
                self.errand = self.background.send(lambda want=self.wanted_version: self.engine_weights.fetch(want))
            return False
        if not self.errand.done.is_set():
            return False
        error = self.errand.error
        if error is None:
            self.tries.record_success()
            return True
        self.errand = None
        self.engine_weights.anew()
        self.tries.record_failure(error)
        return error

    def swap(self) -> dict[str, float | str]:
        """Puts what is built in place of what serves; nothing may decode meanwhile. Returns what `Follows.swap` does,
        and seconds."""
        assert self.errand is not None
        start_time, fetch_seconds, self.errand = time.monotonic(), self.errand.seconds, None
        facts = self.engine_weights.swap()
        self.served_version = int(facts["version"])
        return {**facts, "fetch_s": fetch_seconds, "pause_s": time.monotonic() - start_time}


class Groups:
    """The groups that a worker has: those it plays, those on their way into the store, and the last ones that it said
    to be done."""

    def __init__(self, store: MutableMapping[str, bytes], max_seconds: float):
        self.store, self.since, self.storing, self.done = (
            store,
            dict[int, int](),
            dict[int, Storing](),
            dict[int, Done](),
        )
        self.tries, self.background = RetryPolicy("storing groups", max_seconds), BackgroundThread()

    def oldest(self) -> dict[int, int]:
        """The version of the oldest token of each."""
        versions = {group: entry.done.oldest for group, entry in self.storing.items()} | {
            group: entry.oldest for group, entry in self.done.items()
        }
        return {**self.since, **versions}

    def drop(self, groups: tuple[int, ...]) -> None:
        for group in groups:
            for groups_of_kind in (self.since, self.storing, self.done):
                groups_of_kind.pop(group, None)

    def stored(self) -> tuple[list[Storing], Exception | None]:
        """Groups that are now in the store, and an error if one could not be put there."""
        entries: list[Storing] = []
        error: Exception | None = None
        for group, entry in list(self.storing.items()):
            if entry.errand is None:
                if self.tries.is_due:
                    entry.errand = self.background.send(
                        lambda entry=entry: self.store.__setitem__(entry.done.key, entry.data)
                    )
            elif entry.errand.done.is_set():
                if entry.errand.error is not None:
                    error, entry.errand = entry.errand.error, None
                    continue
                self.tries.record_success()
                del self.storing[group]
                self.done = dict([*self.done.items(), (group, entry.done)][-MOST_DONE:])
                entries.append(entry)
        if error is not None:
            self.tries.record_failure(error)
        return entries, error


def work(
    folder: Path,
    at: Path | Port,
    name: str,
    epoch: int,
    player: Player,
    store: str,
    patience: float,
    store_patience: float,
) -> None:
    """A worker, until it is told to stop. Raises Lost if there is no reconciler for `patience` seconds, GivenUp if the
    reconciler refuses it, and RunError if the store takes and gives nothing for `store_patience` seconds."""
    log, engine, in_store = Log(folder, name, epoch), player.engine, open_stores(store)
    engine_weights = Own(in_store.weights, name, engine) if isinstance(engine, Continuous) else cast(Follows, engine)
    weights, groups = Weights(engine_weights, store_patience), Groups(in_store.groups, store_patience)
    log("start")
    while True:
        line = Line.to(at, patience)
        try:
            oldest_versions = groups.oldest()
            room = max(1, player.capacity // player.rollouts)
            line.say(
                encode(
                    Hello(
                        name,
                        epoch,
                        room,
                        weights.served_version,
                        tuple(oldest_versions),
                        tuple(oldest_versions.values()),
                    )
                )
            )
            for done_message in groups.done.values():
                line.say(encode(done_message))
            last_beat = time.monotonic()
            while True:
                wait = min(player.idle(), BEAT / 2) if weights.served_version >= 0 else BEAT / 2
                if weights.errand is not None or groups.storing:
                    wait = min(wait, 0.005)
                for data in line.receive(wait):
                    message = decode(data)
                    if isinstance(message, Stop):
                        log("stop")
                        if weights.errand is not None:
                            weights.errand.done.wait(
                                patience
                            )  # a thread in the middle of a computation cannot end with the process
                        return
                    if isinstance(message, Refused):
                        raise GivenUp(message.reason)
                    if isinstance(message, Work):
                        groups.drop(message.groups)
                        groups.since |= dict.fromkeys(message.groups, weights.served_version)
                        player.give(message.groups)
                        log("work", groups=len(message.groups))
                    elif isinstance(message, Forget):
                        player.forget(message.groups)
                        groups.drop(message.groups)
                        log("forget", groups=len(message.groups))
                    elif isinstance(message, Update):
                        weights.wanted_version = max(weights.wanted_version, message.version)
                outcome = weights.go_on()
                if isinstance(outcome, Exception):
                    log("unsynced", version=weights.wanted_version, why=str(outcome))
                    if weights.tries.failures > 1:
                        line.say(encode(LoadFailed(name, epoch, weights.wanted_version)))
                elif outcome:
                    facts = weights.swap()
                    log("load", **facts)
                    line.say(encode(Loaded(name, epoch, weights.served_version)))
                for group, rollouts in player.tick().items() if weights.served_version >= 0 else ():
                    data = pack(rollouts)
                    done = Done(
                        name,
                        epoch,
                        group,
                        oldest(rollouts, weights.served_version),
                        f"{group:06d}-{name}-{epoch}",
                        hashlib.sha256(data).hexdigest(),
                    )
                    groups.storing[group] = Storing(
                        done, data, sum(rollout.chain.num_sampled_tokens for rollout in rollouts if not rollout.failure)
                    )
                    groups.since.pop(group, None)
                entries, store_error = groups.stored()
                for entry in entries:
                    line.say(encode(entry.done))
                    log("done", group=entry.done.group, tokens=entry.tokens)
                if store_error is not None:
                    log("unstored", why=str(store_error))
                if time.monotonic() - last_beat > BEAT:
                    last_beat = time.monotonic()
                    line.say(encode(Beat(name, epoch)))
                    log("slots", version=weights.served_version, failures=player.failures, **player.slots())
        except ConnectionLost:
            log("lost")
        finally:
            line.close()
