"""`etude eval RUN|CHECKPOINT`: success on held-out tasks, with intervals, also compared with an earlier checkpoint on
the same tasks."""

from __future__ import annotations

import itertools
import json
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from etude.console import expected, next_steps
from etude.console.progress_line import Line
from etude.play.example_agent import FOLDER
from etude.play.play import Agent, agent_in, find_checkpoints
from recipe.microrepo import Task
from recipe.small.agent import hash_seed
from recipe.small.data import task_stream
from recipe.small.evaluation import compare, measure_policy, summarise

__all__ = ["evaluate"]


def evaluate(
    run_or_checkpoint: Path | None, before: str | None, tasks: int, samples: int, seed: int, as_json: bool
) -> None:
    """Plays the first `tasks` tasks of the evaluation, `samples` rollouts each, and prints means with 95% bootstrap
    intervals over tasks. Both agents play the tasks of the later one with the same random numbers, so their difference
    is paired. Raises RunError."""
    agents = [agent_in(folder) for folder in find_checkpoints(run_or_checkpoint, before)]
    recipe = agents[-1].recipe
    held_out = list(itertools.islice(task_stream(recipe, "evaluation"), tasks))
    with redirect_stdout(sys.stderr if as_json else sys.stdout):
        if duration_line := expected.of_rollouts([agent.folder for agent in agents], FOLDER, tasks * (samples + 1)):
            print(duration_line, flush=True)
        parts = [evaluate_agent(agent, held_out, samples, seed) for agent in agents]
    resamples = recipe.evaluation.resamples
    result: dict[str, Any] = {
        "tasks": tasks,
        "samples": samples,
        "seed": seed,
        "agents": [
            {"who": agent.name, **summarise(part, resamples)} for agent, part in zip(agents, parts, strict=True)
        ],
    }
    if before is not None:
        result["difference"] = compare(parts[0], parts[1], resamples)
    if as_json:
        print(json.dumps(result, ensure_ascii=False))
    else:
        Console().print(make_table(result))
        Console().print(
            f"means of {tasks} held-out tasks, {samples} rollouts each, with 95% intervals over tasks", highlight=False
        )
        next_steps.show(next_steps.of_eval(run_or_checkpoint, before))


def evaluate_agent(agent: Agent, tasks: list[Task], samples: int, seed: int) -> dict[str, Any]:
    """What an agent did on these tasks, under its own settings."""
    recipe = replace(agent.recipe, evaluation=replace(agent.recipe.evaluation, tasks=len(tasks), samples=samples))
    line, done = Line(agent.name, "rollouts", len(tasks) * samples), 0

    def tell(so_far: int) -> None:
        nonlocal done
        line(so_far - done)
        done = so_far

    try:
        return measure_policy(agent.network(), agent.language, tasks, recipe, hash_seed(seed, "eval"), tell)
    finally:
        line.end()


def make_table(result: dict[str, Any]) -> Table:
    """A row for each figure, a column for each agent, and one for the difference."""
    agents, best = result["agents"], f"best_of_{result['samples']}"
    is_same_run = len({Path(agent["who"]).parent for agent in agents}) == 1 < len(agents)
    headings = [Path(agent["who"]).name if is_same_run else agent["who"] for agent in agents] + ["difference"] * (
        "difference" in result
    )
    grid = Table("", *headings, box=None, pad_edge=False)
    names = {
        "success": "success",
        best: f"best of {result['samples']}",
        "greedy": "success, greedy",
        "tokens": "tokens",
        "turns": "turns",
    }
    for name, label in {**names, "invalid_calls": "wrong calls"}.items():
        digits = 1 if name == "tokens" else 2 if name == "turns" else 3
        values = [agent[name] for agent in agents] + ([result["difference"][name]] if "difference" in result else [])
        grid.add_row(
            label, *(f"{v['value']:.{digits}f} [{v['low']:.{digits}f}, {v['high']:.{digits}f}]" for v in values)
        )
    for depth, depth_summary in agents[-1]["by_depth"].items():
        depth_values = [agent["by_depth"][depth]["success"] for agent in agents]
        label = f"success, {depth_summary['tasks']} task{'s' * (depth_summary['tasks'] != 1)} of depth {depth}"
        grid.add_row(label, *(f"{v['value']:.3f} [{v['low']:.3f}, {v['high']:.3f}]" for v in depth_values))
    return grid
