"""What PTX's integer and bit instructions compute: arithmetic modulo 2^width, shifts that clamp, fields of bits, bytes,
tables.

Registers have no type: each is an array of unsigned integers of its width, one element per thread, and predicates are
booleans. An `Operation` maps arrays of bits to an array of bits.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

__all__ = ["SIGNED", "UNSIGNED", "WIDTHS", "Operation", "UnknownInstruction", "integer_operation"]

UNSIGNED = {1: np.bool_, 8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
SIGNED = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
WIDTHS = {"pred": 1, "f16": 16, "bf16": 16, "f32": 32, "f16x2": 32, "bf16x2": 32, "f32x2": 64, "e4m3x2": 16} | {
    f"{kind}{width}": width for kind in "bsu" for width in (8, 16, 32, 64)
}
"""Bits of each type."""


class UnknownInstruction(ValueError):
    """The instruction is not modelled, and so the program is not run."""


@dataclass(frozen=True)
class Operation:
    """What an instruction computes."""

    width: int
    """Bits of the result; 1 for a predicate."""
    sources: tuple[int, ...]
    """Bits of the operands."""
    compute: Callable[..., np.ndarray]
    """From arrays of bits to an array of bits."""


SIMPLE = {
    ("add", "su"): np.add,
    ("sub", "su"): np.subtract,
    ("and", "bp"): np.bitwise_and,
    ("or", "bp"): np.bitwise_or,
    ("xor", "bp"): np.bitwise_xor,
    ("not", "bp"): np.invert,
}


def shifted(a: np.ndarray, by: np.ndarray, left: bool, width: int, signed: bool = False) -> np.ndarray:
    """Amounts above the width count as the width."""
    form = SIGNED[width] if signed else UNSIGNED[width]
    inside = by < width
    amount = np.where(inside, by, 0).astype(UNSIGNED[width]).view(form)
    x = a.view(form)
    result = x << amount if left else x >> amount
    beyond = np.where(x < 0, form(-1), form(0)) if signed else form(0)
    return np.where(inside, result, beyond).view(UNSIGNED[width])


def field(a: np.ndarray, at: np.ndarray, length: np.ndarray, width: int, signed: bool) -> np.ndarray:
    """bfe: `length` bits of a from bit `at` up, extended with zeros, or with the sign: the field's highest bit that a
    has."""
    at, length = at & np.uint32(0xFF), length & np.uint32(0xFF)
    value = shifted(a, at, False, width)
    clamped_length = np.minimum(length, width)
    mask = ~shifted(np.full_like(a, UNSIGNED[width](2**width - 1)), clamped_length, True, width)
    result = value & mask
    if signed:
        highest = np.minimum(at + length - 1, width - 1).astype(np.uint32)
        sign = (shifted(a, highest, False, width) & UNSIGNED[width](1)).astype(bool) & (length > 0)
        # What lies above a's own bits is sign, too.
        available_length = np.minimum(clamped_length, np.where(at < width, width - at, 0)).astype(np.uint32)
        above = shifted(np.full_like(a, UNSIGNED[width](2**width - 1)), available_length, True, width)
        result = np.where(sign, value | above, result)
        result = np.where(length > 0, result, UNSIGNED[width](0))
    return result


def inserted(a: np.ndarray, b: np.ndarray, at: np.ndarray, length: np.ndarray, width: int) -> np.ndarray:
    """bfi: the low `length` bits of a, put into b from bit `at` up."""
    at, length = at & np.uint32(0xFF), np.minimum(length & np.uint32(0xFF), width)
    all_ones = np.full_like(a, UNSIGNED[width](2**width - 1))
    mask = shifted(~shifted(all_ones, length, True, width), at, True, width)
    return (shifted(a, at, True, width) & mask) | (b & ~mask)


def bytes_picked(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """prmt: each of four nibbles picks one of eight bytes, a's below b's; its highest bit asks for the byte's sign
    eight times."""
    pool = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
    result = np.zeros_like(a)
    for i in range(4):
        nibble = (selector >> np.uint32(4 * i)) & np.uint32(15)
        byte = (pool >> ((nibble & np.uint32(7)).astype(np.uint64) * np.uint64(8))).astype(np.uint32) & np.uint32(0xFF)
        signs = np.where(byte & np.uint32(0x80), np.uint32(0xFF), np.uint32(0))
        result = result | (np.where(nibble & np.uint32(8), signs, byte) << np.uint32(8 * i))
    return result


def looked_up(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: np.ndarray) -> np.ndarray:
    """lop3: bit i of the table is the result where the bits of a, b and c spell i."""
    result = np.zeros_like(a)
    for i in range(8):
        term = (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
        result = result | np.where((table >> np.uint32(i)) & np.uint32(1), term, np.uint32(0))
    return result


def funnel(low: np.ndarray, high: np.ndarray, by: np.ndarray, left: bool, wrap: bool) -> np.ndarray:
    """shf: 32 bits of high:low, shifted."""
    amount = (by & np.uint32(31) if wrap else np.minimum(by, np.uint32(32))).astype(np.uint64)
    pair = low.astype(np.uint64) | (high.astype(np.uint64) << np.uint64(32))
    return ((pair << amount) >> np.uint64(32) if left else pair >> amount).astype(np.uint32)


def quotient(a: np.ndarray, b: np.ndarray, is_remainder: bool) -> np.ndarray:
    """Division towards zero, or its remainder, which has the sign of a."""
    if not b.all():
        raise ZeroDivisionError("PTX leaves an integer division by zero open")
    if a.dtype.kind == "u":
        return a % b if is_remainder else a // b
    with np.errstate(over="ignore"):
        result = a // b
        result = result + ((result < 0) & (result * b != a))
        return a - result * b if is_remainder else result


def integer_operation(base: str, words: list[str], kind: str) -> Operation | None:
    """The model, or None."""
    width, form = WIDTHS[kind], (SIGNED if kind[0] == "s" else UNSIGNED).get(WIDTHS[kind])
    unsigned = UNSIGNED[width]
    for (name, kinds), function in SIMPLE.items():
        if base == name and not words and kind[0] in kinds:
            return Operation(width, (width,) * (1 if base == "not" else 2), function)
    if base in ("shl", "shr") and not words and (kind[0] == "b" if base == "shl" else kind[0] in "bsu"):
        return Operation(width, (width, 32), lambda a, n: shifted(a, n, base == "shl", width, kind[0] == "s"))
    if kind[0] in "su" and form is not None:
        if base in ("min", "max") and not words:
            pick = np.minimum if base == "min" else np.maximum
            return Operation(width, (width, width), lambda a, b: pick(a.view(form), b.view(form)).view(unsigned))
        if base in ("mul", "mad") and words == ["lo"]:
            return Operation(
                width, (width,) * (2 if base == "mul" else 3), lambda a, b, *c: a * b + c[0] if c else a * b
            )
        if base in ("mul", "mad") and words == ["wide"] and width < 64:
            wide = (SIGNED if kind[0] == "s" else UNSIGNED)[2 * width]
            wide_unsigned = UNSIGNED[2 * width]

            def widened(a, b, *c):
                product = (a.view(form).astype(wide) * b.view(form).astype(wide)).view(wide_unsigned)
                return product + c[0] if c else product

            return Operation(2 * width, (width, width) if base == "mul" else (width, width, 2 * width), widened)
        if base == "mul" and words == ["hi"] and width == 32:
            wide = (SIGNED if kind[0] == "s" else UNSIGNED)[64]
            return Operation(
                32,
                (32, 32),
                lambda a, b: (
                    (a.view(form).astype(wide) * b.view(form).astype(wide)).view(np.uint64) >> np.uint64(32)
                ).astype(np.uint32),
            )
        if base in ("div", "rem") and not words and width > 8:
            return Operation(
                width, (width, width), lambda a, b: quotient(a.view(form), b.view(form), base == "rem").view(unsigned)
            )
        if base in ("abs", "neg") and not words and kind[0] == "s":
            return Operation(width, (width,), lambda a: np.where(a.view(form) < 0, -a, a) if base == "abs" else -a)
        if base == "bfe" and not words and width in (32, 64):
            return Operation(width, (width, 32, 32), lambda a, at, n: field(a, at, n, width, kind[0] == "s"))
    if base == "bfi" and not words and kind in ("b32", "b64"):
        return Operation(width, (width, width, 32, 32), lambda a, b, at, n: inserted(a, b, at, n, width))
    if kind == "b32":
        if base == "prmt" and not words:
            return Operation(32, (32, 32, 32), bytes_picked)
        if base == "lop3" and not words:
            return Operation(32, (32, 32, 32, 32), looked_up)
        if base == "shf" and len(words) == 2 and words[0] in "lr" and words[1] in ("wrap", "clamp"):
            return Operation(
                32, (32, 32, 32), lambda low, high, n: funnel(low, high, n, words[0] == "l", words[1] == "wrap")
            )
    if base == "popc" and not words and kind in ("b32", "b64"):
        return Operation(32, (width,), lambda a: np.bitwise_count(a).astype(np.uint32))
    if base == "clz" and not words and kind in ("b32", "b64"):
        return Operation(
            32, (width,), lambda a: np.sum([a < unsigned(1 << i) for i in range(width)], 0).astype(np.uint32)
        )
    return None
