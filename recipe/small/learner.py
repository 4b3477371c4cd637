"""Training state of the recipe: master weights, optimisers, checkpoints, and one loop for all supervised phases."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kit.runs import Run, Stage
from kit.settings import RunError
from recipe.small.agent import Language
from recipe.small.conversations import batches
from recipe.small.data import heldout_codebase
from recipe.small.model_card import about
from recipe.small.settings import Recipe
from ref import cpt, sft
from ref.mtp import MTP, mtp_loss
from ref.muon import optimizers
from ref.network import Transformer, load_balancing_loss, load_extra, load_hf, release, save_hf
from ref.network.masters import Masters
from ref.rl import Step

__all__ = [
    "RATES",
    "Learner",
    "checkpoint",
    "language_of",
    "load_checkpoint",
    "packed_rows",
    "perplexity_look",
    "rows_of",
    "shown_rows",
    "train",
]

RATES: dict[str, Callable[[int, int], float]] = {
    "cpt": lambda step, steps: cpt.wsd(step, 10 * steps, steps // 10, 0),
    "mtp": lambda step, steps: cpt.wsd(step, steps, steps // 10, 0),
    "long": lambda step, steps: cpt.wsd(step, steps, 5, steps),
    "sft": lambda step, steps: cpt.wsd(step, steps, 5, steps // 2),
}
"""Share of the learning rates at a step of each supervised stage: a warm-up and the level part of one schedule, which
ends with the long-context phase; layers are distilled at the level rate; SFT has a schedule of its own."""


class Learner:
    """Trunk and MTP layers with their float32 master weights and optimisers, and the state for resuming a stage."""

    def __init__(self, config: Recipe, model: Transformer, mtp: MTP | None, muon_lr: float, adamw_lr: float):
        t = config.training
        torch.set_num_threads(t.threads)
        self.config, self.dtype = config, getattr(torch, t.dtype)
        self.trunk = Masters(model, self.dtype)
        self.mtp = Masters(mtp, self.dtype) if mtp is not None else None
        muon = t.optimizer == "muon"
        self.optimizers: list[torch.optim.Optimizer] = optimizers(self.trunk.masters, muon_lr, adamw_lr, use_muon=muon)
        self.mtp_optimizers = (
            optimizers(mtp, config.mtp.muon_lr, config.mtp.lr, use_muon=muon) if mtp is not None else []
        )
        self.rates = [[g["lr"] for g in o.param_groups] for o in self.all_optimizers]

    # `ref.rl.Trainer`

    @property
    def model(self) -> Transformer:
        return self.trunk.model

    @property
    def mtp_weight(self) -> float:
        return self.config.mtp.weight

    def drafts(self, step: int) -> MTP | None:
        """The layers train along every few steps (`mtp.rl_every`)."""
        return self.mtp.model if self.mtp and step % self.config.mtp.rl_every == 0 else None

    def apply(self, result: Step, rate: float) -> dict[str, float]:
        self.schedule(rate)
        norm = self.trunk.step(self.optimizers, gradients=result.gradients)
        if self.mtp is not None and result.mtp_gradients is not None:
            self.mtp.step(self.mtp_optimizers, gradients=result.mtp_gradients)
        return {"grad_norm": norm.item()}

    @property
    def all_optimizers(self) -> list[torch.optim.Optimizer]:
        return [*self.optimizers, *self.mtp_optimizers]

    def schedule(self, factor: float) -> None:
        """Scales every learning rate by `factor`."""
        for optimizer, rates in zip(self.all_optimizers, self.rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor

    def state(self, step: int, **extras) -> dict:
        return {
            "step": step,
            "trunk": self.trunk.masters.state_dict(),
            "optimizers": [o.state_dict() for o in self.all_optimizers],
            "mtp": self.mtp.masters.state_dict() if self.mtp else None,
            **extras,
        }

    def restore(self, state: dict) -> int:
        """Loads a saved state; returns its step."""
        self.trunk.masters.load_state_dict(state["trunk"])
        self.trunk.copy_down()
        if self.mtp:
            self.mtp.masters.load_state_dict(state["mtp"])
            self.mtp.copy_down()
        for optimizer, optimizer_state in zip(self.all_optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(optimizer_state)
        return state["step"]


def checkpoint(run: Run, name: str, trunk: Transformer, mtp: MTP | None, root: Path | None = None) -> list[Path]:
    """Writes checkpoints/NAME as a Hugging Face folder, with the tokenizer of the run folder `root` (by default this
    run's) and all that others need to read and sample it (`ref.network.release`); MTP layers go to mtp/. Returns its
    files except the model card, which users may edit."""
    root, path = root or run.root, run.path("checkpoints", name)
    extra = {f"mtp.{key}": x for key, x in mtp.state_dict().items()} if mtp is not None else None
    card = about(run, root, name, trunk.config, mtp is not None)
    save_hf(trunk, path, extra=extra, sidecar_files=release.make_sidecar_files(root / "data", trunk.config, card))
    return [file for file in sorted(path.rglob("*")) if file.is_file() and file.name != "README.md"]


def load_checkpoint(root: Path, config: Recipe, name: str, with_mtp: bool = True) -> tuple[Transformer, MTP | None]:
    """Trunk and, if the run folder `root` holds them, MTP layers, in float32."""
    path = root / "checkpoints" / name
    model = load_hf(path)
    layers = load_extra(path) if with_mtp else {}
    if not layers:
        return model, None
    mtp = MTP(model.config, config.mtp.layers)
    mtp.load_state_dict({key.removeprefix("mtp."): x for key, x in layers.items()})
    return model, mtp


def language_of(root: Path) -> Language:
    return Language(cpt.load_tokenizer(root / "data" / "tokenizer.json"))


def packed_rows(root: Path, phase: str) -> tuple[np.ndarray, np.ndarray]:
    """ids and doc [rows, T] of a phase in the run folder `root`. Raises RunError if they are invalid."""
    path = root / "data" / f"{phase}.npz"
    try:
        with np.load(path) as arrays:
            ids, doc = arrays["ids"], arrays["doc"]
        if not (ids.ndim == 2 and ids.shape == doc.shape and ids.dtype.kind in "iu" and doc.dtype.kind in "iu"):
            raise ValueError("ids and doc are not two integer arrays of the same shape")
    except Exception as error:  # Python objects in the array, or a damaged archive
        detail = " ".join(str(error).split())
        raise RunError(
            f"{path} does not hold packed rows ({detail}); delete {root / 'stages' / 'data.json'} to pack again"
        ) from None
    return ids, doc


def rows_of(root: Path, phase: str) -> tuple[tuple[int, int], Callable[[np.ndarray], tuple[Tensor, Tensor, None]]]:
    """[rows, T] of a phase in the run folder `root`, and a function from row indices to ids, doc and weight."""
    ids, doc = packed_rows(root, phase)
    return ids.shape, lambda rows: (
        torch.from_numpy(ids[rows].astype(np.int64)),
        torch.from_numpy(doc[rows].astype(np.int64)),
        None,
    )


def shown_rows(
    pieces: Sequence[tuple[Tensor, Tensor]], length: int, rows: int, seed: Sequence[int]
) -> tuple[int, Callable[[int], tuple[Tensor, Tensor, Tensor]]]:
    """Contexts for SFT, each with tokens [T] and a mask of the agent's own tokens [T], packed into rows of `length`
    tokens: steps per epoch, and batches (`recipe.small.conversations.batches`)."""
    return batches(sft.pack(pieces, length), rows, seed)


def train(
    stage: Stage,
    config: Recipe,
    learner: Learner,
    batches: Callable[[int], tuple[Tensor, Tensor, Tensor | None]],
    steps: int,
    schedule: Callable[[int], float],
    phase: str,
    trunk: bool = True,
    look: Callable[[int], dict] | None = None,
) -> None:
    """`steps` optimiser steps on `batches(step)` → ids, doc, weight [B, T]; trains the trunk, the MTP layers, or both.
    If both, the layers' loss reaches the trunk unless `mtp.detach_trunk` is set."""
    state = stage.restore()
    first = learner.restore(state) if state else 0
    seen_tokens = state["seen"] if state else 0
    model, joint = learner.trunk.model, trunk and learner.mtp is not None and not config.mtp.detach_trunk
    for step in range(first, steps):
        ids, doc, weight = batches(step)
        learner.schedule(schedule(step))
        with torch.set_grad_enabled(trunk):
            out = model(ids, doc=doc, logits=False)
        metrics: dict[str, float] = {}
        if trunk:
            loss, count = cpt.next_token_loss(model, out.hidden, ids, doc, weight)
            metrics["loss"] = loss.item() / count
            loss = loss / count
            if out.router_logits:
                loss = loss + config.model.router_aux_loss_coef * load_balancing_loss(out.router_logits, out.experts)
            if not joint:
                loss.backward()
        if learner.mtp is not None:
            distillation_loss, count, stats = mtp_loss(
                learner.mtp.model, model, out, ids, doc, weight, detach_trunk=not joint
            )
            draft_loss = config.mtp.weight * distillation_loss / count
            (loss + draft_loss if joint else draft_loss).backward()
            metrics |= {"mtp_loss": distillation_loss.item() / count, **stats}
            learner.mtp.step(learner.mtp_optimizers)
        if trunk:
            metrics["grad_norm"] = learner.trunk.step(learner.optimizers).item()
        seen_tokens += int((doc >= 0).sum())
        look_metrics = look(step + 1) if look else {}
        stage.log(step + 1, tokens=seen_tokens, phase=phase, lr=schedule(step), **metrics, **look_metrics)
        progress_metrics = {"loss": metrics.get("loss", metrics.get("mtp_loss"))} | {
            k: v for k, v in look_metrics.items() if k == "codebase_ppl"
        }
        stage.progress(step + 1, seen_tokens, **progress_metrics)
        if stage.due():
            stage.save(learner.state(step + 1, seen=seen_tokens), step + 1)


def perplexity_look(run: Run, config: Recipe, learner: Learner, steps: int) -> Callable[[int], dict]:
    """Perplexity on the beginning of the held-out codebase, every few steps and at the last."""
    language, codebase, t = language_of(run.root), heldout_codebase(run.root), config.training

    def measure_perplexity(step: int) -> dict:
        if step % t.perplexity_every and step != steps:
            return {}
        likelihood = cpt.codebase_nll(
            learner.trunk.model, language.tokenizer, codebase, t.long_length, max_tokens=t.perplexity_tokens
        )
        return {"codebase_ppl": likelihood.perplexity, "codebase_bpb": likelihood.bits_per_byte}

    return measure_perplexity
