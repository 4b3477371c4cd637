"""Asynchronous RL with processes of one machine: starts the services, and starts anew whoever dies.

    play(Plan(...))        returns when every step is done

A process that ends before it is told to is started again with the next epoch; after `most_restarts` of them the run ends with what the last one
said. Everybody ends with the process that started them. Nothing here knows what is played: `Parts` makes it, in the process that needs it.
"""

from __future__ import annotations

import math
import multiprocessing
import multiprocessing.connection
import os
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from kit.settings import RunError
from ref.async_rl import Rules
from ref.engine.sampler import Sampler
from scaled.async_rl import services
from scaled.async_rl.player import Scene
from scaled.async_rl.wire import meeting_place

__all__ = ["Parts", "Plan", "play"]


class Parts(Protocol):
    """What the services play and train. It is sent to each process, which must be able to import its class."""

    def sampler(self) -> Sampler:
        """A sampler whose network has the shape of the trainer's, in bfloat16 numbers; its weights are replaced."""
        ...

    def scene(self) -> Scene: ...

    def learner(self) -> services.Learner: ...


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

    def __post_init__(self):
        least = {"workers": 1, "rollouts": 1, "slots": self.rollouts}
        if self.rules.staleness == 0:  # a worker's block of a step is played at once
            least["slots"] = -(-self.rules.groups // self.workers) * self.rollouts
        for name, smallest in least.items():
            if getattr(self, name) < smallest:
                raise ValueError(f"{name} must be at least {smallest}; got {getattr(self, name)}")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"worker-{n}" for n in range(self.workers))


def play(
    plan: Plan, show: Callable[[int, dict[str, float]], None] = lambda step, figures: None, started: Callable[[str, Any], None] = lambda *_: None
) -> None:
    """Run all services until every step is done; goes on with what the folder holds. `show` is called with each step and its metrics, `started` with
    the name and process of whatever starts. Raises RunError if processes keep dying."""
    plan.folder.mkdir(parents=True, exist_ok=True)
    # A server that has imported torch forks whoever starts: in a tenth of a second instead of three.
    context, epochs, running, dead = multiprocessing.get_context("forkserver"), Counter[str](), {}, 0
    context.set_forkserver_preload(["scaled.async_rl.services"])
    with meeting_place() as at:

        def start(name: str) -> None:
            here, there = context.Pipe()
            # Not a daemon, which could not start processes of its own; it ends with this one all the same.
            process = context.Process(target=_serve, args=(plan, at, name, epochs[name], there))
            epochs[name] += 1
            process.start()
            there.close()
            running[name] = process, here
            started(name, process)

        try:
            for name in ("reconciler", "trainer", *plan.names):
                start(name)
            over = math.inf  # when those who did not hear that all steps are done are ended
            while running and time.monotonic() < over:
                heard = [x for process, here in running.values() for x in (process.sentinel, here)]
                ready = multiprocessing.connection.wait(heard, None if over == math.inf else plan.timeout / 10)
                for name, (process, here) in list(running.items()):
                    said = None
                    while here in ready and here.poll():
                        try:
                            said = here.recv()
                        except (EOFError, OSError):
                            break
                        if isinstance(said, tuple):
                            show(*said)
                    if process.sentinel not in ready:
                        continue
                    process.join()
                    del running[name]
                    here.close()
                    if name == "reconciler" and process.exitcode == 0:
                        over = time.monotonic() + plan.timeout
                    if process.exitcode == 0 or over < math.inf:
                        continue
                    dead += 1
                    if dead > plan.most_restarts:
                        why = said if isinstance(said, str) else f"exit code {process.exitcode}"
                        raise RunError(f"services of {plan.folder} died {dead} times, the last one was {name} ({why})")
                    start(name)
        finally:
            for process, here in running.values():
                process.kill()
                process.join()
                here.close()


def _serve(plan: Plan, at: Path, name: str, epoch: int, there) -> None:
    """One service, in a process of its own."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    patience = 6 * plan.timeout
    try:
        if name == "reconciler":
            services.reconcile(plan.folder, at, plan.rules, plan.names, plan.timeout)
            return
        import torch

        torch.set_num_threads(1)
        if name == "trainer":
            services.train(plan.folder, at, epoch, plan.parts.learner(), patience, lambda step, figures: there.send((step, figures)))
        else:
            scene = plan.parts.scene()
            services.work(plan.folder, at, name, epoch, plan.parts.sampler(), scene, plan.slots, plan.rollouts, plan.seed, plan.temperature, patience)
    except Exception as error:
        traceback.print_exc()
        there.send(f"{type(error).__name__}: {error}")
        raise SystemExit(1) from None


def _end_with(parent) -> None:
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)
