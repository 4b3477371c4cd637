"""Trainings on many ranks, from a folder of code to a Hugging Face folder: what `etude run TECHNIQUE --scale full` plays.

    cpt     continued pretraining: next-token loss and balance loss
    mtp     layers distilled atop a checkpoint that stays as it is

Inside torchrun, on every rank:

    with world(backend, timeout), mesh(dp, cp, ep):
        train("cpt", settings, folder, log)

FOLDER/data/        tokenizer.json, rows.npy and doc.npy: packed once, by rank 0, and mapped into memory by all
FOLDER/state/       checkpoints of the training (`runtime/checkpoint.py`), the last two
FOLDER/metrics/cpt.jsonl    one line a step; what a training that begins again repeats is cut off first, so that no step stands twice
FOLDER/ranks/       process numbers, and what ranks say when one hangs
FOLDER/checkpoints/final    the network, in the end

A step's rows are drawn by (seed, epoch) alone, whatever the layout. A group that died goes on from its last checkpoint and repeats the
same losses, bit for bit on the same layout.
"""

import json
import os
import sysconfig
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from tokenizers import Tokenizer
from torch import Tensor, nn

from ref.cpt import Corpus
from ref.model import Config
from ref.mtp import MTPConfig
from scaled import checkpoint, cpt, muon
from scaled import model as network
from scaled.model import Transformer, load_balancing_loss, load_hf, save_hf
from scaled.mtp import MTP, mtp_loss
from scaled.runtime import sharding
from scaled.runtime.checkpoint import Checkpoints
from scaled.runtime.cut import cut
from scaled.runtime.launch import Watch
from scaled.runtime.mesh import current

__all__ = ["Full", "Rehearsal", "train"]

Log = Callable[..., None]


@dataclass(frozen=True)
class Full:
    """A training on a cluster; the defaults are the report's layout for continued pretraining of Qwen3-30B-A3B (§6.1)."""

    preset: Literal["qwen3_30b_a3b", "tiny"] = "qwen3_30b_a3b"
    """Shape of the network where no checkpoint is given."""
    checkpoint: str | None = None
    """Hugging Face folder to begin from: weights and tokenizer.json."""
    corpus: str | None = None
    """Folder of code; none: the source of the running Python's standard library."""
    vocab_size: int = 32_768
    """Tokens of the byte-level BPE, where no checkpoint brings one."""
    steps: int = 1000
    """Optimiser steps."""
    rows: int = 64
    """Rows of a step, on all ranks together."""
    length: int = 32_768
    """Tokens of a row."""
    cp: int = 2
    """Ranks that share a row's tokens."""
    ep: int = 8
    """Ranks that share a layer's experts."""
    optimizer: Literal["muon", "adamw"] = "adamw"
    """Muon for matrices with AdamW for the rest, or AdamW alone."""
    muon_lr: float = 2e-3
    """Learning rate of Muon."""
    adamw_lr: float = 2e-5
    """Learning rate of AdamW."""
    warmup: float = 0.02
    """Share of the steps over which learning rates rise."""
    decay: float = 0.2
    """Share of the steps, at the end, over which they fall."""
    layers: int = 3
    """Multi-token-prediction layers (mtp)."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """What is computed in; weights, gradients' sums and moments are float32."""
    rematerialise: bool = True
    """Compute a block's activations again in the backward pass instead of keeping them."""
    dispatch: Literal["model", "fp8"] = "model"
    """What tokens travel to their experts in: the dtype above, or E4M3 with a scale per 128 values."""
    checkpoint_every: int = 50
    """Steps between two checkpoints."""
    perplexity_tokens: int = 65_536
    """Tokens of the held-out codebase that are scored in the end; 0 scores none."""
    timeout: float = 900.0
    """Seconds that a step may take before the rank that hangs is named."""
    restarts: int = 3
    """How often a group of which a rank died is started again."""
    seed: int = 0
    """Seed of weights and order."""

    def __post_init__(self):
        for name in ("steps", "rows", "length", "cp", "ep", "layers", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.length % (2 * self.cp):
            raise ValueError(f"length must be a multiple of 2 · cp = {2 * self.cp}, got {self.length}")

    def shape(self, vocab: int) -> Config:
        """The network of the preset."""
        if self.preset == "tiny":
            return Config.tiny(vocab)
        return Config.qwen3_30b_a3b()


@dataclass(frozen=True)
class Rehearsal(Full):
    """The same on CPUs, in a minute: the tiny network, short rows."""

    preset: Literal["qwen3_30b_a3b", "tiny"] = "tiny"
    """Shape of the network where no checkpoint is given."""
    vocab_size: int = 1024
    """Tokens of the byte-level BPE, where no checkpoint brings one."""
    steps: int = 40
    """Optimiser steps."""
    rows: int = 16
    """Rows of a step, on all ranks together."""
    length: int = 128
    """Tokens of a row."""
    cp: int = 1
    """Ranks that share a row's tokens."""
    ep: int = 1
    """Ranks that share a layer's experts."""
    dtype: Literal["bfloat16", "float32"] = "float32"
    """What is computed in; weights, gradients' sums and moments are float32."""
    rematerialise: bool = False
    """Compute a block's activations again in the backward pass instead of keeping them."""
    optimizer: Literal["muon", "adamw"] = "muon"
    """Muon for matrices with AdamW for the rest, or AdamW alone."""
    muon_lr: float = 0.02
    """Learning rate of Muon."""
    adamw_lr: float = 3e-3
    """Learning rate of AdamW."""
    checkpoint_every: int = 10
    """Steps between two checkpoints."""
    perplexity_tokens: int = 8192
    """Tokens of the held-out codebase that are scored in the end; 0 scores none."""
    timeout: float = 120.0
    """Seconds that a step may take before the rank that hangs is named."""


def train(technique: str, c: Full, folder: str | Path, log: Log = lambda *_, **__: None) -> dict[str, float]:
    """The whole training on this rank; `log(step, steps, **metrics)` is called on rank 0. Returns what was measured in the end."""
    folder, rank = Path(folder), dist.get_rank()
    tokenizer, rows, doc, held = data(c, folder, rank)
    network.REMATERIALISE, network.DISPATCH = c.rematerialise, c.dispatch
    sharding.COMPUTE = torch.bfloat16 if c.dtype == "bfloat16" else None
    torch.manual_seed(c.seed)
    model = load_hf(c.checkpoint) if c.checkpoint else Transformer(c.shape(tokenizer.get_vocab_size()))
    (folder / "ranks").mkdir(parents=True, exist_ok=True)
    (folder / "ranks" / f"{rank}.pid").write_text(str(os.getpid()))
    if technique == "mtp":
        found = distil(c, folder, model, rows, doc, log, rank)
    else:
        found = pretrain(c, folder, model, rows, doc, log, rank)
        if c.perplexity_tokens:
            nll = cpt.codebase_nll(model, tokenizer, held, min(c.length, 4096), max_tokens=c.perplexity_tokens)
            found |= {"codebase_perplexity": nll.perplexity, "bits_per_byte": nll.bits_per_byte}
    if rank == 0 and (folder / "checkpoints" / "final").is_dir():
        tokenizer.save(str(folder / "checkpoints" / "final" / "tokenizer.json"))
    return found


def data(c: Full, folder: Path, rank: int) -> tuple[Tokenizer, np.ndarray, np.ndarray, Corpus]:
    """Tokenizer, packed rows and their documents, and the held-out codebase; packed by rank 0, the same on all."""
    if c.corpus is None:
        skip = ("site-packages", "test", "tests", "idlelib", "lib2to3")
        corpus = cpt.read_corpus(sysconfig.get_paths()["stdlib"], (".py",), skip)
    else:
        corpus = cpt.read_corpus(c.corpus)
    _, learn, held = cpt.hold_out_codebase(corpus)
    at = folder / "data"
    if rank == 0 and not (at / "doc.npy").exists():
        at.mkdir(parents=True, exist_ok=True)
        if c.checkpoint:
            tokenizer = Tokenizer.from_file(str(Path(c.checkpoint) / "tokenizer.json"))
        else:
            tokenizer = cpt.train_tokenizer(learn.files.values(), c.vocab_size)
        end = tokenizer.token_to_id(cpt.SPECIAL_TOKENS[0]) or 0
        ids, doc = cpt.pack(([*one.ids, end] for one in tokenizer.encode_batch(list(learn.files.values()))), c.length)
        tokenizer.save(str(at / "tokenizer.json"))
        np.save(at / "rows.npy", ids)
        np.save(at / ".doc.npy", doc)
        os.replace(at / ".doc.npy", at / "doc.npy")  # the last, so that who finds it finds all
    dist.barrier()
    tokenizer = Tokenizer.from_file(str(at / "tokenizer.json"))
    return tokenizer, np.load(at / "rows.npy", mmap_mode="r"), np.load(at / "doc.npy", mmap_mode="r"), held


def batch_of(c: Full, rows: np.ndarray, doc: np.ndarray, step: int) -> tuple[Tensor, Tensor]:
    """This rank's rows and documents of a step."""
    epoch, at = divmod(step * c.rows, max(len(rows) // c.rows, 1) * c.rows)
    order = np.random.default_rng((c.seed, epoch)).permutation(len(rows))[at : at + c.rows]
    some = np.resize(order, c.rows)  # a corpus of fewer rows than a step has is repeated
    device = current().device
    return tuple(cut(torch.from_numpy(x[some].astype(np.int64))).to(device) for x in (rows, doc))


def pretrain(c: Full, folder: Path, model: Transformer, rows: np.ndarray, doc: np.ndarray, log: Log, rank: int) -> dict[str, float]:
    """Next-token training of every weight."""
    weight = model.config.router_aux_loss_coef

    def loss_of(step: int) -> tuple[Tensor, dict[str, float]]:
        ids, documents = batch_of(c, rows, doc, step)
        out = model(ids, doc=documents, logits=False)
        loss, count = cpt.next_token_loss(model, out.hidden, ids, documents)
        loss = loss / count
        shown = {"loss": loss.item(), "tokens": count}
        if out.router_logits:
            loss = loss + weight * load_balancing_loss(out.router_logits, out.experts)
        return loss, shown

    last = steps_of(c, folder, "cpt", model, loss_of, log, rank)
    save_hf(model, folder / "checkpoints" / "final")
    return last


def distil(c: Full, folder: Path, model: Transformer, rows: np.ndarray, doc: np.ndarray, log: Log, rank: int) -> dict[str, float]:
    """Multi-token-prediction layers atop the network as it is."""
    layers = MTP(model.config, MTPConfig(depth=c.layers, intermediate_size=2 * model.config.hidden_size))

    def loss_of(step: int) -> tuple[Tensor, dict[str, float]]:
        ids, documents = batch_of(c, rows, doc, step)
        with torch.no_grad():
            out = model(ids, doc=documents, logits=False)
        loss, count, figures = mtp_loss(layers, model, out, ids, documents)
        loss = loss / max(count, 1.0)
        return loss, {"loss": loss.item(), "tokens": count, **figures}

    last = steps_of(c, folder, "mtp", layers, loss_of, log, rank)
    extra = {f"mtp.{name}": x.cpu() for name, x in sharding.wholes(layers)}  # a few dense layers: small enough for one rank
    save_hf(model, folder / "checkpoints" / "final", extra=extra)
    return last


def steps_of(
    c: Full, folder: Path, name: str, model: nn.Module, loss_of: Callable[[int], tuple[Tensor, dict[str, float]]], log: Log, rank: int
) -> dict[str, float]:
    """The optimiser's loop: checkpoints, metrics, and an eye on who hangs. Returns the last step's metrics."""
    optimizers = muon.optimizers(model, c.muon_lr, c.adamw_lr, use_muon=c.optimizer == "muon")
    base = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    shelf, first = Checkpoints(folder / "state"), 0
    if shelf.steps():
        checkpoint.begun(model, optimizers, shelf.names())
        first = shelf.load(checkpoint.state(model, optimizers))["step"]
    metrics, shown = folder / "metrics" / f"{name}.jsonl", {}
    if rank == 0:
        keep_lines(metrics, first)
    last = [json.loads(line) for line in metrics.read_text().splitlines()][-1:] if rank == 0 else []
    with Watch(folder / "ranks", c.timeout) as watch:
        for step in range(first, c.steps):
            factor = cpt.wsd(step, c.steps, round(c.warmup * c.steps), round(c.decay * c.steps))
            for optimizer, rates in zip(optimizers, base, strict=True):
                for group, lr in zip(optimizer.param_groups, rates, strict=True):
                    group["lr"] = lr * factor
            loss, shown = loss_of(step)
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            if rank == 0:
                with open(metrics, "a") as file:
                    file.write(json.dumps({"step": step + 1, **shown}) + "\n")
                log(step + 1, c.steps, **shown)
            if (step + 1) % c.checkpoint_every == 0 or step + 1 == c.steps:
                shelf.save(step + 1, checkpoint.state(model, optimizers))
            watch.beat(step + 1)
        shelf.finish()
    return shown or {name: value for name, value in (last[0] if last else {}).items() if name != "step"}


def keep_lines(path: Path, step: int) -> None:
    """Cuts a metrics file back to the lines up to a step."""
    lines: Iterable[str] = path.read_text().splitlines() if path.exists() else []
    kept = []
    for line in lines:
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except ValueError:  # a line that a killed process left half written
            break
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}")
    temporary.write_text("".join(kept))
    os.replace(temporary, path)
