"""Curves of training runs: their points, and the drawings of one run or of several in the same axes."""

import math
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from etude.explorer import charts
from etude.explorer.charts import Axis, Look
from etude.explorer.drawing import COLOURS, Drawing
from etude.explorer.panels import PANELS, Panel
from etude.explorer.run_kinds import Played
from etude.report.record import joined_lines, points_of, smoothed

__all__ = ["drawn", "has", "label", "metric_drawn", "metric_rows", "metrics_of", "parts_of", "points", "rows"]

_COLOURS = tuple(COLOURS)
DASHES = ("-", "--", ":", "-.")
MARKS = ("o", "s", "^", "D", "v")


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
            for x, y, s in zip(xs.tolist(), ys.tolist(), smoothed(ys, _window(ys, smooth)).tolist(), strict=True):
                found.append({"run": run.name, "part": part, "step": x, "value": y, "smoothed": s})
    return found


def _smooth(panel: Panel, ys: np.ndarray, width: int) -> np.ndarray:
    return ys if panel.log else smoothed(ys, _window(ys, width))  # few points, each measured on thousands of tokens


def _window(ys: np.ndarray, width: int) -> int:
    """A run that has just begun has few points, and their mean is no curve."""
    return min(width, max(1, len(ys) // 2))


def label(run: Played, several: bool = True) -> str:
    """A run's name where several are shown: with its seed and commit."""
    commit = str(run.machine.get("commit") or "")
    more = [f"seed {run.settings['seed']}"] if "seed" in run.settings else []
    more += [commit[:7] + "+changes" * commit.endswith("+changes")] if commit else []
    return f"{run.name} ({', '.join(more)})" if several and more else run.name


@lru_cache(128)
def drawn(panel: Panel, smooth: int, runs: tuple[Played, ...]) -> Drawing:
    """The drawing of a panel: colours tell runs apart and dashes their curves, or colours the curves of a single run."""
    if not panel.series:
        return _successes(panel, runs)
    several, looks, shown = len(runs) > 1, {}, []
    for number, run in enumerate(runs):
        for place, (key, words) in enumerate(panel.series.items()):
            series = ", ".join([label(run), words] if several and len(panel.series) > 1 else [label(run) if several else words])
            looks[series] = Look(_COLOURS[(number if several else place) % len(_COLOURS)], DASHES[place % len(DASHES)], MARKS[number % len(MARKS)])
            xs, ys = points(run)[f"{panel.name}/{key}"]
            shown += _numbered(series, panel.x, xs, ys, _smooth(panel, ys, smooth))
    axis = Axis(panel.unit, log=panel.log and charts.powers(row["value"] for row in shown if row["value"] is not None), zero=False)
    return _lines(panel.x, axis, shown, looks, raw=not several and not panel.log and smooth > 1, marks=panel.log)


@lru_cache(64)
def metric_drawn(metric: str, parts: tuple[str, ...], smooth: int, runs: tuple[Played, ...]) -> Drawing:
    """The drawing of one metric in some stages or arms."""
    shown = []
    for run in runs:
        for part in parts:
            xs, ys = points_of(run.metrics.get(part, []), metric)
            shown += _numbered(f"{label(run)}, {part}" if len(runs) > 1 else part, "step", xs, ys, smoothed(ys, _window(ys, smooth)))
    return _lines("step", Axis(metric, zero=False), shown, {}, raw=False, marks=False)


def _numbered(series: str, x: str, xs: np.ndarray, ys: np.ndarray, smooth: np.ndarray) -> list[dict]:
    """Points of a curve; what is no number interrupts its line."""
    return [
        {"curve": series, x: at, "value": y if math.isfinite(y) else None, "smoothed": s if math.isfinite(s) else None}
        for at, y, s in zip(xs.tolist(), ys.tolist(), smooth.tolist(), strict=True)
    ]


def _lines(x: str, y: Axis, shown: list[dict], looks: dict[str, Look], raw: bool, marks: bool) -> Drawing:
    """`raw`: unsmoothed values stand behind as thin lines. A curve of one or two points has marks."""
    few = {series for series, n in Counter(row["curve"] for row in shown).items() if marks or n < 3}
    behind = [charts.lines(shown, x, "value", "curve", thin=True)] if raw else []
    marked = charts.points([row for row in shown if row["curve"] in few], x, "smoothed", "curve", tell=("value",))
    return charts.drawing(Axis(x, zero=True), y, *behind, charts.lines(shown, x, "smoothed", "curve", tell=("value",)), marked, looks=looks)


def _successes(panel: Panel, runs: Sequence[Played]) -> Drawing:
    """From before RL to after it: a line for each measure, and the intervals at its ends."""
    several = len(runs) > 1
    shown = [{**row, "curve": label(run) if several else row["measure"]} for run in runs for row in rows(panel, [run], 1)]
    return charts.drawing(
        Axis("", names=True),
        Axis(panel.unit, least=0.0, most=1.0),
        charts.ranges(shown, "when", "low", "high", "curve", tell=("measure",)),
        charts.lines(shown, "when", "value", "curve", split="measure", tell=("measure",)),
        charts.points(shown, "when", "value", "curve", tell=("measure", "low", "high")),
    )
