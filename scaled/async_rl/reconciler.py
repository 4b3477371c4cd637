"""Who plays which group, and what a step trains on: the reconciler of asynchronous RL, without processes and clocks.

`Reconciler.handle(message, now)` and `tick(now)` return what is to be sent to whom. Whatever must not be forgotten is
written by `write` before they return: an event of `ref.async_rl.Life`, with the key and digest of a group that is
ready. A reconciler that dies is made anew from these lines, and its clients say hello again. All else it works out from
what they say:

    a worker hangs up        its groups go to others at once; if it only lost its connection, it says hello and keeps
                             what nobody else has begun
    a worker is silent       after `timeout` its groups go to others; what it says later is refused, because its epoch
                             is over
    a worker is replaced     hello with a higher epoch: the groups of the one before go to others, or back to it
    the trainer is replaced  it says how many steps it has done, and on which groups it did the last one; that step is
                             noted if it was not
    the reconciler died      workers say what they play; what nobody claims, once all have spoken or after `timeout`, is
                             played anew

A group that is played anew keeps its number, and with it its task and its random numbers. One that was lost with its
worker `tries` times is dropped: it may be what kills them.

There are n places, and whoever holds one is given work: the worker that it is named after, once it holds weights. Spare
workers hold weights and no place. When a worker is lost, a spare takes its place, and the worker that is started in its
stead is a spare.

With S = 0 group g always goes to the same one of n places, in n equal blocks of a step. The rollouts of a step are then
the same whoever is quick or dies, and the run is the synchronous loop whose conversations are played in n shares.
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
    LoadFailed,
    Published,
    Ready,
    Refused,
    Repair,
    Stop,
    Trained,
    Update,
    Work,
    Workers,
)

__all__ = ["Reconciler"]

Outbox = list[tuple[str, object]]
"""Receivers and what they are told, in order."""


@dataclass
class Worker:
    """What is known of a worker."""

    epoch: int
    groups: int
    version: int
    last_seen: float
    running: set[int] = field(default_factory=set)


class Reconciler:
    """Raises ValueError if a line of the journal cannot follow the ones before it. `names`: the workers that there are
    to be, one to a place, in order; `spares`: workers that wait for one. `tries`: how often a group may be lost with
    its worker."""

    def __init__(
        self,
        rules: Rules,
        names: Iterable[str],
        write: Callable[[dict], None],
        lines: Iterable[dict] = (),
        timeout: float = 10.0,
        time_now: float = 0.0,
        spares: Iterable[str] = (),
        tries: int = 3,
    ):
        self.rules, self.names, self.spares, self.write, self.timeout, self.tries = (
            rules,
            tuple(names),
            tuple(spares),
            write,
            timeout,
            tries,
        )
        self.start_time = self.current_time = time_now
        self.life, self.records = Life(rules), {}
        for line in lines:
            self.life.apply(Event(line["kind"], tuple(line["groups"]), line["version"]))
            if line["kind"] == "ready":
                self.records[line["groups"][0]] = line["key"], line["digest"]
        self.workers: dict[str, Worker] = {}
        self.holders: list[str | None] = [None] * len(self.names)  # who holds each place
        self.lost_names: set[str] = set()  # workers that were lost at least once
        self.losses = Counter[int]()  # how often a group was lost with its worker
        self.silent: list[
            tuple[str, int]
        ] = []  # workers that were given up, and their epochs, for whoever ends processes
        self.alone = False  # whether the trainer was told that nobody works
        self.repairs: dict[int, float] = {}  # when the trainer was asked to publish a version anew
        self.epochs: dict[str, int] = {}
        self.since: dict[int, int] = {}  # the weights with which a group's first token may have been sampled
        # Somebody may still play what ran when the reconciler before this one died.
        self.unclaimed = {group for group, state in self.life.state.items() if state == "running"}
        self.queue: list[int] = []  # groups that have started and that nobody plays
        self.waits, self.batch = False, None  # whether the trainer waits; what it was given at this version
        # The version that can be loaded. A step is noted before its weights are, and after those of the step before;
        # the trainer will say which.
        self.published = self.life.version - 1

    def handle(self, message, time_now: float) -> Outbox:
        """Take a message. Returns what is to be sent."""
        sender, epoch, self.current_time = message.sender, message.epoch, time_now
        if epoch < self.epochs.get(sender, 0):
            return [(sender, Refused(f"epoch {epoch} of {sender} is over: {self.epochs[sender]} has begun"))]
        outbox: Outbox = []
        if epoch > self.epochs.get(sender, 0) and sender in self.workers:
            self._lose(sender)
        self.epochs[sender] = epoch
        if isinstance(message, (Ready, Trained)):
            self.alone = self.alone and not isinstance(
                message, Ready
            )  # it may be another process, which was told nothing
            outbox += self._trainer(message)
        elif isinstance(message, Published):
            if message.version > self.published:
                self.published = message.version
                outbox += [(name, Update(message.version)) for name in self.workers]
        elif isinstance(message, Hello):
            outbox += self._hello(message, time_now)
        elif sender not in self.workers:
            return [(sender, Refused(f"{sender} must say hello first"))]
        else:
            self.workers[sender].last_seen = time_now
            if isinstance(message, Loaded):
                self.workers[sender].version = max(self.workers[sender].version, message.version)
            elif isinstance(message, Done):
                outbox += self._done(message)
            elif isinstance(message, LoadFailed):
                is_repairing = time_now - self.repairs.get(message.version, -1e9) < self.timeout
                if message.version == self.published and "trainer" in self.epochs and not is_repairing:
                    self.repairs = {message.version: time_now}
                    outbox.append(("trainer", Repair(message.version)))
            else:
                assert isinstance(message, Beat)
        return outbox + self._go_on()

    def tick(self, time_now: float) -> Outbox:
        """Give up who was silent for too long. To be called several times in each `timeout`."""
        self.current_time = time_now
        for name, worker in list(self.workers.items()):
            if time_now - worker.last_seen > self.timeout:
                self._lose(name)
                self.silent.append((name, self.epochs[name]))
                self.epochs[name] += 1  # whatever it says later comes from an epoch that is over
        if time_now - self.start_time > self.timeout:
            self._play_anew()
        return self._go_on()

    def hung_up(self, name: str, time_now: float) -> Outbox:
        """The connection of this client has ended; its process may have, too."""
        self.current_time = time_now
        if name in self.workers:
            self._lose(name)
        return self._go_on()

    def _note(self, event: Event, **record_fields: str) -> None:
        """Apply and write an event, in this order: what cannot follow is not written."""
        self.life.apply(event)
        self.write({"kind": event.kind, "groups": list(event.groups), "version": event.version, **record_fields})

    def _lose(self, name: str) -> None:
        self.lost_names.add(name)
        self.holders = [
            None if holder == name else holder for holder in self.holders
        ]  # its successor must hold weights first
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

    def _hello(self, message: Hello, time_now: float) -> Outbox:
        previous_worker = self.workers.get(message.sender)
        claimed_groups = set(message.running)
        owned_groups = {
            g
            for g in claimed_groups
            if g in self.unclaimed or g in self.queue or previous_worker is not None and g in previous_worker.running
        }
        if previous_worker is not None:
            self.queue += sorted(previous_worker.running - owned_groups)
        self.unclaimed -= owned_groups
        self.queue = [group for group in self.queue if group not in owned_groups]
        self.workers[message.sender] = Worker(message.epoch, message.groups, message.version, time_now, owned_groups)
        self.since |= {
            group: oldest
            for group, oldest in zip(message.running, message.oldest, strict=True)
            if group in owned_groups
        }
        if self.workers.keys() >= {*self.names, *self.spares}:  # nobody else may claim some
            self._play_anew()
        outbox: Outbox = (
            [(message.sender, Forget(tuple(sorted(claimed_groups - owned_groups))))]
            if claimed_groups - owned_groups
            else []
        )
        return [*outbox, (message.sender, Update(self.published))] if self.published >= 0 else outbox

    def _done(self, message: Done) -> Outbox:
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

    def _trainer(self, message: Ready | Trained) -> Outbox:
        is_behind = isinstance(message, Ready) and message.version == self.life.version + 1
        if isinstance(message, Trained) and message.version == self.life.version or is_behind:
            try:
                self._note(Event("train", message.groups, self.life.version))
            except ValueError as error:
                return [("trainer", Refused(str(error)))]
            self.batch = None
        elif isinstance(message, Trained) and message.version == self.life.version - 1:
            pass  # said twice
        elif isinstance(message, Trained) or message.version != self.life.version:
            return [
                (
                    "trainer",
                    Refused(
                        f"the journal has {self.life.version} steps, the trainer {message.version}; is this its folder?"
                    ),
                )
            ]
        self.waits = self.waits or isinstance(message, Ready)
        return []

    def _go_on(self) -> Outbox:
        outbox: Outbox = []
        if self.life.over:
            outbox = [(name, Stop()) for name in self.workers]
            if self.waits and self.published == self.life.version:  # the last weights are there
                outbox, self.waits = [*outbox, ("trainer", Stop())], False
            return outbox
        outbox += self._staff()
        outbox += self._drop_old()
        if self.waits:
            if self.batch is None and (step_groups := self._take()) is not None:
                self.batch = step_groups
            if self.batch is not None:
                keys, digests = zip(*(self.records[group] for group in self.batch), strict=True)
                outbox.append(("trainer", Batch(self.life.version, self.batch, keys, digests)))
                self.waits = False
        return outbox + self._assign()

    def _staff(self) -> Outbox:
        """Who holds the places; tells the trainer if nobody lives, and if somebody does again."""
        for place, own in enumerate(self.names):
            if self.holders[place] in self.workers:
                continue
            self.holders[place] = None
            ready_workers = [
                name for name, worker in self.workers.items() if worker.version >= 0 and name not in self.holders
            ]
            if own in ready_workers:
                self.holders[place] = own
            elif (
                own in self.lost_names
                or own in self.holders
                or own not in self.workers
                and self.current_time - self.start_time > self.timeout
            ):
                # A worker whose own place is vacant takes that one.
                candidates = [
                    n
                    for n in (*self.spares, *self.names)
                    if n in ready_workers and (n in self.spares or self.holders[self.names.index(n)] is not None)
                ]
                self.holders[place] = candidates[0] if candidates else None
        is_expected = self.lost_names or self.workers or self.current_time - self.start_time > self.timeout
        if "trainer" not in self.epochs or not is_expected or self.alone == (not self.workers):
            return []
        self.alone = not self.workers
        return [("trainer", Workers(len(self.workers)))]

    def _take(self) -> tuple[int, ...] | None:
        num_events = len(self.life.journal)
        step_groups = self.life.take()
        for event in self.life.journal[num_events:]:  # groups that were too old
            self.write({"kind": event.kind, "groups": list(event.groups), "version": event.version})
        return step_groups

    def _drop_old(self) -> Outbox:
        """Groups whose first token will be too old at the next step are not played to their end."""
        outbox: Outbox = []
        for name, worker in self.workers.items():
            # Eq. 2 (ref/async_rl.py): age v − u above S.
            old_groups = sorted(
                group for group in worker.running if self.life.version - self.since[group] > self.rules.staleness
            )
            for group in old_groups:
                self._note(Event("drop", (group,), self.life.version))
                worker.running.discard(group)
            if old_groups:
                outbox.append((name, Forget(tuple(old_groups))))
        return outbox

    def _assign(self) -> Outbox:
        assignments: dict[str, list[int]] = {}
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
            assignments.setdefault(name, []).append(group)
        return [(name, Work(tuple(groups))) for name, groups in assignments.items()]

    def _player(self, group: int) -> str | None:
        """The worker that is to play a group: one with a place, with room and with weights that are young enough, the
        least busy one."""
        places = self.holders
        if self.rules.staleness == 0:
            places = [places[group % self.rules.groups * len(places) // self.rules.groups]]
        player_candidates = []
        for name in places:
            worker = self.workers.get(name) if name is not None else None
            if (
                worker is None
                or len(worker.running) >= worker.groups
                or worker.version < self.life.version - self.rules.staleness
            ):
                continue
            if self._suspect(group) and any(map(self._suspect, worker.running)):
                continue
            player_candidates.append((len(worker.running) / worker.groups, name))
        return min(player_candidates)[1] if player_candidates else None

    def _suspect(self, group: int) -> bool:
        """Whether a group is dropped if it is lost once more. A worker has one of them at a time, so that none is
        dropped for another's fault."""
        return self.losses[group] >= self.tries - 1
