"""Into torchrun and out of it: one process a rank, groups of them started again when one dies, and the rank that hangs called by name.

    start(arguments, nproc)      from a shell: torchrun with this program inside, on this machine
    worker()                     whether this process is one of torchrun's
    world(backend)               inside: the process group, NCCL on GPUs or gloo on CPUs, and this rank's device
    share_cores(rank)            inside, on CPUs: ranks that wait for one another do not drive each other off their cores
    Watch(folder, timeout)       inside: `beat(step)` after each step; silence for longer than `timeout` ends the process

On a cluster torchrun is started by the scheduler on every node, with the same program inside; `start` is for one node.

A rank that hangs makes all others wait in a collective, and which one it is nobody can say from there. So each has a thread that looks
at its main thread: when no step has ended for longer than `timeout`, it leaves in a file, FOLDER/RANK, where that stands and how many
collectives it has begun. Who has begun fewer than others, or leaves no word at all, is the one the others wait for; where all have begun
as many, who is not inside of one. (On GPUs a collective is begun long before anyone waits for it, and that may be anywhere.) The first
that answers says so, and all end, which lets torchrun start the group again from the last checkpoint.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from scaled.runtime.mesh import current

__all__ = ["Watch", "share_cores", "start", "worker", "world"]


def start(module: str, arguments: Sequence[str], nproc: int, restarts: int) -> int:
    """Runs `python -m module arguments` as nproc ranks on this machine; the exit code of torchrun. A group of which one rank dies is
    started again up to `restarts` times; when this process dies, all end."""
    command = [
        sys.executable,
        "-m",
        "scaled.runtime.launch",
        str(os.getpid()),
        "--standalone",
        "--nproc-per-node",
        str(nproc),
        "--max-restarts",
        str(restarts),
        "-m",
        module,
        *arguments,
    ]
    # One thread a rank, whatever the caller's is: a sum in float32 depends on it, and a run goes on as it began.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISTRIBUTED_DEBUG": "OFF"}
    process = subprocess.Popen(command, env=environment)
    try:
        return process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise


def end_with(parent: int) -> None:
    """Ends this process once the process `parent` is no more: torchrun with the one that started it, ranks with torchrun. Killed, none of
    them can say so, and ranks that go on alone would write into the folder beside those of a resumed run."""
    while os.getppid() == parent:
        time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGTERM)


def worker() -> bool:
    """Whether this process is a rank of torchrun's."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "LOCAL_RANK" in os.environ


def share_cores(rank: int) -> None:
    """Gives this rank one core, and lets it finish there before another gets it. Called before any thread is started. Ranks on CPUs wait
    for one another hundreds of times a step, and a kernel that runs at once whoever has been woken up takes more time for that than for
    their work: 20 steps of a tiny network on four ranks and two cores took 4.1 s so, and 2.4 s. Nothing happens where the system has no
    such calls."""
    if hasattr(os, "SCHED_BATCH"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})


@contextmanager
def world(backend: str, timeout: float) -> Iterator[int]:
    """Joins the process group; gives this rank. `timeout`: seconds of a step; a collective gives up only at three times that, so that
    `Watch` can say who is to blame."""
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        share_cores(int(os.environ["LOCAL_RANK"]))
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    store, rank, ranks = next(dist.rendezvous("env://", timeout=timedelta(seconds=max(3 * timeout, 300))))
    # torchrun keeps its store over restarts, and in it the addresses of the ranks that died.
    store = dist.PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=3 * timeout))
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()


class Watch:
    """Tells who hangs. Entered as a context, by all ranks together; the thread ends with it."""

    GRACE = 2.0
    """Seconds that ranks have to say where they stand."""

    def __init__(self, folder: Path, timeout: float):
        """`folder` is the same for all ranks; `timeout`: seconds that a step may take."""
        self.folder, self.timeout = Path(folder), timeout
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.last, self.step, self.over = time.monotonic(), -1, threading.Event()
        self.main = threading.get_ident()
        self.groups = {dist.group.WORLD, *(group.handle for _, group in current().groups if group.handle)}
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / str(self.rank)).unlink(missing_ok=True)
        self.thread = threading.Thread(target=self._look, daemon=True)
        dist.barrier()

    def beat(self, step: int) -> None:
        """This rank has finished a step."""
        self.step, self.last = step, time.monotonic()

    def stands(self) -> dict:
        """How many collectives this rank has begun, whether its main thread is inside of torch.distributed, and the line outside of torch
        where it is."""
        frame = sys._current_frames()[self.main]
        waits, inside = f"torch{os.sep}distributed" in frame.f_code.co_filename, os.path.dirname(torch.__file__)
        while frame.f_code.co_filename.startswith(inside) and frame.f_back is not None:
            frame = frame.f_back
        begun = sum(group._get_sequence_number_for_group() for group in self.groups)
        return {"begun": begun, "waits": waits, "at": f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"}

    def verdict(self) -> str:
        """Who hangs, by what all ranks' files say."""
        files = {rank: self.folder / str(rank) for rank in range(self.ranks)}
        silent = [rank for rank, path in files.items() if not path.exists()]
        heard = {rank: json.loads(path.read_text()) for rank, path in files.items() if rank not in silent}
        most = max((found["begun"] for found in heard.values()), default=0)
        behind = [rank for rank, found in heard.items() if found["begun"] < most]
        hanging = behind or [rank for rank, found in heard.items() if not found["waits"]]
        parts = [f"rank {rank} hangs in {heard[rank]['at']}" for rank in hanging] + [f"rank {rank} does not answer" for rank in silent]
        return "; ".join(parts) or "all ranks wait for one another"

    def _look(self) -> None:
        while not self.over.wait(min(1.0, self.timeout / 4)):
            if time.monotonic() - self.last < self.timeout:
                continue
            temporary = self.folder / f".{self.rank}"
            temporary.write_text(json.dumps(self.stands()))
            os.replace(temporary, self.folder / str(self.rank))
            time.sleep(self.GRACE)
            first = min((r for r in range(self.ranks) if (self.folder / str(r)).exists()), default=self.rank) == self.rank
            self.end(f"no step after step {self.step} in {self.timeout:g} s: {self.verdict()}", first)
            return

    def end(self, why: str, say: bool) -> None:
        """Ends this process; says why where it is to speak for all."""
        if say:
            print(f"error: {why}", file=sys.stderr, flush=True)
        time.sleep(self.GRACE / 4)
        os._exit(14)

    def __enter__(self) -> "Watch":
        self.last = time.monotonic()
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.thread.join()


if __name__ == "__main__":
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main

    threading.Thread(target=end_with, args=(int(sys.argv[1]),), daemon=True).start()
    try:
        main(sys.argv[2:])
    except ChildFailedError:
        sys.exit(1)  # the rank has said why
