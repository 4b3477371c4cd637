"""The small formats against their definition: every code decoded by the formula, every bfloat16 value, every midpoint
and its float32 neighbours rounded by searching the sorted values in float64."""

import math
import runpy
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ref import formats
from ref.formats import e2m1_decode, e2m1_encode, e4m3_decode, e4m3_encode, e8m0_decode, power_of_two


def value(code, exponent_bits, mantissa_bits, bias):
    """The number of a code without its sign, by the OCP's definition."""
    exponent, mantissa = code >> mantissa_bits, Fraction(code % 2**mantissa_bits, 2**mantissa_bits)
    if exponent == 0:
        return mantissa * Fraction(2) ** (1 - bias)
    return (1 + mantissa) * Fraction(2) ** (exponent - bias)


E4M3 = [float(value(code, 4, 3, 7)) for code in range(127)]
E2M1 = [float(value(code, 2, 1, 1)) for code in range(8)]
FORMATS = {"e4m3": (e4m3_encode, e4m3_decode, E4M3, 128), "e2m1": (e2m1_encode, e2m1_decode, E2M1, 8)}


def nearest(x, values, sign):
    """Codes of finite x [N]: nearest value, ties to the even code, the largest for what is beyond."""
    values, size = np.array(values), np.abs(x.double().numpy())
    above = np.searchsorted(values, size).clip(1, len(values) - 1)
    down, up = size - values[above - 1], values[above] - size
    code = np.where((up < down) | ((up == down) & (above % 2 == 0)), above, above - 1)
    return torch.from_numpy(code + sign * np.signbit(x.numpy())).to(torch.uint8)


def every_bfloat16():
    return (torch.arange(65536) << 16).to(torch.int64).int().view(torch.float32)


def edges(values):
    """Values, midpoints between them and behind the last, each with its two float32 neighbours and both signs."""
    values = torch.tensor(values)
    middle = (values[1:] + values[:-1]) / 2
    points = torch.cat((values, middle, values[-1:] + (values[-1] - values[-2]) / 2))
    near = torch.cat((points, points.nextafter(torch.tensor(math.inf)), points.nextafter(torch.tensor(-math.inf))))
    return torch.cat((near, -near))


@pytest.mark.parametrize("name", FORMATS)
def test_every_code_decodes_to_its_definition(name):
    _, decode, values, sign = FORMATS[name]
    codes = torch.arange(len(values), dtype=torch.uint8)
    assert decode(codes).tolist() == values
    assert decode(codes + sign).tolist() == [-v for v in values]
    assert torch.signbit(decode(codes + sign)).all()


@pytest.mark.parametrize("name", FORMATS)
def test_codes_come_back(name):
    encode, decode, values, sign = FORMATS[name]
    codes = torch.cat([torch.arange(len(values)) + s for s in (0, sign)]).to(torch.uint8)
    assert torch.equal(encode(decode(codes)), codes)


@pytest.mark.parametrize("name", FORMATS)
def test_rounding_is_to_the_nearest_and_ties_go_to_even(name):
    encode, _, values, sign = FORMATS[name]
    random = torch.randint(-(2**31), 2**31, (200_000,)).int().view(torch.float32)
    for x in (every_bfloat16(), edges(values), random):
        x = x[x.isfinite()]
        assert torch.equal(encode(x), nearest(x, values, sign))


def test_what_is_not_finite():
    x = torch.tensor([math.inf, -math.inf, math.nan, -math.nan])
    codes = e4m3_encode(x)
    assert codes[:2].tolist() == [0x7E, 0xFE] and (codes[2:] & 0x7F == 0x7F).all()
    assert e4m3_decode(torch.tensor([0x7F, 0xFF], dtype=torch.uint8)).isnan().all()
    assert e2m1_encode(x).tolist() == [7, 15, 0, 0]
    assert e8m0_decode(torch.tensor([255], dtype=torch.uint8)).isnan().all()


def test_a_kernels_integer_arithmetic_agrees():
    """E4M3 by bit operations, as where no cast can be trusted: just under half of the last kept place is added, and one
    more if that place is odd; below 2^-6, where steps are 2^-9, adding 2^14 rounds."""
    x = torch.cat(
        (every_bfloat16(), edges(E4M3), torch.randn(100_000) * torch.exp2(torch.randint(-12, 12, (100_000,)).float()))
    )
    x = x[~x.isnan()]
    size = x.abs().view(torch.int32)
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    small = (x.abs() + 16384.0).view(torch.int32) - 0x46800000
    code = torch.where(size < 0x3C800000, small, normal).clamp(max=0x7E) | (torch.signbit(x).int() << 7)
    assert torch.equal(e4m3_encode(x), code.to(torch.uint8))


def test_powers_of_two_are_exact():
    codes = torch.arange(255, dtype=torch.uint8)
    expected = torch.tensor([2.0 ** (code - 127) for code in range(255)], dtype=torch.float64)
    assert torch.equal(e8m0_decode(codes).double(), expected)
    assert torch.equal(power_of_two(torch.arange(-127, 128)).double(), expected)
    assert torch.equal(power_of_two(torch.arange(-127, 128).to(torch.int8)).double(), expected)


def test_values_are_float32_whatever_torch_makes_by_default():
    """Also of whoever has changed that before the import."""
    torch.set_default_dtype(torch.float64)
    try:
        here = runpy.run_path(formats.__file__)
    finally:
        torch.set_default_dtype(torch.float32)
    codes = torch.zeros(3, dtype=torch.uint8)
    assert {here[f"{name}_decode"](codes).dtype for name in ("e4m3", "e2m1", "e8m0")} == {torch.float32}


@settings(max_examples=200, deadline=None)
@given(
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.floats(width=32, allow_nan=False, allow_infinity=False),
)
def test_rounding_keeps_order_and_sign(a, b):
    x = torch.tensor(sorted((a, b)))
    for encode, decode, *_ in FORMATS.values():
        low, high = decode(encode(x)).tolist()
        assert low <= high
        assert torch.equal(encode(-x), encode(x) ^ (128 if encode is e4m3_encode else 8))
