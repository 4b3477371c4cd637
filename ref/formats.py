"""Three small number formats: E4M3, E2M1, E8M0.

    E4M3  sign, 4 exponent bits (bias 7), 3 mantissa bits; largest 448, no infinity, one NaN      a value
    E2M1  sign, 2 exponent bits (bias 1), 1 mantissa bit: 0 .5 1 1.5 2 3 4 6                       a value
    E8M0  8 exponent bits (bias 127), nothing else: 2^-127 to 2^127, 255 is NaN                    a scale

Do not trust casts blindly. torch's cast to E4M3 did not saturate before 2.13. Its cast to E8M0 rounds to nearest, which
can make a scale too small. E2M1 has no casts at all, and the Triton interpreter rounds differently from the GPU. So the
tests check every function here against the definition, for every bfloat16 value and every midpoint.

Sources: OCP Microscaling Formats 1.0, §5; FP8 formats for deep learning, arXiv:2209.05433, Table 1.
"""

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

__all__ = [
    "E2M1",
    "E4M3_MAX",
    "e2m1_decode",
    "e2m1_encode",
    "e4m3_decode",
    "e4m3_encode",
    "e8m0_decode",
    "power_of_two",
]

E4M3_MAX = 448.0
"""Largest E4M3 number, 1.75 · 2^8; the next code is NaN."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The magnitudes of E2M1 by code."""


def e4m3_encode(x: Float[Tensor, "*shape"]) -> UInt8[Tensor, "*shape"]:
    """float32 → codes: rounds to nearest, ties to even, saturates at ±448; NaN is 0x7f or 0xff."""
    return x.float().clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def e4m3_decode(codes: UInt8[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Codes → float32, exactly; 0x7f and 0xff are NaN."""
    return _look_up(_E4M3_VALUES, codes)


def e2m1_encode(x: Float[Tensor, "*shape"]) -> UInt8[Tensor, "*shape"]:
    """float32 → codes 0 to 15: rounds to nearest, ties to the even code, saturates at ±6; E2M1 has no NaN, so NaN
    becomes 0."""
    x = x.float().nan_to_num(0.0)
    magnitude = x.abs().clamp_(max=6.0)
    # Numbers are ½ apart below 2, 1 apart below 4 and 2 apart above; codes count them. Next to a number 2^23 times that
    # distance, float32's last bit is worth exactly one step, and float32 addition rounds to nearest, ties to even.
    exponent = (magnitude.view(torch.int32) >> 23).clamp_(min=127)
    large = (exponent + 22) << 23
    code = (magnitude + large.view(torch.float32)).view(torch.int32) - large + 2 * (exponent - 127)
    return (code | ((x.view(torch.int32) >> 28) & 8)).to(torch.uint8)


def e2m1_decode(codes: UInt8[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Codes 0 to 15 → float32, exactly."""
    return _look_up(_E2M1_VALUES, codes)


def e8m0_decode(codes: UInt8[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Codes → 2^(code − 127) as float32, exactly; 255 is NaN."""
    return _look_up(_E8M0_VALUES, codes)


def power_of_two(exponent: Tensor) -> Float[Tensor, "*shape"]:
    """2^exponent for integers −127 to 127, as float32. The smallest is subnormal but still exact."""
    return _look_up(_E8M0_VALUES, exponent.int() + 127)


_E4M3_VALUES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
_E2M1_VALUES = torch.tensor([*E2M1, *(-size for size in E2M1)], dtype=torch.float32)
_E8M0_VALUES = torch.tensor([*(2.0 ** (code - 127) for code in range(255)), torch.nan], dtype=torch.float32)


def _look_up(table: Tensor, codes: Tensor) -> Tensor:
    return table.to(codes.device).index_select(0, codes.flatten().int()).view(codes.shape)
