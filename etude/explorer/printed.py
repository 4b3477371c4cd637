"""A drawing as a PNG file, by matplotlib: what a chart's download is. Nothing waits for it but the download."""

import io
from itertools import groupby
from typing import Any

from matplotlib.figure import Figure

from etude.explorer.drawing import Drawing, Layer, Look

__all__ = ["png"]

WIDTH, DPI = 6.4, 144
"""Inches, and dots of an inch."""


def png(drawn: Drawing, wide: bool = False) -> bytes:
    """The picture. `wide`: of one and a half times the width."""
    fig = Figure(figsize=(WIDTH * (1.5 if wide else 1.0), max(2.6, drawn.height / 80)), layout="constrained")
    ax = fig.subplots()
    places = _names(drawn)
    _axes(ax, drawn, places)
    seen: set[str] = set()
    for layer in drawn.layers:
        for name, rows in _series(layer):
            look = layer.look if name is None else drawn.looks[name]
            label = None if name is None or name in seen else name.replace("$", r"\$")
            seen |= {name} if name is not None else set()
            _marks(ax, drawn, layer, rows, look, label, name, places)
    if len(drawn.looks) > 1:
        ax.legend(frameon=False, fontsize=8, ncols=min(len(drawn.looks), 3), loc="lower left", bbox_to_anchor=(0, 1))
    buffer = io.BytesIO()
    fig.savefig(buffer, format="png", dpi=DPI)
    return buffer.getvalue()


def _axes(ax: Any, drawn: Drawing, places: dict[str, dict[str, int]]) -> None:
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="y", color="#E5E8EB", linewidth=0.8)
    ax.set_axisbelow(True)
    for name, axis in (("x", drawn.x), ("y", drawn.y)):
        getattr(ax, f"set_{name}label")(axis.title)
        if axis.names:
            names = [one.replace("$", r"\$") for one in places[name]]
            getattr(ax, f"set_{name}ticks")(range(len(names)), names, rotation=60 if name == "x" and len(names) > 12 else 0)
            if name == "y":
                ax.invert_yaxis()
            continue
        if axis.log:
            getattr(ax, f"set_{name}scale")("log")
        low, high = axis.least, axis.most
        if low is None and not axis.log and (axis.zero if axis.zero is not None else name == "y") and not _below(drawn, name):
            low = 0.0
        getattr(ax, f"set_{name}lim")(low, high)


def _below(drawn: Drawing, name: str) -> bool:
    """Whether a figure lies below zero."""
    return any((row.get(column) or 0) < 0 for layer in drawn.layers for column in [getattr(layer, name)] if column for row in layer.rows)


def _names(drawn: Drawing) -> dict[str, dict[str, int]]:
    """Where the names of an axis stand, in order."""
    found: dict[str, dict[str, int]] = {"x": {}, "y": {}}
    for layer in drawn.layers:
        for name, axis in (("x", drawn.x), ("y", drawn.y)):
            column = getattr(layer, name)
            for row in layer.rows if axis.names and column else ():
                found[name].setdefault(str(row[column]), len(found[name]))
    return found


def _series(layer: Layer) -> list[tuple[str | None, list]]:
    """The rows of each series, in order; lines are parted further."""
    if layer.by is None:
        return [(None, list(layer.rows))]
    by: dict[str, list] = {}
    for row in layer.rows:
        by.setdefault(str(row[layer.by]), []).append(row)
    return [*by.items()]


def _marks(ax: Any, drawn: Drawing, layer: Layer, rows: list, look: Look, label: str | None, name: str | None, places: dict) -> None:
    """The marks of a layer for one series."""

    def at(column: str | None, axis: str) -> list:
        values = [None if column is None else row.get(column) for row in rows]
        return [places[axis][str(one)] for one in values] if getattr(drawn, axis).names else [float("nan") if one is None else one for one in values]

    colour = look.hex
    if layer.kind == "rule":
        place, draw = (at(layer.x, "x")[0], ax.axvline) if layer.x else (at(layer.y, "y")[0], ax.axhline)
        draw(place, color=colour, linestyle=look.dash, linewidth=1, label=layer.says.replace("\n", " ") or None)
        return
    if layer.kind == "line":
        for _, some in groupby(rows, key=lambda row: row.get(layer.split) if layer.split else None):
            rows = list(some)
            ax.plot(
                at(layer.x, "x"),
                at(layer.y, "y"),
                look.dash,
                color=colour,
                linewidth=0.6 if layer.thin else 1.8,
                alpha=0.4 if layer.thin else 1,
                label=label,
            )
            label = None
    elif layer.kind == "point":
        face = "white" if layer.hollow else colour
        ax.plot(at(layer.x, "x"), at(layer.y, "y"), look.mark, color=colour, markerfacecolor=face, markersize=6, label=label)
    elif layer.kind == "range":
        ax.vlines(at(layer.x, "x"), at(layer.y, "y"), at(layer.y2, "y"), color=colour, linewidth=1.6, label=label)
    elif layer.kind == "cell":
        ax.scatter(at(layer.x, "x"), at(layer.y, "y"), marker="s", s=90, color=colour, label=label)
    else:
        _bars(ax, drawn, layer, at, colour, label, name)


def _bars(ax: Any, drawn: Drawing, layer: Layer, at: Any, colour: str, label: str | None, name: str | None) -> None:
    """Bars: of a histogram with their right edges, stacked, side by side, or alone."""
    x, y = at(layer.x, "x"), at(layer.y, "y")
    if layer.x2 is not None:
        ax.stairs(y, [*x, at(layer.x2, "x")[-1]], color=colour, linewidth=1.4, label=label)
        return
    if layer.stacked:
        base = ax.__dict__.setdefault("_stack", {})
        ax.bar(x, y, 0.7, bottom=[base.get(one, 0.0) for one in x], color=colour, label=label)
        base.update({one: base.get(one, 0.0) + more for one, more in zip(x, y, strict=True)})
        return
    series = [*drawn.looks]
    many = len(series) if name is not None else 1
    shift = (series.index(name) - (many - 1) / 2) * 0.8 / many if name is not None else 0.0
    ax.bar([one + shift for one in x], y, 0.8 / many, color=colour, label=label)
