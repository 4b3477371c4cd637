"""What the tests of vLLM play, in processes that import this file. vLLM wants wider heads than
`tests/ref/test_continuous.py` has."""

from dataclasses import dataclass

import torch

from ref.engine.sampler import Sampler
from tests.mirror.async_parts import Tiny
from tests.ref.test_continuous import network

WIDE = {
    "vocab_size": 61,
    "hidden_size": 64,
    "head_dim": 32,
    "intermediate_size": 96,
    "moe_intermediate_size": 64,
    "initializer_range": 0.15,
}


def dense(seed=0):
    return network(seed, num_experts=0, **WIDE).bfloat16()


@dataclass(frozen=True)
class Mixture(Tiny):
    """A mixture of experts of a shape that vLLM computes."""

    def sampler(self):
        return Sampler(network(**WIDE).float(), torch.bfloat16)

    def learner(self):
        from scaled.async_rl.learner import Trained

        return Trained(super().learner().c, network(**WIDE).float().requires_grad_(True))
