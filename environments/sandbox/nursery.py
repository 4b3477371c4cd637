"""A nursery: one process that has imported what programs need, and sandboxes that are forks of it.

To start Python and to import pytest takes longer than most of what is done then. A nursery does it once, in a sandbox
of its own: a read-only root, no tree, no network, no capabilities. For each sandbox it forks, and the fork builds walls
of its own within the nursery's before it is told anything (inside/nursery.py). Two sandboxes of a nursery have in
common what they share with the nursery: the root, and memory that was written before either of them began. None of them
has a number for another process than its own, and each ends with its first process, as any sandbox does.

Addresses of modules and the order of hashed texts are the nursery's, and so the same in all of its sandboxes: none of
our guards hangs on them."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path

from kit.settings import RunError

from .bubblewrap import Bubblewrap
from .cache import cache_folder, reachable
from .interface import LIMITS, Limits
from .manifest import Entry
from .open import own_store
from .root import root_file_system
from .served import Served
from .start import Started, start
from .store import Store
from .visible import one_line
from .wire import Wire, WireError

__all__ = ["Nursed", "Nursery"]

BEGIN, FORK, END = 60.0, 10.0, 10.0
"""Seconds: until all is imported; until a fork stands behind its walls; until its processes are gone."""
FORK_REQUEST = b"another"
"""As in inside/nursery.py."""
EMPTY = {"": Entry("dir", 0o755)}


class Fork:
    """A process of a nursery behind its own walls: see served.Machine."""

    def __init__(self, handle: int, pipes: tuple[int, int, int]) -> None:
        """`handle`: a pidfd of it; `pipes`: our ends of what it reads, what it answers, and what it says where it
        fails."""
        self.handle, self.pipes, self.starter = handle, pipes, os.getpid()
        self.first = _read_pid(handle)

    def wire(self, tick: Callable[[], None]) -> Wire:
        requests, answers, _ = self.pipes
        return Wire(answers, requests, tick)

    def crossed(self) -> bool:
        return False

    def stop(self) -> None:
        try:
            signal.pidfd_send_signal(self.handle, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def kill(self) -> None:
        """The kernel says that the first process has ended once all others are gone."""
        if os.getpid() != self.starter:
            return
        self.stop()
        poll = select.poll()
        poll.register(self.handle, select.POLLIN)
        poll.poll(1000 * END)
        for handle in (self.handle, *self.pipes):
            os.close(handle)

    def failure(self, wire: Wire) -> str:
        self.stop()
        try:
            message = Wire(self.pipes[2], self.pipes[0]).line(time.monotonic() + END, 1000).decode(errors="replace")
        except WireError:
            message = "nothing"
        return f"the sandbox of a nursery did not begin; it says: {one_line(message)}"


class Nursed(Served):
    """A sandbox that is a fork of a nursery (see interface.py). It begins with an empty tree. `begin` knows the
    nursery's command, and any other."""

    def __init__(self, fork: Fork, root: Path, store: Store, limits: Limits) -> None:
        self.root = root
        super().__init__(fork, store, limits, EMPTY, EMPTY, {"overlay": False, "bytes": 0, "inodes": 0, "nested": True})

    def fork(self, snapshot: str) -> Bubblewrap:
        """A sandbox that begins with a stored tree: see interface.py. It is no fork of the nursery."""
        return Bubblewrap(self.root, self.store, snapshot, self.limits)

    def __enter__(self) -> Nursed:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _read_pid(handle: int) -> int:
    """The number of a process, as this machine sees it. Raises RunError where it has ended."""
    text = Path(f"/proc/self/fdinfo/{handle}").read_text()
    pid = next((int(line.split()[1]) for line in text.splitlines() if line.startswith("Pid:")), -1)
    if pid < 1:
        raise RunError("the sandbox of a nursery has ended before it began")
    return pid


class NurseryEnded(Exception):
    """A nursery has ended, or does not answer."""


class Running:
    """A nursery that has started. Raises RunError where it does not."""

    def __init__(self, root: Path, request: bytes) -> None:
        self.control, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with child_end:
            try:
                self.machine: Started = start(root, None, (child_end.fileno(),))
            except BaseException:
                self.control.close()
                raise
        try:
            wire = self.machine.wire(lambda: None)
            wire.send(request, time.monotonic() + BEGIN)
            if wire.line(time.monotonic() + BEGIN, 100) != b"ready":
                raise WireError("the nursery says what is no answer")
        except BaseException as error:
            message = self.machine.failure(wire) if isinstance(error, WireError) else ""
            self.close()
            if message:
                raise RunError(message) from None
            raise

    def fork(self) -> Fork:
        """A fork that stands behind its walls. Raises RunError where the kernel refuses them, and NurseryEnded where
        the nursery has ended or does not answer."""
        (request_reader, request_writer), (answer_reader, answer_writer), (note_reader, note_writer) = (
            os.pipe() for _ in range(3)
        )
        open_handles = [request_writer, answer_reader, note_reader]
        try:
            reply, handles = self._request_fork(request_reader, answer_writer, note_writer)
            open_handles += handles
            if reply == b"first" and len(handles) == 1:
                fork = Fork(handles[0], (request_writer, answer_reader, note_reader))
                open_handles.clear()
                return fork
        finally:
            for handle in (request_reader, answer_writer, note_writer, *open_handles):
                os.close(handle)
        raise RunError(f"this machine allows no sandboxes within sandboxes: {one_line(reply.decode(errors='replace'))}")

    def _request_fork(self, *pipe_ends: int) -> tuple[bytes, list[int]]:
        """What is said where a fork is asked for that has these handles, and the handles that come with it."""
        try:
            socket.send_fds(self.control, [FORK_REQUEST], pipe_ends)
            self.control.settimeout(FORK)
            reply, handles, *_ = socket.recv_fds(self.control, 1000, 1)
        except OSError:
            raise NurseryEnded from None
        if not reply:
            raise NurseryEnded
        for handle in handles:
            os.set_inheritable(handle, False)
        return reply, handles

    def close(self) -> None:
        """Ends it, and all of its forks."""
        if os.getpid() == self.machine.starter:
            self.control.close()
        self.machine.kill()


class Nursery:
    """Gives sandboxes in which a command begins at once. It starts with the first one, and anew where it has ended.
    Threads may share it; a forked process begins its own. `refused`: whether somebody has noted that there are none
    here."""

    def __init__(
        self,
        command: str,
        modules: Mapping[str, str],
        limits: Limits = LIMITS,
        root: Path | None = None,
        store: Store | None = None,
    ) -> None:
        """`modules`: texts by name, imported in their order; `command` begins the function `nursed` of the last.
        `root`, `store`: see open.py."""
        self.request = json.dumps([command, dict(modules)]).encode() + b"\n"
        self.limits, self.root, self.store = limits, root, store
        self.refused = False
        self._reset()

    def sandbox(self) -> Nursed:
        """A sandbox of its own. Raises RunError, in one line, where this machine has no sandboxes within sandboxes."""
        self._reset_after_fork()
        root = reachable(self.root or root_file_system())
        store = self.store or own_store(cache_folder() / "store")
        with self._lock:
            fork = self._fork(root) or self._fork(root)
        if fork is None:
            raise RunError("a nursery of sandboxes has ended twice before it gave one")
        return Nursed(fork, root, store, self.limits)

    def refuse(self, reason: str) -> None:
        """Notes that sandboxes are opened otherwise from now on, and says why, once and in one line on stderr."""
        with self._lock:
            was_refused, self.refused = self.refused, True
        if not was_refused:
            print(reason, file=sys.stderr, flush=True)

    def _fork(self, root: Path) -> Fork | None:
        """None where the nursery has ended, or does not answer. It is not asked again then, nor where somebody was
        interrupted who waited: the answer that comes late would be taken for another one's. Its forks, in which others
        are graded, go on."""
        if self._running is None:
            self._running = Running(root, self.request)
            self._finalizers.append(weakref.finalize(self, self._running.close))
        try:
            fork = self._running.fork()
            self._has_forked = True
            return fork
        except RunError:
            if not self._has_forked:
                self._stop()  # it holds a namespace that other sandboxes may need
            raise
        except BaseException as error:
            self._running = None
            if isinstance(error, NurseryEnded):
                return None
            raise

    @property
    def has_forked(self) -> bool:
        """Whether it has given this process a sandbox: where it gives none later, that passes."""
        self._reset_after_fork()
        return self._has_forked

    @property
    def first(self) -> int | None:
        """The number of its process, as this machine sees it; None where none runs."""
        self._reset_after_fork()
        running = self._running
        return None if running is None else running.machine.first

    def close(self) -> None:
        """Ends it, and all of its sandboxes. Closing twice does nothing; who asks for a sandbox then starts it
        again."""
        self._reset_after_fork()
        with self._lock:
            self._stop()

    def _stop(self) -> None:
        self._running = None
        while self._finalizers:
            self._finalizers.pop()()

    def _reset(self) -> None:
        self._pid, self._lock = os.getpid(), threading.Lock()
        self._running: Running | None = None
        self._finalizers: list[weakref.finalize] = []
        self._has_forked = False

    def _reset_after_fork(self) -> None:
        if self._pid != os.getpid():
            self._reset()

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
