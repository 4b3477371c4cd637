"""The sandbox that bubblewrap makes: all namespaces, a root file system of our own, a bounded work tree, a filter of
system calls, a tool server.

Where this stands on bwrap 0.8, and where not
1. bwrap makes the namespaces and the read-only root. It begins with an empty environment, and maps the user who asks,
   or for root another user, to user 1000 inside.
2. bwrap bounds a tmpfs by bytes, not by inodes, and knows no overlays. So the first process inside mounts the work tree
   itself (inside/setup.py), with capabilities that exist only in the sandbox's namespaces and that it then gives up.
3. bwrap's own first process would be one that no filter binds. The tool server takes its place (--as-pid-1): no other
   process inside can signal it, look into it, or outlive it.
4. bwrap's --dev needs a mapped root user, under which 2 is not possible. /dev holds five devices and no terminals.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from kit.settings import RunError

from . import manifest as lists
from .interface import LIMITS, Door, Limits
from .listening import Pair
from .manifest import Manifest
from .served import Served
from .start import start
from .store import Store
from .wire import WireError

__all__ = ["Bubblewrap"]

NEAR_FILES, NEAR_BYTES = 400, 4 * 2**20
"""A fork that differs by less from the tree that its parent began with begins with that, too, and is sent the
difference."""


class Bubblewrap(Served):
    """A sandbox (see interface.py). `near`: a stored tree that is laid out, and may be begun with."""

    def __init__(
        self,
        root: Path,
        store: Store,
        snapshot: str,
        limits: Limits = LIMITS,
        near: str | None = None,
        overlay: bool = True,
        door: Door | None = None,
    ) -> None:
        """Raises RunError where sandboxes cannot be had, or the snapshot is not stored or damaged. `overlay`: False
        copies the tree instead. `door`: a way out; without one there is none."""
        self.root, self.overlay, self.door = root, overlay, door
        manifest, difference = store.manifest(snapshot), None
        self.base = snapshot
        if near is not None and not store.laid_out(snapshot):
            difference = lists.changed(store.readable_manifest(near), manifest)
            if _is_small(manifest, *difference):
                self.base = near
            else:
                difference = None
        tree, base_tree = store.tree(self.base), store.readable_manifest(self.base)
        setup = {"overlay": overlay, "bytes": lists.size(base_tree) + 4096 * len(base_tree), "inodes": len(base_tree)}
        with ExitStack() as stack:
            pair = stack.enter_context(Pair()) if door is not None else None
            machine = start(root, tree, () if pair is None else (pair.inner,))
            if pair is not None and door is not None:
                setup |= {"door": {"handle": pair.inner, "environment": {**door.environment}}}
            super().__init__(machine, store, limits, base_tree, manifest, setup, difference)
            if pair is not None and door is not None:
                try:
                    machine.afterwards.append(door.serve(pair.received()))
                except WireError as error:
                    self.close()
                    raise RunError(str(error)) from None

    def fork(self, snapshot: str) -> Bubblewrap:
        """A sandbox that begins with a stored tree, with the same door: see interface.py. Files only."""
        return Bubblewrap(self.root, self.store, snapshot, self.limits, self.base, self.overlay, self.door)

    def __enter__(self) -> Bubblewrap:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _is_small(manifest: Manifest, remove: list[str], paths: list[str]) -> bool:
    """Whether it is quicker to send a difference than to lay a tree out."""
    return len(remove) + len(paths) <= NEAR_FILES and sum(manifest[path].size for path in paths) <= NEAR_BYTES
