"""Sends tokens to the ranks that own their experts, and the results back: the two all-to-alls of expert parallelism.

    router → sort by expert → all-to-all → own experts → all-to-all → gates · rows, at home

A dispatched row is a token's hidden state; its gate stays on the source rank and multiplies the result. By default a row is sent in the
model's compute dtype. `Compute.combine = "bf16"` returns rows in bfloat16, as the report does (Composer 2, §6.1). `Compute.dispatch = "fp8"`
sends them as E4M3 with a scale per 128 values; the report sends MXFP8, a scale per 32, in which its experts compute anyway. Gradients are
always sent in the model's dtype. The number of rows per rank is known only after the router has run; the host waits for it once per layer.

| symbol | here | shape |
|---|---|---|
| rows sent to, received from each ep rank | `send`, `receive` | ep |
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ref.quant import blockwise_fp8_dequantize, blockwise_fp8_quantize
from scaled.runtime.comm import all_to_all, moved
from scaled.runtime.mesh import current

__all__ = ["combine", "dispatch", "on_owners"]


def on_owners(x: Tensor, gates: Tensor, experts: Tensor, num_experts: int, run: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
    """Σ over a token's experts of gate times output. The rank that owns an expert computes its output as `run(rows [R, D], ones [R, 1],
    experts [R, 1])`, with experts numbered from its first one."""
    ep, K = current().group("ep"), experts.shape[1]
    flat = experts.flatten()
    order = flat.argsort(stable=True)
    # Rows for each expert of each rank. On a GPU, bincount would make the host wait, and repeat_interleave without its size, too.
    load = flat.new_zeros(num_experts).scatter_add_(0, flat, torch.ones_like(flat)).view(ep.size, -1)
    coming = torch.empty_like(load)
    torch.distributed.all_to_all_single(coming, load, group=ep.handle)
    send, receive = torch.stack((load, coming)).sum(2).tolist()
    rows = dispatch(x[order // K], send, receive)
    local = torch.arange(num_experts // ep.size, device=x.device).repeat(ep.size).repeat_interleave(coming.flatten(), output_size=sum(receive))
    y = combine(run(rows, rows.new_ones(len(rows), 1), local[:, None]), receive, send)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=x.device)
    return (y[place].view(-1, K, x.shape[1]) * gates[..., None]).sum(1)


class _Dispatch8(torch.autograd.Function):
    """Rows as E4M3 codes with a scale per 128 values, 0.516 of bfloat16's bytes; gradients come back as they are."""

    @staticmethod
    def forward(ctx, x, send, receive, group):
        ctx.splits = send, receive, group
        codes, scale = blockwise_fp8_quantize(x)
        packed = torch.cat((codes, scale.contiguous().view(torch.uint8)), 1)
        out = moved(packed, send, receive, group)
        codes, scale = out[:, : x.shape[1]], out[:, x.shape[1] :]
        # A copy: a slice with at most one row counts as contiguous at any offset, but float32 must start at a multiple of 4 bytes.
        scale = scale.clone(memory_format=torch.contiguous_format).view(torch.float32)
        return blockwise_fp8_dequantize(codes, scale).to(x.dtype)

    @staticmethod
    def backward(ctx, g):
        send, receive, group = ctx.splits
        return moved(g, receive, send, group), None, None, None


def dispatch(rows: Tensor, send: list[int], receive: list[int]) -> Tensor:
    """Sends rows, sorted by expert, to the ranks that own the experts."""
    if current().compute.dispatch == "fp8":
        return _Dispatch8.apply(rows, send, receive, current().group("ep"))
    return all_to_all(rows, send, receive, "ep")


def combine(rows: Tensor, send: list[int], receive: list[int]) -> Tensor:
    """Sends the experts' outputs back to the source ranks."""
    if current().compute.combine == "bf16":
        return all_to_all(rows.to(torch.bfloat16), send, receive, "ep").to(rows.dtype)
    return all_to_all(rows, send, receive, "ep")
