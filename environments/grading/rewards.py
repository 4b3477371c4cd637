"""Rewards: success by the tests, succinctness against the gold, conformance to the style of the files, and flags that
end them all.

Composer's rewards name correctness, succinctness and conformance to engineering principles (arXiv:2603.24477v2, §2).
Numbers are ours. Success is all or nothing. The other two only ever divide what success has earned: code that is short
and does nothing earns nothing."""

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
    common_indices = {at for _, at in common_lines(lines_of(before), new)}
    return {at + 1: line for at, line in enumerate(new) if at not in common_indices}


def changed(before: Mapping[str, bytes], after: Mapping[str, bytes]) -> int:
    """How many lines a change takes away and adds, over all files: as few as can be. Blank lines do not count."""
    total = 0
    for name in before.keys() | after.keys():
        if before.get(name) != after.get(name):
            old, new = ([line for line in lines_of(files.get(name, b"")) if line.strip()] for files in (before, after))
            total += len(old) + len(new) - 2 * len(common_lines(old, new))
    return total


def succinctness(
    before: Mapping[str, bytes], after: Mapping[str, bytes], gold: Mapping[str, bytes], free: float = 1.2
) -> float:
    """1 for a change of at most `free` times as many lines as the gold's, and in proportion less for a longer one."""
    changed_count, gold_count = changed(before, after), changed(before, gold)
    return 1.0 if changed_count <= free * gold_count else free * max(gold_count, 1) / changed_count


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
    """Lints and style of the lines that are new in files of Python: what a reviewer would say first. A file's own style
    is the measure: how long its lines are, how it indents, ends lines, and writes the names of functions."""
    problems, count = [], 0
    for name in sorted(after):
        if not name.endswith(".py") or after[name] == before.get(name):
            continue
        old, new = before.get(name, b""), added(before.get(name, b""), after[name])
        count += sum(bool(line.strip()) for line in new.values())
        try:
            findings = [*_check_layout(old, after[name], new), *_check_syntax(old, after[name], set(new))]
        except RecursionError:  # an expression that is deeper than Python's stack
            findings = [(1, "the file cannot be parsed")]
        problems += [f"{name}:{line}: {message}" for line, message in sorted(findings)]
    return Conformance(tuple(problems), count)


def _check_layout(old: bytes, data: bytes, new: Mapping[int, str]) -> list[tuple[int, str]]:
    max_length = max([100, *(len(line) for line in lines_of(old))])
    has_tabs = any(line.startswith("\t") for line in lines_of(old))
    problems = []
    for number, line in new.items():
        if line != line.rstrip():
            problems.append((number, "space at the end of the line"))
        if len(line) > max_length:
            problems.append((number, f"the line has {len(line)} characters; no other has more than {max_length}"))
        indent = line[: len(line) - len(line.lstrip())]
        if line.strip() and ("\t" in indent) != has_tabs and indent:
            problems.append(
                (number, "spaces where the file has tabs" if has_tabs else "tabs where the file has spaces")
            )
    if b"\r\n" in data and b"\r\n" not in old and old:
        problems.append((1, "other line ends than before"))
    if data and not data.endswith((b"\n", b"\r")):
        problems.append((len(lines_of(data)), "no line end at the end of the file"))
    comments = [number for number, line in new.items() if line.lstrip().startswith("#")]
    comment_numbers = set(comments)
    code = [number for number, line in new.items() if line.strip() and number not in comment_numbers]
    if len(comments) > max(4, 2 * len(code)):  # a chain of thought in comments
        problems.append((comments[0], f"{len(comments)} lines of comments for {len(code)} of code"))
    return problems


def _format_name(node: ast.expr) -> str:
    """A name, or one within a name; to write out all of a long chain of calls for each of them would take the square of
    its length."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return f"{node.value.id}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _check_syntax(old: bytes, data: bytes, new: set[int]) -> list[tuple[int, str]]:
    try:
        tree = parse(data)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return [(getattr(error, "lineno", None) or 1, "the file cannot be parsed")]
    has_camel_case = bool(re.search(rb"\bdef [a-z]+[A-Z]", old))
    nodes = [*ast.walk(tree)]
    used_names = {node.id for node in nodes if isinstance(node, ast.Name)}
    constants = (node.value for node in nodes if isinstance(node, ast.Constant))
    used_names |= {value for value in constants if isinstance(value, str)}  # in __all__
    problems = []
    for node in nodes:
        line = getattr(node, "lineno", 0)
        if line not in new:
            continue
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            problems.append((line, "a bare except"))
        if (
            isinstance(node, ast.Call)
            and (name := _format_name(node.func)) in ("print", "breakpoint", "pdb.set_trace")
            and b"print(" not in old
        ):
            problems.append((line, f"{name} is left"))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if not has_camel_case and re.search(r"[a-z][A-Z]", node.name) and not node.name.startswith("visit_"):
                problems.append((line, f"{node.name} is not written as the file writes names"))
            if any(
                isinstance(default, ast.List | ast.Dict | ast.Set)
                for default in [*node.args.defaults, *filter(None, node.args.kw_defaults)]
            ):
                problems.append((line, "a default that can be changed"))
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                bound_name = alias.asname or alias.name.partition(".")[0]
                is_future = isinstance(node, ast.ImportFrom) and node.module == "__future__"
                if alias.name != "*" and bound_name not in used_names and not is_future:
                    problems.append((line, f"{bound_name} is imported and not used"))
        if isinstance(node, ast.Compare) and any(isinstance(op, ast.Eq | ast.NotEq) for op in node.ops):
            if any(
                isinstance(comparator, ast.Constant) and comparator.value is None for comparator in node.comparators
            ):
                problems.append((line, "a comparison with None by =="))
    return problems


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
    """`passed`: all tests did, by `Verdicts.all_passed`. `before`, `after`, `gold`: the tree that the agent was given,
    what it left, and the tree with the feature. A flag leaves nothing of the reward, and the parts are told all the
    same."""
    succinctness_score, conformance_score = succinctness(before, after, gold), conformance(before, after).score
    total = (
        weights.success + weights.succinctness * succinctness_score + weights.conformance * conformance_score
        if passed and not flags
        else 0.0
    )
    return Reward(passed, succinctness_score, conformance_score, flags, total)
