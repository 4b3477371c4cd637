"""A line that says how far something is."""

from __future__ import annotations

import sys
import time

__all__ = ["Line"]


class Line:
    """How far something is: one line that is drawn again on a terminal, and elsewhere a line every 20 seconds."""

    def __init__(self, name: str, what: str) -> None:
        self.name, self.what, self.done, self.since = name, what, 0, time.monotonic()
        self.drawn = self.since

    def __call__(self, count: int) -> None:
        self.done += count
        now, terminal = time.monotonic(), sys.stdout.isatty()
        if now - self.drawn >= (0.2 if terminal else 20.0):
            self.drawn = now
            says = f"{self.name}: {self.done} {self.what}, {now - self.since:.0f} s"
            print(f"\r\x1b[K{says}" if terminal else says, end="" if terminal else "\n", flush=True)

    def end(self) -> None:
        if sys.stdout.isatty():
            print("\r\x1b[K", end="", flush=True)
