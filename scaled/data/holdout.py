"""A codebase that is held out, and no near duplicate of which is trained on.

A training document is near a held-out one, with sets of shingles S and H, if

    |S ∩ H| ≥ near · |S ∪ H|                        they are alike, or
    |S ∩ H| ≥ near · min(|S|, |H|)                  one holds most of the other, if both have `ENOUGH` shingles

Counts are exact: an index holds every shingle of the codebase. MinHash would miss some, and what is missed here
falsifies a measurement, while a duplicate that stays in training costs a little compute. The index takes 8 bytes a
shingle, about 1.5 times the codebase's size."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kit.settings import RunError

__all__ = ["ENOUGH", "Index", "choose_heldout", "part_of"]

ENOUGH = 40
"""Shingles from which on a document that lies in another one is no accident."""


def part_of(source: str, name: str) -> str:
    """The part of a source to which a document belongs: its top-level folder, or the source if there is none."""
    return f"{source}/{name.split('/')[0]}" if "/" in name else source


def choose_heldout(parts: Sequence[str], sizes: Sequence[int], heldout: str, share: float) -> tuple[str, list[int]]:
    """Name and documents of the held-out codebase, from the part of each document (`part_of`) and its size.

    `heldout` names a part, or a source with all its parts. If it is empty, the part is chosen as in
    `ref.cpt.hold_out_codebase`: the one whose size is nearest to `share` of everything, if one has between a third and
    five times that size; otherwise every k-th document. Raises RunError if nothing would be held out, or nothing
    left."""
    if len(parts) < 2:
        raise RunError(f"{len(parts)} documents are left after the rules; at least two are needed to hold one out")
    sums: dict[str, int] = {}
    for part, size in zip(parts, sizes, strict=True):
        sums[part] = sums.get(part, 0) + size
    if heldout:
        heldout_ids = [i for i, part in enumerate(parts) if part == heldout or part.startswith(heldout + "/")]
        if not heldout_ids or len(heldout_ids) == len(parts):
            largest = ", ".join(sorted(sums, key=lambda part: (-sums[part], part))[:8])
            raise RunError(
                f"heldout = {heldout!r} holds {'everything' if heldout_ids else 'nothing'} out; the "
                f"largest parts are {largest}"
            )
        return heldout, heldout_ids
    target = share * sum(sizes)
    candidates = [
        part for part, size in sums.items() if "/" in part and target / 3 <= size <= 5 * target and len(sums) > 1
    ]
    if candidates:
        name = min(candidates, key=lambda part: (abs(sums[part] - target), part))
        return name, [i for i, part in enumerate(parts) if part == name]
    interval = max(2, round(1 / share))
    heldout_ids = list(range(interval // 2, len(parts), interval)) or [len(parts) - 1]
    return f"{len(heldout_ids)} documents", heldout_ids


@dataclass
class Index:
    """Every shingle of the held-out documents, with the document that it stands in."""

    marks: np.ndarray
    """uint32 in rising order; a shingle of several documents stands there several times."""
    owners: np.ndarray
    """int32, the document of each."""
    sizes: np.ndarray
    """Shingles of each document."""

    @classmethod
    def of(cls, documents: Sequence[np.ndarray]) -> "Index":
        """The index of documents, each given by its `shingles`."""
        sizes = np.array([len(document) for document in documents], np.int64)
        marks = np.concatenate([np.zeros(0, np.uint32), *documents])
        order = np.argsort(marks, kind="stable")
        return cls(marks[order], np.repeat(np.arange(len(documents), dtype=np.int32), sizes)[order], sizes)

    def nearest(self, marks: np.ndarray, near: float) -> tuple[int, float] | None:
        """The held-out document that a document with these shingles is near to, and how near; None if it is near to
        none."""
        if not len(marks) or not len(self.marks):
            return None
        left, right = (np.searchsorted(self.marks, marks, side) for side in ("left", "right"))
        is_shared = left < right
        left, counts = left[is_shared], (right - left)[is_shared]
        places = (
            np.repeat(left - np.concatenate([[0], counts.cumsum()[:-1]]), counts) + np.arange(counts.sum())
            if len(left)
            else left
        )
        num_shared = np.bincount(self.owners[places], minlength=len(self.sizes))
        smaller = np.minimum(self.sizes, len(marks))
        # |S ∩ H| / |S ∪ H|.
        jaccard = num_shared / np.maximum(self.sizes + len(marks) - num_shared, 1)
        # |S ∩ H| / min(|S|, |H|), if both have `ENOUGH` shingles.
        containment = np.where(smaller >= ENOUGH, num_shared / np.maximum(smaller, 1), 0.0)
        similarity = np.maximum(jaccard, containment)
        best = int(similarity.argmax())
        return (best, round(float(similarity[best]), 4)) if similarity[best] >= near else None
