"""An arithmetic coder that asks of each weight whether it changed, which way and how far, and learns the chances for
each size of weight."""

import struct

import numpy as np

FULL = 0xFFFFFFFF


class Coder:
    """Adaptive binary arithmetic coding with 32-bit bounds; it decodes where bytes are given. A chance belongs to a
    context."""

    def __init__(self, code=None):
        self.low, self.high, self.out, self.code, self.at = 0, FULL, bytearray(), code, 4
        self.value = int.from_bytes(code[:4].ljust(4, b"\0"), "big") if code is not None else 0
        self.counts = {}

    def bit(self, context, bit=None):
        counts = self.counts.setdefault(context, [0.4, 0.8])
        chance = min(max(int(65536 * counts[0] / counts[1]), 16), 65520)
        middle = self.low + ((self.high - self.low) * chance >> 16)
        if self.code is not None:
            bit = self.value <= middle
        if bit:
            self.high = middle
        else:
            self.low = middle + 1
        counts[0] += bool(bit)
        counts[1] += 1
        while not (self.low ^ self.high) & 0xFF000000:
            if self.code is None:
                self.out.append(self.high >> 24)
            else:
                self.value = (self.value << 8 | (self.code[self.at] if self.at < len(self.code) else 0)) & FULL
                self.at += 1
            self.low, self.high = self.low << 8 & FULL, self.high << 8 & FULL | 255
        return bit

    def end(self):
        return bytes(self.out) + struct.pack(">I", self.high)

    def step(self, kind, value=None):
        """A step: whether it is none, its direction, the number of its binary digits, and all of them but the first."""
        is_encoding, distance = value is not None, value or 0
        size = abs(distance)
        if not self.bit(("changed", kind), distance != 0 if is_encoding else None):
            return 0
        up = self.bit(("up",), distance > 0 if is_encoding else None)
        digits = 1
        while self.bit(("longer", kind >> 2, digits), size >> digits > 0 if is_encoding else None):
            digits += 1
        magnitude = 1
        for place in reversed(range(digits - 1)):
            magnitude = magnitude << 1 | bool(
                self.bit(("digit", digits, place), size >> place & 1 if is_encoding else None)
            )
        return magnitude if up else -magnitude


def map_to_line(bits):
    """Bit patterns as places on the line of all numbers, and back."""
    bits = bits.astype(np.uint16).view(np.int16)
    return bits ^ ((bits >> 15) & 0x7FFF)


def kinds(old):
    """Exponent and two bits of the mantissa: numbers lie further apart the larger they are."""
    return ((old & 0x7FFF) >> 5).tolist()


def encode(old, new):
    coder = Coder()
    for kind, step in zip(kinds(old), (map_to_line(new).astype(np.int64) - map_to_line(old)).tolist()):
        coder.step(kind, step)
    return coder.end()


def decode(old, delta):
    coder = Coder(delta)
    distances = np.array([coder.step(kind) for kind in kinds(old)], dtype=np.int64)
    return map_to_line((map_to_line(old) + distances).astype(np.int16).view(np.uint16)).view(np.uint16)
