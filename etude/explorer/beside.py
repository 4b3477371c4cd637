"""Runs beside each other: the settings in which they differ, what each reached, and whether they were asked the same tasks."""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etude.explorer.run_kinds import Played
from etude.report.record import in_words
from kit.disk import parse_json
from kit.runs import flatten
from sims.microrepo.world import origin
from sims.recipe.settings import Recipe

__all__ = ["Tasks", "comparable", "differences", "reached", "tasks_of"]


@dataclass(frozen=True)
class Tasks:
    """The held-out tasks of a run: the first so many of those that a world and a seed make."""

    world: dict[str, Any]
    seed: int
    number: int


def differences(runs: Sequence[Played]) -> list[dict]:
    """The settings in which runs differ, one per row; a dash where a run has no such setting."""
    keys = list(dict.fromkeys(key for run in runs for key in run.settings))
    found = []
    for key in keys:
        values = [run.settings.get(key, "–") for run in runs]
        if any(value != values[0] for value in values):
            found.append({"setting": key, **{run.name: str(value) for run, value in zip(runs, values, strict=True)}})
    return found


def reached(runs: Sequence[Played]) -> list[dict]:
    """Success in the end with its interval, a measure per row and a run per column."""
    names = list(dict.fromkeys(name for run in runs for name, *_ in run.successes))
    ends = {run.name: {name: last for name, _, last in run.successes} for run in runs}

    def told(triple: tuple[float, float, float] | None) -> str:
        return "–" if triple is None else in_words(dict(zip(("value", "low", "high"), triple, strict=True)))

    return [{"success": name, **{run.name: told(ends[run.name].get(name)) for run in runs}} for name in names]


def tasks_of(run: Played) -> Tasks | None:
    """The held-out tasks of a run; None if it does not say. A training of RL plays those of the recipe's run that its checkpoint comes from."""
    c = run.settings
    try:
        if run.recipe:
            return Tasks(_world(c), c["seed"], c["evaluation.tasks"])
        root, known = origin(Path(c["checkpoint"]))
        return None if root is None else Tasks(_world(flatten(known)), known["seed"], c["heldout"])
    except (LookupError, TypeError, OSError):
        return None


def _world(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of a world; one that did not exist yet when a run was played has its default."""
    usual = parse_json(json.dumps(flatten({"world": dataclasses.asdict(Recipe().world)})))
    return usual | {key: value for key, value in settings.items() if key.startswith("world.")}


def comparable(runs: Sequence[Played]) -> str:
    """Whether the success of runs may be compared, in words; empty for a single run, or where fewer than two have measured any."""
    measured = [run for run in runs if run.successes]
    if len(runs) < 2 or len(measured) < 2:
        return ""
    known = {run.name: tasks_of(run) for run in measured}
    if silent := [name for name, tasks in known.items() if tasks is None]:
        return f"**Not comparable**: which held-out tasks {', '.join(silent)} played is not recorded."
    tasks = [one for one in known.values() if one]
    first = tasks[0]
    if others := sorted({key for one in tasks for key in first.world.keys() | one.world.keys() if first.world.get(key) != one.world.get(key)}):
        return f"**Not comparable**: the tasks are of different worlds ({', '.join(others)})."
    if len({one.seed for one in tasks}) > 1:
        return "The tasks are others of the same world, because the seeds differ. The intervals are over tasks and hold for both."
    if len({one.number for one in tasks}) > 1:
        return f"The first {min(one.number for one in tasks)} held-out tasks are the same; the rest only some of them played."
    return f"All of them played the same {first.number} held-out tasks."
