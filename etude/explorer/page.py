"""The parts of a page, and the helpers that all pages share.

A page is a `Page` and one function that draws it. Widgets get `bind="query-params"` and a `key`, which is their name in the URL, so
a link reopens the view that it was copied from. If a URL contains a value that the widget does not allow, the default replaces it. Integers
are sliders, because `st.number_input` ends in a traceback if the URL says inf. No two pages share a key, because Streamlit would carry
its value from one page to the other.

    link(name, label, ...)           a link to another page, within the session
    figure(fig, name, rows, alt)     a picture, with downloads below it: the picture as PNG, its data as CSV
    axes(...)                        empty axes in the project's style, safe in threads
    png(fig)                         the drawn picture as bytes, which can be cached; `figure` takes them, too

Figures are shown by `charts.py`; a picture is for what is no chart. A redraw spends most of its time on drawing pictures. One that a control does
not change is therefore cached, and a page draws few at a time. On a narrow screen, columns are stacked. Two pictures with one pair of axes each stay
legible there; one picture with two does not.
"""

import base64
import inspect
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import streamlit as st
from matplotlib.figure import Figure

from etude import catalog, glossary
from etude.explorer.drawing import COLOURS
from etude.figures import as_csv

__all__ = ["COLOURS", "NARROW", "PLACES", "Page", "axes", "download", "figure", "folded", "link", "png", "show", "steering", "table"]

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True)
class Page:
    """One page of the explorer."""

    name: str
    """Its name in the URL."""
    title: str
    """Its title in the navigation."""
    says: str
    """One or two sentences: what the page is about."""
    formula: str = ""
    """LaTeX; may be empty."""
    question: str = ""
    """What to predict before anything is moved; empty on a page that only leads elsewhere."""
    look: str = ""
    """The answer: what to look for. It is folded until somebody asks."""
    draw: Callable[[], None]
    """Draws controls and picture."""
    code: tuple[Any, ...] = ()
    """Functions and classes whose source the page shows."""
    technique: str | None = None
    """Name in `etude/catalog.py`, for the lesson."""


def show(page: Page) -> None:
    """Draws the complete page. A problem with a folder or a file shows up as one line on the page."""
    from kit.settings import RunError

    st.title(page.title)
    st.markdown(page.says, help=glossary.told(page.says) or None)
    if page.formula:
        st.latex(page.formula)
    if page.question:
        st.info(f"**Predict first.** {page.question}")
        with st.expander("Show the answer"):
            st.markdown(page.look)
    try:
        page.draw()
    except (RunError, OSError) as error:
        st.error(str(error))
    for shown in page.code:
        path, first, text = source(shown)
        with st.expander(f"`{shown.__name__}` in {path}, line {first}"):
            st.code(text, language="python", wrap_lines=True)
    entry = catalog.find(page.technique) if page.technique else None
    if entry and entry.lesson:
        number = Path(entry.lesson).name.partition("_")[0]
        link("lesson", f"Lesson {number}: {entry.title.partition(':')[0]}", ":material/school:", n=number)


@lru_cache(None)
def source(shown: Any) -> tuple[Path, int, str]:
    """File, first line and source text of a function or class."""
    lines, first = inspect.getsourcelines(shown)
    file = inspect.getsourcefile(inspect.unwrap(shown))
    assert file is not None
    return Path(file).relative_to(ROOT), first, "".join(lines)


PLACES: dict[str, Any] = {}
"""Streamlit's pages by their name in the URL. `start` stores them here, because a link needs the page object that Streamlit made."""


def link(name: str, label: str, icon: str | None = None, **query: str) -> None:
    """A link to a page, with what its URL says beside its name. It keeps the session, which an ordinary link would begin anew."""
    st.page_link(PLACES[name], label=label, icon=icon, query_params=query or None)


def axes(x: str, y: str, width: float = 7.0, height: float = 3.6, columns: int = 1, fixed: bool = False) -> tuple[Figure, Any]:
    """A figure and its axes (a list of axes for several columns). Does not use pyplot, because sessions draw in separate threads.

    `fixed`: use margins for a title and ordinary labels instead of measuring all labels first, which takes a quarter of the drawing time."""
    fig = Figure(figsize=(width, height), layout=None if fixed else "constrained")
    if fixed:
        fig.subplots_adjust(left=0.7 / width, right=1 - 0.15 / width, bottom=0.5 / height, top=1 - 0.3 / height)
    made = fig.subplots(1, columns)
    for one in made if columns > 1 else [made]:
        one.set_xlabel(x)
        one.set_ylabel(y)
        one.spines[["top", "right"]].set_visible(False)
        one.grid(axis="y", color="#E5E8EB", linewidth=0.8)
        one.set_axisbelow(True)
        one.locator_params(nbins=5)  # labels take a third of the drawing time
    return fig, made


def png(fig: Figure) -> bytes:
    """The picture, drawn."""
    buffer = io.BytesIO()
    fig.savefig(buffer, format="png", dpi=144)
    return buffer.getvalue()


def figure(fig: Figure | bytes, name: str, rows: Sequence[dict], alt: str, wide: bool = False) -> None:
    """Shows the picture with an alt text and downloads as PNG and CSV. `rows`: the numbers that were drawn. `wide`: on a narrow screen the
    picture keeps a readable size and scrolls sideways."""
    if wide:
        st.html(NARROW)
    drawn = fig if isinstance(fig, bytes) else png(fig)
    # Inside the page: a separate file would be gone if a slider moves before the browser has fetched it.
    with st.container(key=f"wide-{name}" if wide else None):
        st.image(f"data:image/png;base64,{base64.b64encode(drawn).decode()}", caption=alt, width="stretch", alt=alt)
    with st.container(horizontal=True):
        download("Picture (PNG)", lambda: drawn, f"{name}.png", "image/png")
        download("Data (CSV)", lambda: as_csv(rows), f"{name}.csv", "text/csv")


NARROW = """<style>@media (max-width: 640px) {
  [class*="st-key-wide-"] :is([data-testid="stImage"], [data-testid="stFullScreenFrame"]) {overflow-x: auto}
  [class*="st-key-wide-"] [data-testid="stImage"] img {width: 48rem !important; max-width: none !important}
}</style>"""
"""For wide pictures, or several axes side by side, on screens without room for them."""


def download(label: str, content: Callable[[], bytes | str], name: str, kind: str) -> None:
    """A download button. `content` is created when the button is pressed, so a redraw does not wait for it."""
    st.download_button(label, content, name, kind, key=name.replace(".", "-"), on_click="ignore")


def table(rows: Sequence[dict], name: str) -> None:
    """Rows as a table with a CSV download. The table shows four digits, the file has all of them; missing values stay blank."""
    st.dataframe(list(rows), hide_index=True, width="stretch", column_config=_short(rows), placeholder="")
    download("Data (CSV)", lambda: as_csv(rows), f"{name}.csv", "text/csv")


def folded(rows: Sequence[dict], name: str, label: str = "The same as a table") -> None:
    """A table that says again what a chart shows, closed at first."""
    with st.expander(label):
        table(rows, name)


def steering(rows: Sequence[dict], name: str, key: str, values: Sequence) -> None:
    """A table that sets a control: the row that the reader chooses gives the control with this `key` the value in its place of `values`."""
    there = f"rows-{name}"

    def chosen() -> None:
        some = st.session_state[there].selection.rows
        if some and some[0] < len(values):
            st.session_state[key] = values[some[0]]

    st.dataframe(
        list(rows),
        hide_index=True,
        width="stretch",
        column_config=_short(rows),
        placeholder="",
        on_select=chosen,
        selection_mode="single-row",
        key=there,
    )
    download("Data (CSV)", lambda: as_csv(rows), f"{name}.csv", "text/csv")


def _short(rows: Sequence[dict]) -> dict:
    """Four digits for the columns of floats, and hundredths for seconds."""
    floats = {key for row in rows for key, value in row.items() if isinstance(value, float)}
    return {key: st.column_config.NumberColumn(format="%.2f" if key == "seconds" else "%.4g") for key in floats}
