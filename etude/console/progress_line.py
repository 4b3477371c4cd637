"""A line that says how far something is."""

from __future__ import annotations

import sys
import time

from etude.console.expected import duration

__all__ = ["Line"]


class Line:
    """How far something is: one line that is drawn again on a terminal, and elsewhere a line every 20 seconds. Where
    the end is known, it says how long the rest will take at the pace so far."""

    def __init__(self, name: str, unit: str, total: int | None = None) -> None:
        self.name, self.unit, self.total, self.done, self.since = name, unit, total, 0, time.monotonic()
        self.last_print = self.since

    def __call__(self, count: int) -> None:
        self.done += count
        current_time, terminal = time.monotonic(), sys.stdout.isatty()
        if current_time - self.last_print >= (0.2 if terminal else 20.0):
            self.last_print = current_time
            status = f"{self.name}: {self.words(current_time - self.since)}"
            print(f"\r\x1b[K{status}" if terminal else status, end="" if terminal else "\n", flush=True)

    def words(self, seconds: float) -> str:
        """How much is done after so many seconds, and how long the rest will take."""
        if self.total is None:
            return f"{self.done} {self.unit}, {seconds:.0f} s"
        remaining_time = (
            f", about {duration(seconds * (self.total - self.done) / self.done)} left"
            if 0 < self.done < self.total
            else ""
        )
        return f"{self.done} of {self.total} {self.unit}, {seconds:.0f} s{remaining_time}"

    def end(self) -> None:
        if sys.stdout.isatty():
            print("\r\x1b[K", end="", flush=True)
