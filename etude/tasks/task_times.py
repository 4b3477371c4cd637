"""How long packages took on this machine to be made into tasks and graded, so that it can be said before it is done
again."""

from __future__ import annotations

import json
import math
from pathlib import Path

from environments.sandbox.cache import cache_folder, make_folder
from environments.tasks.package import Package
from etude.console.expected import line
from kit.disk import Journal, read_lines
from kit.process import processor

__all__ = ["remember", "format_expected_duration"]


def times_path() -> Path:
    """The file, beside what else is kept of this machine's tasks."""
    return cache_folder() / "times.jsonl"


def make_key(operation: str, package: Package, join: int, jobs: int, kind: str) -> dict[str, str | int]:
    """What has to be the same: the package, the pieces at once, the number of sandboxes, what makes them, the
    machine."""
    return {
        "what": operation,
        "package": f"{package.name} {package.version}",
        "join": join,
        "jobs": jobs,
        "kind": kind,
        "cpu": processor(),
    }


def remember(operation: str, package: Package, join: int, jobs: int, kind: str, seconds: float, count: int = 1) -> None:
    """Adds a line: `operation` (made, remade or graded) took so long, for `count` of its parts. A folder that cannot be
    written loses the line, and no task."""
    row = {**make_key(operation, package, join, jobs, kind), "seconds": round(seconds, 2), "count": count}
    try:
        make_folder(times_path().parent)
        log = Journal(times_path())
        try:
            log.append(("\n" if log.torn() else "").encode() + json.dumps(row).encode() + b"\n")
        finally:
            log.close()
    except OSError:
        return


def read_last_seconds(operation: str, package: Package, join: int, jobs: int, kind: str) -> float | None:
    """Seconds for each part, as it was the last time; None where nobody has done it here."""
    match_key = make_key(operation, package, join, jobs, kind)
    rows = [
        row
        for row in read_lines(times_path())
        if match_key.items() <= row.items() and is_duration(row.get("seconds")) and is_duration(row.get("count"))
    ]
    return rows[-1]["seconds"] / max(1, rows[-1]["count"]) if rows else None


def is_duration(value: object) -> bool:
    """Whether a line's value is a number that time can be."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


def format_expected_duration(operation: str, package: Package, join: int, jobs: int, kind: str, tasks: int = 0) -> str:
    """The line for a package that is made into tasks (made), or made again (remade) with so many tasks graded; empty
    where the time is short or unknown."""
    making = read_last_seconds(operation, package, join, jobs, kind)
    grading = read_last_seconds("graded", package, join, jobs, kind) if tasks else 0.0
    if making is None or grading is None:
        return ""
    return line(making + tasks * grading, f"as {package.name} {package.version} took on this machine")
