"""Triton kernels of the experts' products: one launch for all experts, forward and both gradients.

    y  = x wᵀ      a tile of rows lies within one expert; which one, a program finds in the running tile counts of the experts
    dx = dy w      the same kernel, the weight read the other way
    dw = dyᵀ x     a program per expert and tile of its weight, over the expert's rows

How many rows an expert has only the device knows: the grid is as large as the worst split, ⌈N / BM⌉ + E tiles, and programs beyond the
last tile return. Offsets into weights are int64: 128 experts of 1536 × 2048 pass 2^31 bytes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import INTERPRETED, configs, need

__all__ = ["grouped_linear"]


@triton.jit
def round_bfloat16(y):
    """float32 rounded to bfloat16, nearest even: what hardware's cast does and the interpreter's does not."""
    bits = y.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)


TILES = (
    {"BM": 32, "BN": 32, "BK": 32}, ({"BM": 128, "BN": 128, "BK": 64}, 8, 3), ({"BM": 128, "BN": 256, "BK": 64}, 8, 3),
    ({"BM": 64, "BN": 128, "BK": 64}, 4, 4), ({"BM": 64, "BN": 256, "BK": 64}, 8, 3),
)  # fmt: skip


@triton.autotune(configs=configs(*TILES), key=["N", "O", "D"])
@triton.jit
def rows_kernel(
    x, w, ends, out, N, O, D, E, se, so, sd, EP: tl.constexpr, UPCAST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    """out [N, O] = x [N, D] times each row's expert's w, element (o, d) of expert e at e·se + o·so + d·sd."""
    e = tl.arange(0, EP)
    end = tl.load(ends + e, e < E, other=0).to(tl.int64)
    start = tl.where(e > 0, tl.load(ends + e - 1, (e > 0) & (e < E), other=0).to(tl.int64), 0)
    tiles = tl.where(e < E, (end - start + BM - 1) // BM, 0)
    behind = tl.cumsum(tiles, 0)
    t = tl.program_id(0)
    # The expert whose tiles t lies among; behind the last tile there is none.
    mine = (behind > t) & (behind - tiles <= t)
    if tl.sum(mine.to(tl.int32), 0) > 0:
        expert = tl.sum(tl.where(mine, e, 0), 0).to(tl.int64)
        first = tl.sum(tl.where(mine, start + (t - (behind - tiles)) * BM, 0), 0)
        last = tl.sum(tl.where(mine, end, 0), 0)
        r, o = first + tl.arange(0, BM), tl.program_id(1).to(tl.int64) * BN + tl.arange(0, BN)
        y = tl.zeros((BM, BN), tl.float32)
        for begin in range(0, D, BK):
            d = begin + tl.arange(0, BK)
            a = tl.load(x + r[:, None] * D + d[None, :], (r < last)[:, None] & (d < D)[None, :], other=0.0)
            b = tl.load(w + expert * se + o[None, :] * so + d[:, None] * sd, (o < O)[None, :] & (d < D)[:, None], other=0.0)
            if UPCAST:  # the interpreter's products of bfloat16 are wrong
                a, b = a.to(tl.float32), b.to(tl.float32)
            y = tl.dot(a, b, y, input_precision="ieee")
        if UPCAST and out.dtype.element_ty == tl.bfloat16:
            y = round_bfloat16(y)
        tl.store(out + r[:, None] * O + o[None, :], y.to(out.dtype.element_ty), (r < last)[:, None] & (o < O)[None, :])


@triton.autotune(configs=configs(*TILES), key=["O", "D"])
@triton.jit
def weights_kernel(
    dy, x, ends, out, O, D, UPCAST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    """out [E, O, D]: dyᵀ x over each expert's rows, zeros where it has none."""
    e = tl.program_id(0).to(tl.int64)
    last = tl.load(ends + e).to(tl.int64)
    first = tl.load(ends + e - 1, e > 0, other=0).to(tl.int64)
    o = tl.program_id(1).to(tl.int64) * BM + tl.arange(0, BM)
    d = tl.program_id(2).to(tl.int64) * BN + tl.arange(0, BN)
    y = tl.zeros((BM, BN), tl.float32)
    for begin in range(first, last, BK):
        r = begin + tl.arange(0, BK)
        a = tl.load(dy + r[None, :] * O + o[:, None], (r < last)[None, :] & (o < O)[:, None], other=0.0)
        b = tl.load(x + r[:, None] * D + d[None, :], (r < last)[:, None] & (d < D)[None, :], other=0.0)
        if UPCAST:
            a, b = a.to(tl.float32), b.to(tl.float32)
        y = tl.dot(a, b, y, input_precision="ieee")
    if UPCAST and out.dtype.element_ty == tl.bfloat16:
        y = round_bfloat16(y)
    tl.store(out + e * O * D + o[:, None] * D + d[None, :], y.to(out.dtype.element_ty), (o < O)[:, None] & (d < D)[None, :])


def rows_product(x: Tensor, w: Tensor, ends: Tensor, backward: bool) -> Tensor:
    """x [N, D] with w [E, O, D] → [N, O]; backward: x [N, O] with it → [N, D]."""
    E, O, D = w.shape
    strides = w.stride()
    if backward:
        O, D, strides = D, O, (strides[0], strides[2], strides[1])
    x, out = x.contiguous(), torch.empty(len(x), O, dtype=x.dtype, device=x.device)
    if out.numel():
        grid = lambda tile: (triton.cdiv(len(x), tile["BM"]) + E, triton.cdiv(O, tile["BN"]))  # noqa: E731
        rows_kernel[grid](x, w, ends, out, len(x), O, D, E, *strides, EP=triton.next_power_of_2(E), UPCAST=INTERPRETED)
    return out


class GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, ends):
        ctx.save_for_backward(x, weight, ends)
        return rows_product(x, weight, ends, False)

    @staticmethod
    def backward(ctx, dy):
        (x, weight, ends), dy = ctx.saved_tensors, dy.contiguous()
        dx = rows_product(dy, weight, ends, True) if ctx.needs_input_grad[0] else None
        dw = None
        if ctx.needs_input_grad[1]:
            E, O, D = weight.shape
            dw = torch.empty(E, O, D, dtype=weight.dtype, device=weight.device)
            grid = lambda tile: (E, triton.cdiv(O, tile["BM"]), triton.cdiv(D, tile["BN"]))  # noqa: E731
            weights_kernel[grid](dy, x.contiguous(), ends, dw, O, D, UPCAST=INTERPRETED)
        return dx, dw, None


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor, forward: str = "bfloat16", backward: str = "bfloat16") -> Tensor:
    """As `ref.quant.grouped_linear` in the formats "bfloat16" and "float32", which must be those of x and weight. That ends rise to the
    number of rows is checked on the CPU only, since a GPU would have to be waited for."""
    if x.ndim != 2 or weight.ndim != 3 or x.shape[1] != weight.shape[2] or not weight.numel():
        raise ValueError(f"x and weight must be [N, D] and [E, O, D]; got {list(x.shape)} and {list(weight.shape)}")
    if forward != backward or {x.dtype, weight.dtype} != {getattr(torch, forward, None)} or forward not in ("bfloat16", "float32"):
        raise ValueError(f"forward and backward must be the dtype of x and weight, float32 or bfloat16; got {forward}, {backward}, {x.dtype}, {weight.dtype}")
    if ends.shape != weight.shape[:1] or ends.is_floating_point():
        raise ValueError(f"ends must be int, shape [{len(weight)}]; got {ends.dtype} {list(ends.shape)}")
    if not x.is_cuda and (int(torch.diff(ends, prepend=ends.new_zeros(1)).min()) < 0 or int(ends[-1]) != len(x)):
        raise ValueError(f"ends must rise to the {len(x)} tokens of x, got {ends.tolist()}")
    need(x)
    return GroupedLinear.apply(x, weight, ends.contiguous())
