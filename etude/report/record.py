"""The content of a run folder, as one dictionary and as series to draw. Half a run gives half a record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from kit.disk import atomic_write, read_json, timings


def collect(root: Path) -> dict:
    """Configuration, machine, stage results and stage times of a run folder as one dictionary."""
    config = _read_object(root / "config.json")
    stages = {}
    for path in sorted((root / "stages").glob("*.json")):
        stage_record = _read_object(path)
        stages[path.stem] = stage_record.get("result", stage_record)
    seconds: dict[str, float] = {}
    memory: dict[str, float] = {}
    for line in timings(root):
        stage = line["stage"]
        seconds[stage] = max(seconds.get(stage, 0.0), line["seconds"])
        if "peak_memory_gib" in line:
            memory[stage] = max(memory.get(stage, 0.0), line["peak_memory_gib"])
    return {
        "technique": config.get("technique"),
        "config": config.get("config"),
        "machine": config.get("machine"),
        "seconds": seconds,
        "total_seconds": round(sum(seconds.values()), 1),
        "peak_memory_gib": max(memory.values(), default=None),
        "stages": stages,
    }


# The stages of the recipe, in order.
STAGES: tuple[str, ...] = ("data", "cpt", "mtp", "long", "sft", "rl", "eval", "decode")


def stages_of(record: dict) -> tuple[str, ...]:
    """The stages of a run, in order: those of the recipe, or of a run on packages."""
    config = record.get("config") or {}
    has_drafts = (config.get("cluster") or {}).get("drafts", True)
    if (config.get("tasks") or {}).get("recipes") is None:
        times_decoding = has_drafts and (config.get("evaluation") or {}).get("decode_rounds") != 0
        skipped_stages = {"mtp": not has_drafts, "decode": not times_decoding}
        return tuple(stage for stage in STAGES if not skipped_stages.get(stage))
    has_corpus = (config.get("data") or {}).get("corpus") is not None
    pretraining = (("cpt", "mtp", "long") if has_drafts else ("cpt", "long")) if has_corpus else ()
    return ("tasks", "data", *pretraining, "sft", "measure", "rl", "eval")


# Key, name, number format, and whether higher is better (None: neither).
_MEASURES = (
    ("success", "success, sampled", "{:.3f}", True),
    ("greedy", "success, greedy", "{:.3f}", True),
    ("best_of_", "best of ", "{:.3f}", True),
    ("valid_calls", "valid calls, share", "{:.3f}", True),
    ("finished", "finished, share", "{:.3f}", True),
    ("tokens", "tokens", "{:.1f}", False),
    ("turns", "turns", "{:.2f}", False),
    ("invalid_calls", "invalid calls", "{:.3f}", False),
    ("segments", "contexts per rollout", "{:.2f}", False),
    ("failed", "left out: sandbox failed, rollouts", "{:.0f}", False),
)


def before_after(record: dict) -> list[tuple[str, ...]]:
    """Rows (measure, before, after, difference) with intervals as text, with a run on packages also the checkpoint that
    it started from in front (`columns`); empty without an evaluation. Only packages have shares of valid calls and of
    finished episodes."""
    result = record.get("stages", {}).get("eval", {})
    moments = [
        result.get(key) or {} for key in ("checkpoint", "before", "after") if key in result or key != "checkpoint"
    ]
    difference = result.get("difference") or {}
    rows = []
    for key, name, form, _ in _MEASURES:
        if key == "best_of_":
            key, name = best_of(result)
        if any(key in moment for moment in moments) and (key != "finished" or "checkpoint" in result):
            values = [in_words(moment.get(key), form) for moment in moments]
            rows.append((name, *values, in_words(difference.get(key), form.replace(":", ":+"))))
    parts = [part.get("behaviours") or {} for part in (*moments, difference)]
    for key in dict.fromkeys(key for part in parts for key in part):  # recipe/small/behaviours.py
        values = [in_words(part.get(key), "{:.2f}") for part in parts[:-1]]
        rows.append((f"{key.replace('_', ' ')}, share", *values, in_words(parts[-1].get(key), "{:+.2f}")))
    return rows


def best_of(result: dict) -> tuple[str, str]:
    """The key of best of n in an evaluation, and its name."""
    samples = result.get("samples")
    n = samples if type(samples) is int else 8
    return f"best_of_{n}", f"best of {n}"


def describe_failed(record: dict, lines: list[dict]) -> str:
    """How many rollouts of RL were left out because their environments failed; empty if none. `lines`: its metrics."""
    failed_counts = [line["failed"] for line in lines if line.get("failed")]
    settings = (record.get("config") or {}).get("rl") or {}
    if not failed_counts:
        return ""
    return (
        f"{sum(failed_counts):.0f} of {len(lines) * settings.get('prompts', 0) * settings.get('rollouts', 0)} rollouts "
        f"were left out, as their environments failed, in {len(failed_counts)} of {len(lines)} steps"
    )


def columns(record: dict) -> tuple[str, ...]:
    """The headings of `before_after`, without the first."""
    start = ("checkpoint",) if "checkpoint" in record.get("stages", {}).get("eval", {}) else ()
    return (*start, "before RL", "after RL", "difference")


def _read_object(path: Path) -> dict:
    try:
        value = read_json(path)
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def replace_text(path: Path, text: str) -> None:
    atomic_write(path, text.encode("utf-8", errors="backslashreplace"))  # a file name need not be UTF-8


def as_triple(value: Any) -> tuple[float, float, float] | None:
    """(value, low, high) of a number or an interval; None if it is missing."""
    if isinstance(value, dict):
        middle = value.get("value", value.get("median"))
        if middle is None:
            return None
        low, high = value.get("low"), value.get("high")
        return middle, middle if low is None else low, middle if high is None else high
    return None if value is None else (value, value, value)


def in_words(value: Any, form: str = "{:.3f}") -> str:
    """A number or an interval; what rounds to zero has no sign, and a dash stands for what is missing."""
    triple = as_triple(value)
    if triple is None:
        return "–"
    middle, low, high = (_strip_zero_sign(form.format(part)) for part in triple)
    return middle if low == middle == high else f"{middle} [{low}, {high}]"


def _strip_zero_sign(text: str) -> str:
    return text if any(digit in text for digit in "123456789") else text.lstrip("+-")


def points_of(lines: list[dict], y: str, x: str = "step") -> tuple[np.ndarray, np.ndarray]:
    """The points of metric `y` against `x`, from the lines that have both."""
    points = [
        (line.get(x, line["step"]), line[y])
        for line in lines
        if isinstance(line.get(y), (int, float)) and "step" in line
    ]
    array = np.array(points, dtype=float).reshape(-1, 2)
    return array[:, 0], array[:, 1]


def joined_lines(metrics: dict, *stages: str) -> tuple[list[dict], list[tuple[str, int]]]:
    """The lines of stages that train one after another, with continuous step and token counts, and where each
    began."""
    joined: list[dict] = []
    borders, step, tokens = [], 0, 0
    for stage in stages:
        lines = [line for line in metrics.get(stage, []) if isinstance(line.get("step"), int)]
        if not lines:
            continue
        borders.append((stage, step))
        token_counts = [line.get("tokens") or 0 for line in lines]
        joined += [
            {**line, "step": line["step"] + step, "tokens": count + tokens, "phase": line.get("phase", stage)}
            for line, count in zip(lines, token_counts, strict=True)
        ]
        step, tokens = joined[-1]["step"], tokens + max(token_counts)
    return joined, borders


def evaluation_of(record: dict) -> dict:
    """The result of the evaluation, plus the timed decoding, which is a separate stage."""
    stages = record["stages"]
    result = dict(stages.get("eval", {}))
    if stages.get("decode"):
        result["speculative"] = stages["decode"]
    return result


def smoothed(values: np.ndarray, width: int) -> np.ndarray:
    """Centred moving average over finite values; the window shrinks at both ends. NaN only if the window holds no
    finite value."""
    if width < 2 or len(values) < 3:
        return values
    finite = np.isfinite(values)
    total, count = (np.concatenate([[0.0], np.cumsum(x)]) for x in (np.where(finite, values, 0.0), finite))
    index = np.arange(len(values))
    low, high = np.maximum(index - width // 2, 0), np.minimum(index + width // 2 + 1, len(values))
    window_count = count[high] - count[low]
    return np.where(window_count > 0, (total[high] - total[low]) / np.maximum(window_count, 1), np.nan)
