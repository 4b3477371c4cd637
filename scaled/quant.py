"""Low precision on many ranks: `ref/quant.py`, which explains formats and pitfalls.

A scale per token, per 32 values or per 128 × 128 weights is computed on the rank of the row or weight, by the functions
of `ref`. Only the mixture of experts crosses ranks: rows go to the ranks that own their experts and are quantised
there, just as on one rank.

What equals `ref`, and what cannot
1. Equal on every layout: forward values and the gradients of x and gates, for scales along a row. "nvfp4-tensor" takes
   its scale from the rows on a rank: one more way in which it depends on other tokens.
2. The weights' gradients sum over tokens in blocks of 32 of an expert's rows. One ep group has all rows, in the order
   of `ref`; if several share an expert's weights (efsdp), each quantises blocks of its own rows, and the result is the
   same sum with other rounding.
"""

from jaxtyping import Float, Int
from torch import Tensor

from ref import quant as ref
from ref.checks import expect
from ref.quant import (
    FORMATS,
    Demo,
    blockwise_fp8_dequantize,
    blockwise_fp8_quantize,
    demo,
    grouped_linear,
    linear,
    mxfp8_dequantize,
    mxfp8_quantize,
    mxfp8_quantize_both,
    nvfp4_dequantize,
    nvfp4_quantize,
    rounded,
)
from scaled.network.dispatch import on_owners
from scaled.runtime.engine import fast, kernel
from scaled.runtime.mesh import current

__all__ = [
    "FORMATS",
    "Demo",
    "blockwise_fp8_dequantize",
    "blockwise_fp8_quantize",
    "demo",
    "experts_swiglu",
    "grouped_linear",
    "linear",
    "mxfp8_dequantize",
    "mxfp8_quantize",
    "mxfp8_quantize_both",
    "nvfp4_dequantize",
    "nvfp4_quantize",
    "rounded",
]


def experts_swiglu(
    x: Float[Tensor, "N D"],
    gates: Float[Tensor, "N K"],
    w13: Float[Tensor, "E J D"],
    w2: Float[Tensor, "E D I"],
    experts: Int[Tensor, "N K"],
    forward: str = "nvfp4-token",
    backward: str = "mxfp8",
) -> Float[Tensor, "N D"]:
    """`ref.quant.experts_swiglu`; x, gates and experts are of this rank's tokens, w13 and w2 of the experts it owns. On
    GPUs by `kernels/experts.py`, for the formats that it knows."""
    ep, compute_experts = current().group("ep"), ref.experts_swiglu
    has_kernel = fast(x) and forward in ("mxfp8", "nvfp4-token") and backward == "mxfp8"
    if has_kernel:
        compute_experts = kernel("experts").experts_swiglu
    if ep.size == 1:
        return compute_experts(x, gates, w13, w2, experts, forward, backward)
    expect("gates", gates, "float", len(x), "K")
    expect("experts", experts, "int", *gates.shape)
    expect("w2", w2, "float", len(w13), x.shape[1], w13.shape[1] // 2)

    def run(rows: Tensor, ones: Tensor, local: Tensor) -> Tensor:
        if not len(rows):  # zero gradients, not None: other ranks wait for them
            return rows + 0 * (w13.sum() + w2.sum())
        return compute_experts(rows, ones, w13, w2, local, forward, backward)

    def run_received(rows: Tensor, codes: Tensor, scales: Tensor, ones: Tensor, local: Tensor) -> Tensor:
        if not len(rows):
            return rows + 0 * (w13.sum() + w2.sum())
        return kernel("experts").received_swiglu(rows, codes, scales, ones, w13, w2, local, forward, backward)

    return on_owners(x, gates, experts, len(w13) * ep.size, run, run_received if has_kernel else None)
