"""Text from a sandbox, made safe to print: what a terminal or a reader would not show is written out."""

from __future__ import annotations

import re

__all__ = ["cut", "one_line", "visible"]

HIDDEN_CHARACTERS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f"
    "\ufeff\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)
"""Control characters but tab and newline, what changes the direction of writing or has no width, and halves of
characters."""


def visible(text: str) -> str:
    """The same text with \\x1b for an escape, \\u202e for a character that turns the direction round, \\xff for a byte
    that is no UTF-8."""
    return HIDDEN_CHARACTERS.sub(_escape_character, text)


def _escape_character(match: re.Match[str]) -> str:
    code = ord(match[0])
    if 0xDC80 <= code <= 0xDCFF:  # how Python holds a byte that is no UTF-8
        code -= 0xDC00
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def cut(text: str, max_bytes: int) -> str:
    """At most `max_bytes` bytes of UTF-8 of a text, and a line in its middle that says how many are left out."""
    data = text.encode()
    if len(data) <= max_bytes:
        return text
    head, tail = (
        data[: max_bytes // 2].decode(errors="ignore"),
        data[-(max_bytes - max_bytes // 2) :].decode(errors="ignore"),
    )
    return f"{head}\n… {len(data) - len(head.encode()) - len(tail.encode())} bytes left out …\n{tail}"


def one_line(text: str, max_characters: int = 200) -> str:
    """The first `max_characters` characters of a text, in one line."""
    return " ".join(visible(text).split())[:max_characters]
