"""A command that is started before there is anything to tell it, and told once.

To start takes long where much is imported. So a command may be started ahead: it says a line once it is ready, and then
waits for its standard input. While it waits no tool runs: whatever is called ends it first, so that a tool never works
beside another process."""

from __future__ import annotations

import os
import select
import time

from .shell import TICK, Bounds, Command, CommandResult, Stop, Tail, end_all, finish
from .tree import Refused, Room

__all__ = ["Waiting"]

FIRST = 200
"""Bytes of the line that a command says when it is ready, at most."""


class Waiting:
    """A command that waits. `ready`: the line that it has said. Raises Refused where it ends, or its time is over,
    before it says one."""

    def __init__(self, room: Room, bounds: Bounds, stop: Stop, running: Command, writer: int) -> None:
        """`writer`: the other end of what the command reads from."""
        self.room, self.running, self.writer = room, running, writer
        try:
            self.ready = _await_ready(running, bounds, stop)
        except BaseException:
            self.end()
            raise

    def alive(self) -> bool:
        """Whether it still waits."""
        self.running.reap()
        return self.running.status is None

    def end(self) -> None:
        """Ends it, and whatever it has started."""
        end_all(politely=False)
        for handle in (self.writer, self.running.life, self.running.pipe):
            os.close(handle)

    def send_input(self, data: bytes, bounds: Bounds, stop: Stop) -> CommandResult:
        """What it says once it is told this, and how it ends: as of any command. It waits no more."""
        self.running.since, self.running.output = time.monotonic(), Tail(self.room.output)
        try:
            os.set_blocking(self.writer, False)
            self.running.end_reason = self._write(memoryview(data), bounds, stop)
        finally:
            os.close(self.writer)
        return finish(self.running, bounds, stop)

    def _write(self, remaining: memoryview, bounds: Bounds, stop: Stop) -> str | None:
        """Writes what it takes until it ends or its time is over. Gives the reason to end it, if there is one."""
        until = self.running.since + bounds.seconds
        while remaining and time.monotonic() < until:
            _, writable, _ = select.select([self.running.life, stop.handle], [self.writer], [], TICK)
            if reason := stop.reason():
                return reason
            if writable:
                try:
                    remaining = remaining[os.write(self.writer, remaining) :]
                except BlockingIOError:
                    continue
                except BrokenPipeError:
                    break
            elif not self.alive():
                break
        return None


def _await_ready(running: Command, bounds: Bounds, stop: Stop) -> str:
    """The line that a command says when it is ready. Raises Refused."""
    while b"\n" not in running.output.head:
        running.hear(TICK, running.life, stop.handle)
        running.reap()
        if reason := stop.reason():
            raise Refused(reason)
        if running.output.total > FIRST or running.status is not None and not running.open:
            raise Refused(f"the command must say a line and wait; it said {running.output.text()[:FIRST]!r}")
        if time.monotonic() > running.since + bounds.seconds:
            raise Refused(f"the command was not ready after {bounds.seconds:g} seconds")
    return running.output.text().partition("\n")[0]
