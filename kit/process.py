"""The process and its machine: what to ask of the C library, what a measurement should carry, random generators."""

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
    "restore_rng",
    "uninterrupted",
]


def keep_freed_memory() -> bool:
    """Lets the process keep large freed buffers instead of handing each back to the kernel. True where it
    took effect.

    glibc serves every allocation above 128 KiB to 32 MiB with a fresh mapping and unmaps it when it is freed.
    A network's forward and backward pass allocate and free such buffers hundreds of times a step, and each
    new mapping is zeroed by the kernel page by page on first touch: attention of the tiny network took 29 ms
    so, and 4.4 ms from kept memory. The price is that memory once used stays with the process. Nothing
    happens where the C library is not glibc.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    mmap_threshold, trim_threshold = -3, -1  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD of malloc.h
    return mallopt(mmap_threshold, 2**30) == 1 and mallopt(trim_threshold, 2**31 - 1) == 1


def cores() -> int:
    """Cores that this process may use; fewer where OMP_NUM_THREADS says so."""
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return min(here, int(asked)) if asked.isdigit() and int(asked) else here


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """torch computes with one thread, and afterwards with as many as before."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def on_cores(function: Callable[[Any], Any], parts: Sequence[Any], progress: Callable[[int], None] = lambda done: None, each: int = 1) -> list:
    """[function(part) for part in parts], each with one thread of torch; on Linux with several cores, in `each` forked processes a core, to
    which parts are dealt one by one. `progress` hears how many are done. What `function` raises is raised here; RuntimeError where a
    process dies. Nothing that it changes is seen here: only what it returns, which has to be picklable.

    Two threads wait for each other in every product, and of a small network a product takes microseconds. Beside other busy programs a
    wait lasts until the scheduler has run those: two threads were ten times slower so. Two processes meet only at the end. Each is a
    session of its own, to which Linux gives as much of a core as to every other one: with two a core there are twice as many beside other
    programs, and alone nothing is lost where parts are large."""
    workers = min(each * cores(), len(parts)) if sys.platform == "linux" and cores() > 1 else 1
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
    """Pickled, of a tensor only its own numbers: torch would put the whole memory that it is a view of beside each."""
    import torch

    file = io.BytesIO()
    pickler = pickle.Pickler(file, protocol=5)
    pickler.dispatch_table = copyreg.dispatch_table | {torch.Tensor: _numbers}
    pickler.dump(value)
    return file.getvalue()


def _numbers(tensor: Any) -> tuple[Callable, tuple]:
    import torch

    if tensor.dtype == torch.bfloat16:  # NumPy has none
        return _bfloat16, (tensor.view(torch.int16).numpy(),)
    return torch.from_numpy, (tensor.numpy(),)


def _bfloat16(bits: Any) -> Any:
    import torch

    return torch.from_numpy(bits).view(torch.bfloat16)


def in_fresh_process(function: Callable, *arguments: Any, progress: Callable[[float], None], fresh: float = 60.0) -> Any:
    """What `function(*arguments, progress=…)` returns in a new process, or in this one where it has not used
    `fresh` seconds of CPU time yet; what it reports, `progress` is called with here. RuntimeError where it raises
    or dies in a new process.

    For timings. Eight minutes of training leave a heap so scattered that decoding one context, which uses all
    weights for every token, is a fifth slower in it than in a new process (misses of the page table's cache:
    with huge pages most of it is gone). A new one imports torch for four seconds first."""
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to tell, which then ends this process
    # Without the parent nobody needs the answer, and whoever resumes the run would share the cores with a ghost.
    threading.Thread(target=_end_with, args=(multiprocessing.parent_process(),), daemon=True).start()
    keep_freed_memory()
    try:
        there.send(("returned", function(*arguments, progress=lambda value: there.send(("progress", value)))))
    except BrokenPipeError:
        pass  # nobody listens any more
    except Exception as error:
        there.send(("raised", f"{type(error).__name__}: {error}"))


def _end_with(parent) -> None:
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C waits until the block is over. For what takes a moment and calls C++ that an exception from within would confuse: torch.save
    turns some into a RuntimeError of its own and loses others."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield  # signals go elsewhere, or are ignored
        return
    came = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        before(*came[0])


def machine() -> dict:
    """What a measurement should carry: processor, cores, memory, versions, commit. No host name, no paths."""
    import numpy
    import torch

    model = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    facts = {
        "cpu": model,
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
    """The checked-out commit of this source, with "+changes" when it has been edited; None outside Git."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    try:
        ask = ["git", "-C", str(root)]
        head = subprocess.run([*ask, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10)
        status = subprocess.run([*ask, "status", "--porcelain", "-uno"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if head.returncode != 0:
        return None
    return head.stdout.strip()[:12] + ("+changes" if status.stdout.strip() else "")


def peak_memory_gib() -> float:
    """Largest resident size of this process so far, in GiB."""
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
    """Puts the generators back to where `pack_rng` found them."""
    import torch

    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = state["numpy"]
    import numpy

    numpy.random.set_state((name, keys.numpy().astype("uint32"), *rest))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
