"""`etude tasks demonstrate`: scripted episodes on tasks, written as conversations for SFT."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from environments.harness.demonstration_file import check_styles, record_demonstrations
from environments.harness.demonstrations import STYLES
from environments.sandbox.open import Kind
from environments.tasks.load import list_recipes, read_recipe
from etude.console.progress_line import Line
from etude.tasks.build import load_with_progress

__all__ = ["write_demonstrations"]


def write_demonstrations(
    paths: Sequence[Path],
    out: Path,
    styles: Sequence[str],
    prompt: str,
    jobs: int,
    seconds: float,
    kind: Kind = "bubblewrap",
) -> None:
    """Writes a line to `out` for each task of recipes and each style; what is there already is not played again. Raises
    RunError where no recipe is found, for an unknown style, and where `out` is another file, or has another prompt."""
    styles = check_styles(styles)
    recipes = [(path, read_recipe(path)) for path in dict.fromkeys(list_recipes(paths))]
    progress = Line("demonstrations", "episodes", len(styles) * sum(len(recipe["tasks"]) for _, recipe in recipes))
    packages = (load_with_progress(path, recipe, jobs, seconds, kind) for path, recipe in recipes)
    by_style, missing, before = record_demonstrations(out, packages, styles, prompt, jobs, kind, progress=progress)
    progress.end()
    parts = ", ".join(f"{by_style[style]} {style}" for style in STYLES if by_style[style])
    parts += f"; {before} of them from before" if before else ""
    note = f"; {missing} have none: no test notices a mistake, or tests do not pass in the sandbox" if missing else ""
    print(f"{out}: {by_style.total()} conversations ({parts}){note}", flush=True)
