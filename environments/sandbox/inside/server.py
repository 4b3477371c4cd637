"""The tool server: takes requests as JSON lines from a private pipe, and answers them on another one, until the first
is closed.

It is the first process inside of the sandbox. Commands that it runs have neither pipe, cannot signal it, and cannot
look into it. Frames are bounded on both sides. What it answers is no more trusted than what the commands say: they
share the machine.
"""

from __future__ import annotations

import os
import select
import sys
import time

from . import changes, files, lines, setup, shell
from .kernel import signal
from .tree import Refused, Room, line

__all__ = ["LONGEST", "TOOLS", "Server", "checked", "main"]


def _load_search_tool(name: str):
    """A tool of search.py, which loads regular expressions: they would slow down every start."""

    def tool(*positional, **args):
        from . import search

        return getattr(search, name)(*positional, **args)

    return tool


LONGEST = 64 * 2**20
"""Bytes of a request."""
TOOLS = {
    "read": (files.read, {"path": str}, {"start": int, "lines": int}),
    "write": (files.write, {"path": str, "text": str}, {}),
    "edit": (files.edit, {"path": str, "old": str, "new": str}, {"every": bool}),
    "delete": (files.delete, {"path": str}, {}),
    "list": (files.ls, {}, {"path": str}),
    "glob": (_load_search_tool("glob"), {"pattern": str}, {"path": str}),
    "grep": (_load_search_tool("grep"), {"pattern": str}, {"path": str, "glob": str, "ignore_case": bool}),
    "shell": (None, {"command": str}, {"cwd": str}),
}
"""Of every tool: its function, the arguments that it needs, and those that it may be given."""
WORDS = {str: "text", int: "a whole number", bool: "true or false"}


def checked(tool: object, args: object) -> dict:
    """The arguments of a call, if it is one. Raises Refused, which says what is missing, too much, or of the wrong
    type."""
    if not isinstance(tool, str) or tool not in TOOLS:
        raise Refused(f"there is no tool {str(tool)[:100]!r}; there are {', '.join(TOOLS)}")
    if not isinstance(args, dict):
        raise Refused(f"{tool} expects its arguments by name; got {type(args).__name__}")
    _, needed, allowed = TOOLS[tool]
    for name in needed:
        if name not in args:
            raise Refused(f"{tool} needs {name}, {WORDS[needed[name]]}")
    for name, value in args.items():
        expected = {**needed, **allowed}.get(name)
        if expected is None:
            raise Refused(f"{tool} has no argument {str(name)[:100]!r}; it has {', '.join({**needed, **allowed})}")
        if type(value) is not expected:
            raise Refused(f"{name} of {tool} must be {WORDS[expected]}; got {lines.encode(value)[:100]}")
    return args


class ToolTimeout(Exception):
    """A tool took too long."""


class Server(shell.Stop):
    """Reads from one handle and writes to another. `start`: what setup found."""

    def __init__(self, reader: int, writer: int, start: setup.Start, buffer: bytes) -> None:
        self.handle, self.writer, self.start, self.buffer = reader, writer, start, bytearray(buffer)
        self.room = Room("/work", start.output)
        self.deadline = float("inf")
        self.waiting = None
        signal.signal(signal.SIGALRM, self.alarm)

    def alarm(self, *_: object) -> None:
        """Interrupts a tool of this process, also within a regular expression. A command could send the signal, too:
        the clock decides."""
        if time.monotonic() >= self.deadline:
            raise ToolTimeout

    def line(self) -> dict | None:
        """The next request; None once the pipe is closed. What is no request ends the server."""
        while (end := self.buffer.find(b"\n")) < 0:
            if len(self.buffer) > LONGEST or not (block := os.read(self.handle, 1 << 20)):
                return None
            self.buffer += block
        request = lines.decode(self.buffer[:end].decode())
        del self.buffer[: end + 1]
        assert isinstance(request, dict)
        return request

    def reason(self) -> str | None:
        """Why a command is to be ended, if that was said by now; the pipe's end is a reason as well."""
        if b"\n" not in self.buffer and not select.select([self.handle], [], [], 0)[0]:
            return None
        request = self.line()
        return "the sandbox is closed" if request is None else request.get("stop")

    def answer(self, **fields: object) -> None:
        send(self.writer, lines.encode(fields).encode() + b"\n")

    def play(self, request: dict) -> dict:
        """The answer to a request for a tool."""
        since, seconds = time.monotonic(), float(request["seconds"])
        try:
            answer = self.attempt(request, since, seconds)
        except ToolTimeout:
            answer = {"text": "", "ok": False, "ended": f"more than {seconds:g} seconds"}
        self.deadline = float("inf")
        return {"exit": None, "ended": None, **answer, "seconds": time.monotonic() - since}

    def attempt(self, request: dict, since: float, seconds: float) -> dict:
        """The same, but raises ToolTimeout."""
        answer, s, action = {}, self.start, request["do"]
        bounds = shell.Bounds(seconds, s.processes, s.flood, s.disk, s.inodes, s.disks)
        try:
            args = checked(request["tool"], request["args"]) if action == "call" else {}
            if action == "begin":
                answer |= {"text": self.begin(str(request["command"]), bounds), "ok": True}
            elif action == "tell":
                answer |= encode_result(self.tell(str(request["text"]), bounds))
            elif request["tool"] == "shell":
                answer |= encode_result(shell.shell(self.room, bounds, self, s.environment, **args))
            else:
                self.deadline = since + seconds
                signal.setitimer(signal.ITIMER_REAL, seconds, 0.01)
                answer |= {"text": TOOLS[request["tool"]][0](self.room, **args), "ok": True}
        except (Refused, OSError, ValueError, RecursionError, MemoryError) as error:
            answer |= {"text": describe_error(error), "ok": False}
            if isinstance(error, OSError) and error.errno in (28, 122):
                answer["ended"] = shell.full(shell.Bounds(0, 0, 0, s.disk, s.inodes, s.disks))
        finally:
            self.deadline = float("inf")
            signal.setitimer(signal.ITIMER_REAL, 0)
        return answer

    def begin(self, command: str, bounds: shell.Bounds) -> str:
        """Starts a command that waits, and gives the line that it says. Raises Refused."""
        from .waiting import Waiting  # most sandboxes have none

        reader, writer = os.pipe()
        try:
            running = self.spawn(command, reader)
        except BaseException:
            os.close(writer)
            raise
        finally:
            os.close(reader)
        self.waiting = Waiting(self.room, bounds, self, running, writer)
        return self.waiting.ready

    def spawn(self, command: str, stdin: int) -> shell.Command:
        """Starts a command that reads from a handle."""
        return shell.spawn(self.room, self.start.environment, command, stdin=stdin)

    def tell(self, text: str, bounds: shell.Bounds) -> shell.CommandResult:
        """Tells the command that waits. Raises Refused where none does."""
        waiting, self.waiting = self.waiting, None
        if waiting is None:
            raise Refused("no command waits for what it is told")
        return waiting.send_input(text.encode("utf-8", "surrogateescape"), bounds, self)

    def end_waiting(self) -> None:
        """Ends what waits: no tool works beside another process."""
        waiting, self.waiting = self.waiting, None
        if waiting is not None:
            waiting.end()

    def run(self) -> None:
        """Until nobody asks any more."""
        while (request := self.line()) is not None:
            action = request.get("do")
            if action == "waits":
                self.answer(
                    id=request["id"],
                    text="",
                    ok=self.waiting is not None and self.waiting.alive(),
                    exit=None,
                    ended=None,
                    seconds=0,
                )
                continue
            if action != "tell":
                self.end_waiting()
            if action in ("call", "begin", "tell"):
                self.answer(id=request["id"], **self.play(request))
            elif action == "scan":
                try:
                    self.answer(id=request["id"], **changes.scan(self.start))
                except (Refused, OSError, RecursionError) as error:
                    self.answer(id=request["id"], refused=describe_error(error))
            elif action == "fetch":
                changes.fetch(request["path"], self.writer)


def encode_result(result: shell.CommandResult) -> dict:
    """How a command ended, for an answer."""
    return {
        "text": result.text,
        "exit": result.exit,
        "ended": result.end_reason,
        "ok": result.exit == 0 and result.end_reason is None,
    }


def describe_error(error: BaseException) -> str:
    """An error in one line."""
    if isinstance(error, OSError) and error.strerror:
        name = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else ""
        return f"{error.strerror}: {line(name.removeprefix('/work/'))}" if name else error.strerror
    return " ".join(str(error).split()) or type(error).__name__


def send(handle: int, data: bytes) -> None:
    """Writes all of it: a pipe may take less at a time."""
    remaining = memoryview(data)
    while remaining:
        remaining = remaining[os.write(handle, remaining) :]


def main(kind: type[Server] = Server) -> None:
    """Called once, in the first process: sets the sandbox up, says so, and serves. `kind`: what serves."""
    reader, writer, notes = os.dup(0), os.dup(1), os.dup(2)
    try:
        null = os.open("/dev/null", os.O_RDWR)
        for handle in (0, 1, 2):
            os.dup2(null, handle)
        start, buffer = setup.begin(reader)
        server = kind(reader, writer, start, buffer)
    except BaseException as error:
        os.write(notes, f"{type(error).__name__}: {error}\n".encode("utf-8", "backslashreplace"))
        os._exit(70)
    os.close(notes)
    server.answer(ready=True, overlay=start.upper is not None)
    server.run()
    sys.exit(0)
