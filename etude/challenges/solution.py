"""A reader's file as a scorer sees it: functions that take and return plain data, and nothing besides.

    with Solution(path, seconds=60) as solution:
        solution("estimate", logp, ref_logp)          in an interpreter of its own
        with solution.fresh() as other: …             in another one, which knows nothing of the first

All interpreters of a solution share its seconds. `Here` does the same in this process, for solutions of our own and for tests.
"""

from __future__ import annotations

import contextlib
import copy
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from etude.challenges import solver
from etude.challenges.wire import packed, unpacked
from kit.settings import RunError

__all__ = ["Here", "Solution", "Solves"]

ROOT = Path(__file__).resolve().parents[2]
LONGEST = 300
"""How many characters of what a solution raises are shown."""


class Solves(Protocol):
    """What a scorer asks."""

    def __call__(self, function: str, *arguments: Any) -> Any:
        """Calls a function of the solution. Raises RunError, in one line, for whatever it does wrong."""
        ...

    def fresh(self) -> contextlib.AbstractContextManager[Solves]:
        """The same file in another interpreter."""
        ...


def returned(path: Path, says: dict) -> Any:
    """The value in an answer. Raises RunError with the line of the reader's file."""
    if "returned" in says:
        return unpacked(says["returned"])
    line = f", line {says['line']}" if says["line"] else ""
    said = " ".join(says["raised"].split())
    raise RunError(f"{path}{line}: {said if len(said) <= LONGEST else said[: LONGEST - 1] + '…'}")


class Here:
    """A solution in this process."""

    def __init__(self, path: Path):
        self.path, self.module = path, solver.loaded(path)

    def __call__(self, function: str, *arguments: Any) -> Any:
        given = unpacked(packed(list(arguments)))
        return returned(self.path, solver.answer(self.path, lambda: solver.called(self.module, function, given)))

    @contextlib.contextmanager
    def fresh(self) -> Iterator[Solves]:
        yield Here(self.path)


def passed_on(heard: int) -> None:
    """Passes what is printed on to stderr, which may be a file, and closes the pipe at its end: a solution may not write to any file."""
    with open(heard, "rb", buffering=0) as printed:
        while block := printed.read(1 << 16):
            with contextlib.suppress(OSError):
                os.write(2, block)


class Clock:
    """Seconds that are left."""

    def __init__(self, seconds: float):
        self.allowed = self.left = seconds


class Solution:
    """A solution in a process of its own, which ends with the block."""

    def __init__(self, path: Path, seconds: float):
        """`seconds`: how long all its calls may take together. Raises RunError if there is no such file, or it does not load."""
        if not path.is_file():
            raise RunError(f"{path} does not exist; `etude challenge N` writes a file to start from")
        self.path, self.clock = path, Clock(seconds)

    def __enter__(self) -> Solution:
        read, write = os.pipe()
        back, there = os.pipe()
        paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        words = [sys.executable, "-m", "etude.challenges.solver", str(self.path), str(read), str(there)]
        heard, printed = os.pipe()
        self.process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=printed,
            pass_fds=(read, there),
            env={**os.environ, "PYTHONPATH": paths},
            start_new_session=True,
        )
        for end in (read, there, printed):
            os.close(end)
        self.relay = threading.Thread(target=passed_on, args=(heard,), daemon=True)
        self.relay.start()
        self.asks, self.says, self.rest = write, back, b""
        try:
            self.value()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.relay.join(5)
        os.close(self.asks)
        os.close(self.says)

    def __call__(self, function: str, *arguments: Any) -> Any:
        line = packed([function, list(arguments)]).encode() + b"\n"
        with contextlib.suppress(BrokenPipeError):  # it has died; reading says how
            while line:
                line = line[os.write(self.asks, line) :]
        return self.value()

    @contextlib.contextmanager
    def fresh(self) -> Iterator[Solves]:
        other = copy.copy(self)
        with other:
            yield other

    def value(self) -> Any:
        """The next answer."""
        parts = [self.rest]
        while b"\n" not in parts[-1]:
            began = time.monotonic()
            ready = select.select([self.says], [], [], max(0.0, self.clock.left))[0]
            self.clock.left -= time.monotonic() - began
            if not ready:
                raise RunError(f"{self.path}: too slow; all calls together may take {self.clock.allowed:g} seconds")
            if not (block := os.read(self.says, 1 << 20)):
                raise RunError(f"{self.path}: its process ended with exit code {self.process.wait()}, in the middle of a call")
            parts.append(block)
        line, _, self.rest = b"".join(parts).partition(b"\n")
        try:
            return returned(self.path, unpacked(line.decode()))
        except (ValueError, LookupError, TypeError):
            raise RunError(f"{self.path}: its process sent something other than an answer") from None
