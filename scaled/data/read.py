"""Prepared data as training rows: sources by weight, documents in a new order each epoch, at any position, the same on
every rank.

    data = Prepared(folder)
    ids, doc = data.stream(length=4096, seed=0, end=2).rows(first, count)      row `first` and those after it

A source is an endless sequence of tokens: its documents in a random order, `end` after each, and again in another
order. Row j of a source is the j-th piece of `length` tokens. So no token is padding, an epoch holds every token once,
and a position is a number: nothing has to be replayed. A document that crosses the end of a row is cut there;
`ref.cpt.pack` cuts fewer, but where a row begins would depend on all before it.

Which source the next row comes from follows the weights as evenly as it can: of a block of rows every source has its
share, spread over the block with a random phase.
"""

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from kit.disk import hash_file, read_json, read_lines, what_is_wrong
from kit.settings import RunError
from ref.cpt import Corpus
from scaled.data.shards import Shard

__all__ = ["FORMAT", "Prepared", "Stream", "is_prepared", "quotas"]

FORMAT = "etude data 1"
BLOCK = 1024
"""Rows in which every source has its share."""


def is_prepared(folder: str | Path | None) -> bool:
    """Whether a folder is one that `etude data` prepared completely."""
    try:
        return folder is not None and read_json(Path(folder) / "data.json")["format"] == FORMAT
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


class Prepared:
    """A folder that `etude data` has prepared."""

    def __init__(self, folder: str | Path):
        """Maps the shards. Raises RunError if the folder is damaged."""
        self.folder = Path(folder)
        try:
            self.record: dict[str, Any] = read_json(self.folder / "data.json")
            sources = [source for source in self.record["sources"] if source["weight"] and source["kept"]["documents"]]
            self.names = [source["name"] for source in sources]
            self.weights = np.array([source["weight"] for source in sources], np.float64)
            self.shards = [
                [Shard.open(self.folder / "shards", shard) for shard in source["shards"]] for source in sources
            ]
            heldout_record = self.record["heldout"]
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise RunError(f"corpus {self.folder}: {' '.join(str(error).split())}") from None
        if not self.names:
            raise RunError(f"corpus {self.folder}: no source with a weight has documents")
        if problem := what_is_wrong(self.folder / "heldout.jsonl", heldout_record["bytes"], heldout_record["sha256"]):
            raise RunError(f"corpus {self.folder}: heldout.jsonl: {problem}; prepare the data again")

    @property
    def tokenizer(self) -> Path:
        """The tokenizer of the shards."""
        return self.folder / "tokenizer.json"

    @property
    def documents(self) -> int:
        """Training documents of all sources that have a weight."""
        return sum(len(shard.places) - 1 for source_shards in self.shards for shard in source_shards)

    @property
    def tokens(self) -> int:
        """Their tokens, with one for the end of each document."""
        return sum(
            len(shard.tokens) + len(shard.places) - 1 for source_shards in self.shards for shard in source_shards
        )

    @property
    def heldout(self) -> str:
        """The name of the held-out codebase."""
        return self.record["heldout"]["name"]

    def read_heldout(self) -> Corpus:
        """The held-out codebase."""
        return Corpus({line["name"]: line["text"] for line in read_lines(self.folder / "heldout.jsonl")})

    def check(self, tokenizer: str | Path) -> None:
        """Raises RunError unless the shards hold tokens of this tokenizer.json."""
        if hash_file(Path(tokenizer)) == self.record["tokenizer"]["sha256"]:
            return
        try:
            is_same = read_json(Path(tokenizer)) == read_json(self.tokenizer)
        except ValueError:
            is_same = False
        if not is_same:
            raise RunError(
                f"corpus {self.folder} was prepared with another tokenizer than {tokenizer}; prepare "
                f"it again: etude data … --tokenizer {tokenizer}"
            )

    def stream(self, length: int, seed: int, end: int) -> "Stream":
        """The rows."""
        return Stream(self, length, seed, end)


def quotas(weights: np.ndarray, rows: int) -> np.ndarray:
    """How many of `rows` rows each source has: the share of its weight, rounded by largest remainders; a source without
    a row takes one from the largest."""
    share = rows * weights / weights.sum()
    counts = share.astype(np.int64)
    counts[np.argsort(counts - share, kind="stable")[: rows - int(counts.sum())]] += 1
    while not counts.all():
        counts[counts.argmin()] += 1
        counts[counts.argmax()] -= 1
    return counts


class Stream:
    """Rows of prepared data."""

    def __init__(self, data: Prepared, length: int, seed: int, end: int):
        self.data, self.length, self.seed, self.end = data, length, seed, end
        self.block = max(BLOCK, 16 * len(data.names))
        self.quota = quotas(data.weights, self.block)
        self.sizes = [
            np.concatenate([np.diff(shard.places) for shard in source_shards]) + 1 for source_shards in data.shards
        ]
        self.firsts = [
            np.cumsum([0, *(len(shard.places) - 1 for shard in source_shards)]) for source_shards in data.shards
        ]
        self.totals = [int(sizes.sum()) for sizes in self.sizes]
        self.order = lru_cache(2 * len(data.names))(self.order_of)
        self.turns = lru_cache(4)(self.turns_of)

    def order_of(self, source: int, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The documents of an epoch in their order, and where each ends."""
        order = np.random.default_rng((self.seed, source, epoch)).permutation(len(self.sizes[source]))
        return order, self.sizes[source][order].cumsum()

    def turns_of(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """The source of every row in a block, and how many rows of it come before in the block."""
        phase = np.random.default_rng((self.seed, len(self.quota), block)).random(len(self.quota))
        source = np.repeat(np.arange(len(self.quota)), self.quota)
        number = np.concatenate([np.arange(n) for n in self.quota])
        order = np.argsort((number + phase[source]) / self.quota[source], kind="stable")
        return source[order], number[order]

    def rows(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """ids [R, T] int32 and doc [R, T] int32, which numbers the documents of a row from 0."""
        ids, doc = np.empty((count, self.length), np.int32), np.empty((count, self.length), np.int32)
        for r in range(count):
            source, row = self.place(first + r)
            self.fill(ids[r], doc[r], source, row * self.length)
        return ids, doc

    def place(self, row: int) -> tuple[int, int]:
        """The source of a row, and how many rows of that source come before it."""
        block, at = divmod(row, self.block)
        source, number = self.turns(block)
        s = int(source[at])
        return s, block * int(self.quota[s]) + int(number[at])

    def fill(self, ids: np.ndarray, doc: np.ndarray, source: int, position: int) -> None:
        """Writes the tokens of a source from a position on."""
        epoch, start = divmod(position, self.totals[source])
        order, ends = self.order(source, epoch)
        at = int(np.searchsorted(ends, start, "right"))
        num_filled = number = 0
        while num_filled < self.length:
            if at == len(order):
                epoch, at, start = epoch + 1, 0, 0
                order, ends = self.order(source, epoch)
            document = int(order[at])
            size = int(self.sizes[source][document])
            offset = start - (int(ends[at]) - size)
            n = min(size - offset, self.length - num_filled)
            tokens = self.document(source, document)[offset : offset + n]
            ids[num_filled : num_filled + len(tokens)] = tokens
            ids[num_filled + len(tokens) : num_filled + n] = self.end
            doc[num_filled : num_filled + n] = number
            num_filled, number, start, at = num_filled + n, number + 1, start + n, at + 1

    def document(self, source: int, document: int) -> np.ndarray:
        """The tokens of a document, from the memory map."""
        k = int(np.searchsorted(self.firsts[source], document, "right")) - 1
        shard, i = self.data.shards[source][k], document - int(self.firsts[source][k])
        return shard.tokens[int(shard.places[i]) : int(shard.places[i + 1])]

    def epochs(self, rows: int) -> dict[str, float]:
        """How often each source has been read after so many rows."""
        share = self.quota / self.block
        return {
            name: rows * self.length * float(x) / total
            for name, x, total in zip(self.data.names, share, self.totals, strict=True)
        }

    def pieces(self) -> Iterator[list[int]]:
        """The documents of the rows one after another, cut where a row ends; endless."""
        row = 0
        while True:
            ids, doc = self.rows(row, 1)
            borders = np.flatnonzero(np.diff(doc[0])) + 1
            yield from (piece.tolist() for piece in np.split(ids[0], borders))
            row += 1
