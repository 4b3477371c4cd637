"""Feature deletion on many ranks: `ref/feature_deletion.py`, which explains ways, groups and difficulty.

A codebase of 100,000s of lines has 10,000s of tests. Ranks play the tests, each its share, so each has the coverage of its own. `tree` is small
beside it, and the same on every rank. Every function here returns all pieces, on every rank the same, in the order of `ref`.

    coverage        of this rank's tests; where several ranks name a test, its lines are joined, and so are those that ran at import
    w               for each file a matrix of bits, lines × all tests: one bit for a test that executed the line, gathered once
    G               the distinct rows of lines in functions, dealt to ranks: G, G + ranks, …

What costs time? The reference walks through every function that a test of G enters, for every G. A function loses something only if one of its lines
has ∅ ≠ w(l) ⊆ G. With rows as vectors x of zeros and ones that is x·G = x·x, for all rows at once a product of matrices, exact in float32 below
2²⁴ tests. What is left are few functions for each group, and there `ref` cuts.

`symbols` hands `ref` those files alone that import the symbol, or name it as an attribute. `difficulty` reads each file once, not for each piece
again.
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
from ref.feature_deletion import Demo, Difficulty, Function, Piece, Who, delete, demo, faults, joined, level, undelete
from ref.source_symbols import Module, removal
from ref.source_text import Patch, Source, apply, compiles, parse_source, patch
from scaled.runtime.mesh import current

__all__ = ["Demo", "Difficulty", "Piece", "bodies", "delete", "demo", "difficulty", "faults", "joined", "level", "slices", "symbols", "undelete"]

BLOCK = 2048
"""Rows that are multiplied at a time."""
Rows = dict[str, tuple[np.ndarray, np.ndarray]]
"""File → its covered lines [L], and the tests that executed each, as bits [L, tests / 8]; the last test's first."""
Item = TypeVar("Item")
Found = TypeVar("Found")


def slices(tree: Mapping[str, bytes], coverage: Mapping[str, Collection[tuple[str, int]]], least: int = 3, most: float = 0.5) -> tuple[Piece, ...]:
    """All slices of `tree`, which is the same on every rank, from the `coverage` of this rank's tests. Raises ValueError as in `ref`, on every rank,
    and where the ranks' trees differ."""
    if least < 1 or not 0 < most <= 1:
        raise ValueError(f"least must be at least 1 and most a share above 0; got {least} and {most}")
    agree(tree)
    tests, rows = table(tree, coverage)
    sources = {file: parse_source(tree[file]) for file in sorted(rows)}
    inside = [(file, name, node) for file, source in sources.items() for name, node in ref.functions(source.tree) if "<locals>" not in name]
    distinct, within = groups(rows, inside)
    counts = np.array([int.from_bytes(row.tobytes()).bit_count() for row in distinct], np.int64)
    at_import = distinct[:, 0] >> 7 if len(distinct) else np.zeros(0, np.uint8)
    chosen = np.flatnonzero((counts >= least) & (counts <= most * len(tests)) & (at_import == 0)).tolist()  # (3)
    chosen.sort(key=lambda one: distinct[one].tobytes())  # as whole numbers are sorted
    spare = 8 * distinct.shape[1] - len(tests) - 1
    who = {file: told(*rows[file], spare) for file in rows}

    def cut(some: Sequence[int]) -> list[Piece | None]:
        found = []
        for one, subsets in zip(some, contained(distinct, counts, some), strict=True):
            places = sorted(set(chain.from_iterable(within[number] for number in subsets)))
            group = int.from_bytes(distinct[one].tobytes()) >> spare
            whose = np.flatnonzero(np.unpackbits(distinct[one])[: len(tests) + 1])[::-1]
            names = tuple(tests[len(tests) - at] for at in whose)
            found.append(slice_of(tree, sources, [inside[place] for place in places], who, group, names))
        return found

    pieces: dict[tuple[Patch, ...], Piece] = {}
    for piece in dealt(chosen, cut):
        if piece is not None:
            pieces.setdefault(piece.patches, piece)
    return tuple(sorted(pieces.values(), key=lambda piece: (piece.name, piece.tests)))


def slice_of(
    tree: Mapping[str, bytes],
    sources: Mapping[str, Source],
    inside: Sequence[tuple[str, str, Function]],
    who: Mapping[str, Who],
    group: int,
    tests: tuple[str, ...],
) -> Piece | None:
    """(2) for one group, from the functions that may lose something: file, qualified name, node. None where nothing can go."""
    cuts: dict[str, list] = {}
    for file, name, node in inside:
        cuts.setdefault(file, []).extend((name, edit) for edit in ref.edits_of(sources[file], node, who[file], group))
    cuts = {file: edits for file, edits in cuts.items() if edits}
    patches = tuple(patch(file, tree[file], [edit for _, edit in edits]) for file, edits in cuts.items())
    names = "+".join(f"{file}:{','.join(dict.fromkeys(name for name, _ in edits))}" for file, edits in cuts.items())
    return Piece("slice", names, patches, tests) if patches and all(compiles(apply(one, tree[one.file])) for one in patches) else None


def table(tree: Mapping[str, bytes], coverage: Mapping[str, Collection[tuple[str, int]]]) -> tuple[list[str], Rows]:
    """The tests of all ranks, sorted, and (1) for each file of Python that one of them executed."""
    mine = {test: number for number, test in enumerate(sorted(coverage))}
    lines: dict[str, dict[int, list[int]]] = {}
    for test, executed in coverage.items():
        for file, line in executed:
            if file in tree and file.endswith(".py"):
                lines.setdefault(file, {}).setdefault(line, []).append(mine[test])
    packed = {}
    for file, per in lines.items():
        bits = np.zeros((len(per), len(mine)), bool)
        for row, executed in zip(bits, per.values(), strict=True):
            row[executed] = True
        packed[file] = np.array([*per]), np.packbits(bits, 1)
    parts = gathered([*mine], packed)
    tests = sorted({test for names, _ in parts for test in names if test})
    column = {test: len(tests) - number for number, test in enumerate(tests)} | {"": 0}
    rows: Rows = {}
    for file in sorted({file for _, some in parts for file in some}):
        here = [(names, *some[file]) for names, some in parts if file in some]
        every = np.unique(np.concatenate([at for _, at, _ in here]))
        bits = np.zeros((len(every), len(tests) + 1), bool)
        for names, at, some in here:
            places = np.searchsorted(every, at)[:, None], np.array([column[name] for name in names], int)[None]
            bits[places] |= np.unpackbits(some, 1, len(names)).astype(bool)
        rows[file] = every, np.packbits(bits, 1)
    return tests, rows


def told(lines: np.ndarray, bits: np.ndarray, spare: int) -> Who:
    """(1) for one file as `ref` has it: whole numbers. `spare`: bits behind the first test's."""
    who = Who()
    who.tests = {line: int.from_bytes(row.tobytes()) >> spare for line, row in zip(lines.tolist(), bits, strict=True)}
    return who


def groups(rows: Rows, inside: Sequence[tuple[str, str, Function]]) -> tuple[np.ndarray, list[list[int]]]:
    """The distinct rows of all lines in functions, and for each the functions that have such a line."""
    number: dict[bytes, int] = {}
    within: list[list[int]] = []
    for place, (file, _, node) in enumerate(inside):
        lines, bits = rows[file]
        first, last = np.searchsorted(lines, [node.lineno, (node.end_lineno or node.lineno) + 1])
        for row in {row.tobytes() for row in bits[first:last] if row.any()}:
            if row not in number:
                number[row] = len(number)
                within.append([])
            within[number[row]].append(place)
    width = next((bits.shape[1] for _, bits in rows.values()), 1)
    return np.frombuffer(b"".join(number), np.uint8).reshape(-1, width), within


def contained(distinct: np.ndarray, counts: np.ndarray, some: Sequence[int]) -> Iterator[list[int]]:
    """For each of some rows, the numbers of all rows that are contained in it."""
    device = current().device

    def vectors(bits: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.unpackbits(bits, 1)).to(device, torch.float32)

    sizes = torch.from_numpy(counts).to(device, torch.float32)
    for at in range(0, len(some), BLOCK):
        outer = vectors(distinct[some[at : at + BLOCK]])
        parts = [outer @ vectors(distinct[low : low + BLOCK]).T == sizes[low : low + BLOCK] for low in range(0, len(distinct), BLOCK)]
        yield from (row.nonzero()[:, 0].tolist() for row in torch.cat(parts, 1).cpu())


def bodies(tree: Mapping[str, bytes]) -> tuple[Piece, ...]:
    """`ref.feature_deletion.bodies` of the same tree on every rank; each takes its share of the files."""
    agree(tree)
    return tuple(chain.from_iterable(dealt(sorted(tree), lambda files: [ref.bodies({file: tree[file]}) for file in files])))


def symbols(tree: Mapping[str, bytes]) -> tuple[Piece, ...]:
    """`ref.feature_deletion.symbols` of the same tree on every rank; each takes its share of the symbols."""
    agree(tree)
    sources = {}
    for file in sorted(tree):
        if file.endswith(".py"):
            try:
                sources[file] = parse_source(tree[file])
            except ValueError:
                continue
    known, modules = Names(sources), {file: Module(file, source) for file, source in sources.items()}

    def whole(some: Sequence[tuple[str, str]]) -> list[Piece | None]:
        found = []
        for file, name in some:
            edits = removal({one: modules[one] for one in known.concerned(file, name)}, file, name)
            patches = tuple(patch(other, tree[other], edits[other]) for other in sorted(edits)) if edits else ()
            found.append(Piece("symbol", f"{file}:{name}", patches) if patches else None)
        return found

    every = [(file, name) for file, module in modules.items() for name in module.defined]
    return tuple(piece for piece in dealt(every, whole) if piece is not None)


class Names:
    """Which files say a name in a place that `removal` looks at, and under which others it is imported. More files than needed change nothing."""

    def __init__(self, sources: Mapping[str, Source]) -> None:
        self.files: dict[str, set[str]] = {}
        self.others: dict[str, set[str]] = {}
        for file, source in sources.items():
            for node in ast.walk(source.tree):
                if isinstance(node, ast.Attribute):
                    self.files.setdefault(node.attr, set()).add(file)
                elif isinstance(node, ast.ImportFrom):
                    for alias in node.names:
                        self.files.setdefault(alias.name, set()).add(file)
                        self.others.setdefault(alias.name, set()).add(alias.asname or alias.name)

    def concerned(self, file: str, name: str) -> list[str]:
        """The files that may have to do with a symbol of `file`, sorted: those with a star import too."""
        names, todo = {name}, [name]
        while todo:
            new = self.others.get(todo.pop(), set()) - names
            names |= new
            todo += new
        return sorted({file}.union(*(self.files.get(one, set()) for one in [*names, "*"])))


def difficulty(tree: Mapping[str, bytes], piece: Piece, failing: int | None = None) -> Difficulty:
    """`ref.feature_deletion.difficulty`, on this rank. What the whole tree says is read once, and kept for the next piece of the same tree."""
    every = uses(tuple((file, tree[file]) for file in sorted(tree) if file.endswith(".py")))
    holes: set[str] = set()
    hidden, lines = set(), 0
    for one in piece.patches:
        texts, places = every.files.get(one.file, ((), range(0)))
        gone = {line for edit in one.edits for line in range(edit.first, edit.last + 1)} if texts else set()
        lines += sum(1 for line in gone if texts[line - 1].strip() and not texts[line - 1].lstrip().startswith("#"))
        hidden |= {place for place in places if not gone.isdisjoint(range(every.spans[place][1], every.spans[place][2] + 1))}
    holes = {every.spans[place][0] for place in hidden}
    if piece.way == "symbol":
        holes = {piece.name.rpartition(":")[2]}
    callers = set[int]().union(*(every.users.get(name, set()) for name in holes)) - hidden
    return Difficulty(lines, max(1, len(holes)), len(piece.patches), len(piece.tests) if failing is None else failing, len(callers))


class Uses:
    """Of all files their lines, and of all functions that lie in none which names they use."""

    def __init__(self) -> None:
        self.files: dict[str, tuple[tuple[str, ...], range]] = {}
        self.spans: list[tuple[str, int, int]] = []
        self.users: dict[str, set[int]] = {}


@lru_cache(maxsize=4)
def uses(files: tuple[tuple[str, bytes], ...]) -> Uses:
    """`Uses` of files: name and contents."""
    found = Uses()
    for file, data in files:
        try:
            source = parse_source(data)
        except ValueError:
            continue
        first = len(found.spans)
        for name, node in ref.functions(source.tree):
            if "<locals>" not in name:
                for one in ast.walk(node):
                    if isinstance(one, ast.Name | ast.Attribute):
                        found.users.setdefault(one.id if isinstance(one, ast.Name) else one.attr, set()).add(len(found.spans))
                found.spans.append((name.rpartition(".")[2], source.begins(node)[0], node.end_lineno or 0))
        found.files[file] = source.lines, range(first, len(found.spans))
    return found


def agree(tree: Mapping[str, bytes]) -> None:
    """Raises ValueError, on every rank, unless the tree is the same on all of them."""
    mine = hashlib.sha256(repr([(file, hashlib.sha256(tree[file]).digest()) for file in sorted(tree)]).encode()).hexdigest()
    if len({one for (one,) in gathered(mine)}) > 1:
        raise ValueError("tree must hold the same files on every rank")


def gathered(*mine: object) -> list[tuple]:
    """What every rank has, in the order of ranks."""
    group = current().group("all")
    if group.size == 1:
        return [mine]
    parts: list = [None] * group.size
    dist.all_gather_object(parts, mine, group=group.handle)
    return parts


def dealt(items: Sequence[Item], work: Callable[[Sequence[Item]], list[Found]]) -> list[Found]:
    """work(items) with each item done by one rank, in the order of items on every rank. What one rank raises, all do: none waits for it."""
    group = current().group("all")
    try:
        mine: list[Found] | Exception = work(items[group.rank :: group.size])
    except Exception as error:
        mine = error
    parts = [part for (part,) in gathered(mine)]
    for part in parts:
        if isinstance(part, Exception):
            raise part
    return [parts[number % group.size][number // group.size] for number in range(len(items))]
