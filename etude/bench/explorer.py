"""`etude bench explorer`: how long each control of the explorer takes to redraw its page, without a browser.

Streamlit's own test driver runs each page as a session would. Every slider takes values that were not shown before, so no picture comes
from a cache. The browser's time to show the picture is not included.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

from etude.bench import written
from kit.process import machine

VALUES = 8
"""Redraws per control."""
SLOW = 120.0
"""A page counts as hung after this many seconds."""


def bench(out: Path | None = Path("results")) -> dict:
    """Wall-clock seconds of every slider's redraws; writes out/explorer-MACHINE.json."""
    from etude.explorer import PAGES

    controls = [one for page in PAGES for one in redraws(page.name)]
    every = [second for one in controls for second in one["seconds"]]
    for one in controls:
        print(f"{one['page']:11s} {one['control']:22s} median {one['median_s'] * 1e3:4.0f} ms, slowest {max(one['seconds']) * 1e3:4.0f} ms")
    record = {
        "what": "seconds from a slider's move to the page drawn anew, server side, wall clock",
        "command": "etude bench explorer",
        "machine": machine(),
        "median_s": statistics.median(every),
        "slowest_control_median_s": max(one["median_s"] for one in controls),
        "controls": controls,
    }
    print(f"all redraws: median {record['median_s'] * 1e3:.0f} ms; the slowest control's median {record['slowest_control_median_s'] * 1e3:.0f} ms")
    return written(record, out, "explorer", record["machine"]["cpu"])


def redraws(name: str) -> list[dict]:
    """Each slider of a page, with the seconds of its redraws."""
    from streamlit.testing.v1 import AppTest

    at = AppTest.from_string(f"from etude.explorer import start\nstart({name!r})", default_timeout=SLOW).run()
    found = []
    for kind in ("slider", "select_slider"):
        for key in [widget.key for widget in getattr(at, kind)]:
            widget = getattr(at, kind)(key=key)
            seconds = []
            for value in values(kind, widget):
                began = time.perf_counter()
                getattr(at, kind)(key=key).set_value(value).run()
                seconds.append(time.perf_counter() - began)
                if at.exception:
                    raise RuntimeError(f"{name}, {key} = {value}: {at.exception[0].message}")
            found.append({"page": name, "control": key, "median_s": statistics.median(seconds), "seconds": [round(s, 4) for s in seconds]})
    return found


def values(kind: str, widget) -> list:
    """Values spread over the range of a slider, without its current value."""
    if kind == "select_slider":
        return [option for option in map(number, widget.options) if option != widget.value][:VALUES]
    least, most, step = widget.min, widget.max, widget.step or 1
    steps = round((most - least) / step)
    some = [least + step * (i * steps // VALUES) for i in range(VALUES + 1)]
    return [type(widget.value)(value) for value in dict.fromkeys(some) if value != widget.value][:VALUES]


def number(text: str) -> object:
    """An option of a select slider, as the page defined it."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text
