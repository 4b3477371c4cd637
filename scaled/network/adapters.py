"""Adapters of a network on many ranks, as a folder of the library PEFT beside the checkpoint into which they are merged
(`ref/lora.py`)."""

from pathlib import Path

import torch.distributed as dist

from ref import lora
from ref.lora import rank_of
from scaled.network.model import Transformer
from scaled.runtime.sharding import adapters

__all__ = ["adapter_folder", "save_adapter"]


def adapter_folder(checkpoint: Path) -> Path:
    """Where the adapter lies that was merged into a checkpoint: beside it."""
    return checkpoint.with_name(f"{checkpoint.name}-adapter")


def save_adapter(model: Transformer, checkpoint: Path, base: str | Path, parent: str) -> None:
    """Writes the adapters of a network, if it has any, beside the checkpoint into which `save_hf` merged them; all
    ranks call it together. `base` and `parent`: the network that they belong to, and what it is in words."""
    if not rank_of(model):
        return
    tensors = adapters(model)
    if not dist.is_initialized() or dist.get_rank() == 0:
        lora.save_adapter(
            adapter_folder(checkpoint), tensors, str(Path(base).resolve()), not model.config.num_experts, parent
        )
    if dist.is_initialized():
        dist.barrier()
