"""Estimates every way from its rollouts, plays the training with 216 prices, and takes those that gain most."""

import itertools

import numpy as np

GRID = np.array(list(itertools.product((0, 0.01, 0.02, 0.04, 0.08, 0.16), repeat=3)))


def train(policy, rewards):
    logits = np.log(policy)
    for _ in range(60):
        policy = np.exp(logits - logits.max(-1, keepdims=True))
        policy /= policy.sum(-1, keepdims=True)
        logits = logits + 2 * policy * (rewards - (policy * rewards).sum(-1, keepdims=True))
    return policy


def prices(ways, success, habits):
    counts = np.bincount(ways, minlength=8)
    policy = (counts + 1) / (counts + 1).sum()
    wins = (np.bincount(ways, weights=success, minlength=8) + success.mean()) / (counts + 1)
    habit_rates = np.stack(
        [np.bincount(ways, weights=habits[:, j], minlength=8) / np.maximum(counts, 1) for j in range(3)], 1
    )
    after = train(np.tile(policy, (len(GRID), 1)), wins - GRID @ habit_rates.T)
    gained = (1 - after @ habit_rates / (after[0] @ habit_rates)).mean(1) - 5 * (after[0] - after) @ wins
    return GRID[gained.argmax()]
