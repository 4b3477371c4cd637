"""Feature deletion: tasks that are made from a codebase with tests, by taking a feature out of it and asking for it
back.

Cursor's release of Composer 2.5 names it among its synthetic tasks: the agent is given a codebase with a large test
suite and is asked to delete code so that the codebase keeps working while specific, testable features are gone; the
task is to write the feature again, and the tests are the reward. Composer 2.5 trained on 25 times as many synthetic
tasks as Composer 2 (arXiv:2603.24477v2), and they were made harder as the model got better. It also bred the first
reward hacks of their kind: a signature was read back from a type checker's cache.

Two tables are all that the method needs: the syntax tree of each file, and which test executed which line.

    who         w(l) = the tests that executed line l                                                               (1)
    slice       S(G) = the statements s of functions with  ∅ ≠ ⋃_{l ∈ s} w(l) ⊆ G                                   (2)
    groups      G = w(l) of some line l, with at least `least` tests and at most a share `most` of all              (3)
    valid       at least `least` tests fail, all others pass, nothing fails to be collected, and gold comes back    (4)
                by hash

(2) is what makes a slice safe: no test outside of G ever was in it, so few can miss it, and (4) finds those that do. It
need not be a function. A slice may be one branch of an `if`, a handler of an exception, or such pieces of several
files, and so it finds features inside of functions. Three other ways stand beside it. `bodies` takes one function's
body, which breaks the tests of all who call it. `symbols` takes a whole function or class, with what imports and lists
it. It leaves no hole that could be filled: the agent has to find out where the thing belongs. `statements` takes a
single statement of a function, for models that cannot write a body yet.

What stands in a hole
A function whose body goes raises NotImplementedError, and so does one of which a single statement goes, at its place.
It could not be `pass`: None would travel on, and tests would fail far away for reasons that tell nothing, or pass where
None is what they wait for. A suite of an `if`, `else`, `except`, `case`, loop, `with` or class that goes becomes
`pass`, of a `while` loop `break`, for it might never end otherwise. It does not raise: a traceback would lead to the
line. Who reads the source still sees the condition. An `elif` that goes leaves nothing. A docstring stays, for it is
the specification; comments directly above what goes are removed with it, for they tell how it was done.

What makes a piece hard? (5) counts doublings: of lines, functions, files, tests that must pass together, and places
that use what is gone.

    difficulty  d = Σ log2(1 + n)  over lines, further functions, further files, tests / 3, callers                 (5)
    level       the next one after more than `high` of the rollouts succeed, the one before after less than `low`   (6)

Where this file departs from the release, which gives neither an algorithm nor a number
1. An agent deletes there. Here a rule does, so that no model is needed, and the same tasks come out every time.
2. Slices, and everything in (2) to (6), are our choice. `least` = 3 keeps out pieces that a single guess would restore.
   `most` keeps out the heart of a package. 0.25 and 0.75 in (6) keep groups of rollouts away from all-failed and
   all-solved, which have no gradient in GRPO.
3. Statements that run at import (of modules and classes) never are in a slice: all tests depend on them.
4. A function that would no longer be a generator is left whole by a slice. Its callers would see another type, executed
   or not. `statements` takes none that yields. Where a generator's whole body goes, it raises when it is called, not
   when it is read.
5. `symbols` offers functions and classes of modules only, and none that a module names while it is imported. It does
   not follow attributes of objects. Whoever uses the symbol inside of a function meets a NameError there, which belongs
   to the feature.
6. `joined` makes one piece of several that lie in different files and whose tests do not overlap: harder tasks from the
   same package.

Run it
    etude run feature-deletion --scale small    a second; the same as: python -m ref.feature_deletion
    etude figure feature-deletion               which deletions make tasks, and what else they break; in sandboxes of
                                                bubblewrap
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
from dataclasses import dataclass, field
from functools import lru_cache, reduce
from operator import or_
from types import FrameType
from typing import Any

from ref.source_symbols import Module, removal
from ref.source_text import Edit, Patch, Source, apply, compiles, docstring_apart, parse_source, patch, restore

__all__ = [
    "Demo",
    "Difficulty",
    "Piece",
    "bodies",
    "delete",
    "demo",
    "difficulty",
    "faults",
    "joined",
    "level",
    "slices",
    "statements",
    "symbols",
    "undelete",
]

Function = ast.FunctionDef | ast.AsyncFunctionDef
Suite = Sequence[ast.stmt]
BODY_FILL = "raise NotImplementedError"
SIMPLE = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return, ast.Expr, ast.Assert, ast.Delete)
"""Statements that `statements` takes out."""


@dataclass(frozen=True)
class Piece:
    """What is taken out of a tree of files, with all that is needed to put it back."""

    way: str
    """ "slice", "body", "symbol" or "statement"; "several" where pieces are joined."""
    name: str
    """Where it lies: a file with the qualified names of functions; a plus sign stands between several."""
    patches: tuple[Patch, ...]
    """One for each file, sorted by name."""
    tests: tuple[str, ...] = ()
    """The tests that executed it, sorted; empty where no coverage was asked."""


class LineCoverage:
    """(1) for one file."""

    def __init__(self) -> None:
        self.tests: dict[int, int] = {}
        self.cache: dict[tuple[int, int], int] = {}

    def add(self, line: int, test: int) -> None:
        self.tests[line] = self.tests.get(line, 0) | test  # Eq. 1: the test joins w(l)

    def tests_of_lines(self, first: int, last: int) -> int:
        """The tests that executed a line from `first` to `last`. Asked once for each group of tests, so an answer is
        kept."""
        if (first, last) not in self.cache:
            # Eq. 2: ⋃ w(l) over the lines
            self.cache[first, last] = reduce(or_, (self.tests.get(line, 0) for line in range(first, last + 1)), 0)
        return self.cache[first, last]

    def is_only_covered_by(self, first: int, last: int, group: int) -> bool:
        """(2): whether somebody executed these lines, and nobody outside of the group did."""
        tests = self.tests_of_lines(first, last)
        return bool(tests) and not tests & ~group  # Eq. 2: ∅ ≠ ⋃ w(l) ⊆ G


def slices(
    tree: Mapping[str, bytes],
    coverage: Mapping[str, Collection[tuple[str, int]]],
    least: int = 3,
    max_share: float = 0.5,
) -> tuple[Piece, ...]:
    """(2) for every group of (3), sorted. `tree`: files by name. `coverage`: test → (file, line) that it executed. The
    empty name stands for what ran outside of tests, at import: no group has it. Files that `tree` does not hold are
    ignored. Raises ValueError for least < 1, for most outside of (0, 1], and for a covered file that is no Python."""
    if least < 1 or not 0 < max_share <= 1:
        raise ValueError(f"least must be at least 1 and max_share a share above 0; got {least} and {max_share}")
    tests = sorted(test for test in coverage if test)
    bit = {test: 1 << number for number, test in enumerate([*tests, ""])}
    line_tests: dict[str, LineCoverage] = {}
    for test, lines in coverage.items():
        for file, line in lines:
            line_tests.setdefault(file, LineCoverage()).add(line, bit[test])
    sources = {file: parse_source(tree[file]) for file in sorted(line_tests) if file in tree and file.endswith(".py")}
    file_functions = {
        file: [(name, node) for name, node in functions(source.tree) if "<locals>" not in name]
        for file, source in sources.items()
    }
    groups = {
        line_tests[file].tests_of_lines(line, line)
        for file, nodes in file_functions.items()
        for _, node in nodes
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    pieces: dict[tuple[Patch, ...], Piece] = {}
    for group in sorted(
        g for g in groups if least <= g.bit_count() <= max_share * len(tests) and not g & bit[""]
    ):  # Eq. 3
        patches, names = [], []
        for file, source in sources.items():
            group_functions = [
                (name, node)
                for name, node in file_functions[file]
                if line_tests[file].tests_of_lines(node.lineno, node.end_lineno or 0) & group
            ]
            edits = [
                (name, edit)
                for name, node in group_functions
                for edit in make_function_edits(source, node, line_tests[file], group)
            ]
            if edits:
                patches.append(patch(file, tree[file], [edit for _, edit in edits]))
                names.append(f"{file}:{','.join(dict.fromkeys(name for name, _ in edits))}")
        if patches and all(compiles(apply(file_patch, tree[file_patch.file])) for file_patch in patches):
            pieces.setdefault(
                tuple(patches),
                Piece("slice", "+".join(names), tuple(patches), tuple(test for test in tests if bit[test] & group)),
            )
    return tuple(sorted(pieces.values(), key=lambda piece: (piece.name, piece.tests)))


def make_function_edits(source: Source, node: Function, coverage: LineCoverage, group: int) -> list[Edit]:
    """(2) for one function: what is taken out of it, and what stands there instead."""
    body = docstring_apart(node)
    edits = _edit_suite(source, body, BODY_FILL, coverage, group) if body else []
    if not edits or len(edits) == 1 and edits[0].new.rstrip().endswith(BODY_FILL.encode()):
        return edits
    covered = {line for edit in edits for line in range(edit.first, edit.last + 1)}
    yields = [inner.lineno for inner in own(node) if isinstance(inner, ast.Yield | ast.YieldFrom)]
    return [] if yields and covered.issuperset(yields) else edits


def _edit_suite(source: Source, suite: Suite, fill: str, line_tests: LineCoverage, group: int) -> list[Edit]:
    """(2) for the statements of a suite, and for those within the ones that stay."""
    start, end = source.begins(suite[0])[0], suite[-1].end_lineno or 0
    if not line_tests.tests_of_lines(start, end) & group:
        return []
    if line_tests.is_only_covered_by(
        start, end, group
    ):  # also what nobody executes there: alone it would make no sense
        edits = [source.cut(suite[0], suite[-1], fill, with_comments=bool(fill))]
    else:
        edits, statements = [], []
        for chunk in [*source.chunks(suite), []]:
            if chunk and line_tests.is_only_covered_by(source.begins(chunk[0])[0], chunk[-1].end_lineno or 0, group):
                statements += chunk
                continue
            if statements and source.alone(statements[0]):
                edits.append(source.cut(statements[0], statements[-1], ""))
            statements = []
            for node in chunk:
                for inner, inner_fill in suites(source, node):
                    is_function = isinstance(node, Function)
                    edits += (
                        make_function_edits(source, node, line_tests, group)
                        if is_function
                        else _edit_suite(source, inner, inner_fill, line_tests, group)
                    )
    # `pass` instead of `pass` is no edit
    return [
        edit for edit in edits if line_tests.is_only_covered_by(edit.first, edit.last, group) and edit.new != edit.old
    ]


def suites(source: Source, node: ast.stmt) -> list[tuple[Suite, str]]:
    """The suites of a compound statement that may go, each with what stands in its place."""
    if isinstance(node, Function):
        options = [(docstring_apart(node), BODY_FILL)]
    elif isinstance(node, ast.ClassDef):
        options = [(docstring_apart(node), "pass")]
    else:
        parts = [getattr(node, part, []) for part in ("body", "orelse", "finalbody")]
        parts += [part.body for part in [*getattr(node, "handlers", []), *getattr(node, "cases", [])]]
        options = [(part, "" if len(part) == 1 and _is_elif(source, part[0]) else "pass") for part in parts]
        if isinstance(node, ast.While):
            options[0] = (node.body, "break")
    return [(suite, fill) for suite, fill in options if suite]


def _is_elif(source: Source, node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and source.lines[node.lineno - 1].encode()[node.col_offset :].startswith(b"elif")


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    """All functions with their qualified names, from top to bottom."""
    for node in ast.iter_child_nodes(tree):
        name = f"{prefix}{node.name}" if isinstance(node, Function | ast.ClassDef) else prefix
        if isinstance(node, Function):
            yield name, node
        inner = {ast.ClassDef: ".", ast.FunctionDef: ".<locals>.", ast.AsyncFunctionDef: ".<locals>."}.get(
            type(node), ""
        )
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
    """One piece for each function that does something: its body is gone, its docstring stays. Files that are no Python
    have none."""
    pieces = []
    for file, source in _read_sources(tree):
        for name, node in functions(source.tree):
            body = docstring_apart(node)
            if body and not all(
                isinstance(statement, ast.Pass | ast.Raise)
                or isinstance(statement, ast.Expr)
                and isinstance(statement.value, ast.Constant)
                for statement in body
            ):
                edit = source.cut(body[0], body[-1], BODY_FILL, with_comments=True)
                pieces.append(Piece("body", f"{file}:{name}", (patch(file, tree[file], [edit]),)))
    return tuple(pieces)


def statements(tree: Mapping[str, bytes]) -> tuple[Piece, ...]:
    """One piece for each simple statement of a function (SIMPLE) that is not all that the function does: an exception
    stands in its place. Files that are no Python have none."""
    pieces = []
    for file, source in _read_sources(tree):
        for name, node in functions(source.tree):
            body = docstring_apart(node)
            for statement in _list_simple(source, body):
                if body != [statement]:
                    change = patch(file, tree[file], [source.cut(statement, statement, BODY_FILL)])
                    if compiles(apply(change, tree[file])):
                        pieces.append(Piece("statement", f"{file}:{name}", (change,)))
    return tuple(pieces)


def _list_simple(source: Source, suite: Suite) -> Iterator[ast.stmt]:
    """Simple statements of a suite and of the suites within it, each alone in its lines; none of functions and classes
    within it, and none that yields or is only a constant."""
    for chunk in source.chunks(suite):
        for statement in chunk:
            if isinstance(statement, SIMPLE):
                is_constant = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
                yields = any(isinstance(inner, ast.Yield | ast.YieldFrom) for inner in ast.walk(statement))
                if len(chunk) == 1 and source.alone(statement) and not is_constant and not yields:
                    yield statement
            elif not isinstance(statement, Function | ast.ClassDef):
                for inner_suite, _ in suites(source, statement):
                    yield from _list_simple(source, inner_suite)


def symbols(tree: Mapping[str, bytes]) -> tuple[Piece, ...]:
    """One piece for each function or class of a module that nothing uses at import: the definition is gone, and so is
    its name in the imports of other files and in `__all__`."""
    modules, pieces = {file: Module(file, source) for file, source in _read_sources(tree)}, []
    for file, module in modules.items():
        for name in module.defined:
            edits = removal(modules, file, name)
            if edits:
                patches = tuple(
                    patch(changed_file, tree[changed_file], edits[changed_file]) for changed_file in sorted(edits)
                )
                pieces.append(Piece("symbol", f"{file}:{name}", patches))
    return tuple(pieces)


def joined(pieces: Sequence[Piece]) -> Piece:
    """Several pieces as one, which is harder: more lines, files and tests. Their order does not matter. Raises
    ValueError for fewer than two, and for two that are not independent."""
    parts = sorted(pieces, key=lambda piece: [file_patch.file for file_patch in piece.patches])
    if len(parts) < 2:
        raise ValueError(f"pieces must be at least two; got {len(parts)}")
    for number, piece in enumerate(parts):
        if conflicts := [
            earlier_piece.name for earlier_piece in parts[:number] if not are_independent(piece, earlier_piece)
        ]:
            raise ValueError(f"{conflicts[0]} and {piece.name} change the same file, or share a part of their tests")
    patches = sorted(
        (file_patch for piece in parts for file_patch in piece.patches), key=lambda file_patch: file_patch.file
    )
    tests = sorted({test for piece in parts for test in piece.tests})
    return Piece("several", "+".join(piece.name for piece in parts), tuple(patches), tuple(tests))


def are_independent(first: Piece, second: Piece) -> bool:
    """Whether two pieces lie in different files, and their tests are other ones or the same ones."""
    is_disjoint = {file_patch.file for file_patch in first.patches}.isdisjoint(
        file_patch.file for file_patch in second.patches
    )
    return is_disjoint and ({*first.tests}.isdisjoint(second.tests) or {*first.tests} == {*second.tests})


def _read_sources(tree: Mapping[str, bytes]) -> Iterator[tuple[str, Source]]:
    for file in sorted(tree):
        if file.endswith(".py"):
            try:
                yield file, parse_source(tree[file])
            except ValueError:
                continue


def delete(tree: Mapping[str, bytes], piece: Piece) -> dict[str, bytes]:
    """The tree without the piece. A file that lacks its part already stays as it is. Raises ValueError for any other
    file."""
    return _change_files(apply, tree, piece)


def undelete(tree: Mapping[str, bytes], piece: Piece) -> dict[str, bytes]:
    """The gold: the tree with the piece again, the same bytes. A file that has its part stays as it is. Raises
    ValueError for any other file."""
    return _change_files(restore, tree, piece)


def _change_files(change: Callable[[Patch, bytes], bytes], tree: Mapping[str, bytes], piece: Piece) -> dict[str, bytes]:
    if missing := [file_patch.file for file_patch in piece.patches if file_patch.file not in tree]:
        raise ValueError(f"the tree lacks {missing[0]}, which the piece changes")
    return {**tree, **{file_patch.file: change(file_patch, tree[file_patch.file]) for file_patch in piece.patches}}


def faults(
    tree: Mapping[str, bytes], piece: Piece, before: Mapping[str, str], after: Mapping[str, str], least: int = 3
) -> tuple[str, ...]:
    """(4): why the piece makes no valid task, one line for each reason; empty for a valid one. `before` and `after`:
    test → "passed", "failed", "skipped" or "error", with and without the feature, where a file that cannot be collected
    counts as a test in error. What did not pass before is no test of the task."""
    tests = sorted(test for test, outcome in before.items() if outcome == "passed")
    failed_tests = [test for test in tests if after.get(test) == "failed"]  # Eq. 4: tests that fail without the piece
    reasons = [
        f"{test} cannot be collected"
        for test in sorted(after)
        if after[test] == "error" and before.get(test) != "error"
    ]
    reasons += [f"{test} was not run" for test in tests if test not in after]
    reasons += [f"{test} was skipped" for test in tests if after.get(test) == "skipped"]
    if len(failed_tests) < least:  # Eq. 4: at least `least` of them
        reasons.append(f"{len(failed_tests)} tests fail; at least {least} must")
    if piece.tests:
        reasons += [
            f"{test} fails, although it never executed the piece" for test in failed_tests if test not in piece.tests
        ]
    remaining = delete(tree, piece)  # Eq. 4: gold comes back
    if any(remaining[file_patch.file] == tree[file_patch.file] for file_patch in piece.patches) or undelete(
        remaining, piece
    ) != dict(tree):
        reasons.append("the gold does not come back byte for byte")
    return tuple(reasons)


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
        # Eq. 5: d = Σ log2(1 + n)
        return sum(
            math.log2(1 + n) for n in (self.lines, self.functions - 1, self.files - 1, self.tests / 3, self.callers)
        )


def difficulty(tree: Mapping[str, bytes], piece: Piece, failing: int | None = None) -> Difficulty:
    """The numbers of (5) for a piece of `tree`. `failing`: tests that fail without it, by default those that executed
    it."""
    holes: set[str] = set()
    lines, uses = 0, []
    patch_by_file = {file_patch.file: file_patch for file_patch in piece.patches}
    for file in sorted(file for file in tree if file.endswith(".py")):
        texts, function_uses = _list_uses(tree[file])
        removed_lines = (
            {line for edit in patch_by_file[file].edits for line in range(edit.first, edit.last + 1)}
            if file in patch_by_file
            else set()
        )
        lines += sum(
            1 for line in removed_lines if texts[line - 1].strip() and not texts[line - 1].lstrip().startswith("#")
        )
        for name, first, last, names in function_uses:
            if has_hole := not removed_lines.isdisjoint(range(first, last + 1)):
                holes.add(name)
            uses.append((has_hole, names))
    if piece.way == "symbol":
        holes = {piece.name.rpartition(":")[2]}
    callers = sum(1 for has_hole, names in uses if not has_hole and names & holes)
    return Difficulty(
        lines, max(1, len(holes)), len(patch_by_file), len(piece.tests) if failing is None else failing, callers
    )


@lru_cache(maxsize=256)
def _list_uses(data: bytes) -> tuple[tuple[str, ...], list[tuple[str, int, int, frozenset[str]]]]:
    """The lines of a file, and the functions that lie in none: name, first and last line, and the names that they use.
    No Python has neither."""
    try:
        source = parse_source(data)
    except ValueError:
        return (), []
    function_uses = []
    for name, node in functions(source.tree):
        if "<locals>" not in name:
            names = {
                part.id if isinstance(part, ast.Name) else part.attr
                for part in ast.walk(node)
                if isinstance(part, ast.Name | ast.Attribute)
            }
            function_uses.append(
                (name.rpartition(".")[2], source.begins(node)[0], node.end_lineno or 0, frozenset(names))
            )
    return source.lines, function_uses


def level(current: int, num_solved: int, num_rollouts: int, top: int, low: float = 0.25, high: float = 0.75) -> int:
    """(6): the next level of difficulty, 0 to `top`, after `num_solved` of `num_rollouts` rollouts at the level
    `current`. Levels are quantiles of (5), so that each holds as many tasks. Raises ValueError for numbers that make no
    sense."""
    if not 0 <= current <= top or not 0 <= num_solved <= num_rollouts or not 0 <= low < high <= 1:
        raise ValueError(
            f"0 ≤ now ≤ top, 0 ≤ solved ≤ tried and 0 ≤ low < high ≤ 1 must hold; got {current}, {top}, "
            f"{num_solved}, {num_rollouts}, {low}, {high}"
        )
    if not num_rollouts:
        return current
    # Eq. 6: up above `high`, down below `low`
    return (
        min(top, current + 1)
        if num_solved > high * num_rollouts
        else max(0, current - 1)
        if num_solved < low * num_rollouts
        else current
    )


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
    **{
        f"snake {n}": ("case", (text, "snake"), answer)
        for n, (text, answer) in enumerate([("aB", "a_b"), ("a b", "a_b"), ("Ab", "ab")])
    },
    **{
        f"camel {n}": ("case", (text, "camel"), answer)
        for n, (text, answer) in enumerate([("a_b", "aB"), ("A b", "aB"), ("a b c", "aBC")])
    },
    **{
        f"title {n}": ("case", (text, "title"), answer)
        for n, (text, answer) in enumerate([("a_b", "A B"), ("aB", "A B"), ("ab", "Ab")])
    },
    **{
        f"plural {n}": ("plural", (text,), answer)
        for n, (text, answer) in enumerate([("city", "cities"), ("sky", "skies"), ("fly", "flies")])
    },
    **{
        f"hiss {n}": ("plural", (text,), answer)
        for n, (text, answer) in enumerate([("box", "boxes"), ("bus", "buses"), ("inch", "inches")])
    },
    **{
        f"other {n}": ("plural", (text,), answer)
        for n, (text, answer) in enumerate([("day", "days"), ("cat", "cats"), ("dog", "dogs")])
    },
}
"""Test → function, arguments, answer."""


def play(data: bytes) -> tuple[dict[str, str], dict[str, set[tuple[str, int]]]]:
    """Outcomes and coverage of CHECKS for a version of PROGRAM. Only for that: what is executed here is not shut in
    anywhere."""
    outcomes: dict[str, str] = {}
    coverage: dict[str, set[tuple[str, int]]] = {"": set()}
    test = ""

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename != FILE:
            return None
        if event == "line":
            coverage[test].add((FILE, frame.f_lineno))
        return trace

    namespace: dict[str, Any] = {}
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        exec(compile(data, FILE, "exec", dont_inherit=True), namespace)
        for test, (name, arguments, answer) in CHECKS.items():
            coverage[test] = set()
            try:
                outcomes[test] = "passed" if namespace[name](*arguments) == answer else "failed"
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
    max_share: float = field(default=0.5, metadata={"renamed_from": "most"})
    """Greatest share of the tests that a slice may concern."""


def demo(config: Demo = Demo(), log: Callable[..., None] = lambda *_, **__: None) -> dict[str, float]:
    """For each way: pieces, valid ones, and over those the means of lines, of failing tests, and of bits of difficulty,
    as `measure@way`. Where the tests look the functions up by name, a symbol that is gone fails its tests and breaks no
    import."""
    tree, metrics = {FILE: PROGRAM}, {}
    before, coverage = play(PROGRAM)
    pieces_by_way = {
        "slice": slices(tree, coverage, config.least, config.max_share),
        "body": bodies(tree),
        "symbol": symbols(tree),
    }
    for number, (way, pieces) in enumerate(pieces_by_way.items(), 1):
        difficulties = []
        for piece in pieces:
            after, _ = play(delete(tree, piece)[FILE])
            if not faults(tree, piece, before, after, config.least):
                difficulties.append(difficulty(tree, piece, sum(outcome == "failed" for outcome in after.values())))
        count = max(1, len(difficulties))
        row = {
            "tried": len(pieces),
            "valid": len(difficulties),
            "lines": sum(item.lines for item in difficulties) / count,
            "failing": sum(item.tests for item in difficulties) / count,
        }
        row["bits"] = sum(item.bits for item in difficulties) / count
        metrics |= {f"{name}@{way}": float(value) for name, value in row.items()}
        log(number, len(pieces_by_way), way=way, **row)
    return metrics


if __name__ == "__main__":
    print(demo())
