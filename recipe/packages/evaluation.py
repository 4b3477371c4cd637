"""Evaluation of a policy on held-out packages: sampled and greedy success with intervals over packages, valid calls,
and the episodes themselves.

    RUN/episodes/MOMENT/TASK.jsonl    a greedy episode of each of the first tasks, as `etude show` reads them
"""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from environments.harness.environment import HarnessTask
from environments.harness.task_set import lines_of
from environments.harness.tools import openai, select_tools
from kit.disk import atomic_write, read_json
from kit.runs import Stage
from kit.settings import RunError
from kit.statistics import bootstrap, pass_at_k
from recipe.packages.tasks import PackageTasks
from recipe.small.settings import Evaluation
from ref.chat_format import TemplateFormat
from ref.engine.sampler import Sampler
from ref.rollout import Limits, Rollout, sample_rollouts

__all__ = [
    "EPISODES",
    "MAX_EPISODES",
    "as_lists",
    "check_calls",
    "conclude",
    "evaluate_policy",
    "first_reply",
    "interval",
    "save_episodes",
    "summarise",
]

EPISODES = "episodes"
"""Folder of the episodes inside a run's folder."""
MAX_EPISODES = 8
"""Greedy episodes that are kept of an evaluation."""
MEASURES = ("success", "valid_calls", "finished", "tokens", "turns", "segments")
"""Measures of sampled rollouts; `greedy` is success without sampling."""


def evaluate_policy(
    sampler: Sampler,
    tasks: PackageTasks,
    selected: Sequence[HarnessTask],
    samples: int,
    limits: Limits,
    temperature: float,
    seed: int,
    progress: Callable[[int], None] = lambda done: None,
) -> tuple[dict[str, np.ndarray], list[Rollout]]:
    """Of each task `samples` rollouts and a greedy one: measures [tasks, samples], `greedy` [tasks], and the greedy
    rollouts. Tasks are sampled a few at a time, so that `progress(rollouts so far)` is called. Raises RunError where a
    rollout has no result."""
    chat_format = tasks.chat_format
    assert isinstance(chat_format, TemplateFormat)
    sampled, greedy, done = list[Rollout](), list[Rollout](), 0
    size = max(1, CHUNK // samples)
    for number in range(0, len(selected), size):
        part = selected[number : number + size]
        for count, degree, collected in ((samples, temperature, sampled), (1, 0.0, greedy)):
            generator = torch.Generator().manual_seed(seed) if degree else None
            rollouts = sample_rollouts(
                sampler, tasks.environment, part, count, chat_format, limits, degree, generator, threads=tasks.is_slow
            )
            if failures := [rollout.failure for rollout in rollouts if rollout.failure]:
                raise RunError(
                    f"{len(failures)} of {len(rollouts)} rollouts of the evaluation have no result, the first one "
                    f"because {failures[0]}; resume the run"
                )
            collected += rollouts
            done += len(rollouts)
            progress(done)
    grids = {name: np.zeros((len(selected), samples)) for name in MEASURES}
    for number, rollout in enumerate(sampled):
        for name, value in measure(rollout).items():
            grids[name][divmod(number, samples)] = value
    return grids | {"greedy": np.array([rollout.metrics["success"] for rollout in greedy])}, greedy


CHUNK = 32
"""Rollouts that are sampled together, at most: each holds its keys and values."""


def measure(rollout: Rollout) -> dict[str, float]:
    """The measures of a rollout. A rollout without a call has no valid one."""
    metrics = rollout.metrics
    return {
        "success": metrics["success"],
        "valid_calls": (metrics["calls"] - metrics["invalid_calls"]) / max(1.0, metrics["calls"]),
        "finished": metrics["finished"],
        "tokens": rollout.chain.num_sampled_tokens,
        "turns": metrics["turns"],
        "segments": len(rollout.chain.segments),
    }


def sum_by_package(values: np.ndarray, packages: Sequence[str]) -> np.ndarray:
    """[number of packages, 2]: the sum over the tasks of each package, and their number. A bootstrap over these rows
    keeps the tasks of a package together."""
    names = sorted({*packages})
    rows = [
        [sum(value for value, name in zip(values, packages, strict=True) if name == package), packages.count(package)]
        for package in names
    ]
    return np.array(rows, dtype=float)


def interval(values: np.ndarray, packages: Sequence[str], resamples: int) -> dict[str, float]:
    """The mean over tasks, with a 95% bootstrap interval over packages; of a single package, over its tasks."""
    if len({*packages}) == 1:
        return bootstrap(values, n=resamples)
    return bootstrap(sum_by_package(values, [*packages]), lambda rows: rows[:, 0].sum() / rows[:, 1].sum(), n=resamples)


def summarise(grids: dict[str, Any], packages: Sequence[str], resamples: int) -> dict[str, Any]:
    """Means of the measures with intervals over packages, best of n, greedy success, and pass@k for every k.
    `packages`: of each task."""
    samples = grids["success"].shape[1]
    solved_counts = grids["success"].sum(1)
    curve = [float(pass_at_k(solved_counts, samples, k).mean()) for k in range(1, samples + 1)]
    return {
        **{name: interval(grids[name].mean(1), packages, resamples) for name in MEASURES},
        f"best_of_{samples}": interval(solved_counts > 0, packages, resamples),
        "greedy": interval(grids["greedy"], packages, resamples),
        "pass_at_k": curve,
    }


def compare(before: dict[str, Any], after: dict[str, Any], packages: Sequence[str], resamples: int) -> dict[str, Any]:
    """After minus before, paired by task, with intervals over packages."""
    samples = before["success"].shape[1]
    differences = {name: after[name].mean(1) - before[name].mean(1) for name in MEASURES}
    differences[f"best_of_{samples}"] = after["success"].max(1) - before["success"].max(1)
    differences["greedy"] = after["greedy"] - before["greedy"]
    return {name: interval(values, packages, resamples) for name, values in differences.items()}


def save_episodes(folder: Path, tasks: PackageTasks, rollouts: Sequence[Rollout], policy_name: str) -> None:
    """Writes greedy episodes as transcripts that `etude show` reads. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    for rollout in rollouts:
        lines = format_transcript(lines_of(rollout, tasks.chat_format.stop_ids), rollout, tasks, policy_name)
        text = "".join(json.dumps(line) + "\n" for line in lines)
        atomic_write(folder / f"{rollout.task.key}.jsonl", text)


def format_transcript(lines: Sequence[dict], rollout: Rollout, tasks: PackageTasks, policy_name: str) -> list[dict]:
    """The lines of an episode with the fields of a transcript (`environments/harness/record.py`) that an episode in RL
    does not measure, such as seconds."""
    job, limits = rollout.task.job, tasks.settings
    begin = {
        "tools": [*job.tools],
        "strict": job.strict,
        "who": policy_name,
        "budget": {"turns": limits.turns, "seconds": limits.episode_seconds, "call": limits.call_seconds},
        "schemas": openai(select_tools(job.tools), job.strict),
    }
    defaults: dict[str, dict] = {
        "begin": begin,
        "reply": {"seconds": 0.0},
        "answer": {"seconds": 0.0},
        "turn": {"spent": 0.0},
        "summary": {"seconds": 0.0, "spent": 0.0, "tree": job.tree},
    }
    return [{**line, **defaults.get(line["kind"], {})} for line in lines]


def first_reply(rollout: Rollout) -> str:
    """What the policy says first, shortened to a line."""
    text = next((message.content or "" for message in rollout.messages if message.role == "assistant"), "")
    return " ".join(text.split())[:200]


def check_calls(evaluation: dict[str, Any], minimum: float) -> str:
    """A message with the most frequent first reply where less than this share of the calls is valid; else empty."""
    share = float(evaluation["valid_calls"].mean())
    if share >= minimum:
        return ""
    reply = Counter(evaluation["replies"]).most_common(1)[0][0]
    return (
        f"after SFT {share:.0%} of the calls are valid, less than tasks.min_valid_calls={minimum:g}; the most frequent "
        f"reply is {reply!r}: begin another run that trains longer (sft.epochs, sft.adamw_lr), on more conversations, "
        f"or from a larger checkpoint"
    )


def as_lists(evaluation: dict[str, Any]) -> dict[str, Any]:
    """An evaluation as JSON holds it."""
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in evaluation.items()}


def conclude(
    stage: Stage, settings: Evaluation, root: Path, after: dict[str, Any], codebase: Sequence[dict[str, Any]]
) -> None:
    """Finishes the stage `eval` with the measures of all moments: those of the stage `measure` in the run folder
    `root`, and those after RL."""
    stored = read_json(root / "stages" / "measure.json")["result"]["grids"]
    grids = {moment: as_arrays(stored[moment]) for moment in ("checkpoint", "before")} | {"after": as_arrays(after)}
    packages, n = after["packages"], settings.resamples
    stage.log(
        1,
        **{
            f"{moment}_{name}": float(part[name].mean())
            for moment, part in grids.items()
            for name in ("success", "greedy", "valid_calls")
        },
    )
    stage.finish(
        {
            "tasks": len(packages),
            "packages": sorted({*packages}),
            "samples": grids["after"]["success"].shape[1],
            **{moment: summarise(part, packages, n) for moment, part in grids.items()},
            "difference": compare(grids["before"], grids["after"], packages, n),
            "codebase": codebase,
        },
        [root / EPISODES / "after"],
    )


def as_arrays(grids: dict[str, Any]) -> dict[str, Any]:
    """The measures as arrays, after a round trip through JSON."""
    return {name: np.array(grids[name], dtype=float) for name in (*MEASURES, "greedy")}
