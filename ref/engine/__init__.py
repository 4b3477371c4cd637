"""The engine that runs the policy: many conversations in one batch, or one as fast as possible.

| file | what |
|---|---|
| `sampler.py` | many conversations side by side |
| `decoder.py` | one context, with speculative decoding |
| `conversation.py` | the loop of turns around the decoder |
| `layout.py` | the network's weights laid out for decoding |
"""
