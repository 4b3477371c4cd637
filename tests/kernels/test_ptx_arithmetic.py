"""Every family of PTX's arithmetic against numbers by hand, Python's integers and fractions, torch's casts, and a
search for the nearest number."""

import math
import struct
from fractions import Fraction

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.ptx_floats import encode, operation
from kernels.ptx_integers import UNSIGNED
from ref.formats import e4m3_decode

WORD = st.integers(0, 2**32 - 1)
INF, NAN = 0x7F800000, 0x7FFFFFFF


def value(opcode, *operands):
    """The result of one instruction in one thread."""
    found = operation(opcode)
    arrays = [np.array([x], UNSIGNED[width]) for x, width in zip(operands, found.sources, strict=True)]
    return int(found.compute(*arrays)[0])


def bits(x):
    return struct.unpack("<I", struct.pack("<f", x))[0]


def number(word):
    return struct.unpack("<f", struct.pack("<I", word))[0]


def pair(low, high):
    return bits(low) | bits(high) << 32


def signed(x, width=32):
    return x - 2**width if x >> (width - 1) else x


INTEGERS = {
    "add.s32": lambda a, b: a + b,
    "sub.s32": lambda a, b: a - b,
    "mul.lo.s32": lambda a, b: a * b,
    "mul.hi.u32": lambda a, b: a * b >> 32,
    "mul.hi.s32": lambda a, b: signed(a) * signed(b) >> 32,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "xor.b32": lambda a, b: a ^ b,
    "min.s32": lambda a, b: min(signed(a), signed(b)),
    "max.s32": lambda a, b: max(signed(a), signed(b)),
    "min.u32": min,
    "max.u32": max,
    "shl.b32": lambda a, b: a << b if b < 32 else 0,
    "shr.u32": lambda a, b: a >> b if b < 32 else 0,
    "shr.s32": lambda a, b: signed(a) >> min(b, 31),
    "div.u32": lambda a, b: a // b,
    "rem.u32": lambda a, b: a % b,
    "div.s32": lambda a, b: abs(signed(a)) // abs(signed(b)) * (1 if (signed(a) < 0) == (signed(b) < 0) else -1),
    "rem.s32": lambda a, b: abs(signed(a)) % abs(signed(b)) * (-1 if signed(a) < 0 else 1),
}


@given(WORD, WORD | st.integers(0, 40), st.sampled_from(sorted(INTEGERS)))
def test_integers(a, b, opcode):
    if opcode.startswith(("div", "rem")):
        b = b or 3
    assert value(opcode, a, b) == INTEGERS[opcode](a, b) % 2**32


@given(WORD, WORD, st.integers(0, 2**64 - 1))
def test_wide_integers(a, b, c):
    assert value("mul.wide.u32", a, b) == a * b
    assert value("mul.wide.s32", a, b) == signed(a) * signed(b) % 2**64
    assert value("mad.wide.s32", a, b, c) == (signed(a) * signed(b) + c) % 2**64
    assert value("mad.lo.s64", a, c, b) == (a * c + b) % 2**64
    assert value("cvt.s64.s32", a) == signed(a) % 2**64 and value("cvt.u64.u32", a) == a
    assert value("cvt.u16.u32", a) == a % 2**16 and value("cvt.s32.s16", a % 2**16) == signed(a % 2**16, 16) % 2**32
    assert value("add.s64", c, c) == 2 * c % 2**64 and value("shl.b64", c, a % 70) == (c << a % 70) % 2**64 * (
        a % 70 < 64
    )


@given(WORD, WORD, WORD, st.integers(0, 300), st.integers(0, 300))
def test_fields_of_bits(a, b, c, at, length):
    """From the ISA's own definition: bit by bit."""
    p, n = at & 255, length & 255
    for kind in "us":
        last = min(p + n - 1, 31)
        fill = 0 if kind == "u" or n == 0 else a >> last & 1
        wanted = sum(((a >> (p + i) & 1) if i < n and p + i <= 31 else fill) << i for i in range(32))
        assert value(f"bfe.{kind}32", a, at, length) == wanted
    wanted = sum((a >> (i - p) & 1 if p <= i < p + n else b >> i & 1) << i for i in range(32))
    assert value("bfi.b32", a, b, at, length) == wanted
    pool = (b << 32 | a).to_bytes(8, "little")
    nibbles = [c >> 4 * i & 15 for i in range(4)]
    picked = [pool[x & 7] if x < 8 else 255 * (pool[x & 7] >> 7) for x in nibbles]
    assert value("prmt.b32", a, b, c) == int.from_bytes(picked, "little")
    table = c & 255
    assert value("lop3.b32", a, b, c, table) == sum(
        (table >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | c >> i & 1) & 1) << i for i in range(32)
    )
    assert value("shf.l.wrap.b32", a, b, at) == ((b << 32 | a) << (at & 31) >> 32) % 2**32
    assert value("shf.r.clamp.b32", a, b, at) == (b << 32 | a) >> min(at, 32) & 0xFFFFFFFF
    assert value("popc.b32", a) == a.bit_count() and value("clz.b32", a) == 32 - a.bit_length()


def test_bits_by_hand():
    assert (
        value("lop3.b32", 0b1100, 0b1010, 0b1111, 0x80) == 0b1000 and value("lop3.b32", 12, 10, 6, 0x96) == 12 ^ 10 ^ 6
    )
    assert (
        value("prmt.b32", 0x33221100, 0x77665544, 0x3340) == 0x33334400
        and value("prmt.b32", 0x80, 0, 0x8888) == 0xFFFFFFFF
    )
    assert value("bfe.u32", 0x12345678, 8, 8) == 0x56 and value("bfe.s32", 0x1234F678, 8, 8) == 0xFFFFFFF6
    assert value("bfi.b32", 0xAB, 0x11111111, 4, 8) == 0x11111AB1
    assert value("shr.s32", 0x80000000, 99) == 0xFFFFFFFF and value("shr.u32", 0x80000000, 32) == 0


def nearest(exact: Fraction) -> int:
    """The float32 nearest to a fraction, ties to even, as bits: found by comparing distances."""
    if abs(exact) >= Fraction(2) ** 128 - Fraction(2) ** 103:
        return 0xFF800000 if exact < 0 else INF
    guess = bits(float(np.float32(float(exact))) if abs(exact) < 3e38 else math.copysign(3.4028234663852886e38, exact))
    near = [guess + step for step in (-1, 0, 1) if 0 <= guess + step and (guess + step) & 0x7FFFFFFF < INF]
    return min(near, key=lambda word: (abs(Fraction(number(word)) - exact), word & 1))


FINITE = WORD.filter(lambda word: word & INF != INF)


@given(FINITE, FINITE | st.integers(0x3F000000, 0x41000000), FINITE)
def test_floats_are_rounded_once(a, b, c):
    x, y, z = (Fraction(number(word)) for word in (a, b, c))

    def same(found, exact, zero):
        """A zero's sign is that of the rule."""
        assert found == (nearest(exact) if exact else zero) or (
            nearest(exact) & 0x7FFFFFFF == 0 and found & 0x7FFFFFFF == 0
        )

    sign = (a ^ b) & 0x80000000
    same(value("add.rn.f32", a, b), x + y, a & b & 0x80000000)
    same(value("sub.f32", a, b), x - y, a & ~b & 0x80000000)
    same(value("mul.rn.f32", a, b), x * y, sign)
    if y:
        same(value("div.rn.f32", a, b), x / y, sign)
    same(value("fma.rn.f32", a, b, c), x * y + z, 0)
    rounded = value("mul.rn.f32", a, b)
    if rounded & INF != INF:  # what the rounding of the product lost
        same(value("fma.rn.f32", a, b, rounded ^ 0x80000000), x * y - Fraction(number(rounded)), 0)


def test_floats_by_hand():
    one, tiny = bits(1.0), 1
    assert value("add.rn.f32", one, bits(2.0**-24)) == one and value("add.rn.f32", one | 1, bits(2.0**-24)) == one + 2
    assert value("mul.rn.f32", tiny, bits(0.5)) == 0 and value("mul.rn.f32", 3, bits(0.5)) == 2
    assert value("mul.rn.ftz.f32", tiny, bits(4.0)) == 0 and value("mul.rn.f32", tiny, bits(4.0)) == 4
    assert value("add.ftz.f32", 0x80000001, 0x80000001) == 0x80000000
    assert (
        value("div.rn.f32", one, bits(6.0)) == 0x3E2AAAAB
        and value("div.rn.f32", one, 0) == INF
        and value("div.rn.f32", 0, 0) == NAN
    )
    assert (
        value("add.rn.f32", INF, 0xFF800000) == NAN
        and value("mul.rn.f32", INF, 0x80000000) == NAN
        and value("add.rn.f32", 0xFFC12345, one) == NAN
    )
    assert (
        value("rcp.rn.f32", bits(3.0)) == bits(float(np.float32(1) / np.float32(3)))
        and value("sqrt.rn.f32", bits(2.0)) == 0x3FB504F3
    )
    assert value("abs.f32", bits(-2.0)) == bits(2.0) and value("neg.f32", 0) == 0x80000000
    assert value("fma.rn.f32", bits(1 + 2**-12), bits(1 + 2**-12), bits(-1 - 2**-11)) == bits(2.0**-24)
    assert value("mul.rn.f32x2", pair(3, -2), pair(0.5, 8)) == pair(1.5, -16) and value(
        "add.f32x2", pair(1, 2), pair(3, 5)
    ) == pair(4, 7)
    assert value("abs.bf16x2", 0xBF80FFC1) == 0x3F807FC1
    assert value("add.rn.bf16", 0x3F80, 0x3B80) == 0x3F80 and value("mul.rn.bf16", 0x4040, 0x3F00) == 0x3FC0
    assert value("add.rn.f16x2", 0x3C004200, 0x3C003C00) == 0x40004400 and value("mul.rn.f16", 0x7BFF, 0x4000) == 0x7C00


def test_min_and_max():
    one, two, minus = bits(1.0), bits(2.0), bits(-3.0)
    assert value("min.f32", one, two) == one and value("max.f32", minus, one) == one
    assert value("min.f32", 0, 0x80000000) == 0x80000000 and value("max.f32", 0x80000000, 0) == 0
    assert value("min.f32", NAN, one) == one == value("max.f32", one, 0xFFC00001) and value("min.f32", NAN, NAN) == NAN
    assert value("min.NaN.f32", NAN, one) == NAN == value("max.NaN.f32", one, 0xFF800001)
    assert value("min.NaN.xorsign.abs.f32", minus, two) == bits(-2.0) and value(
        "min.NaN.xorsign.abs.f32", minus, bits(-448.0)
    ) == bits(3.0)
    assert value("min.NaN.xorsign.abs.f32", NAN, two) == NAN


def test_comparisons():
    one, two = bits(1.0), bits(2.0)
    for name, less, same, more, nan in (
        ("lt", 1, 0, 0, 0),
        ("le", 1, 1, 0, 0),
        ("gt", 0, 0, 1, 0),
        ("ge", 0, 1, 1, 0),
        ("eq", 0, 1, 0, 0),
        ("ne", 1, 0, 1, 0),
        ("num", 1, 1, 1, 0),
        ("nan", 0, 0, 0, 1),
        ("ltu", 1, 0, 0, 1),
        ("geu", 0, 1, 1, 1),
        ("equ", 0, 1, 0, 1),
        ("neu", 1, 0, 1, 1),
    ):
        found = [value(f"setp.{name}.f32", a, b) for a, b in ((one, two), (one, one), (two, one), (one, NAN))]
        assert found == [less, same, more, nan], name
    assert value("setp.eq.f32", 0, 0x80000000) == 1
    assert (
        value("setp.lt.s32", 2**32 - 1, 0) == 1
        and value("setp.lt.u32", 2**32 - 1, 0) == 0
        and value("setp.hi.u32", 5, 4) == 1
    )
    assert value("setp.lt.s64", 2**64 - 1, 0) == 1 and value("setp.ne.b16", 3, 4) == 1
    assert [value("setp.gt.and.s32", 2, 1, p) for p in (0, 1)] == [0, 1] and [
        value("setp.gt.or.s32", 1, 2, p) for p in (0, 1)
    ] == [0, 1]
    assert [value("selp.b32", 7, 9, p) for p in (0, 1)] == [9, 7] and value("selp.b16", 7, 9, 1) == 7
    assert value("and.pred", 1, 0) == 0 and value("or.pred", 1, 0) == 1 and value("not.pred", 1) == 0


@given(st.lists(WORD, min_size=1, max_size=50))
def test_casts_to_half_precision_are_torch_s(words):
    a = np.array(words, np.uint32)
    x = torch.from_numpy(a.view(np.int32)).view(torch.float32)
    for opcode, dtype in (("cvt.rn.bf16.f32", torch.bfloat16), ("cvt.rn.f16.f32", torch.float16)):
        ours = torch.from_numpy(operation(opcode).compute(a).view(np.int16)).view(dtype)
        theirs = x.to(dtype)
        assert torch.equal(ours.isnan(), theirs.isnan()) and torch.equal(
            ours.view(torch.int16)[~x.isnan()], theirs.view(torch.int16)[~x.isnan()]
        )
    high, low = a, a[::-1].copy()
    packed = operation("cvt.rn.bf16x2.f32").compute(high, low)
    assert (packed >> 16 == operation("cvt.rn.bf16.f32").compute(high)).all() and (
        packed & 0xFFFF == operation("cvt.rn.bf16.f32").compute(low)
    ).all()
    back = operation("cvt.f32.bf16").compute((a >> 16).astype(np.uint16))
    assert ((back == (a & 0xFFFF0000)) | np.isnan(back.view(np.float32))).all()


def test_e4m3_is_the_nearest_of_its_numbers():
    """Every midpoint, its neighbours, any bits: the nearest of the 127 sizes, the even code of two, the largest beyond,
    NaN as 0x7f."""
    grid = e4m3_decode(torch.arange(0x7F, dtype=torch.uint8)).double().numpy()
    middle = ((grid[1:] + grid[:-1]) / 2).astype(np.float32).view(np.uint32)
    words = np.concatenate(
        [
            middle,
            middle + 1,
            middle - 1,
            grid.astype(np.float32).view(np.uint32),
            np.arange(0, 2**31, 99991, dtype=np.uint32),
        ]
    )
    words = words[words <= INF]
    x = words.view(np.float32).astype(np.float64)
    away = np.abs(np.minimum(x, 1000)[:, None] - grid)
    wanted = np.array([min(range(127), key=lambda code: (row[code], code & 1)) for row in away])
    assert np.array_equal(encode(x, "e4m3"), wanted) and np.array_equal(encode(-x, "e4m3"), wanted | 0x80)
    packed = operation("cvt.rn.satfinite.e4m3x2.f32").compute(words, (words | 0x80000000)[::-1].copy())
    assert np.array_equal(packed >> 8, wanted) and np.array_equal(packed & 255, (wanted | 0x80)[::-1])
    assert (
        value("cvt.rn.satfinite.e4m3x2.f32", NAN, 0xFF812345) == 0x7F7F
        and value("cvt.rn.satfinite.e4m3x2.f32", 0x80000000, INF) == 0x807E
    )
    assert value("cvt.rn.f32.u32", 2**32 - 1) == bits(2.0**32) and value("cvt.rn.f32.s32", 2**32 - 7) == bits(-7.0)
