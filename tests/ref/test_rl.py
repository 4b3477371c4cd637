"""One step of `ref.rl`: the policy gradient written out context by context, sums that do not depend on the cut, and a
loop that learns."""

import inspect
import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lessons.talks import Ids
from ref import dr_grpo, kl, rl, router_replay, textual_feedback
from ref.engine.sampler import Sampler, Segment
from ref.environment import Environment, EnvironmentFailure, Reward, StepResult, TaskSet
from ref.lora import adapt
from ref.messages import Message
from ref.mtp import MTP
from ref.network import Config, Transformer
from ref.rollout import Limits, Rollout
from ref.self_summary import Chain, Chaining, spread
from tests.contexts import CONFIG, hints, network, policy, segment

TINY = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=8)
G, N = 3, 3


def asked(**more) -> rl.Settings:
    return rl.Settings(prompts=G, rollouts=N, budget_tokens=5, **more)


def conversations(seed: int, model: Transformer, longest: int = 2) -> list[Rollout]:
    g = torch.Generator().manual_seed(seed)
    chains = [Chain([segment(g, model) for _ in range(1 + n % longest)], finished=True) for n in range(G * N)]
    return [
        Rollout(chain, {"tests": r}) for chain, r in zip(chains, torch.randn(G * N, generator=g).tolist(), strict=True)
    ]


def compute_logp(c: rl.Settings, network: Transformer, s: Segment, experts: list | None = None) -> torch.Tensor:
    """log π of every token of a context but the first, [1, T−1]."""
    hidden = network(s.tokens[None], logits=False, experts=experts).hidden
    return network.logprob(hidden[0, :-1] / c.temperature, s.tokens[1:])[None]


def replayed_experts(c: rl.Settings, s: Segment) -> list | None:
    """What the training pass over a context uses, per layer."""
    last = torch.arange(2).expand(1, 2, 2)  # the last token predicts nothing
    layers = [x.long() for x in torch.cat((s.experts, last)).unbind(1)]
    if c.replay == "filtered":
        layers = [partial(router_replay.replay, replayed=x, k=2, alpha=c.replay_alpha) for x in layers]
    return None if c.replay == "none" else layers


def written_out(
    c: rl.Settings, model: Transformer, reference: Transformer, played: list[Rollout]
) -> tuple[float, list]:
    """Loss and gradients, every context a batch of its own, by autograd."""
    chains = [p.chain for p in played]
    logp_of = partial(compute_logp, c)
    drift = torch.zeros(len(chains), dtype=torch.float64)
    for n, chain in enumerate(chains if c.payment.kl else ()):
        for s in chain.segments:
            with torch.no_grad():
                drift[n] += (kl.token_kl(logp_of(model, s), logp_of(reference, s), "k1") * s.sampled[None, 1:]).sum()
    rewards = torch.tensor([p.reward for p in played], dtype=torch.float64) - c.payment.kl * drift
    advantages = (rewards.view(G, N) - rewards.view(G, N).mean(1, keepdim=True)).flatten()
    loss = 0.0
    for s, a in zip([s for chain in chains for s in chain.segments], spread(advantages, chains), strict=True):
        logp = logp_of(model, s, replayed_experts(c, s))
        part = dr_grpo.policy_loss(
            logp, s.logp[None, 1:], a[None], s.sampled[None, 1:], budget=float(G * N * c.budget_tokens)
        )
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
    c = asked(temperature=temperature, payment=rl.RewardCoefficients(kl=beta), replay=replay)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rl, "ROWS", rows)
        found = rl.improve(c, model, reference, played, map_fn=lambda f, parts: [f(part) for part in parts[::-1]][::-1])
    loss, wanted = written_out(c, model, reference, played)
    assert found.loss == pytest.approx(loss, abs=1e-10)
    largest = max(float(x.abs().max()) for x in wanted)
    for ours, theirs in zip(found.gradients, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10 * (1 + largest))
    assert found.tokens == sum(int(s.sampled.sum()) for p in played for s in p.chain.segments) == len(found.gap)
    assert (found.dropped is not None) == (replay == "filtered")


VARIANTS = ("dr-grpo", "grpo", "rloo", "dapo", "gspo")
ALL_VARIANTS = pytest.mark.parametrize("variant", VARIANTS)


def test_the_default_has_the_bits_of_plain_dr_grpo():
    """The formula without options, in its order of operations."""
    model = policy(network(3))
    rollouts = conversations(3, model, 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rl, "ROWS", 4)
        found = rl.improve(asked(), model, None, rollouts)
        batches, (own, _) = rl.make_microbatches([rollout.chain for rollout in rollouts])
    rewards = torch.tensor([rollout.reward for rollout in rollouts], dtype=torch.float64).view(G, N)
    relative = rewards - rewards[:, :1]
    advantages = (relative - relative.mean(1, keepdim=True)).flatten()
    owner = torch.tensor([n for n, rollout in enumerate(rollouts) for _ in rollout.chain.segments])
    of_rows = torch.cat((advantages[owner], torch.zeros(len(own) - len(owner), dtype=torch.float64)))
    loss, gradients = 0.0, []
    for batch in batches:
        mask, A = batch.own[:, 1:], of_rows[batch.rows][:, None]
        logp = rl.compute_own_logp(model, model(batch.ids, logits=False).hidden, batch.ids, batch.own)
        log_ratio = (logp - batch.behavior[:, 1:]).where(mask, 0)
        clipped = torch.where(A > 0, log_ratio.clamp(max=math.log1p(0.2)), log_ratio.clamp(min=math.log1p(-0.2)))
        part = -(mask.double() * (clipped.where((A != 0) & mask, 0).exp() * A.where(mask, 0))).sum() / (G * N * 5)
        loss, gradients = loss + part.item(), [*gradients, rl.compute_gradients(part, model)]
    assert len(batches) > 2 and found.loss == loss
    for ours, theirs in zip(found.gradients, rl.sum_gradients(gradients), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("variant", "advantage", "loss"),
    [
        ("dr-grpo", 0.5, -(0.5 * (1.2 + 1 + 1) - 0.5 * (0.8 + 1)) / (2 * 5)),
        ("rloo", 1.0, -((1.2 + 1 + 1) - (0.8 + 1)) / (2 * 5)),
        ("grpo", 0.5**0.5, -(0.5**0.5) * ((1.2 + 1 + 1) / 3 - (0.8 + 1) / 2) / 2),
        ("dapo", 0.5**0.5, -(0.5**0.5) * (1.28 + 1 + 1) / (3 + 2)),
        ("gspo", 0.5**0.5, -(0.5**0.5) * (1.0004 - 0.9997) / 2),
    ],
)
def test_every_variant_by_hand(variant, advantage, loss):
    """Rewards 1 and 0. The good rollout has two contexts, with ratios 1.5 and 1, 1; the bad one was cut off, with
    ratios 0.5 and 1. Geometric means of the ratios: 1.5^⅓ and 0.5^½, both outside of gspo's clip."""
    model = policy(network(1))
    c = rl.Settings(prompts=1, rollouts=2, budget_tokens=5, variant=variant)

    def context(tokens, sampled, ratios):
        ids, mask, T = torch.tensor(tokens), torch.tensor(sampled) > 0, len(tokens)
        experts, version = torch.zeros(T - 1, 2, 2, dtype=torch.int16), torch.zeros(T, dtype=torch.long)
        s = Segment(ids, mask, torch.zeros(T, dtype=torch.float64), version, experts, True)
        log_ratio = torch.tensor(ratios, dtype=torch.float64).log()
        s.logp[mask] = compute_logp(c, model, s)[0].detach()[mask[1:]] - log_ratio
        return s

    good = Chain([context([3, 4], [0, 1], [1.5]), context([5, 6, 7], [0, 1, 1], [1.0, 1.0])], finished=True)
    bad = Chain([context([8, 9, 2, 1], [0, 1, 0, 1], [0.5, 1.0])], finished=False)
    rollouts = [Rollout(good, {"tests": 1.0}), Rollout(bad, {"tests": 0.0})]
    assert rl.improve(c, model, None, rollouts).loss == pytest.approx(loss, rel=2e-6)
    objective = c.objective
    found = dr_grpo.group_advantages(torch.tensor([[1.0, 0.0]]), baseline=objective.baseline, scale=objective.scale)
    assert found.tolist()[0] == pytest.approx([advantage, -advantage], rel=2e-6)


def write_out_variant(c: rl.Settings, model: Transformer, rollouts: list[Rollout]) -> tuple[torch.Tensor, list]:
    """Loss and gradients by the papers' formulas, the tokens of a rollout's contexts in one row."""
    kept = [n for n, rollout in enumerate(rollouts) if not rollout.failure]
    tokens = sum(rollouts[n].chain.num_sampled_tokens for n in kept)
    divisor = {"dapo": tokens, "grpo": len(kept), "gspo": len(kept)}.get(c.variant, len(kept) * c.budget_tokens)
    loss = torch.zeros((), dtype=torch.float64)
    for n in kept:
        group = torch.tensor([rollouts[m].reward for m in kept if m // N == n // N], dtype=torch.float64)
        others = torch.tensor([rollouts[m].reward for m in kept if m // N == n // N and m != n], dtype=torch.float64)
        advantage = rollouts[n].reward - (others if c.variant == "rloo" else group).mean()
        if c.variant in ("grpo", "dapo", "gspo") and len(group) > 1:
            advantage = advantage / (group.std() + 1e-6)
        if not len(others) or c.variant == "dapo" and not rollouts[n].chain.finished:
            continue
        parts = []
        for s in rollouts[n].chain.segments:
            log_ratio = compute_logp(c, model, s, replayed_experts(c, s))[0] - s.logp[1:]
            parts.append(log_ratio[s.sampled[1:]])
        ratio = torch.cat(parts).exp()
        if c.variant == "gspo":
            ratio = ratio.log().mean().exp().expand(1)
        low, high = {"dapo": (0.2, 0.28), "gspo": (3e-4, 4e-4)}.get(c.variant, (0.2, 0.2))
        low, high = (low if c.clip_low is None else c.clip_low), (high if c.clip_high is None else c.clip_high)
        surrogate = torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
        loss = loss - (surrogate.mean() if c.variant in ("grpo", "gspo") else surrogate.sum()) / divisor
    parameters = list(model.parameters())
    return loss.detach(), list(torch.autograd.grad(loss, parameters, allow_unused=True)) if loss.requires_grad else []


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from(VARIANTS),
    st.integers(0, 2**20),
    st.sampled_from(["none", "plain"]),
    st.integers(1, 3),
    st.sampled_from([None, 0.05]),
    st.sampled_from([(1, 0), (4, 0), (32, 0), (32, 60)]),
    st.sets(st.integers(0, G * N - 1), max_size=G * N - 1),
)
@example("grpo", 0, "none", 3, None, (4, 0), {0, 1})
@example("rloo", 1, "none", 3, None, (4, 0), {0, 1})
@example("dapo", 2, "none", 3, None, (4, 0), {0, 1})
@example("gspo", 3, "plain", 3, 0.05, (4, 0), {0, 1})
def test_every_variant_is_its_paper_s_however_micro_batches_are_cut(variant, seed, replay, longest, clip, cut, failed):
    model = policy(network(seed % 5))
    rollouts = conversations(seed, model, longest)
    for n, rollout in enumerate(rollouts):
        rollout.chain.finished = n % 4 != 1
    rollouts = [replace(x, terms={}, failure="its sandbox died") if n in failed else x for n, x in enumerate(rollouts)]
    c = asked(variant=variant, replay=replay, clip_low=clip, clip_high=clip, micro_tokens=cut[1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rl, "ROWS", cut[0])
        found = rl.improve(c, model, None, rollouts)
    loss, wanted = write_out_variant(c, model, rollouts)
    assert found.loss == pytest.approx(loss.item(), abs=1e-10)
    largest = max((float(x.abs().max()) for x in wanted if x is not None), default=0.0)
    for ours, theirs in zip(found.gradients, wanted or [None] * len(found.gradients), strict=True):
        theirs = torch.zeros_like(ours) if theirs is None else theirs
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10 * (1 + largest))


@ALL_VARIANTS
def test_a_variant_brings_its_own_clip_and_a_setting_replaces_it(variant):
    member = dr_grpo.FAMILY[variant.replace("-", "_")]
    assert asked(variant=variant).objective == member
    assert asked(variant=variant, clip_high=0.5).objective == replace(member, clip_high=0.5)
    assert asked(variant=variant, clip_low=0.0).objective == replace(member, clip_low=0.0)


def test_an_unknown_variant_is_refused_with_the_names_of_all():
    assert len(VARIANTS) == len(dr_grpo.FAMILY)
    with pytest.raises(ValueError, match="^variant must be dr-grpo or grpo or rloo or dapo or gspo; got 'ppo'$"):
        rl.Settings.__post_init__(SimpleNamespace(variant="ppo"))  # tests also check the types of what is passed
    with pytest.raises(ValueError, match="clip_high must be at least 0, got -1"):
        asked(clip_high=-1.0)


def with_hints(seed: int, played: list[Rollout], share: float = 0.7) -> list[Rollout]:
    """The same conversations, some of them with hints for their contexts."""
    g = torch.Generator().manual_seed(seed)
    told = [[hints(g, s) for s in p.chain.segments] if torch.rand((), generator=g) < share else [] for p in played]
    return [replace(p, hints=one) for p, one in zip(played, told, strict=True)]


def told_of(played: list[Rollout]) -> list:
    """Every context that has hints, with them."""
    return [(s, p.hints[n]) for p in played if p.hints for n, s in enumerate(p.chain.segments)]


def taught(c: rl.Settings, model: Transformer, played: list[Rollout]) -> tuple[float, int, list]:
    """The loss of the hints without its weight, how many tokens it is of, and its gradients: every message by itself,
    by its formula."""
    total, tokens = torch.zeros((), dtype=torch.float64), 0
    for s, some in told_of(played):
        for hint in some:
            context = torch.cat(
                (s.tokens[: hint.at], torch.tensor(hint.tokens, dtype=torch.long), s.tokens[hint.at : hint.end])
            )
            for other in sorted((o for o in some if o.at < hint.at), key=lambda o: -o.at):
                context = torch.cat(
                    (context[: other.at], torch.tensor(other.tokens, dtype=torch.long), context[other.at :])
                )
            n = hint.end - hint.begin
            last = torch.arange(2).expand(1, 2, 2)
            layers = (
                [x.long()[: hint.end] for x in torch.cat((s.experts, last)).unbind(1)] if c.replay == "plain" else None
            )
            logs = (
                model(s.tokens[None, : hint.end], experts=layers).logits[0, hint.begin - 1 : -1] / c.temperature
            ).log_softmax(-1)
            with torch.no_grad():
                logt = (model(context[None]).logits[0, -n - 1 : -1] / c.temperature).log_softmax(-1)
            mixed = torch.logaddexp(logs, logt) - math.log(2)
            total = (
                total
                + {
                    "reverse": (logs.exp() * (logs - logt)).sum(),
                    "forward": (logt.exp() * (logt - logs)).sum(),
                    "js": ((logs.exp() * (logs - mixed)).sum() + (logt.exp() * (logt - mixed)).sum()) / 2,
                }[c.feedback.divergence]
            )
            tokens += n
    loss = total / (G * N * c.budget_tokens)
    if not tokens:
        return 0.0, 0, [None] * len(list(model.parameters()))
    return loss.item(), tokens, list(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True))


@settings(max_examples=20, deadline=None)
@given(
    st.integers(0, 2**20),
    st.sampled_from(["none", "plain"]),
    st.integers(1, 3),
    st.sampled_from([1.0, 0.7]),
    st.sampled_from([1, 4, 32]),
    st.sampled_from(["reverse", "forward", "js"]),
    st.sampled_from([0.0, 0.7, 1.0]),
)
def test_hints_add_their_loss_message_by_message(seed, replay, longest, temperature, rows, kind, share):
    """Its weight times the gradient of each message by itself, over the same constant, however micro-batches are
    cut."""
    model = policy(network(seed % 5))
    played = with_hints(seed, conversations(seed, model, longest), share)
    c = asked(temperature=temperature, replay=replay, feedback=rl.Feedback(weight=2.5, divergence=kind))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rl, "ROWS", rows)
        found, plain = (
            rl.improve(c, model, None, played),
            rl.improve(replace(c, feedback=rl.Feedback()), model, None, played),
        )
    loss, tokens, wanted = taught(c, model, played)
    assert found.loss == plain.loss and found.distilled == tokens and plain.distilled == 0 and plain.divergence is None
    assert found.divergence == (pytest.approx(loss * G * N * c.budget_tokens / tokens, abs=1e-10) if tokens else None)
    largest = max((float(x.abs().max()) for x in wanted if x is not None), default=0.0)
    for ours, without, theirs in zip(found.gradients, plain.gradients, wanted, strict=True):
        change = torch.zeros_like(ours) if theirs is None else 2.5 * theirs
        torch.testing.assert_close(ours - without, change, rtol=0, atol=1e-10 * (1 + largest))


def test_where_no_hint_is_given_every_bit_is_as_it_was():
    model = policy(network(0))
    played = conversations(0, model)
    plain = rl.improve(asked(), model, None, played)
    silent = [replace(p, hints=[[] for _ in p.chain.segments]) for p in played]
    for c, some in (
        (asked(), with_hints(1, played)),
        (asked(feedback=rl.Feedback(1.0)), played),
        (asked(feedback=rl.Feedback(1.0)), silent),
    ):
        found = rl.improve(c, model, None, some)
        assert found.loss == plain.loss and found.distilled == 0 and found.divergence is None
        assert all(torch.equal(a, b) for a, b in zip(found.gradients, plain.gradients, strict=True))


def test_hints_teach_where_rewards_do_not():
    """Equal rewards, and a step against the gradient of the hints brings the policy nearer to the hinted one."""
    model = policy(network(2))
    played = [replace(p, terms={"tests": 1.0}) for p in with_hints(2, conversations(2, model))]
    c = asked(feedback=rl.Feedback(1.0, "forward"))
    found = rl.improve(c, model, None, played)
    told = [(s, textual_feedback.hinted(s, some)) for s, some in told_of(played)]

    def apart(old):
        total = 0.0
        for (s, where), teacher in zip(told, old, strict=True):
            total += float(
                textual_feedback.divergence(
                    model(s.tokens[None]).logits[0][where.student - 1], teacher, "forward"
                ).sum()
            )
        return total

    with torch.no_grad():
        teachers = [
            model(where.tokens[None]).logits[0][where.teacher - 1]
            if len(where.student)
            else torch.zeros(0, 30).double()
            for _, where in told
        ]
        before = apart(teachers)
        assert found.loss == 0 and before == pytest.approx(found.divergence * found.distilled)
        for p, gradient in zip(model.parameters(), found.gradients, strict=True):
            p -= 1e-3 * gradient
        assert apart(teachers) < before


def test_hints_of_some_contexts_are_refused():
    model = policy(network(0))
    played = conversations(0, model)
    played[1] = replace(played[1], hints=[[]])
    says = "hints must be given for all 2 contexts of rollout 1, or for none; got 1"
    with pytest.raises(ValueError, match=says):
        rl.improve(asked(feedback=rl.Feedback(1.0)), model, None, played)
    with pytest.raises(ValueError, match="weight must be at least 0, got -1"):
        rl.Feedback(-1.0)


def test_a_batch_holds_every_context_once_with_what_belongs_to_it():
    played = conversations(3, policy(network(0)), 3)
    chains = [p.chain for p in played]
    segments = [(n, s) for n, chain in enumerate(chains) for s in chain.segments]
    batches, (own, behavior) = rl.make_microbatches(chains)
    seen = []
    for batch in batches:
        assert (
            batch.ids.shape == batch.own.shape == batch.behavior.shape
            and len(batch.ids) == rl.ROWS
            and batch.ids.shape[1] % rl.MULTIPLE == 0
        )
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
    assert sorted(seen) == list(range(len(segments))) and int(own.sum()) == sum(
        int(s.sampled.sum()) for _, s in segments
    )
    longest = [int(batch.lengths.max()) for batch in batches]
    assert longest == sorted(longest, reverse=True), "the longest are dealt first"


def test_equal_rewards_teach_nothing_and_a_control_may_permute_them():
    model = policy(network(0))
    played = conversations(0, model)
    c = asked()
    same = rl.improve(c, model, None, [Rollout(p.chain, {"tests": 1.0}) for p in played])
    assert same.loss == 0 and all(not g.any() for g in same.gradients if g is not None)
    turned = rl.improve(replace(c, shuffle_rewards=True), model, None, played, seed=5)
    order = torch.randperm(G * N, generator=torch.Generator().manual_seed(5)).tolist()
    wanted = rl.improve(c, model, None, [replace(p, terms=played[n].terms) for p, n in zip(played, order, strict=True)])
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
    assert (
        beside.mtp_loss > 0 and any(g is not None and g.any() for g in beside.mtp_gradients) and alone.mtp_loss is None
    )
    half = rl.improve(c, model, None, played, mtp=layers, mtp_weight=1.0)
    for a, b in zip(beside.mtp_gradients, half.mtp_gradients, strict=True):
        assert (a is None) == (b is None) and (a is None or torch.allclose(a, 2 * b, rtol=1e-12, atol=0))


def test_gradients_add_up_in_float32_and_nothing_is_nothing():
    size = 2.0**-9
    parts = [[torch.tensor([1.0]).bfloat16(), None], [torch.tensor([size]).bfloat16(), None], [None, None]]
    total = rl.sum_gradients(parts)
    assert total[0].dtype == torch.float32 and total[0].item() == 1 + size and total[1] is None  # in bfloat16 it is 1


def test_gradients_of_a_loss_leave_the_network_as_it_was():
    model = torch.nn.ModuleList([torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)])
    loss = model[0](torch.ones(2)).sum()
    first, again = rl.compute_gradients(loss, model, retain_graph=True), rl.compute_gradients(loss, model)
    assert [g is None for g in first] == [False, False, True, True] and torch.equal(first[0], again[0])
    assert all(p.grad is None for p in model.parameters())


class Even:
    """One turn of one token is an episode; it is worth 1 where the token is even. Token 0 ends the turn by itself."""

    even = 0.0

    def reset(self):
        return [Message("user", "1")]

    def reward(self):
        return Reward({"even": self.even}, {"success": self.even})

    def close(self):
        """Nothing is held."""

    def step(self, message):
        self.even = float(int(message.content) % 2 == 0) if message.content else 1.0
        return StepResult((), True)


class Coins:
    """A task set of coins."""

    is_slow, tools = False, ()

    def task(self, stream, number):
        return SimpleNamespace(key=f"{stream}-{number}")

    def environment(self, task, number):
        return Even()

    def transcript(self, rollout):
        return None

    def hints(self, rollouts, seed):
        return [[] for _ in rollouts]


def test_the_loop_learns():
    torch.manual_seed(0)
    model = Transformer(Config.tiny(10, **TINY, num_experts=0, intermediate_size=16))
    assert (
        isinstance(Even(), Environment)
        and isinstance(Coins(), TaskSet)
        and isinstance(rl.Plain(model, 0.01), rl.Trainer)
    )
    c = rl.Settings(steps=30, prompts=4, rollouts=8, lr=0.01, warmup=0, decay=0, budget_tokens=1)
    limits, rewards = Limits(Chaining(4, longest_summary=1, room=0, join="none"), turn_tokens=1), []
    sampler = Sampler(model, torch.float32)
    rl.train(
        c,
        rl.Plain(model, c.lr),
        sampler,
        Coins(),
        Ids((0,)),
        limits,
        observe=lambda done: rewards.append(done.result.rewards.mean().item()),
    )
    assert sum(rewards[:3]) / 3 < 0.75 and sum(rewards[-3:]) / 3 > 0.95, rewards


def test_adapters_are_those_of_the_settings():
    """`rl.lora` without a trainer that has them would train all weights."""
    model, limits = policy(network(0)), Limits(Chaining(4, longest_summary=1, room=0, join="none"), turn_tokens=1)
    for rank, trainer in ((2, rl.Plain(model, 0.1)), (0, rl.Plain(adapt(policy(network(0)), 3), 0.1))):
        own = 3 - 3 * (rank > 0)
        with pytest.raises(
            ValueError, match=f"rl.lora={rank}, but the network has adapters of rank {own}; see ref.lora.adapt"
        ):
            rl.train(rl.Settings(lora=rank), trainer, Sampler(model), Coins(), Ids((0,)), limits)
    with pytest.raises(ValueError, match="lora must be at least 0, got -1"):
        rl.Settings(lora=-1)


def test_the_text_of_the_loop_fits_on_a_screen():
    """Whoever reads the report can read the loop beside it."""
    assert len(inspect.getsource(rl.train).splitlines()) <= 60


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**20), st.sets(st.integers(0, G * N - 1), min_size=1, max_size=G * N - 1))
def test_a_failed_rollout_is_in_no_mean_and_no_sum(seed, failed):
    """The gradient is that of the others, by hand: means over those that are left in each group, and a constant that
    counts them."""
    model = policy(network(seed % 5))
    rollouts = conversations(seed, model)
    c = asked()
    some = [
        replace(one, terms={}, failure="its sandbox died") if n in failed else one for n, one in enumerate(rollouts)
    ]
    found = rl.improve(c, model, None, some)
    assert found.rewards.isnan().nonzero()[:, 0].tolist() == sorted(failed)
    kept = [n for n in range(G * N) if n not in failed]
    loss = torch.zeros((), dtype=torch.float64)
    for n in kept:
        group = [rollouts[m].reward for m in kept if m // N == n // N]
        advantage = torch.tensor([rollouts[n].reward - sum(group) / len(group)], dtype=torch.float64)
        for s in rollouts[n].chain.segments:
            hidden = model(s.tokens[None], logits=False).hidden
            logp = model.logprob(hidden[0, :-1] / c.temperature, s.tokens[1:])[None]
            budget = float(len(kept) * c.budget_tokens)
            loss = loss + dr_grpo.policy_loss(logp, s.logp[None, 1:], advantage, s.sampled[None, 1:], budget=budget)
    assert found.loss == pytest.approx(loss.item(), abs=1e-6)
    wanted = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    for ours, theirs in zip(found.gradients, wanted, strict=True):
        torch.testing.assert_close(ours, torch.zeros_like(ours) if theirs is None else theirs, rtol=0, atol=1e-6)


def test_a_step_without_any_rollout_is_refused():
    rollouts = [Rollout(Chain(), failure="no more sandboxes") for _ in range(G * N)]
    with pytest.raises(EnvironmentFailure, match="no rollout of this step is left to train on: no more sandboxes"):
        rl.improve(asked(), policy(network(0)), None, rollouts)


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 2**20), st.integers(1, 600))
def test_a_bound_on_tokens_cuts_micro_batches_and_changes_nothing_else(seed, tokens):
    model = policy(network(seed % 5))
    rollouts = conversations(seed, model, 3)
    batches, _ = rl.make_microbatches([one.chain for one in rollouts], tokens)
    assert all(len(batch.ids) == 1 or batch.ids.numel() <= tokens for batch in batches)
    plain, found = (rl.improve(asked(micro_tokens=n), model, None, rollouts) for n in (0, tokens))
    assert found.loss == pytest.approx(plain.loss, abs=1e-10)
    for a, b in zip(plain.gradients, found.gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)
