"""Examples of a run's agent at work: those that `etude examples` writes into a run, or the committed ones.

    load(name), arrays(name)         the current NAME.json and NAME.npz in a folder
    remembered(file, …)              caches a function of these files until one of them changes

The default folder is that of the committed examples; `etude/explorer/provenance.py` finds the folder of a run.
The explorer may run for days while files are rewritten, so caches are keyed by path, time and size.
"""

import json
import shlex
from collections.abc import Callable
from functools import lru_cache, wraps
from pathlib import Path
from typing import Any

import numpy as np

from etude.explorer.files import NUMBER, parsed, stamp
from etude.report.record import STAGES, collect
from kit.disk import atomic_write, read_lines
from kit.settings import RunError

__all__ = ["FOLDER", "format_write_command", "arrays", "load", "remembered", "unreadable", "write_recipe"]

FOLDER = Path(__file__).resolve().parents[2] / "results" / "examples"


def _describe_step(value: Any) -> dict:
    is_given = isinstance(value, dict) and value.get("kind") == "given"
    return {"tokens": [str]} if is_given else {"kind": str, "drafted": [str], "accepted": int, "added": [str]}


_PIECE = {"role": str, "tokens": [str]}
_FACT = {"file": str, "fact": str, "needed": bool, "fate": str}
_GROUP_MEMBER = {
    "success": bool,
    "reward": NUMBER,
    "tests": NUMBER,
    "effort": NUMBER,
    "invalid": NUMBER,
    "kl": NUMBER,
    "contexts": [[int], ...],
}
_HINT_ROLLOUT = {
    "task": str,
    "answer": str,
    "success": bool,
    "rule": str,
    "says": str,
    "other": str,
    "text": str,
    "begin": int,
    "end": int,
}
_HINT_ROLLOUT |= {"logp": NUMBER, "own": [[int, ...], ...], "tokens": [int, ...]}
_DRAFTS = {"drafted": [int, ...], "accepted": [int, ...]}
SHAPES: dict[str, dict] = {
    "rollouts": {
        "rollouts": [
            {
                "task": str,
                "success": bool,
                "own_tokens": int,
                "given_tokens": int,
                "calls": int,
                "turns": int,
                "invalid_calls": int,
                "text": str,
            },
            ...,
        ]
    },
    "chain": {
        "trigger": int,
        "chains": [
            {
                "task": str,
                "success": bool,
                "saved": int,
                "place": int,
                "group": [_GROUP_MEMBER, ...],
                "contexts": [[_PIECE, ...], ...],
                "notes": [{"summary": str, "scripted": str, "facts": [_FACT]}],
            }
        ],
    },
    "routing": {
        "sampler": str,
        "trainer": str,
        "alphas": [NUMBER, ...],
        "played": int,
        "chosen": str,
        "rollouts": [{"task": str, "success": bool, "tokens": [str, ...], "sampled": [int, ...]}, ...],
    },
    "hints": {"temperature": NUMBER, "played": int, "chosen": str, "rollouts": [_HINT_ROLLOUT]},
    "drafting": {
        "task": str,
        "tasks": int,
        "identical": int,
        "turns": [int, ...],
        "drafts": {"1": _DRAFTS, ...: _DRAFTS},
        "steps": [_describe_step, ...],
    },
}
"""What the pages need from each JSON file, in the format of `kit.disk.describe_mismatch`."""
ARRAYS = {"routing": ("behavior", "logp"), "token-distributions": ("policy", "reference")}
"""The arrays that the pages need from each NPZ file."""


def load(name: str, folder: Path | None = None) -> dict:
    """NAME.json. Raises RunError if it is missing or broken, or lacks something that the pages show."""
    path = (folder or FOLDER) / f"{name}.json"
    try:
        return _load_json(*stamp(path))
    except (OSError, ValueError, RecursionError) as error:
        raise unreadable(path, error) from None


@lru_cache(16)
def _load_json(path: Path, changed: int, size: int) -> dict:
    return parsed(path, SHAPES[path.stem])


def arrays(name: str, folder: Path | None = None) -> dict[str, np.ndarray]:
    """NAME.npz. Raises RunError if it is missing or broken, or lacks an array."""
    path = (folder or FOLDER) / f"{name}.npz"
    try:
        return _load_arrays(*stamp(path))
    except Exception as error:  # zipfile, zlib and NumPy raise different errors for a damaged archive
        raise unreadable(path, error) from None


@lru_cache(8)
def _load_arrays(path: Path, changed: int, size: int) -> dict[str, np.ndarray]:
    with np.load(path) as archive:
        arrays_by_name = dict(archive)
    missing = [name for name in ARRAYS[path.stem] if name not in arrays_by_name]
    if missing:
        raise ValueError(f"{missing[0]} is missing")
    return arrays_by_name


def unreadable(path: Path, reason: object) -> RunError:
    """A one-line error about an example."""
    return RunError(
        f"example {path.name} cannot be read ({' '.join(str(reason).split())}); write it again with: "
        f"{format_write_command(path.parent, path.name)}"
    )


def format_write_command(folder: Path, name: str = "") -> str:
    """The command that writes the examples of a folder, or the one of this name."""
    if folder == FOLDER and name == "hints.json":
        return "python -m etude.play.example_hints"  # of the committed agent, which is there without its run
    return (
        "etude examples --out results/examples"
        if folder == FOLDER
        else f"etude examples --run {shlex.quote(str(folder.parent))}"
    )


def remembered(*files: str, max_results: int = 1) -> Callable[[Callable], Callable]:
    """Caches the last `max_results` results of a function until these files in its folder change."""

    def decorate(function: Callable) -> Callable:
        cached_function = lru_cache(max_results)(lambda stamps, folder, *arguments: function(*arguments, folder=folder))

        @wraps(function)
        def call(*arguments: Any, folder: Path | None = None) -> Any:
            folder = folder or FOLDER
            try:
                stamps = tuple(stamp(folder / file) for file in files)
            except OSError:
                return function(*arguments, folder=folder)  # raises an error that says what is missing
            return cached_function(stamps, folder, *arguments)

        return call

    return decorate


LINES = 120
"""Approximate maximum number of metrics lines to keep per stage."""


def write_recipe(run_folder: Path, folder: Path | None = None) -> Path:
    """Copies what the explorer shows of a finished run of the recipe to `folder` (FOLDER/recipe): config.json,
    report.json, and every n-th line of each stage's metrics. Lines with a measurement on held-out code and the last
    line are always kept.

    Returns `folder`. Raises RunError if the folder is not a finished run of the recipe, or cannot be read."""
    run_folder, folder = Path(run_folder), FOLDER / "recipe" if folder is None else Path(folder)
    record = collect(run_folder)
    if record["technique"] != "recipe" or any(stage not in record["stages"] for stage in STAGES):
        raise RunError(f"{run_folder} holds no finished run of the recipe; make one with: make small")
    (folder / "metrics").mkdir(parents=True, exist_ok=True)
    atomic_write(folder / "config.json", (run_folder / "config.json").read_bytes())
    atomic_write(folder / "report.json", json.dumps(record, indent=1) + "\n")
    for path in sorted((run_folder / "metrics").glob("*.jsonl")):
        lines = read_lines(path)
        stride = -(-len(lines) // LINES)
        sampled_lines = [
            line for i, line in enumerate(lines) if i % stride == 0 or "codebase_ppl" in line or i == len(lines) - 1
        ]
        atomic_write(folder / "metrics" / path.name, "".join(json.dumps(line) + "\n" for line in sampled_lines))
    return folder
