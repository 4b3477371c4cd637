"""How deleted code is recognised where it should not be: as text in any layout, and by its names where it was compiled.

As text, code is a row of tokens without space and comments, and both kinds of quotes are one. It is divided into blocks
of at most BLOCK tokens, and a block is found where a share SHARE of its runs of RUN tokens stand. So a copy is found
after a formatter, within other text, or in part; not where its variables have other names. Code of fewer than LEAST
tokens cannot be told from what anybody would write: it has no fingerprint, and a piece without one should be no task.

Compiled, code keeps its names and strings. The telling ones do not occur in what is left of the package and are no
everyday words. They are found where a share NAMED of them, and three at least, stand close together.
"""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

__all__ = ["BLOCK", "LEAST", "NAMED", "RUN", "SHARE", "Block", "Deleted", "extract_removed_code", "runs", "tokens"]

RUN, BLOCK, LEAST = 5, 80, 14
SHARE, NAMED = 0.6, 0.6
CACHED_LENGTH = 100_000
"""Characters of a text whose runs are kept for the next piece; they take some thirty times as many bytes."""
TOKEN = re.compile(r"[^\W\d]\w*|\d[\w.]*|[^\w\s]")
WORD = re.compile(r"[^\W\d]\w{2,}")
STRING = re.compile(r'"([^"\\\n]{4,200})"')
COMMENT = re.compile(r"#[^\n]*|\\\r?\n")
EVERYDAY = {*keyword.kwlist, *dir(builtins)} | set(
    "args append cls code copy count data default dest end error extend file find format get index "
    "items join key keys kwargs len line lines list"
    " match message mode msg name names node num obj offset option options other params parent part "
    "parts path pop pos prefix read replace res"
    " result ret root self size sort source split start startswith state stop string strip sub text "
    "the tmp token tokens update val value values"
    " width word words write".split()
)


def tokens(text: str) -> list[str]:
    """The tokens of code or of any other text."""
    return TOKEN.findall(COMMENT.sub("", text).replace("'", '"'))


def extract_removed_code(old: str, new: str) -> str:
    """What of `old` is not in `new`, its replacement, where both begin and end with the same tokens: of a list that
    lost a name, only that name."""
    before, after = ([*TOKEN.finditer(text)] for text in (old, new))
    matches = [old_token[0] == new_token[0] for old_token, new_token in zip(before, after, strict=False)]
    first = matches.index(False) if False in matches else len(matches)
    last = 0
    while last < min(len(before), len(after)) - first and before[-1 - last][0] == after[-1 - last][0]:
        last += 1
    return old[before[first].start() : before[-1 - last].end()] if first + last < len(before) else ""


def runs(row: Sequence[str]) -> set[tuple[str, ...]]:
    """All rows of RUN tokens that stand one behind the other."""
    return {tuple(row[at : at + RUN]) for at in range(len(row) - RUN + 1)}


@dataclass(frozen=True)
class Block:
    """A stretch of deleted code."""

    runs: frozenset[tuple[str, ...]]
    words: frozenset[bytes]
    """Its words of three letters and more, in UTF-8: what has few of them need not be looked at closely."""

    @classmethod
    def of(cls, row: Sequence[str]) -> Block:
        return cls(frozenset(runs(row)), frozenset(word.encode() for word in row if WORD.fullmatch(word)))


@dataclass(frozen=True)
class Deleted:
    """What was taken out of a package, and what is left of the files that it was taken from."""

    code: tuple[str, ...]
    """The lines that are gone, a text for each place."""
    left: Mapping[str, bytes]
    """Files of the package as they are now, by name; at least those that were changed. What stands here tells nothing
    new."""

    def __post_init__(self) -> None:
        if not self.blocks:
            raise ValueError(
                f"the deleted code has fewer than {LEAST} tokens in every place: no copy of it could be recognised"
            )

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """The fingerprint."""
        token_rows = []
        for text in self.code:
            row = tokens(text)
            parts = max(1, -(-len(row) // BLOCK))
            size = -(-len(row) // parts) if row else 1
            token_rows += [row[at : at + size] for at in range(0, len(row), size)]
        return tuple(Block.of(row) for row in token_rows if len(row) >= LEAST)

    @cached_property
    def telling(self) -> frozenset[bytes]:
        """Names and strings of the deleted code that stand nowhere in what is left."""
        remaining = b"\n".join(self.left.values())
        code_texts = [COMMENT.sub("", text).replace("'", '"') for text in self.code]
        candidates = {
            word for text in code_texts for word in WORD.findall(STRING.sub("", text)) if word not in EVERYDAY
        }
        candidates |= {string for text in code_texts for string in STRING.findall(text)}
        return frozenset(word.encode() for word in candidates if word.encode() not in remaining)

    @cached_property
    def words(self) -> frozenset[bytes]:
        return frozenset().union(*(block.words for block in self.blocks))

    @cached_property
    def signatures(self) -> tuple[frozenset[bytes], ...]:
        """For each function of which even the first line is gone: its name and those of its parameters that are
        telling, two at least."""
        name_sets = []
        for text in self.code:
            row = tokens(text)
            for at, token in enumerate(row):
                if token == "def":
                    names, end, depth = {row[at + 1]} if at + 1 < len(row) else set(), at + 2, 0
                    while end < len(row):
                        depth += (row[end] in "([{") - (row[end] in ")]}")
                        if not depth:
                            break
                        names |= (
                            {row[end]}
                            if depth == 1 and row[end - 1] in ("(", ",", "*") and row[end].isidentifier()
                            else set()
                        )
                        end += 1
                    telling_names = frozenset(name.encode() for name in names) & self.telling
                    name_sets += (
                        [telling_names] if len(telling_names) > 1 and row[at + 1].encode() in telling_names else []
                    )
        return tuple(name_sets)

    def may_hold(self, data: bytes) -> bool:
        """Whether it is worth reading `data` as text: most words of a block stand there."""
        present_words = {word for word in self.words if word in data}
        return any(len(block.words & present_words) >= SHARE * len(block.words) for block in self.blocks)

    def as_text(self, text: str) -> str:
        """How much of which block stands in a text; empty if none does."""
        return self.find_runs(_compute_runs(text) if len(text) <= CACHED_LENGTH else runs(tokens(text)))

    def find_runs(self, text_runs: set[tuple[str, ...]]) -> str:
        """The same for the runs of a text."""
        for number, block in enumerate(self.blocks, 1):
            if (common := len(block.runs & text_runs)) >= SHARE * len(block.runs):
                return f"{common} of {len(block.runs)} runs of {RUN} tokens of block {number}"
        return ""

    def by_names(self, data: bytes) -> str:
        """Which telling names stand close together in `data`; empty for too few."""
        least = max(3, -(-len(self.telling) * 6 // 10))
        present_words = [word for word in self.telling if word in data]
        if len(self.telling) < 3 or len(present_words) < least:
            return ""
        span = max(2048, 6 * sum(map(len, self.code)))
        places = sorted((at, word) for word in present_words for at in _find_positions(word, data))
        first, counts = 0, dict.fromkeys(present_words, 0)
        for at, word in places:
            counts[word] += 1
            while at - places[first][0] > span:
                counts[places[first][1]] -= 1
                first += 1
            if sum(map(bool, counts.values())) >= least:
                return (
                    f"the names "
                    f"{', '.join(sorted(word.decode(errors='replace') for word, hits in counts.items() if hits)[:5])} "
                    f"within {span} bytes"
                )
        return ""


@lru_cache(maxsize=128)
def _compute_runs(text: str) -> set[tuple[str, ...]]:
    """The runs of a text. The pieces of a package are looked for in the same files."""
    return runs(tokens(text))


def _find_positions(word: bytes, data: bytes, limit: int = 1000) -> Iterator[int]:
    at = data.find(word)
    while at >= 0 and limit:
        yield at
        at, limit = data.find(word, at + 1), limit - 1
