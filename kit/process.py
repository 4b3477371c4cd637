"""The process and its machine: memory allocation, processes on all cores, facts for a measurement, random
generators."""

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
    "map_on_cores",
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
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    requested = os.environ.get("OMP_NUM_THREADS", "")
    return min(available, int(requested)) if requested.isdigit() and int(requested) else available


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


def map_on_cores(
    function: Callable[[Any], Any],
    parts: Sequence[Any],
    progress: Callable[[int], None] = lambda done: None,
    processes_per_core: int = 1,
    processes: int | None = None,
) -> list:
    """[function(part) for part in parts], each with one torch thread. On Linux with several cores, it runs
    `processes_per_core` forked processes per core, or as many as `processes` says, and hands out the parts one by one.
    `progress` is called with the number of finished parts. Exceptions of `function` are raised here, and RuntimeError
    if a process dies. The caller sees only return values, which must be picklable, and no other side effects.

    Two threads wait for each other in every matrix product, and a product of a small network takes microseconds. Next
    to other busy programs, a wait lasts until the scheduler has run those: two threads were ten times slower that way.
    Two processes meet only at the end. Each is its own session, and Linux gives every session the same share of a core.
    Two processes per core therefore get twice the share next to other programs, and lose nothing on an idle machine if
    parts are large."""
    num_processes = (processes_per_core * cores() if cores() > 1 else 1) if processes is None else processes
    workers = min(num_processes, len(parts)) if sys.platform == "linux" else 1
    if workers < 2:
        results = []
        with one_thread():
            for part in parts:
                results.append(function(part))
                progress(len(results))
        return results
    context, waiting = multiprocessing.get_context("fork"), list(enumerate(parts))[::-1]
    results, done, pipes, children = [None] * len(parts), 0, {}, []
    try:
        for _ in range(workers):
            parent_end, child_end = context.Pipe()
            child = context.Process(target=_serve_parts, args=(child_end, function, parts), daemon=True)
            child.start()
            child_end.close()
            children.append(child)
            pipes[parent_end] = waiting.pop()[0]
            parent_end.send(pipes[parent_end])
        while pipes:
            for parent_end in multiprocessing.connection.wait([*pipes]):
                assert isinstance(parent_end, multiprocessing.connection.Connection)
                try:
                    kind, value = pickle.loads(parent_end.recv_bytes())
                except EOFError:
                    raise RuntimeError(
                        f"a process that computed {function.__name__} died; is there enough memory?"
                    ) from None
                if kind == "raised":
                    raise value
                results[pipes.pop(parent_end)], done = value, done + 1
                progress(done)
                if waiting:
                    pipes[parent_end] = waiting.pop()[0]
                    parent_end.send(pipes[parent_end])
        return results
    finally:
        for child in children:
            child.kill()
            child.join()


def _serve_parts(connection, function: Callable, parts: Sequence) -> None:
    import torch

    os.setsid()
    threading.Thread(target=_exit_with_parent, args=(multiprocessing.parent_process(),), daemon=True).start()
    torch.set_num_threads(1)
    while True:
        part = parts[connection.recv()]
        try:
            answer = _pickle_tensors(("returned", function(part)))
        except Exception as error:
            answer = pickle.dumps(("raised", error))
        connection.send_bytes(answer)


def _pickle_tensors(value: Any) -> bytes:
    """Pickles `value`, with only the elements of each tensor. torch alone would pickle the complete storage behind
    every view."""
    import torch

    file = io.BytesIO()
    pickler = pickle.Pickler(file, protocol=5)
    pickler.dispatch_table = copyreg.dispatch_table | {torch.Tensor: _reduce_tensor}
    pickler.dump(value)
    return file.getvalue()


def _reduce_tensor(tensor: Any) -> tuple[Callable, tuple]:
    import torch

    if tensor.dtype == torch.bfloat16:  # NumPy has no bfloat16
        return _restore_bfloat16, (tensor.view(torch.int16).numpy(),)
    return torch.from_numpy, (tensor.numpy(),)


def _restore_bfloat16(bits: Any) -> Any:
    import torch

    return torch.from_numpy(bits).view(torch.bfloat16)


def in_fresh_process(
    function: Callable, *arguments: Any, progress: Callable[[float], None], fresh: float = 60.0
) -> Any:
    """Returns `function(*arguments, progress=…)`, run in a new process, or in this one if it has used less than
    `fresh` seconds of CPU time. Progress reports are passed to `progress` here. Raises RuntimeError if the
    function raises, or if its process dies.

    For timings. Eight minutes of training leave a heap so fragmented that decoding one context, which uses all
    weights for every token, is a fifth slower than in a new process (TLB misses: with huge pages most of the
    difference is gone). A new process first spends four seconds importing torch."""
    if time.process_time() < fresh:
        return function(*arguments, progress=progress)
    parent_end, child_end = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    child = context.Process(target=_run_and_report, args=(child_end, function, arguments), daemon=True)
    child.start()
    child_end.close()
    try:
        while True:
            kind, value = parent_end.recv()
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


def _run_and_report(connection, function: Callable, arguments: tuple) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent reports Ctrl-C, then ends this process
    # Without its parent, nobody needs the answer, and a resumed run would share the cores with an orphan.
    threading.Thread(target=_exit_with_parent, args=(multiprocessing.parent_process(),), daemon=True).start()
    keep_freed_memory()
    try:
        connection.send(("returned", function(*arguments, progress=lambda value: connection.send(("progress", value)))))
    except BrokenPipeError:
        pass  # the parent is gone
    except Exception as error:
        connection.send(("raised", f"{type(error).__name__}: {error}"))


def _exit_with_parent(parent) -> None:
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Delays Ctrl-C until the block is over. For short calls into C++ that an exception would disturb: torch.save turns
    some exceptions into its own RuntimeError and loses others."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield  # not the main thread, or signals are ignored
        return
    signals = []
    signal.signal(signal.SIGINT, lambda number, frame: signals.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if signals:
        before(*signals[0])


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
    """The checked-out commit of this source, with "+changes" if files other than measurements were edited; None outside
    Git."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    try:
        git_command = ["git", "-C", str(root)]
        head = subprocess.run([*git_command, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10)
        status = subprocess.run(
            [*git_command, "status", "--porcelain", "-uno", "--", ".", ":!results/figures"],
            capture_output=True,
            text=True,
            timeout=10,
        )
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

    numpy_state = numpy.random.get_state(legacy=True)
    assert not isinstance(numpy_state, dict)
    name, keys, *extra = numpy_state
    state = {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(keys.astype("int64")), *extra),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def restore_rng(state: dict) -> None:
    """Restores the generators to the state that `pack_rng` stored."""
    import torch

    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *extra = state["numpy"]
    import numpy

    numpy.random.set_state((name, keys.numpy().astype("uint32"), *extra))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
