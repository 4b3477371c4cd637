"""A layer of experts on one GPU, from the router's scores to the sum over a token's experts, and back: the kernels
behind `ref.quant.experts_swiglu`, in the order in which they run.

    forward     route                    scores → gates, experts
                sort                     the place of every assignment; each expert's rows start at a multiple of 128
                quantise x               gathered into its places; rows for this pass, columns for dw13
                quantise w13, w2         rows for this pass, columns for dx
                h = x w13ᵀ               grouped product
                quantise silu(g) · u     computed from h = (g, u) by the quantiser: memory holds only its codes
                y = act w2ᵀ              grouped product
                combine                  Σ gate · y over a token's experts, in the model's dtype (bfloat16)

    backward    quantise dy              the output's gradient times the gates, gathered; rows for d_act, columns for
                                         dw2
                gates' gradient          y · dy
                d_act = dy w2            grouped product
                quantise dh              SwiGLU's gradient, computed by the quantiser: rows for dx, columns for dw13;
                                         and act's columns for dw2
                dw2 = dyᵀ act            grouped products over each expert's rows
                dw13 = dhᵀ x
                dx = dh w13              grouped product
                combine                  Σ dx over a token's experts

Everything is quantised once, and where two products need it along both axes, by one launch that reads it once. Padding
is zeros, so it adds nothing to a sum. `kernels/launches.py` lists these launches with their bytes and FLOPs, and a test
compares the list with what runs.

With formats that one kernel cannot quantise along both axes (FP8; bfloat16 and float32, which have no codes), the same
steps run with a gather and with SwiGLU as launches of their own; numbers without codes need no padding.

Composer 2 technical report, §6.1, and the kernels post, whose layer has this shape.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ref.checks import expect

from . import launch
from .bits import round_bfloat16
from .expert_rows import aligned, combine, gate_gradient, gather
from .gemm import check_forms
from .grouped_gemm import expert_rows, weights_product
from .launch import INTERPRETED, need
from .operands import FORMS, SCALED, Operand, make_operands, operand, paired, restored, saved, shaped
from .orientations import quantise_swiglu_gradient
from .quant import fp8_blocks
from .router_replay import route

__all__ = ["experts_swiglu", "mixture", "received_swiglu"]


class Layer(torch.autograd.Function):
    """experts [N, K]; codes and scales of x, if it was quantised before it was sent here. x is then only the place of
    its gradient."""

    @staticmethod
    def forward(ctx, x, gates, w13, w2, experts, codes, scales, forward, backward):
        K, dtype = experts.shape[1], x.dtype
        train = backward if any(ctx.needs_input_grad[:4]) else None
        column_form = train if paired(forward, train) else None
        # Blocks of scales may not span two experts; numbers without scales need no padding.
        source, place, bounds = aligned(experts, len(w13), 1 if FORMS[forward] == FORMS[backward] == 0 else 128)
        rows, columns = (x, None) if codes is None else (codes, scales)
        x_rows, x_columns = tokens(rows, source, K, bounds, forward, train, scales=columns)
        w13_rows, w13_columns = make_operands(w13, forward, column_form, weight=True)
        h = expert_rows(x_rows, w13_rows, bounds[1:], dtype)
        act = activation(h, forward, bounds[-1:])
        w2_rows, w2_columns = make_operands(w2, forward, column_form, weight=True)
        y = expert_rows(act, w2_rows, bounds[1:], dtype)
        tensors, ctx.operand_specs = saved(x_columns, w13_columns, w2_columns)
        ctx.form = backward
        ctx.save_for_backward(
            gates, w13, w2, source, place, bounds, h, y if ctx.needs_input_grad[1] else None, *tensors
        )
        return combine(y, place, gates)

    @staticmethod
    def backward(ctx, dout):
        (gates, w13, w2, source, place, bounds, h, y, *tensors), form = ctx.saved_tensors, ctx.form
        x_columns, w13_columns, w2_columns = restored(tuple(tensors), ctx.operand_specs)
        ends, dout = bounds[1:], dout.contiguous()
        dy_rows, dy_columns = tokens(dout, source, place.shape[1], bounds, form, form, gates=gates)
        d_gates = None if y is None else gate_gradient(dout, y, place, gates.dtype)
        d_act = expert_rows(dy_rows, w2_columns or operand(w2, form, -2, True), ends, h.dtype)
        dh_rows, dh_columns, act_columns = swiglu_gradient(h, d_act, form, bounds[-1:])
        dw2 = weights_product(dy_columns, act_columns, bounds, w2.dtype) if ctx.needs_input_grad[3] else None
        dw13 = weights_product(dh_columns, x_columns, bounds, w13.dtype) if ctx.needs_input_grad[2] else None
        dx = None
        if ctx.needs_input_grad[0]:
            dx = combine(expert_rows(dh_rows, w13_columns or operand(w13, form, -2, True), ends, h.dtype), place, None)
        return dx, d_gates, dw13, dw2, None, None, None, None, None


def tokens(
    x: Tensor,
    source: Tensor,
    K: int,
    bounds: Tensor,
    rows: str,
    columns: str | None,
    gates: Tensor | None = None,
    scales: Tensor | None = None,
) -> tuple[Operand, Operand]:
    """Tokens x [N, D] in their experts' rows, times their gates if these are given, in both orientations; or MXFP8
    codes x with their scales."""
    if paired(rows, columns):
        kind = "codes" if scales is not None else "gathered" if gates is None else "weighted"
        gates_argument = scales if gates is None else gates.contiguous()
        return make_operands(
            x.contiguous(), rows, columns, source=kind, index=source, K=K, gates=gates_argument, limit=bounds[-1:]
        )  # pyright: ignore[reportReturnType]
    return make_operands(gather(x, source, K, gates), rows, columns)  # pyright: ignore[reportReturnType]


@triton.jit
def swiglu_kernel(
    h, dy, out, dh, N, I, BACKWARD: tl.constexpr, ROUND: tl.constexpr, BM: tl.constexpr, BI: tl.constexpr
):
    """out [N, I] = silu(gate) · up of h [N, 2I]; BACKWARD: also dh [N, 2I] from dy [N, I]."""
    m = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    i = tl.program_id(1) * BI + tl.arange(0, BI)
    inside = (m < N)[:, None] & (i < I)[None, :]
    at, narrow = m[:, None] * (2 * I) + i[None, :], m[:, None] * I + i[None, :]
    gate = tl.load(h + at, inside, other=0.0).to(tl.float32)
    up = tl.load(h + at + I, inside, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    y = gate * sigmoid * up
    tl.store(out + narrow, (round_bfloat16(y) if ROUND else y).to(out.dtype.element_ty), inside)
    if BACKWARD:
        d = tl.load(dy + narrow, inside, other=0.0).to(tl.float32)
        d_gate, d_up = d * up * sigmoid * (1.0 + gate * (1.0 - sigmoid)), d * gate * sigmoid
        tl.store(dh + at, (round_bfloat16(d_gate) if ROUND else d_gate).to(dh.dtype.element_ty), inside)
        tl.store(dh + at + I, (round_bfloat16(d_up) if ROUND else d_up).to(dh.dtype.element_ty), inside)


def swiglu(h: Tensor, dy: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """silu(gate) · up of h [N, 2I], with gate before up; also the gradient of h if that of the activation is given."""
    N, I = len(h), h.shape[1] // 2
    out, dh = torch.empty(N, I, dtype=h.dtype, device=h.device), None if dy is None else torch.empty_like(h)
    if out.numel():
        BM, BI = (32, 64) if INTERPRETED else (4, 256)
        ROUND = INTERPRETED and h.dtype == torch.bfloat16
        gradient_arguments = (out, out) if dy is None else (dy, dh)
        swiglu_kernel[(triton.cdiv(N, BM), triton.cdiv(I, BI))](
            h,
            gradient_arguments[0],
            out,
            gradient_arguments[1],
            N,
            I,
            BACKWARD=dy is not None,
            ROUND=ROUND,
            BM=BM,
            BI=BI,
        )
    return out, dh


def activation(h: Tensor, form: str, limit: Tensor | None = None) -> Operand:
    """silu(gate) · up of h [N, 2I] as rows of a product. Only its codes are written, unless the format has no codes.
    `limit` [1]: how many rows are used."""
    if form in SCALED:
        return make_operands(h, form, None, source="swiglu", limit=limit)[0]  # pyright: ignore[reportReturnType]
    if form == "fp8":
        codes, scales = fp8_blocks(h, (1, 128), swiglu=True)
        return Operand(form, codes, h.shape[1] // 2, scales)
    return operand(swiglu(h)[0], form)


def swiglu_gradient(h: Tensor, d: Tensor, form: str, limit: Tensor) -> tuple[Operand, Operand, Operand]:
    """From d [P, I], the gradient of silu(gate) · up: that of h [P, 2I] as rows and as columns, and the activation as
    columns."""
    if form != "mxfp8":
        act, dh = swiglu(h, d)
        return *make_operands(dh, form, form), operand(act, form, -2)  # pyright: ignore[reportReturnType]
    swizzled = launch.path(h) == "native"
    outputs = quantise_swiglu_gradient(h, d, limit, swizzled)
    sizes = h.shape[1], len(h), len(h)
    return tuple(
        shaped(form, size, tensors, torch.Size(), swizzled) for size, tensors in zip(sizes, outputs, strict=True)
    )  # pyright: ignore[reportReturnType]


def experts_swiglu(
    x: Tensor,
    gates: Tensor,
    w13: Tensor,
    w2: Tensor,
    experts: Tensor,
    forward: str = "nvfp4-token",
    backward: str = "mxfp8",
) -> Tensor:
    """Same as `ref.quant.experts_swiglu`, for the formats in `kernels.operands.FORMS`; the activation and the gradients
    between the products are quantised from float32. backward may not be NVFP4, whose scale per row does not exist for
    an expert's columns."""
    check(x, gates, w13, w2, experts, forward, backward)
    return Layer.apply(x, gates, w13, w2, experts, None, None, forward, backward)


def received_swiglu(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    gates: Tensor,
    w13: Tensor,
    w2: Tensor,
    experts: Tensor,
    forward: str = "mxfp8",
    backward: str = "mxfp8",
) -> Tensor:
    """`experts_swiglu` of tokens that came as MXFP8: codes [N, D] and scales [N, D / 32], which go into the first
    product as they are. x [N, D] says the dtype and takes the gradient; its values are not read. Along columns, for
    dw13, the decoded values are quantised again."""
    check(x, gates, w13, w2, experts, forward, backward)
    expect("codes", codes, "int", *x.shape)
    expect("scales", scales, "int", len(x), -(-x.shape[1] // 32))
    if backward != "mxfp8" or forward not in SCALED:
        raise ValueError(f"codes need forward mxfp8 or nvfp4-token and backward mxfp8; got {forward} and {backward}")
    return Layer.apply(x, gates, w13, w2, experts, codes.contiguous(), scales.contiguous(), forward, backward)


def mixture(
    x: Tensor,
    scores: Tensor,
    k: int,
    w13: Tensor,
    w2: Tensor,
    forward: str = "nvfp4-token",
    backward: str = "mxfp8",
    normalise: bool = True,
) -> Tensor:
    """The complete layer: the k experts of each token by its scores [N, E] (`route`), and their sum, weighted by their
    gates."""
    gates, experts = route(scores, k, normalise=normalise)
    return experts_swiglu(x, gates, w13, w2, experts, forward, backward)


def check(x: Tensor, gates: Tensor, w13: Tensor, w2: Tensor, experts: Tensor, forward: str, backward: str) -> None:
    expect("w2", w2, "float", "E", "D", "I")
    expect("w13", w13, "float", len(w2), 2 * w2.shape[2], w2.shape[1])
    expect("x", x, "float", "N", w2.shape[1])
    expect("gates", gates, "float", len(x), "K")
    expect("experts", experts, "int", *gates.shape)
    check_forms(forward, backward)
    if backward == "nvfp4-token":
        raise ValueError("backward must be float32, bfloat16, fp8 or mxfp8; got 'nvfp4-token'")
    need(x)
