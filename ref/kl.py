"""KL regularisation: three estimators of KL(π‖π_ref) from sampled tokens, and what their gradients really do.

Papers: Composer 2 technical report (arXiv:2603.24477v2), §4.1 and Figure 4. The estimators are John
Schulman's ("Approximating KL divergence", 2020). What happens when they are differentiated: arXiv:2510.01555.

With tokens x ~ q = π (the policy that sampled) and r = p(x)/q(x), p = π_ref:

    KL(q‖p) = E_q[−log r]      k1 = −log r      k2 = (log r)² / 2      k3 = (r − 1) − log r

k1 and k3 are unbiased; k2 is not. k3 is never negative and has less variance than k1 while p and q are close.
But r is exponential in the log-ratio, so the variance of k3 explodes once they move apart. The report therefore
uses k1. It does not say whether k1 goes into the loss or into the reward.

The trap is the gradient. With the samples held fixed, as in a backward() through `token_kl`,

    E_q[∇k1] = 0              k1 as a loss term regularises nothing: it adds only noise
    E_q[∇k2] = ∇KL(q‖p)       right, although the *value* of k2 is biased
    E_q[∇k3] = ∇KL(p‖q)       the other KL, although the *value* of k3 is unbiased

So we put k1 in the reward, detached. There the score function gives it the right gradient, E_q[k1·∇log q] =
∇KL(q‖p). All of this needs x ~ π. Tokens of an older policy μ need the importance weight π(x)/μ(x). That weight
changes gradients even where its *value* is one, because its gradient is not zero: E_q[∇(π/μ · k3)] is
∇KL(q‖p) again, the right one.

Where this file departs from the papers
1. The report works with sequences. Here everything is per token; sum over a rollout's tokens for the
   sequence's k1 (exact, by the chain rule of probability; a sum of k3 over tokens is not the k3 of the
   sequence).
2. k3 is computed as expm1(log r) − log r. Written as r − 1 − log r, it loses every float32 digit once |log r| <
   3e-4. The remaining rounding error is a few ulp of max(|log r|, r). Nothing is clamped: k3 of a huge ratio is
   huge.
3. `exact_kl` sums over the vocabulary. The report only estimates; we have the logits and want the exact value.
4. `gaussian_oracle` adds the closed forms behind Figure 4, which the report plots without stating them.
5. The report names its estimator but not where it is applied. k1 in the reward is our choice, after
   arXiv:2510.01555.

Run it
    etude run kl --scale small      about a second; the same as: python -m ref.kl
    etude figure kl-variance        Figure 4, and what each gradient really is; three minutes, needs runs/small
    etude run kl --scale full       scaled/kl.py

Glossary
    symbol         variable              shape         where
    log π(x)       logp                  any, [B, T]   the sampled token under the policy, nats
    log π_ref(x)   ref_logp              same          the same token under the reference, nats
    log r          log_ratio             same          ref_logp − logp
    π, π_ref       logits, ref_logits    [..., V]      unnormalised log-probs, `exact_kl`
    u = m²         u                     scalar        squared distance between the two Gaussians, Figure 4
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from ref.checks import expect

__all__ = ["KINDS", "token_kl", "exact_kl", "gaussian_oracle", "crossing"]

KINDS = ("k1", "k2", "k3")


def token_kl(logp: Float[Tensor, "*shape"], ref_logp: Float[Tensor, "*shape"], kind: str) -> Float[Tensor, "*shape"]:
    """Per-token estimate of KL(π‖π_ref) in nats, for tokens sampled from π. Elementwise and differentiable.

    `kind` is "k1", "k2" or "k3". Read the trap above before you call backward() on the result: for a term in
    the reward use k1 on detached log-probs; for a term in the loss use k2.
    A token that is impossible under the reference (ref_logp = −inf) gives inf for every kind. A token that is
    impossible under the policy cannot have been sampled, and is an error.
    Raises ValueError for an unknown kind, for tensors that are not floating point or differ in shape, and for
    any other log-prob that is not finite.
    """
    expect("logp", logp, "float", *getattr(logp, "shape", ()))
    expect("ref_logp", ref_logp, "float", *logp.shape)
    if not bool(logp.isfinite().all()):
        raise ValueError("logp must be finite: a token without a finite log-prob cannot have been sampled")
    if not bool((ref_logp < math.inf).all()):
        raise ValueError("ref_logp must be finite or −inf, but some are NaN or +inf")
    log_ratio = ref_logp - logp
    if kind == "k1":
        return -log_ratio  # k1 = −log r
    if kind == "k2":
        return log_ratio.square() / 2  # k2 = (log r)² / 2
    if kind == "k3":
        return torch.expm1(log_ratio) - log_ratio  # k3 = (r − 1) − log r
    raise ValueError(f"kind must be one of {', '.join(KINDS)}; got {kind!r}")


def exact_kl(logits: Float[Tensor, "*batch V"], ref_logits: Float[Tensor, "*batch V"]) -> Float[Tensor, "*batch"]:
    """KL(π‖π_ref) in nats at each position, summed over the vocabulary, in float32 or wider.

    Tokens that π forbids (logit −inf) contribute nothing to the value or the gradient, whatever the reference
    assigns them. If π allows a token, however unlikely, that π_ref forbids, the divergence is infinite, and the
    position has no gradient.
    Raises ValueError for tensors that are not floating point or differ in shape, for an empty vocabulary, and
    for logits that do not define a distribution: NaN, +inf, or −inf for every token.
    """
    expect("logits", logits, "float", *getattr(logits, "shape", ())[:-1], "V")
    expect("ref_logits", ref_logits, "float", *logits.shape)
    allowed = [x > -math.inf for x in (logits, ref_logits)]
    for name, x, is_allowed in zip(("logits", "ref_logits"), (logits, ref_logits), allowed, strict=True):
        if not (x.shape[-1] and bool((x < math.inf).all() and is_allowed.any(-1).all())):
            raise ValueError(f"{name} must be finite or −inf, with a finite one in each row; got {list(x.shape)}")
    wide = torch.promote_types(torch.promote_types(logits.dtype, ref_logits.dtype), torch.float32)
    logp, ref_logp = logits.to(wide).log_softmax(-1), ref_logits.to(wide).log_softmax(-1)
    probs = logp.exp()
    # Decided by the logits, not by π: a token that π allows may have a probability that this dtype rounds to zero.
    infinite = allowed[0] & ~allowed[1]
    # 0·log 0 = 0. Masking both factors before they are multiplied keeps NaN out of the backward pass as well.
    is_excluded = infinite | (probs == 0)
    log_ratio = ref_logp.masked_fill(is_excluded, 0) - logp.masked_fill(is_excluded, 0)
    divergence = -(probs * log_ratio).sum(-1)  # KL(q‖p) = E_q[−log r]
    return divergence.masked_fill(infinite.any(-1), math.inf)


def gaussian_oracle(m: float) -> dict[str, tuple[float, float]]:
    """(mean, variance) of the exact KL and of k1, k2, k3, for q = N(0, 1) and p = N(m, 1); nats and nats².

    log r = m·x − m²/2 is Gaussian with mean −u/2 and variance u. Every entry follows from that. Raises
    ValueError unless m is finite.
    """
    if not math.isfinite(m):
        raise ValueError(f"m must be finite; got {m}")
    u = m * m
    return {
        "exact": (u / 2, 0.0),  # KL = u/2
        "k1": (u / 2, u),  # mean u/2, variance u
        "k2": (u / 2 + u * u / 8, u * u / 2 + u**3 / 4),  # mean u/2 + u²/8, variance u²/2 + u³/4
        "k3": (u / 2, math.expm1(u) - u if u < 700 else math.inf),  # mean u/2, variance e^u − 1 − u
    }


def crossing() -> float:
    """The KL, in nats, below which k3 has less variance than k1 on the Gaussian pair: e^u = 1 + 2u, KL = u/2
    = 0.628.

    Newton's method starts on the right, where expm1(u) − 2u is convex and increasing, so it cannot overshoot.
    """
    u = 2.0
    for _ in range(20):
        u -= (math.expm1(u) - 2 * u) / (math.exp(u) - 2)  # Newton's step for e^u = 1 + 2u
    return u / 2


@dataclass(frozen=True)
class Demo:
    """Figure 4 by sampling, and the gradient trap by enumeration."""

    divergences: tuple[float, ...] = (0.01, 0.05, 0.1, 0.25, 0.5, 0.6, 0.7, 1.0, 1.5)
    """True KLs, in nats, of the sampled Gaussian pairs."""
    samples: int = 1_000_000
    """Samples drawn for each pair."""
    vocab_size: int = 32
    """Vocabulary of the softmax pair whose three expected gradients are enumerated."""
    seed: int = 0
    """Seed of all random numbers."""


def _expected_gradients(vocab_size: int, generator: torch.Generator) -> dict[str, float]:
    """The relative distance of E_q[∇k] from ∇KL(q‖p) for each kind; exact sums, no sampling."""
    logits, ref_logits = torch.randn(2, vocab_size, dtype=torch.float64, generator=generator)
    logits.requires_grad_()
    (exact_gradient,) = torch.autograd.grad(exact_kl(logits, ref_logits), logits)
    metrics = {}
    for kind in KINDS:
        logp = logits.log_softmax(-1)
        # E_q[k], differentiated with the samples held fixed
        value = (logp.detach().exp() * token_kl(logp, ref_logits.log_softmax(-1), kind)).sum()
        (gradient,) = torch.autograd.grad(value, logits)
        metrics[f"loss_gradient_{kind}_norm"] = (gradient.norm() / exact_gradient.norm()).item()
        metrics[f"loss_gradient_{kind}_error"] = ((gradient - exact_gradient).norm() / exact_gradient.norm()).item()
    logp = logits.log_softmax(-1)
    reward = token_kl(logp, ref_logits.log_softmax(-1), "k1").detach()
    # E_q[k1 · ∇log q]
    (gradient,) = torch.autograd.grad((logp.detach().exp() * reward * logp).sum(), logits)
    return metrics | {"reward_gradient_k1_error": ((gradient - exact_gradient).norm() / exact_gradient.norm()).item()}


def demo(config: Demo = Demo(), log: Callable[..., None] = lambda *_, **__: None) -> dict[str, float]:
    """Measured bias and variance of k1, k2, k3 over a sweep of KLs, the KL at which k3 stops being better than k1, and
    the trap."""
    generator = torch.Generator().manual_seed(config.seed)
    metrics: dict[str, float] = {}
    gaps: list[tuple[float, float]] = []
    for step, kl in enumerate(config.divergences, 1):
        m = math.sqrt(2 * kl)
        # One sample in each of many equally likely strata: k3's variance depends on rare x that plain sampling misses.
        offsets = torch.rand(config.samples, dtype=torch.float64, generator=generator)
        x = torch.special.ndtri((torch.arange(config.samples) + offsets) / config.samples)
        logp, ref_logp = -x.square() / 2, -(x - m).square() / 2
        row = {}
        for kind in KINDS:
            estimate = token_kl(logp, ref_logp, kind)
            row[f"{kind}_bias"], row[f"{kind}_variance"] = estimate.mean().item() - kl, estimate.var().item()
        metrics |= {f"{name}@{kl:g}": value for name, value in row.items()}
        gaps.append((kl, math.log(row["k3_variance"] / row["k1_variance"])))
        log(step, len(config.divergences), kl=kl, **row)
    for (kl_a, gap_a), (kl_b, gap_b) in zip(gaps, gaps[1:]):
        if gap_a < 0 <= gap_b:
            metrics["crossing_measured"] = kl_a + (kl_b - kl_a) * gap_a / (gap_a - gap_b)
    return metrics | {"crossing_exact": crossing()} | _expected_gradients(config.vocab_size, generator)


if __name__ == "__main__":
    print(demo())
