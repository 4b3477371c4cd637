"""Curves of the recipe's runs: what is drawn over what, and for several runs in one pair of axes."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import cycle

import numpy as np
from matplotlib.ticker import LogLocator, NullFormatter

from etude.explorer.page import COLOURS, axes, png
from etude.report.record import joined_lines, points_of, smoothed

__all__ = ["PANELS", "Panel", "drawn", "points", "rows"]

DASHES = ("-", "--", ":", "-.")
MARKS = ("o", "s", "^", "D", "v", "P")


AWAY = 900.0
"""Seconds without a sign of life after which an unfinished run is no longer watched."""


@dataclass(frozen=True, eq=False)
class Played:
    """What the page shows of a run; whatever could be wrong with its files has come to light by now. Equal only to itself, so that
    pictures can be cached by it: a run that has written since is another one."""

    name: str
    facts: list[str]
    """Seed and machine, in words."""
    stages: dict[str, str]
    """Of each stage how far it is, in words."""
    changes: list[tuple[str, str, str, str]]
    """Measure, before RL, after RL, difference."""
    successes: list[tuple[str, tuple, tuple]]
    """Measure of success, and (value, low, high) before and after RL."""
    series: dict[str, tuple[np.ndarray, np.ndarray]]
    """Points of every curve, by `curves.Panel` and key."""
    missing: list[str]
    """Stages that are not finished."""
    touched: float
    """When the run last wrote, seconds since 1970."""

    @property
    def going(self) -> bool:
        return bool(self.missing) and time.time() - self.touched < AWAY


@dataclass(frozen=True, eq=False)
class Panel:
    """One pair of axes."""

    name: str
    """Name of its files."""
    title: str
    """What stands above it."""
    stages: tuple[str, ...]
    """Stages that train one after another; steps and tokens are counted through."""
    series: dict[str, str]
    """Curves: key in the metrics, and what the legend calls it."""
    unit: str
    """Of the vertical axis."""
    words: str
    """What to see."""
    x: str = "step"
    log: bool = False


_AHEAD = {1: "one ahead", 2: "two", 3: "three"}
PANELS: dict[str, tuple[Panel, ...]] = {
    "RL: reward": (
        Panel(
            "reward",
            "Reward and success",
            ("rl",),
            {"success": "success", "reward": "reward"},
            "mean over the batch",
            "Every step plays prompts never seen before: this cannot rise by memory. Reward lies below success by the penalties.",
        ),
        Panel(
            "success",
            "Held-out success",
            (),
            {},
            "share of tasks",
            "Hollow: before RL; filled: after it. Whiskers are 95% bootstrap intervals over held-out tasks.",
        ),
    ),
    "RL: length, drift": (
        Panel(
            "length",
            "Tokens of a rollout",
            ("rl",),
            {"tokens": "tokens"},
            "tokens",
            "The length penalty pulls it down; a crash towards zero would mean that the agent gives up.",
        ),
        Panel("drift", "Distance from where RL began", ("rl",), {"kl": "k1"}, "nats a rollout", "A slow rise is learning, a jump is trouble."),
    ),
    "RL: calls, entropy": (
        Panel(
            "calls",
            "Invalid calls",
            ("rl",),
            {"invalid_calls": "invalid calls"},
            "a rollout",
            "Calls that the world could not follow. They cost reward and should not grow.",
        ),
        Panel(
            "entropy",
            "Entropy, by samples",
            ("rl",),
            {"nll": "entropy"},
            "nats a token",
            "What is left of the policy's uncertainty; near zero it no longer explores.",
        ),
    ),
    "Pretraining": (
        Panel(
            "loss",
            "Training loss",
            ("cpt", "long", "sft"),
            {"loss": "loss"},
            "nats a token",
            "Short context, long context, demonstrations. Each has data of its own, so a jump between them is no fault.",
            "tokens",
        ),
        Panel(
            "perplexity",
            "Held-out codebase",
            ("cpt", "long", "sft"),
            {"codebase_ppl": "perplexity"},
            "perplexity a token",
            "On code that training never saw, while it reads code; SFT, on the agent's work only, is not measured here.",
            "tokens",
            True,
        ),
    ),
    "Drafts": (
        Panel(
            "draft-kl",
            "Draft heads' distance from the main head",
            ("mtp", "long", "sft", "rl"),
            {f"kl_{depth}": words for depth, words in _AHEAD.items()},
            "KL, nats",
            "How far each draft layer is from what it imitates; distilled first, then trained along.",
        ),
        Panel(
            "draft-agreement",
            "Drafts that match",
            ("mtp", "long", "sft", "rl"),
            {f"agree_{depth}": words for depth, words in _AHEAD.items()},
            "share of positions",
            "How often a draft's first choice is the main head's: the higher, the more drafts stand.",
        ),
    ),
}
"""What the radio button offers; two pictures each, because drawing is what a redraw waits for."""


def points(metrics: dict[str, list[dict]]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """x and y of every curve, by "panel/key"."""
    found = {}
    for panel in (panel for group in PANELS.values() for panel in group):
        for key in panel.series:
            own = {stage: [line for line in metrics.get(stage, []) if key in line] for stage in panel.stages}
            # Perplexity is on few lines: the others still count the tokens.
            lines, _ = joined_lines({stage: metrics.get(stage, []) if panel.x == "tokens" else own[stage] for stage in own}, *panel.stages)
            found[f"{panel.name}/{key}"] = points_of(lines, key, panel.x)
    return found


def rows(panel: Panel, runs: Sequence[Played], smooth: int) -> list[dict]:
    """The numbers that are drawn, one point a row."""
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
            xs, ys = run.series[f"{panel.name}/{key}"]
            found += [
                {"run": run.name, "curve": key, panel.x: x, "value": y, "smoothed": s}
                for x, y, s in zip(xs.tolist(), ys.tolist(), _smooth(panel, ys, smooth).tolist(), strict=True)
            ]
    return found


def _smooth(panel: Panel, ys: np.ndarray, width: int) -> np.ndarray:
    return ys if panel.log else smoothed(ys, width)  # few points, measured on thousands of tokens each


def legible(name: str) -> str:
    """A run's name as a legend shows it: dollars are no formula, and a leading underscore does not hide the entry."""
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
        for place, ((key, words), dash) in enumerate(zip(panel.series.items(), DASHES)):
            xs, ys = run.series[f"{panel.name}/{key}"]
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
        ax.legend(frameon=False, fontsize=8, handlelength=3.5)  # so long that dashes are seen beside a marker


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
