"""The process and its machine: memory allocation, processes on all cores, facts for a measurement, random generators."""

from __future__ import annotations

import contextlib
import copyreg
import ctypes
import io
import multiprocessing
import multiprocessing.connection
import os
import pickle
import platform
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

__all__ = [
    "cores",
    "in_fresh_process",
    "keep_freed_memory",
    "machine",
    "on_cores",
    "one_thread",
    "pack_rng",
    "peak_memory_gib",
    "processor",
    "restore_rng",
    "uninterrupted",
]


def keep_freed_memory() -> bool:
    """Lets the process keep large freed buffers instead of returning each one to the kernel. True if it
    took effect.

    glibc serves every allocation above 128 KiB to 32 MiB with a fresh mapping and unmaps it when it is freed.
    A network's forward and backward pass allocate and free such buffers hundreds of times a step, and the
    kernel zeroes each new mapping page by page on first touch. Attention of the tiny network took 29 ms that
    way, and 4.4 ms from kept memory. The price: memory that was used once stays with the process. Does
    nothing if the C library is not glibc.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    mmap_threshold, trim_threshold = -3, -1  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD of malloc.h
    return mallopt(mmap_threshold, 2**30) == 1 and mallopt(trim_threshold, 2**31 - 1) == 1


def cores() -> int:
    """Number of cores that this process may use, at most OMP_NUM_THREADS."""
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return min(here, int(asked)) if asked.isdigit() and int(asked) else here


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """torch computes with one thread inside the block; the old number is restored afterwards."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def on_cores(
    function: Callable[[Any], Any],
    parts: Sequence[Any],
    progress: Callable[[int], None] = lambda done: None,
    each: int = 1,
    processes: int | None = None,
) -> list:
    """[function(part) for part in parts], each with one torch thread. On Linux with several cores, it runs `each` forked processes per core,
    or as many as `processes` says, and hands out the parts one by one. `progress` is called with the number of finished parts. Exceptions of
    `function` are raised here, and RuntimeError if a process dies. The caller sees only return values, which must be picklable, and no other
    side effects.

    Two threads wait for each other in every matrix product, and a product of a small network takes microseconds. Next to other busy programs,
    a wait lasts until the scheduler has run those: two threads were ten times slower that way. Two processes meet only at the end. Each is
    its own session, and Linux gives every session the same share of a core. Two processes per core therefore get twice the share next to
    other programs, and lose nothing on an idle machine if parts are large."""
    wanted = (each * cores() if cores() > 1 else 1) if processes is None else processes
    workers = min(wanted, len(parts)) if sys.platform == "linux" else 1
    if workers < 2:
        found = []
        with one_thread():
            for part in parts:
                found.append(function(part))
                progress(len(found))
        return found
    context, waiting = multiprocessing.get_context("fork"), list(enumerate(parts))[::-1]
    found, done, pipes, children = [None] * len(parts), 0, {}, []
    try:
        for _ in range(workers):
            here, there = context.Pipe()
            child = context.Process(target=_serve, args=(there, function, parts), daemon=True)
            child.start()
            there.close()
            children.append(child)
            pipes[here] = waiting.pop()[0]
            here.send(pipes[here])
        while pipes:
            for here in multiprocessing.connection.wait([*pipes]):
                assert isinstance(here, multiprocessing.connection.Connection)
                try:
                    kind, value = pickle.loads(here.recv_bytes())
                except EOFError:
                    raise RuntimeError(f"a process that computed {function.__name__} died; is there enough memory?") from None
                if kind == "raised":
                    raise value
                found[pipes.pop(here)], done = value, done + 1
                progress(done)
                if waiting:
                    pipes[here] = waiting.pop()[0]
                    here.send(pipes[here])
        return found
    finally:
        for child in children:
            child.kill()
            child.join()


def _serve(there, function: Callable, parts: Sequence) -> None:
    import torch

    os.setsid()
    threading.Thread(target=_end_with, args=(multiprocessing.parent_process(),), daemon=True).start()
    torch.set_num_threads(1)
    while True:
        part = parts[there.recv()]
        try:
            answer = _packed(("returned", function(part)))
        except Exception as error:
            answer = pickle.dumps(("raised", error))
        there.send_bytes(answer)


def _packed(value: Any) -> bytes:
    """Pickles `value`, with only the elements of each tensor. torch alone would pickle the complete storage behind every view."""
    import torch

    file = io.BytesIO()
    pickler = pickle.Pickler(file, protocol=5)
    pickler.dispatch_table = copyreg.dispatch_table | {torch.Tensor: _numbers}
    pickler.dump(value)
    return file.getvalue()


def _numbers(tensor: Any) -> tuple[Callable, tuple]:
    import torch

    if tensor.dtype == torch.bfloat16:  # NumPy has no bfloat16
        return _bfloat16, (tensor.view(torch.int16).numpy(),)
    return torch.from_numpy, (tensor.numpy(),)


def _bfloat16(bits: Any) -> Any:
    import torch

    return torch.from_numpy(bits).view(torch.bfloat16)


def in_fresh_process(function: Callable, *arguments: Any, progress: Callable[[float], None], fresh: float = 60.0) -> Any:
    """Returns `function(*arguments, progress=…)`, run in a new process, or in this one if it has used less than
    `fresh` seconds of CPU time. Progress reports are passed to `progress` here. Raises RuntimeError if the
    function raises, or if its process dies.

    For timings. Eight minutes of training leave a heap so fragmented that decoding one context, which uses all
    weights for every token, is a fifth slower than in a new process (TLB misses: with huge pages most of the
    difference is gone). A new process first spends four seconds importing torch."""
    if time.process_time() < fresh:
        return function(*arguments, progress=progress)
    here, there = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    child = context.Process(target=_report, args=(there, function, arguments), daemon=True)
    child.start()
    there.close()
    try:
        while True:
            kind, value = here.recv()
            if kind == "returned":
                return value
            if kind == "raised":
                raise RuntimeError(f"{function.__name__}: {value}")
            progress(value)
    except EOFError:
        child.join()
        raise RuntimeError(f"{function.__name__} died with exit code {child.exitcode}") from None
    finally:
        child.kill()
        child.join()


def _report(there, function: Callable, arguments: tuple) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent reports Ctrl-C, then ends this process
    # Without its parent, nobody needs the answer, and a resumed run would share the cores with an orphan.
    threading.Thread(target=_end_with, args=(multiprocessing.parent_process(),), daemon=True).start()
    keep_freed_memory()
    try:
        there.send(("returned", function(*arguments, progress=lambda value: there.send(("progress", value)))))
    except BrokenPipeError:
        pass  # the parent is gone
    except Exception as error:
        there.send(("raised", f"{type(error).__name__}: {error}"))


def _end_with(parent) -> None:
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Delays Ctrl-C until the block is over. For short calls into C++ that an exception would disturb: torch.save turns some exceptions
    into its own RuntimeError and loses others."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield  # not the main thread, or signals are ignored
        return
    came = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        before(*came[0])


def processor() -> str:
    """The processor's name."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def machine() -> dict:
    """Facts to store with a measurement: processor, cores, memory, versions, commit. No host name, no paths."""
    import numpy
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    facts = {
        "cpu": processor(),
        "cores": cores,
        "threads": torch.get_num_threads(),
        "memory_gib": round(memory, 1),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "commit": _commit(),
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name(0)
    return facts


def _commit() -> str | None:
    """The checked-out commit of this source, with "+changes" if files other than measurements were edited; None outside Git."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    try:
        ask = ["git", "-C", str(root)]
        head = subprocess.run([*ask, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10)
        status = subprocess.run([*ask, "status", "--porcelain", "-uno", "--", ".", ":!results/figures"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if head.returncode != 0:
        return None
    return head.stdout.strip()[:12] + ("+changes" if status.stdout.strip() else "")


def peak_memory_gib() -> float:
    """Peak resident memory of this process so far, in GiB."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def pack_rng() -> dict:
    """The state of Python's, NumPy's and torch's global generators, as plain values and tensors."""
    import numpy
    import torch

    drawn = numpy.random.get_state(legacy=True)
    assert not isinstance(drawn, dict)
    name, keys, *rest = drawn
    state = {"python": random.getstate(), "numpy": (name, torch.from_numpy(keys.astype("int64")), *rest), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def restore_rng(state: dict) -> None:
    """Restores the generators to the state that `pack_rng` stored."""
    import torch

    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = state["numpy"]
    import numpy

    numpy.random.set_state((name, keys.numpy().astype("uint32"), *rest))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
