"""Asynchronous RL with processes: the synchronous loop where nothing may be stale, and a run that replays whoever was
killed."""

import contextlib
import itertools
import json
import os
import random
import signal
import threading

import pytest
import torch

from kit.disk import read_lines
from ref.async_rl import Event, Rules
from scaled.async_rl import services
from scaled.async_rl.local import Plan, play
from tests.mirror.async_parts import Tiny, check_watched, synchronous, watched
from tests.ref.test_async_rl import audit


def weights(learner):
    return [p.detach().clone() for p in learner.masters.masters.parameters()]


def events(folder):
    return [
        Event(line["kind"], tuple(line["groups"]), line["version"]) for line in read_lines(folder / "journal.jsonl")
    ]


def trained(folder, parts, store=""):
    """The weights that the trainer saved last, and those that come out when its recorded groups are trained on
    again."""
    learner = parts.learner()
    version, groups = services.restored(folder / "trainer", learner)
    again = parts.learner()
    torch.set_num_threads(1)
    assert services.replay(folder, again, store) == version
    return weights(learner), weights(again), version, groups


def check_synchronous(folder, workers, play):
    """n workers against a loop in this process whose conversations are played in the same n shares: weights after five
    steps, to the bit."""
    parts, rules, steps, said = Tiny(), Rules(4, 0, 5), [], []
    plan = Plan(folder, rules, parts, workers, slots=8, rollouts=2, watch=watched)
    play(plan, lambda step, figures: steps.append((step, figures)), say=said.append)
    mine, again, version, _ = trained(folder, parts)
    wanted = weights(synchronous(parts, rules, workers))
    assert version == 5 and [step for step, _ in steps] == [1, 2, 3, 4, 5]
    assert all(figures["distilled"] > 0 and "watch_length" in figures for _, figures in steps)
    assert said == check_watched(folder, 5)
    assert all(a.equal(b) and a.equal(c) for a, b, c in zip(mine, wanted, again, strict=True))
    assert not all(a.equal(b) for a, b in zip(mine, weights(parts.learner()), strict=True))
    counts, _ = audit(rules, events(folder))
    assert counts == {"trained": 20}


@pytest.mark.parametrize("workers", [1, 2])
def test_without_staleness_it_is_the_synchronous_loop(tmp_path, workers):
    check_synchronous(tmp_path, workers, play)


@pytest.mark.parametrize("kills, steps", [(8, 8), pytest.param(25, 40, marks=pytest.mark.faults)])
def test_whoever_is_killed_the_run_ends_and_replays(tmp_path, kills, steps):
    """Workers, trainer and reconciler are killed again and again, in flight and with slow tools: no group is older than
    the bound, none is trained on twice, and the journal replays to the same bits."""
    parts, rules, rng = Tiny(seconds=0.05, steps=steps), Rules(4, 2, steps), random.Random(kills)
    alive, killed, stop = {}, [], threading.Event()

    def killer():
        """A handle of a process cannot mean another one that has its number by now."""
        while not stop.wait(0.2 + rng.random()) and len(killed) < kills:
            name = rng.choice(["trainer", "reconciler", "worker-0", "worker-1"])
            with contextlib.suppress(KeyError, ProcessLookupError):
                signal.pidfd_send_signal(alive[name], signal.SIGKILL)
                killed.append(name)

    thread = threading.Thread(target=killer)
    thread.start()
    try:
        plan = Plan(tmp_path, rules, parts, 2, slots=6, rollouts=2, timeout=3.0, watch=watched)
        play(plan, started=lambda name, process: alive.__setitem__(name, os.pidfd_open(process.pid)))
    finally:
        stop.set()
        thread.join()
    mine, again, version, groups = trained(tmp_path, parts)
    assert version == steps and len(killed) > kills / 4 and all(a.equal(b) for a, b in zip(mine, again, strict=True))
    counts, _ = audit(rules, events(tmp_path))
    assert counts["trained"] == 4 * steps and set(counts) <= {"trained", "dropped"}
    check_watched(tmp_path, steps)
    trainings = [event.groups for event in events(tmp_path) if event.kind == "train"]
    assert trainings[-1] == groups and len(set(itertools.chain(*trainings))) == 4 * steps


def test_a_run_that_was_ended_goes_on(tmp_path):
    """All processes end after some steps, as at a power cut; the folder is played to its end."""
    parts, rules = Tiny(steps=6), Rules(4, 1, 6)

    class Cut(Exception):
        pass

    def cut(step, figures):
        if step == 3:
            raise Cut

    plan = Plan(tmp_path, rules, parts, 1, slots=8, rollouts=2, timeout=2.0, watch=watched)
    with pytest.raises(Cut):
        play(plan, cut)
    before = len(events(tmp_path))
    with open(tmp_path / "journal.jsonl", "a") as file:
        file.write('{"kind": "ready", "gro')  # a line that was being written
    steps = []
    play(plan, lambda step, figures: steps.append(step))
    check_watched(tmp_path, 6)
    mine, again, version, _ = trained(tmp_path, parts)
    assert version == 6 and steps[-1] == 6 and steps[0] >= 4 and len(events(tmp_path)) > before
    assert all(a.equal(b) for a, b in zip(mine, again, strict=True))
    audit(rules, events(tmp_path))
    assert {json.loads(line)["what"] for line in open(tmp_path / "events" / "worker-0.jsonl")} >= {
        "start",
        "load",
        "work",
        "done",
        "stop",
    }


def test_a_record_that_changed_is_not_trained_on(tmp_path):
    parts = Tiny(steps=1)
    play(Plan(tmp_path, Rules(4, 0, 1), parts, 1, slots=8, rollouts=2))
    path = min((tmp_path / "groups").iterdir())
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    with pytest.raises(ValueError, match="has changed since the worker wrote it"):
        services.replay(tmp_path, parts.learner())


def test_what_cannot_be_planned(tmp_path):
    with pytest.raises(ValueError, match="slots must be at least 4; got 3"):
        Plan(tmp_path, Rules(4, 0, 1), Tiny(), 2, slots=3, rollouts=2)
    with pytest.raises(ValueError, match="workers must be at least 1; got 0"):
        Plan(tmp_path, Rules(4, 1, 1), Tiny(), 0)
