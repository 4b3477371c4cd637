"""Deltas are of bits: zeros of both signs, NaN and its payloads, and the old version untouched."""

import pytest
import torch

from ref.delta import apply_delta, encode_delta


def made(dtype, *bits):
    return torch.tensor(bits, dtype=torch.int32).to(torch.int16).view(dtype)


NAN, OTHER_NAN, MINUS_ZERO = 0x7FC0, 0x7FC1, -0x8000


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_what_changed_is_what_has_other_bits(dtype):
    """NaN stays NaN and is not sent; 0 → −0 is, and NaN → another NaN."""
    old = made(dtype, 0, 0, NAN, 0x7E00 + 1, 0x3C00, 5).view(2, 3)
    new = made(dtype, 0, MINUS_ZERO, NAN, 0x7E00 + 2, 0x3C00, OTHER_NAN).view(2, 3)
    positions, values = encode_delta(old, new)
    assert positions.tolist() == [1, 3, 5] and positions.dtype == torch.int64 and values.dtype == dtype
    assert torch.equal(values.view(torch.int16), new.flatten()[[1, 3, 5]].view(torch.int16))
    before = old.clone()
    found = apply_delta(old, positions, values)
    assert found.shape == old.shape and torch.equal(found.view(torch.int16), new.view(torch.int16))
    assert torch.equal(old.view(torch.int16), before.view(torch.int16)), "the old version stays as it is"


def test_values_are_the_new_ones_and_no_differences():
    """256 and 257 differ by one, which bfloat16 cannot add to 256."""
    old, new = torch.tensor([256.0, 1.0]).bfloat16(), torch.tensor([258.0, 1.0]).bfloat16()
    assert encode_delta(old, new)[1].tolist() == [258.0]


def test_nothing_changed():
    old = torch.randn(3, 4).bfloat16()
    positions, values = encode_delta(old, old.clone())
    assert len(positions) == len(values) == 0 and torch.equal(apply_delta(old, positions, values), old)
