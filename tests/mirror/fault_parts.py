"""Faults that strike inside a service, in a process that imports this file: once in a run, at a given place.

A fault is a function that changes what a process of some name does. It is armed when the process receives its plan.
"""

import functools
import multiprocessing
import os
import resource
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from kit.disk import Journal
from ref import weight_sync
from ref.engine.continuous import Continuous
from scaled.async_rl import services, worker
from scaled.async_rl.wire import Line
from scaled.runtime.store import Folder, StoreError
from tests.mirror.async_parts import Paid, Tiny


@dataclass(frozen=True)
class Faulty(Tiny):
    fault: str = ""
    mark: str = ""
    """The file that says that it has struck."""

    def __setstate__(self, state):
        self.__dict__.update(state)
        if self.fault:
            FAULTS[self.fault](Path(self.mark), multiprocessing.current_process().name)

    def tasks(self):
        return Hanging(self.seconds) if self.fault == "a task hangs" else super().tasks()

    def evaluate(self):
        return (lambda sampler: hang()) if self.fault == "measuring never ends" else super().evaluate()


@dataclass(frozen=True)
class Several(Tiny):
    """Faults that all strike in one run."""

    faults: tuple[str, ...] = ()
    folder: str = ""
    """Where each leaves its mark, under its number."""

    def __setstate__(self, state):
        self.__dict__.update(state)
        for n, fault in enumerate(self.faults):
            FAULTS[fault](Path(self.folder) / str(n), multiprocessing.current_process().name)


class Hanging(Paid):
    """The task of group 2 never comes, and holds up whoever asks."""

    def task(self, stream, number):
        if number == 2:
            hang()
        return super().task(stream, number)


def hang():
    time.sleep(1000)
    return 0.0


def once(mark):
    """Whether it has not happened yet."""
    try:
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
        return True
    except FileExistsError:
        return False


def die(mark):
    if once(mark):
        os.kill(os.getpid(), signal.SIGKILL)


def before(owner, name, then):
    """`then` is called with the arguments first."""
    call = getattr(owner, name)

    @functools.wraps(call)
    def changed(*args, **kwargs):
        then(*args, **kwargs)
        return call(*args, **kwargs)

    setattr(owner, name, changed)


def after(owner, name, then):
    call = getattr(owner, name)

    @functools.wraps(call)
    def changed(*args, **kwargs):
        found = call(*args, **kwargs)
        then(*args, **kwargs)
        return found

    setattr(owner, name, changed)


def trainer(arm):
    return lambda mark, name: arm(mark) if name == "trainer" else None


def reconciler(arm):
    return lambda mark, name: arm(mark) if name == "reconciler" else None


def one_worker(arm):
    return lambda mark, name: arm(mark) if name == "worker-0" else None


def half_a_line(mark):
    append = Journal.append

    def torn(self, entry):
        if b'"train"' in entry and once(mark):
            self.file.write(entry[: len(entry) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        append(self, entry)

    Journal.append = torn


def half_a_swap(mark):
    def swap(self):
        if self.staged_weights is not None and self.staged_weights[0] >= 2 and once(mark):
            for part, x in list(zip(self.parts, self.staged_weights[1], strict=True))[: len(self.parts) // 2]:
                part.weights.copy_(x.view(part.weights.shape))
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self)

    original, weight_sync.Reader.swap = weight_sync.Reader.swap, swap


def spoil(change):
    """The delta of version 2 is not what was written, for whoever reads it."""

    def arm(mark):
        def put(self, key, blob):
            told = original(self, key, blob)
            if key.startswith("00000002/delta"):
                once(mark)
                change(self.store, told["key"], blob)
            return told

        original, weight_sync.Writer.upload_shard = weight_sync.Writer.upload_shard, put

    return trainer(arm)


def small_disk(mark):
    """Nothing of more than a kilobyte fits while the file does not exist."""

    def full(saved, learner, version, groups):
        if version == 3 and once(mark):
            _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))

    before(services, "keep", full)


def down(what):
    """From when version 2 is saved until somebody deletes the file `mark`, the store does not answer for keys that lie
    below a folder `what`."""

    def arm(mark, name):
        def ask(self, *args):
            if mark.exists() and what in str(self.root):
                raise StoreError("the store is down")

        def go(saved, learner, version, groups):
            if version == 2 and once(mark.with_suffix(".once")):
                mark.touch()

        for method in ("__getitem__", "__setitem__", "__delitem__", "__iter__", "setdefault"):
            before(Folder, method, ask)
        if name == "trainer":
            before(services, "keep", go)

    return arm


def waiting(at, path, word):
    """The trainer waits with a version until a file holds a word."""

    def wait(saved, learner, version, groups):
        until = time.monotonic() + 120
        while version == at and word not in (path.read_text() if path.exists() else "nothing yet"):
            assert time.monotonic() < until
            time.sleep(0.02)

    before(services, "keep", wait)


def slow_store(mark):
    """It takes no version before the next step has begun."""
    events = mark.parent / "events" / "trainer.jsonl"

    def wait(self, key, blob):
        version, until = int(key[:8]), time.monotonic() + 60
        while version in (1, 2, 3) and f'"train", "version": {version}}}' not in events.read_text():
            assert time.monotonic() < until, "the step waits for the store"
            time.sleep(0.01)

    before(weight_sync.Writer, "upload_shard", wait)


def watched(mark, name):
    """Ends a worker whose weights change while its network computes."""
    step = Continuous.step

    def watch(self):
        was = [p.clone() for p in self.sampler.model.parameters()]
        found = step(self)
        assert all(a.equal(b) for a, b in zip(was, self.sampler.model.parameters(), strict=True))
        return found

    Continuous.step = watch


def often(mark, name):
    """An anchor every three versions."""
    weight_sync.Writer.__init__.__defaults__ = (3, 2, 1)


def the_evaluator_dies(mark, name):
    """Version 4 comes when version 2 has been measured; and the evaluator dies after its first measurement, once."""
    if name == "trainer":
        waiting(4, mark.parent / "events" / "evaluator.jsonl", '"evaluated", "version": 2')
    if name == "evaluator":
        after(services.Log, "__call__", lambda self, what, **facts: die(mark) if what == "evaluated" else None)


def measuring_never_ends(mark, name):
    """The trainer waits until a measurement has begun."""
    if name == "trainer":
        waiting(2, mark.parent / "events" / "evaluator.jsonl", '"load"')


def a_standby_is_needed(mark, name):
    """A worker dies in a rollout once the standby has weights, and before the last version comes."""
    standby = mark.parent / "events" / "standby-0.jsonl"
    if name == "trainer":
        waiting(4, mark, "")
    if name == "worker-0":
        before(
            Continuous,
            "step",
            lambda self: die(mark) if self.ready > 1 and standby.exists() and '"load"' in standby.read_text() else None,
        )


def rollout(mark):
    """In the middle of its rollouts, when it has finished some groups."""
    before(Continuous, "step", lambda self: die(mark) if self.sampler.version >= 1 and self.ready > 2 else None)


def told(word):
    return lambda mark: before(Line, "say", lambda self, data, seconds=10.0: die(mark) if word in data else None)


def train_line(mark):
    return lambda self, entry: die(mark) if b'"train"' in entry else None


FAULTS = {
    "trainer: before the state is saved": trainer(
        lambda mark: before(services, "keep", lambda a, b, version, d: die(mark) if version == 2 else None)
    ),
    "trainer: between state and its manifest": trainer(
        lambda mark: before(
            services, "atomic_write", lambda path, data: die(mark) if path.name == "000002.json" else None
        )
    ),
    "trainer: before publishing": trainer(
        lambda mark: before(
            services.Publisher, "start", lambda self, version, then=None: die(mark) if version == 2 else None
        )
    ),
    "trainer: between shard and manifest": trainer(
        lambda mark: before(
            weight_sync.Writer, "commit", lambda self, version, told: die(mark) if version == 2 else None
        )
    ),
    "trainer: after the manifest": trainer(
        lambda mark: after(
            weight_sync.Writer, "commit", lambda self, version, told: die(mark) if version == 2 else None
        )
    ),
    "trainer: before the step is told": trainer(told(b'"Trained"')),
    "reconciler: before the line of a step": reconciler(lambda mark: before(Journal, "append", train_line(mark))),
    "reconciler: in the middle of the line": reconciler(half_a_line),
    "reconciler: after the line": reconciler(lambda mark: after(Journal, "append", train_line(mark))),
    "worker: in a rollout": one_worker(rollout),
    "worker: while it builds a version": one_worker(
        lambda mark: before(
            weight_sync.Reader,
            "follow",
            lambda self, manifest, n, rows: die(mark) if manifest["version"] >= 2 else None,
        )
    ),
    "worker: in the middle of a swap": one_worker(half_a_swap),
    "worker: before a group is stored": one_worker(
        lambda mark: before(
            Folder, "__setitem__", lambda self, key, value: die(mark) if self.root.name == "groups" else None
        )
    ),
    "worker: before a group is told": one_worker(told(b'"Done"')),
    "delta: a byte is flipped": spoil(
        lambda store, key, blob: store.__setitem__(key, blob[:-1] + bytes([blob[-1] ^ 1]))
    ),
    "delta: it is cut": spoil(lambda store, key, blob: store.__setitem__(key, blob[: len(blob) // 2])),
    "delta: it is missing": spoil(lambda store, key, blob: store.pop(key)),
    "disk full": trainer(small_disk),
    "versions cannot be stored": down("weights"),
    "the store is down": down(""),
    "the store is slow": trainer(slow_store),
    "watched": watched,
    "often": often,
    "the evaluator dies": the_evaluator_dies,
    "measuring never ends": measuring_never_ends,
    "a standby is needed": a_standby_is_needed,
    "a task hangs": lambda mark, name: None,
}
assert worker.work  # the module is what a worker's process runs
