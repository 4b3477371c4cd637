"""Feature deletion: tasks that are made from a codebase with tests, by taking a feature out of it and asking for it back.

Cursor's release of Composer 2.5 names it among its synthetic tasks: the agent is given a codebase with a large test suite and is asked to
delete code so that the codebase keeps working while specific, testable features are gone; the task is to write the feature again, and the
tests are the reward. Composer 2.5 trained on 25 times as many synthetic tasks as Composer 2 (arXiv:2603.24477v2), and they were made harder as the
model got better. It also bred the first reward hacks of their kind: a signature was read back from a type checker's cache.

Two tables are all that the method needs: the syntax tree of each file, and which test executed which line.

    who         w(l) = the tests that executed line l                                                                 (1)
    slice       S(G) = the statements s of functions with  ∅ ≠ ⋃_{l ∈ s} w(l) ⊆ G                                   (2)
    groups      G = w(l) of some line l, with at least `least` tests and at most a share `most` of all                (3)
    valid       at least `least` tests fail, all others pass, nothing fails to be collected, and gold comes back by hash    (4)

(2) is what makes a slice safe: no test outside of G ever was in it, so few can miss it, and (4) finds those that do. It need not be a function. A
slice may be one branch of an `if`, a handler of an exception, or such pieces of several files, and so it finds features inside of functions. Two
other ways stand beside it. `bodies` takes one function's body, which breaks the tests of all who call it. `symbols` takes a whole function or
class, with what imports and lists it. It leaves no hole that could be filled: the agent has to find out where the thing belongs.

What stands in a hole
A function whose body goes raises NotImplementedError. It could not be `pass`: None would travel on, and tests would fail far away for reasons
that tell nothing, or pass where None is what they wait for. A suite of an `if`, `else`, `except`, `case`, loop, `with` or class that goes becomes
`pass`, of a `while` loop `break`, for it might never end otherwise. It does not raise: a traceback would lead to the line. Who reads the source
still sees the condition. An `elif` that goes leaves nothing. A docstring stays, for it is the specification; comments directly above what goes
are removed with it, for they tell how it was done.

What makes a piece hard? (5) counts doublings: of lines, functions, files, tests that must pass together, and places that use what is gone.

    difficulty  d = Σ log2(1 + n)  over lines, further functions, further files, tests / 3, callers                   (5)
    level       the next one after more than `high` of the rollouts succeed, the one before after less than `low`      (6)

Where this file departs from the release, which gives neither an algorithm nor a number
1. An agent deletes there. Here a rule does, so that no model is needed, and the same tasks come out every time.
2. Slices, and everything in (2) to (6), are our choice. `least` = 3 keeps out pieces that a single guess would restore. `most` keeps out the heart of
   a package. 0.25 and 0.75 in (6) keep groups of rollouts away from all-failed and all-solved, which have no gradient in GRPO.
3. Statements that run at import (of modules and classes) never are in a slice: all tests depend on them.
4. A function that would no longer be a generator is left whole by a slice. Its callers would see another type, executed or not. Where a generator's
   whole body goes, it raises when it is called, not when it is read.
5. `symbols` offers functions and classes of modules only, and none that a module names while it is imported. It does not follow attributes of
   objects. Whoever uses the symbol inside of a function meets a NameError there, which belongs to the feature.
6. `joined` makes one piece of several that lie in different files and whose tests do not overlap: harder tasks from the same package.

Run it
    etude run feature-deletion --scale small    a second; the same as: python -m ref.feature_deletion
    etude figure feature-deletion               which deletions make tasks, and what else they break; in sandboxes of bubblewrap
    etude run feature-deletion --scale full     scaled/feature_deletion.py, on many ranks, for a package of yours

Glossary
    symbol   variable         unit
    l        (file, line)     lines from 1
    w        who              a set of tests, as bits of an integer
    G        group            the same
    S        Piece            patches of files
    d        Difficulty.bits  doublings
"""

from __future__ import annotations

import ast
import math
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from operator import or_
from types import FrameType
from typing import Any

from ref.source_symbols import Module, removal
from ref.source_text import Edit, Patch, Source, apply, compiles, docstring_apart, parse_source, patch, restore

__all__ = ["Demo", "Difficulty", "Piece", "bodies", "delete", "demo", "difficulty", "faults", "joined", "level", "slices", "symbols", "undelete"]

Function = ast.FunctionDef | ast.AsyncFunctionDef
Suite = Sequence[ast.stmt]
GONE = "raise NotImplementedError"


@dataclass(frozen=True)
class Piece:
    """What is taken out of a tree of files, with all that is needed to put it back."""

    way: str
    """ "slice", "body" or "symbol"; "several" where pieces are joined."""
    name: str
    """Where it lies: a file with the qualified names of functions; a plus sign stands between several."""
    patches: tuple[Patch, ...]
    """One for each file, sorted by name."""
    tests: tuple[str, ...] = ()
    """The tests that executed it, sorted; empty where no coverage was asked."""


class Who:
    """(1) for one file."""

    def __init__(self) -> None:
        self.tests: dict[int, int] = {}
        self.found: dict[tuple[int, int], int] = {}

    def add(self, line: int, test: int) -> None:
        self.tests[line] = self.tests.get(line, 0) | test

    def over(self, first: int, last: int) -> int:
        """The tests that executed a line from `first` to `last`. Asked once for each group of tests, so an answer is kept."""
        if (first, last) not in self.found:
            self.found[first, last] = reduce(or_, (self.tests.get(line, 0) for line in range(first, last + 1)), 0)
        return self.found[first, last]

    def only(self, first: int, last: int, group: int) -> bool:
        """(2): whether somebody executed these lines, and nobody outside of the group did."""
        found = self.over(first, last)
        return bool(found) and not found & ~group


def slices(tree: Mapping[str, bytes], coverage: Mapping[str, Collection[tuple[str, int]]], least: int = 3, most: float = 0.5) -> tuple[Piece, ...]:
    """(2) for every group of (3), sorted. `tree`: files by name. `coverage`: test → (file, line) that it executed. The empty name stands for what ran
    outside of tests, at import: no group has it. Files that `tree` does not hold are ignored. Raises ValueError for least < 1, for most outside
    of (0, 1], and for a covered file that is no Python."""
    if least < 1 or not 0 < most <= 1:
        raise ValueError(f"least must be at least 1 and most a share above 0; got {least} and {most}")
    tests = sorted(test for test in coverage if test)
    bit = {test: 1 << number for number, test in enumerate([*tests, ""])}
    who: dict[str, Who] = {}
    for test, lines in coverage.items():
        for file, line in lines:
            who.setdefault(file, Who()).add(line, bit[test])
    sources = {file: parse_source(tree[file]) for file in sorted(who) if file in tree and file.endswith(".py")}
    inside = {file: [(name, node) for name, node in functions(source.tree) if "<locals>" not in name] for file, source in sources.items()}
    groups = {
        who[file].over(line, line)
        for file, found in inside.items()
        for _, node in found
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    pieces: dict[tuple[Patch, ...], Piece] = {}
    for group in sorted(g for g in groups if least <= g.bit_count() <= most * len(tests) and not g & bit[""]):  # (3)
        patches, names = [], []
        for file, source in sources.items():
            found = [(name, node) for name, node in inside[file] if who[file].over(node.lineno, node.end_lineno or 0) & group]
            edits = [(name, edit) for name, node in found for edit in edits_of(source, node, who[file], group)]
            if edits:
                patches.append(patch(file, tree[file], [edit for _, edit in edits]))
                names.append(f"{file}:{','.join(dict.fromkeys(name for name, _ in edits))}")
        if patches and all(compiles(apply(one, tree[one.file])) for one in patches):
            pieces.setdefault(tuple(patches), Piece("slice", "+".join(names), tuple(patches), tuple(test for test in tests if bit[test] & group)))
    return tuple(sorted(pieces.values(), key=lambda piece: (piece.name, piece.tests)))


def edits_of(source: Source, node: Function, who: Who, group: int) -> list[Edit]:
    """(2) for one function: what is taken out of it, and what stands there instead."""
    body = docstring_apart(node)
    edits = _of_suite(source, body, GONE, who, group) if body else []
    if not edits or len(edits) == 1 and edits[0].new.rstrip().endswith(GONE.encode()):
        return edits
    covered = {line for edit in edits for line in range(edit.first, edit.last + 1)}
    yields = [found.lineno for found in own(node) if isinstance(found, ast.Yield | ast.YieldFrom)]
    return [] if yields and covered.issuperset(yields) else edits


def _of_suite(source: Source, suite: Suite, fill: str, who: Who, group: int) -> list[Edit]:
    """(2) for the statements of a suite, and for those within the ones that stay."""
    start, end = source.begins(suite[0])[0], suite[-1].end_lineno or 0
    if not who.over(start, end) & group:
        return []
    if who.only(start, end, group):  # also what nobody executes there: alone it would make no sense
        edits = [source.cut(suite[0], suite[-1], fill, whole=bool(fill))]
    else:
        edits, run = [], []
        for chunk in [*source.chunks(suite), []]:
            if chunk and who.only(source.begins(chunk[0])[0], chunk[-1].end_lineno or 0, group):
                run += chunk
                continue
            if run and source.alone(run[0]):
                edits.append(source.cut(run[0], run[-1], ""))
            run = []
            for node in chunk:
                for inner, instead in suites(source, node):
                    of_function = isinstance(node, Function)
                    edits += edits_of(source, node, who, group) if of_function else _of_suite(source, inner, instead, who, group)
    return [edit for edit in edits if who.only(edit.first, edit.last, group) and edit.new != edit.old]  # `pass` instead of `pass` is no edit


def suites(source: Source, node: ast.stmt) -> list[tuple[Suite, str]]:
    """The suites of a compound statement that may go, each with what stands in its place."""
    if isinstance(node, Function):
        found = [(docstring_apart(node), GONE)]
    elif isinstance(node, ast.ClassDef):
        found = [(docstring_apart(node), "pass")]
    else:
        parts = [getattr(node, part, []) for part in ("body", "orelse", "finalbody")]
        parts += [part.body for part in [*getattr(node, "handlers", []), *getattr(node, "cases", [])]]
        found = [(part, "" if len(part) == 1 and _is_elif(source, part[0]) else "pass") for part in parts]
        if isinstance(node, ast.While):
            found[0] = (node.body, "break")
    return [(suite, fill) for suite, fill in found if suite]


def _is_elif(source: Source, node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and source.lines[node.lineno - 1].encode()[node.col_offset :].startswith(b"elif")


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    """All functions with their qualified names, from top to bottom."""
    for node in ast.iter_child_nodes(tree):
        name = f"{prefix}{node.name}" if isinstance(node, Function | ast.ClassDef) else prefix
        if isinstance(node, Function):
            yield name, node
        inner = {ast.ClassDef: ".", ast.FunctionDef: ".<locals>.", ast.AsyncFunctionDef: ".<locals>."}.get(type(node), "")
        yield from functions(node, name + inner)


def own(node: ast.AST) -> Iterator[ast.AST]:
    """What lies within a function, and not in functions or classes within it."""
    todo = [*ast.iter_child_nodes(node)]
    while todo:
        child = todo.pop()
        yield child
        if not isinstance(child, Function | ast.ClassDef | ast.Lambda):
            todo += ast.iter_child_nodes(child)


def bodies(tree: Mapping[str, bytes]) -> tuple[Piece, ...]:
    """One piece for each function that does something: its body is gone, its docstring stays. Files that are no Python have none."""
    found = []
    for file, source in _readable(tree):
        for name, node in functions(source.tree):
            body = docstring_apart(node)
            if body and not all(
                isinstance(one, ast.Pass | ast.Raise) or isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant) for one in body
            ):
                edit = source.cut(body[0], body[-1], GONE, whole=True)
                found.append(Piece("body", f"{file}:{name}", (patch(file, tree[file], [edit]),)))
    return tuple(found)


def symbols(tree: Mapping[str, bytes]) -> tuple[Piece, ...]:
    """One piece for each function or class of a module that nothing uses at import: the definition is gone, and so is its name in the imports
    of other files and in `__all__`."""
    modules, found = {file: Module(file, source) for file, source in _readable(tree)}, []
    for file, module in modules.items():
        for name in module.defined:
            edits = removal(modules, file, name)
            if edits:
                patches = tuple(patch(other, tree[other], edits[other]) for other in sorted(edits))
                found.append(Piece("symbol", f"{file}:{name}", patches))
    return tuple(found)


def joined(pieces: Sequence[Piece]) -> Piece:
    """Several pieces as one, which is harder: more lines, files and tests. Their order does not matter. Raises ValueError for fewer than two, and for
    two that are not independent."""
    parts = sorted(pieces, key=lambda piece: [one.file for one in piece.patches])
    if len(parts) < 2:
        raise ValueError(f"pieces must be at least two; got {len(parts)}")
    for number, piece in enumerate(parts):
        if near := [other.name for other in parts[:number] if not independent(piece, other)]:
            raise ValueError(f"{near[0]} and {piece.name} change the same file, or share a part of their tests")
    patches = sorted((one for piece in parts for one in piece.patches), key=lambda one: one.file)
    tests = sorted({test for piece in parts for test in piece.tests})
    return Piece("several", "+".join(piece.name for piece in parts), tuple(patches), tuple(tests))


def independent(piece: Piece, other: Piece) -> bool:
    """Whether two pieces lie in different files, and their tests are other ones or the same ones."""
    apart = {one.file for one in piece.patches}.isdisjoint(one.file for one in other.patches)
    return apart and ({*piece.tests}.isdisjoint(other.tests) or {*piece.tests} == {*other.tests})


def _readable(tree: Mapping[str, bytes]) -> Iterator[tuple[str, Source]]:
    for file in sorted(tree):
        if file.endswith(".py"):
            try:
                yield file, parse_source(tree[file])
            except ValueError:
                continue


def delete(tree: Mapping[str, bytes], piece: Piece) -> dict[str, bytes]:
    """The tree without the piece. A file that lacks its part already stays as it is. Raises ValueError for any other file."""
    return _each(apply, tree, piece)


def undelete(tree: Mapping[str, bytes], piece: Piece) -> dict[str, bytes]:
    """The gold: the tree with the piece again, the same bytes. A file that has its part stays as it is. Raises ValueError for any other file."""
    return _each(restore, tree, piece)


def _each(change: Callable[[Patch, bytes], bytes], tree: Mapping[str, bytes], piece: Piece) -> dict[str, bytes]:
    if missing := [one.file for one in piece.patches if one.file not in tree]:
        raise ValueError(f"the tree lacks {missing[0]}, which the piece changes")
    return {**tree, **{one.file: change(one, tree[one.file]) for one in piece.patches}}


def faults(tree: Mapping[str, bytes], piece: Piece, before: Mapping[str, str], after: Mapping[str, str], least: int = 3) -> tuple[str, ...]:
    """(4): why the piece makes no valid task, one line for each reason; empty for a valid one. `before` and `after`: test → "passed", "failed",
    "skipped" or "error", with and without the feature, where a file that cannot be collected counts as a test in error. What did not pass before
    is no test of the task."""
    tests = sorted(test for test, outcome in before.items() if outcome == "passed")
    failed = [test for test in tests if after.get(test) == "failed"]
    found = [f"{test} cannot be collected" for test in sorted(after) if after[test] == "error" and before.get(test) != "error"]
    found += [f"{test} was not run" for test in tests if test not in after]
    found += [f"{test} was skipped" for test in tests if after.get(test) == "skipped"]
    if len(failed) < least:
        found.append(f"{len(failed)} tests fail; at least {least} must")
    if piece.tests:
        found += [f"{test} fails, although it never executed the piece" for test in failed if test not in piece.tests]
    gone = delete(tree, piece)
    if any(gone[one.file] == tree[one.file] for one in piece.patches) or undelete(gone, piece) != dict(tree):
        found.append("the gold does not come back byte for byte")
    return tuple(found)


@dataclass(frozen=True)
class Difficulty:
    """What makes a piece hard."""

    lines: int
    """Lines of code that are gone, without blank ones and comments."""
    functions: int
    """Functions with a hole; 1 for a whole symbol."""
    files: int
    tests: int
    """Tests that must pass again."""
    callers: int
    """Functions that use one of those by name and have no hole themselves."""

    @property
    def bits(self) -> float:
        """(5)."""
        return sum(math.log2(1 + n) for n in (self.lines, self.functions - 1, self.files - 1, self.tests / 3, self.callers))


def difficulty(tree: Mapping[str, bytes], piece: Piece, failing: int | None = None) -> Difficulty:
    """The numbers of (5) for a piece of `tree`. `failing`: tests that fail without it, by default those that executed it."""
    holes: set[str] = set()
    lines, uses = 0, []
    changed = {one.file: one for one in piece.patches}
    for file in sorted(file for file in tree if file.endswith(".py")):
        texts, found = _uses(tree[file])
        gone = {line for edit in changed[file].edits for line in range(edit.first, edit.last + 1)} if file in changed else set()
        lines += sum(1 for line in gone if texts[line - 1].strip() and not texts[line - 1].lstrip().startswith("#"))
        for name, first, last, used in found:
            if hole := not gone.isdisjoint(range(first, last + 1)):
                holes.add(name)
            uses.append((hole, used))
    if piece.way == "symbol":
        holes = {piece.name.rpartition(":")[2]}
    callers = sum(1 for hole, used in uses if not hole and used & holes)
    return Difficulty(lines, max(1, len(holes)), len(changed), len(piece.tests) if failing is None else failing, callers)


@lru_cache(maxsize=256)
def _uses(data: bytes) -> tuple[tuple[str, ...], list[tuple[str, int, int, frozenset[str]]]]:
    """The lines of a file, and the functions that lie in none: name, first and last line, and the names that they use. No Python has neither."""
    try:
        source = parse_source(data)
    except ValueError:
        return (), []
    found = []
    for name, node in functions(source.tree):
        if "<locals>" not in name:
            used = {one.id if isinstance(one, ast.Name) else one.attr for one in ast.walk(node) if isinstance(one, ast.Name | ast.Attribute)}
            found.append((name.rpartition(".")[2], source.begins(node)[0], node.end_lineno or 0, frozenset(used)))
    return source.lines, found


def level(now: int, solved: int, tried: int, top: int, low: float = 0.25, high: float = 0.75) -> int:
    """(6): the next level of difficulty, 0 to `top`, after `solved` of `tried` rollouts at the level `now`. Levels are quantiles of (5), so that
    each holds as many tasks. Raises ValueError for numbers that make no sense."""
    if not 0 <= now <= top or not 0 <= solved <= tried or not 0 <= low < high <= 1:
        raise ValueError(f"0 ≤ now ≤ top, 0 ≤ solved ≤ tried and 0 ≤ low < high ≤ 1 must hold; got {now}, {top}, {solved}, {tried}, {low}, {high}")
    if not tried:
        return now
    return min(top, now + 1) if solved > high * tried else max(0, now - 1) if solved < low * tried else now


# The demonstration: a package of one file, its tests, and who executes what.

PROGRAM = b'''
def words(text):
    """Split at spaces, and between small and capital letters."""
    out = []
    for part in text.replace("_", " ").split():
        start = 0
        for at in range(1, len(part)):
            if part[at].isupper():
                out.append(part[start:at])
                start = at
        out.append(part[start:])
    return out

def case(text, style):
    """Write words in a style: snake, camel or title."""
    parts = [word.lower() for word in words(text)]
    if style == "snake":
        return "_".join(parts)
    if style == "camel":
        # the first word stays small
        return "".join([parts[0], *(part.capitalize() for part in parts[1:])])
    elif style == "title":
        return " ".join(part.capitalize() for part in parts)
    else:
        raise ValueError(style)

def plural(word):
    """The plural of an English noun."""
    if word.endswith("y") and word[-2:-1] not in "aeiou":
        return word[:-1] + "ies"
    if word.endswith(("s", "x", "ch")):
        return word + "es"
    return word + "s"
'''
FILE = "words.py"
CHECKS = {
    **{f"snake {n}": ("case", (text, "snake"), said) for n, (text, said) in enumerate([("aB", "a_b"), ("a b", "a_b"), ("Ab", "ab")])},
    **{f"camel {n}": ("case", (text, "camel"), said) for n, (text, said) in enumerate([("a_b", "aB"), ("A b", "aB"), ("a b c", "aBC")])},
    **{f"title {n}": ("case", (text, "title"), said) for n, (text, said) in enumerate([("a_b", "A B"), ("aB", "A B"), ("ab", "Ab")])},
    **{f"plural {n}": ("plural", (text,), said) for n, (text, said) in enumerate([("city", "cities"), ("sky", "skies"), ("fly", "flies")])},
    **{f"hiss {n}": ("plural", (text,), said) for n, (text, said) in enumerate([("box", "boxes"), ("bus", "buses"), ("inch", "inches")])},
    **{f"other {n}": ("plural", (text,), said) for n, (text, said) in enumerate([("day", "days"), ("cat", "cats"), ("dog", "dogs")])},
}
"""Test → function, arguments, answer."""


def play(data: bytes) -> tuple[dict[str, str], dict[str, set[tuple[str, int]]]]:
    """Outcomes and coverage of CHECKS for a version of PROGRAM. Only for that: what is executed here is not shut in anywhere."""
    outcomes: dict[str, str] = {}
    coverage: dict[str, set[tuple[str, int]]] = {"": set()}
    test = ""

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename != FILE:
            return None
        if event == "line":
            coverage[test].add((FILE, frame.f_lineno))
        return trace

    space: dict[str, Any] = {}
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        exec(compile(data, FILE, "exec", dont_inherit=True), space)
        for test, (name, arguments, said) in CHECKS.items():
            coverage[test] = set()
            try:
                outcomes[test] = "passed" if space[name](*arguments) == said else "failed"
            except Exception:
                outcomes[test] = "failed"
    finally:
        sys.settrace(before)
    return outcomes, coverage


@dataclass(frozen=True)
class Demo:
    """Three ways to delete from a package of one file with 18 tests."""

    least: int = 3
    """Fewest tests that must fail."""
    most: float = 0.5
    """Greatest share of the tests that a slice may concern."""


def demo(config: Demo = Demo(), log: Callable[..., None] = lambda *_, **__: None) -> dict[str, float]:
    """For each way: pieces, valid ones, and over those the means of lines, of failing tests, and of bits of difficulty, as `measure@way`. Where the
    tests look the functions up by name, a symbol that is gone fails its tests and breaks no import."""
    tree, figures = {FILE: PROGRAM}, {}
    before, coverage = play(PROGRAM)
    ways = {"slice": slices(tree, coverage, config.least, config.most), "body": bodies(tree), "symbol": symbols(tree)}
    for number, (way, pieces) in enumerate(ways.items(), 1):
        found = []
        for piece in pieces:
            after, _ = play(delete(tree, piece)[FILE])
            if not faults(tree, piece, before, after, config.least):
                found.append(difficulty(tree, piece, sum(outcome == "failed" for outcome in after.values())))
        n = max(1, len(found))
        row = {"tried": len(pieces), "valid": len(found), "lines": sum(d.lines for d in found) / n, "failing": sum(d.tests for d in found) / n}
        row["bits"] = sum(d.bits for d in found) / n
        figures |= {f"{name}@{way}": float(value) for name, value in row.items()}
        log(number, len(ways), way=way, **row)
    return figures


if __name__ == "__main__":
    print(demo())
