"""A file of demonstrations: JSON lines, a scripted episode (`demonstrations.py`) in each, for SFT.

    packages = (load_tasks(path, read_recipe(path), 2, 60.0, "bubblewrap") for path in list_recipes([Path("tasks")]))
    record_demonstrations(Path("demonstrations.jsonl"), packages, STYLES, "specified", 2, "bubblewrap", limit=100)

A file that is there is continued. It ends as if nothing had come between: the order of its lines follows from packages,
tasks and styles, and not from which episode ended first. Without a limit, all styles of a task follow one another, in
the order of `STYLES`, and tasks stand in the order of the packages. With a limit, tasks come in rounds: in round r,
task i of all packages, counted from 0, has the style number (i + r) mod n of the n that are asked for. So few
conversations show many tasks, and each style. A task that has no episode of a style leaves its place to the next one.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from environments.grading.guarded import Exam
from environments.harness.demonstrations import STYLES, TOOLS_SHOWN, Demonstration, Style, conversation, demonstrate
from environments.harness.episode import Episode
from environments.harness.jobs import WORKING, make_job
from environments.harness.record import Record
from environments.harness.scripted import Script
from environments.harness.workspace import SYSTEM
from environments.sandbox.cache import cache_folder
from environments.sandbox.open import Kind, open_sandbox, own_store
from environments.tasks.check import exam_of
from environments.tasks.make import Task
from environments.tasks.package import Package
from kit.disk import Journal, read_lines
from kit.settings import RunError

__all__ = [
    "DemonstrationCounts",
    "Planned",
    "check_styles",
    "plan_demonstrations",
    "play_demonstration",
    "read_demonstrations",
    "record_demonstrations",
]

BATCH = 4
"""Episodes for each sandbox that are planned at a time, where their number has a limit."""
Packages = Iterable[tuple[Package, Mapping[str, Task]]]
"""Packages, each with its tasks by their ids."""


class Planned(NamedTuple):
    """An episode to be played."""

    task: Task
    style: Style
    exam: Exam
    demonstration: Demonstration | None


class DemonstrationCounts(NamedTuple):
    """What a file holds after `record_demonstrations`."""

    by_style: Counter[str]
    """Conversations in the file."""
    missing: int
    """Episodes that were tried now and gave no conversation."""
    before: int
    """Conversations that the file had before."""

    @property
    def total(self) -> int:
        return self.by_style.total()


def check_styles(styles: Sequence[str]) -> tuple[Style, ...]:
    """The styles, each once, in the order of `STYLES`. Raises RunError for one that there is not."""
    if unknown := [style for style in styles if style not in STYLES]:
        raise RunError(f"there is no style {unknown[0]!r}; there are {', '.join(STYLES)}")
    return tuple(style for style in STYLES if style in styles)


def plan_demonstrations(
    tasks: Mapping[str, Task],
    exams: Mapping[str, Exam],
    styles: Collection[str],
    done: Collection[tuple[str, str]],
    *,
    runs_files: bool = False,
) -> list[Planned]:
    """The episodes of a package's tasks that are not in `done`, which holds pairs of a task and a style. `exams`: those
    of the tasks. `runs_files`: see `demonstrate`. To be called in one thread: Python's parser fails now and then in
    several."""
    return [
        Planned(
            task,
            style,
            exam,
            demonstrate(name, style, exam.given_tree, exam.gold_tree, task.visible, runs_files=runs_files),
        )
        for name, task in tasks.items()
        for exam in (exams[name],)
        for style in STYLES
        if style in styles and (name, style) not in done
    ]


def play_demonstration(
    prompt: str,
    kind: Kind,
    planned: Planned,
    *,
    tools: Sequence[str] = TOOLS_SHOWN,
    system: str = SYSTEM,
    strict: bool = False,
    hides_times: bool = False,
) -> dict | None:
    """The conversation of a demonstration; None where there is none, or it does not solve the task. `prompt`:
    "specified" or "terse". `tools`: read, edit, shell and finish are called, so they must be among them. `system`,
    `strict`, `hides_times`: see `Job`. May be called in several threads."""
    task, style, exam, demonstration = planned
    if demonstration is None:
        return None
    job = make_job(task, exam, prompt, None, strict, style, tools=tools, system=system, hides_times=hides_times)
    store, fork = own_store(cache_folder() / "store"), partial(open_sandbox, kind=kind, limits=WORKING)
    with tempfile.TemporaryDirectory(prefix="etude-demonstration-") as folder:
        with Record(Path(folder) / "episode.jsonl") as record:
            tree = store.tree(Episode(job, Script(demonstration.replies), record, fork, store).play())
            is_gold = all(
                (tree / name).is_file() and (tree / name).read_bytes() == exam.gold_tree[name]
                for name in exam.editable.names
            )
            return conversation(record.lines, demonstration) if is_gold else None


def record_demonstrations(
    out: Path,
    packages: Packages,
    styles: Sequence[str],
    prompt: str,
    jobs: int,
    kind: Kind,
    *,
    tools: Sequence[str] = TOOLS_SHOWN,
    system: str = SYSTEM,
    strict: bool = False,
    hides_times: bool = False,
    limit: int | None = None,
    progress: Callable[[int], None] = lambda count: None,
) -> DemonstrationCounts:
    """Writes a line to `out` for each task of the packages and each style, in the order that the top of this file says;
    what is there already is not played again. `packages`: taken one after the other, when their turn comes. `jobs`:
    sandboxes at a time. `kind`: of the sandboxes. `tools`, `system`, `strict`, `hides_times`: see `play_demonstration`.
    `limit`: conversations that the file has in the end, at most. `progress`: hears how many pairs of a task and a style
    are done with. Raises RunError for an unknown style, and where `out` is another file, or has another prompt."""
    styles = check_styles(styles)
    done, length = read_demonstrations(out, prompt)
    counts, missing, before = Counter[str](style for _, style in done), 0, len(done)
    play = partial(play_demonstration, prompt, kind, tools=tools, system=system, strict=strict, hides_times=hides_times)
    if limit is None:
        plans = _plan_packages(packages, styles, done, progress)
    else:
        episodes = _plan_in_rounds(packages, styles, done, progress)
        # As many as are missing at most, so that no episode is played for nothing.
        plans = iter(lambda: [*islice(episodes, max(0, min(BATCH * jobs, limit - counts.total())))], [])
    out.parent.mkdir(parents=True, exist_ok=True)
    journal = Journal(out, keep=length)
    try:
        with ThreadPoolExecutor(jobs) as pool:
            for plan in plans:  # in this thread
                for (task, style, *_), row in zip(plan, pool.map(play, plan), strict=True):
                    progress(1)
                    if row is None:
                        missing += 1
                        continue
                    about = {"task": task.id, "style": style, "prompt": prompt}
                    journal.append(json.dumps({**about, **row}).encode() + b"\n")
                    counts[style] += 1
                    done.add((task.id, style))
    finally:
        journal.close()
    return DemonstrationCounts(counts, missing, before)


def _plan_packages(
    packages: Packages, styles: Sequence[Style], done: Collection[tuple[str, str]], progress: Callable[[int], None]
) -> Iterator[list[Planned]]:
    """The episodes of each package: its tasks, and of each task the styles."""
    for package, tasks in packages:
        exams = {name: exam_of(task, package) for name, task in tasks.items()}
        plan = plan_demonstrations(tasks, exams, styles, done, runs_files=_runs_files(package))
        progress(len(styles) * len(tasks) - len(plan))
        yield plan


def _plan_in_rounds(
    packages: Packages, styles: Sequence[Style], done: Collection[tuple[str, str]], progress: Callable[[int], None]
) -> Iterator[Planned]:
    """The episodes of all packages: task i with style i mod n, then with the next style, and so on."""
    entries: dict[str, tuple[Task, Exam, bool]] = {}

    def list_entries() -> Iterator[tuple[str, tuple[Task, Exam, bool]]]:
        """The tasks of the first round, in which packages are taken only as they are needed."""
        for package, tasks in packages:
            for name, task in tasks.items():
                if name not in entries:
                    entries[name] = (task, exam_of(task, package), _runs_files(package))
                    yield name, entries[name]

    for round_number in range(len(styles)):
        rows = entries.items() if round_number else list_entries()
        for number, (name, (task, exam, runs_files)) in enumerate(rows):
            style = styles[(number + round_number) % len(styles)]
            plan = plan_demonstrations({name: task}, {name: exam}, [style], done, runs_files=runs_files)
            progress(1 - len(plan))
            yield from plan


def _runs_files(package: Package) -> bool:
    """Whether tests are run by their files: made-up packages have few, and a short command is easier to learn."""
    return package.origin == "generated"


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
