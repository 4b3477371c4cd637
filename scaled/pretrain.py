"""Pretraining on many ranks, from a folder of code to a Hugging Face folder: what `etude run TECHNIQUE --scale full`
runs.

    cpt     continued pretraining: next-token loss and balance loss
    mtp     layers distilled on top of a frozen checkpoint

Inside torchrun, on every rank:

    with world(backend, timeout), mesh(dp, cp, ep):
        train("cpt", settings, folder, log)

FOLDER/data/        tokenizer.json, rows.npy and doc.npy: packed once, by rank 0 or before the ranks start, and
                    memory-mapped by all.
                    A corpus that `etude data` prepared is not packed again: its shards are memory-mapped, and
                    FOLDER/data/prepared.json names it
FOLDER/checkpoints/final    the final network; other files: `scaled/optimise.py`

The rows of a step depend only on seed and epoch, not on the layout.
"""

import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from kit.disk import atomic_write, hash_file, read_json
from kit.settings import RunError
from ref.cpt import Corpus, load_tokenizer, read_library
from ref.mtp import MTPConfig
from ref.network import release
from scaled import cpt, muon
from scaled.data.read import Prepared, Stream, is_prepared
from scaled.mtp import MTP, mtp_loss
from scaled.network.model import Transformer, load_balancing_loss, load_hf, save_hf
from scaled.optimise import CPU, Log, Ranks, make_card_facts, optimise, training_context
from scaled.runtime import sharding
from scaled.runtime.cut import cut
from scaled.runtime.launch import Watchdog
from scaled.runtime.mesh import current
from scaled.runtime.step_times import count_rows

__all__ = ["Full", "Rows", "prepare", "train"]

Rows = Callable[[int], tuple[np.ndarray, np.ndarray]]
"""Step → all rows of the step, the same on every rank: ids [rows, T] and doc [rows, T]."""


@dataclass(frozen=True)
class Full(Ranks):
    """Pretraining on a cluster; the defaults are the report's layout for continued pretraining (§6.1), with
    Qwen3-30B-A3B."""

    steps: int = 1000
    """Optimiser steps."""
    optimizer: Literal["muon", "adamw"] = "adamw"
    """Muon for matrices and AdamW for the rest, or AdamW for everything."""
    muon_lr: float = 2e-3
    """Learning rate of Muon."""
    adamw_lr: float = 2e-5
    """Learning rate of AdamW."""
    warmup: int = 20
    """Steps over which the learning rate rises."""
    decay: int = 200
    """Final steps over which the learning rate falls; at most half of all steps."""
    corpus: str | None = None
    """Folder of code, or one that `etude data` prepared; none means the source of the running Python's standard
    library."""
    rows: int = 64
    """Rows per step, on all ranks together."""
    depth: int = 3
    """Layers of multi-token prediction (mtp), one for each token after the next (K)."""
    perplexity_tokens: int = 65_536
    """Tokens of the held-out codebase to score at the end; 0 scores none."""

    def __post_init__(self):
        super().__post_init__()
        self.at_least(1, "steps", "rows", "depth")
        self.at_least(0, "muon_lr", "adamw_lr", "warmup", "decay")
        if self.perplexity_tokens:
            self.at_least(2, "perplexity_tokens")

    @classmethod
    def rehearsal(cls) -> "Full":
        """The same on CPUs, in a minute, from what a small run has left: short rows."""
        short: dict[str, Any] = {
            "checkpoint": "runs/small/checkpoints/mid-cpt",
            "rows": 16,
            "length": 128,
            "perplexity_tokens": 8192,
        }
        return cls(**CPU, **short, steps=40, warmup=1, decay=8, optimizer="muon", muon_lr=0.02, adamw_lr=3e-3)

    @property
    def schedule(self) -> "Full":
        return self

    def rate(self, step: int) -> float:
        """Share of the learning rates at a step: up, level, down."""
        return cpt.wsd(step, self.steps, self.warmup, min(self.decay, self.steps // 2))

    def optimizers(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        return muon.optimizers(model, self.muon_lr, self.adamw_lr, use_muon=self.optimizer == "muon")

    def check(self, dp: int) -> None:
        if self.rows % dp:
            raise ValueError(f"rows={self.rows} must be a multiple of dp = {dp}; see --set rows=…")


def train(technique: str, c: Full, folder: str | Path, log: Log = lambda *_, **__: None) -> dict[str, float]:
    """The complete training on this rank; `log(step, steps, **metrics)` is called on rank 0. Returns the final
    measurements."""
    folder, rank = Path(folder), dist.get_rank()
    assert c.checkpoint is not None, "no training starts from random weights"
    tokenizer, rows, heldout_corpus, data_description = data(c, folder, rank)
    with training_context(c, folder, rank):
        model = load_hf(c.checkpoint)
        extra = None
        if technique == "mtp":
            metrics, extra = distil(c, folder, model, rows, log)
        else:
            metrics = pretrain(c, folder, model, rows, log)
            if c.perplexity_tokens:
                with Watchdog(folder / "ranks", c.timeout):
                    nll = cpt.codebase_nll(
                        model, tokenizer, heldout_corpus, min(c.length, 4096), max_tokens=c.perplexity_tokens
                    )
                metrics |= {"codebase_perplexity": nll.perplexity, "bits_per_byte": nll.bits_per_byte}
        facts = {"data": f"{data_description}, without its held-out part"} | make_card_facts(technique, c, metrics)
        summary = (
            "A network with draft layers distilled from it."
            if extra
            else "A network after continued pretraining on code."
        )
        card = release.make_model_card(f"etude {technique}", summary, model.config, facts, drafts=bool(extra))
        extra_files = release.make_sidecar_files(c.checkpoint, model.config, card)
        save_hf(model, folder / "checkpoints" / "final", extra=extra, sidecar_files=extra_files)
        return metrics


def data(c: Full, folder: Path, rank: int) -> tuple[Any, Rows, Corpus, str]:
    """Tokenizer, the rows of every step, the held-out codebase, and the rows in words; packed by rank 0, the same on
    all."""
    if is_prepared(c.corpus):
        corpus, stream = open_prepared(c)
        description = f"{corpus.tokens:,} tokens of {corpus.folder.name} in rows of {c.length:,}"
        return (
            load_tokenizer(corpus.tokenizer),
            lambda step: stream.rows(step * c.rows, c.rows),
            corpus.read_heldout(),
            description,
        )
    data_folder = folder / "data"
    if rank == 0:
        prepare(c, folder)
    while not (data_folder / "doc.npy").exists():  # wait as long as rank 0 needs; a collective would time out
        time.sleep(0.1)
    packed_rows = np.load(data_folder / "rows.npy", mmap_mode="r"), np.load(data_folder / "doc.npy", mmap_mode="r")
    name = Path(c.corpus).name if c.corpus else "the standard library of Python"
    description = f"{len(packed_rows[0]):,} rows of {c.length:,} tokens from {name}"
    return (
        load_tokenizer(data_folder / "tokenizer.json"),
        lambda step: rows_of_step(c, *packed_rows, step),
        read(c)[1],
        description,
    )


def open_prepared(c: Full) -> tuple[Prepared, Stream]:
    """The prepared corpus and its rows. Raises RunError if its tokenizer is not the checkpoint's."""
    corpus, tokenizer_path = Prepared(str(c.corpus)), Path(str(c.checkpoint)) / "tokenizer.json"
    corpus.check(tokenizer_path)
    return (
        corpus,
        corpus.stream(c.length, c.seed, load_tokenizer(tokenizer_path).token_to_id(cpt.SPECIAL_TOKENS[0]) or 0),
    )


def record_prepared(c: Full, data_folder: Path) -> None:
    """Notes which data a run reads. Raises RunError, and writes nothing, if it is not the data that the run began with,
    and for a held-out codebase that cannot be scored."""
    corpus, stream = open_prepared(c)
    note = {"data.json": hash_file(corpus.folder / "data.json")}
    if (data_folder / "prepared.json").exists():
        if read_json(data_folder / "prepared.json") != note:
            raise RunError(f"corpus {corpus.folder} was prepared again since this run began; choose another --out")
        return
    if (
        c.perplexity_tokens
        and len(load_tokenizer(corpus.tokenizer).encode("\n".join(corpus.read_heldout().files.values())).ids) < 2
    ):
        raise RunError(
            f"{corpus_name(c)}: the held-out part is a single token, with no token before it; see "
            f"--set perplexity_tokens=0"
        )
    repeats = {name: n for name, n in stream.epochs(c.steps * c.rows).items() if n > 1}
    for name, n in repeats.items():
        print(f"corpus: source {name} is read {n:,.2f} times in {c.steps:,} steps", flush=True)
    data_folder.mkdir(parents=True, exist_ok=True)
    atomic_write(data_folder / "prepared.json", json.dumps(note) + "\n")


def read(c: Full) -> tuple[Corpus, Corpus]:
    """The corpus: training part and held-out part. Raises ValueError if nothing can be held out."""
    try:
        return cpt.hold_out_codebase(read_library() if c.corpus is None else cpt.read_corpus(c.corpus))[1:]
    except ValueError as error:
        raise ValueError(f"{corpus_name(c)}: {error}; choose another with --corpus") from None


def corpus_name(c: Full) -> str:
    return "corpus of the standard library" if c.corpus is None else f"corpus {c.corpus}"


def prepare(c: Full, folder: Path) -> None:
    """Writes tokenizer and packed rows to FOLDER/data, unless they exist; prints a line if the steps read the corpus
    more than once. Raises ValueError, and writes nothing, if the corpus has fewer tokens than a row, and RunError for a
    prepared corpus that does not fit."""
    data_folder = folder / "data"
    if is_prepared(c.corpus):
        return record_prepared(c, data_folder)
    if (data_folder / "doc.npy").exists():
        return
    training_corpus, heldout_corpus = read(c)
    files = list(training_corpus.files.values())
    tokenizer_path = Path(str(c.checkpoint)) / "tokenizer.json"
    tokenizer = load_tokenizer(tokenizer_path)
    end = tokenizer.token_to_id(cpt.SPECIAL_TOKENS[0]) or 0
    ids, doc = cpt.pack(([*encoding.ids, end] for encoding in tokenizer.encode_batch(files)), c.length)
    num_tokens, num_needed = int((doc >= 0).sum()), c.steps * c.rows * c.length
    if num_tokens < c.length:
        raise ValueError(
            f"{corpus_name(c)}: {num_tokens:,} training tokens are fewer than a row of {c.length:,}; choose another "
            "with --corpus, or see --set length=…"
        )
    if c.perplexity_tokens and len(tokenizer.encode("\n".join(heldout_corpus.files.values())).ids) < 2:
        raise ValueError(
            f"{corpus_name(c)}: the held-out part is a single token, with no token before it; choose another with "
            "--corpus, or see "
            "--set perplexity_tokens=0"
        )
    if num_tokens < num_needed:
        print(
            f"corpus: {c.steps:,} steps need {num_needed:,} tokens and it has {num_tokens:,} for training, so it is "
            f"read {num_needed / num_tokens:,.2f} times",
            flush=True,
        )
    data_folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(tokenizer_path, data_folder / "tokenizer.json")
    for name, array in (("rows.npy", ids), (".doc.npy", doc)):
        with open(data_folder / name, "wb") as file:
            # With a real file, numpy bypasses Python and does not report a full disk.
            np.save(SimpleNamespace(write=file.write), array)  # pyright: ignore[reportArgumentType]
    os.replace(data_folder / ".doc.npy", data_folder / "doc.npy")  # written last: if it exists, all files exist


def rows_of_step(c: Full, rows: np.ndarray, doc: np.ndarray, step: int) -> tuple[np.ndarray, np.ndarray]:
    """The packed rows of a step."""
    epoch, offset = divmod(step * c.rows, max(len(rows) // c.rows, 1) * c.rows)
    order = np.random.default_rng((c.seed, epoch)).permutation(len(rows))[offset : offset + c.rows]
    row_numbers = np.resize(order, c.rows)  # a corpus with fewer rows than a step is repeated
    return rows[row_numbers], doc[row_numbers]


def batch_of(rows: Rows, step: int, model: Transformer, is_trained: bool = True) -> tuple[Tensor, Tensor]:
    """This rank's rows and documents of a step, which are counted."""
    ids, documents = (torch.from_numpy(x.astype(np.int64)) for x in rows(step))
    count_rows(model, documents, is_trained)
    return cut(ids).to(current().device), cut(documents).to(current().device)


def pretrain(c: Full, folder: Path, model: Transformer, rows: Rows, log: Log) -> dict[str, float]:
    """Next-token training of every weight."""
    weight = model.config.router_aux_loss_coef

    def gradients(step: int) -> dict[str, float]:
        ids, documents = batch_of(rows, step, model)
        out = model(ids, doc=documents, logits=False)
        loss, count = cpt.next_token_loss(model, out.hidden, ids, documents)
        loss = loss / count
        metrics = {"loss": loss.item(), "tokens": count}
        if out.router_logits:
            loss = loss + weight * load_balancing_loss(out.router_logits, out.experts)
        loss.backward()
        return metrics

    return optimise(c, folder, "cpt", model, gradients, log)


def distil(
    c: Full, folder: Path, model: Transformer, rows: Rows, log: Log
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Trains multi-token-prediction layers on the frozen network; returns the metrics of the last step and the tensors
    of the layers."""
    layers = MTP(model.config, MTPConfig(depth=c.depth, intermediate_size=2 * model.config.hidden_size))

    def gradients(step: int) -> dict[str, float]:
        ids, documents = batch_of(rows, step, model, is_trained=False)
        with torch.no_grad():
            out = model(ids, doc=documents, logits=False)
        loss, count, draft_metrics = mtp_loss(layers, model, out, ids, documents)
        loss = loss / max(count, 1.0)
        loss.backward()
        return {"loss": loss.item(), "tokens": count, **draft_metrics}

    last_metrics = optimise(c, folder, "mtp", layers, gradients, log)
    # A few dense layers: small enough for one rank.
    return last_metrics, {f"mtp.{name}": x.cpu() for name, x in sharding.wholes(layers)}
