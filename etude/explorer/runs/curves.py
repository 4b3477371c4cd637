"""Curves of training runs: their points, and the drawings of one run or of several in the same axes."""

import math
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from etude.explorer.charts import chart as charts
from etude.explorer.charts.chart import Axis, Look
from etude.explorer.drawing import COLOURS, Drawing
from etude.explorer.runs.kinds import RunData
from etude.explorer.runs.panels import PANELS, Panel
from etude.report.record import joined_lines, points_of, smoothed

__all__ = ["draw_panel", "has", "label", "metric_drawn", "metric_rows", "metrics_of", "parts_of", "points", "rows"]

_COLOURS = tuple(COLOURS)
DASHES = ("-", "--", ":", "-.")
MARKS = ("o", "s", "^", "D", "v")


@lru_cache(64)
def points(run: RunData) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """x and y of every curve, by "panel/key"."""
    metrics = run.metrics | {"rl": [_rename_metrics(line) for line in run.metrics.get("rl", [])]}
    curve_points = {}
    for panel in (panel for group in PANELS.values() for panel in group):
        for key in panel.series:
            stage_lines = {stage: [line for line in metrics.get(stage, []) if key in line] for stage in panel.stages}
            # Few lines have a perplexity, but all lines count tokens.
            lines, _ = joined_lines(
                {stage: metrics.get(stage, []) if panel.x == "tokens" else stage_lines[stage] for stage in stage_lines},
                *panel.stages,
            )
            curve_points[f"{panel.name}/{key}"] = points_of(lines, key, panel.x)
    return curve_points


def _rename_metrics(line: dict) -> dict:
    """A step of RL under the names of the small recipe: training on ranks logs tokens of rollouts as "written", the
    tokens of the run as "tokens", and k1 as "drift"."""
    tokens = {"tokens": line["written"]} if "written" in line else {}
    return {**line, **tokens, **({"kl": line["drift"]} if "drift" in line else {})}


def has(run: RunData, group: str) -> bool:
    """Whether a run has anything to draw for one of `PANELS`."""
    curve_points = points(run)
    return any(len(curve_points[f"{panel.name}/{key}"][0]) for panel in PANELS[group] for key in panel.series)


def rows(panel: Panel, runs: Sequence[RunData], smooth: int) -> list[dict]:
    """The numbers that are drawn, one point per row."""
    if not panel.series:
        parts = ("value", "low", "high")
        return [
            {"run": run.name, "measure": name, "when": phase, **dict(zip(parts, triple, strict=True))}
            for run in runs
            for name, *pair in run.successes
            for phase, triple in zip(("before RL", "after RL"), pair, strict=True)
        ]
    point_rows = []
    for run in runs:
        for key in panel.series:
            xs, ys = points(run)[f"{panel.name}/{key}"]
            point_rows += [
                {"run": run.name, "curve": key, panel.x: x, "value": y, "smoothed": s}
                for x, y, s in zip(xs.tolist(), ys.tolist(), _smooth_values(panel, ys, smooth).tolist(), strict=True)
            ]
    return point_rows


def metrics_of(runs: Sequence[RunData]) -> list[str]:
    """Names of all metrics that any of these runs logged, those that most of its stages have first."""
    count: Counter[str] = Counter()
    for run in runs:
        for lines in run.metrics.values():
            count.update(
                {
                    key
                    for line in lines
                    for key, value in line.items()
                    if key != "step" and isinstance(value, int | float)
                }
            )
    return [name for name, _ in sorted(count.items(), key=lambda entry: (-entry[1], entry[0]))]


def parts_of(runs: Sequence[RunData], metric: str) -> list[str]:
    """The stages, or arms of an experiment, in which a metric was logged."""
    return list(
        dict.fromkeys(
            part for run in runs for part, lines in run.metrics.items() if any(metric in line for line in lines)
        )
    )


def metric_rows(metric: str, parts: Sequence[str], runs: Sequence[RunData], smooth: int) -> list[dict]:
    """A metric as it was logged, one point per row."""
    point_rows = []
    for run in runs:
        for part in parts:
            xs, ys = points_of(run.metrics.get(part, []), metric)
            for x, y, s in zip(xs.tolist(), ys.tolist(), smoothed(ys, _limit_window(ys, smooth)).tolist(), strict=True):
                point_rows.append({"run": run.name, "part": part, "step": x, "value": y, "smoothed": s})
    return point_rows


def _smooth_values(panel: Panel, ys: np.ndarray, width: int) -> np.ndarray:
    # few points, each measured on thousands of tokens
    return ys if panel.log else smoothed(ys, _limit_window(ys, width))


def _limit_window(ys: np.ndarray, width: int) -> int:
    """A run that has just begun has few points, and their mean is no curve."""
    return min(width, max(1, len(ys) // 2))


def label(run: RunData, several: bool = True) -> str:
    """A run's name where several are shown: with its seed and commit."""
    commit = str(run.machine.get("commit") or "")
    details = [f"seed {run.settings['seed']}"] if "seed" in run.settings else []
    details += [commit[:7] + "+changes" * commit.endswith("+changes")] if commit else []
    return f"{run.name} ({', '.join(details)})" if several and details else run.name


@lru_cache(128)
def draw_panel(panel: Panel, smooth: int, runs: tuple[RunData, ...]) -> Drawing:
    """The drawing of a panel: colours tell runs apart and dashes their curves, or colours the curves of a single
    run."""
    if not panel.series:
        return _draw_successes(panel, runs)
    is_comparison, looks, point_rows = len(runs) > 1, {}, []
    for number, run in enumerate(runs):
        for place, (key, words) in enumerate(panel.series.items()):
            series = ", ".join(
                [label(run), words]
                if is_comparison and len(panel.series) > 1
                else [label(run) if is_comparison else words]
            )
            looks[series] = Look(
                _COLOURS[(number if is_comparison else place) % len(_COLOURS)],
                DASHES[place % len(DASHES)],
                MARKS[number % len(MARKS)],
            )
            xs, ys = points(run)[f"{panel.name}/{key}"]
            point_rows += _make_curve_rows(series, panel.x, xs, ys, _smooth_values(panel, ys, smooth))
    axis = Axis(
        panel.unit,
        log=panel.log and charts.powers(row["value"] for row in point_rows if row["value"] is not None),
        zero=False,
    )
    return _draw_lines(
        panel.x, axis, point_rows, looks, raw=not is_comparison and not panel.log and smooth > 1, marks=panel.log
    )


@lru_cache(64)
def metric_drawn(metric: str, parts: tuple[str, ...], smooth: int, runs: tuple[RunData, ...]) -> Drawing:
    """The drawing of one metric in some stages or arms."""
    point_rows = []
    for run in runs:
        for part in parts:
            xs, ys = points_of(run.metrics.get(part, []), metric)
            point_rows += _make_curve_rows(
                f"{label(run)}, {part}" if len(runs) > 1 else part,
                "step",
                xs,
                ys,
                smoothed(ys, _limit_window(ys, smooth)),
            )
    return _draw_lines("step", Axis(metric, zero=False), point_rows, {}, raw=False, marks=False)


def _make_curve_rows(series: str, x: str, xs: np.ndarray, ys: np.ndarray, smooth: np.ndarray) -> list[dict]:
    """Points of a curve; what is no number interrupts its line."""
    return [
        {
            "curve": series,
            x: x_value,
            "value": y if math.isfinite(y) else None,
            "smoothed": s if math.isfinite(s) else None,
        }
        for x_value, y, s in zip(xs.tolist(), ys.tolist(), smooth.tolist(), strict=True)
    ]


def _draw_lines(x: str, y: Axis, point_rows: list[dict], looks: dict[str, Look], raw: bool, marks: bool) -> Drawing:
    """`raw`: unsmoothed values stand behind as thin lines. A curve of one or two points has marks."""
    short_curves = {series for series, n in Counter(row["curve"] for row in point_rows).items() if marks or n < 3}
    raw_layers = [charts.lines(point_rows, x, "value", "curve", thin=True)] if raw else []
    mark_layer = charts.points(
        [row for row in point_rows if row["curve"] in short_curves], x, "smoothed", "curve", tell=("value",)
    )
    return charts.drawing(
        Axis(x, zero=True),
        y,
        *raw_layers,
        charts.lines(point_rows, x, "smoothed", "curve", tell=("value",)),
        mark_layer,
        looks=looks,
    )


def _draw_successes(panel: Panel, runs: Sequence[RunData]) -> Drawing:
    """From before RL to after it: a line for each measure, and the intervals at its ends."""
    is_comparison = len(runs) > 1
    success_rows = [
        {**row, "curve": label(run) if is_comparison else row["measure"]}
        for run in runs
        for row in rows(panel, [run], 1)
    ]
    return charts.drawing(
        Axis("", names=True),
        Axis(panel.unit, lower=0.0, upper=1.0),
        charts.ranges(success_rows, "when", "low", "high", "curve", tell=("measure",)),
        charts.lines(success_rows, "when", "value", "curve", split="measure", tell=("measure",)),
        charts.points(success_rows, "when", "value", "curve", tell=("measure", "low", "high")),
    )
