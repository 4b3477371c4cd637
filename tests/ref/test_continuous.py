"""Continuous batching samples what one conversation alone would, whoever joins, leaves, waits, or changes the weights
beside it."""

import random
from dataclasses import dataclass, field
from unittest import mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ref.engine import continuous
from ref.engine.continuous import Continuous, ContinuousSampler
from ref.engine.sampler import Sampler, sample
from ref.network import Config, KVCache, Transformer
from ref.self_summary import Chaining
from tests.talks import chains_of, contexts_of

SHAPE = Config.tiny(
    9,
    hidden_size=16,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    num_experts=5,
    num_experts_per_tok=2,
    moe_intermediate_size=12,
    intermediate_size=20,
    initializer_range=0.4,
)
STOP = 0


def network(seed=0, **changes):
    torch.manual_seed(seed)
    return Transformer(Config(**{**vars(SHAPE), **changes})).double().requires_grad_(False)


MODELS = [network(seed) for seed in range(3)]
DENSE = network(7, num_experts=0)


@dataclass
class Talk:
    """Answers `turns` − 1 turns with some tokens, none at times, and remembers what it heard."""

    prompt: list[int]
    turns: int
    size: int
    stop: int = STOP
    heard: list = field(default_factory=list)

    def reply(self, turn):
        self.heard.append(turn)
        return (
            [1 + (len(self.heard) + n) % 8 for n in range((self.size * len(self.heard)) % 12)]
            if len(self.heard) < self.turns
            else None
        )


def talks(rng, number):
    return [
        Talk([rng.randrange(9) for _ in range(rng.randint(1, 9))], rng.randint(1, 4), rng.randint(0, 7))
        for _ in range(number)
    ]


def generators(number):
    return [torch.Generator().manual_seed(seed) for seed in range(number)]


def alike(a, b):
    """Tokens, versions and experts to the last bit, log-probs to rounding."""
    assert (
        a.tokens.equal(b.tokens)
        and a.sampled.equal(b.sampled)
        and a.version.equal(b.version)
        and a.finished == b.finished
    )
    assert a.experts.equal(b.experts)
    assert torch.allclose(a.logp, b.logp, rtol=0, atol=1e-6)  # stored in float32


@settings(max_examples=25)
@given(
    st.integers(0, 2**32),
    st.integers(1, 8),
    st.integers(1, 14),
    st.integers(1, 50),
    st.sampled_from([0.0, 0.7, 1.0]),
    st.booleans(),
)
@example(0, 3, 2, 1, 1.0, False)
@example(0, 3, 2, 2, 1.0, False)
def test_the_same_tokens_as_one_by_one(seed, number, slots, max_len, temperature, dense):
    model = DENSE if dense else MODELS[0]
    one, many = talks(random.Random(seed), number), talks(random.Random(seed), number)
    alone = [
        contexts_of(Sampler(model, torch.float64, 4), [talk], max_len, temperature, [g])[0]
        for talk, g in zip(one, generators(number), strict=True)
    ]
    sampler = ContinuousSampler(model, torch.float64, 4)
    sampler.slots = slots
    for a, b in zip(alone, contexts_of(sampler, many, max_len, temperature, generators(number)), strict=True):
        alike(a, b)
    assert [talk.heard for talk in one] == [talk.heard for talk in many]


LIMITS = st.fixed_dictionaries(
    {}, optional={"turn_tokens": st.integers(1, 9), "tokens": st.integers(1, 60), "turns": st.integers(1, 3)}
)


@settings(max_examples=20)
@given(st.integers(0, 2**32), st.sampled_from(["self", "separate", "truncate", "none"]), st.integers(1, 6), LIMITS)
def test_chains_do_not_wait_and_are_the_same(seed, join, slots, limits):
    """Also where a limit ends turns or chains."""
    how = Chaining(24, 9, room=6, request=(3,), resume=(4,), instruction=(5, 6), max_segments=3, join=join)
    one, many = talks(random.Random(seed), 5), talks(random.Random(seed), 5)
    waves = chains_of(Sampler(MODELS[0], torch.float64), one, how, 1.0, generators(5), **limits)
    sampler = ContinuousSampler(MODELS[0], torch.float64)
    sampler.slots = slots
    for a, b in zip(waves, chains_of(sampler, many, how, 1.0, generators(5), **limits), strict=True):
        assert a.finished == b.finished and a.saved == b.saved and len(a.segments) == len(b.segments)
        for x, y in zip(a.segments, b.segments, strict=True):
            alike(x, y)
            assert x.summary.equal(y.summary)
    assert [talk.heard for talk in one] == [talk.heard for talk in many]


@pytest.mark.parametrize("longest", [1, 3, 4, 5])
def test_a_turn_that_ends_with_its_context_is_cut_off(longest):
    """By either engine, though it is as long as a turn may be."""
    found = []
    for kind in (Sampler, ContinuousSampler):
        engine = kind(MODELS[0], torch.float64).engine(1, 7)
        slot = engine.add(
            [1, 2, 3], [], torch.rand(7, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), longest
        )
        while not engine.step():
            pass
        turn = engine.turn(slot)
        found.append((None if turn is None else len(turn.tokens), engine.remove(slot).tokens.tolist()))
    assert found[0] == found[1] and found[0][0] == (longest if longest < 4 else None)


class Written:
    """Notes, beside an engine, which version read which position of which slot, again and again where contexts are read
    again, and how many positions were copied from another slot."""

    def __init__(self, engine):
        self.engine, self.reader, self.copied, inner, copy = engine, {}, 0, engine.ragged.step, engine.pages.copy

        def copy_prefix(source, row, length):
            read = self.reader[engine.slots[source]]
            self.reader.setdefault(engine.slots[row], {}).update({t: read[t] for t in range(length)})
            self.copied += length
            copy(source, row, length)

        engine.pages.copy = copy_prefix

        def step(ids, row, position, rows):
            for r, t in zip(row.tolist(), position.tolist(), strict=True):
                self.reader.setdefault(engine.slots[r], {})[t] = engine.sampler.version
            return inner(ids, row, position, rows)

        engine.ragged.step = step


def by_hand(rollout, readers, draws, temperature):
    """Tokens and log-probs of one context whose position t was read with the weights of version readers[t], one token
    after the other."""
    cache = KVCache(SHAPE, 1, len(draws), torch.float64)
    assert not rollout.sampled[len(readers) + 1 :].any() and sorted(readers) == [*range(len(readers))]
    for t in range(min(len(readers), len(rollout.tokens) - 1)):
        out = MODELS[readers[t] % 3](rollout.tokens[None, t : t + 1], cache=cache)
        if rollout.sampled[t + 1]:
            assert int(rollout.version[t + 1]) == readers[t]
            token, logp = sample(out.logits[:, -1], temperature, draws[None, t + 1])
            assert int(token) == int(rollout.tokens[t + 1])
            assert float(logp) == pytest.approx(float(rollout.logp[t + 1]), abs=1e-6)


@settings(max_examples=15)
@given(st.integers(0, 2**32), st.integers(1, 6), st.integers(1, 20))
@example(6, 2, 20)  # two rows change places, and both go on
@example(528, 4, 1)  # weights change between the token that fills a context and the next step
def test_swaps_joins_waits_and_leaves(seed, slots, budget):
    """An engine is driven at random. Every context, finished or taken out, is what its own tokens, draws and weights
    give, one by one."""
    drive(seed, slots, budget)


@settings(max_examples=15)
@given(st.integers(0, 2**32), st.integers(2, 6), st.integers(1, 20), st.integers(1, 9))
@example(0, 4, 3, 1)
def test_contexts_that_begin_alike_are_what_they_are_alone(seed, slots, budget, shared):
    """The same, where many contexts begin with the same tokens, and copy what others have read."""
    with mock.patch.object(continuous, "MIN_SHARED", shared):
        drive(seed, slots, budget, [[1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4][: 4 + 2 * n] for n in range(5)])


def drive(seed, slots, budget, openings=([],)):
    """Random moves; every context that leaves is compared with its reading by hand. Returns the tokens copied."""
    rng, max_len = random.Random(seed), 30
    engine = Continuous(Sampler(MODELS[0], torch.float64), slots, max_len, budget=budget)
    notes, held, left, over = Written(engine), {}, 0, set()
    for _ in range(60):
        move = rng.choice(["step"] * 6 + ["join", "join", "answer", "answer", "leave", "load"])
        if move == "join" and engine.free_slots:
            (talk,) = talks(rng, 1)
            draws = torch.rand(
                max_len, dtype=torch.float64, generator=torch.Generator().manual_seed(rng.randrange(2**32))
            )
            slot = engine.add(rng.choice(openings) + talk.prompt, [STOP], draws)
            notes.reader.pop(slot, None)
            held[slot] = talk, draws
        elif move == "step":
            over |= set(engine.step())
        elif move == "answer" and over:
            slot = over.pop()
            turn = engine.turn(slot)
            answer = None if turn is None else held[slot][0].reply(turn.tokens)
            if answer is not None:
                engine.extend(slot, answer)
                continue
            by_hand(engine.remove(slot, turn is not None), notes.reader.get(slot, {}), held.pop(slot)[1], 1.0)
            left += 1
        elif move == "leave" and held and rng.random() < 0.3:
            slot = rng.choice(sorted(held))
            over.discard(slot)
            by_hand(engine.remove(slot, False), notes.reader.get(slot, {}), held.pop(slot)[1], 1.0)
        elif move == "load":
            engine.load(MODELS[(engine.sampler.version + 1) % 3], engine.sampler.version + 1)
    return notes.copied


def test_a_group_reads_its_opening_once():
    """Eight contexts begin with the same 20 tokens, four of them with 10 more, which only those share."""
    engine = Continuous(Sampler(MODELS[0], torch.float64), 8, 60, budget=100)
    sizes, opening = read(engine), [1 + n % 8 for n in range(20)]
    draws = torch.full((60,), 0.5, dtype=torch.float64)
    for number in range(8):
        engine.add(opening + ([3] * 10 if number < 4 else []) + [number], [99], draws)
    engine.step()
    assert sizes == [31], "the others wait"
    engine.step()
    assert sizes[1] == 8 and engine.lengths == [33, *[32] * 3, *[22] * 4]


@pytest.mark.parametrize("cache", ["keep", "recompute"])
def test_nothing_is_copied_from_older_weights(cache):
    """Neither keys nor experts, whether older contexts go on with what they have or are read again."""
    engine = Continuous(Sampler(MODELS[0], torch.float64), 3, 60, budget=100)
    sizes, prompt = read(engine), [1 + n % 8 for n in range(30)]
    draws = torch.full((60,), 0.5, dtype=torch.float64)
    engine.add(prompt, [99], draws)
    engine.step()
    engine.load(MODELS[1], 1, cache)
    late = engine.add(prompt, [99], draws)
    engine.step()
    assert sizes == [30, (1 if cache == "keep" else 31) + 30]
    engine.add(prompt, [99], draws)
    engine.step()
    assert sizes[2] == 3, "the first context of the present weights is a source"
    for slot in (late, 2):
        segment = engine.remove(slot)
        logits = MODELS[1](segment.tokens[None, :30])
        assert segment.experts[:30].equal(torch.stack(logits.experts, 1).to(torch.int16))
        token, logp = sample(logits.logits[:, -1], 1.0, draws[None, 30])
        assert int(token) == int(segment.tokens[30]) and float(logp) == pytest.approx(float(segment.logp[30]), abs=1e-6)


def test_copies_happen():
    """The property above would hold if nothing were ever copied."""
    with mock.patch.object(continuous, "MIN_SHARED", 2):
        assert drive(0, 4, 20, [[1, 2, 3, 4, 5, 6]]) > 20


@settings(max_examples=20)
@given(st.integers(0, 2**32), st.integers(2, 5))
def test_recomputed_contexts_are_the_new_weights_alone(seed, steps):
    """After "recompute", the next token is what the new weights give for the whole context; "keep" gives something
    else."""
    rng = random.Random(seed)
    talk, draws = talks(rng, 1)[0], torch.rand(30, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    logps = {}
    for cache in ("keep", "recompute"):
        engine = Continuous(Sampler(MODELS[0], torch.float64), 3, 30)
        slot = engine.add(talk.prompt, [99], draws)  # no token ends its turn
        for _ in range(steps):
            engine.step()
        before = engine.remove(slot)  # freed and taken anew, to read what it holds
        slot = engine.add(before.tokens.tolist(), [99], draws)
        engine.sampler.load(MODELS[0], 0)
        engine.step()
        engine.load(MODELS[1], 1, cache)
        engine.step()
        after = engine.remove(slot)
        tokens = after.tokens[:-1]
        logits = MODELS[1](tokens[None]).logits[:, -1]
        token, logp = sample(logits, 1.0, draws[None, len(tokens)])
        logps[cache] = float(after.logp[-1]) - float(logp) if int(token) == int(after.tokens[-1]) else 1.0
        assert after.version[-2:].tolist() == [0, 1]
        old = MODELS[0](tokens[None]).experts
        assert after.experts[: len(tokens) - 1].equal(torch.stack(old, 1).to(torch.int16)[: len(tokens) - 1])
    assert abs(logps["recompute"]) < 1e-6 < abs(logps["keep"])


def read(engine):
    """A list that grows by the number of tokens that each step of the engine reads."""
    sizes, inner = [], engine.ragged.step

    def step(ids, row, position, rows):
        sizes.append(len(ids))
        return inner(ids, row, position, rows)

    engine.ragged.step = step
    return sizes


def test_a_waiting_context_costs_nothing_and_a_prompt_one_step():
    """Tokens that the network reads: each once; a prompt in one step, next to other contexts' single tokens."""
    engine = Continuous(Sampler(MODELS[0], torch.float64), 4, 40, budget=100)
    sizes = read(engine)
    draws = torch.full((40,), 0.5, dtype=torch.float64)
    engine.add([1, 2, 3], [99], draws)
    engine.step()
    engine.add([4] * 10, [99], draws)
    engine.step()
    engine.step()
    assert sizes == [3, 11, 2]
    while not (over := engine.step()):
        pass
    assert over == [1] and engine.turn(1) is None  # cut off by max_len
    sizes.clear()
    engine.step()
    assert sizes == [1]


def test_a_budget_bounds_a_step():
    engine = Continuous(Sampler(MODELS[0], torch.float64), 3, 40, budget=5)
    sizes = read(engine)
    for number in range(3):
        engine.add([number] * 20, [99], torch.full((40,), 0.5, dtype=torch.float64))
    for _ in range(12):
        engine.step()
    assert max(sizes) <= 3 + 5 and sum(sizes[:8]) >= 8 * 6


def test_a_budget_bounds_a_step_in_which_a_whole_prompt_is_copied():
    """The last token of the copy is read, and the budget of the others is what it was."""
    engine = Continuous(Sampler(MODELS[0], torch.float64), 3, 40, budget=5)
    sizes, draws = read(engine), torch.full((40,), 0.5, dtype=torch.float64)
    engine.add([1] * 20, [99], draws)
    while engine.lengths[0] < 22:
        engine.step()
    engine.add([1] * 20, [99], draws)
    engine.add([2] * 20, [99], draws)
    engine.step()
    assert sizes[-1] == 1 + 1 + (1 + 5)


def test_what_is_refused():
    with pytest.raises(ValueError, match="slots must be at least 1; got 0"):
        Continuous(Sampler(MODELS[0], torch.float64), 0, 10)
    with pytest.raises(ValueError, match="temperature must be"):
        Continuous(Sampler(MODELS[0], torch.float64), 1, 10, temperature=-1.0)
    engine = Continuous(Sampler(MODELS[0], torch.float64), 1, 10)
    draws = torch.rand(10, dtype=torch.float64)
    for prompt in ([], [9], [-1]):
        with pytest.raises(ValueError, match="prompt must hold tokens 0 to 8"):
            engine.add(prompt, [STOP], draws)
    with pytest.raises(ValueError, match="draws must be 10 numbers"):
        engine.add([1], [STOP])
    slot = engine.add([1], [STOP], draws)
    with pytest.raises(ValueError, match="all slots are taken"):
        engine.add([1], [STOP], draws)
    with pytest.raises(ValueError, match="slot 0 is ready, not over"):
        engine.extend(slot, [1])
    engine.remove(slot)
    with pytest.raises(ValueError, match="slot 0 is free"):
        engine.remove(slot)
    assert engine.step() == []


def test_a_full_seat_that_leaves_is_forgotten():
    """A turn ends at the last position, and its answer does not fit. Before the next step would return the slot, it is
    given up."""
    engine = Continuous(Sampler(MODELS[0], torch.float64), 1, 3)
    for number in range(500):
        draws = torch.rand(3, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
        slot = engine.add([1], [STOP], draws)
        while not engine.step():
            pass
        if engine.lengths[slot] == 3 and engine.turn(slot) is not None:
            engine.extend(slot, [2])
            assert engine.full == [slot]
            engine.remove(slot)
            assert engine.step() == [] and engine.free_slots == 1
            return
        engine.remove(slot)
    raise AssertionError("no turn ended at the last position")
