"""`etude tasks demonstrate`: scripted episodes on tasks, written as conversations for SFT."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from environments.grading.guarded import Exam
from environments.harness.demonstrations import STYLES, TOOLS_SHOWN, Demonstration, Style, conversation, demonstrate
from environments.harness.episode import Episode
from environments.harness.record import Record
from environments.harness.scripted import Script
from environments.sandbox.cache import cache_folder
from environments.sandbox.open import Kind, open_sandbox, own_store
from environments.tasks.check import exam_of
from environments.tasks.make import Task
from etude.console.progress_line import Line
from etude.tasks.build import list_recipes, recipe_of
from etude.tasks.episodes import WORKING, job_of, tasks_of
from kit.disk import Journal, read_lines
from kit.settings import RunError

__all__ = ["Planned", "play", "read_demonstrations", "write_demonstrations"]


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
    job = replace(job_of(task, exam, prompt, None, False, style), tools=TOOLS_SHOWN)
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
    RunError where no recipe is found, for an unknown style, and where `out` is another file, or has another prompt."""
    if unknown := [style for style in styles if style not in STYLES]:
        raise RunError(f"there is no style {unknown[0]!r}; there are {', '.join(STYLES)}")
    styles = list(dict.fromkeys(styles))
    rows = [(path, recipe_of(path)) for path in dict.fromkeys(list_recipes(paths))]
    done, length = read_demonstrations(out, prompt)
    total = len(styles) * sum(len(recipe["tasks"]) for _, recipe in rows)
    counts, progress = Counter[str](style for _, style in done), Line("demonstrations", "episodes", total)
    out.parent.mkdir(parents=True, exist_ok=True)
    journal = Journal(out, keep=length)
    missing, before = 0, len(done)
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
                about = {"task": task.id, "style": style, "prompt": prompt}
                journal.append(json.dumps({**about, **row}).encode() + b"\n")
                counts[style] += 1
    progress.end()
    parts = ", ".join(f"{counts[style]} {style}" for style in STYLES if counts[style])
    parts += f"; {before} of them from before" if before else ""
    note = f"; {missing} have none: no test notices a mistake, or tests do not pass in the sandbox" if missing else ""
    print(f"{out}: {sum(counts.values())} conversations ({parts}){note}", flush=True)


def read_demonstrations(path: Path, prompt: str) -> tuple[set[tuple[str, str]], int]:
    """The tasks and styles in a file, and the bytes of its whole lines; the rest is what a kill cut off. Raises
    RunError for a file with anything else in it, and for one with another prompt."""
    if path.suffix != ".jsonl" or path.is_dir():
        raise RunError(f"{path} must be a file of JSON lines, NAME.jsonl")
    content = path.read_bytes() if path.exists() else b""
    rows, num_lines, done = read_lines(path), content.count(b"\n"), set[tuple[str, str]]()
    if len(rows) < num_lines or content and not num_lines:
        raise RunError(f"{path} is no file of demonstrations; choose another one with --out")
    for row in rows[:num_lines]:
        task, style = row.get("task"), row.get("style")
        if not isinstance(task, str) or not isinstance(style, str) or not isinstance(row.get("messages"), list):
            raise RunError(f"{path} is no file of demonstrations; choose another one with --out")
        if row.get("prompt") != prompt:
            raise RunError(
                f"{path} has demonstrations with --prompt {row.get('prompt')}; choose another file with --out"
            )
        done.add((task, style))
    return done, content.rfind(b"\n") + 1
