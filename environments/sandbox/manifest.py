"""A tree of files as a list of what is in it, and the hash of that list.

The list holds paths, kinds, permissions, contents (as SHA-256) and the targets of links; no times, owners or inodes,
and no order but that of paths. So the same tree has the same hash on any machine. Lists also come from sandboxes, whose
tasks may have written them: a path that would lead out of its tree is refused before anything is made from it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from kit.disk import parse_json
from kit.settings import RunError

__all__ = [
    "Entry",
    "Manifest",
    "changed",
    "digest",
    "dump",
    "load",
    "of_folder",
    "parse",
    "readable",
    "size",
    "remove_paths",
]


@dataclass(frozen=True)
class Entry:
    """One thing in a tree."""

    kind: str
    """ "file", "dir" or "link"."""
    mode: int
    """Permissions, nine bits; 0o777 for a link."""
    size: int = 0
    """Bytes of a file; 0 for others."""
    value: str = ""
    """SHA-256 of a file's content in hexadecimal digits, or a link's target."""


Manifest = dict[str, Entry]
"""Paths, with / between folders, and what lies there. The root has the path "", and every folder stands there
itself."""


def dump(manifest: Manifest) -> bytes:
    """The canonical form: JSON in ASCII without spaces, in the order of paths."""
    rows = [[path, e.kind, e.mode, e.size, e.value] for path, e in sorted(manifest.items())]
    return json.dumps(rows, separators=(",", ":")).encode()


def digest(manifest: Manifest) -> str:
    """SHA-256 of the canonical form, in hexadecimal digits."""
    return hashlib.sha256(dump(manifest)).hexdigest()


def load(data: bytes) -> Manifest:
    """What `dump` made. Raises ValueError for anything else."""
    try:
        rows = parse_json(data)
    except RecursionError as error:
        raise ValueError(str(error)) from None
    manifest = parse(rows)
    if dump(manifest) != data:
        raise ValueError("the list is not in its canonical form")
    return manifest


def parse(rows: object, left: Manifest | None = None) -> Manifest:
    """A tree from rows of path, kind, mode, size and value, and of what is `left` of another tree, which the rows add
    to and replace. Raises ValueError for what is no tree: a path that leads elsewhere, a file without its folder, a
    folder that is a link."""
    new: Manifest = {}
    for row in rows if isinstance(rows, list) else [None]:
        if not isinstance(row, list) or [type(part) for part in row] != [str, str, int, int, str]:
            raise ValueError(f"a row must hold path, kind, mode, size and value; got {str(row)[:100]}")
        path, entry = row[0], Entry(*row[1:])
        _check(path, entry)
        if path in new:
            raise ValueError(f"{path!r} stands there twice")
        new[path] = entry
    manifest = {**(left or {}), **new}
    for path in manifest:
        parent = manifest.get(path.rpartition("/")[0])
        if parent is None or parent.kind != "dir":
            raise ValueError(f"{path!r} lies in no folder of its tree")
    return manifest


def _check(path: str, entry: Entry) -> None:
    parts = path.split("/")
    if (
        "\0" in path
        or (path and any(part in ("", ".", "..") for part in parts))
        or any(len(os.fsencode(part)) > 255 for part in parts)
    ):
        raise ValueError(f"{path[:100]!r} is no path within a tree")
    fits = {
        "dir": entry.size == 0 and entry.value == "",
        "link": entry.size == 0
        and entry.mode == 0o777
        and 0 < len(os.fsencode(entry.value)) < 4096
        and "\0" not in entry.value
        and path != "",
        "file": entry.size >= 0 and re.fullmatch("[0-9a-f]{64}", entry.value) is not None and path != "",
    }
    if not fits.get(entry.kind, False) or not 0 <= entry.mode <= 0o777:
        raise ValueError(f"{path!r} is nothing that a tree holds: {entry}")


def changed(before: Manifest, after: Manifest) -> tuple[list[str], list[str]]:
    """(paths to remove from `before`, without those beneath others; paths of `after` to make or to change, folders
    before what is in them)."""
    differing = [path for path, entry in after.items() if before.get(path) is not entry and before.get(path) != entry]
    stale_paths = sorted(
        [path for path in before if path not in after]
        + [path for path in differing if path in before and before[path].kind != after[path].kind]
    )
    tops: list[str] = []
    for path in stale_paths:
        if not (tops and path.startswith(tops[-1] + "/")):
            tops.append(path)
    return tops, sorted(differing)


def size(manifest: Manifest) -> int:
    """Bytes of all files."""
    return sum(entry.size for entry in manifest.values())


def of_folder(folder: Path) -> Iterator[tuple[str, Entry, int | None]]:
    """(path, entry, open handle of a file) of everything in a folder of this machine, the folder itself first. Links
    are not followed and nothing is waited for. Raises RunError for a FIFO, a socket or a device, which cannot be
    stored; also where `folder` is none."""
    try:
        top = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise RunError(f"{folder} is no folder that can be read: {error.strerror}") from None
    yield "", Entry("dir", stat.S_IMODE(os.fstat(top).st_mode) & 0o777), None
    yield from _walk_folder(top, "")


def _walk_folder(handle: int, path: str) -> Iterator[tuple[str, Entry, int | None]]:
    try:
        for name in sorted(os.listdir(handle)):
            child_path = f"{path}/{name}" if path else name
            status = os.lstat(name, dir_fd=handle)
            mode, flags = stat.S_IMODE(status.st_mode) & 0o777, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
            if stat.S_ISLNK(status.st_mode):
                yield child_path, Entry("link", 0o777, 0, os.readlink(name, dir_fd=handle)), None
            elif stat.S_ISDIR(status.st_mode):
                yield child_path, Entry("dir", mode), None
                yield from _walk_folder(_open_entry(name, flags | os.O_DIRECTORY, handle, child_path), child_path)
            elif stat.S_ISREG(status.st_mode):
                inner = _open_entry(name, flags, handle, child_path)
                try:
                    with open(inner, "rb", closefd=False) as file:
                        value = hashlib.file_digest(file, "sha256").hexdigest()
                    yield child_path, Entry("file", mode, os.fstat(inner).st_size, value), inner
                finally:
                    os.close(inner)
            else:
                words = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}
                raise RunError(
                    f"{child_path!r} is {words.get(stat.S_IFMT(status.st_mode), 'a device')}, and cannot be stored"
                )
    finally:
        os.close(handle)


def _open_entry(name: str, flags: int, folder: int, path: str) -> int:
    try:
        return os.open(name, flags, dir_fd=folder)
    except OSError as error:
        raise RunError(f"{path!r} cannot be read: {error.strerror}") from None


def remove_paths(manifest: Manifest, tops: Iterable[str]) -> Manifest:
    """A tree without these paths and all that lies beneath them; "" stands for all of it."""
    removed_paths, remaining = set(tops), {}
    for path, entry in sorted(manifest.items()):  # a folder comes before what is in it
        if path in removed_paths or "" in removed_paths or path.rpartition("/")[0] in removed_paths - {""}:
            removed_paths.add(path)
        else:
            remaining[path] = entry
    return remaining


def readable(manifest: Manifest) -> Manifest:
    """The same tree with modes that let its owner read it."""
    minimum_modes = {"file": 0o400, "dir": 0o500, "link": 0}

    def make_readable(entry: Entry) -> Entry:
        mode = entry.mode | minimum_modes[entry.kind]
        return entry if mode == entry.mode else replace(entry, mode=mode)

    return {path: make_readable(entry) for path, entry in manifest.items()}
