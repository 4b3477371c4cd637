"""A player's rollouts are the synchronous sampler's, whatever tools take and whoever is given up; and a group's record
keeps every bit."""

import random
import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lessons.talks import Ids, Talk
from ref.engine.continuous import ContinuousSampler
from ref.engine.sampler import Sampler
from ref.environment import EnvironmentFailure, Reward
from ref.rl import Settings
from ref.rollout import Limits, rollout
from ref.self_summary import Chaining
from ref.textual_feedback import Hint
from ref.transcript import ROLES, STATES, Call, Todo, Transcript, Turn
from scaled.async_rl.player import TRIES, Player, Setup, seed_of
from scaled.async_rl.records import oldest, pack, unpack
from scaled.async_rl.services import own_versions
from tests.ref.test_continuous import MODELS, talks

HOW = Chaining(24, 9, room=6, request=(3,), resume=(4,), max_segments=3)
ASKED = Settings(prompts=1, rollouts=2)


class Heard(Talk):
    """A conversation that earns a point for each turn. `seconds`: what each turn's tools take; in the turn `hang`, they
    take ten more."""

    def __init__(self, inner, seconds=(), hang=-1, fails=False):
        super().__init__(inner)
        self.seconds, self.hang, self.fails = seconds, hang, fails

    def step(self, message):
        turn = len(self.inner.heard)
        time.sleep(self.seconds[turn % len(self.seconds)] if self.seconds else 0.0)
        if turn == self.hang:
            if self.fails:
                raise EnvironmentFailure("its sandbox has died")
            time.sleep(10)
        return super().step(message)

    def reward(self):
        return Reward({"turns": float(len(self.inner.heard))}, {"success": 1.0})


class Quiz:
    """Task t is always the same conversation; tools take `seconds` on the average. Rollout number `bad` of task 0 hangs
    or fails at its first turn, the first `times` times."""

    tools = ()
    kind = Heard

    def __init__(self, seconds=0.0, bad=None, times=0, fails=False):
        self.seconds, self.bad, self.times, self.fails = seconds, bad, times, fails

    @property
    def is_slow(self):
        return self.seconds > 0 or self.bad is not None

    def task(self, stream, number):
        return SimpleNamespace(key=f"{stream}-{number}", number=number)

    def environment(self, task, number):
        (talk,) = talks(random.Random(task.key), 1)
        rng = random.Random(f"{task.number}-{number}")
        seconds = [rng.expovariate(1 / self.seconds) for _ in range(9)] if self.seconds else []
        if (task.number, number) == (0, self.bad) and self.times:
            self.times -= 1
            return self.kind(talk, seconds, 0, self.fails)
        return self.kind(talk, seconds)

    def transcript(self, rollout):
        return None

    def hints(self, rollouts, seed):
        return [[] for _ in rollouts]


def setup(quiz=None, **limits):
    return Setup(quiz or Quiz(), Ids((0,)), Limits(HOW, **limits), ASKED)


def same(a, b):
    """Every bit."""
    assert a.terms == b.terms and a.metrics == b.metrics and a.failure == b.failure and a.transcript == b.transcript
    assert [[*some] for some in a.hints] == [[*some] for some in b.hints]
    assert (a.chain.finished, a.chain.saved, len(a.chain.segments)) == (
        b.chain.finished,
        b.chain.saved,
        len(b.chain.segments),
    )
    for x, y in zip(a.chain.segments, b.chain.segments, strict=True):
        for name in ("tokens", "sampled", "logp", "version", "experts", "summary"):
            assert getattr(x, name).equal(getattr(y, name)) and getattr(x, name).dtype == getattr(y, name).dtype
        assert x.finished == y.finished


def play(player):
    found = {}
    while player.groups:
        time.sleep(min(1.0, player.idle()))
        found |= player.tick()
    return found


@settings(max_examples=15)
@given(st.integers(0, 99), st.integers(1, 4), st.integers(1, 3))
def test_all_at_once_is_the_synchronous_sampler_bit_for_bit(seed, groups, rollouts):
    """With room for all and no latency: the same steps, so the same bits, in float32 too."""
    model = MODELS[seed % 3].float()
    try:
        player = Player(Sampler(model, torch.float32, 5), setup(), groups * rollouts, rollouts, seed)
        player.give(range(groups))
        found = play(player)
        quiz, numbers = Quiz(), [divmod(n, rollouts) for n in range(groups * rollouts)]
        make = [partial(quiz.environment, quiz.task("rl", group), number) for group, number in numbers]
        seeds = [seed_of(seed, "rl", group, number) for group, number in numbers]
        wanted = rollout(ContinuousSampler(model, torch.float32, 5), make, Ids((0,)), Limits(HOW), 1.0, seeds)
        for (group, number), one in zip(numbers, wanted, strict=True):
            mine = found[group][number]
            same(replace(mine, terms={"turns": mine.terms["turns"]}), one)
    finally:
        MODELS[seed % 3].double()


@settings(max_examples=8)
@given(st.integers(0, 99), st.integers(1, 5), st.sampled_from([0.0, 0.004, 0.02]))
def test_waiting_and_giving_up_change_no_token(seed, slots, seconds):
    """The same tokens with few slots, slow tools, and other groups that come and go."""
    alone = Player(Sampler(MODELS[0], torch.float64), setup(), 4, 2, seed)
    alone.give([0, 1])
    wanted = play(alone)
    player, found, rng = (
        Player(Sampler(MODELS[0], torch.float64), setup(Quiz(seconds)), slots, 2, seed),
        {},
        random.Random(seed),
    )
    player.give([7, 0, 8])
    player.give([1])
    with pytest.raises(ValueError, match="group 7 is under way"):
        player.give([7])
    while {0, 1} - set(found):
        if rng.random() < 0.02:
            player.forget([7, 8, 99])
        wait = player.idle()
        assert wait < float("inf")
        time.sleep(wait)
        found |= player.tick()
    for group in (0, 1):
        for a, b in zip(found[group], wanted[group], strict=True):
            assert (
                all(x.tokens.equal(y.tokens) for x, y in zip(a.chain.segments, b.chain.segments, strict=True))
                and a.metrics == b.metrics
            )
    player.forget(player.groups)
    assert player.idle() == float("inf") and player.engine.free_slots == slots and player.tick() == {}


@pytest.mark.parametrize("fails", [False, True])
def test_an_environment_that_fails_is_tried_again_and_delays_nobody(fails):
    """It dies, or hangs for longer than it may: the others are sampled meanwhile, the episode begins anew, and gives
    the same tokens."""
    alone = Player(Sampler(MODELS[0], torch.float64), setup(), 4, 2, 3)
    alone.give([0, 1])
    wanted = play(alone)
    player = Player(
        Sampler(MODELS[0], torch.float64), setup(Quiz(0.001, bad=1, times=1, fails=fails), seconds=0.5), 4, 2, 3
    )
    player.give([0, 1])
    found = play(player)
    assert player.failures == 1 and not found[0][1].failure
    assert fails or [*found] == [1, 0], "the other group has waited for it"
    for group in (0, 1):
        for a, b in zip(found[group], wanted[group], strict=True):
            assert all(x.tokens.equal(y.tokens) for x, y in zip(a.chain.segments, b.chain.segments, strict=True))


def test_a_rollout_whose_environment_fails_again_and_again_is_left_out():
    player = Player(Sampler(MODELS[0], torch.float64), setup(Quiz(0.001, bad=0, times=99, fails=True)), 4, 2, 3)
    player.give([0])
    first, second = play(player)[0]
    assert first.failure == "its sandbox has died" and not second.failure and player.failures == 2
    assert not first.terms and not first.metrics and not first.chain.finished
    for a, b in zip((first, second), unpack(pack([first, second])), strict=True):
        assert a.failure == b.failure and (a.failure or a.terms == b.terms)


def test_a_group_whose_environments_all_fail_is_tried_again_and_then_has_failed():
    """It has nothing to train on, and ends no run: what is left of a step is trained on."""

    class Broken(Quiz):
        is_slow = False

        def environment(self, task, number):
            raise EnvironmentFailure("there are no sandboxes")

    player = Player(Sampler(MODELS[0], torch.float64), setup(Broken()), 4, 2, 3)
    player.give([0])
    (group,) = play(player).values()
    assert [one.failure for one in group] == ["there are no sandboxes"] * 2 and player.failures == 2 * 2 * TRIES
    assert [one.failure for one in unpack(pack(group))] == ["there are no sandboxes"] * 2 and oldest(group, 7) == 7
    assert len(own_versions(group)) == 0


def test_weights_in_flight():
    """Tokens before the swap have the old version, tokens after it the new one; the group is as old as its oldest
    token."""
    player = Player(Sampler(MODELS[0], torch.float64, 3), setup(), 4, 2, 0)
    player.give([0, 1])
    for _ in range(3):
        player.tick()
    player.load(MODELS[1], 4)
    found = play(player)
    assert player.version == 4 and {oldest(played, 4) for played in found.values()} == {3}
    versions = torch.cat([s.version[s.sampled] for played in found.values() for p in played for s in p.chain.segments])
    assert set(versions.tolist()) == {3, 4}


def hints(rng):
    """Of the contexts of a rollout."""
    number = partial(rng.randrange, 99)
    contexts = range(rng.randrange(3))
    return [[Hint(number(), (number(), number()), number(), 99) for _ in range(rng.randrange(3))] for _ in contexts]


def transcript(rng):
    """With every field filled, or left out."""
    word, flag = partial(rng.choice, ("", "read", "été\n")), partial(rng.choice, (True, False))
    calls = [Call(word(), word(), word(), flag(), flag(), rng.choice((None, (1, 3)))) for _ in range(rng.randrange(4))]
    turns = (Turn(rng.choice(ROLES), word()), Turn("assistant", word(), tuple(calls)))
    todos = [Todo(word(), state) for state in rng.sample(STATES, 2)]
    return rng.choice((None, Transcript(), Transcript(turns, tuple(todos), 1, rng.randrange(9), rng.randrange(99))))


@settings(max_examples=10)
@given(st.integers(0, 99), st.integers(1, 3))
def test_records_keep_every_bit(seed, rollouts):
    player, rng = Player(Sampler(MODELS[0], torch.float64), setup(), 4, rollouts, seed), random.Random(seed)
    player.give([seed])
    (played,) = play(player).values()
    played = [replace(one, hints=hints(rng), transcript=transcript(rng)) for one in played]
    for a, b in zip(played, unpack(pack(played)), strict=True):
        same(a, b)
    assert oldest(unpack(pack(played)), 5) == oldest(played, 5) == 0
    assert len({pack(played) for _ in range(9)}) == 1, "equal groups have equal bytes"


@pytest.mark.parametrize("data", [b"", b"\x08" + b"\0" * 7 + b"{}      ", b"\xff" * 40, b"\x02" + b"\0" * 7 + b"[]"])
def test_what_is_no_record(data):
    with pytest.raises(ValueError, match="not the record of a group"):
        unpack(data)


def test_a_cut_record_is_refused():
    player = Player(Sampler(MODELS[0], torch.float64), setup(), 4, 1, 0)
    player.give([0])
    (played,) = play(player).values()
    data = pack(played)
    for size in (7, 8, 60, len(data) // 2, len(data) - 1):
        with pytest.raises(ValueError, match="not the record of a group"):
            unpack(data[:size])


def test_in_the_small_world(tiny_run):
    """Rollouts earn what a batch of the same tasks would earn, tools take their mean time, and nothing depends on
    it."""
    from recipe.small.micro_world import CheckpointTasks
    from ref.network import load_hf
    from scaled.rl import Rl

    checkpoint = tiny_run / "checkpoints" / "sft"
    asked = Rl(checkpoint=str(checkpoint), cp=1, ep=1, length=512, join="self", rl=Settings(max_len=96))
    quick, slow = CheckpointTasks(asked), CheckpointTasks(asked, tool_s=0.004)
    wanted = [slow.latency(slow.task("rl", task), 0, turn) for task in range(40) for turn in range(50)]
    assert sum(wanted) / len(wanted) == pytest.approx(0.004, rel=0.15) and not quick.is_slow and slow.is_slow
    found = []
    for tasks, slots in ((quick, 4), (slow, 3)):
        sampler = Sampler(load_hf(checkpoint).double(), torch.float64)
        player = Player(sampler, Setup(tasks, tasks.language, tasks.limits, asked.rl), slots, 2, 0)
        player.give([0, 1])
        found.append(play(player))
    for group in (0, 1):
        for a, b in zip(found[0][group], found[1][group], strict=True):
            assert [s.tokens.tolist() for s in a.chain.segments] == [s.tokens.tolist() for s in b.chain.segments]
            assert (a.terms, a.metrics) == (b.terms, b.metrics) and "success" in a.metrics
