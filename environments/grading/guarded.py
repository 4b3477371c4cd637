"""The guarded grader: G2 to G9, in sandboxes of its own.

The agent's sandbox is closed before, with every process in it (G8), and only files go on. In a fresh sandbox without a
network (G7) the judge of `inside/` plays the tests on a pristine tree with the agent's editable files laid onto it.
What it says under seal is read, canaries and all, and the monitor looks at what was changed and called. A flag means
that nothing is paid.

The examiner's secrets do not lie in the examinee's process. Tests that can be carried over a pipe
(`Exam.separate_tests`) run in a process of their own, and the package in another one, which sees calls and nothing
else. Questions that no test asks (`Exam.fresh`, see fresh.py) go the same way, and must be answered as the original
does. `prepare_exam` finds both, by the original. Other tests run with the package in one process, as guarded as that
can be: code in it can read them. So a task none of whose tests can be carried, and which has no fresh inputs, says so
(`Exam.trust`)."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path

from environments.grading import fresh as fresh_inputs
from environments.grading.fresh import Agreement, Question, compare_answers
from environments.grading.lay import Collected, Editable, collect, lay, packed
from environments.grading.ready import Judges, open_judge_sandbox
from environments.grading.rewards import WEIGHTS, Reward, Weights, reward
from environments.grading.verdicts import Verdicts, answers_of, disguised, insert_canaries, list_cases, original, read
from environments.monitor import Attempt, Call, Flag, is_test, watch
from environments.sandbox.interface import Observation, Sandbox

__all__ = ["Exam", "Grade", "Trust", "prepare_exam", "grade", "add_questions"]

LARGEST, MAX_FILES = 4 << 20, 1000
"""Bytes and files of a tree that the judge lays. A larger one lies there before the judge begins, which takes
longer."""
NO_TREE = 3
"""As in inside/judge.py."""
PATIENCE = 4
"""As in inside/judge.py: of wall-clock time the tests may take so many times their seconds, on a crowded machine."""
CASES = 8
"""Cases of a canary that are played apart from the package, at most: what makes one of them pass makes others pass,
too."""
CALL_SECONDS = 20.0
"""Seconds of processor time of a call of the package, where tests are played apart."""


class Trust(Enum):
    """What a solution would have to forge that passes without solving the task. Of each, the original is paid in
    full."""

    SEPARATE = "all tests that fail without the feature are played apart from the package"
    PARTLY = "some of the tests that fail without the feature are played apart from the package"
    FRESH = "no test that fails without the feature can be played apart from the package; fresh inputs decide"
    NONE = (
        "no test that fails without the feature can be played apart from the package, and there are no "
        "fresh inputs: a solution can read the tests"
    )


@dataclass(frozen=True)
class Exam:
    """What a task's solution is graded by."""

    given_tree: Mapping[str, bytes]
    """The tree that the agent began with."""
    gold_tree: Mapping[str, bytes]
    """The same tree with the feature."""
    editable: Editable
    tests: Mapping[str, str]
    """Files of tests, visible and held out, by a name that need not be in the tree."""
    required_tests: tuple[str, ...]
    """The tests that must pass: a file's name, two colons, and what pytest calls the test."""
    package: str = ""
    """For the monitor: the package that the task is about."""
    target_tests: tuple[str, ...] = ()
    """Those of the wanted tests that fail without the feature. Canaries are copies of them before others: what is equal
    to everything shows only in tests that look at it."""
    fresh: tuple[Question, ...] = ()
    """Questions that no test asks; none by default. `add_questions` and `prepare_exam` find them."""
    separate_tests: tuple[str, ...] = ()
    """Those of the wanted tests that are played apart from the package; none by default. `prepare_exam` finds them."""
    support: Mapping[str, object] = field(default_factory=dict)
    """conftest files and modules that the tests need besides themselves, from the original: see `Support` of
    inside/play.py. Nothing of an agent's is among them."""

    @property
    def trust(self) -> Trust:
        """What guards the exam besides the monitor and canaries. Where it does not say which tests fail without the
        feature, all of them count."""
        decisive_tests = {*(self.target_tests or self.required_tests)}
        if decisive_tests <= {*self.separate_tests}:
            return Trust.SEPARATE
        return Trust.PARTLY if decisive_tests & {*self.separate_tests} else Trust.FRESH if self.fresh else Trust.NONE


@dataclass(frozen=True)
class Grade:
    """What was found, and what it earns."""

    reward: Reward
    verdicts: Verdicts
    collected: Collected
    flags: tuple[Flag, ...]
    agreement: Agreement | None = None
    """How what passed all tests answered the exam's fresh inputs, where it has any."""
    trust: Trust = Trust.NONE
    """What the exam is guarded by."""


def add_questions(exam: Exam, seed: str, fresh: Callable[[Path], Sandbox], seconds: float = 60.0) -> Exam:
    """The exam with fresh inputs, the same ones for the same seed, such as a task's id; without any where the functions
    that are gone are not ones that can be asked. The original code answers them as it did, so what it is paid stays.
    `fresh`, `seconds`: see `grade`."""
    return replace(
        exam,
        fresh=fresh_inputs.make_questions(
            exam.given_tree, exam.gold_tree, exam.tests, exam.required_tests, fresh, seed, seconds
        ),
    )


CARRIED_TESTS: dict[str, frozenset[str]] = {}
"""Digest of an original, its tests and questions → what of the tests it passes apart: the tasks of a package have it in
common."""


def prepare_exam(
    exam: Exam,
    seed: str,
    fresh: Callable[[Path], Sandbox],
    seconds: float = 60.0,
    judges: Judges | None = None,
    ask: bool = True,
) -> Exam:
    """The exam with fresh inputs (see `add_questions`), and with those tests played apart from the package that the
    original passes so, also without the others. Fresh inputs that the original answers otherwise over the pipe are left
    out. `fresh`, `seconds`, `judges`: see `grade`. `ask`: False leaves fresh inputs out."""
    exam, sandboxes = add_questions(exam, seed, fresh, seconds) if ask else exam, judges or Judges(fresh)
    package_files = {name: data for name, data in exam.gold_tree.items() if name in exam.editable or not is_test(name)}
    digest_parts = [sorted(package_files.items()), sorted(exam.tests.items()), sorted(exam.required_tests)]
    digest = hashlib.sha256(repr(digest_parts).encode()).hexdigest()

    def play_tests(tests: Collection[str]) -> tuple[Verdicts, dict[int, object]]:
        trial_exam = replace(exam, separate_tests=tuple(tests), required_tests=tuple(tests))
        key = secrets.token_bytes(16)
        return _collect_verdicts(trial_exam, exam.gold_tree, exam.tests, [], {}, [], key, sandboxes, seconds)

    if digest not in CARRIED_TESTS:
        CARRIED_TESTS[digest] = play_tests(exam.required_tests)[0].passed
    verdicts, answers = play_tests([test for test in exam.required_tests if test in CARRIED_TESTS[digest]])
    CARRIED_TESTS[digest] &= verdicts.passed
    apart_tests = tuple(test for test in exam.required_tests if test in verdicts.passed)
    agreed_questions = tuple(
        question
        for number, question in enumerate(exam.fresh)
        if not compare_answers([question], {0: answers.get(number)}).differing
    )
    return replace(
        exam,
        separate_tests=apart_tests,
        fresh=agreed_questions if len(agreed_questions) >= fresh_inputs.MIN_QUESTIONS else (),
    )


def grade(
    exam: Exam,
    left: Path,
    fresh: Callable[[Path], Sandbox],
    calls: Sequence[Call] = (),
    seconds: float = 60.0,
    weights: Weights = WEIGHTS,
    judges: Judges | None = None,
) -> Grade:
    """Grades a folder that an agent left. `fresh`: opens a sandbox over a folder; its limit on output must hold a line
    of 200 bytes for each test. `calls`: the episode's, for the monitor. `seconds`: of processor time for all tests
    together; tests that only wait for that long are ended as well. `judges`: may have opened such a sandbox ahead.
    Raises RuntimeError where the infrastructure fails, such as a sandbox whose server is killed twice."""
    collected = collect(left, exam.editable, exam.given_tree)
    key, apart_tests = secrets.token_bytes(16), {*exam.separate_tests}
    laid_tree = lay(exam.given_tree, collected, exam.editable)
    apart_sources, apart_canaries = add_canaries(exam, key, exam.separate_tests, 2, CASES)
    inside_tests = [test for test in exam.required_tests if test not in apart_tests]
    inside_sources, inside_canaries = add_canaries(exam, secrets.token_bytes(16), inside_tests, 4)
    verdicts, answers = _collect_verdicts(
        exam,
        laid_tree,
        apart_sources,
        apart_canaries,
        inside_sources,
        inside_canaries,
        key,
        judges or Judges(fresh),
        seconds,
    )
    agreement = compare_answers(exam.fresh, answers) if exam.fresh and verdicts.all_passed else None
    after = {**exam.given_tree, **collected.ignored, **collected.files}
    deleted_names = [name for name in exam.given_tree if name in exam.editable and name not in collected.files]
    after = {name: data for name, data in after.items() if name not in deleted_names}
    test_files = {name: source.encode() for name, source in exam.tests.items()}
    flags = watch(Attempt(exam.given_tree, after, calls, exam.package, test_files))
    reasons = (*verdicts.flags, *(f"{flag.location}: {flag.signature} ({flag.evidence})" for flag in flags))
    changed_tree = {
        **{name: data for name, data in exam.given_tree.items() if name not in exam.editable},
        **collected.files,
    }
    passed = verdicts.all_passed and (agreement is None or agreement.good)
    return Grade(
        reward(passed, exam.given_tree, changed_tree, exam.gold_tree, reasons, weights),
        verdicts,
        collected,
        flags,
        agreement,
        exam.trust,
    )


def _run_judge(sandbox: Sandbox, plan: Mapping[str, object], seconds: float) -> Observation:
    """What a sandbox's judge says; it is closed then."""
    try:
        return sandbox.tell(json.dumps(plan), PATIENCE * seconds + 10)
    finally:
        sandbox.close()


def add_canaries(
    exam: Exam, key: bytes, subset: Collection[str], max_canaries: int, cases: int | None = None
) -> tuple[dict[str, str], list[str]]:
    """The files of a subset of the exam's tests with at most `max_canaries` canaries in each, and the canaries' names,
    with at most so many `cases` of each. Those of the tests that fail without the feature are copied before others."""
    tests, canary_names = {}, []
    for name in [name for name in exam.tests if any(test.startswith(f"{name}::") for test in subset)]:
        heads = [
            test.partition("[")[0].removeprefix(f"{name}::")
            for test in exam.target_tests
            if test in subset and test.startswith(f"{name}::")
        ]
        tests[name], names = insert_canaries(exam.tests[name], key, max_canaries, heads)
        canary_names += [
            f"{name}::{canary}{case}"
            for canary in names
            for case in list_cases(f"{name}::{original(canary)}", exam.required_tests, key)[:cases]
        ]
    return tests, canary_names


def _collect_verdicts(
    exam: Exam,
    tree: Mapping[str, bytes],
    apart_sources: Mapping[str, str],
    apart_canaries: Sequence[str],
    inside_sources: Mapping[str, str],
    inside_canaries: Sequence[str],
    key: bytes,
    judges: Judges,
    seconds: float,
) -> tuple[Verdicts, dict[int, object]]:
    """Plays an exam over a tree: the verdicts, and the answers to its fresh inputs by number. `apart_sources`,
    `inside_sources`: files of tests, with canaries, for the process that is apart from the package, and for the one
    that is not."""
    disguised_names, apart_tests = disguised(exam.required_tests, key), {*exam.separate_tests}
    package_files = {
        name: data
        for name, data in tree.items()
        if name not in exam.tests and (name in exam.editable or not is_test(name))
    }
    test_files = {name: data for name, data in tree.items() if name not in package_files}
    is_small = len(tree) <= MAX_FILES and sum(map(len, tree.values())) <= LARGEST
    folders = ["/work/tree", "/work/tree/src"]

    def make_part(tests: Mapping[str, str], canary_names: Sequence[str], test_names: Sequence[str]) -> dict:
        heads = {test.partition("[")[0]: disguised_names[test].partition("[")[0] for test in test_names}
        return {
            "folder": "/work/exam/tests",
            "tests": tests,
            "wanted": [*map(disguised_names.__getitem__, test_names), *canary_names],
            "names": heads,
            "folders": folders,
            "support": exam.support,
        }

    questions = [
        {"function": question.function, "args": [*question.args], "named": dict(question.named)}
        for question in exam.fresh
    ]
    apart_part = make_part(apart_sources, apart_canaries, [test for test in exam.required_tests if test in apart_tests])
    inside_part = make_part(
        inside_sources, inside_canaries, [test for test in exam.required_tests if test not in apart_tests]
    )
    plan = {
        "key": key.hex(),
        "files": packed(package_files) if is_small else {},
        "later": packed(test_files),
        "tree": "/work/tree",
        "apart": {
            **apart_part,
            "asked": questions,
            "each": CALL_SECONDS,
            **_describe_modules(package_files, test_files),
        },
        "inside": inside_part,
        "seconds": seconds,
    }
    laid_files = None if is_small else package_files
    observation = _run_judge(judges.take() if is_small else open_judge_sandbox(judges.fresh, laid_files), plan, seconds)
    if observation.has_lost_server:
        # Whoever ends a nursery ends all of its forks, and what is graded in them is not to blame.
        observation = _run_judge(open_judge_sandbox(judges.fresh, laid_files), plan, seconds)
    if observation.has_lost_server:  # no verdict: nothing inside can end the server, so this is no failure of the tests
        raise RuntimeError(f"the grading sandbox has ended twice: {observation.end_reason}")
    if observation.exit == NO_TREE:  # nothing of the tree has run yet
        raise RuntimeError(f"the grading sandbox takes no tree: {observation.text}")
    # a judge that was killed has said nothing
    lines = observation.text.encode().splitlines() if observation.exit == 0 else []
    lines, answers = answers_of(lines, key)
    canary_names = [
        *(apart_canaries if apart_part["wanted"] else ()),
        *(inside_canaries if inside_part["wanted"] else ()),
    ]
    verdicts = (
        read(lines, key, [*disguised_names.values()], canary_names)
        if disguised_names
        else Verdicts(frozenset(), {}, ())
    )
    names = {name: test for test, name in disguised_names.items()}
    failed = {names[name]: outcome for name, outcome in verdicts.failed.items()}
    return Verdicts(frozenset(map(names.__getitem__, verdicts.passed)), failed, verdicts.flags), answers


def _describe_modules(package_files: Mapping[str, bytes], tests: Mapping[str, bytes]) -> dict[str, object]:
    """The names at the top of the package's modules, "tops", and the tests' own modules with their sources, "local"."""

    def make_module_name(name: str) -> str:
        return name.removeprefix("src/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    tops = {make_module_name(name).partition(".")[0] for name in package_files if name.endswith(".py")}
    local: dict[str, list] = {}
    for name, data in tests.items():
        if name.endswith(".py"):
            parent = make_module_name(name).rpartition(".")[0]
            while parent and parent.partition(".")[0] not in tops:
                local.setdefault(parent, ["", True])
                parent = parent.rpartition(".")[0]
            local[make_module_name(name)] = [data.decode(errors="replace"), name.endswith("/__init__.py")]
    return {"tops": sorted(tops), "local": local}
