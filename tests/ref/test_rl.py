"""One step of `ref.rl`: the policy gradient written out context by context, sums that do not depend on the cut, and a loop that learns."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ref import dr_grpo, kl, rl, router_replay
from ref.engine.sampler import Sampler
from ref.mtp import MTP
from ref.network import Config, Transformer
from ref.self_summary import Chain, spread
from tests.contexts import CONFIG, network, policy, segment

TINY = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=8)
G, N = 3, 3


def asked(**more) -> rl.Settings:
    return rl.Settings(prompts=G, rollouts=N, budget_tokens=5, **more)


def conversations(seed: int, model: Transformer, longest: int = 2) -> list[rl.Played]:
    g = torch.Generator().manual_seed(seed)
    chains = [Chain([segment(g, model) for _ in range(1 + n % longest)], finished=True) for n in range(G * N)]
    return [rl.Played(chain, r) for chain, r in zip(chains, torch.randn(G * N, generator=g).tolist(), strict=True)]


def written_out(c: rl.Settings, model: Transformer, reference: Transformer, played: list[rl.Played]) -> tuple[float, list]:
    """Loss and gradients, every context a batch of its own, by autograd."""
    chains = [p.chain for p in played]

    def logp_of(network, s, experts=None):
        hidden = network(s.tokens[None], logits=False, experts=experts).hidden
        return network.logprob(hidden[0, :-1] / c.temperature, s.tokens[1:])[None]

    drift = torch.zeros(len(chains), dtype=torch.float64)
    for n, chain in enumerate(chains if c.payment.kl else ()):
        for s in chain.segments:
            with torch.no_grad():
                drift[n] += (kl.token_kl(logp_of(model, s), logp_of(reference, s), "k1") * s.sampled[None, 1:]).sum()
    rewards = torch.tensor([p.reward for p in played], dtype=torch.float64) - c.payment.kl * drift
    advantages = (rewards.view(G, N) - rewards.view(G, N).mean(1, keepdim=True)).flatten()
    loss = 0.0
    for s, a in zip([s for chain in chains for s in chain.segments], spread(advantages, chains), strict=True):
        last = torch.arange(2).expand(1, 2, 2)  # the last token predicts nothing
        layers = [x.long() for x in torch.cat((s.experts, last)).unbind(1)]
        if c.replay == "filtered":
            layers = [partial(router_replay.replay, replayed=x, k=2, alpha=c.replay_alpha) for x in layers]
        logp = logp_of(model, s, None if c.replay == "none" else layers)
        part = dr_grpo.policy_loss(logp, s.logp[None, 1:], a[None], s.sampled[None, 1:], budget=float(G * N * c.budget_tokens))
        part.backward()
        loss += part.item()
    return loss, [p.grad for p in model.parameters()]


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 2**20),
    st.sampled_from(["none", "plain", "filtered"]),
    st.sampled_from([0.0, 0.3]),
    st.integers(1, 3),
    st.sampled_from([1.0, 0.7]),
    st.sampled_from([1, 4, 32]),
)
def test_a_step_is_the_one_written_out_context_by_context(seed, replay, beta, longest, temperature, rows):
    """However micro-batches are cut, and in whatever order they are computed."""
    model, reference = policy(network(seed % 5)), policy(network(seed % 5 + 1))
    played = conversations(seed, model, longest)
    c = asked(temperature=temperature, payment=rl.Payment(kl=beta), replay=replay)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rl, "ROWS", rows)
        found = rl.improve(c, model, reference, played, each=lambda f, parts: [f(part) for part in parts[::-1]][::-1])
    loss, wanted = written_out(c, model, reference, played)
    assert found.loss == pytest.approx(loss, abs=1e-10)
    largest = max(float(x.abs().max()) for x in wanted)
    for ours, theirs in zip(found.gradients, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10 * (1 + largest))
    assert found.tokens == sum(int(s.sampled.sum()) for p in played for s in p.chain.segments) == len(found.gap)
    assert (found.dropped is not None) == (replay == "filtered")


def test_a_batch_holds_every_context_once_with_what_belongs_to_it():
    played = conversations(3, policy(network(0)), 3)
    chains = [p.chain for p in played]
    segments = [(n, s) for n, chain in enumerate(chains) for s in chain.segments]
    batches, (own, behavior) = rl.deal(chains)
    seen = []
    for batch in batches:
        assert batch.ids.shape == batch.own.shape == batch.behavior.shape and len(batch.ids) == rl.ROWS and batch.ids.shape[1] % rl.MULTIPLE == 0
        for at, (row, context) in enumerate(zip(batch.rows.tolist(), batch.contexts, strict=True)):
            if context is None:
                assert row >= len(segments) and batch.lengths[at] == 0 and not batch.own[at].any()
                continue
            n, s = segments[row]
            T = len(s.tokens)
            assert context is s and batch.chain[at] == n and batch.lengths[at] == T and not batch.own[at, T:].any()
            assert torch.equal(batch.ids[at, :T], s.tokens) and torch.equal(batch.own[at, :T], s.sampled)
            assert torch.equal(batch.behavior[at, :T], s.logp)
            seen.append(row)
    assert sorted(seen) == list(range(len(segments))) and int(own.sum()) == sum(int(s.sampled.sum()) for _, s in segments)
    longest = [int(batch.lengths.max()) for batch in batches]
    assert longest == sorted(longest, reverse=True), "the longest are dealt first"


def test_equal_rewards_teach_nothing_and_a_control_may_permute_them():
    model = policy(network(0))
    played = conversations(0, model)
    c = asked()
    same = rl.improve(c, model, None, [rl.Played(p.chain, 1.0) for p in played])
    assert same.loss == 0 and all(not g.any() for g in same.gradients if g is not None)
    turned = rl.improve(c, model, None, played, rearranged=lambda rewards: rewards.roll(1))
    wanted = rl.improve(c, model, None, [rl.Played(p.chain, q.reward) for p, q in zip(played, [played[-1], *played[:-1]], strict=True)])
    assert torch.equal(turned.rewards, wanted.rewards) and turned.loss == wanted.loss


@pytest.mark.parametrize("replay", ["plain", "filtered"])
def test_a_dense_network_has_nothing_to_replay(replay):
    """Its rollouts say so: no layer of theirs was routed."""
    torch.manual_seed(0)
    model = Transformer(replace(CONFIG, num_experts=0)).double()
    played = conversations(0, model)
    for s in (s for p in played for s in p.chain.segments):
        s.experts = s.experts[:, :0]
    found, wanted = (rl.improve(asked(replay=how), model, None, played) for how in (replay, "none"))
    assert found.loss == wanted.loss and found.dropped is None
    assert all(torch.equal(a, b) for a, b in zip(found.gradients, wanted.gradients, strict=True) if a is not None)


def test_draft_layers_learn_beside_and_the_trunk_has_none_of_it():
    model, layers = policy(network(0)), MTP(CONFIG).double()
    played, c = conversations(0, model), asked()
    alone, beside = rl.improve(c, model, None, played), rl.improve(c, model, None, played, mtp=layers, mtp_weight=2.0)
    assert all(torch.equal(a, b) for a, b in zip(alone.gradients, beside.gradients, strict=True))
    assert beside.mtp_loss > 0 and any(g is not None and g.any() for g in beside.mtp_gradients) and alone.mtp_loss is None
    half = rl.improve(c, model, None, played, mtp=layers, mtp_weight=1.0)
    for a, b in zip(beside.mtp_gradients, half.mtp_gradients, strict=True):
        assert (a is None) == (b is None) and (a is None or torch.allclose(a, 2 * b, rtol=1e-12, atol=0))


def test_gradients_add_up_in_float32_and_nothing_is_nothing():
    size = 2.0**-9
    parts = [[torch.tensor([1.0]).bfloat16(), None], [torch.tensor([size]).bfloat16(), None], [None, None]]
    total = rl.total_of(parts)
    assert total[0].dtype == torch.float32 and total[0].item() == 1 + size and total[1] is None  # in bfloat16 it is 1


def test_gradients_of_a_loss_leave_the_network_as_it_was():
    model = torch.nn.ModuleList([torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)])
    loss = model[0](torch.ones(2)).sum()
    first, again = rl.gradients_of(loss, model, again=True), rl.gradients_of(loss, model)
    assert [g is None for g in first] == [False, False, True, True] and torch.equal(first[0], again[0])
    assert all(p.grad is None for p in model.parameters())


class Coin:
    """One turn of one token is a conversation; it is worth 1 where the token is even."""

    def __init__(self):
        self.prompt, self.stop = [1], 0

    def reply(self, turn):
        return None


class Even:
    """A world in which a token is worth 1 where it is even."""

    def play(self, sampler, stream, tasks, generator):
        from ref.self_summary import Chaining, rollout_chains

        how = Chaining(2, longest_summary=1, room=0, join="none")
        chains = rollout_chains(sampler, [Coin() for _ in tasks], how, 1.0, generator)
        return [rl.Played(chain, float(chain.segments[0].tokens[1] % 2 == 0), {"success": 1.0}) for chain in chains]


def test_the_loop_learns():
    torch.manual_seed(0)
    model = Transformer(Config.tiny(10, **TINY, num_experts=0, intermediate_size=16))
    assert isinstance(Even(), rl.World)
    c = rl.Settings(steps=30, prompts=4, rollouts=8, lr=0.01, warmup=0, decay=0, budget_tokens=1)
    rewards = [step.rewards.mean().item() for step in rl.learn(c, model, Sampler(model, torch.float32), Even())]
    assert sum(rewards[:3]) / 3 < 0.75 and sum(rewards[-3:]) / 3 > 0.95, rewards
