"""`etude bench explorer`: how long a page of the explorer takes to open, and each of its controls to redraw it, without
a browser.

Streamlit's own test driver runs each page as a session would. Every slider takes values that were not shown before, so
no picture comes from a cache. A page is opened cold: by a session that has seen no page, before any picture of it was
drawn; the program itself has started. The browser's time to show what was drawn is not included.
"""

from __future__ import annotations

import statistics
import time
from logging import getLogger
from pathlib import Path
from typing import TYPE_CHECKING

from etude.bench import write_record
from kit.process import machine

if TYPE_CHECKING:
    from streamlit.testing.v1 import AppTest

VALUES = 8
"""Redraws per control."""
SLOW = 120.0
"""A page counts as hung after this many seconds."""


def bench(out: Path | None = Path("results")) -> dict:
    """Wall-clock seconds of every slider's redraws; writes out/explorer-MACHINE.json."""
    from etude.explorer import PAGES

    open_page(PAGES[-1].name)  # what all pages load once
    pages, controls = [], []
    for page in PAGES:
        at, seconds = open_page(page.name)
        pages.append({"page": page.name, "cold_s": round(seconds, 4)})
        print(f"{page.name:16s} cold {seconds * 1e3:5.0f} ms")
        for control in redraws(at, page.name):
            controls.append(control)
            print(
                f"{control['page']:16s} {control['control']:22s} median {control['median_s'] * 1e3:4.0f} ms, slowest "
                f"{max(control['seconds']) * 1e3:4.0f} ms"
            )
    all_seconds = [second for control in controls for second in control["seconds"]]
    record = {
        "what": "seconds from a slider's move to the page drawn anew, and from a new session to a page's first "
        "drawing; server side, wall clock",
        "command": "etude bench explorer",
        "machine": machine(),
        "median_s": statistics.median(all_seconds),
        "slowest_control_median_s": max(control["median_s"] for control in controls),
        "slowest_cold_s": max(row["cold_s"] for row in pages),
        "pages": pages,
        "controls": controls,
    }
    print(
        f"all redraws: median {record['median_s'] * 1e3:.0f} ms; the slowest control's median "
        f"{record['slowest_control_median_s'] * 1e3:.0f} ms"
    )
    print(f"cold: the slowest page {record['slowest_cold_s'] * 1e3:.0f} ms")
    return write_record(record, out, "explorer", record["machine"]["cpu"])


def open_page(name: str) -> tuple[AppTest, float]:
    """A page in a new session, and the seconds until it was drawn. Raises RuntimeError if it fails."""
    from streamlit.testing.v1 import AppTest

    getLogger("streamlit.runtime.scriptrunner_utils.script_run_context").setLevel(
        "ERROR"
    )  # the driver runs in no session, and is told so each time
    at = AppTest.from_string(f"from etude.explorer import start\nstart({name!r})", default_timeout=SLOW)
    start = time.perf_counter()
    at.run()
    seconds = time.perf_counter() - start
    if at.exception:
        raise RuntimeError(f"{name}: {at.exception[0].message}")
    return at, seconds


def redraws(at: AppTest, name: str) -> list[dict]:
    """Each slider of a page, with the seconds of its redraws."""
    results = []
    for kind in ("slider", "select_slider"):
        for key in [widget.key for widget in getattr(at, kind)]:
            widget = getattr(at, kind)(key=key)
            seconds, before = [], widget.value
            for value in choose_values(kind, widget):
                start = time.perf_counter()
                getattr(at, kind)(key=key).set_value(value).run()
                seconds.append(time.perf_counter() - start)
                if at.exception:
                    raise RuntimeError(f"{name}, {key} = {value}: {at.exception[0].message}")
            results.append(
                {
                    "page": name,
                    "control": key,
                    "median_s": statistics.median(seconds),
                    "seconds": [round(s, 4) for s in seconds],
                }
            )
            getattr(at, kind)(key=key).set_value(before).run()  # one slider can take another away, or change its range
    return results


def choose_values(kind: str, widget) -> list:
    """Values spread over the range of a slider, without its current value."""
    if kind == "select_slider":
        return [option for option in map(number, widget.options) if option != widget.value][:VALUES]
    minimum, maximum, step = widget.min, widget.max, widget.step or 1
    steps = round((maximum - minimum) / step)
    candidates = [minimum + step * (i * steps // VALUES) for i in range(VALUES + 1)]
    return [type(widget.value)(value) for value in dict.fromkeys(candidates) if value != widget.value][:VALUES]


def number(text: str) -> object:
    """An option of a select slider, as the page defined it."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text
