"""The highest linear price that costs at most 0.9 points of success on the tasks that are shown."""

import numpy as np


def penalty(scales):
    best = 0.0
    for price in np.geomspace(1e-6, 1e-3, 200):
        efforts = np.maximum(0.0, -scales * np.log(np.minimum(1.0, (price + 1e-5) * scales)))
        free = -scales * np.log(1e-5 * scales)
        if (np.exp(-efforts / scales) - np.exp(-free / scales)).mean() <= 0.009:
            best = price
    return best, 0.0, 0.0
