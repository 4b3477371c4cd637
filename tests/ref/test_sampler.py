"""What a rollout records, beside a forward pass over its tokens: log-probs, versions, experts, turns; and how tokens
are drawn."""

import math
from dataclasses import dataclass, field

import pytest
import torch
from scipy.stats import chi2

from ref.engine.continuous import Continuous, ContinuousSampler
from ref.engine.sampler import Sampler, sample
from ref.network import Config, Transformer
from tests.talks import contexts_of

SHAPE = Config.tiny(
    9,
    hidden_size=16,
    num_hidden_layers=3,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    num_experts=5,
    num_experts_per_tok=2,
    moe_intermediate_size=12,
    initializer_range=0.4,
)
STOP = 0


@dataclass
class Talk:
    """Answers `turns` − 1 turns with tokens that nobody draws alike, and remembers what it heard."""

    prompt: list[int]
    turns: int
    stop: int = STOP
    heard: list = field(default_factory=list)

    def reply(self, turn):
        self.heard.append(turn)
        return [1 + len(self.heard), 8, 7][: 1 + len(self.heard) % 3] if len(self.heard) < self.turns else None


def network(seed=0, **changes):
    torch.manual_seed(seed)
    return Transformer(Config(**{**vars(SHAPE), **changes}))


def talks():
    """Prompts and lives of unlike length: rows leave the batch at different times."""
    return [Talk([1 + n % 8, *range(1, 1 + n % 5)], 1 + n % 4) for n in range(12)]


def played(model, version=3, temperature=1.0, max_len=60, seed=0):
    conversations = talks()
    sampler = Sampler(model, torch.float32, version=version)
    return contexts_of(sampler, conversations, max_len, temperature, torch.Generator().manual_seed(seed)), conversations


def test_who_spoke_and_what_was_heard():
    """Prompt, turn, answer, turn …: the tokens are these in order, the policy's are marked, the last one is its stop
    token."""
    rollouts, conversations = played(network(), seed=1)
    assert {r.finished for r in rollouts} == {True, False}, "needs rollouts that end and some that are cut off"
    assert len({len(r.tokens) for r in rollouts}) > 5
    for rollout, talk in zip(rollouts, conversations, strict=True):
        replay, tokens, mine = Talk(talk.prompt, talk.turns), list(talk.prompt), [False] * len(talk.prompt)
        for turn in talk.heard:
            tokens, mine = [*tokens, *turn, STOP], mine + [True] * (len(turn) + 1)
            answer = replay.reply(turn) or []
            tokens, mine = tokens + answer, mine + [False] * len(answer)
        rest = len(rollout.tokens) - len(tokens)
        assert rollout.finished == (len(talk.heard) == talk.turns)
        assert rest == 0 if rollout.finished else len(rollout.tokens) == 60
        known = min(len(tokens), 60)
        assert rollout.tokens.tolist()[:known] == tokens[:known] and rollout.sampled.tolist()[:known] == mine[:known]
        assert rollout.sampled[known:].all() and not (rollout.tokens[known:] == STOP).any()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_are_those_of_the_distribution_that_was_drawn_from(temperature):
    model = network()
    for rollout in played(model, temperature=temperature)[0]:
        with torch.no_grad():
            logp = (model(rollout.tokens[None]).logits[0, :-1] / temperature).log_softmax(-1)
        wanted = logp.gather(1, rollout.tokens[1:, None])[:, 0].where(rollout.sampled[1:], 0.0)
        torch.testing.assert_close(rollout.logp[1:], wanted, rtol=0, atol=1e-5)
        assert rollout.logp[0] == 0 and (rollout.logp[rollout.sampled] < 0).all()


def test_the_version_is_that_of_the_weights_and_none_where_the_token_was_given():
    first, second = network(0), network(1)
    for rollout in played(first, version=3)[0]:
        assert torch.equal(rollout.version, torch.where(rollout.sampled, 3, -1))
    sampler = Sampler(first, torch.float32, version=3)
    sampler.load(second, 8)
    now, wanted = (
        contexts_of(s, talks(), 60, generator=torch.Generator().manual_seed(0))
        for s in (sampler, Sampler(second, torch.float32))
    )
    for rollout, other in zip(now, wanted, strict=True):
        assert torch.equal(rollout.tokens, other.tokens) and torch.equal(rollout.logp, other.logp)
        assert torch.equal(rollout.version, torch.where(rollout.sampled, 8, -1))


def test_experts_are_those_that_each_position_of_each_rollout_went_to():
    """In every layer, also behind the prompt's one pass, and after rows have left the batch."""
    model = network()
    for rollout in played(model)[0]:
        with torch.no_grad():
            own = torch.stack(model(rollout.tokens[None]).experts, 1)[:-1]
        assert rollout.experts.shape == (len(rollout.tokens) - 1, 3, 2)
        assert torch.equal(rollout.experts.long().sort(-1)[0], own.sort(-1)[0])


def test_a_dense_network_has_no_experts():
    assert {r.experts.shape[1] for r in played(network(num_experts=0, intermediate_size=12))[0]} == {0}


def test_the_sampler_keeps_its_own_copy():
    model = network()
    sampler = Sampler(model, torch.float32)
    before = contexts_of(sampler, talks(), 30, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    after = contexts_of(sampler, talks(), 30, generator=torch.Generator().manual_seed(1))
    assert all(
        torch.equal(a.tokens, b.tokens) and torch.equal(a.logp, b.logp) for a, b in zip(before, after, strict=True)
    )


@pytest.mark.parametrize("make", [Sampler, ContinuousSampler])
def test_a_sampler_may_take_the_weights_themselves(make):
    """The same tokens as of a copy, and no second network."""
    model = network()
    copied = make(model, torch.bfloat16)
    taken = make(model, torch.bfloat16, copy=False)
    assert taken.model is model and copied.model is not model
    assert all(p.dtype is torch.bfloat16 and not p.requires_grad for p in model.parameters())
    first, second = (
        contexts_of(sampler, talks(), 30, generator=torch.Generator().manual_seed(1)) for sampler in (copied, taken)
    )
    assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("temperature", [1.0, 0.5, 3.0])
def test_tokens_are_drawn_as_often_as_they_are_likely(temperature):
    logits = torch.tensor([0.0, 1.0, -math.inf, 2.0, -1.0, -math.inf])
    tokens, logp = sample(logits.repeat(20_000, 1), temperature, torch.rand(20_000, dtype=torch.float64))
    p = (logits / temperature).softmax(-1)
    seen = torch.bincount(tokens, minlength=6)
    assert (seen[p == 0] == 0).all()
    expected = 20_000 * p[p > 0]
    assert chi2.sf(((seen[p > 0] - expected) ** 2 / expected).sum().item(), 3) > 1e-3
    torch.testing.assert_close(logp, p.log()[tokens])


def test_at_temperature_zero_the_first_of_the_likeliest_is_taken_for_certain():
    tokens, logp = sample(torch.tensor([[0.0, 2.0, 2.0], [5.0, 1.0, 2.0]]), 0.0, None)
    assert tokens.tolist() == [1, 0] and logp.tolist() == [0, 0]


@pytest.mark.parametrize("length", [1, 3, 6])
def test_a_context_that_leaves_before_the_first_step_is_its_prompt(length):
    """As in continuous batching, and another one may come."""
    sampler, prompt = Sampler(network(), torch.float64), [*range(1, 1 + length)]
    draws = torch.rand(5, dtype=torch.float64)
    waves, continuous = sampler.engine(2, 5), Continuous(sampler, 2, 5)
    gone = [engine.remove(engine.add(prompt, [STOP], draws)) for engine in (waves, continuous)]
    for name, value in vars(gone[0]).items():
        other = getattr(gone[1], name)
        assert torch.equal(value, other) and value.dtype == other.dtype if torch.is_tensor(value) else value == other, (
            name
        )
    slots = [waves.add(prompt, [STOP], draws), waves.add([8], [STOP], draws)]
    waves.remove(slots[0])
    with pytest.raises(ValueError, match="is free"):
        waves.remove(slots[0])
    while slots[1] not in waves.step():
        pass
    assert waves.remove(slots[1]).tokens[0] == 8 and waves.free_slots == 2
