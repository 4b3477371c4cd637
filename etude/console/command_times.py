"""How long commands that are no runs took on this machine, so that it can be said before they are played again with the
same settings."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from environments.sandbox.cache import cache_folder, make_folder
from etude.console.expected import ALIKE, LONG, line
from kit.disk import Journal, read_lines
from kit.process import machine

__all__ = ["remember", "format_expected_duration"]


def locate_journal() -> Path:
    """The file, beside the times of tasks."""
    return cache_folder() / "commands.jsonl"


def make_key(command: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What has to be the same: the command, the settings but for the seed, the machine."""
    text, host = json.dumps({**settings, "seed": None}, sort_keys=True), machine()
    return {
        "command": command,
        "settings": hashlib.sha256(text.encode()).hexdigest(),
        **{fact: host.get(fact) for fact in ALIKE},
    }


def remember(command: str, settings: Mapping[str, Any], seconds: float) -> None:
    """Adds a line: the command took so long, if that is long enough to be told. A folder that cannot be written loses
    the line, and nothing else."""
    if seconds < LONG:
        return
    try:
        make_folder(locate_journal().parent)
        log = Journal(locate_journal())
        try:
            log.append(
                ("\n" if log.torn() else "").encode()
                + json.dumps({**make_key(command, settings), "seconds": round(seconds, 2)}).encode()
                + b"\n"
            )
        finally:
            log.close()
    except OSError:
        return


def format_expected_duration(command: str, settings: Mapping[str, Any]) -> str:
    """The line for a command: as long as it took the last time; empty where that is unknown, or short."""
    run_key = make_key(command, settings)
    durations = [
        row["seconds"]
        for row in read_lines(locate_journal())
        if run_key.items() <= row.items() and is_duration(row.get("seconds"))
    ]
    return line(durations[-1], f"as etude {command} took on this machine with such a run") if durations else ""


def is_duration(value: object) -> bool:
    """Whether a line's value is a number that time can be."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf
