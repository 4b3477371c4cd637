"""Asynchronous RL with processes of one machine: starts the services, and starts anew whoever dies.

    play(Plan(...))        returns when every step is done

A process that ends before it is told to is started again with the next epoch; after `most_restarts` of them the run
ends with what the last one said. The ranks of a trainer that is a group begin and end together. One that hangs, so that
the reconciler gives it up, is killed first. What no restart can mend ends the run at once: a full disk, or a store that
is down for too long. Everybody ends with the process that started them. Nothing here knows what is played: `Parts`
makes it, in the process that needs it.
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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from kit.disk import NO_ROOM, atomic_write, refusal
from kit.settings import RunError
from ref.async_rl import Rules
from ref.engine.sampler import Sampler
from ref.environment import EnvironmentFailure
from scaled.async_rl import evaluator, services, trainer, worker
from scaled.async_rl.player import Player, Setup
from scaled.async_rl.vllm_engine import VLLM
from scaled.async_rl.wire import Port, meeting_place
from scaled.runtime.store import open_store

if TYPE_CHECKING:
    from scaled.async_rl.group import TrainerGroup
    from scaled.watching import Look, Watcher

__all__ = ["Deaths", "Failed", "Parts", "Plan", "Silent", "claim", "named", "play", "serve"]

TOGETHER = 0.2
"""Seconds in which ranks that go down together are seen to have ended."""


class Parts(Protocol):
    """What the services play and train. It is sent to each process, which must be able to import its class."""

    def sampler(self) -> Sampler:
        """A sampler whose network has the shape of the trainer's, in bfloat16 numbers; its weights are replaced."""
        ...

    def setup(self) -> Setup:
        """What is sampled; `Plan.tool_deadline` bounds each call of an environment."""
        ...

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
    """Rollouts that a worker samples at a time."""
    rollouts: int = 8
    """Rollouts of a group."""
    seed: int = 0
    temperature: float = 1.0
    timeout: float = 10.0
    """Seconds of silence after which a worker is given up."""
    most_restarts: int = 100
    store: str = ""
    """Where weights and records of groups lie: a folder, or an address that fsspec knows; by default the run's own
    folder."""
    store_patience: float = 600.0
    """Seconds that a store may be down."""
    tool_deadline: float = 60.0
    """Seconds that a call of an environment may take; then it has failed."""
    standby: int = 0
    """Workers more that hold the weights and play nothing until another one dies."""
    evaluate_every: int = 0
    """Versions from one that is measured to the next; 0: none is."""
    group: TrainerGroup | None = None
    """The ranks of the trainer; None: it is one process, which trains `parts.learner()`."""
    engine: Literal["own", "vllm"] = "own"
    """What a worker samples with."""
    watch: Callable[[Callable[[str], None]], Watcher] | None = None
    """Makes the monitor of a trainer's process, which is given what shows a line; None: nobody watches."""

    def __post_init__(self):
        minimums = {"workers": 1, "rollouts": 1, "slots": self.rollouts, "standby": 0, "evaluate_every": 0}
        if self.rules.staleness == 0:  # a worker's block of a step is played at once
            minimums["slots"] = -(-self.rules.groups // self.workers) * self.rollouts
        for name, minimum in minimums.items():
            if getattr(self, name) < minimum:
                raise ValueError(f"{name} must be at least {minimum}; got {getattr(self, name)}")

        if not (self.tool_deadline > 0 and self.store_patience > 0):
            raise ValueError(
                f"tool_deadline and store_patience must be above 0 seconds; got {self.tool_deadline} "
                f"and {self.store_patience}"
            )
        if self.group is not None and self.rules.groups * self.rollouts < self.group.layout.world:
            raise ValueError(
                f"{self.group.layout.world} ranks cannot share the {self.rules.groups * self.rollouts} "
                f"conversations of a step"
            )
        if self.store.startswith("memory://"):
            raise ValueError(f"the store must be one that processes share; {self.store} is one process's own")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"worker-{n}" for n in range(self.workers))

    @property
    def spares(self) -> tuple[str, ...]:
        return tuple(f"standby-{n}" for n in range(self.standby))

    @property
    def trainers(self) -> tuple[str, ...]:
        """Processes that are the trainer together."""
        return ("trainer",) if self.group is None else self.group.names

    def partners(self, name: str) -> tuple[str, ...]:
        """Who begins and ends together with a process, itself included."""
        return self.trainers if name in self.trainers else (name,)

    @property
    def address(self) -> str:
        """Of the store."""
        return self.store or str(self.folder)


def claim(plan: Plan) -> None:
    """Makes a store that is not the run's own folder this run's. Raises RunError if it is another one's, cannot be
    opened, or does not answer."""
    if not plan.store:
        return
    store, name = open_store(plan.store), named(plan.folder)
    try:
        owner = store.setdefault("run", name)
    except OSError as error:
        raise RunError(f"the store {plan.store} cannot be used: {error}") from None
    if owner != name:
        raise RunError(f"the store {plan.store} holds another run; choose another one, or delete what it holds")
    atomic_write(plan.folder / "store", plan.store if "://" in plan.store else str(Path(plan.store).resolve()))


def named(folder: Path) -> bytes:
    """A name of the run in this folder that no other one has; given to it the first time."""
    path = folder / "name"
    folder.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        atomic_write(path, uuid.uuid4().hex)
    return path.read_bytes()


def play(
    plan: Plan,
    show: Callable[[int, dict[str, float]], None] = lambda step, figures: None,
    started: Callable[[str, Any], None] = lambda *_: None,
    say: Callable[[str], None] = lambda line: None,
) -> None:
    """Run all services until every step is done; goes on with what the folder holds. `show` is called with each step
    and its metrics, `started` with the name and process of whatever starts, `say` with each line of the monitor. Raises
    RunError if processes keep dying, and for a store that is another run's or does not answer, and OSError for a full
    disk."""
    plan.folder.mkdir(parents=True, exist_ok=True)
    claim(plan)
    # A server that has imported torch, what its optimisers import late, and what makes the parts, forks whoever starts:
    # in a tenth of a second instead of four.
    context, epochs, running, deaths = multiprocessing.get_context("forkserver"), Counter[str](), {}, Deaths(plan)
    service = "scaled.async_rl.worker" if plan.group is None else "scaled.async_rl.group"
    context.set_forkserver_preload(["torch._dynamo", service, type(plan.parts).__module__])
    with meeting_place() as at:

        def start(name: str) -> None:
            receiver, sender = context.Pipe()
            # Not a daemon, which could not start processes of its own; it ends with this one all the same.
            process = context.Process(target=_serve, name=name, args=(plan, at, name, epochs[name], sender))
            epochs[name] += 1
            process.start()
            sender.close()
            running[name] = process, receiver
            started(name, process)

        def end(name: str) -> None:
            process, receiver = running.pop(name)
            process.kill()
            process.join()
            receiver.close()

        try:
            for name in (
                "reconciler",
                *plan.trainers,
                *plan.names,
                *plan.spares,
                *(["evaluator"] if plan.evaluate_every else []),
            ):
                start(name)
            failures = dict[str, Failed]()
            deadline = math.inf  # when those who did not hear that all steps are done are ended
            while running.keys() - {"evaluator"} and time.monotonic() < deadline:
                waitables = [x for process, receiver in running.values() for x in (process.sentinel, receiver)]
                ready = multiprocessing.connection.wait(waitables, None if deadline == math.inf else plan.timeout / 10)
                for process, receiver in list(running.values()):
                    while receiver.poll():
                        try:
                            report = receiver.recv()
                        except (EOFError, OSError):
                            break
                        if isinstance(report, Failed):
                            failures[process.name] = report  # its process may end later
                        elif isinstance(report, Silent):
                            if report.name in running and report.epoch == epochs[report.name] - 1:
                                running[report.name][0].kill()
                        elif isinstance(report, str):
                            say(report)
                        else:
                            show(*report)
                for name, (process, receiver) in list(running.items()):
                    # It has ended with a partner.
                    if process.sentinel not in ready or running.get(name) != (process, receiver):
                        continue
                    process.join()
                    end(name)
                    reported_failure = failures.pop(name, None)
                    if name == "reconciler" and process.exitcode == 0:
                        deadline = time.monotonic() + plan.timeout
                    if process.exitcode == 0 or deadline < math.inf:
                        continue
                    partners = plan.partners(name)
                    first, code = find_first_death(
                        name,
                        process.exitcode,
                        {partner: running[partner][0] for partner in partners if partner in running},
                    )
                    for partner in running.keys() & set(partners):
                        end(partner)
                    # A rank may go because another one has, which has more to say.
                    known_failures = [
                        failure
                        for failure in (reported_failure, *(failures.pop(partner, None) for partner in partners))
                        if failure is not None
                    ]
                    reported_failure = max(known_failures, key=Failed.weight, default=None)
                    deaths.note(partners[0], epochs[name] - 1, f"exit code {code}", reported_failure, process=first)
                    for partner_name in partners:
                        start(partner_name)
        finally:
            for name in list(running):
                end(name)


def find_first_death(name: str, code: int | None, partners: Mapping[str, Any]) -> tuple[str, int | None]:
    """Which of several ranks died first, and its exit code, where `name` was seen to have ended: one that a signal has
    ended, for those that end with an error may have lost their connection to it. `partners`: the processes of the
    others."""
    pending, deadline = dict(partners), time.monotonic() + TOGETHER
    while (code or 0) > 0 and pending and (seconds_left := deadline - time.monotonic()) > 0:
        ready = multiprocessing.connection.wait([process.sentinel for process in pending.values()], seconds_left)
        for partner, process in [
            (partner, process) for partner, process in pending.items() if process.sentinel in ready
        ]:
            process.join()
            if pending.pop(partner).exitcode < 0:
                return partner, process.exitcode
    return name, code


@dataclass(frozen=True)
class Silent:
    """The reconciler has given a worker up."""

    name: str
    epoch: int


@dataclass(frozen=True)
class Failed:
    """What a service says before it ends with an error."""

    reason: str
    hopeless: bool = False
    """Whether another process in its place would fail too."""
    number: int | None = None
    """That of the operating system's error, if a disk is full."""
    path: str | None = None

    def weight(self) -> int:
        """How much it says about what is to be done."""
        return 2 * (self.number is not None) + self.hopeless


def serve(
    plan: Plan, at: Path | Port, name: str, epoch: int, tell: Callable[[Any], None], ranks: int = 0
) -> Failed | None:
    """One service, until it is told to stop, or with an error. `tell` takes what whoever started it should know:
    Silent, a step and its metrics, or a line of the monitor. ranks: where services meet at a port, that at which the
    ranks of a trainer meet on the same machine."""
    patience = 6 * plan.timeout
    try:
        if name == "reconciler":
            services.reconcile(
                plan.folder,
                at,
                plan.rules,
                plan.names,
                plan.timeout,
                plan.spares,
                lambda *arguments: tell(Silent(*arguments)),
            )
            return None
        import torch

        torch.set_num_threads(1)
        if name in plan.trainers:
            _train(plan, at, plan.trainers.index(name), epoch, tell, patience, ranks)
        elif name == "evaluator":
            measure = plan.parts.evaluate()
            evaluator.evaluate(
                plan.folder, epoch, plan.address, plan.parts.sampler(), measure, plan.evaluate_every, plan.rules.steps
            )
        else:
            sampler, setup = plan.parts.sampler(), plan.parts.setup()
            setup = replace(setup, limits=replace(setup.limits, seconds=plan.tool_deadline))
            with contextlib.ExitStack() as exit_stack:
                if plan.engine == "vllm":
                    vllm = VLLM(
                        sampler.model, plan.address, name, plan.slots, setup.limits.chaining.limit, plan.temperature
                    )
                    sampler = exit_stack.enter_context(contextlib.closing(vllm))
                player = Player(sampler, setup, plan.slots, plan.rollouts, plan.seed, plan.temperature)
                worker.work(plan.folder, at, name, epoch, player, plan.address, patience, plan.store_patience)
        return None
    except Exception as error:
        os_error = refusal(error)
        is_disk_full = os_error is not None and os_error.errno in NO_ROOM
        if not is_disk_full and not isinstance(error, RunError):
            traceback.print_exc()
        reason = str(error) if isinstance(error, RunError) else f"{type(error).__name__}: {error}"
        number, path = (os_error.errno, os_error.filename) if os_error is not None and is_disk_full else (None, None)
        return Failed(
            reason, isinstance(error, RunError | EnvironmentFailure), number, None if path is None else str(path)
        )


class Deaths:
    """What becomes of a run when a service of it dies."""

    def __init__(self, plan: Plan):
        self.plan, self.number = plan, 0

    def note(self, name: str, epoch: int, cause: str, failed: Failed | None, **facts: str) -> None:
        """Returns where another process may take the place of this one; `facts` go into its log. Raises OSError for a
        full disk, and RunError for what no restart can mend and for one death too many."""
        reason = cause if failed is None else failed.reason
        if name != "reconciler":
            services.Log(self.plan.folder, name, epoch)("died", why=reason, **facts)
        if failed is not None and failed.number is not None:
            raise OSError(failed.number, os.strerror(failed.number), failed.path)
        if failed is not None and failed.hopeless:
            raise RunError(failed.reason)
        self.number += 1
        if self.number > self.plan.most_restarts:
            raise RunError(
                f"services of {self.plan.folder} died {self.number} times, the last one was {name} ({reason})"
            )


def _serve(plan: Plan, at: Path, name: str, epoch: int, sender) -> None:
    """One service, in a process of its own."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    failure = serve(plan, at, name, epoch, sender.send)
    if failure is not None:
        sender.send(failure)
        raise SystemExit(1)


def _train(
    plan: Plan, at: Path | Port, rank: int, epoch: int, tell: Callable[[Any], None], patience: float, ranks: int
) -> None:
    """The trainer, or one of its ranks."""

    def show(step: int, metrics: dict[str, float]) -> None:
        tell((step, metrics))

    stores = services.open_stores(plan.address)
    if plan.group is None:
        log = services.Log(plan.folder, "trainer", epoch)
        look = monitor_of(plan, log, tell)
        work = trainer.Alone(plan.folder, plan.parts.learner(), stores, log, plan.store_patience, look)
        return trainer.train(at, epoch, work, log, patience, show)
    from scaled.async_rl import group  # FSDP and DCP take half a second, which nobody else needs

    # Events are the trainer's, which is one to everybody else; what the other ranks have to say of the store lies
    # elsewhere.
    log = services.Log(plan.folder if rank == 0 else plan.folder / "ranks", plan.trainers[rank], epoch)
    meeting = (at.host, ranks) if isinstance(at, Port) else at.with_name("ranks")
    with group.joined(plan.group, rank, meeting, epoch, plan.store_patience):
        look = monitor_of(plan, log, tell)
        work = group.Rank(plan.folder, plan.group.learner(), stores, log, plan.store_patience, look)
        if rank:
            return work.follow()
        trainer.train(at, epoch, work, log, patience, show)
        work.stop()


def monitor_of(plan: Plan, log: services.Log, tell: Callable[[Any], None]) -> Look | None:
    """The monitor of a trainer's process. Its journal lies in the run folder, and its lines go into the log, too."""
    if plan.watch is None:
        return None
    from scaled.watching import watching  # as late as `group`

    def say(line: str) -> None:
        log("monitor", says=line)
        tell(line)

    return watching(plan.watch(say), plan.folder, plan.rules.groups, plan.rollouts)


def _end_with(parent) -> None:
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)
