"""Expected duration, printed in one line before something starts: as long as the same took before.

It is that of a finished run with the same settings on this machine, in `runs/` or next to the new run; without one,
that of the committed record, whose machine is named. If there is neither, nothing is printed: there are no guesses from
other settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kit.disk import read_json, sum_stage_seconds, timings
from kit.process import machine
from kit.runs import Run, flatten
from kit.settings import RunError, fill

__all__ = ["COMMITTED", "LONG", "duration", "line", "of_rollouts", "seconds_of", "tell"]

COMMITTED = Path(__file__).resolve().parents[2] / "results"
LONG = 20.0
"""Seconds. What takes less is not announced."""
ALIKE = ("cpu", "cores", "threads", "gpu")
"""Facts of a machine on which its speed depends, as far as a record has them."""


def duration(seconds: float) -> str:
    """Seconds, minutes or hours, with two digits or so: 45 s, 12 min, 1.6 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if round(seconds / 60) < 100 else f"{seconds / 3600:.1f} h"


def line(seconds: float, source: str, is_partial: bool = False) -> str:
    """The line that is printed; empty for what does not take long. `is_partial`: part of the work is done already."""
    return f"expected: {duration(seconds)}{' more' * is_partial}, {source}" if seconds >= LONG else ""


def tell(run: Run, **ranks: Any) -> None:
    """Prints how long the rest of an open run will take, if that is known. `ranks`: what decides how fast a full run is
    and is no setting of it, such as their number; the report of the run before must say the same."""
    estimate = find_previous(run, ranks) or (None if ranks else find_committed(run))
    done = run.seconds()
    if estimate is None or run.resumed and not done:  # a run that does not say what it has done already
        return
    seconds, source = estimate
    finished = {stage for stage in seconds if (run.root / "stages" / f"{stage}.json").exists()}
    left = sum(
        max(0.0, stage_seconds - done.get(stage, 0.0))
        for stage, stage_seconds in seconds.items()
        if stage not in finished
    )
    if message := line(left, source, bool(done)):
        print(message, flush=True)


def find_previous(run: Run, ranks: Mapping[str, Any]) -> tuple[dict[str, float], str] | None:
    """Seconds by stage of the newest finished run with the same settings on this machine, and where that is said."""
    searches = [
        run.root.parent.glob("*/config.json"),
        *(Path("runs").glob(f"{pattern}/config.json") for pattern in ("*", "*/*")),
    ]
    folders = {path.parent.resolve(): path.parent for path in sorted(path for paths in searches for path in paths)}
    folders.pop(run.root.resolve(), None)
    host, candidates = machine(), []
    for folder in folders.values():
        record = read(folder / "config.json")
        if (
            record.get("technique") == run.technique
            and is_same_machine(record.get("machine"), host)
            and has_same_settings(run.config, record.get("config"))
        ):
            report = read(folder / "report.json") if ranks else {}
            if (seconds := seconds_of(folder)) and all(report.get(name) == value for name, value in ranks.items()):
                candidates.append(((folder / "config.json").stat().st_mtime, seconds, folder))
    if not candidates:
        return None
    _, seconds, folder = max(candidates, key=lambda candidate: candidate[0])
    return seconds, f"as the run in {folder} took on this machine"


def find_committed(run: Run) -> tuple[dict[str, float], str] | None:
    """The same of the committed record, with the machine that it names."""
    if run.technique == "recipe":
        paths = ("recipe-small.json", "examples/recipe/report.json")
    else:
        kind, _, name = run.technique.partition(" ")
        paths = (f"figures/{name}.json",) if kind == "figure" else ()
    for path in paths:
        record = read(COMMITTED / path)
        if has_same_settings(run.config, record.get("config")):
            return record["seconds"], f"as it took on {describe_machine(record['machine'])}, see results/{path}"
    return None


def describe_machine(box: Mapping[str, Any]) -> str:
    """A machine in words: 2 cores (AMD EPYC)."""
    return f"{box['cores']} core{'s' * (box['cores'] != 1)} ({box['cpu']})"


def seconds_of(folder: Path) -> dict[str, float]:
    """Seconds by stage of a finished run; empty for one that is not finished, or does not say. A record stands beside
    the settings in the end: the report, or what a figure or an evaluation writes."""
    seconds = sum_stage_seconds(folder)
    finished_stages = {timing["stage"] for timing in timings(folder) if timing.get("finished") is True}
    records = [path for path in folder.glob("*.json") if path.name != "config.json"]
    if not records or seconds.keys() - finished_stages:
        return {}
    reported_seconds = read(folder / "report.json").get("seconds")  # of a technique's full run, which has no stages
    return seconds or (reported_seconds if isinstance(reported_seconds, dict) else {})


def has_same_settings(config: Any, stored: Any) -> bool:
    """Whether stored settings are those of `config`, but for the seed. What a setting was before it existed is its
    default."""
    if not isinstance(stored, dict):
        return False
    try:
        stored_config = fill(type(config), stored)
    except (RunError, TypeError):
        return False

    def flatten_settings(settings: Any) -> dict[str, Any]:
        return {key: value for key, value in flatten(dataclasses.asdict(settings)).items() if key != "seed"}

    return flatten_settings(config) == flatten_settings(stored_config)


def is_same_machine(recorded: Any, current: Mapping[str, Any]) -> bool:
    """Whether a record was made on such a machine."""
    return isinstance(recorded, dict) and all(recorded.get(fact) == current.get(fact) for fact in ALIKE)


def read(path: Path) -> dict:
    """A JSON object from a file; empty if there is none."""
    try:
        content = read_json(path)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def of_rollouts(checkpoints: Sequence[Path], example: Path, rollouts: int) -> str:
    """The line for an evaluation in which each checkpoint plays so many rollouts; empty if a checkpoint's run does not
    tell. `example`: the bundled checkpoint, whose run is a committed record. A run's evaluation plays two checkpoints,
    every task greedily, too."""
    seconds, sources, host = 0.0, [], machine()
    for folder in checkpoints:
        root, is_own_run = (
            folder.resolve().parent.parent,
            example.resolve() not in (folder.resolve(), folder.resolve().parent),
        )
        record = read(root / "config.json") if is_own_run else read(COMMITTED / "examples" / "recipe" / "report.json")
        stage_seconds = seconds_of(root) if is_own_run else record.get("seconds", {})
        if (
            record.get("technique") != "recipe"
            or "eval" not in stage_seconds
            or (is_own_run and not is_same_machine(record.get("machine"), host))
        ):
            return ""
        sizes = record["config"]["evaluation"]
        seconds += rollouts * stage_seconds["eval"] / (2 * sizes["tasks"] * (sizes["samples"] + 1))
        origin = (
            f"in {folder.parent.parent} took on this machine"
            if is_own_run
            else f"of a small run took on {describe_machine(record['machine'])}"
        )
        sources.append(f"as the evaluation {origin}")
    return line(seconds, " and ".join(dict.fromkeys(sources)))
