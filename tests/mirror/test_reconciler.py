"""The reconciler in virtual time: workers, trainer and the reconciler itself die, freeze and come back at any moment,
and messages are lost with them. No group older than the bound is trained on, none twice, none is lost, and the run
ends."""

import heapq
import itertools
import random
from collections import Counter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ref.async_rl import Rules
from scaled.async_rl.messages import (
    KINDS,
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
    decode,
    encode,
)
from scaled.async_rl.reconciler import Reconciler
from tests.ref.test_async_rl import audit

TIMEOUT = 5.0


class Clock:
    def __init__(self):
        self.now, self.heap, self.order = 0.0, [], itertools.count()

    def at(self, delay, what):
        heapq.heappush(self.heap, (self.now + delay, next(self.order), what))


class Client:
    """A process with a first-in first-out connection each way. `alive` processes hear; frozen ones hear and speak
    later."""

    def __init__(self, town, name, epoch):
        self.town, self.name, self.epoch, self.alive, self.frozen, self.last = town, name, epoch, True, 0.0, 0.0
        self.line = 0  # how often its connection has ended

    def later(self, delay, what):
        """Do something unless this process is dead by then; a frozen one does it when it wakes up."""

        def run():
            if not self.alive:
                return
            if self.frozen > self.town.clock.now:
                self.town.clock.at(self.frozen - self.town.clock.now, run)
                return
            what()

        self.town.clock.at(delay, run)

    def say(self, message):
        self.last = max(self.last, self.town.clock.now + self.town.rng.random() * 0.1)
        line = self.town.generation, self.line
        self.town.clock.at(self.last - self.town.clock.now, lambda: self.town.hear(self, message, line))


class Player(Client):
    def __init__(self, town, name, epoch):
        super().__init__(town, name, epoch)
        self.version, self.running, self.done = -1, {}, {}
        self.connect()
        self.beat()

    def connect(self):
        groups = {**self.running, **{group: done.oldest for group, done in self.done.items()}}
        self.say(Hello(self.name, self.epoch, self.town.room, self.version, tuple(groups), tuple(groups.values())))
        for done in self.done.values():
            self.say(done)

    def beat(self):
        self.say(Beat(self.name, self.epoch))
        self.later(1.0, self.beat)

    def hear(self, message):
        if isinstance(message, Work):
            for group in message.groups:
                assert self.version >= 0 and group not in self.running
                self.running[group] = self.version
                self.done.pop(group, None)
                self.later(self.town.rng.lognormvariate(0.0, 1.2), lambda group=group: self.finish(group))
        elif isinstance(message, Forget):
            for group in message.groups:
                self.running.pop(group, None)
                self.done.pop(group, None)
        elif isinstance(message, Update) and message.version > self.version:
            self.later(self.town.rng.random(), lambda: self.load(message.version))
        elif isinstance(message, Refused):
            self.town.kill(self)
        elif isinstance(message, Stop):
            self.town.stopped.add(self.name)

    def load(self, version):
        assert version <= self.town.published  # nothing else is in the store
        if version > self.version:
            self.version = version
            self.say(Loaded(self.name, self.epoch, version))

    def finish(self, group):
        if group in self.running:
            oldest = self.running.pop(group)
            self.done[group] = Done(self.name, self.epoch, group, oldest, f"{group}-{self.name}-{self.epoch}", "")
            self.say(self.done[group])


class Learner(Client):
    """It publishes a version beside the next step, and the one before must be there first."""

    def __init__(self, town, name, epoch):
        super().__init__(town, name, epoch)
        self.busy, town.published = False, town.saved[0]
        self.connect()

    def connect(self):
        if not self.busy:
            self.say(Ready(self.name, self.epoch, *self.town.saved))
        self.say(Published(self.name, self.epoch, self.town.published))

    def hear(self, message):
        if isinstance(message, Batch) and not self.busy and message.version == self.town.saved[0]:
            self.busy = True
            assert all(int(key.split("-")[0]) == group for key, group in zip(message.keys, message.groups, strict=True))
            self.later(self.town.rng.random() * 2, lambda: self.save(message))
        elif isinstance(message, Refused):
            self.town.kill(self)
        elif isinstance(message, Stop):
            self.town.stopped.add(self.name)

    def save(self, batch):
        self.town.saved = batch.version + 1, batch.groups
        self.town.steps.append(batch.groups)
        self.later(self.town.rng.random() * 0.2, lambda: self.tell(batch))

    def publish(self, version):
        self.town.published = version
        self.say(Published(self.name, self.epoch, version))

    def tell(self, batch):
        if self.town.published < batch.version:
            self.later(0.1, lambda: self.tell(batch))
            return
        self.later(self.town.rng.random() * 3, lambda: self.publish(batch.version + 1))
        self.busy = False
        self.say(Trained(self.name, self.epoch, batch.version, batch.groups))
        self.connect()


class Town:
    """Everyone, and a supervisor that starts anew whoever ended, with the next epoch."""

    def __init__(self, rules, workers, room, seed, faults, spares=0):
        self.rules, self.room, self.rng, self.clock, self.faults = rules, room, random.Random(seed), Clock(), faults
        self.names, self.spares = [f"worker-{n}" for n in range(workers)], [f"standby-{n}" for n in range(spares)]
        self.lines, self.saved, self.steps, self.stopped, self.generation = [], (0, ()), [], set(), 0
        self.published = -1
        self.epochs, self.clients, self.lines_to, self.reconciler = Counter(), {}, {}, None
        self.rise()
        for name in [*self.names, *self.spares, "trainer"]:
            self.start(name)

    def start(self, name):
        self.clients[name] = (Learner if name == "trainer" else Player)(self, name, self.epochs[name])
        self.epochs[name] += 1

    def kill(self, client):
        if client.alive:
            client.alive = False
            self.clock.at(self.rng.random() * 0.2, lambda: self.hang_up(client))
            if self.clients[client.name] is client:
                self.clock.at(self.rng.random() * 3, lambda: self.start(client.name))

    def hang_up(self, client):
        """The reconciler sees that a connection has ended."""
        if self.reconciler is not None and self.lines_to.get(client.name) is client:
            del self.lines_to[client.name]
            self.send(self.reconciler.hung_up(client.name, self.clock.now))

    def rise(self):
        lines = [dict(line) for line in self.lines]
        self.reconciler = Reconciler(
            self.rules, self.names, self.lines.append, lines, TIMEOUT, self.clock.now, self.spares
        )
        self.lines_to = {}
        self.generation += 1
        for client in self.clients.values():
            client.later(self.rng.random(), lambda client=client: client.connect())
        self.tick(self.reconciler)

    def tick(self, mine):
        if self.reconciler is mine:
            self.send(mine.tick(self.clock.now))
            self.clock.at(TIMEOUT / 4, lambda: self.tick(mine))

    def hear(self, client, message, line):
        if self.reconciler is not None and line == (self.generation, client.line):
            if isinstance(message, (Hello, Ready)) and client.epoch >= self.reconciler.epochs.get(client.name, 0):
                self.lines_to[client.name] = client  # answers go to whoever spoke last, as along a connection
            self.send(self.reconciler.handle(decode(encode(message)), self.clock.now), client)

    def send(self, sent, speaker=None):
        for name, message in sent:
            client = speaker if isinstance(message, Refused) else self.lines_to.get(name)
            if client is None:
                continue  # it has hung up
            delay = max(client.__dict__.get("heard", 0.0), self.clock.now + self.rng.random() * 0.1)
            client.heard = delay
            client.later(
                delay - self.clock.now, lambda client=client, message=message: client.hear(decode(encode(message)))
            )

    def fault(self):
        kind = self.rng.choice(
            ["worker", "worker", "trainer", "reconciler", "freeze", "all workers", "connection", "stuck"]
        )
        if kind == "reconciler" and self.reconciler is not None:
            self.reconciler = None
            self.clock.at(self.rng.random() * 8, self.rise)
        elif kind == "freeze":
            client = self.clients[self.rng.choice([*self.names, *self.spares])]
            client.frozen = self.clock.now + self.rng.random() * 4 * TIMEOUT
        elif kind == "connection":
            client = self.clients[self.rng.choice([*self.names, *self.spares])]
            client.line += 1
            self.hang_up(client)
            client.later(self.rng.random(), client.connect)
        elif kind == "stuck":
            client = self.clients[self.rng.choice(self.names)]
            client.later(0.0, lambda: client.say(LoadFailed(client.name, client.epoch, self.published)))
        elif kind == "all workers":
            for name in [*self.names, *self.spares]:
                self.kill(self.clients[name])
        elif kind != "reconciler":
            self.kill(self.clients["trainer" if kind == "trainer" else self.rng.choice([*self.names, *self.spares])])

    def play(self, most=4000.0):
        for _ in range(self.faults):
            self.clock.at(self.rng.random() * 60, self.fault)
        everyone = {*self.names, *self.spares, "trainer"}
        while self.clock.heap and not (self.saved[0] == self.rules.steps and self.stopped >= everyone):
            self.clock.now, _, what = heapq.heappop(self.clock.heap)
            assert self.clock.now < most, "the run does not end"
            what()
        return self


@settings(max_examples=200)
@given(
    st.integers(0, 2**32),
    st.integers(1, 4),
    st.integers(0, 3),
    st.integers(1, 6),
    st.integers(1, 3),
    st.integers(1, 5),
    st.integers(0, 12),
    st.integers(0, 2),
)
@example(0, 2, 0, 3, 2, 2, 0, 1)
@example(872972, 1, 2, 2, 1, 1, 5, 0)  # a successor says hello before its predecessor's connection ends
def test_whatever_dies(seed, groups, staleness, steps, workers, room, faults, spares):
    rules = Rules(groups, staleness, steps)
    town = Town(rules, workers, room, seed, faults, spares).play()
    assert faults or not any("standby" in line.get("key", "") for line in town.lines)
    events = Reconciler(rules, town.names, list().append, town.lines).life.journal
    counts, version = audit(rules, events)
    assert version == steps == len(town.steps) == town.published and counts["trained"] == steps * groups
    assert counts["running"] == counts["ready"] == 0 and set(counts) <= {"trained", "dropped"}
    # The journal's steps are the trainer's, and no group was trained on twice.
    assert [event.groups for event in events if event.kind == "train"] == town.steps
    assert len(set(itertools.chain(*town.steps))) == steps * groups


def test_without_staleness_each_worker_has_its_block():
    """S = 0, two workers, four groups: two each, in every step, in one message, and none before the new weights are
    there."""
    rules, lines = Rules(4, 0, 2), []
    r = Reconciler(rules, ["a", "b"], lines.append)
    r.handle(Ready("trainer", 0, 0), 0.0)
    for name in "ab":
        r.handle(Hello(name, 0, 4, -1), 0.0)
    assert r.handle(Loaded("a", 0, 0), 0.0) == [("a", Work((0, 1)))]
    assert r.handle(Loaded("b", 0, 0), 0.0) == [("b", Work((2, 3)))]
    for name, group in zip("bbaa", (3, 2, 1, 0), strict=True):
        sent = r.handle(Done(name, 0, group, 0, f"k{group}", "d"), 1.0)
    assert sent == [("trainer", Batch(0, (0, 1, 2, 3), ("k0", "k1", "k2", "k3"), ("d",) * 4))]
    assert r.handle(Trained("trainer", 0, 0, (0, 1, 2, 3)), 2.0) == []
    assert r.handle(Published("trainer", 0, 1), 2.0) == [("a", Update(1)), ("b", Update(1))]
    assert r.handle(Loaded("a", 0, 1), 3.0) == [("a", Work((4, 5)))]
    assert r.handle(Loaded("b", 0, 1), 3.0) == [("b", Work((6, 7)))]


def test_a_zombie_is_refused_and_its_groups_are_played_by_others():
    lines = []
    r = Reconciler(Rules(2, 1, 2), ["a", "b"], lines.append, timeout=5.0)
    r.handle(Hello("a", 0, 4, 0), 0.0)
    assert r.life.count("running") == 4 and r.workers["a"].running == {0, 1, 2, 3}
    r.handle(Hello("b", 0, 4, 0), 4.0)
    sent = r.tick(6.0)
    assert sent == [("b", Work((0, 1, 2, 3)))]
    ((name, refused),) = r.handle(Done("a", 0, 0, 0, "k", "d"), 6.0)
    assert isinstance(refused, Refused) and name == "a" and "epoch 0 of a is over" in refused.reason
    assert [line["kind"] for line in lines] == ["start"] * 4  # nothing was lost, and nothing started twice
    assert r.handle(Done("b", 0, 0, 0, "k", "d"), 6.0) == [] and r.life.state[0] == "ready"
    assert r.handle(Done("b", 0, 0, 0, "k", "d"), 6.0) == []  # said twice


def test_a_step_that_was_saved_but_not_told_is_noted():
    lines = []
    r = Reconciler(Rules(1, 0, 3), ["a"], lines.append)
    r.handle(Hello("a", 0, 1, 0), 0.0)
    r.handle(Done("a", 0, 0, 0, "k", "d"), 0.0)
    assert r.handle(Ready("trainer", 0, 0), 0.0) == [("trainer", Batch(0, (0,), ("k",), ("d",)))]
    again = Reconciler(Rules(1, 0, 3), ["a"], lines.append, list(lines))
    assert again.handle(Ready("trainer", 1, 1, (0,)), 0.0) == [] and again.life.version == 1
    ((_, refused),) = again.handle(Ready("trainer", 1, 5, (0,)), 0.0)
    assert isinstance(refused, Refused) and "the journal has 1 steps, the trainer 5" in refused.reason
    assert again.handle(Trained("trainer", 1, 0, (0,)), 0.0) == []  # said late


def test_nobody_loads_what_is_not_published():
    """Before the trainer has said that weights are there, a worker does without; those of one step are there once the
    next one is noted."""
    lines = []
    r = Reconciler(Rules(1, 1, 3), ["a", "b"], lines.append)
    assert r.handle(Hello("a", 0, 1, -1), 0.0) == [] and r.life.state == {}
    assert r.handle(Ready("trainer", 0, 0), 0.0) == []
    assert r.handle(Published("trainer", 0, 0), 0.0) == [("a", Update(0))]
    assert r.handle(Published("trainer", 0, 0), 0.0) == []  # said twice
    assert r.handle(Hello("b", 0, 1, -1), 0.0) == [("b", Update(0))]
    assert r.handle(Loaded("a", 0, 0), 0.0) == [("a", Work((0,)))]
    again = Reconciler(Rules(1, 1, 3), ["a", "b"], lines.append, [dict(line) for line in lines])
    assert again.handle(Hello("a", 0, 1, 0, (0,), (0,)), 0.0) == []  # at version 0 the trainer must say it again
    again.handle(Done("a", 0, 0, 0, "k", "d"), 0.0)
    again.handle(Ready("trainer", 0, 1, (0,)), 0.0)
    third = Reconciler(Rules(1, 1, 3), ["a", "b"], lines.append, [dict(line) for line in lines])
    assert third.life.version == 1 and third.handle(Hello("a", 0, 1, -1), 0.0) == [("a", Update(0))]
    assert third.handle(Published("trainer", 0, 1), 0.0) == [("a", Update(1))]


def test_after_the_last_step_everyone_is_stopped():
    r = Reconciler(Rules(1, 2, 1), ["a"], list().append)
    r.handle(Hello("a", 0, 9, 0), 0.0)
    assert r.life.count("running") == 1  # no group that no step needs
    r.handle(Done("a", 0, 0, 0, "k", "d"), 0.0)
    r.handle(Ready("trainer", 0, 0), 0.0)
    assert ("a", Stop()) in r.handle(Trained("trainer", 0, 0, (0,)), 0.0)
    assert r.handle(Ready("trainer", 0, 1, (0,)), 0.0) == [("a", Stop())]  # it has the last weights on their way
    assert r.handle(Published("trainer", 0, 1), 0.0) == [("a", Update(1)), ("a", Stop()), ("trainer", Stop())]


@given(st.sampled_from(sorted(KINDS)), st.data())
def test_messages_travel(kind, data):
    from dataclasses import fields

    some = {"str": st.text(), "int": st.integers(-1, 2**63), "tuple[int, ...]": st.lists(st.integers(0, 99)).map(tuple)}
    some["tuple[str, ...]"] = st.lists(st.text()).map(tuple)
    message = KINDS[kind](**{field.name: data.draw(some[str(field.type)]) for field in fields(KINDS[kind])})
    assert decode(encode(message)) == message


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{",
        b"\xff",
        b"[" * 100_000,
        b'{"kind": "Nothing"}',
        b'{"kind": "Update"}',
        b'{"kind": "Update", "version": "1"}',
        b'{"kind": "Update", "version": true}',
        b'{"kind": "Update", "version": 1, "more": 2}',
        b'{"kind": "Work", "groups": [1, "2"]}',
        b'{"kind": ["Work"]}',
        b'"Work"',
        b"3",
        b"null",
    ],
)
def test_what_is_no_message(data):
    with pytest.raises(ValueError):
        decode(data)


def test_a_journal_that_contradicts_itself_is_refused():
    with pytest.raises(ValueError, match="group 0 must be running; it is unknown"):
        Reconciler(
            Rules(), ["a"], list().append, [{"kind": "ready", "groups": [0], "version": 0, "key": "k", "digest": "d"}]
        )


def test_what_nobody_plays_is_played_anew_once_all_workers_have_spoken():
    """A run that goes on after an interruption does not wait for the time-out."""
    lines = []
    r = Reconciler(Rules(4, 0, 1), ["a", "b"], lines.append)
    r.handle(Hello("a", 0, 2, 0), 0.0)
    r.handle(Hello("b", 0, 2, 0), 0.0)
    again = Reconciler(Rules(4, 0, 1), ["a", "b"], lines.append, list(lines))
    assert again.handle(Hello("a", 0, 2, 0, (0,), (0,)), 0.1) == []  # b may claim group 1
    assert again.handle(Hello("b", 1, 2, 0), 0.2) == [("a", Work((1,))), ("b", Work((2, 3)))]


def test_what_a_worker_says_that_another_has_taken_over_it_forgets():
    lines = []
    r = Reconciler(Rules(2, 0, 1), ["a", "b"], lines.append)
    r.handle(Hello("a", 0, 2, 0), 0.0)
    r.handle(Done("a", 0, 0, 0, "k", "d"), 0.0)
    again = Reconciler(Rules(2, 0, 1), ["a", "b"], lines.append, list(lines))
    assert again.handle(Hello("a", 0, 2, 0, (0,), (0,)), 0.0) == [("a", Forget((0,)))]


def test_what_will_be_too_old_is_not_played_to_its_end():
    r = Reconciler(Rules(1, 1, 5), ["a", "b"], list().append)
    r.handle(Hello("a", 0, 1, 0), 0.0)
    r.handle(Hello("b", 0, 1, 0), 0.0)
    assert r.since == {0: 0, 1: 0}
    r.handle(Ready("trainer", 0, 0), 0.0)
    for step, group in enumerate((1, 2)):
        sent = r.handle(Done("b", 0, group, step, f"k{group}", "d"), 0.0)
        assert sent[0] == ("trainer", Batch(step, (group,), (f"k{group}",), ("d",)))
        sent = r.handle(Trained("trainer", 0, step, (group,)), 0.0)
        r.handle(Loaded("b", 0, step + 1), 0.0)
        r.handle(Ready("trainer", 0, step + 1, (group,)), 0.0)
    assert ("a", Forget((0,))) in sent and r.life.state[0] == "dropped" and 0 not in r.workers["a"].running


def test_the_trainer_waits_until_it_has_a_batch_and_has_it_once():
    r = Reconciler(Rules(1, 1, 3), ["a"], list().append)
    r.handle(Hello("a", 0, 4, 0), 0.0)
    r.handle(Done("a", 0, 0, 0, "k0", "d"), 0.0)
    r.handle(Ready("trainer", 0, 0), 0.0)
    r.handle(Trained("trainer", 0, 0, (0,)), 0.0)
    r.handle(Ready("trainer", 0, 1, (0,)), 0.0)
    r.handle(Trained("trainer", 0, 0, (0,)), 0.0)  # said late
    assert r.handle(Done("a", 0, 1, 0, "k1", "d"), 0.0) == [("trainer", Batch(1, (1,), ("k1",), ("d",)))]
    assert r.handle(Beat("a", 0), 0.0) == []
    assert r.handle(Ready("trainer", 0, 1, (0,)), 0.0) == [
        ("trainer", Batch(1, (1,), ("k1",), ("d",)))
    ]  # asked again: the same


def test_a_group_is_lost_as_often_as_is_allowed_and_then_dropped():
    """Twice it is played anew, by whoever is there. The third loss is the last one, and the next group takes its
    place."""
    lines = []
    r = Reconciler(Rules(1, 0, 2), ["a"], lines.append, tries=3)
    for epoch in range(3):
        assert r.handle(Hello("a", epoch, 1, 0), float(epoch)) == [("a", Work((0,)))]
        assert r.hung_up("a", epoch + 0.5) == [] and r.losses[0] == epoch + 1
    assert [(line["kind"], line["groups"]) for line in lines] == [("start", [0]), ("drop", [0])] and r.life.state[
        0
    ] == "dropped"
    assert r.handle(Hello("a", 3, 1, 0), 4.0) == [("a", Work((1,)))]


def test_of_groups_that_may_kill_a_worker_it_has_one_at_a_time():
    """Two groups were lost twice, with the same worker. If both were lost with it once more, one would be dropped for
    the other's fault."""
    r = Reconciler(Rules(2, 0, 1), ["a"], list().append, tries=3)
    for epoch in range(2):
        assert r.handle(Hello("a", epoch, 2, 0), float(epoch)) == [("a", Work((0, 1)))]
        r.hung_up("a", epoch + 0.5)
    assert r.handle(Hello("a", 2, 2, 0), 3.0) == [("a", Work((0,)))]
    r.hung_up("a", 3.5)
    assert r.life.state == {0: "dropped", 1: "running"}
    assert r.handle(Hello("a", 3, 2, 0), 4.0) == [("a", Work((1, 2)))]  # nobody suspects the new one


def test_a_successor_has_work_once_it_holds_weights():
    """Whoever comes in the place of a worker under its name holds none yet, whatever the one before held."""
    r = Reconciler(Rules(2, 1, 3), ["a", "b"], list().append)
    r.handle(Published("trainer", 0, 0), 0.0)
    r.handle(Hello("a", 0, 4, 0), 0.0)
    assert r.workers["a"].running == {0, 1, 2, 3}
    assert r.handle(Hello("a", 1, 4, -1), 1.0) == [("a", Update(0))] and not r.workers["a"].running
    assert r.handle(Loaded("a", 1, 0), 1.5) == [("a", Work((0, 1, 2, 3)))]


def test_a_version_that_cannot_be_loaded_is_published_anew_once_in_a_while():
    r = Reconciler(Rules(1, 2, 4), ["a", "b"], list().append, timeout=5.0)
    r.handle(Hello("a", 0, 1, -1), 0.0)
    r.handle(Hello("b", 0, 1, -1), 0.0)
    assert r.handle(LoadFailed("a", 0, 0), 0.0) == []  # nobody can be asked
    r.handle(Published("trainer", 0, 0), 0.0)
    r.handle(Published("trainer", 0, 1), 0.5)
    assert r.handle(LoadFailed("a", 0, 0), 1.0) == []  # a newer one is there
    assert r.handle(LoadFailed("a", 0, 1), 1.0) == [("trainer", Repair(1))]
    assert r.handle(LoadFailed("b", 0, 1), 2.0) == [] == r.handle(LoadFailed("a", 0, 1), 5.9)
    assert r.handle(LoadFailed("b", 0, 1), 6.0) == [("trainer", Repair(1))]


def test_a_group_that_another_worker_has_taken_over_is_that_one_s():
    """The first one lost its connection only, and comes back with the group finished, or before it has heard that it is
    no more its own."""
    r = Reconciler(Rules(1, 1, 3), ["a", "b"], list().append)
    r.handle(Hello("a", 0, 1, 0), 0.0)
    assert r.handle(Hello("b", 0, 2, 0), 0.0) == [("b", Work((1,)))]
    assert r.hung_up("a", 1.0) == [("b", Work((0,)))]
    assert r.handle(Hello("a", 0, 1, 0, (0,), (0,)), 1.5) == [("a", Forget((0,)))]
    assert r.handle(Done("a", 0, 0, 0, "of a", "d"), 1.5) == [] and r.life.state[0] == "running"
    assert r.handle(Done("b", 0, 0, 0, "of b", "d"), 2.0) == [] and r.records == {0: ("of b", "d")}


def test_a_new_trainer_hears_that_nobody_works():
    """Once, and once that somebody does again; the one before had been told, and is gone."""
    r = Reconciler(Rules(1, 0, 1), ["a"], list().append)
    r.handle(Ready("trainer", 0, 0), 0.0)
    r.handle(Hello("a", 0, 1, -1), 0.0)
    assert r.hung_up("a", 1.0) == [("trainer", Workers(0))] and r.tick(1.5) == []
    assert r.handle(Ready("trainer", 1, 0), 2.0) == [("trainer", Workers(0))] and r.tick(2.5) == []
    assert r.handle(Hello("a", 1, 1, -1), 3.0) == [("trainer", Workers(1))] and r.tick(3.5) == []


def test_a_group_that_a_worker_no_longer_claims_is_played_anew():
    """It says hello again as the same process, and its line was never seen to end."""
    r = Reconciler(Rules(2, 0, 1), ["a"], list().append)
    assert r.handle(Hello("a", 0, 2, 0), 0.0) == [("a", Work((0, 1)))]
    assert r.handle(Hello("a", 0, 2, 0, (1,), (0,)), 1.0) == [("a", Work((0,)))] and r.workers["a"].running == {0, 1}


def test_a_group_is_as_old_as_the_weights_of_the_worker_that_began_it():
    """Not as the step at which it began: after one more step it is too old, and is given up."""
    r = Reconciler(Rules(1, 1, 4), ["a", "b"], list().append)
    r.handle(Hello("a", 0, 1, 0), 0.0)
    r.handle(Hello("b", 0, 1, 0), 0.0)
    r.handle(Ready("trainer", 0, 0), 0.0)
    r.handle(Done("a", 0, 0, 0, "k0", "d"), 0.0)
    assert r.handle(Trained("trainer", 0, 0, (0,)), 1.0) == [("a", Work((2,)))] and r.since[2] == 0
    r.handle(Ready("trainer", 0, 1, (0,)), 1.0)
    r.handle(Done("b", 0, 1, 0, "k1", "d"), 1.0)
    sent = r.handle(Trained("trainer", 0, 1, (1,)), 2.0)
    assert ("a", Forget((2,))) in sent and r.life.state[2] == "dropped"


def test_of_two_workers_the_one_with_more_room_left_is_given_the_group():
    """One of two seats is taken here, two of ten there."""
    r = Reconciler(Rules(1, 3, 9), ["a", "b"], list().append)
    assert r.handle(Hello("b", 0, 2, 0), 0.0) == [("b", Work((0, 1)))]
    assert r.handle(Hello("a", 0, 10, 0), 0.0) == [("a", Work((2, 3)))]
    r.handle(Done("b", 0, 0, 0, "k", "d"), 0.0)
    r.handle(Ready("trainer", 0, 0), 0.0)
    assert r.handle(Trained("trainer", 0, 0, (0,)), 1.0) == [("a", Work((4,)))]


def test_a_worker_that_speaks_is_alive_and_one_that_is_silent_is_named_once():
    r = Reconciler(Rules(1, 0, 1), ["a", "b"], list().append, timeout=5.0)
    r.handle(Hello("a", 0, 1, -1), 0.0)
    r.handle(Hello("b", 0, 1, -1), 0.0)
    r.handle(Beat("a", 0), 4.0)
    r.tick(5.0)
    assert not r.silent
    r.tick(5.1)
    assert r.silent == [("b", 0)] and [*r.workers] == ["a"]
    ((name, refused),) = r.handle(Beat("b", 0), 5.2)
    assert name == "b" and isinstance(refused, Refused)
    assert r.handle(Hello("b", 1, 1, -1), 5.3) == [] and set(r.workers) == {"a", "b"}
