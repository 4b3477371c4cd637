"""The network beneath the techniques: a Qwen3 or Qwen3-MoE transformer, its gradients, its checkpoints.

| file | what |
|---|---|
| `model.py` | the transformer; read it first |
| `gradients.py` | five of its pieces with explicit gradients |
| `linear_logprob.py` | log-probabilities under the head, without storing the logits |
| `masters.py` | float32 master weights for bfloat16 computation |
| `bfloat16.py` | bfloat16 products for processors that lack them |
| `checkpoint.py`, `release.py` | Hugging Face folders: weights, and the files that go with them |
"""
