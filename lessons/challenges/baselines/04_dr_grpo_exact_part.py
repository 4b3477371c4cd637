"""The others' answers are weighted by their known probabilities instead of being counted; what they do not show is
believed to earn 0.5."""

import math


def advantages(rewards, logps):
    values = []
    for i in range(4):
        reward_of = {float(logps[j]): float(rewards[j]) for j in range(4) if j != i}
        share = sum(map(math.exp, reward_of))
        values.append(
            rewards[i] - sum(math.exp(logp) * reward for logp, reward in reward_of.items()) - 0.5 * (1 - share)
        )
    return values
