"""The stages of a full run on packages that measure: held-out packages before RL and after it, on all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist

from kit.disk import atomic_write, read_json
from kit.runs import Run, Stage
from recipe.full.settings import FullRecipe
from recipe.full.weights import gather, measure_codebase
from recipe.packages import evaluation
from recipe.packages.chat_format import load_chat_format, make_chaining
from recipe.packages.tasks import PackageTasks, make_schemas
from ref.chat_format import TemplateFormat
from ref.engine.continuous import make_sampler
from ref.environment import EnvironmentFailure
from ref.rollout import Limits, hash_seed
from scaled import rl
from scaled.network.model import load_hf
from scaled.runtime import preemption
from scaled.runtime.launch import Watchdog

__all__ = [
    "STOPPED",
    "evaluate_packages",
    "limits_of",
    "make_package_tasks",
    "measure_packages",
    "refusal_of",
    "stopping",
]


def make_package_tasks(c: FullRecipe, out: Path) -> PackageTasks:
    """The tasks of this rank, with the chat format of the run."""
    return PackageTasks(c.tasks, out, load_chat_format(out / "data", make_schemas(c.tasks)), c.seed)


def limits_of(c: FullRecipe, tasks: PackageTasks) -> Limits:
    """How long an episode on a package may be."""
    chaining = make_chaining(c.tasks, cast(TemplateFormat, tasks.chat_format), c.rl.max_len)
    return replace(c.rl.limits(chaining), turns=c.tasks.turns)


def measure_packages(stage: Stage | None, out: Path, c: FullRecipe) -> None:
    """Held-out packages with the checkpoint as it came, and after SFT. Where SFT has not taught to call tools, the
    result has a `refusal`, and the run ends here."""
    moments = {"checkpoint": Path(str(c.checkpoint)), "before": out / "checkpoints" / "sft"}
    evaluations = measure_moments(stage, out, c, moments)
    if stage is not None:
        grids = {moment: evaluation.as_lists(part) for moment, part in evaluations.items()}
        refusal = evaluation.check_calls(evaluations["before"], c.tasks.min_valid_calls)
        stage.finish({"grids": grids, "refusal": refusal}, [out / evaluation.EPISODES / moment for moment in moments])


def refusal_of(out: Path) -> str:
    """Why the run does not go on to RL; empty if it does."""
    path = out / "stages" / "measure.json"
    return str(read_json(path)["result"].get("refusal") or "") if path.exists() else ""


STOPPED = Path("work", "stopped")
"""File of a run's folder: why it stopped before its end."""


@contextmanager
def stopping(run: Run | None, out: Path, c: FullRecipe) -> Iterator[None]:
    """Where too many sandboxes have failed, which all ranks raise, rank 0 notes why, for whoever started the ranks:
    torchrun would start them again and again."""
    try:
        yield
    except EnvironmentFailure as error:
        if not c.on_packages:
            raise
        if run is not None:
            atomic_write(out / STOPPED, str(error))


def evaluate_packages(stage: Stage | None, out: Path, c: FullRecipe) -> None:
    """Held-out packages after RL, compared with what `measure_packages` has measured; with pretraining, also the
    held-out codebase after each stage."""
    evaluations = measure_moments(stage, out, c, {"after": out / "checkpoints" / "final"})
    codebase = measure_codebase(c, out, lambda number: None) if c.has_pretraining else []
    if stage is not None:
        evaluation.conclude(stage, c.evaluation, out, evaluations["after"], codebase)


def measure_moments(
    stage: Stage | None, out: Path, c: FullRecipe, moments: Mapping[str, Path]
) -> dict[str, dict[str, Any]]:
    """The measures of held-out tasks for some checkpoints, by moment, each rank with its share. Rank 0 keeps them in
    the stage's state as soon as a moment is done."""
    e, tasks = c.evaluation, make_package_tasks(c, out)
    selected = tasks.heldout_tasks(e.tasks)
    numbers = rl.share(len(selected)).tolist()
    part, per_moment = [selected[number] for number in numbers], len(numbers) * (e.samples + 1)
    saved_parts: list = [{}]
    if stage is not None:
        stage.total, saved_parts = len(moments) * per_moment, [(stage.restore() or {}).get("parts", {})]
    dist.broadcast_object_list(saved_parts, 0)
    evaluations = saved_parts[0]
    with Watchdog(out / "work" / "eval", c.cluster.timeout) as watch:
        for index, (moment, folder) in enumerate(moments.items()):
            if moment in evaluations:
                continue
            preemption.check()

            def beat(done: int, base: int = index * per_moment) -> None:
                watch.beat(base + done)
                if stage is not None:
                    stage.progress(base + done)

            dtype = getattr(torch, c.training.sampler_dtype)
            sampler = make_sampler(c.tasks.engine, gather(load_hf(folder), dtype), dtype, c.tasks.slots, copy=False)
            seed = hash_seed(c.seed, "evaluation")
            policy_name = str(folder.relative_to(out)) if folder.is_relative_to(out) else str(folder)
            grids, greedy, failures = evaluation.evaluate_policy(
                sampler, tasks, part, e.samples, limits_of(c, tasks), c.rl.temperature, seed, beat
            )
            first_rollouts = [
                rollout for number, rollout in zip(numbers, greedy, strict=True) if number < evaluation.MAX_EPISODES
            ]
            evaluation.save_episodes(out / evaluation.EPISODES / moment, tasks, first_rollouts, policy_name)
            watch.meet()
            gathered: list = [None] * dist.get_world_size()
            replies = [evaluation.first_reply(rollout) for rollout in greedy if not rollout.failure]
            dist.all_gather_object(gathered, (grids, replies, failures))
            measures = {name: np.concatenate([part[name] for part, *_ in gathered]) for name in grids}
            evaluation.check_evaluation(
                measures, c.tasks.max_failed_share, [reason for *_, reasons in gathered for reason in reasons]
            )
            evaluations[moment] = {
                **measures,
                "replies": [reply for _, replies, _ in gathered for reply in replies],
                "tasks": [task.key for task in selected],
                "packages": [tasks.package_of[task.key] for task in selected],
            }
            if stage is not None:
                stage.save({"parts": evaluations}, index + 1)
    return evaluations
