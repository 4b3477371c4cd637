"""Where kernels stand in the scaled network: interpreted here, they compute what `ref` computes; on their own they are
not asked."""

from dataclasses import replace

import pytest
import torch

from kernels.gate import excess
from ref import muon as ref_muon
from ref import router_replay as ref_router_replay
from ref.network import Config
from ref.network import Transformer as Reference
from ref.network.fast import MoE
from scaled import muon, quant, router_replay
from scaled.network.model import Transformer
from scaled.runtime import engine
from tests.mirror import calls
from tests.mirror.layouts import play

CONFIG = Config.tiny(
    70,
    hidden_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    num_experts=4,
    moe_intermediate_size=32,
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
    for name, dtype, ours in (
        ("kernel", torch.float32, True),
        ("ref", torch.float32, False),
        ("exact", torch.float64, False),
    ):
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
    """The kernel is what is called, and quantises to the same codes: its values are those of `ref` up to float32's
    sums."""
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_muon(interpreted, dtype, monkeypatch):
    """A step's updates are orthogonalised by the kernel, at most twice as far from float64 as by `ref`; what it does
    not know, `ref` takes."""
    import kernels.muon as own

    asked, real = [], own.newton_schulz
    monkeypatch.setattr(own, "newton_schulz", lambda *a, **k: asked.append(1) or real(*a, **k))
    weights, grads = torch.randn(2, 3, 33, 20), torch.randn(2, 3, 33, 20)

    def step(cls, wide, iterate):
        p = torch.nn.Parameter(weights.to(wide, copy=True))
        p.grad = grads.to(wide)
        cls([p], lr=0.1, ns_dtype=iterate).step()
        return p.detach().double()

    exact = step(ref_muon.Muon, torch.float64, torch.float64)
    assert torch.equal(step(muon.Muon, torch.float64, torch.float64), exact) and not asked
    ours, theirs = (step(cls, torch.float32, dtype) for cls in (muon.Muon, ref_muon.Muon))
    assert asked == [1] and (ours - exact).norm() <= 2 * (theirs - exact).norm()


@pytest.mark.parametrize("normalise", [True, False])
def test_routers(interpreted, normalise, monkeypatch):
    """A router's own choice, by the kernel: the experts of `ref`, gates and the router's gradient three ways; what is
    supplied stays as it is."""
    import kernels.router_replay as own

    asked, real = [], own.route
    monkeypatch.setattr(own, "route", lambda *a: asked.append(1) or real(*a))
    mixture = Transformer(replace(CONFIG, norm_topk_prob=normalise)).layers[0].mlp
    torch.nn.init.normal_(mixture.gate.weight)
    x, up = torch.randn(9, 32), torch.randn(9, CONFIG.num_experts_per_tok)
    found = {}
    for name, dtype, cls in (
        ("kernel", torch.float32, type(mixture)),
        ("ref", torch.float32, MoE),
        ("exact", torch.float64, MoE),
    ):
        mixture.to(dtype).zero_grad()
        logits, gates, experts = cls.route(mixture, x.to(dtype), None)
        (gates * up.to(dtype)).sum().backward()
        order = experts.argsort(-1)
        found[name] = experts.gather(1, order), gates.detach().gather(1, order), mixture.gate.weight.grad.clone()
        assert logits.shape == (9, CONFIG.num_experts) and gates.dtype == dtype
    assert torch.equal(found["kernel"][0], found["ref"][0]) and asked == [1]
    for ours, theirs, exact in list(zip(*found.values(), strict=True))[1:]:
        assert excess(ours, theirs, exact) <= 1
    given = torch.arange(18).view(9, 2) % CONFIG.num_experts
    mixture.to(torch.float32)
    for ours, theirs in zip(mixture.route(x, given), MoE.route(mixture, x, given), strict=True):
        assert torch.equal(ours, theirs)
    assert asked == [1]


@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_replayed_routers(interpreted, alpha):
    """`route` of the twin is the kernel, for a replay too; float64, which it does not know, is `ref`'s."""
    scores = torch.randn(7, 6)
    replayed = torch.rand(7, 6).argsort(-1)[:, :2]
    gates, experts = router_replay.route(scores, 2, replayed, alpha)
    wanted = ref_router_replay.route(scores, 2, replayed, alpha)
    assert torch.equal(experts, wanted[1])
    torch.testing.assert_close(gates, wanted[0])
    for ours, theirs in zip(
        *(module.route(scores.double(), 2, replayed, alpha) for module in (router_replay, ref_router_replay)),
        strict=True,
    ):
        assert torch.equal(ours, theirs)


def test_experts_of_other_ranks():
    """Tokens are sorted, permuted and summed by kernels on their way to two ranks' experts and back. Sent as MXFP8,
    their bytes go into the experts' product as they came: values, and all gradients but that of the first weights, have
    the bits that they have if rows are sent in the model's dtype and quantised on arrival. The first weights' gradient
    sums over tokens, along which the decoded values are quantised again."""
    g = torch.Generator().manual_seed(0)
    x, gates = torch.randn(10, 32, generator=g), torch.rand(10, 2, generator=g)
    w13, w2 = torch.randn(4, 64, 32, generator=g) / 6, torch.randn(4, 32, 32, generator=g) / 6
    experts = torch.rand(10, 4, generator=g).argsort(-1)[:, :2]
    layout = dict(dp=2, cp=1, ep=2)
    (plain, asked), (sent, asked_sent) = (
        play(layout, calls.of_interpreted_kernels, x, gates, w13, w2, experts, how) for how in ("model", "mxfp8")
    )
    assert asked == ["experts_swiglu", "permute", "sort_by_expert", "unpermute"]
    assert asked_sent == ["received_swiglu", "sort_by_expert", "unpermute"]
    for name, a, b in zip(("y", "x", "gates", "w13", "w2"), plain, sent, strict=True):
        assert torch.equal(a, b) or name == "w13", name
    whole = [t.clone().requires_grad_() for t in (x, gates, w13, w2)]
    y = quant.ref.experts_swiglu(*whole, experts, "mxfp8", "mxfp8")
    (y * torch.linspace(-1, 1, 32)).sum().backward()
    for ours, theirs in zip(sent, (y.detach(), *(t.grad for t in whole)), strict=True):
        assert (ours - theirs).norm() < 0.05 * theirs.norm()
