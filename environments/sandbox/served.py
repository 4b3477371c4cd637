"""A sandbox whose first process is the tool server of inside/: what bubblewrap's and Docker's have in common.

Processes, output, disk and time are watched from inside by the server, memory from outside by whoever waits for an
answer. The server is trusted with nothing but its own machine: if it does not answer, or answers nonsense, the sandbox
is ended.
"""

from __future__ import annotations

import json
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Protocol

from kit.settings import RunError

from . import manifest as lists
from . import memory, seccomp
from .interface import FLOOD, Limits, Observation
from .manifest import Manifest
from .store import Store
from .visible import cut, one_line, visible
from .wire import Wire, WireError

__all__ = ["Machine", "Served"]

BEGIN, LATE, LONG = 30.0, 3.0, 600.0
"""Seconds: a start; an answer after a call's own time; a snapshot or a tree on its way."""
REQUEST, LIST = 32 * 2**20, 64 * 2**20
"""Bytes of the longest request, and of the longest list of a tree."""
BOUND = "more than "
"""How a server begins to say which bound was crossed."""


class Machine(Protocol):
    """Namespaces with a server as their first process, however they were made."""

    @property
    def first(self) -> int:
        """The number of the first process inside, as this machine sees it."""
        ...

    @property
    def starter(self) -> int:
        """The process that started it, and that alone ends it."""
        ...

    def wire(self, tick: Callable[[], None]) -> Wire:
        """The pipes to the server. `tick`: see Wire. Called once."""
        ...

    def crossed(self) -> bool:
        """Whether a bound of the machine's own on memory has ended a process since this was last asked."""
        ...

    def stop(self) -> None:
        """Ends the first process, and with it all others. Nothing is waited for."""
        ...

    def kill(self) -> None:
        """The same, but returns once they are gone, and closes what was open."""
        ...

    def failure(self, wire: Wire) -> str:
        """Why the first process has ended before it served, in one line. `wire`: the one to it. A machine must not keep
        it: it leads to the sandbox, which would never be forgotten."""
        ...


class Served:
    """A sandbox (see interface.py). Whoever derives from it adds `fork`."""

    def __init__(
        self,
        machine: Machine,
        store: Store,
        limits: Limits,
        base_tree: Manifest,
        tree: Manifest,
        base: dict,
        near: tuple | None = None,
    ) -> None:
        """`laid`: the tree that lies there; `wanted`: the one to begin with; `near`: what differs, if that is known.
        `base`: what the first process is told of what lies there (see inside/setup.py). Raises RunError where it does
        not begin to serve; the machine is ended then."""
        self.store, self.limits = store, limits
        self._machine, self._base_tree = machine, base_tree
        self._lock, self._number, self._end_reason, self._stop_time, self._memory_killed = (
            threading.Lock(),
            0,
            "",
            0.0,
            False,
        )
        self._end_lock = threading.Lock()
        self._finalizer = weakref.finalize(self, type(machine).kill, machine)
        try:
            self._wire = machine.wire(self._tick)
            self._wire.send(
                self._encode_start(tree, base, *(near or lists.changed(base_tree, tree))), time.monotonic() + LONG
            )
            self.overlaid = self._wire.answer(time.monotonic() + BEGIN, 1000).get("overlay") is True
        except WireError:
            message = machine.failure(self._wire)
            self._finalizer()
            raise RunError(message) from None
        except BaseException:
            self._finalizer()
            raise

    def call(self, tool: str, args: Mapping[str, object], timeout: float | None = None) -> Observation:
        """Runs a tool: see interface.py. Raises ValueError for a timeout that is not positive, and nothing else."""
        return self._perform("call", {"tool": tool, "args": args}, timeout)

    def begin(self, command: str, timeout: float | None = None) -> Observation:
        """Starts a command that waits to be told something: see interface.py. Raises as `call` does."""
        return self._perform("begin", {"command": command}, timeout)

    def tell(self, text: str, timeout: float | None = None) -> Observation:
        """Tells it: see interface.py. Raises as `call` does."""
        return self._perform("tell", {"text": text}, timeout)

    def waits(self) -> bool:
        """Whether a command waits: see interface.py."""
        return self._perform("waits", {}, LATE).ok

    def _perform(self, action: str, fields: Mapping[str, object], timeout: float | None) -> Observation:
        """One request, and what is seen of it."""
        if timeout is not None and not timeout > 0:
            raise ValueError(f"timeout must be positive; got {timeout}")
        seconds = min(self.limits.seconds, timeout or self.limits.seconds)
        with self._lock:
            if self._end_reason:
                return Observation("", False, None, self._end_reason)
            try:
                request = {**fields, "seconds": seconds}
                request |= {"args": dict(request["args"])} if "args" in request else {}
                size = len(json.dumps(request))
            except (TypeError, ValueError, RecursionError) as error:
                return Observation(f"args must be what JSON can hold: {one_line(str(error))}", False)
            if size > REQUEST:
                return Observation(f"args must have at most {REQUEST >> 20} MiB; got {size} bytes", False)
            since = time.monotonic()
            try:
                answer = self._request(action, request, since + seconds + LATE, 8 * self.limits.output + (1 << 16))
                # what outlived a killed process is no cause
                if self._has_exceeded_memory() and not str(answer.get("ended")).startswith(BOUND):
                    answer |= {"ok": False, "ended": self._memory_message()}
                return _parse_observation(answer, self.limits)
            except WireError as error:
                return Observation("", False, None, self._give_up(str(error)), time.monotonic() - since)

    def snapshot(self) -> str:
        """Stores the work tree, and gives its hash: see interface.py. Files only. Raises RunError for what cannot be
        stored, and where the sandbox has ended."""
        with self._lock:
            if self._end_reason:
                raise RunError(f"there is nothing to store: {self._end_reason}")
            try:
                return self.store.add(self._fetch_tree())
            except WireError as error:
                raise RunError(f"there is nothing to store: {self._give_up(str(error))}") from None

    def close(self) -> None:
        """Ends every process, and returns when they are gone. A call that another thread waits for says that the
        sandbox is closed."""
        self._end_reason = self._end_reason or "the sandbox is closed"
        if os.getpid() != self._machine.starter:
            return  # a fork leaves its parent's sandboxes as they are
        with self._end_lock:
            if self._finalizer.alive:
                self._machine.stop()
        with self._lock:  # whoever waits for an answer reads from handles that are closed now
            self._finish()

    @property
    def first(self) -> int:
        """The number of the first process inside, as this machine sees it."""
        return self._machine.first

    def _give_up(self, reason: str) -> str:
        if not self._end_reason and self._has_exceeded_memory():
            reason = self._memory_message()
        self._end_reason = self._end_reason or f"{reason}; the episode is over"
        self._finish()
        return self._end_reason

    def _finish(self) -> None:
        with self._end_lock:
            self._finalizer()

    def _encode_start(self, tree: Manifest, base: dict, remove: list[str], paths: list[str]) -> bytes:
        """What the first process is told, and the contents of the files that it makes."""
        limits = {**asdict(self.limits), "flood": FLOOD * self.limits.output}
        rows = [(path, tree[path]) for path in paths]
        entries = [
            [path, entry.kind, entry.mode, entry.value if entry.kind == "link" else entry.size] for path, entry in rows
        ]
        settings = {
            "limits": limits,
            "filter": seccomp.program().hex(),
            "base": base,
            "remove": remove,
            "entries": entries,
        }
        return b"".join(
            [
                json.dumps(settings).encode(),
                b"\n",
                *(self.store.content(entry) for _, entry in rows if entry.kind == "file"),
            ]
        )

    def _request(self, action: str, fields: dict, until: float, max_bytes: int) -> dict:
        """One request, and its answer. Raises Broken."""
        self._number, self._stop_time, self._memory_killed = self._number + 1, 0.0, False
        self._wire.send(json.dumps({"do": action, "id": self._number, **fields}).encode() + b"\n", until)
        answer = self._wire.answer(until, max_bytes)
        if answer.get("id") != self._number:
            raise WireError("the sandbox's server said what is no answer")
        return answer

    def _memory_message(self) -> str:
        return f"{BOUND}{self.limits.memory / 2**20:g} MiB of memory"

    def _has_exceeded_memory(self) -> bool:
        """Whether the machine's own bound on memory has ended a process of this request."""
        self._memory_killed = self._machine.crossed() or self._memory_killed
        return self._memory_killed

    def _tick(self) -> None:
        """While an answer is waited for: memory. A server that is told of it and does not answer is ended with all the
        rest."""
        if self._stop_time and time.monotonic() > self._stop_time + LATE:
            raise WireError(self._memory_message())
        if (
            self._number
            and not self._stop_time
            and (self._has_exceeded_memory() or memory.measure_memory(self.first) > self.limits.memory)
        ):
            self._stop_time = time.monotonic()
            self._wire.send(
                json.dumps({"do": "stop", "stop": self._memory_message()}).encode() + b"\n", self._stop_time + LATE
            )

    def _fetch_tree(self) -> Manifest:
        """The work tree as it is now; contents that the store lacks are stored. Raises RunError and Broken."""
        until = time.monotonic() + LONG
        answer = self._request("scan", {}, until, LIST)
        if "refused" in answer:
            raise RunError(one_line(str(answer["refused"])))
        try:
            removed_paths, rows = answer["removed"], answer["entries"]
            if not all(isinstance(path, str) for path in removed_paths):
                raise ValueError("removed must hold paths")
            tree = lists.parse(rows, lists.remove_paths(self._base_tree, removed_paths))
        except (ValueError, KeyError, TypeError) as error:
            raise WireError(f"the sandbox's server told of no tree: {one_line(str(error))}") from None
        for path, entry in sorted(tree.items()):
            if entry.kind == "file" and not self.store.has(entry.value):
                self._fetch(path, entry, until)
        return tree

    def _fetch(self, path: str, entry: lists.Entry, until: float) -> None:
        self._wire.send(json.dumps({"do": "fetch", "path": path}).encode() + b"\n", until)
        if self._wire.line(until, 100) != b"%d" % entry.size:
            raise WireError(f"the sandbox's server does not give {one_line(path)} as it told of it")
        self.store.add_content(lambda size: self._wire.read(size, until), entry.size, entry.value, path)


def _parse_observation(answer: dict, limits: Limits) -> Observation:
    """What a server's answer says. Raises Broken if it is none."""
    text, ok, code, end_reason, seconds = (answer.get(name) for name in ("text", "ok", "exit", "ended", "seconds"))
    if not isinstance(text, str) or not isinstance(ok, bool) or not isinstance(end_reason, str | None):
        raise WireError("the sandbox's server said what is no answer")
    if (
        not (code is None or type(code) is int)
        or not isinstance(seconds, int | float)
        or not 0 <= seconds < float("inf")
    ):
        raise WireError("the sandbox's server said what is no answer")
    return Observation(
        cut(visible(text), limits.output),
        ok,
        code,
        None if end_reason is None else one_line(end_reason),
        float(seconds),
    )
