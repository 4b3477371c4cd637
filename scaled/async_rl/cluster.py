"""Asynchronous RL on a Ray cluster: each service is an actor. Ray finds a machine for it, and starts it anew there or
elsewhere when it dies.

    play(Plan(...))        as `local.play` does, with processes of this machine

RAY_ADDRESS names the cluster ("auto": the one that this machine belongs to). Without it Ray starts here, on loopback,
and ends with the run.

| service | where |
|---|---|
| reconciler | the machine where `play` is called |
| trainer | a free CPU, and a GPU if the cluster has any |
| ranks of a trainer that is a group | a free CPU each, and over nccl a GPU each |
| workers, standbys, evaluator | a free CPU each, with vLLM a GPU if there are enough; workers spread over machines |

What they do and say is the same as on one machine (`local.serve`); they meet at a port of the reconciler's machine. All
machines must see the run folder, since the trainer's state and the events lie there, and the store, if it is another
one. A process learns its epoch from `play`, not from Ray: an actor that Ray has given up and that goes on all the same
has an earlier one than its successor, and is refused. The ranks of a group meet at another port of the reconciler's
machine, and have one epoch: when one of them dies, the others are ended, and all begin again together."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import queue
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kit.settings import RunError
from scaled.async_rl.local import Deaths, Failed, Plan, Silent, claim, named, serve
from scaled.async_rl.wire import Port, meeting_port
from scaled.runtime.store import open_store

__all__ = ["imported", "joined", "play", "unseen"]

OBJECTS = 80 << 20
"""Bytes of Ray's object store: rollouts and weights do not travel through it."""
SEE = 10.0
"""Seconds within which a machine must see a file that another one has written."""


@dataclass(frozen=True)
class Process:
    pid: int
    host: str


class Service:
    """An actor, which plays a service once: who takes its place is another process."""

    def __init__(self, name: str):
        multiprocessing.current_process().name = name
        os.environ["OMP_NUM_THREADS"] = (
            "1"  # with more, `kit.process.map_on_cores` would fork, which a process that has Ray's threads must not
        )
        self.name, self.epoch, self.reports = name, -1, queue.SimpleQueue[Any]()

    def ready(self) -> Process:
        return Process(os.getpid(), socket.gethostname())

    def serve(self, plan: Plan, run: bytes, at: Port, epoch: int, ranks: int) -> list:
        """Begins; returns what `said` does. run: the name of the run in the plan's folder. ranks: the port where those
        of a group meet."""

        def run_service() -> None:
            problem = unseen(plan, run)
            self.reports.put(
                Failed(problem, hopeless=True)
                if problem
                else serve(plan, at, self.name, epoch, self.reports.put, ranks)
            )

        if self.epoch >= 0:
            os._exit(1)  # Ray could not reach it for a while, and it has been given up
        self.epoch = epoch
        threading.Thread(target=run_service, daemon=True).start()
        return self.next_reports(epoch)

    def next_reports(self, epoch: int) -> list:
        """Waits for something to tell. The last thing is None, or Failed."""
        if epoch != self.epoch:
            raise RuntimeError(f"epoch {epoch} of {self.name} is over")
        reports = [self.reports.get()]
        while not self.reports.empty():
            reports.append(self.reports.get())
        return reports


def unseen(plan: Plan, run: bytes, seconds: float = SEE) -> str:
    """What this machine does not see of a run, and what to do; nothing if it sees all. Raises RunError where the store
    cannot be opened."""
    deadline, host = time.monotonic() + seconds, socket.gethostname()
    while True:
        problem = ""
        if not (plan.folder / "name").is_file() or (plan.folder / "name").read_bytes() != run:
            problem = (
                f"{host} does not see the run folder {plan.folder}; choose one that all machines of the cluster share"
            )
        elif plan.store:
            with contextlib.suppress(OSError):  # a store that does not answer may do so later
                if open_store(plan.store).get("run") != run:
                    problem = (
                        f"{host} does not see the store {plan.store}; choose a folder that all machines "
                        f"share, or an address such as s3://bucket/run"
                    )
        if not problem or time.monotonic() > deadline:
            return problem
        time.sleep(0.2)


def imported() -> Any:
    """Ray. Raises RunError if it is not installed."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    if os.environ.get("RAY_ADDRESS", "local") == "local":
        os.environ.setdefault(
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0"
        )  # of all systems, unlike its name: Ray then listens on loopback only
        os.environ.setdefault(
            "RAY_worker_niceness", "0"
        )  # what Ray starts is of lower priority otherwise, and starves beside other programs
    try:
        import ray  # pyright: ignore[reportMissingImports] (the extra `cluster`)
    except ImportError:
        raise RunError("runtime=ray needs Ray; in the clone: pip install -c constraints.txt ray") from None
    return ray


@contextlib.contextmanager
def joined(cpus: int, gpus: int = 0) -> Iterator[Any]:
    """Ray, connected to a cluster that has so many CPUs and GPUs. Leaves it afterwards, unless this process was
    connected before. Raises RunError if there is none, or a smaller one."""
    address = os.environ.get("RAY_ADDRESS", "local")
    if "://" in address:
        raise RunError(
            f"RAY_ADDRESS={address} is for programs outside of a cluster; start this one on a machine "
            f"of it, with RAY_ADDRESS=auto"
        )
    ray = imported()
    was_connected = ray.is_initialized()
    try:
        if not was_connected and address == "local":
            ray.init(
                "local", num_cpus=cpus, include_dashboard=False, object_store_memory=OBJECTS, logging_level="error"
            )
        elif not was_connected:
            ray.init(address, logging_level="error")
    except Exception as error:  # Ray raises kinds of its own as well
        problem = (
            "Ray does not start here"
            if address == "local"
            else f"RAY_ADDRESS={address} does not answer; is it a machine of a Ray cluster?"
        )
        raise RunError(f"{problem} ({' '.join(str(error).split())})") from None
    try:
        for kind, num_wanted in (("CPU", cpus), ("GPU", gpus)):
            num_available = int(ray.cluster_resources().get(kind, 0))
            if num_available < num_wanted:
                raise RunError(
                    f"the services want {num_wanted} {kind}s, and the Ray cluster has {num_available}; "
                    f"add machines, or take fewer workers or ranks"
                )
        yield ray
    finally:
        if not was_connected:
            ray.shutdown()


@dataclass
class RunningService:
    """A service, and the call of its actor that is under way."""

    actor: Any
    method: str = ""
    call: Any = None
    epoch: int = -1
    failure: Failed | None = None

    def submit(self, method: str, *arguments: Any) -> None:
        """A call that Ray tries again itself would reach a process that was told nothing; to be `ready` is all that
        each is asked for."""
        self.method, tries = method, -1 if method == "ready" else 0
        self.call = getattr(self.actor, method).options(max_task_retries=tries).remote(*arguments)


def play(
    plan: Plan,
    show: Callable[[int, dict[str, float]], None] = lambda step, figures: None,
    started: Callable[[str, Any], None] = lambda *_: None,
    say: Callable[[str], None] = lambda line: None,
) -> None:
    """Run all services until every step is done, as `local.play` does; `started` is called with the name, pid and host
    of whatever starts. Raises RunError also if Ray is missing, or its cluster too small, and if a machine does not see
    the run folder or the store."""
    store = plan.store if "://" in plan.store or not plan.store else str(Path(plan.store).resolve())
    plan = replace(plan, folder=plan.folder.resolve(), store=store)
    names = [*plan.trainers, *plan.names, *plan.spares, *(["evaluator"] if plan.evaluate_every else [])]
    claim(plan)
    run, deaths, running, epochs = named(plan.folder), Deaths(plan), dict[str, RunningService](), Counter[str]()
    with (
        joined(len(names), gpus(plan)) as ray,
        meeting_port(ray.util.get_node_ip_address()) as at,
        ranks_port(plan, at.host) as ranks,
    ):

        def start(name: str) -> None:
            running[name] = RunningService(
                ray.remote(Service).options(max_restarts=-1, **placement_options(ray, plan, name)).remote(name)
            )
            running[name].submit("ready")

        def end_with(name: str, cause: str) -> None:
            """Notes the death of a service, and ends those that begin again together with it."""
            partners = plan.partners(name)
            first, running_partners = (
                partners[0],
                [running[partner] for partner in partners if partner != name and partner in running],
            )
            deaths.note(
                first, epochs[first], cause, find_main_failure(ray, [running[name], *running_partners]), process=name
            )
            epochs[first] += 1
            for service in running_partners:
                if service.method != "ready":
                    ray.kill(service.actor, no_restart=False)
            for partner in partners:
                if partner not in running:
                    start(partner)

        def handle_reports(name: str, reports: list) -> bool:
            """Whether the service has ended well."""
            for report in reports:
                if isinstance(report, Failed):
                    running[name].failure = report
                    ray.kill(running[name].actor, no_restart=False)
                elif isinstance(report, Silent):
                    if report.name in running and report.epoch == running[report.name].epoch:
                        ray.kill(running[report.name].actor, no_restart=False)
                elif isinstance(report, str):
                    say(report)
                elif report is not None:
                    show(*report)
            return reports[-1] is None

        try:
            for name in ("reconciler", *names):
                start(name)
            deadline = math.inf  # when those who did not hear that all steps are done are ended
            while running.keys() - {"evaluator"} and time.monotonic() < deadline:
                done, _ = ray.wait([service.call for service in running.values()], timeout=plan.timeout / 10)
                for name, service in [(name, service) for name, service in running.items() if service.call in done]:
                    try:
                        answer = ray.get(service.call)
                    except ray.exceptions.RayError as error:
                        is_lost = isinstance(error, ray.exceptions.RayActorError)
                        # It would be the same again.
                        if service.method == "ready" or service.method == "serve" and not is_lost:
                            raise RunError(f"{name} cannot be started: {last_line(error)}") from None
                        if deadline < math.inf:
                            ray.kill(service.actor)
                            del running[name]
                            continue
                        if service.epoch == epochs[plan.partners(name)[0]]:  # otherwise it was ended with a partner
                            end_with(name, "Ray lost its process" if is_lost else last_line(error))
                        service.failure = None
                        service.submit("ready")
                        continue
                    if service.method == "ready":
                        service.epoch = epochs[plan.partners(name)[0]]
                        service.submit("serve", plan, run, at, service.epoch, ranks)
                        started(name, answer)
                    elif handle_reports(name, answer):
                        ray.kill(service.actor)
                        del running[name]
                        deadline = time.monotonic() + plan.timeout if name == "reconciler" else deadline
                    else:
                        service.submit("next_reports", service.epoch)
        finally:
            for service in running.values():
                ray.kill(service.actor)


def find_main_failure(ray: Any, dead_services: Sequence[RunningService]) -> Failed | None:
    """What says most of why services died: a rank may go because another one has, which has more to say a moment
    later."""
    calls = [service.call for service in dead_services[1:] if service.method != "ready"]
    failures = [service.failure for service in dead_services]
    for call in ray.wait(calls, num_returns=len(calls), timeout=1.0)[0] if calls else []:
        with contextlib.suppress(ray.exceptions.RayError):
            failures += [report for report in ray.get(call) if isinstance(report, Failed)]
    return max((failure for failure in failures if failure is not None), key=Failed.weight, default=None)


@contextlib.contextmanager
def ranks_port(plan: Plan, host: str) -> Iterator[int]:
    """A port of an address of this machine where the ranks of a group meet; 0 if there is none."""
    if plan.group is None:
        yield 0
    else:
        from torch.distributed import TCPStore

        server = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        port = server.getsockname()[1]
        # Without a socket it would listen at all addresses.
        store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach())
        yield port
        del store


def gpus(plan: Plan) -> int:
    """GPUs that a run cannot do without: one for each rank over nccl."""
    return len(plan.trainers) if plan.group is not None and plan.group.backend == "nccl" else 0


def placement_options(ray: Any, plan: Plan, name: str) -> dict[str, Any]:
    """Where a service may be placed, as options of its actor."""
    if name == "reconciler":
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # pyright: ignore[reportMissingImports]

        node_id = ray.get_runtime_context().get_node_id()
        return {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False)}
    num_gpus = int(ray.cluster_resources().get("GPU", 0))
    if name in plan.trainers:
        return {"num_cpus": 1, "num_gpus": min(1, num_gpus if plan.group is None else gpus(plan))}
    needs_gpu = (
        plan.engine == "vllm" and name != "evaluator" and num_gpus >= len(plan.trainers) + plan.workers + plan.standby
    )
    return {"num_cpus": 1, "num_gpus": int(needs_gpu), "scheduling_strategy": "SPREAD"}


def last_line(error: Exception) -> str:
    return str(error).strip().splitlines()[-1].strip()
