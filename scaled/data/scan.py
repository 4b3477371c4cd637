"""One unit of a source on one process: its documents read, judged by the rules and hashed; later, those that stay
tokenised.

WORK/00012.text         the texts that the rules leave, one after another, UTF-8
WORK/00012.shingles     their shingles, uint32
WORK/00012.signatures   their MinHash, uint32; empty if near = 0
WORK/00012.json         their names, sizes, licences and digests, and what was dropped; written last: if it exists, all
                        of the above do
WORK/00012.tokens       tokens of those that stay, of `dtype`
WORK/00012.lengths      tokens of each, int64; written last
"""

import json
import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kit.disk import atomic_write, read_json
from ref.cpt import load_tokenizer
from scaled.data.documents import UnreadableDocument, read
from scaled.data.duplicates import PERMUTATIONS, digest, shingles, signature
from scaled.data.rules import Rules, licence, reason
from scaled.data.sources import Source, Unit

__all__ = ["Scan", "Task", "Tokenise", "dtype_of", "scan", "tokenise"]


class Task(NamedTuple):
    """What one process does with one unit."""

    number: int
    unit: Unit
    source: Source
    rules: Rules
    max_bytes: int
    """Bytes of the longest document."""
    near: bool
    """Whether signatures are wanted."""
    work: Path


def scan(task: Task) -> int:
    """Reads a unit and writes its files. Returns its number."""
    texts, marks, minhashes, documents, dropped_entries = [], [], [], [], []
    rows = 0
    for item in read(task.unit, task.source, task.max_bytes):
        rows += 1
        if isinstance(item, UnreadableDocument):
            dropped_entries.append([item.name, item.reason, 0, 0])
            continue
        name, text = item
        data = text.encode()
        size, lines = len(data), text.count("\n") + (not text.endswith("\n"))
        if rule := reason(text, task.rules, task.source.rules):
            dropped_entries.append([name, rule, size, lines])
            continue
        document_marks = shingles(text)
        texts.append(data)
        marks.append(document_marks)
        if task.near:
            minhashes.append(signature(document_marks))
        documents.append([name, size, lines, licence(text), digest(text), len(document_marks)])
    base = task.work / f"{task.number:05d}"
    atomic_write(base.with_suffix(".text"), b"".join(texts))
    atomic_write(base.with_suffix(".shingles"), b"".join(array.tobytes() for array in marks))
    atomic_write(base.with_suffix(".signatures"), b"".join(array.tobytes() for array in minhashes))
    atomic_write(
        base.with_suffix(".json"), json.dumps({"rows": rows, "documents": documents, "dropped": dropped_entries})
    )
    return task.number


class Scan:
    """What `scan` has left of a unit."""

    def __init__(self, work: Path, number: int):
        self.base = work / f"{number:05d}"
        record: dict[str, Any] = read_json(self.base.with_suffix(".json"))
        self.rows, self.documents, self.dropped = record["rows"], record["documents"], record["dropped"]
        self.text_ends = np.cumsum([0, *(document[1] for document in self.documents)])
        self.mark_ends = np.cumsum([0, *(document[5] for document in self.documents)])

    def text(self, i: int) -> str:
        """The text of document i."""
        with open(self.base.with_suffix(".text"), "rb") as file:
            file.seek(int(self.text_ends[i]))
            return file.read(int(self.text_ends[i + 1] - self.text_ends[i])).decode()

    def shingles(self) -> list[np.ndarray]:
        """The shingles of every document."""
        flat = np.fromfile(self.base.with_suffix(".shingles"), np.uint32)
        return [flat[a:b] for a, b in zip(self.mark_ends, self.mark_ends[1:])]

    def signatures(self) -> np.ndarray:
        """The signature of every document; no rows if there are none."""
        return np.fromfile(self.base.with_suffix(".signatures"), np.uint32).reshape(-1, PERMUTATIONS)


class Tokenise(NamedTuple):
    """A unit and the documents of it that stay."""

    number: int
    documents: Sequence[int]
    tokenizer: Path
    work: Path


@lru_cache(1)
def cached_tokenizer(path: Path) -> Any:
    return load_tokenizer(path)


def dtype_of(tokenizer: Any) -> Any:
    """The dtype that holds every token of a tokenizer: uint16 or uint32."""
    return np.uint16 if max(tokenizer.get_vocab().values(), default=0) < 1 << 16 else np.uint32


def tokenise(task: Tokenise) -> int:
    """Writes the tokens of a unit. Special tokens in a text are plain text, and nothing is added. Returns its
    number."""
    tokenizer, token_blocks, lengths = cached_tokenizer(task.tokenizer), [], []
    unit_scan = Scan(task.work, task.number)
    previous_value = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes share the cores already
    try:
        for at in range(0, len(task.documents), 32):
            for encoding in tokenizer.encode_batch(
                [unit_scan.text(i) for i in task.documents[at : at + 32]], add_special_tokens=False
            ):
                lengths.append(len(encoding.ids))
                token_blocks.append(np.array(encoding.ids, dtype_of(tokenizer)).tobytes())
    finally:
        if previous_value is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = previous_value
    atomic_write(unit_scan.base.with_suffix(".tokens"), b"".join(token_blocks))
    atomic_write(unit_scan.base.with_suffix(".lengths"), np.array(lengths, np.int64).tobytes())
    return task.number
