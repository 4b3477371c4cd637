"""Where kernels stand in the scaled network: interpreted here, they compute what `ref` computes; on their own they are not asked."""

import pytest
import torch

from kernels.gate import excess
from ref.network import Config
from ref.network import Transformer as Reference
from scaled import quant
from scaled.network.model import Transformer
from scaled.runtime import engine

CONFIG = Config.tiny(
    70, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=16, num_experts=4, moe_intermediate_size=32
)


@pytest.fixture
def interpreted(monkeypatch):
    monkeypatch.setattr(engine, "INTERPRETED", True)


def test_without_a_gpu_ref_computes():
    assert not engine.fast(torch.zeros(1)) or torch.zeros(1).is_cuda


@pytest.mark.parametrize("tied", [True, False])
def test_the_head(interpreted, tied, monkeypatch):
    """Log-probs and both gradients by the kernel, three ways."""
    import kernels.linear_logprob as own

    asked, real = [], own.linear_logprob
    monkeypatch.setattr(own, "linear_logprob", lambda *a: asked.append(1) or real(*a))
    model = Transformer(Config.tiny(70, hidden_size=32, num_hidden_layers=1, num_experts=0, tie_word_embeddings=tied))
    assert isinstance(model, Reference)
    hidden, targets = torch.randn(9, 32), torch.randint(0, 70, (9,))
    found = {}
    for name, dtype, ours in (("kernel", torch.float32, True), ("ref", torch.float32, False), ("exact", torch.float64, False)):
        net, x = model.to(dtype), hidden.clone().to(dtype).requires_grad_()
        net.zero_grad()
        logp = net.logprob(x, targets) if ours else Reference.logprob(net, x, targets)
        (logp * torch.linspace(-1, 1, 9, dtype=logp.dtype)).sum().backward()
        table = net.embed_tokens if tied else net.lm_head
        found[name] = [logp.detach(), x.grad, table.weight.grad.clone()]
    for ours, theirs, exact in zip(*found.values(), strict=True):
        assert excess(ours, theirs, exact) <= 1
    assert asked == [1]


@pytest.mark.parametrize("forward", ["mxfp8", "nvfp4-token"])
def test_quantised_experts(interpreted, forward, monkeypatch):
    """The kernel is what is called, and quantises to the same codes: its values are those of `ref` up to float32's sums."""
    import kernels.experts as own

    asked, real = [], own.experts_swiglu
    monkeypatch.setattr(own, "experts_swiglu", lambda *a: asked.append(1) or real(*a))
    g = torch.Generator().manual_seed(0)
    x, gates = torch.randn(12, 32, generator=g), torch.rand(12, 2, generator=g)
    w13, w2 = torch.randn(4, 64, 32, generator=g) / 6, torch.randn(4, 32, 32, generator=g) / 6
    experts = torch.rand(12, 4, generator=g).argsort(-1)[:, :2]
    ours = quant.experts_swiglu(x, gates, w13, w2, experts, forward)
    theirs = quant.ref.experts_swiglu(x, gates, w13, w2, experts, forward)
    assert asked and ours.shape == theirs.shape
    # Between the products an activation may fall on the other side of a rounding: few values, by a step of the format.
    assert ((ours - theirs).abs() > 1e-5 * theirs.abs().max()).double().mean() < 0.1
    assert (ours - theirs).norm() < 0.05 * theirs.norm()
