"""Scorer of challenge 5: mean squared error of estimates of KL(π‖π_ref), from a few samples of distributions at three
divergences.

k3 is far better than k1 near the reference, and worse far from it. An estimate is therefore compared with the better of
the two at each divergence: neither of them passes, nor does a choice between them.

Whether an estimator is unbiased is a question to many groups of the same distributions. At each divergence there are a
hundred pairs of them with forty groups each: the mean error over all groups must lie within five standard errors of
zero, and so must what the errors of the pairs have beyond their own noise, since a constant is right in the mean and
wrong for each pair. Groups are shuffled, and some are asked about again in another interpreter, in other company and
alone: an estimate may depend on its own group only.
"""

from __future__ import annotations

import numpy as np

from kit.settings import RunError
from lessons.challenges import answers
from lessons.challenges.solution import Solves

__all__ = ["score"]

PAIRS, GROUPS, SAMPLES, VOCABULARY = 100, 40, 32, 50
MOVES = (0.1, 0.5, 1.5)
"""Standard deviation of log π_ref − log π over the vocabulary before both are normalised."""
REPEAT_SIZES = (200, 50, *[1] * 10)
"""Sizes of the batches in which groups are asked about again."""
NEAR = 1e-5
"""How far the answers about one group may differ, in nats: what float32 rounds away."""


def draw_samples(rng: np.random.Generator, move: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """log π and log π_ref of the samples, [PAIRS, GROUPS, SAMPLES] each, and the exact KL of each pair, [PAIRS, 1], in
    nats."""
    logits = rng.normal(0.0, 2.0, (PAIRS, VOCABULARY))
    logp = logits - np.logaddexp.reduce(logits, 1, keepdims=True)
    moved = logits + rng.normal(0.0, move, logits.shape)
    ref_logp = moved - np.logaddexp.reduce(moved, 1, keepdims=True)
    exact = (np.exp(logp) * (logp - ref_logp)).sum(1, keepdims=True)
    ends = np.exp(logp).cumsum(1)
    tokens = (rng.random((PAIRS, GROUPS * SAMPLES, 1)) * ends[:, None, -1:] > ends[:, None, :]).sum(-1)
    sample_logp, sample_ref_logp = (
        np.take_along_axis(token_logp, tokens, 1).reshape(PAIRS, GROUPS, SAMPLES) for token_logp in (logp, ref_logp)
    )
    return sample_logp, sample_ref_logp, exact


def score(solution: Solves, seed: int) -> float:
    """Root mean squared error over that of the mean of k1 or k3, whichever is less, as the geometric mean over three
    divergences."""
    rng, ratios, queries, estimates = np.random.default_rng(seed), [], [], []
    for move in MOVES:
        logp, ref_logp, exact = draw_samples(rng, move)
        order = rng.permutation(PAIRS * GROUPS)
        queries.append(np.stack([logps.reshape(-1, SAMPLES)[order] for logps in (logp, ref_logp)]))
        estimates.append(answers.array("estimate", solution("estimate", *queries[-1]), len(order)))
        unpermuted = np.zeros(len(order))
        unpermuted[order] = estimates[-1]
        error, k1 = unpermuted.reshape(PAIRS, GROUPS) - exact, logp - ref_logp
        check_bias(error, move)
        plain = min(np.square(estimate.mean(-1) - exact).mean() for estimate in (k1, k1 + np.expm1(-k1)))
        ratios.append(float(np.sqrt(np.square(error).mean() / plain)))
    check_consistency(solution, rng, np.concatenate(queries, 1), np.concatenate(estimates))
    return float(np.exp(np.log(np.maximum(ratios, 1e-9)).mean()))


def check_bias(error: np.ndarray, move: float) -> None:
    """Raises RunError unless the errors [PAIRS, GROUPS] have zero mean, all together and for each pair."""
    means, noise = error.mean(1), error.var(1, ddof=1) / GROUPS  # noise: the variance of each mean, were it zero
    off, wide = means.mean(), noise.sum() ** 0.5 / PAIRS
    if abs(off) > 5 * wide + 1e-9:
        raise RunError(
            f"estimate is biased: where π_ref is {move:g} away, its mean error is {off:+.2g} ± {wide:.1g} nats"
        )
    beyond, wide = np.square(means).sum() - noise.sum(), (2 * np.square(noise).sum()) ** 0.5
    if beyond > 5 * wide + PAIRS * 1e-18:
        usual_bias = float(np.sqrt(beyond / PAIRS))
        raise RunError(
            f"estimate is biased: where π_ref is {move:g} away, it is off by {usual_bias:.2g} nats for "
            f"the usual pair, high here and low there"
        )


def check_consistency(solution: Solves, rng: np.random.Generator, queries: np.ndarray, estimates: np.ndarray) -> None:
    """Raises RunError where an estimate depends on other groups. queries: [2, groups, SAMPLES]; estimates: [groups]."""
    batches = np.split(rng.choice(len(estimates), sum(REPEAT_SIZES), replace=False), np.cumsum(REPEAT_SIZES)[:-1])
    with solution.fresh() as fresh_solution:
        for batch in reversed(batches):  # alone first, when it knows nothing yet
            new_estimates = answers.array("estimate", fresh_solution("estimate", *queries[:, batch]), len(batch))
            if np.abs(new_estimates - estimates[batch]).max() > NEAR:
                raise RunError(
                    "estimate must depend on its own group alone; asked about the same groups in "
                    "another batch, it returned other numbers"
                )
