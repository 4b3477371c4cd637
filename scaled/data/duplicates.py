"""Exact and near duplicates of documents.

Two documents are exact duplicates if their texts are equal but for spaces at the ends of lines, empty lines at the ends
of the text and a licence header. They are near duplicates if the Jaccard similarity of their shingles, five words each,
is at least `near`.

    J(A, B) = |A ∩ B| / |A ∪ B|

MinHash signatures (Broder, 1997) in a locality-sensitive index name candidates (the library datasketch), and their
shingles decide. So nothing is dropped by an estimate; a near duplicate that no band of the index shows stays. Of two
duplicates the first stays, in the order of the sources.

The traps
a. The hash of a word must not be Python's own, which differs from process to process.
b. Small words make a file of licence headers similar to every other. `rules.body` takes the header away first.
c. Near is not transitive. A document is compared only with those that stay, so a chain of small changes is not dropped
   as a whole.
"""

import hashlib
import re
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from kit.settings import RunError
from scaled.data.rules import body
from scaled.data.sources import INSTALL

__all__ = ["PERMUTATIONS", "Duplicate", "digest", "duplicates", "jaccard", "shingles", "signature", "sketches"]

PERMUTATIONS = 128
WORDS = 5
"""Words of a shingle."""
WORD = re.compile(r"\w+")
BATCH = 4096


class Checksums(dict):
    """Word → its CRC-32."""

    def __missing__(self, word: str) -> int:
        value = zlib.crc32(word.encode())
        if len(self) < 1 << 20:
            self[word] = value
        return value


CHECKSUMS = Checksums()


class Duplicate(NamedTuple):
    """A document that an earlier one makes superfluous."""

    document: int
    of: int
    similarity: float
    """1 for an exact duplicate."""


def digest(text: str) -> str:
    """Hash of a text without its licence header, spaces at the ends of lines, and empty lines at its ends; 32
    hexadecimal digits."""
    plain_text = "\n".join(map(str.rstrip, body(text).split("\n"))).strip()
    return hashlib.blake2b(plain_text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def shingles(text: str) -> np.ndarray:
    """The distinct hashes of all runs of five words, uint32 in rising order. A text of fewer words is one run; one
    without words has none."""
    words = WORD.findall(body(text))
    if not words:
        return np.zeros(0, np.uint32)
    sums = np.fromiter(map(CHECKSUMS.__getitem__, words), np.uint64, len(words))
    n = max(len(words) - WORDS + 1, 1)
    hashes = np.zeros(n, np.uint64)
    for k in range(min(WORDS, len(words))):
        hashes = (hashes ^ sums[k : k + n]) * np.uint64(0x9E3779B97F4A7C15)
        hashes ^= hashes >> np.uint64(29)
    return np.unique((hashes >> np.uint64(32)).astype(np.uint32))


def sketches() -> Any:
    """The library. Raises RunError if it is not installed."""
    try:
        import datasketch

        return datasketch
    except ImportError:
        raise RunError(f"near duplicates need datasketch: {INSTALL}; or set near = 0") from None


def signature(marks: np.ndarray) -> np.ndarray:
    """MinHash of shingles, uint32 [PERMUTATIONS]."""
    sketch = sketches().MinHash(PERMUTATIONS, hashfunc=int, scheme="affine32")
    for at in range(0, len(marks), BATCH):
        sketch.update_batch(marks[at : at + BATCH].tolist())
    return sketch.hashvalues.astype(np.uint32)


def jaccard(a: np.ndarray, b: np.ndarray) -> float:
    """Similarity of two sets, each in rising order without repetition; 0 if both are empty."""
    # J(A, B) = |A ∩ B| / |A ∪ B|.
    num_shared = len(np.intersect1d(a, b, assume_unique=True))
    return num_shared / max(len(a) + len(b) - num_shared, 1)


def duplicates(documents: Iterable[tuple[int, str, np.ndarray, np.ndarray]], near: float) -> Iterator[Duplicate]:
    """Duplicates among documents, each with its number, `digest`, `signature` and `shingles`, in the order in which the
    first stays. near = 0 looks for exact ones alone."""
    first: dict[str, int] = {}
    marks_of: dict[int, np.ndarray] = {}
    index, sketch = None, None
    if near:
        library = sketches()
        # Candidates are checked, so one too many costs little and one too few is a duplicate that stays.
        index = library.MinHashLSH(near, PERMUTATIONS, weights=(0.1, 0.9))
        sketch = library.MinHash(PERMUTATIONS, scheme="affine32")
    for number, text_digest, minhash, marks in documents:
        if text_digest in first:
            yield Duplicate(number, first[text_digest], 1.0)
            continue
        if index is not None and sketch is not None and len(marks):
            sketch.hashvalues = minhash
            best_match = max(
                ((jaccard(marks, marks_of[candidate]), -candidate) for candidate in index.query(sketch)),
                default=(0.0, 0),
            )
            if best_match[0] >= near:
                yield Duplicate(number, -best_match[1], round(best_match[0], 4))
                continue
            index.insert(number, sketch)
            marks_of[number] = marks
        first[text_digest] = number
