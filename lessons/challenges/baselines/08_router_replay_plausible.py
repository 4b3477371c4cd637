"""The trainer's filter: an expert is implausible if its score lies far below that of the last one that the trainer
would choose."""

import numpy as np


def slipped(scores, experts):
    least = np.sort(scores, 1)[:, -2]
    return (np.take_along_axis(scores, experts, 1).min(1) < least - 1.0).astype(int)
