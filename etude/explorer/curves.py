"""Curves of the recipe's runs: which metrics are drawn, for one run or for several in the same axes."""

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from itertools import cycle

import numpy as np
from matplotlib.ticker import LogLocator, NullFormatter

from etude.explorer.page import COLOURS, axes, png
from etude.explorer.panels import PANELS, Panel
from etude.explorer.run_kinds import Played
from etude.report.record import joined_lines, points_of, smoothed

__all__ = ["drawn", "has", "legible", "metric_drawn", "metric_rows", "metrics_of", "parts_of", "points", "rows"]

DASHES = ("-", "--", ":", "-.")
MARKS = ("o", "s", "^", "D", "v", "P")


@lru_cache(64)
def points(run: Played) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """x and y of every curve, by "panel/key"."""
    metrics = run.metrics | {"rl": [_alike(line) for line in run.metrics.get("rl", [])]}
    found = {}
    for panel in (panel for group in PANELS.values() for panel in group):
        for key in panel.series:
            own = {stage: [line for line in metrics.get(stage, []) if key in line] for stage in panel.stages}
            # Few lines have a perplexity, but all lines count tokens.
            lines, _ = joined_lines({stage: metrics.get(stage, []) if panel.x == "tokens" else own[stage] for stage in own}, *panel.stages)
            found[f"{panel.name}/{key}"] = points_of(lines, key, panel.x)
    return found


def _alike(line: dict) -> dict:
    """A step of RL under the names of the small recipe: training on ranks logs tokens of rollouts as "written", the tokens of the run as "tokens",
    and k1 as "drift"."""
    tokens = {"tokens": line["written"]} if "written" in line else {}
    return {**line, **tokens, **({"kl": line["drift"]} if "drift" in line else {})}


def has(run: Played, group: str) -> bool:
    """Whether a run has anything to draw for one of `PANELS`."""
    known = points(run)
    return any(len(known[f"{panel.name}/{key}"][0]) for panel in PANELS[group] for key in panel.series)


def rows(panel: Panel, runs: Sequence[Played], smooth: int) -> list[dict]:
    """The numbers that are drawn, one point per row."""
    if not panel.series:
        parts = ("value", "low", "high")
        return [
            {"run": run.name, "measure": name, "when": when, **dict(zip(parts, triple, strict=True))}
            for run in runs
            for name, *pair in run.successes
            for when, triple in zip(("before RL", "after RL"), pair, strict=True)
        ]
    found = []
    for run in runs:
        for key in panel.series:
            xs, ys = points(run)[f"{panel.name}/{key}"]
            found += [
                {"run": run.name, "curve": key, panel.x: x, "value": y, "smoothed": s}
                for x, y, s in zip(xs.tolist(), ys.tolist(), _smooth(panel, ys, smooth).tolist(), strict=True)
            ]
    return found


def metrics_of(runs: Sequence[Played]) -> list[str]:
    """Names of all metrics that any of these runs logged, those that most of its stages have first."""
    count: Counter[str] = Counter()
    for run in runs:
        for lines in run.metrics.values():
            count.update({key for line in lines for key, value in line.items() if key != "step" and isinstance(value, int | float)})
    return [name for name, _ in sorted(count.items(), key=lambda one: (-one[1], one[0]))]


def parts_of(runs: Sequence[Played], metric: str) -> list[str]:
    """The stages, or arms of an experiment, in which a metric was logged."""
    return list(dict.fromkeys(part for run in runs for part, lines in run.metrics.items() if any(metric in line for line in lines)))


def metric_rows(metric: str, parts: Sequence[str], runs: Sequence[Played], smooth: int) -> list[dict]:
    """A metric as it was logged, one point per row."""
    found = []
    for run in runs:
        for part in parts:
            xs, ys = points_of(run.metrics.get(part, []), metric)
            for x, y, s in zip(xs.tolist(), ys.tolist(), smoothed(ys, smooth).tolist(), strict=True):
                found.append({"run": run.name, "part": part, "step": x, "value": y, "smoothed": s})
    return found


def _smooth(panel: Panel, ys: np.ndarray, width: int) -> np.ndarray:
    return ys if panel.log else smoothed(ys, width)  # few points, each measured on thousands of tokens


def legible(name: str) -> str:
    """A run's name for the legend: dollar signs do not start a formula, and a leading underscore does not hide the entry."""
    return ("\u200b" if name.startswith("_") else "") + name.replace("$", r"\$")


@lru_cache(128)
def drawn(panel: Panel, smooth: int, runs: tuple[Played, ...]) -> bytes:
    """The picture of a panel."""
    fig, ax = axes(panel.x if panel.series else "", panel.unit, 4.4, 3.1, fixed=True)
    ax.set_title(panel.title, loc="left", fontsize=11)
    if panel.series:
        _curves(ax, panel, runs, smooth)
    else:
        _successes(ax, runs)
    return png(fig)


def _curves(ax, panel: Panel, runs: Sequence[Played], smooth: int) -> None:
    several = len(runs) > 1
    colours = tuple(COLOURS.values())
    for number, (run, mark) in enumerate(zip(runs, cycle(MARKS))):
        for place, ((key, words), dash) in enumerate(zip(panel.series.items(), cycle(DASHES))):
            xs, ys = points(run)[f"{panel.name}/{key}"]
            if not len(xs):
                continue
            colour = colours[(number if several else place) % len(colours)]
            label = legible(f"{run.name}, {words}" if len(panel.series) > 1 else run.name) if several else words
            if not several and not panel.log and smooth > 1:
                ax.plot(xs, ys, color=colour, alpha=0.25, linewidth=0.8)
            few = {"marker": mark, "markersize": 5, "markevery": max(1, len(xs) // 8)} if several or panel.log or len(xs) < 3 else {}
            ax.plot(xs, _smooth(panel, ys, smooth), dash, color=colour, linewidth=1.8, label=label, **few)
    if panel.log:
        ax.set_yscale("log")
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        ax.yaxis.set_minor_formatter(NullFormatter())
    if panel.x == "tokens":
        ax.xaxis.set_major_formatter(lambda value, _: f"{value / 1e6:g} M" if value >= 1e6 else f"{value / 1e3:g} k" if value else "0")
    if several or len(panel.series) > 1:
        ax.legend(frameon=False, fontsize=8, handlelength=3.5)  # long enough to show the dashes next to a marker


def _successes(ax, runs: Sequence[Played]) -> None:
    colours = tuple(COLOURS.values())
    names = list(dict.fromkeys(name for run in runs for name, *_ in run.successes))
    for number, (run, mark) in enumerate(zip(runs, cycle(MARKS))):
        for name, *pair in run.successes:
            for side, (value, low, high) in enumerate(pair):
                x = names.index(name) + (number - (len(runs) - 1) / 2) * 0.24 + (0.05 if side else -0.05)
                colour = colours[number % len(colours)]
                ax.errorbar(
                    x,
                    value,
                    [[max(value - low, 0)], [max(high - value, 0)]],
                    fmt=mark,
                    color=colour,
                    markersize=7,
                    capsize=2,
                    markerfacecolor=colour if side else "white",
                    label=legible(run.name) if side and name == names[0] else None,
                )
    ax.set_xticks(range(len(names)), names)
    ax.set_xlim(-0.6, len(names) - 0.4)
    ax.set_ylim(0, 1.05)
    if len(runs) > 1:
        ax.legend(frameon=False, fontsize=8, loc="lower right")


@lru_cache(64)
def metric_drawn(metric: str, parts: tuple[str, ...], smooth: int, runs: tuple[Played, ...]) -> bytes:
    """The picture of one metric in some stages or arms."""
    fig, ax = axes("step", metric, 8.4, 3.4, fixed=True)
    colours = tuple(COLOURS.values())
    drawn_ones = [(run, part) for run in runs for part in parts if any(metric in line for line in run.metrics.get(part, []))]
    for number, (run, part) in enumerate(drawn_ones):
        xs, ys = points_of(run.metrics[part], metric)
        label = legible(f"{run.name}, {part}" if len(runs) > 1 else part)
        ax.plot(
            xs, smoothed(ys, smooth), DASHES[number // len(colours) % len(DASHES)], color=colours[number % len(colours)], linewidth=1.6, label=label
        )
    if drawn_ones:
        ax.legend(frameon=False, fontsize=8, handlelength=3.5)
    return png(fig)
