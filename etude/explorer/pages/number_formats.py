"""The way of one number into a low-precision format and back: its scales, what is rounded, to which neighbour, and the
bits of the code."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ref import formats, quant

__all__ = [
    "FORMS",
    "LAYOUTS",
    "Layout",
    "Way",
    "bits_of",
    "fields",
    "grid",
    "near",
    "reading",
    "value",
    "verdict",
    "way",
]


@dataclass(frozen=True)
class Layout:
    """The bits of a code, from the left: sign, exponent, mantissa."""

    exponent: int
    mantissa: int
    bias: int
    sign: int = 1
    values: Callable[[], Tensor] | None = None
    """The value of every code."""

    @property
    def bits(self) -> int:
        return self.sign + self.exponent + self.mantissa


def make_codes(bits: int) -> Tensor:
    return torch.arange(1 << bits, dtype=torch.int32)


LAYOUTS = {
    "float32": Layout(8, 23, 127),
    "bfloat16": Layout(8, 7, 127, values=lambda: make_codes(16).to(torch.int16).view(torch.bfloat16).float()),
    "E4M3": Layout(4, 3, 7, values=lambda: formats.e4m3_decode(make_codes(8).to(torch.uint8))),
    "E2M1": Layout(2, 1, 1, values=lambda: formats.e2m1_decode(make_codes(4).to(torch.uint8))),
    "E8M0": Layout(8, 0, 127, 0, values=lambda: formats.e8m0_decode(make_codes(8).to(torch.uint8))),
}
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
FORMS = {
    "bfloat16": ("bfloat16", "No scale."),
    "FP8 E4M3": ("E4M3", "No scale: numbers beyond ±448 become ±448."),
    "FP8 E4M3, scaled": ("E4M3", "128 numbers of a token share a float32 scale."),
    "MXFP8": ("E4M3", "32 numbers share a power of two."),
    "NVFP4": ("E2M1", "16 numbers share an E4M3 scale, and a token shares a float32 scale."),
}
"""Name of a format: the layout of its values, and what shares a scale."""


@dataclass(frozen=True)
class Way:
    """A number's way into a format and back."""

    number: float
    """As float32 holds it."""
    scales: tuple[tuple[str, str, int, float], ...]
    """What shares the scale, its layout, its code and its value."""
    quotient: float
    """Number over scale: what is rounded."""
    layout: str
    code: int
    rounded: float
    """The value of the code."""
    back: float
    """Rounded value times scale: what a product sees."""


def way(number: float, form: str, block: float = 0.0, token: float = 0.0) -> Way:
    """The way of a number whose block has a neighbour of size `block`, and whose token has, in another block, one of
    size `token`."""
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 1], x[0, 16] = number, block, token
    layout, code, scales, step = FORMS[form][0], 0, [], torch.tensor(1.0)
    if form == "NVFP4":
        packed, blocks, s = quant.nvfp4_quantize(x)
        step = formats.e4m3_decode(blocks)[0, 0] * s[0, 0]
        scales = [
            ("token", "float32", bits_of(s[0, 0]), s.item()),
            ("block", "E4M3", int(blocks[0, 0]), formats.e4m3_decode(blocks)[0, 0].item()),
        ]
        code, back = int(packed[0, 0]) & 15, quant.nvfp4_dequantize(packed, blocks, s)[0, 0]
    elif form == "MXFP8":
        x[0, 16] = 0
        codes, scale_codes = quant.mxfp8_quantize(x)
        step = formats.e8m0_decode(scale_codes)[0, 0]
        scales = [("block", "E8M0", int(scale_codes[0, 0]), step.item())]
        code, back = int(codes[0, 0]), quant.mxfp8_dequantize(codes, scale_codes)[0, 0]
    elif form == "FP8 E4M3, scaled":
        x[0, 16] = 0
        codes, scale = quant.blockwise_fp8_quantize(x)
        step = scale[0, 0]
        scales = [("block", "float32", bits_of(step), step.item())]
        code, back = int(codes[0, 0]), quant.blockwise_fp8_dequantize(codes, scale)[0, 0]
    elif form == "FP8 E4M3":
        code = int(formats.e4m3_encode(x)[0, 0])
        back = formats.e4m3_decode(formats.e4m3_encode(x))[0, 0]
    else:
        cast = x[0, 0].to(torch.bfloat16)
        code, back = int(cast.view(torch.int16)) & 0xFFFF, cast.float()
    quotient = x[0, 0] / step if step else torch.tensor(0.0)  # a scale of zero: so are the data
    return Way(x[0, 0].item(), tuple(scales), quotient.item(), layout, code, value(layout, code), back.item())


def bits_of(x: Tensor) -> int:
    """The bits of a float32."""
    return int(x.view(torch.int32)) & 0xFFFFFFFF


@lru_cache(8)
def grid(layout: str) -> np.ndarray:
    """All finite values of a layout in order, float64."""
    values = LAYOUTS[layout].values
    assert values is not None
    all_values = values().double().numpy()
    return np.unique(all_values[np.isfinite(all_values)] + 0.0)


def value(layout: str, code: int) -> float:
    """The value of a code."""
    values = LAYOUTS[layout].values
    return (
        _list_values(layout)[code]
        if values
        else torch.tensor(code - (code >> 31 << 32), dtype=torch.int32).view(torch.float32).item()
    )


@lru_cache(8)
def _list_values(layout: str) -> list[float]:
    values = LAYOUTS[layout].values
    assert values is not None
    return values().tolist()


def fields(layout: str, code: int) -> tuple[str, str, str]:
    """Bits of sign, exponent and mantissa."""
    shape = LAYOUTS[layout]
    bits = f"{code:0{shape.bits}b}"
    return bits[: shape.sign], bits[shape.sign : shape.sign + shape.exponent], bits[shape.sign + shape.exponent :]


def reading(layout: str, code: int) -> str:
    """How the bits of a code are read."""
    shape, number = LAYOUTS[layout], value(layout, code)
    if not math.isfinite(number):
        return "not a number" if math.isnan(number) else f"{'−' if number < 0 else ''}infinite"
    sign, exponent, mantissa = (int(bits or "0", 2) for bits in fields(layout, code))
    normal = exponent > 0 or not shape.mantissa
    power, share = max(exponent, int(bool(shape.mantissa))) - shape.bias, normal + mantissa / (1 << shape.mantissa)
    return (
        f"{'−' if sign else ''}2{str(power).translate(SUPERSCRIPTS)} · "
        f"{share:g}{'' if normal else ', subnormal: no leading one'}"
    )


def verdict(conversion: Way) -> str:
    """Why the number became this one of the values that the format has."""
    q, rounded_value, values = conversion.quotient, conversion.rounded, grid(conversion.layout)
    if math.isnan(conversion.back) or math.isinf(conversion.number) and math.isinf(rounded_value):
        result = (
            "All numbers that share its scale are lost." if conversion.scales else "The result is not finite either."
        )
        return f"Not finite. {result}"
    if not q and conversion.number:
        return "The scale is too small for its own format and became zero, and with it the number."
    if q == rounded_value:
        return "A value of the format: no rounding error."
    if abs(q) > values[-1]:
        limit = "infinite" if math.isinf(rounded_value) else f"{rounded_value:g}"
        return f"Beyond the largest value, {values[-1]:g}: it becomes {limit}."
    index = int(np.searchsorted(values, q))
    lower, upper = values[index - 1], values[index]
    if q - lower == upper - q:
        return f"Exactly half-way from {lower:g} to {upper:g}: it is rounded to the code whose last bit is zero."
    neighbour = lower if rounded_value == upper else upper
    return f"Nearer to {rounded_value:g} than to {neighbour:g}{': it becomes zero' if not rounded_value else ''}."


def near(conversion: Way, count: int = 2) -> list[float]:
    """The format's values around the quotient, `count` on either side of the pair that holds it."""
    values = grid(conversion.layout)
    index = (
        int(np.searchsorted(values, conversion.quotient)) if not math.isnan(conversion.quotient) else len(values) // 2
    )
    return values[max(0, min(index - count, len(values) - 2 * count)) : max(index + count, 2 * count)].tolist()
