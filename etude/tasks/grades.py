"""`etude tasks grade`: grades a folder as the solution of a task, as a trainer would."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from environments.grading.guarded import Exam, Grade, grade, prepare_exam
from environments.harness.format_line import format_line
from environments.sandbox.open import Kind
from environments.sandbox.visible import one_line
from environments.tasks.build import judges_of
from environments.tasks.check import exam_of
from etude.tasks.episodes import FOLDERS, task_of
from kit.settings import RunError

__all__ = ["grade_folder"]


def grade_folder(
    name: str, folder: Path, folders: Sequence[Path], jobs: int, seconds: float, kind: Kind, ask: bool, as_json: bool
) -> float:
    """Grades a folder, prints the reward with its terms, and returns it. `folders`: of recipes. `ask`: with fresh
    inputs, too. Raises RunError if there is no such task, or if the folder contains nothing to grade."""
    files = _list_files(folder)
    task, package = task_of(name, folders or FOLDERS, jobs, seconds, kind)
    exam = exam_of(task, package)
    if not any(file in exam.editable for file in files):
        editable = ", ".join(exam.editable.names)
        raise RunError(
            f"{folder} contains none of the files that {task.id} may change: {editable}; use the layout of the package"
        )
    judges = judges_of(kind)
    try:
        exam = prepare_exam(exam, task.id, judges.fresh, seconds, judges, ask)
        result = grade(exam, folder, judges.fresh, seconds=seconds, judges=judges)
    except (ValueError, RuntimeError) as error:
        raise RunError(f"{folder} cannot be graded: {one_line(str(error))}") from None
    fields = _format_grade(exam, result)
    if as_json:
        print(json.dumps({"task": task.id, "folder": str(folder), **fields}))
        return result.reward.total
    for text in format_line({"kind": "grade", **fields}, 5):
        print(text)
    for file, reason in fields["refused"].items():
        print(f"  refused: {file}: {reason}")
    for file in fields["ignored"]:
        print(f"  ignored: {file} is not among the files that may be changed: {', '.join(exam.editable.names)}")
    for file in fields["missing"]:
        print(f"  missing: {file} counts as deleted")
    return result.reward.total


def _list_files(folder: Path) -> list[str]:
    """The names of the regular files beneath a folder. Raises RunError where there are none."""
    if not folder.is_dir():
        raise RunError(
            f"{folder} is not a folder; expected a folder with the files of a solution"
            if folder.exists()
            else f"{folder} does not exist"
        )
    files = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    if not files:
        raise RunError(f"{folder} is empty; expected the files of a solution")
    return files


def _format_grade(exam: Exam, result: Grade) -> dict:
    """A grade as JSON: the reward, its terms, and the reasons."""
    parts = {name: getattr(result.reward, name) for name in ("success", "succinctness", "conformance")}
    counts = {"passed": len(result.verdicts.passed), "of": len(exam.required_tests), "apart": len(exam.separate_tests)}
    if result.agreement is not None:
        counts |= {
            "agreed": result.agreement.question_count - len(result.agreement.differing),
            "asked": result.agreement.question_count,
        }
    return {
        "reward": result.reward.total,
        **parts,
        **counts,
        "trust": result.trust.name.lower(),
        "flags": [*result.reward.flags],
        "failed": {test: one_line(reason) for test, reason in result.verdicts.failed.items()},
        "refused": dict(result.collected.refused),
        "ignored": [*result.collected.ignored],
        "missing": [name for name in exam.given_tree if name in exam.editable and name not in result.collected.files],
    }
