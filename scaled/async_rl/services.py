"""The services as functions, each of which a process of its own runs: here the reconciler, and what a trainer does with
a step. `trainer.py`, `worker.py` and `evaluator.py` have the others.

They meet at a socket's path, or at a port. They share a run folder, and a store, which is the same folder if no other
is named:

    folder  journal.jsonl               what became of every group, with the key and digest of its record
            trainer/                    what the trainer needs to go on: its last two steps
            events/NAME.jsonl           what each service did, and when, for people to read
    store   groups/NUMBER-WORKER-EPOCH  records of finished groups
            weights/                    versions of the weights (`ref/weight_sync.py`)

Whoever is killed is started again with the next epoch, and finds there all that it needs. Nothing is taken for done
before it is on the disk.

While the store is down, workers sample up to the bound on age and then wait, and the trainer waits with a step that it
cannot publish. Everyone asks again, with pauses that grow, and gives the run up after `store_patience` seconds. A full
disk ends the run at once."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from kit.disk import NO_ROOM, Journal, atomic_write, read_json, read_lines, seal_record
from kit.settings import RunError
from ref import weight_sync
from ref.async_rl import Rules
from ref.rollout import Rollout
from scaled.async_rl.background import BackgroundCall, BackgroundThread
from scaled.async_rl.messages import Hello, Ready, Refused, Stop, decode, encode
from scaled.async_rl.reconciler import Reconciler
from scaled.async_rl.records import unpack
from scaled.async_rl.wire import ConnectionLost, Hub, Line, Port
from scaled.runtime.store import open_store

if TYPE_CHECKING:
    from scaled.watching import Look

__all__ = [
    "BEAT",
    "GivenUp",
    "Learner",
    "Log",
    "Publisher",
    "Stores",
    "Steps",
    "address",
    "ages",
    "retry_store_call",
    "keep",
    "no_room",
    "open_stores",
    "own_versions",
    "pause",
    "read",
    "reconcile",
    "replay",
    "restored",
    "trained",
    "watch_step",
]

BEAT = 0.5
"""Seconds between two signs of life."""


class GivenUp(RuntimeError):
    """The reconciler refused this process: another one has taken its place, or its folder is of another run."""


class Steps(Protocol):
    """What is trained, by a process or by a rank."""

    @property
    def model(self) -> torch.nn.Module:
        """The network whose weights are published."""
        ...

    def step(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """One optimiser step on the rollouts of the groups of a step; returns its metrics."""
        ...


class Learner(Steps, Protocol):
    """What a trainer trains that is one process."""

    def save(self) -> bytes:
        """All that `restore` needs."""
        ...

    def restore(self, data: bytes) -> None: ...


class Log:
    """What a service did, a line each: seconds since 1970, and facts."""

    def __init__(self, folder: Path, name: str, epoch: int):
        (folder / "events").mkdir(parents=True, exist_ok=True)
        self.file, self.epoch, self.lock = Journal(folder / "events" / f"{name}.jsonl"), epoch, threading.Lock()

    def __call__(self, event: str, **facts: float | str) -> None:
        with self.lock:
            self.file.append(
                json.dumps({"at": round(time.time(), 4), "epoch": self.epoch, "what": event, **facts}).encode() + b"\n"
            )


@dataclass(frozen=True)
class Stores:
    """What the services share beside the run folder."""

    weights: MutableMapping[str, bytes]
    groups: MutableMapping[str, bytes]


def open_stores(address: str) -> Stores:
    """Both, at the address of a folder or one that fsspec knows. Raises RunError where `open_store` does."""
    return Stores(*(open_store(f"{address.rstrip('/')}/{part}") for part in ("weights", "groups")))


def address(folder: Path) -> str:
    """Of what the services of a run folder share."""
    path = folder / "store"
    return path.read_text() if path.exists() else str(folder)


def pause(failures: int) -> float:
    """Seconds to wait after so many failures in a row."""
    return min(10.0, 0.1 * 2**failures)


def no_room(error: Exception) -> bool:
    """Whether an error says that a disk is full. Waiting does not help then."""
    return isinstance(error, OSError) and error.errno in NO_ROOM


def reconcile(
    folder: Path,
    at: Path | Port,
    rules: Rules,
    names: Sequence[str],
    timeout: float = 10.0,
    spares: Sequence[str] = (),
    silent: Callable[[str, int], None] = lambda name, epoch: None,
) -> None:
    """The reconciler, until every step is done and everybody has been told. `silent` is called with the name and epoch
    of a worker that was given up, whose process should be ended if it still hangs."""
    path = folder / "journal.jsonl"
    lines = read_lines(path)
    content = path.read_bytes() if path.exists() else b""
    journal = Journal(path, keep=content.rfind(b"\n") + 1)  # a line that a kill cut off never happened

    def write(line: dict) -> None:
        journal.append(json.dumps(line).encode() + b"\n")
        journal.sync()

    reconciler = Reconciler(rules, names, write, lines, timeout, time.monotonic(), spares)
    hub, lines_to, notified_names, closed_names = Hub(at), dict[str, Line](), set[str](), set[str]()

    def send(messages: list, speaker: Line | None = None) -> None:
        for name, message in messages:
            line = speaker if isinstance(message, Refused) else lines_to.get(name)
            if line is None:
                continue  # its process will say hello again, or another one in its place
            try:
                line.say(encode(message))
            except ConnectionLost:
                hub.end(line)
                end(line)
                continue
            if isinstance(message, Stop):
                notified_names.add(name)

    def end(line: Line) -> None:
        for name in [name for name, open_line in lines_to.items() if open_line is line]:
            del lines_to[name]
            closed_names.update({name} & notified_names)  # whoever has been told hangs up
            send(reconciler.hung_up(name, time.monotonic()))

    last_tick = last_activity = time.monotonic()
    all_names = {*names, *spares, "trainer"}
    while not closed_names >= all_names and time.monotonic() - last_activity < timeout:
        if not reconciler.life.over or lines_to.keys() - notified_names:
            # Who is not connected is waited for no longer than `timeout` from now on: it may hang before it says hello.
            last_activity = time.monotonic()
        for line, data in hub.receive(min(BEAT, timeout / 4)):
            if data is None:
                end(line)
                continue
            try:
                message = decode(data)
            except ValueError as error:
                send([("", Refused(str(error)))], line)
                continue
            if isinstance(message, (Hello, Ready)) and message.epoch >= reconciler.epochs.get(message.sender, 0):
                lines_to[message.sender] = line
            send(reconciler.handle(message, time.monotonic()), line)
        if time.monotonic() - last_tick > min(BEAT, timeout / 4):
            last_tick = time.monotonic()
            send(reconciler.tick(last_tick))
            while reconciler.silent:
                name, epoch = reconciler.silent.pop()
                lines_to.pop(name, None)
                silent(name, epoch)
    hub.close()


class Publisher:
    """Publishes versions of a learner's weights, however often the store has to be asked. One version is on its way at
    a time."""

    def __init__(self, store: MutableMapping[str, bytes], learner: Steps, log: Log, patience: float, sync=weight_sync):
        """patience: seconds that the store may be down. sync: `ref.weight_sync`, or its twin, where every rank has a
        publisher and all call it together."""
        self.store, self.learner, self.log, self.patience, self.sync = store, learner, log, patience, sync
        self.writer, self.background = sync.Writer(store), BackgroundThread()
        self.errand: BackgroundCall | None = None
        self.visible = -1
        """The newest version that was published."""

    def publish(self, version: int, anew: bool = False) -> None:
        """Returns once a version is visible. `anew`: it was, but somebody cannot read it; then it is published whole.
        Raises RunError after `patience` seconds."""
        self.wait()
        self._publish(version, self.sync.parts(self.learner.model), anew)

    def start(self, version: int, on_visible: Callable[[], None] = lambda: None) -> None:
        """Returns once the weights are copied, and publishes them beside whatever this process does next; calls
        `on_visible` once they are visible. First waits for the version before."""
        self.wait()
        parts = [
            replace(part, weights=part.weights.detach().to(torch.bfloat16, copy=True))
            for part in self.sync.parts(self.learner.model)
        ]

        def call() -> None:
            self._publish(version, parts)
            on_visible()

        self.errand = self.background.send(call)

    def check(self) -> None:
        """Raises the error of the version that was started, if it has one."""
        if self.errand is not None and self.errand.done.is_set():
            errand, self.errand = self.errand, None
            if errand.error is not None:
                raise errand.error

    def wait(self) -> None:
        """Returns once the version that was started is visible; raises its error, if it has one."""
        if self.errand is not None:
            self.errand.done.wait()
        self.check()

    def _publish(self, version: int, parts: Sequence[weight_sync.Part], anew: bool = False) -> None:
        def attempt() -> dict:
            if anew:
                self.store.pop(f"{version:08d}/manifest", None)
                self.writer = self.sync.Writer(self.store)
            return self.writer.publish(version, parts)

        start_time = time.monotonic()
        manifest = retry_store_call(attempt, f"publishing version {version}", self.log, self.patience)
        self.visible, size = version, sum(shard["bytes"] for link in manifest["links"] for shard in link["shards"])
        self.log(
            "repaired" if anew else "published",
            version=version,
            bytes=size,
            seconds=round(time.monotonic() - start_time, 4),
        )
        if version % self.writer.anchor_every == 0 and self.writer.rank == 0:
            try:
                self.log("pruned", versions=weight_sync.prune(self.store))
            except (OSError, weight_sync.SyncError) as error:
                self.log("unpruned", why=str(error))  # the next anchor comes


def retry_store_call(call: Callable, action: str, log: Log, patience: float):
    """What call() returns, once the store answers. Raises RunError after `patience` seconds, and at once where trying
    again cannot help."""
    start_time, failures = time.monotonic(), 0
    while True:
        try:
            return call()
        except (OSError, weight_sync.SyncError) as error:
            if no_room(error):
                raise
            failures += 1
            log("waits for the store", doing=action, why=str(error))
            if "another writer" in str(error):
                raise RunError(f"{action} failed: {error}; is the store that of another run?") from None
            if time.monotonic() - start_time > patience:
                raise RunError(f"{action} failed for {patience:g} seconds; the last error: {error}") from None
            time.sleep(pause(failures))


def ages(rollouts: Sequence[Rollout], version: int) -> dict[str, float]:
    """Mean and greatest age, in updates, of the policy's own tokens, and their number."""
    own = own_versions(rollouts)
    # Age v − u (ref/async_rl.py).
    return {
        "age": (version - own).double().mean().item(),
        "oldest": float(version - int(own.min())),
        "tokens": float(len(own)),
    }


def watch_step(
    look: Look | None, version: int, numbers: Sequence[int], rollouts: Sequence[Rollout]
) -> dict[str, float]:
    """What the monitor logs of a step, whose rollouts have these numbers; all ranks call it together. A group that an
    earlier version of this project recorded has no transcripts, and is not watched."""
    if look is None:
        return {}
    is_watched = [bool(rollout.failure) or rollout.transcript is not None for rollout in rollouts]
    return look(version, [*compress(numbers, is_watched)], [*compress(rollouts, is_watched)])


def own_versions(rollouts: Sequence[Rollout]) -> torch.Tensor:
    """The version of each of the policy's own tokens, [n], in rollouts whose environment did not fail."""
    return torch.cat(
        [
            torch.zeros(0, dtype=torch.long),
            *(s.version[s.sampled] for p in rollouts if not p.failure for s in p.chain.segments),
        ]
    )


def trained(folder: Path, store: str = "") -> Iterator[tuple[int, list[Rollout]]]:
    """The steps of a run in the order of its journal: the version that each began with, and the rollouts of its groups.
    `store`: where these lie, if no longer where the run left them."""
    records, groups = dict[int, tuple[str, str]](), open_stores(store or address(folder)).groups
    for line in read_lines(folder / "journal.jsonl"):
        if line["kind"] == "ready":
            records[line["groups"][0]] = line["key"], line["digest"]
        elif line["kind"] == "train":
            keys, digests = zip(*(records[group] for group in line["groups"]), strict=True)
            yield line["version"], read(groups, keys, digests)


def replay(folder: Path, learner: Steps, store: str = "") -> int:
    """Train on the recorded groups of a run again, from where `learner` is at step 0; `store` as for `trained`. Returns
    the number of steps."""
    steps = 0
    for _, rollouts in trained(folder, store):
        learner.step(rollouts)
        steps += 1
    return steps


def read(groups: Mapping[str, bytes], keys: Sequence[str], digests: Sequence[str]) -> list[Rollout]:
    """The rollouts of some groups. Raises ValueError for a record that is not the one that was announced, or is
    gone."""
    rollouts = []
    for key, digest in zip(keys, digests, strict=True):
        if Path(key).name != key:
            raise ValueError(f"{key!r} is no record's name")
        try:
            data = groups[key]
        except KeyError:
            raise ValueError(f"the record {key} of a group is gone from the store") from None
        if hashlib.sha256(data).hexdigest() != digest:
            raise ValueError(f"the record {key} of a group has changed since the worker wrote it")
        rollouts += unpack(data)
    return rollouts


def keep(saved: Path, learner: Learner, version: int, groups: Sequence[int]) -> None:
    """Save a step: its state, then a manifest that makes it count. The step before it stays, all earlier ones go."""
    data = learner.save()
    atomic_write(saved / f"{version:06d}.state", data)
    manifest = {"version": version, "groups": list(groups), "digest": hashlib.sha256(data).hexdigest()}
    atomic_write(saved / f"{version:06d}.json", json.dumps(seal_record(manifest)))
    for path in saved.iterdir():
        with contextlib.suppress(ValueError, FileNotFoundError):
            if int(path.stem) < version - 1:
                path.unlink()


def restored(saved: Path, learner: Learner) -> tuple[int, tuple[int, ...]]:
    """Steps done, and the groups of the last one, after `learner` has been restored; 0 and none at the beginning."""
    for path in sorted(saved.glob("*.json"), reverse=True):
        with contextlib.suppress(OSError, ValueError):
            manifest = read_json(path, {"version": int, "groups": [int], "digest": str})
            data = path.with_suffix(".state").read_bytes()
            if hashlib.sha256(data).hexdigest() == manifest["digest"]:
                learner.restore(data)
                return manifest["version"], tuple(manifest["groups"])
    return 0, ()
