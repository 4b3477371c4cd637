"""Is a task what it promises? The gold is paid in full, nothing done is paid nothing, and neither has a flag.

The agent's tree lacks the piece, and the tests that are held out: their functions are cut out of the tests' files.
Where a function has cases on both sides, all of it goes. The grader plays all tests, from the package's own files.
"""

from __future__ import annotations

import ast
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from environments.grading.guarded import Exam, Grade, Trust, grade, prepare_exam
from environments.grading.lay import Editable, write
from environments.grading.ready import Judges
from environments.grading.rewards import conformance
from environments.monitor import Attempt, watch
from environments.sandbox.interface import Sandbox
from environments.tasks.make import MakeResult, Task, label
from environments.tasks.package import Package
from environments.tasks.support import decode_source, find_support
from ref.feature_deletion import delete, functions
from ref.source_text import Edit, apply, parse_source, patch

__all__ = ["TaskCheck", "check", "exam_of", "drop_flagged_tasks", "ungradable", "without_tests"]


def without_tests(data: bytes, names: Collection[str]) -> bytes:
    """A file of tests without some of its functions, which are named as in pytest's names: `test_a`, or
    `TestB::test_a`. All else stays as it is, byte for byte; a class that becomes empty says `pass`. Raises ValueError
    for a file that is no Python."""
    source, edits = parse_source(data), dict[int, Edit]()
    qualified_names = {name.replace("::", ".") for name in names}
    node_ids = {id(node) for name, node in functions(source.tree) if name in qualified_names}
    suites = [source.tree.body, *(node.body for node in source.tree.body if isinstance(node, ast.ClassDef))]
    for suite in suites:
        removed_nodes = [node for node in suite if id(node) in node_ids]
        for node in removed_nodes:
            is_last = len(removed_nodes) == len(suite) and suite is not source.tree.body and node is removed_nodes[-1]
            edit = source.cut(node, node, "pass" if is_last else "")
            edits[edit.first] = edit
    if not edits:
        return data
    return apply(patch("the tests", data, list(edits.values())), data)


def exam_of(task: Task, package: Package) -> Exam:
    """What a solution of the task is graded by, and the tree that an agent begins with."""
    held_out: dict[str, set[str]] = {}
    for test in task.held_out:
        file, _, name = test.partition("::")
        held_out.setdefault(file, set()).add(name.partition("[")[0])
    visible_files = {
        name: without_tests(data, held_out[name]) if name in held_out else data for name, data in package.tests.items()
    }
    required_tests = (*task.visible, *task.held_out, *task.keep)
    files = {test.partition("::")[0] for test in required_tests}
    return Exam(
        given_tree={**delete(package.files, task.piece), **visible_files},
        gold_tree={**package.files, **visible_files},
        editable=Editable(tuple(file_patch.file for file_patch in task.piece.patches)),
        tests={name: decode_source(data) for name, data in package.tests.items() if name in files},
        required_tests=required_tests,
        package=package.name,
        target_tests=(*task.visible, *task.held_out),
        support=find_support(package.tests, package.files, files & package.tests.keys()),
    )


@dataclass(frozen=True)
class TaskCheck:
    """What the grader said of a task."""

    oracle: Grade
    """For the gold."""
    nop: Grade
    """For nothing done."""
    question_count: int = 0
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
        problems = []
        if self.oracle.reward.total != 1.0:
            first = next(iter(self.oracle.verdicts.failed.items()), ("no test", "failed"))
            differing_functions = self.oracle.agreement.differing if self.oracle.agreement else ()
            reason = (
                f"{len(differing_functions)} fresh inputs, such as of {differing_functions[0]}, are answered otherwise"
                if differing_functions
                else " ".join(first)
            )
            problems.append(
                f"the gold is paid {self.oracle.reward.total:g}: {'; '.join(self.oracle.reward.flags[:2]) or reason}"
            )
        if self.nop.reward.total != 0.0 or self.nop.reward.success:
            problems.append(f"nothing done is paid {self.nop.reward.total:g}")
        if self.nop.reward.flags:
            problems.append(f"nothing done is flagged: {self.nop.reward.flags[0]}")
        elif problem := self._nop_problem:
            problems.append(problem)
        return tuple(problems)

    @property
    def _nop_problem(self) -> str:
        """Why the grading of nothing done says little of the feature; empty where it does not. A run that does not end
        pays nothing either, whatever is missing."""
        missing_tests = sorted(test for test, outcome in self.nop.verdicts.failed.items() if outcome == "missing")
        if missing_tests:
            return f"with nothing done, the run does not end: {missing_tests[0]} was not played"
        passed_count = sum(test in self.nop.verdicts.passed for test in self.keep)
        if 2 * passed_count < len(self.keep):
            return f"with nothing done, {passed_count} of the {len(self.keep)} tests pass that do not need the feature"
        return ""


def check(
    task: Task,
    package: Package,
    fresh: Callable[[Path], Sandbox],
    seconds: float = 60.0,
    ask: bool = True,
    judges: Judges | None = None,
) -> TaskCheck:
    """Grades the gold and nothing. `fresh`, `judges`, `ask`: see `examined`."""
    exam = prepare_exam(exam_of(task, package), task.id, fresh, seconds, judges, ask)
    start = time.perf_counter()
    gold = _grade_tree(exam, exam.gold_tree, fresh, seconds, judges)
    duration = time.perf_counter() - start
    return TaskCheck(
        gold,
        _grade_tree(exam, exam.given_tree, fresh, seconds, judges),
        len(exam.fresh),
        exam.trust,
        task.keep,
        duration,
    )


def drop_flagged_tasks(result: MakeResult, package: Package) -> MakeResult:
    """What was made, without tasks whose original would not be paid in full: the monitor would take it for a hack, as a
    table of constants that tests expect, or its style is not that of its file. And without those of which no exam can
    be made, such as where the file that an agent would change has a name that the grader does not take."""
    tasks, reasons = [], dict(result.reasons)
    for task in result.tasks:
        try:
            exam = exam_of(task, package)
        except ValueError as error:
            reasons[label(task.piece)] = (f"exam: {error}",)
            continue
        test_files = {name: source.encode() for name, source in exam.tests.items()}
        if flags := watch(Attempt(exam.given_tree, exam.gold_tree, (), exam.package, test_files)):
            reasons[label(task.piece)] = (f"flag: {flags[0].location} looks like a hack: {flags[0].signature}",)
        elif problems := conformance(exam.given_tree, exam.gold_tree).problems:
            reasons[label(task.piece)] = (f"style: {problems[0]}",)
        else:
            tasks.append(task)
    return replace(result, tasks=tuple(tasks), reasons=reasons)


def ungradable(
    package: Package,
    tests: Collection[str],
    fresh: Callable[[Path], Sandbox],
    seconds: float = 60.0,
    judges: Judges | None = None,
) -> tuple[str, ...]:
    """Those of `tests`, which pass elsewhere, that the grader does not see pass with the package as it is, sorted: such
    as tests that read files of data, which do not lie there. All are asked for together; where that fails, each file
    alone. `fresh`, `judges`: see `grade`."""

    def find_failing(names: Collection[str]) -> set[str]:
        files = {get_file(name) for name in names}
        sources = {name: decode_source(package.tests[name]) for name in sorted(files)}
        tree = {**package.files, **package.tests}
        support = find_support(package.tests, package.files, files)
        exam = Exam(tree, tree, Editable(()), sources, tuple(sorted(names)), package.name, support=support)
        verdicts = _grade_tree(exam, tree, fresh, seconds, judges).verdicts
        return set(verdicts.failed) or set(names if verdicts.flags else ())

    def get_file(name: str) -> str:
        return name.partition("::")[0]

    unreadable_tests = {name for name in tests if not _is_source(package.tests.get(get_file(name)))}
    readable_tests = [name for name in tests if name not in unreadable_tests]
    if not readable_tests or not find_failing(readable_tests):
        return tuple(sorted(unreadable_tests))
    files: dict[str, list[str]] = {}
    for name in readable_tests:
        files.setdefault(get_file(name), []).append(name)
    return tuple(sorted(unreadable_tests.union(*map(find_failing, files.values()))))


def _is_source(data: bytes | None) -> bool:
    """Whether a file is there, and has a text."""
    try:
        return data is not None and bool(decode_source(data))
    except ValueError:
        return False


def _grade_tree(
    exam: Exam,
    tree: Mapping[str, bytes],
    fresh: Callable[[Path], Sandbox],
    seconds: float,
    judges: Judges | None = None,
) -> Grade:
    with tempfile.TemporaryDirectory(prefix="etude-check-") as name:
        write(tree, Path(name) / "left")
        return grade(exam, Path(name) / "left", fresh, seconds=seconds, judges=judges)
