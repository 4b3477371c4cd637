"""The explorer without a browser: pages opened by name, every control moved to every end, tables edited.

What tests of several pages need stands here as fixtures that are functions:

    page(name, **query)     opens a page, as its link with these query parameters would
    go(at, name, **query)   goes on to another page, or to another address of the same
    whole(at)               nothing on it is an exception; returns it
    controls(at)            its controls, in order
    drive(at)               moves every control to each end and through its options; how often it was drawn
    edit(at, ...)           edits the page's table
    open_menus(at)          opens the menu of every chart, which has its data as a table
    table(at, column)       the first table that has this column, as a data frame; it opens the menus if there is none
    plays(at, key)          plays the sequence of the slider with this key, and pauses it; where it began
"""

import re
from functools import cache

import pytest
from matplotlib.figure import Figure
from streamlit.components.v2 import manifest_scanner
from streamlit.testing.v1 import AppTest

from etude.bench.explorer import number

# Streamlit looks through all installed packages for components whenever a test opens a page: two thirds of the time.
# Once is enough.
manifest_scanner.scan_component_manifests = cache(manifest_scanner.scan_component_manifests)
SLOW = 120
"""Seconds that a page may take at most: a page that hangs fails, on a slow machine too."""
KINDS = (
    "slider",
    "select_slider",
    "selectbox",
    "radio",
    "multiselect",
    "button_group",
    "number_input",
    "checkbox",
    "toggle",
    "text_input",
)
BY_HAND = {"run", "examples", "async-run", "episode"}
"""Controls that the page itself keeps in the URL; of all others Streamlit does."""
LENGTH = re.compile(r"-\d+(\.\d+)?-")
"""In a button's key: how long the sequence is that it plays."""


@pytest.fixture(autouse=True)
def no_runs(tmp_path_factory, monkeypatch):
    """The explorer looks for runs in the working directory: here there are none, whatever was run in this checkout."""
    monkeypatch.chdir(tmp_path_factory.mktemp("empty"))


def _whole(at):
    assert not at.exception, "\n".join([*(e.message for e in at.exception), *at.exception[0].stack_trace])
    return at


@pytest.fixture
def whole():
    return _whole


@pytest.fixture
def page():
    def opened(name, **query):
        at = AppTest.from_string(f"from etude.explorer import start\nstart({name!r})", default_timeout=SLOW)
        at.query_params.update(query)
        return _whole(at.run())

    return opened


@pytest.fixture
def go():
    def gone(at, name, **query):
        # AppTest finds pages by their file, and these have none.
        at._page_hash = next(key for key, known in at._registered_pages.items() if known.get("url_pathname") == name)
        at.query_params = dict(query)
        return _whole(at.run())

    return gone


def _controls(at):
    return [control for kind in KINDS for control in getattr(at, kind)]


@pytest.fixture
def controls():
    return _controls


def _open_menus(at):
    for popover in at.get("popover"):
        at.session_state[popover.key] = True
    return _whole(at.run())


@pytest.fixture
def open_menus():
    return _open_menus


@pytest.fixture
def table():
    def find_table(at, column):
        if not any(column in frame.value.columns for frame in at.dataframe):
            _open_menus(at)
        return next(frame.value for frame in at.dataframe if column in frame.value.columns)

    return find_table


@pytest.fixture
def plays():
    def played(at, key):
        at.button(key=f"{key}-play").click()
        _whole(at.run())
        assert at.button(key=f"{key}-play").label == "Pause"
        moment = at.slider(key=f"{key}-playing").value
        at.button(key=f"{key}-play").click()
        _whole(at.run())
        assert at.button(key=f"{key}-play").label == "Play" and at.slider(key=key).value == moment
        return moment

    return played


@pytest.fixture
def edit():
    def edited(at, rows=None, add=(), delete=()):
        """`rows`: {row: {column: value}}, over what was edited before."""
        key = at.data_editor[0].key
        before = at.session_state[key]["edited_rows"] if key in at.session_state else {}
        at.session_state[key] = {
            "edited_rows": {**before, **(rows or {})},
            "added_rows": list(add),
            "deleted_rows": list(delete),
        }
        return _whole(at.run())

    return edited


def _settings(widget):
    """Values that a control is driven through; they end where it began."""
    kind, now = widget.type, widget.value
    if kind in ("slider", "number_input"):
        ends = [end for end in (widget.min, widget.max) if end is not None]
        return [*(type(now)(end) for end in ends), now]
    if kind == "select_slider":
        return [number(widget.options[0]), number(widget.options[-1]), now]
    if kind in ("selectbox", "radio"):
        return [*widget.options, now]
    if kind in ("multiselect", "button_group"):
        names = [getattr(option, "content", option) for option in widget.options]
        several = isinstance(now, list)
        return [*([name] if several else name for name in names), *([[], names] if several else []), now]
    if kind in ("checkbox", "toggle"):
        return [not now, now]
    if kind == "text_input":
        return ["zebra", now]
    return []


@pytest.fixture
def drive():
    def driven(at):
        drawn = 0
        for kind, key, bound in [(w.type, w.key, w.proto.query_param_key) for w in _controls(at)]:
            assert key, f"a control without a key is not in the URL: {kind}"
            assert key != "n", "which lesson is meant; a link to one would lose it here"
            settings = _settings(getattr(at, kind)(key=key))
            for value in settings:
                getattr(at, kind)(key=key).set_value(value)
                _whole(at.run())
                drawn += 1
            chosen = key in at.query_params or all(value == settings[0] for value in settings)
            assert bound == key or key in BY_HAND and chosen, f"{kind} {key} is not in the URL"
        clicked = set()  # a click may rename another button, whose key holds how long its sequence is
        while waiting := {
            LENGTH.sub("-", button.key): button.key
            for button in at.button
            if LENGTH.sub("-", button.key) not in clicked
        }:
            name, key = next(iter(waiting.items()))
            clicked.add(name)
            at.button(key=key).click()
            _whole(at.run())
            drawn += 1
        return drawn

    return driven


def _charts(at):
    """What each chart is made of: its grammar and its figures."""
    return [
        (one.proto.spec, one.proto.data.data, *(some.data.data for some in one.proto.datasets))
        for one in at.get("vega_lite_chart")
    ]


@pytest.fixture
def redrawn(monkeypatch, whole):
    """How many pictures are drawn, and charts changed, when a control is moved: that is what a redraw waits for. `etude
    bench explorer` says how long."""
    drawn = []
    savefig = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *how, **more: drawn.append(self) or savefig(self, *how, **more))

    def moved(at, control, value):
        before = _charts(at)
        drawn.clear()
        control.set_value(value)
        whole(at.run())
        return len(drawn) + sum(one not in before for one in _charts(at))

    return moved
