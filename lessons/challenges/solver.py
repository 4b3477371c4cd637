"""The process of a solution: loads the reader's file, and answers calls of its functions, one line each, until the
scorer closes the pipe.

    python -m lessons.challenges.solver FILE READ WRITE        the two numbers are those of open pipes

Once it is loaded, the file may read, and may print (to stderr). It may not write files, begin processes or connect:
what one call knows must not reach another interpreter behind the scorer's back. Nor may it ever read what the scorer
knows: this package, which draws the cases, or another process, which was told their seed. That stops slips and short
cuts. It is no sandbox, since the file is the reader's own. Before it is loaded nothing is known that could be passed
on, and imports want to write; those in its functions are made then, too."""

from __future__ import annotations

import ast
import contextlib
import fcntl
import importlib
import os
import re
import resource
import stat
import sys
import tempfile
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from lessons.challenges.wire import packed, unpacked

__all__ = ["answer", "loaded", "main"]

REFUSED = (
    "subprocess.",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "os.rename",
    "os.remove",
    "os.mkdir",
    "os.link",
    "os.symlink",
)
REFUSED += (
    "os.rmdir",
    "os.truncate",
    "os.setxattr",
    "os.removexattr",
    "os.utime",
    "os.chmod",
    "os.chown",
    "os.spawn",
    "pty.spawn",
    "shutil.",
)
REFUSED += ("socket.connect", "socket.bind", "socket.sendto", "sqlite3.connect", "ctypes.dlopen")

FOLDER = os.path.dirname(os.path.realpath(__file__))


def refuse_the_scorer(path: Path, event: str, arguments: tuple) -> None:
    """An audit hook: PermissionError where the file at `path` reads this package, beside itself, or another process."""
    if event == "open" and not isinstance(arguments[0], int):
        name = os.path.realpath(os.fsdecode(arguments[0]))
        if name.startswith(FOLDER + os.sep) and name != os.path.realpath(path):
            raise PermissionError("a solution may not read the scorers, which draw its cases")
        if re.match(r"/proc/\d+/", name) and not name.startswith(f"/proc/{os.getpid()}/"):
            raise PermissionError("a solution may not look into another process")


def refuse(event: str, arguments: tuple) -> None:
    """An audit hook: PermissionError for what a solution may not do."""
    if event.startswith(REFUSED):
        raise PermissionError(f"a solution may not do this once it is loaded: {event}")
    if event == "open" and arguments[0] != os.devnull and not isinstance(arguments[0], int):
        mode, flags = arguments[1], arguments[2] if isinstance(arguments[2], int) else 0
        if any(letter in (mode or "") for letter in "wax+") or flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise PermissionError(f"a solution may not write files: {arguments[0]}")


def loaded(path: Path) -> ModuleType:
    """The reader's file as a module of its own. Raises what the file raises."""
    module = ModuleType("solution")
    module.__file__ = str(path)
    code = compile(path.read_text(encoding="utf-8-sig"), str(path), "exec", dont_inherit=True)
    sys.modules["solution"] = module  # a dataclass looks itself up there
    exec(code, vars(module))
    return module


def load_sealed(path: Path) -> ModuleType:
    """The same, for a process of its own: from here on no file can be written to. Raises PermissionError where one is
    left open for that."""
    sys.addaudithook(partial(refuse_the_scorer, path))
    module = loaded(path)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8-sig"))):
        names = (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [getattr(node, "module", None)] * isinstance(node, ast.ImportFrom)
        )
        for name in filter(None, names):
            with contextlib.suppress(Exception):  # its own function will say what is missing
                importlib.import_module(name)
    tempfile.gettempdir()  # found by trying to write
    if open_files := [name for name in map(find_open_file, range(3, 256)) if name]:
        raise PermissionError(f"a solution may not keep a file open to write to: {open_files[0]}")
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # Python ignores SIGXFSZ: a write raises
    sys.addaudithook(refuse)
    return module


def find_open_file(number: int) -> str:
    """The name of a regular file that is open for writing under this number, its number where no name is known; empty
    if there is none."""
    try:
        if (
            not stat.S_ISREG(os.fstat(number).st_mode)
            or fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
        ):
            return ""
    except OSError:
        return ""
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/self/fd/{number}")
    return str(number)


def answer(path: Path, call: Callable[[], Any]) -> dict[str, Any]:
    """What is sent back: `returned`, or `raised` with the line of the reader's file, 0 where no line of it took
    part."""
    try:
        return {"returned": packed(call())}
    except BaseException as error:  # also SystemExit: a file that ends itself is told so
        if isinstance(error, SyntaxError) and error.filename == str(path):
            return {"raised": f"{type(error).__name__}: {error.msg}", "line": error.lineno or 0}
        if isinstance(error, MissingFunction):
            return {"raised": str(error), "line": 0}
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        return {"raised": f"{type(error).__name__}: {error}".strip().rstrip(":"), "line": lines[-1] if lines else 0}


class MissingFunction(Exception):
    """A function that the file should have; said without the name of this class."""


def called(module: ModuleType, name: str, arguments: list) -> Any:
    """The value of a function of the reader's file."""
    function = getattr(module, name, None)
    if not callable(function):
        raise MissingFunction(f"the file has no function {name}")
    return function(*arguments)


def main(path: Path, read: int, write: int) -> None:
    """Loads and serves."""
    sys.dont_write_bytecode = True
    modules: list[ModuleType] = []
    with os.fdopen(read, encoding="utf-8") as requests, os.fdopen(write, "w", encoding="utf-8") as responses:
        os.dup2(2, 1)  # what a solution prints is for its author
        response = answer(path, lambda: modules.append(load_sealed(path)))
        print(packed(response), file=responses, flush=True)
        for line in requests:
            name, arguments = unpacked(line)
            print(packed(answer(path, partial(called, modules[0], name, arguments))), file=responses, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
