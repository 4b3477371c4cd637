"""The nursery: the first process of a sandbox without a tree, which has imported what programs need and forks for each
who asks.

Each fork builds walls of its own (walls.py) before it is told anything, becomes the first process behind them, and is
the tool server there, as in any sandbox. What it has beside that are the programs that are imported already: to begin
one is a fork, and no start of Python.

A fork holds what the nursery held: modules, and nothing of any task. It begins with the three handles that came for it.
The nursery's own, and with them the way to other forks, are closed before the server serves. No process behind a wall
has a number for the nursery or for another fork: it can neither signal nor look into them, and its session is its own.
"""

from __future__ import annotations

import gc
import os
import socket
import sys
import types
from collections.abc import Callable, Mapping
from typing import ClassVar, NoReturn

from . import kernel, lines, server, shell, walls
from . import search as search  # now, since forks shall import nothing
from . import waiting as waiting
from .kernel import signal
from .places import WORK
from .tree import Refused

__all__ = ["Nursling", "main"]

FOLDER = "/usr/lib/sandbox"
"""Where this package lies, which no program shall find."""
FORK_REQUEST, HANDLES = b"another", 3
"""What is said by who asks for a fork, and the handles that come with it: a server's standard ones."""
Program = Callable[[], None]


class Nursling(server.Server):
    """The server of a fork."""

    programs: ClassVar[dict[str, Program]] = {}
    """By the command that begins them; each is begun by a fork."""
    has_begun = False
    """Whether a command has begun here. What it was told is left in this process's memory, of which a program has a
    copy."""

    def spawn(self, command: str, stdin: int) -> shell.Command:
        """Begins a program that is imported, before anything else has begun, and starts any other command. Raises
        Refused."""
        had_begun, self.has_begun = self.has_begun, True
        if command not in self.programs:
            return super().spawn(command, stdin)
        if had_begun:
            raise Refused("what is imported begins only in a sandbox in which nothing has begun before")
        reader, writer = os.pipe()
        try:
            if (pid := os.fork()) == 0:
                _run_program(self.programs[command], stdin, writer, {**shell.ENVIRONMENT, **self.start.environment})
        except OSError:
            os.close(reader)
            raise
        finally:
            os.close(writer)
        return shell.Command(pid, reader, shell.Tail(self.room.output))


def _run_program(program: Program, stdin: int, writer: int, environment: Mapping[str, str]) -> NoReturn:
    """Plays a program in this process, which nobody else shares, as if it had been started."""
    code = 1
    try:
        os.setsid()
        kernel.only_handles(stdin, writer, writer)
        for number in shell.DEFAULTS:
            signal.signal(number, signal.SIG_IGN if number in (signal.SIGPIPE, signal.SIGXFSZ) else signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # the other ones are as Python begins with them, too
        os.chdir(WORK)
        os.environ.clear()
        os.environ.update(environment)
        for name in [name for name in sys.modules if name.partition(".")[0] == __package__]:
            del sys.modules[name]
        gc.enable()
        program()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
        if isinstance(end.code, str):
            os.write(2, f"{end.code}\n".encode())
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        try:
            sys.stdout.flush()
        finally:
            os._exit(code)


def _load_program(texts: dict[str, str]) -> Program:
    """Imports modules from their texts, in their order. The last one has the program, a function `nursed`."""
    module = types.ModuleType("none")
    for name, text in texts.items():
        module = sys.modules[name] = types.ModuleType(name)
        exec(compile(text, f"{name}.py", "exec", dont_inherit=True), module.__dict__)
    return module.nursed


def _serve_fork(control: socket.socket, handles: list[int]) -> NoReturn:
    """In a fork: builds its walls, tells who it is, and serves."""
    try:
        os.setsid()  # a signal to one's own group knows no namespaces
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        walls.build()
        first = os.pidfd_open(os.getpid())
        socket.send_fds(control, [b"first"], [first])  # refused where too many handles are on their way
    except BaseException as error:
        try:
            control.send(f"{type(error).__name__}: {error}".encode("utf-8", "backslashreplace")[:1000])
        finally:
            os._exit(70)
    try:
        control.detach()  # who has asked hears one answer, whatever fails from here on
        kernel.only_handles(*handles)
        server.main(Nursling)
    finally:
        os._exit(0)


def main(handle: int) -> None:
    """Called once, in the first process of a sandbox without a tree. Its standard input holds a line: the command, and
    the modules behind it. `handle`: a socket, on which handles come for each fork that is asked for, and a handle of
    the fork goes out."""
    try:
        data = b""
        while not data.endswith(b"\n"):
            if not (block := os.read(0, 1 << 20)):
                raise EOFError("nobody says what is wanted")
            data += block
        request = lines.decode(data.decode().rstrip("\n"))
        assert isinstance(request, list)
        command, texts = request
        Nursling.programs[command] = _load_program(texts)
        sys.path.remove(FOLDER)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks that have ended are gone at once
        gc.disable()
        gc.freeze()  # a collection would copy what forks share
        control = socket.socket(fileno=handle)
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode("utf-8", "backslashreplace"))
        os._exit(70)
    os.write(1, b"ready\n")
    while True:
        message, handles, _, _ = socket.recv_fds(control, len(FORK_REQUEST), HANDLES)
        if message != FORK_REQUEST or len(handles) != HANDLES:
            os._exit(0)  # nobody asks any more
        try:
            if os.fork() == 0:
                _serve_fork(control, handles)
        except OSError as error:
            control.send(f"fork: {error.strerror}".encode())
        for fork_handle in handles:
            os.close(fork_handle)
