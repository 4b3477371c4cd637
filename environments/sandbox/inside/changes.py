"""What has become of the work tree: what differs from the base it began with, or, where that was copied, all that is
there.

An overlay keeps changes in a folder of its own: new files as they are, a removed one as a device 0/0, a folder that was
removed and made anew with an attribute. Only that folder is read, so that a snapshot costs as much as has changed.
"""

from __future__ import annotations

import os
import stat

from .setup import Start
from .tree import Refused, kind, line

__all__ = ["DEEPEST", "fetch", "scan"]

DEEPEST = 100
"""Folders within folders."""


def scan(start: Start) -> dict:
    """`entries`: [path, kind, mode, size, SHA-256 or a link's target] of what is new or changed, folders before what is
    in them; the root has the path "". `removed`: paths that are gone, with all that was beneath them. Raises Refused
    for a FIFO, a socket or a device."""
    top = os.open("/work", os.O_RDONLY | os.O_DIRECTORY) if start.upper is None else os.dup(start.upper)
    entries, removed = [["", "dir", stat.S_IMODE(os.fstat(top).st_mode) & 0o777, 0, ""]], []
    if start.upper is None:
        removed.append("")
    _scan_folder(top, "", entries, removed, start.upper is not None, 0)
    return {"entries": entries, "removed": removed}


def _scan_folder(handle: int, path: str, entries: list, removed: list, is_overlaid: bool, depth: int) -> None:
    """Takes the handle of a folder, and closes it. `is_overlaid`: whether it lies in an overlay's folder of changes."""
    if depth > DEEPEST:
        raise Refused(f"{line(path)[:100]}… lies deeper than {DEEPEST} folders, and cannot be stored")
    try:
        for name in sorted(os.listdir(handle)):
            status, child_path = os.lstat(name, dir_fd=handle), f"{path}/{name}" if path else name
            mode = stat.S_IMODE(status.st_mode) & 0o777
            if is_overlaid and stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:
                removed.append(child_path)
            elif stat.S_ISDIR(status.st_mode):
                inner = _open(handle, name, os.O_DIRECTORY)
                if is_overlaid and _read_opaque(inner) == b"y":
                    removed.append(child_path)
                entries.append([child_path, "dir", mode, 0, ""])
                _scan_folder(inner, child_path, entries, removed, is_overlaid, depth + 1)
            elif stat.S_ISLNK(status.st_mode):
                entries.append([child_path, "link", 0o777, 0, os.readlink(name, dir_fd=handle)])
            elif stat.S_ISREG(status.st_mode):
                entries.append([child_path, "file", mode, status.st_size, _digest(_open(handle, name))])
            else:
                raise Refused(f"{line(child_path)} is a {kind(status.st_mode)}, and cannot be stored")
    finally:
        os.close(handle)


def _digest(handle: int) -> str:
    import hashlib  # it loads OpenSSL, which would slow down every start

    with open(handle, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _open(folder: int, name: str, flags: int = 0) -> int:
    """Opens what lies in a folder, also where its mode forbids its owner to read it. The mode stays."""
    flags |= os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        return os.open(name, flags, dir_fd=folder)
    except PermissionError:
        mode = stat.S_IMODE(os.lstat(name, dir_fd=folder).st_mode)
        os.chmod(name, mode | stat.S_IRWXU, dir_fd=folder)
        handle = os.open(name, flags, dir_fd=folder)
        os.fchmod(handle, mode)
        return handle


def _read_opaque(handle: int) -> bytes:
    try:
        return os.getxattr(handle, "user.overlay.opaque")
    except OSError:
        return b""


def _open_path(path: str) -> int:
    """A handle of a file of the work tree. No link is followed on the way."""
    current = os.open("/work", os.O_RDONLY | os.O_DIRECTORY)
    *folders, name = path.split("/")
    try:
        for folder in folders:
            inner = _open(current, folder, os.O_DIRECTORY)
            os.close(current)
            current = inner
        return _open(current, name)
    finally:
        os.close(current)


def fetch(path: str, writer: int) -> None:
    """Writes a file's size in a line, and its bytes; or -1, if there is no such file."""
    try:
        handle = _open_path(path)
    except OSError:
        os.write(writer, b"-1\n")
        return
    with open(handle, "rb") as file:
        remaining = os.fstat(handle).st_size
        os.write(writer, b"%d\n" % remaining)
        while remaining and (block := file.read(min(remaining, 1 << 20))):
            remaining -= len(block)
            view = memoryview(block)
            while view:
                view = view[os.write(writer, view) :]
