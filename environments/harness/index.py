"""Search by words, outside of the sandbox: BM25 over pieces of texts (Robertson and Zaragoza 2009, eq. 3.15, with the
idf that is never negative).

    score(query, piece) = Σ over words w of the query of
                          idf(w) · f(w) · (k1 + 1) / (f(w) + k1 · (1 − b + b · length / mean length))
    idf(w) = ln(1 + (N − n(w) + ½) / (n(w) + ½))

f(w): how often w stands in the piece; n(w): in how many of N pieces. Names are taken apart, so that `parseHTTP_date` is
found as parse, http, date."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Hit", "Index", "words"]

K1, B = 1.2, 0.75
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+|[^\W\d_a-zA-Z]+")


def words(text: str) -> list[str]:
    """The words of a text in small letters; names taken apart at underscores and capitals."""
    return [word.lower() for word in WORD.findall(text)]


@dataclass(frozen=True)
class Hit:
    """A piece of a text that was found."""

    name: str
    line: int
    """Number of its first line, from 1."""
    text: str
    score: float


class Index:
    """Texts by name, cut into pieces of `height` lines."""

    def __init__(self, texts: Mapping[str, str], height: int = 20) -> None:
        self.pieces: list[tuple[str, int, str]] = []
        self.lengths: list[int] = []
        self.holds: dict[str, dict[int, int]] = defaultdict(dict)
        for name in sorted(texts):
            lines = texts[name].splitlines()
            for at in range(0, len(lines), height):
                text = "\n".join(lines[at : at + height])
                counts = Counter(words(f"{name}\n{text}"))
                for word, count in counts.items():
                    self.holds[word][len(self.pieces)] = count
                self.pieces.append((name, at + 1, text))
                self.lengths.append(counts.total())

    def find(self, query: str, max_hits: int = 5) -> list[Hit]:
        """The pieces that fit best, best first; of two that fit alike, the one that comes first by name and line."""
        N, scores = len(self.pieces), defaultdict(float)
        mean = sum(self.lengths) / N if N else 0.0
        for word in words(query):
            holds = self.holds.get(word, {})
            idf = math.log(1 + (N - len(holds) + 0.5) / (len(holds) + 0.5))
            for piece, count in holds.items():
                scores[piece] += idf * count * (K1 + 1) / (count + K1 * (1 - B + B * self.lengths[piece] / mean))
        best = sorted(scores, key=lambda piece: (-scores[piece], piece))[:max_hits]
        return [Hit(name, line, text, scores[piece]) for piece in best for name, line, text in [self.pieces[piece]]]
