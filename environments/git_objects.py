"""The objects of a Git repository, read by hand: loose ones, packs with their deltas, and bundles.

No `git` runs in a tree that somebody else wrote: its configuration and hooks are programs. Reachability does not
matter. What a stash, a reflog, another branch, a submodule or nobody refers to lies among the objects all the same.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator, MutableMapping

__all__ = ["NAMES", "TooLarge", "apply_delta", "inflate", "parse_loose_object", "iterate_pack"]

NAMES = {1: b"commit", 2: b"tree", 3: b"blob", 4: b"tag"}
OFFSET_DELTA, REFERENCE_DELTA = 6, 7


class TooLarge(ValueError):
    """What would come out of a compressed stream is more than was allowed."""


def inflate(data: bytes, max_bytes: int, at: int = 0) -> tuple[bytes, int]:
    """The zlib stream that begins at a place of `data`: what is in it, and where it ends. Raises TooLarge beyond
    `max_bytes` bytes, and ValueError for anything else than a complete stream."""
    stream, out = zlib.decompressobj(), bytearray()
    while not stream.eof:
        piece = data[at : at + 16384]  # all that follows at once would be copied for every object of a pack
        if not piece:
            raise ValueError("the zlib stream is cut off")
        try:
            out += stream.decompress(piece, max_bytes - len(out) + 1)
        except zlib.error as error:
            raise ValueError(f"no zlib stream: {error}") from error
        if len(out) > max_bytes:
            raise TooLarge(f"more than {max_bytes} bytes are in a zlib stream")
        at += len(piece)
    return bytes(out), at - len(stream.unused_data)


def parse_loose_object(data: bytes, max_bytes: int) -> tuple[str, bytes]:
    """Kind and content of a loose object. Raises ValueError for other files."""
    out, _ = inflate(data, max_bytes)
    head, _, content = out.partition(b"\0")
    kind, _, size = head.partition(b" ")
    if kind not in NAMES.values() or size != str(len(content)).encode():
        raise ValueError("this is no loose object")
    return kind.decode(), content


def iterate_pack(
    data: bytes, max_bytes: int, objects: MutableMapping[bytes, tuple[int, bytes]] | None = None
) -> Iterator[tuple[str, bytes]]:
    """Hash and content of every object of a pack that begins with `data`. `objects`: objects of other packs by hash,
    for deltas against them; those of this pack are added. A delta whose base is nowhere gives its own bytes: what was
    inserted stands there. `max_bytes`: bytes that all may take together. Raises TooLarge, or ValueError where the pack
    is damaged; what was read before that has been given."""
    objects = {} if objects is None else objects
    if data[:4] != b"PACK" or len(data) < 12:
        raise ValueError("this is no pack")
    at, number = 12, int.from_bytes(data[8:12], "big")
    pack_objects: dict[int, tuple[int, bytes]] = {}
    waiting_deltas: list[tuple[int, bytes, bytes]] = []
    for _ in range(number):
        start = at
        kind, at = _parse_kind(data, at)
        base: int | bytes | None = None
        if kind == OFFSET_DELTA:
            distance, at = _parse_offset(data, at)
            base = start - distance
        elif kind == REFERENCE_DELTA:
            base, at = data[at : at + 20], at + 20
        content, at = inflate(data, max_bytes, at)
        max_bytes -= len(content)
        if isinstance(base, bytes) and base not in objects:
            waiting_deltas.append((start, base, content))
            continue
        if base is not None:
            source = objects.get(base) if isinstance(base, bytes) else pack_objects.get(base)
            if source is None:  # its own base is waiting
                yield f"delta at {start}", content
                continue
            kind, content = source[0], apply_delta(source[1], content, max_bytes)
            max_bytes -= len(content)
        elif kind not in NAMES:
            raise ValueError(f"the pack has an object of the unknown kind {kind}")
        pack_objects[start] = kind, content
        yield _record_object(kind, content, objects), content
    while ready_deltas := [delta for delta in waiting_deltas if delta[1] in objects]:
        for delta in ready_deltas:
            waiting_deltas.remove(delta)
            kind, content = objects[delta[1]][0], apply_delta(objects[delta[1]][1], delta[2], max_bytes)
            max_bytes -= len(content)
            yield _record_object(kind, content, objects), content
    for start, _, content in waiting_deltas:
        yield f"delta at {start}", content


def _record_object(kind: int, content: bytes, objects: MutableMapping[bytes, tuple[int, bytes]]) -> str:
    name = hashlib.sha1(NAMES[kind] + b" %d\0" % len(content) + content, usedforsecurity=False).digest()
    objects[name] = kind, content
    return name.hex()


def _parse_kind(data: bytes, at: int) -> tuple[int, int]:
    byte = data[at] if at < len(data) else 0
    kind = byte >> 4 & 7
    while byte & 128:
        at += 1
        byte = data[at] if at < len(data) else 0
    return kind, at + 1


def _parse_offset(data: bytes, at: int) -> tuple[int, int]:
    byte = data[at] if at < len(data) else 0
    value = byte & 127
    while byte & 128:
        at += 1
        byte = data[at] if at < len(data) else 0
        value = (value + 1 << 7) | byte & 127
    return value, at + 1


def _parse_size(delta: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(delta):
        byte, at = delta[at], at + 1
        value |= (byte & 127) << shift
        shift += 7
        if not byte & 128:
            break
    return value, at


def apply_delta(base: bytes, delta: bytes, max_bytes: int) -> bytes:
    """The object that a delta makes of its base. Raises TooLarge beyond `max_bytes` bytes, ValueError for a delta that
    does not fit its base."""
    base_size, at = _parse_size(delta, 0)
    size, at = _parse_size(delta, at)
    if base_size != len(base):
        raise ValueError("the delta belongs to another base")
    if size > max_bytes:
        raise TooLarge(f"more than {max_bytes} bytes are in a delta")
    out = bytearray()
    while at < len(delta) and len(out) <= size:
        code, at = delta[at], at + 1
        if code & 128:
            offset = length = 0
            for bit in range(7):
                if code >> bit & 1 and at < len(delta):
                    byte, at = delta[at], at + 1
                    if bit < 4:
                        offset |= byte << 8 * bit
                    else:
                        length |= byte << 8 * (bit - 4)
            out += base[offset : offset + (length or 0x10000)]
        else:
            out += delta[at : at + code]
            at += code
            if not code:
                raise ValueError("the delta has a reserved command")
    if len(out) != size:
        raise ValueError("the delta is damaged")
    return bytes(out)
