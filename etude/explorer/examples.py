"""A run's agent at work: the examples that `etude examples` writes into a run, or for whoever has none the committed ones.

    load(name), arrays(name)         NAME.json and NAME.npz as they now lie in a folder
    remembered(file, …)              keeps what a function makes of these files until one of them changes

Where no folder is given it is that of the committed ones; `etude/explorer/provenance.py` finds the run's.
The explorer may run for days, and the files may be written again meanwhile: whatever is kept of them is kept by path, time and size.
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

__all__ = ["FOLDER", "again", "arrays", "load", "remembered", "unreadable", "write_recipe"]

FOLDER = Path(__file__).resolve().parents[2] / "results" / "examples"


def _step(value: Any) -> dict:
    given = isinstance(value, dict) and value.get("kind") == "given"
    return {"tokens": [str]} if given else {"kind": str, "drafted": [str], "accepted": int, "added": [str]}


_PIECE = {"role": str, "tokens": [str]}
_FACT = {"file": str, "fact": str, "needed": bool, "fate": str}
_PAID = {"success": bool, "reward": NUMBER, "tests": NUMBER, "effort": NUMBER, "invalid": NUMBER, "kl": NUMBER, "contexts": [[int], ...]}
_DRAFTS = {"drafted": [int, ...], "accepted": [int, ...]}
SHAPES: dict[str, dict] = {
    "rollouts": {
        "rollouts": [
            {"task": str, "success": bool, "own_tokens": int, "given_tokens": int, "calls": int, "turns": int, "invalid_calls": int, "text": str},
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
                "group": [_PAID, ...],
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
    "drafting": {"task": str, "tasks": int, "identical": int, "turns": [int, ...], "drafts": {"1": _DRAFTS, ...: _DRAFTS}, "steps": [_step, ...]},
}
"""What the pages need of each JSON, as `files.unlike` takes it."""
ARRAYS = {"routing": ("behavior", "logp"), "token-distributions": ("policy", "reference")}
"""The arrays that they need of each NPZ."""


def load(name: str, folder: Path | None = None) -> dict:
    """NAME.json. RunError where it is missing or broken, or lacks what the pages show of it."""
    path = (folder or FOLDER) / f"{name}.json"
    try:
        return _load(*stamp(path))
    except (OSError, ValueError, RecursionError) as error:
        raise unreadable(path, error) from None


@lru_cache(16)
def _load(path: Path, changed: int, size: int) -> dict:
    return parsed(path, SHAPES[path.stem])


def arrays(name: str, folder: Path | None = None) -> dict[str, np.ndarray]:
    """NAME.npz. RunError where it is missing or broken, or lacks an array."""
    path = (folder or FOLDER) / f"{name}.npz"
    try:
        return _arrays(*stamp(path))
    except Exception as error:  # of a damaged archive zipfile, zlib and NumPy each complain in ways of their own
        raise unreadable(path, error) from None


@lru_cache(8)
def _arrays(path: Path, changed: int, size: int) -> dict[str, np.ndarray]:
    with np.load(path) as stored:
        found = dict(stored)
    missing = [name for name in ARRAYS[path.stem] if name not in found]
    if missing:
        raise ValueError(f"{missing[0]} is missing")
    return found


def unreadable(path: Path, why: object) -> RunError:
    """One line about an example."""
    return RunError(f"example {path.name} cannot be read ({' '.join(str(why).split())}); write it again with: {again(path.parent)}")


def again(folder: Path) -> str:
    """The command that writes the examples of a folder."""
    return "etude examples --out results/examples" if folder == FOLDER else f"etude examples --run {shlex.quote(str(folder.parent))}"


def remembered(*files: str, most: int = 1) -> Callable[[Callable], Callable]:
    """The last `most` results of a function are kept for as long as these files of the folder that it is given stay as they are."""

    def keeping(function: Callable) -> Callable:
        kept = lru_cache(most)(lambda stamps, folder, *arguments: function(*arguments, folder=folder))

        @wraps(function)
        def call(*arguments: Any, folder: Path | None = None) -> Any:
            folder = folder or FOLDER
            try:
                stamps = tuple(stamp(folder / file) for file in files)
            except OSError:
                return function(*arguments, folder=folder)  # says what is missing
            return kept(stamps, folder, *arguments)

        return call

    return keeping


LINES = 120
"""Of each stage's metrics about so many lines are kept at most."""


def write_recipe(run_folder: Path, folder: Path | None = None) -> Path:
    """What the explorer shows of a finished run of the recipe, copied to `folder` (FOLDER/recipe): config.json, report.json, and of
    each stage's metrics every so many lines, those with a measurement on held-out code and the last one always.

    Returns `folder`. RunError where the run is none of the recipe, is not finished, or cannot be read."""
    run_folder, folder = Path(run_folder), FOLDER / "recipe" if folder is None else Path(folder)
    record = collect(run_folder)
    if record["technique"] != "recipe" or any(stage not in record["stages"] for stage in STAGES):
        raise RunError(f"{run_folder} holds no finished run of the recipe; make small plays one")
    (folder / "metrics").mkdir(parents=True, exist_ok=True)
    atomic_write(folder / "config.json", (run_folder / "config.json").read_bytes())
    atomic_write(folder / "report.json", json.dumps(record, indent=1) + "\n")
    for path in sorted((run_folder / "metrics").glob("*.jsonl")):
        lines = read_lines(path)
        every = -(-len(lines) // LINES)
        kept = [line for i, line in enumerate(lines) if i % every == 0 or "codebase_ppl" in line or i == len(lines) - 1]
        atomic_write(folder / "metrics" / path.name, "".join(json.dumps(line) + "\n" for line in kept))
    return folder
