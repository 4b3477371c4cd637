"""Networks of many shapes, for property tests."""

import torch
from hypothesis import strategies as st

from ref.network import Config, RopeScaling

SCALINGS = {
    "default": RopeScaling(),
    "linear": RopeScaling("linear", factor=4.0),
    "llama3": RopeScaling("llama3", factor=8.0, original_max_position_embeddings=16),
    "yarn": RopeScaling("yarn", factor=4.0, original_max_position_embeddings=16),
    "other yarn": RopeScaling("yarn", 2.5, 24, beta_fast=4.0, beta_slow=0.5, truncate=False, attention_factor=1.3),
}
"""Every kind of rotary embedding, for contexts of few tokens."""


@st.composite
def configs(draw, moe=None):
    kv_heads, experts = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([0, 1, 3, 4, 5]))
    if moe is not None:
        experts = draw(st.sampled_from([3, 4, 5])) if moe else 0
    qk_norm, bias = (True, False) if experts else draw(st.sampled_from([(True, False), (False, True), (False, False)]))
    heads = kv_heads * draw(st.sampled_from([1, 2, 4]))
    return Config(
        vocab_size=draw(st.sampled_from([11, 37, 64])),
        hidden_size=draw(st.sampled_from([9, 16, 33] if qk_norm or bias else [2 * heads, 24])),
        num_hidden_layers=draw(st.sampled_from([1, 2])),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        qk_norm=qk_norm,
        attention_bias=bias,
        rope_scaling=draw(st.sampled_from(list(SCALINGS.values()))),
        head_dim=draw(st.sampled_from([4, 6, 8])),
        intermediate_size=draw(st.sampled_from([5, 16])),
        num_experts=experts,
        num_experts_per_tok=draw(st.integers(1, experts)) if experts else 2,
        moe_intermediate_size=draw(st.sampled_from([1, 5, 8])) if experts else 192,
        norm_topk_prob=draw(st.booleans()) if experts else True,
        rope_theta=draw(st.sampled_from([100.0, 10_000.0, 1e6])),
        rms_norm_eps=draw(st.sampled_from([1e-6, 1e-3])),
        tie_word_embeddings=draw(st.booleans()),
        max_position_embeddings=64,
    )


def scramble(network: torch.nn.Module) -> torch.nn.Module:
    """Weights of the size training gives them, so that a missing norm, gate or rotation shows in the
    logits."""
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.ndim == 1:
                parameter.normal_(1.0, 0.2)
            else:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
    return network.eval()


def same(a, b, atol=1e-10):
    torch.testing.assert_close(a, b, rtol=0, atol=atol)
