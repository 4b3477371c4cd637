"""When a kernel's numbers count as correct: the rule that its tests and its benchmark share."""

import torch
from torch import Tensor

__all__ = ["excess", "compute_missing_share", "same_bits"]

HOPPER_MISSING_SHARE = 4 * 2.0**-13
"""Hopper's tensor cores keep 14 bits of a sum of FP8 products (DeepSeek-V3, arXiv:2412.19437, §3.5.2), and 128 of them,
after which our kernels go on in float32, are four instructions. So this share of Σ|a b| may be missing. An H100 lost up
to 3.2 · 2⁻¹³ in float32; a bfloat16 hides it."""


def compute_missing_share(form: str, x: Tensor) -> float:
    """The share of Σ|a b| that a product of this form may lose on x's device, whatever the kernel:
    `HOPPER_MISSING_SHARE` for FP8 on Hopper, else 0."""
    return (
        HOPPER_MISSING_SHARE
        if form == "fp8" and x.is_cuda and torch.cuda.get_device_capability(x.device) == (9, 0)
        else 0.0
    )


def excess(actual: Tensor, expected: Tensor, exact: Tensor, missing: float = 0.0) -> float:
    """Three-way comparison: the kernel's largest error over the allowed error; up to 1 is correct. Allowed is twice the
    reference's error plus half an ulp of the largest number, since the reference may happen to be exact, and what the
    hardware may leave out (`missing`, in the units of the result). `exact` is float64; `actual` and `expected` have the
    same dtype; all have the same shape. A NaN in any of them gives infinite excess."""
    if (
        actual.dtype != expected.dtype
        or not actual.shape == expected.shape == exact.shape
        or exact.dtype != torch.float64
    ):
        shapes = ", ".join(f"{t.dtype} {list(t.shape)}" for t in (actual, expected, exact))
        raise ValueError(
            f"actual, expected and exact must have one shape, the first two one dtype, the last float64; got {shapes}"
        )
    if not exact.numel():
        return 0.0
    place = torch.finfo(actual.dtype).eps / 2 * exact.detach().abs().max()
    actual, expected, exact = (t.detach().double().to(exact.device) for t in (actual, expected, exact))
    error, allowed = (actual - exact).abs().max(), 2 * (expected - exact).abs().max() + place + missing
    if not bool(torch.isfinite(error + allowed)):
        return float("inf")
    return float(error / allowed) if allowed else float("inf") if error else 0.0


def same_bits(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
    """Whether codes and scales agree in every bit; NaNs count as equal whatever their sign."""
    for a, b in zip(actual, expected, strict=True):
        a, b = a.cpu(), b.cpu()
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        if a.dtype == torch.uint8:
            # 0x7f and 0xff are both NaN as values, and a NaN scale is always 0xff.
            nan = ((a & 0x7F) == 0x7F) & ((b & 0x7F) == 0x7F)
        else:
            nan = a.isnan() & b.isnan()
            a, b = (t.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()]) for t in (a, b))
        if not torch.equal(a.masked_fill(nan, 0), b.masked_fill(nan, 0)):
            return False
    return True
