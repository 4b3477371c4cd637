"""Metrics as TensorBoard events, without TensorBoard: three kinds of event need little of its format, and who looks at them installs it.

The process that logs them also writes them. torch's SummaryWriter writes in a thread, which prints a traceback when the disk is full.
"""

from __future__ import annotations

import itertools
import os
import struct
import time
from pathlib import Path

from kit.disk import Journal

__all__ = ["Board"]

_numbers = itertools.count()


class Board:
    """One file of events."""

    def __init__(self, folder: Path, step: int) -> None:
        """`step`: events after it replace those of earlier files in the folder; 0 if there are no earlier files."""
        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads the files in the order of their names.
        self.journal = Journal(folder / f"events.out.tfevents.{time.time():017.6f}.{os.getpid()}.{next(_numbers)}")
        self.write(0, _part(3, b"brain.Event:2"))
        if step:
            self.write(step + 1, _part(7, b"\x08\x01"))  # a session starts

    def add(self, scalars: dict[str, float], step: int) -> None:
        """Adds values by tag at a step. Raises OSError when the disk is full."""
        values = (_part(1, tag.encode()) + b"\x15" + _float32(value) for tag, value in scalars.items())
        self.write(step, _part(5, b"".join(_part(1, value) for value in values)))

    def write(self, step: int, what: bytes) -> None:
        """Appends an event: its time, its step, and what it says; around it its length, and a checksum of each."""
        event = b"\x09" + struct.pack("<d", time.time()) + (b"\x10" + _varint(step) if step else b"") + what
        length = struct.pack("<Q", len(event))
        self.journal.append(length + _checksum(length) + event + _checksum(event))

    def close(self) -> None:
        self.journal.close()


def _varint(number: int) -> bytes:
    """A whole number, seven bits a byte."""
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes([*found, number])


def _part(field: int, content: bytes) -> bytes:
    """A field of a protocol buffer that is text or a message."""
    return bytes([field << 3 | 2]) + _varint(len(content)) + content


def _float32(value: float) -> bytes:
    try:
        return struct.pack("<f", value)
    except OverflowError:
        return struct.pack("<f", float("inf") if value > 0 else float("-inf"))


def _crc32c(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
    return byte


_TABLE = [_crc32c(byte) for byte in range(256)]


def _checksum(content: bytes) -> bytes:
    """CRC-32C, masked as TensorFlow's records want it."""
    crc = 0xFFFFFFFF
    for byte in content:
        crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 255]
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
