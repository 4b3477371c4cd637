"""What lies folded up within a file: archives, compressed and encoded data, Git's packs, and text in another dress.

Nothing is unpacked onto the disk and nothing is run. Every step gives bytes, and the caller looks at them and unfolds
them again. What comes out is bounded: a step that would give more raises TooLarge, and the caller says that the file
could not be read to its end."""

from __future__ import annotations

import base64
import binascii
import bz2
import html
import io
import json
import lzma
import re
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from environments.git_objects import TooLarge, iterate_pack, parse_loose_object

__all__ = ["DRESSES", "FOLDS", "Fold", "TooLarge"]

Fold = Callable[[bytes, int], Iterator[tuple[str, bytes]]]
"""Data, and how many bytes may come out → the names of what lies within, and its bytes. Nothing for data of another
kind."""


def _decompress(decompressor: Any, data: bytes, max_bytes: int) -> bytes:
    """All members of a compressed file, as many as can be read: a stream that is cut off gives what it has."""
    out = bytearray()
    while data:
        stream = decompressor()
        try:
            out += stream.decompress(data, max_bytes - len(out) + 1)
        except (zlib.error, OSError, EOFError, lzma.LZMAError):
            break
        if len(out) > max_bytes:
            raise TooLarge(f"more than {max_bytes} bytes are in a compressed file")
        data = stream.unused_data if stream.eof else b""
    return bytes(out)


def unfold_gzip(data: bytes, max_bytes: int) -> Iterator[tuple[str, bytes]]:
    if data[:3] == b"\x1f\x8b\x08":
        yield "gzip", _decompress(lambda: zlib.decompressobj(31), data, max_bytes)


def unfold_bz2(data: bytes, max_bytes: int) -> Iterator[tuple[str, bytes]]:
    if data[:3] == b"BZh":
        yield "bz2", _decompress(bz2.BZ2Decompressor, data, max_bytes)


def unfold_xz(data: bytes, max_bytes: int) -> Iterator[tuple[str, bytes]]:
    if data[:6] == b"\xfd7zXZ\x00" or data[:3] == b"\x5d\x00\x00":
        yield "xz", _decompress(lambda: lzma.LZMADecompressor(memlimit=256 << 20), data, max_bytes)


def unfold_zlib(data: bytes, max_bytes: int) -> Iterator[tuple[str, bytes]]:
    """Also loose objects of Git, wherever they lie and whoever refers to them."""
    if len(data) > 2 and data[0] & 15 == 8 and data[0] >> 4 <= 7 and not (data[0] << 8 | data[1]) % 31:
        try:
            kind, content = parse_loose_object(data, max_bytes)
            yield f"git {kind}", content
        except TooLarge:
            raise
        except ValueError:
            if out := _decompress(zlib.decompressobj, data, max_bytes):
                yield "zlib", out


def unfold_zip(data: bytes, max_bytes: int) -> Iterator[tuple[str, bytes]]:
    """Wheels, eggs and documents too, and archives behind a program."""
    if b"PK\x05\x06" not in data[-70000:]:
        return
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for info in archive.infolist():
                if info.flag_bits & 1:
                    raise TooLarge(f"{info.filename} is encrypted")
                with archive.open(info) as member:
                    content = member.read(max_bytes + 1)
                if (max_bytes := max_bytes - len(content)) < 0:
                    raise TooLarge("too many bytes are in a zip archive")
                yield info.filename, content
    except TooLarge:
        raise
    except (
        zipfile.BadZipFile,
        NotImplementedError,
        OSError,
        EOFError,
        zlib.error,
        lzma.LZMAError,
        struct.error,
        ValueError,
        RuntimeError,
    ):
        return


def unfold_tar(data: bytes, max_bytes: int) -> Iterator[tuple[str, bytes]]:
    if data[257:262] != b"ustar":
        return
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
            for info in archive:
                if info.isreg() and (member := archive.extractfile(info)):
                    content = member.read(max_bytes + 1)
                    if (max_bytes := max_bytes - len(content)) < 0:
                        raise TooLarge("too many bytes are in a tar archive")
                    yield info.name, content
    except (tarfile.TarError, OSError, EOFError, UnicodeDecodeError, OverflowError):
        return


def unfold_git_packs(data: bytes, max_bytes: int) -> Iterator[tuple[str, bytes]]:
    """Packs, and bundles, which are a pack behind a few lines."""
    start = (
        0 if data[:4] == b"PACK" else data.find(b"\n\nPACK") + 2 if data[:4] == b"# v2" or data[:4] == b"# v3" else -1
    )
    if start < 0 or data[start : start + 4] != b"PACK":
        return
    try:
        yield from iterate_pack(data[start:], max_bytes)
    except TooLarge:
        raise
    except ValueError:
        return


def unfold_wide_text(data: bytes, max_bytes: int) -> Iterator[tuple[str, bytes]]:
    """UTF-16 and UTF-32, with a mark or without."""
    head = data[:400]
    if b"\0" not in head or len(data) * 2 > max_bytes:
        return
    marks = {b"\xff\xfe\0\0": "utf-32", b"\0\0\xfe\xff": "utf-32", b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}
    kind = next((name for mark, name in marks.items() if data.startswith(mark)), "")
    if not kind:
        even, odd = head[::2].count(0), head[1::2].count(0)
        if 4 * max(even, odd) < len(head):
            return
        kind = (
            ("utf-32-le" if even > len(head) / 8 else "utf-16-le")
            if odd > even
            else ("utf-32-be" if odd > len(head) / 8 else "utf-16-be")
        )
    text = data.decode(kind, errors="ignore").removeprefix("\ufeff")
    if (
        text[:200].replace("\n", "").replace("\t", "").replace("\r", "").isprintable()
    ):  # the zeros of other formats are not those of letters
        yield kind, text.encode(errors="ignore")


BASE64 = re.compile(rb"[A-Za-z0-9+/_-]{40,}={0,2}(?:[\"',\\\s]{1,12}(?:n\s*[\"'])?[A-Za-z0-9+/_-]{16,}={0,2})*")
HEX = re.compile(rb"(?:[0-9a-fA-F]{2}(?:\\x|[\s:,]|0x){0,3}){40,}")
DUMP = re.compile(rb"^[0-9a-fA-F]{6,8}:?[ \t]+((?:[0-9a-fA-F]{2,4} +)+)", re.MULTILINE)


def unfold_base64(data: bytes, max_bytes: int) -> Iterator[tuple[str, bytes]]:
    for match in BASE64.finditer(data):
        run = re.sub(rb"\\n|[^A-Za-z0-9+/_-]", b"", match[0]).translate(bytes.maketrans(b"-_", b"+/"))
        if len(set(run)) > 20:
            yield f"base64 at {match.start()}", base64.b64decode(run[: len(run) // 4 * 4])


def unfold_hex(data: bytes, max_bytes: int) -> Iterator[tuple[str, bytes]]:
    """Hexadecimal digits in a row, and what xxd and hexdump print."""
    for match in HEX.finditer(data):
        digits = re.sub(rb"\\x|0x|[\s:,]", b"", match[0])
        yield f"hex at {match.start()}", binascii.unhexlify(digits[: len(digits) // 2 * 2])
    if rows := DUMP.findall(data):
        digits = re.sub(rb"\s", b"", b"".join(rows))
        yield "hex dump", binascii.unhexlify(digits[: len(digits) // 2 * 2])


def bound_errors(kind: str, fold: Fold) -> Fold:
    """The same fold, which raises TooLarge where the library beneath it fails, such as over headers that fill its
    stack: then the data could not be read to its end, and the caller says so."""

    def unfold(data: bytes, max_bytes: int) -> Iterator[tuple[str, bytes]]:
        try:
            yield from fold(data, max_bytes)
        except TooLarge:
            raise
        except Exception as error:  # each library has errors of its own, and no list of them is complete
            raise TooLarge(f"{kind} cannot be read: {type(error).__name__}") from error

    return unfold


FOLDS: Mapping[str, Fold] = MappingProxyType(
    {
        kind: bound_errors(kind, fold)
        for kind, fold in {
            "gzip": unfold_gzip,
            "bz2": unfold_bz2,
            "xz": unfold_xz,
            "zlib": unfold_zlib,
            "zip": unfold_zip,
            "tar": unfold_tar,
            "git pack": unfold_git_packs,
            "wide text": unfold_wide_text,
            "base64": unfold_base64,
            "hex": unfold_hex,
        }.items()
    }
)


# The same text in another dress: tokens that are not the code's stand between those that are.

SPACE = re.compile(r"\s*")
NUMBERED_LINE = re.compile(r"^(?:\S*?:)?[ \t]*\d+[:|\-\t ](?: ?\| ?)?", re.MULTILINE)
TAGGED_NUMBER = re.compile(r"<(a|span|td)\b([^<>]*+)>\s*+\d++\s*+</\1>")
LINE_NUMBER = re.compile(r'href|id=|lineno|class="n"')
"""What an attribute of such a tag holds where its number is that of a line."""


def _strip_html(text: str) -> str:
    if "<" not in text and "&" not in text:
        return ""
    text = TAGGED_NUMBER.sub(lambda tag: "" if LINE_NUMBER.search(tag[2]) else tag[0], text)
    *parts, tail = text.split(">")  # no expression: from each of many < it would look for a > that is nowhere
    return html.unescape("".join(part.partition("<")[0] if "<" in part else f"{part}>" for part in parts) + tail)


def _join_json_strings(text: str) -> str:
    """The strings of JSON, one behind the other; notebooks have one for each line."""
    strings: list[str] = []
    text = text.strip()

    def walk(value: object) -> None:
        if isinstance(value, str):
            strings.append(value if value.endswith("\n") else value + "\n")
        elif isinstance(value, dict | list):
            for element in value.values() if isinstance(value, dict) else value:
                walk(element)

    decoder, at = json.JSONDecoder(), 0
    while at < len(text) and text[at] in "{[":  # one value, or one behind the other
        try:
            value, at = decoder.raw_decode(text, at)
            walk(value)
        except (ValueError, RecursionError):
            break
        space = SPACE.match(text, at)
        at = space.end() if space else len(text)
    return "".join(strings)


def _unescape(text: str) -> str:
    """A string within a program, or within JSON that is damaged."""
    if "\\n" not in text:
        return ""
    return (
        text.replace('\\n",\n', "\\n")
        .replace("\\n", "\n")
        .replace("\\t", "\t")
        .replace('\\"', '"')
        .replace("\\'", "'")
        .replace("\\\\", "\\")
    )


def _strip_diff_marks(text: str) -> str:
    """Both sides of a patch: marks at the beginnings of lines go."""
    return (
        re.sub(r"^[+\-!<> ]{1,2}", "", text, flags=re.MULTILINE)
        if re.search(r"^(@@ |[+\-<>] ?\S|\*\*\* )", text, re.MULTILINE)
        else ""
    )


def _strip_line_numbers(text: str) -> str:
    return NUMBERED_LINE.sub("", text) if NUMBERED_LINE.search(text) else ""


def _reverse_swap_lines(text: str) -> str:
    """Vim's swap file has the lines of a block from the last one to the first, each with a zero behind it."""
    return "\n".join(reversed(text.split("\0"))) if text.startswith("b0VIM") else ""


DRESSES: Mapping[str, Callable[[str], str]] = MappingProxyType(
    {
        "html": _strip_html,
        "json": _join_json_strings,
        "escapes": _unescape,
        "diff": _strip_diff_marks,
        "numbered": _strip_line_numbers,
        "swap": _reverse_swap_lines,
    }
)
