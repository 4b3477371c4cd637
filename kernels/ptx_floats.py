"""What PTX's arithmetic computes on floats, and the table of all instructions: numpy functions of bits, one array
element per thread.

    operation("div.rn.f32")    the widths of operands and result, and a function from arrays of bits to an array of bits

Registers have no type: floats are their bits, in unsigned integers of 8 to 64 bits, and predicates are booleans.
Everything follows the text of the PTX ISA (NVIDIA, version 9): rounding to nearest even, subnormal numbers kept unless
`.ftz` is written, comparisons with NaN false unless unordered. Small formats are rounded by integer code of our own
(`encode`). An instruction, a modifier or a rounding that is not modelled raises UnknownInstruction with its name, and
so do approximate ones (`.approx`, `.full`): the ISA bounds their error but not their bits.

A result that is NaN has the bits of NAN. Where the ISA leaves NaN's bits open, no kernel may depend on them; a test
sets others."""

import numpy as np

from .ptx_integers import SIGNED, UNSIGNED, WIDTHS, Operation, UnknownInstruction, integer_operation

__all__ = ["NAN", "encode", "operation"]

NAN = 0x7FFFFFFF
"""PTX's canonical float32 NaN."""
SMALL = {"bf16": (7, -126, 0x7F80, 0x7FFF), "f16": (10, -14, 0x7C00, 0x7FFF), "e4m3": (3, -6, 0x7E, 0x7F)}
"""Bits of the mantissa, smallest normal exponent, the code of what overflows (for E4M3 its largest number), the code of
NaN."""


def encode(x: np.ndarray, form: str) -> np.ndarray:
    """float64 → codes of a small format, rounded to nearest, ties to even, once. The dropped part of the significand
    decides."""
    mantissa, least, top, nan = SMALL[form]
    bits = x.view(np.uint64)
    size = bits & np.uint64(0x7FFFFFFFFFFFFFFF)
    exponent = (size >> np.uint64(52)).astype(np.int64) - 1023
    significand = (size & np.uint64(2**52 - 1)) | (np.uint64(1) << np.uint64(52)) * (exponent > -1023)
    at = np.maximum(exponent, least)
    drop = np.minimum(52 - mantissa + at - exponent, 60).astype(np.uint64)
    unit = np.uint64(1)
    quotient, remainder, half = significand >> drop, significand & ((unit << drop) - unit), unit << (drop - unit)
    quotient = quotient + ((remainder > half) | ((remainder == half) & (quotient & unit == unit)))
    code = np.minimum(quotient.astype(np.int64) + ((at - least) << mantissa), top)
    code = np.where(np.isnan(x), nan, code)
    sign = (bits >> np.uint64(63)).astype(np.int64) << (7 if form == "e4m3" else 15)
    return (code | np.where(np.isnan(x), 0, sign)).astype(np.uint16)


def floats(bits: np.ndarray, kind: str) -> np.ndarray:
    """Bits of one number per element as floats that hold it exactly: float32 for f32, float64 for the 16-bit
    formats."""
    if kind == "f32":
        return bits.view(np.float32)
    if kind == "f64":  # float32, widened
        with np.errstate(invalid="ignore"):  # a signalling NaN
            return bits.view(np.float32).astype(np.float64)
    if kind == "f16":
        return bits.view(np.float16).astype(np.float64)
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)


def bits_of(x: np.ndarray, kind: str) -> np.ndarray:
    """The reverse, rounded to nearest even; NaN is canonical."""
    if kind == "f32":
        return np.where(np.isnan(x), np.uint32(NAN), np.ascontiguousarray(x, np.float32).view(np.uint32))
    return encode(np.ascontiguousarray(x, np.float64), kind)


def flushed(bits: np.ndarray) -> np.ndarray:
    """float32 with subnormal numbers replaced by zeros of their sign: `.ftz`."""
    return np.where(bits & np.uint32(0x7F800000), bits, bits & np.uint32(0x80000000))


def fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a · b + c of float32, rounded once. The product is exact in float64. If the sum is not, its last bit is set odd,
    so that rounding it again to float32 cannot meet a false tie."""
    p, c = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    s = p + c
    virtual_c = s - p
    error = (p - (s - virtual_c)) + (c - virtual_c)
    bits = s.view(np.int64)
    inexact = np.isfinite(s) & (error != 0) & (bits & 1 == 0)
    towards = np.where((error > 0) == (s > 0), 1, -1)
    return np.where(inexact, bits + towards, bits).view(np.float64).astype(np.float32)


def smaller(a: np.ndarray, b: np.ndarray, words: set[str], least: bool, kind: str) -> np.ndarray:
    """min and max of floats: −0 is below +0; one NaN gives the other number, or NaN with `.NaN`; `.xorsign.abs` takes
    sizes, and both signs."""
    sign = (np.signbit(a) ^ np.signbit(b)) if "xorsign" in words else None
    if "xorsign" in words:
        a, b = np.abs(a), np.abs(b)
    first = (a < b) | ((a == b) & np.signbit(a)) if least else (a > b) | ((a == b) & ~np.signbit(a))
    has_nan = np.isnan(a) | np.isnan(b)
    result = np.where(first, a, b)
    result = np.where(has_nan, np.nan if "NaN" in words else np.where(np.isnan(a), b, a), result).astype(a.dtype)
    if sign is not None:
        result = np.where(sign, -result, result)
    return bits_of(result, kind)


BINARY = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}
PAIRS = {"f32x2": ("f32", 32), "f16x2": ("f16", 16), "bf16x2": ("bf16", 16)}


def float_operation(base: str, words: set[str], kind: str) -> Operation | None:
    """Floats of one or of two numbers per register."""
    if base not in ("add", "sub", "mul", "div", "fma", "min", "max", "abs", "neg", "rcp", "sqrt"):
        return None
    must = {"div": {"rn"}, "rcp": {"rn"}, "sqrt": {"rn"}, "fma": {"rn"}}.get(base, set())
    may = (
        {"rn", "ftz"}
        if base in BINARY or must
        else {"NaN", "xorsign", "abs", "ftz"}
        if base in ("min", "max")
        else {"ftz"}
    )
    if not must <= words <= may or ("xorsign" in words) != ("abs" in words):
        return None
    lane, width = PAIRS.get(kind, (kind, WIDTHS[kind]))
    if (
        ("ftz" in words and lane != "f32")
        or (base in ("div", "rcp", "sqrt") and kind != "f32")
        or (base == "fma" and lane != "f32")
    ):
        return None

    def compute_number(*values: np.ndarray) -> np.ndarray:
        if base in ("abs", "neg"):  # also of NaN: whose sign the ISA leaves open
            mark = UNSIGNED[width](1 << (width - 1))
            return values[0] & ~mark if base == "abs" else values[0] ^ mark
        x = [floats(v, lane) for v in values]
        with np.errstate(all="ignore"):
            if base in ("min", "max"):
                return smaller(*x, words, base == "min", lane)
            if base == "fma":
                return bits_of(fused(*x), lane)
            if base == "rcp":
                return bits_of(np.float32(1) / x[0], lane)
            if base == "sqrt":
                return bits_of(np.sqrt(x[0]), lane)
            return bits_of(BINARY[base](*x), lane)

    def compute_flushed(*values: np.ndarray) -> np.ndarray:
        return flushed(compute_number(*map(flushed, values))) if "ftz" in words else compute_number(*values)

    def compute_pair(*values: np.ndarray) -> np.ndarray:
        half = UNSIGNED[width]
        low = compute_flushed(*(v.astype(half) for v in values))
        high = compute_flushed(*((v >> v.dtype.type(width)).astype(half) for v in values))
        pair_type = UNSIGNED[2 * width]
        return low.astype(pair_type) | (high.astype(pair_type) << pair_type(width))

    count = 3 if base == "fma" else 1 if base in ("abs", "neg", "rcp", "sqrt") else 2
    return Operation(WIDTHS[kind], (WIDTHS[kind],) * count, compute_pair if kind in PAIRS else compute_flushed)


COMPARISONS = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}


COMPARABLE = {"f32", "f16", "bf16", *(f"{kind}{width}" for kind in "bsu" for width in (16, 32, 64))}


def comparison(words: list[str], kind: str) -> Operation | None:
    """setp, also with a predicate that is joined by and, or, xor."""
    name, joins, width = words[0], words[1:], WIDTHS[kind]
    real = kind in ("f32", "f16", "bf16")
    if len(joins) > 1 or set(joins) - {"and", "or", "xor"} or kind not in COMPARABLE:
        return None
    unordered = real and name[:-1] in COMPARISONS and name.endswith("u")
    base = name[:-1] if unordered else name
    if not (base in COMPARISONS or (real and name in ("num", "nan"))) or (
        base in ("lo", "ls", "hi", "hs") and kind[0] != "u"
    ):
        return None
    if kind[0] == "b" and not real and base not in ("eq", "ne"):
        return None

    def compare(a, b, *joined):
        if real:
            a, b = floats(a, kind), floats(b, kind)
            has_nan = np.isnan(a) | np.isnan(b)
            if name in ("num", "nan"):
                result = has_nan if name == "nan" else ~has_nan
            else:
                result = COMPARISONS[base](a, b) | has_nan if unordered else COMPARISONS[base](a, b) & ~has_nan
        else:
            form = SIGNED if kind[0] == "s" else UNSIGNED
            result = COMPARISONS[base](a.view(form[width]), b.view(form[width]))
        for word, predicate in zip(joins, joined, strict=True):
            result = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}[word](result, predicate)
        return result

    return Operation(1, (width, width, *(1 for _ in joins)), compare)


def conversion(words: list[str], to: str, of: str) -> Operation | None:
    """cvt between integers, between floats, and from one to the other."""
    rounding = set(words)
    ints = [kind[0] in "su" and kind[1:].isdigit() for kind in (to, of)]
    width, source = WIDTHS[to], WIDTHS[of]
    if all(ints) and not words:
        form = SIGNED if of[0] == "s" else UNSIGNED
        return Operation(width, (source,), lambda a: a.view(form[source]).astype(SIGNED[width]).view(UNSIGNED[width]))
    if ints == [False, True] and to == "f32" and rounding == {"rn"}:
        form = SIGNED if of[0] == "s" else UNSIGNED
        return Operation(32, (source,), lambda a: a.view(form[source]).astype(np.float32).view(np.uint32))
    if to == "f32" and of in ("bf16", "f16") and not words:
        return Operation(32, (16,), lambda a: bits_of(floats(a, of).astype(np.float32), "f32"))
    if of == "f32" and to in ("bf16", "f16") and rounding == {"rn"}:
        return Operation(16, (32,), lambda a: encode(floats(a, "f64"), to))
    pairs = {"bf16x2": ("bf16", 16, {"rn"}), "f16x2": ("f16", 16, {"rn"}), "e4m3x2": ("e4m3", 8, {"rn", "satfinite"})}
    if of == "f32" and to in pairs and rounding == pairs[to][2]:
        small, bits, _ = pairs[to]

        def pack(high, low):
            codes = [encode(floats(v, "f64"), small).astype(UNSIGNED[2 * bits]) for v in (high, low)]
            return (codes[0] << UNSIGNED[2 * bits](bits)) | codes[1]

        return Operation(2 * bits, (32, 32), pack)
    return None


def operation(opcode: str) -> Operation:
    """The model of an arithmetic instruction. Raises UnknownInstruction if there is none."""
    base, *words = opcode.split(".")
    model = None
    if words and words[-1] in WIDTHS:
        kind = words[-1]
        if base == "cvt" and len(words) > 1 and words[-2] in WIDTHS:
            model = conversion(words[:-2], words[-2], kind)
        elif base == "setp" and len(words) > 1:
            model = comparison(words[:-1], kind)
        elif base == "selp" and len(words) == 1:
            width = WIDTHS[kind]
            model = Operation(width, (width, width, 1), lambda a, b, p: np.where(p, a, b))
        elif kind in ("f32", "f16", "bf16", *PAIRS):
            model = float_operation(base, set(words[:-1]), kind) if len(set(words)) == len(words) else None
        else:
            model = integer_operation(base, words[:-1], kind)
    if model is None:
        raise UnknownInstruction(f"no model of the PTX instruction {opcode}")
    return model
