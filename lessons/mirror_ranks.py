"""Ranks for a notebook: processes on this machine that talk over gloo and do what a cell asks of them.

    two = Ranks(2)
    two.run(dict(dp=2), function, x, y)       function(x, y) on each rank under that mesh → what each returned, by rank
    two.stop()

What a notebook defines no other process can import. So a function is sent as its text, and with it what it names:
modules and what was imported from them by their names, other functions of the notebook as their texts, everything else
pickled. Ranks are started at the first call and stay; where one raises, the call raises the same here, with the rank's
traceback as a note. A call that is interrupted, or in which a rank ends, ends them all: what they might still answer is
not to be taken for the answer to the next call, which starts new ones.
"""

import ast
import atexit
import builtins
import importlib
import inspect
import os
import pickle
import subprocess
import sys
import tempfile
import textwrap
import traceback
import types
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

__all__ = ["Ranks"]

TIMEOUT = 300.0
"""Seconds after which a call counts as hung."""
GRACE = 10.0
"""Seconds that the others have to answer once a rank has failed; who has not by then waits for it in a collective."""


class Ranks:
    """`n` processes, one rank each."""

    def __init__(self, n: int):
        self.n = n
        self.pipes: list[Connection] = []
        self.processes: list[subprocess.Popen] = []
        atexit.register(self.stop)

    def start(self) -> None:
        """Starts the processes; `run` does so by itself."""
        self.folder = tempfile.TemporaryDirectory()
        root = str(Path(__file__).resolve().parents[1])
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH")))),
            "OMP_NUM_THREADS": "1",
        }
        for rank in range(self.n):
            parent_pipe, child_pipe = Pipe()
            command = [
                sys.executable,
                "-m",
                "lessons.mirror_ranks",
                str(child_pipe.fileno()),
                str(rank),
                str(self.n),
                self.folder.name,
            ]
            with open(Path(self.folder.name) / f"{rank}.err", "wb") as stderr_file:
                # In a session of their own, so that Ctrl-C and a notebook's interrupt reach this process alone, which
                # then ends them.
                self.processes.append(
                    subprocess.Popen(
                        command,
                        env=environment,
                        pass_fds=[child_pipe.fileno()],
                        stderr=stderr_file,
                        start_new_session=True,
                    )
                )
            child_pipe.close()
            self.pipes.append(parent_pipe)

    def stop(self) -> None:
        """Ends the processes."""
        pipes, processes, self.pipes, self.processes = self.pipes, self.processes, [], []
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.kill()
            process.wait()
        if processes:
            self.folder.cleanup()

    def run(self, layout: dict[str, int], function: Callable, *arguments: Any) -> list:
        """The results of all ranks. Raises what a rank raised; RuntimeError when one ends or hangs."""
        request = pickle.dumps((layout, packed(function), function.__name__, arguments))
        if any(process.poll() is not None for process in self.processes):
            self.stop()  # one ended since the last call, and the others are of no use without it
        try:
            if not self.processes:
                self.start()
            results, failure = self.answers(request)
        except BaseException:
            self.stop()
            raise
        if failure:
            raise failure
        return results

    def answers(self, request: bytes) -> tuple[list, BaseException | None]:
        """What each rank answers, and what the first that failed has raised. Raises where one does not answer."""
        results: list = [None] * self.n
        waiting = {pipe: rank for rank, pipe in enumerate(self.pipes)}
        failure: BaseException | None = None
        for pipe, rank in waiting.items():
            try:
                pipe.send_bytes(request)
            except OSError:
                raise self.make_end_error(rank) from None
        while waiting:
            ready = wait(list(waiting), GRACE if failure else TIMEOUT)
            if not ready:
                hung_ranks = sorted(waiting.values())
                raise failure or RuntimeError(
                    f"ranks {hung_ranks} did not answer within {TIMEOUT:.0f} s; do all ranks call the same collectives?"
                )
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    is_success, results[rank] = pickle.loads(pipe.recv_bytes())
                except (EOFError, OSError):
                    raise self.make_end_error(rank) from None
                failure = failure or (None if is_success else results[rank])
        return results, failure

    def make_end_error(self, rank: int) -> RuntimeError:
        """What is to be said of a rank that is no more."""
        stderr_lines = (Path(self.folder.name) / f"{rank}.err").read_text(errors="replace").strip().splitlines()
        return RuntimeError(f"rank {rank} ended: {stderr_lines[-1] if stderr_lines else 'it left no word'}")


def packed(function: Callable, collected_parts: dict | None = None) -> dict[str, tuple]:
    """The text of a function and of all that it names and a fresh process does not know: name → how to come by it. A
    function stands behind those that it names: where one is its decorator or the default of an argument, it has to be
    there first."""
    parts = {} if collected_parts is None else collected_parts
    if function.__name__ == "<lambda>":
        raise ValueError("a lambda cannot be sent to ranks; give the function a name")
    inner, text = inspect.unwrap(function), textwrap.dedent(inspect.getsource(function))
    parts[function.__name__] = "text", text
    used_names = find_names(inner.__code__) | find_names(compile_head(text))
    for name in used_names:
        if name in parts or name not in inner.__globals__:
            continue
        value = inner.__globals__[name]
        if isinstance(value, types.ModuleType):
            submodules = [
                part for part in (f"{value.__name__}.{attribute}" for attribute in used_names) if part in sys.modules
            ]
            parts[name] = "module", value.__name__, *submodules
        elif isinstance(value, types.FunctionType) and inspect.unwrap(value).__globals__ is inner.__globals__:
            packed(value, parts)
        elif callable(value) and is_importable(value):
            parts[name] = "import", value.__module__, value.__qualname__
        else:
            parts[name] = "value", value
    parts[function.__name__] = parts.pop(function.__name__)
    return parts


def compile_head(text: str) -> types.CodeType:
    """The code that defines a function without its body: its decorators, defaults and annotations are looked up by
    whoever defines it."""
    tree = ast.parse(text)
    tree.body[0].body = ast.parse("pass").body
    return compile(tree, "<head>", "exec")


def find_names(code: types.CodeType) -> set[str]:
    """What code, and code inside it, looks up beyond its own variables."""
    inner = (part for part in code.co_consts if isinstance(part, types.CodeType))
    return set(code.co_names).union(*map(find_names, inner)) - set(vars(builtins))


def is_importable(value: Any) -> bool:
    """Whether another process can import it: it lies, under its own name, in a module that has a file."""
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    return (
        getattr(module, "__file__", None) is not None
        and getattr(module, getattr(value, "__qualname__", ""), None) is value
    )


def unpacked(parts: dict[str, tuple]) -> dict[str, Any]:
    """The namespace that `packed` described."""
    namespace: dict[str, Any] = {"__name__": "notebook"}
    for name, (kind, *values) in parts.items():
        if kind == "module":
            namespace[name], *_ = map(importlib.import_module, values)
        elif kind == "import":
            namespace[name] = getattr(importlib.import_module(values[0]), values[1])
        elif kind == "value":
            namespace[name] = values[0]
    for name, (kind, *values) in parts.items():
        if kind == "text":
            exec(compile(values[0], f"<{name}, on a rank>", "exec"), namespace)
    return namespace


def serve(pipe: Connection, rank: int, n: int, folder: str) -> None:
    """A rank: answers calls until its pipe closes."""
    import torch
    import torch.distributed as dist

    from scaled.runtime.mesh import mesh

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=n)
    while True:
        try:
            request = pipe.recv_bytes()
        except (EOFError, OSError):
            return
        try:
            layout, parts, name, arguments = pickle.loads(request)
            with mesh(**layout):
                answer = pickle.dumps((True, unpacked(parts)[name](*arguments)))
        except Exception as error:
            answer = pickle_error(error, rank)
        pipe.send_bytes(answer)


def pickle_error(error: Exception, rank: int) -> bytes:
    """An exception as it can travel, with what the rank saw."""
    traceback_text = "".join(traceback.format_exception(error))
    for exception in (error, RuntimeError(f"{type(error).__name__}: {error}")):
        try:
            exception.add_note(f"on rank {rank}:\n{traceback_text}")
            answer = pickle.dumps((False, exception))
            pickle.loads(answer)
            return answer
        except Exception:  # an exception may refuse to be pickled, or to come back
            continue
    raise AssertionError("a RuntimeError can be pickled")


if __name__ == "__main__":
    handle, rank, n, folder = sys.argv[1:]
    serve(Connection(int(handle)), int(rank), int(n), folder)
