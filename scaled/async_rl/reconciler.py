"""Who plays which group, and what a step trains on: the reconciler of asynchronous RL, without processes and clocks.

`Reconciler.handle(message, now)` and `tick(now)` return what is to be sent to whom. Whatever must not be forgotten is written by `write` before
they return: an event of `ref.async_rl.Life`, with the key and digest of a group that is ready. A reconciler that dies is made anew from these
lines, and its clients say hello again. All else it works out from what they say:

    a worker hangs up        its groups go to others at once; if it only lost its connection, it says hello and keeps what nobody else has begun
    a worker is silent       after `timeout` its groups go to others; what it says later is refused, because its epoch is over
    a worker is replaced     hello with a higher epoch: the groups of the one before go to others, or back to it
    the trainer is replaced  it says how many steps it has done, and on which groups it did the last one; that step is noted if it was not
    the reconciler died      workers say what they play; what nobody claims, once all have spoken or after `timeout`, is played anew

A group that is played anew keeps its number, and with it its task and its random numbers. One that was lost with its worker `tries` times is
dropped: it may be what kills them.

There are n places, and whoever holds one is given work: the worker that it is named after, once it holds weights. Spare workers hold weights and
no place. When a worker is lost, a spare takes its place, and the worker that is started in its stead is a spare.

With S = 0 group g always goes to the same one of n places, in n equal blocks of a step. The rollouts of a step are then the same whoever is quick
or dies, and the run is the synchronous loop whose conversations are played in n shares.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ref.async_rl import Event, Life, Rules
from scaled.async_rl.messages import (
    Batch,
    Beat,
    Done,
    Forget,
    Hello,
    Loaded,
    Published,
    Ready,
    Refused,
    Repair,
    Stop,
    Stuck,
    Trained,
    Update,
    Work,
    Workers,
)

__all__ = ["Reconciler"]

Sent = list[tuple[str, object]]
"""Receivers and what they are told, in order."""


@dataclass
class Worker:
    """What is known of a worker."""

    epoch: int
    groups: int
    version: int
    seen: float
    running: set[int] = field(default_factory=set)


class Reconciler:
    """Raises ValueError if a line of the journal cannot follow the ones before it. `names`: the workers that there are to be, one to a place, in
    order; `spares`: workers that wait for one. `tries`: how often a group may be lost with its worker."""

    def __init__(
        self,
        rules: Rules,
        names: Iterable[str],
        write: Callable[[dict], None],
        lines: Iterable[dict] = (),
        timeout: float = 10.0,
        now: float = 0.0,
        spares: Iterable[str] = (),
        tries: int = 3,
    ):
        self.rules, self.names, self.spares, self.write, self.timeout, self.tries = rules, tuple(names), tuple(spares), write, timeout, tries
        self.began = self.now = now
        self.life, self.records = Life(rules), {}
        for line in lines:
            self.life.apply(Event(line["kind"], tuple(line["groups"]), line["version"]))
            if line["kind"] == "ready":
                self.records[line["groups"][0]] = line["key"], line["digest"]
        self.workers: dict[str, Worker] = {}
        self.holders: list[str | None] = [None] * len(self.names)  # who holds each place
        self.lost: set[str] = set()  # workers that were lost at least once
        self.losses = Counter[int]()  # how often a group was lost with its worker
        self.silent: list[tuple[str, int]] = []  # workers that were given up, and their epochs, for whoever ends processes
        self.alone = False  # whether the trainer was told that nobody works
        self.repairs: dict[int, float] = {}  # when the trainer was asked to publish a version anew
        self.epochs: dict[str, int] = {}
        self.since: dict[int, int] = {}  # the weights with which a group's first token may have been sampled
        # Somebody may still play what ran when the reconciler before this one died.
        self.unclaimed = {group for group, state in self.life.state.items() if state == "running"}
        self.queue: list[int] = []  # groups that have started and that nobody plays
        self.waits, self.batch = False, None  # whether the trainer waits; what it was given at this version
        # The version that can be loaded. A step is noted before its weights are, and after those of the step before; the trainer will say which.
        self.published = self.life.version - 1

    def handle(self, message, now: float) -> Sent:
        """Take a message. Returns what is to be sent."""
        sender, epoch, self.now = message.sender, message.epoch, now
        if epoch < self.epochs.get(sender, 0):
            return [(sender, Refused(f"epoch {epoch} of {sender} is over: {self.epochs[sender]} has begun"))]
        sent: Sent = []
        if epoch > self.epochs.get(sender, 0) and sender in self.workers:
            self._lose(sender)
        self.epochs[sender] = epoch
        if isinstance(message, (Ready, Trained)):
            self.alone = self.alone and not isinstance(message, Ready)  # it may be another process, which was told nothing
            sent += self._trainer(message)
        elif isinstance(message, Published):
            if message.version > self.published:
                self.published = message.version
                sent += [(name, Update(message.version)) for name in self.workers]
        elif isinstance(message, Hello):
            sent += self._hello(message, now)
        elif sender not in self.workers:
            return [(sender, Refused(f"{sender} must say hello first"))]
        else:
            self.workers[sender].seen = now
            if isinstance(message, Loaded):
                self.workers[sender].version = max(self.workers[sender].version, message.version)
            elif isinstance(message, Done):
                sent += self._done(message)
            elif isinstance(message, Stuck):
                asked = now - self.repairs.get(message.version, -1e9) < self.timeout
                if message.version == self.published and "trainer" in self.epochs and not asked:
                    self.repairs = {message.version: now}
                    sent.append(("trainer", Repair(message.version)))
            else:
                assert isinstance(message, Beat)
        return sent + self._go_on()

    def tick(self, now: float) -> Sent:
        """Give up who was silent for too long. To be called several times in each `timeout`."""
        self.now = now
        for name, worker in list(self.workers.items()):
            if now - worker.seen > self.timeout:
                self._lose(name)
                self.silent.append((name, self.epochs[name]))
                self.epochs[name] += 1  # whatever it says later comes from an epoch that is over
        if now - self.began > self.timeout:
            self._play_anew()
        return self._go_on()

    def hung_up(self, name: str, now: float) -> Sent:
        """The connection of this client has ended; its process may have, too."""
        self.now = now
        if name in self.workers:
            self._lose(name)
        return self._go_on()

    def _note(self, event: Event, **more: str) -> None:
        """Apply and write an event, in this order: what cannot follow is not written."""
        self.life.apply(event)
        self.write({"kind": event.kind, "groups": list(event.groups), "version": event.version, **more})

    def _lose(self, name: str) -> None:
        self.lost.add(name)
        self.holders = [None if holder == name else holder for holder in self.holders]  # its successor must hold weights first
        for group in sorted(self.workers.pop(name).running):
            self.losses[group] += 1
            if self.losses[group] < self.tries:
                self.queue.append(group)
            else:
                self._note(Event("drop", (group,), self.life.version))

    def _play_anew(self) -> None:
        """What nobody claims."""
        self.queue += sorted(self.unclaimed)
        self.unclaimed = set()

    def _hello(self, message: Hello, now: float) -> Sent:
        before = self.workers.get(message.sender)
        claimed = set(message.running)
        mine = {g for g in claimed if g in self.unclaimed or g in self.queue or before is not None and g in before.running}
        if before is not None:
            self.queue += sorted(before.running - mine)
        self.unclaimed -= mine
        self.queue = [group for group in self.queue if group not in mine]
        self.workers[message.sender] = Worker(message.epoch, message.groups, message.version, now, mine)
        self.since |= {group: oldest for group, oldest in zip(message.running, message.oldest, strict=True) if group in mine}
        if self.workers.keys() >= {*self.names, *self.spares}:  # nobody else may claim some
            self._play_anew()
        sent: Sent = [(message.sender, Forget(tuple(sorted(claimed - mine))))] if claimed - mine else []
        return [*sent, (message.sender, Update(self.published))] if self.published >= 0 else sent

    def _done(self, message: Done) -> Sent:
        worker, group = self.workers[message.sender], message.group
        if group not in worker.running:
            return []  # it was taken away from this worker, or is said twice
        try:
            self._note(Event("ready", (group,), message.oldest), key=message.key, digest=message.digest)
        except ValueError as error:
            return [(message.sender, Refused(str(error)))]
        worker.running.discard(group)
        self.records[group] = message.key, message.digest
        return []

    def _trainer(self, message: Ready | Trained) -> Sent:
        behind = isinstance(message, Ready) and message.version == self.life.version + 1
        if isinstance(message, Trained) and message.version == self.life.version or behind:
            try:
                self._note(Event("train", message.groups, self.life.version))
            except ValueError as error:
                return [("trainer", Refused(str(error)))]
            self.batch = None
        elif isinstance(message, Trained) and message.version == self.life.version - 1:
            pass  # said twice
        elif isinstance(message, Trained) or message.version != self.life.version:
            return [("trainer", Refused(f"the journal has {self.life.version} steps, the trainer {message.version}; is this its folder?"))]
        self.waits = self.waits or isinstance(message, Ready)
        return []

    def _go_on(self) -> Sent:
        sent: Sent = []
        if self.life.over:
            sent = [(name, Stop()) for name in self.workers]
            if self.waits and self.published == self.life.version:  # the last weights are there
                sent, self.waits = [*sent, ("trainer", Stop())], False
            return sent
        sent += self._staff()
        sent += self._drop_old()
        if self.waits:
            if self.batch is None and (taken := self._take()) is not None:
                self.batch = taken
            if self.batch is not None:
                keys, digests = zip(*(self.records[group] for group in self.batch), strict=True)
                sent.append(("trainer", Batch(self.life.version, self.batch, keys, digests)))
                self.waits = False
        return sent + self._assign()

    def _staff(self) -> Sent:
        """Who holds the places; tells the trainer if nobody lives, and if somebody does again."""
        for place, own in enumerate(self.names):
            if self.holders[place] in self.workers:
                continue
            self.holders[place] = None
            able = [name for name, worker in self.workers.items() if worker.version >= 0 and name not in self.holders]
            if own in able:
                self.holders[place] = own
            elif own in self.lost or own in self.holders or own not in self.workers and self.now - self.began > self.timeout:
                # A worker whose own place is vacant takes that one.
                others = [n for n in (*self.spares, *self.names) if n in able and (n in self.spares or self.holders[self.names.index(n)] is not None)]
                self.holders[place] = others[0] if others else None
        expected = self.lost or self.workers or self.now - self.began > self.timeout
        if "trainer" not in self.epochs or not expected or self.alone == (not self.workers):
            return []
        self.alone = not self.workers
        return [("trainer", Workers(len(self.workers)))]

    def _take(self) -> tuple[int, ...] | None:
        before = len(self.life.journal)
        taken = self.life.take()
        for event in self.life.journal[before:]:  # groups that were too old
            self.write({"kind": event.kind, "groups": list(event.groups), "version": event.version})
        return taken

    def _drop_old(self) -> Sent:
        """Groups whose first token will be too old at the next step are not played to their end."""
        sent: Sent = []
        for name, worker in self.workers.items():
            late = sorted(group for group in worker.running if self.life.version - self.since[group] > self.rules.staleness)
            for group in late:
                self._note(Event("drop", (group,), self.life.version))
                worker.running.discard(group)
            if late:
                sent.append((name, Forget(tuple(late))))
        return sent

    def _assign(self) -> Sent:
        given: dict[str, list[int]] = {}
        while True:
            group = next((g for g in self.queue if self._player(g) is not None), None)
            if group is None and self.life.admissible:
                group = len(self.life.state)
            name = None if group is None else self._player(group)
            if name is None or group is None:
                break
            if group in self.queue:
                self.queue.remove(group)
            else:
                self._note(Event("start", (group,), self.life.version))
            worker = self.workers[name]
            worker.running.add(group)
            self.since[group] = worker.version
            given.setdefault(name, []).append(group)
        return [(name, Work(tuple(groups))) for name, groups in given.items()]

    def _player(self, group: int) -> str | None:
        """The worker that is to play a group: one with a place, with room and with weights that are young enough, the least busy one."""
        places = self.holders
        if self.rules.staleness == 0:
            places = [places[group % self.rules.groups * len(places) // self.rules.groups]]
        able = []
        for name in places:
            worker = self.workers.get(name) if name is not None else None
            if worker is None or len(worker.running) >= worker.groups or worker.version < self.life.version - self.rules.staleness:
                continue
            if self._suspect(group) and any(map(self._suspect, worker.running)):
                continue
            able.append((len(worker.running) / worker.groups, name))
        return min(able)[1] if able else None

    def _suspect(self, group: int) -> bool:
        """Whether a group is dropped if it is lost once more. A worker has one of them at a time, so that none is dropped for another's fault."""
        return self.losses[group] >= self.tries - 1
