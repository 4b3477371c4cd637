"""Challenge 4: the least noisy advantage that stays unbiased.

A group has four rollouts. Rewards minus the mean of the others (leave-one-out) give an unbiased gradient. Three others
are a poor baseline, and some of them say more than others do. Any baseline that does not look at its own rollout is
unbiased.

advantages(rewards, logps): rewards of a group's four rollouts, and log-probs of their answers under the policy that
drew them; return four advantages. Two rollouts with the same log-prob and reward gave the same answer; a prompt has
three answers. Rewards lie near 0 and 1.

Score: the variance of the gradient in the policy's logits over that of leave-one-out, enumerated exactly, each summed
over 24 prompts. Less is better. A rule whose mean gradient is not the true one, up to one factor for all prompts, is
refused, and so is one that remembers other groups.
"""


def advantages(rewards, logps):
    """Leave-one-out."""
    return [reward - (rewards.sum() - reward) / 3 for reward in rewards]
