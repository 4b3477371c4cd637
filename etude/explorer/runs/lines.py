"""Files of a run folder: JSON objects, lines of metrics and of services, and how far each stage is."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kit.disk import read_json, read_lines, timings
from kit.settings import RunError
from recipe.asynchronous.timeline import events, trainings

__all__ = ["accumulate_tokens", "how_far", "json_object", "lines_in", "metrics_in", "services_in", "speed_in"]

CLOCK_KEYS = ("what", "at", "began", "sent", "epoch", "version", "pid")
"""Of the trainer's events, what is no metric."""


def metrics_in(folder: Path) -> dict[str, list[dict]]:
    """Lines of metrics by stage."""
    return {path.stem: lines_in(path) for path in sorted((folder / "metrics").glob("*.jsonl"))}


def speed_in(folder: Path, is_recipe: bool) -> dict[str, list[dict]]:
    """Lines of the speed of a full run's steps, as "speed STAGE". In a run of one technique what is no pretraining or
    SFT is RL, whatever its name."""
    return {
        f"speed {path.stem if is_recipe or path.stem in ('cpt', 'mtp', 'sft') else 'rl'}": lines_in(path)
        for path in sorted((folder / "speed").glob("*.jsonl"))
    }


def accumulate_tokens(lines: list[dict]) -> list[dict]:
    """The lines of a full run with tokens counted from its beginning; there each line has those of its step."""
    total, counted_lines = 0.0, []
    for line in lines:
        total += line.get("tokens", 0.0)
        counted_lines.append({**line, "tokens": total} if "tokens" in line else line)
    return counted_lines


def services_in(folder: Path) -> list[dict]:
    """The trainer's steps so far, numbered by the version that each made."""
    lines = trainings(events(folder / "services").get("trainer", []))
    return [
        {"step": line["version"], **{key: value for key, value in line.items() if key not in CLOCK_KEYS}}
        for line in lines
    ]


def how_far(
    folder: Path, done: Mapping[str, Any], seconds: Mapping[str, float], stages: Sequence[str]
) -> dict[str, str]:
    """How far each stage is, in words, and the time of all together."""
    last_lines = {line["stage"]: line for line in timings(folder) if "step" in line}
    words = {}
    for stage in stages:
        duration = seconds.get(stage)
        if stage in done:
            words[stage] = "done" if duration is None else f"{duration:.0f} s"
        elif stage in last_lines:
            words[stage] = f"{duration:.0f} s so far, at step {last_lines[stage]['step']:g}"
        else:
            words[stage] = "–" if duration is None else f"{duration:.0f} s so far"
    return words | {"together": f"{sum(seconds.values()) / 60:.1f} min"}


def json_object(path: Path) -> dict:
    """The object in a JSON file. Raises RunError if there is none."""
    try:
        content = read_json(path)
    except FileNotFoundError:
        raise RunError(f"{path} is missing") from None
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read ({error})") from None
    if not isinstance(content, dict):
        raise RunError(f"{path} does not hold a JSON object")
    return content


def lines_in(path: Path) -> list[dict]:
    """Complete lines. Skips a line that is still being written or that a kill cut off; a file without complete lines is
    an error."""
    lines = read_lines(path)
    if not lines and path.stat().st_size > 0:
        raise RunError(f"{path} holds no metrics")
    return lines
