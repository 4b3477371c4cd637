"""Figure 2: does more continued pretraining give a lower loss after SFT, and does a lower loss give a higher RL reward?

    etude figure cpt-rl                 55 minutes on two threads
    etude figure cpt-rl --quick

The recipe at log-spaced budgets of pretraining tokens, with several seeds each: short and long context in the recipe's
proportion, then the same SFT and RL for all. Each seed has its own weights, data order, demonstrations and RL tasks
(without upsampling, which would make the tasks differ). The budgets of a seed share all of that; a smaller budget reads
the beginning of what a larger one reads. Corpus, tokenizer and measurement tasks are common to all, so losses are
comparable. There are no MTP layers: in the recipe they give the trunk no gradient.

Measured for each run: loss on the held-out codebase, during and after pretraining; cross-entropy after SFT on the
agent's own tokens in demonstrations on held-out tasks, as imperfect as those of SFT; and two rewards after the same
number of RL steps: success on other held-out tasks, and the training reward of the last steps. `rl.gate` is 0 here:
weak policies go through RL like strong ones, although penalties may teach them little but to stop.

Rules of the verdicts, fixed before the experiment ran: a loss falls log-linearly if the interval of the slope is below
0 and the line explains 95% of the variance; a loss predicts the reward, between budgets, if the interval of the slope
over seeds is below 0, and the interval over tasks, too; budgets order the reward if every step to the next budget adds
success beyond its interval, and the training rewards come in the same order. Perplexity on the codebase predicts the
reward by the same rule over seeds; this one was added after the experiment ran.

Power. A seed gives one slope over its four budgets, and three seeds decide. The success of a training run varies by
0.03 by chance and the losses span 0.09 nats, so a slope varies by 0.4 per nat. Three seeds resolve 1: a tenth of
success from the smallest to the largest budget.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kit import trends
from kit.runs import Run
from kit.statistics import student
from recipe.small.data import data
from sims.cpt_rl.budgets import Experiment, settings, training
from sims.experiment import above, below, claim

__all__ = ["Experiment", "concluded", "experiment", "perplexity_foretells", "picture"]


def experiment(run: Run, config: Experiment) -> dict:
    """Every training run, smallest budgets first; fits, intervals, verdicts."""
    c, corpus = config, run.root / "corpus"
    largest = settings(c, c.budgets[-1], 0)
    with Run.open(
        corpus, "recipe", largest, resume=corpus.exists(), checkpoint_seconds=run.checkpoint_seconds
    ) as inner:
        data(inner, largest)
    return concluded([training(run, c, corpus, budget, number) for budget in c.budgets for number in range(c.seeds)], c)


def concluded(results: list[dict], c: Experiment) -> dict:
    """Rows, verdicts and fits of the training runs, in the order of budgets and, in them, seeds."""
    fits = fitted(results, c)
    rows = [row(f, c) for f in results]
    rows += [{"part": "look", "budget": f["budget"], "seed": f["seed"], **look} for f in results for look in f["looks"]]
    rows += [{"part": "fit", "name": name, **flatten_fit(fit)} for name, fit in fits.items() if name != "steps"]
    rows += [{"part": "step", "name": name, **step} for name, step in zip(step_names(c), fits["steps"], strict=True)]
    return {"rows": rows, "claims": verdicts(rows, fits, c), "fits": fits}


def row(f: dict, c: Experiment) -> dict:
    """The numbers of one training run."""
    before, after = f["sft"], f["final"]
    loss_before, loss_after = trends.loss_of(np.array([before["nll"], after["nll"]]))
    return {
        "part": "training",
        "budget": f["budget"],
        "seed": f["seed"],
        "tokens": f["tokens"],
        "codebase_loss": f["codebase_loss"],
        "codebase_ppl": float(np.exp(f["codebase_loss"])),
        "codebase_bpb": f["codebase_bpb"],
        "sft_loss": float(loss_before),
        "loss_after_rl": float(loss_after),
        **{
            f"{name}_{moment}": float(np.mean(outcome[name]))
            for name in ("success", "best", "greedy", "turns", "finished")
            for moment, outcome in (("before", before), ("after", after))
        },
        "reward_first": float(np.mean(f["reward"][: c.last])),
        "reward_last": float(np.mean(f["reward"][-c.last :])),
        "kl": f["kl"],
    }


def flatten_fit(fit: dict) -> dict:
    """Intervals in two columns each."""
    columns = {}
    for name, value in fit.items():
        columns |= {f"{name}_low": value[0], f"{name}_high": value[1]} if isinstance(value, list) else {name: value}
    return columns


def step_names(c: Experiment) -> list[str]:
    return [f"{a:,} → {b:,}" for a, b in [*itertools.pairwise(c.budgets), (c.budgets[0], c.budgets[-1])]]


def fitted(results: list[dict], c: Experiment) -> dict:
    """All fits, from the training runs in the order of `experiment`."""
    budgets, nll = np.array([f["budget"] for f in results]), np.array([f["sft"]["nll"] for f in results])
    # One number per training run: the steps of a run depend on each other and are not an independent sample.
    success, reward = (
        np.array([f["final"]["success"] for f in results]),
        np.array([[np.mean(f["reward"][-c.last :])] for f in results]),
    )
    final_points = [np.array([f["tokens"]]) for f in results], [np.array([f["codebase_loss"]]) for f in results]
    # During training: only at full learning rate, between warm-up and the decay of the long phase.
    full_rate_looks = [[look for look in f["looks"] if look["phase"] == "cpt" and look["lr"] == 1] for f in results]
    along_points = (
        [np.array([k["tokens"] for k in looks]) for looks in full_rate_looks],
        [np.log([k["ppl"] for k in looks]) for looks in full_rate_looks],
    )
    return {
        "after": trends.falls(budgets, *final_points, c.resamples, c.seed),
        "along": trends.falls(budgets, *along_points, c.resamples, c.seed),
        "success": trends.predicts(budgets, nll, success, c.resamples, c.seed),
        "reward": trends.predicts(budgets, nll, reward, c.resamples, c.seed),
        "steps": trends.orders(success.reshape(len(c.budgets), c.seeds, -1), c.resamples, c.seed),
    }


def verdicts(rows: list[dict], fits: dict, c: Experiment) -> list[dict]:
    """Claims by the rules at the top of this file."""
    trainings, tenfold = [row for row in rows if row["part"] == "training"], float(np.log(10))
    runs_text = f"{len(trainings)} trainings ({len(c.budgets)} budgets × {c.seeds} seeds)"
    means = {
        name: [float(np.mean([row[name] for row in trainings if row["budget"] == budget])) for budget in c.budgets]
        for name in ("success_before", "success_after", "reward_first", "reward_last")
    }
    means_text = {name: ", ".join(f"{value:.3f}" for value in values) for name, values in means.items()}
    outcomes = zip(c.budgets, means["success_before"], means["success_after"], strict=True)
    idle = ", ".join(f"{budget:,}" for budget, before, after in outcomes if after <= before)
    idle = f"; RL adds no success at {idle} tokens" if idle else ""

    def make_loss_claim(name: str, says: str, key: str, place_text: str) -> dict:
        fit = fits[key]
        note = (
            f"{place_text}; 95% bootstrap over {runs_text}; R² of the line {fit['r2']:.3f}, of a power law "
            f"{fit['r2_power_law']:.3f}"
        )
        slope, bend, measured_slope = fit["slope_over_runs"], fit["curvature_over_runs"], None
        if slope is None:
            note = (
                f"{place_text}; {runs_text} give no interval, slope {fit['slope'] * tenfold:.3g}; R² of "
                f"the line {fit['r2']:.3f}"
            )
        else:
            measured_slope, slope = fit["slope"] * tenfold, (slope[0] * tenfold, slope[1] * tenfold)
            bend_text = (
                "the fall slows down"
                if bend[0] > 0
                else "it quickens"
                if bend[1] < 0
                else "no bend beyond the interval"
            )
            note += (
                f"; curvature {fit['curvature']:+.3f} [{bend[0]:+.3f}, {bend[1]:+.3f}] nats per squared "
                f"factor e: {bend_text}"
            )
        unit = "nats a token per tenfold tokens"
        return claim(
            name,
            says,
            "§3.1, Fig. 2 right",
            measured_slope,
            below(),
            slope,
            unit,
            note,
            {"a line, R² ≥ 0.95": fit["r2"] >= 0.95},
        )

    def make_prediction_claim(name: str, outcome: str, key: str, change: str) -> dict:
        fit = fits[key]
        says = (
            f"between pretraining budgets, lower loss after SFT goes with higher RL reward after a fixed "
            f"number of steps ({outcome})"
        )
        seed_slopes, seeds, tasks = (
            [fit[f"slope_{number}"] for number in range(c.seeds)],
            fit["slope_over_seeds"],
            fit["slope_over_tasks"],
        )
        note = (
            f"slope over the budgets of a seed, {runs_text}: {', '.join(f'{v:.3g}' for v in seed_slopes)}; 95% "
            "Student's t over seeds; over tasks "
            f"[{tasks[0]:.3g}, {tasks[1]:.3g}]; correlation of the budgets' means {fit['r']:.3f}; {change}"
        )
        measured_slope = None if seeds is None else fit["slope"]
        return claim(
            name,
            says,
            "§3.1, Fig. 2 left",
            measured_slope,
            below(),
            seeds,
            "per nat a token",
            note,
            {"over tasks, too": tasks[1] < 0},
        )

    *step_estimates, overall = fits["steps"]
    least_index = min(range(len(step_estimates)), key=lambda i: step_estimates[i]["value"])
    has_rising_rewards = all(a < b for a, b in itertools.pairwise(means["reward_last"]))
    return [
        make_loss_claim(
            "codebase-loss",
            "loss on the held-out codebase falls log-linearly in compute",
            "after",
            "at the end of pretraining, where the learning rate has decayed",
        ),
        make_loss_claim(
            "codebase-loss-along",
            "it also does so along training",
            "along",
            "beginning of the held-out codebase, between warm-up and decay of the learning rate",
        ),
        make_prediction_claim(
            "loss-success",
            "success on held-out tasks",
            "success",
            f"success by budget {means_text['success_before']} before RL, {means_text['success_after']} after{idle}",
        ),
        make_prediction_claim(
            "loss-reward",
            f"training reward of the last {c.last} steps",
            "reward",
            f"reward by budget {means_text['reward_first']} in the first {c.last} steps, "
            f"{means_text['reward_last']} in the last",
        ),
        *perplexity_foretells(trainings),
        claim(
            "budget-order",
            "a larger pretraining budget gives a higher RL reward",
            "§3.1, Fig. 2",
            step_estimates[least_index]["value"],
            above(),
            (step_estimates[least_index]["low"], step_estimates[least_index]["high"]),
            "held-out success, the least step",
            f"least at {step_names(c)[least_index]} tokens; 95% bootstrap over seeds and, nested, tasks, paired; from "
            "the first budget to "
            f"the last {overall['value']:+.3f} [{overall['low']:+.3f}, {overall['high']:+.3f}]; training reward by "
            "budget "
            f"{means_text['reward_last']}{idle}",
            {"so does training reward": has_rising_rewards},
        ),
    ]


def perplexity_foretells(trainings: Sequence[dict]) -> list[dict]:
    """Claims on rows of training runs: between the budgets of a seed, does the codebase loss of the base predict the
    two rewards after RL? The note has the correlation of the budgets' means, and that of the loss after SFT."""
    seeds, claims = sorted({row["seed"] for row in trainings}), []
    budgets = sorted({row["budget"] for row in trainings})

    def slope(outcome: str, seed: int) -> float:
        seed_rows = [row for row in trainings if row["seed"] == seed]
        return trends.line(*(np.array([row[key] for row in seed_rows]) for key in ("codebase_loss", outcome)))[0]

    def correlation(loss: str, outcome: str) -> float:
        means = [
            [np.mean([row[key] for row in trainings if row["budget"] == budget]) for budget in budgets]
            for key in (loss, outcome)
        ]
        return trends.line(*map(np.array, means))[2]

    for name, outcome, words in (
        ("success", "success_after", "success on held-out tasks"),
        ("reward", "reward_last", "training reward at the end"),
    ):
        slopes = [slope(outcome, seed) for seed in seeds]
        estimate = student(slopes) if len(slopes) > 1 else None
        claims.append(
            claim(
                f"perplexity-{name}",
                f"between pretraining budgets, lower codebase perplexity of the base goes with higher "
                f"RL reward ({words})",
                "§3.1, App. B",
                None if estimate is None else estimate["value"],
                below(),
                None if estimate is None else (estimate["low"], estimate["high"]),
                "per nat a token of the codebase",
                f"slope over the budgets of a seed, {len(trainings)} trainings: "
                f"{', '.join(f'{v:.3g}' for v in slopes)}; 95% Student's t over seeds; "
                f"correlation of the budgets' means {correlation('codebase_loss', outcome):.3f}, with "
                f"the loss after SFT "
                f"{correlation('sft_loss', outcome):.3f}",
            )
        )
    return claims


def picture(results: dict, path: Path) -> None:
    """Left and middle, Figure 2 left: loss after SFT against both rewards. Right, Figure 2 right: perplexity against
    tokens."""
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    from kit.plots import COLOURS, save, sheet

    rows, fits, dark = results["rows"], results["fits"], "#5A6773"
    trainings, looks = ([row for row in rows if row["part"] == part] for part in ("training", "look"))
    budgets = sorted({row["budget"] for row in trainings})
    colours = dict(zip(budgets, itertools.cycle(COLOURS), strict=False))

    def format_interval(interval: list[float] | None, scale: float = 1.0) -> str:
        return f"[{scale * interval[0]:.2f}, {scale * interval[1]:.2f}] " if interval else ""

    figure, (left, middle, right) = sheet(
        3, "More pretraining, loss after SFT, and the reward after the same RL", width=5
    )
    line_x = np.linspace(min(row["sft_loss"] for row in trainings), max(row["sft_loss"] for row in trainings), 2)
    for axis, key, name in ((left, "success", "success_after"), (middle, "reward", "reward_last")):
        for budget in budgets:
            budget_rows = [row for row in trainings if row["budget"] == budget]
            x, y = [r["sft_loss"] for r in budget_rows], [r[name] for r in budget_rows]
            axis.plot(x, y, "o", color=colours[budget], label=f"{budget:,} tokens")
        fit = fits[key]
        axis.plot(line_x, fit["intercept"] + fit["slope"] * line_x, color=dark, linewidth=1.5, zorder=1)
        axis.set_title(
            f"slope {fit['slope']:.2f} {format_interval(fit['slope_over_seeds'])}per nat, r = {fit['r']:.2f}"
        )
        axis.set_xlabel("loss after SFT on held-out demonstrations, nats a token")
    left.set_ylabel("success on held-out tasks after RL")
    middle.set_ylabel(f"mean training reward, last {results['config']['last']} RL steps")
    left.legend(frameon=False, title="pretraining")
    for budget, number in sorted({(row["budget"], row["seed"]) for row in trainings}):
        look_rows = [row for row in looks if (row["budget"], row["seed"]) == (budget, number)]
        x, y = [row["tokens"] for row in look_rows], [np.log(row["ppl"]) for row in look_rows]
        right.plot(x, y, color=colours[budget], linewidth=1, alpha=0.7)
        final_row = next(row for row in trainings if (row["budget"], row["seed"]) == (budget, number))
        right.plot(final_row["tokens"], final_row["codebase_loss"], "o", color=colours[budget], markersize=5, zorder=3)
    handles = [
        Line2D([], [], color=dark, marker="o", linestyle="", markersize=5, label="end of pretraining, whole codebase")
    ]
    full_rate_looks = [look for look in looks if look["phase"] == "cpt" and look["lr"] == 1]
    for key, words, style, points in (
        ("after", "at the end", "-", trainings),
        ("along", "along", ":", full_rate_looks),
    ):
        span = np.geomspace(min(p["tokens"] for p in points), max(p["tokens"] for p in points), 2)
        fit = fits[key]
        tenfold = float(np.log(10))
        handles += right.plot(
            span,
            fit["intercept"] + fit["slope"] * np.log(span),
            style,
            color=dark,
            zorder=2,
            label=f"{words}: {fit['slope'] * tenfold:.2f} "
            f"{format_interval(fit['slope_over_runs'], tenfold)}nats per tenfold tokens",
        )
    right.set(
        xscale="log",
        xlabel="pretraining tokens",
        ylabel="perplexity of the held-out codebase (log axis)",
        title="Perplexity along pretraining (lines) and at its end",
    )
    right.yaxis.set_major_locator(MaxNLocator(6))
    right.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{np.exp(value):.0f}"))
    bottom, top = right.get_ylim()
    right.set_ylim(bottom, top + 0.25 * (top - bottom))  # room for the legend above all curves
    right.legend(handles=handles, frameon=False, fontsize=9, loc="upper right")
    save(figure, path)
