"""`etude tasks`: makes tasks by deleting features of packages, and checks them with the grader."""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from importlib import metadata
from multiprocessing import get_context
from pathlib import Path
from statistics import median

from environments.grading.guarded import Trust, prepare_exam
from environments.grading.lay import write
from environments.harbor import export as harbor
from environments.sandbox.cache import cache_folder
from environments.sandbox.open import Kind
from environments.sandbox.visible import one_line
from environments.tasks.build import build_tasks, grading_timeout, judges_of
from environments.tasks.check import check as graded
from environments.tasks.check import exam_of
from environments.tasks.levels import bits_of, sorted_by
from environments.tasks.load import list_recipes, load_tasks, read_recipe, unused_tests, ways_of
from environments.tasks.make import MakeResult, Task
from environments.tasks.package import Package
from environments.tasks.recipe import compare_recipe, make_recipe
from environments.tasks.sources import package_of
from environments.tasks.task_cache import save_task
from etude.console import next_steps
from etude.console.progress_line import Line
from etude.tasks import task_times
from kit.disk import Journal, atomic_write, read_lines
from kit.settings import RunError

__all__ = ["build_with_progress", "check_all", "export_all", "load_with_progress", "make_all", "show_levels", "told_of"]


@contextmanager
def progress_line(name: str) -> Iterator[Line]:
    """A line that says how many runs of a package's tests were made, until its tasks are there."""
    line = Line(name, "runs of its tests")
    try:
        yield line
    finally:
        if line.done:
            line.end()


def build_with_progress(
    package: Package,
    jobs: int,
    seconds: float,
    kind: Kind,
    known_unused: Mapping[str, Collection[str]] | None = None,
    join: int = 1,
    single_statements: bool = False,
) -> tuple[Package, Mapping[str, Collection[str]], MakeResult, float]:
    """See `build_tasks`; a line says how far it is."""
    with progress_line(f"{package.name} {package.version}") as line:
        return build_tasks(package, jobs, seconds, kind, known_unused, join, single_statements, line)


def load_with_progress(
    path: Path, recipe: Mapping, jobs: int, seconds: float, kind: Kind
) -> tuple[Package, dict[str, Task]]:
    """See `load_tasks`; where tasks are made again, a line says how far that is."""
    about_package = recipe["package"]
    name = f"{about_package.get('name', about_package['spec'])} {about_package.get('version', '')}"
    with progress_line(one_line(name)) as line:
        return load_tasks(path, recipe, jobs, seconds, kind, line, partial(print, flush=True))


def make_all(
    specs: Sequence[str],
    out: Path,
    jobs: int,
    seconds: float,
    overwrite: bool,
    kind: Kind = "bubblewrap",
    join: int = 1,
    single_statements: bool = False,
) -> bool:
    """Writes OUT/NAME-VERSION.json for each package, and says how many tasks each gave. A package that gives none is
    said in one line, and the next one comes. A recipe that is there stays, unless `overwrite`. `kind`: of the
    sandboxes. `join`, `single_statements`: see `make_tasks`. True if all packages gave tasks."""
    rows, all_succeeded = [], True
    operation = name_operation("made", single_statements)
    for spec in specs:
        try:
            package = package_of(spec, cache_folder() / "sdists")
            path = out / f"{package.name}-{package.version}.json"
            if path.exists() and not overwrite:
                print(f"{path} already exists; --again overwrites it")
                continue
            if time_hint := task_times.format_expected_duration(operation, package, join, jobs, kind):
                print(time_hint, flush=True)
            package, unused, task_set, elapsed = build_with_progress(
                package, jobs, seconds, kind, join=join, single_statements=single_statements
            )
            if not task_set.tasks:
                raise ValueError(f"{package.name} {package.version}: {without_tasks(task_set)}")
            task_times.remember(operation, package, join, jobs, kind, elapsed)
        except (RunError, ValueError, OSError) as error:
            print(f"{spec}: {one_line(str(error), 500)}", file=sys.stderr)
            all_succeeded = False
            continue
        except Exception as error:  # a package that breaks this program takes no other one with it
            print(f"{spec}: {describe_fault(error)}", file=sys.stderr)
            all_succeeded = False
            continue
        out.mkdir(parents=True, exist_ok=True)
        recipe = make_recipe(spec, package, unused, task_set, join, single_statements)
        atomic_write(path, json.dumps(recipe, indent=1) + "\n")
        for task in task_set.tasks:
            save_task(cache_folder() / "tasks", task, package)
        rejections = ", ".join(f"{count} {kind}" for kind, count in sorted(task_set.why_not.items()))
        exclusions = [
            *unused["left out"],
            *(f"{len(unused[reason])} {reason} tests" for reason in ("slow", "ungradable") if unused[reason]),
        ]
        exclusion_note = f"; left out: {', '.join(exclusions)}" if exclusions else ""
        print(
            f"{path}: {len(task_set.tasks)} tasks of {task_set.piece_count} pieces in {elapsed:.0f} s "
            f"({rejections}){exclusion_note}",
            flush=True,
        )
        rows.append((len(task_set.tasks), task_set.piece_count, elapsed))
    if len(rows) > 1:
        tasks, piece_count, elapsed = map(sum, zip(*rows, strict=True))
        print(f"{tasks} tasks of {piece_count} pieces from {len(rows)} packages, {60 * tasks / elapsed:.1f} a minute")
    if rows:
        next_steps.show(next_steps.of_tasks(out, checked=False))
    return all_succeeded


def name_operation(name: str, single_statements: bool) -> str:
    """How it is called where times are remembered: with single statements it takes longer."""
    return f"{name} with single statements" if single_statements else name


def without_tasks(task_set: MakeResult) -> str:
    """Why a package gave no tasks."""
    if not task_set.piece_count:
        return "no tasks: no function or class of its source can be deleted"
    label, reasons = min(
        task_set.reasons.items(), key=lambda item: (-task_set.why_not[item[1][0].partition(":")[0]], item[0])
    )
    counts = ", ".join(f"{count} {reason}" for reason, count in sorted(task_set.why_not.items()))
    return f"no tasks of {task_set.piece_count} pieces ({counts}), such as {label}: {reasons[0]}"


def describe_fault(error: Exception) -> str:
    """What an error says that nobody expected, and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" in {Path(frames[-1].filename).name}, line {frames[-1].lineno}" if frames else ""
    message = one_line(f"{type(error).__name__}: {error}")
    return f"a bug in etude, please report it: {message}{place}"


def check_all(paths: Sequence[Path], jobs: int, seconds: float, kind: Kind = "bubblewrap", ask: bool = True) -> bool:
    """Makes the tasks of recipes again, compares them, and grades for each the gold and nothing done. Results go to
    NAME-VERSION.checks.jsonl, and a check that was made already is not made again. `kind`: of the sandboxes. `ask`:
    also with fresh inputs. True if nothing is wrong."""
    all_passed, gradings = True, list[list[float]]()
    for path, recipe, package, task_set in remake_tasks(paths, jobs, seconds, kind, grade=True, ask=ask):
        log, since = path.with_suffix(".checks.jsonl"), time.monotonic()
        previous_count = len(read_checks(log, package.digest, ask))
        results = grade_tasks(log, package, task_set, jobs, seconds, kind, ask)
        if graded_count := len(results) - previous_count:
            task_times.remember(
                "graded", package, recipe.get("join", 1), jobs, kind, time.monotonic() - since, graded_count
            )
        problems = [
            *compare_recipe(recipe, package, task_set),
            *(f"{task.id}: {fault}" for task in task_set.tasks for fault in results[task.id]["faults"]),
        ]
        verdict = f"{len(problems)} wrong" if problems else "the original code gets reward 1, no change 0"
        verdict += f"; {sum(results[task.id]['fresh'] > 0 for task in task_set.tasks)} have fresh inputs" if ask else ""
        counts = {
            trust: sum(results[task.id]["trust"] == trust.name.lower() for task in task_set.tasks) for trust in Trust
        }
        details = [f"  {problem}" for problem in problems] + [
            f"  {count}: {trust.value}" for trust, count in counts.items() if count
        ]
        details += (
            [f"  a grading takes {median(grading_seconds):.2f} s (median)"]
            if (grading_seconds := [results[task.id]["seconds"] for task in task_set.tasks])
            else []
        )
        gradings.append(grading_seconds)
        print(f"{path}: {len(task_set.tasks)} tasks, made again and graded: {verdict}", *details, sep="\n")
        all_passed = all_passed and not problems
    if len(gradings) > 1 and (all_seconds := [*itertools.chain(*gradings)]):
        print(f"{len(all_seconds)} tasks in all: a grading takes {median(all_seconds):.2f} s (median)")
    if all_passed and paths:
        next_steps.show(next_steps.of_tasks(paths[0], checked=True))
    return all_passed


def remake_tasks(
    paths: Sequence[Path], jobs: int, seconds: float, kind: Kind, grade: bool = False, ask: bool = True
) -> Iterator[tuple[Path, dict, Package, MakeResult]]:
    """Each recipe with what is made of its package now; of other files nothing is made, for it could not be the same.
    Before that comes a line with the time that it will take, with `grade` that of grading too. Raises RunError for what
    is no recipe, and where nothing can be made."""
    for path in list_recipes(paths):
        recipe = read_recipe(path)
        try:
            package = package_of(recipe["package"]["spec"], cache_folder() / "sdists")
            if package.remove_tests(recipe["package"]["left out"]).digest != recipe["package"]["digest"]:
                task_set = MakeResult((), 0, {}, ())
            else:
                ways, previous_checks = (
                    ways_of(recipe),
                    read_checks(path.with_suffix(".checks.jsonl"), recipe["package"]["digest"], ask),
                )
                key = (name_operation("remade", ways["single_statements"]), package, ways["join"], jobs, kind)
                todo = max(0, len(recipe["tasks"]) - len(previous_checks)) if grade else 0
                if time_hint := task_times.format_expected_duration(*key, todo):
                    print(time_hint, flush=True)
                unused = unused_tests(recipe)
                package, _, task_set, elapsed = build_with_progress(package, jobs, seconds, kind, unused, **ways)
                task_times.remember(*key, elapsed)
        except ValueError as error:
            raise RunError(str(error)) from None
        yield path, recipe, package, task_set


def export_all(
    paths: Sequence[Path], out: Path, format: str, jobs: int, seconds: float, kind: Kind = "bubblewrap"
) -> bool:
    """Makes the tasks of recipes again, and writes OUT/ID, a folder of Harbor's, for each; one that is there is written
    anew. True if all tasks of the recipes, and no others, were made. Raises RunError for another format."""
    if format != "harbor":
        raise RunError(f"--format expects harbor, got {format!r}")
    all_made = True
    for path, recipe, package, task_set in remake_tasks(paths, jobs, seconds, kind):
        judges = judges_of(kind)
        for task in task_set.tasks:
            exam = prepare_exam(exam_of(task, package), task.id, judges.fresh, seconds, judges)
            write_anew(harbor.folder(task, package, metadata.version("pytest"), seconds, exam), out / task.id)
        problems = compare_recipe(recipe, package, task_set)
        print(
            f"{path}: {len(task_set.tasks)} tasks, made again and written to {out}",
            *(f"  {problem}" for problem in problems),
            sep="\n",
        )
        all_made = all_made and not problems
    return all_made


def write_anew(files: Mapping[str, bytes], folder: Path) -> None:
    """Replaces a folder by one of these files; scripts may be executed. What was there goes only when the new one is
    whole."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".export-") as name:
        write(files, Path(name) / "new")
        for path in files:
            (Path(name) / "new" / path).chmod(0o755 if path.endswith(".sh") else 0o644)
        if folder.exists():
            folder.rename(Path(name) / "old")
        (Path(name) / "new").rename(folder)


def grade_tasks(
    path: Path, package: Package, task_set: MakeResult, jobs: int, seconds: float, kind: Kind, ask: bool = True
) -> dict[str, dict]:
    """Task → what is wrong with it, `faults`, and with `ask` the number of its fresh inputs, `fresh`. What stands in
    the file at `path` already is not looked at again; the rest is added there."""
    results = read_checks(path, package.digest, ask)
    todo = [task for task in task_set.tasks if task.id not in results]
    line, log = Line(f"{package.name} {package.version}", "tasks graded", len(todo)), Journal(path)
    if log.torn():
        log.append(b"\n")
    try:
        # Processes, not threads: Python 3.11 fails where two threads parse at once (python/cpython#106905).
        with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
            rows = pool.map(partial(told_of, package=package, seconds=seconds, kind=kind, ask=ask), todo)
            for task, row in zip(todo, rows, strict=True):
                results[task.id] = row
                log.append(json.dumps(row).encode() + b"\n")
                line(1)
    finally:
        line.end()
        log.close()
    return results


def read_checks(path: Path, digest: str, ask: bool) -> dict[str, dict]:
    """The results in a file of checks that are of a package with this digest, by task."""
    return {row["id"]: row for row in read_lines(path) if _is_check_result(row, ask) and row["digest"] == digest}


def told_of(task: Task, package: Package, seconds: float, kind: Kind, ask: bool) -> dict:
    """What is found of a task, in a process of its own."""
    judges = judges_of(kind)
    grading = graded(task, package, judges.fresh, grading_timeout(seconds), ask, judges)
    row = {
        "id": task.id,
        "digest": package.digest,
        "faults": [*grading.faults],
        "trust": grading.trust.name.lower(),
        "seconds": round(grading.seconds, 3),
    }
    return row | ({"fresh": grading.question_count} if ask else {})


def show_levels(paths: Sequence[Path], number: int, level: int | None = None) -> None:
    """Says how the tasks of recipes are sorted by difficulty, in so many levels; or the tasks of one level. Raises
    RunError."""
    bits: dict[str, float] = {}
    for path in list_recipes(paths):
        try:
            bits |= bits_of([read_recipe(path)])
        except (LookupError, TypeError):
            raise RunError(
                f"{path} is not a recipe with the difficulty of its tasks; make one with: etude tasks make PACKAGE"
            ) from None
    try:
        levels = sorted_by(bits, number)
    except ValueError as error:
        raise RunError(str(error)) from None
    if level is not None:
        if level >= number:
            raise RunError(f"--level expects a level from 0 to {number - 1}, got {level}")
        print(*levels[level], sep="\n")
        return
    for index, tasks in enumerate(levels):
        print(f"level {index}: {len(tasks)} tasks, {bits[tasks[0]]:.1f} to {bits[tasks[-1]]:.1f} bits")


def _is_check_result(row: dict, ask: bool) -> bool:
    """Whether a line is the result of a check, and of one that asked if this one does."""
    faults = row.get("faults")
    is_valid = (
        isinstance(row.get("id"), str)
        and isinstance(faults, list)
        and all(isinstance(fault, str) for fault in faults)
        and "digest" in row
    )
    is_valid = is_valid and str(row.get("trust", "")).upper() in Trust.__members__ and type(row.get("seconds")) is float
    return is_valid and (type(row.get("fresh")) is int or not ask)
