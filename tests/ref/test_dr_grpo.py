"""Signs and sizes by hand, sums over micro-batches, what the mask hides, and the exact expected gradient; the
same for the whole family; bad input; and TRL's losses, where it is installed."""

import importlib.util
import itertools
import math
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ref import dr_grpo
from ref.dr_grpo import FAMILY, Variant, family_loss, group_advantages, policy_loss, ratio_statistics

INF, NAN = math.inf, math.nan
members = pytest.mark.parametrize("name", FAMILY)


def double(*values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize(
    "unit, dtype",
    [
        (1e4, torch.float16),
        (1e4, torch.bfloat16),
        (1e30, torch.bfloat16),
        (1e30, torch.float32),
        (1e-30, torch.float32),
        (1e100, torch.float64),
    ],
    ids=str,
)
def test_advantages_in_deviations_do_not_depend_on_the_unit_of_the_reward(unit, dtype, baseline):
    """Squares that the rewards' own dtype cannot hold are held; of narrow rewards the advantages are float32."""
    rewards = (double([0.0, 1.0, 2.0, 4.0], [1.0, 1.0, 1.0, 1.0]) * unit).to(dtype)
    how = {"baseline": baseline, "scale": "std"}
    found = group_advantages(rewards, eps=1e-45, **how)
    want = group_advantages(rewards.double() / unit, eps=1e-9, **how)
    assert found.dtype == torch.promote_types(dtype, torch.float32) and not found[1].any()
    torch.testing.assert_close(found.double(), want, rtol=1e-6, atol=1e-6)
    plain = group_advantages(rewards, baseline=baseline)
    torch.testing.assert_close(plain.double(), group_advantages(rewards.double(), baseline=baseline), rtol=1e-6, atol=0)


TOO_FAR_APART = {
    "float32": ([3e38, -3e38, 0.0], torch.float32, {}),
    "float32, sum": ([0.0] + [3e38] * 3, torch.float32, {}),
    "bfloat16": ([3e38, -3e38, 0.0], torch.bfloat16, {"scale": "std"}),
    "float64, squares": ([0.0, 1e200], torch.float64, {"scale": "std"}),
}


@pytest.mark.parametrize("rewards, dtype, how", TOO_FAR_APART.values(), ids=TOO_FAR_APART)
def test_rewards_that_overflow_their_group_are_refused(rewards, dtype, how):
    rewards = torch.tensor([[1.0] * len(rewards), rewards], dtype=dtype)
    with pytest.raises(ValueError, match="rewards of a group must be close enough together.*row 1 of 2"):
        group_advantages(rewards, **how)


def test_advantages_by_hand():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 0.0]])
    want = torch.tensor([[0.5, -0.5, -0.5, 0.5], [0.25, 0.25, 0.25, -0.75]])
    assert torch.equal(group_advantages(rewards), want)


@given(
    value=st.floats(-1e6, 1e6, width=32), n=st.integers(1, 33), dtype=st.sampled_from([torch.float32, torch.float64])
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
    [
        (1.5, 1.0, 0.2, 0.28, -1.28),
        (1.5, 1.0, 0.2, INF, -1.5),
        (0.5, -1.0, 0.3, 0.2, 0.7),
        (0.01, -1.0, INF, 0.2, 0.01),
        (0.01, -1.0, 1.0, 0.2, 0.01),
        (1.0, 1.0, 0.0, 0.0, -1.0),
    ],
)
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


@pytest.mark.parametrize(
    "dtype, far", [(torch.float32, 100.0), (torch.float64, 800.0), (torch.bfloat16, 3e38)], ids=str
)
@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_an_advantage_of_zero_weighs_nothing_whatever_the_ratio(dtype, far, ratio):
    """Also where ρ overflows and no clip takes it back: 0 · inf is not what min(ρ · 0, ρ · 0) is."""
    how = {"clip_low": INF, "clip_high": INF, "ratio": ratio}
    behavior, mask = torch.tensor([[-far, -far], [-1.0, -1.0]], dtype=dtype), torch.ones(2, 2)
    logp = torch.full((2, 2), -0.5, dtype=dtype, requires_grad=True)
    loss = policy_loss(logp, behavior, torch.tensor([0.0, 1.0]), mask, budget=2, **how)
    assert loss.item() == pytest.approx(-math.exp(0.5), rel=1e-6)
    loss.backward()
    assert logp.grad[0].tolist() == [0, 0] and bool((logp.grad[1] < 0).all())
    found = ratio_statistics(logp, behavior, torch.tensor([0.0, 1.0]), mask, n_tokens=4, **how)
    assert found["clip_fraction"] == 0


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
    assert figures["gradient_cosine_rloo"] == pytest.approx(figures["gradient_cosine_dr_grpo"], rel=1e-12)
    assert figures["gradient_scale_rloo"] == pytest.approx(1, abs=0.03)
    assert all(figures[f"gradient_cosine_{name}"] < 0.9 for name in ("grpo", "dapo", "gspo"))
    # On policy the two differ in nothing: every ratio is one.
    assert figures["gradient_cosine_gspo"] == pytest.approx(figures["gradient_cosine_grpo"], rel=1e-12)


# The family


def test_leave_one_out_by_hand():
    rewards = double([1, 0, 0, 1], [4, 1, 1, 0])
    want = double([2 / 3, -2 / 3, -2 / 3, 2 / 3], [10 / 3, -2 / 3, -2 / 3, -2])
    torch.testing.assert_close(group_advantages(rewards, baseline="leave_one_out"), want)


def test_std_by_hand():
    """Deviations 3, −1, −1, −1: twelve over three, so the sample's standard deviation is two."""
    got = group_advantages(double([4, 0, 0, 0]), scale="std", eps=1e-12)
    torch.testing.assert_close(got, double([1.5, -0.5, -0.5, -0.5]))
    assert group_advantages(double([4, 0, 0, 0]), scale="std", eps=1.0)[0, 0].item() == pytest.approx(1)


def test_in_a_nearly_equal_group_the_deviation_blows_a_trifle_up_to_full_size():
    """Three rollouts at 1 and one that paid δ: −3δ/4 by the mean, and −3/2 by the deviation, which is δ/2."""
    for delta in (1.0, 1e-2, 1e-4):
        rewards = double([1, 1, 1, 1 - delta])
        torch.testing.assert_close(group_advantages(rewards), delta * double([0.25, 0.25, 0.25, -0.75]))
        blown_up = group_advantages(rewards, scale="std", eps=1e-12)
        torch.testing.assert_close(blown_up, double([0.5, 0.5, 0.5, -1.5]))


@given(
    G=st.integers(0, 4),
    N=st.integers(2, 7),
    shift=st.floats(-100, 100),
    seed=st.integers(0, 2**31),
    baseline=st.sampled_from(["mean", "leave_one_out"]),
    scale=st.sampled_from(["none", "std"]),
)
@settings(max_examples=60, deadline=None)
def test_laws_of_every_advantage(G, N, shift, seed, baseline, scale):
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randn(G, N, dtype=torch.float64, generator=generator)
    order = torch.randperm(N, generator=generator)

    def advantages(r):
        return group_advantages(r, baseline=baseline, scale=scale, eps=1e-12)

    got = advantages(rewards)
    torch.testing.assert_close(advantages(rewards + shift), got, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(advantages(rewards[:, order]), got[:, order])
    torch.testing.assert_close(got.sum(1), torch.zeros(G, dtype=torch.float64), rtol=0, atol=1e-11)
    # The deviation takes the rewards' unit away; without it the unit stays.
    want = got if scale == "std" else 3 * got
    torch.testing.assert_close(advantages(3 * rewards), want, rtol=1e-4, atol=1e-9)
    assert (advantages(torch.full_like(rewards, 0.1)) == 0).all()


def family_batch(seed, G=4, N=3, T=5, distance=0.3):
    """Groups off policy, every rollout with a token at least, some of them cut off."""
    generator = torch.Generator().manual_seed(seed)
    behavior = -2 * torch.rand(G * N, T, dtype=torch.float64, generator=generator)
    logp = behavior + distance * torch.randn(G * N, T, dtype=torch.float64, generator=generator)
    mask = torch.rand(G * N, T, generator=generator) < 0.6
    mask[torch.arange(G * N), torch.randint(T, (G * N,), generator=generator)] = True
    rewards = torch.randn(G, N, dtype=torch.float64, generator=generator)
    return logp, behavior, rewards, mask, torch.rand(G * N, generator=generator) < 0.7


def gradient(variant, logp, behavior, rewards, mask, finished, budget=7):
    x = logp.clone().requires_grad_()
    loss = family_loss(variant, x, behavior, rewards, mask, budget=budget, finished=finished)
    return loss.detach(), torch.autograd.grad(loss, x)[0]


def test_the_default_variant_is_this_files_loss():
    logp, behavior, rewards, mask, _ = family_batch(0)
    want = policy_loss(logp, behavior, group_advantages(rewards).flatten(), mask, budget=7)
    assert torch.equal(gradient(FAMILY["dr_grpo"], *family_batch(0))[0], want)
    assert FAMILY["dr_grpo"] == Variant()


def test_weights_and_budget_of_every_member_by_hand():
    """Two rollouts of 2 and 5 tokens, of at most 10; the second one was cut off."""
    lengths, finished = torch.tensor([2, 5]), torch.tensor([True, False])
    weights = {name: member.token_weights(lengths, finished).tolist() for name, member in FAMILY.items()}
    per_rollout, per_token = [1 / 2, 1 / 5], [1, 1]
    assert weights == dict(dr_grpo=per_token, grpo=per_rollout, rloo=per_token, dapo=[1, 0], gspo=per_rollout)
    budgets = {name: member.budget(rollouts=2, tokens=7, longest=10) for name, member in FAMILY.items()}
    assert budgets == dict(dr_grpo=20, grpo=2, rloo=20, dapo=7, gspo=2)


def test_a_rollout_without_a_token_has_a_finite_weight():
    assert FAMILY["grpo"].token_weights(torch.tensor([0, 4]), torch.ones(2, dtype=torch.bool)).tolist() == [1, 0.25]


@members
@given(seed=st.integers(0, 2**31), cuts=st.sets(st.integers(1, 3)))
@settings(max_examples=15, deadline=None)
def test_micro_batches_of_groups_add_up_for_every_member(name, seed, cuts):
    logp, behavior, rewards, mask, finished = family_batch(seed)
    loss, whole = gradient(FAMILY[name], logp, behavior, rewards, mask, finished)
    total, parts = 0.0, []
    for start, end in itertools.pairwise([0, *sorted(cuts), 4]):
        rows = slice(3 * start, 3 * end)
        piece = (logp[rows], behavior[rows], rewards[start:end], mask[rows], finished[rows])
        value, part = gradient(FAMILY[name], *piece)
        total, parts = total + value.item(), [*parts, part]
    assert total == pytest.approx(loss.item(), rel=1e-12, abs=1e-14)
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-11, atol=1e-14)


@given(seed=st.integers(0, 2**31), cut=st.integers(1, 11))
@settings(max_examples=20, deadline=None)
def test_micro_batches_may_cut_through_groups_when_rollouts_average_their_own_tokens(seed, cut):
    logp, behavior, rewards, mask, keep = family_batch(seed)
    advantages = group_advantages(rewards, scale="std").flatten()

    def loss(rows):
        options = {"ratio": "sequence", "length": "rollout", "keep": keep[rows], "budget": 12}
        return policy_loss(logp[rows], behavior[rows], advantages[rows], mask[rows], **options).item()

    assert loss(slice(0, cut)) + loss(slice(cut, 12)) == pytest.approx(loss(slice(0, 12)), rel=1e-11)


@members
@given(seed=st.integers(0, 2**31), order=st.permutations(range(6)))
@settings(max_examples=15, deadline=None)
def test_permuting_the_rollouts_of_a_group_permutes_the_gradient(name, seed, order):
    logp, behavior, rewards, mask, finished = family_batch(seed, G=1, N=6)
    loss, whole = gradient(FAMILY[name], logp, behavior, rewards, mask, finished)
    mixed = (logp[order], behavior[order], rewards[:, order], mask[order], finished[order])
    other, permuted = gradient(FAMILY[name], *mixed)
    torch.testing.assert_close(other, loss)
    torch.testing.assert_close(permuted, whole[order])


@members
@given(seed=st.integers(0, 2**31), distance=st.sampled_from([0.0, 3e-4, 0.3, 3.0]))
@settings(max_examples=15, deadline=None)
def test_no_gradient_has_the_sign_of_its_advantage(name, seed, distance):
    """On policy and far from it: descent raises what was better than its group and lowers what was worse, or
    the clip lets it be."""
    logp, behavior, rewards, mask, finished = family_batch(seed, distance=distance)
    variant = FAMILY[name]
    _, slope = gradient(variant, logp, behavior, rewards, mask, finished)
    advantages = group_advantages(rewards, baseline=variant.baseline, scale=variant.scale).flatten()[:, None]
    assert (slope * advantages <= 0).all() and (slope[~mask] == 0).all()
    live = mask & finished[:, None] if variant.drop_overlong else mask
    if distance == 0:
        assert ((slope * advantages < 0) == live).all(), "the clip has nothing to do, every token moves"


@given(
    seed=st.integers(0, 2**31), low=st.floats(0, 2), high=st.floats(0, 2), ratio=st.sampled_from(["token", "sequence"])
)
@settings(max_examples=30, deadline=None)
def test_at_a_ratio_of_one_value_and_gradient_are_the_plain_ones_whatever_the_clip(seed, low, high, ratio):
    """The value −ΣA/budget over the tokens, the gradient that of −ΣA log π/budget; nothing is clipped."""
    logp, _, rewards, mask, _ = family_batch(seed)
    advantages, x = group_advantages(rewards).flatten(), logp.clone().requires_grad_()
    loss = policy_loss(x, logp, advantages, mask, budget=7, clip_low=low, clip_high=high, ratio=ratio)
    plain = advantages[:, None] * mask / 7
    assert loss.item() == pytest.approx(-plain.sum().item(), rel=1e-12, abs=1e-13)
    if min(low, high) > 0:  # a clip of zero has its kink here
        torch.testing.assert_close(torch.autograd.grad(loss, x)[0], -plain, rtol=1e-12, atol=1e-14)
    found = ratio_statistics(logp, logp, advantages, mask, n_tokens=int(mask.sum()), clip_low=low, clip_high=high)
    assert [found[k].item() for k in ("mean_ratio", "clip_fraction", "approx_kl")] == [1, 0, 0]


@members
def test_the_gradient_pulls_towards_the_better_rollout(name):
    logp, _, _, mask, _ = family_batch(2, G=1, N=4)
    everyone = torch.ones(4, dtype=torch.bool)
    _, slope = gradient(FAMILY[name], logp, logp, double([0, 1, 0, 0]), mask, everyone)
    assert (slope[1][mask[1]] < 0).all(), "descent raises its log-probs"
    assert (slope[[0, 2, 3]][mask[[0, 2, 3]]] > 0).all()


@pytest.mark.parametrize(
    "ratio, length, slope, log_ratios",
    [
        ("token", "none", -2, [0.3, -0.1, 0.1]),
        ("token", "rollout", -2 / 3, [0.3, -0.1, 0.1]),
        ("sequence", "none", -2, [0.1, 0.1, 0.1]),
        ("sequence", "rollout", -2 / 3, [0.1, 0.1, 0.1]),
    ],
)
def test_ratios_and_lengths_by_hand(ratio, length, slope, log_ratios):
    """Three tokens of A = 2 and one that is not the policy's; the log-ratios off policy have the mean 0.1."""
    mask = torch.tensor([[1, 1, 0, 1]], dtype=torch.bool)
    for distance, used in (([0.0, 0.0, 0.0, 0.0], [0, 0, 0]), ([0.3, -0.1, 9.0, 0.1], log_ratios)):
        logp = double(distance).requires_grad_()
        options = {"budget": 1, "clip_high": INF, "ratio": ratio, "length": length}
        policy_loss(logp, torch.zeros_like(logp), double(2), mask, **options).backward()
        first, second, last = (slope * math.exp(x) for x in used)
        torch.testing.assert_close(logp.grad, double([first, second, 0, last]))


def test_a_sequence_is_clipped_as_a_whole_and_a_token_alone():
    """log ρ = 0.3, −0.1, 0.1: the geometric mean exceeds 1.05; of the tokens the first and last do."""
    for ratio, moves in (("sequence", [False] * 3), ("token", [False, True, False])):
        logp = double([0.3, -0.1, 0.1]).requires_grad_()
        everywhere = torch.ones(1, 3, dtype=torch.bool)
        loss = policy_loss(logp, torch.zeros_like(logp), double(1), everywhere, budget=1, clip_high=0.05, ratio=ratio)
        loss.backward()
        assert (logp.grad != 0).tolist() == [moves]
        share = ratio_statistics(
            logp, torch.zeros_like(logp), double(1), everywhere, n_tokens=3, clip_high=0.05, ratio=ratio
        )["clip_fraction"]
        assert share.item() == pytest.approx(1 - sum(moves) / 3)
    assert loss.item() == pytest.approx(-(1.05 + math.exp(-0.1) + 1.05))


def test_gspo_clips_where_its_paper_says():
    everywhere = torch.ones(2, 3, dtype=torch.bool)
    for log_ratio, advantage, moves in (
        (3.9e-4, 1, True),
        (4.1e-4, 1, False),
        (-2.9e-4, -1, True),
        (-3.1e-4, -1, False),
    ):
        logp = torch.full((2, 3), log_ratio, dtype=torch.float64)
        _, slope = gradient(FAMILY["gspo"], logp, 0 * logp, double([advantage, 0]), everywhere, None)
        assert (slope[0] != 0).all() if moves else (slope[0] == 0).all()


@pytest.mark.parametrize("name", ["grpo", "gspo"])
def test_long_and_short_rollouts_weigh_the_same_in_all_where_length_divides(name):
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 0, 0, 0, 0]], dtype=torch.bool)
    logp = torch.zeros(2, 5, dtype=torch.float64)
    _, slope = gradient(FAMILY[name], logp, logp, double([0, 1]), mask, None)
    torch.testing.assert_close(slope[0], -slope[1].sum().expand(5) / 5)


@given(seed=st.integers(0, 2**31))
@settings(max_examples=20, deadline=None)
def test_leave_one_out_is_dr_grpo_times_n_over_n_minus_one(seed):
    batch = family_batch(seed)
    (a, grad_a), (b, grad_b) = (gradient(FAMILY[name], *batch) for name in ("dr_grpo", "rloo"))
    torch.testing.assert_close(grad_a, 2 / 3 * grad_b, rtol=1e-13, atol=0)
    torch.testing.assert_close(a, 2 / 3 * b, rtol=1e-12, atol=1e-13)


def test_clip_higher_lets_a_good_token_rise_to_1_28():
    everywhere = torch.ones(2, 1, dtype=torch.bool)
    for ratio, name, moves in ((1.21, "grpo", False), (1.27, "dapo", True), (1.29, "dapo", False)):
        logp = double([math.log(ratio)], [0.0])
        _, slope = gradient(FAMILY[name], logp, 0 * logp, double([1, 0]), everywhere, everywhere[:, 0])
        assert (slope[0] != 0).item() is moves and (slope[1] > 0).all()
    best = policy_loss(double([9.0]), double([0.0]), double(1), everywhere[:1], budget=1, clip_high=0.28)
    assert best.item() == pytest.approx(-1.28)


@given(seed=st.integers(0, 2**31), junk=st.sampled_from([NAN, INF, -INF]))
@settings(max_examples=20, deadline=None)
def test_the_overlong_mask_takes_out_the_rollouts_that_were_cut_off_and_nothing_else(seed, junk):
    logp, behavior, rewards, mask, finished = family_batch(seed)
    _, all_in = gradient(replace(FAMILY["dapo"], drop_overlong=False), logp, behavior, rewards, mask, None)
    dirty = [x.masked_fill(~finished[:, None], junk) for x in (logp, behavior)]
    loss, slope = gradient(FAMILY["dapo"], *dirty, rewards, mask, finished)
    assert loss.isfinite() and (slope[~finished] == 0).all()
    assert torch.equal(slope[finished], all_in[finished]), "those cut off still count in mean and deviation"
    if not finished.any():
        assert loss == 0


@members
@given(seed=st.integers(0, 2**31), junk=st.sampled_from([NAN, INF, -INF, 1e30]))
@settings(max_examples=15, deadline=None)
def test_what_the_mask_hides_contributes_nothing_in_any_member(name, seed, junk):
    logp, behavior, rewards, mask, finished = family_batch(seed)
    want, slope = gradient(FAMILY[name], logp, behavior, rewards, mask, finished)
    dirty = [x.masked_fill(~mask, junk) for x in (logp, behavior)]
    got, dirty_slope = gradient(FAMILY[name], *dirty, rewards, mask, finished)
    assert torch.equal(got, want) and torch.equal(dirty_slope, slope)


def expected_gradient(variant, logits):
    """Expected ascent direction over all groups of two words a policy with an end symbol can draw, by
    enumeration, and the true gradient of the expected reward. Words may end at once or after one letter."""
    words = torch.tensor([w for w in itertools.product(range(3), repeat=2) if w[0] != 2 or w[1] == 2])
    mask = torch.stack([torch.ones(len(words), dtype=torch.bool), words[:, 0] != 2], 1)
    reward = double(0.3, 1.0, -0.5, 0.8, 0.1, 0.4, 0.2)
    logp = word_logp(logits, words)
    probs = (logp * mask).sum(1).exp()
    assert probs.sum().item() == pytest.approx(1)
    total = 0.0
    for pair in map(list, itertools.product(range(len(words)), repeat=2)):
        loss = family_loss(
            variant,
            logp[pair],
            logp[pair].detach(),
            reward[pair][None],
            mask[pair],
            budget=2,
            finished=(words[pair] == 2).any(1),
        )
        total = total + probs[pair].prod().detach() * loss
    (got,) = torch.autograd.grad(-total, logits, retain_graph=True)
    return got, torch.autograd.grad((probs * reward).sum(), logits)[0]


def test_only_leave_one_out_has_the_true_expected_gradient_and_divisions_turn_it_away():
    logits = table(3, length=2)[0]
    for name, variant in FAMILY.items():
        got, true = expected_gradient(variant, logits)
        cosine = ((got * true).sum() / got.norm() / true.norm()).item()
        if name in ("rloo", "dr_grpo"):
            torch.testing.assert_close(got, true / (1 if name == "rloo" else 2), rtol=0, atol=1e-10)
        else:
            assert cosine < 0.95, "no factor makes it the true one"
            assert (got - true).norm() > 0.5 * true.norm()


BAD = {
    "rewards, shape": ({"rewards": torch.zeros(6)}, r"rewards must be a float tensor of shape \[G, N\].*\[6\]"),
    "rewards, dtype": (
        {"rewards": torch.zeros(2, 3, dtype=torch.int64)},
        r"rewards must be a float tensor.*torch.int64",
    ),
    "rewards, NaN": ({"rewards": torch.tensor([[0, 1, 2], [0, NAN, 1]])}, "rewards must be finite; row 1 of 2"),
    "rewards, no rollouts": ({"rewards": torch.zeros(2, 0)}, "N ≥ 1 for mean, none; got N = 0"),
    "nobody to leave out": (
        {"rewards": torch.zeros(6, 1), "variant": FAMILY["rloo"]},
        "rewards.*N ≥ 2 for leave_one_out, none; got N = 1",
    ),
    "no deviation": ({"rewards": torch.zeros(6, 1), "variant": FAMILY["grpo"]}, "rewards.*N ≥ 2 for mean, std"),
    "other groups": ({"rewards": torch.zeros(2, 4)}, r"logp must be a float tensor of shape \[8, T\]; got .* \[6, 5\]"),
    "logp, dims": ({"logp": torch.zeros(6)}, r"logp must be a float tensor of shape \[6, T\]"),
    "logp, dtype": ({"logp": torch.zeros(6, 5, dtype=torch.int32)}, "logp must be a float tensor.*torch.int32"),
    "behavior_logp, shape": ({"behavior_logp": torch.zeros(6, 4)}, r"behavior_logp .* \[6, 5\]; got .* \[6, 4\]"),
    "mask, shape": ({"mask": torch.ones(5, 6)}, r"mask must be a tensor of shape \[6, 5\]"),
    "mask, nothing": ({"mask": torch.zeros(6, 5)}, r"mask must be nonzero somewhere; got shape \[6, 5\]"),
    "mask, empty row": (
        {"mask": torch.eye(6, 5), "variant": Variant(length="rollout")},
        "mask must be nonzero somewhere in each row; row 5 of 6",
    ),
    "mask, empty sequence": ({"mask": torch.eye(6, 5), "variant": Variant(ratio="sequence")}, "row 5 of 6"),
    "mask, NaN": ({"mask": torch.full((6, 5), NAN)}, "mask must be finite"),
    "logp, NaN": ({"logp": torch.full((6, 5), NAN)}, "logp must be finite where the mask counts; row 0 of 6"),
    "logp, inf": ({"behavior_logp": torch.full((6, 5), -INF)}, "behavior_logp must be finite"),
    "finished, missing": ({"variant": FAMILY["dapo"]}, r"finished must be a bool tensor of shape \[6\]; got None"),
    "finished, shape": (
        {"finished": torch.ones(2, dtype=torch.bool)},
        r"finished must be a bool tensor of shape \[6\]",
    ),
    "finished, dtype": ({"finished": torch.ones(6)}, "finished must be a bool tensor.*torch.float32"),
    "budget": ({"budget": INF}, "budget must be positive and finite; got inf"),
    "clip": ({"variant": Variant(clip_low=-0.1)}, "clip_low and clip_high must not be negative; got -0.1"),
    "baseline": ({"variant": Variant(baseline="median")}, "baseline must be mean or leave_one_out; got 'median'"),
    "scale": ({"variant": Variant(scale="var")}, "scale must be none or std"),
    "ratio": ({"variant": Variant(ratio="word")}, "ratio must be token or sequence"),
    "length": ({"variant": Variant(length="batch")}, "length must be none or rollout"),
}


@pytest.fixture(scope="module")
def untyped():
    """The file as a user imports it: without the tests' own shape checks, which would come first."""
    spec = importlib.util.spec_from_file_location("untyped_dr_grpo", dr_grpo.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("change, says", BAD.values(), ids=BAD)
def test_errors_name_the_argument(untyped, change, says):
    arguments = {
        "variant": Variant(),
        "logp": torch.zeros(6, 5),
        "behavior_logp": torch.zeros(6, 5),
        "rewards": torch.arange(6.0).view(2, 3),
        "mask": torch.ones(6, 5),
        "budget": 30,
    }
    untyped.family_loss(**arguments)
    with pytest.raises(ValueError, match=says):
        untyped.family_loss(**(arguments | change))


def test_errors_of_the_parts_name_the_argument_too(untyped):
    zeros, ones = torch.zeros(2, 3), torch.ones(2, 3)
    for advantages, keep, says in (
        (torch.zeros(3), None, r"advantages must be a float tensor of shape \[2\]"),
        (torch.tensor([0.0, INF]), None, "advantages must be finite where the mask counts; row 1 of 2"),
        (torch.zeros(2), torch.ones(2), "keep must be a bool tensor"),
    ):
        with pytest.raises(ValueError, match=says):
            untyped.policy_loss(zeros, zeros, advantages, ones, budget=1, keep=keep)
    with pytest.raises(ValueError, match="n_tokens"):
        untyped.ratio_statistics(zeros, zeros, torch.zeros(2), ones, n_tokens=0)
    with pytest.raises(ValueError, match="eps"):
        untyped.group_advantages(zeros, scale="std", eps=0.0)


def test_a_row_that_is_not_kept_needs_no_token_and_a_batch_without_any_is_zero():
    mask = torch.tensor([[True, True], [False, False]])
    zeros, keep = torch.zeros(2, 2), torch.tensor([True, False])
    options = {"budget": 2, "ratio": "sequence", "length": "rollout"}
    loss = policy_loss(zeros, zeros, torch.tensor([1.0, NAN]), mask, keep=keep, **options)
    assert loss.item() == -0.5
    assert policy_loss(zeros, zeros, torch.ones(2), mask, keep=~mask[0], **options) == 0
    assert policy_loss(zeros, zeros, torch.ones(2), ~mask & mask, budget=2) == 0


TRL = {
    "dr_grpo": ({"loss_type": "dr_grpo"}, lambda mask: mask.numel()),
    "grpo": ({"loss_type": "grpo"}, len),
    "dapo": ({"loss_type": "dapo", "epsilon_high": 0.28}, lambda mask: mask.sum().item()),
    "gspo": ({"importance_sampling_level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4}, len),
}


@pytest.mark.parametrize("name", TRL)
@pytest.mark.parametrize("seed", range(3))
def test_losses_and_gradients_are_those_of_trl(name, seed):
    """A second opinion by another hand: its trainer's loss, on a bare trainer with what that loss reads."""
    import trl  # here, not above: it takes seconds, and only this test wants it
    from trl.trainer.utils import nanstd

    changes, budget = TRL[name]
    logp, behavior, rewards, mask, finished = family_batch(seed, distance=3e-4 if name == "gspo" else 0.3)
    kept = mask & finished[:, None] if FAMILY[name].drop_overlong else mask
    x = logp.clone().requires_grad_()
    trainer = object.__new__(trl.GRPOTrainer)
    reads = {
        "loss_type": "grpo",
        "importance_sampling_level": "token",
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "beta": 0.0,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "use_vllm": False,
        "aux_loss_enabled": False,
        "_entropy_bonus_enabled": False,
        "max_completion_length": mask.shape[1],
        "args": SimpleNamespace(delta=None),
        "model": SimpleNamespace(training=False),
        "_metrics": {"eval": defaultdict(list)},
        "accelerator": SimpleNamespace(num_processes=1, gather=lambda t: t, reduce=lambda t, reduction: t),
        "_get_per_token_logps_and_entropies": lambda *_, **__: (x, torch.zeros_like(logp), None),
    }
    for key, value in (reads | changes).items():
        setattr(trainer, key, value)
    centred = rewards - rewards.mean(1, keepdim=True)
    if FAMILY[name].scale == "std":
        centred = centred / (nanstd(rewards, dim=1, keepdim=True) + 1e-6)  # it adds 1e-4 itself, outside the loss
    prompt = torch.zeros(len(logp), 1, dtype=torch.long)
    loss = trainer._compute_loss(
        None,
        {
            "prompt_ids": prompt,
            "prompt_mask": prompt,
            "completion_ids": mask.long(),
            "completion_mask": kept.long(),
            "advantages": centred.flatten(),
            "old_per_token_logps": behavior,
            "num_items_in_batch": kept.sum(),
        },
    )
    ours, slope = gradient(FAMILY[name], logp, behavior, rewards, mask, finished, budget=budget(kept))
    torch.testing.assert_close(ours, loss.detach(), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(slope, torch.autograd.grad(loss, x)[0], rtol=1e-9, atol=1e-12)


def test_clip_fraction_counts_no_token_without_advantage():
    """The clip takes nothing from a gradient that is zero anyway: A = 0 far outside, beside a good token inside and one
    outside."""
    ratios = double([9.0, 0.1], [1.1, 9.0])
    got = ratio_statistics(ratios.log(), torch.zeros_like(ratios), double(0.0, 1.0), torch.ones(2, 2), n_tokens=4)
    assert got["clip_fraction"].item() == 1 / 4


def test_a_mask_of_weights_weighs_its_tokens():
    logp, behavior, advantages, mask = batch(3)
    weights = mask * torch.tensor([0.5, 2.0, 1.0, 3.0, 0.25])
    one = [policy_loss(logp, behavior, advantages, mask & (torch.arange(5) == t), budget=30) for t in range(5)]
    wanted = sum(w * x for w, x in zip([0.5, 2.0, 1.0, 3.0, 0.25], one, strict=True))
    torch.testing.assert_close(
        policy_loss(logp, behavior, advantages, weights, budget=30), wanted, rtol=1e-12, atol=1e-14
    )


def loo_trainer(rewards, logp, behavior, mask):
    """TRL's RLOO on rollouts that are given: a bare trainer with what its scoring and its loss read, and what it makes
    of the rollouts."""
    import trl

    G, N = rewards.shape
    x = logp.clone().requires_grad_()
    trainer = object.__new__(trl.RLOOTrainer)
    rollouts = [[1]] * (G * N), [list(range(logp.shape[1]))] * (G * N), [""] * (G * N)
    reads = {
        "_generate": lambda prompts: rollouts,
        "_calculate_rewards": lambda *_: rewards.view(-1, 1),
        "reward_weights": torch.ones(1),
        "num_generations": N,
        "num_generations_eval": N,
        "reward_clip_range": None,
        "normalize_advantages": False,
        "beta": 0.0,
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "_tokenizer": SimpleNamespace(pad_token_id=-1),
        "pad_to_multiple_of": None,
        "mask_truncated_completions": False,
        "eos_token_ids": [],
        "reward_func_names": ["reward"],
        "_pending_extra_logs": {},
        "_pending_metrics": {},
        "log_multimodal": False,
        "aux_loss_enabled": False,
        "_metrics": {"eval": defaultdict(list)},
        "_logs": {"rewards": defaultdict(list), **{name: [] for name in ("prompt", "completion", "advantages")}},
        "args": SimpleNamespace(per_device_eval_batch_size=G * N, gradient_checkpointing_kwargs=None),
        "model": SimpleNamespace(training=False, is_gradient_checkpointing=False),
        "accelerator": SimpleNamespace(
            device=torch.device("cpu"), process_index=0, gather=lambda t: t, reduce=lambda t, reduction: t
        ),
    }
    for key, value in reads.items():
        setattr(trainer, key, value)
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (behavior, None, None)
    scored = trainer._generate_and_score_completions([{"prompt": ""}] * (G * N))
    scored |= {"completion_mask": mask.long(), "old_logps": (behavior * mask).sum(1)}
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (x, torch.zeros_like(x), None)
    loss = trainer._compute_loss(None, scored)
    return scored["advantages"], loss.detach(), torch.autograd.grad(loss, x)[0]


@pytest.mark.parametrize("seed", range(3))
def test_rloo_is_that_of_trl(seed):
    """Its advantages always. Its ratio is of the whole rollout, ours of the token: the gradient is the same on policy,
    and the loss too, off policy and clipped, where a rollout is one token long."""
    logp, behavior, rewards, mask, _ = family_batch(seed, G=20)
    first = mask & (mask.cumsum(1) == 1)
    for x, some in ((behavior, mask), (logp, first)):
        advantages, loss, slope = loo_trainer(rewards, x, behavior, some)
        torch.testing.assert_close(
            group_advantages(rewards, baseline="leave_one_out").flatten(), advantages, rtol=1e-9, atol=1e-12
        )
        ours, grad = gradient(FAMILY["rloo"], x, behavior, rewards, some, None, budget=len(x))
        torch.testing.assert_close(grad, slope, rtol=1e-9, atol=1e-12)
        if some is first:
            torch.testing.assert_close(ours, loss, rtol=1e-9, atol=1e-12)
            assert (grad[first] == 0).any() and (grad[first] != 0).any(), "needs clipped tokens and others"
