"""What a drawing becomes: Vega-Lite that its own grammar allows, the figures that were given, what hovering says, and a
picture of the same."""

import io
import json
import math

import altair
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from etude.explorer.charts import printed, vega
from etude.explorer.charts.chart import Axis, Look, bars, boxes, cells, drawing, lines, points, ranges, rule, words
from etude.explorer.drawing import COLOURS

ROWS = [
    {"way": way, "x": x, "y": x * k, "low": x * k - 1, "high": x * k + 1, "to": x + 1}
    for way, k in (("a", 1.0), ("b", 2.0))
    for x in range(4)
]
NAMED = [
    {"way": way, "x": x, "y": y}
    for way, x, y in (("a", "one", 0.0), ("a", "two", 3.0), ("b", "one", 1.0), ("b", "two", 2.0))
]
DRAWN = {
    "lines": drawing("x", "y", lines(ROWS, "x", "y", "way"), rule("here", x=1.5), rule("there", y=2.0)),
    "all near": drawing(
        "x",
        Axis("y", log=True),
        lines(ROWS, "x", "y", "way"),
        points(ROWS, "x", "y", "way", hollow=True),
        ranges(ROWS, "x", "low", "high"),
    ),
    "histogram": drawing("x", "y", bars(ROWS, "x", "y", "way", to="to"), rule("mean", x=1, low=True)),
    "side by side": drawing(Axis("x", names=True), Axis("y", upper=4), bars(NAMED, "x", "y", "way"), rule(x="two")),
    "dodged": drawing(Axis("x", names=True), "y", points(NAMED, "x", "y", "way", dodge=True), rule(y=0)),
    "stacked": drawing(Axis("x", names=True), "y", bars(NAMED, "x", "y", "way", stacked=True)),
    "bars and line": drawing(
        Axis("x", names=True), "y", bars(NAMED[:2], "x", "y"), lines(NAMED[2:], "x", "y", look=Look("red", "--"))
    ),
    "cells": drawing(Axis("x", names=True), Axis("way", names=True), cells(NAMED, "x", "way", "y")),
    "boxes and words": drawing(
        "x",
        Axis("", lower=-2, upper=8, ticks={0.5: "first", 7.25: "last $"}),
        boxes(ROWS, "x", "to", "low", "high", "way", tell=("y",)),
        words(ROWS, "x", "y", "way", tell=("to",), angle=300),
    ),
    "thin and parted": drawing("x", "y", lines(ROWS, "x", "y", "way", thin=True, split="to")),
}


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *((name, "zoom") for name in DRAWN),
        ("all near", "brush"),
        *((name, "pick") for name in ("all near", "stacked", "dodged")),
    ],
)
def test_the_grammar_allows_every_chart(name, mode):
    drawn = DRAWN[name]
    spec = vega.spec(drawn, mode)
    assert altair.LayerChart.from_dict({"data": {"name": "source"}, **spec}).to_dict()["layer"]
    named = [param["name"] for layer in spec["layer"] for param in layer.get("params", [])]
    assert named.count(mode) == (0 if mode == "zoom" and drawn.x.names else 1), (
        "one drag or click means one thing, and names cannot be moved"
    )


@pytest.mark.parametrize("drawn", DRAWN.values(), ids=DRAWN)
def test_the_table_holds_the_rows_and_nothing_else(drawn):
    table = vega.table(drawn)
    assert {len(column) for column in table.values()} == {sum(len(layer.rows) for layer in drawn.layers)}
    for part, row, y in zip(table["part"], table["row"], table["y"], strict=True):
        layer = drawn.layers[part]
        if layer.y is not None and y is not None:
            assert y == (str if drawn.y.names else float)(layer.rows[row][layer.y])
    used = json.dumps(vega.spec(drawn))
    assert all(name in table for name in ("x", "y", "by", "part")) and "datum.t9" not in used


def test_the_download_is_a_picture():
    width, height = Image.open(io.BytesIO(printed.png(DRAWN["lines"]))).size
    assert width > height > 300


@pytest.mark.parametrize("drawn", DRAWN.values(), ids=DRAWN)
def test_the_picture_leaves_nothing_out(drawn):
    fig, wide = printed.printed(drawn), printed.printed(drawn, wide=True)
    assert wide.get_figwidth() == 1.5 * fig.get_figwidth()
    (ax,) = fig.axes
    for name, axis in (("x", drawn.x), ("y", drawn.y)):
        low, high = sorted(getattr(ax, f"get_{name}lim")())
        for layer in drawn.layers:
            places = [
                row[column]
                for row in layer.rows
                for column in (getattr(layer, name), getattr(layer, f"{name}2"))
                if column
            ]
            assert axis.names or all(low <= place <= high for place in places if not axis.log or place > 0)
    said = {text.get_text() for text in legend.get_texts()} if (legend := ax.get_legend()) else set()
    assert said == (set(drawn.looks) if len(drawn.looks) > 1 else set()) | {
        layer.says for layer in drawn.layers if layer.says
    }


def test_equal_marks_of_a_rollout_stand_side_by_side():
    """In the chart and in its picture, in the order of the legend; the layer for hovering has the same places."""
    rows = [{"way": way, "x": 1, "y": 0.5} for way in "abc"]
    dodged = drawing(Axis("x", names=True), "y", points(rows, "x", "y", "way", dodge=True))
    offsets = [layer["encoding"].get("xOffset", {}).get("sort") for layer in vega.spec(dodged)["layer"]]
    assert offsets == [["a", "b", "c"]] * 2
    places = [line.get_xdata()[0] for line in printed.printed(dodged).axes[0].lines]
    assert places == pytest.approx([-0.8 / 3, 0, 0.8 / 3])


def test_words_are_turned_in_the_chart_and_in_its_picture():
    drawn = DRAWN["boxes and words"]
    (mark,) = [layer["mark"] for layer in vega.spec(drawn)["layer"] if layer["mark"]["type"] == "text"]
    turned = {text.get_rotation() for text in printed.printed(drawn).axes[0].texts}
    assert mark["angle"] == 300 and turned == {60.0}, "clockwise in one, and the other way round in the other"


@given(
    st.floats(allow_nan=True, allow_infinity=False)
    | st.integers(-(10**9), 10**9)
    | st.none()
    | st.booleans()
    | st.text(max_size=5)
)
def test_hovering_says_what_a_value_is(value):
    (said,) = vega.table(drawing("x", "y", points([{"x": 0.5, "y": 1.5, "it": value}], "x", "y", tell=("it",))))["t2"]
    if isinstance(value, bool):
        assert said == ("yes" if value else "no")
    elif value is None or value != value:
        assert said == "–"
    elif isinstance(value, float):
        assert said == "exactly 0" if value == 0 else math.isclose(float(said), value, rel_tol=1e-5)
    else:
        assert said == str(value)


@given(st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=7, unique=True))
def test_every_series_can_be_told_apart_without_its_colour(names):
    drawn = drawing("x", "y", lines([{"s": name, "x": x, "y": x} for name in names for x in (0, 1)], "x", "y", "s"))
    assert list(drawn.looks) == names
    assert len({look.colour for look in drawn.looks.values()}) == len(names)
    assert len({(look.dash, look.mark) for look in drawn.looks.values()}) == len(names)


def test_a_logarithmic_axis_leaves_out_what_it_cannot_show():
    table = vega.table(drawing("x", Axis("y", log=True), lines([{"x": 1, "y": 0.0}, {"x": 2, "y": 1.0}], "x", "y")))
    assert table["y"] == [None, 1.0] and table["t1"] == ["exactly 0", "1"]


@pytest.mark.parametrize(
    ("words", "rows"), [("a", 1), ("two words", 2), ("some more words", 3), ("words that need a row for themselves", 5)]
)
def test_a_legend_takes_nothing_from_the_picture(words, rows):
    names = [f"{words} {n}" for n in range(5)]
    drawn = drawing(
        "x", "y", lines([{"s": name, "x": x, "y": x} for name in names for x in (0, 1)], "x", "y", "s", thin=True)
    )
    made = vega.spec(drawn)
    legend = made["layer"][0]["encoding"]["color"]["legend"]
    assert -(-len(names) // legend["columns"]) == rows and legend["symbolOpacity"] == 1
    assert made["height"] - drawn.height == (rows - 1) * vega.LEGEND_ROW


def test_a_filled_mark_does_not_cover_a_hollow_one():
    both = [
        vega.spec(drawing("x", "y", points(ROWS, "x", "y", hollow=hollow)))["layer"][0]["mark"]
        for hollow in (True, False)
    ]
    assert not both[0]["filled"] and both[1]["filled"] and both[0]["size"] > 2 * both[1]["size"]


@given(st.floats(1e-6, 1e6), st.floats(1.0, 100.0))
def test_a_short_logarithmic_axis_has_ticks_at_one_two_and_five(low, over):
    drawn = drawing(
        "x", Axis("y", log=True), lines([{"x": 0, "y": low}, {"x": 1, "y": low * over}, {"x": 2, "y": 0.0}], "x", "y")
    )
    axis = vega.spec(drawn)["layer"][0]["encoding"]["y"]
    ticks = axis["axis"]["values"]
    assert ticks[0] <= low * (1 + 1e-9) and low * over <= ticks[-1] * (1 + 1e-9) and axis["scale"]["padding"] > 0
    assert all(1.99 < after / before < 2.51 for before, after in zip(ticks, ticks[1:], strict=False))


def test_a_long_logarithmic_axis_is_left_to_vega():
    drawn = drawing("x", Axis("y", log=True), lines([{"x": 0, "y": 1e-4}, {"x": 1, "y": 1.0}], "x", "y"))
    assert "values" not in vega.spec(drawn)["layer"][0]["encoding"]["y"]["axis"]


@pytest.mark.parametrize("ground", [1.0, 0.0087], ids=["white", "black"])
@pytest.mark.parametrize("name", [*COLOURS, "words"])
def test_colours_are_seen_on_light_and_dark(name, ground):
    """A contrast of 2 for lines, 3 for words, as WCAG reckons it; `ground` is Streamlit's background, light or dark."""
    text = vega.WORDS if name == "words" else COLOURS[name]
    linear = [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
        for c in (int(text[i : i + 2], 16) / 255 for i in (1, 3, 5))
    ]
    bright = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    assert (max(bright, ground) + 0.05) / (min(bright, ground) + 0.05) > (3 if name == "words" else 2)
