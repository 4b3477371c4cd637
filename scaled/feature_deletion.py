"""Feature deletion on many ranks: `ref/feature_deletion.py`, which explains ways, groups and difficulty.

A codebase of 100,000s of lines has 10,000s of tests. Ranks play the tests, each its share, so each has the coverage of
its own. `tree` is small beside it, and the same on every rank. Every function here returns all pieces, on every rank
the same, in the order of `ref`.

    coverage        of this rank's tests; where several ranks name a test, its lines are joined, and so are those that
                    ran at import
    w               for each file a matrix of bits, lines × all tests: one bit for a test that executed the line,
                    gathered once
    G               the distinct rows of lines in functions, dealt to ranks: G, G + ranks, …

What costs time? The reference walks through every function that a test of G enters, for every G. A function loses
something only if one of its lines has ∅ ≠ w(l) ⊆ G. With rows as vectors x of zeros and ones that is x·G = x·x, for all
rows at once a product of matrices, exact in float32 below 2²⁴ tests. What is left are few functions for each group, and
there `ref` cuts.

`symbols` hands `ref` those files alone that import the symbol, or name it as an attribute. `difficulty` reads each file
once, not for each piece again.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist

from ref import feature_deletion as ref
from ref.feature_deletion import (
    Demo,
    Difficulty,
    Function,
    LineCoverage,
    Piece,
    delete,
    demo,
    faults,
    joined,
    level,
    undelete,
)
from ref.source_symbols import Module, removal
from ref.source_text import Patch, Source, apply, compiles, parse_source, patch
from scaled.runtime.mesh import current

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

BLOCK = 2048
"""Rows that are multiplied at a time."""
Rows = dict[str, tuple[np.ndarray, np.ndarray]]
"""File → its covered lines [L], and the tests that executed each, as bits [L, tests / 8]; the last test's first."""
Item = TypeVar("Item")
Result = TypeVar("Result")


def slices(
    tree: Mapping[str, bytes],
    coverage: Mapping[str, Collection[tuple[str, int]]],
    least: int = 3,
    max_share: float = 0.5,
) -> tuple[Piece, ...]:
    """All slices of `tree`, which is the same on every rank, from the `coverage` of this rank's tests. Raises
    ValueError as in `ref`, on every rank, and where the ranks' trees differ."""
    if least < 1 or not 0 < max_share <= 1:
        raise ValueError(f"least must be at least 1 and most a share above 0; got {least} and {max_share}")
    check_same_tree(tree)
    tests, rows = table(tree, coverage)
    sources = {file: parse_source(tree[file]) for file in sorted(rows)}
    functions = [
        (file, name, node)
        for file, source in sources.items()
        for name, node in ref.functions(source.tree)
        if "<locals>" not in name
    ]
    distinct, functions_of_row = distinct_rows(rows, functions)
    counts = np.array([int.from_bytes(row.tobytes()).bit_count() for row in distinct], np.int64)
    at_import = distinct[:, 0] >> 7 if len(distinct) else np.zeros(0, np.uint8)
    # Eq. 3 (ref/feature_deletion.py): groups G of at least `least` tests, at most a share `most`, none at import.
    row_numbers = np.flatnonzero((counts >= least) & (counts <= max_share * len(tests)) & (at_import == 0)).tolist()
    row_numbers.sort(key=lambda row_number: distinct[row_number].tobytes())  # as whole numbers are sorted
    spare = 8 * distinct.shape[1] - len(tests) - 1
    tests_by_file = {file: tests_by_line(*rows[file], spare) for file in rows}

    def cut(batch: Sequence[int]) -> list[Piece | None]:
        batch_pieces = []
        for row_number, subsets in zip(batch, find_contained(distinct, counts, batch), strict=True):
            function_numbers = sorted(set(chain.from_iterable(functions_of_row[number] for number in subsets)))
            group = int.from_bytes(distinct[row_number].tobytes()) >> spare
            test_columns = np.flatnonzero(np.unpackbits(distinct[row_number])[: len(tests) + 1])[::-1]
            names = tuple(tests[len(tests) - at] for at in test_columns)
            batch_pieces.append(
                slice_of(
                    tree,
                    sources,
                    [functions[function_number] for function_number in function_numbers],
                    tests_by_file,
                    group,
                    names,
                )
            )
        return batch_pieces

    pieces: dict[tuple[Patch, ...], Piece] = {}
    for piece in map_over_ranks(row_numbers, cut):
        if piece is not None:
            pieces.setdefault(piece.patches, piece)
    return tuple(sorted(pieces.values(), key=lambda piece: (piece.name, piece.tests)))


def slice_of(
    tree: Mapping[str, bytes],
    sources: Mapping[str, Source],
    functions: Sequence[tuple[str, str, Function]],
    tests_by_file: Mapping[str, LineCoverage],
    group: int,
    tests: tuple[str, ...],
) -> Piece | None:
    """(2) for one group, from the functions that may lose something: file, qualified name, node. None where nothing can
    go."""
    # Eq. 2 (ref/feature_deletion.py): S(G), the statements that only tests of G execute.
    cuts: dict[str, list] = {}
    for file, name, node in functions:
        cuts.setdefault(file, []).extend(
            (name, edit) for edit in ref.make_function_edits(sources[file], node, tests_by_file[file], group)
        )
    cuts = {file: edits for file, edits in cuts.items() if edits}
    patches = tuple(patch(file, tree[file], [edit for _, edit in edits]) for file, edits in cuts.items())
    names = "+".join(f"{file}:{','.join(dict.fromkeys(name for name, _ in edits))}" for file, edits in cuts.items())
    return (
        Piece("slice", names, patches, tests)
        if patches and all(compiles(apply(file_patch, tree[file_patch.file])) for file_patch in patches)
        else None
    )


def table(tree: Mapping[str, bytes], coverage: Mapping[str, Collection[tuple[str, int]]]) -> tuple[list[str], Rows]:
    """The tests of all ranks, sorted, and (1) for each file of Python that one of them executed."""
    local_numbers = {test: number for number, test in enumerate(sorted(coverage))}
    lines: dict[str, dict[int, list[int]]] = {}
    for test, executed_lines in coverage.items():
        for file, line in executed_lines:
            if file in tree and file.endswith(".py"):
                lines.setdefault(file, {}).setdefault(line, []).append(local_numbers[test])
    packed_lines = {}
    for file, tests_of_line in lines.items():
        bits = np.zeros((len(tests_of_line), len(local_numbers)), bool)
        for row, test_numbers in zip(bits, tests_of_line.values(), strict=True):
            row[test_numbers] = True
        packed_lines[file] = np.array([*tests_of_line]), np.packbits(bits, 1)
    parts = gather_values([*local_numbers], packed_lines)
    tests = sorted({test for names, _ in parts for test in names if test})
    column = {test: len(tests) - number for number, test in enumerate(tests)} | {"": 0}
    rows: Rows = {}
    for file in sorted({file for _, packed_files in parts for file in packed_files}):
        entries = [(names, *packed_files[file]) for names, packed_files in parts if file in packed_files]
        all_lines = np.unique(np.concatenate([line_numbers for _, line_numbers, _ in entries]))
        bits = np.zeros((len(all_lines), len(tests) + 1), bool)
        for names, line_numbers, packed_bits in entries:
            cells = (
                np.searchsorted(all_lines, line_numbers)[:, None],
                np.array([column[name] for name in names], int)[None],
            )
            # Eq. 1 (ref/feature_deletion.py): w(l), one bit for each test.
            bits[cells] |= np.unpackbits(packed_bits, 1, len(names)).astype(bool)
        rows[file] = all_lines, np.packbits(bits, 1)
    return tests, rows


def tests_by_line(lines: np.ndarray, bits: np.ndarray, spare: int) -> LineCoverage:
    """(1) for one file as `ref` has it: whole numbers. `spare`: bits behind the first test's."""
    # Eq. 1 (ref/feature_deletion.py): w(l), as a whole number.
    line_tests = LineCoverage()
    line_tests.tests = {
        line: int.from_bytes(row.tobytes()) >> spare for line, row in zip(lines.tolist(), bits, strict=True)
    }
    return line_tests


def distinct_rows(rows: Rows, functions: Sequence[tuple[str, str, Function]]) -> tuple[np.ndarray, list[list[int]]]:
    """The distinct rows of all lines in functions, and for each the functions that have such a line."""
    row_numbers: dict[bytes, int] = {}
    functions_of_row: list[list[int]] = []
    for function_number, (file, _, node) in enumerate(functions):
        lines, bits = rows[file]
        first, last = np.searchsorted(lines, [node.lineno, (node.end_lineno or node.lineno) + 1])
        for row in {row.tobytes() for row in bits[first:last] if row.any()}:
            if row not in row_numbers:
                row_numbers[row] = len(row_numbers)
                functions_of_row.append([])
            functions_of_row[row_numbers[row]].append(function_number)
    width = next((bits.shape[1] for _, bits in rows.values()), 1)
    return np.frombuffer(b"".join(row_numbers), np.uint8).reshape(-1, width), functions_of_row


def find_contained(distinct: np.ndarray, counts: np.ndarray, row_numbers: Sequence[int]) -> Iterator[list[int]]:
    """For each of some rows, the numbers of all rows that are contained in it."""
    device = current().device

    def vectors(bits: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.unpackbits(bits, 1)).to(device, torch.float32)

    sizes = torch.from_numpy(counts).to(device, torch.float32)
    for first in range(0, len(row_numbers), BLOCK):
        outer = vectors(distinct[row_numbers[first : first + BLOCK]])
        # x · G = x · x: row x is contained in G.
        parts = [
            outer @ vectors(distinct[low : low + BLOCK]).T == sizes[low : low + BLOCK]
            for low in range(0, len(distinct), BLOCK)
        ]
        yield from (row.nonzero()[:, 0].tolist() for row in torch.cat(parts, 1).cpu())


def bodies(tree: Mapping[str, bytes]) -> tuple[Piece, ...]:
    """`ref.feature_deletion.bodies` of the same tree on every rank; each takes its share of the files."""
    return _map_over_files(tree, ref.bodies)


def statements(tree: Mapping[str, bytes]) -> tuple[Piece, ...]:
    """`ref.feature_deletion.statements` of the same tree on every rank; each takes its share of the files."""
    return _map_over_files(tree, ref.statements)


def _map_over_files(
    tree: Mapping[str, bytes], cut: Callable[[Mapping[str, bytes]], tuple[Piece, ...]]
) -> tuple[Piece, ...]:
    check_same_tree(tree)
    return tuple(
        chain.from_iterable(map_over_ranks(sorted(tree), lambda files: [cut({file: tree[file]}) for file in files]))
    )


def symbols(tree: Mapping[str, bytes]) -> tuple[Piece, ...]:
    """`ref.feature_deletion.symbols` of the same tree on every rank; each takes its share of the symbols."""
    check_same_tree(tree)
    sources = {}
    for file in sorted(tree):
        if file.endswith(".py"):
            try:
                sources[file] = parse_source(tree[file])
            except ValueError:
                continue
    name_index, modules = NameIndex(sources), {file: Module(file, source) for file, source in sources.items()}

    def cut_symbols(batch: Sequence[tuple[str, str]]) -> list[Piece | None]:
        batch_pieces = []
        for file, name in batch:
            edits = removal(
                {concerned_file: modules[concerned_file] for concerned_file in name_index.find_files(file, name)},
                file,
                name,
            )
            patches = (
                tuple(patch(edited_file, tree[edited_file], edits[edited_file]) for edited_file in sorted(edits))
                if edits
                else ()
            )
            batch_pieces.append(Piece("symbol", f"{file}:{name}", patches) if patches else None)
        return batch_pieces

    all_symbols = [(file, name) for file, module in modules.items() for name in module.defined]
    return tuple(piece for piece in map_over_ranks(all_symbols, cut_symbols) if piece is not None)


class NameIndex:
    """Which files say a name in a place that `removal` looks at, and under which others it is imported. More files than
    needed change nothing."""

    def __init__(self, sources: Mapping[str, Source]) -> None:
        self.files: dict[str, set[str]] = {}
        self.aliases: dict[str, set[str]] = {}
        for file, source in sources.items():
            for node in ast.walk(source.tree):
                if isinstance(node, ast.Attribute):
                    self.files.setdefault(node.attr, set()).add(file)
                elif isinstance(node, ast.ImportFrom):
                    for alias in node.names:
                        self.files.setdefault(alias.name, set()).add(file)
                        self.aliases.setdefault(alias.name, set()).add(alias.asname or alias.name)

    def find_files(self, file: str, name: str) -> list[str]:
        """The files that may have to do with a symbol of `file`, sorted: those with a star import too."""
        names, todo = {name}, [name]
        while todo:
            new = self.aliases.get(todo.pop(), set()) - names
            names |= new
            todo += new
        return sorted({file}.union(*(self.files.get(known_name, set()) for known_name in [*names, "*"])))


def difficulty(tree: Mapping[str, bytes], piece: Piece, failing: int | None = None) -> Difficulty:
    """`ref.feature_deletion.difficulty`, on this rank. What the whole tree says is read once, and kept for the next
    piece of the same tree."""
    name_uses = read_uses(tuple((file, tree[file]) for file in sorted(tree) if file.endswith(".py")))
    holes: set[str] = set()
    removed_functions, lines = set(), 0
    for file_patch in piece.patches:
        texts, function_numbers = name_uses.files.get(file_patch.file, ((), range(0)))
        removed_lines = (
            {line for edit in file_patch.edits for line in range(edit.first, edit.last + 1)} if texts else set()
        )
        lines += sum(
            1 for line in removed_lines if texts[line - 1].strip() and not texts[line - 1].lstrip().startswith("#")
        )
        removed_functions |= {
            function_number
            for function_number in function_numbers
            if not removed_lines.isdisjoint(
                range(name_uses.spans[function_number][1], name_uses.spans[function_number][2] + 1)
            )
        }
    holes = {name_uses.spans[function_number][0] for function_number in removed_functions}
    if piece.way == "symbol":
        holes = {piece.name.rpartition(":")[2]}
    callers = set[int]().union(*(name_uses.users.get(name, set()) for name in holes)) - removed_functions
    # The counts n of Eq. 5 (ref/feature_deletion.py).
    return Difficulty(
        lines, max(1, len(holes)), len(piece.patches), len(piece.tests) if failing is None else failing, len(callers)
    )


class NameUses:
    """Of all files their lines, and of all functions that lie in none which names they use."""

    def __init__(self) -> None:
        self.files: dict[str, tuple[tuple[str, ...], range]] = {}
        self.spans: list[tuple[str, int, int]] = []
        self.users: dict[str, set[int]] = {}


@lru_cache(maxsize=4)
def read_uses(files: tuple[tuple[str, bytes], ...]) -> NameUses:
    """`NameUses` of files: name and contents."""
    name_uses = NameUses()
    for file, data in files:
        try:
            source = parse_source(data)
        except ValueError:
            continue
        first = len(name_uses.spans)
        for name, node in ref.functions(source.tree):
            if "<locals>" not in name:
                for child in ast.walk(node):
                    if isinstance(child, ast.Name | ast.Attribute):
                        name_uses.users.setdefault(child.id if isinstance(child, ast.Name) else child.attr, set()).add(
                            len(name_uses.spans)
                        )
                name_uses.spans.append((name.rpartition(".")[2], source.begins(node)[0], node.end_lineno or 0))
        name_uses.files[file] = source.lines, range(first, len(name_uses.spans))
    return name_uses


def check_same_tree(tree: Mapping[str, bytes]) -> None:
    """Raises ValueError, on every rank, unless the tree is the same on all of them."""
    local_digest = hashlib.sha256(
        repr([(file, hashlib.sha256(tree[file]).digest()) for file in sorted(tree)]).encode()
    ).hexdigest()
    if len({digest for (digest,) in gather_values(local_digest)}) > 1:
        raise ValueError("tree must hold the same files on every rank")


def gather_values(*values: object) -> list[tuple]:
    """What every rank has, in the order of ranks."""
    group = current().group("all")
    if group.size == 1:
        return [values]
    parts: list = [None] * group.size
    dist.all_gather_object(parts, values, group=group.handle)
    return parts


def map_over_ranks(items: Sequence[Item], work: Callable[[Sequence[Item]], list[Result]]) -> list[Result]:
    """work(items) with each item done by one rank, in the order of items on every rank. What one rank raises, all do:
    none waits for it."""
    group = current().group("all")
    try:
        local_results: list[Result] | Exception = work(items[group.rank :: group.size])
    except Exception as error:
        local_results = error
    parts = [part for (part,) in gather_values(local_results)]
    for part in parts:
        if isinstance(part, Exception):
            raise part
    return [parts[number % group.size][number // group.size] for number in range(len(items))]
