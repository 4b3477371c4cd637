"""The front door: a sandbox over a folder or over a stored tree."""

from __future__ import annotations

import functools
import platform
import time
from pathlib import Path
from typing import Literal, get_args, overload

from kit.settings import RunError

from .bubblewrap import Bubblewrap
from .cache import cache_folder, reachable
from .docker import Docker
from .interface import LIMITS, Door, Limits
from .root import root_file_system
from .store import Store

__all__ = ["Kind", "open_sandbox"]

Kind = Literal["bubblewrap", "docker"]
"""Of sandboxes: bubblewrap needs nothing but its program; Docker needs an engine that answers, and its SDK for
Python."""
TREE_LIFETIME = 14 * 24 * 3600
"""Seconds for which a tree is kept that nobody begins with."""


@functools.cache
def own_store(folder: Path) -> Store:
    """The user's store; one for a process. What has not been used for long is removed, at most once a day."""
    store, marker = Store(folder), folder / "forgotten"
    if not marker.exists() or marker.stat().st_mtime < time.time() - 24 * 3600:
        marker.touch()
        store.forget(time.time() - TREE_LIFETIME)
    return store


@overload
def open_sandbox(
    tree: Path | str,
    kind: Literal["bubblewrap"] = ...,
    limits: Limits = ...,
    *,
    root: Path | None = ...,
    store: Store | None = ...,
    door: Door | None = ...,
) -> Bubblewrap: ...


@overload
def open_sandbox(
    tree: Path | str,
    kind: Kind,
    limits: Limits = ...,
    *,
    root: Path | None = ...,
    store: Store | None = ...,
    door: Door | None = ...,
) -> Bubblewrap | Docker: ...


def open_sandbox(
    tree: Path | str,
    kind: Kind = "bubblewrap",
    limits: Limits = LIMITS,
    *,
    root: Path | None = None,
    store: Store | None = None,
    door: Door | None = None,
) -> Bubblewrap | Docker:
    """A sandbox whose work tree begins as `tree`: a folder, which is copied and never changed, or the hash of a stored
    tree. A folder is read whole each time; who opens many sandboxes over one stores it once, and names its hash.

    `root`: a root file system, by default the one of root.py, which is built at the first use. `store`: where trees are
    stored, by default in the user's cache folder. `door`: a way out (environments/egress/door.py); without one there is
    none. Raises RunError, in one line that says what to do, where this machine has no sandboxes and for a tree that
    cannot be had.

        with open_sandbox(Path("package")) as sandbox:
            print(sandbox.call("shell", {"command": "pytest -q"}).text)
    """
    if kind not in get_args(Kind):
        raise RunError(f"there is no kind of sandbox called {kind!r}; there are {' and '.join(get_args(Kind))}")
    if platform.system() != "Linux":
        raise RunError(
            f"sandboxes need Linux's namespaces, which {platform.system()} lacks; run this in a "
            f"virtual machine with Linux"
        )
    if kind == "docker" and door is not None:
        raise RunError("a door out of a sandbox needs bubblewrap: Docker hands out no sockets")
    root = reachable(root or root_file_system())
    store = store or own_store(cache_folder() / "store")
    snapshot = store.add_folder(tree) if isinstance(tree, Path) else tree
    return (
        Docker(root, store, snapshot, limits)
        if kind == "docker"
        else Bubblewrap(root, store, snapshot, limits, door=door)
    )
