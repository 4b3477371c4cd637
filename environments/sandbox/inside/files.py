"""The tools that read and change single files, and list folders."""

from __future__ import annotations

import os
import stat

from .texts import WIDE, edited, encoding_of
from .tree import NOTE, Refused, Room, Rows, kind, line, open_file, place

__all__ = ["delete", "edit", "ls", "read", "write"]

LARGEST = 8 * 2**20
"""Bytes of the largest file that is edited."""


def read(room: Room, path: str, start: int = 1, lines: int = 0) -> str:
    """Lines of a file, from line `start`, which is 1 for the first; `lines` 0: all of them. What is no text is shown as
    \\x and its code. Lines end with \\n, whatever ends them there, and a mark of byte order is not shown: so an edit
    takes them."""
    if start < 1 or lines < 0:
        raise Refused("start must be at least 1, and lines not negative")
    max_bytes = room.output - NOTE
    blocks, size, number, suffix = [], 0, 0, ""
    with open(open_file(room, path), "rb") as file:
        total = os.fstat(file.fileno()).st_size
        mark, encoding = encoding_of(file.read(4))
        if encoding.startswith(WIDE) and total <= LARGEST:
            import io

            file.seek(len(mark))
            data = file.read().decode(encoding, "backslashreplace").encode()
            file, mark, total = io.BytesIO(data), b"", len(data)
        file.seek(len(mark))
        while block := file.readline(max_bytes + 1):
            if number + 1 >= start:
                part = block[: max_bytes - size] if not blocks else block
                if size + len(part) > max_bytes or len(part) < len(block):
                    part = part if not blocks else b""
                    remaining = total - file.tell() + len(block) - len(part)
                    advice = (
                        f"line {number + 1} is longer than a tool may say"
                        if part
                        else f"read on with start={number + 1}"
                    )
                    suffix = f"\n… {remaining} bytes more: {advice}"
                    blocks.append(part)
                    break
                blocks.append(block)
                size += len(block)
            number += block.endswith(b"\n")
            if lines and number >= start - 1 + lines:
                break
    return b"".join(blocks).decode("utf-8", "backslashreplace").replace("\r\n", "\n") + suffix


def write(room: Room, path: str, text: str) -> str:
    """Makes or replaces a file, and the folders that it lies in."""
    real_path = place(room, path)
    if os.path.lexists(real_path) and not stat.S_ISREG(os.lstat(real_path).st_mode):
        raise Refused(f"{line(path)} is a {kind(os.lstat(real_path).st_mode)}, not a file")
    os.makedirs(os.path.dirname(real_path), exist_ok=True)
    data = text.encode("utf-8", "surrogateescape")
    with open(open_file(room, path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
        file.write(data)
    return f"wrote {len(data)} bytes to {line(path)}"


def edit(room: Room, path: str, old: str, new: str, every: bool = False) -> str:
    """Replaces `old`, which must occur once, by `new`; `every`: however often it occurs. Line ends are those of the
    file (see texts.py)."""
    if not old:
        raise Refused("old must not be empty; write makes a file")
    with open(open_file(room, path), "rb") as file:
        before = file.read(LARGEST + 1)
    if len(before) > LARGEST:
        raise Refused(f"{line(path)} is larger than {LARGEST >> 20} MiB; edit it with a command")
    times, after = edited(before, old, new, every)
    if times == 0 or (times > 1 and not every):
        raise Refused(
            f"old occurs {times} times in {line(path)}; it must occur once"
            if times
            else f"old does not occur in {line(path)}"
        )
    with open(open_file(room, path, os.O_WRONLY | os.O_TRUNC), "wb") as file:
        file.write(after)
    return f"replaced {times} {'place' if times == 1 else 'places'} in {line(path)}"


def delete(room: Room, path: str) -> str:
    """Removes a file, a link or a folder with all that is in it. Of a link it removes the link only."""
    real_path = place(room, path, follow=False)
    if stat.S_ISDIR(os.lstat(real_path).st_mode):
        import shutil  # it loads compressors, which would slow down every start

        shutil.rmtree(real_path)
    else:
        os.unlink(real_path)
    return f"deleted {line(path)}"


def ls(room: Room, path: str = ".") -> str:
    """One line for each thing in a folder, in the order of names: its kind, its bytes, its name."""
    real_path = place(room, path)
    if not stat.S_ISDIR(os.lstat(real_path).st_mode):
        raise Refused(f"{line(path)} is a {kind(os.lstat(real_path).st_mode)}, not a folder")
    rows, names = Rows(room), sorted(os.listdir(real_path))
    for number, name in enumerate(names):
        status = os.lstat(os.path.join(real_path, name))
        target = f" -> {line(os.readlink(os.path.join(real_path, name)))}" if stat.S_ISLNK(status.st_mode) else ""
        if not rows.add(f"{kind(status.st_mode):6} {status.st_size:>9} {line(name)}{target}"):
            return rows.text(f"{len(names) - number} more; glob finds them by name")
    return rows.text() or "the folder is empty"
