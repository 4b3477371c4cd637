"""Whether a run is going on, how far it is, when it may be over, how it goes on after a kill, and what it keeps of its last rollouts.

A run holds a lock on its folder for as long as it lives, and the kernel releases it however the process ends. The page asks for it, for an instant.
"""

import fcntl
import os
import shlex
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from etude import expected
from etude.explorer.run_kinds import Played
from kit.disk import spent, timings

__all__ = ["AWAY", "again", "going", "held", "left", "said", "where"]

AWAY = 900.0
"""A copy of a run, which has no lock, counts as going on until it has written nothing for this many seconds."""

TOKENS = {"cpt": "training.tokens", "long": "training.long_tokens"}
"""Stage of the recipe → the setting that says how many tokens it trains on."""


@dataclass(frozen=True)
class Where:
    """The place that a run has reached."""

    stage: str
    step: float
    total: float | None
    """Steps of the stage, where its settings say so."""


def held(folder: Path) -> bool | None:
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


def going(run: Played) -> bool:
    """Whether a run is still going on."""
    if not run.missing:
        return False
    locked = held(run.place)
    return time.time() - run.touched < AWAY if locked is None else locked


def where(run: Played) -> Where | None:
    """The step that an unfinished run has reached in its first unfinished stage; None before its first step."""
    stage = run.missing[0] if run.missing else ""
    logged = run.metrics.get(stage) or (run.metrics.get("rl", []) if not run.recipe else [])
    steps = [line["step"] for line in (*logged[-1:], *timings(run.place)) if "step" in line and line.get("stage", stage) == stage]
    return Where(stage, max(steps), total(run, stage)) if steps else None


def total(run: Played, stage: str) -> float | None:
    """How many steps a stage has by the run's settings; None where they do not say."""
    c = run.settings
    try:
        if run.recipe and stage == "eval":
            return 2 * c["evaluation.tasks"] * c["evaluation.samples"] if run.technique == "recipe" else None  # ranks share the tasks
        if run.recipe and stage in TOKENS:
            return c[TOKENS[stage]] // c["training.batch_tokens"]
        trains = stage == "rl" or not run.recipe and (run.technique == "async-rl" or run.technique.endswith(" full"))
        return c.get("rl.steps", c.get("steps")) if trains else None
    except (LookupError, TypeError):
        return None


def left(run: Played, others: Iterable[Played]) -> str:
    """How much longer a run will take, in words: as a finished one with the same settings took, or else as the steps of its stage did so far. Empty
    where neither is known."""
    done, reached = spent(run.place), where(run)
    share = min(1.0, reached.step / reached.total) if reached and reached.total else 0.0
    alike = [other for other in others if other.technique == run.technique and not other.missing and same_settings(run, other)]
    for other in sorted(alike, key=lambda other: -other.touched):
        if took := expected.seconds_of(other.place):
            if reached and not done:  # trainings on ranks note no times
                done = {reached.stage: share * took.get(reached.stage, 0.0)}
            more = sum(max(0.0, seconds - done.get(stage, 0.0)) for stage, seconds in took.items() if stage in run.missing or stage not in done)
            return f"about {expected.duration(more)} more, as {other.name} took"
    if share and (seconds := done.get(run.missing[0])):
        return f"about {expected.duration(seconds * (1 - share) / share)} more of this stage, at the pace so far"
    return ""


def same_settings(one: Played, other: Played) -> bool:
    """Whether two runs differ in their seed alone."""
    first, second = ({key: value for key, value in run.settings.items() if key != "seed"} for run in (one, other))
    return first == second


def said(run: Played, others: Iterable[Played] = ()) -> str:
    """The state of a run in words."""
    if not run.missing:
        return "finished"
    reached = where(run)
    at = run.missing[0]
    if reached:
        at += f", step {reached.step:g}" + (f" of {reached.total:g}" if reached.total and reached.total >= reached.step else "")
    if going(run):
        return ", ".join(filter(None, [f"running, at {at}", left(run, others)]))
    minutes = (time.time() - run.touched) / 60
    return f"interrupted {minutes:.0f} minutes ago at {at}; goes on with `{again(run)}`"


def again(run: Played) -> str:
    """The command with which an interrupted run goes on."""
    name, _, scale = run.technique.partition(" ")
    out = f"--out {shlex.quote(str(outer(run.place)))} --resume"
    if name == "figure":
        return f"etude figure {scale} {out}"
    if scale != "full":
        return f"etude run {name} {out}"
    if outer(run.place) != run.place:
        name = "cpt-rl"
    ranks = len({path.name for part in ("ranks", "work/*/ranks") for path in run.place.glob(f"{part}/*.pid")})
    return f"etude run {name} --scale full {out}" + (f" --backend gloo --nproc {ranks}" if ranks and "gpu" not in run.machine else "")


def outer(folder: Path) -> Path:
    """The folder of the run of Figure 2 at full scale that this one is part of, or the folder itself."""
    return folder.parents[1] if folder.parent.name == "runs" and (folder.parents[1] / "config.json").is_file() else folder
