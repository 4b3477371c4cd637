"""Straight lines through training runs, and their uncertainty.

A training run is one point (or one curve) among few, and the runs differ in budget and seed. Its coordinates were
themselves measured on tasks, which are the same for all runs. All intervals are 95% intervals. For claims between
budgets, each seed gives one number. Elsewhere training runs are resampled with replacement until at least three budgets
are among them (fewer do not decide a line)."""

import itertools
from collections.abc import Sequence

import numpy as np

from kit.statistics import student

__all__ = ["curvature", "draw", "falls", "line", "loss_of", "orders", "predicts"]


def line(x: np.ndarray, y: np.ndarray) -> tuple[float, float, float]:
    """(slope, intercept, correlation) of least squares; slope and correlation are 0 if x or y is constant."""
    dx, dy = x - x.mean(), y - y.mean()
    xx, xy, yy = float(dx @ dx), float(dx @ dy), float(dy @ dy)
    slope = xy / xx if xx else 0.0
    return slope, float(y.mean() - slope * x.mean()), xy / (xx * yy) ** 0.5 if xx * yy else 0.0


def curvature(x: np.ndarray, y: np.ndarray) -> float:
    """Quadratic coefficient of the parabola through the points: if y falls, a value above 0 means that it falls ever
    more slowly."""
    return float(np.polyfit(x - x.mean(), y, 2)[0])


def draw(rng: np.random.Generator, budgets: np.ndarray) -> np.ndarray:
    """Indices of training runs, resampled with replacement, with at least three budgets among them."""
    while True:
        indices = rng.integers(0, len(budgets), len(budgets))
        if len(np.unique(budgets[indices])) >= 3:
            return indices


def interval(values: Sequence[float] | np.ndarray) -> list[float]:
    return [float(v) for v in np.quantile(values, [0.025, 0.975])]


def loss_of(nll: np.ndarray) -> np.ndarray:
    """Nats per token of every training run, from [trainings, tasks, (nats, tokens)]; every token has the same
    weight."""
    total = nll.sum(1)
    return total[:, 0] / total[:, 1]


def predicts(budgets: np.ndarray, nll: np.ndarray, outcome: np.ndarray, n: int, seed: int) -> dict:
    """Between budgets, does the loss of a training run predict its outcome?

    budgets [R], with equally many training runs per budget, in the order of their seeds; nll [R, tasks, (nats,
    tokens)]; outcome [R, S], whose mean over S tasks is predicted. `slope`: slope of the line through the budgets of
    one seed, which share everything else, averaged over seeds; `slope_over_seeds` is Student's interval, None for a
    single seed; `slope_over_tasks` resamples tasks. `intercept` and `r` are those of the budget means. `inside`: slope
    and correlation after subtracting the mean of each budget; no claim uses it."""
    x, y = loss_of(nll), outcome.mean(1)
    n_budgets = len(np.unique(budgets))

    def slopes(x: np.ndarray, y: np.ndarray) -> list[float]:
        return [line(a, b)[0] for a, b in zip(x.reshape(n_budgets, -1).T, y.reshape(n_budgets, -1).T, strict=True)]

    seed_slopes, rng, over_tasks = slopes(x, y), np.random.default_rng(seed), []
    for _ in range(n):
        tasks, scored_tasks = (rng.integers(0, values.shape[1], values.shape[1]) for values in (nll, outcome))
        over_tasks.append(np.mean(slopes(loss_of(nll[:, tasks]), outcome[:, scored_tasks].mean(1))))
    estimate, means = (
        student(seed_slopes) if len(seed_slopes) > 1 else None,
        [values.reshape(n_budgets, -1).mean(1) for values in (x, y)],
    )
    is_same_budget = (budgets[:, None] == budgets).astype(float)
    within_budgets = line(*(values - is_same_budget @ values / is_same_budget.sum(1) for values in (x, y)))
    slope = float(np.mean(seed_slopes))
    return {
        "slope": slope,
        "intercept": float(y.mean() - slope * x.mean()),
        "r": line(*means)[2],
        "slope_over_seeds": estimate and [estimate["low"], estimate["high"]],
        "slope_over_tasks": interval(over_tasks),
        **{f"slope_{number}": value for number, value in enumerate(seed_slopes)},
        "inside_slope": within_budgets[0],
        "inside_r": within_budgets[2],
    }


def falls(budgets: np.ndarray, tokens: Sequence[np.ndarray], loss: Sequence[np.ndarray], n: int, seed: int) -> dict:
    """Loss as a line in the natural logarithm of the tokens, over training runs that give a point or a curve each:
    slope in nats per factor e, R², the curvature that a line leaves out, and the R² of a power law, log loss in log
    tokens. Intervals are None for three training runs, of which only one draw has three budgets."""

    def fit(run_indices: Sequence[int] | np.ndarray) -> tuple[float, float, float, float, float]:
        x, y = np.log(np.concatenate([tokens[i] for i in run_indices])), np.concatenate([loss[i] for i in run_indices])
        slope, intercept, r = line(x, y)
        return slope, intercept, r * r, curvature(x, y), line(x, np.log(y))[2] ** 2

    slope, intercept, r2, bend, power = fit(range(len(budgets)))
    rng = np.random.default_rng(seed)
    resampled_fits = [fit(draw(rng, budgets)) for _ in range(n if len(budgets) > 3 else 0)]
    return {
        "slope": slope,
        "intercept": intercept,
        "r2": r2,
        "curvature": bend,
        "r2_power_law": power,
        "slope_over_runs": interval([d[0] for d in resampled_fits]) if resampled_fits else None,
        "curvature_over_runs": interval([d[3] for d in resampled_fits]) if resampled_fits else None,
    }


def orders(outcome: np.ndarray, n: int, seed: int) -> list[dict]:
    """What each budget adds to the previous one, from [budgets, seeds, tasks], and last what the largest adds to the
    smallest: {value, low, high}. Resamples seeds and, nested, tasks, in pairs, because all budgets of a seed share it
    and all play the same tasks."""
    rng, draws = np.random.default_rng(seed), []
    for _ in range(n):
        seeds, tasks = (rng.integers(0, size, size) for size in outcome.shape[1:])
        draws.append(outcome[:, seeds][:, :, tasks].mean((1, 2)))
    means, resampled_means, differences = outcome.mean((1, 2)), np.array(draws), []
    for a, b in [*itertools.pairwise(range(len(means))), (0, len(means) - 1)]:
        low, high = interval(resampled_means[:, b] - resampled_means[:, a])
        differences.append({"value": float(means[b] - means[a]), "low": low, "high": high})
    return differences
