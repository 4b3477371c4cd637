"""Page's cumulative sum: the evidence for a rate that is a quarter of the way to one, since the step at which it began
to pay."""

import numpy as np


def alarms(counts, rates, rollouts):
    after = rates + 0.18 * (1 - rates)
    gain = (
        counts * np.log(after / rates)[:, None]
        + (rollouts - counts.astype(int)) * np.log((1 - after) / (1 - rates))[:, None]
    )
    best = np.zeros(len(counts))
    highest = np.zeros(len(counts))
    for step in range(counts.shape[1]):
        best = np.maximum(0.0, best) + gain[:, step]
        highest = np.maximum(highest, best)
    return (highest > 7.6).astype(int)
