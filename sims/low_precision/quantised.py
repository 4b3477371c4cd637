"""A network whose experts compute in low precision, and the resulting loss of accuracy.

The measuring half of `sims/low_precision/experiment.py`.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ref import cpt
from ref.formats import E4M3_MAX, e4m3_decode, e4m3_encode, power_of_two
from ref.network import Config, Transformer
from ref.network.fast import MoE
from ref.quant import (
    experts_swiglu,
    grouped_linear,
    mxfp8_dequantize,
    mxfp8_quantize,
    nvfp4_dequantize,
    nvfp4_quantize,
    rounded,
)

__all__ = ["LowPrecision", "division", "logps", "lower", "moved", "noise", "operands"]

KINDS = ("activations", "products", "weights", "gradients")
"""Operands of an expert's products: inputs of the first and the second product, weights of both, gradients at the
outputs of the second."""


class LowPrecision(MoE):
    """A mixture of experts whose products are quantised in both passes; their inputs and outputs have the dtype
    `dtype`."""

    def __init__(self, c: Config, forward: str, backward: str, dtype: torch.dtype):
        super().__init__(c)
        self.forms, self.dtype = (forward, backward), dtype

    def forward(self, x: Tensor, experts=None) -> tuple[Tensor, Tensor, Tensor]:
        logits, gates, experts = self.route(x, experts)
        rows, shares, gate_up, down = (
            tensor.to(self.dtype) for tensor in (x, gates, self.gate_up_proj, self.down_proj)
        )
        return experts_swiglu(rows, shares, gate_up, down, experts, *self.forms).to(x.dtype), logits, experts


class RecordingMoE(MoE):
    """A mixture of experts that records the operands of its products, sorted by expert."""

    def forward(self, x: Tensor, experts=None) -> tuple[Tensor, Tensor, Tensor]:
        logits, gates, experts = self.route(x, experts)
        order = experts.flatten().argsort(stable=True)
        self.token, self.counts = order // self.top_k, experts.flatten().bincount(minlength=logits.shape[1]).tolist()
        ends = torch.tensor(self.counts).cumsum(0)
        self.activations = x[self.token]
        gate, up = grouped_linear(self.activations, self.gate_up_proj, ends, "float32", "float32").chunk(2, -1)
        self.products = F.silu(gate) * up
        self.outputs = grouped_linear(self.products, self.down_proj, ends, "float32", "float32")
        self.outputs.retain_grad()
        y = self.outputs * gates.flatten()[order, None]
        return torch.zeros_like(x).index_add(0, self.token, y), logits, experts


def replace_experts(model: Transformer, make) -> Transformer:
    """The same model, with its mixtures of experts rebuilt on the same parameters."""
    for block in model.layers:
        mixture = make(model.config)
        mixture.gate, mixture.gate_up_proj, mixture.down_proj = (
            block.mlp.gate,
            block.mlp.gate_up_proj,
            block.mlp.down_proj,
        )
        block.mlp = mixture
    return model


def lower(model: Transformer, forward: str, backward: str, dtype: torch.dtype = torch.float32) -> Transformer:
    """The same model, with its experts' products in these formats in both passes, from operands of the dtype
    `dtype`."""
    return replace_experts(model, lambda c: LowPrecision(c, forward, backward, dtype))


def operands(model: Transformer, ids: Tensor, doc: Tensor) -> Iterator[tuple[str, list[Tensor], np.ndarray | None]]:
    """By layer and kind, the operands of a float32 model's products on the rows ids, doc [B, T]: one matrix per expert,
    with the summed axis last; and the row of text that each of their rows comes from (None for weights)."""
    model = replace_experts(model, RecordingMoE)
    out = model(ids, doc=doc, logits=False)
    loss, count = cpt.next_token_loss(model, out.hidden, ids, doc)
    (loss / count).backward()
    for block in model.layers:
        m = block.mlp
        assert isinstance(m, RecordingMoE) and m.outputs.grad is not None
        text = (m.token // ids.shape[1]).numpy()
        for kind, x in (("activations", m.activations), ("products", m.products), ("gradients", m.outputs.grad)):
            yield kind, list(x.detach().split(m.counts)), text
        for weights in (m.gate_up_proj, m.down_proj):
            yield "weights", list(weights.detach()), None


def noise(parts: list[Tensor], form: str) -> np.ndarray:
    """Σ x² and Σ (x̂ − x)² of every row of these matrices [rows, 2], with each matrix quantised separately."""
    rows = [
        torch.stack((x.double().square().sum(1), (rounded(x, form) - x).double().square().sum(1)), 1)
        for x in parts
        if len(x)
    ]
    return torch.cat(rows).numpy()


def division(parts: list[Tensor], form: str) -> tuple[int, int]:
    """How many numbers change when x / s is computed as x · fl(1/s) ("nvfp4"), or when the power-of-two scale is found
    with a product by fl(1/448) instead of a division ("mxfp8"), and how many numbers there are. All are rounded to
    bfloat16 first, like operands in training. Quotients then often lie on a tie, which an extra rounding breaks
    differently."""
    n_changed = 0
    for x in (part.bfloat16().float() for part in parts):
        if form == "nvfp4":
            ieee, fast = (
                nvfp4_dequantize(*nvfp4_quantize(x, division=mode), size=x.shape[1]) for mode in ("ieee", "fast")
            )
        else:
            codes, scales = mxfp8_quantize(x)
            ieee = mxfp8_dequantize(codes, scales)
            blocks = F.pad(x, (0, -x.shape[1] % 32)).unflatten(1, (-1, 32))
            fraction, exponent = torch.frexp(blocks.abs().amax(-1) / E4M3_MAX)
            scale = power_of_two((exponent - (fraction == 0.5).int()).clamp(-127, 127))[..., None]
            fast = (e4m3_decode(e4m3_encode(blocks / scale)) * scale).flatten(1)[:, : x.shape[1]]
        n_changed += int((ieee != fast).sum())
    return n_changed, sum(x.numel() for x in parts)


@torch.no_grad()
def logps(model: Transformer, ids: Tensor, doc: Tensor) -> Tensor:
    """log p of every token but the first, given the earlier tokens of its document [B, T − 1], in nats."""
    hidden = model(ids, doc=doc, logits=False).hidden[:, :-1]
    return model.logprob(hidden.flatten(0, 1), ids[:, 1:].flatten()).view(len(ids), -1)


def moved(
    model: Transformer, ids: Tensor, doc: Tensor, companions: int, generator: np.random.Generator
) -> dict[str, list[float]]:
    """The largest change of a log-prob per row, in nats: over the tokens before the last two if the last token is
    replaced ("later"; the log-prob of the last token itself changes, of course), and over all tokens if the row is read
    in a batch with this many others ("batch")."""
    changes: dict[str, list[float]] = {"later": [], "batch": []}
    vocabulary = model.config.vocab_size
    for row in range(len(ids)):
        row_ids, row_doc = ids[row : row + 1], doc[row : row + 1]
        own_logps, changed_ids = logps(model, row_ids, row_doc), row_ids.clone()
        changed_ids[0, -1] = (int(row_ids[0, -1]) + int(generator.integers(1, vocabulary))) % vocabulary
        changes["later"].append(float((logps(model, changed_ids, row_doc) - own_logps)[:, :-1].abs().max()))
        companion_rows = torch.from_numpy(generator.permutation(np.delete(np.arange(len(ids)), row))[:companions])
        batch_logps = logps(model, torch.cat((row_ids, ids[companion_rows])), torch.cat((row_doc, doc[companion_rows])))
        changes["batch"].append(float((batch_logps[:1] - own_logps).abs().max()))
    return changes
