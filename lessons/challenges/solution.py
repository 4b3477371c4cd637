"""A reader's file as a scorer sees it: functions that take and return plain data, and nothing besides.

    with Solution(path, seconds=60) as solution:
        solution("estimate", logp, ref_logp)          in an interpreter of its own
        with solution.fresh() as other: …             in another one, which knows nothing of the first

All interpreters of a solution share its seconds. `LocalSolution` does the same in this process, for solutions of our
own and for tests."""

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

from kit.settings import RunError
from lessons.challenges import solver
from lessons.challenges.wire import packed, unpacked

__all__ = ["LocalSolution", "Solution", "Solves"]

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


def parse_answer(path: Path, fields: dict) -> Any:
    """The value in an answer. Raises RunError with the line of the reader's file."""
    if "returned" in fields:
        return unpacked(fields["returned"])
    line = f", line {fields['line']}" if fields["line"] else ""
    message = " ".join(fields["raised"].split())
    raise RunError(f"{path}{line}: {message if len(message) <= LONGEST else message[: LONGEST - 1] + '…'}")


class LocalSolution:
    """A solution in this process."""

    def __init__(self, path: Path):
        self.path, self.module = path, solver.loaded(path)

    def __call__(self, function: str, *arguments: Any) -> Any:
        values = unpacked(packed(list(arguments)))
        return parse_answer(self.path, solver.answer(self.path, lambda: solver.called(self.module, function, values)))

    @contextlib.contextmanager
    def fresh(self) -> Iterator[Solves]:
        yield LocalSolution(self.path)


def relay_output(pipe: int) -> None:
    """Passes what is printed on to stderr, which may be a file, and closes the pipe at its end: a solution may not
    write to any file."""
    with open(pipe, "rb", buffering=0) as output:
        while block := output.read(1 << 16):
            with contextlib.suppress(OSError):
                os.write(2, block)


class Clock:
    """Seconds that are left."""

    def __init__(self, seconds: float):
        self.allowed = self.left = seconds


class Solution:
    """A solution in a process of its own, which ends with the block."""

    def __init__(self, path: Path, seconds: float):
        """`seconds`: how long all its calls may take together. Raises RunError if there is no such file, or it does not
        load."""
        if not path.is_file():
            raise RunError(f"{path} does not exist; `etude challenge N` writes a file to start from")
        self.path, self.clock = path, Clock(seconds)

    def __enter__(self) -> Solution:
        request_reader, request_writer = os.pipe()
        answer_reader, answer_writer = os.pipe()
        paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        command = [
            sys.executable,
            "-m",
            "lessons.challenges.solver",
            str(self.path),
            str(request_reader),
            str(answer_writer),
        ]
        output_reader, output_writer = os.pipe()
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output_writer,
            stderr=output_writer,
            pass_fds=(request_reader, answer_writer),
            env={**os.environ, "PYTHONPATH": paths},
            start_new_session=True,
        )
        for end in (request_reader, answer_writer, output_writer):
            os.close(end)
        self.relay = threading.Thread(target=relay_output, args=(output_reader,), daemon=True)
        self.relay.start()
        self.request_fd, self.answer_fd, self.buffer = request_writer, answer_reader, b""
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
        os.close(self.request_fd)
        os.close(self.answer_fd)

    def __call__(self, function: str, *arguments: Any) -> Any:
        line = packed([function, list(arguments)]).encode() + b"\n"
        with contextlib.suppress(BrokenPipeError):  # it has died; reading says how
            while line:
                line = line[os.write(self.request_fd, line) :]
        return self.value()

    @contextlib.contextmanager
    def fresh(self) -> Iterator[Solves]:
        clone = copy.copy(self)
        with clone:
            yield clone

    def value(self) -> Any:
        """The next answer."""
        parts = [self.buffer]
        while b"\n" not in parts[-1]:
            start = time.monotonic()
            ready = select.select([self.answer_fd], [], [], max(0.0, self.clock.left))[0]
            self.clock.left -= time.monotonic() - start
            if not ready:
                raise RunError(f"{self.path}: too slow; all calls together may take {self.clock.allowed:g} seconds")
            if not (block := os.read(self.answer_fd, 1 << 20)):
                raise RunError(
                    f"{self.path}: its process ended with exit code {self.process.wait()}, in the middle of a call"
                )
            parts.append(block)
        line, _, self.buffer = b"".join(parts).partition(b"\n")
        try:
            return parse_answer(self.path, unpacked(line.decode()))
        except (ValueError, LookupError, TypeError):
            raise RunError(f"{self.path}: its process sent something other than an answer") from None
