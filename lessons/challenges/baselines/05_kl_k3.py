"""k3 as it is: about the best of what looks at one sample at a time, close to the reference."""

import numpy as np


def estimate(logp, ref_logp):
    return (logp - ref_logp + np.expm1(ref_logp - logp)).mean(1)
