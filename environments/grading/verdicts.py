"""Guards G4 and G5: what a run of tests says, and whether it may be believed.

The tests run in a process into which the agent's code is imported, so whatever that process prints is the agent's to say. Its verdicts therefore
come on a pipe that nothing else has, one line each, sealed with a key that the runner read before it imported anything of the tree. The first line of
a test counts. A line with a wrong seal was written by somebody else, and then nothing is believed. A test that was skipped, or of which
nothing was heard, has failed.

Seals do not help against code that makes the tests themselves pass: an object that is equal to everything, a patched runner. Canaries do. They are
copies of real tests that cannot pass, whatever the solution is. Whoever makes tests pass without solving the task makes the canaries pass. A copy of
one kind compares with a value that is nearly the one that was expected. A copy of the other kind fails at its end.
"""

from __future__ import annotations

import ast
import copy
import hashlib
import hmac
import itertools
import json
import textwrap
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from environments.syntax import parse
from kit.disk import parse_json

__all__ = ["Verdicts", "answers_of", "canaries", "cases_of", "disguised", "original", "read", "seal"]

PREFIX = 12
"""Digits at the end of a canary's name, and of a test's while it is played."""


@dataclass(frozen=True)
class Verdicts:
    """What a run said about the tests that were asked for."""

    passed: frozenset[str]
    failed: Mapping[str, str]
    """Test → why: what the runner said, or "missing"."""
    flags: tuple[str, ...]
    """Reasons not to pay, whatever passed."""

    @property
    def all_passed(self) -> bool:
        """Whether every test passed and nothing speaks against it."""
        return not self.failed and not self.flags and bool(self.passed)


def seal(key: bytes, test: str, outcome: str) -> bytes:
    """A line of the pipe."""
    body = json.dumps([test, outcome], separators=(",", ":"), ensure_ascii=True)
    return f"{hmac.new(key, body.encode(), hashlib.sha256).hexdigest()} {body}\n".encode()


def read(lines: Iterable[bytes], key: bytes, tests: Collection[str], must_fail: Collection[str] = ()) -> Verdicts:
    """The verdicts on `tests`, from the pipe's lines. `must_fail`: the canaries among what was run. Raises ValueError where no test is asked for."""
    if not tests:
        raise ValueError("tests must not be empty: nothing asked for would be all passed")
    found: dict[str, str] = {}
    flags: list[str] = []
    for number, line in enumerate(lines, 1):
        mark, _, body = line.strip().partition(b" ")
        if not hmac.compare_digest(mark, _mark(key, body)):
            flags.append(f"line {number} of the verdicts has a wrong seal")
            continue
        test, outcome = parse_json(body)
        if found.setdefault(test, outcome) != outcome:
            flags.append(f"{test} was first {found[test]} and then {outcome}")
    for canary in sorted(must_fail):
        cases = {test: outcome for test, outcome in found.items() if test == canary or test.startswith(f"{canary}[")} or {canary: "missing"}
        for test, outcome in cases.items():
            if outcome == "passed" or outcome not in ("failed", "error") and "passed" in found.values():  # where nothing ran, nothing is claimed
                flags.append(f"the canary {test} must fail; it is {outcome}")
    heads = {canary.partition("[")[0] for canary in must_fail}
    strangers = {test for test in found if test not in tests and test.partition("[")[0] not in heads}
    if strangers:
        flags.append(f"nobody asked for {sorted(strangers)[0]}")
    passed = frozenset(test for test in tests if found.get(test) == "passed" and not flags)
    return Verdicts(passed, {test: found.get(test, "missing") for test in tests if test not in passed}, tuple(flags))


def answers_of(lines: Iterable[bytes], key: bytes) -> tuple[list[bytes], dict[int, object]]:
    """The pipe's lines without those that hold answers to fresh inputs, and these by number. What has a wrong seal is left for `read`."""
    rest, answers = [], dict[int, object]()
    for line in lines:
        mark, _, body = line.strip().partition(b" ")
        if not (body.startswith(b'["answer ') and hmac.compare_digest(mark, _mark(key, body))):
            rest.append(line)
        elif (found := _answer(body)) is not None:
            answers.setdefault(*found)
    return rest, answers


def _mark(key: bytes, body: bytes) -> bytes:
    return hmac.new(key, body, hashlib.sha256).hexdigest().encode()


def _answer(body: bytes) -> tuple[int, object] | None:
    """The number and the answer on a line; None where the answer is no JSON."""
    name, written = parse_json(body)
    try:
        return int(name.removeprefix("answer ")), parse_json(written)
    except ValueError:
        return None


def canaries(source: str, key: bytes, most: int = 4, first: Collection[str] = ()) -> tuple[str, tuple[str, ...]]:
    """Test source with copies of at most `most` of its tests in it, and the names of the copies. Every other copy compares with values that are
    nearly those that were expected, where its test compares at its top, by == or as unittest does; the others, and those of tests that do not, fail
    at their ends. A copy stands beside its test, every other one before it: who answers a question otherwise when it is asked again gains nothing.
    Which tests are copied, where the copies stand, and their names follow from the key; but tests of `first`, `test_a` or `TestB::test_a`, are copied
    before others. Source without tests comes back as it is. Raises SyntaxError for source that is none."""
    source = source.removeprefix("\ufeff")  # a byte order mark, which is no part of the program
    tests = _tests(source)
    salt = _digest(key, "another value")
    lines, names, placed = source.replace("\r\n", "\n").replace("\r", "\n").split("\n"), [], []
    order = sorted(tests, key=lambda place: ("::".join(filter(None, place)) not in first, _digest(key, ".".join(place))))
    chosen = list(itertools.islice((place for place in order if _may_fail(tests[place])), most))
    coin = int(salt[-1], 16)
    for number, (owner, name) in enumerate(chosen):
        node = tests[owner, name]
        one = copy.deepcopy(node)
        one.name = f"{name}_{_digest(key, f'{owner}.{name}')[:PREFIX]}"
        compared = [part for part in one.body if _compared(part)]
        if compared and not number % 2:
            for part in compared:
                _ask_nearly(part, salt)
        else:
            one.body.append(parse("assert False").body[0])
        above = min(line.lineno for line in (node, *node.decorator_list)) - 1
        at = above if (number + coin) % 2 else node.end_lineno or 0
        indent = lines[node.lineno - 1][: node.col_offset]
        placed.append((at, textwrap.indent(ast.unparse(ast.fix_missing_locations(one)), indent)))
        names.append(f"{owner}::{one.name}" if owner else one.name)
    if not names:
        return source, ()
    for at, text in sorted(placed, reverse=True):
        lines[at:at] = ["", *text.split("\n"), ""]
    return "\n".join([*lines, "", NEARLY.format(name=f"nearly_{salt[:PREFIX]}", salt=salt)]), tuple(sorted(names))


def original(canary: str) -> str:
    """The test that a canary is a copy of, by the canary's name."""
    return canary[: -PREFIX - 1]


def cases_of(test: str, wanted: Iterable[str], key: bytes = b"") -> tuple[str, ...]:
    """The cases of a test that must pass, in brackets, in an order that follows from the key; without brackets where none is named. Its canary is
    played with the same cases: others may be skipped, as those of a fixture that this machine lacks, and would be taken for a hack."""
    cases = {name.partition("[") for name in wanted if name.partition("[")[0] == test}
    return tuple(sorted((bracket + case for _, bracket, case in cases), key=lambda case: _digest(key, case))) or ("",)


def disguised(tests: Iterable[str], key: bytes) -> dict[str, str]:
    """Test → the name under which it is played. It ends like a canary's, so that a name tells nobody which of the two a test is. Cases of a function
    share it."""
    found = {}
    for test in tests:
        name, bracket, case = test.partition("[")
        file, _, own = name.partition("::")
        same = f"name of {file}::{own.rpartition('::')[2]}"  # a test that a class inherits has one name
        found[test] = f"{name}_{_digest(key, same)[:PREFIX]}{bracket}{case}"
    return found


@lru_cache(32)
def _tests(source: str) -> dict[tuple[str, str], ast.FunctionDef]:
    """Class, or nothing, and name → test, for those that are defined once. Many solutions are graded by the same tests."""
    tree = parse(source)
    found: dict[tuple[str, str], ast.FunctionDef] = {}
    twice = set()
    suites = [("", tree.body), *((node.name, node.body) for node in tree.body if isinstance(node, ast.ClassDef) and _plain(node.decorator_list))]
    for owner, suite in suites:
        for node in suite:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
                twice |= {(owner, node.name)} & found.keys()
                found[owner, node.name] = node
    return {place: node for place, node in found.items() if place not in twice}


EQUAL = {"assertEqual", "assertEquals", "assertListEqual", "assertTupleEqual", "assertDictEqual", "assertSetEqual", "assertSequenceEqual"}


def _compared(node: ast.stmt) -> bool:
    """Whether a statement asserts that two values are equal."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Attribute):
        return node.value.func.attr in EQUAL and len(node.value.args) >= 2
    test = node.test if isinstance(node, ast.Assert) else None
    return isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq)


def _ask_nearly(node: ast.stmt, salt: str) -> None:
    """Asks for a value that is nearly the expected one. The side that no call makes was expected; the second, where calls make both or neither."""
    name = f"nearly_{salt[:PREFIX]}"
    if isinstance(node, ast.Assert):
        assert isinstance(node.test, ast.Compare)
        node.test = _asked(name, node.test.left, node.test.comparators[0])
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Attribute):
        node.value.func.attr = "assertTrue"
        node.value.args[:2] = [_asked(name, *node.value.args[:2])]


def _asked(name: str, left: ast.expr, right: ast.expr) -> ast.expr:
    swapped = ast.Constant(_calls(right) and not _calls(left))
    return ast.Call(ast.Name(name, ast.Load()), [left, right, swapped], [])


NEARLY = """def {name}(left, right, swapped):
    others = {name}_to(left if swapped else right)
    equal = [other for other in others if (other == right if swapped else left == other)]
    return len(equal) > 1 or len(equal) == 1 and not {name}_plain(right if swapped else left)


def {name}_plain(value):
    kind = type(value)
    if kind is dict:
        return all({name}_plain(one) for pair in value.items() for one in pair)
    if kind in (list, tuple, set, frozenset):
        return all(map({name}_plain, value))
    return kind in (str, bytes, int, float, complex, bool, type(None))


def {name}_to(value, salt="{salt}"):
    kind, most = type(value), 8
    if kind is str:
        draws = [int(salt[4 * at : 4 * at + 4], 16) % (len(value) or 1) for at in range(most)]
        places = range(len(value) or 1) if len(value) <= most else dict.fromkeys(draws)
        shift = int(salt[8], 16) % 9 - 96
        letters = [chr(97 + (ord((value[at:] or "a")[0]) + shift) % 26) for at in places]
        return [value[:at] + letter + value[at + 1 :] for at, letter in zip(places, letters)]
    if kind is bytes:
        return [one.encode("latin-1", "replace") for one in {name}_to(value.decode("latin-1"))]
    if kind in (int, float):
        return [value + 1000 + int(salt[:4], 16)]
    if kind in (list, tuple, set, frozenset):
        parts = list(value)
        found = [[*parts[:at], one, *parts[at + 1 :]] for at, part in enumerate(parts[:most]) for one in {name}_to(part)[-2:]]
        return [kind(one) for one in found] or [kind([object()])]
    if kind is dict:
        found = [{{**value, key: one}} for key in list(value)[:most] for one in {name}_to(value[key])[-2:]]
        return found or [{{object(): value}}]
    return [object()]
"""
"""In the tests' file: whether a side is equal to one of some values that have the type and shape of what was expected, and are other ones. An object
of no value would be known by its type: who is equal to every text, and to nothing else, would not be seen. Each value differs in one letter or one
element: who compares loosely, such as by first letters, is equal to one of them. Numbers are far away, since a wrong solution may be off by one.
What consists of plain values is equal to one of them by chance, as "-inf" is where "-Inf" is wanted, and only where == itself is broken to two."""


def _calls(value: ast.expr) -> bool:
    return any(isinstance(node, ast.Call) for node in ast.walk(value))


def _may_fail(node: ast.FunctionDef) -> bool:
    """Whether a copy would reach its end, or fail before: not where it may be skipped, is expected to fail, or returns."""
    leaves = any(isinstance(one, ast.Return | ast.Yield | ast.YieldFrom) for one in ast.walk(node))
    calls = {ast.unparse(one.func).rpartition(".")[2] for one in ast.walk(node) if isinstance(one, ast.Call)}
    return not leaves and not calls & {"skip", "skipTest", "xfail", "importorskip", "exit"} and _plain(node.decorator_list)


def _plain(decorators: list[ast.expr]) -> bool:
    words = " ".join(map(ast.unparse, decorators)).lower()
    return not any(word in words for word in ("skip", "xfail", "expectedfailure"))


def _digest(key: bytes, name: str) -> str:
    return hmac.new(key, name.encode(), hashlib.sha256).hexdigest()
