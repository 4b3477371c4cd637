"""Charts that answer: a drawing shown live, with its downloads below it.

    chart(drawn, name, rows, alt)     hover tells figures, a drag moves the axes, Shift and the wheel zoom, a double
                                      click brings them back
    brushed(…)                        the same, but a drag chooses a part of the horizontal axis; returns it
    picked(…)                         the same, but a click chooses a row; returns it

`drawing.py` has the words in which a drawing is written. `alt` is what the chart shows, for the caption and for those
who cannot see it. The downloads are the picture as PNG, which is drawn when the button is pressed, and the numbers as
CSV.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pyarrow
import streamlit as st

from etude.explorer import printed, vega
from etude.explorer.drawing import Axis, Drawing, Look, bars, boxes, cells, drawing, lines, points, ranges, rule, words
from etude.explorer.page import download
from etude.figures import as_csv

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


def chart(drawn: Drawing, name: str, rows: Sequence[dict], alt: str, wide: bool = False) -> None:
    """Shows the drawing. `rows`: the numbers, for the CSV file. `wide`: it keeps a readable width on a narrow screen,
    and scrolls."""
    _show(drawn, name, rows, alt, wide, "zoom")


def brushed(
    drawn: Drawing, name: str, rows: Sequence[dict], alt: str, wide: bool = False
) -> tuple[float, float] | None:
    """Shows the drawing. Returns the part of the horizontal axis that is brushed; None where nothing is."""
    selection = _show(drawn, name, rows, alt, wide, "brush")
    ends = selection.get("x") if selection else None
    return (min(ends), max(ends)) if ends else None


def picked(
    drawn: Drawing,
    name: str,
    rows: Sequence[dict],
    alt: str,
    wide: bool = False,
    then: Callable[[Mapping[str, Any]], None] | None = None,
) -> Mapping[str, Any] | None:
    """Shows the drawing. Returns the row that was clicked, as its layer has it; None where none was. `then` is called
    with it before the page is drawn anew, when it may still set a control."""

    def handle_click() -> None:
        row = _find_row(drawn, st.session_state[f"chart-{name}"].selection.get(vega.PICK))
        if row is not None and then is not None:
            then(row)

    return _find_row(drawn, _show(drawn, name, rows, alt, wide, "pick", handle_click if then else "rerun"))


def _find_row(picture: Drawing, selection: Any) -> Mapping[str, Any] | None:
    """The row that a click has found; the figures may have changed since."""
    if not selection:
        return None
    part, row = int(selection[0]["part"]), int(selection[0]["row"])
    layer_rows = picture.layers[part].rows if part < len(picture.layers) else ()
    return layer_rows[row] if row < len(layer_rows) else None


def _show(
    picture: Drawing, name: str, rows: Sequence[dict], alt: str, wide: bool, mode: vega.Mode, callback: Any = "rerun"
) -> Any:
    """What is selected in the chart; None if nothing is."""
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
    with st.container(horizontal=True):
        download("Picture (PNG)", lambda: printed.png(picture, wide), f"{name}.png", "image/png")
        download("Data (CSV)", lambda: as_csv(rows), f"{name}.csv", "text/csv")
    return selection
