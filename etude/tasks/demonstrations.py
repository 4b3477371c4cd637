"""`etude tasks demonstrate`: scripted episodes on tasks, written as conversations for SFT."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

from environments.grading.guarded import Exam
from environments.harness.demonstrations import STYLES, TOOLS_SHOWN, Demonstration, Style, conversation, demonstrate
from environments.harness.episode import Episode
from environments.harness.record import Record
from environments.harness.scripted import Script
from environments.harness.workspace import Job
from environments.sandbox.cache import cache_folder
from environments.sandbox.open import Kind, open_sandbox, own_store
from environments.tasks.check import exam_of
from environments.tasks.make import Task
from etude.console.progress_line import Line
from etude.tasks.build import recipe_of, recipes
from etude.tasks.episodes import WORKING, store_files, tasks_of
from kit.disk import Journal, parse_json, read_lines
from kit.settings import RunError

__all__ = ["Planned", "open_journal", "play", "write_demonstrations"]


class Planned(NamedTuple):
    """An episode to be played."""

    task: Task
    style: Style
    exam: Exam
    demonstration: Demonstration | None


def play(prompt: str, kind: Kind, planned: Planned) -> dict | None:
    """The conversation of a demonstration; None where there is none, or it does not solve the task. `prompt`:
    "specified" or "terse"."""
    task, style, exam, demonstration = planned
    if demonstration is None:
        return None
    words = task.specified if prompt == "specified" else task.terse
    job = Job(task.id, words, store_files(exam.given_tree), exam.given_tree, None, TOOLS_SHOWN, policy_name=style)
    store, fork = own_store(cache_folder() / "store"), partial(open_sandbox, kind=kind, limits=WORKING)
    with tempfile.TemporaryDirectory(prefix="etude-demonstration-") as folder:
        with Record(Path(folder) / "episode.jsonl") as record:
            tree = store.tree(Episode(job, Script(demonstration.replies), record, fork, store).play())
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
    journal = open_journal(out)
    missing = 0
    with ThreadPoolExecutor(jobs) as pool:
        for path, recipe in rows:
            package, tasks = tasks_of(path, recipe, jobs, seconds, kind)
            exams = {name: exam_of(task, package) for name, task in tasks.items()}
            plan = [  # here, since Python's parser fails now and then in threads
                Planned(task, style, exam, demonstrate(name, style, exam.given_tree, exam.gold_tree, task.visible))
                for (name, task), exam in zip(tasks.items(), exams.values(), strict=True)
                for style in STYLES
                if style in styles and (name, style) not in done
            ]
            progress(len(styles) * len(tasks) - len(plan))
            for (task, style, *_), row in zip(plan, pool.map(partial(play, prompt, kind), plan), strict=True):
                progress(1)
                if row is None:
                    missing += 1
                    continue
                journal.append(json.dumps({"task": task.id, "style": style, **row}).encode() + b"\n")
                counts[style] += 1
    progress.end()
    parts = ", ".join(f"{counts[style]} {style}" for style in styles)
    note = f"; {missing} have none: no test notices a mistake, or tests do not pass in the sandbox" if missing else ""
    print(f"{out}: {sum(counts.values())} conversations ({parts}){note}", flush=True)


def open_journal(path: Path) -> Journal:
    """The file, to be continued: a last line that a kill cut off is taken away."""
    content = path.read_bytes() if path.exists() else b""
    end = content.rfind(b"\n") + 1
    try:
        parse_json(content[end:])
    except ValueError:
        return Journal(path, keep=end)
    journal = Journal(path)  # a whole line, without its end
    journal.append(b"\n")
    return journal
