"""The tasks that a checkpoint goes on with in RL: those of the run that it comes from, on packages or in the small
world. `etude run async-rl` and the techniques of `scaled/rl.py` train on them."""

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from kit.disk import read_json
from kit.settings import RunError, fill
from recipe.packages.chat_format import load_chat_format, make_chaining
from recipe.packages.settings import PackageSettings
from recipe.packages.tasks import PackageTasks, check_lengths, make_schemas
from recipe.small.micro_world import CheckpointTasks, RunSettings, origin
from ref.environment import ChatFormat
from ref.rollout import Limits

__all__ = ["RolloutSetup", "find_package_run", "find_setup"]


class RolloutSetup(NamedTuple):
    """What rollouts are made with."""

    tasks: CheckpointTasks | PackageTasks
    chat_format: ChatFormat
    limits: Limits


def find_package_run(checkpoint: Path) -> tuple[Path, dict[str, Any]] | None:
    """The run on packages that a checkpoint comes from, and its settings; None if it comes from another run or from
    none."""
    root, _ = origin(checkpoint)
    if root is None:
        return None
    config = read_json(root / "config.json")["config"]
    tasks = config.get("tasks")
    return (root, config) if isinstance(tasks, dict) and tasks.get("recipes") is not None else None


def find_setup(c: RunSettings, length: str = "length", tool_s: float = 0.0) -> RolloutSetup:
    """Tasks, chat format and limits for a run that starts from `c.checkpoint`. `length`: what the user calls the
    setting that bounds a context; `tool_s`: see `CheckpointTasks`; tools on packages take as long as they take. Raises
    RunError."""
    assert c.checkpoint is not None
    package_run = find_package_run(Path(c.checkpoint))
    if package_run is None:
        tasks = CheckpointTasks(c, length=length, tool_s=tool_s)
        return RolloutSetup(tasks, tasks.language, tasks.limits)
    root, config = package_run
    settings = fill(PackageSettings, config["tasks"])
    chat_format = load_chat_format(Path(c.checkpoint), make_schemas(settings))
    if c.rl.max_len > c.length:
        raise RunError(f"{length} must hold a context of rl.max_len = {c.rl.max_len} tokens, got {c.length}")
    package_tasks = PackageTasks(settings, root, chat_format, config["seed"])
    prompts = {task.key: task.prompt for stream in package_tasks.streams.values() for task in stream}
    check_lengths(settings, chat_format, prompts, c.rl.max_len)
    limits = c.rl.limits(make_chaining(settings, chat_format, c.rl.max_len))
    return RolloutSetup(package_tasks, chat_format, replace(limits, turns=settings.turns))
