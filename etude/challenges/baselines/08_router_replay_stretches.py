"""Asks of each token whether its experts fit its own scores or those before it, and finds the likeliest stretch by dynamic programming."""

import numpy as np


def gaps(scores, experts):
    """How far the recorded experts lie below the two that these scores would choose."""
    return np.sort(scores, 1)[:, -2:].sum(1) - np.take_along_axis(scores, experts, 1).sum(1)


def slipped(scores, experts):
    here, before = gaps(scores, experts), np.concatenate([[9.0], gaps(scores[:-1], experts[1:])])
    wide = max(0.1, float(np.median(np.minimum(here, before)) + 0.5 * np.minimum(here, before).mean()))
    evidence = np.clip((here - before) / wide, -6, 6)
    best, start, cost = (0.0, 0, 0), 0, 0.0
    for t, gain in enumerate(evidence):
        if cost <= 0:
            start, cost = t, 0.0
        cost += gain
        if cost > best[0]:
            best = cost, start, t + 1
    found = np.zeros(len(scores), dtype=int)
    if best[0] > 8:
        found[best[1] : best[2]] = here[best[1] : best[2]] > 0
    return found
