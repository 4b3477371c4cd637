"""Conversations in JSONL as rows of the SFT stage (`ref/sft.py`): read, rendered by the checkpoint's chat template,
packed once into data/sft.npz.

A line that is no conversation, or of which the template does not tell what the assistant wrote, is named and skipped.
The rows are kept, so that a resumed run goes on with those it began with, whatever has become of the file.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kit.settings import RunError
from recipe.small.agent import Language
from ref import sft
from ref.sft import Render

__all__ = ["ROWS", "batches", "check_conversations", "kept_rows", "pack_conversations"]

ROWS = "sft.npz"
"""Packed conversations, in a run's folder data/."""
MAX_NAMED_LINES = 5
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
        raise RunError(
            f"sft.conversations={path} cannot be read ({error.strerror}); change its permissions or name another file"
        ) from None


def pack_conversations(
    path: str | Path,
    render: Render,
    language: Language,
    length: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Rows, dict[str, Any]]:
    """Rows of `length` tokens and what they were made of. Prints a line for the first few lines that are skipped.
    Raises RunError if no conversation is left."""
    chats, errors = sft.read_conversations(path)
    if date := getattr(render, "date", None):
        print(f"the chat template writes today's date, {date}; SOURCE_DATE_EPOCH=SECONDS sets another one", flush=True)
    contexts: list[tuple[Tensor, Tensor]] = []
    counts = {"conversations": 0, "contexts": 0, "cut": 0, "dropped": 0, "skipped": 0}
    for number, (line, chat) in enumerate(chats, 1):
        try:
            chat_contexts = sft.tokens_and_mask(chat, render, language.tokenizer)
            if not chat_contexts:
                raise ValueError("the assistant has no turn to learn")
        except ValueError as error:
            errors.append(f"{path}:{line}: {error}")
            continue
        fitting_contexts, cut_count, dropped_count = sft.fitted(chat_contexts, length)
        contexts += fitting_contexts
        for name, increment in (
            ("conversations", 1),
            ("contexts", len(fitting_contexts)),
            ("cut", cut_count),
            ("dropped", dropped_count),
        ):
            counts[name] += increment
        if number % 100 == 0 or number == len(chats):
            progress(number, len(chats))
    counts["skipped"] = len(errors)
    for line in errors[:MAX_NAMED_LINES]:
        print(f"skipped: {line}", flush=True)
    if len(errors) > MAX_NAMED_LINES:
        print(f"skipped: {len(errors) - MAX_NAMED_LINES} more lines of {path}", flush=True)
    for name, description in (
        ("cut", "cut behind the last turn that fits"),
        ("dropped", "dropped, because no turn fits"),
    ):
        if counts[name]:
            print(f"{path}: {counts[name]} contexts longer than a row of {length} tokens are {description}", flush=True)
    if not contexts:
        detail = (
            f"; the first: {errors[0]}"
            if errors
            else f"; no turn ends within a row of {length} tokens"
            if counts["dropped"]
            else ""
        )
        raise RunError(f"sft.conversations={path} has no conversation to learn from{detail}")
    rows = sft.pack(contexts, length)
    tokens, learned_tokens = sum(len(ids) for ids, _ in contexts), sum(int(mask.sum()) for _, mask in contexts)
    return rows, counts | {"rows": len(rows[0]), "tokens": tokens, "learned": learned_tokens}


def kept_rows(root: Path) -> Rows:
    """The rows in the run folder `root`. Raises RunError if they are damaged."""
    path = root / "data" / ROWS
    try:
        with np.load(path) as arrays:
            ids, doc, weight = arrays["ids"], arrays["doc"], arrays["weight"]
        if not (
            ids.ndim == 2
            and ids.shape == doc.shape == weight.shape
            and ids.dtype.kind == doc.dtype.kind == "i"
            and weight.dtype == bool
        ):
            raise ValueError("ids, doc and weight are not three arrays of the same shape")
    except Exception as error:  # Python objects in the array, or a damaged archive
        detail = " ".join(str(error).split())
        raise RunError(
            f"{path} does not hold packed conversations ({detail}); delete "
            f"{root / 'stages' / 'data.json'} to pack again"
        ) from None
    return ids, doc, weight


def batches(packed: Rows, rows: int, seed: Sequence[int]) -> tuple[int, Callable[[int], tuple[Tensor, Tensor, Tensor]]]:
    """Steps per epoch, and a function from step to a batch of at most `rows` rows: ids [B, T], doc [B, T] and weight
    [B, T], 1 on the agent's own tokens. The order depends on `seed` and the epoch."""
    ids, doc, weight = packed
    B = min(rows, len(ids))
    per_epoch = len(ids) // B

    def batch(step: int) -> tuple[Tensor, Tensor, Tensor]:
        order = np.random.default_rng([*seed, step // per_epoch]).permutation(len(ids))
        indices = order[step % per_epoch * B :][:B]
        return (
            torch.from_numpy(ids[indices].astype(np.int64)),
            torch.from_numpy(doc[indices].astype(np.int64)),
            torch.from_numpy(weight[indices]).float(),
        )

    return per_epoch, batch
