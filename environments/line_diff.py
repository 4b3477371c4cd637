"""The lines that two texts have in common: a longest common subsequence, by bit vectors.

Row j of the table of lengths L[i, j] = LCS(a[:i], b[:j]) is kept as one integer V, whose bit i is 0 where L[i + 1, j] =
L[i, j] + 1. With M[c] the places of line c in a, the next row is V' = (V + (V & M[c])) | (V & ~M[c]) (Hyyrö 2004): a
row of thousands of lines takes some microseconds. Where all rows together would be too large, b is halved, and a is cut
where the lengths from both sides sum up to the most (Hirschberg 1975).

Nothing is guessed: no line is too frequent to count, and the time depends on the number of lines alone.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence

__all__ = ["common_lines", "lines_of"]

PAIRS = 4_000_000_000
"""Pairs of lines that are compared, at most, which takes about a second: who is graded chooses their number."""
TABLE = 200_000_000
"""Bits of a table that is kept whole."""
RARE = 8
"""Places of a line in a text for which no mask is kept: a mask for each of many lines would fill the memory."""


def lines_of(data: bytes) -> list[str]:
    """The lines of a text as Python's parser numbers them, without their ends."""
    lines = data.decode(errors="replace").replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return lines if lines[-1] else lines[:-1]


def common_lines(old: Sequence[str], new: Sequence[str]) -> list[tuple[int, int]]:
    """Places in both of the lines that are the same, in order and as many as can be. Of texts that differ in more than
    PAIRS pairs of lines: those before the first difference and behind the last."""
    head = 0
    while head < min(len(old), len(new)) and old[head] == new[head]:
        head += 1
    tail = 0
    while tail < min(len(old), len(new)) - head and old[-1 - tail] == new[-1 - tail]:
        tail += 1
    shared_lines = {*old[head : len(old) - tail]} & {*new[head : len(new) - tail]}
    left = [at for at in range(head, len(old) - tail) if old[at] in shared_lines]
    right = [at for at in range(head, len(new) - tail) if new[at] in shared_lines]
    middle = []
    if len(left) * len(right) <= PAIRS:
        middle = [(left[i], right[j]) for i, j in _find_common([old[at] for at in left], [new[at] for at in right])]
    ends = [(len(old) - at, len(new) - at) for at in range(tail, 0, -1)]
    return [*((at, at) for at in range(head)), *middle, *ends]


def _find_common(a: Sequence[str], b: Sequence[str]) -> list[tuple[int, int]]:
    if not a or not b:
        return []
    if len(a) * len(b) <= TABLE or len(b) == 1:
        return _trace_pairs(a, [*_compute_rows(a, b)])
    half = len(b) // 2
    forward, backward = _compute_lengths(a, b[:half]), _compute_lengths(a[::-1], b[half:][::-1])
    cut = max(range(len(a) + 1), key=lambda at: forward[at] + backward[len(a) - at])
    tail_pairs = _find_common(a[cut:], b[half:])
    return [*_find_common(a[:cut], b[:half]), *((i + cut, j + half) for i, j in tail_pairs)]


def _compute_rows(a: Sequence[str], b: Sequence[str]) -> Iterator[int]:
    """V for every beginning of b, from the empty one on."""
    places: dict[str, list[int]] = {}
    for at, line in enumerate(a):
        places.setdefault(line, []).append(at)
    masks = {line: _make_mask(at, len(a)) for line, at in places.items() if len(at) > RARE}
    V = full = (1 << len(a)) - 1
    yield V
    for line in b:
        matches = V & (masks[line] if line in masks else sum(1 << at for at in places.get(line, ())))
        V = (V + matches | V - matches) & full
        yield V


def _make_mask(places: Sequence[int], size: int) -> int:
    bits = bytearray(size // 8 + 1)
    for at in places:
        bits[at // 8] |= 1 << at % 8
    return int.from_bytes(bits, "little")


def _compute_lengths(a: Sequence[str], b: Sequence[str]) -> list[int]:
    """LCS(a[:i], b) for each i."""
    V = deque(_compute_rows(a, b), maxlen=1)[0]
    return [0, *itertools.accumulate(bit == "0" for bit in reversed(f"{V:0{len(a)}b}"))]


def _trace_pairs(a: Sequence[str], rows: Sequence[int]) -> list[tuple[int, int]]:
    """The pairs of places, from a table's end to its beginning."""
    i, j, pairs = len(a), len(rows) - 1, []
    while i and j:
        if rows[j] >> i - 1 & 1:
            i -= 1  # L[i, j] = L[i − 1, j]
        elif not rows[j - 1] >> i - 1 & 1:
            j -= 1  # the row before is as long here
        else:
            i, j = i - 1, j - 1
            pairs.append((i, j))
    return pairs[::-1]
