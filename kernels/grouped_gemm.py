"""Triton kernels behind `ref.quant.grouped_linear`: one launch for all experts, forward and both gradients, in every
form of kernels/gemm.py.

    y  = x wᵀ      a tile of rows belongs to one expert, which a program finds from the running tile counts of the
                   experts
    dx = dy w      the same kernel, with the weight quantised, or read, along its other axis
    dw = dyᵀ x     one program per expert and tile of its weight, over the expert's rows

Only the device knows how many rows an expert has. So the grid covers the worst case, ⌈N / BM⌉ + E tiles, and programs
beyond the last tile return. For dw the sum is over rows, and no block of scales may span two experts: every expert's
rows start at a new multiple of 128, with zeros before it. On Blackwell (kernels/block_scaled.py) all three products
want that. Offsets are int64: 128 experts of 1536 × 2048 exceed 2^31 bytes. Each expert's tiles follow each other, in
the order of kernels/tiles.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ref.checks import expect

from . import block_scaled
from .gemm import check_forms, product
from .launch import INTERPRETED, configs, fitting, need
from .operands import FORMS, Operand, make_operands, operand
from .tiles import banded, expert_tile, store_tile

__all__ = ["expert_rows", "expert_weights", "grouped_linear", "weights_product"]

TILES = (
    {"BM": 128, "BN": 128, "BK": 128},
    ({"BM": 128, "BN": 128, "BK": 64}, 8, 3),
    ({"BM": 128, "BN": 256, "BK": 64}, 8, 3),
    ({"BM": 64, "BN": 128, "BK": 64}, 4, 4),
    ({"BM": 128, "BN": 128, "BK": 128}, 8, 3),
    ({"BM": 64, "BN": 64, "BK": 64}, 4, 3),
    ({"BM": 64, "BN": 64, "BK": 32}, 4, 3),
)
PLAIN = ({"BM": 64, "BN": 64, "BK": 32}, 4, 3), ({"BM": 32, "BN": 32, "BK": 32}, 4, 3)


# The number of rows is no key: with experts on several ranks it is another one in every step, and each would be tuned
# anew.
@triton.autotune(
    configs=configs(*TILES, plain=PLAIN),
    key=["O", "K", "FORM"],
    prune_configs_by=fitting("grouped_gemm.rows_kernel", "FORM", "BBLOCK"),
)
@triton.jit
def rows_kernel(
    a,
    a_scales,
    a_whole,
    b,
    b_scales,
    b_whole,
    ends,
    out,
    N,
    O,
    K,
    E,
    eb,
    es,
    sa,
    ka,
    la,
    sb,
    kb,
    lb,
    EP: tl.constexpr,
    FORM: tl.constexpr,
    BBLOCK: tl.constexpr,
    UPCAST: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """out [N, O] = every row of a times its expert's b; expert e's data and scales start at e·eb and e·es."""
    is_valid, expert, first, last, column = expert_tile(tl.program_id(0), ends, E, tl.cdiv(O, BN), EP, BM)
    if is_valid:
        first_o = column.to(tl.int64) * BN
        r, o = first + tl.arange(0, BM), first_o + tl.arange(0, BN)
        y = product(
            a,
            a_scales,
            b + expert * eb,
            b_scales + expert * es,
            r,
            r < last,
            o,
            o < O,
            first_o,
            0,
            K,
            sa,
            ka,
            la,
            sb,
            kb,
            lb,
            FORM,
            BBLOCK,
            UPCAST,
            BM,
            BN,
            BK,
        )
        store_tile(out, y, a_whole, b_whole + expert * O, r, r, r < last, o, o < O, O, FORM, UPCAST)


@triton.autotune(
    configs=configs(*TILES, plain=PLAIN),
    key=["O", "D", "FORM"],
    prune_configs_by=fitting("grouped_gemm.weights_kernel", "FORM"),
)
@triton.jit
def weights_kernel(
    a,
    a_scales,
    b,
    b_scales,
    bounds,
    out,
    O,
    D,
    sa,
    ka,
    la,
    sb,
    kb,
    lb,
    FORM: tl.constexpr,
    UPCAST: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """out [E, O, D]: a bᵀ over columns bounds[e] to bounds[e + 1] of a [O, P] and b [D, P]; zeros for an expert without
    columns."""
    down, across = tl.cdiv(O, BM), tl.cdiv(D, BN)
    e = (tl.program_id(0) // (down * across)).to(tl.int64)
    row, column = banded(tl.program_id(0) % (down * across), down, across)
    first_d = column.to(tl.int64) * BN
    o, d = row.to(tl.int64) * BM + tl.arange(0, BM), first_d + tl.arange(0, BN)
    y = product(
        a,
        a_scales,
        b,
        b_scales,
        o,
        o < O,
        d,
        d < D,
        first_d,
        tl.load(bounds + e),
        tl.load(bounds + e + 1),
        sa,
        ka,
        la,
        sb,
        kb,
        lb,
        FORM,
        1,
        UPCAST,
        BM,
        BN,
        BK,
    )
    store_tile(out + e * O * D, y, a, b, o, o, o < O, d, d < D, D, FORM, UPCAST)


def expert_rows(a: Operand, b: Operand, ends: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of a [N, K], sorted by expert, times their experts' b [E, O, K] → [N, O]. Swizzled operands want ends that
    are multiples of 128."""
    if a.swizzled:
        return block_scaled.rows_of_experts(a, b, ends, ends, len(a.data), dtype)
    (N, E), O = (len(a.data), len(b.data)), b.data.shape[1]
    out = torch.empty(N, O, dtype=dtype, device=a.data.device)
    if out.numel():
        grid = lambda tile: ((triton.cdiv(N, tile["BM"]) + E) * triton.cdiv(O, tile["BN"]),)
        rows_kernel[grid](
            *a.tensors(),
            *b.tensors(),
            ends,
            out,
            N,
            O,
            a.size,
            E,
            b.data.stride(0),
            b.tensors()[1].stride(0),
            *a.strides(),
            *b.strides(),
            EP=triton.next_power_of_2(E),
            FORM=FORMS[a.form],
            BBLOCK=b.block,
            UPCAST=INTERPRETED,
        )
    return out


def weights_product(a: Operand, b: Operand, bounds: Tensor, dtype: torch.dtype) -> Tensor:
    """a bᵀ over each expert's columns, bounds[e] to bounds[e + 1] of a [O, P] and b [D, P] → [E, O, D]; zeros for an
    expert without columns."""
    if a.swizzled:
        return block_scaled.weights_of_experts(a, b, bounds, dtype)
    O, D, E = len(a.data), len(b.data), len(bounds) - 1
    out = torch.empty(E, O, D, dtype=dtype, device=a.data.device)
    if out.numel():
        grid = lambda tile: (E * triton.cdiv(O, tile["BM"]) * triton.cdiv(D, tile["BN"]),)
        strides = *a.strides(), *b.strides()
        weights_kernel[grid](
            *a.tensors()[:2], *b.tensors()[:2], bounds, out, O, D, *strides, FORM=FORMS[a.form], UPCAST=INTERPRETED
        )
    return out


def expert_weights(dy: Tensor, x: Tensor, ends: Tensor, form: str, dtype: torch.dtype) -> Tensor:
    """dyᵀ x over each expert's rows, dy [N, O] and x [N, D] → [E, O, D]."""
    (N, O), D, E = dy.shape, x.shape[1], len(ends)
    if not N:
        return torch.zeros(E, O, D, dtype=dtype, device=dy.device)
    if FORMS[form] == 0:
        return weights_product(operand(dy, form, -2), operand(x, form, -2), torch.cat([ends.new_zeros(1), ends]), dtype)
    rows, bounds = padded(ends, N)
    if form == "mxfp8":  # gathered into their places while they are quantised
        a, b = (make_operands(t, None, form, source="gathered", index=rows, limit=bounds[-1:])[1] for t in (dy, x))
    else:
        a, b = (operand(torch.where(rows[:, None] < 0, 0, t[rows.clamp(0)]), form, -2) for t in (dy, x))
    assert a is not None and b is not None
    return weights_product(a, b, bounds, dtype)


def closed_up(x: Tensor, b: Operand, ends: Tensor, form: str) -> Tensor:
    """Rows of x [N, K], sorted by expert, times their experts' b [E, O, K] → [N, O], in a format."""
    if not b.swizzled:
        return expert_rows(operand(x, form), b, ends, x.dtype)
    rows, bounds = padded(ends, len(x))
    a, _ = make_operands(x, form, None, source="gathered", index=rows, limit=bounds[-1:])
    assert a is not None
    return block_scaled.rows_of_experts(a, b, bounds[1:], ends, len(x), x.dtype)


def padded(ends: Tensor, N: int, block: int = 128) -> tuple[Tensor, Tensor]:
    """The row at each place [P] if every expert starts at a multiple of `block`, −1 on padding; and the experts' bounds
    [E + 1]. P is large enough for any split of N rows, so the host does not wait for the device."""
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    blocks = (counts + block - 1) // block
    behind = blocks.cumsum(0)
    place = torch.arange((-(-N // block) + len(ends)) * block, device=ends.device)
    expert = torch.searchsorted(behind, place // block, right=True).clamp(max=len(ends) - 1)
    row = (ends - counts)[expert] + place - (behind - blocks)[expert] * block
    row = torch.where((place // block < behind[-1]) & (row < ends[expert]), row, -1)
    return row, torch.cat([behind.new_zeros(1), behind]) * block


class GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, ends, forward, backward):
        ctx.save_for_backward(x, weight, ends)
        ctx.form = backward
        return closed_up(x.contiguous(), operand(weight, forward, weight=True), ends, forward)

    @staticmethod
    def backward(ctx, dy):
        (x, weight, ends), dy, form = ctx.saved_tensors, dy.contiguous(), ctx.form
        dx = closed_up(dy, operand(weight, form, -2, True), ends, form).to(x.dtype) if ctx.needs_input_grad[0] else None
        dw = expert_weights(dy, x, ends, form, weight.dtype) if ctx.needs_input_grad[1] else None
        return dx, dw, None, None, None


def grouped_linear(
    x: Tensor, weight: Tensor, ends: Tensor, forward: str = "nvfp4-token", backward: str = "mxfp8"
) -> Tensor:
    """Same as `ref.quant.grouped_linear`, for the formats in `kernels.gemm.FORMS`. backward may not be NVFP4, whose
    scale per row does not exist for an expert's columns. That ends rise to the number of rows is checked only on the
    CPU, to avoid waiting for a GPU."""
    expect("x", x, "float", "N", "D")
    expect("weight", weight, "float", "E", "O", x.shape[1])
    expect("ends", ends, "int", len(weight))
    check_forms(forward, backward)
    if backward == "nvfp4-token":
        raise ValueError("backward must be float32, bfloat16, fp8 or mxfp8; got 'nvfp4-token'")
    if not x.is_cuda and (int(torch.diff(ends, prepend=ends.new_zeros(1)).min()) < 0 or int(ends[-1]) != len(x)):
        raise ValueError(f"ends must rise to the {len(x)} tokens of x; got {ends.tolist()}")
    need(x)
    return GroupedLinear.apply(x, weight, ends.contiguous(), forward, backward)
