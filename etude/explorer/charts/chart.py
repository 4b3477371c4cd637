"""Interactive charts: a drawing on the page, with one menu below it.

    chart(drawn, name, rows, alt)     hover shows values, a drag pans, Shift and the wheel zoom, a double click resets
    brushed(…)                        the same, but a drag selects a range of the horizontal axis; returns the range
    picked(…)                         the same, but a click selects a row; returns the row

`etude/explorer/drawing.py` defines drawings. `alt` is the caption and the alternative text. The menu has the data as a
table and as CSV, and the picture as PNG, which is rendered when its button is pressed.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pyarrow
import streamlit as st

from etude.explorer.charts import printed, vega
from etude.explorer.drawing import Axis, Drawing, Look, bars, boxes, cells, drawing, lines, points, ranges, rule, words
from etude.explorer.page import menu

__all__ = [
    "Axis",
    "Look",
    "bars",
    "boxes",
    "brushed",
    "cells",
    "chart",
    "drawing",
    "lines",
    "picked",
    "points",
    "powers",
    "ranges",
    "rule",
    "words",
]

WIDE_CHART_STYLE = """<style>@media (max-width: 640px) {
  [class*="st-key-wide-"] [data-testid="stFullScreenFrame"] {overflow-x: auto}
  [class*="st-key-wide-"] [data-testid="stVegaLiteChart"] {min-width: 48rem}
}</style>"""
"""Wide charts scroll sideways on screens without room for them."""


def powers(values: Iterable[float]) -> bool:
    """Whether positive values reach over more than one power of ten; on a shorter logarithmic axis hardly a tick finds
    a place."""
    finite_values = [value for value in values if math.isfinite(value)]
    return bool(finite_values) and max(finite_values) > 10 * min(finite_values)


def chart(picture: Drawing, name: str, rows: Sequence[dict], alt: str, wide: bool = False) -> None:
    """Shows the drawing. `rows`: the data of its menu. `wide`: it keeps a readable width on a narrow screen, and
    scrolls."""
    _show(picture, name, rows, alt, wide, "zoom")


def brushed(
    picture: Drawing, name: str, rows: Sequence[dict], alt: str, wide: bool = False
) -> tuple[float, float] | None:
    """Shows the drawing. Returns the selected range of the horizontal axis, or None."""
    selection = _show(picture, name, rows, alt, wide, "brush")
    ends = selection.get("x") if selection else None
    return (min(ends), max(ends)) if ends else None


def picked(
    picture: Drawing,
    name: str,
    rows: Sequence[dict],
    alt: str,
    wide: bool = False,
    on_click: Callable[[Mapping[str, Any]], None] | None = None,
) -> Mapping[str, Any] | None:
    """Shows the drawing. Returns the clicked row of a layer, or None. `on_click` is called with the row before the page
    is redrawn, when it may still set a control."""

    def handle_click() -> None:
        row = _find_row(picture, st.session_state[f"chart-{name}"].selection.get(vega.PICK))
        if row is not None and on_click is not None:
            on_click(row)

    return _find_row(picture, _show(picture, name, rows, alt, wide, "pick", handle_click if on_click else "rerun"))


def _find_row(picture: Drawing, selection: Any) -> Mapping[str, Any] | None:
    """The clicked row, or None; the data may have changed since the click."""
    if not selection:
        return None
    part, row = int(selection[0]["part"]), int(selection[0]["row"])
    layer_rows = picture.layers[part].rows if part < len(picture.layers) else ()
    return layer_rows[row] if row < len(layer_rows) else None


def _show(
    picture: Drawing, name: str, rows: Sequence[dict], alt: str, wide: bool, mode: vega.Mode, callback: Any = "rerun"
) -> Any:
    """The selection in the chart, or None."""
    if not any(layer.rows for layer in picture.layers):  # a selection needs a layer
        st.caption(f"Nothing to draw yet. {alt}")
        return None
    data, spec = pyarrow.table(vega.table(picture)), vega.spec(picture, mode)
    if wide:
        st.html(WIDE_CHART_STYLE)
    with st.container(key=f"wide-{name}" if wide else None):
        if mode == "zoom":
            selection = None
            st.vega_lite_chart(data, spec, width="stretch", key=f"chart-{name}", alt=alt)
        else:
            state: Any = st.vega_lite_chart(
                data, spec, width="stretch", key=f"chart-{name}", alt=alt, on_select=callback, selection_mode=mode
            )
            selection = state.selection.get(mode)
        st.caption(alt)
    menu(name, lambda: rows, lambda: printed.png(picture, wide))
    return selection
