"""Engines that run the policy: many contexts in one batch, or one as fast as possible.

| file | what |
|---|---|
| `sampler.py` | many contexts side by side |
| `continuous.py` | the same, each context at its own position: continuous batching, weights that change in flight |
| `decoder.py` | one context, with speculative decoding |
| `layout.py` | the network's weights laid out for decoding |
| `ragged.py` | the same for continuous batching |
"""
