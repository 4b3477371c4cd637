"""Keys and values in pages: the same bits as in one block, exactly the memory that the contexts need, all of it given
back, and no context that waits for ever where pages are short."""

import gc
import random
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ref.engine.continuous import Continuous, ContinuousSampler
from ref.engine.pages import MIN_SIZE, Pages
from ref.engine.sampler import Sampler
from ref.network import Config, Transformer

SHAPE = Config.tiny(
    9,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    num_experts=3,
    num_experts_per_tok=2,
    moe_intermediate_size=12,
    initializer_range=0.4,
)
STOP = 0


def sampler_of(seed=0, dtype=torch.float64, **changes):
    torch.manual_seed(seed)
    return Sampler(Transformer(Config(**{**vars(SHAPE), **changes})), dtype)


SAMPLER = sampler_of()
SIZE = Pages(SHAPE, 1, 1, torch.float64, torch.device("cpu")).size
MAX_LEN = 3 * SIZE - 7


def without_pages(engine):
    """The engine with its keys and values in one block, as on a GPU."""
    pages, ragged = engine.pages, engine.ragged
    pages.map, pages.memory = None, torch.zeros_like(pages.memory)
    ragged.keys, ragged.values = (x.unbind(0) for x in pages.memory)
    return engine


def resident_bytes(pages):
    """What the operating system holds of the pages' addresses."""
    address, size = pages.memory.data_ptr(), None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *fields = line.split()
        if "-" in first and not first.endswith(":"):
            start, end = (int(part, 16) for part in first.split("-"))
            size = end - start if start <= address < end else None
        elif size is not None and first == "Rss:":
            assert size == pages.memory.numel() * pages.memory.element_size(), "the mapping stands alone"
            return 1024 * int(fields[0])
    raise AssertionError("the mapping is not there")


def draws_of(number):
    return torch.rand(MAX_LEN, dtype=torch.float64, generator=torch.Generator().manual_seed(number))


class Play:
    """Contexts by number, each with a prompt, answers and draws of its own, that an engine decodes in whatever order
    it is driven."""

    def __init__(self, engine, seed):
        self.engine, self.seed = engine, seed
        self.slots, self.over, self.segments, self.turns, self.begun = {}, [], {}, {}, 0

    def begin(self):
        number, self.begun = self.begun, self.begun + 1
        rng = random.Random(f"{self.seed}-{number}")
        prompt = [rng.randrange(9) for _ in range(rng.choice([1, 5, SIZE - 1, SIZE, SIZE + 1, 2 * SIZE]))]
        slot = self.engine.add(prompt, [STOP], draws_of(hash((self.seed, number)) % 2**32), rng.randint(1, 9))
        self.slots[slot], self.turns[number] = number, rng.randint(1, 4)

    def step(self):
        self.over += self.engine.step()

    def answer(self, at):
        """Answers the turn of a slot, or ends its context."""
        slot = self.over.pop(at % len(self.over))
        number = self.slots[slot]
        self.turns[number] -= 1
        if self.engine.turn(slot) is None or not self.turns[number]:
            self.end(slot)
            return
        rng = random.Random(f"{self.seed}-{number}-{self.turns[number]}")
        self.engine.extend(slot, [rng.randrange(9) for _ in range(rng.choice([0, 1, 7, SIZE]))], rng.randint(1, 9))

    def end(self, slot):
        self.over = [other for other in self.over if other != slot]
        self.segments[self.slots.pop(slot)] = self.engine.remove(slot)

    def finish(self):
        """Until all contexts that were begun are over. Every step without a turn to answer must do something."""
        for _ in range(100 * self.begun * MAX_LEN):
            while self.over:
                self.answer(0)
            if not self.slots:
                return
            assert not self.engine.is_idle
            self.step()
        raise AssertionError("contexts that were begun do not end")


def drive(plays, seed, moves):
    """The same random moves for all of them; yields after each."""
    rng = random.Random(seed)
    for _ in range(moves):
        move, at = rng.choice(["step"] * 5 + ["begin", "answer", "leave", "load"]), rng.randrange(100)
        for play in plays:
            if move == "begin" and play.engine.free_slots:
                play.begin()
            elif move == "step":
                play.step()
            elif move == "answer" and play.over:
                play.answer(at)
            elif move == "leave" and play.slots and at < 30:
                play.end(sorted(play.slots)[at % len(play.slots)])
            elif move == "load" and at < 30:
                play.engine.load(play.engine.sampler.model, at, "recompute")
        yield


@settings(max_examples=6, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 5), st.sampled_from([3, 40, 500]))
@example(1, 3, 40)
def test_the_same_bits_as_in_one_block(seed, slots, budget):
    paged, dense = (Continuous(SAMPLER, slots, MAX_LEN, budget=budget) for _ in range(2))
    plays = [Play(paged, seed), Play(without_pages(dense), seed)]
    for _ in drive(plays, seed, 80):
        pass
    for play in plays:
        play.finish()
    a, b = plays
    assert a.segments.keys() == b.segments.keys()
    for number, segment in a.segments.items():
        other = b.segments[number]
        for name in ("tokens", "sampled", "logp", "version", "experts"):
            assert getattr(segment, name).equal(getattr(other, name)), name


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/smaps")
@settings(max_examples=5, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 5), st.sampled_from([3, 500]))
def test_memory_is_that_of_live_contexts(seed, slots, budget):
    """In pages and in bytes, after every move; nothing is left once all contexts are over."""
    gc.collect()
    engine = Continuous(SAMPLER, slots, MAX_LEN, budget=budget)
    pages, play = engine.pages, Play(engine, seed)
    assert pages.page_bytes == 2 * 2 * 2 * 8 * 8 * SIZE, "keys and values, 2 layers, 2 heads of 8 numbers of 8 bytes"
    for _ in drive([play], seed, 60):
        live = [engine.cached_lengths[slot] for slot in play.slots]
        assert pages.in_use == sum(-(-length // SIZE) for length in live)
        assert resident_bytes(pages) == pages.in_use * pages.page_bytes
    play.finish()
    assert pages.in_use == 0 and resident_bytes(pages) == 0


@settings(max_examples=6, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 6), st.sampled_from([3, 500]), st.integers(0, 3))
@example(0, 5, 500, 0)
def test_short_pages(seed, slots, budget, spare):
    """Contexts wait or are put back, never hold more pages than there are, and all end with the tokens that they have
    where pages are not short; the oldest that is ready goes on in every step."""
    limit = 3 * SIZE + spare * SIZE
    short = Continuous(SAMPLER, slots, MAX_LEN, budget=budget, cache_tokens=limit)
    play, free = Play(short, seed), Play(Continuous(SAMPLER, slots, MAX_LEN, budget=budget), seed)
    rng = random.Random(seed)
    for _ in range(80):
        while short.free_slots and rng.random() < 0.5:
            play.begin()
        ready = [slot for slot in play.slots if short.state[slot] == "ready"]
        oldest = min(ready, key=short.ages.__getitem__, default=None)
        before = oldest is not None and (short.cached_lengths[oldest], short.lengths[oldest])
        play.step()
        if oldest is not None:
            assert (short.cached_lengths[oldest], short.lengths[oldest]) > before
        assert short.pages.in_use * SIZE <= limit
        if play.over and rng.random() < 0.3:
            play.answer(rng.randrange(100))
    play.finish()
    assert short.pages.in_use == 0
    while free.begun < play.begun:
        if free.engine.free_slots:
            free.begin()
        else:
            free.step()
            while free.over:
                free.answer(0)
    free.finish()
    for number, segment in free.segments.items():
        other = play.segments[number]
        assert segment.tokens.equal(other.tokens) and segment.experts.equal(other.experts)
        assert torch.allclose(segment.logp, other.logp, rtol=0, atol=1e-6)


def test_a_context_is_put_back_and_read_again():
    """Two contexts of two pages each, and three pages: the older one goes on, the newer one is read twice."""
    engine = Continuous(SAMPLER, 2, 2 * SIZE, budget=1000, cache_tokens=3 * SIZE)
    read, inner = [], engine.ragged.step
    engine.ragged.step = lambda ids, *rest: read.append(len(ids)) or inner(ids, *rest)
    draws = torch.full((2 * SIZE,), 0.5, dtype=torch.float64)
    for prompt in ([1] * (SIZE - 1), [2] * (SIZE - 2)):
        engine.add(prompt, [], draws)
    engine.step()
    assert engine.pages.counts == [1, 1]
    for _ in range(3):
        engine.step()  # the older context enters its second page, then the newer one
    assert engine.cached_lengths == [SIZE + 2, SIZE]
    engine.step()
    assert engine.cached_lengths == [SIZE + 3, SIZE], "the newer one has no second page, and waits"
    assert not engine.is_idle and read[-1] == 1
    while 0 not in engine.step():
        pass
    assert engine.turn(0) is None
    engine.remove(0)
    while 1 not in engine.step():
        pass
    assert len(engine.remove(1).tokens) == 2 * SIZE


def test_the_newest_is_put_back():
    engine = Continuous(SAMPLER, 3, 2 * SIZE, budget=1000, cache_tokens=3 * SIZE)
    draws = torch.full((2 * SIZE,), 0.5, dtype=torch.float64)
    for number in range(3):
        engine.add([number] * (SIZE - 1), [], draws)
    for _ in range(2):
        engine.step()
    assert engine.cached_lengths == [SIZE, SIZE, SIZE]
    engine.step()
    assert engine.cached_lengths == [SIZE + 1, SIZE, 0]


def test_a_newer_context_takes_no_page_of_an_older_one():
    """The first context waits for an answer and keeps its page. The second one, the oldest that is ready, takes that of
    the third, which then takes none of the first."""
    engine = Continuous(SAMPLER, 3, 2 * SIZE, budget=1000, cache_tokens=3 * SIZE)
    draws = torch.full((2 * SIZE,), 0.5, dtype=torch.float64)
    engine.add([3] * 4, [], draws, longest_turn=1)
    engine.add([1] * (SIZE - 1), [], draws)
    engine.add([2] * 4, [], draws)
    for _ in range(2):
        engine.step()
    assert engine.cached_lengths == [4, SIZE, 5]
    engine.step()
    assert engine.cached_lengths == [4, SIZE + 1, 0]


def test_what_is_refused():
    with pytest.raises(ValueError, match=f"cache_tokens must hold a context of max_len={MAX_LEN}.*got {3 * SIZE - 1}"):
        Continuous(SAMPLER, 2, MAX_LEN, cache_tokens=3 * SIZE - 1)
    sampler = ContinuousSampler(SAMPLER.model, torch.float64)
    sampler.cache_tokens = 1
    with pytest.raises(ValueError, match="cache_tokens must hold"):
        sampler.engine(2, MAX_LEN)


@pytest.mark.parametrize("head_dim", [2, 6, 64, 80, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_page_begins_where_one_of_the_operating_system_s_begins(head_dim, dtype):
    import mmap

    config = Config.tiny(9, num_attention_heads=2, num_key_value_heads=2, head_dim=head_dim)
    pages = Pages(config, 2, 300, dtype, torch.device("cpu"))
    assert pages.size >= MIN_SIZE and pages.memory.shape[-2] % pages.size == 0 and pages.memory.shape[-2] >= 300
    assert pages.head_page_bytes % mmap.PAGESIZE == 0 and pages.memory.data_ptr() % mmap.PAGESIZE == 0
    assert not pages.memory.any()


def test_addresses_may_be_more_than_memory():
    """Of a terabyte of addresses only what is written is there."""
    config = Config.tiny(9, num_attention_heads=8, num_key_value_heads=8, head_dim=128, num_hidden_layers=8)
    pages = Pages(config, 512, 2**15, torch.float32, torch.device("cpu"))
    assert pages.memory.numel() * 4 >= 2**40
    pages.resize(511, 5)
    pages.memory[:, :, 511, :, :5] = 1.0
    assert pages.memory[1, -1, 511, -1, 4, -1] == 1
    pages.resize(511, 0)
    assert pages.memory[1, -1, 511, -1, 4, -1] == 0 and pages.in_use == 0
