"""The audit of a tree: is there anything left from which the deleted code could be read? Guard G1.

An agent that finds the original earns the reward without the work. Cursor met it with Composer 2.5, which read a
signature from a type checker's cache; others met it in Git's objects and in packages that a `pip download` brings. So
every file of a tree is read, unfolded as far as it goes (`environments/unfold.py`), and compared with the deleted code
as text and by its names (`environments/fingerprint.py`). The audit does not know where a tool keeps its cache. It looks
at bytes, so a cache that nobody has heard of is found too. Three rules stand beside it: bytecode that was compiled from
another source than the one that lies there, a type checker's cache that tells a signature, and a database of coverage,
which tells the lines of the original.

What is not found: a copy whose variables have other names, one that is encrypted or folded in a way that `FOLDS` does
not have, code of fewer than `LEAST` tokens, and compiled code of which every name also stands in what is left, unless
it is the bytecode of the changed file itself. What could not be read to its end is a finding too, of the kind "unread".

How often is it wrong? On 24 functions of the standard library against five other packages of it, sources and bytecode,
it has no alarm; `tests/environments/test_leaks.py` counts.
"""

from __future__ import annotations

import importlib.util
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from environments.fingerprint import Deleted
from environments.unfold import DRESSES, FOLDS, Fold, TooLarge

__all__ = ["Detectors", "Leak", "Limits", "audit"]


@dataclass(frozen=True, order=True)
class Leak:
    """A place from which the deleted code, or something telling about it, can be read."""

    path: str
    """Within the tree; behind exclamation marks, what it was unfolded to."""
    kind: str
    """ "text", "names", "signature", "bytecode", "coverage", or "unread"."""
    reason: str


@dataclass(frozen=True)
class Limits:
    """What the audit may read."""

    depth: int = 8
    """How often something may be unfolded from something unfolded."""
    file: int = 256 << 20
    """Bytes of a file, and of what is unfolded from it in one step."""
    total: int = 2 << 30
    """Bytes of everything that is unfolded."""
    files: int = 500_000


@dataclass(frozen=True)
class Detectors:
    """What is looked for. A test takes one away, and what it planted must not be found then."""

    folds: Mapping[str, Fold] = field(default_factory=lambda: FOLDS)
    dresses: Mapping[str, Callable[[str], str]] = field(default_factory=lambda: DRESSES)
    rules: frozenset[str] = frozenset({"text", "names", "bytecode", "coverage", "signatures", "links", "attributes"})


class _Audit:
    def __init__(self, root: Path, deleted: Deleted, limits: Limits, detectors: Detectors) -> None:
        self.root, self.deleted, self.limits, self.detectors = root, deleted, limits, detectors
        self.bytes_left, self.files = limits.total, 0

    def walk(self) -> Iterator[Leak]:
        folders = [self.root]
        while folders:  # no recursion: a tree may be deeper than Python's stack
            folder = folders.pop()
            try:
                entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
            except OSError as error:
                yield self.make_unread_leak(folder, error.strerror or "it cannot be opened")
                continue
            for entry in entries:
                path = Path(entry.path)
                if self.files >= self.limits.files:
                    yield self.make_unread_leak(path, f"the tree has more than {self.limits.files} files")
                    return
                self.files += 1
                if "attributes" in self.detectors.rules:
                    yield from self.read_attributes(path)
                mode = entry.stat(follow_symlinks=False).st_mode
                if stat.S_ISDIR(mode):
                    folders.append(path)
                elif stat.S_ISLNK(mode):
                    yield from self.follow_link(path)
                elif stat.S_ISREG(mode):
                    yield from self.read_file(path, path)
                else:
                    yield self.make_unread_leak(path, "it is neither a file nor a folder")

    def format_name(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    def make_unread_leak(self, path: Path, reason: str) -> Leak:
        return Leak(self.format_name(path), "unread", reason)

    def follow_link(self, path: Path) -> Iterator[Leak]:
        """Where a link leads to a file outside of the tree, that file is read as if it lay here. What is inside is read
        by itself."""
        if "links" not in self.detectors.rules:
            return
        try:
            target = path.resolve(strict=True)
            mode = target.stat().st_mode
        except (OSError, RuntimeError):
            return
        if not target.is_relative_to(self.root):
            if stat.S_ISREG(mode):
                yield from self.read_file(path, target)
            else:
                yield self.make_unread_leak(path, f"it is a link to {target}, outside of the tree")

    def read_attributes(self, path: Path) -> Iterator[Leak]:
        try:
            for name in os.listxattr(path, follow_symlinks=False):
                yield from self.search(
                    f"{self.format_name(path)}!{name}", os.getxattr(path, name, follow_symlinks=False), 0, ()
                )
        except OSError:
            return  # a file system without them

    def read_file(self, path: Path, source_path: Path) -> Iterator[Leak]:
        try:
            handle = os.open(source_path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            with open(handle, "rb") as file:
                data = file.read(self.limits.file + 1)
        except OSError as error:
            yield self.make_unread_leak(path, error.strerror or "it cannot be opened")
            return
        if len(data) > self.limits.file:
            yield self.make_unread_leak(path, f"it has more than {self.limits.file} bytes")
        else:
            yield from self.search(self.format_name(path), data, 0, ())

    def search(self, name: str, data: bytes, depth: int, chain: tuple[str, ...]) -> Iterator[Leak]:
        yield from self.match_rules(name, data)
        for kind, fold in self.detectors.folds.items():
            try:
                for label, inner in fold(data, min(self.limits.file, self.bytes_left)):
                    self.bytes_left -= len(inner)
                    inner_name = f"{name}!{label}"
                    if depth + 1 >= self.limits.depth:
                        yield Leak(inner_name, "unread", f"it is folded more than {self.limits.depth} times")
                    else:
                        yield from self.search(inner_name, inner, depth + 1, (*chain, kind))
            except TooLarge as error:
                yield Leak(name, "unread", str(error))

    def match_rules(self, name: str, data: bytes) -> Iterator[Leak]:
        rules = self.detectors.rules
        if (
            data[:16] == b"SQLite format 3\0"
            and (b"line_bits" in data or b"CREATE TABLE arc" in data)
            and "coverage" in rules
        ):
            yield Leak(name, "coverage", "a database of coverage tells the lines of the original")
        if (
            data[2:4] == b"\r\n"
            and len(data) > 16
            and "bytecode" in rules
            and (reason := self.find_stale_bytecode(data))
        ):
            yield Leak(name, "bytecode", reason)
        if "text" in rules and self.deleted.may_hold(data):
            text = data.decode("utf-8", errors="replace")
            for dress in ("", *self.detectors.dresses):
                content = self.detectors.dresses[dress](text) if dress else text
                if reason := self.deleted.as_text(content):
                    yield Leak(name, "text", f"{reason}{', as ' + dress if dress else ''}")
                    return
        if (
            "signatures" in rules
            and b"arg_names" in data
            and any(all(word in data for word in words) for words in self.deleted.signatures)
        ):
            yield Leak(name, "signature", "a type checker's cache tells a signature")
        if "names" in rules and (reason := self.deleted.by_names(data)):
            yield Leak(name, "names", reason)

    def find_stale_bytecode(self, data: bytes) -> str:
        """Why bytecode of a changed file belongs to another source than the one that lies there. Its head says a size
        or a hash of its source."""
        for file, source in self.deleted.left.items():
            if Path(file).name.encode() in data:
                flags = int.from_bytes(data[4:8], "little")
                expected_hash = importlib.util.source_hash(source) if flags & 1 else b""
                if (
                    flags & 1
                    and data[8:16] != expected_hash
                    or not flags & 1
                    and int.from_bytes(data[12:16], "little") != len(source) & 0xFFFFFFFF
                ):
                    return f"bytecode of another {file} than the one that lies there"
        return ""


def audit(tree: Path, deleted: Deleted, limits: Limits = Limits(), detectors: Detectors = Detectors()) -> list[Leak]:
    """All places of a tree that tell the deleted code, sorted; empty for a clean one. Reads, and runs nothing. Raises
    ValueError where `tree` is no folder."""
    if not tree.is_dir():
        raise ValueError(f"tree must be a folder; got {tree}")
    root = tree.resolve()
    return sorted(set(_Audit(root, deleted, limits, detectors).walk()))
