"""Sends tokens to the ranks that own their experts, and the results back: the two all-to-alls of expert parallelism.

    router → sort by expert → all-to-all → own experts → all-to-all → gates · rows, at home

A dispatched row is a token's hidden state; its gate stays on the source rank and multiplies the result. By default a
row is sent in the model's compute dtype. `Compute.combine = "bf16"` returns rows in bfloat16, as the report does
(Composer 2, §6.1). `Compute.dispatch = "mxfp8"` sends them as the report does, as MXFP8, in which its experts compute
anyway: a token is quantised once, for all its experts, and on GPUs the bytes go into the experts' product as they came.
Quantising rows commutes with permuting them, so an MXFP8 product has the bits that it has if rows are quantised on
arrival. `"fp8"` has a scale per 128 values instead. Gradients are always sent in the model's dtype. The number of rows
per rank is known only after the router has run; the host waits for it once per layer.

| symbol | here | shape |
|---|---|---|
| rows sent to, received from each ep rank | `send`, `receive` | ep |
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ref.quant import blockwise_fp8_dequantize, blockwise_fp8_quantize, mxfp8_dequantize, mxfp8_quantize
from scaled.runtime.comm import all_to_all, moved
from scaled.runtime.engine import fast, kernel
from scaled.runtime.mesh import Group, current

__all__ = ["combine", "dispatch", "on_owners"]


def on_owners(
    x: Tensor,
    gates: Tensor,
    experts: Tensor,
    num_experts: int,
    run: Callable[[Tensor, Tensor, Tensor], Tensor],
    received: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor] | None = None,
) -> Tensor:
    """Σ over a token's experts of gate times output. The rank that owns an expert computes its output as `run(rows [R,
    D], ones [R, 1], experts [R, 1])`, with experts numbered from its first one. If rows are sent as MXFP8, and
    `received` is given, it is `received(rows, codes [R, D], scales [R, D / 32], ones, experts)`, where rows only take
    the gradient: their values are not there. On GPUs, tokens are sorted, permuted and summed by
    `kernels/expert_rows.py`."""
    ep, K = current().group("ep"), experts.shape[1]
    flat_experts, row_kernel = experts.flatten(), None
    if fast(x) and x.dtype in (torch.float32, torch.bfloat16):
        row_kernel = kernel("expert_rows")
        order, place, _ = row_kernel.sort_by_expert(experts, num_experts)
    else:
        order = flat_experts.argsort(stable=True)
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=x.device)
        place = place.view(-1, K)
    # Rows for each expert of each rank. On a GPU, bincount would make the host wait, and repeat_interleave without its
    # size, too.
    load = (
        flat_experts.new_zeros(num_experts)
        .scatter_add_(0, flat_experts, torch.ones_like(flat_experts))
        .view(ep.size, -1)
    )
    incoming_load = torch.empty_like(load)
    torch.distributed.all_to_all_single(incoming_load, load, group=ep.handle)
    send, receive = torch.stack((load, incoming_load)).sum(2).tolist()
    local = (
        torch.arange(num_experts // ep.size, device=x.device)
        .repeat(ep.size)
        .repeat_interleave(incoming_load.flatten(), output_size=sum(receive))
    )
    if current().compute.dispatch == "mxfp8":
        rows, codes, scales = _DispatchMXFP8.apply(x, order, place, send, receive, ep, received is None)
        if received is None:
            y = run(rows, rows.new_ones(len(rows), 1), local[:, None])
        else:
            y = received(rows, codes, scales, rows.new_ones(len(rows), 1), local[:, None])
    else:
        rows = dispatch(row_kernel.permute(x, order, place) if row_kernel else x[order // K], send, receive)
        y = run(rows, rows.new_ones(len(rows), 1), local[:, None])
    y = combine(y, receive, send)
    # Σ over a token's experts of gate · output.
    if row_kernel:
        return row_kernel.unpermute(y, order, place, gates)
    return (y[place] * gates[..., None]).sum(1)


class _DispatchMXFP8(torch.autograd.Function):
    """Tokens as E4M3 codes and a scale per 32 values, 0.516 of bfloat16's bytes, quantised once and then permuted.
    Returns codes and scales, and rows: the decoded values, or with `decoded=False` a view of nothing that has their
    shape and dtype. Gradients come back as they are."""

    @staticmethod
    def forward(
        ctx, x: Tensor, order: Tensor, place: Tensor, send: list[int], receive: list[int], group: Group, decoded: bool
    ):
        ctx.splits = send, receive, group
        ctx.save_for_backward(place)
        codes, scales = (kernel("quant").mxfp8_quantize if fast(x) else mxfp8_quantize)(x)
        out = moved(torch.cat((codes, scales), 1)[order // place.shape[1]], send, receive, group)
        codes, scales = out[:, : x.shape[1]], out[:, x.shape[1] :]
        rows = mxfp8_dequantize(codes, scales).to(x.dtype) if decoded else x.new_zeros(1, 1).expand(codes.shape)
        ctx.mark_non_differentiable(codes, scales)
        return rows, codes, scales

    @staticmethod
    def backward(ctx, g, *_):
        # Plain form: rows = rounded(x)[order // K]; test_network.py::test_dispatch_from_ranks_without_a_token.
        send, receive, group = ctx.splits
        (place,) = ctx.saved_tensors
        rows = moved(g, receive, send, group)
        wide_dtype = torch.promote_types(rows.dtype, torch.float32)
        return rows[place].to(wide_dtype).sum(1).to(rows.dtype), None, None, None, None, None, None


class _DispatchFP8(torch.autograd.Function):
    """Rows as E4M3 codes with a scale per 128 values, 0.516 of bfloat16's bytes; gradients come back as they are."""

    @staticmethod
    def forward(ctx, x, send, receive, group):
        ctx.splits = send, receive, group
        codes, scale = blockwise_fp8_quantize(x)
        packed_rows = torch.cat((codes, scale.contiguous().view(torch.uint8)), 1)
        out = moved(packed_rows, send, receive, group)
        codes, scale = out[:, : x.shape[1]], out[:, x.shape[1] :]
        # A copy: a slice with at most one row counts as contiguous at any offset, but float32 must start at a multiple
        # of 4 bytes.
        scale = scale.clone(memory_format=torch.contiguous_format).view(torch.float32)
        return blockwise_fp8_dequantize(codes, scale).to(x.dtype)

    @staticmethod
    def backward(ctx, g):
        # Plain form: rounded(x), straight through; test_network.py::test_dispatch_from_ranks_without_a_token.
        send, receive, group = ctx.splits
        return moved(g, receive, send, group), None, None, None


def dispatch(rows: Tensor, send: list[int], receive: list[int]) -> Tensor:
    """Sends rows, sorted by expert, to the ranks that own the experts."""
    if current().compute.dispatch == "fp8":
        return _DispatchFP8.apply(rows, send, receive, current().group("ep"))
    return all_to_all(rows, send, receive, "ep")


def combine(rows: Tensor, send: list[int], receive: list[int]) -> Tensor:
    """Sends the experts' outputs back to the source ranks."""
    if current().compute.combine == "bf16":
        return all_to_all(rows.to(torch.bfloat16), send, receive, "ep").to(rows.dtype)
    return all_to_all(rows, send, receive, "ep")
