"""Straight lines through whole trainings, and what chance can do to them.

A training is one point (or one curve) among few, and the trainings differ in budget and seed. Its coordinates were themselves
measured on tasks, the same for all trainings. Every interval here is of 95% and comes from drawing trainings with replacement,
until at least three budgets are among them (fewer decide no line), and, where tasks carry the measurement, tasks in each draw.
"""

import itertools
from collections.abc import Sequence

import numpy as np

__all__ = ["curvature", "draw", "falls", "line", "loss_of", "orders", "predicts"]


def line(x: np.ndarray, y: np.ndarray) -> tuple[float, float, float]:
    """(slope, intercept, correlation) of least squares; slope and correlation are 0 where x or y is constant."""
    dx, dy = x - x.mean(), y - y.mean()
    xx, xy, yy = float(dx @ dx), float(dx @ dy), float(dy @ dy)
    slope = xy / xx if xx else 0.0
    return slope, float(y.mean() - slope * x.mean()), xy / (xx * yy) ** 0.5 if xx * yy else 0.0


def curvature(x: np.ndarray, y: np.ndarray) -> float:
    """Coefficient of the square in the parabola through the points: where y falls, above 0 says that it falls ever slower."""
    return float(np.polyfit(x - x.mean(), y, 2)[0])


def draw(rng: np.random.Generator, budgets: np.ndarray) -> np.ndarray:
    """Indices of trainings drawn with replacement, three budgets or more among them."""
    while True:
        some = rng.integers(0, len(budgets), len(budgets))
        if len(np.unique(budgets[some])) >= 3:
            return some


def interval(values: Sequence[float]) -> list[float]:
    return [float(v) for v in np.quantile(values, [0.025, 0.975])]


def loss_of(nll: np.ndarray) -> np.ndarray:
    """Nats a token of every training from [trainings, tasks, (nats, tokens)]: every token weighs the same."""
    total = nll.sum(1)
    return total[:, 0] / total[:, 1]


def predicts(budgets: np.ndarray, nll: np.ndarray, outcome: np.ndarray, n: int, seed: int) -> dict:
    """Does the loss of a training foretell its outcome?

    budgets [R]; nll [R, tasks, (nats, tokens)]; outcome [R, S], whose mean over S tasks (or steps) is foretold. Slope and
    correlation; `over_runs` draws trainings, `nested` tasks and steps as well. `inside`: slope and correlation once every
    training has lost the mean of its budget, that is what the loss knows beyond the budget."""
    x, y = loss_of(nll), outcome.mean(1)
    slope, intercept, r = line(x, y)
    rng, over_runs, nested = np.random.default_rng(seed), [], []
    for _ in range(n):
        some = draw(rng, budgets)
        over_runs.append(line(x[some], y[some])[0])
        tasks, steps = (rng.integers(0, values.shape[1], values.shape[1]) for values in (nll, outcome))
        nested.append(line(loss_of(nll[:, tasks])[some], outcome[:, steps].mean(1)[some])[::2])
    same = (budgets[:, None] == budgets).astype(float)
    inside = line(*(values - same @ values / same.sum(1) for values in (x, y)))
    return {
        "slope": slope, "intercept": intercept, "r": r, "slope_over_runs": interval(over_runs),
        "slope_nested": interval([s for s, _ in nested]), "r_nested": interval([c for _, c in nested]),
        "inside_slope": inside[0], "inside_r": inside[2],
    }  # fmt: skip


def falls(budgets: np.ndarray, tokens: Sequence[np.ndarray], loss: Sequence[np.ndarray], n: int, seed: int) -> dict:
    """Loss as a line in the natural logarithm of the tokens, over trainings that give a point or a curve each: slope in nats
    per factor e, R², the curvature that a line leaves out, and beside them the R² of a power law, log loss in log tokens."""

    def fit(some: Sequence[int]) -> tuple[float, float, float, float, float]:
        x, y = np.log(np.concatenate([tokens[i] for i in some])), np.concatenate([loss[i] for i in some])
        slope, intercept, r = line(x, y)
        return slope, intercept, r * r, curvature(x, y), line(x, np.log(y))[2] ** 2

    slope, intercept, r2, bend, power = fit(range(len(budgets)))
    rng = np.random.default_rng(seed)
    drawn = [fit(draw(rng, budgets)) for _ in range(n)]
    return {
        "slope": slope, "intercept": intercept, "r2": r2, "curvature": bend, "r2_power_law": power,
        "slope_over_runs": interval([d[0] for d in drawn]), "curvature_over_runs": interval([d[3] for d in drawn]),
    }  # fmt: skip


def orders(outcome: np.ndarray, n: int, seed: int) -> list[dict]:
    """What each budget adds to the one before it, from [budgets, seeds, tasks], and last what the largest adds to the smallest:
    {value, low, high}. Seeds are drawn and, nested, tasks; paired, for all budgets of a seed share it and all play the same
    tasks."""
    rng, drawn = np.random.default_rng(seed), []
    for _ in range(n):
        seeds, tasks = (rng.integers(0, size, size) for size in outcome.shape[1:])
        drawn.append(outcome[:, seeds][:, :, tasks].mean((1, 2)))
    means, many, found = outcome.mean((1, 2)), np.array(drawn), []
    for a, b in [*itertools.pairwise(range(len(means))), (0, len(means) - 1)]:
        low, high = interval(many[:, b] - many[:, a])
        found.append({"value": float(means[b] - means[a]), "low": low, "high": high})
    return found
