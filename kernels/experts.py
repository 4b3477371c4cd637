"""Triton kernels behind `ref.quant.experts_swiglu`: a layer of experts whose activations are quantised while they are computed.

Between an expert's two products is silu(gate) · up. In the forward pass, the quantiser of the second product reads gate and up and
computes it on the fly, so memory only ever holds its codes. In the backward pass, one kernel reads them once and gives the gradients of
gate and up, and the activation again for the weight's gradient.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ref.checks import expect

from .bits import round_bfloat16
from .expert_rows import permute, sort_by_expert, unpermute
from .gemm import Operand, check_forms, operand
from .grouped_gemm import expert_rows, expert_weights, grouped_linear
from .launch import INTERPRETED, need
from .quant import fp8_blocks, mxfp8_matrix, nvfp4_rows

__all__ = ["experts_swiglu", "swiglu_linear"]


@triton.jit
def swiglu_kernel(h, dy, out, dh, N, I, BACKWARD: tl.constexpr, ROUND: tl.constexpr, BM: tl.constexpr, BI: tl.constexpr):
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
        given = (out, out) if dy is None else (dy, dh)
        swiglu_kernel[(triton.cdiv(N, BM), triton.cdiv(I, BI))](h, given[0], out, given[1], N, I, BACKWARD=dy is not None, ROUND=ROUND, BM=BM, BI=BI)
    return out, dh


def activation(h: Tensor, form: str) -> Operand:
    """silu(gate) · up of h [N, 2I] as an operand of a product. Only its codes are written, unless the format has no codes."""
    I = h.shape[1] // 2
    if form == "fp8":
        codes, scales = fp8_blocks(h, (1, 128), swiglu=True)
        return Operand(form, codes, I, scales)
    if form == "mxfp8":
        codes, scales, *_ = mxfp8_matrix(h, True, False, swiglu=True)
        return Operand(form, codes, I, scales)
    if form == "nvfp4-token":
        packed, scales, whole = nvfp4_rows(h, swiglu=True)
        return Operand(form, packed, I, scales, whole[..., 0])
    return operand(swiglu(h)[0], form)


class SwigluLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, weight, ends, forward, backward):
        h = h.contiguous()
        ctx.save_for_backward(h, weight, ends)
        ctx.form = backward
        return expert_rows(activation(h, forward), operand(weight, forward, weight=True), ends, h.dtype)

    @staticmethod
    def backward(ctx, dy):
        (h, weight, ends), dy, form = ctx.saved_tensors, dy.contiguous(), ctx.form
        d_act = expert_rows(operand(dy, form), operand(weight, form, -2, True), ends, h.dtype)
        act, dh = swiglu(h, d_act)
        return dh, expert_weights(dy, act, ends, form, weight.dtype) if ctx.needs_input_grad[1] else None, None, None, None


def swiglu_linear(h: Tensor, weight: Tensor, ends: Tensor, forward: str = "nvfp4-token", backward: str = "mxfp8") -> Tensor:
    """`grouped_linear` of silu(gate) · up: h [N, 2I] with gate before up, weight [E, D, I] → [N, D]."""
    expect("weight", weight, "float", "E", "D", "I")
    expect("h", h, "float", "N", 2 * weight.shape[2])
    expect("ends", ends, "int", len(weight))
    check_forms(forward, backward)
    need(h)
    return SwigluLinear.apply(h, weight, ends, forward, backward)


def experts_swiglu(
    x: Tensor, gates: Tensor, w13: Tensor, w2: Tensor, experts: Tensor, forward: str = "nvfp4-token", backward: str = "mxfp8"
) -> Tensor:
    """Same as `ref.quant.experts_swiglu`, for the formats in `kernels.gemm.FORMS`; the activation is quantised from float32."""
    expect("w2", w2, "float", "E", "D", "I")
    expect("w13", w13, "float", len(w2), 2 * w2.shape[2], w2.shape[1])
    expect("x", x, "float", "N", w2.shape[1])
    expect("gates", gates, "float", len(x), "K")
    expect("experts", experts, "int", *gates.shape)
    order, place, ends = sort_by_expert(experts, len(w13))
    h = grouped_linear(permute(x, order, place), w13, ends, forward, backward)
    return unpermute(swiglu_linear(h, w2, ends, forward, backward), order, place, gates)
