"""Deletions that look nowhere: as many lines as asked for, in one place or scattered, of those that some test executes."""

import ast
import random
from collections.abc import Collection, Iterator, Mapping, Sequence

from ref.feature_deletion import Piece, functions, suites
from ref.source_text import Edit, Source, apply, compiles, parse_source, patch

__all__ = ["Known", "code_lines", "executed", "in_one_place", "scattered"]

Known = Sequence[tuple[str, Edit, frozenset[str]]]
"""What can go: file, edit, and the tests that executed a line of it."""


def runs_of(source: Source) -> Iterator[Edit]:
    """What may go of a file: statements of functions that follow each other in one suite, as edits."""
    for name, node in functions(source.tree):
        todo: list[ast.stmt] = [] if "<locals>" in name else [node]
        while todo:
            here = todo.pop()
            for suite, fill in suites(source, here):
                for first in range(len(suite)):
                    for last in range(first, len(suite)):
                        whole = len(suite) == last - first + 1
                        if not source.alone(suite[first]):
                            continue
                        yield source.cut(suite[first], suite[last], fill if whole else "", whole=whole and bool(fill))
                todo += suite


def code_lines(edit: Edit) -> int:
    """Lines that go, without blank ones and comments."""
    return sum(bool(line.strip()) and not line.lstrip().startswith(b"#") for line in edit.old.splitlines())


def executed(tree: Mapping[str, bytes], coverage: Mapping[str, Collection[tuple[str, int]]]) -> Known:
    """What may go of a tree: all that leaves Python, and that some test executed."""
    who: dict[tuple[str, int], set[str]] = {}
    for test, lines in coverage.items():
        for place in lines:
            who.setdefault(place, set()).add(test)
    found = []
    for file, data in sorted(tree.items()):
        for edit in runs_of(parse_source(data)):
            tests = frozenset[str]().union(*(who.get((file, line), ()) for line in range(edit.first, edit.last + 1))) - {""}
            if tests and edit.old != edit.new and compiles(apply(patch(file, data, [edit]), data)):
                found.append((file, edit, tests))
    return found


def in_one_place(tree: Mapping[str, bytes], known: Known, lines: int, draw: random.Random) -> Piece:
    """One edit of so many lines, or of the nearest number that there is."""
    least = min(abs(code_lines(edit) - lines) for _, edit, _ in known)
    file, edit, tests = draw.choice([one for one in known if abs(code_lines(one[1]) - lines) == least])
    return Piece("one place", f"{file}:{edit.first}", (patch(file, tree[file], [edit]),), tuple(sorted(tests)))


def scattered(tree: Mapping[str, bytes], known: Known, lines: int, draw: random.Random) -> Piece:
    """Edits of one line each, as many as lines are asked for, anywhere. Raises ValueError where a hundred draws leave no Python."""
    single = [one for one in known if code_lines(one[1]) == 1]
    for _ in range(100):
        drawn = draw.sample(single, min(lines, len(single)))
        files = sorted({file for file, _, _ in drawn})
        try:
            patches = tuple(patch(one, tree[one], [edit for file, edit, _ in drawn if file == one]) for one in files)
        except ValueError:  # two of them touch
            continue
        if all(compiles(apply(one, tree[one.file])) for one in patches):
            name = "+".join(f"{one.file}:{','.join(str(edit.first) for edit in one.edits)}" for one in patches)
            return Piece("scattered", name, patches, tuple(sorted(frozenset[str]().union(*(tests for _, _, tests in drawn)))))
    raise ValueError(f"no {lines} lines were found that leave Python when they go")
