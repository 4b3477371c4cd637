"""Signs and sizes by hand, sums over micro-batches, what the mask hides, and the exact expected gradient."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ref import dr_grpo
from ref.dr_grpo import group_advantages, policy_loss, ratio_statistics

INF, NAN = math.inf, math.nan


def double(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_advantages_by_hand():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 0.0]])
    want = torch.tensor([[0.5, -0.5, -0.5, 0.5], [0.25, 0.25, 0.25, -0.75]])
    assert torch.equal(group_advantages(rewards), want)


@given(
    value=st.floats(-1e6, 1e6, width=32),
    n=st.integers(1, 33),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
@settings(deadline=None)
def test_a_group_of_equal_rewards_has_advantage_exactly_zero(value, n, dtype):
    assert (group_advantages(torch.full((2, n), value, dtype=dtype)) == 0).all()


def test_the_plain_mean_would_not_be_exact():
    rewards = double(0.1, 0.1, 0.1)
    assert rewards.sum() / 3 != 0.1
    assert (group_advantages(rewards[None]) == 0).all()


@given(st.integers(1, 5), st.integers(1, 9), st.integers(0, 2**31))
@settings(max_examples=40, deadline=None)
def test_advantages_sum_to_zero_ignore_shifts_and_keep_scale(G, N, seed):
    rewards = torch.randn(G, N, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    advantages = group_advantages(rewards)
    torch.testing.assert_close(advantages.sum(1), torch.zeros(G, dtype=torch.float64), rtol=0, atol=1e-12)
    torch.testing.assert_close(group_advantages(rewards + torch.arange(G)[:, None]), advantages)
    # A division by the standard deviation would make this the same advantage, not a thousandth of it.
    torch.testing.assert_close(group_advantages(rewards / 1000), advantages / 1000)


def test_groups_without_prompts_are_empty_and_unknown_baselines_are_errors():
    assert group_advantages(torch.zeros(0, 4)).shape == (0, 4)
    with pytest.raises(ValueError, match="mean"):
        group_advantages(torch.zeros(1, 2), baseline="median")


CASES = {
    "on policy, good": (1.0, 2.0, -2.0, -2.0),
    "on policy, bad": (1.0, -2.0, 2.0, 2.0),
    "good and already likelier: stop": (1.5, 1.0, -1.2, 0.0),
    "good and less likely: push": (0.5, 1.0, -0.5, -0.5),
    "bad and already less likely: stop": (0.5, -1.0, 0.8, 0.0),
    "bad and likelier: push, unclipped": (1.5, -1.0, 1.5, 1.5),
    "no advantage": (3.0, 0.0, 0.0, 0.0),
}


@pytest.mark.parametrize("ratio, advantage, value, slope", CASES.values(), ids=CASES.keys())
def test_one_token_by_hand(ratio, advantage, value, slope):
    logp = double([math.log(ratio) - 1]).requires_grad_()
    ones = torch.ones(1, 1, dtype=torch.bool)
    loss = policy_loss(logp, double([-1.0]), double(advantage), ones, budget=1)
    loss.backward()
    assert loss.item() == pytest.approx(value, abs=1e-15)
    assert logp.grad.item() == pytest.approx(slope, abs=1e-15)


@pytest.mark.parametrize(
    "ratio, advantage, low, high, value",
    [(1.5, 1.0, 0.2, 0.28, -1.28), (1.5, 1.0, 0.2, INF, -1.5), (0.5, -1.0, 0.3, 0.2, 0.7),
     (0.01, -1.0, INF, 0.2, 0.01), (0.01, -1.0, 1.0, 0.2, 0.01), (1.0, 1.0, 0.0, 0.0, -1.0)],
)  # fmt: skip
def test_each_side_of_the_clip_is_its_own(ratio, advantage, low, high, value):
    ones = torch.ones(1, 1, dtype=torch.bool)
    logp = double([math.log(ratio)])
    loss = policy_loss(logp, double([0.0]), double(advantage), ones, budget=1, clip_low=low, clip_high=high)
    assert loss.item() == pytest.approx(value, rel=1e-14)


@given(seed=st.integers(0, 2**31), B=st.integers(0, 5), T=st.integers(0, 7), low=st.floats(0.01, 0.9))
@settings(max_examples=60, deadline=None)
def test_value_and_gradient_are_those_of_the_published_surrogate(seed, B, T, low):
    generator = torch.Generator().manual_seed(seed)
    logp, behavior = -torch.rand(2, B, T, dtype=torch.float64, generator=generator)
    advantages = torch.randn(B, dtype=torch.float64, generator=generator)
    mask = torch.rand(B, T, generator=generator) < 0.7
    results = []
    for published in (True, False):
        x = logp.clone().requires_grad_()
        if published:
            ratio, A = (x - behavior).exp(), advantages[:, None]
            loss = -(torch.minimum(ratio * A, ratio.clamp(1 - low, 1.3) * A) * mask).sum() / 17
        else:
            loss = policy_loss(x, behavior, advantages, mask, budget=17, clip_low=low, clip_high=0.3)
        results.append((loss.detach(), torch.autograd.grad(loss, x)[0]))
    for got, want in zip(*results):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)


def test_a_long_rollout_weighs_every_token_like_a_short_one():
    logp = torch.zeros(2, 5, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 0, 0, 0, 0]], dtype=torch.bool)
    policy_loss(logp, torch.zeros_like(logp), double(-1.0, -1.0), mask, budget=10).backward()
    torch.testing.assert_close(logp.grad, mask.double() / 10)


def batch(seed, B=6, T=5):
    generator = torch.Generator().manual_seed(seed)
    logp, behavior = -torch.rand(2, B, T, dtype=torch.float64, generator=generator) * 2
    mask = torch.rand(B, T, generator=generator) < 0.6
    return logp, behavior, torch.randn(B, dtype=torch.float64, generator=generator), mask


@given(seed=st.integers(0, 2**31), cuts=st.sets(st.integers(1, 5)))
@settings(max_examples=40, deadline=None)
def test_micro_batches_with_one_budget_add_up_to_the_whole(seed, cuts):
    tensors = batch(seed)
    whole = tensors[0].clone().requires_grad_()
    loss = policy_loss(whole, *tensors[1:], budget=30)
    loss.backward()
    parts, total = tensors[0].clone().requires_grad_(), 0.0
    edges = [0, *sorted(cuts), 6]
    for start, end in itertools.pairwise(edges):
        piece = policy_loss(parts[start:end], *(t[start:end] for t in tensors[1:]), budget=30)
        piece.backward()
        total += piece.item()
    assert total == pytest.approx(loss.item(), rel=1e-12, abs=1e-14)
    assert torch.equal(parts.grad, whole.grad)


@given(seed=st.integers(0, 2**31), pad=st.integers(0, 4), junk=st.sampled_from([0.0, NAN, INF, -INF, -1e30]))
@settings(max_examples=60, deadline=None)
def test_what_the_mask_hides_contributes_nothing_at_all(seed, pad, junk):
    logp, behavior, advantages, mask = batch(seed)
    advantages[2], mask[2] = NAN, False
    clean = [logp.masked_fill(~mask, 0).requires_grad_(), behavior.masked_fill(~mask, 0)]
    want = policy_loss(*clean, advantages, mask, budget=30)
    want.backward()

    def padded(x, fill):
        return torch.cat([x, torch.full((6, pad), fill, dtype=x.dtype)], 1)

    wide = padded(mask, False)
    dirty = [padded(x, 0.0).masked_fill(~wide, junk) for x in (logp, behavior)]
    dirty[0].requires_grad_()
    got = policy_loss(*dirty, advantages, wide, budget=30)
    got.backward()
    assert got.item() == pytest.approx(want.item(), rel=1e-13, abs=1e-15)
    assert torch.equal(dirty[0].grad[:, :5], clean[0].grad)
    assert (dirty[0].grad[~wide] == 0).all()
    statistics = ratio_statistics(dirty[0], dirty[1], advantages, wide, n_tokens=10)
    assert all(value.isfinite() and not value.requires_grad for value in statistics.values())


def test_nothing_but_logp_gets_a_gradient():
    logp, behavior, advantages, mask = batch(0)
    leaves = [x.requires_grad_() for x in (logp, behavior, advantages)]
    policy_loss(logp, behavior, advantages, mask, budget=1).backward()
    assert [x.grad is None for x in leaves] == [False, True, True]


def test_a_ratio_that_overflows_on_the_clipped_side_stays_finite():
    logp = torch.zeros(1, 1, requires_grad=True)
    loss = policy_loss(logp, torch.full((1, 1), -200.0), torch.ones(1), torch.ones(1, 1), budget=1)
    loss.backward()
    assert loss.item() == pytest.approx(-1.2) and logp.grad.item() == 0


def test_low_precision_log_probs_are_summed_in_float32():
    logp = torch.full((1, 4000), -1.0, dtype=torch.bfloat16)
    loss = policy_loss(logp, logp, torch.ones(1), torch.ones_like(logp, dtype=torch.bool), budget=4000)
    assert loss.dtype == torch.float32 and loss.item() == -1


@pytest.mark.parametrize("budget", [0, -1.0, NAN])
def test_a_budget_that_is_not_positive_is_an_error(budget):
    with pytest.raises(ValueError, match="budget"):
        policy_loss(*batch(0), budget=budget)


def test_statistics_by_hand():
    ratios = double([0.5, 1.0, 1.5, 9.0], [0.5, 1.0, 1.5, 9.0])
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 0]], dtype=torch.bool)
    got = ratio_statistics(ratios.log(), torch.zeros_like(ratios), double(1.0, -1.0), mask, n_tokens=6)
    assert got["mean_ratio"].item() == pytest.approx(1.0)
    assert got["clip_fraction"].item() == pytest.approx(2 / 6)
    assert got["approx_kl"].item() == pytest.approx(2 * -math.log(0.75) / 6)


def table(seed, length, vocab=3):
    """Logits [length, previous, next] of an autoregressive policy, all its words, and a reward for each."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.tensor(list(itertools.product(range(vocab), repeat=length)))
    logits = torch.randn(length, vocab, vocab, dtype=torch.float64, generator=generator).requires_grad_()
    return logits, words, torch.randn(len(words), dtype=torch.float64, generator=generator)


def word_logp(logits, words):
    previous = torch.cat([torch.zeros_like(words[:, :1]), words[:, :-1]], 1)
    return logits.log_softmax(-1)[torch.arange(words.shape[1]), previous, words]


@pytest.mark.parametrize("N", [2, 3])
@pytest.mark.parametrize("length", [1, 2])
def test_expected_gradient_is_the_true_one_times_n_minus_one_over_n(N, length):
    """Every group of N words that the policy could have drawn, weighed by its probability."""
    logits, words, reward = table(3, length)
    logp = word_logp(logits, words)
    probs = logp.sum(1).exp()
    expected = 0.0
    for group in map(list, itertools.product(range(len(words)), repeat=N)):
        advantages = group_advantages(reward[group][None])[0]
        mask = torch.ones(N, length, dtype=torch.bool)
        loss = policy_loss(logp[group], logp[group].detach(), advantages, mask, budget=N)
        expected = expected + probs[group].prod().detach() * loss
    (got,) = torch.autograd.grad(-expected, logits, retain_graph=True)
    (true,) = torch.autograd.grad((probs * reward).sum(), logits)
    torch.testing.assert_close(got, true * (N - 1) / N, rtol=1e-11, atol=1e-14)


def test_off_policy_without_a_clip_the_expected_gradient_is_still_the_true_one():
    logits, words, reward = table(5, length=1)
    behavior = word_logp(table(6, length=1)[0].detach(), words)
    logp = word_logp(logits, words)
    expected = 0.0
    for group in map(list, itertools.product(range(len(words)), repeat=3)):
        advantages = group_advantages(reward[group][None])[0]
        loss = policy_loss(
            logp[group], behavior[group], advantages, torch.ones(3, 1), budget=3, clip_low=INF, clip_high=INF
        )
        expected = expected + behavior[group].sum().exp() * loss
    (got,) = torch.autograd.grad(-expected, logits, retain_graph=True)
    (true,) = torch.autograd.grad((logp.sum(1).exp() * reward).sum(), logits)
    torch.testing.assert_close(got, true * 2 / 3, rtol=1e-11, atol=1e-14)


def test_demo_learns_and_shows_what_the_divisions_do():
    seen = []
    config = dr_grpo.Demo(gradient_samples=30_000, steps=100)
    figures = dr_grpo.demo(config, log=lambda step, total, **metrics: seen.append((step, total)))
    assert seen == [(step, config.steps) for step in range(1, config.steps + 1)]
    assert figures["reward_after"] > figures["reward_before"] + 0.2
    assert figures["gradient_cosine_dr_grpo"] > 0.999
    assert figures["gradient_scale_dr_grpo"] == pytest.approx(3 / 4, abs=0.02)
    assert figures["gradient_cosine_dr_grpo"] > figures["gradient_cosine_length_division"]
    assert figures["easy_share_std_division"] > 5 * figures["easy_share_dr_grpo"]
