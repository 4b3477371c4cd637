"""Rewards: success by the tests, succinctness against the gold, conformance to the style of the files, and flags that end them all.

Composer's rewards name correctness, succinctness and conformance to engineering principles (arXiv:2603.24477v2, §2). Numbers are ours. Success is all
or nothing. The other two only ever divide what success has earned: code that is short and does nothing earns nothing.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass

from environments.line_diff import common_lines, lines_of
from environments.syntax import parse

__all__ = ["WEIGHTS", "Conformance", "Reward", "Weights", "added", "changed", "conformance", "reward", "succinctness"]


@dataclass(frozen=True)
class Weights:
    """How a success is divided. Raises ValueError unless the parts are not negative and make one."""

    success: float = 0.8
    succinctness: float = 0.1
    conformance: float = 0.1

    def __post_init__(self) -> None:
        parts = (self.success, self.succinctness, self.conformance)
        if min(parts) < 0 or abs(sum(parts) - 1) > 1e-9:
            raise ValueError(f"weights must not be negative and must make 1; got {parts}")


WEIGHTS = Weights()
"""Those of a reward for which none are named."""


def added(before: bytes, after: bytes) -> dict[int, str]:
    """Lines of `after`, by number, that are new or changed: as few as can be."""
    new = lines_of(after)
    kept = {at for _, at in common_lines(lines_of(before), new)}
    return {at + 1: line for at, line in enumerate(new) if at not in kept}


def changed(before: Mapping[str, bytes], after: Mapping[str, bytes]) -> int:
    """How many lines a change takes away and adds, over all files: as few as can be. Blank lines do not count."""
    total = 0
    for name in before.keys() | after.keys():
        if before.get(name) != after.get(name):
            old, new = ([line for line in lines_of(files.get(name, b"")) if line.strip()] for files in (before, after))
            total += len(old) + len(new) - 2 * len(common_lines(old, new))
    return total


def succinctness(before: Mapping[str, bytes], after: Mapping[str, bytes], gold: Mapping[str, bytes], free: float = 1.2) -> float:
    """1 for a change of at most `free` times as many lines as the gold's, and in proportion less for a longer one."""
    ours, theirs = changed(before, after), changed(before, gold)
    return 1.0 if ours <= free * theirs else free * max(theirs, 1) / ours


@dataclass(frozen=True)
class Conformance:
    """How new lines fit those of their file."""

    problems: tuple[str, ...]
    lines: int
    """New lines that are not blank."""

    @property
    def score(self) -> float:
        """1 without a problem, 0 with one for every third line."""
        return max(0.0, 1 - 3 * len(self.problems) / self.lines) if self.lines else 1.0


def conformance(before: Mapping[str, bytes], after: Mapping[str, bytes]) -> Conformance:
    """Lints and style of the lines that are new in files of Python: what a reviewer would say first. A file's own style is the measure: how long its
    lines are, how it indents, ends lines, and writes the names of functions."""
    problems, count = [], 0
    for name in sorted(after):
        if not name.endswith(".py") or after[name] == before.get(name):
            continue
        old, new = before.get(name, b""), added(before.get(name, b""), after[name])
        count += sum(bool(line.strip()) for line in new.values())
        try:
            said = [*_layout(old, after[name], new), *_syntax(old, after[name], set(new))]
        except RecursionError:  # an expression that is deeper than Python's stack
            said = [(1, "the file cannot be parsed")]
        problems += [f"{name}:{line}: {what}" for line, what in sorted(said)]
    return Conformance(tuple(problems), count)


def _layout(old: bytes, whole: bytes, new: Mapping[int, str]) -> list[tuple[int, str]]:
    longest = max([100, *(len(line) for line in lines_of(old))])
    tabs = any(line.startswith("\t") for line in lines_of(old))
    found = []
    for number, line in new.items():
        if line != line.rstrip():
            found.append((number, "space at the end of the line"))
        if len(line) > longest:
            found.append((number, f"the line has {len(line)} characters; no other has more than {longest}"))
        indent = line[: len(line) - len(line.lstrip())]
        if line.strip() and ("\t" in indent) != tabs and indent:
            found.append((number, "spaces where the file has tabs" if tabs else "tabs where the file has spaces"))
    if b"\r\n" in whole and b"\r\n" not in old and old:
        found.append((1, "other line ends than before"))
    if whole and not whole.endswith((b"\n", b"\r")):
        found.append((len(lines_of(whole)), "no line end at the end of the file"))
    comments = [number for number, line in new.items() if line.lstrip().startswith("#")]
    marked = set(comments)
    code = [number for number, line in new.items() if line.strip() and number not in marked]
    if len(comments) > max(4, 2 * len(code)):  # a chain of thought in comments
        found.append((comments[0], f"{len(comments)} lines of comments for {len(code)} of code"))
    return found


def _name(node: ast.expr) -> str:
    """A name, or one within a name; to write out all of a long chain of calls for each of them would take the square of its length."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return f"{node.value.id}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _syntax(old: bytes, whole: bytes, new: set[int]) -> list[tuple[int, str]]:
    try:
        tree = parse(whole)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return [(getattr(error, "lineno", None) or 1, "the file cannot be parsed")]
    camel = bool(re.search(rb"\bdef [a-z]+[A-Z]", old))
    nodes = [*ast.walk(tree)]
    used = {node.id for node in nodes if isinstance(node, ast.Name)}
    constants = (node.value for node in nodes if isinstance(node, ast.Constant))
    used |= {value for value in constants if isinstance(value, str)}  # in __all__
    found = []
    for node in nodes:
        line = getattr(node, "lineno", 0)
        if line not in new:
            continue
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            found.append((line, "a bare except"))
        if isinstance(node, ast.Call) and (name := _name(node.func)) in ("print", "breakpoint", "pdb.set_trace") and b"print(" not in old:
            found.append((line, f"{name} is left"))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if not camel and re.search(r"[a-z][A-Z]", node.name) and not node.name.startswith("visit_"):
                found.append((line, f"{node.name} is not written as the file writes names"))
            if any(isinstance(one, ast.List | ast.Dict | ast.Set) for one in [*node.args.defaults, *filter(None, node.args.kw_defaults)]):
                found.append((line, "a default that can be changed"))
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                bound = alias.asname or alias.name.partition(".")[0]
                future = isinstance(node, ast.ImportFrom) and node.module == "__future__"
                if alias.name != "*" and bound not in used and not future:
                    found.append((line, f"{bound} is imported and not used"))
        if isinstance(node, ast.Compare) and any(isinstance(op, ast.Eq | ast.NotEq) for op in node.ops):
            if any(isinstance(one, ast.Constant) and one.value is None for one in node.comparators):
                found.append((line, "a comparison with None by =="))
    return found


@dataclass(frozen=True)
class Reward:
    """What an episode earns."""

    success: bool
    succinctness: float
    conformance: float
    flags: tuple[str, ...]
    total: float
    """0 to 1."""


def reward(
    passed: bool,
    before: Mapping[str, bytes],
    after: Mapping[str, bytes],
    gold: Mapping[str, bytes],
    flags: tuple[str, ...] = (),
    weights: Weights = WEIGHTS,
) -> Reward:
    """`passed`: all tests did, by `Verdicts.all_passed`. `before`, `after`, `gold`: the tree that the agent was given, what it left, and the tree
    with the feature. A flag leaves nothing of the reward, and the parts are told all the same."""
    short, fits = succinctness(before, after, gold), conformance(before, after).score
    total = weights.success + weights.succinctness * short + weights.conformance * fits if passed and not flags else 0.0
    return Reward(passed, short, fits, flags, total)
