"""Tokens that the other samples show are summed exactly, with their known probabilities; only the rest is estimated, by k3."""

import numpy as np


def estimate(logp, ref_logp):
    groups, n = logp.shape
    k3 = logp - ref_logp + np.expm1(ref_logp - logp)
    share = np.exp(logp) * k3
    found = np.zeros(groups)
    for i in range(n):
        others = [j for j in range(n) if j != i]
        seen = np.zeros(groups)
        for place, j in enumerate(others):
            new = np.all(logp[:, others[:place]] != logp[:, j : j + 1], axis=1) if place else np.ones(groups, bool)
            seen += np.where(new, share[:, j], 0.0)
        unseen = np.all(logp[:, others] != logp[:, i : i + 1], axis=1)
        found += seen + np.where(unseen, k3[:, i], 0.0)
    return found / n
