"""The engine that runs the policy: many conversations in one batch, or one as fast as possible.

| file | what |
|---|---|
| `sampler.py` | many conversations side by side |
| `continuous.py` | the same, each conversation at a position of its own: continuous batching, and weights that change in flight |
| `decoder.py` | one context, with speculative decoding |
| `conversation.py` | the loop of turns around the decoder |
| `layout.py` | the network's weights laid out for decoding |
| `ragged.py` | the same for continuous batching |
"""
