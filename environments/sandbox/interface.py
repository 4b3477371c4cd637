"""What a sandbox is to whoever uses one: calls of tools, observations, snapshots, forks, and limits.

Snapshots hold files only. What a process keeps in memory is not in them: every process that a call starts ends with the
call, so there is none between two calls. A fork of running processes, with their memory, needs a virtual machine.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Protocol

__all__ = ["SERVER_ENDED", "Door", "FLOOD", "LIMITS", "Limits", "Observation", "Sandbox"]

SERVER_ENDED = "the sandbox's server has ended"
"""Why a call has no answer where nobody is left to answer."""
FLOOD = 16
"""A command that says so many times `Limits.output` is ended."""


@dataclass(frozen=True)
class Limits:
    """What a sandbox may use. Raises ValueError unless all are positive, and memory, disk and output hold at least a
    page."""

    processes: int = 64
    """Processes and threads at a time."""
    memory: int = 512 * 2**20
    """Bytes of memory over all processes: the sum of their proportional set sizes, and of what the kernel may hold for
    their sockets."""
    disk: int = 256 * 2**20
    """Bytes that may be written beyond the tree that the sandbox starts from, temporary files included. They lie in
    memory, too."""
    inodes: int = 20_000
    """Files, folders and links that may be made beyond that tree."""
    output: int = 64 * 2**10
    """Bytes of text that a call gives back. Longer text is cut in its middle, and a command that says 16 times as much
    is ended."""
    seconds: float = 60.0
    """Wall-clock seconds of a call that names no timeout of its own, and the most that one may name."""

    def __post_init__(self):
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 < value < float("inf"):
                raise ValueError(f"{field.name} must be positive and finite; got {value}")
            if field.name in ("memory", "disk", "output") and value < 4096:
                raise ValueError(f"{field.name} must be at least 4096 bytes; got {value}")


LIMITS = Limits()
"""Those of a sandbox for which none are named."""


@dataclass(frozen=True)
class Observation:
    """What a call gives back."""

    text: str
    """What a person or a model may read: at most `Limits.output` bytes and a line, with terminal escapes made
    visible."""
    ok: bool
    """Whether the tool did what it was asked, and nothing had to be ended."""
    exit: int | None = None
    """The exit code of a command, 128 + the signal's number if one ended it; None for a tool that runs none."""
    end_reason: str | None = None
    """The limit that ended something, in one line, such as "more than 512 MiB of memory"; None if nothing was ended."""
    seconds: float = 0.0
    """Wall-clock seconds that the call took."""

    @property
    def has_lost_server(self) -> bool:
        """Whether the sandbox's server ended before it could answer, which no process inside can do."""
        return self.exit is None and (self.end_reason or "").startswith(SERVER_ENDED)


class Door(Protocol):
    """A way out of sandboxes that have no network (environments/egress/door.py)."""

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables that commands in a sandbox are told."""
        ...

    def serve(self, listener: socket.socket) -> Callable[[], None]:
        """Answers what connects to a socket that listens in a sandbox, until what this gives is called."""
        ...


class Sandbox(Protocol):
    """A machine for one episode. One call runs at a time. When something ends the sandbox itself, all later calls say
    so, and raise nothing."""

    def call(self, tool: str, args: Mapping[str, object], timeout: float | None = None) -> Observation:
        """Runs a tool. A bad name, bad arguments and a failing tool are observations, too. `timeout`: seconds, at most
        `Limits.seconds`."""
        ...

    def begin(self, command: str, timeout: float | None = None) -> Observation:
        """Starts a command that says a line when it is ready and then waits for its standard input, and gives that
        line. Until it is told something it waits; every other call but `waits` ends it first."""
        ...

    def tell(self, text: str, timeout: float | None = None) -> Observation:
        """Tells the command that waits, and closes its standard input. What it says then is observed as of `shell`."""
        ...

    def waits(self) -> bool:
        """Whether a command waits to be told something. It may have been ended meanwhile, or the sandbox."""
        ...

    def snapshot(self) -> str:
        """Stores the work tree, and gives its content hash: SHA-256 over a canonical manifest of paths, modes, contents
        and links. The same tree has the same hash on any machine. Raises RunError for what cannot be stored: a FIFO, a
        socket, a device."""
        ...

    def fork(self, snapshot: str) -> Sandbox:
        """Another sandbox with the same limits, which starts from a stored tree. Files only: see the top of this
        file."""
        ...

    def close(self) -> None:
        """Ends every process of the sandbox, and returns when they are gone. Closing twice does nothing."""
        ...
