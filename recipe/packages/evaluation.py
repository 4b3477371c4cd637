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
from kit.statistics import bootstrap, pass_at_k
from recipe.packages.tasks import PackageTasks
from recipe.small.settings import Evaluation
from ref.chat_format import TemplateFormat
from ref.engine.sampler import Sampler
from ref.environment import EnvironmentFailure
from ref.rollout import Limits, Rollout, check_failures, sample_rollouts

__all__ = [
    "EPISODES",
    "MAX_EPISODES",
    "as_lists",
    "check_calls",
    "check_evaluation",
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
) -> tuple[dict[str, np.ndarray], list[Rollout], list[str]]:
    """Of each task `samples` rollouts and a greedy one: measures [tasks, samples], `greedy` [tasks], the greedy
    rollouts, and why rollouts failed. A rollout whose sandbox failed is neither a success nor a failure of the policy:
    its measures are NaN, and it is in no mean. `progress(rollouts so far)` is called whenever an environment has
    answered."""
    chat_format = tasks.chat_format
    assert isinstance(chat_format, TemplateFormat)
    sampled, greedy = (
        sample_rollouts(
            sampler,
            tasks.environment,
            selected,
            count,
            chat_format,
            limits,
            degree,
            torch.Generator().manual_seed(seed) if degree else None,
            threads=tasks.is_slow,
            on_step=lambda num_over, done=done: progress(done + num_over),
        )
        for count, degree, done in ((samples, temperature, 0), (1, 0.0, len(selected) * samples))
    )
    progress(len(selected) * (samples + 1))
    grids = {name: np.full((len(selected), samples), np.nan) for name in MEASURES}
    for number, rollout in enumerate(sampled):
        for name, value in measure(rollout).items() if not rollout.failure else ():
            grids[name][divmod(number, samples)] = value
    grids["greedy"] = np.array([np.nan if rollout.failure else rollout.metrics["success"] for rollout in greedy])
    return grids, greedy, [rollout.failure for rollout in (*sampled, *greedy) if rollout.failure]


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


def interval_of_valid(values: np.ndarray, packages: Sequence[str], resamples: int) -> dict[str, float] | None:
    """`interval` over the tasks whose value is not NaN; None if there are none."""
    is_valid = np.isfinite(values)
    valid_packages = [name for name, valid in zip(packages, is_valid, strict=True) if valid]
    return interval(values[is_valid], valid_packages, resamples) if valid_packages else None


def average_samples(grid: np.ndarray) -> np.ndarray:
    """[tasks, samples] → [tasks]: the mean over the samples whose sandbox did not fail; NaN where all failed."""
    is_valid = np.isfinite(grid)
    return np.where(is_valid, grid, 0.0).sum(1) / np.where(is_valid.any(1), is_valid.sum(1), np.nan)


def estimate_pass_at_k(success: np.ndarray, k: int) -> np.ndarray:
    """[tasks, samples] → [tasks]: the unbiased estimate from each task's m valid samples; NaN where m < k, as fewer
    samples say nothing about k of them without bias."""
    valid_counts = np.isfinite(success).sum(1)
    return np.array(
        [
            pass_at_k(np.nansum(row), m, k)[0] if m >= k else np.nan
            for row, m in zip(success, valid_counts.tolist(), strict=True)
        ]
    )


def count_failed(grids: dict[str, Any]) -> int:
    """Rollouts whose sandbox failed, sampled and greedy ones."""
    return int(np.isnan(grids["success"]).sum() + np.isnan(grids["greedy"]).sum())


def check_evaluation(grids: dict[str, Any], max_share: float, reasons: Sequence[str]) -> None:
    """Raises EnvironmentFailure where sandboxes of more than this share of the rollouts failed, and where no sampled
    rollout is left. `reasons`: why each failed."""
    check_failures(len(reasons), grids["success"].size + grids["greedy"].size, max_share, reasons[0] if reasons else "")
    if np.isnan(grids["success"]).all():
        raise EnvironmentFailure(f"no rollout of the evaluation is left: {reasons[0]}")


def summarise(grids: dict[str, Any], packages: Sequence[str], resamples: int) -> dict[str, Any]:
    """Means of the measures with intervals over packages, best of n, greedy success, pass@k for every k, and the number
    of rollouts whose sandbox failed, which are in none of these. `packages`: of each task. A measure that no task has
    is None."""
    samples = grids["success"].shape[1]
    curve = []
    for k in range(1, samples + 1):
        values = estimate_pass_at_k(grids["success"], k)
        curve.append(float(np.nanmean(values)) if np.isfinite(values).any() else None)
    return {
        **{name: interval_of_valid(average_samples(grids[name]), packages, resamples) for name in MEASURES},
        f"best_of_{samples}": interval_of_valid(estimate_pass_at_k(grids["success"], samples), packages, resamples),
        "greedy": interval_of_valid(grids["greedy"], packages, resamples),
        "pass_at_k": curve,
        "failed": count_failed(grids),
    }


def compare(before: dict[str, Any], after: dict[str, Any], packages: Sequence[str], resamples: int) -> dict[str, Any]:
    """After minus before, paired by task, with intervals over packages. A task that has no value before or after is
    left out."""
    samples = before["success"].shape[1]
    differences = {name: average_samples(after[name]) - average_samples(before[name]) for name in MEASURES}
    differences[f"best_of_{samples}"] = np.subtract(
        *(estimate_pass_at_k(part["success"], samples) for part in (after, before))
    )
    differences["greedy"] = after["greedy"] - before["greedy"]
    return {name: interval_of_valid(values, packages, resamples) for name, values in differences.items()}


def save_episodes(folder: Path, tasks: PackageTasks, rollouts: Sequence[Rollout], policy_name: str) -> None:
    """Writes greedy episodes as transcripts that `etude show` reads, but for those whose sandbox failed. Raises
    OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    for rollout in [rollout for rollout in rollouts if not rollout.failure]:
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
    share = float(np.nanmean(evaluation["valid_calls"]))
    if share >= minimum:
        return ""
    reply = Counter(evaluation["replies"] or [""]).most_common(1)[0][0]
    return (
        f"after SFT {share:.0%} of the calls are valid, less than tasks.min_valid_calls={minimum:g}; the most frequent "
        f"reply is {reply!r}: begin another run that trains longer (sft.epochs, sft.adamw_lr), on more conversations, "
        f"or from a larger checkpoint"
    )


def as_lists(evaluation: dict[str, Any]) -> dict[str, Any]:
    """An evaluation as JSON holds it: null in place of NaN."""
    return {
        name: np.where(np.isnan(value), np.array(None), value).tolist() if isinstance(value, np.ndarray) else value
        for name, value in evaluation.items()
    }


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
            f"{moment}_{name}": float(np.nanmean(part[name]))
            for moment, part in grids.items()
            for name in ("success", "greedy", "valid_calls")
            if np.isfinite(part[name]).any()
        },
        failed=count_failed(grids["after"]),
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
