"""The network beneath the techniques: a Qwen3 or Qwen3-MoE transformer, its gradients, its checkpoints.

| file | what |
|---|---|
| `model.py` | the transformer in plain PyTorch, to be read first |
| `fast.py` | the same transformer, computed with fewer operations: `ref.network.Transformer` |
| `gradients.py` | the five pieces of `fast.py` whose gradients are written out |
| `linear_logprob.py` | log-probability, entropy and KL under the head: the definition that the kernel is held to |
| `masters.py` | float32 masters under bfloat16 computation |
| `bfloat16.py` | bfloat16 products where the processor has none |
| `checkpoint.py`, `release.py` | Hugging Face folders: the weights, and what other programs need besides |
"""

from ref.network.fast import Transformer, load_hf
from ref.network.model import CheckpointError, Config, KVCache, Output, load_balancing_loss, load_extra, save_hf

__all__ = ["CheckpointError", "Config", "KVCache", "Output", "Transformer", "load_balancing_loss", "load_extra", "load_hf", "save_hf"]
