"""The network beneath the techniques: a transformer of the families Qwen3-MoE, Qwen3, Qwen2 and Llama, its gradients,
its checkpoints.

| file | what |
|---|---|
| `model.py` | the transformer in plain PyTorch, to be read first |
| `rope.py` | the frequencies of its rotary embedding, and how they are scaled for longer contexts |
| `fast.py` | the same transformer, computed with fewer operations: `ref.network.Transformer` |
| `documents.py` | attention inside the documents of packed rows, without a mask |
| `gradients.py` | the five pieces of `fast.py` whose gradients are written out |
| `linear_logprob.py` | log-probability, entropy and KL under the head: the definition that the kernel is held to |
| `masters.py` | float32 masters under bfloat16 computation |
| `bfloat16.py` | bfloat16 products where the processor has none |
| `checkpoint.py`, `release.py` | Hugging Face folders: the weights, and what other programs need besides |
"""

from ref.network.fast import Transformer, load_hf
from ref.network.model import CheckpointError, Config, KVCache, Output, load_balancing_loss, load_extra, save_hf
from ref.network.rope import RopeScaling

__all__ = [
    "CheckpointError",
    "Config",
    "KVCache",
    "Output",
    "RopeScaling",
    "Transformer",
    "load_balancing_loss",
    "load_extra",
    "load_hf",
    "save_hf",
]
