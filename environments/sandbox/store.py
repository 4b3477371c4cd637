"""Stored trees: contents under their SHA-256, lists of what is in a tree under theirs, and whole trees laid out for sandboxes to start from.

Everything appears by one rename and is never changed, so that processes may share a store. A file of a sandbox is never linked to one here: what
is laid out is a copy (the kernel shares its blocks where the file system can), which sandboxes see read-only. What is read is compared with its
name, and damage is reported, not passed on. Snapshots hold files only: a fork of running processes, with their memory, needs a virtual machine.
"""

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
from .cache import keep, made, owner, reachable
from .manifest import Entry, Manifest

__all__ = ["Store"]


class Store:
    """A folder of stored trees; created if it is missing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._known: dict[str, Manifest] = {}
        self._laid: dict[str, Manifest] = {}
        self._sound: set[str] = set()
        self._seen: set[str] = set()
        for name in ("contents", "lists", "trees"):
            made(folder / name)
        for name in ("contents", "lists"):
            (folder / name).chmod(stat.S_IRWXU)
        reachable(folder)
        self._handle = keep(folder)
        weakref.finalize(self, os.close, self._handle)

    def forget(self, since: float) -> int:
        """Removes trees that nobody has begun with or added since then (in seconds since 1970), and contents that no other tree holds. Gives the
        number of trees. Does nothing while another store, of whichever process, is open over the same folder; no other thread may use this one."""
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return 0
        try:
            old = [path for path in (self.folder / "lists").iterdir() if path.stat().st_mtime < since]
            for path in old:
                path.unlink()
            left = [path for path in (self.folder / "lists").glob("*.json")]
            for path in (self.folder / "trees").iterdir():
                if not self._list(path.name).exists() and path.stat().st_ctime < since:
                    _remove(path)
            kept: set[str] = set()
            for path in left:
                with contextlib.suppress(ValueError):  # a damaged list is of no use any more
                    kept |= {entry.value for entry in lists.load(path.read_bytes()).values() if entry.kind == "file"}
            for path in (self.folder / "contents").glob("*/*"):
                if path.parent.name + path.name not in kept and path.stat().st_mtime < since:
                    path.unlink()
        finally:
            for known in (self._known, self._laid, self._sound, self._seen):
                known.clear()
            fcntl.flock(self._handle, fcntl.LOCK_SH)
        return sum(path.suffix == ".json" for path in old)

    def __contains__(self, snapshot: str) -> bool:
        return snapshot in self._known or self._list(snapshot).exists()

    def add_folder(self, folder: Path) -> str:
        """Stores a folder of this machine, and gives its hash. Raises RunError for what cannot be stored."""
        found: Manifest = {}
        for path, entry, handle in lists.of_folder(folder):
            found[path] = entry
            if handle is not None and not self.has(entry.value):
                os.lseek(handle, 0, os.SEEK_SET)
                self.add_content(lambda size, handle=handle: os.read(handle, size), entry.size, entry.value, path)
        return self.add(found)

    def add(self, manifest: Manifest) -> str:
        """Stores a list whose contents are stored. Raises RunError if one is not."""
        for path, entry in manifest.items():
            if entry.kind == "file" and not self.has(entry.value):
                raise RunError(f"the content of {path!r} is not stored: {entry.value}")
        name = lists.digest(manifest)
        if self._list(name).exists():
            self._used(name)
        else:
            self._publish(self._list(name), lists.dump(manifest))
        self._known[name] = manifest
        return name

    def has(self, value: str) -> bool:
        """Whether the content of this SHA-256 is stored. What this process has once seen there is not looked for again."""
        if value not in self._seen and self._content(value).exists():
            self._seen.add(value)
        return value in self._seen

    def add_content(self, read: Callable[[int], bytes], size: int, value: str, path: str) -> None:
        """Stores `size` bytes that `read(n)` gives, at most n at a time. Raises RunError if they are other bytes than `value` says; `path`: where
        they come from."""
        target = self._content(value)
        target.parent.mkdir(exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=".new-", dir=target.parent)
        try:
            found, left = hashlib.sha256(), size
            with open(handle, "wb") as file:
                while left and (block := read(min(left, 1 << 20))):
                    found.update(block)
                    file.write(block)
                    left -= len(block)
            if left or found.hexdigest() != value:
                raise RunError(f"{path!r} was changed while it was stored; nothing else should write to its tree meanwhile")
            os.replace(temporary, target)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise

    def manifest(self, snapshot: str) -> Manifest:
        """The list of a stored tree; not to be changed. Raises RunError if there is none, or if it is damaged."""
        if snapshot not in self._known:
            if not re.fullmatch("[0-9a-f]{64}", snapshot) or not self._list(snapshot).exists():
                raise RunError(f"no tree {snapshot!r} is stored in {self.folder}")
            data = self._list(snapshot).read_bytes()
            self._used(snapshot)
            if hashlib.sha256(data).hexdigest() != snapshot:
                raise RunError(f"the stored list {self._list(snapshot)} is damaged: its content does not fit its name; delete it")
            self._known[snapshot] = lists.load(data)
        return self._known[snapshot]

    def content(self, entry: Entry) -> bytes:
        """A stored file's bytes. Raises RunError if they are missing or damaged."""
        path = self._content(entry.value)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise RunError(f"the stored content {path} cannot be read: {error.strerror}") from None
        if hashlib.sha256(data).hexdigest() != entry.value:
            raise RunError(f"the stored content {path} is damaged: it does not fit its name; delete it")
        return data

    def laid(self, snapshot: str) -> Manifest:
        """The list of a stored tree as `tree` lays it out; not to be changed."""
        if snapshot not in self._laid:
            self._laid[snapshot] = lists.readable(self.manifest(snapshot))
        return self._laid[snapshot]

    def laid_out(self, snapshot: str) -> bool:
        """Whether the tree lies there as files."""
        return (self.folder / "trees" / snapshot).is_dir()

    def tree(self, snapshot: str) -> Path:
        """The tree as files, laid out if it is not yet, with modes that let its owner read it. Nobody may change them. The first time that this
        process asks, they are compared with the list. Raises RunError if they differ, or what is stored is damaged."""
        manifest, target = self.laid(snapshot), self.folder / "trees" / snapshot
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
        if snapshot not in self._sound:
            found = {path: entry for path, entry, _ in lists.of_folder(target)}
            if found != manifest:
                wrong = sorted(path for path in found.keys() | manifest.keys() if found.get(path) != manifest.get(path))
                raise RunError(f"the stored tree {target} is damaged, first at {wrong[0]!r}; delete it")
            self._sound.add(snapshot)
        return target

    def _lay_out(self, manifest: Manifest, folder: Path) -> None:
        whose = owner()
        for path, entry in sorted(manifest.items()):
            target = folder / path
            if entry.kind == "dir":
                target.mkdir(exist_ok=True)
            elif entry.kind == "link":
                target.symlink_to(entry.value)
            else:
                self._copy(entry, target)
                target.chmod(entry.mode)
            if whose is not None:
                os.chown(target, whose, whose, follow_symlinks=False)
        for path, entry in sorted(manifest.items(), reverse=True):
            if entry.kind == "dir":
                (folder / path).chmod(entry.mode)

    def _copy(self, entry: Entry, target: Path) -> None:
        """Raises RunError if the content is missing. Damage is found when the whole tree is compared."""
        try:
            shutil.copyfile(self._content(entry.value), target)
        except FileNotFoundError:
            raise RunError(f"the stored content {self._content(entry.value)} is missing") from None

    def _used(self, name: str) -> None:
        """Takes note, for `forget`."""
        with contextlib.suppress(OSError):  # another user's store
            os.utime(self._list(name))

    def _content(self, value: str) -> Path:
        return self.folder / "contents" / value[:2] / value[2:]

    def _list(self, snapshot: str) -> Path:
        return self.folder / "lists" / f"{snapshot}.json"

    def _publish(self, target: Path, data: bytes) -> None:
        handle, temporary = tempfile.mkstemp(prefix=".new-", dir=target.parent)
        with open(handle, "wb") as file:
            file.write(data)
        os.replace(temporary, target)


def _remove(folder: Path) -> None:
    """Removes a tree, whatever its modes are."""
    for below, folders, _ in os.walk(folder):
        for name in folders:
            if not os.path.islink(os.path.join(below, name)):
                os.chmod(os.path.join(below, name), stat.S_IRWXU)
    shutil.rmtree(folder, ignore_errors=True)
