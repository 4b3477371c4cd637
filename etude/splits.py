"""`etude plan --rl`: how GPUs are best split between sampler and trainer of asynchronous RL, and how old tokens have to
be for that.

    trainer    one group of ranks: a step of `etude plan`, as many times as the rollouts of an RL step fill its rows
    sampler    engines that each hold all weights in bfloat16. A step of an engine in which each of R rollouts samples a
               token takes

                   max(bytes of touched weights and of R caches / bandwidth, FLOPs / peak) + R · (given / own) · FLOPs
                   of a given token / peak

               with half a rollout in each cache, and the prompt's and the tools' tokens prefilled along with those that
               are sampled
    tools      log-normal times

`ref.async_rl.simulate`, with updates in flight, plays the services at these speeds. All engines are one there, with the
slots of all. A step is played with few of its groups and rollouts, each of which stands for several. Staleness is a
bound: a run may keep to a lower one, so a higher bound is never slower.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from etude import planning
from etude.prices import FULLNESS, cache, span
from kit.disk import atomic_write
from kit.settings import RunError
from ref.async_rl import Load, Outcome, Rules, heavy_tailed, simulate
from ref.network import Config
from ref.packing import Cost
from scaled.plan import HARDWARE, Hardware

if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    "ASSUMPTIONS",
    "Engines",
    "Split",
    "Trainer",
    "Work",
    "best",
    "bound",
    "candidates",
    "engines",
    "play",
    "show",
    "find_splits",
    "trainer",
    "write",
]

SIMULATED_SIZE = 4, 8
"""Groups of a step that are simulated, and rollouts of a group; the others do as these do."""
STEPS = 8
"""Steps that are counted, after those in which the pipeline fills and before those in which it drains."""
MEMORY_SHARE = 0.92
"""Share of a GPU's memory that may be filled."""
CLOSE = 1.03
"""A split is simulated unless what has been found is this much above what it could reach at best."""
ASSUMPTIONS = (
    "S: maximum age of a token, in updates; in brackets, that of the fastest run if it is less. slots: "
    "engines × rollouts of each. step: the "
    "trainer's time. waits: share of the time in which the trainer waits. used: sampled tokens, as a "
    "share of those with every slot decoding. "
    "age: mean age of the tokens that are trained on. dropped: groups that became too old.\n\n"
    "A step trains on {rollouts} rollouts of {tokens:,.0f} tokens, {own:,.0f} of them the policy's "
    "own, in {turns:g} turns; a tool takes "
    "{tool_s:g} s on average (log-normal, σ = {sigma:g}). Simulated: ref.async_rl.simulate with "
    "updates in flight, {played} of the rollouts, "
    "{steps} steps after the pipeline has filled; all engines as one. Trainer: the time of etude plan, "
    "rows {fullness:.0%} full. Engine: {gpus} "
    "GPU{s} with all weights in bfloat16; memory-bound decoding and compute-bound prefill, one after "
    "the other, at the trainer's share of peak; as "
    "many slots as caches of mean rollouts fit into {room:.0%} of the memory; balanced routing; no "
    "drafts, no shared prefixes, load balanced over "
    "the engines. Guessed: {publish_s:g} s until weights can be loaded, {swap_s:g} s to load them. "
    "Nothing was measured on a GPU."
)


@dataclass(frozen=True)
class Work:
    """What a step of RL trains on, and how long what lies around takes."""

    groups: int = 64
    """Groups (prompts) of a step."""
    rollouts: int = 16
    """Rollouts of a group."""
    turns: int = 10
    """Turns of a rollout; from half as many to half as many again."""
    turn_tokens: int = 300
    """Tokens that the policy samples in a turn; from half as many to half as many again."""
    tool_tokens: int = 1200
    """Tokens that a tool answers with."""
    prompt_tokens: int = 1500
    """Tokens of a prompt."""
    tool_s: float = 5.0
    """Mean seconds of a tool, log-normal."""
    sigma: float = 1.0
    """σ of its logarithm; 0: every tool takes as long."""
    staleness: tuple[int, ...] = (1, 2, 4, 8)
    """Bounds of the age, in updates, to be compared."""
    publish_s: float = 5.0
    """Seconds from the end of a step until engines can load its weights: a guess."""
    swap_s: float = 0.5
    """Seconds in which an engine loads weights and samples nothing: a guess."""
    seed: int = 0
    """Seed of lengths and tool times."""

    def __post_init__(self):
        least = {"groups": 1, "rollouts": 1, "turns": 1, "turn_tokens": 1, "tool_tokens": 0, "prompt_tokens": 1}
        for name, value in (least | {"tool_s": 0, "sigma": 0, "publish_s": 0, "swap_s": 0}).items():
            if not value <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be at least {value}, got {getattr(self, name)}")
        if not self.staleness or min(self.staleness) < 0 or len(set(self.staleness)) < len(self.staleness):
            raise ValueError(
                f"staleness must hold one bound or more, each once and at least 0; got {list(self.staleness)}"
            )

    @property
    def own(self) -> float:
        """Mean tokens of a rollout that the policy samples."""
        return mean_draw(self.turns) * mean_draw(self.turn_tokens)

    @property
    def tokens(self) -> float:
        """Mean tokens of a rollout."""
        return self.prompt_tokens + self.own + (mean_draw(self.turns) - 1) * self.tool_tokens

    @property
    def longest(self) -> int:
        """Tokens of the longest rollout."""
        turns = self.turns + self.turns // 2
        return self.prompt_tokens + turns * (self.turn_tokens + self.turn_tokens // 2) + (turns - 1) * self.tool_tokens


def mean_draw(number: int) -> float:
    """Of what `heavy_tailed` draws: from half of the number to half more."""
    return (max(1, number // 2) + number + number // 2) / 2


@dataclass(frozen=True)
class Trainer:
    """The trainer's ranks."""

    gpus: int
    step_s: float
    memory: float
    """Bytes of a rank."""
    fits: bool


@dataclass(frozen=True)
class Engines:
    """The sampler: engines that are alike."""

    count: int
    gpus: int
    """GPUs of each."""
    slots: int
    """Rollouts that each holds."""
    token_s: Callable[[float], float]
    """Rollouts that decode in an engine → seconds in which each samples a token, with its share of the prefill."""


@dataclass(frozen=True)
class Split:
    """A split of some GPUs at a staleness, as simulated."""

    gpus: int
    sampler: int
    """GPUs of the sampler."""
    trainer: int
    """GPUs of the trainer."""
    engines: int
    slots: int
    """Of an engine."""
    staleness: int
    """The bound on the age, in updates."""
    effective_staleness: int
    """The bound that the run keeps to: the fastest one that is no higher."""
    step_s: float
    """Seconds that the trainer needs for a step."""
    steps_per_hour: float
    trainer_idle: float
    """Share of the time in which the trainer waits."""
    sampler_used: float
    """Tokens that the engines sample, over what they would sample with every slot decoding."""
    mean_age: float
    """Of the tokens that were trained on, in updates."""
    dropped: float
    """Share of groups that are dropped, too old."""
    dollars: float
    """Of a step."""


def trainer(model: str, gpus: int, cp: int, ep: int, length: int, hardware: str, work: Work) -> Trainer:
    """Raises RunError where `etude plan` does."""
    (step_plan,) = planning.plan_steps(model, [gpus], cp, math.gcd(ep, gpus), length, 1, hardware)
    rows = math.ceil(work.groups * work.rollouts * work.tokens / FULLNESS / step_plan["length"])
    return Trainer(
        gpus,
        math.ceil(rows / step_plan["layout"]["dp"]) * step_plan["step_seconds"],
        step_plan["memory"],
        step_plan["fits"],
    )


def engines(config: Config, machine: Hardware, work: Work) -> Engines:
    """One engine, on as few GPUs of a node as hold the weights and the longest rollout. Raises RunError if a node does
    not."""
    active, all_parameters, cost = config.parameters(active=True), config.parameters(), Cost.of(config)
    for gpus in (n for n in (1, 2, 4, 8, 16) if n <= machine.node):
        free_bytes = MEMORY_SHARE * gpus * machine.memory - 2 * all_parameters
        if free_bytes >= cache(config, work.longest, 2):
            break
    else:
        raise RunError(
            f"an engine with {2 * all_parameters / 1e9:,.0f} GB of weights does not fit a node of "
            f"{machine.node} GPUs; choose another --hardware"
        )
    bandwidth, peak = gpus * machine.bandwidth, gpus * machine.flops * machine.efficiency
    touched_share = config.num_experts_per_tok / config.num_experts if config.num_experts else 1.0
    cache_bytes, prefill = cache(config, work.tokens / 2, 2), (cost.linear + cost.quadratic * work.tokens) / peak
    prefill_ratio = (work.tokens - work.own) / work.own

    def token_s(rows: float) -> float:
        bytes_read = 2 * (active + (all_parameters - active) * min(1.0, rows * touched_share)) + rows * cache_bytes
        return max(bytes_read / bandwidth, 2 * active * rows / peak) + rows * prefill_ratio * prefill

    return Engines(1, gpus, int(free_bytes / cache(config, work.tokens, 2)), token_s)


def candidates(gpus: int, cp: int, engine: int) -> list[int]:
    """GPUs of the trainer in the splits to look at: about eight, all multiples of cp, with whole engines for the
    rest."""
    step = cp * max(1, round(gpus / 8 / cp))
    return [n for n in range(step, gpus, step) if (gpus - n) % engine == 0]


def bound(train: Trainer, sampler: Engines, staleness: int, work: Work) -> float:
    """Steps per hour that no schedule exceeds in the long run: the trainer never waits, or all slots that admission
    allows are always taken, by rollouts that decode or wait for tools."""
    occupied_slots = min(sampler.slots, (staleness + 1) * work.groups * work.rollouts / sampler.count)
    tool_seconds = (mean_draw(work.turns) - 1) * work.tool_s  # the last tool, that of the tests, holds no slot
    low, high = 0.0, float(occupied_slots)
    for _ in range(50):  # the number that decode: the others wait, by Little's law
        rows = (low + high) / 2
        low, high = (
            (rows, high)
            if rows * (1 + tool_seconds / work.own / sampler.token_s(rows)) < occupied_slots
            else (low, rows)
        )
    sampling = work.groups * work.rollouts * work.own * sampler.token_s(high) / high / sampler.count
    return 3600 / max(train.step_s, sampling)


def play(train_s: float, sampler: Engines, staleness: int, work: Work) -> tuple[float, Outcome]:
    """Steps per hour once the pipeline has filled, and all that the simulator saw."""
    groups, rollouts = min(SIMULATED_SIZE[0], work.groups), min(SIMULATED_SIZE[1], work.rollouts)
    scale = work.groups * work.rollouts / groups / rollouts  # real rollouts that a simulated one stands for
    slots = max(1, round(sampler.count * sampler.slots / scale))
    seconds: dict[int, float] = {}

    def token_s(rows: int) -> float:
        if rows not in seconds:
            seconds[rows] = sampler.token_s(max(1.0, rows * scale / sampler.count))
        return seconds[rows]

    lead = staleness + 2
    load = Load(
        heavy_tailed(work.tool_s, work.seed, work.turns, work.turn_tokens, work.sigma),
        rollouts=rollouts,
        slots=slots,
        token_s=token_s,
        train_s=train_s,
        publish_s=work.publish_s,
        swap_s=work.swap_s,
    )
    outcome = simulate("in-flight", Rules(groups, staleness, STEPS + 2 * lead), load)
    start_time, end_time = outcome.steps[lead - 1], outcome.steps[lead + STEPS - 1]
    return 3600 * STEPS / (end_time - start_time), outcome


def best(gpus: int, staleness: int, trainers: list[Trainer], engine: Engines, machine: Hardware, work: Work) -> Split:
    """The fastest of the splits, among those that fit, at one staleness. Splits that could not be faster even at best
    are not simulated."""
    pairs = [(candidate, replace(engine, count=(gpus - candidate.gpus) // engine.gpus)) for candidate in trainers]
    fastest: Split | None = None
    for train, sampler in sorted(pairs, key=lambda pair: -bound(*pair, staleness, work)):
        if fastest is not None and fastest.steps_per_hour >= CLOSE * bound(train, sampler, staleness, work):
            break
        rate, outcome = play(train.step_s, sampler, staleness, work)
        if fastest is not None and rate <= fastest.steps_per_hour:
            continue
        sampled_tokens = rate / 3600 * work.groups * work.rollouts * work.own
        fastest = Split(
            gpus,
            gpus - train.gpus,
            train.gpus,
            sampler.count,
            sampler.slots,
            staleness,
            staleness,
            train.step_s,
            rate,
            max(0.0, 1 - rate / 3600 * train.step_s),
            sampled_tokens * sampler.token_s(sampler.slots) / sampler.slots / sampler.count,
            outcome.mean_age,
            outcome.dropped / max(1, outcome.dropped + outcome.trained),
            gpus * machine.price / rate,
        )
    assert fastest is not None
    return fastest


def find_splits(
    model: str,
    gpus: list[int],
    cp: int,
    ep: int,
    length: int,
    hardware: str,
    work: Work,
    report_progress: Callable[[int, int, int], None] = lambda done, of, gpus: None,
) -> list[Split]:
    """The best split for each number of GPUs and each staleness, in rising order of both. `report_progress`: hears
    after each how many are done.

    Raises RunError for unknown names, for rollouts that are longer than a row, and where no split fits."""
    machine, config = planning.hardware_of(hardware), planning.network_of(model)
    row = min(length, config.max_position_embeddings)
    if work.longest > row:
        raise RunError(
            f"rollouts of up to {work.longest:,} tokens do not fit rows of {row:,}; raise --length, or "
            f"set fewer turns or tokens"
        )
    engine, best_splits, done = engines(config, machine, work), [], 0
    for number in sorted(gpus):
        trainers = [trainer(model, n, cp, ep, length, hardware, work) for n in candidates(number, cp, engine.gpus)]
        if not trainers:
            raise RunError(
                f"{number} GPU{'s' * (number > 1)} cannot be split: the trainer needs at least --cp "
                f"{cp}, and an engine {engine.gpus}; "
                "use more --gpus or a smaller --cp"
            )
        fitting = [candidate for candidate in trainers if candidate.fits]
        if not fitting:
            least = min(candidate.memory for candidate in trainers) / 1e9
            raise RunError(
                f"no split of {number} GPUs fits: the trainer's ranks would need {least:,.0f} GB each, "
                f"of {machine.memory / 1e9:,.0f} GB; "
                "use more --gpus, a smaller --length or another --hardware"
            )
        fastest: Split | None = None
        for staleness in sorted(work.staleness):
            split = best(number, staleness, fitting, engine, machine, work)
            if fastest is None or split.steps_per_hour > fastest.steps_per_hour:
                fastest = split
            best_splits.append(replace(fastest, staleness=staleness))
            done += 1
            report_progress(done, len(gpus) * len(work.staleness), number)
    return best_splits


def show(splits: list[Split], model: str, hardware: str, work: Work, console: Console | None = None) -> None:
    """Prints the table, and the assumptions under it, on `console` or on the terminal."""
    from rich.console import Console
    from rich.table import Table

    console = console or Console()
    title = f"{model} on {hardware}: the split into sampler + trainer with the most steps per hour"
    table = Table(box=None, header_style="bold", title=title, title_justify="left", padding=(0, 2, 0, 0))
    for heading in ("GPUs", "S", "split", "slots", "step", "steps/h", "waits", "used", "age", "dropped", "$/step"):
        table.add_column(heading, justify="right", no_wrap=True)
    for previous, split in zip([None, *splits], splits):
        table.add_row(
            f"{split.gpus}" if previous is None or previous.gpus != split.gpus else "",
            f"{split.staleness}"
            + ("" if split.effective_staleness == split.staleness else f" ({split.effective_staleness})"),
            f"{split.sampler} + {split.trainer}",
            f"{split.engines} × {split.slots}",
            span(split.step_s),
            f"{split.steps_per_hour:,.1f}",
            f"{split.trainer_idle:.0%}",
            f"{split.sampler_used:.0%}",
            f"{split.mean_age:.1f}",
            f"{split.dropped:.0%}",
            f"{split.dollars:,.2f}",
        )
    console.print(table)
    engine = engines(planning.network_of(model), HARDWARE[hardware], work).gpus
    simulated_size = " × ".join(f"{min(pair)}" for pair in zip(SIMULATED_SIZE, (work.groups, work.rollouts)))
    numbers = asdict(work) | {
        "tokens": work.tokens,
        "own": work.own,
        "rollouts": f"{work.groups} × {work.rollouts}",
        "played": simulated_size,
    }
    console.print(
        ASSUMPTIONS.format(
            **numbers, steps=STEPS, fullness=FULLNESS, gpus=engine, s="s" if engine > 1 else "", room=MEMORY_SHARE
        ),
        highlight=False,
    )


def write(splits: list[Split], work: Work, out: Path) -> None:
    """Writes rl-plan.json to a folder: the settings, and every split of the table."""
    out.mkdir(parents=True, exist_ok=True)
    atomic_write(
        out / "rl-plan.json",
        json.dumps({"work": asdict(work), "splits": [asdict(split) for split in splits]}, indent=1) + "\n",
    )
