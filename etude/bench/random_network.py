"""Networks of random weights and true widths, made on their device: what `etude bench step` and `etude bench decode`
time."""

from __future__ import annotations

from dataclasses import replace

import torch

from etude.plan.step import network_of
from ref.network import Config
from scaled.network.model import Transformer
from scaled.plan import Hardware, chip_named

__all__ = ["config_with_layers", "hardware", "random_network"]


def config_with_layers(model: str, layers: int) -> Config:
    """The shape of `model` (as in `etude plan --model`) with so many layers. Raises RunError for an unknown name."""
    return replace(network_of(model), num_hidden_layers=layers)


def hardware() -> Hardware | None:
    """The row of `scaled.plan.HARDWARE` whose name is part of this GPU's; None for others and without one."""
    return chip_named(torch.cuda.get_device_name()) if torch.cuda.is_available() else None


@torch.no_grad()
def random_network(config: Config, dtype: torch.dtype, device: torch.device) -> Transformer:
    """A network of N(0, 0.02²) weights and norms of one: 3 billion weights in a second, because nothing is drawn on the
    CPU."""
    with torch.device("meta"):
        model = Transformer(config, init_weights=False)
    model = model.to(dtype).to_empty(device=device)
    generator = torch.Generator(device).manual_seed(0)
    for name, p in model.named_parameters():
        if p.ndim > 1:
            p.normal_(0.0, 0.02, generator=generator)
        else:
            p.fill_(0.0 if name.endswith(".bias") else 1.0)
    return model
