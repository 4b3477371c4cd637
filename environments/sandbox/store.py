"""Stored trees: contents under their SHA-256, lists of what is in a tree under theirs, and whole trees laid out for
sandboxes to start from.

Everything appears by one rename and is never changed, so that processes may share a store. A file of a sandbox is never
linked to one here: what is laid out is a copy (the kernel shares its blocks where the file system can), which sandboxes
see read-only. What is read is compared with its name, and damage is reported, not passed on. Snapshots hold files only:
a fork of running processes, with their memory, needs a virtual machine."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import stat
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path

from kit.settings import RunError

from . import manifest as lists
from .cache import keep, make_folder, owner, reachable
from .manifest import Entry, Manifest

__all__ = ["Store"]

MAX_ENTRIES, MAX_CONTENTS = 200_000, 500_000
"""Entries of lists, and names of contents, that a process remembers: some 70 MB each. A training sees a new tree in
each turn of each episode."""


class Store:
    """A folder of stored trees; created if it is missing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._manifests: dict[str, Manifest] = {}
        self._layouts: dict[str, Manifest] = {}
        self._verified_trees: set[str] = set()
        self._stored_contents: set[str] = set()
        for name in ("contents", "lists", "trees"):
            make_folder(folder / name)
        for name in ("contents", "lists"):
            (folder / name).chmod(stat.S_IRWXU)
        reachable(folder)
        self._handle = keep(folder)
        weakref.finalize(self, os.close, self._handle)

    def forget(self, since: float) -> int:
        """Removes trees that nobody has begun with or added since then (in seconds since 1970), and contents that no
        other tree holds. Gives the number of trees. Does nothing while another store, of whichever process, is open
        over the same folder; no other thread may use this one."""
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return 0
        try:
            old_lists = [path for path in (self.folder / "lists").iterdir() if path.stat().st_mtime < since]
            for path in old_lists:
                path.unlink()
            remaining_lists = [path for path in (self.folder / "lists").glob("*.json")]
            for path in (self.folder / "trees").iterdir():
                if not self._list_path(path.name).exists() and path.stat().st_ctime < since:
                    _remove(path)
            used_contents: set[str] = set()
            for path in remaining_lists:
                with contextlib.suppress(ValueError):  # a damaged list is of no use any more
                    used_contents |= {
                        entry.value for entry in lists.load(path.read_bytes()).values() if entry.kind == "file"
                    }
            for path in (self.folder / "contents").glob("*/*"):
                if path.parent.name + path.name not in used_contents and path.stat().st_mtime < since:
                    path.unlink()
        finally:
            for cache in (self._manifests, self._layouts, self._verified_trees, self._stored_contents):
                cache.clear()
            fcntl.flock(self._handle, fcntl.LOCK_SH)
        return sum(path.suffix == ".json" for path in old_lists)

    def __contains__(self, snapshot: str) -> bool:
        return snapshot in self._manifests or self._list_path(snapshot).exists()

    def add_folder(self, folder: Path) -> str:
        """Stores a folder of this machine, and gives its hash. Raises RunError for what cannot be stored."""
        manifest: Manifest = {}
        for path, entry, handle in lists.of_folder(folder):
            manifest[path] = entry
            if handle is not None and not self.has(entry.value):
                os.lseek(handle, 0, os.SEEK_SET)
                self.add_content(lambda size, handle=handle: os.read(handle, size), entry.size, entry.value, path)
        return self.add(manifest)

    def add(self, manifest: Manifest) -> str:
        """Stores a list whose contents are stored. Raises RunError if one is not."""
        for path, entry in manifest.items():
            if entry.kind == "file" and not self.has(entry.value):
                raise RunError(f"the content of {path!r} is not stored: {entry.value}")
        name = lists.digest(manifest)
        if self._list_path(name).exists():
            self._touch(name)
        else:
            self._publish(self._list_path(name), lists.dump(manifest))
        _remember(self._manifests, name, manifest)
        return name

    def has(self, value: str) -> bool:
        """Whether the content of this SHA-256 is stored. What this process has once seen there is not looked for
        again."""
        if value in self._stored_contents:
            return True
        is_stored = self._content_path(value).exists()
        if is_stored:
            if len(self._stored_contents) >= MAX_CONTENTS:
                self._stored_contents.clear()
            self._stored_contents.add(value)
        return is_stored

    def add_content(self, read: Callable[[int], bytes], size: int, value: str, path: str) -> None:
        """Stores `size` bytes that `read(n)` gives, at most n at a time. Raises RunError if they are other bytes than
        `value` says; `path`: where they come from."""
        target = self._content_path(value)
        target.parent.mkdir(exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=".new-", dir=target.parent)
        try:
            digest, remaining = hashlib.sha256(), size
            with open(handle, "wb") as file:
                while remaining and (block := read(min(remaining, 1 << 20))):
                    digest.update(block)
                    file.write(block)
                    remaining -= len(block)
            if remaining or digest.hexdigest() != value:
                raise RunError(
                    f"{path!r} was changed while it was stored; nothing else should write to its tree meanwhile"
                )
            os.replace(temporary, target)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise

    def manifest(self, snapshot: str) -> Manifest:
        """The list of a stored tree; not to be changed. Raises RunError if there is none, or if it is damaged."""
        manifest = self._manifests.get(snapshot)
        if manifest is None:
            if not re.fullmatch("[0-9a-f]{64}", snapshot) or not self._list_path(snapshot).exists():
                raise RunError(f"no tree {snapshot!r} is stored in {self.folder}")
            data = self._list_path(snapshot).read_bytes()
            self._touch(snapshot)
            if hashlib.sha256(data).hexdigest() != snapshot:
                raise RunError(
                    f"the stored list {self._list_path(snapshot)} is damaged: its content does not fit "
                    f"its name; delete it"
                )
            manifest = _remember(self._manifests, snapshot, lists.load(data))
        return manifest

    def content(self, entry: Entry) -> bytes:
        """A stored file's bytes. Raises RunError if they are missing or damaged."""
        path = self._content_path(entry.value)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise RunError(f"the stored content {path} cannot be read: {error.strerror}") from None
        if hashlib.sha256(data).hexdigest() != entry.value:
            raise RunError(f"the stored content {path} is damaged: it does not fit its name; delete it")
        return data

    def readable_manifest(self, snapshot: str) -> Manifest:
        """The list of a stored tree as `tree` lays it out; not to be changed."""
        manifest = self._layouts.get(snapshot)
        return manifest or _remember(self._layouts, snapshot, lists.readable(self.manifest(snapshot)))

    def laid_out(self, snapshot: str) -> bool:
        """Whether the tree lies there as files."""
        return (self.folder / "trees" / snapshot).is_dir()

    def tree(self, snapshot: str) -> Path:
        """The tree as files, laid out if it is not yet, with modes that let its owner read it. Nobody may change them.
        The first time that this process asks, they are compared with the list. Raises RunError if they differ, or what
        is stored is damaged."""
        manifest, target = self.readable_manifest(snapshot), self.folder / "trees" / snapshot
        if not target.is_dir():
            building = Path(tempfile.mkdtemp(prefix=".building-", dir=target.parent))
            try:
                self._lay_out(manifest, building)
                try:
                    building.rename(target)
                except OSError:
                    if not target.is_dir():  # else another process was faster
                        raise
            finally:
                _remove(building)
        if snapshot not in self._verified_trees:
            actual = {path: entry for path, entry, _ in lists.of_folder(target)}
            if actual != manifest:
                damaged_paths = sorted(
                    path for path in actual.keys() | manifest.keys() if actual.get(path) != manifest.get(path)
                )
                raise RunError(f"the stored tree {target} is damaged, first at {damaged_paths[0]!r}; delete it")
            self._verified_trees.add(snapshot)
        return target

    def _lay_out(self, manifest: Manifest, folder: Path) -> None:
        user = owner()
        for path, entry in sorted(manifest.items()):
            target = folder / path
            if entry.kind == "dir":
                target.mkdir(exist_ok=True)
            elif entry.kind == "link":
                target.symlink_to(entry.value)
            else:
                self._copy(entry, target)
                target.chmod(entry.mode)
            if user is not None:
                os.chown(target, user, user, follow_symlinks=False)
        for path, entry in sorted(manifest.items(), reverse=True):
            if entry.kind == "dir":
                (folder / path).chmod(entry.mode)

    def _copy(self, entry: Entry, target: Path) -> None:
        """Raises RunError if the content is missing. Damage is found when the whole tree is compared."""
        try:
            shutil.copyfile(self._content_path(entry.value), target)
        except FileNotFoundError:
            raise RunError(f"the stored content {self._content_path(entry.value)} is missing") from None

    def _touch(self, name: str) -> None:
        """Takes note, for `forget`."""
        with contextlib.suppress(OSError):  # another user's store
            os.utime(self._list_path(name))

    def _content_path(self, value: str) -> Path:
        return self.folder / "contents" / value[:2] / value[2:]

    def _list_path(self, snapshot: str) -> Path:
        return self.folder / "lists" / f"{snapshot}.json"

    def _publish(self, target: Path, data: bytes) -> None:
        handle, temporary = tempfile.mkstemp(prefix=".new-", dir=target.parent)
        with open(handle, "wb") as file:
            file.write(data)
        os.replace(temporary, target)


def _remember(cache: dict[str, Manifest], snapshot: str, manifest: Manifest) -> Manifest:
    """Keeps a list in memory, and forgets the oldest ones."""
    cache[snapshot] = manifest
    sizes = [(name, len(entries)) for name, entries in [*cache.items()]]
    excess = sum(size for _, size in sizes) - MAX_ENTRIES
    for name, size in sizes[:-1]:
        if excess <= 0:
            break
        excess -= size
        cache.pop(name, None)
    return manifest


def _remove(folder: Path) -> None:
    """Removes a tree, whatever its modes are."""
    for below, folders, _ in os.walk(folder):
        for name in folders:
            if not os.path.islink(os.path.join(below, name)):
                os.chmod(os.path.join(below, name), stat.S_IRWXU)
    shutil.rmtree(folder, ignore_errors=True)
