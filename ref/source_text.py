"""Python source by lines: where its statements begin and end, and edits that leave every other line as it was, byte for
byte.

The parser gives positions as line and offset in UTF-8, whatever the file's own encoding is. Lines end where Python's
tokenizer ends them: at `\\n`, `\\r\\n` and `\\r`, not at a form feed and not at the other places where `str.splitlines`
would. Nothing here is executed."""

from __future__ import annotations

import ast
import hashlib
import re
import tokenize
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

__all__ = [
    "Edit",
    "Patch",
    "Source",
    "apply",
    "compiles",
    "docstring_apart",
    "lines_of",
    "patch",
    "parse_source",
    "restore",
    "split",
    "tree_of",
]

BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, order=True)
class Edit:
    """Whole lines of a file that others take the place of."""

    first: int
    """Number of the first line, from 1."""
    old: bytes
    """The lines, with their ends."""
    new: bytes
    """What stands there instead; empty where nothing does."""

    @cached_property
    def last(self) -> int:
        """Number of the last line that goes."""
        return self.first + len(split(self.old)) - 1


@dataclass(frozen=True)
class Patch:
    """Edits of one file, from top to bottom, and the SHA-256 of the file before and after them."""

    file: str
    edits: tuple[Edit, ...]
    before: str
    after: str


def split(data: bytes) -> list[bytes]:
    """The lines of a file, each with its end. Joined they are the file again."""
    return re.findall(rb"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+", data)


def patch(file: str, data: bytes, edits: Sequence[Edit]) -> Patch:
    """Edits of `data`. Raises ValueError where two of them touch the same line, where the lines are others, or where
    nothing changes."""
    edits, lines, out, position = sorted(edits), split(data), [], 0
    for edit in edits:
        if edit.first - 1 < position or b"".join(lines[edit.first - 1 : edit.last]) != edit.old or not edit.old:
            raise ValueError(
                f"{file}: lines {edit.first} to {edit.last} are not those that the edit takes away, or "
                f"two edits overlap"
            )
        out += [*lines[position : edit.first - 1], edit.new]
        position = edit.last
    after = b"".join([*out, *lines[position:]])
    if after == data:
        raise ValueError(f"{file}: the edits change nothing")
    return Patch(file, tuple(edits), digest(data), digest(after))


def apply(patch: Patch, data: bytes) -> bytes:
    """The file after the edits. A file that has them already stays as it is. Raises ValueError for any other file."""
    return _swap(patch, data, patch.before, patch.after, [(edit.first, edit.old, edit.new) for edit in patch.edits])


def restore(patch: Patch, data: bytes) -> bytes:
    """The file before the edits, from the one after them. Raises ValueError for any other file."""
    swaps, shift = [], 0
    for edit in patch.edits:
        swaps.append((edit.first + shift, edit.new, edit.old))
        shift += len(split(edit.new)) - len(split(edit.old))
    return _swap(patch, data, patch.after, patch.before, swaps)


def _swap(patch: Patch, data: bytes, start: str, end: str, swaps: list[tuple[int, bytes, bytes]]) -> bytes:
    if digest(data) == end:
        return data
    if digest(data) != start:
        raise ValueError(
            f"{patch.file} is not the file that the piece was cut from: its SHA-256 begins with "
            f"{digest(data)[:12]}, not {start[:12]}"
        )
    lines, out, position = split(data), [], 0
    for first, old, new in swaps:
        out += [*lines[position : first - 1], new]
        position = first - 1 + len(split(old))
    content = b"".join([*out, *lines[position:]])
    if digest(content) != end:  # line ends of several kinds, which met where lines went
        raise ValueError(f"{patch.file} cannot be changed: its line ends are of several kinds")
    return content


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def tree_of(text: str) -> ast.Module:
    """The tree of a program's text. Raises what `ast.parse` raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what the author of a package may have been told about escapes
        return ast.parse(text)


def compiles(data: bytes) -> bool:
    """Whether Python takes the file: `ast.parse` lets some through that the compiler refuses, such as a `nonlocal`
    without its variable."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(data, "<source>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def docstring_apart(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.stmt]:
    """A body without its docstring."""
    return node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body


@dataclass(frozen=True)
class Source:
    """A file of Python that was read."""

    raw: tuple[bytes, ...]
    """Its lines with their ends."""
    lines: tuple[str, ...]
    """The same lines, decoded, without a byte order mark."""
    encoding: str
    tree: ast.Module

    @cached_property
    def quoted(self) -> frozenset[int]:
        """Lines that begin inside of a string."""
        string_lines: set[int] = set()
        for node in ast.walk(self.tree):
            if (
                isinstance(node, ast.JoinedStr)
                or isinstance(node, ast.Constant)
                and isinstance(node.value, str | bytes)
            ):
                string_lines.update(range(node.lineno + 1, (node.end_lineno or node.lineno) + 1))
        return frozenset(string_lines)

    def begins(self, node: ast.stmt) -> tuple[int, int]:
        """Line of the first token of a statement, decorators included, and its offset in UTF-8. Parentheses behind an
        `@` are no part of the decorator's node, so the line with the `@` is looked for upwards."""
        line, offset = node.lineno, node.col_offset
        if decorators := getattr(node, "decorator_list", None):
            line = decorators[0].lineno
            while not self.lines[line - 1].lstrip().startswith("@"):
                line -= 1
            offset = len(self.lines[line - 1].partition("@")[0].encode())
        return line, offset

    def alone(self, node: ast.stmt) -> bool:
        """Whether nothing but space stands before the statement in its line."""
        line, offset = self.begins(node)
        return not self.lines[line - 1].encode()[:offset].strip()

    def chunks(self, suite: Sequence[ast.stmt]) -> list[list[ast.stmt]]:
        """Statements of a suite that share a line, by `;` or by a backslash, go together: coverage cannot tell them
        apart."""
        groups: list[list[ast.stmt]] = []
        for node in suite:
            before = groups[-1][-1].end_lineno if groups else None
            if before and (self.begins(node)[0] <= before or self.lines[before - 1].rstrip().endswith("\\")):
                groups[-1].append(node)
            else:
                groups.append([node])
        return groups

    def cut(self, first: ast.stmt, last: ast.stmt, fill: str, with_comments: bool = False) -> Edit:
        """Takes away the statements from `first` to `last` of one suite, and the comments directly above that are
        indented as they are. What stands before `first` in its line stays if there is a `fill`, which comes behind it.
        `with_comments`: comments directly below that are indented as much, or more, go too: they are the suite's,
        unless `first` is an `elif`."""
        start, offset = self.begins(first)
        end = last.end_lineno or last.lineno
        before = self.lines[start - 1].encode()[:offset].decode()
        new = b""
        if fill:
            line = self.raw[end - 1]
            mark = BOM if start == 1 and self.raw[0].startswith(BOM) else b""
            new = mark + (before + fill).encode(self.encoding) + line[len(line.rstrip(b"\r\n")) :]
        if not before.strip():
            while (
                start > 1
                and self._is_comment(start - 1, before + "#")
                and not (start > 2 and self.lines[start - 3].rstrip().endswith("\\"))
            ):
                start -= 1
            while with_comments and end < len(self.lines) and self._is_comment(end + 1, before):
                end += 1
        return Edit(start, b"".join(self.raw[start - 1 : end]), new)

    def _is_comment(self, line: int, begins: str) -> bool:
        text = self.lines[line - 1]
        return text.lstrip().startswith("#") and text.startswith(begins) and line not in self.quoted


def lines_of(data: bytes) -> tuple[str, list[str]]:
    """The encoding of a file of Python source, and its lines, without a byte order mark. Raises ValueError for bytes
    that Python could not decode either, and for an encoding in which a line has other bytes than alone."""
    raw = split(data)
    try:
        encoding, _ = tokenize.detect_encoding(iter(raw).__next__)
        # Each line alone, and all of them: in an encoding with states, a line would depend on those before it.
        encoding = "utf-8" if encoding == "utf-8-sig" else encoding
        lines = [line.decode(encoding) for line in raw]
        if any(line.encode(encoding) != bytes_ for line, bytes_ in zip(lines, raw, strict=True)) or "".join(
            lines
        ) != data.decode(encoding):
            raise ValueError(f"lines in the encoding {encoding} cannot be changed one by one")
    except (SyntaxError, LookupError) as error:
        raise ValueError(f"this is no Python source: {error}") from error
    if lines and data.startswith(BOM):
        lines[0] = lines[0].removeprefix("\ufeff")
    return encoding, lines


def parse_source(data: bytes) -> Source:
    """Reads a file of Python source. Raises ValueError as `lines_of` does, and for one that Python could not parse
    either."""
    encoding, lines = lines_of(data)
    try:
        tree = tree_of("".join(lines))
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"this is no Python source: {error}") from error
    return Source(tuple(split(data)), tuple(lines), encoding, tree)
