"""The tool that runs a command, and ends what it leaves behind.

The first process of a process namespace can signal all others at once and is the parent of every orphan. So nothing
that a command starts, however it forks and hides, lives longer than its call.
"""

from __future__ import annotations

import os
import select
import time

from .kernel import signal
from .tree import Refused, Room, line, place

__all__ = [
    "TICK",
    "Bounds",
    "Command",
    "CommandResult",
    "Stop",
    "Tail",
    "end_all",
    "finish",
    "full",
    "list_processes",
    "shell",
    "spawn",
]

ENVIRONMENT = {
    "PATH": "/usr/bin",
    "HOME": "/tmp",
    "TMPDIR": "/tmp",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
    "USER": "agent",
    "SHELL": "/bin/sh",
    # A file that is edited twice within a second, and keeps its size, would be taken for the one that was compiled.
    "PYTHONDONTWRITEBYTECODE": "1",
}
DEFAULTS = (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ, signal.SIGALRM, signal.SIGTERM)
TICK = 0.05
"""Seconds between two looks at processes and disk."""
GRACE, LINGER = 0.5, 0.2
"""Seconds from SIGTERM to SIGKILL, and from the end of a command to that of what it started."""


class Bounds:
    """What ends a command. `flood`: bytes of output; `disks`: handles of the bounded file systems, the first of which
    has room for what all of them together may hold."""

    def __init__(
        self, seconds: float, processes: int, flood: int, disk: int, inodes: int, disks: tuple[int, ...]
    ) -> None:
        self.seconds, self.processes, self.flood = seconds, processes, flood
        self.disk, self.inodes, self.disks = disk, inodes, disks


class Stop:
    """Where a reason to end a command may come from. `handle` becomes readable when there may be one."""

    handle: int

    def reason(self) -> str | None:
        """The reason, if there is one by now."""
        raise NotImplementedError


class CommandResult:
    """How a command ended."""

    def __init__(self, text: str, exit: int | None, end_reason: str | None) -> None:
        self.text, self.exit, self.end_reason = text, exit, end_reason


class Tail:
    """Keeps the beginning and the end of a stream, `room` bytes together, and counts the rest."""

    def __init__(self, room: int) -> None:
        self.half, self.head, self.tail, self.total = room // 2, bytearray(), bytearray(), 0

    def add(self, block: bytes) -> None:
        self.total += len(block)
        free = self.half - len(self.head)
        self.head += block[:free]
        self.tail += block[free:] if free < len(block) else b""
        if len(self.tail) > 2 * self.half:
            del self.tail[: -self.half]

    def text(self) -> str:
        tail = bytes(self.tail[-self.half :])
        left_out = self.total - len(self.head) - len(tail)
        middle = f"\n… {left_out} bytes left out …\n".encode() if left_out else b""
        return (bytes(self.head) + middle + tail).decode("utf-8", "backslashreplace")


class Command:
    """A command that runs. `life`: a pidfd of it; `status`: how it ended; `ended`: the bound that it crossed;
    `was_full`: whether the disk has been full all the time."""

    def __init__(self, pid: int, pipe: int, output: Tail) -> None:
        self.pid, self.pipe, self.output, self.open = pid, pipe, output, True
        self.life = os.pidfd_open(pid)
        self.status: int | None = None
        self.end_reason: str | None = None
        self.since = time.monotonic()
        self.was_full = False

    def hear(self, wait: float, *handles: int) -> None:
        """Waits for output or for one of the handles, and takes what is there."""
        ready, _, _ = select.select([self.pipe, *handles] if self.open else handles, [], [], wait)
        if self.pipe in ready:
            block = os.read(self.pipe, 1 << 16)
            self.output.add(block)
            self.open = bool(block)

    def reap(self) -> None:
        """Takes note of processes that have ended."""
        try:
            while (child := os.waitpid(-1, os.WNOHANG))[0]:
                if child[0] == self.pid:
                    self.status = child[1]
        except ChildProcessError:
            pass


def list_processes() -> list[int]:
    """Every process but the first one that has not ended."""
    pids = []
    for name in os.listdir("/proc"):
        if name.isdigit() and name != "1":
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    state = file.read().rpartition(b")")[2].split()[0]
                # the first thread may end before others
                is_alive = state not in (b"Z", b"X") or len(os.listdir(f"/proc/{name}/task")) > 1
            except OSError:
                continue
            if is_alive:
                pids.append(int(name))
    return pids


def tasks() -> int:
    """Processes and threads, without those of the first process."""
    total = 0
    for pid in list_processes():
        try:
            total += len(os.listdir(f"/proc/{pid}/task"))
        except OSError:
            continue
    return total


def end_all(politely: bool) -> bool:
    """Ends all processes but the first, and waits until they are gone. `politely`: with SIGTERM first. True if some
    took no notice of that."""
    stubborn = False
    try:
        if politely:
            os.kill(-1, signal.SIGTERM)
            os.kill(-1, signal.SIGCONT)
            until = time.monotonic() + GRACE
            while (stubborn := bool(list_processes())) and time.monotonic() < until:
                time.sleep(0.005)
        os.kill(-1, signal.SIGKILL)
    except ProcessLookupError:
        pass
    try:
        while True:
            os.waitpid(-1, 0)
    except ChildProcessError:
        return stubborn


def _check_bounds(command: Command, bounds: Bounds) -> str | None:
    """The bound that a command has crossed."""
    if command.output.total > bounds.flood:
        return f"more than {_format_bytes(bounds.flood)} of output"
    if time.monotonic() - command.since > bounds.seconds:
        return _time_message(bounds)
    if tasks() > bounds.processes:
        return _processes_message(bounds)
    disk_message = full(bounds)
    command.was_full = command.was_full and disk_message is not None
    return None if command.was_full else disk_message  # a command that finds the disk full may be one that makes room


def _time_message(bounds: Bounds) -> str:
    return f"more than {bounds.seconds:g} seconds"


def _processes_message(bounds: Bounds) -> str:
    return f"more than {bounds.processes} processes"


def full(bounds: Bounds) -> str | None:
    """Which bound of the disk is reached, if one is."""
    rooms = [os.fstatvfs(handle) for handle in bounds.disks]
    if (
        any(room.f_bavail == 0 for room in rooms)
        or sum(room.f_blocks - room.f_bavail for room in rooms) >= rooms[0].f_blocks
    ):
        return f"more than {_format_bytes(bounds.disk)} of disk"
    if (
        any(room.f_favail == 0 for room in rooms)
        or sum(room.f_files - room.f_favail for room in rooms) >= rooms[0].f_files
    ):
        return f"more than {bounds.inodes} inodes"
    return None


def _format_bytes(count: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:g} {unit}"
    return f"{count} bytes"


def shell(room: Room, bounds: Bounds, stop: Stop, environment: dict, command: str, cwd: str = ".") -> CommandResult:
    """Runs a command in /bin/bash, or in /bin/sh, in the folder `cwd`. `environment`: what it is told beside the
    usual."""
    before = full(bounds) is not None
    running = spawn(room, environment, command, cwd)
    running.was_full = before
    return finish(running, bounds, stop)


def spawn(room: Room, environment: dict, command: str, cwd: str = ".", stdin: int | None = None) -> Command:
    """Starts a command. `stdin`: the handle that it reads from, if there is something to read."""
    folder = place(room, cwd)
    if "\0" in command:
        raise Refused("command must not hold a null character")
    if len(command.encode("utf-8", "surrogateescape")) > 100_000:
        raise Refused("command must have at most 100000 bytes; write a script")
    program = next(path for path in ("/bin/bash", "/bin/sh") if os.path.exists(path))
    reader, writer = os.pipe()
    begin = (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0) if stdin is None else (os.POSIX_SPAWN_DUP2, stdin, 0)
    actions = [begin, (os.POSIX_SPAWN_DUP2, writer, 1), (os.POSIX_SPAWN_DUP2, writer, 2)]
    try:
        os.chdir(folder)  # a spawned process begins where its parent is
        pid = os.posix_spawn(
            program,
            [program, "-c", command],
            {**ENVIRONMENT, **environment},
            file_actions=actions,
            setsid=True,
            setsigdef=DEFAULTS,
        )
    except OSError as error:
        os.close(reader)
        raise Refused(f"{line(cwd)} is no folder") if isinstance(error, NotADirectoryError) else error from None
    finally:
        os.chdir("/")
        os.close(writer)
    return Command(pid, reader, Tail(room.output))


def finish(running: Command, bounds: Bounds, stop: Stop) -> CommandResult:
    """How a command ends, by itself or at a bound. Nothing that it has started is left then."""
    try:
        return _watch(running, bounds, stop)
    finally:
        end_all(politely=False)
        os.close(running.life)
        os.close(running.pipe)


def _watch(running: Command, bounds: Bounds, stop: Stop) -> CommandResult:
    last_check = running.since
    while running.end_reason is None:
        running.hear(TICK, running.life, stop.handle)
        current_time = time.monotonic()
        running.end_reason = stop.reason()
        if running.end_reason is None and (
            running.output.total > bounds.flood
            or current_time - last_check > TICK
            or current_time - running.since > bounds.seconds
        ):
            running.end_reason, last_check = _check_bounds(running, bounds), current_time
        running.reap()
        if running.status is not None:
            break
    survivors = _find_survivors() if running.end_reason is None else []
    if len(survivors) > bounds.processes:
        running.end_reason = _processes_message(bounds)
    if running.end_reason:  # what crosses another bound than that of time would go on while it is asked to end
        if end_all(politely=running.end_reason == _time_message(bounds)):
            running.end_reason += "; it took no notice of SIGTERM, and was killed"
    elif survivors:
        end_all(politely=False)
        running.end_reason = (
            f"{len(survivors)} {'process' if len(survivors) == 1 else 'processes'} that outlived the call"
        )
    while (
        running.open and running.output.total <= bounds.flood
    ):  # what it still said; nobody is left who could say more
        running.hear(TICK)
    running.end_reason = running.end_reason or full(bounds)
    if running.status is None:
        return CommandResult(running.output.text(), None, running.end_reason)
    code = os.waitstatus_to_exitcode(running.status)
    return CommandResult(running.output.text(), code if code >= 0 else 128 - code, running.end_reason)


def _find_survivors() -> list[int]:
    """The processes that are still there a moment after their command has ended."""
    until = time.monotonic() + LINGER
    while (survivors := list_processes()) and time.monotonic() < until:
        time.sleep(0.005)
    return survivors
