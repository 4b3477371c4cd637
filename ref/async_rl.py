"""Asynchronous RL: sampling and training at the same time, with a bound on how old a token may be when it is trained
on.

Papers: Composer 2 technical report (arXiv:2603.24477v2), §4.1 and §6.2; in-flight updates: PipelineRL
(arXiv:2509.19128); admission: AReaL (arXiv:2505.24298); truncated importance weights: IMPALA (arXiv:1802.01561).

In a synchronous loop the trainer waits for the slowest rollout and the sampler waits for the trainer. Services that do
not wait for each other sample with weights that are some updates old. v counts the updates that were made. A token that
was sampled by version u and is trained on at version v has age v − u, and a group of rollouts has the age of its oldest
token.

    admission      a group may start while  trained + ready + running < (S + v + 1) · G                             (1)
    hard bound     a group whose age exceeds S when a step takes it is dropped, and another one takes its place     (2)
    loss           ρ_t = π(o_t) / μ(o_t), where μ is what the token was drawn from, whatever version that was       (3)

S is the staleness, G the groups of a step. S = 0 is the synchronous loop.

The trap is to believe that (1) bounds the age. It bounds how many groups run ahead, but a slow group may start at
version 0 and end when the trainer is at version 9: others overtake it. Hence (2). A drop is not free of bias: what is
dropped is slow, and slow rollouts are long. In-flight updates make later tokens of a slow rollout fresh, but its first
token keeps its version, and so the group keeps its age.

What (3) needs is the log-probability that was recorded when the token was drawn, not one that is computed afterwards
with the weights of that version: after an update in flight, keys and values of older weights are part of what the token
was drawn from. Versions only keep accounts.

What a stale token does to the loss
a. PPO's clip (`ref/dr_grpo.py`): a token whose ratio has left [1 − ε, 1 + ε] on its own side has no gradient. Biased,
   never large.
b. `truncated_ratios`: the gradient of log π is weighted by min(ρ, cap), a constant. Biased only where the cap acts;
   each token for itself.
c. `sequence_mask`: a rollout counts only if the geometric mean of its ratios lies between two bounds. Then a or b.
All of them take the other tokens' ratios as one. Exact would be the product of the ratios of all tokens of the rollout,
since they all earn its reward together. That product has a variance that nobody can pay for.

`Life` is what becomes of each group: generate → score → ready → train. It is a fold over a journal of events, so a
service that dies is rebuilt from its journal. `simulate` plays services on a virtual clock with the same `Life`.
`scaled/async_rl` plays them with processes.

Where this file departs from the papers
1. The report does not give its bound, nor what it does with what is too old. The hard bound by dropping is our choice;
   AReaL interrupts.
2. A slot holds one rollout until its end, also while a tool runs. The report parks environments.
3. The virtual clock takes decoding as a flow: a rollout's tokens come at one rate as long as nobody joins, leaves or
   waits.

Run it
    python -m ref.async_rl                 four ways to run the same services on the virtual clock, a second
    etude run async-rl --scale small       plays the services themselves, from runs/small; minutes
    etude run async-rl --scale full        the same services with a group of ranks as the trainer

Glossary
    symbol   variable            unit
    v        life.version        updates
    u        oldest, version     updates
    S        rules.staleness     updates
    G        rules.groups        groups per step
    log ρ    log_ratio           nats, [B, T]
"""

import heapq
import itertools
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ref.checks import expect

__all__ = [
    "Demo",
    "Event",
    "Life",
    "Load",
    "Occupied",
    "Outcome",
    "Rules",
    "Span",
    "demo",
    "sequence_mask",
    "simulate",
    "truncated_ratios",
]

State = Literal["running", "ready", "trained", "dropped"]


@dataclass(frozen=True)
class Rules:
    """How far sampling may run ahead of training. Raises ValueError for numbers that make no sense."""

    groups: int = 16
    """Groups that a step trains on."""
    staleness: int = 2
    """Oldest age, in updates, at which a group may be trained on; 0: the synchronous loop."""
    steps: int = 100
    """Number of steps after which the run is over. No group starts that no step needs."""

    def __post_init__(self):
        for name, minimum in (("groups", 1), ("staleness", 0), ("steps", 0)):
            if getattr(self, name) < minimum:
                raise ValueError(f"{name} must be at least {minimum}; got {getattr(self, name)}")


@dataclass(frozen=True)
class Event:
    """One line of the journal."""

    kind: Literal["start", "ready", "drop", "train"]
    """A group starts; it is sampled and scored; it is given up; a step on some groups is done and the version rises by
    one."""
    groups: tuple[int, ...]
    """The groups concerned, by their number; exactly `rules.groups` for "train", otherwise one."""
    version: int
    """Of "start" and "train": the number of updates before it. Of "ready": the version of the group's oldest token. Of
    "drop": the version at which it happened."""


class Life:
    """What became of every group, as a fold over events. `apply` refuses an event that contradicts those before it, and
    then changes nothing."""

    def __init__(self, rules: Rules, journal: Iterable[Event] = ()):
        self.rules, self.version, self.journal = rules, 0, []
        self.state: dict[int, State] = {}
        self.by_state: dict[State, set[int]] = {"running": set(), "ready": set(), "trained": set(), "dropped": set()}
        self.oldest: dict[int, int] = {}
        for event in journal:
            self.apply(event)

    def count(self, *states: State) -> int:
        """Number of groups in any of these states."""
        return sum(len(self.by_state[state]) for state in states)

    @property
    def admissible(self) -> int:
        """How many groups may start now, (1)."""
        G = self.rules.groups
        ahead = min((self.rules.staleness + self.version + 1) * G, self.rules.steps * G)  # Eq. 1: (S + v + 1) · G
        return max(0, ahead - self.count("running", "ready", "trained"))  # Eq. 1: minus trained + ready + running

    @property
    def over(self) -> bool:
        """Whether all steps are done."""
        return self.version >= self.rules.steps

    def start(self) -> int:
        """Begin the next group and return its number. Raises ValueError if none may start."""
        number = len(self.state)
        self.apply(Event("start", (number,), self.version))
        return number

    def finish(self, group: int, oldest: int) -> None:
        """All rollouts of a running group are sampled and scored; `oldest` is the version of its oldest token."""
        self.apply(Event("ready", (group,), oldest))

    def drop(self, group: int) -> None:
        """Give up a group that runs or is ready."""
        self.apply(Event("drop", (group,), self.version))

    def take(self) -> tuple[int, ...] | None:
        """The groups of the next step, those that started first, or None if too few are ready. Groups beyond the bound
        are dropped, (2)."""
        ready = sorted(self.by_state["ready"])
        for group in ready:
            # Eq. 2: the age v − u exceeds S
            if self.version - self.oldest[group] > self.rules.staleness:
                self.drop(group)
        fresh_groups = [group for group in ready if self.state[group] == "ready"]
        return (
            tuple(fresh_groups[: self.rules.groups])
            if len(fresh_groups) >= self.rules.groups and not self.over
            else None
        )

    def train(self, groups: Sequence[int]) -> None:
        """A step on these groups is done."""
        self.apply(Event("train", tuple(groups), self.version))

    def apply(self, event: Event) -> None:
        """Take one event. Raises ValueError for one that cannot follow."""
        kind, groups = event.kind, event.groups
        if kind not in ("start", "ready", "drop", "train"):
            raise ValueError(f"kind must be start, ready, drop or train; got {kind!r}")
        if len(groups) != (self.rules.groups if kind == "train" else 1) or len(set(groups)) != len(groups):
            raise ValueError(
                f"{kind} must name {self.rules.groups if kind == 'train' else 1} groups, each once; got {list(groups)}"
            )
        if kind == "start":
            if groups[0] != len(self.state) or event.version != self.version:
                raise ValueError(
                    f"group {len(self.state)} starts next, at version {self.version}; got group "
                    f"{groups[0]} at {event.version}"
                )
            if not self.admissible:
                raise ValueError(
                    f"no group may start: {self.count('running', 'ready', 'trained')} have, at version {self.version}"
                )
            self.set_state(groups[0], "running")
        else:
            allowed_states = {"ready": ("running",), "drop": ("running", "ready"), "train": ("ready",)}[kind]
            for group in groups:
                if self.state.get(group) not in allowed_states:
                    raise ValueError(
                        f"{kind}: group {group} must be {' or '.join(allowed_states)}; it is "
                        f"{self.state.get(group, 'unknown')}"
                    )
            if kind == "ready":
                if not 0 <= event.version <= self.version:
                    raise ValueError(
                        f"the oldest version of group {groups[0]} must lie between 0 and "
                        f"{self.version}; got {event.version}"
                    )
                self.oldest[groups[0]] = event.version
            elif event.version != self.version:
                raise ValueError(f"{kind} must happen at version {self.version}; got {event.version}")
            if kind == "train":
                if self.over:
                    raise ValueError(f"all {self.rules.steps} steps are done")
                # Eq. 2: hard bound
                stale_groups = [group for group in groups if self.version - self.oldest[group] > self.rules.staleness]
                if stale_groups:
                    raise ValueError(
                        f"group {stale_groups[0]} is {self.version - self.oldest[stale_groups[0]]} "
                        f"updates old; at most {self.rules.staleness} may be"
                    )
                self.version += 1
            next_states: dict[str, State] = {"ready": "ready", "drop": "dropped", "train": "trained"}
            for group in groups:
                self.set_state(group, next_states[kind])
        self.journal.append(event)

    def set_state(self, group: int, state: State) -> None:
        if group in self.state:
            self.by_state[self.state[group]].remove(group)
        self.state[group] = state
        self.by_state[state].add(group)


def truncated_ratios(log_ratio: Float[Tensor, "B T"], cap: float = 2.0) -> Float[Tensor, "B T"]:
    """min(ρ, cap), detached: what the gradient of log π of a stale token is weighted with. log_ratio: log π − log μ,
    nats. Raises ValueError unless cap > 0 and log ratios are numbers."""
    expect("log_ratio", log_ratio, "float", "B", "T")
    if not cap > 0 or bool(log_ratio.isnan().any()):
        raise ValueError(f"cap must be positive, and log_ratio must not be NaN; got cap {cap}")
    return log_ratio.detach().clamp(max=math.log(cap)).exp()  # min(ρ, cap), ρ of Eq. 3


def sequence_mask(
    log_ratio: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"], low: float = 0.5, high: float = 2.0
) -> Bool[Tensor, "B T"]:
    """`mask` where the geometric mean of a row's ratios over its masked tokens lies in [low, high], False in other
    rows. A row without a masked token stays as it is. Raises ValueError unless 0 ≤ low ≤ high."""
    expect("log_ratio", log_ratio, "float", "B", "T")
    if not 0 <= low <= high:
        raise ValueError(f"low and high must satisfy 0 ≤ low ≤ high; got {low} and {high}")
    total = torch.where(mask, log_ratio.detach(), 0.0).sum(1)
    mean = (total / mask.sum(1).clamp(min=1)).exp()  # geometric mean of the row's ρ
    return mask & ((mean >= low) & (mean <= high))[:, None]


# The virtual clock.


@dataclass(frozen=True)
class Load:
    """What the services have to do, and how long it takes on a virtual clock, in seconds."""

    turns: Callable[[int, int], Sequence[tuple[int, float]]]
    """Group and rollout → its turns: tokens to sample, and seconds in the environment afterwards."""
    rollouts: int = 8
    """Rollouts of a group."""
    slots: int = 128
    """Rollouts that may run or wait for a tool at a time, over all workers."""
    workers: int = 1
    """Engines, each with its part of the slots."""
    token_s: Callable[[int], float] = lambda rows: 0.002 + 0.00005 * rows
    """Rows that decode in an engine → time of a step, in which each of them samples a token."""
    train_s: float = 3.0
    """Time of an optimiser step."""
    publish_s: float = 0.0
    """Time from the end of a step until an engine can load its weights. It blocks nobody."""
    swap_s: float = 0.02
    """Pause of an engine that loads weights."""
    score_s: float = 0.0
    """Time from a group's last token to its score."""
    shared: float | Callable[[int], float] = 1.0
    """Speed of engines and trainer while both compute, 1.0 if they do not share processors; or that speed for each
    number of engines that decode."""


@dataclass(frozen=True)
class Span:
    """A piece of somebody's time."""

    service: str
    """ "trainer", or "worker N"."""
    activity: Literal["train", "decode", "idle", "swap"]
    start: float
    end: float
    version: int
    """Of the weights that are trained, used or loaded."""


@dataclass(frozen=True)
class Occupied:
    """What the slots of an engine do from a moment on, until its next entry."""

    engine: str
    """ "worker N"."""
    at: float
    decoding: int
    waiting: int
    """Rollouts whose tool runs."""
    free: int


@dataclass
class Outcome:
    """What `simulate` saw, in virtual seconds."""

    seconds: float = 0.0
    """Until the last step is done."""
    steps: list[float] = field(default_factory=list)
    """When each step was done."""
    trained: int = 0
    dropped: int = 0
    token_ages: Counter[int] = field(default_factory=Counter)
    """Age → number of tokens that were trained on at that age."""
    group_ages: Counter[int] = field(default_factory=Counter)
    spans: list[Span] = field(default_factory=list)
    slots: list[Occupied] = field(default_factory=list)
    journal: list[Event] = field(default_factory=list)

    @property
    def trainer_idle(self) -> float:
        """Share of the time in which the trainer waits."""
        busy = sum(span.end - span.start for span in self.spans if span.activity == "train")
        return 1 - busy / self.seconds if self.seconds else 0.0

    @property
    def sampler_idle(self) -> float:
        """Share of the engines' time in which they decode nothing: they wait for tools, for the trainer, or load
        weights."""
        workers = {span.service for span in self.spans if span.service != "trainer"}
        busy = sum(span.end - span.start for span in self.spans if span.activity == "decode")
        return 1 - busy / (self.seconds * len(workers)) if workers and self.seconds else 0.0

    @property
    def mean_age(self) -> float:
        """Of the tokens that were trained on, in updates."""
        return sum(age * n for age, n in self.token_ages.items()) / max(1, self.token_ages.total())


Mode = Literal["synchronous", "one-step-off", "asynchronous", "in-flight"]


def simulate(mode: Mode, rules: Rules, load: Load) -> Outcome:
    """Play sampler, environments, scorer and trainer on a virtual clock, the same way every time.

    synchronous     a step's groups are sampled with its weights, and nothing else happens meanwhile: S = 0
    one-step-off    the next step's groups are sampled while a step is trained, and both wait for each other: S = 1
    asynchronous    nobody waits, within `rules`. An engine loads new weights once its running rollouts have ended; none
                    starts before that
    in-flight       the same, but an engine loads new weights between two tokens

    Raises ValueError for another mode, and if a rollout has no turns."""
    if mode not in ("synchronous", "one-step-off", "asynchronous", "in-flight"):
        raise ValueError(f"mode must be synchronous, one-step-off, asynchronous or in-flight; got {mode!r}")
    if load.slots < load.workers or load.workers < 1:
        raise ValueError(f"each of the {load.workers} workers must have a slot; got {load.slots} slots")
    return _Clock(
        mode, replace(rules, staleness={"synchronous": 0, "one-step-off": 1}.get(mode, rules.staleness)), load
    ).run()


@dataclass
class _Rollout:
    group: int
    turns: list[tuple[int, float]]
    counted_until: float = 0.0  # the engine's progress up to which its tokens are counted
    tokens: Counter = field(default_factory=Counter)  # version → tokens


class _Engine:
    def __init__(self, name: str, slots: int):
        self.name, self.slots, self.version, self.waiting = name, slots, 0, 0
        self.loading_until = 0.0  # it loads weights until then
        self.progress = 0.0  # tokens that a rollout would have sampled that had been active from the beginning
        self.active: list[tuple[float, int, _Rollout]] = []  # a heap, by the progress at which the turn ends
        self.last_counts: tuple[int, int] | None = None  # active and waiting rollouts, as last noted

    @property
    def free(self) -> int:
        return self.slots - len(self.active) - self.waiting

    def count_tokens(self, rollout: _Rollout, progress: float) -> None:
        """Note a rollout's tokens up to this progress: they are of the engine's version."""
        if progress - rollout.counted_until > 1e-6:
            rollout.tokens[self.version] += progress - rollout.counted_until  # pyright: ignore[reportArgumentType]
        rollout.counted_until = progress


class _Clock:
    """The services of `simulate`. Decoding is a flow: between two events every active rollout of an engine gains the
    same number of tokens."""

    def __init__(self, mode: str, rules: Rules, load: Load):
        self.mode, self.load, self.life, self.time, self.outcome = mode, load, Life(rules), 0.0, Outcome()
        slot_counts = [
            load.slots // load.workers + (index < load.slots % load.workers) for index in range(load.workers)
        ]
        self.engines = [_Engine(f"worker {index}", slots) for index, slots in enumerate(slot_counts)]
        self.queue: deque[_Rollout] = deque()  # rollouts of started groups that have no slot yet
        self.rollouts_left: Counter[int] = Counter()  # group → rollouts that have not ended
        self.tokens: dict[int, Counter] = {}
        self.scheduled: list[tuple[float, int, Callable[[], None]]] = []  # what happens at a fixed time
        self.order = itertools.count()
        self.training: tuple[int, ...] | None = None
        self.work_left = self.step_start = 0.0  # seconds of the step that are still to do, and when it began
        self.newest_version = 0  # the version that engines can load
        # engine → what it does, with which version, since when
        self.activities: dict[str, tuple[Any, int, float]] = {}

    def schedule(self, seconds: float, callback: Callable[[], None]) -> None:
        heapq.heappush(self.scheduled, (self.time + seconds, next(self.order), callback))

    def run(self) -> Outcome:
        self.dispatch()
        while not self.life.over:
            self.advance_clock(self.time_to_next())
            while self.scheduled and self.scheduled[0][0] <= self.time:
                heapq.heappop(self.scheduled)[2]()
            for engine in self.engines:
                while engine.active and engine.active[0][0] <= engine.progress + 1e-6:
                    self.end_turn(engine, *heapq.heappop(engine.active))
            if self.training is not None and self.work_left <= 1e-12:
                self.end_step()
            self.dispatch()
        for engine in self.engines:
            self.note_activity(engine.name, "idle", -1)
        self.outcome.seconds, self.outcome.journal = self.time, self.life.journal
        self.outcome.trained, self.outcome.dropped = self.life.count("trained"), self.life.count("dropped")
        return self.outcome

    def is_decoding(self, engine: _Engine) -> bool:
        return bool(engine.active) and engine.loading_until <= self.time

    def compute_speeds(self) -> tuple[float, float]:
        """Of engines and of the trainer."""
        engines = sum(self.is_decoding(engine) for engine in self.engines)
        if self.training is None or not engines:
            return 1.0, 1.0
        speed = self.load.shared(engines) if callable(self.load.shared) else self.load.shared
        return speed, speed

    def time_to_next(self) -> float:
        sampler, trainer = self.compute_speeds()
        times = [self.scheduled[0][0] - self.time] if self.scheduled else []
        times += [engine.loading_until - self.time for engine in self.engines if engine.loading_until > self.time]
        for engine in self.engines:
            if self.is_decoding(engine):
                times.append((engine.active[0][0] - engine.progress) * self.load.token_s(len(engine.active)) / sampler)
        if self.training is not None:
            times.append(self.work_left / trainer)
        if not times:
            raise ValueError("nothing can happen any more: are there slots, and does every rollout have a turn?")
        return max(0.0, min(times))

    def advance_clock(self, seconds: float) -> None:
        sampler, trainer = self.compute_speeds()
        for engine in self.engines:
            activity = "swap" if engine.loading_until > self.time else "decode" if engine.active else "idle"
            if seconds > 0:
                self.note_activity(engine.name, activity, engine.version)
            if seconds > 0 and engine.last_counts != (len(engine.active), engine.waiting):
                engine.last_counts = len(engine.active), engine.waiting
                self.outcome.slots.append(Occupied(engine.name, self.time, *engine.last_counts, engine.free))
            if activity == "decode":
                engine.progress += seconds * sampler / self.load.token_s(len(engine.active))
        if self.training is not None:
            self.work_left -= seconds * trainer
        self.time += seconds

    def note_activity(self, name: str, activity: Any, version: int) -> None:
        """From now on, this is what an engine does."""
        previous = self.activities.get(name)
        if previous is not None and previous[:2] == (activity, version):
            return
        if previous is not None:
            self.outcome.spans.append(Span(name, previous[0], previous[2], self.time, previous[1]))
        self.activities[name] = activity, version, self.time

    def end_turn(self, engine: _Engine, turn_end: float, _: int, rollout: _Rollout) -> None:
        engine.count_tokens(rollout, turn_end)
        wait = rollout.turns.pop(0)[1]
        if rollout.turns:
            engine.waiting += 1
            self.schedule(wait, lambda: self.resume_rollout(engine, rollout))
            return
        self.tokens[rollout.group] += rollout.tokens
        self.rollouts_left[rollout.group] -= 1
        if not self.rollouts_left[rollout.group]:
            self.schedule(
                wait + self.load.score_s, lambda: self.life.finish(rollout.group, min(self.tokens[rollout.group]))
            )

    def resume_rollout(self, engine: _Engine, rollout: _Rollout) -> None:
        engine.waiting -= 1
        self.start_turn(engine, rollout)

    def start_turn(self, engine: _Engine, rollout: _Rollout) -> None:
        rollout.counted_until = engine.progress
        heapq.heappush(engine.active, (engine.progress + rollout.turns[0][0], next(self.order), rollout))

    def end_step(self) -> None:
        assert self.training is not None
        for group in self.training:
            for version, tokens in self.tokens.pop(group).items():
                self.outcome.token_ages[self.life.version - version] += round(tokens)
            self.outcome.group_ages[self.life.version - self.life.oldest[group]] += 1
        self.outcome.spans.append(Span("trainer", "train", self.step_start, self.time, self.life.version))
        self.life.train(self.training)
        self.outcome.steps.append(self.time)
        self.training, version = None, self.life.version

        def publish() -> None:
            self.newest_version = version

        self.schedule(self.load.publish_s, publish)

    def dispatch(self) -> None:
        for engine in self.engines:
            # Without updates in flight an engine must be empty before it loads.
            if (
                engine.version < self.newest_version
                and engine.loading_until <= self.time
                and (self.mode == "in-flight" or not engine.active and not engine.waiting)
            ):
                for *_, rollout in engine.active:
                    engine.count_tokens(rollout, engine.progress)
                engine.version, engine.loading_until = self.newest_version, self.time + self.load.swap_s
        if self.training is None and (groups := self.life.take()) is not None:
            self.training, self.work_left, self.step_start = groups, self.load.train_s, self.time
        # In step, the next groups start only when all before them have been sampled, and with the weights of the last
        # finished step.
        is_lockstep = self.mode in ("synchronous", "one-step-off")
        if (
            not is_lockstep
            or not self.life.count("running")
            and self.newest_version == self.life.version
            and not (self.mode == "one-step-off" and self.is_step_pending())
        ):
            for _ in range(
                self.life.admissible if not is_lockstep else min(self.life.admissible, self.life.rules.groups)
            ):
                self.start_group(self.life.start())
        for engine in sorted(self.engines, key=lambda engine: -engine.free):
            is_draining = engine.version < self.newest_version and self.mode != "in-flight"
            # What starts with weights that are too old already would be dropped in the end.
            is_stale = engine.version < self.life.version - self.life.rules.staleness
            while self.queue and engine.free and engine.loading_until <= self.time and not is_draining and not is_stale:
                self.start_turn(engine, self.queue.popleft())

    def is_step_pending(self) -> bool:
        """One-step-off: whether a step could begin but has not, because the one before is not done."""
        return self.life.count("ready") - (len(self.training) if self.training else 0) >= self.life.rules.groups

    def start_group(self, group: int) -> None:
        self.rollouts_left[group], self.tokens[group] = self.load.rollouts, Counter()
        for number in range(self.load.rollouts):
            turns = [(int(tokens), float(wait)) for tokens, wait in self.load.turns(group, number)]
            if not turns or min(tokens for tokens, _ in turns) < 1 or min(wait for _, wait in turns) < 0:
                raise ValueError(
                    f"rollout {number} of group {group} must have turns of at least one token and no negative wait"
                )
            self.queue.append(_Rollout(group, turns))


def heavy_tailed(
    latency: float, seed: int = 0, turns: int = 4, tokens: int = 20, sigma: float = 1.0
) -> Callable[[int, int], list[tuple[int, float]]]:
    """Turns whose tools take a log-normal time with mean `latency` seconds and this σ; numbers of turns and tokens vary
    by a half."""

    def draw(group: int, rollout: int) -> list[tuple[int, float]]:
        rng = random.Random(f"{seed}-{group}-{rollout}")
        number = rng.randint(max(1, turns // 2), turns + turns // 2)
        return [
            (
                rng.randint(max(1, tokens // 2), tokens + tokens // 2),
                latency * rng.lognormvariate(-(sigma**2) / 2, sigma) if latency else 0.0,
            )
            for _ in range(number)
        ]

    return draw


@dataclass(frozen=True)
class Demo:
    """The four modes at some tool latencies, on the virtual clock."""

    latencies: tuple[float, ...] = (0.0, 0.2, 0.5)
    """Mean times of a tool, seconds."""
    groups: int = 16
    """Groups of a step (G), of eight rollouts each."""
    staleness: int = 2
    """Greatest age, updates (S), where nobody waits."""
    steps: int = 20
    """Steps of each run."""
    slots: int = 128
    """Rollouts that may run or wait for a tool at a time."""
    seed: int = 0
    """Seed of the rollouts' lengths and of their tools' times."""


def demo(config: Demo = Demo(), log: Callable[..., None] = lambda *_, **__: None) -> dict[str, float]:
    """For each latency and mode: steps per minute, shares of the time in which trainer and engines wait, mean age of
    the tokens that were trained on, and the number of groups that were dropped, as `measure@mode,latency`."""
    metrics: dict[str, float] = {}
    runs = [(latency, mode) for latency in config.latencies for mode in get_args(Mode)]
    for number, (latency, mode) in enumerate(runs, 1):
        load = Load(heavy_tailed(latency, config.seed), slots=config.slots)
        outcome = simulate(mode, Rules(config.groups, config.staleness, config.steps), load)
        row = {
            "steps_per_minute": 60 * config.steps / outcome.seconds if outcome.seconds else 0.0,
            "trainer_idle": outcome.trainer_idle,
            "sampler_idle": outcome.sampler_idle,
            "mean_age": outcome.mean_age,
            "dropped": float(outcome.dropped),
        }
        metrics |= {f"{name}@{mode},{latency:g}": value for name, value in row.items()}
        log(number, len(runs), latency=latency, **row)
    return metrics


if __name__ == "__main__":
    metrics = demo()
    for run in dict.fromkeys(name.partition("@")[2] for name in metrics):
        row = (f"{name.partition('@')[0]} {value:.2f}" for name, value in metrics.items() if name.endswith(f"@{run}"))
        print(f"{run:>16}", *row, sep="  ")
