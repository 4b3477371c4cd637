"""Weights as in an engine with 8-bit weights: FP8 E4M3, one scale per output channel.

E4M3 (the kind without infinities, as on GPUs) has steps of 2^(e−3) between 2^e and 2^(e+1), steps of 2^−9 below 2^−6, and ends
at 448. The largest magnitude of each row is scaled to 448; activations are not quantised. An engine computes with exactly these values
and moves the scales out of the products; here they are multiplied back at once.
"""

import torch
from torch import Tensor

__all__ = ["LARGEST", "fp8_rows"]

LARGEST = 448.0
"""The largest E4M3 number."""


def fp8_rows(weight: Tensor) -> Tensor:
    """`weight` [*, out, in] in float32, each row (output channel, of each expert if there are several) rounded to E4M3 times
    a float32 scale: to nearest, ties to even. A row of zeros stays zero."""
    wide = weight.detach().float()
    scale = wide.abs().amax(-1, keepdim=True) / LARGEST
    scale = torch.where(scale > 0, scale, 1.0)
    # Before torch 2.13 the cast does not saturate, and amax / scale may exceed 448 by a rounding error.
    return (wide / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).to(torch.float32) * scale
