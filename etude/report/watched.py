"""What the monitor saw during RL, from the metrics that it leaves (`recipe/small/monitoring.py`): a sentence, a table,
a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt

from etude.report.pictures import BLUE, RED, embedded
from etude.report.record import points_of
from recipe.small.monitored import NAMES

__all__ = ["alarm_in", "changes", "picture", "rows", "sentence"]


def alarm_in(lines: Sequence[Mapping[str, Any]], name: str) -> tuple[int, str] | None:
    """Step and direction of a statistic's alarm."""
    line = next((line for line in lines if line.get(f"alarm_{name}")), None)
    return None if line is None else (line["step"], "up" if line[f"alarm_{name}"] > 0 else "down")


def list_watched(lines: list[dict[str, Any]]) -> list[str]:
    """The statistics for which the metrics hold a band."""
    return [name for name in NAMES if any(f"high_{name}" in line for line in lines)]


def changes(lines: list[dict[str, Any]]) -> list[str]:
    """Each alarm in words, in order."""
    alarms = sorted(
        (step, name, way) for name in list_watched(lines) for step, way in filter(None, [alarm_in(lines, name)])
    )
    return [f"{NAMES[name]} ({'more' if way == 'up' else 'less'}, by step {step})" for step, name, way in alarms]


def sentence(lines: list[dict[str, Any]]) -> str:
    """What has changed; empty where nothing was watched."""
    if not list_watched(lines):
        return ""
    first = next(line["step"] for line in lines if "alarm_at" in line)
    alarm_words = changes(lines)
    return f"Watched from step {first} on. " + (
        f"Changed: {'; '.join(alarm_words)}." if alarm_words else "Nothing that is watched has changed."
    )


def rows(lines: list[dict[str, Any]]) -> list[list[str]]:
    """Statistic, its band, its mean over the last tenth of the steps, evidence of a change in nats, and the alarm."""
    table_rows = []
    for name in list_watched(lines):
        last = next(line for line in reversed(lines) if f"high_{name}" in line)
        low, high = last[f"low_{name}"], last[f"high_{name}"]
        usual = (
            f"at most {high:.2f}" if low == 0 else f"at least {low:.2f}" if high == 1 else f"{low:.2f} to {high:.2f}"
        )
        _, ys = points_of(lines, f"watch_{name}")
        mean = f"{ys[-max(1, len(lines) // 10) :].mean():.2f}" if len(ys) else "–"
        alarm = alarm_in(lines, name)
        words = f"{'more' if alarm[1] == 'up' else 'less'}, by step {alarm[0]}" if alarm else "–"
        table_rows.append(
            [NAMES[name], usual, mean, f"{last[f'evidence_{name}']:.1f} of {last['alarm_at']:.1f}", words]
        )
    return table_rows


def picture(lines: list[dict[str, Any]]) -> list[str]:
    """Every statistic along the steps, with its band, and a line where it has changed."""
    names = list_watched(lines)
    if not names:
        return []
    figure, axes = plt.subplots(
        -(-len(names) // 2), 2, figsize=(5.0, 1.25 * -(-len(names) // 2) + 0.4), layout="constrained", squeeze=False
    )
    for axis in axes.flat[len(names) :]:
        axis.set_visible(False)
    for axis, name in zip(axes.flat, names):
        xs, ys = points_of(lines, f"watch_{name}")
        axis.plot(xs, ys, color=BLUE, linewidth=1.0)
        band_steps, lows = points_of(lines, f"low_{name}")
        _, highs = points_of(lines, f"high_{name}")
        axis.fill_between(band_steps, lows, highs, color=BLUE, alpha=0.12, linewidth=0)
        if alarm := alarm_in(lines, name):
            axis.axvline(alarm[0], color=RED, linewidth=1.4)
        axis.set_title(NAMES[name], loc="left", fontsize=8)
        axis.set_ylim(-0.03, 1.03)
        axis.tick_params(labelsize=7)
        axis.spines[["top", "right"]].set_visible(False)
    words = (
        "Means over each step's groups. Shaded: where the mean may lie before it counts as changed, "
        "learnt from the first steps. "
        "A red line is an alarm. It says that something has changed, not that it is bad."
    )
    return [embedded(figure, "what was watched during RL", words)]
