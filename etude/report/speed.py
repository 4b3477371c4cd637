"""What the steps of a full run took and reached (`scaled/runtime/step_times.py`): a table and a picture."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from etude.report.pictures import BLUE, GREEN, ORANGE, PURPLE, RED, SKY, embedded, make_axes
from etude.report.record import STAGES
from kit.disk import read_lines

__all__ = ["HEADER", "picture", "read_speed", "rows"]

HEADER = ["", "steps", "s/step", "sampling", "waiting", "training", "tokens/s a rank", "MFU", "memory, peak"]
COLOURS = {"sample": SKY, "wait": RED, "train": BLUE, "update": GREEN, "look": PURPLE, "save": ORANGE}
"""Part of a step → its colour."""
NAMES = {"sample": "sampling", "wait": "waiting", "train": "training", "look": "perplexity", "save": "checkpoint"}


def read_speed(root: Path) -> dict[str, list[dict[str, Any]]]:
    """Stage → its lines with a step and numbers, from a run's folder."""
    lines_by_stage = {}
    order = dict(zip(STAGES, range(len(STAGES)), strict=True))
    for path in sorted((root / "speed").glob("*.jsonl"), key=lambda path: (order.get(path.stem, -1), path.stem)):
        lines = [line for line in read_lines(path) if all(_is_number(line.get(key)) for key in ("seconds", *COLOURS))]
        if lines:
            lines_by_stage[path.stem] = lines
    return lines_by_stage


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")


def middle(lines: Sequence[Mapping[str, Any]], key: str) -> float | None:
    """The median over the steps, without the first if there are others: it compiles and allocates."""
    values = [line[key] for line in lines[len(lines) > 1 :] if _is_number(line.get(key))]
    return statistics.median(values) if values else None


def rows(lines_by_stage: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[list[str]]:
    """One row for each stage: medians over its steps."""
    table_rows = []
    for stage, lines in lines_by_stage.items():
        seconds = middle(lines, "seconds") or 0.0
        parts = [middle(lines, key) or 0.0 for key in ("sample", "wait", "train")]
        shares = [f"{part / seconds:.0%}" if seconds and part else "–" for part in parts]
        tokens, mfu = middle(lines, "tokens_per_second"), middle(lines, "mfu")
        peaks = [line["peak"] for line in lines if _is_number(line.get("peak"))]
        table_rows.append(
            [
                stage,
                f"{len(lines):,}",
                f"{seconds:.3g}",
                *shares,
                "–" if tokens is None else f"{tokens:,.0f}",
                "–" if mfu is None else f"{mfu:.1%}",
                f"{max(peaks) / 1e9:.2f} GB" if peaks else "–",
            ]
        )
    return table_rows


def picture(lines_by_stage: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """The parts of a middle step, a bar for each stage."""
    if not lines_by_stage:
        return []
    stages = [*lines_by_stage]
    figure, axes = make_axes("Where a step's time goes", "seconds", "", (5.0, 1.2 + 0.36 * len(stages)))
    axes.grid(False)
    lefts = [0.0] * len(stages)
    for key, colour in COLOURS.items():
        widths = [middle(lines_by_stage[stage], key) or 0.0 for stage in stages]
        if any(widths):
            axes.barh(stages, widths, left=lefts, color=colour, label=NAMES.get(key, key))
            lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
    axes.invert_yaxis()
    axes.legend(frameon=False, fontsize=8, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.3))
    words = (
        "Medians over the steps, means over the ranks. Waiting: ranks that have sampled, for those that have not. "
        "Seconds without a part are neither."
    )
    return [embedded(figure, "seconds of a step by part", words)]
