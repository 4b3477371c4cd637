"""Metrics for trackio or Weights & Biases, beside TensorBoard's: the same names, values and steps.

Both are optional packages, imported only where one is asked for. A run's folder is one run there, and a run that goes
on goes on there, too. Nothing leaves this machine by itself: trackio writes to its own folder, and wandb is offline
unless the environment has WANDB_MODE. Processes that a command starts find the choice in their environment.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from kit.settings import RunError

__all__ = ["KINDS", "VARIABLE", "Tracker", "logged_to", "open_tracker"]

KINDS = ("trackio", "wandb")
VARIABLE = "ETUDE_LOG"
"""Environment variable with the choice."""
PROJECT = "etude"


class Tracker(Protocol):
    """What takes the metrics of a run."""

    def add(self, scalars: dict[str, float], step: int) -> None:
        """Adds values by name at a step of their stage."""
        ...

    def close(self) -> None:
        """Waits until everything is written."""
        ...


@contextlib.contextmanager
def logged_to(kind: str | None) -> Iterator[None]:
    """Runs that log inside the block, in this process or in one that it starts, log to `kind` as well; None changes
    nothing. Raises RunError for a kind that does not exist or is not installed."""
    before = os.environ.get(VARIABLE)
    if kind is not None:
        check(kind)
        os.environ[VARIABLE] = kind
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(VARIABLE, None)
        else:
            os.environ[VARIABLE] = before


def check(kind: str) -> None:
    """Raises RunError for a kind that does not exist or is not installed."""
    if kind not in KINDS:
        raise RunError(f"--log expects {' or '.join(KINDS)}, got {kind!r}; TensorBoard's files are written in any case")
    if importlib.util.find_spec(kind) is None:
        raise RunError(
            f"--log {kind} needs the package {kind}: pip install {kind}, or in the clone: pip install -e '.[log]'"
        )


def open_tracker(root: Path, technique: str, config: Any, resumed: bool) -> Tracker | None:
    """What logs the run in the folder `root`; None where nothing was asked for. `config`: its settings. `resumed`:
    whether it goes on with what was logged before. Raises RunError where the package refuses."""
    kind = os.environ.get(VARIABLE)
    if not kind:
        return None
    check(kind)
    try:
        return {"trackio": Trackio, "wandb": Wandb}[kind](root, technique, config, resumed)
    except Exception as error:  # no key, no room, an address that nobody answers: the package's own errors
        raise RunError(f"--log {kind}: {' '.join(str(error).split())}; go on without --log, or mend it") from error


def name_of(root: Path) -> str:
    """The name of a run: its folder from `runs/` on. No other path of this machine is logged."""
    path, runs_folder = root.resolve(), Path("runs").resolve()
    return (
        path.relative_to(runs_folder).as_posix()
        if path.is_relative_to(runs_folder) and path != runs_folder
        else path.name
    )


class Trackio:
    """A local run of trackio, which has one open run in a process: who was displaced by another run opens its own
    again."""

    _open: Trackio | None = None

    def __init__(self, root: Path, technique: str, config: Any, resumed: bool) -> None:
        self.module = importlib.import_module("trackio")
        self.facts = {"project": PROJECT, "name": name_of(root), "group": technique, "config": config, "embed": False}
        self.run = self.begin("allow" if resumed else "never")

    def begin(self, resume: str) -> Any:
        Trackio._open = self
        return self.module.init(**self.facts, resume=resume)

    def add(self, scalars: dict[str, float], step: int) -> None:
        if Trackio._open is not self:
            self.run = self.begin("allow")
        self.run.log(scalars, step=step)

    def close(self) -> None:
        if Trackio._open is self:
            Trackio._open = None
            self.run.finish()


class Wandb:
    """A run of Weights & Biases. Steps must not fall there, and each stage counts its own: a stage's step is a metric,
    its other metrics' axis."""

    def __init__(self, root: Path, technique: str, config: Any, resumed: bool) -> None:
        module = importlib.import_module("wandb")
        stamp = root / "config.json"  # a folder that was deleted and used again is another run
        start_stamp = stamp.stat().st_mtime_ns if stamp.exists() else 0
        mode = None if os.environ.get("WANDB_MODE") else "offline"
        if mode is not None:  # offline, too, it would report its own errors and durations to its makers
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        self.run = module.init(
            project=PROJECT,
            name=name_of(root),
            group=technique,
            config=config,
            id=hashlib.sha256(f"{root.resolve()} {start_stamp}".encode()).hexdigest()[:16],
            resume="allow" if mode is None else None,  # offline, the parts meet where they are sent
            dir=str(root),
            mode=mode,
            reinit="create_new",
            settings=module.Settings(silent=True, console="off"),
        )
        self.stages: set[str] = set()
        if mode is not None:
            print(
                f"wandb: offline, in {root / 'wandb'}; to send it: wandb sync {root / 'wandb'}/offline-run-*",
                flush=True,
            )

    def add(self, scalars: dict[str, float], step: int) -> None:
        for stage in dict.fromkeys(name.rpartition("/")[0] for name in scalars):
            axis = f"{stage}/step"
            if stage not in self.stages:
                self.stages.add(stage)
                self.run.define_metric(axis, hidden=True)
                self.run.define_metric(f"{stage}/*", step_metric=axis)
            self.run.log(
                {**{name: value for name, value in scalars.items() if name.rpartition("/")[0] == stage}, axis: step}
            )

    def close(self) -> None:
        self.run.finish()
