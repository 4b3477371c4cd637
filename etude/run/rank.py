"""One rank of a full run, a process of torchrun: `python -m etude.run.rank FOLDER TOLD`, where TOLD is JSON.

It joins the process group, sets the mesh, and trains by `scaled/pretrain.py` or `scaled/rl.py`; rank 0 shows progress
and writes the report."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from etude.run.settings import DELETION, RL, layout, settings
from kit.disk import atomic_write, parse_json
from kit.process import keep_freed_memory
from kit.runs import Run
from kit.settings import Preempted, RunError

__all__ = ["Line", "rank", "train"]


def rank(out: Path, payload: dict) -> None:
    """One process of torchrun."""
    from scaled.runtime import launch

    if (
        payload["backend"] == "gloo"
    ):  # gathered weights, sent and freed again and again, else come as new pages each time
        keep_freed_memory()
    config = settings(payload["technique"], payload["backend"], payload["config"])
    with launch.world(payload["backend"], getattr(config, "cluster", config).timeout) as me, exit_on_error(out):
        check_same(payload)
        if payload["technique"] == "recipe":
            from recipe.full import stages as chain

            chain.play(out, config, payload["ranks"])
        elif payload["technique"] == "cpt-rl":
            from etude.run import budget_ladder

            budget_ladder.play(out, config, payload["ranks"], config.seed // 1000)
        elif payload["technique"] == DELETION:
            from etude.run import feature_deletion
            from scaled.runtime.mesh import mesh

            with mesh(dp=payload["ranks"]):
                feature_deletion.play(out, config, payload["ranks"])
        else:
            train(out, payload, config, me)


def check_same(payload: dict) -> None:
    """Raises RunError if the machines of a run were started with different settings."""
    import torch.distributed as dist

    from kit.runs import flatten

    if int(os.environ.get("GROUP_WORLD_SIZE", "1")) == 1:
        return
    first_payload: list = [payload]
    dist.broadcast_object_list(first_payload, 0)
    first, own = flatten(first_payload[0]), flatten(payload)
    if different := [name for name in sorted({*first, *own}) if first.get(name) != own.get(name)]:
        name = different[0]
        raise RunError(
            f"the machines of this run have different settings: {name} is {own.get(name)} here and "
            f"{first.get(name)} on that of rank 0; start all of them with the same command"
        )


@contextlib.contextmanager
def exit_on_error(out: Path) -> Iterator[None]:
    """Turns a bad checkpoint, a full disk and too many environments that failed into one line; ends well where all
    ranks leave at a signal."""
    from kit.disk import NO_ROOM, refusal
    from ref.environment import EnvironmentFailure
    from ref.network.checkpoint import CheckpointError
    from scaled.runtime import preemption

    try:
        yield
    except Preempted:
        preemption.leave()
    except (
        CheckpointError,
        EnvironmentFailure,
        RunError,
    ) as error:  # usually every rank raises it, but some files are read by one rank only
        sys.exit(f"error: {error}")
    except Exception as error:
        refused = refusal(error)
        if refused is None or refused.errno not in NO_ROOM:
            raise
        sys.exit(f"error: {refused.strerror}: {refused.filename or out}; free some space")


def train(out: Path, payload: dict, config, me: int) -> None:
    """One technique, on this rank."""
    from kit.process import machine
    from kit.progress import Progress
    from scaled import pretrain
    from scaled.runtime.mesh import mesh

    technique = payload["technique"]
    line = Line(technique, config.schedule.steps)
    progress, tokens = Progress(line), 0.0
    run = Run(out, f"{technique} full", config, None, any((out / "metrics").glob("*.jsonl")), 20.0)

    def log(step: int, steps: int, **metrics: float) -> None:
        nonlocal tokens
        tokens += metrics["tokens"]
        run.track({f"{technique}/{name}": value for name, value in metrics.items()}, step)
        progress.update(
            step, tokens, {name: metrics[name] for name in ("reward", "success", "loss") if name in metrics}
        )
        if step == steps:
            progress.last()
            progress.stop()

    with mesh(**layout(config, payload["ranks"])):
        if technique in RL:
            from recipe.full.stages import reinforced
            from recipe.packages.checkpoint_tasks import find_setup

            result = reinforced(technique, config, out, out, *find_setup(config), log, progress.say)
        else:
            result = pretrain.train(technique, config, out, log)
    if me == 0:
        report = {"scale": "full", **payload, "machine": machine(), "result": result}
        if not run.resumed:
            report["seconds"] = {technique: round(line.seconds, 1)}
        atomic_write(out / "report.json", json.dumps(report, indent=1) + "\n")
    run.close()


class Line:
    """The part of a stage that `Progress` needs."""

    def __init__(self, name: str, total: int):
        self.name, self.total, self.unit, self.start_time = name, total, "tokens", time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.start_time

    def note_time(self, **facts: float) -> None:
        """Does nothing: a full run does not record rates in a second file."""


if __name__ == "__main__":
    rank(Path(sys.argv[1]), parse_json(sys.argv[2]))
