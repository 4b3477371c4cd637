"""What trainer and sampler of asynchronous RL did when, in one form for the simulator and for a real run, whose
services write events (`scaled/async_rl/services.py`): figures, and how it is drawn.

    simulated(name, outcome)      of `ref.async_rl.simulate`
    played(name, folder)          of a run's services
    bars(timelines)               the picture: a strip for the trainer and one for each worker, over time

A version has one colour everywhere: on the step that makes it, and on the worker that holds it later.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from kit.disk import read_lines
from kit.plots import BLUE, GREEN, ORANGE, PURPLE, RED, SKY
from kit.settings import RunError
from ref.async_rl import Outcome
from scaled.async_rl import services

__all__ = [
    "Timeline",
    "bars",
    "clock",
    "colour",
    "events",
    "make_run_timeline",
    "rows",
    "simulated",
    "slots",
    "summary",
    "thinned",
    "trainings",
    "workers",
]

TRAINER = "trainer"
VERSIONS = (BLUE, ORANGE, PURPLE, SKY, RED)
"""Colours of versions, in turn; green is for slots."""
LIGHT = "#E5E8EB"
MOMENTS = 400
"""Moments at which a strip is drawn: each of them is one or two pixels wide."""
MAX_LABELS = 60
"""Numbers of versions that a picture shows: each takes a third of a millisecond."""


def events(folder: Path) -> dict[str, list[dict]]:
    """Name of each service → its events, in order."""
    return {path.stem: read_lines(path) for path in sorted((folder / "events").glob("*.jsonl"))}


def workers(service_events: dict[str, list[dict]]) -> dict[str, list[dict]]:
    """Of the services those that play."""
    return {name: lines for name, lines in service_events.items() if name not in ("trainer", "evaluator")}


def slots(folder: Path) -> list[dict]:
    """What the workers' slots do now, as far as is known."""
    last = ([line for line in lines if line["what"] == "slots"][-1:] for lines in workers(events(folder)).values())
    return [line for worker_lines in last for line in worker_lines]


def trainings(lines: list[dict]) -> list[dict]:
    """The steps of the trainer that count: when each began, when it was saved, when its version was on its way so that
    the next step could begin, and its metrics. What a killed process began is not among them."""
    steps, start_time = {}, 0.0
    for line in lines:
        if line["what"] == "train":
            start_time = line["at"]
        elif line["what"] == "saved":
            steps[line["version"]] = {**line, "began": start_time, "sent": line["at"]}
        elif line["what"] == "publishing" and line["version"] in steps:
            steps[line["version"]]["sent"] = line["at"]
    return [steps[version] for version in sorted(steps)]


def clock(lines: Sequence[dict]) -> Callable[[float], float]:
    """Seconds since 1970 → seconds of the run: those in which the whole run was interrupted do not count. `lines`: the
    trainer's."""
    start_time = lines[0]["at"]
    # Processes of a run that goes on count their epochs from 0 again.
    pauses = [
        (before["at"], line["at"])
        for before, line in zip(lines, lines[1:])
        if line["what"] == "start" and line["epoch"] == 0
    ]
    return lambda at: max(
        0.0, at - start_time - sum(min(max(at - before, 0.0), after - before) for before, after in pauses)
    )


def summary(folder: Path, steps: int) -> dict[str, float]:
    """Figures of a finished run."""
    service_events = events(folder)
    training_steps = trainings(service_events["trainer"])
    seconds = clock(service_events["trainer"])(service_events["trainer"][-1]["at"])
    tokens = sum(step["tokens"] for step in training_steps)
    journal = read_lines(folder / "journal.jsonl")
    loads = [line for lines in workers(service_events).values() for line in lines if line["what"] == "load"]
    return {
        "steps": float(steps),
        "seconds": seconds,
        "seconds_per_step": seconds / steps,
        "tokens_per_s": tokens / seconds,
        "trainer_busy": sum(step["at"] - step["began"] for step in training_steps) / seconds,
        "age": sum(step["age"] * step["tokens"] for step in training_steps) / tokens,
        "oldest": max(step["oldest"] for step in training_steps),
        "dropped_groups": float(sum(line["kind"] == "drop" for line in journal)),
        "pause_ms": 1000 * sum(line["pause_s"] for line in loads) / max(1, len(loads)),
        "restarts": float(sum(max(line["epoch"] for line in lines) for lines in service_events.values())),
    }


@dataclass(frozen=True, eq=False)
class Timeline:
    """Who did what when; times in seconds."""

    name: str
    seconds: float
    steps: list[tuple[float, float, int]]
    """Begin, end, and the version that the step made."""
    slots: dict[str, list[tuple[float, int, int, int]]]
    """Worker → from when on how many slots decode, wait for a tool, are free."""
    version_changes: dict[str, list[tuple[float, int]]]
    """Worker → from when on it holds which version."""
    ages: Counter[int]
    """Age → number of tokens that were trained on at that age."""
    sampler_idle: float
    """Share of the workers' time in which no slot decodes."""
    dropped: int
    """Groups that were dropped."""

    @property
    def steps_per_minute(self) -> float:
        return 60 * len(self.steps) / self.seconds

    @property
    def trainer_idle(self) -> float:
        return 1 - sum(end - begin for begin, end, _ in self.steps) / self.seconds

    @property
    def mean_age(self) -> float:
        return sum(age * n for age, n in self.ages.items()) / max(1, self.ages.total())


def simulated(name: str, outcome: Outcome) -> Timeline:
    """What the virtual clock saw."""
    workers = list(dict.fromkeys(slot.engine for slot in outcome.slots))
    version_changes: dict[str, list[tuple[float, int]]] = {worker: [] for worker in workers}
    for span in outcome.spans:
        if span.service != TRAINER and (
            not version_changes[span.service] or version_changes[span.service][-1][1] != span.version
        ):
            version_changes[span.service].append((span.start, span.version))
    return Timeline(
        name,
        outcome.seconds,
        [(span.start, span.end, span.version + 1) for span in outcome.spans if span.service == TRAINER],
        {
            worker: [
                (slot.at, slot.decoding, slot.waiting, slot.free) for slot in outcome.slots if slot.engine == worker
            ]
            for worker in workers
        },
        version_changes,
        outcome.token_ages,
        outcome.sampler_idle,
        outcome.dropped,
    )


def make_run_timeline(name: str, folder: Path) -> Timeline:
    """A run so far, of its services' folder. Raises RunError if no step is done, and OSError, LookupError, TypeError or
    ValueError for files that are missing or damaged."""
    service_events = events(folder)
    worker_events = {worker: lines for worker, lines in workers(service_events).items() if lines}
    training_steps = trainings(service_events[TRAINER])
    if not training_steps:
        raise RunError(f"{folder.parent} has not finished a step yet")
    at = clock(service_events[TRAINER])
    begin = min(lines[0]["at"] for lines in service_events.values() if lines)
    seconds = max(at(step["at"]) for step in training_steps)
    slots = {
        worker: [line for line in lines if line["what"] == "slots" and begin <= line["at"]]
        for worker, lines in worker_events.items()
    }
    busy_flags = [line["decoding"] > 0 for lines in slots.values() for line in lines if at(line["at"]) <= seconds]
    journal = read_lines(folder / "journal.jsonl")
    return Timeline(
        name,
        seconds,
        [(at(step["began"]), at(step["at"]), step["version"]) for step in training_steps],
        {
            worker: [(at(line["at"]), line["decoding"], line["tools"], line["free"]) for line in lines]
            for worker, lines in slots.items()
        },
        {
            worker: [(at(line["at"]), line["version"]) for line in lines if line["what"] == "load"]
            for worker, lines in worker_events.items()
        },
        count_token_ages(folder),
        1 - sum(busy_flags) / max(1, len(busy_flags)),
        sum(line["kind"] == "drop" for line in journal),
    )


def count_token_ages(folder: Path) -> Counter[int]:
    """Age → number of the policy's own tokens that were trained on at that age, from the records of the groups."""
    token_ages = Counter[int]()
    for version, rollouts in services.trained(folder):
        for segment in (s for p in rollouts for s in p.chain.segments):
            versions, counts = segment.version[segment.sampled].unique(return_counts=True)
            token_ages.update({version - v: n for v, n in zip(versions.tolist(), counts.tolist(), strict=True)})
    return token_ages


def colour(version: int) -> str:
    return VERSIONS[version % len(VERSIONS)]


def bars(timelines: Sequence[Timeline]) -> Figure:
    """A strip for the trainer, and for each worker one with the version it holds above one with what its slots do, from
    top to bottom. All timelines share one pair of axes and few collections of shapes: a redraw waits for the
    drawing."""
    heights = [1.0 + 1.5 * len(timeline.slots) for timeline in timelines]
    gap = 0.28 / 0.3  # a strip's unit is 0.3 inches high; a title takes 0.28
    total_height = sum(heights) + gap * len(timelines)
    figure_height = 0.72 + 0.3 * total_height
    fig = Figure(figsize=(8.4, figure_height))
    ax = fig.add_axes((0.085, 0.42 / figure_height, 0.905, 0.3 * total_height / figure_height))
    longest = max(timeline.seconds for timeline in timelines)
    shapes: dict[tuple[str, float, str], list[np.ndarray]] = {}
    ticks, base = {}, total_height
    for timeline, height in zip(timelines, heights, strict=True):
        base -= height + gap
        top = base + height
        ticks[top - 0.5] = TRAINER
        ax.text(0, top + 0.15, timeline.name.replace("$", r"\$"), fontsize=9)
        ax.plot((0, longest), (base, base), color="black", linewidth=0.8)
        for begin, end, version in timeline.steps:
            shapes.setdefault((colour(version), 1.0, "white"), []).append(make_rectangle(begin, end, top - 0.9, 0.8))
        # What is too narrow for a number has none.
        for begin, end, version in [step for step in timeline.steps if step[1] - step[0] > 0.012 * longest][
            : MAX_LABELS // len(timelines)
        ]:
            ax.text(
                (begin + end) / 2,
                top - 0.52,
                str(version),
                ha="center",
                va="center",
                fontsize=7,
                color="white",
                fontweight="bold",
            )
        for number, (worker, lines) in enumerate(timeline.slots.items()):
            low = top - 1.0 - 1.5 * (number + 1)
            ticks[low + 0.7] = worker
            version_changes = [*timeline.version_changes.get(worker, []), (timeline.seconds, -1)]
            for (start, version), (end, _) in zip(version_changes, version_changes[1:]):
                if end > start:
                    shapes.setdefault((colour(version), 1.0, "none"), []).append(
                        make_rectangle(start, end, low + 1.08, 0.27)
                    )
            if lines:
                slot_counts = np.array(thinned(lines, timeline.seconds))
                at, slot_shares = (
                    np.append(slot_counts[:, 0], timeline.seconds),
                    slot_counts[:, 1:] / np.maximum(1, slot_counts[:, 1:].sum(1, keepdims=True)),
                )
                shapes.setdefault((LIGHT, 1.0, "none"), []).append(make_rectangle(at[0], at[-1], low, 1.0))
                shapes.setdefault((ORANGE, 0.55, "none"), []).append(
                    make_step_outline(at, low, slot_shares[:, 0] + slot_shares[:, 1])
                )
                shapes.setdefault((GREEN, 1.0, "none"), []).append(make_step_outline(at, low, slot_shares[:, 0]))
    order = (LIGHT, ORANGE, GREEN)  # what decodes lies above what is busy, and that above all slots
    for (shade, alpha, edge), outlines in sorted(
        shapes.items(), key=lambda item: order.index(item[0][0]) if item[0][0] in order else len(order)
    ):
        ax.add_collection(
            PolyCollection(outlines, facecolors=shade, alpha=alpha, edgecolors=edge, linewidths=0.8), autolim=False
        )
    ax.set_yticks(list(ticks), list(ticks.values()), fontsize=8)
    ax.set(xlim=(0, longest), ylim=(0, total_height))
    ax.spines[:].set_visible(False)
    ax.tick_params(axis="y", length=0)
    ax.tick_params(axis="x", labelsize=8)
    ax.set_xlabel("seconds", fontsize=8)
    kinds = [("slots that decode", GREEN, 1.0), ("that wait for a tool", ORANGE, 0.55), ("free", LIGHT, 1.0)]
    patches = [Patch(color=shade, alpha=alpha, label=label) for label, shade, alpha in kinds]
    fig.legend(handles=patches, loc="upper right", ncols=3, frameon=False, fontsize=8, borderaxespad=0.2)
    return fig


def make_rectangle(left: float, right: float, low: float, height: float) -> np.ndarray:
    """Corners of a rectangle."""
    return np.array([(left, low), (right, low), (right, low + height), (left, low + height)])


def make_step_outline(at: np.ndarray, low: float, shares: np.ndarray) -> np.ndarray:
    """Outline of what is above `low` by `shares[n]` from `at[n]` to `at[n + 1]`."""
    x, y = np.repeat(at, 2), low + np.repeat(shares, 2)
    return np.column_stack([x, np.concatenate([[low], y, [low]])])


def thinned(
    lines: list[tuple[float, int, int, int]], seconds: float, max_moments: int = MOMENTS
) -> list[tuple[float, int, int, int]]:
    """What is the case at `max_moments` moments, where there are more changes than a picture can show."""
    if len(lines) <= max_moments:
        return lines
    moments = [lines[0][0] + (seconds - lines[0][0]) * n / max_moments for n in range(max_moments)]
    return [(at, *lines[bisect_right(lines, at, key=lambda line: line[0]) - 1][1:]) for at in moments]


def rows(timelines: Sequence[Timeline]) -> list[dict]:
    """What `bars` draws, a piece of somebody's time in each row."""
    table_rows = []
    for timeline in timelines:
        keys = ("run", "who", "what", "from", "to", "version", "decoding", "tools", "free")
        table_rows += [
            dict(zip(keys, (timeline.name, TRAINER, "step", begin, end, version, *[None] * 3)))
            for begin, end, version in timeline.steps
        ]
        for worker, version_changes in timeline.version_changes.items():
            ends = [at for at, _ in version_changes[1:]] + [timeline.seconds]
            table_rows += [
                dict(zip(keys, (timeline.name, worker, "holds", at, end, version, *[None] * 3)))
                for (at, version), end in zip(version_changes, ends, strict=True)
            ]
        for worker, lines in timeline.slots.items():
            ends = [line[0] for line in lines[1:]] + [timeline.seconds]
            table_rows += [
                dict(zip(keys, (timeline.name, worker, "slots", line[0], end, None, *line[1:])))
                for line, end in zip(lines, ends, strict=True)
            ]
    return table_rows
