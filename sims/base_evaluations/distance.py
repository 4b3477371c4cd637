"""The distance of Appendix B's state tracking: by how many characters a text is off."""

from __future__ import annotations

import numpy as np

__all__ = ["levenshtein", "similarity"]


def levenshtein(a: str, b: str) -> int:
    """The least number of characters inserted, deleted or replaced that make `b` of `a`.

    One row of the table at a time. Within a row, an insertion leans on its left neighbour; a running minimum of cost −
    column does all columns at once."""
    if len(a) < len(b):
        a, b = b, a
    codes = np.frombuffer(b.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    columns = np.arange(len(codes) + 1)
    row = columns.copy()
    for row_number, character in enumerate(a, 1):
        next_row = np.empty_like(row)
        next_row[0] = row_number
        np.minimum(row[:-1] + (codes != ord(character)), row[1:] + 1, out=next_row[1:])
        row = np.minimum.accumulate(next_row - columns) + columns
    return int(row[-1])


def similarity(text: str, target: str) -> float:
    """100 for the same text, 0 for one with no character in place: 100 · (1 − distance / length of the longer text)."""
    longest = max(len(text), len(target))
    return 100.0 if longest == 0 else 100.0 * (1 - levenshtein(text, target) / longest)
