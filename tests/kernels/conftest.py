"""What tests of products share."""

import pytest

from ref import quant


@pytest.fixture(scope="session")
def exactly():
    """x as a product over `axis` sees it in a format, in float64: codes times scales without another rounding."""

    def wide(x, form, axis, weight=False):
        if form == "fp8":
            last = x.movedim(axis, -1)
            block = (128, 128) if weight else (1, 128)
            codes, scale = quant.blockwise_fp8_quantize(last, block)
            return quant.blockwise_fp8_dequantize(codes, scale.double(), block).movedim(-1, axis)
        if form == "nvfp4-token":
            last = x.movedim(axis, -1)
            packed, blocks, scale = quant.nvfp4_quantize(last)
            return quant.nvfp4_dequantize(packed, blocks, scale.double(), last.shape[-1]).movedim(-1, axis)
        return quant.rounded(x, form, axis, weight).double()

    return wide
