"""scaled = ref for what is computed from log-probs and rewards, on every layout: values, gradients, hypothesis over
shapes and masks."""

import itertools

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ref import dr_grpo, packing, router_replay, self_summary
from tests.mirror import calls
from tests.mirror.layouts import close, layouts, play, seeds

some = settings(max_examples=20, deadline=None, derandomize=True)
odd = st.integers(1, 3)
how_advantages = st.sampled_from(
    [dict(baseline=b, scale=s) for b in ("mean", "leave_one_out") for s in ("none", "std")]
)


def text(seed: int, B: int, T: int, holes: float):
    """log-probs, behaviour, advantages and a mask; where the mask is zero the log-probs are NaN."""
    g = torch.Generator().manual_seed(seed)
    logp, behavior = (-torch.rand(B, T, generator=g, dtype=torch.float64) * 3 for _ in range(2))
    advantages = torch.randn(B, generator=g, dtype=torch.float64)
    mask = torch.rand(B, T, generator=g) >= holes
    mask[torch.arange(B), torch.randint(0, T, (B,), generator=g)] = True
    weight = mask * torch.randint(1, 3, (B, T), generator=g)
    return logp.masked_fill(~mask, torch.nan), behavior.masked_fill(~mask, torch.inf), advantages, weight


@some
@given(
    layouts,
    seeds,
    odd,
    odd,
    st.floats(0, 0.95),
    st.sampled_from(["token", "sequence"]),
    st.sampled_from(["none", "rollout"]),
    st.booleans(),
)
def test_policy_loss(layout, seed, rows, size, holes, ratio, length, dropped):
    B, T = rows * layout["dp"], 2 * size * layout["cp"]
    logp, behavior, advantages, mask = text(seed, B, T, holes)
    keep = torch.arange(B) % 2 == 0 if dropped else None
    how = dict(ratio=ratio, length=length, clip_low=0.3, clip_high=0.1)
    loss, grad, statistics = play(layout, calls.policy, logp, behavior, advantages, mask, keep, how)
    whole = logp.clone().requires_grad_()
    wanted = dr_grpo.policy_loss(whole, behavior, advantages, mask, budget=7.0, keep=keep, **how)
    wanted.backward()
    close(loss, wanted)
    close(grad, whole.grad)
    del how["length"]
    for name, value in dr_grpo.ratio_statistics(logp, behavior, advantages, mask, n_tokens=11.0, **how).items():
        close(statistics[name], value)


@some
@given(layouts, seeds, odd, st.integers(2, 9), how_advantages, st.booleans(), st.booleans())
def test_advantages_are_of_the_whole_group(layout, seed, G, N, how, equal, scattered):
    """Rollouts of a group on all dp ranks, as many on each as it comes (also none); equal rewards give exact zeros."""
    g = torch.Generator().manual_seed(seed)
    rewards = torch.randn(G, 1 if equal else N, generator=g, dtype=torch.float64).expand(G, N).contiguous()
    found = play(layout, calls.advantages, rewards, how, scattered)
    close(found, dr_grpo.group_advantages(rewards, **how))
    if equal:
        assert not found.any()


@pytest.mark.parametrize("layout", [dict(dp=1, cp=1, ep=1), dict(dp=2, cp=1, ep=1)], ids=str)
@pytest.mark.parametrize("baseline, scale", [("mean", "none"), ("leave_one_out", "none"), ("mean", "std")])
def test_a_rollout_that_is_alone_in_its_group_has_no_advantage(layout, baseline, scale):
    """Where others of its group were lost; a complete group of one has nothing to be compared with and is refused."""
    how, rewards = dict(baseline=baseline, scale=scale), torch.tensor([[3.0], [-1.0], [0.5]])
    assert play(layout, calls.advantages, rewards, how, True).tolist() == [[0.0]] * 3
    if how != dict(baseline="mean", scale="none"):
        with pytest.raises((ValueError, RuntimeError), match="N ≥ 2"):
            play(dict(dp=1, cp=1, ep=1), calls.advantages, rewards, how, False)


@pytest.mark.parametrize("layout", [dict(dp=1, cp=1, ep=1), dict(dp=2, cp=1, ep=1)], ids=str)
@pytest.mark.parametrize("unit, dtype", [(1e4, torch.float16), (1e30, torch.float32)], ids=str)
@pytest.mark.parametrize("scattered", [False, True])
def test_rewards_whose_squares_their_dtype_cannot_hold(layout, unit, dtype, scattered):
    rewards = (torch.tensor([[0.0, 1.0, 2.0, 4.0], [1.0, 1.0, 1.0, 1.0]]) * unit).to(dtype)
    found = play(layout, calls.advantages, rewards, dict(scale="std"), scattered)
    wanted = dr_grpo.group_advantages(rewards.double(), scale="std")
    assert found.dtype == torch.float32 and not found[1].any()
    torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=1e-6)
    far = torch.tensor([[3e38, -3e38, 0.0, 0.0]])
    with pytest.raises((ValueError, RuntimeError), match="rewards of a group must be close enough together"):
        play(layout, calls.advantages, far, {}, scattered)


@pytest.mark.parametrize("layout", [dict(dp=1, cp=1, ep=1), dict(dp=1, cp=2, ep=1)], ids=str)
@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_an_advantage_of_zero_weighs_nothing_whatever_the_ratio(layout, ratio):
    logp, behavior = (
        torch.zeros(2, 4, dtype=torch.float64),
        torch.tensor([[-800.0] * 4, [0.0] * 4], dtype=torch.float64),
    )
    how = dict(ratio=ratio, length="none", clip_low=float("inf"), clip_high=float("inf"))
    loss, grad, _ = play(
        layout, calls.policy, logp, behavior, torch.tensor([0.0, 1.0], dtype=torch.float64), torch.ones(2, 4), None, how
    )
    assert loss.item() == -4 / 7 and not grad[0].any() and bool((grad[1] < 0).all())


@some
@given(layouts, seeds, odd, st.integers(1, 2), odd, st.sampled_from(sorted(dr_grpo.FAMILY)))
def test_the_family(layout, seed, G, n, size, name):
    N, T = n * layout["dp"] * (1 if n * layout["dp"] > 1 else 2), 2 * size * layout["cp"]
    logp, behavior, _, mask = text(seed, G * N, T, 0.3)
    rewards = torch.randn(G, N, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    finished = torch.arange(G * N) % 3 != 1
    loss, grad = play(layout, calls.family, name, logp, behavior, rewards, mask, finished)
    whole = logp.clone().requires_grad_()
    wanted = dr_grpo.family_loss(dr_grpo.FAMILY[name], whole, behavior, rewards, mask, budget=5.0, finished=finished)
    wanted.backward()
    close(loss, wanted)
    close(grad, whole.grad)


@some
@given(layouts, seeds, odd, odd, st.floats(0, 0.9))
def test_replay_statistics(layout, seed, rows, size, holes):
    """Mean, quantiles and maximum are of all ranks' tokens, those of a rank without any included."""
    B, T, g = rows * layout["dp"], 2 * size * layout["cp"], torch.Generator().manual_seed(seed)
    logp, behavior, _, mask = text(seed, B, T, holes)
    mask = mask > 0
    mask[1:] &= torch.rand(B - 1, 1, generator=g) < 0.5
    assume(bool(mask.any()))
    ours, theirs = ([torch.rand(B, T, 6, generator=g).argsort(-1)[..., :2] for _ in range(2)] for _ in range(2))
    found = play(layout, calls.replay_statistics, logp, behavior, mask, ours, theirs)
    flat = [[layer.flatten(0, 1) for layer in layers] for layers in (ours, theirs)]
    for got, wanted in zip(
        found, (router_replay.mismatch(logp, behavior, mask), router_replay.compare_experts(*flat)), strict=True
    ):
        assert got.keys() == wanted.keys()
        for name in wanted:
            close(got[name], wanted[name])


@pytest.mark.parametrize("layout", [dict(dp=1, cp=1, ep=1), dict(dp=2, cp=1, ep=1), dict(dp=2, cp=2, ep=1)], ids=str)
def test_experts_of_ranks_without_a_token(layout):
    """All tokens are rank 0's; and where nobody has one, that is said everywhere."""
    ours, theirs = ([torch.stack([torch.randperm(6)[:2] for _ in range(7)]) for _ in range(3)] for _ in range(2))
    assert play(layout, calls.on_the_first, ours, theirs) == router_replay.compare_experts(ours, theirs)
    none = [x[:0] for x in ours]
    with pytest.raises((ValueError, RuntimeError), match="at least one token"):
        play(layout, calls.on_the_first, none, none)


@some
@given(layouts, seeds, st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_a_chain_weighs_the_same_wherever_its_segments_are(layout, seed, sizes):
    advantages = torch.randn(len(sizes), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    chains = [calls.chain_of(n) for n in sizes]
    found = play(layout, calls.chain_advantages, advantages, chains)
    wanted = self_summary.spread(advantages, chains).tolist()
    of = itertools.chain.from_iterable([c] * n for c, n in enumerate(sizes))
    assert found == sorted(zip(of, wanted, strict=True))


def test_a_chain_without_segments_anywhere_is_refused():
    with pytest.raises(RuntimeError, match="chain 1 has none"):
        play(dict(dp=2, cp=1), calls.chain_advantages, torch.zeros(2), [calls.chain_of(1), calls.chain_of(0)])


@some
@given(layouts, seeds, st.integers(4, 40), st.integers(1, 9))
def test_packing(layout, seed, S, n):
    """All ranks deal all sequences as one would, and each arrives, whole, where it was dealt."""
    costs = torch.rand(S, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).round(decimals=1)
    dealt, off, held = play(layout, calls.packed, costs, n)
    assert torch.equal(dealt, packing.balance(costs, n))
    close(off, packing.imbalance(costs, dealt, n))
    assert held == [(i, i % 5 + 1, int(dealt[i]) % layout["dp"]) for i in range(S)]
