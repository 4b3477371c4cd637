"""Guard G6, its second half: fresh inputs, answered by the original code in another sandbox.

Whoever has a table of the tests' answers, held-out ones included, passes all tests. So the functions that the tests
call are called with arguments that no test has (draw.py). The original answers them, and what the agent left must
answer as it does.

Only questions count that have one answer. A function is left out that is asked twice, in another order and with sets in
another order, and answers otherwise, that changes its arguments, or whose arguments or answers are no plain data. A
question is left out that does not come through the code that is gone, or that ends in an error which no test has of
that function: what is an accident of the original is nothing to be written again. Where both the docstring and the
tests leave open what is right, honest answers differ from the original's, so a few may."""

from __future__ import annotations

import ast
import json
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from environments.grading.draw import draw_calls, text_of
from environments.grading.inside.fresh import unpack_value
from environments.grading.lay import write
from environments.grading.rewards import added
from environments.sandbox.interface import Sandbox
from environments.syntax import parse
from kit.disk import parse_json

__all__ = [
    "MIN_QUESTIONS",
    "MAX_QUESTIONS",
    "Agreement",
    "Question",
    "compare_answers",
    "measure_agreement",
    "make_questions",
    "are_equal",
]

INSIDE = Path(__file__).parent / "inside"
MAX_QUESTIONS, MIN_QUESTIONS = 48, 8
"""Questions that are asked, and fewest that are worth asking."""
CALL_SECONDS = 1.0
"""Seconds of processor time of a call."""
SHARE = 0.9
"""Of the questions, that must be answered as the original does."""


@dataclass(frozen=True)
class Question:
    """A call, and what comes of it."""

    function: str
    args: tuple[object, ...]
    """Packed: see inside/fresh.py."""
    named: Mapping[str, object]
    kind: str
    """"value" or "error"."""
    answer: object
    """The packed value, or the error's class and those that it derives from, by name."""


@dataclass(frozen=True)
class Agreement:
    """How a solution answered."""

    question_count: int
    differing: tuple[str, ...]
    """Functions, one for each question that was answered otherwise."""

    @property
    def good(self) -> bool:
        """Whether enough is as the original has it."""
        return self.question_count - len(self.differing) >= SHARE * self.question_count


def make_questions(
    given_tree: Mapping[str, bytes],
    gold: Mapping[str, bytes],
    tests: Mapping[str, str],
    required_tests: Sequence[str],
    fresh: Callable[[Path], Sandbox],
    seed: str,
    seconds: float = 60.0,
) -> tuple[Question, ...]:
    """Questions that `gold` answers and that no test asks, the same ones for the same seed; none where fewer than LEAST
    can be had. The rest as in guarded.py: the trees without and with the feature, files of tests, the tests that must
    pass, what opens a sandbox. `seconds`: of wall-clock, for the tests and for each of two times that the original
    answers."""
    holes = {
        name: sorted(added(given_tree.get(name, b""), data))
        for name, data in gold.items()
        if name.endswith(".py") and given_tree.get(name) != data
    }
    holes = {name: lines for name, lines in holes.items() if lines}
    if not holes:
        return ()
    plan = {"tree": "/work/tree", "holes": holes, "wanted": [*required_tests]}
    rows = _run_program(
        "record", {**gold, **{name: source.encode() for name, source in tests.items()}}, plan, fresh, 0, seconds
    )
    remaining_functions = {
        name for file, data in given_tree.items() if file.endswith(".py") for name in functions_of(file, data)
    }
    calls = [
        row for row in map(_parse_call, rows) if row and (row["outside"] or row["function"] in remaining_functions)
    ]
    calls_by_text = {text_of(row): {name: row[name] for name in ("function", "args", "named")} for row in calls}
    test_calls = [calls_by_text[text] for text in sorted(calls_by_text)]
    asked_calls = [*test_calls, *draw_calls(test_calls, seed)]
    order = [*range(len(asked_calls))]
    first_answers = _collect_answers(gold, asked_calls, order, holes, fresh, 1, seconds)
    second_answers = _collect_answers(gold, asked_calls, order[::-1], {}, fresh, 2, seconds)
    unsteady_functions = {
        call["function"]
        for number, call in enumerate(asked_calls)
        if not _is_steady(first_answers.get(number), second_answers.get(number))
    }
    errors = {
        (asked_calls[number]["function"], first_answers[number][1][0])
        for number in order[: len(test_calls)]
        if first_answers.get(number, [""])[0] == "error"
    }
    steady_questions = []
    for number in order[len(test_calls) :]:
        call = asked_calls[number]
        if call["function"] in unsteady_functions:
            continue
        kind, answer, has_reached_hole, _ = first_answers[number]
        if has_reached_hole and (kind == "value" or kind == "error" and (call["function"], answer[0]) in errors):
            steady_questions.append(Question(call["function"], tuple(call["args"]), call["named"], kind, answer))
    return tuple(steady_questions[:MAX_QUESTIONS]) if len(steady_questions) >= MIN_QUESTIONS else ()


def measure_agreement(
    questions: Sequence[Question], tree: Mapping[str, bytes], fresh: Callable[[Path], Sandbox], seconds: float = 60.0
) -> Agreement:
    """How the code of a tree answers. They are asked in another order than the original was."""
    calls = [
        {"function": question.function, "args": [*question.args], "named": dict(question.named)}
        for question in questions
    ]
    order = [*range(1, len(calls), 2), *range(0, len(calls), 2)]
    answers = _collect_answers(tree, calls, order, {}, fresh, 3, seconds)
    return compare_answers(questions, answers)


def compare_answers(questions: Sequence[Question], answers: Mapping[int, object]) -> Agreement:
    """How questions were answered. `answers`: kind and answer by a question's number; it may be anything that JSON can
    hold."""
    return Agreement(
        len(questions),
        tuple(
            question.function
            for number, question in enumerate(questions)
            if not _matches_original(question, answers.get(number))
        ),
    )


def _matches_original(question: Question, answer: object) -> bool:
    if not (isinstance(answer, list) and len(answer) >= 2 and answer[0] == question.kind):
        return False
    if question.kind == "error":
        return isinstance(answer[1], list) and isinstance(question.answer, list) and question.answer[0] in answer[1]
    return are_equal(question.answer, answer[1])


def are_equal(expected: object, actual: object) -> bool:
    """Whether two packed values are equal, as == has it; of numbers with a fraction, to nine digits. `actual` may be
    anything that JSON can hold."""
    if expected == actual:
        return True
    a, b = _unpack_number(expected), _unpack_number(actual)
    if a is not None and b is not None:
        try:
            return a == b or float in (type(a), type(b)) and math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12)
        except OverflowError:
            return False
    if not (isinstance(expected, list) and isinstance(actual, list) and len(expected) == len(actual)):
        return False
    return all(are_equal(a, b) for a, b in zip(expected, actual, strict=True))


def _unpack_number(packed_value: object) -> int | float | None:
    try:
        return (
            unpack_value(packed_value)
            if isinstance(packed_value, bool) or isinstance(packed_value, list) and packed_value[0] in ("int", "float")
            else None
        )
    except (ValueError, TypeError, LookupError):
        return None


def _is_steady(first: Sequence | None, second: Sequence | None) -> bool:
    """Whether a call was answered alike twice, and left its arguments as they were."""
    return first is not None and second is not None and first[:2] == second[:2] and bool(first[3])


def functions_of(file: str, data: bytes) -> set[str]:
    """The functions of a module, "module:name" each; none of a file that is no Python. What tests do not call
    themselves, and is not there any more, need not be written again."""
    module = file.removeprefix("src/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    try:
        return {f"{module}:{node.name}" for node in parse(data).body if isinstance(node, ast.FunctionDef)}
    except (SyntaxError, ValueError):
        return set()


def _parse_call(row: object) -> dict | None:
    """A recorded call, if it is one."""
    if not (isinstance(row, dict) and isinstance(row.get("function"), str) and isinstance(row.get("args"), list)):
        return None
    return row if isinstance(row.get("named"), dict) and isinstance(row.get("outside"), bool) else None


def _collect_answers(
    tree: Mapping[str, bytes],
    calls: Sequence[Mapping],
    order: Sequence[int],
    holes: Mapping[str, Sequence[int]],
    fresh: Callable[[Path], Sandbox],
    seed: int,
    seconds: float,
) -> dict[int, list]:
    """Number of a call → kind and answer, whether a hole was reached, and whether the arguments stayed as they were.
    `seed`: of hashes."""
    answers: dict[int, list] = {}
    plan = {"tree": "/work/tree", "asked": [*calls], "order": [*order], "holes": holes, "each": CALL_SECONDS}
    for row in _run_program("answer", tree, plan, fresh, seed, seconds) if calls else ():
        if isinstance(row, list) and len(row) == 5 and type(row[0]) is int:
            answers.setdefault(row[0], row[1:])  # the first counts
    return answers


def _run_program(
    mode: str, tree: Mapping[str, bytes], plan: Mapping, fresh: Callable[[Path], Sandbox], seed: int, seconds: float
) -> Iterator[object]:
    """What inside/fresh.py says, one value a line; nothing where it says what is no JSON. Raises RuntimeError where the
    sandbox fails."""
    with tempfile.TemporaryDirectory(prefix="etude-fresh-") as name:
        folder = Path(name)
        write(tree, folder / "tree")
        (folder / "exam").mkdir()
        shutil.copyfile(INSIDE / "fresh.py", folder / "exam" / "fresh.py")
        folder.chmod(0o755)
        sandbox = fresh(folder)
    try:
        write_result = sandbox.call("write", {"path": "exam/plan.json", "text": json.dumps(plan)})
        if not write_result.ok:
            raise RuntimeError(f"the grading sandbox takes no plan: {write_result.text or write_result.end_reason}")
        command = (
            f"exec env -i PATH=$PATH HOME=/tmp LANG=C.UTF-8 PYTHONHASHSEED={seed} python3 -s -P -B "
            f"exam/fresh.py {mode} exam/plan.json"
        )
        result = sandbox.call("shell", {"command": command}, seconds)
    finally:
        sandbox.close()
    if result.has_lost_server:  # no answer of the code's
        raise RuntimeError(f"the grading sandbox has ended: {result.end_reason}")
    try:
        yield from parse_json(f"[{','.join(result.text.splitlines())}]")
    except (ValueError, RecursionError):
        return
