"""Deletions that look nowhere: as many lines as asked for, in one place or scattered, of those that some test
executes."""

import ast
import random
from collections.abc import Collection, Iterator, Mapping, Sequence

from ref.feature_deletion import Piece, functions, suites
from ref.source_text import Edit, Source, apply, compiles, parse_source, patch

__all__ = ["DeletableEdits", "code_lines", "executed", "in_one_place", "scattered"]

DeletableEdits = Sequence[tuple[str, Edit, frozenset[str]]]
"""What can go: file, edit, and the tests that executed a line of it."""


def generate_edits(source: Source) -> Iterator[Edit]:
    """What may go of a file: statements of functions that follow each other in one suite, as edits."""
    for name, node in functions(source.tree):
        pending: list[ast.stmt] = [] if "<locals>" in name else [node]
        while pending:
            current = pending.pop()
            for suite, fill in suites(source, current):
                for first in range(len(suite)):
                    for last in range(first, len(suite)):
                        is_whole = len(suite) == last - first + 1
                        if not source.alone(suite[first]):
                            continue
                        yield source.cut(
                            suite[first], suite[last], fill if is_whole else "", with_comments=is_whole and bool(fill)
                        )
                pending += suite


def code_lines(edit: Edit) -> int:
    """Lines that go, without blank ones and comments."""
    return sum(bool(line.strip()) and not line.lstrip().startswith(b"#") for line in edit.old.splitlines())


def executed(tree: Mapping[str, bytes], coverage: Mapping[str, Collection[tuple[str, int]]]) -> DeletableEdits:
    """What may go of a tree: all that leaves Python, and that some test executed."""
    tests_by_line: dict[tuple[str, int], set[str]] = {}
    for test, lines in coverage.items():
        for place in lines:
            tests_by_line.setdefault(place, set()).add(test)
    edits = []
    for file, data in sorted(tree.items()):
        for edit in generate_edits(parse_source(data)):
            tests = frozenset[str]().union(
                *(tests_by_line.get((file, line), ()) for line in range(edit.first, edit.last + 1))
            ) - {""}
            if tests and edit.old != edit.new and compiles(apply(patch(file, data, [edit]), data)):
                edits.append((file, edit, tests))
    return edits


def in_one_place(tree: Mapping[str, bytes], edits: DeletableEdits, lines: int, draw: random.Random) -> Piece:
    """One edit of so many lines, or of the nearest number that there is."""
    smallest_gap = min(abs(code_lines(edit) - lines) for _, edit, _ in edits)
    file, edit, tests = draw.choice([entry for entry in edits if abs(code_lines(entry[1]) - lines) == smallest_gap])
    return Piece("one place", f"{file}:{edit.first}", (patch(file, tree[file], [edit]),), tuple(sorted(tests)))


def scattered(tree: Mapping[str, bytes], edits: DeletableEdits, lines: int, draw: random.Random) -> Piece:
    """Edits of one line each, as many as lines are asked for, anywhere. Raises ValueError where a hundred draws leave
    no Python."""
    single_lines = [entry for entry in edits if code_lines(entry[1]) == 1]
    for _ in range(100):
        sample = draw.sample(single_lines, min(lines, len(single_lines)))
        files = sorted({file for file, _, _ in sample})
        try:
            patches = tuple(
                patch(path, tree[path], [edit for file, edit, _ in sample if file == path]) for path in files
            )
        except ValueError:  # two of them touch
            continue
        if all(compiles(apply(file_patch, tree[file_patch.file])) for file_patch in patches):
            name = "+".join(
                f"{file_patch.file}:{','.join(str(edit.first) for edit in file_patch.edits)}" for file_patch in patches
            )
            return Piece(
                "scattered", name, patches, tuple(sorted(frozenset[str]().union(*(tests for _, _, tests in sample))))
            )
    raise ValueError(f"no {lines} lines were found that leave Python when they go")
