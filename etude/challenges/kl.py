"""Scorer of challenge 5: mean squared error of estimates of KL(π‖π_ref), from a few samples of distributions at three divergences.

Every group comes from distributions of its own, so that nothing can be learned from other groups. Whether an estimator is unbiased is a
question to many groups: at each divergence its mean error must lie within five standard errors of zero.
"""

from __future__ import annotations

import numpy as np

from etude.challenges import answers
from etude.challenges.solution import Solves
from kit.settings import RunError

__all__ = ["score"]

GROUPS, SAMPLES, VOCABULARY = 4000, 8, 50
MOVES = (0.1, 0.5, 1.5)
"""Standard deviation of log π_ref − log π over the vocabulary before both are normalised."""


def drawn(rng: np.random.Generator, move: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """log π and log π_ref of the samples, [GROUPS, SAMPLES] each, and the exact KL, [GROUPS], in nats."""
    logits = rng.normal(0.0, 2.0, (GROUPS, VOCABULARY))
    logp = logits - np.logaddexp.reduce(logits, 1, keepdims=True)
    moved = logits + rng.normal(0.0, move, logits.shape)
    ref_logp = moved - np.logaddexp.reduce(moved, 1, keepdims=True)
    exact = (np.exp(logp) * (logp - ref_logp)).sum(1)
    ends = np.exp(logp).cumsum(1)
    tokens = (rng.random((GROUPS, SAMPLES, 1)) * ends[:, None, -1:] > ends[:, None, :]).sum(-1)
    return np.take_along_axis(logp, tokens, 1), np.take_along_axis(ref_logp, tokens, 1), exact


def score(solution: Solves, seed: int) -> float:
    """Root mean squared error over that of the mean of k1, as the geometric mean over three divergences."""
    rng, ratios = np.random.default_rng(seed), []
    for move in MOVES:
        logp, ref_logp, exact = drawn(rng, move)
        found = answers.array("estimate", solution("estimate", logp, ref_logp), GROUPS)
        error, plain = found - exact, (logp - ref_logp).mean(1) - exact
        off, wide = error.mean(), error.std() / GROUPS**0.5
        if abs(off) > 5 * wide + 1e-9:
            raise RunError(f"estimate is biased: where π_ref is {move:g} away, its mean error is {off:+.2g} ± {wide:.1g} nats")
        ratios.append(float(np.sqrt(np.square(error).mean() / np.square(plain).mean())))
    return float(np.exp(np.log(ratios).mean()))
