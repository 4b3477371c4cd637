"""The layout of scales for Blackwell's tensor cores: there and back, places counted by hand, and the kernels' own
address."""

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st

from kernels.orientations import scale_at
from kernels.swizzle import swizzle, tiles, unswizzle

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = st.integers(1, 300), st.integers(1, 20)


@given(*SIZES, st.integers(0, 2))
def test_there_and_back(rows, blocks, lead):
    scales = torch.randint(256, (*(2, 3)[:lead], rows, blocks), dtype=torch.uint8)
    tiled = swizzle(scales)
    assert tiled.shape == (*scales.shape[:-2], *tiles(rows, blocks), 32, 4, 4) and tiled.is_contiguous()
    assert torch.equal(unswizzle(tiled, rows, blocks), scales)
    assert int(tiled.long().sum()) == int(scales.long().sum()), "padding is 0"


@given(*SIZES, st.data())
def test_places(rows, blocks, data):
    """Row r and block b of the definition, one number among zeros."""
    r, b = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, blocks - 1))
    scales = torch.zeros(rows, blocks, dtype=torch.uint8)
    scales[r, b] = 7
    (place,) = swizzle(scales).flatten().nonzero().flatten().tolist()
    across = -(-blocks // 4)
    assert place == (r // 128 * across + b // 4) * 512 + 16 * (r % 32) + 4 * (r % 128 // 32) + b % 4


def test_by_hand():
    """Rows 0, 32, 64 and 96 of a block stand side by side, four blocks each; row 1 follows 16 bytes on."""
    scales = torch.arange(128)[:, None].expand(128, 4).to(torch.uint8).contiguous()
    flat = swizzle(scales).flatten().tolist()
    assert flat[:16] == [0] * 4 + [32] * 4 + [64] * 4 + [96] * 4 and flat[16:20] == [1] * 4


@triton.jit
def place_kernel(out, across, ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    r, b = tl.arange(0, ROWS), tl.arange(0, BLOCKS)
    tl.store(out + r[:, None] * BLOCKS + b[None, :], scale_at(r[:, None], b[None, :], across))


def test_the_kernels_write_there():
    out = torch.empty(256, 8, dtype=torch.int32, device=DEVICE)
    place_kernel[(1,)](out, 2, ROWS=256, BLOCKS=8)
    numbers = torch.arange(2048).view(256, 8)
    assert torch.equal(swizzle(numbers).flatten()[out.cpu().long()], numbers)


def test_bad_input():
    with pytest.raises(ValueError, match=r"scales must have shape \[\*, R, B\]"):
        swizzle(torch.zeros(3))
    with pytest.raises(ValueError, match=r"tiled must have shape \['\*', 1, 2, 32, 4, 4\] for 5 rows of 6 blocks"):
        unswizzle(torch.zeros(1, 1, 32, 4, 4), 5, 6)
