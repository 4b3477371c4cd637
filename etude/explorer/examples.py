"""Committed examples of a real run, for whoever has none: `etude examples` writes them from runs/small into results/examples/."""

import json
from functools import lru_cache
from pathlib import Path

import numpy as np

from etude.record import STAGES, collect, read_lines
from etude.runs import RunError, atomic_write

__all__ = ["FOLDER", "arrays", "load", "write_recipe"]

FOLDER = Path(__file__).resolve().parents[2] / "results" / "examples"


@lru_cache(None)
def load(name: str) -> dict:
    """NAME.json. RunError where it is missing or broken."""
    path = FOLDER / f"{name}.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError("it holds no JSON object")
        return found
    except (OSError, ValueError) as error:
        raise RunError(f"example {path.name} cannot be read ({error}); write it again with: etude examples") from None


@lru_cache(None)
def arrays(name: str) -> dict[str, np.ndarray]:
    """NAME.npz. RunError where it is missing or broken."""
    path = FOLDER / f"{name}.npz"
    try:
        with np.load(path) as stored:
            return dict(stored)
    except (OSError, ValueError, KeyError) as error:
        raise RunError(f"example {path.name} cannot be read ({error}); write it again with: etude examples") from None


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
