"""LoRA: low-rank adapters of linear projections, the only weights that are trained.

Source: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models (arXiv:2106.09685), §4.1. No part of the Composer
reports, which train all weights. It is for machines on which gradients and moments of all weights do not fit: those
are held for adapters alone.

    y = W x + (α/r) · B A x        W is frozen; A starts random, B at zero, so training starts from the network itself
    W_merged = W + (α/r) · B A     what samplers and checkpoints get: the network as it was, without adapters

Which projections have adapters: q, k, v, o and, in a dense network, gate, up and down of every block. The experts of a
mixture and its router stay as they are: experts see few tokens each, and served adapters do not reach them.

Where this file departs from the paper
1. α is one constant, not a setting. At r = α the two matrices are not scaled; with the factor α/r, a good learning rate
   hardly depends on r, and is about ten times that of training all weights.
2. A ~ N(0, 1/n), n being its inputs, so A x is about as large as x. The paper does not say its variance.
3. No dropout, no adapters of embeddings, norms and biases.

The trap: adding B A to W for sampling and subtracting it again rounds W twice in each step, and it drifts. Here W is
never written. Merged weights are computed from W, A and B each time.

Run it
    etude run recipe --scale full --set sft.lora=16 --set rl.lora=16 …       `scaled/network/model.py`, on ranks
    ref.rl.train(c, ref.rl.Plain(adapt(network, c.lora), c.lr), …)           in Python, on one

An adapter is stored in the format of the library PEFT, which loads it on top of its base (`save_adapter`).

Glossary
    symbol   here        shape
    r        `rank`
    α        `ALPHA`
    α/r      `scale`
    W        `weight`    [m, n]
    A        `lora_A`    [r, n]
    B        `lora_B`    [m, r]
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from ref.network.checkpoint import CheckpointError, disk_name, read_file, read_json
from ref.network.model import Config, Transformer

__all__ = [
    "ALPHA",
    "AdaptedLinear",
    "adapt",
    "adapters",
    "count_parameters",
    "draw_adapters",
    "is_adapter",
    "load_adapter",
    "merge_weight",
    "merged",
    "rank_of",
    "save_adapter",
    "weights",
]

ALPHA = 32
"""α: with it B A is scaled by α/r."""
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
"""The projections that have adapters, the latter in dense networks only."""


def merge_weight(weight: Tensor, A: Tensor, B: Tensor, scale: float) -> Tensor:
    """W + (α/r) · B A, computed in float32 or wider, in the dtype of W."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    return torch.addmm(weight.to(wide), B.to(wide), A.to(wide), alpha=scale).to(weight.dtype)


class AdaptedLinear(nn.Linear):
    """A linear projection with frozen weight and bias, and an adapter. The adapter's values are not set here."""

    def __init__(self, linear: nn.Linear, rank: int):
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.rank, self.scale = rank, ALPHA / rank
        self.weight, self.bias = linear.weight.requires_grad_(False), linear.bias
        if self.bias is not None:
            self.bias.requires_grad_(False)
        self.lora_A = nn.Parameter(self.weight.new_empty(rank, self.in_features))
        self.lora_B = nn.Parameter(self.weight.new_empty(self.out_features, rank))

    def forward(self, input: Tensor) -> Tensor:
        # W x + (α/r) · B A x
        return F.linear(input, self.weight, self.bias) + self.scale * F.linear(
            F.linear(input, self.lora_A), self.lora_B
        )


N = TypeVar("N", bound=Transformer)


def adapt(model: N, rank: int, seed: int = 0) -> N:
    """Freezes the network and gives it adapters of this rank, in place; 0: leaves it as it is. `seed`: of A."""
    replace_projections(model, rank)
    with torch.no_grad():
        parameters = dict(model.named_parameters())
        for name, values in draw_adapters(model, seed):
            parameters[name].copy_(values)
    return model


def replace_projections(model: Transformer, rank: int) -> None:
    """`adapt`, without values in the adapters."""
    if not rank:
        return
    model.requires_grad_(False)
    for block in model.layers:
        for part, names in ((block.self_attn, ATTENTION), (block.mlp, MLP)):
            for name in names:
                linear = getattr(part, name, None)
                if isinstance(linear, nn.Linear):  # those of experts are not
                    setattr(part, name, AdaptedLinear(linear, rank))


def draw_adapters(model: nn.Module, seed: int) -> Iterator[tuple[str, Tensor]]:
    """(name, values) of the adapters at the beginning, in float32: A ~ N(0, 1/n), B = 0. They are drawn on the CPU, so
    they are the same on every device and rank."""
    generator = torch.Generator().manual_seed(seed)
    for name, layer in projections(model):
        # A ~ N(0, 1/n)
        A = torch.randn(layer.rank, layer.in_features, generator=generator) * layer.in_features**-0.5
        yield f"{name}.lora_A", A
        yield f"{name}.lora_B", torch.zeros(layer.out_features, layer.rank)


def projections(model: nn.Module) -> Iterator[tuple[str, AdaptedLinear]]:
    """(name, layer) of every projection with an adapter."""
    for name, layer in model.named_modules():
        if isinstance(layer, AdaptedLinear):
            yield name, layer


def is_adapter(name: str) -> bool:
    """Whether a parameter is one of an adapter."""
    return name.rpartition(".")[2] in ("lora_A", "lora_B")


def rank_of(model: nn.Module) -> int:
    """r; 0 for a network without adapters."""
    return next((layer.rank for _, layer in projections(model)), 0)


def count_parameters(config: Config, rank: int) -> int:
    """Parameters of the adapters of a network of this shape."""
    with torch.device("meta"):
        model = Transformer(config)
        replace_projections(model, rank)
    return sum(p.numel() for p in adapters(model).values())


def adapters(model: nn.Module) -> dict[str, Tensor]:
    """The adapters by name."""
    return {name: p.detach() for name, p in model.named_parameters() if is_adapter(name)}


@torch.no_grad()
def weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, weight) of the network without adapters, in the order of its parameters: W + (α/r) · B A where there is an
    adapter, computed when it is asked for, and the parameter itself elsewhere."""
    layers = {f"{name}.weight": layer for name, layer in projections(model)}
    for name, p in model.named_parameters():
        if not is_adapter(name):
            layer = layers.get(name)
            yield name, p.detach() if layer is None else merge_weight(p, layer.lora_A, layer.lora_B, layer.scale)


def merged(model: N) -> N:
    """A network without adapters that computes the same, and shares the weights that have none; the network itself if
    it has no adapters."""
    if not rank_of(model):
        return model
    with torch.device("meta"):
        plain = type(model)(model.config)
    plain.load_state_dict(dict(weights(model)), assign=True)
    return plain


# ------------------------------------------------------------------------------------------------ PEFT's format

PREFIX = "base_model.model."
"""What PEFT puts before the name of a module of the base."""


def save_adapter(
    folder: str | Path, tensors: Mapping[str, Tensor], base: str, dense: bool, parent: str = "the base"
) -> None:
    """Writes adapters, by their names in the network, as PEFT would: adapter_config.json and adapter_model.safetensors,
    and a README.md that names the base. `base`: folder or name of the network that they belong to, and `parent` what
    that is, in words. `dense`: whether the network has no experts."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    rank = next(len(tensor) for name, tensor in tensors.items() if name.endswith("lora_A"))
    record = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "target_modules": [*ATTENTION, *(MLP if dense else ())],
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": False,
    }
    stored = {f"{PREFIX}{disk_name(name)}.weight": tensor.contiguous().cpu() for name, tensor in tensors.items()}
    save_file(stored, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(record, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(
        f"---\nlibrary_name: peft\n---\n\nA LoRA adapter of rank {rank} for `{base}`, which is {parent}. "
        f"Do not load it on top of another network: the folder beside this one already has it merged into its "
        f"weights.\n",
        encoding="utf-8",
    )


def load_adapter(model: N, folder: str | Path) -> N:
    """Gives the network, which must be the adapter's base, an adapter that `save_adapter` wrote. Raises CheckpointError
    if it does not fit."""
    folder = Path(folder)
    record, path = read_json(folder / "adapter_config.json"), folder / "adapter_model.safetensors"
    rank, alpha = record.get("r"), record.get("lora_alpha")
    if type(rank) is not int or rank < 1 or alpha != ALPHA:
        raise CheckpointError(
            f"{folder / 'adapter_config.json'}: r must be a positive whole number and lora_alpha {ALPHA}; "
            f"got {rank!r} and {alpha!r}"
        )
    replace_projections(model, rank)
    targets = adapters(model)
    stored_names = [f"{PREFIX}{disk_name(name)}.weight" for name in targets]
    for (name, target), (_, tensor) in zip(targets.items(), read_file(path, stored_names), strict=True):
        if tensor.shape != target.shape:
            raise CheckpointError(f"{path}: {name} must have the shape {list(target.shape)}, got {list(tensor.shape)}")
        target.copy_(tensor)
    return model
