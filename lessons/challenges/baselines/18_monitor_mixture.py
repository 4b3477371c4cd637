"""Shiryaev and Roberts' statistic for a mixture of five rises: the evidence of every step at which the change may have
begun, summed."""

import numpy as np


def alarms(counts, rates, rollouts):
    statistic = np.zeros(len(counts))
    for rise in (0.1, 0.16, 0.22, 0.3, 0.4):
        after = rates + rise * (1 - rates)
        gain = (
            counts * np.log(after / rates)[:, None]
            + (rollouts - counts.astype(int)) * np.log((1 - after) / (1 - rates))[:, None]
        )
        since = np.zeros(len(counts))
        for step in range(counts.shape[1]):
            since = (1 + since) * np.exp(gain[:, step].clip(-50, 50))
            since = since.clip(0, 1e30)
        statistic += since / 5
    return (statistic > 8000).astype(int)
