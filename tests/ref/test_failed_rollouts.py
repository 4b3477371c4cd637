"""What a step of RL estimates where environments fail: by enumeration of everything that can happen in small groups."""

import functools
import itertools
import math
import random
from collections import Counter, defaultdict

import pytest
import torch
from torch import nn

from ref import rl
from ref.engine.sampler import Segment
from ref.network import Config, Output, Transformer
from ref.rollout import Rollout
from ref.self_summary import Chain

THETA = (0.4, -1.1)
"""Logit of action 1, for each prompt."""
PAYS = ((0.3, 0.8), (1.0, 0.0))
"""Probability of reward 1 after each action, for each prompt."""
BUDGET = 5
FAILED = "failed"


class OneLogit(Transformer):
    """A policy of two actions, tokens 0 and 1: after prompt g, token 2 + g, it takes action 1 with probability
    1 / (1 + exp(−θ_g))."""

    def __init__(self):
        nn.Module.__init__(self)
        self.config = Config.tiny(4, num_experts=0)
        self.theta = nn.Parameter(torch.tensor(THETA, dtype=torch.float64))

    def forward(self, ids, *args, **kwargs):
        hidden = torch.cat((torch.zeros(2, dtype=torch.float64), self.theta))[ids][..., None]
        return Output(None, hidden, hidden, [], [])

    def logprob(self, hidden, targets):
        return torch.cat((torch.zeros_like(hidden), hidden), 1).log_softmax(-1).gather(1, targets[:, None])[:, 0]


MODEL = OneLogit()


def log_probability(prompt, action):
    return -math.log1p(math.exp(-THETA[prompt] if action else THETA[prompt]))


def true_gradient(prompt):
    """d/dθ of the expected reward J = p·q₁ + (1 − p)·q₀: p·(1 − p)·(q₁ − q₀)."""
    p = math.exp(log_probability(prompt, 1))
    return p * (1 - p) * (PAYS[prompt][1] - PAYS[prompt][0])


def list_outcomes(prompt):
    """(action, reward) of a rollout whose environment does not fail, with its probability."""
    for action, reward in itertools.product((0, 1), repeat=2):
        pays = PAYS[prompt][action] if reward else 1 - PAYS[prompt][action]
        if pays:
            yield (action, reward), math.exp(log_probability(prompt, action)) * pays


def make_rollout(prompt, outcome):
    """A rollout of one token; of one that failed, its action is still in the chain, and nobody may look at it."""
    action, reward = (1, None) if outcome == FAILED else outcome
    logp = torch.tensor([0.0, log_probability(prompt, action)], dtype=torch.float64)
    segment = Segment(
        torch.tensor([2 + prompt, action]),
        torch.tensor([False, True]),
        logp,
        torch.tensor([-1, 0]),
        torch.zeros(1, 0, 2, dtype=torch.int16),
        True,
    )
    chain = Chain([segment], finished=True)
    return Rollout(chain, failure="killed") if outcome == FAILED else Rollout(chain, {"tests": float(reward)})


def mask(rollouts):
    """What the loop does."""
    return rollouts


def pay_nothing(rollouts):
    """The usual mistake: an environment that failed is a policy that failed."""
    return [Rollout(rollout.chain, {"tests": 0.0}) if rollout.failure else rollout for rollout in rollouts]


def count_orders(group):
    return math.factorial(len(group)) // math.prod(map(math.factorial, Counter(group).values()))


@functools.cache
def expected_gradients(variant, groups, size, treat=mask):
    """{(m_1, …): E[gradient | m_g valid rollouts in group g]}, [prompts] each, for the objective that is maximised.
    Everything that can happen in a group is played through `rl.improve`: outcomes and failures, in an order that is
    drawn, with the number of orders as a factor of the probability. A failure has probability ½ here, whatever else
    happens, which the condition removes."""
    c = rl.Settings(variant=variant, prompts=groups, rollouts=size, budget_tokens=BUDGET)
    sums, weights = defaultdict(lambda: torch.zeros(2, dtype=torch.float64)), defaultdict(float)
    draw = random.Random(0)
    options = [[*((one, p / 2) for one, p in list_outcomes(prompt)), (FAILED, 0.5)] for prompt in range(groups)]
    for chosen in itertools.product(*(itertools.combinations_with_replacement(rows, size) for rows in options)):
        valid_counts = tuple(sum(one != FAILED for one, _ in group) for group in chosen)
        if not sum(valid_counts):
            continue
        rollouts = [
            make_rollout(prompt, one) for prompt, group in enumerate(chosen) for one, _ in draw.sample(group, size)
        ]
        (gradient,) = rl.improve(c, MODEL, None, treat(rollouts)).gradients
        probability = math.prod(p for group in chosen for _, p in group) * math.prod(map(count_orders, chosen))
        weights[valid_counts] += probability
        sums[valid_counts] -= probability * gradient
    return {counts: sums[counts] / weights[counts] for counts in sums}


def formula(variant, valid_counts):
    """E[gradient | m] = 1/(M·budget) Σ_g k(m_g) ∇J_g, where M = Σ_g m_g, and k(m) = m − 1 for Dr. GRPO, whose mean
    holds the rollout itself, and m for RLOO; 0 for m ≤ 1, where there is nobody to compare with."""
    factors = [0 if m < 2 else m if variant == "rloo" else m - 1 for m in valid_counts]
    scale = sum(valid_counts) * BUDGET
    gradients = [k * true_gradient(prompt) / scale for prompt, k in enumerate(factors)]
    return torch.tensor(gradients + [0.0] * (2 - len(gradients)), dtype=torch.float64)


@pytest.mark.parametrize(
    ("variant", "groups", "size"), [("dr-grpo", 1, 2), ("dr-grpo", 1, 4), ("rloo", 1, 3), ("dr-grpo", 2, 2)]
)
def test_masked_rollouts_leave_the_gradient_of_those_that_are_left(variant, groups, size):
    """With failures that do not depend on the outcome, the expected gradient, given that m_g rollouts of group g are
    valid, is that of a step whose groups had m_g rollouts from the start, and none of which failed:

        E[gradient | m] = 1/(M·budget) Σ_g k(m_g) ∇J_g            (`formula`)

    For one group of Dr. GRPO it is (m − 1)/m · ∇J / budget: the true gradient, with the factor that Dr. GRPO has for a
    group of m anyway (`ref/dr_grpo.py`, departure 1). A group with one valid rollout has A = 0. Exact in float64, for
    `scaled.rl.improve` too, which is the same for any pattern of failures (tests/mirror/test_rl.py)."""
    found = expected_gradients(variant, groups, size)
    assert len(found) == (size + 1) ** groups - 1
    for valid_counts, gradient in found.items():
        torch.testing.assert_close(gradient, formula(variant, valid_counts), rtol=0, atol=1e-14)


def test_failures_as_frequent_in_both_groups_leave_the_direction():
    """Two prompts with the same rate f of failures: E[gradient] over all steps with a valid rollout is a multiple of
    ∇J_1 + ∇J_2, as without failures."""
    found, rate, size = expected_gradients("dr-grpo", 2, 2), 0.3, 2
    weights = {
        counts: math.prod(math.comb(size, m) * (1 - rate) ** m * rate ** (size - m) for m in counts) for counts in found
    }
    gradient = sum(weights[counts] * found[counts] for counts in found)
    ratios = gradient / torch.tensor([true_gradient(prompt) for prompt in range(2)], dtype=torch.float64)
    assert ratios[0] > 0 and float(ratios[0] - ratios[1]) == pytest.approx(0, abs=1e-14)


@pytest.mark.parametrize(("variant", "groups", "size"), [("dr-grpo", 1, 2), ("dr-grpo", 1, 4), ("rloo", 1, 3)])
def test_a_reward_of_zero_for_failures_is_another_gradient(variant, groups, size):
    """What the enumeration is worth: it sees the usual mistake in every group that has lost a rollout and still has
    two, and nowhere else."""
    wrong = expected_gradients(variant, groups, size, pay_nothing)
    for valid_counts, gradient in wrong.items():
        is_same = torch.allclose(gradient, formula(variant, valid_counts), rtol=0, atol=1e-6)
        assert is_same == (valid_counts == (size,) * groups), valid_counts
