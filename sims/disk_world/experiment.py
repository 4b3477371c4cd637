"""RL where tools are real: the small world on disk against the same world in memory, from the same policy, with the
same seeds.

    etude figure disk-world              half an hour on two cores; starts from the SFT checkpoint of runs/small (make
                                         small); Linux with bubblewrap
    etude figure disk-world --quick

Composer is trained in the product's own harness, with tools that read, write and run real files in isolated machines
(§6.2). The small world exists twice: in memory, where a tool takes microseconds, and on disk
(`recipe/microrepo/disk.py`), where each episode has a sandbox, `test` runs pytest, and the grader of real environments
decides. Both arms take the recipe's RL steps on the same tasks with the same random numbers. Held-out tasks are played
before and after, in memory.

Power. The arms are not two samples of a noisy thing: as long as each answer and each verdict is the same, so are
tokens, gradients and weights, to the bit, and a single different verdict would show in every later step. So the
difference between the arms has no spread, and three trainings are there for the gain: 1,600 paired held-out rollouts a
training leave its 95% interval at about ±0.02.
"""

import hashlib
import itertools
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from kit.disk import read_lines
from kit.runs import Run
from kit.statistics import bootstrap
from recipe.small.agent import hash_seed, play
from recipe.small.data import task_stream
from recipe.small.demonstrations import context
from recipe.small.learner import language_of, load_checkpoint
from recipe.small.reinforcement import Moment, learn
from recipe.small.settings import Recipe
from sims.experiment import above, at_most, claim
from sims.policies import agent

__all__ = ["Experiment", "experiment", "picture"]

ARMS = ("memory", "disk")


@dataclass(frozen=True)
class Experiment:
    """Length of training, and held-out tasks."""

    run: str = "runs/small"
    """A finished run of the recipe; RL starts from its SFT checkpoint (empty: first run a tiny recipe that has learned
    nothing)."""
    trainings: int = 3
    """RL training runs from that checkpoint in each arm; they differ in their seed."""
    steps: int = 12
    """RL steps of each."""
    prompts: int = 8
    """Tasks of a step."""
    rollouts: int = 8
    """Rollouts of each task."""
    tasks: int = 200
    """Held-out tasks before and after."""
    samples: int = 8
    """Rollouts of each."""
    seed: int = 0
    """Seed of the looks; added to the recipe's seed, it is that of the training runs."""

    def __post_init__(self):
        for name in ("trainings", "steps", "prompts", "rollouts", "tasks", "samples"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    @classmethod
    def quick(cls) -> "Experiment":
        return cls(run="", trainings=2, steps=2, prompts=2, rollouts=2, tasks=6, samples=2)


def training(run: Run, c: Experiment, root: Path, recipe: Recipe, arm: str, number: int) -> dict:
    """One training run: of each step success, reward and seconds; held-out successes before and after [tasks]; and a
    hash of the weights."""
    stage = run.stage(f"{arm}-{number}", total=c.steps, unit="tokens")
    if stage.finished:
        return stage.result()
    rl = replace(recipe.rl, steps=c.steps, prompts=c.prompts, rollouts=c.rollouts, world=arm, gate=0.0)
    config = replace(recipe, seed=recipe.seed + 1000 * c.seed + number, rl=rl)
    tasks, language = list(itertools.islice(task_stream(recipe, "evaluation"), c.tasks)), language_of(root)
    step_start = [time.perf_counter()]

    def observe(moment: Moment) -> dict:
        metrics: dict = {"step_s": time.perf_counter() - step_start[0]}
        if moment.step in (0, c.steps):
            generator, r = (
                torch.Generator().manual_seed(hash_seed(c.seed, "disk-world", number, moment.step)),
                config.rl,
            )
            episodes = play(
                moment.sampler,
                language,
                tasks,
                c.samples,
                r.limits(context(language, config)),
                r.max_turns,
                generator,
                r.temperature,
            )
            metrics["solved"] = (
                np.array([e.metrics["tests"] for e in episodes], dtype=int).reshape(c.tasks, c.samples).sum(1).tolist()
            )
        step_start[0] = time.perf_counter()
        return metrics

    policy, reference = (load_checkpoint(root, config, "sft", with_mtp=False)[0] for _ in range(2))
    learner, _ = learn(stage, config, policy, None, reference, language, [observe])
    weights_hash = hashlib.sha256(
        b"".join(p.detach().view(torch.uint8).numpy().tobytes() for p in learner.trunk.masters.parameters())
    ).hexdigest()
    lines = read_lines(stage.metrics_path)
    steps = [
        {name: line[name] for name in ("step", "success", "reward", "step_s")} for line in lines if line["step"] > 0
    ]
    return stage.finish(
        {"steps": steps, "solved": [line["solved"] for line in lines if "solved" in line], "weights": weights_hash}
    )


def experiment(run: Run, config: Experiment) -> dict:
    """The training runs, arm beside arm, and the verdicts."""
    c = config
    root, recipe = agent(run, c.run, c.seed)
    results = {
        (arm, number): training(run, c, root, recipe, arm, number) for number in range(c.trainings) for arm in ARMS
    }
    rows = [
        {"training": number, "arm": arm, **step}
        for (arm, number), result in results.items()
        for step in result["steps"]
    ]
    # Trainings, 2, tasks
    solved_shares = {
        arm: np.array([results[arm, number]["solved"] for number in range(c.trainings)]) / c.samples for arm in ARMS
    }
    heldout = [
        {"training": number, "arm": arm, "before": float(successes[0].mean()), "after": float(successes[1].mean())}
        | estimate_gain(successes[1] - successes[0])
        for arm in ARMS
        for number, successes in enumerate(solved_shares[arm])
    ]
    equal = [
        results["memory", number]["weights"] == results["disk", number]["weights"] for number in range(c.trainings)
    ]
    return {"rows": rows, "heldout": heldout, "claims": verdicts(rows, solved_shares, equal, c)}


def estimate_gain(change: np.ndarray) -> dict:
    return {f"gain{'' if name == 'value' else '_' + name}": value for name, value in bootstrap(change).items()}


def verdicts(rows: list[dict], solved: dict[str, np.ndarray], equal: list[bool], c: Experiment) -> list[dict]:
    """Whether both worlds teach the same, and whether the agent learns on disk."""
    curves = {arm: np.array([[row["success"], row["reward"]] for row in rows if row["arm"] == arm]) for arm in ARMS}
    largest_difference = float(np.abs(curves["memory"] - curves["disk"]).max())
    step_seconds = {arm: float(np.median([row["step_s"] for row in rows if row["arm"] == arm])) for arm in ARMS}
    change = solved["disk"][:, 1] - solved["disk"][:, 0]
    gain = bootstrap(change.mean(0))
    before, after = (solved["disk"][:, look].mean() for look in (0, 1))
    return [
        claim(
            "same-curves",
            "an agent that trains on real files with real tools learns what it learns in memory",
            "§6.2",
            largest_difference,
            at_most(1e-9),
            None,
            "difference of success or reward",
            f"largest difference between the arms over {len(curves['disk'])} steps; weights at the end "
            f"equal to the bit in {sum(equal)} of "
            f"{len(equal)} trainings; a step of {c.prompts * c.rollouts} rollouts takes {step_seconds['disk']:.1f} s "
            f"on disk and {step_seconds['memory']:.1f} s in "
            "memory",
            {"weights equal to the bit": all(equal)},
        ),
        claim(
            "learns-on-disk",
            "RL in the product's own harness improves the agent",
            "§6.2",
            gain["value"],
            above(),
            (gain["low"], gain["high"]),
            "gain of held-out success",
            f"held-out success {before:.3f} → {after:.3f} after {c.steps} steps of "
            f"{c.prompts * c.rollouts} rollouts; 95% bootstrap over tasks, "
            f"paired; trainings by themselves: {', '.join(f'{value:+.3f}' for value in change.mean(1))}",
            {"every training by itself": bool(change.mean(1).min() > 0)},
        ),
    ]


def picture(results: dict, path: Path) -> None:
    """Left: success along RL in both arms. Middle: held-out success before and after. Right: what a step costs."""
    from kit.plots import COLOURS, GREY, save, sheet

    figure, (left, middle, right) = sheet(3, "RL on files of Python in sandboxes, and in memory")
    for arm, colour, style in (("memory", GREY, "-"), ("disk", COLOURS[0], "--")):
        for number in sorted({row["training"] for row in results["rows"]}):
            run_rows = [row for row in results["rows"] if (row["arm"], row["training"]) == (arm, number)]
            width, label = (4 if arm == "memory" else 1.5), arm if number == 0 else None
            left.plot(
                [row["step"] for row in run_rows],
                [row["success"] for row in run_rows],
                style,
                color=colour,
                linewidth=width,
                label=label,
            )
        for row in (heldout_row for heldout_row in results["heldout"] if heldout_row["arm"] == arm):
            label = arm if row["training"] == 0 else None
            middle.plot(
                [0, 1],
                [row["before"], row["after"]],
                "o" + style,
                color=colour,
                linewidth=4 if arm == "memory" else 1.5,
                label=label,
            )
    arm_seconds = [[row["step_s"] for row in results["rows"] if row["arm"] == arm] for arm in ARMS]
    right.bar(ARMS, [float(np.median(times)) for times in arm_seconds], color=[GREY, COLOURS[0]])
    left.set(
        xlabel="RL step",
        ylabel="success of a step's rollouts",
        title="Along RL: the curves lie on each other",
        ylim=(0, 1),
    )
    middle.set(xticks=[0, 1], xticklabels=["before", "after"], ylabel="success", title="Held-out tasks", ylim=(0, 1))
    right.set(ylabel="s, median", title="Time of a step")
    for axis in (left, middle):
        axis.legend(frameon=False)
    save(figure, path)
