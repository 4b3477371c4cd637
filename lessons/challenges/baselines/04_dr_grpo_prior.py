"""The mean of the others, drawn towards 0.5 as if one more rollout had earned that: a little wrong, and much less
noisy."""


def advantages(rewards, logps):
    return [reward - (rewards.sum() - reward + 0.5) / 4 for reward in rewards]
