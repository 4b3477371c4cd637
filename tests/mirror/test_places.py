"""The reconciler's places: spare workers, groups that are lost with their workers, and what the trainer is told of
both. By hand, in virtual time."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from ref.async_rl import Rules
from scaled.async_rl.messages import (
    Beat,
    Done,
    Hello,
    Loaded,
    LoadFailed,
    Published,
    Ready,
    Repair,
    Trained,
    Update,
    Work,
    Workers,
)
from scaled.async_rl.reconciler import Reconciler


def test_a_spare_takes_the_place_of_a_worker_that_is_lost():
    """And keeps it: the worker that comes back is the next spare."""
    r = Reconciler(Rules(2, 1, 9), ["a", "b"], list().append, spares=["s"])
    for name in "asb":
        r.handle(Hello(name, 0, 2, 0), 0.0)
    assert r.holders == ["a", "b"] and [r.workers[name].running for name in "abs"] == [{0, 1}, {2, 3}, set()]
    assert r.hung_up("a", 1.0) == [("s", Work((0, 1)))] and r.holders == ["s", "b"]
    assert (
        r.handle(Hello("a", 1, 2, -1), 1.0) == [] and r.handle(Loaded("a", 1, 0), 1.0) == [] and r.holders == ["s", "b"]
    )
    assert r.hung_up("b", 2.0) == [("a", Work((2, 3)))] and r.holders == ["s", "a"]
    assert r.hung_up("s", 2.0) == [] and r.holders == [None, "a"]
    r.handle(Hello("b", 1, 2, 0), 3.0)
    assert r.holders == ["b", "a"] and r.workers["b"].running == {0}  # lost twice: one such group at a time


def test_a_spare_plays_nothing_before_it_holds_weights_or_before_somebody_is_missing():
    r = Reconciler(Rules(2, 1, 9), ["a"], list().append, timeout=5.0, spares=["s"])
    r.handle(Hello("s", 0, 2, 0), 0.0)
    r.handle(Beat("s", 0), 4.0)
    assert r.holders == [None] and r.tick(5.0) == []  # the worker itself may still come
    assert r.tick(5.1) == [("s", Work((0, 1)))]
    r = Reconciler(Rules(2, 1, 9), ["a"], list().append, timeout=5.0, spares=["s"])
    r.handle(Hello("a", 0, 2, 0), 0.0)
    r.handle(Hello("s", 0, 2, -1), 0.0)
    assert r.hung_up("a", 1.0) == [] and r.handle(Loaded("s", 0, 0), 1.0) == [("s", Work((0, 1)))]


def test_the_trainer_knows_within_one_timeout_that_nobody_lives():
    r = Reconciler(Rules(4, 1, 9), ["a", "b"], list().append, timeout=5.0)
    r.handle(Ready("trainer", 0, 0), 0.0)
    assert ("trainer", Workers(0)) not in r.tick(5.0) and r.tick(5.1) == [("trainer", Workers(0))] and r.tick(5.2) == []
    assert ("trainer", Workers(1)) in r.handle(Hello("a", 0, 4, -1), 6.0)
    r.handle(Hello("b", 0, 4, -1), 6.0)
    r.handle(Beat("a", 0), 9.0)
    assert r.hung_up("a", 9.5) == [] and r.tick(11.0) == []
    assert r.tick(11.1) == [("trainer", Workers(0))] and r.silent == [("b", 0)]  # b was silent since 6.0
    assert ("trainer", Workers(0)) in r.handle(
        Ready("trainer", 1, 0), 12.0
    )  # another process, which must be told again


def test_a_group_that_takes_its_workers_with_it_is_dropped():
    """Three workers die of group 0; it is given up, and the others are trained on."""
    lines = []
    r = Reconciler(Rules(1, 0, 9), ["a"], lines.append)
    for epoch in range(3):
        r.handle(Hello("a", epoch, 1, 0), 0.0)
        assert r.workers["a"].running == {0}
        r.hung_up("a", 0.0)
    assert lines[-1] == {"kind": "drop", "groups": [0], "version": 0}
    r.handle(Hello("a", 3, 1, 0), 0.0)
    assert r.workers["a"].running == {1}


@given(st.integers(0, 5), st.integers(1, 3), st.integers(1, 4), st.integers(0, 2))
def test_a_group_that_kills_is_dropped_alone(killer, workers, room, staleness):
    """Whoever plays it dies, with all other groups that it plays; none of those is given up."""
    r = Reconciler(Rules(2, staleness, 9), names := [f"w{n}" for n in range(workers)], list().append)
    epochs, dropped = Counter(), []
    for name in names:
        r.handle(Hello(name, 0, room, 0), 0.0)
    r.handle(Ready("trainer", 0, 0), 0.0)
    for _ in range(200):
        for name in names:
            if killer in r.workers[name].running:
                before = len(r.life.journal)
                r.hung_up(name, 0.0)
                dropped += [event.groups for event in r.life.journal[before:] if event.kind == "drop"]
                epochs[name] += 1
                r.handle(Hello(name, epochs[name], room, r.life.version), 0.0)
            elif running := sorted(r.workers[name].running):
                r.handle(Done(name, epochs[name], running[-1], r.since[running[-1]], "k", "d"), 0.0)
        if r.batch is not None and not r.waits:
            version = r.life.version
            r.handle(Trained("trainer", 0, version, r.batch), 0.0)
            for name in names:
                r.handle(Loaded(name, epochs[name], version + 1), 0.0)
            r.handle(Ready("trainer", 0, version + 1, r.life.journal[-1].groups), 0.0)
    assert r.life.over and set(dropped) <= {(killer,)} and r.life.state[killer] == "dropped"


def test_a_version_that_cannot_be_loaded_is_asked_for_anew_once_in_a_while():
    r = Reconciler(Rules(1, 1, 9), ["a", "b"], list().append, timeout=5.0)
    r.handle(Hello("a", 0, 1, -1), 0.0)
    assert r.handle(LoadFailed("a", 0, 0), 0.0) == []  # nobody is there to ask
    r.handle(Published("trainer", 0, 0), 0.0)
    assert r.handle(LoadFailed("a", 0, 0), 1.0) == [("trainer", Repair(0))]
    assert r.handle(LoadFailed("a", 0, 0), 3.0) == [] and r.handle(LoadFailed("a", 0, 0), 6.0) == [
        ("trainer", Repair(0))
    ]
    assert r.handle(LoadFailed("a", 0, 7), 20.0) == []  # not this version


def test_a_successor_gets_no_work_before_it_holds_weights():
    """Its hello comes before the connection of its predecessor ends. Version −1 would be young enough for S = 2 at
    version 1."""
    r = Reconciler(Rules(1, 2, 9), ["a"], list().append)
    r.handle(Hello("a", 0, 1, 0), 0.0)
    r.handle(Done("a", 0, 0, 0, "k", "d"), 0.0)
    r.handle(Ready("trainer", 0, 1, (0,)), 0.0)
    assert r.life.version == 1 and r.workers["a"].running == {1}
    r.handle(Published("trainer", 0, 1), 0.0)
    assert r.handle(Hello("a", 1, 1, -1), 0.0) == [("a", Update(1))] and r.holders == [None]
    assert r.handle(Loaded("a", 1, 1), 0.0) == [("a", Work((1,)))]
