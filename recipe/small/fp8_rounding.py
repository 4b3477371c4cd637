"""Weights as in an engine with 8-bit weights: FP8 E4M3, one scale per output channel.

E4M3 (the kind without infinities, as on GPUs) has steps of 2^(e−3) between 2^e and 2^(e+1), steps of 2^−9 below 2^−6,
and ends at 448. The largest magnitude of each row is scaled to 448; activations are not quantised. An engine computes
with exactly these values and moves the scales out of the products; here they are multiplied back at once.
"""

import torch
from torch import Tensor

from ref.formats import E4M3_MAX, e4m3_decode, e4m3_encode

__all__ = ["fp8_rows"]


def fp8_rows(weight: Tensor) -> Tensor:
    """`weight` [*, out, in] in float32, each row (output channel, of each expert if there are several) rounded to E4M3
    times a float32 scale: to nearest, ties to even. A row of zeros stays zero."""
    wide = weight.detach().float()
    scale = wide.abs().amax(-1, keepdim=True) / E4M3_MAX
    scale = torch.where(scale > 0, scale, 1.0)
    return e4m3_decode(e4m3_encode(wide / scale)) * scale
