"""Rollouts: limits hold in every engine; environments in threads, that fail, and that hang; formats that rewrite;
scripts say what was sampled."""

import threading
import time
import weakref
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lessons.talks import Ids, spoken
from ref.engine.continuous import ContinuousSampler
from ref.engine.sampler import Sampler
from ref.environment import EnvironmentFailure, Reward, StepResult
from ref.messages import Message
from ref.network import Config, Transformer
from ref.rollout import Driver, Entry, EnvironmentCall, Limits, Threads, rollout, sample_rollouts, script_rollout
from ref.self_summary import ChainBuilder, Chaining
from tests.talks import whole

STOP, VOCAB = 0, 6
CONFIG = Config.tiny(
    VOCAB,
    hidden_size=8,
    num_hidden_layers=1,
    num_attention_heads=1,
    num_key_value_heads=1,
    head_dim=8,
    num_experts=0,
    intermediate_size=8,
)
KINDS = (Sampler, ContinuousSampler)


def policy(kind=ContinuousSampler) -> Sampler:
    torch.manual_seed(0)
    return kind(Transformer(CONFIG), torch.float32)


@dataclass
class Echo:
    """Answers `turns` turns with their last word, or with 5. What it is to do when, `faults` says: (method, episode,
    turn) → call."""

    turns: int = 3
    faults: dict = field(default_factory=dict)
    episode: int = 0
    heard: list[str] = field(default_factory=list)
    closed: int = 0

    def happen(self, method: str) -> None:
        self.faults.get((method, self.episode, len(self.heard)), lambda: None)()

    def reset(self) -> list[Message]:
        self.happen("reset")
        return [Message("user", "1 2")]

    def step(self, message: Message) -> StepResult:
        self.happen("step")
        self.heard.append(message.content or "")
        return StepResult(
            [Message("user", f"{(self.heard[-1].split() or ['5'])[-1]} 3")], len(self.heard) == self.turns
        )

    def reward(self) -> Reward:
        self.happen("reward")
        return Reward({"turns": float(len(self.heard))}, {"success": 1.0})

    def close(self) -> None:
        self.closed += 1


@dataclass(frozen=True)
class Named:
    key: str


def fails() -> None:
    raise EnvironmentFailure("the sandbox is gone")


def episodes(faults: dict | None = None, turns: int = 3) -> tuple[list[Echo], object]:
    """Environments of one rollout, episode by episode as they are made, and what makes them."""
    made: list[Echo] = []

    def make() -> Echo:
        made.append(Echo(turns, faults or {}, len(made)))
        return made[-1]

    return made, make


def same(a, b) -> bool:
    return len(a.chain.segments) == len(b.chain.segments) and all(
        x.tokens.equal(y.tokens) and x.sampled.equal(y.sampled)
        for x, y in zip(a.chain.segments, b.chain.segments, strict=True)
    )


amount = st.none() | st.integers(1, 9)


@settings(max_examples=60)
@given(amount, amount, st.none() | st.integers(1, 25), st.integers(4, 60), st.integers(1, 6), st.integers(0, 2**31))
def test_limits_hold_in_every_engine(turns, turn_tokens, tokens, length, answered, seed):
    limits, found = Limits(whole(length), turns=turns, turn_tokens=turn_tokens, tokens=tokens), []
    for kind in KINDS:
        made = [episodes(turns=answered) for _ in range(3)]
        found.append(rollout(policy(kind), [make for _, make in made], Ids(), limits, seeds=[seed, seed + 1, seed + 2]))
        for one, ((environment,), _) in zip(found[-1], made, strict=True):
            (context,) = one.chain.segments
            assert len(context.tokens) <= length and environment.closed == 1
            assert int(context.sampled.sum()) <= (tokens or length), "of all turns together"
            assert len(environment.heard) <= min(turns or answered, answered) and one.terms == {
                "turns": len(environment.heard)
            }
            assert all(len(said.split()) <= (turn_tokens or length) for said in environment.heard)
            assert one.chain.finished == (len(environment.heard) == answered)
            for said in environment.heard[:-1]:  # a turn that was cut off is answered behind a given stop token
                assert STOP not in map(int, said.split())
    assert all(map(same, *found)), "the engines' rollouts are alike"


def test_a_turn_that_is_cut_off_ends_with_a_given_token():
    (one,) = rollout(policy(), [episodes(turns=2)[1]], Ids(), Limits(whole(30), turn_tokens=1), seeds=[5])
    (context,) = one.chain.segments
    own, ids = context.sampled.tolist(), context.tokens.tolist()
    assert ids[2] != STOP and own[2:4] == [True, False] and ids[3] == STOP, "drawn, then given"


@given(st.integers(0, 2**31), st.integers(1, 4))
@settings(max_examples=15)
def test_threads_change_no_rollout(seed, turns):
    """Neighbours of a context change the last bit of its logits and no token of a seed of its own."""
    beside, plain = (
        rollout(
            policy(),
            [episodes(turns=turns)[1] for _ in range(4)],
            Ids(),
            Limits(whole(40)),
            seeds=[seed + n for n in range(4)],
            threads=threads,
        )
        for threads in (True, False)
    )
    assert all(map(same, beside, plain))


def test_who_waits_for_a_tool_holds_up_nobody():
    """One environment answers only after the other rollout is over."""
    over = threading.Event()
    slow, make_slow = episodes({("step", 0, 0): lambda: over.wait(60)}, turns=1)
    _, make_fast = episodes(turns=4)
    driver = Driver(policy().engine(2, 40), Ids(), Limits(whole(40)), threads=True)
    driver.add("slow", make_slow, 1)
    driver.add("fast", make_fast, 2)
    order = []
    while not driver.is_empty:
        for key, _ in driver.step():
            order.append(key)
            over.set()
        driver.wait(60.0)
    assert order == ["fast", "slow"] and slow[0].heard


def test_a_tool_that_hangs_is_given_up():
    """After `tries` episodes the rollout has a failure and no reward; the other one is as it is alone."""
    release = threading.Event()
    hangs, make_hangs = episodes({("step", n, 0): lambda: release.wait(60) for n in range(2)})
    _, make = episodes()
    limits = Limits(whole(40), seconds=0.2, tries=2)
    try:
        failed, fine = rollout(policy(), [make_hangs, make], Ids(), limits, seeds=[1, 2], threads=True)
    finally:
        release.set()
    (alone,) = rollout(policy(), [episodes()[1]], Ids(), limits, seeds=[2])
    assert failed.failure == "the environment did not answer in 0.2 seconds" and not failed.terms and not failed.metrics
    assert len(hangs) == 2 and not fine.failure and same(fine, alone)


@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("place", [("reset", 0), ("step", 0), ("step", 2), ("reward", 3)])
def test_an_environment_that_fails_once_is_tried_again(place, threads):
    method, turn = place
    made, make = episodes({(method, 0, turn): fails})
    (one,) = rollout(policy(), [make], Ids(), Limits(whole(60)), seeds=[3], threads=threads)
    (never,) = rollout(policy(), [episodes()[1]], Ids(), Limits(whole(60)), seeds=[3])
    assert len(made) == 2 and not one.failure and same(one, never) and one.terms == never.terms, (
        "the second episode draws the same numbers"
    )


@pytest.mark.parametrize("tries", [1, 3])
def test_an_environment_that_always_fails_is_a_failure(tries):
    made, make = episodes({("reward", n, 3): fails for n in range(tries)})
    failed, fine = rollout(policy(), [make, episodes()[1]], Ids(), Limits(whole(60), tries=tries), seeds=[3, 4])
    assert failed.failure == "the sandbox is gone" and failed.reward == 0 and not failed.metrics and len(made) == tries
    assert all(one.closed == 1 for one in made) and fine.terms


@pytest.mark.parametrize("threads", [False, True])
def test_other_errors_are_the_programmer_s(threads):
    _, make = episodes({("step", 0, 0): lambda: {}["missing"]})
    with pytest.raises(KeyError, match="missing"):
        rollout(policy(), [make], Ids(), Limits(whole(60)), seeds=[3], threads=threads)


class Forgetful(Ids):
    """A format that shows every turn its number alone: what came before is written anew."""

    def encode_opening(self, messages):
        return [1, *spoken(messages[-1:])]

    def encode_answer(self, history, messages):
        return None


@pytest.mark.parametrize("kind", KINDS)
def test_a_format_that_rewrites_begins_a_context_for_each_turn(kind):
    made, make = episodes(turns=4)
    (one,) = rollout(policy(kind), [make], Forgetful(), Limits(whole(40), turn_tokens=3), seeds=[7])
    first, *others = one.chain.segments
    assert first.tokens.tolist()[:3] == [1, 1, 2] and len(others) == 3
    for context, said in zip(others, made[0].heard, strict=False):
        assert context.tokens.tolist()[:3] == [1, int((said.split() or ["5"])[-1]), 3], "the answer to the turn before"
    assert one.chain.finished and one.terms == {"turns": 4.0}


def test_who_is_cancelled_leaves_the_rest_as_it_was():
    gone, make_gone = episodes()
    driver = Driver(policy().engine(2, 60), Ids(), Limits(whole(60)))
    driver.add("gone", make_gone, 1)
    driver.add("stays", episodes()[1], 2)
    found = dict(driver.step())
    driver.cancel(lambda key: key == "gone")
    while not driver.is_empty:
        found.update(driver.step())
    (alone,) = rollout(policy(), [episodes()[1]], Ids(), Limits(whole(60)), seeds=[2])
    assert [*found] == ["stays"] and same(found["stays"], alone) and gone[0].closed == 1


@given(st.integers(0, 2**31), st.integers(1, 4))
@settings(max_examples=25)
def test_a_script_that_says_what_was_sampled_gives_the_same_contexts(seed, turns):
    """So demonstrations hold the tokens that sampling would have."""
    made, make = episodes(turns=turns)
    (one,) = rollout(policy(), [make], Ids(), Limits(whole(200)), seeds=[seed])
    said = iter(made[0].heard)
    again = script_rollout(
        Echo(turns), Ids(), Limits(whole(200)), lambda messages, summary: spoken([Message("assistant", next(said))])
    )
    assert not one.chain.finished or same(one, again)


def test_a_script_whose_context_ends_within_a_turn_is_unfinished():
    said = [2, 3, 4, 2, 3]
    for length, finished in ((7, False), (8, True)):
        one = script_rollout(Echo(1), Ids(), Limits(whole(length)), lambda messages, summary: said)
        (context,) = one.chain.segments
        assert context.finished == finished and context.tokens.tolist() == [1, 2, *said, STOP][:length]


def test_a_rollout_draws_with_its_own_seed():
    first, again, other = rollout(
        policy(), [episodes()[1] for _ in range(3)], Ids(), Limits(whole(60)), seeds=[1, 1, 2]
    )
    assert same(first, again) and not same(first, other)


@pytest.mark.parametrize(
    ("name", "value"),
    [("turns", 0), ("turn_tokens", 0), ("tokens", -1), ("tries", 0), ("seconds", -1.0), ("seconds", float("nan"))],
)
def test_limits_that_are_none(name, value):
    with pytest.raises(ValueError, match=f"{name} must be at least"):
        Limits(whole(10), **{name: value})


class Empty(Echo):
    def reset(self) -> list[Message]:
        return []


def test_nothing_to_play_is_refused():
    with pytest.raises(ValueError, match="at least one environment"):
        rollout(policy(), [], Ids(), Limits(whole(10)), seeds=[])
    with pytest.raises(ValueError, match="prompt must hold"):
        rollout(policy(), [Empty], Ids(), Limits(whole(10)), seeds=[0])


class Noisy(Ids):
    """A format that rewrites the messages after every second turn: the tokens of turns become 4."""

    def encode_opening(self, messages):
        return [token for message in messages for token in ([4] if message.role == "assistant" else spoken([message]))]

    def encode_answer(self, history, messages):
        turns = sum(message.role == "assistant" for message in history)
        return None if turns % 2 == 0 else spoken(messages)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("limit", "value", "turns"), [("turns", 2, 2), ("tokens", 4, 4), ("turns", 5, 5)])
def test_limits_hold_where_every_turn_begins_a_context(kind, limit, value, turns):
    made, make = episodes(turns=9)
    limits = Limits(whole(40), **{"turn_tokens": 1, limit: value})
    (one,) = rollout(policy(kind), [make], Forgetful(), limits, seeds=[7])
    assert len(made[0].heard) == turns and len(one.chain.segments) == turns and not one.chain.finished
    again = script_rollout(Echo(9), Forgetful(), limits, lambda messages, summary: [2, 3])
    assert len(again.chain.segments) == turns and not again.chain.finished and again.terms == {"turns": float(turns)}


def summing(trigger: int, join="self", **more) -> Chaining:
    return Chaining(
        trigger, longest_summary=2, room=30, request=(5, 5), resume=(3,), instruction=(1,), join=join, **more
    )


@pytest.mark.parametrize("join", ["self", "separate"])
def test_a_context_that_is_rewritten_after_a_summary_holds_the_summary(join):
    """What the summary replaced does not come back."""
    one = script_rollout(
        Echo(8), Noisy(), Limits(summing(14, join)), lambda messages, summary: [4] if summary else [2, 2]
    )
    first, summary = [1, 2], [4, STOP, 3]
    starts = [segment.tokens.tolist() for segment in one.chain.segments]
    seen = sum(any(bool(t) for t in segment.summary) for segment in one.chain.segments)
    assert seen and one.chain.finished and len(starts) > seen + 2
    after = False
    for segment, tokens in zip(one.chain.segments, starts, strict=True):
        begin = tokens[1:] if tokens[0] == 1 and tokens[1] == 1 else tokens
        assert begin[:2] == first and (not after or begin[2:5] == summary), (
            "each context after a summary begins with it"
        )
        after = after or bool(segment.summary.any())
        assert len(tokens) <= 14 + 30
    since = [*first, *summary, *[4, 2, 3] * 2, 2, 2]  # two turns since the summary, and then the policy speaks
    assert any(tokens[: len(since)] == since for tokens in starts)


def test_a_limit_of_turns_is_none_of_summaries():
    """`turn_tokens` cuts no summary, and one that uses up the tokens of all turns is the end."""
    long = Limits(summing(14), turn_tokens=1)
    one = script_rollout(Echo(8), Ids(), long, lambda messages, summary: [4] if summary else [])
    assert one.chain.finished and any(bool(segment.summary.any()) for segment in one.chain.segments)
    for kind in KINDS:
        for seed in range(12):
            made, make = episodes(turns=9)
            limits = Limits(summing(14), turn_tokens=1, tokens=5)
            (some,) = rollout(policy(kind), [make], Ids(), limits, seeds=[seed])
            assert some.chain.num_sampled_tokens <= 5 and len(some.chain.segments) <= 2 and not some.chain.finished


def test_rewritten_messages_that_reach_the_trigger_are_summarised_first():
    builder = ChainBuilder([1, 2], summing(9))
    assert builder.answer([4, STOP], [3]) == [3]
    builder.rewrite([1, 2, 4, 4, 4, 4, 4, 4, 4])
    assert builder.go_on([]) and builder.is_summary and builder.prompt == [1, 2, *[4] * 7, 5, 5]
    builder.summarise([2, STOP])
    assert (
        builder.go_on([]) and builder.prompt == [1, 2, 2, STOP, 3] and not builder.is_summary and builder.dropped == 2
    )


def wait_for(condition, seconds: float = 10.0) -> None:
    """Returns once it holds. AssertionError if it never does."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never holds"
        time.sleep(0.001)


@pytest.mark.parametrize("sizes", [[], [1, 1, 1], [3, 1, 2, 3], [1, 4]])
def test_threads_that_are_free_work_again(sizes):
    """No more threads are made than functions were under way at once, one that hangs has one to itself, and all end."""
    workers, release, hung, seen = Threads(), threading.Event(), threading.Event(), []
    workers.run(lambda: (seen.append(threading.current_thread()), hung.set(), release.wait(60)))
    for number, size in enumerate(sizes):
        together = threading.Barrier(size)
        for _ in range(size):
            workers.run(lambda together=together: (seen.append(threading.current_thread()), together.wait(10)))
        wait_for(lambda sizes=sizes[: number + 1]: len(workers.free) >= max(sizes))
    assert hung.wait(60) and len(seen) == 1 + sum(sizes) and len(set(seen)) == 1 + max(sizes, default=0)
    workers.close()
    release.set()
    for thread in seen:
        thread.join(60)
        assert not thread.is_alive()


def test_a_free_thread_keeps_nothing():
    """An environment that is over may be gone, though the thread that ran it waits for the next."""
    workers, environment = Threads(), Echo()
    gone = weakref.ref(environment)
    workers.run(partial(environment.step, Message("assistant", "1")))
    wait_for(lambda: workers.free)
    del environment
    assert gone() is None
    workers.close()


@pytest.mark.parametrize("error", [None, ValueError("late")])
def test_what_a_call_has_returned_is_discarded_once_it_is_abandoned(error):
    """Nobody else would close an environment that was made just before the driver gave it up."""

    def make():
        if error is not None:
            raise error
        return "environment"

    discarded = []
    call = EnvironmentCall(Entry("key", Ids, 0), make, discarded.append, threading.Event(), discarded.append)
    call.run()
    assert call.done.is_set() and not discarded
    call.abandon()
    assert discarded == ([] if error else ["environment"])


def test_what_cannot_be_written_anew_ends_the_rollout():
    class Strict(Forgetful):
        def encode_opening(self, messages):
            if len(messages) > 1:
                raise ValueError("message 2: the chat template leaves out its content")
            return super().encode_opening(messages)

    made, make = episodes(turns=4)
    (one,) = rollout(policy(), [make], Strict(), Limits(whole(40), turn_tokens=2), seeds=[7])
    assert not one.chain.finished and one.terms == {"turns": 1.0} and made[0].closed == 1


def test_another_stop_token_is_followed_by_the_format_s_own():
    found = 0
    for seed in range(20):
        (one,) = rollout(policy(), [episodes(turns=4)[1]], Ids((STOP, 5)), Limits(whole(60)), seeds=[seed])
        (context,) = one.chain.segments
        own, ids = context.sampled.tolist(), context.tokens.tolist()
        for at in range(len(ids) - 1):
            if own[at] and ids[at] == 5 and (at + 1 < len(ids)):
                assert not own[at + 1] and ids[at + 1] == STOP
                found += 1
            assert not (own[at] and ids[at] == STOP and own[at + 1])
    assert found


def until(what, seconds=20.0):
    end = time.monotonic() + seconds
    while not what() and time.monotonic() < end:
        time.sleep(0.01)
    return what()


@pytest.mark.parametrize("method", ["make", "reset", "step", "reward"])
def test_every_environment_is_closed_once_also_one_that_comes_too_late(method):
    """Given up, cancelled, and where the program fails: in the middle of a call of the environment."""
    for end in ("late", "cancel", "error"):
        release, made = threading.Event(), []

        def make(made=made, release=release, end=end):
            number = len(made)
            if method == "make" and (number == 0 or end != "late"):
                made.append(None)
                release.wait(20)
                made[number] = Echo(1)
                return made[number]
            slow = (
                {(method, 0, 1 if method == "reward" else 0): lambda: release.wait(20)}
                if number == 0 or end != "late"
                else {}
            )
            made.append(Echo(1, slow))
            return made[-1]

        limits = Limits(whole(40), turn_tokens=2, seconds=0.3 if end == "late" else float("inf"))
        driver = Driver(policy().engine(1, 40), Ids(), limits, threads=True)
        driver.add("one", make, 3)
        results = []
        while not results and not (
            end != "late" and driver.calls and until(lambda d=driver: d.is_blocked, 0.2) and made
        ):
            results += driver.step()
            driver.wait(0.05)
        if end == "error":
            driver.close(0.1)
        else:
            driver.cancel(lambda key: True)
        release.set()
        assert until(lambda made=made: all(one is not None and one.closed == 1 for one in made)), (method, end)
        time.sleep(0.05)
        assert all(one.closed == 1 for one in made) and (end != "late" or (results and not results[0][1].failure)), (
            method,
            end,
        )


def test_a_late_first_episode_does_not_disturb_the_second():
    """`make` of the first episode returns while the second one is under way."""
    release, made = threading.Event(), []

    def make():
        number = len(made)
        made.append(Echo(2))
        if number == 0:
            release.wait(20)
        else:
            release.set()
            time.sleep(0.1)
        return made[number]

    (one,) = rollout(policy(), [make], Ids(), Limits(whole(40), seconds=0.3), seeds=[3], threads=True)
    (alone,) = rollout(policy(), [lambda: Echo(2)], Ids(), Limits(whole(40)), seeds=[3])
    assert (
        same(one, alone) and not made[0].heard and made[1].heard and until(lambda: [e.closed for e in made] == [1, 1])
    )


def test_an_error_of_the_program_closes_all_environments():
    made = [Echo(3, {("step", 0, 0): lambda: {}["missing"]}), Echo(3), Echo(3)]
    with pytest.raises(KeyError):
        rollout(policy(), [lambda one=one: one for one in made], Ids(), Limits(whole(60)), seeds=[3, 4, 5])
    assert [one.closed for one in made] == [1, 1, 1]
    (environment,) = ([Echo(3, {("step", 0, 0): fails})],)
    with pytest.raises(EnvironmentFailure):
        script_rollout(environment[0], Ids(), Limits(whole(60)), lambda messages, summary: [2])
    assert environment[0].closed == 1


def test_an_environment_that_cannot_be_closed_is_a_warning():
    class Stuck(Echo):
        def close(self):
            raise OSError("no space")

    with pytest.warns(RuntimeWarning, match="could not be closed.*no space"):
        (one,) = rollout(policy(), [lambda: Stuck(1)], Ids(), Limits(whole(40)), seeds=[3])
    assert one.terms


@pytest.mark.parametrize("threads", [False, True])
def test_no_more_environments_are_open_than_slots_need(threads):
    live, most, lock = 0, 0, threading.Lock()

    class Counted(Echo):
        def reset(self):
            nonlocal live, most
            with lock:
                live += 1
                most = max(most, live)
            return super().reset()

        def close(self):
            nonlocal live
            with lock:
                live -= 1
            super().close()

    driver = Driver(policy().engine(4, 40), Ids(), Limits(whole(40)), threads)
    for number in range(30):
        driver.add(number, lambda: Counted(2), number)
    finished = []
    while not driver.is_empty:
        finished += [key for key, _ in driver.step()]
        driver.wait()
    driver.close()
    assert sorted(finished) == list(range(30)) and live == 0 and most <= 5 + 4 * threads, (
        "closing runs beside the next one's reset"
    )


@pytest.mark.parametrize(("kind", "threads", "expected"), [
    (ContinuousSampler, True, [70]), (Sampler, True, [32, 32, 6]), (ContinuousSampler, False, [32, 32, 6]),
])  # fmt: skip
def test_a_sampler_of_so_many_slots_takes_all_rollouts_at_once(kind, threads, expected):
    """One batch waits once for its longest rollout. The tokens are those of other batches, and `on_step` hears how many
    rollouts are over."""
    sizes, counts = [], []

    class Watched(kind):
        def engine(self, slots, max_len, temperature=1.0):
            sizes.append(slots)
            engine = super().engine(slots, max_len, temperature)
            assert engine.free_slots == min(slots, self.slots or slots)
            return engine

    torch.manual_seed(0)
    sampler = Watched(Transformer(CONFIG), torch.float32)
    if sampler.slots is not None:
        sampler.slots = 4
    tasks, generator = [Named(str(number)) for number in range(35)], torch.Generator().manual_seed(1)
    found = sample_rollouts(
        sampler, lambda task, number: Echo(1 + int(task.key) % 3), tasks, 2, Ids(), Limits(whole(40)), 1.0, generator,
        threads=threads, on_step=counts.append,
    )  # fmt: skip
    assert sizes == expected and counts == sorted(counts) and counts[-1] == len(found) == 70
    plain = sample_rollouts(
        policy(Sampler), lambda task, number: Echo(1 + int(task.key) % 3), tasks, 2, Ids(), Limits(whole(40)), 1.0,
        torch.Generator().manual_seed(1),
    )  # fmt: skip
    assert all(map(same, found, plain))


def test_contexts_that_start_together_wait_for_slow_openings():
    calls = []

    class Watched(Sampler):
        def engine(self, slots, max_len, temperature=1.0):
            engine = super().engine(slots, max_len, temperature)
            start = engine.start
            engine.start = lambda: (calls.append(len(engine.prompts)), start())
            return engine

    torch.manual_seed(0)
    sampler = Watched(Transformer(CONFIG), torch.float32)
    make = [lambda n=n: Echo(1, {("reset", 0, 0): lambda n=n: time.sleep(0.02 * n)}) for n in range(5)]
    rollout(sampler, make, Ids(), Limits(whole(20)), seeds=list(range(5)), threads=True)
    assert calls == [5]
