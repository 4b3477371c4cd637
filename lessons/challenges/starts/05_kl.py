"""Challenge 5: an unbiased KL with less error than k1 and k3.

Thirty-two tokens are sampled from π. You get their log-probs under π and under π_ref, in nats, and estimate
KL(π‖π_ref). k1 is unbiased and noisy; k3 is unbiased too, far better near π_ref and worse far from it. Neither uses
what you know: the probabilities of the tokens that you drew, and that two tokens of a group with the same log-probs are
the same one.

estimate(logp, ref_logp): two arrays [groups, 32]; return one estimate for each group, which may depend on that group
alone. Distributions are over 50 tokens, at three distances from each other; there are a hundred pairs at each, with
forty groups a pair.

Score: the root mean squared error over that of the mean of k1 or of k3, whichever has less at this distance, as the
geometric mean over the three distances. Less is better. k3 scores 1 or more, and so does any choice between k1 and k3.
An estimator whose mean error is not zero within five standard errors is refused, and so is one that is too high for
some pairs and too low for others."""


def estimate(logp, ref_logp):
    """k1, the mean over the samples."""
    return (logp - ref_logp).mean(1)
