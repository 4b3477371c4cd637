"""The sandbox that bubblewrap makes: all namespaces, a root file system of our own, a bounded work tree, a filter of system calls, a tool server.

Where this stands on bwrap 0.8, and where not
1. bwrap makes the namespaces and the read-only root. It begins with an empty environment, and maps the user who asks, or for root another user, to
   user 1000 inside.
2. bwrap bounds a tmpfs by bytes, not by inodes, and knows no overlays. So the first process inside mounts the work tree itself (inside/setup.py),
   with capabilities that exist only in the sandbox's namespaces and that it then gives up.
3. bwrap's own first process would be one that no filter binds. The tool server takes its place (--as-pid-1): no other process inside can signal it,
   look into it, or outlive it.
4. bwrap's --dev needs a mapped root user, under which 2 is not possible. /dev holds five devices and no terminals.

Processes, output, disk and time are watched from inside by the server, memory from outside by whoever waits for an answer. The server is trusted
with nothing but its own machine: if it does not answer, or answers nonsense, the sandbox is ended.
"""

from __future__ import annotations

import json
import os
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from kit.settings import RunError

from . import manifest as lists
from . import memory, seccomp
from .interface import FLOOD, LIMITS, Limits, Observation
from .manifest import Manifest
from .start import Started, failure, start
from .store import Store
from .visible import cut, one_line, visible
from .wire import Broken, Wire

__all__ = ["Bubblewrap"]

BEGIN, LATE, LONG = 30.0, 3.0, 600.0
"""Seconds: a start; an answer after a call's own time; a snapshot or a tree on its way."""
REQUEST, LIST = 32 * 2**20, 64 * 2**20
"""Bytes of the longest request, and of the longest list of a tree."""
NEAR_FILES, NEAR_BYTES = 400, 4 * 2**20
"""A fork that differs by less from the tree that its parent began with begins with that, too, and is sent the difference."""


class Bubblewrap:
    """A sandbox (see interface.py). `near`: a stored tree that is laid out, and may be begun with."""

    def __init__(self, root: Path, store: Store, snapshot: str, limits: Limits = LIMITS, near: str | None = None, overlay: bool = True) -> None:
        """Raises RunError where sandboxes cannot be had, or the snapshot is not stored or damaged. `overlay`: False copies the tree instead."""
        self.root, self.store, self.limits, self.overlay = root, store, limits, overlay
        self._lock, self._number, self._over, self._stopping = threading.Lock(), 0, "", 0.0
        self._ending = threading.Lock()
        wanted, difference = store.manifest(snapshot), None
        self.base = snapshot
        if near is not None and not store.laid_out(snapshot):
            difference = lists.changed(store.laid(near), wanted)
            self.base = near if _small(wanted, *difference) else snapshot
        tree, self._laid = store.tree(self.base), store.laid(self.base)
        self._started = start(root, tree)  # what is to be sent is looked up while the first process begins
        self._end = weakref.finalize(self, Started.kill, self._started)
        pipes = self._started.monitor
        assert pipes.stdin is not None and pipes.stdout is not None
        self._wire = Wire(pipes.stdout.fileno(), pipes.stdin.fileno(), self._tick)
        try:
            hello = self._hello(wanted, *(difference if self.base == near and difference else lists.changed(self._laid, wanted)))
            self._wire.send(hello, time.monotonic() + LONG)
            self.overlaid = self._wire.answer(time.monotonic() + BEGIN, 1000).get("overlay") is True
        except Broken:
            says = failure(pipes)
            self._end()
            raise RunError(says) from None
        except BaseException:
            self._end()
            raise

    def call(self, tool: str, args: Mapping[str, object], timeout: float | None = None) -> Observation:
        """Runs a tool: see interface.py. Raises ValueError for a timeout that is not positive, and nothing else."""
        if timeout is not None and not timeout > 0:
            raise ValueError(f"timeout must be positive; got {timeout}")
        seconds = min(self.limits.seconds, timeout or self.limits.seconds)
        with self._lock:
            if self._over:
                return Observation("", False, None, self._over)
            try:
                request = {"tool": tool, "args": dict(args), "seconds": seconds}
                size = len(json.dumps(request))
            except (TypeError, ValueError, RecursionError) as error:
                return Observation(f"args must be what JSON can hold: {one_line(str(error))}", False)
            if size > REQUEST:
                return Observation(f"args must have at most {REQUEST >> 20} MiB; got {size} bytes", False)
            since = time.monotonic()
            try:
                found = self._ask("call", request, since + seconds + LATE, 8 * self.limits.output + (1 << 16))
                return _observation(found, self.limits)
            except Broken as error:
                return Observation("", False, None, self._give_up(str(error)), time.monotonic() - since)

    def snapshot(self) -> str:
        """Stores the work tree, and gives its hash: see interface.py. Files only. Raises RunError for what cannot be stored, and where the sandbox
        has ended."""
        with self._lock:
            if self._over:
                raise RunError(f"there is nothing to store: {self._over}")
            try:
                return self.store.add(self._fetched())
            except Broken as error:
                raise RunError(f"there is nothing to store: {self._give_up(str(error))}") from None

    def fork(self, snapshot: str) -> Bubblewrap:
        """A sandbox that begins with a stored tree: see interface.py. Files only."""
        return Bubblewrap(self.root, self.store, snapshot, self.limits, self.base, self.overlay)

    def close(self) -> None:
        """Ends every process, and returns when they are gone. A call that another thread waits for says that the sandbox is closed."""
        self._over = self._over or "the sandbox is closed"
        if os.getpid() != self._started.starter:
            return  # a fork leaves its parent's sandboxes as they are
        with self._ending:
            if self._end.alive:
                self._started.stop()
        with self._lock:  # whoever waits for an answer reads from handles that are closed now
            self._finish()

    def __enter__(self) -> Bubblewrap:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def first(self) -> int:
        """The number of the first process inside, as this machine sees it."""
        return self._started.first

    def _give_up(self, why: str) -> str:
        self._over = self._over or f"{why}; the episode is over"
        self._finish()
        return self._over

    def _finish(self) -> None:
        with self._ending:
            self._end()

    def _hello(self, wanted: Manifest, remove: list[str], paths: list[str]) -> bytes:
        """What the first process is told, and the contents of the files that it makes."""
        limits = {**asdict(self.limits), "flood": FLOOD * self.limits.output}
        base = {"overlay": self.overlay, "bytes": lists.size(self._laid) + 4096 * len(self._laid), "inodes": len(self._laid)}
        rows = [(path, wanted[path]) for path in paths]
        entries = [[path, entry.kind, entry.mode, entry.value if entry.kind == "link" else entry.size] for path, entry in rows]
        told = {"limits": limits, "filter": seccomp.program().hex(), "base": base, "remove": remove, "entries": entries}
        return b"".join([json.dumps(told).encode(), b"\n", *(self.store.content(entry) for _, entry in rows if entry.kind == "file")])

    def _ask(self, what: str, more: dict, until: float, most: int) -> dict:
        """One request, and its answer. Raises Broken."""
        self._number, self._stopping = self._number + 1, 0.0
        self._wire.send(json.dumps({"do": what, "id": self._number, **more}).encode() + b"\n", until)
        found = self._wire.answer(until, most)
        if found.get("id") != self._number:
            raise Broken("the sandbox's server said what is no answer")
        return found

    def _tick(self) -> None:
        """While an answer is waited for: memory. A server that is told of it and does not answer is ended with all the rest."""
        why = f"more than {self.limits.memory / 2**20:g} MiB of memory"
        if self._stopping and time.monotonic() > self._stopping + LATE:
            raise Broken(why)
        if self._number and not self._stopping and memory.held(self.first) > self.limits.memory:
            self._stopping = time.monotonic()
            self._wire.send(json.dumps({"do": "stop", "stop": why}).encode() + b"\n", self._stopping + LATE)

    def _fetched(self) -> Manifest:
        """The work tree as it is now; contents that the store lacks are stored. Raises RunError and Broken."""
        until = time.monotonic() + LONG
        found = self._ask("scan", {}, until, LIST)
        if "refused" in found:
            raise RunError(one_line(str(found["refused"])))
        try:
            removed, rows = found["removed"], found["entries"]
            if not all(isinstance(path, str) for path in removed):
                raise ValueError("removed must hold paths")
            tree = lists.parse(rows, lists.without(self._laid, removed))
        except (ValueError, KeyError, TypeError) as error:
            raise Broken(f"the sandbox's server told of no tree: {one_line(str(error))}") from None
        for path, entry in sorted(tree.items()):
            if entry.kind == "file" and not self.store.has(entry.value):
                self._fetch(path, entry, until)
        return tree

    def _fetch(self, path: str, entry: lists.Entry, until: float) -> None:
        self._wire.send(json.dumps({"do": "fetch", "path": path}).encode() + b"\n", until)
        if self._wire.line(until, 100) != b"%d" % entry.size:
            raise Broken(f"the sandbox's server does not give {one_line(path)} as it told of it")
        self.store.add_content(lambda size: self._wire.read(size, until), entry.size, entry.value, path)


def _small(wanted: Manifest, remove: list[str], paths: list[str]) -> bool:
    """Whether it is quicker to send a difference than to lay a tree out."""
    return len(remove) + len(paths) <= NEAR_FILES and sum(wanted[path].size for path in paths) <= NEAR_BYTES


def _observation(found: dict, limits: Limits) -> Observation:
    """What a server's answer says. Raises Broken if it is none."""
    text, ok, code, ended, seconds = (found.get(name) for name in ("text", "ok", "exit", "ended", "seconds"))
    if not isinstance(text, str) or not isinstance(ok, bool) or not isinstance(ended, str | None):
        raise Broken("the sandbox's server said what is no answer")
    if not (code is None or type(code) is int) or not isinstance(seconds, int | float) or not 0 <= seconds < float("inf"):
        raise Broken("the sandbox's server said what is no answer")
    return Observation(cut(visible(text), limits.output), ok, code, None if ended is None else one_line(ended), float(seconds))
