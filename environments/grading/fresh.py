"""Guard G6, its second half: fresh inputs, answered by the original code in another sandbox.

Whoever has a table of the tests' answers, held-out ones included, passes all tests. So the functions that the tests call are called with arguments
that no test has (draw.py). The original answers them, and what the agent left must answer as it does.

Only questions count that have one answer. A function is left out that is asked twice, in another order and with sets in another order, and answers
otherwise, that changes its arguments, or whose arguments or answers are no plain data. A question is left out that does not come through the code
that is gone, or that ends in an error which no test has of that function: what is an accident of the original is nothing to be written again. Where
both the docstring and the tests leave open what is right, honest answers differ from the original's, so a few may.
"""

from __future__ import annotations

import ast
import json
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from environments.grading.draw import drawn, text_of
from environments.grading.inside.fresh import unpacked
from environments.grading.lay import write
from environments.grading.rewards import added
from environments.sandbox.interface import Sandbox
from environments.syntax import parse
from kit.disk import parse_json

__all__ = ["LEAST", "MOST", "Agreement", "Question", "agreed", "agreement", "questions", "same"]

INSIDE = Path(__file__).parent / "inside"
MOST, LEAST = 48, 8
"""Questions that are asked, and fewest that are worth asking."""
EACH = 1.0
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

    asked: int
    differing: tuple[str, ...]
    """Functions, one for each question that was answered otherwise."""

    @property
    def good(self) -> bool:
        """Whether enough is as the original has it."""
        return self.asked - len(self.differing) >= SHARE * self.asked


def questions(
    given: Mapping[str, bytes],
    gold: Mapping[str, bytes],
    tests: Mapping[str, str],
    wanted: Sequence[str],
    fresh: Callable[[Path], Sandbox],
    seed: str,
    seconds: float = 60.0,
) -> tuple[Question, ...]:
    """Questions that `gold` answers and that no test asks, the same ones for the same seed; none where fewer than LEAST can be had. The rest as in
    guarded.py: the trees without and with the feature, files of tests, the tests that must pass, what opens a sandbox. `seconds`: of wall-clock, for
    the tests and for each of two times that the original answers."""
    holes = {name: sorted(added(given.get(name, b""), data)) for name, data in gold.items() if name.endswith(".py") and given.get(name) != data}
    holes = {name: lines for name, lines in holes.items() if lines}
    if not holes:
        return ()
    plan = {"tree": "/work/tree", "holes": holes, "wanted": [*wanted]}
    heard = _run("record", {**gold, **{name: source.encode() for name, source in tests.items()}}, plan, fresh, 0, seconds)
    kept = {name for file, data in given.items() if file.endswith(".py") for name in functions_of(file, data)}
    calls = [one for one in map(_call, heard) if one and (one["outside"] or one["function"] in kept)]
    each = {text_of(one): {name: one[name] for name in ("function", "args", "named")} for one in calls}
    known = [each[text] for text in sorted(each)]
    asked = [*known, *drawn(known, seed)]
    order = [*range(len(asked))]
    one = _answers(gold, asked, order, holes, fresh, 1, seconds)
    other = _answers(gold, asked, order[::-1], {}, fresh, 2, seconds)
    unsteady = {call["function"] for number, call in enumerate(asked) if not _steady(one.get(number), other.get(number))}
    errors = {(asked[number]["function"], one[number][1][0]) for number in order[: len(known)] if one.get(number, [""])[0] == "error"}
    found = []
    for number in order[len(known) :]:
        call = asked[number]
        if call["function"] in unsteady:
            continue
        kind, answer, reached, _ = one[number]
        if reached and (kind == "value" or kind == "error" and (call["function"], answer[0]) in errors):
            found.append(Question(call["function"], tuple(call["args"]), call["named"], kind, answer))
    return tuple(found[:MOST]) if len(found) >= LEAST else ()


def agreement(asked: Sequence[Question], tree: Mapping[str, bytes], fresh: Callable[[Path], Sandbox], seconds: float = 60.0) -> Agreement:
    """How the code of a tree answers. They are asked in another order than the original was."""
    calls = [{"function": one.function, "args": [*one.args], "named": dict(one.named)} for one in asked]
    order = [*range(1, len(calls), 2), *range(0, len(calls), 2)]
    heard = _answers(tree, calls, order, {}, fresh, 3, seconds)
    return agreed(asked, heard)


def agreed(asked: Sequence[Question], heard: Mapping[int, object]) -> Agreement:
    """How questions were answered. `heard`: kind and answer by a question's number; it may be anything that JSON can hold."""
    return Agreement(len(asked), tuple(one.function for number, one in enumerate(asked) if not _agrees(one, heard.get(number))))


def _agrees(one: Question, heard: object) -> bool:
    if not (isinstance(heard, list) and len(heard) >= 2 and heard[0] == one.kind):
        return False
    if one.kind == "error":
        return isinstance(heard[1], list) and isinstance(one.answer, list) and one.answer[0] in heard[1]
    return same(one.answer, heard[1])


def same(one: object, other: object) -> bool:
    """Whether two packed values are equal, as == has it; of numbers with a fraction, to nine digits. `other` may be anything that JSON can hold."""
    if one == other:
        return True
    a, b = _number(one), _number(other)
    if a is not None and b is not None:
        try:
            return a == b or float in (type(a), type(b)) and math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12)
        except OverflowError:
            return False
    if not (isinstance(one, list) and isinstance(other, list) and len(one) == len(other)):
        return False
    return all(same(a, b) for a, b in zip(one, other, strict=True))


def _number(told: object) -> int | float | None:
    try:
        return unpacked(told) if isinstance(told, bool) or isinstance(told, list) and told[0] in ("int", "float") else None
    except (ValueError, TypeError, LookupError):
        return None


def _steady(one: Sequence | None, other: Sequence | None) -> bool:
    """Whether a call was answered alike twice, and left its arguments as they were."""
    return one is not None and other is not None and one[:2] == other[:2] and bool(one[3])


def functions_of(file: str, data: bytes) -> set[str]:
    """The functions of a module, "module:name" each; none of a file that is no Python. What tests do not call themselves, and is not there any more,
    need not be written again."""
    module = file.removeprefix("src/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    try:
        return {f"{module}:{node.name}" for node in parse(data).body if isinstance(node, ast.FunctionDef)}
    except (SyntaxError, ValueError):
        return set()


def _call(told: object) -> dict | None:
    """A recorded call, if it is one."""
    if not (isinstance(told, dict) and isinstance(told.get("function"), str) and isinstance(told.get("args"), list)):
        return None
    return told if isinstance(told.get("named"), dict) and isinstance(told.get("outside"), bool) else None


def _answers(
    tree: Mapping[str, bytes],
    asked: Sequence[Mapping],
    order: Sequence[int],
    holes: Mapping[str, Sequence[int]],
    fresh: Callable[[Path], Sandbox],
    seed: int,
    seconds: float,
) -> dict[int, list]:
    """Number of a call → kind and answer, whether a hole was reached, and whether the arguments stayed as they were. `seed`: of hashes."""
    found: dict[int, list] = {}
    plan = {"tree": "/work/tree", "asked": [*asked], "order": [*order], "holes": holes, "each": EACH}
    for row in _run("answer", tree, plan, fresh, seed, seconds) if asked else ():
        if isinstance(row, list) and len(row) == 5 and type(row[0]) is int:
            found.setdefault(row[0], row[1:])  # the first counts
    return found


def _run(what: str, tree: Mapping[str, bytes], plan: Mapping, fresh: Callable[[Path], Sandbox], seed: int, seconds: float) -> Iterator[object]:
    """What inside/fresh.py says, one value a line; nothing where it says what is no JSON."""
    with tempfile.TemporaryDirectory(prefix="etude-fresh-") as name:
        folder = Path(name)
        write(tree, folder / "tree")
        (folder / "exam").mkdir()
        shutil.copyfile(INSIDE / "fresh.py", folder / "exam" / "fresh.py")
        folder.chmod(0o755)
        sandbox = fresh(folder)
    try:
        written = sandbox.call("write", {"path": "exam/plan.json", "text": json.dumps(plan)})
        if not written.ok:
            raise RuntimeError(f"the grading sandbox takes no plan: {written.text or written.ended}")
        command = f"exec env -i PATH=$PATH HOME=/tmp LANG=C.UTF-8 PYTHONHASHSEED={seed} python3 -s -P -B exam/fresh.py {what} exam/plan.json"
        said = sandbox.call("shell", {"command": command}, seconds)
    finally:
        sandbox.close()
    try:
        yield from parse_json(f"[{','.join(said.text.splitlines())}]")
    except (ValueError, RecursionError):
        return
