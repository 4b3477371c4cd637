"""Files that survive a kill, a full disk and careless edits: replaced atomically, appended in complete entries,
checked by hash, and read within limits. Whatever a file or a message holds, reading it ends in a value of the
expected shape or in an error of one line."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import stat
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from kit.settings import RunError

__all__ = [
    "NO_ROOM",
    "DamagedFile",
    "Hashing",
    "Journal",
    "atomic_write",
    "describe_mismatch",
    "hash_file",
    "parse_json",
    "parse_toml",
    "read_bytes",
    "read_json",
    "read_lines",
    "read_record",
    "read_text",
    "read_toml",
    "refusal",
    "seal_record",
    "sum_stage_seconds",
    "timings",
    "what_is_wrong",
]

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers for a full disk, an exhausted quota and a file size limit."""
MAX_BYTES = 256 << 20
"""Upper bound of a JSON file. Real tokenizers have up to 35 MB."""
MAX_TOML_BYTES = 1 << 20
"""Upper bound of a TOML file, whose parser is slow."""
MAX_DEPTH = 100
"""Upper bound of nesting. Code that walks a value recursively then stays far from Python's own limit."""


class DamagedFile(RunError, ValueError):
    """A file that does not hold what its reader expects. `reason` says why, without the path; `path` is the file."""

    def __init__(self, path: Path, reason: str, advice: str = "restore or delete it", message: str = "") -> None:
        super().__init__(message or f"{path} is damaged ({reason}); {advice}")
        self.path, self.reason = path, reason


def atomic_write(path: str | Path, content: bytes | str) -> None:
    """Replaces the content of `path` atomically: a reader sees all of the old content or all of the new. Raises OSError
    if that fails."""
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
    """A file that grows by complete entries. An entry that does not fit on the disk, or is interrupted, leaves no
    trace."""

    def __init__(self, path: Path, keep: int | None = None) -> None:
        """Opens `path` and creates it if it is missing. `keep`: first truncate it to this many bytes."""
        self.file = open(path, "ab", buffering=0)
        if keep is not None:
            self.file.truncate(keep)

    def append(self, entry: bytes) -> None:
        """Adds all of `entry`. Raises OSError if it does not fit, and leaves the file unchanged."""
        before, remaining = os.fstat(self.file.fileno()).st_size, memoryview(entry)
        try:
            while remaining:  # a write may accept fewer bytes than it is given
                remaining = remaining[self.file.write(remaining) or 0 :]
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
    """A file object for torch.save. It passes blocks on to `file` and hashes what it was given, not what the disk kept.
    `failed`: the disk's error, which torch.save replaces by one of its own."""

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
    digest, remaining = hashlib.sha256(), math.inf if length is None else length
    with open(path, "rb") as file:
        while remaining > 0 and (block := file.read(int(min(1 << 20, remaining)))):
            digest.update(block)
            remaining -= len(block)
    return digest.hexdigest()


def what_is_wrong(path: Path, size: int, digest: str, prefix: bool = False) -> str:
    """Why the file differs from the one that was written; empty if it does not. `prefix`: compare only the first `size`
    bytes."""
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


def describe_mismatch(value: Any, shape: Any) -> str:
    """Describes where a JSON value differs from this shape; empty if it matches.

    A shape is a type or a tuple of types, or `object` for any value; a list with the shape of its elements, and ...
    if it must not be empty; a dict with the shapes of the required keys, or under ... the shape of every value; or a
    function from a value to its shape."""
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            return "not a JSON object"
        items = [
            (key, inner)
            for key_pattern, inner in shape.items()
            for key in (value if key_pattern is ... else [key_pattern])
        ]
        mismatches = (
            (key, describe_mismatch(value[key], inner) if key in value else "missing") for key, inner in items
        )
    elif isinstance(shape, list):
        if not isinstance(value, list) or len(shape) > len(value) + 1:
            return "empty" if value == [] else "not a list"
        mismatches = ((place, describe_mismatch(inner, shape[0])) for place, inner in enumerate(value))
    elif shape is object:
        return ""
    elif isinstance(shape, type | tuple):
        return (
            ""
            if type(value) in (shape if isinstance(shape, tuple) else (shape,))
            else f"unexpected value {json.dumps(value)[:40]}"
        )
    else:
        return describe_mismatch(value, shape(value))
    return next((f"{location}: {mismatch}" for location, mismatch in mismatches if mismatch), "")


def parse_json(
    text: str | bytes | bytearray,
    limit: int = MAX_BYTES,
    parse_constant: Callable[[str], Any] | None = None,
    object_hook: Callable[[dict], Any] | None = None,
) -> Any:
    """The value of a JSON text, in UTF-8 if it comes as bytes. NaN and infinities are accepted; the hooks are
    those of `json.loads`. Raises ValueError, in one line, for anything else, for more than `limit` bytes or
    characters, and for nesting deeper than `MAX_DEPTH`."""
    if len(text) > limit:
        raise ValueError(f"it has more than {limit:,} bytes")
    try:
        decoded = text if isinstance(text, str) else text.decode("utf-8-sig")
        value = json.loads(decoded, parse_constant=parse_constant, object_hook=object_hook)
    except RecursionError:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not valid UTF-8: {error.reason} at byte {error.start:,}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not valid JSON: {error}") from None
    if decoded.count("[") + decoded.count("{") > MAX_DEPTH:
        _check_depth(value)
    return value


def parse_toml(text: str | bytes) -> dict[str, Any]:
    """The table of a TOML text, in UTF-8 if it comes as bytes. Raises ValueError as `parse_json` does."""
    try:
        value = tomllib.loads(text.decode("utf-8") if isinstance(text, bytes) else text)
    except RecursionError:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not valid UTF-8: {error.reason} at byte {error.start:,}") from None
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"it is not valid TOML: {error}") from None
    _check_depth(value)
    return value


def _check_depth(value: Any) -> None:
    """Raises ValueError for a value nested deeper than `MAX_DEPTH`; level by level, because recursion is what it
    protects from."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_DEPTH):
        if not level:
            return
        level = [
            part
            for group in level
            for part in (group.values() if isinstance(group, dict) else group)
            if isinstance(part, dict | list)
        ]
    if level:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")


def read_bytes(path: str | Path, limit: float = MAX_BYTES) -> bytes:
    """The content of a regular file. Raises OSError if it cannot be read, and DamagedFile for a device or pipe,
    which may have no end, and for more than `limit` bytes."""
    path = Path(path)
    status = path.stat()
    if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
        raise DamagedFile(path, "it is not a regular file", "name another file")
    if status.st_size > limit:
        raise DamagedFile(path, f"it has more than {limit:,} bytes")
    return path.read_bytes()


def read_text(path: str | Path, limit: float = MAX_BYTES) -> str:
    """The content of a regular file in UTF-8. Raises OSError and DamagedFile."""
    try:
        return read_bytes(path, limit).decode("utf-8")
    except UnicodeDecodeError as error:
        raise DamagedFile(Path(path), f"it is not valid UTF-8: {error.reason} at byte {error.start:,}") from None


def seal_record(record: dict[str, Any]) -> dict[str, Any]:
    """The record with its seal: under "seal", the SHA-256 of its canonical content, which is JSON in ASCII with
    sorted keys and without spaces."""
    content = {key: value for key, value in record.items() if key != "seal"}
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return {**content, "seal": hashlib.sha256(canonical.encode()).hexdigest()}


def read_record(path: str | Path, shape: dict[str, Any], advice: str, optional: str = "") -> dict[str, Any]:
    """The record that `seal_record` sealed, in a JSON file. `optional`: a key beside those of `shape`. Raises
    OSError and DamagedFile as `read_json` does.

    A record without a seal was written by a version before seals, and is accepted. It has no other keys than these,
    or else damage to the word "seal" would make such a record of a sealed one."""
    record = read_json(path, shape, advice)
    if unknown := sorted(record.keys() - shape.keys() - {"seal", optional}):
        raise DamagedFile(Path(path), f"unknown key {unknown[0]!r}", advice)
    return record


def read_json(path: str | Path, shape: Any = dict, advice: str = "restore or delete it", limit: int = MAX_BYTES) -> Any:
    """The value in a JSON file. Every reader of such a file uses this function. A record that has a seal must
    match it.

    `shape`: what the value must look like, as `describe_mismatch` takes it; by default a JSON object. `advice`: what
    the message tells the user to do. Raises OSError if the file cannot be read, and DamagedFile if it does not hold
    such a value within the limits of `parse_json`."""
    path = Path(path)
    try:
        value = parse_json(read_bytes(path, limit), limit)
        reason = describe_mismatch(value, shape)
        if not reason and isinstance(value, dict) and "seal" in value and value["seal"] != seal_record(value)["seal"]:
            reason = "its content has changed: the seal does not match"
    except DamagedFile as error:
        reason = error.reason
    except ValueError as error:
        reason = " ".join(str(error).split())
    if reason:
        raise DamagedFile(path, reason, advice)
    return value


def read_toml(path: str | Path) -> dict[str, Any]:
    """The table in a TOML file, which may be a pipe. Raises OSError and DamagedFile."""
    content = b""
    with open(path, "rb") as file:
        while block := file.read(1 << 16):
            content += block
            if len(content) > MAX_TOML_BYTES:
                raise DamagedFile(Path(path), f"it has more than {MAX_TOML_BYTES:,} bytes", "name another file")
    try:
        return parse_toml(content)
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise DamagedFile(
            Path(path), reason, message=f"{path} is not valid TOML: {reason.removeprefix('it is not valid TOML: ')}"
        ) from None


def read_lines(path: Path) -> list[dict]:
    """The JSON objects in a file of JSON lines; empty if there is no file. Skips other lines, such as a last line
    that a kill cut off. Every reader of such files uses this function. Raises OSError if the file cannot be read,
    and DamagedFile for a device or pipe."""
    objects = []
    for line in read_bytes(path, math.inf).decode("utf-8", "replace").split("\n") if path.exists() else ():
        try:
            value = parse_json(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            objects.append(value)
    return objects


def timings(root: Path) -> list[dict]:
    """The lines of a run's timings.jsonl: `stage`, the `seconds` spent in it so far, and in some lines `step` or
    `peak_memory_gib`. Skips lines in any other format."""

    def is_number(value: object) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf

    def is_timing(line: dict) -> bool:
        has_numbers = all(is_number(line[key]) for key in ("step", "peak_memory_gib") if key in line)
        return isinstance(line.get("stage"), str) and is_number(line.get("seconds")) and has_numbers

    return [line for line in read_lines(root / "timings.jsonl") if is_timing(line)]


def sum_stage_seconds(root: Path) -> dict[str, float]:
    """Wall-clock seconds of a run by stage, without interruptions, but with repeated work."""
    seconds: dict[str, float] = {}
    for line in timings(root):
        seconds[line["stage"]] = max(seconds.get(line["stage"], 0.0), line["seconds"])
    return seconds


def refusal(error: BaseException) -> OSError | None:
    """The operating system's error behind `error`: `error` itself, or the one that a Rust library wraps (safetensors in
    an exception of its own, tokenizers in a plain Exception). None for any other error."""
    from safetensors import SafetensorError

    if isinstance(error, OSError):
        return error
    match = re.search(r"\(os error (\d+)\)", str(error)) if type(error) in (Exception, SafetensorError) else None
    return OSError(int(match[1]), os.strerror(int(match[1]))) if match else None
