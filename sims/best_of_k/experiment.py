"""Figure 5: while the average reward rises, does best-of-K rise, too? Measured on held-out tasks during RL.

    etude figure best-of-k              about 13 minutes on two threads; starts from the SFT checkpoint of runs/small
                                        (make small)
    etude figure best-of-k --quick

RL as in the recipe, but shorter: several training runs that differ only in their seed. At the beginning, at the end and
twice in between, each plays the same held-out tasks n times. A task with c successes in n rollouts gives the unbiased
estimate of pass@K for every K ≤ n. Intervals are bootstrapped over tasks, and differences are paired by task. They do
not include the variation between training seeds, so a claim must also hold in each training run alone.

What to look for: pass@1 is the average reward. If RL only sharpens (makes likely what was reachable anyway), pass@1
climbs towards a constant pass@16. If RL widens what is reachable, pass@16 climbs as well. Both can be true, so the gap
between the two is reported next to them.
"""

import itertools
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from kit.disk import read_lines
from kit.runs import Run
from kit.statistics import bootstrap, pass_at_k
from recipe.small.agent import hash_seed, play
from recipe.small.data import task_stream
from recipe.small.demonstrations import context
from recipe.small.learner import language_of, load_checkpoint
from recipe.small.reinforcement import Moment, learn
from recipe.small.settings import Recipe
from sims.experiment import above, claim
from sims.policies import agent

__all__ = ["Experiment", "experiment", "picture"]


@dataclass(frozen=True)
class Experiment:
    """Length of training and precision of the measurements."""

    run: str = "runs/small"
    """A finished run of the recipe; RL starts from its SFT checkpoint (empty: first run a tiny recipe that has learned
    nothing)."""
    trainings: int = 3
    """RL training runs from that checkpoint; the first has the recipe's own seed."""
    steps: int | None = 75
    """RL steps of each training run, fewer than in the recipe, so three take a quarter of an hour; none: as many as in
    the recipe."""
    looks: tuple[float, ...] = (0.0, 0.33, 0.67, 1.0)
    """When to play held-out tasks, as shares of the steps; the claims compare the first and the last."""
    tasks: int = 160
    """Held-out tasks, in the world's mix of depths."""
    samples: int = 16
    """Rollouts per task at each look; the largest K."""
    middle: int = 4
    """The K between 1 and `samples` that one claim is about."""
    resamples: int = 2000
    """Bootstrap resamples, over tasks."""
    seed: int = 0
    """Seed of the looks; added to the recipe's seed, it is that of the training runs."""

    @classmethod
    def quick(cls) -> "Experiment":
        return cls(run="", trainings=2, steps=2, looks=(0.0, 0.5, 1.0), tasks=6, samples=4, middle=2, resamples=100)


def training(run: Run, c: Experiment, root: Path, recipe: Recipe, number: int) -> list[dict]:
    """One training run: {step, solved} at each look; `solved` counts the successes of every held-out task among its
    samples."""
    steps = recipe.rl.steps if c.steps is None else c.steps
    stage = run.stage(f"rl-{number}", total=max(steps, 1), unit="tokens")
    if stage.finished:
        return stage.result()["looks"]
    config = replace(recipe, seed=recipe.seed + 1000 * c.seed + number, rl=replace(recipe.rl, steps=steps))
    tasks = list(itertools.islice(task_stream(recipe, "evaluation"), c.tasks))
    look_steps, language, r = {round(share * steps) for share in c.looks}, language_of(root), config.rl

    def measure_solved(moment: Moment) -> dict:
        if moment.step not in look_steps:
            return {}
        generator = torch.Generator().manual_seed(hash_seed(c.seed, "best-of-k", number, moment.step))
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
        solved_flags = np.array([e.metrics["tests"] for e in episodes], dtype=int).reshape(c.tasks, c.samples)
        return {"solved": solved_flags.sum(1).tolist()}

    policy, reference = (load_checkpoint(root, config, "sft", with_mtp=False)[0] for _ in range(2))
    learn(stage, config, policy, None, reference, language, [measure_solved])
    # From the stage's metrics, because an earlier process may have done some of the looks.
    lines = read_lines(stage.metrics_path)
    looks = [{"step": line["step"], "solved": line["solved"]} for line in lines if "solved" in line]
    return stage.finish({"looks": looks})["looks"]


def curves(solved: np.ndarray, n: int) -> np.ndarray:
    """pass@K of every task for K = 1..n, [..., n], from its successes among n."""
    return np.stack([pass_at_k(solved, n, k).reshape(np.shape(solved)) for k in range(1, n + 1)], -1)


def crossing(before: np.ndarray, after: np.ndarray) -> int | None:
    """The smallest K at which the mean curve after RL [K] is no longer above the one before RL; None if it is above at
    every K."""
    return next((k for k, (b, a) in enumerate(zip(before, after, strict=True), 1) if a <= b + 1e-12), None)


def churn(before: np.ndarray, after: np.ndarray) -> tuple[float, float, float | None]:
    """Shares of all tasks, averaged over training runs, from successes [trainings, tasks]: never solved before but
    solved after; solved before but never after; and, as the effect of chance alone, never solved in one run's look
    before RL but solved in another run's look at the same policy (None for a single training run)."""
    gained_share, lost_share = ((before == 0) & (after > 0)).mean(), ((before > 0) & (after == 0)).mean()
    pairs = [((a == 0) & (b > 0)).mean() for a, b in itertools.permutations(before, 2)]
    return float(gained_share), float(lost_share), float(np.mean(pairs)) if pairs else None


def experiment(run: Run, config: Experiment) -> dict:
    """The training runs, the curves at every look, and the verdicts."""
    c = config
    root, recipe = agent(run, c.run, c.seed)
    looks = [training(run, c, root, recipe, number) for number in range(c.trainings)]
    steps = [look["step"] for look in looks[0]]
    # Trainings, looks, tasks
    solved_counts = np.array([[look["solved"] for look in training_looks] for training_looks in looks])
    reach = curves(solved_counts, c.samples)  # trainings, looks, tasks, K
    depths = np.array([t.depth for t in itertools.islice(task_stream(recipe, "evaluation"), c.tasks)])
    rows = []

    def gain_columns(change: np.ndarray) -> dict:
        return {f"gain_{name}": v for name, v in bootstrap(change, n=c.resamples).items()}

    for look_index, step in enumerate(steps):
        for k in range(1, c.samples + 1):
            current_reach, initial_reach = reach[:, look_index, :, k - 1], reach[:, 0, :, k - 1]
            rows.append(
                {
                    "part": "all",
                    "step": step,
                    "k": k,
                    **bootstrap(current_reach.mean(0), n=c.resamples),
                    **gain_columns((current_reach - initial_reach).mean(0)),
                    **{f"training_{i}": float(v) for i, v in enumerate(current_reach.mean(1))},
                }
            )
    for depth, k in itertools.product(sorted(set(depths.tolist())), sorted({1, c.middle, c.samples})):
        depth_reach = reach[:, :, depths == depth, k - 1].mean(0)
        rows.append(
            {
                "part": f"depth {depth}",
                "step": steps[-1],
                "k": k,
                "tasks": int((depths == depth).sum()),
                "before": float(depth_reach[0].mean()),
                **bootstrap(depth_reach[-1], n=c.resamples),
                **gain_columns(depth_reach[-1] - depth_reach[0]),
            }
        )
    return {"rows": rows, "claims": verdicts(solved_counts[:, 0], solved_counts[:, -1], c), "trainings": c.trainings}


def verdicts(solved_before: np.ndarray, solved_after: np.ndarray, c: Experiment) -> list[dict]:
    """Claims that pass@K rises, from the successes [trainings, tasks] at the first and at the last look; the interval
    and every training run must show it. Best-of-`samples` distinguishes widening from sharpening."""
    n = c.samples
    before, after = curves(solved_before, n), curves(solved_after, n)  # trainings, tasks, K
    change, start, end = after - before, before.mean((0, 1)), after.mean((0, 1))

    def make_claim(name: str, says: str, k: int, suffix: str = "") -> dict:
        training_gains = change[:, :, k - 1].mean(1)
        # Rounded, so that equal gains and losses cancel to exactly zero.
        gain = {end: round(v, 12) for end, v in bootstrap(change[:, :, k - 1].mean(0), n=c.resamples).items()}
        return claim(
            name,
            says,
            "§4.1, Fig. 5",
            gain["value"],
            above(),
            (gain["low"], gain["high"]),
            f"pass@{k}",
            f"pass@{k} on held-out tasks {start[k - 1]:.3f} → {end[k - 1]:.3f}; 95% bootstrap over "
            f"tasks, paired; trainings by "
            f"themselves: {', '.join(f'{v:+.3f}' for v in training_gains)}{suffix}",
            {"every training by itself": min(training_gains) > 0},
        )

    gap = bootstrap((change[:, :, -1] - change[:, :, 0]).mean(0), n=c.resamples)
    gap_text = (
        "it shrinks: RL sharpens"
        if gap["high"] < 0
        else "it grows"
        if gap["low"] > 0
        else "no change beyond the interval"
    )
    gained_share, lost_share, chance = churn(solved_before, solved_after)
    chance_text = "" if chance is None else f" (two looks at one policy differ so by {100 * chance:.1f}% either way)"
    cross = crossing(start, end)
    crossing_text = "the mean curves do not cross" if cross is None else f"the mean curves meet at K = {cross}"
    reach_text = (
        f". The gap to pass@1 was {start[-1] - start[0]:.3f} and is {end[-1] - end[0]:.3f}: {gap_text}; "
        f"{crossing_text}. Of all tasks "
        f"{100 * gained_share:.1f}% were never solved in {n} rollouts before RL but after it, {100 * lost_share:.1f}% "
        f"the other way{chance_text}"
    )
    return [
        make_claim("average", "average reward rises", 1),
        make_claim(f"best-of-{c.middle}", f"best-of-{c.middle}, between average and best, rises", c.middle),
        make_claim(
            f"best-of-{n}",
            f"best-of-{n} rises too: RL widens what is reachable, it does not only sharpen",
            n,
            reach_text,
        ),
    ]


def picture(results: dict, path: Path) -> None:
    """Left, Figure 5: average and best-of-K during RL. Middle: pass@K against K. Right: what RL added at each K."""
    from kit.plots import COLOURS, GREY, save, sheet

    rows = [row for row in results["rows"] if row["part"] == "all"]
    n, steps = max(row["k"] for row in rows), sorted({row["step"] for row in rows})
    figure, (left, middle, right) = sheet(3, "Average reward and best-of-K on held-out tasks along RL")

    def draw_band(axis, points: list[dict], x_key: str, colour: str, label: str, prefix: str = "") -> None:
        x = [row[x_key] for row in points]
        axis.plot(x, [row[f"{prefix}value"] for row in points], "o-", color=colour, markersize=4, label=label)
        low, high = ([row[f"{prefix}{end}"] for row in points] for end in ("low", "high"))
        axis.fill_between(x, low, high, color=colour, alpha=0.15)

    for k, colour in zip(sorted({1, results["config"]["middle"], n}), COLOURS, strict=False):
        draw_band(left, [row for row in rows if row["k"] == k], "step", colour, "average" if k == 1 else f"best of {k}")
    for step, colour in zip(
        sorted({steps[0], steps[len(steps) // 2], steps[-1]}), (GREY, COLOURS[4], COLOURS[0]), strict=False
    ):
        draw_band(middle, [row for row in rows if row["step"] == step], "k", colour, f"step {step}")
    last = [row for row in rows if row["step"] == steps[-1]]
    first = [row for row in rows if row["step"] == steps[0]]
    for i in range(results["trainings"]):
        gains = [b[f"training_{i}"] - a[f"training_{i}"] for a, b in zip(first, last, strict=True)]
        right.plot(
            [row["k"] for row in last], gains, color=GREY, linewidth=1, label="each training" if i == 0 else None
        )
    draw_band(right, last, "k", COLOURS[2], "mean of the trainings", "gain_")
    right.axhline(0, color="#5A6773", linewidth=1)
    left.set(xlabel="RL step", ylabel="share of tasks solved", title="Along RL", ylim=(0, 1))
    middle.set(xlabel="K, rollouts of a task", ylabel="pass@K", title="One of K rollouts succeeds", ylim=(0, 1))
    right.set(
        xlabel="K, rollouts of a task",
        ylabel="pass@K, after minus before",
        title="What RL added (bands: 95%, over tasks)",
    )
    left.set_xticks(steps)
    for axis in (middle, right):
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    for axis in (left, middle, right):
        axis.legend(frameon=False)
    save(figure, path)
