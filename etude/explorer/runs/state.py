"""Whether a run is going on, how far it is, when it may be over, how it goes on after a kill, and what it keeps of its
last rollouts.

A run holds a lock on its folder for as long as it lives, and the kernel releases it however the process ends. The page
asks for it, for an instant."""

import fcntl
import os
import shlex
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from etude.console import expected
from etude.explorer.runs.kinds import RunData
from kit.disk import sum_stage_seconds, timings

__all__ = ["AWAY", "make_resume_command", "going", "is_locked", "left", "describe_state", "find_position"]

AWAY = 900.0
"""A copy of a run, which has no lock, counts as going on until it has written nothing for this many seconds."""

TOKEN_SETTINGS = {"cpt": "training.tokens", "long": "training.long_tokens"}
"""Stage of the recipe → the setting that says how many tokens it trains on."""


@dataclass(frozen=True)
class Position:
    """The place that a run has reached."""

    stage: str
    step: float
    total: float | None
    """Steps of the stage, where its settings say so."""


def is_locked(folder: Path) -> bool | None:
    """Whether a process has the folder's lock; None if there is no lock to ask for."""
    try:
        handle = os.open(folder / "lock", os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(handle)  # and with it the lock
    return False


def going(run: RunData) -> bool:
    """Whether a run is still going on."""
    if not run.missing:
        return False
    has_lock = is_locked(run.place)
    return time.time() - run.touched < AWAY if has_lock is None else has_lock


def find_position(run: RunData) -> Position | None:
    """The step that an unfinished run has reached in its first unfinished stage; None before its first step."""
    stage = run.missing[0] if run.missing else ""
    logged_lines = run.metrics.get(stage) or (run.metrics.get("rl", []) if not run.recipe else [])
    steps = [
        line["step"]
        for line in (*logged_lines[-1:], *timings(run.place))
        if "step" in line and line.get("stage", stage) == stage
    ]
    return Position(stage, max(steps), count_steps(run, stage)) if steps else None


def count_steps(run: RunData, stage: str) -> float | None:
    """How many steps a stage has by the run's settings; None where they do not say."""
    settings = run.settings
    try:
        if run.recipe and stage == "eval":
            # ranks share the tasks
            return (
                2 * settings["evaluation.tasks"] * settings["evaluation.samples"] if run.technique == "recipe" else None
            )
        if run.recipe and stage in TOKEN_SETTINGS:
            return settings[TOKEN_SETTINGS[stage]] // settings["training.batch_tokens"]
        is_training = (
            stage == "rl" or not run.recipe and (run.technique == "async-rl" or run.technique.endswith(" full"))
        )
        return settings.get("rl.steps", settings.get("steps")) if is_training else None
    except (LookupError, TypeError):
        return None


def left(run: RunData, reference_runs: Iterable[RunData]) -> str:
    """How much longer a run will take, in words: as a finished one with the same settings took, or else as the steps of
    its stage did so far. Empty where neither is known."""
    stage_seconds, position = sum_stage_seconds(run.place), find_position(run)
    share = min(1.0, position.step / position.total) if position and position.total else 0.0
    similar_runs = [
        candidate
        for candidate in reference_runs
        if candidate.technique == run.technique and not candidate.missing and has_same_settings(run, candidate)
    ]
    for candidate in sorted(similar_runs, key=lambda candidate: -candidate.touched):
        if reference_seconds := expected.seconds_of(candidate.place):
            if position and not stage_seconds:  # trainings on ranks note no times
                stage_seconds = {position.stage: share * reference_seconds.get(position.stage, 0.0)}
            remaining = sum(
                max(0.0, seconds - stage_seconds.get(stage, 0.0))
                for stage, seconds in reference_seconds.items()
                if stage in run.missing or stage not in stage_seconds
            )
            return f"about {expected.duration(remaining)} more, as {candidate.name} took"
    if share and (seconds := stage_seconds.get(run.missing[0])):
        return f"about {expected.duration(seconds * (1 - share) / share)} more of this stage, at the pace so far"
    return ""


def has_same_settings(first_run: RunData, second_run: RunData) -> bool:
    """Whether two runs differ in their seed alone."""
    first_settings, second_settings = (
        {key: value for key, value in run.settings.items() if key != "seed"} for run in (first_run, second_run)
    )
    return first_settings == second_settings


def describe_state(run: RunData, reference_runs: Iterable[RunData] = ()) -> str:
    """The state of a run in words."""
    if not run.missing:
        return "finished"
    position = find_position(run)
    position_text = run.missing[0]
    if position:
        position_text += f", step {position.step:g}" + (
            f" of {position.total:g}" if position.total and position.total >= position.step else ""
        )
    if going(run):
        return ", ".join(filter(None, [f"running, at {position_text}", left(run, reference_runs)]))
    minutes = (time.time() - run.touched) / 60
    return f"interrupted {minutes:.0f} minutes ago at {position_text}; resume it with `{make_resume_command(run)}`"


def make_resume_command(run: RunData) -> str:
    """The command with which an interrupted run goes on."""
    name, _, scale = run.technique.partition(" ")
    out = f"--out {shlex.quote(str(find_outer_folder(run.place)))} --resume"
    if name == "figure":
        return f"etude figure {scale} {out}"
    if scale != "full":
        return f"etude run {name} {out}"
    if find_outer_folder(run.place) != run.place:
        name = "cpt-rl"
    ranks = len({path.name for part in ("ranks", "work/*/ranks") for path in run.place.glob(f"{part}/*.pid")})
    return f"etude run {name} --scale full {out}" + (
        f" --backend gloo --nproc {ranks}" if ranks and "gpu" not in run.machine else ""
    )


def find_outer_folder(folder: Path) -> Path:
    """The folder of the run of Figure 2 at full scale that this one is part of, or the folder itself."""
    return (
        folder.parents[1] if folder.parent.name == "runs" and (folder.parents[1] / "config.json").is_file() else folder
    )
