"""Starting and watching ranks: torchrun with one process per rank, restarts if one dies, and a diagnosis that names a
hanging rank.

    start(arguments, nproc)      from a shell: torchrun with this program inside, on this machine or on several (`Node`)
    worker()                     whether this process is one of torchrun's
    world(backend)               inside: the process group, NCCL on GPUs or gloo on CPUs, and this rank's device
    share_cores(rank)            inside, on CPUs: ranks that wait for each other do not preempt each other
    Watchdog(folder, timeout)    inside: `beat(step)` after each step; silence for longer than `timeout` ends the
                                 process
    stay_alive(), meet()         within a step of unequal length, such as sampling with slow tools: this rank works;
                                 wait here for ranks that still do

On several machines, each calls `start` as a `Node`: node 0 holds the store where all agents of torchrun meet. After a
failure on any of them, all agents start their ranks again.

A rank that hangs makes all others wait in a collective, and from there nobody can tell which one it is. So each rank
has a thread that watches its main thread. If no step has ended for longer than `timeout`, it writes to a file,
FOLDER/RANK, where the main thread is and how many collectives it has started. The culprit is a rank that has started
fewer than others, or has written nothing. If all have started the same number, it is the one that is not in a
collective. (On GPUs, a collective starts long before anyone waits for it, and the wait may be anywhere.) The first rank
that has answered reports this, and all exit, so torchrun restarts the group from the last checkpoint."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from kit.disk import read_json
from kit.settings import Preempted
from scaled.runtime import preemption
from scaled.runtime.mesh import current

__all__ = ["Node", "Watchdog", "meet", "share_cores", "start", "stay_alive", "worker", "world"]


def variables(folder: Path) -> dict[str, str]:
    """Variables of the environment that ranks on GPUs need, unless the user has set them; `folder` is that of the run.
    docs/scaling.md has the reasons."""
    defaults = {
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "NCCL_DEBUG": "WARN",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": str(folder / "nccl-trace-"),
    }
    earlier_names = {
        "PYTORCH_ALLOC_CONF": "PYTORCH_CUDA_ALLOC_CONF",
        "TORCH_FR_DUMP_TEMP_FILE": "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
    }
    return {
        name: value
        for name, value in defaults.items()
        if name not in os.environ and earlier_names.get(name, name) not in os.environ
    }


@dataclass(frozen=True)
class Node:
    """This machine among those of a run."""

    count: int
    """Number of machines."""
    number: int
    """Of this machine, from 0."""
    host: str
    """Name or address of machine 0."""
    port: int
    """A port of it, where the agents of all machines meet."""

    def options(self, run: str) -> list[str]:
        """How torchrun's agent here meets those of the other machines of the run."""
        return [
            "--nnodes",
            str(self.count),
            "--rdzv-backend",
            "c10d",
            "--rdzv-endpoint",
            f"{self.host}:{self.port}",
            "--rdzv-id",
            run,
            # torchrun would compare the name with its own, and a machine may have several.
            "--rdzv-conf",
            f"is_host={self.number == 0}",
        ]

    def wait(self) -> None:
        """Returns once machine 0 has started its agent: it may prepare data for hours before, and an agent waits for a
        minute."""
        is_reported = False
        while True:
            try:
                with socket.create_connection((self.host.strip("[]"), self.port), timeout=5.0):
                    return
            except OSError:
                if not is_reported:
                    print(f"waiting for node 0 at {self.host}:{self.port}", flush=True)
                is_reported = True
                time.sleep(1.0)


def start(module: str, arguments: Sequence[str], nproc: int, restarts: int, node: Node | None = None) -> int:
    """Runs `python -m module arguments`, the first of which is the run's folder, as nproc ranks on this machine;
    returns the exit code of torchrun. If one rank dies, the group is restarted up to `restarts` times; if this process
    dies, all ranks end. `node`: with those of other machines, whose folder has the same name. Raises Preempted if they
    have left at a signal."""
    if node is not None and node.number:
        node.wait()
    command = [
        sys.executable,
        "-m",
        "scaled.runtime.launch",
        str(os.getpid()),
        *(["--standalone"] if node is None else node.options(Path(arguments[0]).name)),
        "--nproc-per-node",
        str(nproc),
        "--max-restarts",
        str(restarts),
        "-m",
        module,
        *arguments,
    ]
    # One thread per rank, whatever the caller uses: float32 sums depend on it, and a resumed run must continue as it
    # started.
    environment = {
        **os.environ,
        **variables(Path(arguments[0])),
        "OMP_NUM_THREADS": "1",
        "TORCH_DISTRIBUTED_DEBUG": "OFF",
    }
    with tempfile.TemporaryDirectory(prefix="etude-") as folder, preemption.listening(Path(folder)):
        process = subprocess.Popen(command, env=environment | {preemption.FOLDER: folder})
        try:
            code = process.wait()
        except BaseException:
            process.send_signal(signal.SIGINT)
            process.wait()
            raise
    if code == preemption.CODE:
        raise Preempted("stopped by a signal; the state is saved")
    return code


def exit_with_parent(parent: int, number: int) -> None:
    """Sends a signal to this process when the process `parent` is gone: torchrun ends with its parent, ranks with
    torchrun. A killed process cannot notify the others, and ranks without a parent would write to the folder at the
    same time as those of a resumed run."""
    while os.getppid() == parent:
        time.sleep(0.2)
    os.kill(os.getpid(), number)


def worker() -> bool:
    """Whether torchrun started this process as a rank."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "LOCAL_RANK" in os.environ


def share_cores(rank: int) -> None:
    """Pins this rank to one core and lets it run there without preemption. Call it before any thread starts. Ranks on
    CPUs wait for each other hundreds of times per step, and a kernel that switches to every process it wakes spends
    more time on that than on their work: 20 steps of a tiny network on four ranks and two cores took 4.1 s that way,
    and 2.4 s like this. Does nothing if the system has no such calls."""
    if hasattr(os, "SCHED_BATCH"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})


@contextmanager
def world(backend: str, timeout: float) -> Iterator[int]:
    """Joins the process group; yields this rank's number. `timeout`: seconds per step; a collective times out only
    after three times as long, so `Watchdog` can first name the culprit."""
    device = None
    if backend == "nccl":
        device = torch.device(
            "cuda", int(os.environ["LOCAL_RANK"])
        )  # unless NCCL is told, it guesses, and says so at every barrier
        torch.cuda.set_device(device)
    else:
        share_cores(int(os.environ["LOCAL_RANK"]))
    threading.Thread(target=exit_with_parent, args=(os.getppid(), signal.SIGKILL), daemon=True).start()
    preemption.listen()
    store, rank, ranks = next(dist.rendezvous("env://", timeout=timedelta(seconds=max(3 * timeout, 300))))
    # On one machine the agent keeps its store across restarts, with the addresses of the dead ranks. On several each
    # attempt has a store of its own (`agent`): their agents count restarts each for itself (pytorch #108158).
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store = dist.PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=3 * timeout), device_id=device
    )
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()


class Watchdog:
    """Reports which rank hangs. A context that all ranks enter together; its thread ends with it."""

    GRACE = 2.0
    """Seconds for all ranks to write where they are."""
    POLL = 0.05
    """Seconds between two looks at how far other ranks are."""
    active: "Watchdog | None" = None
    """That of this process now."""

    def __init__(self, folder: Path, timeout: float):
        """`folder` is the same for all ranks; `timeout`: seconds that a step may take."""
        self.folder, self.timeout = Path(folder), timeout
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.last_beat, self.step, self.stop_event = time.monotonic(), -1, threading.Event()
        self.beat_count, self.published_count, self.meeting_count, self.is_meeting = 0, 0, 0, False
        self.main_thread = threading.get_ident()
        self.groups = {dist.group.WORLD, *(group.handle for _, group in current().groups if group.handle)}
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in (str(self.rank), f"{self.rank}.beats", f"{self.rank}.meetings"):
            (self.folder / name).unlink(missing_ok=True)
        self.thread = threading.Thread(target=self._watch_steps, daemon=True)
        dist.barrier()

    def beat(self, step: int) -> None:
        """This rank has finished a step."""
        self.step = step
        self.stay_alive()

    def stay_alive(self) -> None:
        """This rank does its work, within a step."""
        self.last_beat, self.beat_count = time.monotonic(), self.beat_count + 1

    def meet(self) -> None:
        """Waits until all ranks are here. A collective would fail where another rank still works for three times the
        timeout; here, as long as any rank beats, those that wait for it beat as well. A collective must follow before
        this watchdog ends, so that nobody who is still here waits for the next one's."""
        self.meeting_count, self.is_meeting = self.meeting_count + 1, True
        self._write_count("meetings", self.meeting_count)
        beats: list[int] = []
        while min(self._read_counts("meetings")) < self.meeting_count:
            if (counts := self._read_counts("beats")) != beats:
                beats, self.last_beat = counts, time.monotonic()
            time.sleep(self.POLL)
        self.is_meeting = False
        self.stay_alive()

    def publish(self) -> None:
        """Tells the other ranks how often this one has beaten, if that is news."""
        if self.beat_count != self.published_count:
            self.published_count = self.beat_count
            self._write_count("beats", self.published_count)

    def _write_count(self, name: str, count: int) -> None:
        temporary = self.folder / f".{self.rank}.{name}"
        temporary.write_text(str(count))
        os.replace(temporary, self.folder / f"{self.rank}.{name}")

    def _read_counts(self, name: str) -> list[int]:
        paths = [self.folder / f"{rank}.{name}" for rank in range(self.ranks)]
        return [int(path.read_text()) if path.exists() else 0 for path in paths]

    def describe_position(self) -> dict:
        """How many collectives this rank has started, whether its main thread is inside torch.distributed, and its
        current line outside torch."""
        frame = sys._current_frames()[self.main_thread]
        is_waiting, torch_folder = (
            f"torch{os.sep}distributed" in frame.f_code.co_filename,
            os.path.dirname(torch.__file__),
        )
        while frame.f_code.co_filename.startswith(torch_folder) and frame.f_back is not None:
            frame = frame.f_back
        num_collectives = sum(group._get_sequence_number_for_group() for group in self.groups)
        return {
            "begun": num_collectives,
            "waits": is_waiting or self.is_meeting,
            "at": f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}",
        }

    def name_hanging_ranks(self) -> str:
        """Which rank hangs, according to the files of all ranks."""
        files = {rank: self.folder / str(rank) for rank in range(self.ranks)}
        silent_ranks = [rank for rank, path in files.items() if not path.exists()]
        reports = {rank: read_json(path) for rank, path in files.items() if rank not in silent_ranks}
        most_collectives = max((report["begun"] for report in reports.values()), default=0)
        ranks_behind = [rank for rank, report in reports.items() if report["begun"] < most_collectives]
        hanging_ranks = ranks_behind or [rank for rank, report in reports.items() if not report["waits"]]
        parts = [f"rank {rank} hangs in {reports[rank]['at']}" for rank in hanging_ranks] + [
            f"rank {rank} does not answer" for rank in silent_ranks
        ]
        return "; ".join(parts) or "all ranks wait for each other"

    def _watch_steps(self) -> None:
        while not self.stop_event.wait(min(1.0, self.timeout / 4)):
            self.publish()
            if time.monotonic() - self.last_beat < self.timeout:
                continue
            temporary = self.folder / f".{self.rank}"
            temporary.write_text(json.dumps(self.describe_position()))
            os.replace(temporary, self.folder / str(self.rank))
            time.sleep(self.GRACE)
            is_first = (
                min((r for r in range(self.ranks) if (self.folder / str(r)).exists()), default=self.rank) == self.rank
            )
            self.exit_process(
                f"no step after step {self.step} in {self.timeout:g} s: {self.name_hanging_ranks()}", is_first
            )
            return

    def exit_process(self, reason: str, say: bool) -> None:
        """Ends this process; prints the reason if it reports for all ranks."""
        if say:
            print(f"error: {reason}", file=sys.stderr, flush=True)
        time.sleep(self.GRACE / 4)
        os._exit(14)

    def __enter__(self) -> "Watchdog":
        self.last_beat, Watchdog.active = time.monotonic(), self
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        Watchdog.active = None
        self.stop_event.set()
        self.thread.join()


def stay_alive() -> None:
    """See `Watchdog.stay_alive`; does nothing where nobody watches."""
    if Watchdog.active is not None:
        Watchdog.active.stay_alive()


def meet() -> None:
    """See `Watchdog.meet`; does nothing where nobody watches."""
    if Watchdog.active is not None:
        Watchdog.active.meet()


def agent(parent: int, arguments: Sequence[str]) -> int:
    """This process as torchrun, with torchrun's arguments, as long as the process `parent` lives. Returns the exit
    code."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.run import main

    if "--standalone" not in arguments:
        # Otherwise the agents share one store for all attempts, and remember where it was when its machine is gone.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    folder = Path(os.environ[preemption.FOLDER])

    def end(*_: object) -> None:
        raise SignalException("the command has ended", sigval=signal.SIGKILL)  # which is sent to the ranks

    signal.signal(signal.SIGINT, end)
    threading.Thread(target=exit_with_parent, args=(parent, signal.SIGINT), daemon=True).start()
    try:
        with preemption.listening(folder):
            main(["--signals-to-handle", "SIGHUP,SIGQUIT", *arguments])
    except (ChildFailedError, SignalException):
        return 1  # the rank has already printed the reason, or the command has one
    except RendezvousError as error:  # another machine has given up, or never came
        print(f"error: the machines of this run no longer meet ({type(error).__name__})", file=sys.stderr, flush=True)
        return 1
    return preemption.CODE if preemption.has_left(folder) else 0


if __name__ == "__main__":
    sys.exit(agent(int(sys.argv[1]), sys.argv[2:]))
