"""Is a task what it promises? The gold is paid in full, nothing done is paid nothing, and neither has a flag.

The agent's tree lacks the piece, and the tests that are held out: their functions are cut out of the tests' files. Where a function has cases on
both sides, all of it goes. The grader plays all tests, from the package's own files.
"""

from __future__ import annotations

import ast
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from environments.grading.guarded import Exam, Grade, Trust, examined, grade
from environments.grading.lay import Editable, write
from environments.grading.ready import Judges
from environments.grading.rewards import conformance
from environments.monitor import Attempt, watch
from environments.sandbox.interface import Sandbox
from environments.tasks.make import Made, Task, label
from environments.tasks.package import Package
from environments.tasks.support import decode_source, find_support
from ref.feature_deletion import delete, functions
from ref.source_text import Edit, apply, parse_source, patch

__all__ = ["Checked", "check", "exam_of", "unflagged", "ungradable", "without_tests"]


def without_tests(data: bytes, names: Collection[str]) -> bytes:
    """A file of tests without some of its functions, which are named as in pytest's names: `test_a`, or `TestB::test_a`. All else stays as it is,
    byte for byte; a class that becomes empty says `pass`. Raises ValueError for a file that is no Python."""
    source, edits = parse_source(data), dict[int, Edit]()
    wanted = {name.replace("::", ".") for name in names}
    found = {id(node) for name, node in functions(source.tree) if name in wanted}
    suites = [source.tree.body, *(node.body for node in source.tree.body if isinstance(node, ast.ClassDef))]
    for suite in suites:
        gone = [node for node in suite if id(node) in found]
        for node in gone:
            last = len(gone) == len(suite) and suite is not source.tree.body and node is gone[-1]
            edit = source.cut(node, node, "pass" if last else "")
            edits[edit.first] = edit
    if not edits:
        return data
    return apply(patch("the tests", data, list(edits.values())), data)


def exam_of(task: Task, package: Package) -> Exam:
    """What a solution of the task is graded by, and the tree that an agent begins with."""
    held: dict[str, set[str]] = {}
    for test in task.held:
        file, _, name = test.partition("::")
        held.setdefault(file, set()).add(name.partition("[")[0])
    shown = {name: without_tests(data, held[name]) if name in held else data for name, data in package.tests.items()}
    wanted = (*task.visible, *task.held, *task.keep)
    files = {test.partition("::")[0] for test in wanted}
    return Exam(
        given={**delete(package.files, task.piece), **shown},
        gold={**package.files, **shown},
        editable=Editable(tuple(one.file for one in task.piece.patches)),
        tests={name: decode_source(data) for name, data in package.tests.items() if name in files},
        wanted=wanted,
        package=package.name,
        asked=(*task.visible, *task.held),
        support=find_support(package.tests, package.files, files & package.tests.keys()),
    )


@dataclass(frozen=True)
class Checked:
    """What the grader said of a task."""

    oracle: Grade
    """For the gold."""
    nop: Grade
    """For nothing done."""
    asked: int = 0
    """Fresh inputs of the exam."""
    trust: Trust = Trust.NONE
    """What the exam is guarded by."""
    keep: tuple[str, ...] = ()
    """Tests that pass without the feature, as the task says."""
    seconds: float = 0.0
    """That the grading of the gold took, of wall-clock time."""

    @property
    def faults(self) -> tuple[str, ...]:
        """Why the task is none; empty for a good one."""
        found = []
        if self.oracle.reward.total != 1.0:
            first = next(iter(self.oracle.verdicts.failed.items()), ("no test", "failed"))
            differing = self.oracle.agreement.differing if self.oracle.agreement else ()
            why = f"{len(differing)} fresh inputs, such as of {differing[0]}, are answered otherwise" if differing else " ".join(first)
            found.append(f"the gold is paid {self.oracle.reward.total:g}: {'; '.join(self.oracle.reward.flags[:2]) or why}")
        if self.nop.reward.total != 0.0 or self.nop.reward.success:
            found.append(f"nothing done is paid {self.nop.reward.total:g}")
        if self.nop.reward.flags:
            found.append(f"nothing done is flagged: {self.nop.reward.flags[0]}")
        elif lost := self._lost:
            found.append(lost)
        return tuple(found)

    @property
    def _lost(self) -> str:
        """Why the grading of nothing done says little of the feature; empty where it does not. A run that does not end
        pays nothing either, whatever is missing."""
        unplayed = sorted(test for test, why in self.nop.verdicts.failed.items() if why == "missing")
        if unplayed:
            return f"with nothing done, the run does not end: {unplayed[0]} was not played"
        passed = sum(test in self.nop.verdicts.passed for test in self.keep)
        if 2 * passed < len(self.keep):
            return f"with nothing done, {passed} of the {len(self.keep)} tests pass that do not need the feature"
        return ""


def check(
    task: Task, package: Package, fresh: Callable[[Path], Sandbox], seconds: float = 60.0, ask: bool = True, judges: Judges | None = None
) -> Checked:
    """Grades the gold and nothing. `fresh`, `judges`, `ask`: see `examined`."""
    exam = examined(exam_of(task, package), task.id, fresh, seconds, judges, ask)
    since = time.perf_counter()
    gold = _graded(exam, exam.gold, fresh, seconds, judges)
    took = time.perf_counter() - since
    return Checked(gold, _graded(exam, exam.given, fresh, seconds, judges), len(exam.fresh), exam.trust, task.keep, took)


def unflagged(made: Made, package: Package) -> Made:
    """What was made, without tasks whose original would not be paid in full: the monitor would take it for a hack, as a table of constants that tests
    expect, or its style is not that of its file. And without those of which no exam can be made, such as where the file
    that an agent would change has a name that the grader does not take."""
    tasks, reasons = [], dict(made.reasons)
    for task in made.tasks:
        try:
            exam = exam_of(task, package)
        except ValueError as error:
            reasons[label(task.piece)] = (f"exam: {error}",)
            continue
        held = {name: source.encode() for name, source in exam.tests.items()}
        if flags := watch(Attempt(exam.given, exam.gold, (), exam.package, held)):
            reasons[label(task.piece)] = (f"flag: {flags[0].where} looks like a hack: {flags[0].signature}",)
        elif problems := conformance(exam.given, exam.gold).problems:
            reasons[label(task.piece)] = (f"style: {problems[0]}",)
        else:
            tasks.append(task)
    return replace(made, tasks=tuple(tasks), reasons=reasons)


def ungradable(
    package: Package, tests: Collection[str], fresh: Callable[[Path], Sandbox], seconds: float = 60.0, judges: Judges | None = None
) -> tuple[str, ...]:
    """Those of `tests`, which pass elsewhere, that the grader does not see pass with the package as it is, sorted: such as
    tests that read files of data, which do not lie there. All are asked for together; where that fails, each file alone.
    `fresh`, `judges`: see `grade`."""

    def failing(names: Collection[str]) -> set[str]:
        files = {file_of(name) for name in names}
        sources = {name: decode_source(package.tests[name]) for name in sorted(files)}
        whole = {**package.files, **package.tests}
        support = find_support(package.tests, package.files, files)
        exam = Exam(whole, whole, Editable(()), sources, tuple(sorted(names)), package.name, support=support)
        verdicts = _graded(exam, whole, fresh, seconds, judges).verdicts
        return set(verdicts.failed) or set(names if verdicts.flags else ())

    def file_of(name: str) -> str:
        return name.partition("::")[0]

    strangers = {name for name in tests if not _is_source(package.tests.get(file_of(name)))}
    known = [name for name in tests if name not in strangers]
    if not known or not failing(known):
        return tuple(sorted(strangers))
    files: dict[str, list[str]] = {}
    for name in known:
        files.setdefault(file_of(name), []).append(name)
    return tuple(sorted(strangers.union(*map(failing, files.values()))))


def _is_source(data: bytes | None) -> bool:
    """Whether a file is there, and has a text."""
    try:
        return data is not None and bool(decode_source(data))
    except ValueError:
        return False


def _graded(exam: Exam, tree: Mapping[str, bytes], fresh: Callable[[Path], Sandbox], seconds: float, judges: Judges | None = None) -> Grade:
    with tempfile.TemporaryDirectory(prefix="etude-check-") as name:
        write(tree, Path(name) / "left")
        return grade(exam, Path(name) / "left", fresh, seconds=seconds, judges=judges)
