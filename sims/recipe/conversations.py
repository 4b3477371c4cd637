"""Conversations in JSONL as rows of the SFT stage (`ref/sft.py`): read, rendered by the checkpoint's chat template, packed once into data/sft.npz.

A line that is no conversation, or of which the template does not tell what the assistant wrote, is named and skipped. The rows are kept, so that
a resumed run goes on with those it began with, whatever has become of the file.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kit.settings import RunError
from ref import sft
from ref.sft import Render
from sims.recipe.agent import Language

__all__ = ["ROWS", "batches", "check_conversations", "kept_rows", "pack_conversations"]

ROWS = "sft.npz"
"""Packed conversations, in a run's folder data/."""
NAMED = 5
"""Lines that are skipped, of which so many are named."""

Rows = tuple[np.ndarray, np.ndarray, np.ndarray]
"""ids, doc and weight [R, T]."""


def check_conversations(path: str | None) -> None:
    """Raises RunError unless `path` is None or a file that can be read."""
    if path is None:
        return
    if not Path(path).is_file():
        raise RunError(f"sft.conversations={path} is not a file; name a JSONL file of conversations")
    try:
        open(path, "rb").close()
    except OSError as error:
        raise RunError(f"sft.conversations={path} cannot be read ({error.strerror}); change its permissions or name another file") from None


def pack_conversations(
    path: str | Path, render: Render, language: Language, length: int, progress: Callable[[int, int], None] = lambda done, total: None
) -> tuple[Rows, dict[str, Any]]:
    """Rows of `length` tokens and what they were made of. Prints a line for the first few lines that are skipped. Raises RunError if no
    conversation is left."""
    chats, refused = sft.read_conversations(path)
    if date := getattr(render, "date", None):
        print(f"the chat template writes today's date, {date}; SOURCE_DATE_EPOCH=SECONDS sets another one", flush=True)
    contexts: list[tuple[Tensor, Tensor]] = []
    counts = {"conversations": 0, "contexts": 0, "cut": 0, "dropped": 0, "skipped": 0}
    for number, (line, chat) in enumerate(chats, 1):
        try:
            found = sft.tokens_and_mask(chat, render, language.tokenizer)
            if not found:
                raise ValueError("the assistant has no turn to learn")
        except ValueError as error:
            refused.append(f"{path}:{line}: {error}")
            continue
        kept, cut, dropped = sft.fitted(found, length)
        contexts += kept
        for name, more in (("conversations", 1), ("contexts", len(kept)), ("cut", cut), ("dropped", dropped)):
            counts[name] += more
        if number % 100 == 0 or number == len(chats):
            progress(number, len(chats))
    counts["skipped"] = len(refused)
    for line in refused[:NAMED]:
        print(f"skipped: {line}", flush=True)
    if len(refused) > NAMED:
        print(f"skipped: {len(refused) - NAMED} more lines of {path}", flush=True)
    for name, what in (("cut", "cut behind the last turn that fits"), ("dropped", "dropped, because no turn fits")):
        if counts[name]:
            print(f"{path}: {counts[name]} contexts longer than a row of {length} tokens are {what}", flush=True)
    if not contexts:
        why = f"; the first: {refused[0]}" if refused else f"; no turn ends within a row of {length} tokens" if counts["dropped"] else ""
        raise RunError(f"sft.conversations={path} has no conversation to learn from{why}")
    rows = sft.pack(contexts, length)
    tokens, learned = sum(len(ids) for ids, _ in contexts), sum(int(own.sum()) for _, own in contexts)
    return rows, counts | {"rows": len(rows[0]), "tokens": tokens, "learned": learned}


def kept_rows(root: Path) -> Rows:
    """The rows in the run folder `root`. Raises RunError if they are damaged."""
    path = root / "data" / ROWS
    try:
        with np.load(path) as packed:
            ids, doc, weight = packed["ids"], packed["doc"], packed["weight"]
        if not (ids.ndim == 2 and ids.shape == doc.shape == weight.shape and ids.dtype.kind == doc.dtype.kind == "i" and weight.dtype == bool):
            raise ValueError("ids, doc and weight are not three arrays of the same shape")
    except Exception as error:  # Python objects in the array, or a damaged archive
        why = " ".join(str(error).split())
        raise RunError(f"{path} does not hold packed conversations ({why}); delete {root / 'stages' / 'data.json'} to pack again") from None
    return ids, doc, weight


def batches(packed: Rows, rows: int, seed: Sequence[int]) -> tuple[int, Callable[[int], tuple[Tensor, Tensor, Tensor]]]:
    """Steps per epoch, and a function from step to a batch of at most `rows` rows: ids [B, T], doc [B, T] and weight [B, T], 1 on the agent's own
    tokens. The order depends on `seed` and the epoch."""
    ids, doc, weight = packed
    B = min(rows, len(ids))
    per_epoch = len(ids) // B

    def batch(step: int) -> tuple[Tensor, Tensor, Tensor]:
        order = np.random.default_rng([*seed, step // per_epoch]).permutation(len(ids))
        some = order[step % per_epoch * B :][:B]
        return torch.from_numpy(ids[some].astype(np.int64)), torch.from_numpy(doc[some].astype(np.int64)), torch.from_numpy(weight[some]).float()

    return per_epoch, batch
