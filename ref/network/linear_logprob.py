"""From hidden states to per-token log-probability, entropy and KL: what the head of an RL trainer is asked for.

An RL step needs of the N × V logits three numbers a token. With a vocabulary of 151,936 the logits of 8,192 tokens are
5 GB in float32, their gradient as much again. This file computes them, to be read and to be compared with;
`kernels/linear_logprob.py` gives the same numbers and never holds them: it goes over the vocabulary tile by tile with a
running maximum and sum, and once more in the backward pass.

    log p_t = z_t − log Σ e^z      ∂/∂z_v = 1[v = t] − p_v
    H = −Σ p log p                 ∂/∂z_v = −p_v (log p_v + H)
    KL(q‖p) = Σ q (log q − log p)  ∂/∂z_v = p_v − q_v                          q a teacher that is followed
    KL(p‖q) = Σ p (log p − log q)  ∂/∂z_v = p_v (log p_v − log q_v − KL)       q a reference that is not to be left

Products are computed in the dtype of their arguments, everything after them in float32 (or wider, if the arguments
are)."""

from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from ref.checks import expect

__all__ = ["linear_kl", "linear_logprob"]


def linear_logprob(
    hidden: Float[Tensor, "N D"], weight: Float[Tensor, "V D"], targets: Int[Tensor, " N"]
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
    """Log-probability of the targets, and entropy, of softmax(hidden @ weightᵀ), nats, in float32 or wider; gradients
    of both reach hidden and weight. ValueError for other shapes and dtypes, and for targets outside the vocabulary."""
    check(hidden, weight)
    expect("targets", targets, "int", len(hidden))
    if targets.numel() and not 0 <= int(targets.min()) <= int(targets.max()) < len(weight):
        raise ValueError(
            f"targets must be tokens 0 to {len(weight) - 1}, got {int(targets.min())} to {int(targets.max())}"
        )
    logp = wide_logits(hidden, weight).log_softmax(-1)  # log p = z − log Σ e^z
    # log p_t, and H = −Σ p log p
    return logp.gather(1, targets.long()[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def linear_kl(
    hidden: Float[Tensor, "N D"],
    weight: Float[Tensor, "V D"],
    other_hidden: Float[Tensor, "N C"],
    other_weight: Float[Tensor, "V C"],
    target_kind: Literal["teacher", "reference"] = "teacher",
) -> Float[Tensor, " N"]:
    """KL(q‖p) to a teacher or KL(p‖q) to a reference, p and q the softmax of hidden @ weightᵀ and of the other pair,
    nats, in float32 or wider; the other gets no gradient. ValueError for other shapes and dtypes."""
    check(hidden, weight)
    expect("other_hidden", other_hidden, "float", len(hidden), "C")
    expect("other_weight", other_weight, "float", len(weight), other_hidden.shape[1])
    if target_kind not in ("teacher", "reference"):
        raise ValueError(f"target_kind must be teacher or reference, got {target_kind!r}")
    logp = wide_logits(hidden, weight).log_softmax(-1)
    with torch.no_grad():
        logq = wide_logits(other_hidden, other_weight).log_softmax(-1)
    first, second = (logq, logp) if target_kind == "teacher" else (logp, logq)
    return (first.exp() * (first - second)).sum(-1)  # KL(first‖second)


def check(hidden: Tensor, weight: Tensor) -> None:
    expect("hidden", hidden, "float", "N", "D")
    expect("weight", weight, "float", "V", hidden.shape[1])


def wide_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    return F.linear(hidden, weight).to(torch.promote_types(hidden.dtype, torch.float32))
