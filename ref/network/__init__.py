"""The network beneath the techniques: a Qwen3 or Qwen3-MoE transformer, its gradients, its checkpoints.

| file | what |
|---|---|
| `model.py` | the transformer, to be read first |
| `gradients.py` | five of its pieces with their gradients written out |
| `linear_logprob.py` | log-probabilities under the head, without storing the logits |
| `masters.py` | float32 masters under bfloat16 computation |
| `bfloat16.py` | bfloat16 products where the processor has none |
| `checkpoint.py`, `release.py` | Hugging Face folders: weights, and what others need beside them |
"""
