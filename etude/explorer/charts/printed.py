"""A drawing as a PNG file, by matplotlib: what a chart's download is. Nothing waits for it but the download."""

import io
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure

from etude.explorer.drawing import Drawing, Layer

__all__ = ["png", "printed"]

WIDTH, DPI = 6.4, 144
"""Inches, and dots of an inch."""


def png(drawing: Drawing, wide: bool = False) -> bytes:
    """The picture as a file. `wide`: of one and a half times the width."""
    buffer = io.BytesIO()
    printed(drawing, wide).savefig(buffer, format="png", dpi=DPI)
    return buffer.getvalue()


def printed(drawing: Drawing, wide: bool = False) -> Figure:
    """The picture."""
    fig = Figure(figsize=(WIDTH * (1.5 if wide else 1.0), max(2.6, drawing.height / 80)), layout="constrained")
    sheet = _Sheet(fig.subplots(), drawing, _number_names(drawing))
    _set_up_axes(sheet.ax, drawing, sheet.places)
    for layer in drawing.layers:
        for name, rows in _split_series(layer):
            sheet.draw(layer, name, rows)
    handles, labels = sheet.ax.get_legend_handles_labels()
    # a series that has lines and marks stands there once
    handles_by_label = dict(zip(reversed(labels), reversed(handles)))
    if len(handles_by_label) > 1 or any(layer.says for layer in drawing.layers):
        unique_labels = [*dict.fromkeys(labels)]
        sheet.ax.legend(
            [handles_by_label[label] for label in unique_labels],
            unique_labels,
            frameon=False,
            fontsize=8,
            ncols=min(len(unique_labels), 3),
            loc="lower left",
            bbox_to_anchor=(0, 1),
        )
    _set_limits(sheet.ax, drawing)
    return fig


def _set_up_axes(ax: Any, drawing: Drawing, places: dict[str, dict[str, int]]) -> None:
    ax.spines[["top", "right"]].set_visible(False)
    if drawing.y.ticks is None:
        ax.grid(axis="y", color="#E5E8EB", linewidth=0.8)
    ax.set_axisbelow(True)
    for name, axis in (("x", drawing.x), ("y", drawing.y)):
        getattr(ax, f"set_{name}label")(axis.title)
        if axis.names:
            names = [label.replace("$", r"\$") for label in places[name]]
            getattr(ax, f"set_{name}ticks")(
                range(len(names)), names, rotation=60 if name == "x" and len(names) > 12 else 0
            )
            if name == "y":
                ax.invert_yaxis()
        elif axis.ticks is not None:
            getattr(ax, f"set_{name}ticks")([*axis.ticks], [label.replace("$", r"\$") for label in axis.ticks.values()])
            ax.tick_params(axis=name, labelrotation=60 if name == "x" else 0)
        elif axis.log:
            getattr(ax, f"set_{name}scale")("log")
        elif axis.integer:
            getattr(ax, f"{name}axis").get_major_locator().set_params(integer=True)


def _set_limits(ax: Any, drawing: Drawing) -> None:
    """Where the axes begin and end, once everything is drawn."""
    for name, axis in (("x", drawing.x), ("y", drawing.y)):
        if axis.names:
            continue
        low = axis.lower
        if (
            low is None
            and not axis.log
            and (axis.zero if axis.zero is not None else name == "y")
            and not _has_negative(drawing, name)
        ):
            low = 0.0
        getattr(ax, f"set_{name}lim")(low, axis.upper)


def _has_negative(drawing: Drawing, name: str) -> bool:
    """Whether a figure lies below zero."""
    return any(
        (row.get(column) or 0) < 0
        for layer in drawing.layers
        for column in [getattr(layer, name)]
        if column
        for row in layer.rows
    )


def _number_names(drawing: Drawing) -> dict[str, dict[str, int]]:
    """Where the names of an axis stand, in order."""
    places: dict[str, dict[str, int]] = {"x": {}, "y": {}}
    for layer in drawing.layers:
        for name, axis in (("x", drawing.x), ("y", drawing.y)):
            column = getattr(layer, name)
            for row in layer.rows if axis.names and column else ():
                places[name].setdefault(str(row[column]), len(places[name]))
    return places


def _split_series(layer: Layer) -> list[tuple[str | None, list]]:
    """The rows of each series, in order."""
    if layer.by is None:
        return [(None, list(layer.rows))]
    by: dict[str, list] = {}
    for row in layer.rows:
        by.setdefault(str(row[layer.by]), []).append(row)
    return [*by.items()]


@dataclass
class _Sheet:
    """Axes that are drawn on, and what has to be known of them."""

    ax: Any
    drawing: Drawing
    places: dict[str, dict[str, int]]
    """Where the names of an axis stand."""
    bar_heights: dict[float, float] = field(default_factory=dict)
    """How high the stacked bars of each place are so far."""

    def find_positions(self, rows: list, column: str | None, axis: str) -> list:
        """Places of rows along an axis."""
        values = [None if column is None else row.get(column) for row in rows]
        is_named, places = getattr(self.drawing, axis).names, self.places[axis]
        return [float("nan") if value is None else places[str(value)] if is_named else value for value in values]

    def draw(self, layer: Layer, name: str | None, rows: list) -> None:
        """The marks of a layer for one series."""
        ax, look = self.ax, layer.look if name is None else self.drawing.looks[name]
        label = name.replace("$", r"\$") if name is not None else None
        x, y = self.find_positions(rows, layer.x, "x"), self.find_positions(rows, layer.y, "y")
        width = 0.8 / len(self.drawing.looks) if layer.dodge else 0.8
        if layer.dodge:
            shift = ([*self.drawing.looks].index(str(name)) - (len(self.drawing.looks) - 1) / 2) * width
            x = [position + shift for position in x]
        if layer.kind == "rule":
            place, draw_line = (x[0], ax.axvline) if layer.x else (y[0], ax.axhline)
            draw_line(
                place, color=look.hex, linestyle=look.dash, linewidth=1, label=layer.says.replace("\n", " ") or None
            )
        elif layer.kind == "line":
            width, alpha = (0.6, 0.4) if layer.thin else (1.8, 1.0)
            for _, indices in groupby(
                range(len(rows)), key=lambda index: rows[index].get(layer.split) if layer.split else None
            ):
                part = [*indices]
                ax.plot(
                    [x[i] for i in part],
                    [y[i] for i in part],
                    look.dash,
                    color=look.hex,
                    linewidth=width,
                    alpha=alpha,
                    label=label,
                )
        elif layer.kind == "point":
            face = "white" if layer.hollow else look.hex
            size = (9 if layer.hollow else 6) * (layer.size / 55) ** 0.5
            ax.plot(x, y, look.mark, color=look.hex, markerfacecolor=face, markersize=size, label=label)
        elif layer.kind == "range":
            ax.vlines(x, y, self.find_positions(rows, layer.y2, "y"), color=look.hex, linewidth=1.6)
        elif layer.kind == "cell":
            ax.scatter(x, y, marker="s", s=90, color=look.hex, label=label)
        elif layer.kind == "box":
            corners = zip(
                x, y, self.find_positions(rows, layer.x2, "x"), self.find_positions(rows, layer.y2, "y"), strict=True
            )
            outlines = [[(left, low), (right, low), (right, high), (left, high)] for left, low, right, high in corners]
            fill = [to_rgba(look.hex, 1.0 if layer.shade is None else row[layer.shade]) for row in rows]
            ax.add_collection(PolyCollection(outlines, facecolors=fill, edgecolors="none", label=label))
            ax.autoscale_view()
        elif layer.kind == "text":
            for left, low, row in zip(x, y, rows, strict=True):
                text = str(row[layer.tell[0]]).replace("$", r"\$")
                text_style = (
                    {"ha": "left", "family": "monospace", "fontsize": 6}
                    if layer.code
                    else {"ha": "center", "fontweight": "bold", "fontsize": 7}
                )
                ax.text(left, low, text, color=look.hex, va="center", rotation=-layer.angle, **text_style)
        elif layer.x2 is not None:
            ax.stairs(
                y,
                [*x, self.find_positions(rows, layer.x2, "x")[-1]],
                color=look.hex,
                linestyle=look.dash,
                linewidth=1.4,
                label=label,
            )
        elif layer.stacked:
            ax.bar(
                x, y, 0.7, bottom=[self.bar_heights.get(position, 0.0) for position in x], color=look.hex, label=label
            )
            self.bar_heights |= {
                position: self.bar_heights.get(position, 0.0) + height for position, height in zip(x, y, strict=True)
            }
        else:
            ax.bar(x, y, width, color=look.hex, label=label)
