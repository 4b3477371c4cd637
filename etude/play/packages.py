"""`etude play RUN --task NAME`: the agent of a run on packages works on a task, in a sandbox, and is graded."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from environments.harness.environment import HarnessTask
from environments.harness.format_line import format_line
from environments.harness.task_set import lines_of
from etude.play.play import find_checkpoints
from kit.settings import RunError, fill
from recipe.full.package_stages import limits_of, make_package_tasks
from recipe.full.settings import FullRecipe
from recipe.packages.checkpoint_tasks import find_package_run
from recipe.packages.evaluation import format_transcript
from recipe.packages.tasks import PackageTasks
from ref.engine.continuous import make_sampler
from ref.network import load_hf
from ref.rollout import hash_seed, sample_rollouts

__all__ = ["find_run", "watch"]


def find_run(run_or_checkpoint: Path) -> tuple[Path, dict] | None:
    """The run on packages that a run or a checkpoint is or comes from, and its settings; None for others."""
    final = run_or_checkpoint / "checkpoints" / "final"
    try:
        return find_package_run(final if final.parent.is_dir() else run_or_checkpoint)
    except (OSError, ValueError):  # no path at all, or a file that is damaged: whoever plays it says what is wrong
        return None


def find_task(tasks: PackageTasks, name: str | None) -> HarnessTask:
    """The task of this name or unique beginning; by default the first held-out one. Raises RunError."""
    if name is None:
        return tasks.task("heldout", 0)
    all_tasks = {task.key: task for stream in ("heldout", "rl") for task in tasks.streams[stream]}
    matches = [name] if name in all_tasks else [key for key in all_tasks if key.startswith(name)]
    if len(matches) != 1:
        problem = f"{len(matches)} tasks begin with {name}" if matches else f"the run has no task {name}"
        raise RunError(f"{problem}; choose one: {', '.join(matches[:12] or sorted(all_tasks)[:12])}")
    return all_tasks[matches[0]]


def watch(
    run_or_checkpoint: Path, name: str | None, before: str | None, temperature: float | None, seed: int, as_json: bool
) -> None:
    """Samples an episode on the task by each checkpoint, the earlier one first, and prints it as `etude show` does, or
    as JSON lines. `temperature`: None is that of RL. Raises RunError."""
    package_run = find_run(run_or_checkpoint)
    assert package_run is not None  # the command has asked
    root, config = package_run
    c = fill(FullRecipe, config)
    tasks = make_package_tasks(c, root)
    task = find_task(tasks, name)
    degree = c.rl.temperature if temperature is None else temperature
    for folder in find_checkpoints(run_or_checkpoint, before):
        model = load_hf(folder).to(getattr(torch, c.training.dtype))
        (rollout,) = sample_rollouts(
            make_sampler(c.tasks.engine, model, getattr(torch, c.training.sampler_dtype), c.tasks.slots),
            tasks.environment,
            [task],
            1,
            tasks.chat_format,
            limits_of(c, tasks),
            degree,
            torch.Generator().manual_seed(hash_seed(seed, "play")) if degree else None,
            threads=tasks.is_slow,
        )
        if rollout.failure:
            raise RunError(f"the episode has no result: {rollout.failure}")
        lines = lines_of(rollout, tasks.chat_format.stop_ids)
        for line in format_transcript(lines, rollout, tasks, str(folder)):
            for text in [json.dumps(line)] if as_json else format_line(line, 12):
                print(text, flush=True)
