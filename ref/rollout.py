"""Rollouts: an engine that samples a policy, and environments that answer it, driven together.

    rollouts = rollout(sampler, [partial(tasks.environment, task, 0) for task in …], chat_format, Limits(chaining),
    seeds=…)

One driver for every engine (`ref/engine/`, vLLM) and every environment (`ref/environment.py`). A rollout is a chain of
contexts (`ref/self_summary.py`); `Rollout` holds its tokens, its messages, and what it earned.

Tokens in, tokens out. What was sampled is what is trained: the ids of a turn are never rendered again. The tokens that
answer a turn are encoded by themselves, from the turn's stop token on. A turn that a limit cut off gets its stop as a
given token, which is not trained. A format that rewrites earlier messages (Qwen3's drops the thinking of earlier turns)
begins a new context.

Slow environments run beside the engine. With `threads`, each call of an environment runs in a thread of its own, and
the engine goes on with the other contexts. Without, they run between two steps of the engine, and every run has the
same order of events. An episode begins once a slot is free or nearly so, and its environment is closed as soon as it is
over, given up, or the driver stops.

An environment that fails (`EnvironmentFailure`, or a call beyond `Limits.seconds`) is a third outcome, neither success
nor failure of the policy. The episode is tried again from its beginning; after `Limits.tries` of them the rollout has
`failure` in place of a reward, and is left out of its group's mean and of the loss (`ref/rl.py`).
"""

import copy
import itertools
import math
import random
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar, cast

import torch

from ref.engine.decoder import Decoder
from ref.engine.sampler import Engine, SampledTurn, Sampler, Segment, check_tokens, uniform
from ref.environment import ChatFormat, Environment, EnvironmentFailure, ForkableEnvironment, Reward, StepResult
from ref.messages import Message
from ref.self_summary import Chain, ChainBuilder, Chaining
from ref.textual_feedback import Hint
from ref.transcript import Transcript

__all__ = [
    "SUMMARY",
    "Driver",
    "MapFunction",
    "Limits",
    "RolloutResult",
    "Rollout",
    "MIN_BATCH",
    "batch_size",
    "check_failures",
    "common_names",
    "decode_rollout",
    "hash_seed",
    "map_in_order",
    "rollout",
    "sample_rollouts",
    "script_rollout",
]

MapFunction = Callable[[Callable[[Any], Any], Sequence[Any]], list]
"""(function, parts) → [function(part) for part in parts], wherever it is computed."""

SUMMARY = "summary"
"""The name of a message that is the policy's summary."""
Seed = int | torch.Generator | None
"""What a rollout draws with: a seed of its own, a generator, or nothing at temperature 0. A rollout that is tried again
draws the same numbers only from a seed of its own."""


@dataclass(frozen=True)
class Limits:
    """How long a rollout may be, and how long its environment may take."""

    chaining: Chaining
    """How contexts are joined, and how long they are."""
    turns: int | None = None
    """Turns of the policy, without summaries; None: as many as the environment takes."""
    turn_tokens: int | None = None
    """Tokens of a turn other than a summary; a longer one is cut off and answered."""
    tokens: int | None = None
    """Tokens of all turns together."""
    seconds: float = math.inf
    """Of a single call of the environment, with threads. It must exceed what the environment itself allows the policy,
    or a policy could make its episode a failure of the environment."""
    tries: int = 2
    """Episodes of an environment that fails, before the rollout counts as failed."""

    def __post_init__(self):
        for name in ("turns", "turn_tokens", "tokens", "tries", "seconds"):
            value = getattr(self, name)
            if value is not None and not value >= (0 if name == "seconds" else 1):
                raise ValueError(f"{name} must be at least 1; got {value}")


@dataclass(frozen=True)
class RolloutResult:
    """How a rollout ended: what a curriculum follows, and what fits into a line of a journal."""

    task: Any
    failure: str
    """Why its environment failed; empty if it did not."""
    metrics: Mapping[str, float]
    """Those of the environment; empty after a failure."""
    num_sampled_tokens: int
    """Tokens that the policy wrote."""


@dataclass
class Rollout:
    """A finished episode: what was sampled, what was said, and what it earned."""

    chain: Chain
    """Its contexts, as tokens."""
    terms: dict[str, float] = field(default_factory=dict)
    """Named terms of its reward. Those of the environment come first; the loop adds others."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Further numbers, of which means are logged. All rollouts of a task set have the same names, "success" among
    them."""
    task: Any = None
    """The task."""
    messages: list[Message] = field(default_factory=list)
    """All messages in order. The name of a summary is `SUMMARY`; what the format asks it with is not among them."""
    opening: int = 0
    """Tokens that opened its first context."""
    hints: Sequence[Sequence[Hint]] = ()
    """The hints of every context, in order; empty if there are none (`ref/textual_feedback.py`)."""
    transcript: Transcript | None = None
    """What it did on its way, for behaviour rewards and the monitor; None where nobody has asked."""
    environment: Any = None
    """The environment in its last state, closed."""
    failure: str = ""
    """Why its environment failed; empty if it did not. A failed rollout has no terms and no metrics."""

    @property
    def reward(self) -> float:
        """The sum of its terms."""
        return sum(self.terms.values(), 0.0)

    @property
    def outcome(self) -> RolloutResult:
        """How it ended."""
        return RolloutResult(self.task, self.failure, self.metrics, self.chain.num_sampled_tokens)

    @property
    def logged(self) -> dict[str, float]:
        """Its metrics, and how much it wrote, of which means are logged."""
        chain = self.chain
        counts = {
            "written": chain.num_sampled_tokens,
            "segments": len(chain.segments),
            "summary_tokens": chain.summary_tokens,
        }
        return {name: float(value) for name, value in {**self.metrics, **counts}.items()}


class Active:
    """A rollout under way: one episode, seen as turns of tokens."""

    def __init__(self, environment: Environment, chat_format: ChatFormat, limits: Limits):
        self.environment, self.format, self.limits = environment, chat_format, limits
        self.messages: list[Message] = []
        self.record: list[Message] = []  # with summaries
        self.starts: list[int] = []  # where among `messages` each turn begins
        self.sampled = 0
        self.is_over = False  # the context came to its end by itself

    def fork(self) -> "Active":
        """A copy in its current state, which continues independently."""
        twin = copy.copy(self)
        assert isinstance(self.environment, ForkableEnvironment)
        twin.environment, twin.builder = self.environment.fork(), self.builder.fork()
        twin.messages, twin.record, twin.starts = list(self.messages), list(self.record), list(self.starts)
        return twin

    def open(self, messages: Sequence[Message]) -> None:
        """Takes the messages that open the episode."""
        self.messages, self.record = list(messages), list(messages)
        self.opening = len(self.messages)
        self.builder = ChainBuilder(self.format.encode_opening(self.messages), self.limits.chaining)

    def read(self, turn: SampledTurn) -> Message | None:
        """Takes a turn. Returns the message for the environment, or None for a summary."""
        tokens = get_turn_tokens(turn)
        self.sampled += len(tokens)
        if self.builder.is_summary:
            self.builder.summarise(tokens)
            self.record.append(replace(self.format.decode_turn(turn.tokens), name=SUMMARY))
            return None
        self.last = turn
        self.starts.append(len(self.messages))
        message = self.format.decode_turn(turn.tokens)
        self.messages.append(message)
        self.record.append(message)
        return message

    @property
    def has_reached_limit(self) -> bool:
        """Whether a limit leaves no further turn to an episode that is not over."""
        limits = self.limits
        is_exhausted = (
            limits.turns is not None
            and len(self.starts) >= limits.turns
            or limits.tokens is not None
            and self.sampled >= limits.tokens
        )
        return is_exhausted and not self.builder.chain.finished

    @property
    def longest_turn(self) -> int | None:
        """Tokens that the next turn may have."""
        limits = self.limits
        remaining = None if limits.tokens is None else max(1, limits.tokens - self.sampled)
        bounds = [
            bound for bound in (remaining, None if self.builder.is_summary else limits.turn_tokens) if bound is not None
        ]
        return min(bounds) if bounds else None

    def answer(self, result: StepResult) -> list[int] | None:
        """Takes what the environment answered to the last turn. Returns the tokens to append, or None if the context
        ends here."""
        if result.done:
            self.builder.finish()
            return None
        history = list(self.messages)
        self.messages += result.messages
        self.record += result.messages
        tokens = self.format.encode_answer(history, result.messages)
        if tokens is None:
            self.builder.rewrite(self._encode_rewritten())
            return None
        # Behind a turn that a limit cut off, or that ended with another stop token, the format's own one is given.
        stop = self.format.stop_ids[0]
        return self.builder.answer(get_turn_tokens(self.last), tokens if self.last.stop == stop else [stop, *tokens])

    def _encode_rewritten(self) -> list[int] | None:
        """The current context as the format writes its messages now, up to where the policy speaks; None if it cannot
        be written: because of what the policy wrote, or because a summary would have to stand where the format writes
        something else."""
        builder = self.builder
        messages = [*self.messages[: self.opening], *self.messages[self.starts[builder.dropped] :]]
        try:
            prompt = self.format.encode_opening(messages)
        except ValueError:
            return None
        if builder.base == builder.first:
            return prompt
        length = len(builder.first)
        return [*builder.base, *prompt[length:]] if prompt[:length] == builder.first else None

    def result(self, reward: Reward) -> Rollout:
        return Rollout(
            self.builder.chain,
            dict(reward.terms),
            dict(reward.metrics),
            messages=self.record,
            opening=len(self.builder.first),
            environment=self.environment,
        )


def get_turn_tokens(turn: SampledTurn) -> list[int]:
    """The tokens of a turn, with the stop token that it chose."""
    return turn.tokens if turn.stop is None else [*turn.tokens, turn.stop]


@dataclass(eq=False)
class Entry:
    """A rollout in a driver: what makes its environment, and where it stands."""

    key: Hashable
    make: Callable[[], Environment]
    seed: Seed
    number: int = 0
    tries: int = 0
    slot: int = -1
    environment: Environment | None = None
    """Of the current episode, until it is closed."""
    active: Active | None = None
    """The current episode, once its environment has been reset."""
    draws: torch.Generator | None = None


class Threads:
    """Runs functions in threads, as many as there are functions under way. A thread that is free is used again: the
    engine would wait half a millisecond for a new one. They are daemons, so a function that hangs does not keep the
    process alive."""

    def __init__(self):
        self.free: list[SimpleQueue[Callable[[], None] | None]] = []  # inboxes of threads without a function
        self.lock, self.is_closed = threading.Lock(), False

    def run(self, function: Callable[[], None]) -> None:
        """Runs `function`, which must not raise."""
        with self.lock:
            inbox = self.free.pop() if self.free else None
        if inbox is None:
            inbox = SimpleQueue()
            threading.Thread(target=self._work, args=(inbox,), daemon=True).start()
        inbox.put(function)

    def close(self) -> None:
        """Ends the threads: free ones now, others once their functions have returned."""
        with self.lock:
            self.is_closed = True
            for inbox in self.free:
                inbox.put(None)
            self.free.clear()

    def _work(self, inbox: "SimpleQueue[Callable[[], None] | None]") -> None:
        while (function := inbox.get()) is not None:
            function()
            del function  # or a free thread would keep an environment
            with self.lock:
                if self.is_closed:
                    return
                self.free.append(inbox)


class EnvironmentCall:
    """One call of an environment, which `run` makes in another thread. `answer_event` is set once it has ended.
    `discard`: what becomes of a value that comes too late."""

    def __init__(
        self,
        entry: Entry,
        function: Callable[[], Any],
        on_result: Callable[[Any], None],
        answer_event: threading.Event,
        discard: Callable[[Any], None] | None = None,
    ):
        self.entry, self.function, self.on_result, self.discard = entry, function, on_result, discard
        self.answer_event, self.start_time = answer_event, time.monotonic()
        self.value: Any = None
        self.error: BaseException | None = None
        self.done, self.lock, self.is_abandoned = threading.Event(), threading.Lock(), False

    def run(self) -> None:
        """Makes the call, and returns once it has ended."""
        try:
            self.value = self.function()
        except BaseException as error:  # raised in the thread of the driver
            self.error = error
        with self.lock:
            self.done.set()
            is_late = self.is_abandoned
        if is_late:
            self._discard_value()
        self.answer_event.set()

    def abandon(self) -> None:
        """Nobody waits for the call any more. If it returns a value, now or later, the value is discarded."""
        with self.lock:
            self.is_abandoned, is_done = True, self.done.is_set()
        if is_done:
            self._discard_value()

    def _discard_value(self) -> None:
        if self.discard is not None and self.error is None:
            self.discard(self.value)


class Driver:
    """Runs rollouts with one engine, as many at a time as it has slots.

        driver.add(key, make, seed)            `make()` gives a new environment for the episode
        for key, rollout in driver.step():     one step of the engine; rollouts that are now over
        driver.close()                         gives up what is under way; every environment is closed

    Rollouts that were added first start first. `threads`: environments run in threads beside the engine; a quarter more
    of them than there are slots are opened ahead."""

    def __init__(
        self, engine: Engine, chat_format: ChatFormat, limits: Limits, threads: bool = False, temperature: float = 1.0
    ):
        self.engine, self.format, self.limits, self.threads, self.temperature = (
            engine,
            chat_format,
            limits,
            threads,
            temperature,
        )
        self.max_active = engine.free_slots + max(1, engine.free_slots // 4)  # episodes under way
        self.queue: list[Entry] = []  # not yet begun
        self.entries: dict[Entry, None] = {}  # under way
        self.waiting: list[Entry] = []  # open contexts without a slot
        self.entries_by_slot: dict[int, Entry] = {}
        self.calls: list[EnvironmentCall] = []
        self.workers = Threads()
        self.closing: list[threading.Event] = []  # one for each environment that is being closed
        self.results: list[tuple[Any, Rollout]] = []
        self.failures = self.added = 0
        self.answer_event = threading.Event()  # set once a call of an environment has ended

    def add(self, key: Hashable, make: Callable[[], Environment], seed: Seed = None) -> None:
        """Adds a rollout, which begins in a later step."""
        self.queue.append(Entry(key, make, seed, self.added))
        self.added += 1

    def cancel(self, keys: Callable[[Any], bool]) -> None:
        """Gives up the rollouts whose keys are such, and closes their environments."""
        for slot, entry in list(self.entries_by_slot.items()):
            if keys(entry.key):
                self.engine.remove(slot)
                del self.entries_by_slot[slot]
        for call in self.calls:
            if keys(call.entry.key):
                call.abandon()
        self.queue, self.waiting = (
            [entry for entry in entries if not keys(entry.key)] for entries in (self.queue, self.waiting)
        )
        self.calls = [call for call in self.calls if not keys(call.entry.key)]
        self.results = [(key, rollout) for key, rollout in self.results if not keys(key)]
        for entry in [entry for entry in self.entries if keys(entry.key)]:
            self._end_rollout(entry)

    def close(self, seconds: float = 10.0) -> None:
        """Gives up all rollouts. Waits until their environments are closed, for so many seconds at most."""
        self.cancel(lambda _: True)
        deadline = time.monotonic() + seconds
        for is_closed in self.closing:
            is_closed.wait(max(0.0, deadline - time.monotonic()))
        self.workers.close()

    @property
    def is_empty(self) -> bool:
        """Whether no rollout is under way."""
        return not (self.queue or self.entries or self.results)

    @property
    def is_blocked(self) -> bool:
        """Whether a step would do nothing until an environment answers."""
        if (
            self.results
            or any(call.done.is_set() for call in self.calls)
            or self.queue
            and len(self.entries) < self.max_active
        ):
            return False
        return self.engine.is_idle and not (self.waiting and self._can_add_context)

    @property
    def _can_add_context(self) -> bool:
        """Whether a context may take a slot. Contexts that start together wait for those whose environments are still
        opening."""
        return self.engine.free_slots > 0 and not (
            self.engine.in_waves and any(call.entry.active is None for call in self.calls)
        )

    def slots(self) -> dict[str, int]:
        """How many slots decode, how many wait for an environment, how many are free, and how many rollouts wait for a
        slot."""
        tools = sum(call.entry.slot >= 0 for call in self.calls)
        queued = len(self.queue) + len(self.waiting)
        return {
            "decoding": len(self.entries_by_slot) - tools,
            "tools": tools,
            "free": self.engine.free_slots,
            "queued": queued,
        }

    def step(self) -> list[tuple[Any, Rollout]]:
        """One step: answers of environments, new contexts, and a step of the engine. Returns the rollouts that are now
        over."""
        self.answer_event.clear()
        self._handle_calls()
        while self.queue and len(self.entries) < self.max_active:
            entry = self.queue.pop(0)
            self.entries[entry] = None
            self._start_episode(entry)
        if self.engine.in_waves:  # contexts keep their order from wave to wave
            self.waiting.sort(key=lambda entry: entry.number)
        while self.waiting and self._can_add_context:
            entry = self.waiting.pop(0)
            assert entry.active is not None
            draws = uniform(entry.draws, self.engine.max_len) if self.temperature else None
            entry.slot = self.engine.add(
                entry.active.builder.prompt, self.format.stop_ids, draws, entry.active.longest_turn
            )
            self.entries_by_slot[entry.slot] = entry
        for slot in self.engine.step():
            entry, turn = self.entries_by_slot[slot], self.engine.turn(slot)
            assert entry.active is not None
            if turn is None:
                self._end_context(entry, False)
                continue
            message = entry.active.read(turn)
            if message is None:
                self._end_context(entry, turn.stop is not None and not entry.active.has_reached_limit)
            else:
                self._call_environment(
                    entry, partial(entry.active.environment.step, message), partial(self._on_step, entry)
                )
        results, self.results = self.results, []
        return results

    def wait(self, seconds: float | None = None) -> None:
        """Waits until an environment has answered, if nothing else is to be done."""
        if self.is_blocked and self.calls:
            seconds_left = min(call.start_time for call in self.calls) + self.limits.seconds - time.monotonic()
            bounds = [bound for bound in (seconds, seconds_left) if bound is not None and bound < math.inf]
            self.answer_event.wait(max(0.0, min(bounds)) if bounds else None)

    def _start_episode(self, entry: Entry) -> None:
        entry.tries, entry.slot = entry.tries + 1, -1
        entry.draws = torch.Generator().manual_seed(entry.seed) if isinstance(entry.seed, int) else entry.seed
        self._call_environment(entry, entry.make, partial(self._on_created, entry), close_environment)

    def _on_created(self, entry: Entry, environment: Environment) -> None:
        entry.environment = environment
        self._call_environment(entry, environment.reset, partial(self._on_reset, entry))

    def _on_reset(self, entry: Entry, messages: Sequence[Message]) -> None:
        assert entry.environment is not None
        entry.active = Active(entry.environment, self.format, self.limits)
        entry.active.open(messages)
        self.waiting.append(entry)

    def _on_step(self, entry: Entry, result: StepResult) -> None:
        active = entry.active
        assert active is not None
        tokens = active.answer(result)
        if tokens is None or active.has_reached_limit:
            self._end_context(entry, not active.has_reached_limit)
        else:
            self.engine.extend(entry.slot, tokens, active.longest_turn)

    def _end_context(self, entry: Entry, finished: bool) -> None:
        """A context is over. `finished`: it came to its end by itself."""
        active = entry.active
        assert active is not None
        del self.entries_by_slot[entry.slot]
        segment, entry.slot = self.engine.remove(entry.slot, finished), -1
        if not bool(segment.logp.isfinite().all()):
            raise ValueError("the policy must give finite log-probs, but gave others")
        if active.builder.close(segment):
            self.waiting.insert(0, entry)
        else:
            self._call_environment(entry, active.environment.reward, partial(self._on_reward, entry))

    def _on_reward(self, entry: Entry, reward: Reward) -> None:
        assert entry.active is not None
        self.results.append((entry.key, entry.active.result(reward)))
        self._end_rollout(entry)

    def _call_environment(
        self,
        entry: Entry,
        function: Callable[[], Any],
        on_result: Callable[[Any], None],
        discard: Callable[[Any], None] | None = None,
    ) -> None:
        if self.threads:
            self.calls.append(EnvironmentCall(entry, function, on_result, self.answer_event, discard))
            self.workers.run(self.calls[-1].run)
            return
        try:
            value = function()
        except EnvironmentFailure as error:
            self._handle_failure(entry, str(error))
        else:
            on_result(value)

    def _handle_calls(self) -> None:
        """Goes on with the rollouts whose environments have answered, and gives up those that take too long."""
        time_now = time.monotonic()
        for call in [
            call for call in self.calls if call.done.is_set() or time_now - call.start_time > self.limits.seconds
        ]:
            self.calls.remove(call)
            self._handle_call(call)

    def _handle_call(self, call: EnvironmentCall) -> None:
        if not call.done.is_set():
            call.abandon()
            self._handle_failure(call.entry, f"the environment did not answer in {self.limits.seconds:g} seconds")
        elif isinstance(call.error, EnvironmentFailure):
            self._handle_failure(call.entry, str(call.error))
        elif call.error is not None:
            raise call.error
        else:
            call.on_result(call.value)

    def _handle_failure(self, entry: Entry, reason: str) -> None:
        """The environment has failed: the episode is tried again, or is over."""
        self.failures += 1
        if entry.slot >= 0:
            del self.entries_by_slot[entry.slot]
            self.engine.remove(entry.slot, False)
        chain = Chain() if entry.active is None else entry.active.builder.chain
        if entry.tries < self.limits.tries:
            self._close_environment(entry)
            self._start_episode(entry)
        else:
            self.results.append((entry.key, Rollout(chain, failure=reason)))
            self._end_rollout(entry)

    def _end_rollout(self, entry: Entry) -> None:
        """The rollout is over, or given up."""
        del self.entries[entry]
        self._close_environment(entry)

    def _close_environment(self, entry: Entry) -> None:
        environment, entry.environment, entry.active = entry.environment, None, None
        if environment is None:
            return
        if self.threads:
            is_closed = threading.Event()
            self.closing = [*(event for event in self.closing if not event.is_set()), is_closed]
            self.workers.run(partial(close_environment, environment, is_closed))
        else:
            close_environment(environment)


def close_environment(environment: Environment, is_closed: threading.Event | None = None) -> None:
    """Closes an environment, and sets `is_closed`. An error is a warning: the rollout is over, and others go on."""
    try:
        environment.close()
    except Exception as error:
        warnings.warn(f"an environment could not be closed: {error!r}", RuntimeWarning, stacklevel=2)
    finally:
        if is_closed is not None:
            is_closed.set()


def check_failures(num_failed: int, total: int, max_share: float, reason: str) -> None:
    """Raises EnvironmentFailure where the environments of more than a share of the rollouts failed. `reason`: that of
    the first."""
    if num_failed > max_share * total:
        raise EnvironmentFailure(
            f"the environments of {num_failed} of {total} rollouts failed, more than max_failed_share={max_share:g}; "
            f"the first because {reason}"
        )


def common_names(metrics: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names that all of them have, in the order of the first."""
    return [name for name in (metrics[0] if metrics else ()) if all(name in record for record in metrics)]


def map_in_order(function: Callable[[Any], Any], parts: Sequence[Any]) -> list:
    """[function(part) for part in parts]"""
    return [function(part) for part in parts]


def hash_seed(*parts: object) -> int:
    """A 63-bit seed from words and numbers, the same in every process."""
    return random.Random("-".join(map(str, parts))).getrandbits(63)


def rollout(
    sampler: Sampler,
    make: Sequence[Callable[[], Environment]],
    chat_format: ChatFormat,
    limits: Limits,
    temperature: float = 1.0,
    seeds: Sequence[Seed] | torch.Generator | None = None,
    threads: bool = False,
    on_step: Callable[[int], None] = lambda _: None,
) -> list[Rollout]:
    """Runs an episode of every environment to its end. Rollouts are returned in the order of `make`, whose functions
    give new environments. `seeds`: one for each, or a generator for all. `on_step`: called after each step of the
    driver, so with every answer of an environment at the latest, with the number of rollouts that are over. No context
    is longer than `limits.chaining.limit` tokens.

    Raises ValueError if there is no environment, for given tokens outside the vocabulary, an empty prompt, an invalid
    temperature, and a policy whose log-probs are not finite. With summaries, `chaining.trigger` must exceed every
    prompt plus the longest summary and `resume`, or a context could start at the trigger. §4.1."""
    if not make:
        raise ValueError("there must be at least one environment")
    chaining = limits.chaining
    for name in ("request", "resume", "instruction"):
        check_tokens(name, getattr(chaining, name), sampler.vocab_size)
    driver = Driver(sampler.engine(len(make), chaining.limit, temperature), chat_format, limits, threads, temperature)
    rollout_seeds = seeds if isinstance(seeds, Sequence) else [seeds] * len(make)
    rollouts: dict[Hashable, Rollout] = {}
    try:
        for number, (make_environment, seed) in enumerate(zip(make, rollout_seeds, strict=True)):
            driver.add(number, make_environment, seed)
        while not driver.is_empty:
            rollouts.update(driver.step())
            on_step(len(rollouts))
            driver.wait()
    finally:
        driver.close()
    return [rollouts[number] for number in range(len(make))]


MIN_BATCH, MAX_BATCH = 32, 600
"""Bounds for the rollouts in one batch, which has a quarter of them otherwise. A step of a small network has a fixed
cost as high as that of 100 contexts, so small batches are inefficient; large ones take memory, half a megabyte per
rollout of the small world."""


def batch_size(count: int) -> int:
    """How many of `count` rollouts are sampled together, at most."""
    return min(max(MIN_BATCH, -(-count // 4)), MAX_BATCH)


def sample_rollouts(
    sampler: Sampler,
    environment: Callable[[Any, int], Environment],
    tasks: Sequence[Any],
    count: int,
    chat_format: ChatFormat,
    limits: Limits,
    temperature: float,
    generator: torch.Generator | None,
    map_fn: MapFunction = map_in_order,
    threads: bool = False,
    on_step: Callable[[int], None] = lambda _: None,
) -> list[Rollout]:
    """`count` rollouts of every task, in environments that `environment(task, number)` gives; those of a task are
    adjacent. The random numbers of a rollout depend on a number that `generator`
    draws, the task's key and its index among the rollouts of that task, whatever else is sampled. At temperature 0 no
    generator is needed.

    `on_step`: see `rollout`. `map_fn(function, batches)` may sample the batches elsewhere. How rollouts are divided
    into batches does not depend on the number of processes, because the last bit of a product depends on its number of
    rows. With environments in `threads` and a sampler of so many slots there is one batch, in which the next rollout
    begins as soon as one is over; other samplers take MIN_BATCH."""
    stream = 0 if generator is None else int(torch.randint(2**62, (), generator=generator))
    counts: Counter[str] = Counter()
    requests: list[tuple[Any, int, int | None]] = []
    for task in (task for task in tasks for _ in range(count)):
        number = counts[task.key]
        requests.append((task, number, None if generator is None else hash_seed(stream, task.key, number)))
        counts[task.key] += 1

    def sample_batch(indices: range) -> list[Rollout]:
        make = [partial(environment, *requests[index][:2]) for index in indices]
        return rollout(
            sampler,
            make,
            chat_format,
            limits,
            temperature,
            [requests[index][2] for index in indices],
            threads,
            lambda num_over: on_step(indices.start + num_over),
        )

    size = batch_size(len(requests))
    if threads:
        size = MIN_BATCH if sampler.slots is None else len(requests)
    batches = [range(len(requests))[start : start + size] for start in range(0, len(requests), size)]
    rollouts = [*itertools.chain(*map_fn(sample_batch, batches))]
    for (task, *_), sampled_rollout in zip(requests, rollouts, strict=True):
        sampled_rollout.task = task
    return rollouts


def script_rollout(
    environment: Environment,
    chat_format: ChatFormat,
    limits: Limits,
    say: Callable[[Sequence[Message], bool], Sequence[int]],
) -> Rollout:
    """The rollout of a scripted policy, which `say`s its turns: (messages so far, whether a summary is asked for) →
    tokens without the stop token. Its log-probs are zero. Limits hold as in `rollout`, so demonstrations for SFT have
    the tokens that sampling would have."""
    active = Active(environment, chat_format, limits)
    try:
        active.open(environment.reset())
        while active.builder.close(_script_context(active, say)):
            pass
        return active.result(environment.reward())
    finally:
        close_environment(environment)


def _script_context(active: Active, say: Callable[[Sequence[Message], bool], Sequence[int]]) -> Segment:
    """Writes one context to its end, or up to a limit."""
    builder, stop, limit = active.builder, active.format.stop_ids[0], active.limits.chaining.limit
    tokens, is_sampled, answer, finished = list(builder.prompt), [False] * len(builder.prompt), builder.prompt, False
    while answer is not None and len(tokens) < limit:
        ids, longest = list(say(active.messages, builder.is_summary)), active.longest_turn
        turn = SampledTurn(ids, stop) if longest is None or len(ids) < longest else SampledTurn(ids[:longest], None)
        tokens += get_turn_tokens(turn)
        is_sampled += [True] * len(get_turn_tokens(turn))
        if len(tokens) > limit:
            break  # full within the turn, which nobody sees
        message = active.read(turn)
        answer = None if message is None else active.answer(active.environment.step(message))
        finished = answer is None and not active.has_reached_limit and (message is not None or turn.stop is not None)
        tokens += answer or []
        is_sampled += [False] * len(answer or [])
        if active.has_reached_limit:
            break
    T = min(len(tokens), limit)
    sampled, experts = torch.tensor(is_sampled[:T]), torch.zeros(T - 1, 0, 2, dtype=torch.int16)
    return Segment(torch.tensor(tokens[:T]), sampled, torch.zeros(T), torch.where(sampled, 0, -1), experts, finished)


F = TypeVar("F", bound=ForkableEnvironment)


def decode_rollout(
    decoder: Decoder, environment: F, chat_format: ChatFormat, limits: Limits, ahead: bool = True
) -> Iterator[F]:
    """Runs one episode at batch 1, as fast as possible, with speculative decoding (`ref/engine/decoder.py`). After each
    context, when `decoder.tokens` holds it, yields the environment in its current state: the one given, or a fork of
    it.

    `ahead`: a turn does not have to wait until its last tokens are verified. It is carried out, and the pass that reads
    the answer also verifies the turn, which saves one pass per turn. If the turn is rejected, the answer is dropped and
    the fork replaces the environment (report §6.2: snapshot and fork). Limits hold as in `rollout`; turns end with the
    first of the format's stop tokens.

    Raises ValueError if the decoder's max_len is not `limits.chaining.limit`, where a context is cut off."""
    if decoder.max_len != limits.chaining.limit:
        raise ValueError(
            f"decoder must have max_len {limits.chaining.limit}, which is chaining.limit; got {decoder.max_len}"
        )
    active = Active(environment, chat_format, limits)
    active.open(environment.reset())
    while True:
        active = _decode_context(decoder, active, ahead)
        yield cast(F, active.environment)
        if not (active.is_over and active.builder.go_on(decoder.tokens)):
            return


def _decode_context(decoder: Decoder, active: Active, ahead: bool) -> Active:
    """Decodes one context to its end, to a limit, or to the decoder's max_len; `decoder.tokens` then holds it. Returns
    the rollout in its final state: the one given, or a fork of it."""
    stop, forks = active.format.stop_ids[0], []
    active.is_over = False
    decoder.reset()
    decoder.feed(active.builder.prompt)
    turn = decoder.generate(stop, active.longest_turn, ahead)
    while turn and (turn[-1] == stop or decoder.length < decoder.max_len):
        # One fork for each turn that may be taken back, made before the turn was carried out.
        forks = [*forks[: len(decoder.pending) - 1], active.fork()] if decoder.pending else []
        is_whole = turn[-1] == stop
        message = active.read(SampledTurn(turn[:-1], stop) if is_whole else SampledTurn(turn, None))
        answer = None if message is None else active.answer(active.environment.step(message))
        active.is_over = answer is None and not active.has_reached_limit and (is_whole or message is not None)
        if answer is None or active.has_reached_limit:
            turn = decoder.generate(stop, 0)
        else:
            decoder.feed(answer[: decoder.max_len - decoder.length])
            turn = decoder.generate(stop, active.longest_turn, ahead)
        if decoder.retracted:
            active = forks[-decoder.retracted]
    return active
