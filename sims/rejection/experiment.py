"""RL against rejection fine-tuning on as many rollouts: which solves more, and which goes beyond the depths it saw?

    etude figure rejection              about a quarter of an hour on two cores; starts from three finished runs:
        etude run recipe --config examples/search.toml --out runs/seed0 --seed 0          and seeds 1 and 2
    etude figure rejection --quick

Rejection fine-tuning samples the policy after SFT on the tasks of RL, as many rollouts as RL used in all, keeps those
that solve their task, and continues SFT on them with the settings of SFT. Both arms begin from the same weights, and
play the same held-out tasks with the same random numbers. RL's arm is the run itself, whose evaluation is read. Its
tasks are of the same stream, of which RL leaves out easier ones in its second half (`rl.later`).

What to look for: a rollout that is kept shows how a task was solved by chance, mostly the easier ones. Fine-tuning on
it makes that likelier once; RL samples the policy anew after each step, so that what it has just learned is tried on
deeper tasks (arXiv:2509.25123).
"""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from kit.disk import atomic_write, read_json
from kit.groups import bootstrap_groups
from kit.runs import Run
from recipe.small.agent import hash_seed, play
from recipe.small.data import task_stream
from recipe.small.demonstrations import context
from recipe.small.evaluation import measure_policy
from recipe.small.learner import RATES, Learner, language_of, load_checkpoint, shown_rows, train
from recipe.small.settings import Recipe
from ref.engine.sampler import Sampler
from sims.experiment import above, claim
from sims.policies import agent

__all__ = ["Experiment", "experiment", "picture"]

SOURCE = "arXiv:2509.25123"
ARMS = ("SFT", "rejection", "RL")


@dataclass(frozen=True)
class Experiment:
    """The runs, and how long to fine-tune."""

    runs: tuple[str, ...] = ("runs/seed0", "runs/seed1", "runs/seed2")
    """Finished runs of the recipe in a world of multi-hop tasks, one per seed (none: first play a tiny one that has
    learned nothing)."""
    epochs: int = 5
    """Passes over the rollouts that are kept, as many as SFT makes over its demonstrations."""
    at_once: int = 64
    """Tasks whose rollouts are sampled together."""
    resamples: int = 2000
    """Bootstrap resamples, of seeds and of tasks."""
    seed: int = 0
    """Seed of the rollouts."""

    @classmethod
    def quick(cls) -> "Experiment":
        return cls(runs=(), epochs=1, at_once=8, resamples=100)


def sample(run: Run, c: Experiment, number: int, root: Path, recipe: Recipe) -> tuple[Path, dict]:
    """The file with the contexts of the rollouts that solve their task, [[tokens, sampled], …], and counts."""
    r, path = recipe.rl, run.root / "rollouts" / f"{number}.json"
    total = r.steps * r.prompts
    stage = run.stage(f"sample-{number}", total=total * r.rollouts, unit="rollouts")
    if stage.finished:
        return path, stage.result()
    language, model = language_of(root), load_checkpoint(root, recipe, "sft", with_mtp=False)[0]
    sampler = Sampler(model, getattr(torch, recipe.training.sampler_dtype))
    tasks = itertools.islice(task_stream(recipe, "rl"), total)
    state = stage.restore() or {"done": 0, "solved": 0, "contexts": []}
    done, solved, contexts = state["done"], state["solved"], state["contexts"]
    for first in range(0, total, c.at_once):
        group = list(itertools.islice(tasks, c.at_once))
        if first < done:
            continue
        generator = torch.Generator().manual_seed(hash_seed(c.seed, "rejection", number, first))
        limits = r.limits(context(language, recipe))
        for rollout in play(sampler, language, group, r.rollouts, limits, r.max_turns, generator, r.temperature):
            if rollout.metrics["tests"]:
                solved += 1
                contexts += [[s.tokens.tolist(), s.sampled.tolist()] for s in rollout.chain.segments]
        done = first + len(group)
        stage.progress(done * r.rollouts, solved=solved)
        if stage.due():
            stage.save({"done": done, "solved": solved, "contexts": contexts}, done)
    path.parent.mkdir(exist_ok=True)
    atomic_write(path, json.dumps(contexts))
    return path, stage.finish({"rollouts": total * r.rollouts, "solved": solved, "contexts": len(contexts)}, [path])


def tune(run: Run, c: Experiment, number: int, root: Path, recipe: Recipe, path: Path) -> dict:
    """Continues SFT on these contexts, and measures the policy on the run's held-out tasks: per task, how many of its
    rollouts solve it, and whether the greedy one does."""
    contexts = [(torch.tensor(ids), torch.tensor(sampled)) for ids, sampled in read_json(path, list)]
    s, length = recipe.sft, recipe.training.long_length
    per_epoch, batch = shown_rows(contexts, length, s.rows, [recipe.seed]) if contexts else (0, None)
    steps = per_epoch * c.epochs
    stage = run.stage(f"tune-{number}", total=max(steps, 1))
    if stage.finished:
        return stage.result()
    learner = Learner(recipe, load_checkpoint(root, recipe, "sft", with_mtp=False)[0], None, s.muon_lr, s.adamw_lr)
    if batch is not None:
        train(stage, recipe, learner, batch, steps, lambda step: RATES["sft"](step, steps), "rejection")
    tasks = list(itertools.islice(task_stream(recipe, "evaluation"), recipe.evaluation.tasks))
    model = learner.trunk.model.to(getattr(torch, recipe.training.dtype))
    seed = hash_seed(recipe.seed, "evaluation")
    outcomes = measure_policy(model, language_of(root), tasks, recipe, seed)
    return stage.finish(
        {
            "steps": steps,
            "solved": outcomes["success"].sum(1).astype(int).tolist(),
            "greedy": outcomes["greedy"].astype(int).tolist(),
        }
    )


def experiment(run: Run, config: Experiment) -> dict:
    """The arms of every run, by depth, and the verdicts."""
    c, arms = config, []
    for number, folder in enumerate(c.runs or ("",)):
        root, recipe = agent(run, folder, c.seed)
        path, counts = sample(run, c, number, root, recipe)
        tuned = tune(run, c, number, root, recipe, path)
        evaluation = read_json(root / "stages" / "eval.json", {"result": {"outcomes": [dict]}})["result"]
        samples, trained = evaluation["samples"], len(recipe.world.hop_mix)
        tasks = [
            {
                "kind": task["kind"],
                "depth": task["depth"],
                "deeper": task["kind"] == "multi-hop" and task["depth"] > trained,
                "SFT": {"sampled": task["before"]["solved"] / samples, "greedy": task["before"]["greedy"]},
                "rejection": {"sampled": solved / samples, "greedy": greedy},
                "RL": {"sampled": task["after"]["solved"] / samples, "greedy": task["after"]["greedy"]},
            }
            for task, solved, greedy in zip(evaluation["outcomes"], tuned["solved"], tuned["greedy"], strict=True)
        ]
        arms.append({"seed": recipe.seed, "tasks": tasks, "kept": counts})
    rows = [
        {"seed": arm["seed"], "kind": kind, "depth": depth, "tasks": len(group), "arm": name}
        | {measure: float(np.mean([task[name][measure] for task in group])) for measure in ("sampled", "greedy")}
        for arm in arms
        for kind, depth in sorted({(task["kind"], task["depth"]) for task in arm["tasks"]})
        for group in [[task for task in arm["tasks"] if (task["kind"], task["depth"]) == (kind, depth)]]
        for name in ARMS
    ]
    arm_counts = [{"seed": arm["seed"], **arm["kept"]} for arm in arms]
    return {"rows": rows, "kept": arm_counts, "claims": verdicts(arms, c)}


def verdicts(arms: Sequence[dict], c: Experiment) -> list[dict]:
    """Claims that RL solves more than rejection fine-tuning, on all tasks and on deeper ones than it saw, and that
    rejection fine-tuning learns at all; the interval and every run must show it."""

    def compare(name: str, says: str, arm: str, base: str, measure: str, deeper: bool) -> dict:
        groups = [
            [task[arm][measure] - task[base][measure] for task in part["tasks"] if task["deeper"] or not deeper]
            for part in arms
        ]
        groups = [group for group in groups if group] or [[0.0]]
        levels = [
            float(
                np.mean(
                    [
                        task[name_of_arm][measure]
                        for part in arms
                        for task in part["tasks"]
                        if task["deeper"] or not deeper
                    ]
                    or [0.0]
                )
            )
            for name_of_arm in (base, arm)
        ]
        difference = {end: round(value, 12) for end, value in bootstrap_groups(groups, n=c.resamples).items()}
        means = [float(np.mean(group)) for group in groups]
        return claim(
            name,
            says,
            SOURCE,
            difference["value"],
            above(),
            (difference["low"], difference["high"]),
            f"{measure} success",
            f"{measure} success: {base} {levels[0]:.3f}, {arm} {levels[1]:.3f}; 95% bootstrap over seeds and tasks; "
            f"seeds by themselves: {', '.join(f'{mean:+.3f}' for mean in means)}",
            {"every seed by itself": min(means) > 0},
        )

    return [
        compare(
            "greedy",
            "RL solves more than rejection fine-tuning on as many rollouts",
            "RL",
            "rejection",
            "greedy",
            False,
        ),
        compare(
            "deeper",
            "on deeper tasks than either saw, RL solves more than rejection fine-tuning",
            "RL",
            "rejection",
            "sampled",
            True,
        ),
        compare("rejection", "rejection fine-tuning solves more than SFT", "rejection", "SFT", "sampled", False),
    ]


def picture(results: dict, path: Path) -> None:
    """Sampled and greedy success by depth of the multi-hop tasks, after SFT, rejection fine-tuning and RL."""
    from kit.plots import COLOURS, GREY, save, sheet

    rows = [row for row in results["rows"] if row["kind"] == "multi-hop"] or results["rows"]
    figure, axes = sheet(2, "RL against rejection fine-tuning on as many rollouts, by depth")
    depths = sorted({row["depth"] for row in rows})
    for axis, measure in zip(axes, ("sampled", "greedy"), strict=True):
        for name, colour in zip(ARMS, (GREY, COLOURS[1], COLOURS[0]), strict=True):
            for seed in sorted({row["seed"] for row in rows}):
                points = [row for row in rows if row["arm"] == name and row["seed"] == seed]
                axis.plot([p["depth"] for p in points], [p[measure] for p in points], color=colour, alpha=0.3)
            means = [
                np.average([p[measure] for p in points], weights=[p["tasks"] for p in points])
                for depth in depths
                for points in [[row for row in rows if row["arm"] == name and row["depth"] == depth]]
            ]
            axis.plot(depths, means, "o-", color=colour, label=name)
        axis.set(xlabel="references to follow", ylabel="share solved", title=f"{measure} success", ylim=(0, 1.02))
        axis.set_xticks(depths)
        axis.legend(frameon=False)
    save(figure, path)
