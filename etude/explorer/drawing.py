"""What a chart consists of, said once: `charts/vega.py` makes it live in the browser, and `charts/printed.py` draws the
same for a file.

    drawing(x, y, layer, …)          a pair of axes and what lies on them, from back to front
    lines, points, bars, ranges      rows of figures, one mark each; a line goes through its rows in order
    cells                            coloured fields of a table
    boxes, words                     rectangles, and words at a place
    rule(…)                          one straight line through the picture, with words

Rows are dictionaries, and layers name the columns that they draw. `by` names the column that says to which series a row
belongs; `looks` gives every series a colour, and dashes or a marker beside it, so that people with any colour vision
tell them apart.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from kit.plots import BY_NAME

__all__ = [
    "COLOURS",
    "Axis",
    "Drawing",
    "Layer",
    "Look",
    "bars",
    "boxes",
    "cells",
    "drawing",
    "lines",
    "points",
    "ranges",
    "rule",
    "words",
]

COLOURS = BY_NAME
"""People with any colour vision tell them apart. All can be seen on white and on black."""
ORDER = ("blue", "orange", "green", "purple", "red", "sky", "grey")
DASHES, MARKS = ("-", "--", ":", "-."), ("o", "s", "^", "D", "v")
Kind = Literal["line", "point", "bar", "range", "cell", "box", "text", "rule"]


@dataclass(frozen=True)
class Axis:
    """One axis."""

    title: str
    log: bool = False
    lower: float | None = None
    """Where it begins; by default where the figures do, or at 0 for the vertical one."""
    upper: float | None = None
    names: bool = False
    """The places are names or whole numbers in the order of the rows, not points on a scale."""
    zero: bool | None = None
    """Whether it begins at 0; by default only the vertical one does."""
    ticks: Mapping[float, str] | None = None
    """Places that have words in place of figures; no other place has a mark."""
    integer: bool = False
    """It counts: no tick lies between two whole numbers."""


@dataclass(frozen=True)
class Look:
    """How a series is drawn."""

    colour: str = "blue"
    """A name in COLOURS, or a colour in hexadecimal."""
    dash: str = "-"
    """As matplotlib writes it: - -- : -."""
    mark: str = "o"
    """As matplotlib writes it: o s ^ D v x"""

    @property
    def hex(self) -> str:
        return COLOURS.get(self.colour, self.colour)


@dataclass(frozen=True)
class Layer:
    """Marks of one kind. The columns of its rows are named by `x`, `y` and, where a mark has an extent, `x2` and
    `y2`."""

    kind: Kind
    rows: Sequence[Mapping[str, Any]]
    x: str | None = None
    y: str | None = None
    x2: str | None = None
    y2: str | None = None
    by: str | None = None
    tell: tuple[str, ...] = ()
    """Columns that hovering tells."""
    hollow: bool = False
    stacked: bool = False
    dodge: bool = False
    """Marks of several series at one name of the horizontal axis stand side by side."""
    thin: bool = False
    """A faint line that stands behind another one."""
    split: str | None = None
    """A column whose values part the lines of one series."""
    look: Look = field(default_factory=Look)
    """Of a layer without series."""
    says: str = ""
    """The words of a rule."""
    low: bool = False
    """They stand at its lower end."""
    shade: str | None = None
    """A column from 0 to 1: how full the colour of a box is."""
    size: float = 55
    """Of a point, square pixels."""
    code: bool = False
    """Words begin at their place and are written as source text is."""
    angle: float = 0
    """By which words are turned, degrees clockwise, from 0 to 360."""


@dataclass(frozen=True)
class Drawing:
    """A pair of axes and what lies on them."""

    x: Axis
    y: Axis
    layers: tuple[Layer, ...]
    looks: Mapping[str, Look]
    height: int = 320
    """Pixels on the screen."""


def drawing(
    x: Axis | str, y: Axis | str, *layers: Layer, looks: Mapping[str, Look] | None = None, height: int = 320
) -> Drawing:
    """A pair of axes with these layers, from back to front. A series without a look gets the next one that no other
    has."""
    series = dict.fromkeys(str(row[layer.by]) for layer in layers if layer.by for row in layer.rows)
    series_looks = {name: look for name, look in (looks or {}).items() if name in series}
    for place, name in enumerate(name for name in series if name not in series_looks):
        series_looks[name] = Look(ORDER[place % len(ORDER)], DASHES[place % len(DASHES)], MARKS[place % len(MARKS)])
    x_axis, y_axis = (axis if isinstance(axis, Axis) else Axis(axis) for axis in (x, y))
    return Drawing(x_axis, y_axis, tuple(layer for layer in layers if layer.rows), series_looks, height)


def lines(
    rows: Sequence[Mapping],
    x: str,
    y: str,
    by: str | None = None,
    *,
    tell: Sequence[str] = (),
    thin: bool = False,
    split: str | None = None,
    look: Look | None = None,
) -> Layer:
    """A line through the rows of each series, in their order; a row whose `y` is missing interrupts it."""
    return Layer(
        "line", rows, x, y, by=by, tell=_unique_columns(by, x, y, *tell), thin=thin, split=split, look=look or Look()
    )


def points(
    rows: Sequence[Mapping],
    x: str,
    y: str,
    by: str | None = None,
    *,
    tell: Sequence[str] = (),
    hollow: bool = False,
    dodge: bool = False,
    look: Look | None = None,
    size: float = 55,
) -> Layer:
    """A mark for each row. `dodge`: those of several series at one name of the horizontal axis stand side by side."""
    hover_columns = _unique_columns(by, x, y, *tell)
    look = look or Look()
    return Layer("point", rows, x, y, by=by, tell=hover_columns, hollow=hollow, dodge=dodge, look=look, size=size)


def bars(
    rows: Sequence[Mapping],
    x: str,
    y: str,
    by: str | None = None,
    *,
    to: str | None = None,
    stacked: bool = False,
    tell: Sequence[str] = (),
    look: Look | None = None,
) -> Layer:
    """A bar for each row: side by side or `stacked` where there are series. `to`: the column with its right edge, for a
    histogram."""
    hover_columns, dodge = _unique_columns(by, x, to, y, *tell), by is not None and to is None and not stacked
    look = look or Look()
    return Layer("bar", rows, x, y, x2=to, by=by, tell=hover_columns, stacked=stacked, dodge=dodge, look=look)


def ranges(
    rows: Sequence[Mapping],
    x: str,
    low: str,
    high: str,
    by: str | None = None,
    *,
    tell: Sequence[str] = (),
    look: Look | None = None,
) -> Layer:
    """An upright line from `low` to `high` for each row: an interval of confidence."""
    return Layer(
        "range", rows, x, low, y2=high, by=by, tell=_unique_columns(by, x, low, high, *tell), look=look or Look("grey")
    )


def cells(rows: Sequence[Mapping], x: str, y: str, by: str, *, tell: Sequence[str] = ()) -> Layer:
    """A coloured field for each row; both axes should have names."""
    return Layer("cell", rows, x, y, by=by, tell=_unique_columns(x, y, by, *tell))


def boxes(
    rows: Sequence[Mapping],
    x: str,
    to: str,
    low: str,
    high: str,
    by: str | None = None,
    *,
    tell: Sequence[str] = (),
    shade: str | None = None,
    look: Look | None = None,
) -> Layer:
    """A rectangle for each row, from `x` to `to` and from `low` to `high`. Hovering says the series and the columns
    `tell`, no others. Where there are boxes, all marks tell of themselves, and none of what is near."""
    return Layer(
        "box", rows, x, low, x2=to, y2=high, by=by, tell=_unique_columns(by, *tell), shade=shade, look=look or Look()
    )


def words(
    rows: Sequence[Mapping],
    x: str,
    y: str,
    says: str,
    *,
    tell: Sequence[str] = (),
    code: bool = False,
    angle: float = 0,
    look: Look | None = None,
) -> Layer:
    """What the column `says` holds, written at the place of each row. Hovering says it, too, and the columns `tell`.
    `code`: the words are source text, which begins at the place. `angle`: degrees clockwise, from 0 to 360."""
    return Layer(
        "text", rows, x, y, tell=_unique_columns(says, *tell), code=code, angle=angle, look=look or Look("grey")
    )


def rule(
    says: str = "", *, x: float | str | None = None, y: float | None = None, look: Look | None = None, low: bool = False
) -> Layer:
    """A straight line at this x or y, with words beside it; at its lower end where it says `low`."""
    x_column, y_column = None if x is None else "x", None if y is None else "y"
    return Layer("rule", [{"x": x, "y": y}], x_column, y_column, look=look or Look("grey"), says=says, low=low)


def _unique_columns(*columns: str | None) -> tuple[str, ...]:
    return tuple(dict.fromkeys(column for column in columns if column is not None))
