"""The tools that search the tree: by name, and by content."""

from __future__ import annotations

import os
import re

from .texts import WIDE, encoding_of
from .tree import Refused, Room, Rows, line, open_file, place, walk

__all__ = ["glob", "grep", "pattern"]

LONGEST, EXCERPT_CHARACTERS, CONTEXT_BEFORE = 8 * 2**20, 1000, 200
"""Bytes of a line that are searched, as of a text in UTF-16 or UTF-32; characters of a line that are shown, and those
before the match."""
TRUNCATION_NOTE = "there is more: look in a folder beneath, or for something rarer"


def pattern(words: str) -> re.Pattern[str]:
    """The expression for paths that a glob matches: * and ? stay within a folder, ** crosses folders, [abc] is one
    character of them. A glob without a slash matches in every folder."""
    if "/" not in words:
        words = "**/" + words
    expression, i = "", 0
    while i < len(words):
        if words.startswith("**/", i):
            expression, i = expression + "(?:[^/]+/)*", i + 3
        elif words.startswith("**", i):
            expression, i = expression + ".*", i + 2
        elif words[i] in "*?":
            expression, i = expression + ("[^/]*" if words[i] == "*" else "[^/]"), i + 1
        elif words[i] == "[" and (end := words.find("]", i + 2)) > 0:
            inner = re.sub(r"([\\\[&~|^])", r"\\\1", words[i + 1 : end])
            expression, i = expression + ("[^/" + inner[1:] if inner.startswith("!") else "[" + inner) + "]", end + 1
        else:
            expression, i = expression + re.escape(words[i]), i + 1
    try:
        return re.compile(expression, re.DOTALL)
    except re.error as error:
        raise Refused(f"{line(words)} is no glob: {error}") from None


def glob(room: Room, pattern: str, path: str = ".") -> str:
    """The paths of files beneath a folder that match, in the order of names."""
    expression, rows = _compile_glob(pattern), Rows(room)
    for name, entry in walk(room, path):
        if entry.is_dir(follow_symlinks=False) or not expression.fullmatch(name):
            continue
        if not rows.add(line(name)):
            return rows.text(TRUNCATION_NOTE)
    return rows.text() or "nothing matches"


_compile_glob = pattern  # the tool's argument has the same name


def grep(room: Room, pattern: str, path: str = ".", glob: str = "*", ignore_case: bool = False) -> str:
    """The lines that a regular expression matches, as path:line:text; of a long line the part around its first match.
    Only regular files are read, and none that holds a null byte at its beginning, unless it has the mark of UTF-16 or
    UTF-32. What is no text is searched as \\x and its code."""
    try:
        expression = re.compile(pattern, re.IGNORECASE if ignore_case else 0)
    except (re.error, OverflowError, RecursionError) as error:
        raise Refused(f"pattern is no regular expression: {error}") from None
    name_expression, output = _compile_glob(glob), Rows(room)
    for name, entry in _list_files(room, path):
        if not (entry is None or name_expression.fullmatch(name)):
            continue
        try:
            handle = open_file(room, name)
        except (OSError, Refused):
            continue
        with open(handle, "rb") as file:
            rows = _read_lines(file)
            if rows is None and entry is None:
                return f"{line(name)} holds null bytes: it is no text, and not searched"
            for number, text in rows or ():
                match = expression.search(text)
                if match is not None and not output.add(f"{line(name)}:{number}:{_excerpt(text, match.start())}"):
                    return output.text(TRUNCATION_NOTE)
    return output.text() or "nothing matches"


def _read_lines(file):
    """Number and text of each line of a file, without its end; None for what is no text."""
    head = file.read(1024)
    mark, encoding = encoding_of(head)
    if encoding.startswith(WIDE):
        text = (head + file.read(LONGEST))[len(mark) :].decode(encoding, "backslashreplace")
        rows = text.removesuffix("\n").split("\n") if text else []
        return enumerate((row.rstrip("\r") for row in rows), 1)
    file.seek(len(mark))
    return None if b"\0" in head else _narrow_lines(file)


def _narrow_lines(file):
    number = 0
    while block := file.readline(LONGEST):
        number += 1
        yield number, block.decode("utf-8", "backslashreplace").rstrip("\r\n")
        while len(block) == LONGEST and not block.endswith(b"\n"):
            block = file.readline(LONGEST)  # what lies behind so many bytes is not searched


def _excerpt(text: str, at: int) -> str:
    """A line, or the part of a long one in which the match begins."""
    if len(text) <= EXCERPT_CHARACTERS:
        return text
    start = max(0, min(at - CONTEXT_BEFORE, len(text) - EXCERPT_CHARACTERS))
    return (
        f"{'…' * (start > 0)}{text[start : start + EXCERPT_CHARACTERS]}{'…' * (start + EXCERPT_CHARACTERS < len(text))}"
    )


def _list_files(room: Room, path: str):
    """(path, entry) of the files beneath a folder; of a file itself, without an entry."""
    if os.path.isfile(place(room, path)):
        yield path, None
        return
    for name, entry in walk(room, path):
        if entry.is_file(follow_symlinks=False):
            yield name, entry
