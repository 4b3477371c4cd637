"""Guard G2: of what an agent left, only regular files of the editable set come into the tree that is graded.

The folder that an agent worked in is hostile. It may hold links out of it, FIFOs that block who opens them, names that
break terminals or other file systems, and configuration that turns a test runner into a program of the agent. So the
graded tree is a pristine one, onto which files are laid that pass every check. What is refused or ignored is named: a
task that pays in spite of it tells nothing about the agent otherwise."""

from __future__ import annotations

import base64
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["FORBIDDEN_FILES", "Collected", "Editable", "collect", "lay", "packed", "write"]

PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,99}")
FORBIDDEN_FILES = re.compile(
    r"(.*/)?(conftest\.py|pytest\.ini|\.pytest\.ini|tox\.ini|setup\.cfg|setup\.py|pyproject\.toml"
    r"|(site|user)customize\.py"
    r"|[^/]*\.(pth|pyc|pyo|so|pyd|egg-link)|(__pycache__|[^/]*\.(egg-info|dist-info))(/.*)?)",
    re.IGNORECASE | re.DOTALL,
)
"""Files that change how tests are run or what is imported: no set of editable files reaches them."""

MAX_IGNORED = 64 << 20
"""Bytes that are read of all files outside of the editable set, at most: several trees are graded at a time."""
DEEPEST = 40
"""Folders within each other, at most. A path may be longer than the system's limit on paths, and deeper than Python's
stack."""


@dataclass(frozen=True)
class Editable:
    """Which files a task may change, and how much."""

    names: tuple[str, ...]
    """Files, and folders with a slash at the end, in which files of Python may be made too."""
    file: int = 1 << 20
    """Bytes of a file, at most."""
    files: int = 200
    """Files that may be laid, at most."""

    def __post_init__(self) -> None:
        for name in self.names:
            if (
                name.startswith("/")
                or not all(PLAIN.fullmatch(part) for part in name.removesuffix("/").split("/"))
                or FORBIDDEN_FILES.fullmatch(name)
            ):
                raise ValueError(
                    f"{name!r} cannot be editable: it must be a plain relative path, and no file that test runners obey"
                )

    def __contains__(self, name: str) -> bool:
        inside = any(folder.endswith("/") and name.startswith(folder) for folder in self.names)
        return (name in self.names or inside and name.endswith(".py")) and not FORBIDDEN_FILES.fullmatch(name)


@dataclass(frozen=True)
class Collected:
    """What was found in a folder that an agent left."""

    files: Mapping[str, bytes]
    """The editable ones."""
    refused: tuple[tuple[str, str], ...]
    """Editable names that are no plain files, with the reason; and whatever has an odd name."""
    ignored: Mapping[str, bytes]
    """What was changed or made outside of the editable set, as far as it can be read: the monitor looks at it."""


def collect(root: Path, editable: Editable, pristine: Mapping[str, bytes], entries: int = 100_000) -> Collected:
    """Reads a folder that an agent left, and follows nothing. `pristine`: the files that it began with. `entries`: how
    many names are looked at, at most; the rest is refused. Raises ValueError where the folder is none."""
    files: dict[str, bytes] = {}
    refusals: list[tuple[str, str]] = []
    ignored_files: dict[str, bytes] = {}
    count, ignored_bytes, pristine_paths = 0, 0, {*pristine}
    for name in pristine:
        pristine_paths |= {name[:at] for at, letter in enumerate(name) if letter == "/"}

    def walk(handle: int, prefix: str) -> None:
        nonlocal count, ignored_bytes
        for entry in sorted(os.listdir(handle)):
            if (count := count + 1) > entries:
                return
            name = f"{prefix}{entry}"
            if not PLAIN.fullmatch(entry) and name not in pristine_paths:
                if PLAIN.fullmatch(entry.removeprefix(".")):
                    ignored_files[name] = b""
                else:
                    refusals.append((escape_name(name), "its name is not plain"))
                continue
            status = os.stat(entry, dir_fd=handle, follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode):
                if name.count("/") >= DEEPEST:
                    refusals.append((name, f"it lies more than {DEEPEST} folders deep"))
                    continue
                try:
                    inner = os.open(entry, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=handle)
                except OSError as error:
                    refusals.append((name, error.strerror or "it cannot be opened"))
                    continue
                try:
                    walk(inner, name + "/")
                finally:
                    os.close(inner)
            elif name not in editable:
                max_bytes = (
                    max(editable.file, len(pristine[name]))
                    if name in pristine
                    else max(0, min(editable.file, MAX_IGNORED - ignored_bytes))
                )
                data = read_content(handle, entry, max_bytes)
                if name not in pristine or data != pristine[name]:
                    ignored_files[name] = data or b""
                    ignored_bytes += len(ignored_files[name])
            elif reason := explain_refusal(status, editable.file):
                refusals.append((name, reason))
            elif len(files) >= editable.files:
                refusals.append((name, f"more than {editable.files} files would be laid"))
            elif (data := read_content(handle, entry, editable.file)) is None:
                refusals.append((name, "it cannot be read"))
            else:
                files[name] = data

    try:
        top = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise ValueError(f"root must be a folder; {root}: {error.strerror}") from error
    try:
        walk(top, "")
    finally:
        os.close(top)
    if count > entries:
        refusals.append((".", f"the folder has more than {entries} entries"))
    names_by_casefold = {}
    for name in sorted(files):
        if names_by_casefold.setdefault(name.casefold(), name) != name:
            refusals.append((name, f"it differs from {names_by_casefold[name.casefold()]} by capital letters alone"))
    return Collected(
        {name: data for name, data in files.items() if names_by_casefold[name.casefold()] == name},
        tuple(sorted(refusals)),
        dict(sorted(ignored_files.items())),
    )


def escape_name(name: str) -> str:
    """A name as it can be printed anywhere: others could move a terminal's cursor."""
    return ascii(name)[1:-1]


def explain_refusal(status: os.stat_result, max_bytes: int) -> str:
    """Why something cannot be laid; empty for a regular file that has one name."""
    kinds = {
        stat.S_IFLNK: "a symbolic link",
        stat.S_IFIFO: "a FIFO",
        stat.S_IFSOCK: "a socket",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
    }
    if not stat.S_ISREG(status.st_mode):
        return f"it is {kinds.get(stat.S_IFMT(status.st_mode), 'no regular file')}"
    if status.st_nlink > 1:
        return "it is a hard link"
    return f"it has more than {max_bytes} bytes" if status.st_size > max_bytes else ""


def read_content(handle: int, entry: str, max_bytes: int) -> bytes | None:
    """A regular file's bytes; None for others, and for one that has more than `max_bytes` when it is read."""
    try:
        file = os.open(entry, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY, dir_fd=handle)
    except OSError:
        return None
    with open(file, "rb") as stream:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            return None
        data = stream.read(max_bytes + 1)
    return data if len(data) <= max_bytes else None


def lay(pristine: Mapping[str, bytes], collected: Collected, editable: Editable) -> dict[str, bytes]:
    """The tree that is graded: the pristine one, in which the editable files are what the agent left. An editable file
    that is gone is gone."""
    fixed_files = {name: data for name, data in pristine.items() if name not in editable}
    for name in collected.files:
        if name not in editable:
            raise ValueError(f"{name} is not editable")
    return {**fixed_files, **collected.files}


def write(tree: Mapping[str, bytes], folder: Path) -> None:
    """Writes a tree into a folder that is empty or does not exist. Raises ValueError for any other, and for names that
    lead out of it."""
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise ValueError(f"{folder} must be empty")
    for name, data in tree.items():
        path = folder / _check_path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def packed(tree: Mapping[str, bytes]) -> dict[str, str]:
    """A tree as JSON can hold it, each file in base64. Raises ValueError for names that lead out of a folder."""
    return {_check_path(name): base64.b64encode(data).decode() for name, data in tree.items()}


def _check_path(name: str) -> str:
    """The same name. Raises ValueError where it leads out of a folder."""
    if name.startswith("/") or any(part in ("", ".", "..") for part in name.split("/")):
        raise ValueError(f"{name!r} leads out of the folder")
    return name
