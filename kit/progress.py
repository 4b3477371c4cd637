"""The live line of a running stage: percent, rate, values, time left."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from typing import Any, Protocol

__all__ = ["Progress", "ProgressSource"]


class ProgressSource(Protocol):
    """What `Progress` shows: a stage of a run, or an object that acts as one."""

    name: str
    unit: str
    start_time: float
    """When it began, by `time.perf_counter`."""

    @property
    def total(self) -> float: ...

    @property
    def seconds(self) -> float: ...

    def note_time(self, **facts: Any) -> None:
        """Keeps what was measured by now."""


class Progress:
    """A rich bar on a terminal; elsewhere a plain line every few seconds."""

    def __init__(self, stage: ProgressSource) -> None:
        self.stage, self.bar, self.task = stage, None, None
        self.first: tuple[float, float] | None = None
        self.window: deque[tuple[float, float]] = deque(maxlen=64)
        self.step, self.values = 0.0, {}
        self.last_draw = self.last_note = -math.inf

    def update(self, step: float, units: float, values: dict[str, Any]) -> None:
        time_now = time.perf_counter()
        self.step, self.values = step, {**self.values, **values}
        if self.first is None:
            self.first = (self.stage.start_time, step)
        if not self.window or time_now - self.window[-1][0] > 0.25:
            self.window.append((time_now, units))
        if time_now - self.last_note >= 2.0:
            self.last_note = time_now
            self.stage.note_time(step=step, rate=round(self.rate(), 1), unit=self.stage.unit)
        if sys.stdout.isatty():
            if time_now - self.last_draw >= 0.1:
                self.last_draw = time_now
                self.draw()
        elif time_now - self.last_draw >= 5.0:
            self.last_draw = time_now
            self.print_line()

    def rate(self) -> float:
        """Units per second over the last window of updates."""
        if len(self.window) < 2:
            return 0.0
        (start, before), (end, after) = self.window[0], self.window[-1]
        return max(after - before, 0.0) / max(end - start, 1e-9)

    def left(self) -> str:
        start, before = self.first or (0.0, 0.0)
        done = self.step - before
        if self.step >= self.stage.total:
            return _format_clock(0)
        if done <= 0:
            return "-:--"
        return _format_clock((self.stage.total - self.step) * (time.perf_counter() - start) / done)

    def words(self) -> str:
        rate = self.rate()
        speed = f"{_format_short(rate)} {self.stage.unit}/s" if rate else ""
        return "  ".join(
            filter(None, [speed, *(f"{key} {_format_short(value)}" for key, value in self.values.items())])
        )

    def percent(self) -> float:
        return 100.0 if not self.stage.total else min(100.0, 100.0 * self.step / self.stage.total)

    def draw(self) -> None:
        if self.bar is None:
            from rich.progress import BarColumn, Progress, TextColumn
            from rich.table import Column

            self.bar = Progress(
                TextColumn("[bold]{task.description:>6}", table_column=Column(no_wrap=True, min_width=6)),
                BarColumn(16),
                TextColumn("{task.percentage:>3.0f}%", table_column=Column(no_wrap=True, min_width=4)),
                TextColumn("{task.fields[clock]}", table_column=Column(no_wrap=True, min_width=11)),
                TextColumn("{task.fields[words]}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)),
                expand=True,
                refresh_per_second=8,
            )
            self.bar.start()
            self.task = self.bar.add_task(self.stage.name, total=self.stage.total or 1, clock="", words="")
        assert self.task is not None
        self.bar.update(
            self.task,
            completed=min(self.step, self.stage.total or 1),
            words=self.words(),
            clock=f"{_format_clock(self.stage.seconds)} < {self.left()}",
        )

    def say(self, line: str) -> None:
        if self.bar is None:
            print(line, flush=True)
        else:
            self.bar.console.print(line, markup=False, highlight=False)

    def print_line(self) -> None:
        print(
            f"{self.stage.name:>6} {self.percent():3.0f}%  {_format_clock(self.stage.seconds)} < "
            f"{self.left()}  {self.words()}",
            flush=True,
        )

    def last(self) -> None:
        """Prints the line of the finished stage, which stays on screen."""
        self.step = self.stage.total
        if sys.stdout.isatty():
            self.draw()
        else:
            self.print_line()

    def stop(self) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None


def _format_clock(seconds: float) -> str:
    total_seconds = int(seconds)
    hours, minutes = divmod(total_seconds // 60, 60)
    return f"{hours}:{minutes:02d}:{total_seconds % 60:02d}" if hours else f"{minutes}:{total_seconds % 60:02d}"


def _format_short(value: Any) -> str:
    """A number in few characters: a rate of 12345 becomes 12.3k."""
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if letter == 'k' else limit):.1f}{letter}"
    return str(value) if isinstance(value, int) else f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
