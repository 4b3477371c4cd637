"""`etude tasks try`: runs an agent on a task and grades it. `etude show`: prints a transcript."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from environments.grading.guarded import Exam, grade, prepare_exam
from environments.grading.ready import Judges
from environments.harness import record, scripted
from environments.harness.episode import Budget, Episode
from environments.harness.format_line import format_line
from environments.harness.jobs import WORKING, make_job
from environments.harness.messages import Policy, PolicyError
from environments.harness.record import Record
from environments.harness.remote import Remote
from environments.sandbox.cache import cache_folder
from environments.sandbox.open import Kind, open_sandbox, own_store
from environments.tasks.build import GRADING
from environments.tasks.check import exam_of
from environments.tasks.load import read_recipe, recipe_paths
from environments.tasks.make import Task
from environments.tasks.package import Package
from etude.tasks.build import load_with_progress
from kit.settings import Interrupted, RunError

__all__ = ["FOLDERS", "graded", "show", "task_of", "print_line", "transcript_of", "try_task"]

FOLDERS = (Path("tasks"), Path("examples/tasks"))
"""Folders in which recipes are searched."""


def find_recipe(name: str, folders: Sequence[Path]) -> tuple[Path, dict]:
    """The recipe with the task of this id or unique prefix. Raises RunError."""
    paths = [path for folder in folders if folder.exists() for path in recipe_paths(folder)]
    rows = [(path, recipe, row["id"]) for path in paths for recipe in [read_recipe(path)] for row in recipe["tasks"]]
    matches = [candidate for candidate in rows if candidate[2] == name] or [
        candidate for candidate in rows if candidate[2].startswith(name)
    ]
    if len({candidate[2] for candidate in matches}) == 1:
        return matches[0][0], {**matches[0][1], "task": matches[0][2]}
    if matches:
        suffix = f" and {len(matches) - 12} more" if len(matches) > 12 else ""
        raise RunError(
            f"{len(matches)} tasks begin with {name}; choose one: "
            f"{', '.join(candidate[2] for candidate in matches[:12])}{suffix}"
        )
    places = ", ".join(map(str, folders))
    raise RunError(
        f"no recipe in {places} has a task {name}; `etude tasks make PACKAGE` writes recipes, which list their tasks"
    )


def task_of(name: str, folders: Sequence[Path], jobs: int, seconds: float, kind: Kind) -> tuple[Task, Package]:
    """The task and its package; made again where it is not kept from before. Raises RunError."""
    path, recipe = find_recipe(name, folders)
    name = recipe["task"]
    package, tasks = load_with_progress(path, {**recipe, "tasks": [{"id": name}]}, jobs, seconds, kind)
    return tasks[name], package


def policy_of(
    model: str, name: str, exam: Exam, task: Task, sampling: dict, strict: bool, choice: Literal["auto", "required"]
) -> Policy:
    """Who plays: "oracle", "fool", or the address of a model. Raises RunError."""
    if model in ("oracle", "fool"):
        return (
            scripted.oracle(exam.given_tree, exam.gold_tree, task.visible)
            if model == "oracle"
            else scripted.fool(task.visible)
        )
    if not name:
        raise RunError("a model on a server needs its name there: --name NAME")
    try:
        key = os.environ.get("OPENAI_API_KEY", "")
        return Remote(
            model,
            name,
            key,
            sampling,
            strict,
            choice,
            on_retry=lambda reason: print(reason, file=sys.stderr, flush=True),
        )
    except ValueError as error:
        raise RunError(f"{error}; oracle and fool need no model") from None


def try_task(
    name: str,
    model: str,
    model_name: str,
    folders: Sequence[Path],
    prompt: str,
    out: Path,
    resume: bool,
    budget: Budget,
    sampling: dict,
    strict: bool,
    choice: Literal["auto", "required"],
    corpus: Path | None,
    jobs: int,
    seconds: float,
    kind: Kind = "bubblewrap",
    ask: bool = True,
) -> float:
    """Runs an episode, grades it, and returns the reward. `ask`: with fresh inputs, too. Raises RunError, and
    Interrupted."""
    task, package = task_of(name, folders or FOLDERS, jobs, seconds, kind)
    exam, path = exam_of(task, package), transcript_of(task, out, resume)
    policy = policy_of(model, model_name, exam, task, sampling, strict, choice)
    author = model if isinstance(policy, scripted.Script) else f"{model_name}, {json.dumps(sampling)}"
    job = make_job(task, exam, prompt, corpus, strict, author)
    with Record(path) as journal, Judges(partial(open_sandbox, kind=kind, limits=GRADING)) as judges:
        if isinstance(policy, scripted.Script):
            policy.reply_count = sum(line["kind"] == "reply" for line in journal.lines)
        for line in journal.lines:
            print_line(line)  # what was there already
        episode = Episode(
            job,
            policy,
            journal,
            partial(open_sandbox, kind=kind, limits=WORKING),
            own_store(cache_folder() / "store"),
            budget,
            print_line,
        )
        judges.expect()
        try:
            tree = episode.play()
        except PolicyError as error:
            raise RunError(f"{error}; --resume continues from turn {episode.turns}") from None
        except KeyboardInterrupt:
            raise Interrupted(f"interrupted; --resume continues from turn {episode.turns}") from None
        reward = graded(exam, journal, tree, seconds, kind, ask, judges)
    print(f"{path}: read it with `etude show {path}`")
    return reward


def transcript_of(task: Task, out: Path, resume: bool) -> Path:
    """The path of a task's transcript. Raises RunError if it exists and is not to be resumed."""
    path = out / f"{task.id}.jsonl"
    if path.exists() and not resume:
        raise RunError(f"{path} already exists; --resume continues it, and --out chooses another folder")
    out.mkdir(parents=True, exist_ok=True)
    return path


def graded(
    exam: Exam, journal: Record, tree: str, seconds: float, kind: Kind, ask: bool, judges: Judges | None = None
) -> float:
    """The reward of an episode that is over, graded unless its transcript says it. `tree`: the stored one that it left.
    `ask`: with fresh inputs. `judges`: may have opened a sandbox for it ahead."""
    if not any(line["kind"] == "grade" for line in journal.lines):
        store, fresh = own_store(cache_folder() / "store"), partial(open_sandbox, kind=kind, limits=GRADING)
        exam = prepare_exam(exam, journal.lines[0]["task"], fresh, seconds, ask=ask)
        result = grade(exam, store.tree(tree), fresh, [*record.calls(journal.lines)], seconds, judges=judges)
        journal.add("grade", **record.grade_fields(result, len(exam.required_tests)))
        print_line(journal.lines[-1])
    return next(line["reward"] for line in journal.lines if line["kind"] == "grade")


def print_line(line: dict) -> None:
    """One line of a transcript while it grows."""
    for text in format_line(line, 1 if line["kind"] != "grade" else 5):
        print(text, flush=True)


def show(path: Path, rows: int, out: Callable[[str], None] = print) -> None:
    """A transcript for a person: `rows` lines of each text at most, 0 for all. Raises RunError."""
    for line in record.read(path):
        for text in format_line(line, rows):
            out(text)
