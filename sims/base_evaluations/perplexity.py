"""Codebase perplexity of any model (Appendix B): files joined in alphabetical order, every token scored under a rolling
window.

`ref.cpt.codebase_nll` is the same for our network; a test holds the two equal. This one takes any `Base`, and keeps the
files apart: tokens of one file repeat its names, so they are no independent draws, and the interval is a bootstrap over
*files*.

    texts = codebase(folder, 40_000)                  whole files in alphabetical order, at most that many bytes
    files = file_nll(base, texts, window=512)         [(nats, tokens, bytes) of each file]
    summed(files)                                     totals, and intervals

Three numbers. The sum in nats is the report's (Table 2); it says little between tokenizers of another grain only if the
text differs, because a sum over the same bytes is comparable. Bits per byte is that sum by the length of the text.
Perplexity per token depends on the tokenizer."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from kit.settings import RunError
from ref import cpt
from sims.base_evaluations.models import Base

__all__ = ["codebase", "file_nll", "summed"]


def codebase(folder: str | Path | None, size: int) -> dict[str, str]:
    """Name → text of a folder's files in alphabetical order, whole files of at most `size` bytes together; a file that
    would go over is left out, and smaller ones behind it may still come. None: the part of the standard library that
    the recipe's runs hold out. Raises RunError if nothing is left."""
    corpus = cpt.hold_out_codebase(cpt.read_library())[2] if folder is None else cpt.read_corpus(folder)
    selected_texts, remaining_bytes = {}, size
    for name in sorted(corpus.files):
        length = len(corpus.files[name].encode()) + 1
        if length <= remaining_bytes:
            selected_texts[name], remaining_bytes = corpus.files[name], remaining_bytes - length
    if not selected_texts:
        raise RunError(
            f"the codebase {folder or 'of the standard library'} has no text file of at most {size:,} "
            f"bytes; choose another --codebase"
        )
    return selected_texts


def file_nll(
    base: Base,
    texts: dict[str, str],
    window: int,
    stride: int | None = None,
    progress: Callable[[float], None] = lambda share: None,
) -> list[tuple[float, int, int]]:
    """(nats, tokens, bytes) of each file. A window holds at most `window` tokens and moves by `stride` (default: half
    of it); a prefix of the tokenizer, if it has one, stands before every window. Without one, the first token of all
    has no context and is not scored.

    Raises ValueError for a window that does not fit the model, or a stride outside 1 … window − 1."""
    names = sorted(texts)
    text = "\n".join(texts[name] for name in names)
    encoding = base.tokenizer.encode(text)
    ids, ends = encoding.ids, list(accumulate(len(texts[name]) + 1 for name in names))
    stride = window // 2 if stride is None else stride
    if len(ids) < 2 or not 1 <= stride < window:
        raise ValueError(f"nothing to score: {len(ids)} tokens, window {window}, stride {stride}")
    width = min(window, len(ids))
    starts = [*range(0, len(ids) - width, stride), len(ids) - width]
    scored_until = 0 if base.prefix else 1  # tokens before this one are scored, or cannot be
    rows, firsts, position_ranges = [], [], []
    for start in starts:
        rows.append(ids[start : start + width])
        firsts.append(scored_until - start)
        position_ranges.append(range(scored_until, start + width))
        scored_until = start + width
    scores = base.log_probs(rows, firsts, lambda done: progress(done / len(rows)))
    nats, tokens = [0.0] * len(names), [0] * len(names)
    for positions, score in zip(position_ranges, scores, strict=True):
        for position, logp in zip(positions, score.logp, strict=True):
            file = min(bisect_right(ends, encoding.offsets[position][0]), len(names) - 1)
            nats[file] -= logp
            tokens[file] += 1
    sizes = [len(texts[name].encode()) + (name != names[-1]) for name in names]
    return list(zip(nats, tokens, sizes, strict=True))


def summed(files: Sequence[Sequence[float]], resamples: int, seed: int = 0) -> dict[str, Any]:
    """{nats, nats_interval, tokens, bytes, bits_per_byte, bits_interval, perplexity} of [(nats, tokens, bytes), …]; 95%
    intervals by a bootstrap over files. That of the sum is that of bits per byte, for the same bytes."""
    values = np.array(files, dtype=float)
    bits = bootstrap_bits(values, resamples, seed)
    nats, tokens, size = values.sum(0)
    low, high = (float(v) for v in np.quantile(bits, [0.025, 0.975]))
    scale = float(size) * math.log(2)
    return {
        "nats": float(nats),
        "nats_interval": [low * scale, high * scale],
        "tokens": float(tokens),
        "bytes": float(size),
        "bits_per_byte": float(nats / scale),
        "bits_interval": [low, high],
        "perplexity": math.exp(nats / tokens),
    }


def bootstrap_bits(values: np.ndarray, resamples: int, seed: int) -> np.ndarray:
    """Bits per byte of `resamples` draws of files, the same files for the same seed: draws of two models are paired."""
    rng = np.random.default_rng(seed)
    resampled_sums = values[rng.integers(0, len(values), (resamples, len(values)))].sum(1)
    return resampled_sums[:, 0] / resampled_sums[:, 2] / math.log(2)
