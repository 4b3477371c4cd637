"""The tools that search the tree: by name, and by content."""

from __future__ import annotations

import os
import re

from .tree import Refused, Room, Rows, line, open_file, place, walk

__all__ = ["glob", "grep", "pattern"]

LONGEST = 4096
"""Bytes of a line that are searched and shown."""
MORE = "there is more: look in a folder beneath, or for something rarer"


def pattern(words: str) -> re.Pattern[str]:
    """The expression for paths that a glob matches: * and ? stay within a folder, ** crosses folders, [abc] is one character of them. A
    glob without a slash matches in every folder."""
    if "/" not in words:
        words = "**/" + words
    made, i = "", 0
    while i < len(words):
        if words.startswith("**/", i):
            made, i = made + "(?:[^/]+/)*", i + 3
        elif words.startswith("**", i):
            made, i = made + ".*", i + 2
        elif words[i] in "*?":
            made, i = made + ("[^/]*" if words[i] == "*" else "[^/]"), i + 1
        elif words[i] == "[" and (end := words.find("]", i + 2)) > 0:
            inner = re.sub(r"([\\\[&~|^])", r"\\\1", words[i + 1 : end])
            made, i = made + ("[^/" + inner[1:] if inner.startswith("!") else "[" + inner) + "]", end + 1
        else:
            made, i = made + re.escape(words[i]), i + 1
    try:
        return re.compile(made, re.DOTALL)
    except re.error as error:
        raise Refused(f"{line(words)} is no glob: {error}") from None


def glob(room: Room, pattern: str, path: str = ".") -> str:
    """The paths of files beneath a folder that match, in the order of names."""
    wanted, found = _compiled(pattern), Rows(room)
    for name, entry in walk(room, path):
        if entry.is_dir(follow_symlinks=False) or not wanted.fullmatch(name):
            continue
        if not found.add(line(name)):
            return found.text(MORE)
    return found.text() or "nothing matches"


_compiled = pattern  # the tool's argument has the same name


def grep(room: Room, pattern: str, path: str = ".", glob: str = "*", ignore_case: bool = False) -> str:
    """The lines that a regular expression matches, as path:line:text. Only regular files are read, and none that holds a null byte at its
    beginning."""
    try:
        wanted = re.compile(pattern, re.IGNORECASE if ignore_case else 0)
    except (re.error, OverflowError, RecursionError) as error:
        raise Refused(f"pattern is no regular expression: {error}") from None
    named, found = _compiled(glob), Rows(room)
    for name, entry in _files(room, path):
        if not (entry is None or named.fullmatch(name)):
            continue
        try:
            handle = open_file(room, name)
        except (OSError, Refused):
            continue
        with open(handle, "rb") as file:
            if b"\0" in file.read(1024):
                continue
            file.seek(0)
            number, whole = 0, True
            while block := file.readline(LONGEST):
                number += whole
                whole = block.endswith(b"\n")
                text = block.decode("utf-8", "backslashreplace").rstrip("\r\n")
                if wanted.search(text) and not found.add(f"{line(name)}:{number}:{text}"):
                    return found.text(MORE)
    return found.text() or "nothing matches"


def _files(room: Room, path: str):
    """(path, entry) of the files beneath a folder; of a file itself, without an entry."""
    if os.path.isfile(place(room, path)):
        yield path, None
        return
    for name, entry in walk(room, path):
        if entry.is_file(follow_symlinks=False):
            yield name, entry
