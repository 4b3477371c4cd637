"""Small number formats inside kernels, by integer operations on float32: the arithmetic of `ref/formats.py`.

The interpreter's casts to FP8 round differently from the hardware, so integer operations are the default. With NATIVE,
a GPU that has the cast uses it; `tests/gpu` checks that the two agree.
"""

import triton
import triton.language as tl

__all__ = ["decode_e2m1", "decode_e4m3", "encode_e2m1", "encode_e4m3", "power_of_two", "round_bfloat16", "size_bits"]


@triton.jit
def size_bits(x):
    """The bits of |x|, float32, as an integer. These integers sort like the numbers, then Inf, then every NaN."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def encode_e4m3(x, NATIVE: tl.constexpr):
    """float32 → E4M3 codes, uint8: round to nearest even, saturating; NaN is 0x7f or 0xff."""
    if NATIVE:
        return (
            tl.clamp(x, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        )
    size = size_bits(x)
    # Add just under half of the last kept bit, and one more if that bit is odd. Below 2^-6, where steps are 2^-9,
    # adding 2^14 rounds.
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    small = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.minimum(tl.where(size < 0x3C800000, small, normal), 0x7E)
    code = tl.where(size > 0x7F800000, 0x7F, code)
    return (code | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def decode_e4m3(code):
    """E4M3 codes, uint8 → float32, exactly. Normal numbers are shifted into place; subnormal ones are counted in
    2^-9."""
    c = code.to(tl.int32)
    exponent, mantissa = (c >> 3) & 15, c & 7
    normal = ((exponent + 120) << 23) | (mantissa << 20)
    size = tl.where(exponent == 0, mantissa.to(tl.float32) * 0.001953125, normal.to(tl.float32, bitcast=True))
    bits = size.to(tl.int32, bitcast=True)
    bits = tl.where((c & 0x7F) == 0x7F, 0x7FC00000, bits) | ((c & 0x80) << 24)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def encode_e2m1(x):
    """float32 → E2M1 codes 0 to 15, int32: round to nearest even, saturating; NaN is 0."""
    size = tl.abs(x)
    code = (
        (size > 0.25).to(tl.int32)
        + (size >= 0.75).to(tl.int32)
        + (size > 1.25).to(tl.int32)
        + (size >= 1.75).to(tl.int32)
    )
    code += (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32) + (size > 5.0).to(tl.int32)
    code |= (x.to(tl.int32, bitcast=True) >> 28) & 8
    return tl.where(x == x, code, 0)


@triton.jit
def power_of_two(exponent):
    """2^exponent for integers −127 to 127, as float32; the smallest is subnormal."""
    field = exponent + 127
    return tl.where(field > 0, field << 23, 0x00400000).to(tl.float32, bitcast=True)


@triton.jit
def decode_e2m1(code):
    """E2M1 codes 0 to 15, int32 → float32: exponent field 0 gives 0 and 0.5; above it, an exponent and one mantissa
    bit."""
    exponent, half = (code >> 1) & 3, code & 1
    bits = tl.where(exponent > 0, ((exponent + 126) << 23) | (half << 22), half * 0x3F000000) | ((code & 8) << 28)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def round_bfloat16(y):
    """float32 rounded to bfloat16, to nearest even, as the hardware's cast does and the interpreter's does not."""
    bits = y.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
