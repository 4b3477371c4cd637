"""Tokens that the other samples show are summed exactly; the rest is estimated, around the others' mean, with k3's
control variate by distance."""

import numpy as np


def estimate(logp, ref_logp):
    """For each sample from the others alone: a weight w of r − 1, a centre c, and what they show; unbiased whatever w
    and c are."""
    n = logp.shape[1]
    k1, zero, p = logp - ref_logp, np.expm1(ref_logp - logp), np.exp(logp)
    is_same = (logp[:, :, None] == logp[:, None, :]) & (ref_logp[:, :, None] == ref_logp[:, None, :])
    is_unique = is_same.sum(2) == 1
    first = ~np.tril(is_same, -1).any(2)

    def sum_over_others(x):  # the sum over the different tokens that samples other than this one show, [groups, n]
        return (first * x).sum(1, keepdims=True) - is_unique * x

    sum_of_others = k1.sum(1, keepdims=True) - k1
    spread = ((k1**2).sum(1, keepdims=True) - k1**2 - sum_of_others**2 / (n - 1)) / (n - 2)
    spread = spread.clip(1e-9, 50)
    w = spread / np.expm1(spread)  # the best weight if log r is normal: 1 close to the reference, 0 far from it
    c = (sum_over_others(k1) + w * sum_over_others(zero)) / sum_over_others(np.ones_like(k1))
    shown_part = sum_over_others(p * k1) + w * sum_over_others(p * zero) - c * sum_over_others(p)
    return (c + shown_part + is_unique * (k1 + w * zero - c)).mean(1)
