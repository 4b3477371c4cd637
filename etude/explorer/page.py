"""The parts of a page, and the helpers that all pages share.

A page is a `Page` and one function that draws it. Widgets get `bind="query-params"` and a `key`, which is their name in
the URL, so a link reopens the view that it was copied from. If a URL contains a value that the widget does not allow,
the default replaces it. Integers are sliders, because `st.number_input` ends in a traceback if the URL says inf. No two
pages share a key, because Streamlit would carry its value from one page to the other.

    link(name, label, ...)           a link to another page, within the session
    table(rows, name)                a table with a CSV download; `folded`: in a closed box; `steering`: sets a control
    menu(name, read_rows, png)       the menu below a chart: its data as a table and as CSV, its picture as PNG

`charts/chart.py` shows charts. On a narrow screen, columns are stacked.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import streamlit as st

from etude import catalog, glossary
from etude.explorer.drawing import COLOURS
from etude.ledger.figures import as_csv

__all__ = ["COLOURS", "PLACES", "Page", "folded", "link", "menu", "show", "steering", "table"]

ROOT = Path(__file__).resolve().parents[2]
MENU_STYLE = '<style>[data-testid="stPopoverBody"] {width: min(44rem, 92vw)}</style>'
"""Room for a table in the menu of a chart."""


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
    """LaTeX; may be empty. A name in \\mathrm is a symbol, text in \\text is none."""
    symbols: Mapping[str, str] = field(default_factory=dict)
    """LaTeX of every symbol of the formula → its definition, shown below the formula."""
    question: str = ""
    """A prediction to make before a control is moved; empty on a page that has only links."""
    look: str = ""
    """The answer, in a closed box."""
    draw: Callable[[], None]
    """Draws controls and charts."""
    code: tuple[Any, ...] = ()
    """Functions and classes whose source the page shows."""
    technique: str | None = None
    """Name in `etude/catalog.py`, for the lesson."""
    opens: bool = False
    """Whether controls and charts come before the formula and the question."""


def show(page: Page) -> None:
    """Draws the complete page. A problem with a folder or a file shows up as one line on the page."""
    st.title(page.title)
    st.markdown(page.says, help=glossary.explain_terms(page.says) or None)
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
    """The formula with the definitions of its symbols, and the question with its answer in a closed box."""
    if page.formula:
        st.latex(page.formula)
        st.caption("; ".join(f"${symbol}$: {meaning}" for symbol, meaning in page.symbols.items()) + ".")
    if page.question:
        st.info(f"**Predict first.** {page.question}")
        with st.expander("Show the answer"):
            st.markdown(page.look)


def _draw_body(page: Page) -> None:
    """Controls and charts, or one line with the error."""
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
    """A link to a page and its query parameters. It keeps the session; an HTML link would start a new one."""
    st.page_link(PLACES[name], label=label, icon=icon, query_params=query or None)


def _download(label: str, content: Callable[[], bytes | str], name: str, kind: str) -> None:
    """A download button. `content` is created when the button is pressed, so a redraw does not wait for it."""
    st.download_button(label, content, name, kind, key=name.replace(".", "-"), on_click="ignore")


def table(rows: Sequence[dict], name: str, display_rows: Sequence[dict] | None = None) -> None:
    """Rows as a table with a CSV download. `display_rows`: the same rows with some numbers in words."""
    _show_rows(display_rows or rows)
    _download_csv(rows, name)


def _show_rows(rows: Sequence[dict], **options: Any) -> None:
    """Rows as a table with four digits; missing values stay blank."""
    config = _format_columns(rows)
    st.dataframe(list(rows), hide_index=True, width="stretch", column_config=config, placeholder="", **options)


def _download_csv(rows: Sequence[dict], name: str) -> None:
    """A download of rows with all digits."""
    _download("Data (CSV)", lambda: as_csv(rows), f"{name}.csv", "text/csv")


def folded(rows: Sequence[dict], name: str, label: str) -> None:
    """A table in a closed box."""
    with st.expander(label):
        table(rows, name)


def menu(name: str, read_rows: Callable[[], Sequence[dict]], png: Callable[[], bytes]) -> None:
    """The menu below a chart: its data as a table and as CSV, its picture as PNG. Its content is created once it is
    open."""
    popover = st.popover("Data and picture", type="tertiary", key=f"menu-{name}", on_change="rerun")
    if not popover.open:
        return
    with popover:
        st.html(MENU_STYLE)
        _show_rows(rows := read_rows())
        with st.container(horizontal=True):
            _download_csv(rows, name)
            _download("Picture (PNG)", png, f"{name}.png", "image/png")


def steering(rows: Sequence[dict], name: str, key: str, values: Sequence) -> None:
    """A table that sets a control: selecting a row gives the control with this `key` the value of `values` at the
    same index."""
    table_key = f"rows-{name}"

    def set_control() -> None:
        selected_rows = st.session_state[table_key].selection.rows
        if selected_rows and selected_rows[0] < len(values):
            st.session_state[key] = values[selected_rows[0]]

    _show_rows(rows, on_select=set_control, selection_mode="single-row", key=table_key)
    _download_csv(rows, name)


def _format_columns(rows: Sequence[dict]) -> dict:
    """Four digits for the columns of floats, and hundredths for seconds."""
    floats = {key for row in rows for key, value in row.items() if isinstance(value, float)}
    return {key: st.column_config.NumberColumn(format="%.2f" if key == "seconds" else "%.4g") for key in floats}
