"""The weights of a full run as a whole: the checkpoint that it starts from, the complete network on every rank, and the
perplexity of what each stage left."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from recipe.full.settings import FullRecipe
from recipe.small.data import heldout_codebase
from recipe.small.learner import language_of
from ref.network import Config
from ref.network import fast as ref
from ref.network.checkpoint import matched, open_safetensors
from ref.network.model import config_of
from scaled import cpt
from scaled.network.model import Transformer, load_hf
from scaled.runtime import sharding
from scaled.runtime.mesh import current

__all__ = ["check_files", "count_windows", "gather", "measure_codebase"]


def check_files(folder: Path) -> Config:
    """The shape of the network of a checkpoint. Raises CheckpointError if a tensor or a file of it is missing, or a
    file is cut off; reads no tensor."""
    network = config_of(folder)
    with torch.device("meta"):
        shapes = {name: tuple(x.shape) for name, x in ref.Transformer(network).state_dict().items()}
    for file in sorted({*matched(folder, shapes)[0].values()}):
        with open_safetensors(folder / file):  # which compares its size with that of its tensors
            pass
    return network


def gather(model: Transformer, dtype: torch.dtype) -> ref.Transformer:
    """The complete network on every rank."""
    with torch.device("meta"):
        network = ref.Transformer(model.config).to(dtype)
    network.to_empty(device=current().device)
    with torch.no_grad():
        for (_, x), parameter in zip(sharding.wholes(model), network.parameters(), strict=True):
            parameter.copy_(x)
    return network


def count_windows(c: FullRecipe) -> int:
    """Windows of the held-out codebase that all ranks read at once: as many tokens as a micro-batch of pretraining has,
    or one window for each dp rank."""
    t = c.training
    return current().group("dp").size * max(1, c.cluster.micro_rows * t.length // t.long_length)


def measure_codebase(c: FullRecipe, out: Path, beat: Callable[[int], None]) -> list[dict[str, Any]]:
    """Perplexity of the held-out codebase after each stage."""
    results = []
    for number, name in enumerate(("mid-cpt", "cpt", "sft", "final")):
        nll = cpt.codebase_nll(
            load_hf(out / "checkpoints" / name),
            language_of(out).tokenizer,
            heldout_codebase(out),
            c.training.long_length,
            batch=count_windows(c),
        )
        results.append({"checkpoint": name, "perplexity": nll.perplexity, "bits_per_byte": nll.bits_per_byte})
        beat(number)
    return results
