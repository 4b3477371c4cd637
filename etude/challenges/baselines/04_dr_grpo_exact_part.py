"""The others' answers are weighted by their known probabilities instead of being counted; what they do not show is believed to earn 0.5."""

import math


def advantages(rewards, logps):
    found = []
    for i in range(4):
        seen = {float(logps[j]): float(rewards[j]) for j in range(4) if j != i}
        share = sum(map(math.exp, seen))
        found.append(rewards[i] - sum(math.exp(logp) * reward for logp, reward in seen.items()) - 0.5 * (1 - share))
    return found
