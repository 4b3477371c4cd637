"""The harness's end of the pipe to a tool server: frames of bounded size, and times by which they must be there.

The server shares a machine with what the agent runs. Nothing that it sends may stop, fill or mislead the harness:
whatever is no answer to the last request is an error in one line.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable

from kit.disk import parse_json

from .interface import SERVER_ENDED

__all__ = ["WireError", "Wire"]


class WireError(Exception):
    """The other end is gone, or says what is no answer: one line."""


class Wire:
    """Two pipes. `tick`: called about every 50 ms while an answer is waited for."""

    TICK = 0.05

    def __init__(self, reader: int, writer: int, tick: Callable[[], None] = lambda: None) -> None:
        self.reader, self.writer, self.tick = reader, writer, tick
        self.buffer = bytearray()
        for handle in (reader, writer):
            os.set_blocking(handle, False)

    def send(self, data: bytes, until: float) -> None:
        """Writes all of it. `until`: of time.monotonic. Raises Broken."""
        remaining = memoryview(data)
        while remaining:
            self._wait([], [self.writer], until)
            try:
                remaining = remaining[os.write(self.writer, remaining[: 1 << 16]) :]
            except BlockingIOError:
                continue
            except OSError:
                raise WireError(SERVER_ENDED) from None

    def line(self, until: float, max_bytes: int) -> bytes:
        """The next line, of at most `max_bytes` bytes. Raises Broken."""
        searched = 0
        while (end := self.buffer.find(b"\n", searched)) < 0:
            searched = len(self.buffer)
            if searched > max_bytes:
                raise WireError(f"the sandbox's server said more than {max_bytes} bytes in an answer")
            self._receive(until)
        data = bytes(self.buffer[:end])
        del self.buffer[: end + 1]
        return data

    def answer(self, until: float, max_bytes: int) -> dict:
        """The next line, which must be a JSON object, and the last one. Raises Broken."""
        try:
            message = parse_json(self.line(until, max_bytes))
        except ValueError:
            message = None
        if not isinstance(message, dict) or self.buffer:
            raise WireError("the sandbox's server said what is no answer")
        return message

    def read(self, size: int, until: float) -> bytes:
        """Between 1 and `size` bytes. Raises Broken."""
        if not self.buffer:
            self._receive(until)
        block = bytes(self.buffer[:size])
        del self.buffer[:size]
        return block

    def drain(self, until: float) -> bool:
        """Whether the other end was closed by then. What still comes is thrown away."""
        try:
            while True:
                self._receive(until, tick=False)
                self.buffer.clear()
        except WireError:
            return time.monotonic() < until

    def _receive(self, until: float, tick: bool = True) -> None:
        self._wait([self.reader], [], until, tick)
        try:
            block = os.read(self.reader, 1 << 16)
        except BlockingIOError:
            return
        if not block:
            raise WireError(SERVER_ENDED)
        self.take(block)

    def take(self, block: bytes) -> None:
        """Adds to the buffer what has come."""
        self.buffer += block

    def _wait(self, readers: list[int], writers: list[int], until: float, tick: bool = True) -> None:
        poll = select.poll()  # select(2) knows no handle above 1023
        for handle in readers:
            poll.register(handle, select.POLLIN)
        for handle in writers:
            poll.register(handle, select.POLLOUT)
        while not poll.poll(1000 * max(0.0, min(self.TICK, until - time.monotonic()))):
            if time.monotonic() >= until:
                raise WireError("the sandbox's server gave no answer in time")
            if tick:
                self.tick()
