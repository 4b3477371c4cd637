"""Scorer of challenge 4: how noisy a policy gradient is under a rule for advantages, by exact enumeration.

A prompt is a policy over three answers, a softmax with a reward for each. All 3⁴ groups of four rollouts are
enumerated, so that mean and variance of the gradient are exact. A rule is unbiased if the mean gradient of every prompt
is the true one times one factor.

Variances are summed over prompts before they are divided, as they are in the gradient of a batch. A mean of ratios
would be ruled by the prompt whose leave-one-out has the least noise: where all likely answers earn the same, a baseline
that is a little off looks many times worse."""

from __future__ import annotations

import itertools

import numpy as np

from kit.settings import RunError
from lessons.challenges import answers
from lessons.challenges.solution import Solves

__all__ = ["score"]

PROMPTS, ANSWERS, ROLLOUTS = 24, 3, 4
GROUPS = np.array(list(itertools.product(range(ANSWERS), repeat=ROLLOUTS)))
"""Every group: the answer of each rollout, [81, 4]."""


def compute_moments(advantages: np.ndarray, policy: np.ndarray) -> tuple[np.ndarray, float]:
    """Mean gradient in the logits, [3], and its covariance's trace; `advantages`: those of every group, [81, 4]."""
    slopes = np.eye(ANSWERS)[GROUPS] - policy
    gradients = (advantages[..., None] * slopes).sum(1) / ROLLOUTS
    chances = policy[GROUPS].prod(1)
    mean = (chances[:, None] * gradients).sum(0)
    return mean, float((chances * np.square(gradients - mean).sum(1)).sum())


def check_consistency(
    solution: Solves, rewards: np.ndarray, policies: np.ndarray, advantages: np.ndarray, rng: np.random.Generator
) -> None:
    """Asks about some groups again, in another order, where nothing is known of the others. Raises RunError where an
    answer differs.

    rewards, policies: [PROMPTS, ANSWERS]; advantages: those of every group, [PROMPTS, 81, 4].
    """
    with solution.fresh() as fresh_solution:
        for number in rng.choice(PROMPTS * len(GROUPS), 100, replace=False):
            prompt, group = divmod(int(number), len(GROUPS))
            answer_ids = GROUPS[group]
            new_advantages = answers.array(
                "advantages",
                fresh_solution("advantages", rewards[prompt, answer_ids], np.log(policies[prompt, answer_ids])),
                ROLLOUTS,
            )
            if np.abs(new_advantages - advantages[prompt, group]).max() > 1e-9:
                raise RunError(
                    "advantages must depend on its own group alone; asked about the same group again, "
                    "it returned other numbers"
                )


def score(solution: Solves, seed: int) -> float:
    """Variance over that of leave-one-out, both summed over prompts, for a mean gradient of the true length."""
    rng = np.random.default_rng(seed)
    policies = rng.dirichlet(np.full(ANSWERS, 1.5), PROMPTS)
    rewards = (rng.random((PROMPTS, ANSWERS)) < 0.5) + rng.normal(0.0, 0.1, (PROMPTS, ANSWERS))
    rewards[:, 0], rewards[:, 1] = (
        rewards[:, 0].clip(0.8),
        rewards[:, 1].clip(None, 0.2),
    )  # something to learn in every prompt
    queries = [(prompt, group) for prompt in range(PROMPTS) for group in range(len(GROUPS))]
    advantages = np.zeros((PROMPTS, *GROUPS.shape))
    for number in rng.permutation(len(queries)):
        prompt, group = queries[number]
        answer_ids = GROUPS[group]
        inputs = rewards[prompt, answer_ids], np.log(policies[prompt, answer_ids])
        advantages[prompt, group] = answers.array("advantages", solution("advantages", *inputs), ROLLOUTS)
    check_consistency(solution, rewards, policies, advantages, rng)
    truths, means, noises, plain = [], [], [], []
    for prompt, policy in enumerate(policies):
        reward = rewards[prompt]
        truths.append(policy * (reward - policy @ reward))
        mean, noise = compute_moments(advantages[prompt], policy)
        means.append(mean)
        noises.append(noise)
        group_rewards = reward[GROUPS]
        plain.append(
            compute_moments((group_rewards - group_rewards.mean(1, keepdims=True)) * ROLLOUTS / (ROLLOUTS - 1), policy)[
                1
            ]
        )
    true, mean = np.array(truths), np.array(means)
    factor = float((true * mean).sum() / np.square(true).sum())
    if not factor > 1e-6:
        raise RunError(
            "advantages lead nowhere or downhill: the mean gradient does not point where the expected reward grows"
        )
    off = np.linalg.norm(mean / factor - true, axis=1).max() / np.linalg.norm(true, axis=1).mean()
    if off > 1e-6:
        raise RunError(
            f"advantages are biased: the mean gradient of a prompt is off by {off:.2g} of its usual "
            f"length, after one factor for all"
        )
    return float(np.sum(noises) / factor**2 / np.sum(plain))
