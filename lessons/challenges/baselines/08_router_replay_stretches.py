"""Asks of each token whether its experts fit its own scores or those before it, and finds the likeliest stretch by
dynamic programming."""

import numpy as np


def compute_gaps(scores, experts):
    """How far the recorded experts lie below the two that these scores would choose."""
    return np.sort(scores, 1)[:, -2:].sum(1) - np.take_along_axis(scores, experts, 1).sum(1)


def slipped(scores, experts):
    own_gaps, previous_gaps = (
        compute_gaps(scores, experts),
        np.concatenate([[9.0], compute_gaps(scores[:-1], experts[1:])]),
    )
    wide = max(
        0.1, float(np.median(np.minimum(own_gaps, previous_gaps)) + 0.5 * np.minimum(own_gaps, previous_gaps).mean())
    )
    evidence = np.clip((own_gaps - previous_gaps) / wide, -6, 6)
    best, start, cost = (0.0, 0, 0), 0, 0.0
    for t, gain in enumerate(evidence):
        if cost <= 0:
            start, cost = t, 0.0
        cost += gain
        if cost > best[0]:
            best = cost, start, t + 1
    flags = np.zeros(len(scores), dtype=int)
    if best[0] > 8:
        flags[best[1] : best[2]] = own_gaps[best[1] : best[2]] > 0
    return flags
