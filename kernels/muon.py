"""Triton kernel behind `ref.muon.newton_schulz`: products with a symmetric result, of which only half is computed.

A step of the iteration has three products. Two of them, X Xᵀ and (X Xᵀ)², are symmetric: a tile below the diagonal is
the transpose of one above it. One kernel serves both, α·A Aᵀ + β·C with C symmetric: programs below the diagonal
return, and the others write their tile twice. The library computes the third product.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ref.muon import COEFFICIENTS, normalised

from .bits import round_bfloat16
from .launch import INTERPRETED, configs, fitting, need

__all__ = ["newton_schulz", "symmetric_product"]

TILES = (
    {"BM": 32, "BK": 32},
    ({"BM": 128, "BK": 64}, 8, 3),
    ({"BM": 64, "BK": 64}, 4, 4),
    ({"BM": 128, "BK": 32}, 8, 4),
    ({"BM": 64, "BK": 128}, 4, 3),
)
PLAIN = ({"BM": 64, "BK": 32}, 4, 3), ({"BM": 32, "BK": 32}, 4, 3)


@triton.autotune(
    configs=configs(*TILES, plain=PLAIN),
    key=["M", "K", "ADD"],
    prune_configs_by=fitting("muon.symmetric_kernel", "ADD"),
)
@triton.jit
def symmetric_kernel(
    a,
    c,
    out,
    M,
    K,
    sb,
    sm,
    sk,
    alpha,
    beta,
    ADD: tl.constexpr,
    UPCAST: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
):
    """out [B, M, M] = alpha · A Aᵀ (+ beta · C), A's element (b, m, k) at b·sb + m·sm + k·sk; C and out contiguous."""
    i, j, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    if i <= j:
        m, n = i.to(tl.int64) * BM + tl.arange(0, BM), j.to(tl.int64) * BM + tl.arange(0, BM)
        y = tl.zeros((BM, BM), tl.float32)
        for begin in range(0, K, BK):
            k = begin + tl.arange(0, BK)
            x = tl.load(
                a + batch * sb + m[:, None] * sm + k[None, :] * sk, (m < M)[:, None] & (k < K)[None, :], other=0.0
            )
            z = tl.load(
                a + batch * sb + n[None, :] * sm + k[:, None] * sk, (n < M)[None, :] & (k < K)[:, None], other=0.0
            )
            if UPCAST:  # the interpreter's bfloat16 products are wrong
                x, z = x.to(tl.float32), z.to(tl.float32)
            y = tl.dot(x, z, y, input_precision="ieee")
        inside = (m < M)[:, None] & (n < M)[None, :]
        y = alpha * y
        if ADD:
            y += beta * tl.load(c + batch * M * M + m[:, None] * M + n[None, :], inside, other=0.0).to(tl.float32)
        if i == j:  # the two halves of a diagonal tile may differ in the order of their sums
            y = tl.where(m[:, None] <= n[None, :], y, tl.trans(y))
        if UPCAST and out.dtype.element_ty == tl.bfloat16:
            y = round_bfloat16(y)
        y = y.to(out.dtype.element_ty)
        tl.store(out + batch * M * M + m[:, None] * M + n[None, :], y, inside)
        if i < j:
            tl.store(
                out + batch * M * M + n[:, None] * M + m[None, :], tl.trans(y), (n < M)[:, None] & (m < M)[None, :]
            )


def symmetric_product(a: Tensor, c: Tensor | None = None, alpha: float = 1.0, beta: float = 0.0) -> Tensor:
    """alpha · a aᵀ + beta · c for a [B, M, K] and symmetric c [B, M, M], in the dtype of a: float32 or bfloat16."""
    if a.ndim != 3 or a.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"a must be float32 or bfloat16 of shape [B, M, K]; got {a.dtype} of shape {list(a.shape)}")
    B, M, K = a.shape
    if c is not None and (c.shape != (B, M, M) or c.dtype != a.dtype):
        raise ValueError(f"c must be {a.dtype} of shape {[B, M, M]}; got {c.dtype} of shape {list(c.shape)}")
    need(a)
    out = torch.empty(B, M, M, dtype=a.dtype, device=a.device)
    if out.numel():
        grid = lambda tile: (triton.cdiv(M, tile["BM"]), triton.cdiv(M, tile["BM"]), B)
        c_argument = out if c is None else c.contiguous()
        symmetric_kernel[grid](
            a, c_argument, out, M, K, *a.stride(), alpha, beta, ADD=c is not None, UPCAST=INTERPRETED
        )
    return out


def newton_schulz(G: Tensor, steps: int = 5, *, dtype: torch.dtype | None = None) -> Tensor:
    """Same as `ref.muon.newton_schulz`, iterating in float32 or bfloat16."""
    if G.ndim < 2:
        raise ValueError(f"G must have shape [*, m, n]; got {list(G.shape)}")
    need(G)
    a, b, c = COEFFICIENTS
    tall = G.shape[-2] > G.shape[-1]
    x = normalised(G.reshape(-1, *G.shape[-2:])).to(dtype or G.dtype)
    for _ in range(steps):
        gram = symmetric_product(x.mT if tall else x)
        polynomial = symmetric_product(gram, gram, c, b)
        x = torch.baddbmm(x, x, polynomial, beta=a) if tall else torch.baddbmm(x, polynomial, x, beta=a)
    return x.to(G.dtype).reshape(G.shape)
