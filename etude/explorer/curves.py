"""Curves of the recipe's runs: which metrics are drawn, for one run or for several in the same axes."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import cycle

import numpy as np
from matplotlib.ticker import LogLocator, NullFormatter

from etude.explorer.page import COLOURS, axes, png
from etude.report.record import joined_lines, points_of, smoothed
from sims.recipe.watched import NAMES

__all__ = ["PANELS", "Panel", "drawn", "points", "rows"]

DASHES = ("-", "--", ":", "-.")
MARKS = ("o", "s", "^", "D", "v", "P")


AWAY = 900.0
"""An unfinished run that has written nothing for this many seconds is no longer watched."""


@dataclass(frozen=True, eq=False)
class Played:
    """What the page shows of a run; its files have been checked by now. Equal only to itself, so pictures can be cached by it: a run
    that has written since then is a new object."""

    name: str
    facts: list[str]
    """Seed and machine, in words."""
    stages: dict[str, str]
    """Progress of each stage, in words."""
    changes: list[tuple[str, str, str, str]]
    """Measure, before RL, after RL, difference."""
    successes: list[tuple[str, tuple, tuple]]
    """Measure of success, and (value, low, high) before and after RL."""
    series: dict[str, tuple[np.ndarray, np.ndarray]]
    """Points of every curve, by `curves.Panel` and key."""
    missing: list[str]
    """Unfinished stages."""
    touched: float
    """When the run last wrote, in seconds since 1970."""

    @property
    def going(self) -> bool:
        return bool(self.missing) and time.time() - self.touched < AWAY


@dataclass(frozen=True, eq=False)
class Panel:
    """One pair of axes."""

    name: str
    """Name of its files."""
    title: str
    """Title."""
    stages: tuple[str, ...]
    """Stages that train one after another; steps and tokens count on from stage to stage."""
    series: dict[str, str]
    """Curves: key in the metrics, and name in the legend."""
    unit: str
    """Label of the vertical axis."""
    words: str
    """Caption."""
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
            "Every step uses new prompts, so memorisation cannot raise this curve. Reward is success minus the penalties.",
        ),
        Panel(
            "success",
            "Held-out success",
            (),
            {},
            "share of tasks",
            "Hollow: before RL; filled: after RL. Whiskers are 95% bootstrap intervals over held-out tasks.",
        ),
    ),
    "RL: length, drift": (
        Panel(
            "length",
            "Tokens per rollout",
            ("rl",),
            {"tokens": "tokens"},
            "tokens",
            "The length penalty pulls it down; a crash towards zero would mean that the agent gives up.",
        ),
        Panel(
            "drift", "Distance from the policy before RL", ("rl",), {"kl": "k1"}, "nats per rollout", "A slow rise is learning, a jump is trouble."
        ),
    ),
    "RL: calls, entropy": (
        Panel(
            "calls",
            "Invalid calls",
            ("rl",),
            {"invalid_calls": "invalid calls"},
            "a rollout",
            "Calls that the environment could not parse. They cost reward and should not increase.",
        ),
        Panel(
            "entropy",
            "Entropy, estimated from samples",
            ("rl",),
            {"nll": "entropy"},
            "nats a token",
            "The policy's remaining uncertainty; near zero it no longer explores.",
        ),
    ),
    "RL: monitor": (
        Panel(
            "evidence",
            "Evidence of a change",
            ("rl",),
            {f"evidence_{name}": words for name, words in NAMES.items()} | {"alarm_at": "an alarm from here on"},
            "log of a bettor's wealth, nats",
            "Somebody bets that what rollouts do has changed since the first steps. In an unchanged run hardly one in a hundred ever gets this far.",
        ),
        *(
            Panel(
                f"watch-{name.replace('_', '-')}",
                f"{words[0].upper()}{words[1:]}",
                ("rl",),
                {f"watch_{name}": "mean of a step", f"low_{name}": "usual: from", f"high_{name}": "usual: to"},
                "share",
                "Its mean may lie between these lines before it counts as changed. Evidence past its threshold says that it has, not that it is bad.",
            )
            for name, words in NAMES.items()
        ),
    ),
    "Pretraining": (
        Panel(
            "loss",
            "Training loss",
            ("cpt", "long", "sft"),
            {"loss": "loss"},
            "nats a token",
            "Short context, long context, demonstrations. Each phase has its own data, so a jump between phases is normal.",
            "tokens",
        ),
        Panel(
            "perplexity",
            "Held-out codebase",
            ("cpt", "long", "sft"),
            {"codebase_ppl": "perplexity"},
            "perplexity per token",
            "On held-out code, while the network trains on code. Not measured during SFT, which trains on the agent's work only.",
            "tokens",
            True,
        ),
    ),
    "Drafts": (
        Panel(
            "draft-kl",
            "Distance of the draft heads from the main head",
            ("mtp", "long", "sft", "rl"),
            {f"kl_{depth}": words for depth, words in _AHEAD.items()},
            "KL, nats",
            "How far each draft layer is from the head that it imitates; first distilled, then trained jointly.",
        ),
        Panel(
            "draft-agreement",
            "Drafts that match",
            ("mtp", "long", "sft", "rl"),
            {f"agree_{depth}": words for depth, words in _AHEAD.items()},
            "share of positions",
            "How often a draft's first choice is also the main head's: the higher, the more drafts are accepted.",
        ),
    ),
}
"""Options of the radio button; most have two pictures, because a redraw waits for the drawing."""


def points(metrics: dict[str, list[dict]]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """x and y of every curve, by "panel/key"."""
    found = {}
    for panel in (panel for group in PANELS.values() for panel in group):
        for key in panel.series:
            own = {stage: [line for line in metrics.get(stage, []) if key in line] for stage in panel.stages}
            # Few lines have a perplexity, but all lines count tokens.
            lines, _ = joined_lines({stage: metrics.get(stage, []) if panel.x == "tokens" else own[stage] for stage in own}, *panel.stages)
            found[f"{panel.name}/{key}"] = points_of(lines, key, panel.x)
    return found


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
            xs, ys = run.series[f"{panel.name}/{key}"]
            found += [
                {"run": run.name, "curve": key, panel.x: x, "value": y, "smoothed": s}
                for x, y, s in zip(xs.tolist(), ys.tolist(), _smooth(panel, ys, smooth).tolist(), strict=True)
            ]
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
