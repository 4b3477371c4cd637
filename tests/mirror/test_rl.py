"""A step of reinforcement learning on many ranks is that of one, wherever conversations were played and segments were
dealt to."""

import dataclasses

import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from ref import packing, rl
from ref.environment import EnvironmentFailure
from ref.self_summary import Chain
from scaled.rl import Rl
from tests.contexts import CONFIG, LENGTH, hints, network, policy, segment
from tests.mirror import calls
from tests.mirror.layouts import close, layouts, play, seeds

G, N = 3, 3
SMALL = rl.Settings(prompts=G, rollouts=N, max_len=LENGTH, budget_tokens=5)
ASKED = dataclasses.replace(Rl.rehearsal(), rl=SMALL, length=LENGTH, heldout=0, max_failed_share=1.0)


def on_one(
    c: Rl, state: dict, before: dict, chains: list[Chain], rewards: torch.Tensor, told: list | None = None, lost=()
) -> tuple[rl.Step, dict]:
    """The step of `ref.rl`, and its gradients by name."""
    script = calls.Script(chains, rewards, told, lost)
    model, played = policy(state), [script.rollout(n) for n in range(len(chains))]
    found = rl.improve(c.rl, model, policy(before) if c.rl.payment.kl else None, played)
    return found, {name: g for (name, _), g in zip(model.named_parameters(), found.gradients, strict=True)}


@settings(max_examples=12, deadline=None, derandomize=True, phases=(Phase.explicit, Phase.generate))
@given(
    layouts,
    seeds,
    st.sampled_from(["none", "plain", "filtered"]),
    st.sampled_from([0.0, 0.3]),
    st.integers(1, 2),
    st.integers(1, 4),
    st.sampled_from([LENGTH, 8 * LENGTH]),
    st.sampled_from([1.0, 0.7]),
)
def test_a_step(layout, seed, replay, beta, longest, micro, length, temperature):
    """Loss, gradient and what else is told are those of `ref.rl.improve` within 1e-10 in float64, whatever is replayed,
    charged for, or cut over ranks, of which some may hold padding alone."""
    g = torch.Generator().manual_seed(seed)
    state, before = network(seed % 5), network(seed % 5 + 1)
    mine = policy(state)
    chains = [Chain([segment(g, mine) for _ in range(1 + n % longest)], finished=True) for n in range(G * N)]
    rewards = torch.randn(G * N, generator=g, dtype=torch.float64)
    small = dataclasses.replace(
        SMALL,
        replay=replay,
        payment=rl.RewardCoefficients(effort_price=0.0, invalid_call=0.0, kl=beta),
        temperature=temperature,
    )
    c = dataclasses.replace(ASKED, rl=small, cp=layout["cp"], ep=layout["ep"], micro_rows=micro, length=length)
    figures, grads, asked, arrived = play(layout, calls.rl_step, c, CONFIG, state, before, chains, rewards)
    found, wanted = on_one(c, state, before, chains, rewards)
    close(figures["loss"], found.loss)
    close(figures["reward"], found.rewards.mean().item())
    close(figures["drift"], found.drift.mean().item())
    close(figures["engine_kl"], found.engine.mean().item())
    close(figures["mismatch"], found.gap.abs().quantile(0.5).item()) if found.gap.numel() else None
    assert grads.keys() == wanted.keys()
    largest = max(float(x.abs().max()) for x in wanted.values())
    for name, x in wanted.items():
        close(grads[name], x, largest)
    close(figures["grad_norm"] ** 2, sum(float(x.square().sum()) for x in wanted.values()))
    assert arrived and asked == [2 * G + n // N for n in range(G * N)]
    assert figures["tokens"] == found.tokens == sum(int(s.sampled.sum()) for chain in chains for s in chain.segments)
    assert figures["success"] == pytest.approx(sum(n % 3 == 0 for n in range(G * N)) / (G * N))
    lengths = torch.tensor([len(s.tokens) for chain in chains for s in chain.segments])
    costs = packing.Cost.of(CONFIG)(lengths)
    # Costs are dealt in the order in which dp ranks hold them, which is that of the conversations.
    wanted = packing.imbalance(costs, packing.balance(costs, layout["dp"]), layout["dp"])
    assert figures["imbalance"] == pytest.approx(wanted, rel=1e-12)


@settings(max_examples=10, deadline=None, derandomize=True, phases=(Phase.explicit, Phase.generate))
@given(
    layouts,
    seeds,
    st.sampled_from(["none", "plain"]),
    st.integers(1, 2),
    st.integers(1, 4),
    st.sampled_from([LENGTH, 8 * LENGTH]),
    st.sampled_from([1.0, 0.7]),
    st.sampled_from(["reverse", "forward", "js"]),
    st.sampled_from([0.0, 0.3, 1.0]),
)
def test_a_step_with_hints(layout, seed, replay, longest, micro, length, temperature, kind, share):
    """The same for the loss of hints, wherever a message and its teacher's sequence, which may be longer than a row,
    were dealt to."""
    g, state = torch.Generator().manual_seed(seed), network(seed % 5)
    mine = policy(state)
    chains = [Chain([segment(g, mine) for _ in range(1 + n % longest)], finished=True) for n in range(G * N)]
    told = [[hints(g, s) for s in chain.segments] if torch.rand((), generator=g) < share else [] for chain in chains]
    rewards = torch.randn(G * N, generator=g, dtype=torch.float64)
    small = dataclasses.replace(SMALL, replay=replay, temperature=temperature, feedback=rl.Feedback(1.7, kind))
    c = dataclasses.replace(ASKED, rl=small, cp=layout["cp"], ep=layout["ep"], micro_rows=micro, length=length)
    figures, grads, *_ = play(layout, calls.rl_step, c, CONFIG, state, state, chains, rewards, told)
    found, wanted = on_one(c, state, state, chains, rewards, told)
    close(figures["loss"], found.loss)
    assert figures.get("distilled", 0) == found.distilled and ("divergence" in figures) == (
        found.divergence is not None
    )
    if found.divergence is not None:
        close(figures["divergence"], found.divergence)
    largest = max(float(x.abs().max()) for x in wanted.values())
    for name, x in wanted.items():
        close(grads[name], x, largest)


@settings(max_examples=10, deadline=None, derandomize=True, phases=(Phase.explicit, Phase.generate))
@given(
    layouts,
    seeds,
    st.sets(st.integers(0, G * N - 1), max_size=G * N - 1),
    st.integers(1, 3),
    st.sampled_from([0.0, 0.3]),
)
@example(dict(dp=4, cp=1, ep=2), 0, {0, 1, 2}, 1, 0.3)  # the first rank's share, which is a group
@example(dict(dp=2, cp=2, ep=2), 1, {0, 1, 2, 3, 4}, 2, 0.0)  # a dp rank's
@example(dict(dp=4, cp=1, ep=4), 0, {0, 2, 3, 4, 5, 6, 7}, 2, 0.3)  # fewer segments are left than dp ranks
def test_environments_that_fail(layout, seed, lost, longest, beta):
    """What is left is trained on as on one rank, also where a rank or a group has nothing left. Nobody's drift is that
    of those that failed."""
    g, state, before = torch.Generator().manual_seed(seed), network(seed % 5), network(seed % 5 + 1)
    mine = policy(state)
    chains = [Chain([segment(g, mine) for _ in range(1 + n % longest)], finished=True) for n in range(G * N)]
    told = [[hints(g, s) for s in chain.segments] for chain in chains]
    rewards = torch.randn(G * N, generator=g, dtype=torch.float64)
    small = dataclasses.replace(
        SMALL,
        payment=rl.RewardCoefficients(effort_price=0.0, invalid_call=0.0, kl=beta),
        feedback=rl.Feedback(1.7, "reverse"),
    )
    c = dataclasses.replace(ASKED, rl=small, cp=layout["cp"], ep=layout["ep"])
    figures, grads, *_ = play(layout, calls.rl_step, c, CONFIG, state, before, chains, rewards, told, lost)
    found, wanted = on_one(c, state, before, chains, rewards, told, lost)
    close(figures["loss"], found.loss)
    for name, mean in (("reward", found.rewards), ("drift", found.drift), ("engine_kl", found.engine)):
        close(figures[name], mean.nanmean().item())
    assert (
        figures.get("failed", 0) == len(lost)
        and figures["tokens"] == found.tokens
        and figures.get("distilled", 0) == found.distilled
    )
    assert figures["success"] == pytest.approx(
        sum(n % 3 == 0 for n in range(G * N) if n not in lost) / (G * N - len(lost))
    )
    largest = max(float(x.abs().max()) for x in wanted.values())
    for name, x in wanted.items():
        close(grads[name], x, largest)


@settings(max_examples=10, deadline=None, derandomize=True, phases=(Phase.explicit, Phase.generate))
@given(
    layouts,
    seeds,
    st.sampled_from(["dr-grpo", "grpo", "rloo", "dapo", "gspo"]),
    st.sampled_from(["none", "plain"]),
    st.integers(1, 3),
    st.integers(1, 4),
    st.sampled_from([LENGTH, 8 * LENGTH]),
    st.sampled_from([None, 0.05]),
    st.sets(st.integers(0, G * N - 1), max_size=G * N - 1),
)
@example(dict(dp=2, cp=2, ep=2), 0, "grpo", "none", 3, 1, LENGTH, None, {0, 1})
@example(dict(dp=2, cp=2, ep=2), 1, "rloo", "none", 3, 1, LENGTH, None, {0, 1})
@example(dict(dp=2, cp=2, ep=2), 2, "dapo", "none", 3, 1, LENGTH, None, {0, 1})
@example(dict(dp=2, cp=2, ep=2), 3, "gspo", "none", 3, 1, LENGTH, None, {0, 1})
@example(dict(dp=2, cp=2, ep=2), 3, "gspo", "plain", 3, 1, LENGTH, 0.05, set())
def test_a_step_of_every_variant(layout, seed, variant, replay, longest, micro, length, clip, lost):
    """Baselines, deviations, lengths, ratios and budgets are those of all ranks' rollouts, wherever their contexts were
    dealt to and whatever was lost; a rollout that is left alone in its group teaches nothing."""
    g, state = torch.Generator().manual_seed(seed), network(seed % 5)
    mine = policy(state)
    chains = [Chain([segment(g, mine) for _ in range(1 + n % longest)], finished=n % 4 != 1) for n in range(G * N)]
    rewards = torch.randn(G * N, generator=g, dtype=torch.float64)
    small = dataclasses.replace(SMALL, variant=variant, replay=replay, clip_low=clip, clip_high=clip)
    c = dataclasses.replace(ASKED, rl=small, cp=layout["cp"], ep=layout["ep"], micro_rows=micro, length=length)
    figures, grads, *_ = play(layout, calls.rl_step, c, CONFIG, state, state, chains, rewards, None, lost)
    found, wanted = on_one(c, state, state, chains, rewards, None, lost)
    close(figures["loss"], found.loss)
    largest = max(float(x.abs().max()) for x in wanted.values())
    for name, x in wanted.items():
        close(grads[name], x, largest)


@pytest.mark.parametrize("layout", [dict(dp=1, cp=1, ep=1), dict(dp=2, cp=2, ep=2)], ids=str)
def test_a_step_stops_where_too_many_rollouts_failed(layout):
    """On all ranks, wherever those are that failed; exactly the share that is allowed is trained on."""
    g, state = torch.Generator().manual_seed(0), network(0)
    chains = [Chain([segment(g, policy(state))], finished=True) for _ in range(G * N)]
    lost = {2, 7, 8}
    c = dataclasses.replace(ASKED, cp=layout["cp"], ep=layout["ep"], max_failed_share=3 / 9)
    figures, *_ = play(layout, calls.rl_step, c, CONFIG, state, state, chains, torch.zeros(G * N).double(), None, lost)
    assert figures["failed"] == 3
    c = dataclasses.replace(c, max_failed_share=0.3)
    with pytest.raises(
        (EnvironmentFailure, RuntimeError),
        match="of 3 of 9 rollouts failed, more than max_failed_share=0.3; the first because the sandbox is gone",
    ):
        play(layout, calls.rl_step, c, CONFIG, state, state, chains, torch.zeros(G * N).double(), None, lost)


@pytest.mark.parametrize("layout", [dict(dp=1, cp=1, ep=1), dict(dp=2, cp=2, ep=2)], ids=str)
def test_a_step_without_any_rollout_is_refused(layout):
    g, state = torch.Generator().manual_seed(0), network(0)
    chains = [Chain([segment(g, policy(state))], finished=True) for _ in range(G * N)]
    c = dataclasses.replace(ASKED, cp=layout["cp"], ep=layout["ep"])
    with pytest.raises(
        (EnvironmentFailure, RuntimeError), match="no rollout of this step is left to train on: the sandbox is gone"
    ):
        play(layout, calls.rl_step, c, CONFIG, state, state, chains, torch.zeros(G * N).double(), None, range(G * N))


def test_engines_that_differ_are_no_drift():
    """The policy before its first step pays nothing, whatever its sampler computes otherwise: that stands by itself."""
    g, state = torch.Generator().manual_seed(0), network(0)
    chains = [Chain([segment(g, policy(state))], finished=True) for _ in range(G * N)]
    rewards = torch.randn(G * N, generator=g, dtype=torch.float64)
    with torch.no_grad():
        own = [
            policy(state)(s.tokens[None]).logits[0, :-1].log_softmax(-1).gather(1, s.tokens[1:, None])[:, 0]
            for s in (chain.segments[0] for chain in chains)
        ]
    apart = [
        ((c.segments[0].logp[1:] - logp) * c.segments[0].sampled[1:]).sum() for c, logp in zip(chains, own, strict=True)
    ]
    for layout in (dict(dp=1, cp=1, ep=1), dict(dp=2, cp=2, ep=2)):
        c = dataclasses.replace(
            ASKED,
            cp=layout["cp"],
            ep=layout["ep"],
            rl=dataclasses.replace(SMALL, payment=rl.RewardCoefficients(kl=0.3)),
        )
        figures = play(layout, calls.rl_step, c, CONFIG, state, state, chains, rewards)[0]
        assert figures["drift"] == 0
        close(figures["engine_kl"], float(sum(apart) / len(apart)))
        assert abs(figures["engine_kl"]) > 0.01


def test_a_rank_that_holds_padding_alone():
    """Few tokens in long rows: the chunks of the last cp ranks are empty, and the figures are still those of all
    tokens."""
    g, state = torch.Generator().manual_seed(0), network(0)
    chains = [Chain([segment(g, policy(state))], finished=True) for _ in range(G * N)]
    rewards = torch.randn(G * N, generator=g, dtype=torch.float64)
    found = [
        play(
            layout,
            calls.rl_step,
            dataclasses.replace(ASKED, cp=layout["cp"], length=16 * LENGTH),
            CONFIG,
            state,
            state,
            chains,
            rewards,
        )[0]
        for layout in (dict(dp=1, cp=1, ep=1), dict(dp=1, cp=4, ep=1))
    ]
    assert found[0].keys() == found[1].keys() and 0 < found[0]["routing_differs"] < 1
    for name, value in found[0].items():
        close(found[1][name], value)


def test_equal_rewards_teach_nothing():
    """A group that is paid the same throughout has no gradient, on ranks as on one; and a clip leaves nothing as it
    was."""
    g, state = torch.Generator().manual_seed(0), network(0)
    mine = policy(state)
    chains = [Chain([segment(g, mine)], finished=True) for _ in range(G * N)]
    layout = dict(dp=2, cp=2, ep=2)
    c = dataclasses.replace(ASKED, cp=2, ep=2)
    figures, grads, *_ = play(layout, calls.rl_step, c, CONFIG, state, state, chains, torch.ones(G * N).double())
    assert figures["loss"] == 0 and all(not x.any() for x in grads.values())


@pytest.mark.parametrize("layout", [dict(dp=1, cp=1, ep=1), dict(dp=4, cp=1, ep=2), dict(dp=2, cp=2, ep=4)], ids=str)
def test_clipping(layout):
    """One norm over all ranks' parts, experts counted once."""
    state = network(1)
    norm, before, after = play(layout, calls.clipped, CONFIG, state, 0.5)
    close(norm, sum(float(x.square().sum()) for x in before.values()) ** 0.5)
    close(sum(float(x.square().sum()) for x in after.values()) ** 0.5, 0.5 * norm * norm / (norm + 1e-6))
    flat = [torch.cat([x[name].flatten() for name in before]) for x in (before, after)]
    torch.testing.assert_close(flat[1] / flat[1].norm(), flat[0] / flat[0].norm())


def test_settings_that_cannot_be():
    for wrong, name in (
        (dict(rollouts=1), "rollouts"),
        (dict(replay_alpha=1.5), "replay_alpha"),
        (dict(payment=rl.RewardCoefficients(kl=-1.0)), "payment.kl"),
        (dict(temperature=0.0), "temperature"),
        (dict(warmup=-1), "warmup"),
        (dict(lr=float("nan")), "lr"),
    ):
        with pytest.raises(ValueError, match=f"^{name} must"):
            dataclasses.replace(SMALL, **wrong)
    for wrong, name in (
        (dict(rl=dataclasses.replace(SMALL, max_len=999)), "length must hold a context of rl.max_len"),
        (dict(seed=-1), "seed"),
        (dict(timeout=0), "timeout"),
        (dict(max_norm=float("nan")), "max_norm"),
    ):
        with pytest.raises(ValueError, match=name):
            dataclasses.replace(ASKED, **wrong)
    with pytest.raises(ValueError, match="number of ranks, 16"):
        ASKED.check(16)
