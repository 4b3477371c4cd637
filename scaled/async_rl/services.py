"""The services as functions, each of which a process of its own runs: the reconciler, a worker, and the trainer.

They know each other by a socket's path and share a run folder:

    journal.jsonl               what became of every group, with the key and digest of its record
    groups/NUMBER-WORKER-EPOCH  records of finished groups
    weights/                    versions of the weights (`ref/weight_sync.py`)
    trainer/                    what the trainer needs to go on: its last two steps
    events/NAME.jsonl           what each service did, and when, for people to read

Whoever is killed is started again with the next epoch, and finds there all that it needs. Nothing is taken for done before it is on the disk.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import torch

from kit.disk import Journal, atomic_write, read_lines
from ref import weight_sync
from ref.async_rl import Rules
from ref.engine.sampler import Sampler
from ref.rl import Played
from scaled.async_rl.messages import Batch, Beat, Done, Forget, Hello, Loaded, Ready, Refused, Stop, Trained, Update, Work, decode, encode
from scaled.async_rl.player import Player, Scene
from scaled.async_rl.reconciler import Reconciler
from scaled.async_rl.records import oldest, pack, unpack
from scaled.async_rl.wire import Hub, Line, Lost
from scaled.runtime.store import Folder

__all__ = ["GivenUp", "Learner", "Log", "reconcile", "replay", "train", "trained", "work"]

BEAT = 0.5
"""Seconds between two signs of life."""


class GivenUp(RuntimeError):
    """The reconciler refused this process: another one has taken its place, or its folder is of another run."""


class Learner(Protocol):
    """What the trainer trains."""

    @property
    def model(self) -> torch.nn.Module:
        """The network whose weights are published."""
        ...

    def step(self, played: Sequence[Played]) -> dict[str, float]:
        """One optimiser step on the rollouts of the groups of a step; returns its metrics."""
        ...

    def save(self) -> bytes:
        """All that `restore` needs."""
        ...

    def restore(self, data: bytes) -> None: ...


class Log:
    """What a service did, a line each: seconds since 1970, and facts."""

    def __init__(self, folder: Path, name: str, epoch: int):
        (folder / "events").mkdir(parents=True, exist_ok=True)
        self.file, self.epoch = Journal(folder / "events" / f"{name}.jsonl"), epoch

    def __call__(self, what: str, **facts: float | str) -> None:
        self.file.append(json.dumps({"at": round(time.time(), 4), "epoch": self.epoch, "what": what, **facts}).encode() + b"\n")


def reconcile(folder: Path, at: Path, rules: Rules, names: Sequence[str], timeout: float = 10.0) -> None:
    """The reconciler, until every step is done and everybody has been told."""
    path = folder / "journal.jsonl"
    lines = read_lines(path)
    whole = path.read_bytes() if path.exists() else b""
    journal = Journal(path, keep=whole.rfind(b"\n") + 1)  # a line that a kill cut off never happened

    def write(line: dict) -> None:
        journal.append(json.dumps(line).encode() + b"\n")
        journal.sync()

    reconciler = Reconciler(rules, names, write, lines, timeout, time.monotonic())
    hub, lines_to, told = Hub(at), dict[str, Line](), set[str]()

    def send(sent: list, speaker: Line | None = None) -> None:
        for name, message in sent:
            line = speaker if isinstance(message, Refused) else lines_to.get(name)
            try:
                if line is not None:
                    line.say(encode(message))
            except Lost:
                hub.end(line)  # pyright: ignore[reportArgumentType]
            if isinstance(message, Stop):
                told.add(name)

    last = ended = time.monotonic()
    everyone, gone = {*names, "trainer"}, set[str]()
    while not gone >= everyone and time.monotonic() - ended < timeout:
        if not told >= everyone:
            ended = time.monotonic()
        for line, data in hub.heard(min(BEAT, timeout / 4)):
            if data is None:
                gone |= {name for name in told if lines_to.get(name) is line}  # whoever has been told hangs up
                continue
            try:
                message = decode(data)
            except ValueError as error:
                line.say(encode(Refused(str(error))))
                continue
            if isinstance(message, (Hello, Ready)) and message.epoch >= reconciler.epochs.get(message.sender, 0):
                lines_to[message.sender] = line
            send(reconciler.handle(message, time.monotonic()), line)
        if time.monotonic() - last > min(BEAT, timeout / 4):
            last = time.monotonic()
            send(reconciler.tick(last))
    hub.close()


def work(
    folder: Path,
    at: Path,
    name: str,
    epoch: int,
    sampler: Sampler,
    scene: Scene,
    slots: int,
    rollouts: int,
    seed: int,
    temperature: float,
    patience: float,
) -> None:
    """A worker, until it is told to stop. Raises Lost if there is no reconciler for `patience` seconds, and GivenUp."""
    log, player = Log(folder, name, epoch), Player(sampler, scene, slots, rollouts, seed, temperature)
    # What is synchronised is bfloat16, whatever the sampler computes in.
    served = sampler.model if sampler.dtype is torch.bfloat16 else copy.deepcopy(sampler.model).bfloat16()
    reader = weight_sync.Reader(Folder(folder / "weights"), weight_sync.parts(served), name)
    sampler.version, since, done = -1, dict[int, int](), dict[int, Done]()
    (folder / "groups").mkdir(exist_ok=True)
    log("start")
    while True:
        line = Line.to(at, patience)
        try:
            groups = {**since, **{group: one.oldest for group, one in done.items()}}
            line.say(encode(Hello(name, epoch, max(1, slots // rollouts), sampler.version, tuple(groups), tuple(groups.values()))))
            for one in done.values():
                line.say(encode(one))
            beat = time.monotonic()
            while True:
                wait = min(player.idle(time.monotonic()), BEAT / 2) if sampler.version >= 0 else BEAT / 2
                for data in line.heard(wait):
                    message = decode(data)
                    if isinstance(message, Stop):
                        log("stop")
                        return
                    if isinstance(message, Refused):
                        raise GivenUp(message.why)
                    if isinstance(message, Work):
                        for group in message.groups:
                            done.pop(group, None)
                            since[group] = sampler.version
                        player.give(message.groups)
                        log("work", groups=len(message.groups))
                    elif isinstance(message, Forget):
                        player.forget(message.groups)
                        for group in message.groups:
                            since.pop(group, None)
                            done.pop(group, None)
                        log("forget", groups=len(message.groups))
                    elif isinstance(message, Update) and message.version > sampler.version:
                        began = time.monotonic()
                        reader.fetch()
                        fetched = time.monotonic()
                        version = reader.swap()
                        assert version is not None
                        player.load(served, version) if served is not sampler.model else player.renewed(version)
                        line.say(encode(Loaded(name, epoch, version)))
                        log("load", version=version, fetch_s=fetched - began, pause_s=time.monotonic() - fetched)
                for group, played in player.tick(time.monotonic()).items():
                    data = pack(played)
                    key = f"{group:06d}-{name}-{epoch}"
                    atomic_write(folder / "groups" / key, data)
                    since.pop(group, None)
                    done = dict([*done.items()][-4 * len(player.engine.state) :])
                    done[group] = Done(name, epoch, group, oldest(played), key, hashlib.sha256(data).hexdigest())
                    line.say(encode(done[group]))
                    log("done", group=group, tokens=sum(p.chain.written for p in played))
                if time.monotonic() - beat > BEAT:
                    beat = time.monotonic()
                    line.say(encode(Beat(name, epoch)))
                    log("slots", version=sampler.version, **player.slots())
        except Lost:
            log("lost")
        finally:
            line.close()


def train(
    folder: Path, at: Path, epoch: int, learner: Learner, patience: float, show: Callable[[int, dict[str, float]], None] = lambda step, figures: None
) -> None:
    """The trainer, until it is told to stop. A step counts once its state is saved; its weights are published before that is told."""
    log, saved = Log(folder, "trainer", epoch), folder / "trainer"
    saved.mkdir(exist_ok=True)
    version, groups = restored(saved, learner)
    store = Folder(folder / "weights")
    writer = weight_sync.Writer(store)
    log("start", version=version)
    writer.publish(version, weight_sync.parts(learner.model))  # the process before this one may have done so: then nothing changes
    while True:
        line = Line.to(at, patience)
        try:
            line.say(encode(Ready("trainer", epoch, version, groups)))
            while True:
                for data in line.heard(BEAT):
                    message = decode(data)
                    if isinstance(message, Stop):
                        log("stop")
                        return
                    if isinstance(message, Refused):
                        raise GivenUp(message.why)
                    if isinstance(message, Batch) and message.version == version:
                        log("train", version=version)
                        played = read(folder, message.keys, message.digests)
                        figures = learner.step(played) | ages(played, version)
                        keep(saved, learner, version + 1, message.groups)
                        version, groups = version + 1, message.groups
                        log("saved", version=version, **figures)
                        sent = writer.publish(version, weight_sync.parts(learner.model))
                        log("published", version=version, bytes=sum(shard["bytes"] for link in sent["links"] for shard in link["shards"]))
                        show(version, figures)
                        line.say(encode(Trained("trainer", epoch, version - 1, groups)))
                        line.say(encode(Ready("trainer", epoch, version, groups)))
        except Lost:
            log("lost")
        finally:
            line.close()


def ages(played: Sequence[Played], version: int) -> dict[str, float]:
    """Mean and greatest age, in updates, of the policy's own tokens, and their number."""
    own = torch.cat([s.version[s.sampled] for p in played for s in p.chain.segments])
    return {"age": (version - own).double().mean().item(), "oldest": float(version - int(own.min())), "tokens": float(len(own))}


def trained(folder: Path) -> Iterator[tuple[int, list[Played]]]:
    """The steps of a run in the order of its journal: the version that each began with, and the rollouts of its groups."""
    records = dict[int, tuple[str, str]]()
    for line in read_lines(folder / "journal.jsonl"):
        if line["kind"] == "ready":
            records[line["groups"][0]] = line["key"], line["digest"]
        elif line["kind"] == "train":
            keys, digests = zip(*(records[group] for group in line["groups"]), strict=True)
            yield line["version"], read(folder, keys, digests)


def replay(folder: Path, learner: Learner) -> int:
    """Train on the recorded groups of a run again, from where `learner` is at step 0. Returns the number of steps."""
    steps = 0
    for _, played in trained(folder):
        learner.step(played)
        steps += 1
    return steps


def read(folder: Path, keys: Sequence[str], digests: Sequence[str]) -> list[Played]:
    """The rollouts of some groups. Raises ValueError for a record that is not the one that was announced."""
    found = []
    for key, digest in zip(keys, digests, strict=True):
        if Path(key).name != key:
            raise ValueError(f"{key!r} is no record's name")
        data = (folder / "groups" / key).read_bytes()
        if hashlib.sha256(data).hexdigest() != digest:
            raise ValueError(f"{folder / 'groups' / key} has changed since the worker wrote it")
        found += unpack(data)
    return found


def keep(saved: Path, learner: Learner, version: int, groups: Sequence[int]) -> None:
    """Save a step: its state, then a manifest that makes it count. The step before it stays, all earlier ones go."""
    data = learner.save()
    atomic_write(saved / f"{version:06d}.state", data)
    about = {"version": version, "groups": list(groups), "digest": hashlib.sha256(data).hexdigest()}
    atomic_write(saved / f"{version:06d}.json", json.dumps(about))
    for path in saved.iterdir():
        with contextlib.suppress(ValueError, FileNotFoundError):
            if int(path.stem) < version - 1:
                path.unlink()


def restored(saved: Path, learner: Learner) -> tuple[int, tuple[int, ...]]:
    """Steps done, and the groups of the last one, after `learner` has been restored; 0 and none at the beginning."""
    for path in sorted(saved.glob("*.json"), reverse=True):
        with contextlib.suppress(OSError, ValueError, KeyError):
            about = json.loads(path.read_text())
            data = path.with_suffix(".state").read_bytes()
            if hashlib.sha256(data).hexdigest() == about["digest"]:
                learner.restore(data)
                return about["version"], tuple(about["groups"])
    return 0, ()
