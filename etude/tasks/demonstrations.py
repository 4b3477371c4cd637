"""`etude tasks demonstrate`: scripted episodes on tasks, written as conversations for SFT."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from environments.grading.guarded import Exam
from environments.harness.demonstrations import STYLES, TOOLS_SHOWN, Style, conversation, demonstrate
from environments.harness.episode import Episode
from environments.harness.record import Record
from environments.harness.scripted import Script
from environments.harness.workspace import Job
from environments.sandbox.cache import cache_folder
from environments.sandbox.open import Kind, open_sandbox, own_store
from environments.tasks.check import exam_of
from environments.tasks.make import Task
from environments.tasks.package import Package
from etude.console.progress_line import Line
from etude.tasks.build import recipe_of, recipes
from etude.tasks.episodes import WORKING, store_files, tasks_of
from kit.disk import Journal, read_lines
from kit.settings import RunError

__all__ = ["play", "write_demonstrations"]


def play(task: Task, exam: Exam, style: Style, prompt: str, kind: Kind) -> dict | None:
    """The conversation of a demonstration; None where the script of this style does not apply to the task, or does not
    solve it. `prompt`: "specified" or "terse"."""
    demonstration = demonstrate(task.id, style, exam.given_tree, exam.gold_tree, task.visible)
    if demonstration is None:
        return None
    words = task.specified if prompt == "specified" else task.terse
    job = Job(task.id, words, store_files(exam.given_tree), exam.given_tree, None, TOOLS_SHOWN, policy_name=style)
    store = own_store(cache_folder() / "store")
    with tempfile.TemporaryDirectory(prefix="etude-demonstration-") as folder:
        with Record(Path(folder) / "episode.jsonl") as record:
            script = Script(demonstration.replies)
            tree = store.tree(
                Episode(job, script, record, partial(open_sandbox, kind=kind, limits=WORKING), store).play()
            )
            is_gold = all(
                (tree / name).is_file() and (tree / name).read_bytes() == exam.gold_tree[name]
                for name in exam.editable.names
            )
            return conversation(record.lines, demonstration) if is_gold else None


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
    RunError where no recipe is found, for an unknown style, and where `out` is another file."""
    if unknown := [style for style in styles if style not in STYLES]:
        raise RunError(f"there is no style {unknown[0]!r}; there are {', '.join(STYLES)}")
    styles = list(dict.fromkeys(styles))
    rows = [(path, recipe_of(path)) for folder in paths for path in recipes(folder)]
    if out.suffix != ".jsonl":
        raise RunError(f"{out} must be a file of JSON lines, NAME.jsonl")
    lines = read_lines(out) if out.exists() else []
    if not all(isinstance(line.get("task"), str) and line.get("style") and "messages" in line for line in lines):
        raise RunError(f"{out} is no file of demonstrations; choose another one with --out")
    done = {(line["task"], line["style"]) for line in lines}
    total = len(styles) * sum(len(recipe["tasks"]) for _, recipe in rows)
    counts, progress = Counter[str](line["style"] for line in lines), Line("demonstrations", "episodes", total)
    progress(0)
    out.parent.mkdir(parents=True, exist_ok=True)
    journal = Journal(out)
    missing = 0
    with ThreadPoolExecutor(jobs) as pool:
        for path, recipe in rows:
            package, tasks = tasks_of(path, recipe, jobs, seconds, kind)
            pairs = [
                (task, style)
                for task in tasks.values()
                for style in STYLES
                if style in styles and (task.id, style) not in done
            ]
            progress(len(styles) * len(tasks) - len(pairs))
            rows_played = pool.map(partial(_play_pair, package, prompt, kind), pairs)
            for (task, style), row in zip(pairs, rows_played, strict=True):
                progress(1)
                if row is None:
                    missing += 1
                    continue
                journal.append(json.dumps({"task": task.id, "style": style, **row}).encode() + b"\n")
                counts[style] += 1
    progress.end()
    parts = ", ".join(f"{counts[style]} {style}" for style in styles)
    note = f"; {missing} have none: no mistake that a test notices, or a file that the script cannot edit" * bool(
        missing
    )
    print(f"{out}: {sum(counts.values())} conversations ({parts}){note}", flush=True)


def _play_pair(package: Package, prompt: str, kind: Kind, pair: tuple[Task, Style]) -> dict | None:
    task, style = pair
    return play(task, exam_of(task, package), style, prompt, kind)
