"""Kernels against `ref/quant.py`, bit for bit: every bfloat16 value, midpoints and their neighbours, blocks of zeros,
of subnormal numbers, with NaN and Inf, odd sizes, views that are not contiguous. Under the interpreter where there is
no GPU."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import quant as kernels
from kernels.gate import same_bits
from ref import quant as ref
from ref.formats import E2M1, e4m3_decode

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MODES = ("rceil", "floor", "ceil", "even")


def every_bfloat16():
    """[64, 1024]: rows of like size, whose blocks have 32 neighbours each; NaN and Inf among them."""
    return (torch.arange(65536) << 16).int().view(torch.float32).view(64, 1024)


def midpoints(values, rows=8):
    """Every midpoint of a format and its float32 neighbours, times powers of two, in blocks led by what fixes the
    scale."""
    values = torch.tensor(values)
    middle = (values[1:] + values[:-1]) / 2
    near = torch.cat([middle, middle.nextafter(torch.tensor(math.inf)), middle.nextafter(torch.tensor(0.0))])
    near = torch.cat([near, -near])
    blocks = torch.zeros(-(-len(near) // 15), 16)
    blocks[:, 0] = values[-1]
    blocks[:, 1:] = torch.nn.functional.pad(near, (0, -len(near) % 15)).view(-1, 15)
    return blocks.flatten()[None] * torch.exp2(torch.arange(-4.0, rows - 4.0))[:, None]


def hostile():
    """[6, 200]: zeros with signs, subnormal numbers, the largest, NaN, Inf, and very unlike blocks in a row."""
    x = torch.randn(6, 200)
    x[0] = torch.where(torch.arange(200) % 2 == 0, 0.0, -0.0)
    x[1] *= 1e-42
    x[2] *= torch.exp2(torch.linspace(-149, 120, 200))
    x[3, 5], x[3, 70] = math.nan, -math.nan
    x[4, 199], x[4, 40] = math.inf, -math.inf
    x[5, ::3] = 3.4028234663852886e38
    return x


CASES = {
    "every bfloat16": every_bfloat16,
    "midpoints of E4M3": lambda: midpoints(
        [e4m3_decode(torch.tensor([c], dtype=torch.uint8)).item() for c in range(0x7F)]
    ),
    "midpoints of E2M1": lambda: midpoints(E2M1),
    "hostile": hostile,
    "bfloat16": lambda: torch.randn(33, 65).bfloat16(),
    "one": lambda: torch.tensor([[-3.0]]),
    "one column": lambda: torch.randn(70, 1),
    "a view": lambda: torch.randn(90, 300)[::3, 7::2],
    "transposed": lambda: torch.randn(40, 70).T,
    "nothing": lambda: torch.zeros(0, 40),
}


@pytest.mark.parametrize("case", CASES)
def test_mxfp8(case):
    x = CASES[case]()
    for mode in MODES if case in ("hostile", "every bfloat16") else MODES[:1]:
        assert same_bits(kernels.mxfp8_quantize_both(x.to(DEVICE), mode), ref.mxfp8_quantize_both(x, mode))
    for axis in (0, 1, -1):
        assert same_bits(kernels.mxfp8_quantize(x.to(DEVICE), axis), ref.mxfp8_quantize(x, axis))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("scale", ["token", "tensor"])
def test_nvfp4(case, scale):
    x = CASES[case]()
    assert same_bits(kernels.nvfp4_quantize(x.to(DEVICE), scale), ref.nvfp4_quantize(x, scale))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("block", [(1, 128), (128, 128), (3, 20)], ids=str)
def test_blockwise_fp8(case, block):
    x = CASES[case]()
    assert same_bits(kernels.blockwise_fp8_quantize(x.to(DEVICE), block), ref.blockwise_fp8_quantize(x, block))


def test_fast_division():
    x = torch.randn(64, 256).bfloat16()
    assert same_bits(kernels.nvfp4_quantize(x.to(DEVICE), division="fast"), ref.nvfp4_quantize(x, division="fast"))


def test_long_tokens_are_read_twice():
    x = torch.randn(3, 1100)
    x[1, 1050] = 1e4
    assert same_bits(kernels.nvfp4_quantize(x.to(DEVICE)), ref.nvfp4_quantize(x))


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_shape(data):
    shape = data.draw(st.lists(st.integers(1, 3), min_size=0, max_size=2)) + [
        data.draw(st.integers(1, n)) for n in (12, 70)
    ]
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    x = torch.randn(shape) * torch.exp2(torch.randint(-30, 30, (*shape[:-1], 1)).float())
    assert same_bits(kernels.mxfp8_quantize(x.to(DEVICE), axis), ref.mxfp8_quantize(x, axis))
    assert same_bits(kernels.nvfp4_quantize(x.to(DEVICE)), ref.nvfp4_quantize(x))
    assert same_bits(kernels.blockwise_fp8_quantize(x.to(DEVICE), (1, 16)), ref.blockwise_fp8_quantize(x, (1, 16)))


def test_nothing_is_left_unwritten():
    """Under test, memory that nobody wrote is NaN or 0xff: a scale that was never stored would show here."""
    for shape in ((31, 33), (1, 129), (130, 2)):
        codes, scales, col_codes, col_scales = kernels.mxfp8_quantize_both(torch.ones(shape, device=DEVICE))
        assert (
            (codes == 0x78).all() and (scales == 119).all() and (col_codes == 0x78).all() and (col_scales == 119).all()
        )
