"""`etude tasks grade`: what a trainer would pay for a folder that an agent, or a person, has left."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from environments.grading.guarded import Exam, Grade, examined, grade
from environments.sandbox.open import Kind
from environments.sandbox.visible import one_line
from environments.tasks.check import exam_of
from etude.episodes import FOLDERS, shown, task_of
from etude.tasks import judges_of
from kit.settings import RunError

__all__ = ["grade_folder"]


def grade_folder(
    name: str, folder: Path, folders: Sequence[Path], jobs: int, seconds: float, kind: Kind, ask: bool, as_json: bool
) -> float:
    """Grades a folder, and says what it is paid and why. `folders`: of recipes. `ask`: with fresh inputs, too. Gives
    the reward. Raises RunError where there is no such task, and where the folder holds nothing that could be graded."""
    files = _list_files(folder)
    task, package = task_of(name, folders or FOLDERS, jobs, seconds, kind)
    exam = exam_of(task, package)
    if not any(file in exam.editable for file in files):
        editable = ", ".join(exam.editable.names)
        raise RunError(
            f"{folder} holds none of the files that {task.id} may change: {editable}; lay it out as the package is"
        )
    judges = judges_of(kind)
    try:
        exam = examined(exam, task.id, judges.fresh, seconds, judges, ask)
        result = grade(exam, folder, judges.fresh, seconds=seconds, judges=judges)
    except (ValueError, RuntimeError) as error:
        raise RunError(f"{folder} cannot be graded: {one_line(str(error))}") from None
    fields = _format_grade(exam, result)
    if as_json:
        print(json.dumps({"task": task.id, "folder": str(folder), **fields}))
        return result.reward.total
    for text in shown({"kind": "grade", **fields}, 5):
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
            f"{folder} is no folder; expected one with the files that an agent left"
            if folder.exists()
            else f"{folder} does not exist"
        )
    files = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    if not files:
        raise RunError(f"{folder} is empty; expected the files that an agent left")
    return files


def _format_grade(exam: Exam, result: Grade) -> dict:
    """A grade as JSON: the reward, its terms, and the reasons."""
    parts = {name: getattr(result.reward, name) for name in ("success", "succinctness", "conformance")}
    counts = {"passed": len(result.verdicts.passed), "of": len(exam.wanted), "apart": len(exam.apart)}
    if result.agreement is not None:
        counts |= {"agreed": result.agreement.asked - len(result.agreement.differing), "asked": result.agreement.asked}
    return {
        "reward": result.reward.total,
        **parts,
        **counts,
        "trust": result.trust.name.lower(),
        "flags": [*result.reward.flags],
        "failed": {test: one_line(reason) for test, reason in result.verdicts.failed.items()},
        "refused": dict(result.collected.refused),
        "ignored": [*result.collected.ignored],
        "missing": [name for name in exam.given if name in exam.editable and name not in result.collected.files],
    }
