"""Challenge 5: an unbiased KL with the least error.

Eight tokens are sampled from π. You get their log-probs under π and under π_ref, in nats, and estimate KL(π‖π_ref). k1 is unbiased and
noisy; k3 is unbiased too, and better or far worse. An unbiased estimator with less error than both exists: you know the probabilities
of what you drew, and two tokens of a group may be the same one.

estimate(logp, ref_logp): two arrays [groups, 8]; return one estimate for each group, which may depend on that group alone.
Distributions are over 50 tokens, at three distances from each other; there are a hundred pairs at each, with forty groups a pair.

Score: the root mean squared error over that of the mean of k1, as the geometric mean over the three distances. Less is better. An
estimator whose mean error is not zero within five standard errors is refused, and so is one that is too high for some pairs and too low
for others.
"""


def estimate(logp, ref_logp):
    """k1, the mean over the samples."""
    return (logp - ref_logp).mean(1)
