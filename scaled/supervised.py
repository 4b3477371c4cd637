"""All supervised phases of the recipe on many ranks, in one loop: continued pretraining, distillation of the draft
layers, the long-context phase and SFT, which train both together (Composer 2 technical report, §3.1). On one rank,
`recipe/small/learner.py` trains the same phases.

    loss = next-token loss + weight · balance loss [+ weight · distillation loss]

The next-token loss is the mean over all scored tokens of the step, on all ranks and in all micro-batches: the number of
tokens is counted before the first forward pass. The balance loss is computed within a micro-batch, of all ranks, and
averaged over the micro-batches."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from scaled import cpt, muon
from scaled.mtp import MTP, mtp_loss
from scaled.network.model import Transformer, load_balancing_loss
from scaled.optimise import Log, Ranks, optimise
from scaled.runtime.cut import cut
from scaled.runtime.mesh import current
from scaled.runtime.step_times import count_rows

__all__ = ["Batches", "Phase", "counts", "train"]

Batches = Callable[[int], tuple[Tensor, Tensor, Tensor | None]]
"""Step → all rows of the step, the same on every rank: ids [B, T], doc [B, T] (−1 for padding), and the weights of the
tokens' losses [B, T], or None for 1."""


@dataclass(frozen=True)
class Phase(Ranks):
    """A supervised phase."""

    name: str = "cpt"
    """Name of the file of metrics."""
    steps: int = 1
    """Optimiser steps."""
    factor: Callable[[int, int], float] = lambda step, steps: 1.0
    """Share of the learning rates at a step, of so many steps."""
    micro_rows: int = 1
    """Rows per dp rank in one forward pass."""
    muon: bool = True
    """Muon for matrices and AdamW for the rest, or AdamW for everything."""
    muon_lr: float = 0.02
    """Learning rate of Muon."""
    adamw_lr: float = 3e-3
    """Learning rate of AdamW."""
    layers_muon_lr: float = 0.02
    """Learning rate of Muon for the draft layers."""
    layers_adamw_lr: float = 3e-3
    """Learning rate of AdamW for the draft layers."""
    layers_weight: float = 1.0
    """Weight of the distillation loss."""
    detach_trunk: bool = True
    """Whether the distillation loss leaves the trunk alone."""

    @property
    def schedule(self) -> "Phase":
        return self

    def rate(self, step: int) -> float:
        """Share of the learning rates at a step."""
        return self.factor(step, self.steps)

    def optimizers(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        rates = {"trunk": (self.muon_lr, self.adamw_lr), "layers": (self.layers_muon_lr, self.layers_adamw_lr)}
        return [
            optimizer
            for name, part in model.named_children()
            for optimizer in muon.optimizers(part, *rates[name], use_muon=self.muon)
        ]

    def check(self, dp: int) -> None:
        """The number of rows is the caller's."""


def train(
    c: Phase,
    folder: Path,
    model: Transformer,
    layers: MTP | None,
    batches: Batches,
    log: Log = lambda *_, **__: None,
    trunk: bool = True,
    look: Callable[[int], dict[str, float]] = lambda step: {},
) -> dict[str, float]:
    """Trains the trunk, the draft layers, or both for `c.steps` steps, and returns the metrics of the last step; files
    and `log` as `scaled.optimise.optimise`. Raises ValueError if the rows of a step cannot be split."""
    joint, aux = trunk and layers is not None and not c.detach_trunk, model.config.router_aux_loss_coef

    def gradients(step: int) -> dict[str, float]:
        all_rows = batches(step)
        count_rows(model, all_rows[1], is_trained=trunk)
        token_weight, draft_weight = counts(all_rows[1], all_rows[2], layers.mtp.depth if layers is not None else 0)
        ids, doc, weight = (None if x is None else cut(x).to(current().device) for x in all_rows)
        assert ids is not None and doc is not None
        parts, metrics = -(-len(ids) // c.micro_rows), {"tokens": float((all_rows[1] >= 0).sum())}
        for first in range(0, len(ids), c.micro_rows):
            row_slice = slice(first, first + c.micro_rows)
            batch = ids[row_slice], doc[row_slice], None if weight is None else weight[row_slice]
            with torch.set_grad_enabled(trunk):
                out = model(batch[0], doc=batch[1], logits=False)
            losses = []
            if trunk:
                nll, _ = cpt.next_token_loss(model, out.hidden, *batch)
                metrics["loss"] = metrics.get("loss", 0.0) + nll.item() / token_weight
                losses.append(nll / token_weight)
                if out.router_logits:
                    losses.append(aux * load_balancing_loss(out.router_logits, out.experts) / parts)
            if layers is not None:
                draft_loss, _, draft_metrics = mtp_loss(layers, model, out, *batch, detach_trunk=not joint)
                losses.append(c.layers_weight * draft_loss / draft_weight)
                metrics["mtp_loss"] = metrics.get("mtp_loss", 0.0) + draft_loss.item() / draft_weight
                metrics |= {name: metrics.get(name, 0.0) + value / parts for name, value in draft_metrics.items()}
            # loss = next-token loss + weight · balance loss [+ weight · distillation loss].
            torch.stack(losses).sum().backward()  # once: a backward pass reshards the head, which both losses read
        return metrics

    modules = ({"trunk": model} if trunk else {}) | ({} if layers is None else {"layers": layers})
    return optimise(c, folder, c.name, nn.ModuleDict(modules), gradients, log, look)


def counts(doc: Tensor, weight: Tensor | None, depth: int) -> tuple[float, float]:
    """The denominators of `next_token_loss` and `mtp_loss` for complete rows [B, T]: weights of the scored tokens, and
    the mean over `depth` draft layers of the weights that each is compared with; at least tiny, so that a step without
    a scored token has a loss of zero."""
    w = torch.zeros(doc.shape, dtype=torch.float64)
    w[:, :-1] = (doc[:, 1:] == doc[:, :-1]) & (doc[:, 1:] >= 0)  # the main head at j predicts token j + 1
    if weight is not None:
        w[:, :-1] *= weight[:, 1:].double()
    layers = [(w[:, k:] * (doc[:, k:] == doc[:, :-k])).sum().item() for k in range(1, depth + 1)]
    return w.sum().item() or 1e-9, sum(layers) / max(depth, 1) or 1e-9
