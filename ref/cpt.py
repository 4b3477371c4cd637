"""Continued pretraining: from a folder of code to a model that has read it, and a measure of how well.

Paper: Composer 2 technical report (arXiv:2603.24477v2), §3.1 and Appendix B.

The report trains on a code-dominated mix: the bulk of the compute at a short context, then a shorter phase at
a long one, then a short SFT. It tracks held-out *codebase perplexity*: the files of a repository are joined in
alphabetical order, and each token is scored under a rolling window. This file holds what the phases share, in
the order in which data flows; `recipe/small/stages.py` runs the phases one after another.

    folder → files → tokens → packed rows → loss → codebase perplexity

    L   = −Σ_{b,t} w_{b,t} log p(x_t | the tokens of its own document before it)   to be divided by a count
    NLL = −Σ_{t ≥ 1} log p(x_t | x_{s(t)} … x_{t−1})                               its window starts at s(t)
    perplexity = exp(NLL / tokens)          bits per byte = NLL / (bytes · ln 2)

The traps
a. A packed row holds unrelated documents. Attention must stay inside a document (the network takes `doc` too),
   and the first token of a document must not be predicted.
b. `next_token_loss` returns a sum and a count. Dividing by each micro-batch's own count would give a token in
   a row full of padding more weight than one in a full row; divide by the count of the whole step.
c. A token at the start of a window has no context. If windows overlap and only their new tokens are scored,
   every token has at least window − stride tokens of context. The result depends on both numbers.
d. Perplexity per token depends on the tokenizer. Bits per byte of source do not, so compare those.

Where this file departs from the paper
1. The base model has random weights: at this size pretraining and continued pretraining are the same.
2. We use Muon with AdamW (as Composer 2.5 does) instead of AdamW alone; `optimizer = "adamw"` gives the report's.
3. The report names no schedule. Ours is warm-up, stable, decay, after MiniCPM (arXiv:2404.06395, §4).
4. Weights are bfloat16 with float32 masters (`ref/network/masters.py`) instead of MXFP8.
5. Contexts have 128 and 256 tokens, not 32k and 256k.
6. The report does not give the stride of its window: ours is half a window. Holding out a folder of the corpus
   itself is our choice too.

Run it
    etude run cpt --scale small           half a minute; the same as: python -m ref.cpt
    etude run recipe --scale small        all phases, and what comes after them
    etude figure cpt-rl                   what more of it does to the loss and to RL (Figure 2); an hour
    etude run cpt --scale full            scaled/cpt.py

Glossary
    symbol             variable       shape    where
    x                  ids            [B, T]   token ids; [R, T] as `pack` lays them out
    document of x_t    doc            [B, T]   numbered in each row, −1 for padding
    w                  weight         [B, T]   weight of token t in the loss; SFT: one on the agent's own tokens
    –                  hidden         B T D    after the final norm, D the width
    s(t)               starts         –        multiples of the stride, the last one pulled back
    NLL                nll            scalar   `CodebaseNLL`, nats, summed
    learning rate      wsd(step, …)   scalar   its factor at a step
"""

import math
import os
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ref.checks import expect, expect_text
from ref.control_tokens import control_tokens, without_options
from ref.network import Config, Transformer

__all__ = [
    "SPECIAL_TOKENS",
    "CodebaseNLL",
    "Corpus",
    "codebase_nll",
    "hold_out_codebase",
    "next_token_loss",
    "pack",
    "read_corpus",
    "train_tokenizer",
    "wsd",
]

SPECIAL_TOKENS = ("<|endoftext|>", "<|env|>", "<|agent|>")
"""End of a document; start of the environment's text; start of the agent's text."""

CODE = r" ?\w+|\n *| ?[^\s\w]+|\s+"
"""Pieces whose borders byte-pair merges may not cross: a word with the space before it, a newline with the
indentation after it, punctuation."""


LIBRARY_EXCLUDE = ("site-packages", "test", "tests", "lib2to3", "idlelib", "turtledemo", "ensurepip")
"""Folders of the standard library that are left out: third-party packages, tests, demos, old tools."""


@dataclass
class Corpus:
    """Text files of a folder, in alphabetical order of their paths."""

    files: dict[str, str] = field(default_factory=dict)
    """Relative path → text. Bytes of a path that are not UTF-8 appear as `os.fsdecode` writes them."""
    skipped: Counter = field(default_factory=Counter)
    """Reason → number of files left out: empty, huge, binary, encoding, unreadable, vendored."""

    @property
    def bytes(self) -> int:
        return sum(len(text.encode()) for text in self.files.values())


def read_corpus(
    root: str | Path, suffixes: Sequence[str] = (), exclude: Sequence[str] = (), max_bytes: int = 1 << 20
) -> Corpus:
    """Read every text file below `root`, except in hidden folders (.git), folders named in `exclude`, and __pycache__:
    how much bytecode there is depends on what was imported, and a resumed run must read the same.

    `suffixes`: read only these (with the dot); an empty sequence means all. A file is skipped and counted if it
    is empty, larger than `max_bytes`, binary (a NUL byte), not UTF-8, or unreadable; so is a folder that cannot
    be listed. Links are not followed, so a corpus cannot loop. \\r\\n becomes \\n; nothing else changes.
    """
    corpus, root = Corpus(), Path(root)
    for path in sorted(
        walk(root, frozenset((*exclude, "__pycache__")), corpus.skipped),
        key=lambda item: item.relative_to(root).as_posix(),
    ):
        if suffixes and path.suffix not in suffixes:
            continue
        try:
            size = path.stat().st_size
            if size > max_bytes:
                corpus.skipped["huge"] += 1
                continue
            data = path.read_bytes()
        except OSError:
            corpus.skipped["unreadable"] += 1
            continue
        if not data.strip():
            corpus.skipped["empty"] += 1
        elif b"\0" in data:
            corpus.skipped["binary"] += 1
        else:
            try:
                corpus.files[path.relative_to(root).as_posix()] = data.decode("utf-8").replace("\r\n", "\n")
            except UnicodeDecodeError:
                corpus.skipped["encoding"] += 1
    return corpus


def read_library() -> Corpus:
    """The source of the running Python's standard library: the default corpus of small and full runs."""
    return read_corpus(sysconfig.get_paths()["stdlib"], (".py",), LIBRARY_EXCLUDE)


def walk(folder: Path, exclude: frozenset[str], skipped: Counter) -> Iterable[Path]:
    """Regular files at any depth below a folder, in no particular order. Folders that cannot be listed are counted in
    `skipped`."""
    folders = [folder]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                visible_entries = [
                    entry for entry in entries if not (entry.name.startswith(".") or entry.name in exclude)
                ]
            folders += [Path(entry.path) for entry in visible_entries if entry.is_dir(follow_symlinks=False)]
            yield from [Path(entry.path) for entry in visible_entries if entry.is_file(follow_symlinks=False)]
        except OSError:
            skipped["unreadable"] += 1


def hold_out_codebase(corpus: Corpus, share: float = 0.03) -> tuple[str, Corpus, Corpus]:
    """(name, training part, held-out codebase). Held out is the top-level folder whose size is nearest to `share`
    of the corpus, if one has between a third and five times that size and is not the only folder; otherwise every
    k-th file. Raises ValueError for fewer than two files, and unless share lies between 0 and 1."""
    if not 0 < share < 1:
        raise ValueError(f"share must lie between 0 and 1; got {share}")
    if len(corpus.files) < 2:
        raise ValueError(
            f"the corpus has {len(corpus.files)} usable text files; at least two are needed to hold one out"
        )
    sizes: Counter = Counter()
    for name, text in corpus.files.items():
        if "/" in name:
            sizes[name.split("/")[0]] += len(text)
    target_size = share * sum(map(len, corpus.files.values()))
    is_single_folder = len({name.split("/")[0] for name in corpus.files}) == 1
    candidates = [
        top for top, size in sizes.items() if target_size / 3 <= size <= 5 * target_size and not is_single_folder
    ]
    if candidates:
        name = min(candidates, key=lambda top: (abs(sizes[top] - target_size), top))
        held_out = {path for path in corpus.files if path.split("/")[0] == name and "/" in path}
    else:
        interval = max(2, round(1 / share))
        held_out = set(list(corpus.files)[interval // 2 :: interval] or [max(corpus.files)])
        name = f"{len(held_out)} files"
    training_files = {path: text for path, text in corpus.files.items() if path not in held_out}
    return name, Corpus(training_files, corpus.skipped), Corpus({path: corpus.files[path] for path in sorted(held_out)})


def train_tokenizer(texts: Iterable[str], vocab_size: int):
    """Train a byte-level BPE (Hugging Face `tokenizers.Tokenizer`) with `SPECIAL_TOKENS` first. Any text round-trips
    exactly, and special tokens in a text are read as plain text (`as_text`). Raises ValueError if the vocabulary has
    no room for the special tokens and the 256 bytes."""
    if vocab_size < len(SPECIAL_TOKENS) + 256:
        raise ValueError(f"vocab_size must be at least {len(SPECIAL_TOKENS) + 256}; got {vocab_size}")
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(CODE), behavior="isolated")
    as_bytes = pre_tokenizers.ByteLevel(False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return as_text(tokenizer)


def as_text(tokenizer):
    """The tokenizer, or a copy of it, that reads control tokens in a text as plain text: `<|endoftext|>` in a source
    file is encoded like any other word, and nothing is added before or after, cut off or padded, whatever a
    tokenizer.json says. Only the program inserts control tokens, by id; otherwise a file could end a document or speak
    for the agent. A tokenizer.json cannot store this setting, so it is set after each load or copy.
    `ref/control_tokens.py` says which tokens they are. A tokenizer from another library is returned unchanged."""
    if not hasattr(tokenizer, "encode_special_tokens"):
        return tokenizer
    options = tokenizer.post_processor, tokenizer.truncation, tokenizer.padding
    if (
        tokenizer.encode_special_tokens
        and options == (None, None, None)
        and all(token.special for token in control_tokens(tokenizer))
    ):
        return tokenizer
    return without_options(tokenizer, as_text=True)


def load_tokenizer(path: str | Path):
    """Load a tokenizer.json from any path; special tokens in a text are read as plain text (`as_text`). Raises
    ValueError if the file holds no tokenizer."""
    from tokenizers import Tokenizer

    content = Path(path).read_bytes()  # Tokenizer.from_file accepts only paths that are UTF-8
    try:
        return as_text(Tokenizer.from_str(content.decode("utf-8")))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{path} holds no tokenizer: {error}") from None


def pack(
    documents: Iterable[Sequence[int]], length: int, pad: int = 0, open_rows: int = 32
) -> tuple[np.ndarray, np.ndarray]:
    """Pack complete documents into rows of `length` tokens, first fit among `open_rows` rows. A document is cut
    only if it is longer than a row.

    Returns ids [R, T] int32 and doc [R, T] int32. doc numbers the documents of a row from 0 and is −1 on padding
    (`pad`). Raises ValueError for length or open_rows < 1, and for documents that are not sequences of integers.
    """
    for name, value in (("length", length), ("open_rows", open_rows)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a whole number of at least 1; got {value}")
    packed_rows: list[list[Sequence[int]]] = []
    rows: list[list[Sequence[int]]] = []
    free_tokens: list[int] = []
    for number, document in enumerate(documents):
        tokens = np.asarray(document)
        if len(document) and not (tokens.ndim == 1 and tokens.dtype.kind in "iu"):
            description = f"{tokens.dtype} {list(tokens.shape)}"
            raise ValueError(f"documents must be sequences of whole numbers; number {number} is {description}")
        for start in range(0, len(document), length):
            piece = document[start : start + length]
            open_row = next((index for index, space in enumerate(free_tokens) if space >= len(piece)), None)
            if open_row is None:
                if len(rows) == open_rows:
                    fullest_row = min(range(len(free_tokens)), key=free_tokens.__getitem__)
                    packed_rows.append(rows.pop(fullest_row))
                    free_tokens.pop(fullest_row)
                rows.append([])
                free_tokens.append(length)
                open_row = len(rows) - 1
            rows[open_row].append(piece)
            free_tokens[open_row] -= len(piece)
    packed_rows += rows
    ids, doc = np.full((len(packed_rows), length), pad, np.int32), np.full((len(packed_rows), length), -1, np.int32)
    for row_index, row in enumerate(packed_rows):
        offset = 0
        for number, piece in enumerate(row):
            ids[row_index, offset : offset + len(piece)], doc[row_index, offset : offset + len(piece)] = piece, number
            offset += len(piece)
    return ids, doc


def wsd(step: int, total: int, warmup: int, decay: int) -> float:
    """Warm-up, stable, decay: the factor of the learning rate at `step` (0-based) of `total`. It rises linearly over
    `warmup` steps, stays at one, then falls linearly over the last `decay` steps to 1/decay at the last step.
    Raises ValueError for a step out of range, and for negative warmup or decay."""
    if not (0 <= step < total and warmup >= 0 and decay >= 0):
        raise ValueError(
            f"step must lie in 0 … total − 1, and warmup and decay must not be negative; got {step}, "
            f"{total}, {warmup}, {decay}"
        )
    return min(1.0, (step + 1) / max(warmup, 1), (total - step) / max(decay, 1))  # warm-up, stable, decay


def next_token_loss(
    model: Transformer,
    hidden: Float[Tensor, "B T D"],
    ids: Int[Tensor, "B T"],
    doc: Int[Tensor, "B T"] | None = None,
    weight: Tensor | None = None,
) -> tuple[Float[Tensor, ""], int | float]:
    """Summed negative log-likelihood (nats) of every token given the tokens before it in its document, and the
    number of scored tokens.

    `weight` [B, T] bool or float scales the loss of token t (SFT: 1 on the agent's own tokens). Divide by a
    *global* count, never by a local one, or micro-batches of unequal size weigh their tokens unequally. Both
    results are zero if no token is scored. Raises ValueError for other shapes or dtypes, tokens outside the
    vocabulary, and a weight or log-prob that is not finite (log-probs of weight zero are not computed)."""
    expect("hidden", hidden, "float", "B", "T", model.config.hidden_size)
    expect_text(ids, doc, weight, *hidden.shape[:2], vocab=model.config.vocab_size)
    loss_weight = torch.ones(
        ids[:, 1:].shape, dtype=torch.promote_types(hidden.dtype, torch.float32), device=ids.device
    )
    if doc is not None:
        loss_weight *= (doc[:, 1:] == doc[:, :-1]) & (doc[:, 1:] >= 0)  # w = 0 on a document's first token
    if weight is not None:
        loss_weight *= weight[:, 1:]
    states, targets, loss_weight = hidden[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), loss_weight.flatten()
    if weight is not None:  # run the head only on tokens that count
        scored_rows = loss_weight.nonzero()[:, 0]
        states, targets, loss_weight = states[scored_rows], targets[scored_rows], loss_weight[scored_rows]
    logp = model.logprob(states, targets)
    loss = -(logp * loss_weight).sum()  # L = −Σ w log p
    if not bool(loss.isfinite()):
        raise ValueError("hidden must give finite log-probs, but some are not finite")
    return loss, loss_weight.sum().item()


@dataclass(frozen=True)
class CodebaseNLL:
    """The negative log-likelihood of a codebase."""

    nll: float
    """Sum of −log p over all scored tokens, nats."""
    tokens: int
    """Scored tokens."""
    bytes: int
    """UTF-8 bytes of the concatenated files."""

    @property
    def perplexity(self) -> float:
        """exp(nll per token); depends on the tokenizer."""
        return math.exp(self.nll / self.tokens)  # perplexity = exp(NLL / tokens)

    @property
    def bits_per_byte(self) -> float:
        """nll in bits per byte of source; comparable between tokenizers."""
        return self.nll / self.bytes / math.log(2)  # bits per byte = NLL / (bytes · ln 2)


@torch.no_grad()
def codebase_nll(
    model: Transformer,
    tokenizer,
    path: str | Path | Corpus,
    window: int = 256,
    stride: int | None = None,
    max_tokens: int | None = None,
    batch: int = 32,
) -> CodebaseNLL:
    """Codebase perplexity (Appendix B): the files are concatenated in alphabetical order, and every token but the
    first is scored under a window of at most `window` tokens that moves by `stride` (default: half a window). Once
    the text is long enough, a token has at least window − stride tokens of context. Special tokens in the text are
    read as plain text (`as_text`), whatever `tokenizer` is set to.

    `path`: a folder (read by `read_corpus`) or a `Corpus`. `max_tokens` limits scoring to the beginning. Raises
    ValueError if nothing can be scored, for batch < 1 or negative max_tokens, for a tokenizer with more tokens than
    the model, and if a log-prob is not finite.
    """
    token_windows = windows(model.config, tokenizer, path, window, stride, max_tokens, batch)
    total = 0.0
    for first in range(0, len(token_windows.starts), batch):
        rows, is_scored = token_windows.rows(first, batch)
        output = model(rows, logits=False)
        logp = model.logprob(output.hidden[:, :-1].flatten(0, 1), rows[:, 1:].flatten()).view(len(rows), -1)
        for row_logp, row_mask in zip(logp, is_scored[:, 1:], strict=True):
            total -= row_logp[row_mask].double().sum().item()  # NLL = −Σ log p, each token once
    if not math.isfinite(total):
        raise ValueError("model must give finite log-probs, but some are not finite")
    return CodebaseNLL(total, token_windows.tokens, token_windows.bytes)


@dataclass(frozen=True)
class Windows:
    """A codebase as rows of tokens. Each token but the first is scored in exactly one row."""

    ids: Int[Tensor, " N"]
    """The concatenated files."""
    starts: tuple[int, ...]
    """Where each row starts: multiples of the stride; the last is pulled back so that the row ends with the text."""
    width: int
    """Tokens per row."""
    bytes: int
    """UTF-8 bytes of the text."""

    @property
    def tokens(self) -> int:
        """Scored tokens."""
        return len(self.ids) - 1

    def rows(self, first: int, count: int) -> tuple[Int[Tensor, "B T"], Bool[Tensor, "B T"]]:
        """Up to `count` rows starting at row `first`: their tokens, and a mask of those that no earlier row has
        scored."""
        row_starts = torch.tensor(self.starts[first : first + count])
        scored_until = torch.tensor((1 - self.width, *self.starts[:-1]))[first : first + count] + self.width
        positions = row_starts[:, None] + torch.arange(self.width)
        return self.ids[positions], positions >= scored_until[:, None]


def windows(
    config: Config,
    tokenizer,
    path: str | Path | Corpus,
    window: int,
    stride: int | None,
    max_tokens: int | None,
    batch: int,
) -> Windows:
    """Check the arguments of `codebase_nll` and return what it scores."""
    if batch < 1 or (max_tokens or 0) < 0:
        raise ValueError(f"batch must be at least 1, and max_tokens must not be negative; got {batch} and {max_tokens}")
    corpus, tokenizer = path if isinstance(path, Corpus) else read_corpus(path), as_text(tokenizer)
    text = "\n".join(corpus.files[name] for name in sorted(corpus.files))
    ids = torch.tensor(tokenizer.encode(text).ids[: max_tokens or None])
    stride = window // 2 if stride is None else stride
    if len(ids) < 2 or not 1 <= stride < window:
        raise ValueError(f"nothing to score: {len(ids)} tokens, window {window}, stride {stride}")
    if int(ids.max()) >= config.vocab_size:
        raise ValueError(f"tokenizer must give tokens 0 to {config.vocab_size - 1}, but gives up to {int(ids.max())}")
    size = len(text.encode()) if not max_tokens else len(tokenizer.decode(ids.tolist()).encode())
    width = min(window, len(ids))
    # s(t): multiples of the stride, the last one pulled back
    return Windows(ids, (*range(0, len(ids) - width, stride), len(ids) - width), width, size)


@dataclass(frozen=True)
class Demo:
    """A very small network trains on part of a corpus; the perplexity of a codebase that it never saw falls."""

    corpus: str | None = None
    """Folder of code. Default: the packages of the standard library whose names start with a to e."""
    steps: int = 120
    """Optimiser steps of 2,048 tokens."""
    length: int = 128
    """Context."""
    hidden_size: int = 64
    """Width of the network, which has two layers of four experts."""
    vocab_size: int = 512
    """Vocabulary size of the byte-level BPE."""
    looks: int = 4
    """How often perplexity is measured."""
    lr: float = 3e-3
    """AdamW's learning rate."""
    seed: int = 0
    """Seed of the weights and the order of the data."""


def demo(config: Demo = Demo(), log: Callable[..., None] = lambda *_, **__: None) -> dict[str, float]:
    """Codebase perplexity and bits per byte of the held-out part during training."""
    torch.manual_seed(config.seed)
    if config.corpus is None:
        corpus = read_library()
        corpus = Corpus(
            {path: content for path, content in corpus.files.items() if "/" in path and path < "f"}, corpus.skipped
        )
    else:
        corpus = read_corpus(config.corpus)
    _, train, held_out = hold_out_codebase(corpus)
    tokenizer = train_tokenizer((text[:20_000] for text in train.files.values()), config.vocab_size)
    rows, token_budget = 2048 // config.length, config.steps * 2048
    documents, total = [], 0
    for text in train.files.values():
        documents.append([*tokenizer.encode(text).ids, 0])
        total += len(documents[-1])
        if total > token_budget:
            break
    ids, doc = (torch.from_numpy(array.astype(np.int64)) for array in pack(documents, config.length))
    if total < config.length:
        raise ValueError(
            f"corpus must have at least {config.length} training tokens, one row, but has {total}; "
            f"choose another with --corpus"
        )
    epochs = math.ceil(
        config.steps * rows / len(ids)
    )  # more than one if the corpus is smaller than the training budget
    order = torch.cat([torch.randperm(len(ids)) for _ in range(epochs)])
    model = Transformer(
        Config.tiny(
            tokenizer.get_vocab_size(),
            hidden_size=config.hidden_size,
            num_hidden_layers=2,
            num_experts=4,
            num_attention_heads=2,
            num_key_value_heads=1,
            moe_intermediate_size=64,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), config.lr, (0.9, 0.95), weight_decay=0.0, fused=True)
    metrics, steps = {"epochs": config.steps * rows / len(ids)} if epochs > 1 else {}, config.steps
    for step in range(steps + 1):
        if step % max(1, steps // config.looks) == 0 or step == steps:
            evaluation = codebase_nll(model, tokenizer, held_out, config.length, max_tokens=8192)
            metrics[f"perplexity@{step * 2048}"] = evaluation.perplexity
            metrics[f"bits_per_byte@{step * 2048}"] = evaluation.bits_per_byte
            log(step, steps, perplexity=evaluation.perplexity)
        if step == steps:
            break
        batch = order[step * rows : (step + 1) * rows]
        for group in optimizer.param_groups:
            group["lr"] = config.lr * wsd(step, steps, steps // 10, steps // 3)
        hidden = model(ids[batch], doc=doc[batch], logits=False).hidden
        loss, count = next_token_loss(model, hidden, ids[batch], doc[batch])
        (loss / count).backward()
        optimizer.step()
        optimizer.zero_grad()
    return metrics


if __name__ == "__main__":
    print(demo())
