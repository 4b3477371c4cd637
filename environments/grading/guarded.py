"""The guarded grader: G2 to G9, in sandboxes of its own.

The agent's sandbox is closed before, with every process in it (G8), and only files go on. In a fresh sandbox without a network (G7) the judge of
`inside/` plays the tests on a pristine tree with the agent's editable files laid onto it. What it says under seal is read, canaries and all, and the
monitor looks at what was changed and called. A flag means that nothing is paid. Where an exam has questions that no test asks (fresh.py), what passed
all tests is asked them, in one more sandbox, and must answer as the original does.

What is not guarded: code that finds the pipe of the verdicts in its own process, and tells real tests from canaries, by means that the monitor has
no signature of. It would have to be written into the editable files.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from environments.grading import fresh as fresh_inputs
from environments.grading.fresh import Agreement, Question
from environments.grading.lay import Collected, Editable, collect, lay, packed
from environments.grading.ready import Judges, opened
from environments.grading.rewards import WEIGHTS, Reward, Weights, reward
from environments.grading.verdicts import Verdicts, canaries, cases_of, disguised, original, read
from environments.monitor import Call, Episode, Flag, watch
from environments.sandbox.interface import ENDED, Observation, Sandbox

__all__ = ["Exam", "Grade", "grade", "questioned"]

LARGEST, MANY = 4 << 20, 1000
"""Bytes and files of a tree that the judge lays. A larger one lies there before the judge begins, which takes longer."""
NO_TREE = 3
"""As in inside/judge.py."""


@dataclass(frozen=True)
class Exam:
    """What a task's solution is graded by."""

    given: Mapping[str, bytes]
    """The tree that the agent began with."""
    gold: Mapping[str, bytes]
    """The same tree with the feature."""
    editable: Editable
    tests: Mapping[str, str]
    """Files of tests, visible and held out, by a name that need not be in the tree."""
    wanted: tuple[str, ...]
    """The tests that must pass: a file's name, two colons, and what pytest calls the test."""
    package: str = ""
    """For the monitor: the package that the task is about."""
    asked: tuple[str, ...] = ()
    """Those of the wanted tests that fail without the feature. Canaries are copies of them before others: what is equal to everything shows only in
    tests that look at it."""
    fresh: tuple[Question, ...] = ()
    """Questions that no test asks; none by default. `questioned` finds them."""
    support: Mapping[str, object] = field(default_factory=dict)
    """conftest files and modules that the tests need besides themselves, from the original: see `Support` of
    inside/play.py. Nothing of an agent's is among them."""


@dataclass(frozen=True)
class Grade:
    """What was found, and what it earns."""

    reward: Reward
    verdicts: Verdicts
    collected: Collected
    flags: tuple[Flag, ...]
    agreement: Agreement | None = None
    """How what passed all tests answered the exam's questions, where it has any."""


def questioned(exam: Exam, seed: str, fresh: Callable[[Path], Sandbox], seconds: float = 60.0) -> Exam:
    """The exam with fresh inputs, the same ones for the same seed, such as a task's id; without any where the functions that are gone are not ones
    that can be asked. The original code answers them as it did, so what it is paid stays. `fresh`, `seconds`: see `grade`."""
    return replace(exam, fresh=fresh_inputs.questions(exam.given, exam.gold, exam.tests, exam.wanted, fresh, seed, seconds))


def grade(
    exam: Exam,
    left: Path,
    fresh: Callable[[Path], Sandbox],
    calls: Sequence[Call] = (),
    seconds: float = 60.0,
    weights: Weights = WEIGHTS,
    judges: Judges | None = None,
) -> Grade:
    """Grades a folder that an agent left. `fresh`: opens a sandbox over a folder; its limit on output must hold a line of 200 bytes for each test.
    `calls`: the episode's, for the monitor. `seconds`: of wall-clock for all tests together. `judges`: may have opened such a sandbox ahead."""
    collected = collect(left, exam.editable, exam.given)
    key = secrets.token_bytes(16)
    tests, traps = {}, []
    for name, source in exam.tests.items():
        heads = [test.partition("[")[0].removeprefix(f"{name}::") for test in exam.asked if test.startswith(f"{name}::")]
        tests[name], names = canaries(source, key, first=heads)
        traps += [f"{name}::{one}{case}" for one in names for case in cases_of(f"{name}::{original(one)}", exam.wanted)]
    laid = lay(exam.given, collected, exam.editable)
    verdicts = _verdicts(exam, laid, tests, traps, key, judges or Judges(fresh), seconds)
    agreement = fresh_inputs.agreement(exam.fresh, laid, fresh, seconds) if exam.fresh and verdicts.all_passed else None
    after = {**exam.given, **collected.ignored, **collected.files}
    gone = [name for name in exam.given if name in exam.editable and name not in collected.files]
    after = {name: data for name, data in after.items() if name not in gone}
    held = {name: source.encode() for name, source in exam.tests.items()}
    flags = watch(Episode(exam.given, after, calls, exam.package, held))
    said = (*verdicts.flags, *(f"{flag.where}: {flag.signature} ({flag.seen})" for flag in flags))
    graded = {**{name: data for name, data in exam.given.items() if name not in exam.editable}, **collected.files}
    passed = verdicts.all_passed and (agreement is None or agreement.good)
    return Grade(reward(passed, exam.given, graded, exam.gold, said, weights), verdicts, collected, flags, agreement)


def _said(sandbox: Sandbox, plan: Mapping[str, object], seconds: float) -> Observation:
    """What a sandbox's judge says; it is closed then."""
    try:
        return sandbox.tell(json.dumps(plan), seconds + 10)
    finally:
        sandbox.close()


def _verdicts(
    exam: Exam, tree: Mapping[str, bytes], tests: Mapping[str, str], traps: Sequence[str], key: bytes, judges: Judges, seconds: float
) -> Verdicts:
    played = disguised(exam.wanted, key)
    small = len(tree) <= MANY and sum(map(len, tree.values())) <= LARGEST
    plan = {
        "key": key.hex(),
        "files": packed(tree) if small else {},
        "tree": "/work/tree",
        "folder": "/work/exam/tests",
        "tests": tests,
        "wanted": [*played.values(), *traps],
        "names": {test.partition("[")[0]: name.partition("[")[0] for test, name in played.items()},
        "seconds": seconds,
        "support": exam.support,
    }
    said = _said(judges.take() if small else opened(judges.fresh, tree), plan, seconds)
    if small and said.exit is None and (said.ended or "").startswith(ENDED):
        # Whoever ends a nursery ends all of its forks, and what is graded in them is not to blame.
        said = _said(opened(judges.fresh), plan, seconds)
    if said.exit == NO_TREE:  # nothing of the tree has run yet
        raise RuntimeError(f"the grading sandbox takes no tree: {said.text}")
    lines = said.text.encode().splitlines() if said.exit == 0 else []  # a judge that was killed has said nothing
    said = read(lines, key, [*played.values()], traps)
    names = {name: test for test, name in played.items()}
    return Verdicts(frozenset(map(names.__getitem__, said.passed)), {names[name]: why for name, why in said.failed.items()}, said.flags)
