"""A player's rollouts are the synchronous sampler's, whatever tools take and whoever is given up; and a group's record keeps every bit."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ref.engine.continuous import ContinuousSampler
from ref.engine.sampler import Sampler
from ref.rl import Played
from ref.self_summary import Chaining, rollout_chains
from scaled.async_rl.player import Player, seed_of
from scaled.async_rl.records import oldest, pack, unpack
from tests.ref.test_continuous import MODELS, talks

HOW = Chaining(24, 9, room=6, request=(3,), resume=(4,), max_segments=3)


class Quiz:
    """Task t is always the same conversation; tools take `seconds` on the average."""

    def __init__(self, seconds=0.0, how=HOW):
        self.seconds, self.how = seconds, how

    def open(self, stream, task):
        (talk,) = talks(random.Random(f"{stream}-{task}"), 1)
        return talk

    def latency(self, stream, task, rollout, turn):
        return random.Random(f"{task}-{rollout}-{turn}").expovariate(1 / self.seconds) if self.seconds else 0.0

    def settle(self, conversation, chain):
        return Played(chain, float(len(conversation.heard)), {"success": float(chain.finished), "written": float(chain.written)})


def same(a, b):
    """Every bit."""
    assert a.reward == b.reward and a.figures == b.figures
    assert (a.chain.finished, a.chain.saved, len(a.chain.segments)) == (b.chain.finished, b.chain.saved, len(b.chain.segments))
    for x, y in zip(a.chain.segments, b.chain.segments, strict=True):
        for name in ("tokens", "sampled", "logp", "version", "experts", "summary"):
            assert getattr(x, name).equal(getattr(y, name)) and getattr(x, name).dtype == getattr(y, name).dtype
        assert x.finished == y.finished


def play(player, now=0.0):
    found = {}
    while player.groups:
        found |= player.tick(now)
        now += 0.01
    return found


@settings(max_examples=15)
@given(st.integers(0, 99), st.integers(1, 4), st.integers(1, 3))
def test_all_at_once_is_the_synchronous_sampler_bit_for_bit(seed, groups, rollouts):
    """With room for all and no latency: the same steps, so the same bits, in float32 too."""
    model = MODELS[seed % 3].float()
    try:
        player = Player(Sampler(model, torch.float32, 5), Quiz(), groups * rollouts, rollouts, seed)
        player.give(range(groups))
        found = play(player)
        quiz = Quiz()
        talks = [quiz.open("rl", n // rollouts) for n in range(groups * rollouts)]
        draws = [torch.Generator().manual_seed(seed_of(seed, "rl", n // rollouts, n % rollouts)) for n in range(groups * rollouts)]
        chains = rollout_chains(ContinuousSampler(model, torch.float32, 5), talks, HOW, 1.0, draws)
        for n, (talk, chain) in enumerate(zip(talks, chains, strict=True)):
            same(found[n // rollouts][n % rollouts], quiz.settle(talk, chain))
    finally:
        MODELS[seed % 3].double()


@settings(max_examples=15)
@given(st.integers(0, 99), st.integers(1, 5), st.sampled_from([0.0, 0.05, 1.0]))
def test_waiting_and_giving_up_change_no_token(seed, slots, seconds):
    """The same tokens with few seats, slow tools, and other groups that come and go."""
    alone = Player(Sampler(MODELS[0], torch.float64), Quiz(), 4, 2, seed)
    alone.give([0, 1])
    wanted = play(alone)
    player, now, found, rng = Player(Sampler(MODELS[0], torch.float64), Quiz(seconds), slots, 2, seed), 0.0, {}, random.Random(seed)
    player.give([7, 0, 8])
    player.give([1])
    with pytest.raises(ValueError, match="group 7 is under way"):
        player.give([7])
    while {0, 1} - set(found):
        if rng.random() < 0.02:
            player.forget([7, 8, 99])
        wait = player.idle(now)
        assert wait < float("inf")
        now += wait
        found |= player.tick(now)
    for group in (0, 1):
        for a, b in zip(found[group], wanted[group], strict=True):
            assert all(x.tokens.equal(y.tokens) for x, y in zip(a.chain.segments, b.chain.segments, strict=True)) and a.figures == b.figures
    player.forget(player.groups)
    assert player.idle(now) == float("inf") and player.engine.free == slots and player.tick(now) == {}


def test_weights_in_flight():
    """Tokens before the swap have the old version, tokens after it the new one; the group is as old as its oldest token."""
    player = Player(Sampler(MODELS[0], torch.float64, 3), Quiz(), 4, 2, 0)
    player.give([0, 1])
    for _ in range(3):
        player.tick(0.0)
    player.load(MODELS[1], 4)
    found = play(player)
    assert player.version == 4 and {oldest(played) for played in found.values()} == {3}
    versions = torch.cat([s.version[s.sampled] for played in found.values() for p in played for s in p.chain.segments])
    assert set(versions.tolist()) == {3, 4}


@settings(max_examples=10)
@given(st.integers(0, 99), st.integers(1, 3))
def test_records_keep_every_bit(seed, rollouts):
    player = Player(Sampler(MODELS[0], torch.float64), Quiz(), 4, rollouts, seed)
    player.give([seed])
    (played,) = play(player).values()
    for a, b in zip(played, unpack(pack(played)), strict=True):
        same(a, b)
    assert oldest(unpack(pack(played))) == oldest(played) == 0


@pytest.mark.parametrize("data", [b"", b"\x08" + b"\0" * 7 + b"{}      ", b"\xff" * 40, b"\x02" + b"\0" * 7 + b"[]"])
def test_what_is_no_record(data):
    with pytest.raises(ValueError, match="not the record of a group"):
        unpack(data)


def test_a_cut_record_is_refused():
    player = Player(Sampler(MODELS[0], torch.float64), Quiz(), 4, 1, 0)
    player.give([0])
    (played,) = play(player).values()
    data = pack(played)
    for size in (7, 8, 60, len(data) // 2, len(data) - 1):
        with pytest.raises(ValueError, match="not the record of a group"):
            unpack(data[:size])


def test_in_the_small_world(tiny_run):
    """Rollouts earn what a batch of the same world would pay them, tools take their mean time, and nothing depends on it."""
    from ref.network import load_hf
    from ref.rl import Settings
    from scaled.rl import Rl
    from sims.microrepo.world import MicroWorld

    checkpoint = tiny_run / "checkpoints" / "sft"
    asked = Rl(checkpoint=str(checkpoint), cp=1, ep=1, length=512, join="self", rl=Settings(max_len=96))
    quick, slow = MicroWorld(asked), MicroWorld(asked, tool_s=0.2)
    wanted = [slow.latency("rl", task, 0, turn) for task in range(40) for turn in range(50)]
    assert sum(wanted) / len(wanted) == pytest.approx(0.2, rel=0.15) and quick.latency("rl", 0, 0, 0) == 0.0
    found = []
    for world, slots in ((quick, 4), (slow, 3)):
        player = Player(Sampler(load_hf(checkpoint).double(), torch.float64), world, slots, 2, 0)
        player.give([0, 1])
        found.append(play(player))
    for group in (0, 1):
        for a, b in zip(found[0][group], found[1][group], strict=True):
            assert [s.tokens.tolist() for s in a.chain.segments] == [s.tokens.tolist() for s in b.chain.segments]
            assert (a.reward, a.figures) == (b.reward, b.figures) and "success" in a.figures
