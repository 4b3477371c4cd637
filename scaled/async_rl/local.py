"""Asynchronous RL with processes of one machine: starts the services, and starts anew whoever dies.

    play(Plan(...))        returns when every step is done

A process that ends before it is told to is started again with the next epoch; after `most_restarts` of them the run ends with what the last one
said. One that hangs, so that the reconciler gives it up, is killed first. What no restart can mend ends the run at once: a full disk, or a store
that is down for too long. Everybody ends with the process that started them. Nothing here knows what is played: `Parts` makes it, in the process that
needs it.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import multiprocessing.connection
import os
import threading
import time
import traceback
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from kit.disk import NO_ROOM, atomic_write, refusal
from kit.settings import RunError
from ref.async_rl import Rules
from ref.engine.sampler import Sampler
from scaled.async_rl import evaluator, services, worker
from scaled.async_rl.player import Player, Scene
from scaled.async_rl.vllm_engine import VLLM
from scaled.async_rl.wire import meeting_place
from scaled.runtime.store import open_store

__all__ = ["Parts", "Plan", "claim", "play"]


class Parts(Protocol):
    """What the services play and train. It is sent to each process, which must be able to import its class."""

    def sampler(self) -> Sampler:
        """A sampler whose network has the shape of the trainer's, in bfloat16 numbers; its weights are replaced."""
        ...

    def scene(self) -> Scene: ...

    def learner(self) -> services.Learner: ...

    def evaluate(self) -> evaluator.Evaluate:
        """What measures a version; asked for only where versions are measured."""
        ...


@dataclass(frozen=True)
class Plan:
    """A run."""

    folder: Path
    rules: Rules
    parts: Parts
    workers: int = 2
    slots: int = 64
    """Conversations that a worker plays at a time."""
    rollouts: int = 8
    """Conversations of a group."""
    seed: int = 0
    temperature: float = 1.0
    timeout: float = 10.0
    """Seconds of silence after which a worker is given up."""
    most_restarts: int = 100
    store: str = ""
    """Where weights and records of groups lie: a folder, or an address that fsspec knows; by default the run's own folder."""
    store_patience: float = 600.0
    """Seconds that a store may be down."""
    tool_deadline: float = 60.0
    """Seconds that a tool may take; then its rollout is over."""
    standby: int = 0
    """Workers more that hold the weights and play nothing until another one dies."""
    evaluate_every: int = 0
    """Versions from one that is measured to the next; 0: none is."""
    engine: Literal["own", "vllm"] = "own"
    """What a worker samples with."""

    def __post_init__(self):
        least = {"workers": 1, "rollouts": 1, "slots": self.rollouts, "standby": 0, "evaluate_every": 0}
        if self.rules.staleness == 0:  # a worker's block of a step is played at once
            least["slots"] = -(-self.rules.groups // self.workers) * self.rollouts
        for name, smallest in least.items():
            if getattr(self, name) < smallest:
                raise ValueError(f"{name} must be at least {smallest}; got {getattr(self, name)}")

        if not (self.tool_deadline > 0 and self.store_patience > 0):
            raise ValueError(f"tool_deadline and store_patience must be above 0 seconds; got {self.tool_deadline} and {self.store_patience}")
        if self.store.startswith("memory://"):
            raise ValueError(f"the store must be one that processes share; {self.store} is one process's own")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"worker-{n}" for n in range(self.workers))

    @property
    def spares(self) -> tuple[str, ...]:
        return tuple(f"standby-{n}" for n in range(self.standby))

    @property
    def address(self) -> str:
        """Of the store."""
        return self.store or str(self.folder)


def claim(plan: Plan) -> None:
    """Makes a store that is not the run's own folder this run's. Raises RunError if it is another one's, cannot be opened, or does not answer."""
    if not plan.store:
        return
    store, path = open_store(plan.store), plan.folder / "name"
    plan.folder.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        atomic_write(path, uuid.uuid4().hex)
    try:
        owner = store.setdefault("run", path.read_bytes())
    except OSError as error:
        raise RunError(f"the store {plan.store} cannot be used: {error}") from None
    if owner != path.read_bytes():
        raise RunError(f"the store {plan.store} holds another run; choose another one, or delete what it holds")
    atomic_write(plan.folder / "store", plan.store if "://" in plan.store else str(Path(plan.store).resolve()))


def play(
    plan: Plan, show: Callable[[int, dict[str, float]], None] = lambda step, figures: None, started: Callable[[str, Any], None] = lambda *_: None
) -> None:
    """Run all services until every step is done; goes on with what the folder holds. `show` is called with each step and its metrics, `started` with
    the name and process of whatever starts. Raises RunError if processes keep dying, and for a store that is another run's or does not answer, and
    OSError for a full disk."""
    plan.folder.mkdir(parents=True, exist_ok=True)
    claim(plan)
    # A server that has imported torch, and what its optimisers import late, forks whoever starts: in a tenth of a second instead of three.
    context, epochs, running, dead = multiprocessing.get_context("forkserver"), Counter[str](), {}, 0
    context.set_forkserver_preload(["torch._dynamo", "scaled.async_rl.worker"])
    with meeting_place() as at:

        def start(name: str) -> None:
            here, there = context.Pipe()
            # Not a daemon, which could not start processes of its own; it ends with this one all the same.
            process = context.Process(target=_serve, name=name, args=(plan, at, name, epochs[name], there))
            epochs[name] += 1
            process.start()
            there.close()
            running[name] = process, here
            started(name, process)

        try:
            for name in ("reconciler", "trainer", *plan.names, *plan.spares, *(["evaluator"] if plan.evaluate_every else [])):
                start(name)
            words = dict[str, Failed]()
            over = math.inf  # when those who did not hear that all steps are done are ended
            while running.keys() - {"evaluator"} and time.monotonic() < over:
                heard = [x for process, here in running.values() for x in (process.sentinel, here)]
                ready = multiprocessing.connection.wait(heard, None if over == math.inf else plan.timeout / 10)
                for name, (process, here) in list(running.items()):
                    while here in ready and here.poll():
                        try:
                            said = here.recv()
                        except (EOFError, OSError):
                            break
                        if isinstance(said, Failed):
                            words[name] = said  # its process may end later
                        elif isinstance(said, Silent):
                            if said.name in running and said.epoch == epochs[said.name] - 1:
                                running[said.name][0].kill()
                        else:
                            show(*said)
                    if process.sentinel not in ready:
                        continue
                    process.join()
                    del running[name]
                    here.close()
                    failed = words.pop(name, None)
                    if name == "reconciler" and process.exitcode == 0:
                        over = time.monotonic() + plan.timeout
                    if process.exitcode == 0 or over < math.inf:
                        continue
                    if name != "reconciler":
                        said = "" if failed is None else failed.why
                        services.Log(plan.folder, name, epochs[name] - 1)("died", code=process.exitcode or 0, why=said)
                    if failed is not None and failed.number is not None:
                        raise OSError(failed.number, os.strerror(failed.number), failed.path)
                    if failed is not None and failed.hopeless:
                        raise RunError(failed.why)
                    dead += 1
                    if dead > plan.most_restarts:
                        why = f"exit code {process.exitcode}" if failed is None else failed.why
                        raise RunError(f"services of {plan.folder} died {dead} times, the last one was {name} ({why})")
                    start(name)
        finally:
            for process, here in running.values():
                process.kill()
                process.join()
                here.close()


@dataclass(frozen=True)
class Silent:
    """The reconciler has given a worker up."""

    name: str
    epoch: int


@dataclass(frozen=True)
class Failed:
    """What a service says before it ends with an error."""

    why: str
    hopeless: bool = False
    """Whether another process in its place would fail too."""
    number: int | None = None
    """That of the operating system's error, if a disk is full."""
    path: str | None = None


def _serve(plan: Plan, at: Path, name: str, epoch: int, there) -> None:
    """One service, in a process of its own."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    patience = 6 * plan.timeout
    try:
        if name == "reconciler":
            services.reconcile(plan.folder, at, plan.rules, plan.names, plan.timeout, plan.spares, lambda *who: there.send(Silent(*who)))
            return
        import torch

        torch.set_num_threads(1)
        if name == "trainer":

            def show(step: int, figures: dict[str, float]) -> None:
                there.send((step, figures))

            services.train(plan.folder, at, epoch, plan.parts.learner(), patience, plan.address, plan.store_patience, show)
        elif name == "evaluator":
            measure = plan.parts.evaluate()
            evaluator.evaluate(plan.folder, epoch, plan.address, plan.parts.sampler(), measure, plan.evaluate_every, plan.rules.steps)
        else:
            sampler, scene = plan.parts.sampler(), plan.parts.scene()
            with contextlib.ExitStack() as ending:
                if plan.engine == "vllm":
                    own = VLLM(sampler.model, plan.address, name, plan.slots, scene.how.limit, plan.temperature)
                    sampler = ending.enter_context(contextlib.closing(own))
                player = Player(sampler, scene, plan.slots, plan.rollouts, plan.seed, plan.temperature, deadline=plan.tool_deadline)
                worker.work(plan.folder, at, name, epoch, player, plan.address, patience, plan.store_patience)
    except Exception as error:
        refused = refusal(error)
        full = refused is not None and refused.errno in NO_ROOM
        if not full and not isinstance(error, RunError):
            traceback.print_exc()
        why = str(error) if isinstance(error, RunError) else f"{type(error).__name__}: {error}"
        number, path = (refused.errno, refused.filename) if refused is not None and full else (None, None)
        there.send(Failed(why, isinstance(error, RunError), number, None if path is None else str(path)))
        raise SystemExit(1) from None


def _end_with(parent) -> None:
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)
