"""What the bytes of a file are as text: its mark of order, its encoding, and the ends of its lines.

A tool shows a text without its mark and with \\n behind each line, and takes the same in an edit. What it writes has
the file's own mark, encoding and line ends, and every other byte as it was.
"""

from __future__ import annotations

__all__ = ["WIDE", "edited", "encoding_of"]

MARKS = (
    (b"\xff\xfe\0\0", "utf-32-le"),
    (b"\0\0\xfe\xff", "utf-32-be"),
    (b"\xff\xfe", "utf-16-le"),
    (b"\xfe\xff", "utf-16-be"),
    (b"\xef\xbb\xbf", "utf-8"),
)
"""Marks of byte order, the longer of two first."""
WIDE = ("utf-16", "utf-32")
"""Beginnings of encodings whose lines cannot be told by a byte."""


def encoding_of(head: bytes) -> tuple[bytes, str]:
    """The mark at the beginning of a file, empty for none, and its encoding."""
    return next(((mark, encoding) for mark, encoding in MARKS if head.startswith(mark)), (b"", "utf-8"))


def decode(data: bytes) -> tuple[bytes, str, str]:
    """Mark, encoding and text, from which the same bytes can be made again: what is no text of its mark's encoding is
    taken as bytes."""
    mark, encoding = encoding_of(data)
    if encoding != "utf-8":
        try:
            text = data[len(mark) :].decode(encoding, "surrogatepass")
            if encode(b"", encoding, text) == data[len(mark) :]:
                return mark, encoding, text
        except UnicodeDecodeError:
            pass
        mark, encoding = b"", "utf-8"
    return mark, encoding, data[len(mark) :].decode("utf-8", "surrogateescape")


def encode(mark: bytes, encoding: str, text: str) -> bytes:
    """Raises UnicodeEncodeError for a text that has no bytes."""
    return mark + text.encode(encoding, "surrogateescape" if encoding == "utf-8" else "surrogatepass")


def edited(data: bytes, old: str, new: str, every: bool) -> tuple[int, bytes]:
    """How often `old` stands in a file, and the file with `new` in its place, if it does so once or `every` is given. A
    \\n of `old` also stands for \\r\\n, and each \\n of `new` becomes what ends the lines there."""
    mark, encoding, text = decode(data)
    old = old.removeprefix("\ufeff") or old
    spans = (
        [*_find_exact(text, old)]
        if "\r\n" not in text or "\r\n" in old and old in text
        else [*_find_lenient(text, old)]
    )
    if not spans or len(spans) > 1 and not every:
        return len(spans), data
    parts, last = [], 0
    for start, end in spans:
        parts += [text[last:start], _adapt_line_ends(new, text, start, end)]
        last = end
    return len(spans), encode(mark, encoding, "".join(parts) + text[last:])


def _find_exact(text: str, old: str):
    at = text.find(old)
    while at >= 0:
        yield at, at + len(old)
        at = text.find(old, at + len(old))


def _find_lenient(text: str, old: str):
    """Spans of a text in which `old` stands if \\r\\n is taken for \\n."""
    from bisect import bisect_right

    plain, line_starts, at = text.replace("\r\n", "\n"), [], 0
    for line in text.split("\r\n")[:-1]:
        at += len(line) + 1
        line_starts.append(at)  # in the plain text, behind the line's end: there, one character more has stood before
    for start, end in _find_exact(plain, old.replace("\r\n", "\n")):
        yield start + bisect_right(line_starts, start), end + bisect_right(line_starts, end)


def _adapt_line_ends(new: str, text: str, start: int, end: int) -> str:
    """A new text with the line ends of its place: those of what it replaces, else the next one behind it, else the last
    before it."""
    if "\r\n" not in text or "\n" not in new:
        return new
    at = text.find("\n", start, end)
    at = at if at >= 0 else text.find("\n", end)
    at = at if at >= 0 else text.rfind("\n", 0, start)
    return new.replace("\r\n", "\n").replace("\n", "\r\n") if text[at - 1 : at] == "\r" else new
