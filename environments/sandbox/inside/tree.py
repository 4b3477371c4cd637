"""The work tree as the tools see it: where a path leads, and what may be opened there.

A tool never follows a link out of the tree, and never waits for a FIFO or a device. No other process lives while a file
tool runs, so that what was looked at is what is opened.
"""

from __future__ import annotations

import os
import stat

__all__ = ["NOTE", "Refused", "Room", "Rows", "kind", "line", "open_file", "place", "walk"]


NOTE = 100
"""Bytes that are kept free for a last line, which says how to read on."""


class Refused(Exception):
    """Why a tool does not do what it was asked, in one line."""


class Rows:
    """Lines of an answer, as many as a tool may say. What counts are bytes of UTF-8: the longest frame is known by
    them."""

    def __init__(self, room: Room) -> None:
        self.rows, self.left = [], room.output - NOTE

    def add(self, row: str) -> bool:
        """Whether there was room for it."""
        self.left -= len(row.encode("utf-8", "surrogatepass")) + 1
        if self.left >= 0:
            self.rows.append(row)
        return self.left >= 0

    def text(self, note: str = "") -> str:
        """All lines, and a last one where something is left out."""
        return "\n".join([*self.rows, *([f"… {note}"] if note else [])])


class Room:
    """Where tools work, and how much one of them may say. `root`: the work tree; `output`: bytes of a text, after which
    a tool stops reading."""

    def __init__(self, root: str = "/work", output: int = 64 * 2**10) -> None:
        self.root, self.output = root, output


def line(path: str) -> str:
    """A path in one line of a text: odd characters are escaped."""
    if path.isprintable():
        return path
    return "".join(
        c if c.isprintable() else f"\\x{ord(c) & 0xFF:02x}" if 0xDC80 <= ord(c) <= 0xDCFF else ascii(c)[1:-1]
        for c in path
    )


def kind(mode: int) -> str:
    """What a file of this mode is, in a word."""
    words = {
        stat.S_IFREG: "file",
        stat.S_IFDIR: "folder",
        stat.S_IFLNK: "link",
        stat.S_IFIFO: "FIFO",
        stat.S_IFSOCK: "socket",
    }
    return words.get(stat.S_IFMT(mode), "device")


def resolve_path(path: str) -> str:
    """As os.path.realpath, which gives up at a link that leads to itself, and then leaves links behind it as they
    are."""
    for _ in range(40):
        real_path = os.path.realpath(path)
        if real_path == path:
            return real_path
        path = real_path
    raise Refused(f"{line(path)} has too many links")


def place(room: Room, path: str, follow: bool = True) -> str:
    """The real absolute path. `follow`: also if the path itself is a link. Raises Refused where it leads out of the
    tree, and without `follow` for its root."""
    if "\0" in path:
        raise Refused("path must not hold a null character")
    joined = os.path.join(room.root, path)
    if not follow:
        folder, name = os.path.split(joined.rstrip("/"))
        if name in ("", ".", ".."):
            raise Refused(f"{line(path)!r} names nothing in {room.root}")
        real_path = os.path.join(resolve_path(folder), name)
    else:
        real_path = resolve_path(joined)
    if not real_path.startswith(room.root + "/") and not (follow and real_path == room.root):
        raise Refused(f"{line(path)} leads out of {room.root}")
    return real_path


def open_file(room: Room, path: str, flags: int = os.O_RDONLY) -> int:
    """A handle of a regular file. Raises Refused for everything else, and OSError."""
    real_path = place(room, path)
    if os.path.lexists(real_path) and not stat.S_ISREG(os.lstat(real_path).st_mode):
        raise Refused(f"{line(path)} is a {kind(os.lstat(real_path).st_mode)}, not a file")
    return os.open(real_path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY, 0o644)


def walk(room: Room, start: str = "."):
    """(path from the root of the tree, os.DirEntry) of everything beneath a folder, in the order of names. Links are
    not followed."""
    top = place(room, start)
    stack = [top]
    while stack:
        folder = stack.pop()
        try:
            with os.scandir(folder) as iterator:
                entries = sorted(iterator, key=lambda entry: entry.name)
        except OSError:
            continue  # a folder that may not be read
        for entry in entries:
            yield entry.path[len(room.root) + 1 :], entry
        stack += [entry.path for entry in reversed(entries) if entry.is_dir(follow_symlinks=False)]
