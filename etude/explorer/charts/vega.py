"""A drawing as a Vega-Lite chart: hover tells exact figures, a drag moves the axes or brushes, Shift and the wheel
zoom, a click picks a row.

    table(drawn)          all rows of all layers as the columns of one table, which is sent apart from the chart: while
                          only figures
                          change, the browser keeps the chart and exchanges the table
    spec(drawn, mode)     the chart, as Vega-Lite's grammar (version 6) says

Columns get short names, since Vega-Lite reads dots and brackets in a name as a path; titles and hovering say their real
ones. Hovering finds the nearest row anywhere in the picture, so fingers hit it, too. Text and grid take their colours
from Streamlit's theme, light or dark."""

import json
import math
from collections.abc import Sequence
from typing import Any, Literal

from etude.explorer.drawing import Axis, Drawing, Layer

__all__ = ["BRUSH", "PICK", "spec", "table"]

BRUSH, PICK = "brush", "pick"
"""Names of the selections that Streamlit reports."""
Mode = Literal["zoom", "brush", "pick"]
DASHES = {"-": [1, 0], "--": [6, 4], ":": [2, 3], "-.": [8, 3, 2, 3]}
MARKS = {"o": "circle", "s": "square", "^": "triangle-up", "D": "diamond", "v": "triangle-down", "x": "cross"}
NEAREST_DATUM = "(isValid(datum.datum) ? datum.datum : datum)"
"""The row of a point, and of the surroundings in which hovering finds it, whose datum is the point."""
LEGEND_ROW = 28
"""Pixels by which every further row of the legend makes a chart higher: Vega takes them from the picture."""
MAX_TICK_RATIO = 300
"""Largest over smallest, from which on powers of ten are ticks enough."""
WORDS = "#808A94"
"""Colour of words in the picture, which can be read on white and on black."""


def table(drawing: Drawing) -> dict[str, list]:
    """Columns: the number of the layer, the row in it, its places, its series, and what hovering tells of it."""
    max_tell = max((len(layer.tell) for layer in drawing.layers), default=0)
    columns: dict[str, list] = {
        name: []
        for name in (
            "part",
            "row",
            "x",
            "y",
            "x2",
            "y2",
            "by",
            "dash",
            "split",
            "shade",
            *(f"t{i}" for i in range(max_tell)),
        )
    }
    for part, layer in enumerate(drawing.layers):
        row_count = len(layer.rows)
        columns["part"] += [part] * row_count
        columns["row"] += range(row_count)
        for name in ("x", "y", "x2", "y2", "by", "split", "shade"):
            column = getattr(layer, name)
            values = [None] * row_count if column is None else [row.get(column) for row in layer.rows]
            columns[name] += (
                [None if entry is None else str(entry) for entry in values] if name in ("by", "split") else values
            )
        for i in range(max_tell):
            columns[f"t{i}"] += (
                [_format_value(row.get(layer.tell[i])) for row in layer.rows]
                if i < len(layer.tell)
                else [None] * row_count
            )
    # by another name: dashes join the legend of markers only where they can be told apart there
    columns["dash"] = columns["by"]
    for name, axis in (("x", drawing.x), ("y", drawing.y)):
        for column in (name, f"{name}2"):
            columns[column] = [_to_coordinate(value, axis) for value in columns[column]]
    return columns


def _to_coordinate(value: Any, axis: Axis) -> Any:
    if axis.names:
        return None if value is None else str(value)
    return None if value is None or axis.log and not value > 0 else float(value)


def _format_value(value: Any) -> str | None:
    """What hovering says of a value: six digits of a number, and where it is exactly zero, that."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return "exactly 0" if value == 0 else "–" if value != value else f"{value:.6g}"
    return "–" if value is None else str(value)


def spec(drawing: Drawing, mode: Mode = "zoom") -> dict:
    """The chart, without its figures."""
    near = any(_has_nearest_row(layer) for layer in drawing.layers) and not any(
        layer.kind == "box" for layer in drawing.layers
    )
    layers = [
        _encode_layer(drawing, part, layer, direct=not near, mode=mode) for part, layer in enumerate(drawing.layers)
    ]
    rule_labels = [_make_rule_label(drawing, part, layer) for part, layer in enumerate(drawing.layers) if layer.says]
    if near:
        # Where a click chooses, what lies between the marks is not in their way.
        marks = any(layer.kind == "point" for layer in drawing.layers)
        kinds = ("point",) if mode == "pick" and marks else ("line", "point", "bar")
        layers.append(
            _make_hover_layer(drawing, [part for part, layer in enumerate(drawing.layers) if layer.kind in kinds], mode)
        )
    return {
        "height": drawing.height + LEGEND_ROW * max(0, _count_legend_rows(drawing) - 1),
        "layer": [*layers, *rule_labels],
    }


def _count_legend_columns(drawing: Drawing) -> int:
    """Of the legend: the shorter its words, the more of them stand side by side, on a phone too."""
    longest, together = max(map(len, drawing.looks), default=0), sum(map(len, drawing.looks))
    return 1 if longest > 24 else 5 if together <= 22 else 2 if longest > 11 else 3


def _count_legend_rows(drawing: Drawing) -> int:
    has_legend = len(drawing.looks) > 1 and any(layer.by for layer in drawing.layers)
    return -(-len(drawing.looks) // _count_legend_columns(drawing)) if has_legend else 0


def _make_ticks(drawing: Drawing, name: str) -> list[float] | None:
    """Of a logarithmic axis that is short: 1, 2 and 5 of every power of ten. None where Vega's own are enough."""
    raw_values = [
        row.get(column)
        for layer in drawing.layers
        for column in (getattr(layer, name), getattr(layer, f"{name}2"))
        if column
        for row in layer.rows
    ]
    values = [float(value) for value in raw_values if value is not None and value > 0]
    if not values or max(values) > MAX_TICK_RATIO * min(values):
        return None
    powers = range(math.floor(math.log10(min(values))), math.ceil(math.log10(max(values))) + 1)
    return [digit * 10.0**power for power in powers for digit in (1, 2, 5)]


def _has_nearest_row(layer: Layer) -> bool:
    """Whether hovering finds the nearest row of the layer; wide marks tell of themselves."""
    return layer.kind in ("line", "point") or layer.kind == "bar" and layer.x2 is not None


def _encode_layer(drawing: Drawing, part: int, layer: Layer, direct: bool, mode: Mode) -> dict:
    """The marks of a layer. `direct`: they tell of themselves and take clicks, because no layer of near points lies
    over them."""
    encoding: dict[str, Any] = {}
    for name in ("x", "y"):
        if getattr(layer, name) is not None:
            encoding[name] = _encode_axis(name, drawing)
        if getattr(layer, f"{name}2") is not None and layer.kind != "bar":
            encoding[f"{name}2"] = {"field": f"{name}2"}
    mark = {
        "line": {"type": "line", "strokeWidth": 0.7 if layer.thin else 2, "opacity": 0.4 if layer.thin else 1},
        "point": {"type": "point", "filled": not layer.hollow, "size": layer.size, "strokeWidth": 1.8, "opacity": 1},
        "bar": {"type": "bar"}
        if layer.x2 is None
        else {"type": "line", "interpolate": "step-after", "strokeWidth": 1.6},
        "range": {"type": "rule", "strokeWidth": 2},
        "cell": {"type": "rect"},
        "box": {"type": "rect", "clip": True},
        "text": {"type": "text", "clip": True, "fontSize": 11, "fontWeight": "bold"},
        "rule": {"type": "rule", "strokeWidth": 1.2, "strokeDash": DASHES[layer.look.dash]},
    }[layer.kind]
    mark = mark | {"tooltip": {"expr": _make_tooltip(layer)} if direct and layer.kind != "rule" else None}
    if layer.kind == "range":
        mark["clip"] = True
    if layer.hollow:
        mark["size"] = 150  # around a filled mark at the same place
    if layer.by is None:
        mark["color"] = layer.look.hex
        if mark["type"] == "line":
            mark["strokeDash"] = DASHES[layer.look.dash]
        if layer.kind == "point":
            mark["shape"] = MARKS[layer.look.mark]
    else:
        encoding |= _encode_series(drawing, layer)
    if layer.shade is not None:
        encoding["opacity"] = {
            "field": "shade",
            "type": "quantitative",
            "scale": {"domain": [0, 1], "range": [0, 1]},
            "legend": None,
        }
    if layer.kind == "text":
        encoding["text"] = {"field": "t0"}
        mark |= {"align": "left", "font": "monospace", "fontSize": 9, "fontWeight": "normal"} if layer.code else {}
        mark |= {"angle": layer.angle} if layer.angle else {}
    if layer.split is not None:
        encoding["detail"] = {"field": "split", "type": "nominal"}
    if mark["type"] == "bar" and layer.by is not None:
        encoding["y"] |= {"stack": "zero" if layer.stacked else None}
    if layer.dodge:
        encoding["xOffset"] = _encode_offset(drawing)
    layer_spec: dict[str, Any] = {
        "transform": [{"filter": f"datum.part === {part}"}],
        "mark": mark,
        "encoding": encoding,
    }
    if (
        direct
        and layer.kind != "rule"
        and not any(previous_layer.kind != "rule" for previous_layer in drawing.layers[:part])
    ):
        layer_spec["params"] = _make_params(drawing, mode, near=False)
    return layer_spec


def _encode_series(drawing: Drawing, layer: Layer) -> dict:
    """Colour, dashes and markers by series; the legend has all of them."""
    names, looks = list(drawing.looks), drawing.looks.values()
    legend: dict[str, Any] | None = {
        "orient": "top",
        "title": None,
        "labelLimit": 0,
        "columns": _count_legend_columns(drawing),
        "symbolOpacity": 1,  # also where the first layer is faint
    }
    filled_flags = (
        candidate.kind in ("point", "cell", "box") or candidate.kind == "bar" and candidate.x2 is None
        for candidate in drawing.layers
        if candidate.by
    )
    lines_only = not any(filled_flags)
    if len(names) < 2:
        legend = None
    elif lines_only:
        legend |= {"symbolType": "stroke", "symbolSize": 500, "symbolStrokeWidth": 2}

    def make_scale(values: list, field: str = "by") -> dict:
        return {"field": field, "type": "nominal", "scale": {"domain": names, "range": values}}

    encoding: dict[str, Any] = {"color": make_scale([look.hex for look in looks]) | {"legend": legend}}
    if layer.kind == "line" or layer.kind == "bar" and layer.x2 is not None:
        encoding["strokeDash"] = make_scale([DASHES[look.dash] for look in looks], "by" if lines_only else "dash") | {
            "legend": legend if lines_only else None
        }
    if layer.kind == "point":
        encoding["shape"] = make_scale([MARKS[look.mark] for look in looks]) | {"legend": legend}
    return encoding


def _encode_offset(drawing: Drawing) -> dict:
    """The place of a series at a name of the horizontal axis."""
    return {"field": "by", "type": "nominal", "sort": list(drawing.looks)}


def _encode_axis(name: str, drawing: Drawing) -> dict:
    axis: Axis = getattr(drawing, name)
    if axis.names:
        return {
            "field": name,
            "type": "ordinal",
            "sort": None,
            "title": axis.title or None,
            "axis": {"labelAngle": 0, "labelOverlap": True},
        }
    zero = axis.zero if axis.zero is not None else name == "y" and not axis.log
    scale: dict[str, Any] = {"type": "log", "nice": False} if axis.log else {"zero": zero, "nice": name == "y"}
    if (name == "x" or axis.log) and axis.lower is None and axis.upper is None:
        scale["padding"] = 6  # marks at the ends are whole
    if axis.lower is not None:
        scale["domainMin"] = axis.lower
    if axis.upper is not None:
        scale |= {"domainMax": axis.upper, "nice": False}
    axis_options: dict[str, Any] = (
        {"format": "~g", "tickCount": 5, "gridOpacity": 0.4} if axis.log else {"tickCount": 5}
    )
    if axis.integer:
        axis_options |= {"format": "d", "tickMinStep": 1}
    if axis.log and (ticks := _make_ticks(drawing, name)):
        axis_options |= {"values": ticks, "tickCount": len(ticks)}  # a smaller count would thin them
    if axis.ticks is not None:
        label_expression = "".join(
            f"datum.value === {place:g} ? {json.dumps(label)} : " for place, label in axis.ticks.items()
        )
        axis_options = {
            "values": list(axis.ticks),
            "labelExpr": f"{label_expression}''",
            "grid": False,
            "ticks": False,
            "domain": False,
            "labelOverlap": False,
            "labelLimit": 180,
        }
        axis_options |= {"labelAngle": -60} if name == "x" else {}
    return {"field": name, "type": "quantitative", "title": axis.title or None, "scale": scale, "axis": axis_options}


def _make_hover_layer(drawing: Drawing, parts: Sequence[int], mode: Mode) -> dict:
    """Rows of all layers with lines or points, unseen until the pointer is near."""
    tooltip = "null"
    for part in reversed(parts):
        tooltip = f"{NEAREST_DATUM}.part === {part} ? {_make_tooltip(drawing.layers[part], NEAREST_DATUM)} : {tooltip}"
    hover_condition = {"param": "hover", "empty": False, "value": 1}
    offset = {"xOffset": _encode_offset(drawing)} if all(drawing.layers[part].dodge for part in parts) else {}
    return {
        "transform": [
            {"filter": " || ".join(f"datum.part === {part}" for part in parts)},
            {"filter": "isValid(datum.x) && isValid(datum.y)"},
        ],
        "mark": {
            "type": "point",
            "filled": False,
            "size": 140,
            "strokeWidth": 2,
            "color": WORDS,
            "tooltip": {"expr": tooltip},
        },
        "encoding": {
            "x": _encode_axis("x", drawing),
            "y": _encode_axis("y", drawing),
            **offset,
            "opacity": {
                "condition": [
                    hover_condition,
                    *([{"param": PICK, "empty": False, "value": 1}] if mode == "pick" else []),
                ],
                "value": 0,
            },
        },
        "params": [
            {"name": "hover", "select": {"type": "point", "on": "pointerover", "clear": "pointerout", "nearest": True}},
            *_make_params(drawing, mode, near=True),
        ],
    }


def _make_params(drawing: Drawing, mode: Mode, near: bool) -> list[dict]:
    """What a drag or a click does."""
    if mode == "brush":
        return [{"name": BRUSH, "select": {"type": "interval", "encodings": ["x"]}}]
    if mode == "pick":
        return [
            {
                "name": PICK,
                "select": {
                    "type": "point",
                    "fields": ["part", "row"],
                    "toggle": False,
                    **({"nearest": True} if near else {}),
                },
            }
        ]
    if drawing.x.names:
        return []  # names cannot be moved
    # The wheel alone scrolls the page.
    return [{"name": "zoom", "select": {"type": "interval", "zoom": "wheel![event.shiftKey]"}, "bind": "scales"}]


def _make_tooltip(layer: Layer, datum: str = "datum") -> str:
    """An expression for what hovering says: the layer's columns by their real names."""
    return (
        "{"
        + ", ".join(f"{json.dumps(name, ensure_ascii=False)}: {datum}.t{i}" for i, name in enumerate(layer.tell))
        + "}"
    )


def _make_rule_label(drawing: Drawing, part: int, layer: Layer) -> dict:
    """The words of a rule, at its upper or right end."""
    text_lines = layer.says.split("\n")
    if layer.x is not None:
        position = {"x": _encode_axis("x", drawing), "y": {"value": "height" if layer.low else 2}}
        style = {"align": "left", "baseline": "top", "dx": 4, "dy": -13 * len(text_lines) if layer.low else 0}
    else:
        position = {"x": {"value": "width"}, "y": _encode_axis("y", drawing)}
        style = {"align": "right", "baseline": "bottom", "dy": -3}
    return {
        "transform": [{"filter": f"datum.part === {part}"}],
        "mark": {"type": "text", "text": text_lines, "color": WORDS, "fontSize": 11, "tooltip": None} | style,
        "encoding": position,
    }
