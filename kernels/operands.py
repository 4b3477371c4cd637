"""The sides of a product: numbers or codes, contiguous along the axis that the product sums over, with their scales.

    operand     one side, quantised along one axis
    both        both sides that a matrix, or what is computed from one, is in a step: rows for one product, columns for
                another

Which layout the scales have, the device decides (`launch.path`): tiles for Blackwell's tensor cores
(kernels/swizzle.py), row-major elsewhere. The product then follows from the operand: `Operand.swizzled`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from . import launch
from .orientations import quantise_both
from .quant import blockwise_fp8_quantize, mxfp8_quantize, nvfp4_quantize

__all__ = ["FORMS", "Operand", "make_operands", "operand", "paired", "restored", "saved"]

FORMS = {"float32": 0, "bfloat16": 0, "fp8": 1, "mxfp8": 2, "nvfp4-token": 3}
"""The formats that the kernels support, by their names in `ref.quant.FORMATS`."""
SCALED = ("mxfp8", "nvfp4-token")
"""Those whose blocks Blackwell's tensor cores scale."""


@dataclass(frozen=True)
class Operand:
    """One side of a product: rows [*, R, K] in a format."""

    form: str
    """Its name in FORMS."""
    data: Tensor
    """Numbers, codes, or two codes per byte: [*, R, K] or [*, R, K / 2]."""
    size: int
    """K."""
    scales: Tensor | None = None
    """Scales along K: [*, R / block, K / 128], [*, R, K / 32] or [*, R, K / 16]; or tiles [*, R / 128, K / 4 blocks,
    32, 4, 4]."""
    token_scales: Tensor | None = None
    """NVFP4: one scale per row [*, R]."""
    block: int = 1
    """FP8: how many rows share a scale."""
    swizzled: bool = False
    """Whether the scales lie in tiles."""

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """data, scales and token_scales as kernel arguments; data is a placeholder for those that the format does not
        have."""
        return tuple(self.data if t is None else t for t in (self.data, self.scales, self.token_scales))

    def strides(self) -> tuple[int, int, int]:
        """Strides of a row, of K, and of a row of scales."""
        return *self.data.stride()[-2:], self.tensors()[1].stride(-2)

    def across(self) -> int:
        """Tiles of scales that lie side by side."""
        assert self.scales is not None
        return self.scales.shape[-4]


def operand(x: Tensor, form: str, axis: int = -1, weight: bool = False) -> Operand:
    """x [*, R, K] (axis −1) or [*, K, R] (axis −2), quantised along K. A weight has one FP8 scale per 128 × 128
    block."""
    rows = x if axis == -1 else x.mT
    size = rows.shape[-1]
    if FORMS[form] == 0:
        return Operand(form, rows.to(getattr(torch, form)), size)
    if form in SCALED and launch.path(x) == "native":
        # NVFP4 along columns is along the rows of the transposed view.
        turned = axis == -2 and form == "mxfp8"
        sides = make_operands(x, None, form) if turned else make_operands(rows, form, None)
        side = sides[1 if turned else 0]
        assert side is not None
        return side
    if form == "mxfp8":
        codes, scales = (t if axis == -1 else t.mT for t in mxfp8_quantize(x, axis))
        return Operand(form, codes.contiguous(), size, scales.contiguous())
    if form == "fp8":
        block = 128 if weight else 1
        codes, scales = blockwise_fp8_quantize(rows, (block, 128))
        return Operand(form, codes, size, scales, block=block)
    packed, scales, token_scales = nvfp4_quantize(rows)
    return Operand(form, packed, size, scales, token_scales[..., 0])


def paired(rows: str | None, columns: str | None) -> bool:
    """Whether one kernel quantises both orientations: rows to MXFP8 or NVFP4, columns to MXFP8."""
    return (rows or columns) is not None and rows in (None, *SCALED) and columns in (None, "mxfp8")


def make_operands(
    x: Tensor,
    rows: str | None,
    columns: str | None,
    weight: bool = False,
    source: str = "matrix",
    limit: Tensor | None = None,
    **gathered,
) -> tuple[Operand | None, Operand | None]:
    """x [*, M, N] as rows of a product that sums over N, in the format `rows`, and as rows of one that sums over M, in
    the format `columns`; None for a side without a format. One launch for MXFP8 and NVFP4 rows with MXFP8 columns,
    whatever the source (kernels/orientations.py); other formats, of matrices alone, side by side."""
    if not paired(rows, columns):
        assert source == "matrix"
        return None if rows is None else operand(x, rows, -1, weight), None if columns is None else operand(
            x, columns, -2, weight
        )
    launch.need(x)
    swizzled = launch.path(x) == "native"
    flat = x if x.ndim <= 3 else x.flatten(0, -3)
    outputs = quantise_both(source, flat, rows, columns, swizzled, limit=limit, **gathered)
    lead = x.shape[:-2]
    M = outputs[0][0].shape[-2] if rows else outputs[1][0].shape[-1]
    N = x.shape[-1] // (2 if source == "swiglu" else 1)
    return (
        None if rows is None else shaped(rows, N, outputs[0], lead, swizzled),
        None if columns is None else shaped(columns, M, outputs[1], lead, swizzled),
    )


def shaped(form: str, size: int, tensors: tuple[Tensor, ...], lead: torch.Size, swizzled: bool) -> Operand:
    """What the kernel wrote for one side, with the leading axes of x."""
    data, scales, *token_scales = (t.view(*lead, *t.shape[1:]) for t in tensors)
    return Operand(form, data, size, scales, token_scales[0] if form == "nvfp4-token" else None, swizzled=swizzled)


def saved(*sides: Operand | None) -> tuple[list[Tensor | None], list[tuple | None]]:
    """The tensors of operands, for autograd to keep, and what else they are."""
    tensors = [t for side in sides for t in ((side.data, side.scales, side.token_scales) if side else (None,) * 3)]
    return tensors, [(side.form, side.size, side.block, side.swizzled) if side else None for side in sides]


def restored(tensors: tuple[Tensor | None, ...], specs: list[tuple | None]) -> list[Operand | None]:
    """The operands of `saved`."""
    operands: list[Operand | None] = []
    for place, spec in enumerate(specs):
        data, scales, token_scales = tensors[3 * place : 3 * place + 3]
        operands.append(
            None
            if spec is None or data is None
            else Operand(spec[0], data, spec[1], scales, token_scales, spec[2], spec[3])
        )
    return operands
