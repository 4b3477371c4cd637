"""Tokens of documents as files that are memory-mapped.

NAME-00000.bin      tokens of one document after another, little-endian uint16 or uint32; no token marks the end of a
                    document
NAME-00000.idx      where each document begins, and where the last ends, in tokens: little-endian int64, documents + 1
NAME-00000.json     manifest: documents, tokens, dtype, and the SHA-256 of both files; written last: if it exists, the
                    shard is complete
"""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kit.disk import atomic_write, read_json

__all__ = ["Layout", "Shard", "plan_shards", "write"]

DTYPES = {"uint16": "<u2", "uint32": "<u4"}
BLOCK = 1 << 22


class Layout(NamedTuple):
    """What one shard is made of."""

    path: Path
    """Without suffix."""
    spans: tuple[tuple[Path, int, int], ...]
    """Files of tokens, and from which token to which."""
    lengths: np.ndarray
    """Tokens of every document."""
    dtype: str


def plan_shards(
    lengths: Sequence[np.ndarray], files: Sequence[Path], max_tokens: int, base: Path, dtype: str
) -> list[Layout]:
    """The shards of a source whose documents lie in files of tokens, some in each: a shard ends with the document that
    fills it to `max_tokens` tokens."""
    layouts: list[Layout] = []
    spans: list[tuple[Path, int, int]] = []
    document_lengths: list[int] = []
    num_tokens = 0

    def close() -> None:
        nonlocal spans, document_lengths, num_tokens
        if document_lengths:
            layouts.append(
                Layout(
                    base.with_name(f"{base.name}-{len(layouts):05d}"),
                    tuple(spans),
                    np.array(document_lengths, np.int64),
                    dtype,
                )
            )
        spans, document_lengths, num_tokens = [], [], 0

    for file, sizes in zip(files, lengths, strict=True):
        begin = at = 0
        for size in sizes.tolist():
            document_lengths.append(size)
            at, num_tokens = at + size, num_tokens + size
            if num_tokens >= max_tokens:
                spans.append((file, begin, at))
                begin = at
                close()
        if at > begin or (len(sizes) and document_lengths):
            spans.append((file, begin, at))
    close()
    return layouts


def write(layout: Layout) -> dict[str, Any]:
    """Writes a shard unless it is complete, and returns its manifest."""
    binary, index, manifest = (layout.path.with_name(layout.path.name + suffix) for suffix in (".bin", ".idx", ".json"))
    if manifest.exists():
        return read_json(manifest)
    kind, digest = np.dtype(DTYPES[layout.dtype]), hashlib.sha256()
    temporary = binary.with_name(f".tmp-{binary.name}")
    with open(temporary, "wb") as file:
        for source, begin, end in layout.spans:
            with open(source, "rb") as tokens:
                tokens.seek(begin * kind.itemsize)
                bytes_left = (end - begin) * kind.itemsize
                while bytes_left:
                    block = tokens.read(min(bytes_left, BLOCK))
                    if not block:
                        raise OSError(f"{source} is cut short")
                    bytes_left -= len(block)
                    digest.update(block)
                    file.write(block)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, binary)
    places = np.concatenate([[0], layout.lengths.cumsum()]).astype("<i8").tobytes()
    atomic_write(index, places)
    record = {
        "name": layout.path.name,
        "documents": len(layout.lengths),
        "tokens": int(layout.lengths.sum()),
        "dtype": layout.dtype,
        "sha256": {"bin": digest.hexdigest(), "idx": hashlib.sha256(places).hexdigest()},
    }
    atomic_write(manifest, json.dumps(record, indent=1) + "\n")
    return record


@dataclass
class Shard:
    """A shard that is read."""

    tokens: np.ndarray
    """[tokens], memory-mapped."""
    places: np.ndarray
    """[documents + 1] int64."""

    @classmethod
    def open(cls, folder: Path, manifest: dict[str, Any]) -> "Shard":
        """The shard of a manifest. Raises ValueError if a file is missing or has another size."""
        binary, index = (folder / f"{manifest['name']}.{suffix}" for suffix in ("bin", "idx"))
        kind = np.dtype(DTYPES[manifest["dtype"]])
        for path, size in ((binary, manifest["tokens"] * kind.itemsize), (index, 8 * (manifest["documents"] + 1))):
            actual_size = path.stat().st_size if path.is_file() else None
            if actual_size != size:
                raise ValueError(
                    f"{path} "
                    f"{'is missing' if actual_size is None else f'has {actual_size} bytes instead of {size}'}; "
                    "prepare the data again"
                )
        places = np.memmap(index, "<i8", "r")
        if not manifest["tokens"]:
            return cls(np.zeros(0, kind), places)
        return cls(np.memmap(binary, kind, "r"), places)
