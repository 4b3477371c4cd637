"""Guards G4 and G5: what a run of tests says, and whether it may be believed.

The tests run in a process into which the agent's code is imported, so whatever that process prints is the agent's to say. Its verdicts therefore
come on a pipe that nothing else has, one line each, sealed with a key that the runner read before it imported anything of the tree. The first line of
a test counts. A line with a wrong seal was written by somebody else, and then nothing is believed. A test that was skipped, or of which
nothing was heard, has failed.

Seals do not help against code that makes the tests themselves pass: an object that is equal to everything, a patched runner. Canaries do. They are
copies of real tests that cannot pass, whatever the solution is. Whoever makes tests pass without solving the task makes the canaries pass.
"""

from __future__ import annotations

import ast
import copy
import hashlib
import hmac
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

__all__ = ["Verdicts", "canaries", "read", "seal"]

PREFIX = 12
"""Digits of a canary's name."""


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
        if not hmac.compare_digest(mark, hmac.new(key, body, hashlib.sha256).hexdigest().encode()):
            flags.append(f"line {number} of the verdicts has a wrong seal")
            continue
        test, outcome = json.loads(body)
        if found.setdefault(test, outcome) != outcome:
            flags.append(f"{test} was first {found[test]} and then {outcome}")
    for canary in sorted(must_fail):
        outcome = found.get(canary, "missing")
        if outcome == "passed" or outcome not in ("failed", "error") and "passed" in found.values():  # where nothing ran, nothing is claimed
            flags.append(f"the canary {canary} must fail; it is {outcome}")
    strangers = found.keys() - {*tests, *must_fail}
    if strangers:
        flags.append(f"nobody asked for {sorted(strangers)[0]}")
    passed = frozenset(test for test in tests if found.get(test) == "passed" and not flags)
    return Verdicts(passed, {test: found.get(test, "missing") for test in tests if test not in passed}, tuple(flags))


def canaries(source: str, key: bytes, most: int = 4) -> tuple[str, tuple[str, ...]]:
    """Test source with copies of at most `most` of its functions behind it, and the names of the copies. A copy asks that what was compared equals
    an object that nothing equals; where it passes nevertheless, or compares nothing, it fails at its end. Which functions are copied, and the
    copies' names, follow from the key. Source without test functions comes back as it is. Raises SyntaxError for source that is none."""
    tree = ast.parse(source)
    tests = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test") and _may_fail(node)]
    names = [node.name for node in tests]
    tests = [node for node in tests if names.count(node.name) == 1]
    chosen = sorted(tests, key=lambda node: _digest(key, node.name))[:most]
    copies = []
    for node in sorted(chosen, key=lambda node: node.name):
        one = _Impossible().visit(copy.deepcopy(node))
        one.name = f"{node.name}_{_digest(key, node.name)[:PREFIX]}"
        one.body.append(ast.parse("assert False").body[0])
        copies.append(ast.fix_missing_locations(one))
    if not copies:
        return source, ()
    text = "\n\n\n".join(ast.unparse(one) for one in copies)
    return f"{source.rstrip()}\n\n\n{text}\n", tuple(one.name for one in copies)


def _may_fail(node: ast.FunctionDef) -> bool:
    """Whether a copy would reach its end, or fail before: not where it may be skipped, is expected to fail, or returns."""
    words = " ".join(map(ast.unparse, node.decorator_list))
    leaves = any(isinstance(one, ast.Return | ast.Yield | ast.YieldFrom) for one in ast.walk(node))
    calls = {ast.unparse(one.func).rpartition(".")[2] for one in ast.walk(node) if isinstance(one, ast.Call)}
    return not leaves and not calls & {"skip", "xfail", "importorskip", "exit"} and not any(word in words for word in ("skip", "xfail"))


def _digest(key: bytes, name: str) -> str:
    return hmac.new(key, name.encode(), hashlib.sha256).hexdigest()


class _Impossible(ast.NodeTransformer):
    """Every comparison by == within an assertion is with an object that was just made."""

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        if isinstance(node.test, ast.Compare) and len(node.test.ops) == 1 and isinstance(node.test.ops[0], ast.Eq):
            node.test.comparators = [ast.Call(ast.Name("object", ast.Load()), [], [])]
        return node
