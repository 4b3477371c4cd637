"""Ranks to test on: processes started once and sent one call after another, over gloo.

    ranks(4).run(dict(dp=2, cp=2), f, x, y)        f(x, y) on each of four ranks under that mesh → their results, by
                                                   rank

What is called must be importable in a fresh process: a function at the top level of a module beside this file. A rank
that raises is reported with its traceback, and the others, which may wait for it in a collective, are started again
with it.

Ranks that only wait are hung; ranks that compute, or would if other processes let them, are not: what counts is their
processor time. What is sent is copied: torch would share memory by file descriptors, one exchange with a thread of the
sender for each tensor.

A device of gloo has a thread that wakes a hundred times a second, and torch makes a device for each process group, of
which each layout has five. Here all groups of a rank share one, so that ranks cost nothing while they wait.
"""

import atexit
import os
import pickle
import socket
import time
import traceback
from functools import lru_cache
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch

from tests import forks

__all__ = ["Ranks", "ranks"]

TIMEOUT = 60.0
"""Seconds without an answer, and without a hundredth of a second of work, after which ranks count as hung."""
LONGEST = 1800.0
"""Seconds after which they do, whatever they are doing."""


class Ranks:
    """`n` processes, one rank each."""

    def __init__(self, n: int):
        self.n = n
        self.pipes: list[Connection] = []
        self.processes: list = []

    def start(self) -> None:
        port = free_port()
        for rank in range(self.n):
            here, there = forks.CONTEXT.Pipe()
            process = forks.CONTEXT.Process(target=serve, args=(rank, self.n, port, there), daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.pipes, self.processes = [], []

    def run(self, layout: dict, call, *args) -> list:
        """The results of all ranks. RuntimeError with the traceback of a rank that failed, or if none answers in
        time."""
        if not self.processes:
            self.start()
        request = pickle.dumps((layout, call, args))
        for pipe in self.pipes:
            pipe.send_bytes(request)
        results, waiting = [None] * self.n, {pipe: rank for rank, pipe in enumerate(self.pipes)}
        began = time.monotonic()
        while waiting:
            worked = self.work()
            ready = wait(list(waiting), TIMEOUT)
            if not ready:
                if self.work() > worked and time.monotonic() - began < LONGEST:
                    continue
                self.stop()
                raise RuntimeError(f"ranks {sorted(waiting.values())} hang: no answer and no work in {TIMEOUT:.0f} s")
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    fine, results[rank] = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    fine, results[rank] = False, "the process ended"
                if not fine:
                    others = self.hear(waiting)
                    self.stop()
                    said = "\n".join(
                        f"rank {r} of {self.n}, {layout}:\n{text}" for r, text in ((rank, results[rank]), *others)
                    )
                    raise RuntimeError(said)
        return results

    def work(self) -> float:
        """Seconds of processor time of all ranks so far; 0 where the system does not tell."""
        ticks = 0
        for process in self.processes:
            try:
                fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            ticks += int(fields[11]) + int(fields[12])  # in user and in kernel mode, all threads
        return ticks / os.sysconf("SC_CLK_TCK")

    @staticmethod
    def hear(waiting: dict[Connection, int]) -> list[tuple[int, str]]:
        """What other ranks have to say of a failure: which of them was first, only they know."""
        found = []
        for pipe in wait(list(waiting), 3.0) if waiting else []:
            try:
                fine, text = pickle.loads(pipe.recv_bytes())
            except EOFError:
                fine, text = False, "the process ended"
            if not fine:
                found.append((waiting[pipe], text))
        return found


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def serve(rank: int, n: int, port: int, pipe: Connection) -> None:
    """A rank: answers calls until its pipe closes."""
    import torch.distributed as dist

    from scaled.runtime.launch import share_cores
    from scaled.runtime.mesh import mesh

    share_cores(rank)
    torch.set_num_threads(1)
    # As in conftest.py: what nobody wrote is NaN.
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    share_device()
    dist.init_process_group("gloo", rank=rank, world_size=n)
    while True:
        try:
            layout, call, args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            with mesh(**layout):
                answer = pickle.dumps((True, call(*args)))
        except Exception:
            answer = pickle.dumps((False, traceback.format_exc()))
        pipe.send_bytes(answer)


def share_device() -> None:
    """All process groups of gloo that this process makes from now on share one device, and its thread."""
    from torch.distributed import distributed_c10d

    original = distributed_c10d.ProcessGroupGloo
    device = original.create_device(interface="lo")

    class SharedDevice(original):
        def __init__(self, store, rank, size, timeout):
            options = original._Options()
            options._devices, options._timeout = [device], timeout
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = SharedDevice


@lru_cache(None)
def ranks(n: int) -> Ranks:
    """The session's n ranks."""
    found = Ranks(n)
    atexit.register(found.stop)
    return found
