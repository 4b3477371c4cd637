"""Files that survive a kill, a full disk and careless edits: replaced atomically, appended in complete entries, checked by hash, read by line."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
from pathlib import Path
from typing import BinaryIO

__all__ = ["NO_ROOM", "Hashing", "Journal", "atomic_write", "hash_file", "read_lines", "refusal", "spent", "timings", "what_is_wrong"]

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers for a full disk, an exhausted quota and a file size limit."""


def atomic_write(path: str | Path, content: bytes | str) -> None:
    """Replaces the content of `path` atomically: a reader sees all of the old content or all of the new. Raises OSError if that fails."""
    path = Path(path)
    temporary = path.with_name(f".tmp-{path.name}")
    try:
        with open(temporary, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    handle = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class Journal:
    """A file that grows by complete entries. An entry that does not fit on the disk, or is interrupted, leaves no trace."""

    def __init__(self, path: Path, keep: int | None = None) -> None:
        """Opens `path` and creates it if it is missing. `keep`: first truncate it to this many bytes."""
        self.file = open(path, "ab", buffering=0)
        if keep is not None:
            self.file.truncate(keep)

    def append(self, entry: bytes) -> None:
        """Adds all of `entry`. Raises OSError if it does not fit, and leaves the file unchanged."""
        before, left = os.fstat(self.file.fileno()).st_size, memoryview(entry)
        try:
            while left:  # a write may accept fewer bytes than it is given
                left = left[self.file.write(left) or 0 :]
        except BaseException:
            self.file.truncate(before)
            raise

    def torn(self) -> bool:
        """Whether a kill cut off the last line."""
        with open(self.file.name, "rb") as file:
            return bool(file.seek(0, os.SEEK_END)) and file.seek(-1, os.SEEK_END) >= 0 and file.read(1) != b"\n"

    def sync(self) -> None:
        """Returns once everything appended is on disk."""
        os.fsync(self.file.fileno())

    def close(self) -> None:
        self.file.close()


class Hashing:
    """A file object for torch.save. It passes blocks on to `file` and hashes what it was given, not what the disk kept. `failed`: the disk's
    error, which torch.save replaces by one of its own."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.digest, self.bytes = file, hashlib.sha256(), 0
        self.failed: OSError | None = None

    def write(self, block: bytes) -> int:
        self.digest.update(block)
        self.bytes += len(block)
        try:
            return self.file.write(block)
        except OSError as error:
            self.failed = error
            raise

    def flush(self) -> None:
        self.file.flush()


def hash_file(path: Path, length: int | None = None) -> str:
    """SHA-256 of the first `length` bytes of a file (by default of the complete file)."""
    digest, left = hashlib.sha256(), math.inf if length is None else length
    with open(path, "rb") as file:
        while left > 0 and (block := file.read(int(min(1 << 20, left)))):
            digest.update(block)
            left -= len(block)
    return digest.hexdigest()


def what_is_wrong(path: Path, size: int, digest: str, prefix: bool = False) -> str:
    """Why the file differs from the one that was written; empty if it does not. `prefix`: compare only the first `size` bytes."""
    if not path.exists():
        return "it is missing"
    length = path.stat().st_size
    if length < size:
        return f"it is cut short: {length} of {size} bytes"
    if length > size and not prefix:
        return f"it has {length} bytes instead of {size}"
    if hash_file(path, size) != digest:
        return "its content has changed: the SHA-256 differs from the recorded one"
    return ""


def read_lines(path: Path) -> list[dict]:
    """The JSON objects in a file of JSON lines; empty if there is no file. Skips other lines, such as a last line that a kill cut off.
    Every reader of such files uses this function."""
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n") if path.exists() else ():
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            found.append(value)
    return found


def timings(root: Path) -> list[dict]:
    """The lines of a run's timings.jsonl: `stage`, the `seconds` spent in it so far, and in some lines `step` or `peak_memory_gib`. Skips
    lines in any other format."""

    def number(value: object) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf

    def ours(line: dict) -> bool:
        told = all(number(line[key]) for key in ("step", "peak_memory_gib") if key in line)
        return isinstance(line.get("stage"), str) and number(line.get("seconds")) and told

    return [line for line in read_lines(root / "timings.jsonl") if ours(line)]


def spent(root: Path) -> dict[str, float]:
    """Wall-clock seconds of a run by stage, without interruptions, but with repeated work."""
    seconds: dict[str, float] = {}
    for line in timings(root):
        seconds[line["stage"]] = max(seconds.get(line["stage"], 0.0), line["seconds"])
    return seconds


def refusal(error: BaseException) -> OSError | None:
    """The operating system's error behind `error`: `error` itself, or the one that a Rust library wraps (safetensors in an exception of its
    own, tokenizers in a plain Exception). None for any other error."""
    from safetensors import SafetensorError

    if isinstance(error, OSError):
        return error
    said = re.search(r"\(os error (\d+)\)", str(error)) if type(error) in (Exception, SafetensorError) else None
    return OSError(int(said[1]), os.strerror(int(said[1]))) if said else None
