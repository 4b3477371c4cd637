"""Runs beside each other: the settings in which they differ, what each reached, and whether they were asked the same
tasks."""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etude.explorer.runs.kinds import RunData
from etude.report.record import in_words
from kit.disk import parse_json
from kit.runs import flatten
from recipe.small.micro_world import origin
from recipe.small.settings import Recipe

__all__ = ["Tasks", "comparable", "differences", "reached", "tasks_of"]


@dataclass(frozen=True)
class Tasks:
    """The held-out tasks of a run: the first so many of those that a world and a seed make."""

    world: dict[str, Any]
    seed: int
    number: int


def differences(runs: Sequence[RunData]) -> list[dict]:
    """The settings in which runs differ, one per row; a dash where a run has no such setting."""
    keys = list(dict.fromkeys(key for run in runs for key in run.settings))
    rows = []
    for key in keys:
        values = [run.settings.get(key, "–") for run in runs]
        if any(value != values[0] for value in values):
            rows.append({"setting": key, **{run.name: str(value) for run, value in zip(runs, values, strict=True)}})
    return rows


def reached(runs: Sequence[RunData]) -> list[dict]:
    """Success in the end with its interval, a measure per row and a run per column."""
    names = list(dict.fromkeys(name for run in runs for name, *_ in run.successes))
    ends = {run.name: {name: last for name, _, last in run.successes} for run in runs}

    def format_interval(triple: tuple[float, float, float] | None) -> str:
        return "–" if triple is None else in_words(dict(zip(("value", "low", "high"), triple, strict=True)))

    return [
        {"success": name, **{run.name: format_interval(ends[run.name].get(name)) for run in runs}} for name in names
    ]


def tasks_of(run: RunData) -> Tasks | None:
    """The held-out tasks of a run; None if it does not say. A training of RL plays those of the recipe's run that its
    checkpoint comes from."""
    c = run.settings
    try:
        if run.recipe:
            return Tasks(_select_world(c), c["seed"], c["evaluation.tasks"])
        root, origin_settings = origin(Path(c["checkpoint"]))
        return (
            None
            if root is None
            else Tasks(_select_world(flatten(origin_settings)), origin_settings["seed"], c["heldout"])
        )
    except (LookupError, TypeError, OSError):
        return None


def _select_world(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of a world; one that did not exist yet when a run was played has its default."""
    defaults = parse_json(json.dumps(flatten({"world": dataclasses.asdict(Recipe().world)})))
    return defaults | {key: value for key, value in settings.items() if key.startswith("world.")}


def comparable(runs: Sequence[RunData]) -> str:
    """Whether the success of runs may be compared, in words; empty for a single run, or where fewer than two have
    measured any."""
    measured_runs = [run for run in runs if run.successes]
    if len(runs) < 2 or len(measured_runs) < 2:
        return ""
    tasks_by_run = {run.name: tasks_of(run) for run in measured_runs}
    if unknown_runs := [name for name, tasks in tasks_by_run.items() if tasks is None]:
        return f"**Not comparable**: the held-out tasks of {', '.join(unknown_runs)} are not recorded."
    tasks = [task_set for task_set in tasks_by_run.values() if task_set]
    first = tasks[0]
    if differing_keys := sorted(
        {
            key
            for task_set in tasks
            for key in first.world.keys() | task_set.world.keys()
            if first.world.get(key) != task_set.world.get(key)
        }
    ):
        return f"**Not comparable**: the tasks are of different worlds ({', '.join(differing_keys)})."
    if len({task_set.seed for task_set in tasks}) > 1:
        return (
            "The tasks are different samples of the same world, because the seeds differ. The intervals are over tasks "
            "and hold for both."
        )
    if len({task_set.number for task_set in tasks}) > 1:
        common = min(task_set.number for task_set in tasks)
        return f"The first {common} held-out tasks are the same; the others were evaluated for some of the runs only."
    return f"All runs were evaluated on the same {first.number} held-out tasks."
