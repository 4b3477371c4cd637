"""The parts of a page, and the helpers that all pages share.

A page is a `Page` and one function that draws it. Widgets get `bind="query-params"` and a `key`, which is their name in
the URL, so a link reopens the view that it was copied from. If a URL contains a value that the widget does not allow,
the default replaces it. Integers are sliders, because `st.number_input` ends in a traceback if the URL says inf. No two
pages share a key, because Streamlit would carry its value from one page to the other.

    link(name, label, ...)           a link to another page, within the session
    table(rows, name)                a table with a CSV download; `folded`, closed at first; `steering`, one that sets a
                                     control

`charts.py` shows figures. On a narrow screen, columns are stacked.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import streamlit as st

from etude import catalog, glossary
from etude.explorer.drawing import COLOURS
from etude.figures import as_csv

__all__ = ["COLOURS", "PLACES", "Page", "download", "folded", "link", "show", "steering", "table"]

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
    opens: bool = False
    """Whether the page opens with what it draws, before its formula and its question."""


def show(page: Page) -> None:
    """Draws the complete page. A problem with a folder or a file shows up as one line on the page."""
    st.title(page.title)
    st.markdown(page.says, help=glossary.told(page.says) or None)
    for part in (_draw_body, _draw_question) if page.opens else (_draw_question, _draw_body):
        part(page)
    for code_object in page.code:
        path, first_line, text = read_source(code_object)
        with st.expander(f"`{code_object.__name__}` in {path}, line {first_line}"):
            st.code(text, language="python", wrap_lines=True)
    entry = catalog.find(page.technique) if page.technique else None
    if entry and entry.lesson:
        number = Path(entry.lesson).name.partition("_")[0]
        link("lesson", f"Lesson {number}: {entry.title.partition(':')[0]}", ":material/school:", n=number)


def _draw_question(page: Page) -> None:
    """The formula, and the question with its folded answer."""
    if page.formula:
        st.latex(page.formula)
    if page.question:
        st.info(f"**Predict first.** {page.question}")
        with st.expander("Show the answer"):
            st.markdown(page.look)


def _draw_body(page: Page) -> None:
    """What the page draws, or in one line why it cannot."""
    from kit.settings import RunError

    try:
        page.draw()
    except (RunError, OSError) as error:
        st.error(str(error))


@lru_cache(None)
def read_source(code_object: Any) -> tuple[Path, int, str]:
    """File, first line and source text of a function or class."""
    lines, first_line = inspect.getsourcelines(code_object)
    file = inspect.getsourcefile(inspect.unwrap(code_object))
    assert file is not None
    return Path(file).relative_to(ROOT), first_line, "".join(lines)


PLACES: dict[str, Any] = {}
"""Streamlit's pages by their name in the URL. `start` stores them here, because a link needs the page object that
Streamlit made."""


def link(name: str, label: str, icon: str | None = None, **query: str) -> None:
    """A link to a page, with what its URL says beside its name. It keeps the session, which an ordinary link would
    begin anew."""
    st.page_link(PLACES[name], label=label, icon=icon, query_params=query or None)


def download(label: str, content: Callable[[], bytes | str], name: str, kind: str) -> None:
    """A download button. `content` is created when the button is pressed, so a redraw does not wait for it."""
    st.download_button(label, content, name, kind, key=name.replace(".", "-"), on_click="ignore")


def table(rows: Sequence[dict], name: str) -> None:
    """Rows as a table with a CSV download. The table shows four digits, the file has all of them; missing values stay
    blank."""
    st.dataframe(list(rows), hide_index=True, width="stretch", column_config=_format_columns(rows), placeholder="")
    download("Data (CSV)", lambda: as_csv(rows), f"{name}.csv", "text/csv")


def folded(rows: Sequence[dict], name: str, label: str = "The same as a table") -> None:
    """A table that says again what a chart shows, closed at first."""
    with st.expander(label):
        table(rows, name)


def steering(rows: Sequence[dict], name: str, key: str, values: Sequence) -> None:
    """A table that sets a control: the row that the reader chooses gives the control with this `key` the value in its
    place of `values`."""
    table_key = f"rows-{name}"

    def set_control() -> None:
        selected_rows = st.session_state[table_key].selection.rows
        if selected_rows and selected_rows[0] < len(values):
            st.session_state[key] = values[selected_rows[0]]

    st.dataframe(
        list(rows),
        hide_index=True,
        width="stretch",
        column_config=_format_columns(rows),
        placeholder="",
        on_select=set_control,
        selection_mode="single-row",
        key=table_key,
    )
    download("Data (CSV)", lambda: as_csv(rows), f"{name}.csv", "text/csv")


def _format_columns(rows: Sequence[dict]) -> dict:
    """Four digits for the columns of floats, and hundredths for seconds."""
    floats = {key for row in rows for key, value in row.items() if isinstance(value, float)}
    return {key: st.column_config.NumberColumn(format="%.2f" if key == "seconds" else "%.4g") for key in floats}
