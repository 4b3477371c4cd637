"""The iteration against its polynomial on singular values; the optimiser against a plain one and torch's."""

import io

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ref import muon
from ref.muon import COEFFICIENTS, Muon, newton_schulz, optimizers, split_parameters
from ref.network import Config, Transformer

EPS = 1e-7
INF, NAN = float("inf"), float("nan")


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def jordan(G, steps=5):
    """The published code: one matrix, transposed when tall, in bfloat16 or whatever G is."""
    a, b, c = COEFFICIENTS
    X = G.mT if G.size(0) > G.size(1) else G
    X = X / (X.norm() + EPS)
    for _ in range(steps):
        A = X @ X.mT
        X = a * X + (b * A + c * A @ A) @ X
    return X.mT if G.size(0) > G.size(1) else X


SHAPES = [(1, 1), (1, 7), (7, 1), (5, 5), (3, 8), (8, 3), (2, 4, 6), (3, 2, 9, 5), (17, 33)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_the_polynomial_applied_to_every_singular_value(shape):
    G = randn(*shape)
    U, S, Vh = torch.linalg.svd(G, full_matrices=False)
    S = S / (torch.linalg.matrix_norm(G)[..., None] + EPS)
    a, b, c = COEFFICIENTS
    for _ in range(5):
        S = a * S + b * S**3 + c * S**5
    torch.testing.assert_close(newton_schulz(G), U * S[..., None, :] @ Vh, rtol=1e-9, atol=1e-10)


@given(st.integers(2, 40), st.integers(2, 40), st.floats(0.013, 1), st.integers(0, 2**31))
@settings(max_examples=50, deadline=None)
def test_singular_values_above_the_floor_land_near_one(m, n, smallest, seed):
    U, _, Vh = torch.linalg.svd(randn(m, n, seed=seed), full_matrices=False)
    values = torch.linspace(smallest, 1, min(m, n), dtype=torch.float64)
    assert values[0] / values.norm() > 0.002
    out = torch.linalg.svdvals(newton_schulz(U * values @ Vh))
    assert 0.68 < out.min() and out.max() < 1.21


@pytest.mark.parametrize("shape", [(6, 6), (4, 9), (9, 4), (3, 5, 8)], ids=str)
def test_rotating_the_gradient_rotates_the_update(shape):
    G = randn(*shape)
    left = torch.linalg.qr(randn(shape[-2], shape[-2], seed=1)).Q
    right = torch.linalg.qr(randn(shape[-1], shape[-1], seed=2)).Q
    want = left @ newton_schulz(G) @ right
    torch.testing.assert_close(newton_schulz(left @ G @ right), want, atol=1e-9, rtol=0)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_batched_is_looped_and_tall_is_wide_transposed(shape):
    G = randn(*shape)
    looped = torch.stack([jordan(x) for x in G.reshape(-1, *shape[-2:])]).reshape(shape)
    torch.testing.assert_close(newton_schulz(G), looped, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(newton_schulz(G.mT), newton_schulz(G).mT, rtol=1e-10, atol=1e-12)


def test_one_matrix_of_a_batch_does_not_touch_another():
    G = randn(3, 4, 6)
    alone = newton_schulz(G)
    G[1] *= 1e12
    torch.testing.assert_close(newton_schulz(G)[[0, 2]], alone[[0, 2]], rtol=0, atol=0)
    torch.testing.assert_close(newton_schulz(G)[1], alone[1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@given(st.integers(3, 120), st.sampled_from([(1, 1), (3, 8), (9, 4)]))
@settings(max_examples=25, deadline=None)
def test_the_size_of_a_gradient_changes_nothing_however_large(dtype, exponent, shape):
    """Powers of two, so that the numbers are the same; up to where squares overflow by far, beside others that do
    not."""
    G = randn(3, *shape).to(dtype)
    large = G.clone()
    large[1] *= 2.0**exponent
    found, wanted = newton_schulz(large), newton_schulz(G)
    assert torch.equal(found[0], wanted[0]) and torch.equal(found[2], wanted[2])
    torch.testing.assert_close(found[1], wanted[1], rtol=0, atol=0.1 if dtype == torch.bfloat16 else 1e-4)


def test_a_huge_gradient_is_a_full_step_and_one_that_is_not_finite_is_heard_of():
    G = randn(4, 6).float()

    def stepped(grad):
        weight = nn.Parameter(torch.zeros(4, 6))
        weight.grad = grad
        Muon([weight], lr=0.1).step()
        return weight.data

    assert stepped(G).norm() > 0.1
    torch.testing.assert_close(stepped(G * 1e25), stepped(G), rtol=0, atol=5e-3)
    for value in (INF, NAN):
        broken = G.clone()
        broken[0, 0] = value
        assert stepped(broken).isnan().all()


def test_zero_stays_zero_and_vanishing_gradients_vanish():
    assert (newton_schulz(torch.zeros(2, 3, 5)) == 0).all()
    for scale in (1e-20, 1e-30, 1e-42):
        out = newton_schulz(randn(8, 5, dtype=torch.float32) * scale)
        assert out.isfinite().all() and out.abs().max() < 1e-6


@pytest.mark.parametrize("shape", [(128, 128), (64, 128), (128, 48), (4, 96, 32)], ids=str)
def test_bfloat16_is_at_most_twice_as_wrong_as_the_published_code_in_bfloat16(shape):
    G = randn(*shape)
    exact = newton_schulz(G)
    low = newton_schulz(G.float(), dtype=torch.bfloat16)
    assert low.dtype == torch.float32
    published = torch.stack([jordan(x.bfloat16()) for x in G.reshape(-1, *shape[-2:])]).reshape(shape)
    assert (low - exact).norm() <= 2 * (published - exact).norm()
    assert newton_schulz(G.bfloat16()).dtype == torch.bfloat16


def plain_muon(params, grads_of_steps, lr, momentum, nesterov, weight_decay):
    """Equations (2) and (3), one matrix at a time, as one would write them without batching."""
    params = [p.clone() for p in params]
    buffers = [torch.zeros_like(p) for p in params]
    for grads in grads_of_steps:
        for p, buffer, grad in zip(params, buffers, grads):
            if grad is None:
                continue
            buffer.copy_(momentum * buffer + (1 - momentum) * grad)
            update = (1 - momentum) * grad + momentum * buffer if nesterov else buffer
            m, n = p.shape[-2:]
            for matrix, u in zip(p.reshape(-1, m, n), update.reshape(-1, m, n)):
                matrix.copy_((1 - lr * weight_decay) * matrix - lr * max(1, m / n) ** 0.5 * jordan(u))
    return params


MIXED = [(4, 6), (6, 4), (3, 4, 6), (4, 6), (2, 2, 6, 4), (1, 5), (8, 8)]


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_ten_steps_are_those_of_a_plain_implementation(nesterov, weight_decay):
    start = [randn(*shape, seed=i) for i, shape in enumerate(MIXED)]
    grads = [[randn(*shape, seed=100 * step + i) for i, shape in enumerate(MIXED)] for step in range(10)]
    grads[3][1] = grads[4][2] = None
    params = [nn.Parameter(p.clone()) for p in start]
    optimizer = Muon(params, 0.05, 0.9, nesterov, weight_decay, ns_dtype=None)
    for row in grads:
        kept = [None if g is None else g.clone() for g in row]
        for p, g in zip(params, row):
            p.grad = g
        optimizer.step()
        assert all(g is None or torch.equal(g, k) for g, k in zip(row, kept)), "gradients are only read"
    for got, want in zip(params, plain_muon(start, grads, 0.05, 0.9, nesterov, weight_decay)):
        torch.testing.assert_close(got.detach(), want, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("shape", [(64, 64), (96, 32), (32, 80)], ids=str)
def test_agrees_with_the_optimiser_in_torch(shape):
    """torch's iteration is always bfloat16; ours in bfloat16 may be twice as far from ours in float64."""

    def run(make, dtype):
        p = nn.Parameter(randn(*shape).to(dtype))
        optimizer = make(p)
        for step in range(8):
            p.grad = randn(*shape, seed=step + 1).to(dtype)
            optimizer.step()
        return p.detach().double()

    exact = run(lambda p: Muon([p], 0.02, weight_decay=0.1, ns_dtype=None), torch.float64)
    ours = run(lambda p: Muon([p], 0.02, weight_decay=0.1), torch.float32)
    theirs = run(
        lambda p: torch.optim.Muon([p], 0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn="original"), torch.float32
    )
    assert (ours - exact).norm() <= 2 * (theirs - exact).norm()
    assert (theirs - exact).norm() < 0.05 * (exact - randn(*shape)).norm()


def test_state_survives_a_round_trip_exactly():
    def fresh():
        params = [nn.Parameter(randn(*shape, seed=i, dtype=torch.float32)) for i, shape in enumerate(MIXED)]
        return params, Muon(params, 0.03, weight_decay=0.1)

    def advance(params, optimizer, steps):
        for step in steps:
            for i, p in enumerate(params):
                p.grad = randn(*p.shape, seed=1000 * step + i, dtype=torch.float32)
            optimizer.step()

    params, optimizer = fresh()
    advance(params, optimizer, range(3))
    file = io.BytesIO()
    torch.save({"params": [p.detach() for p in params], "optimizer": optimizer.state_dict()}, file)
    advance(params, optimizer, range(3, 6))
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed, other = fresh()
    with torch.no_grad():
        for p, value in zip(resumed, saved["params"]):
            p.copy_(value)
    other.load_state_dict(saved["optimizer"])
    advance(resumed, other, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(params, resumed))


def test_an_expert_without_gradient_stays_and_its_neighbour_moves():
    p = nn.Parameter(randn(2, 4, 6, dtype=torch.float32))
    before = p.detach().clone()
    p.grad = torch.zeros_like(p)
    p.grad[1] = randn(4, 6, dtype=torch.float32)
    Muon([p], 0.1).step()
    assert torch.equal(p[0], before[0]) and (p[1] - before[1]).norm() > 0.1


def test_the_step_descends_and_returns_the_closure_loss():
    p = nn.Parameter(randn(5, 3, dtype=torch.float32))
    optimizer = Muon([p], 0.05)

    def closure():
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(20)]
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize(
    "params, options",
    [
        ([torch.zeros(3)], {}),
        ([torch.zeros(())], {}),
        ([torch.zeros(2, 2)], {"lr": -1.0}),
        ([torch.zeros(2, 2)], {"momentum": 1.0}),
        ([torch.zeros(2, 2)], {"weight_decay": -0.1}),
    ],
)
def test_vectors_and_impossible_options_are_errors(params, options):
    with pytest.raises(ValueError):
        Muon([nn.Parameter(p) for p in params], **options)


@pytest.mark.parametrize("tied", [True, False])
def test_split_sends_hidden_matrices_to_muon_and_everything_once(tied):
    with torch.device("meta"):
        model = Transformer(Config.tiny(tie_word_embeddings=tied))
    names = {id(p): name for name, p in model.named_parameters()}
    matrices, rest = ([names[id(p)] for p in group] for group in split_parameters(model))
    assert sorted(matrices + rest) == sorted(names.values())
    kinds = {name.removesuffix(".weight").split(".")[-1] for name in matrices}
    assert kinds == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj"}
    assert any(name.endswith("gate.weight") for name in rest) and any("embed" in name for name in rest)


def test_frozen_parameters_are_in_neither_group():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    matrices, rest = split_parameters(model)
    assert [tuple(p.shape) for p in matrices] == [(2, 4)] and [tuple(p.shape) for p in rest] == [(2,)]


@pytest.mark.parametrize("use_muon, kinds", [(True, ["Muon", "AdamW"]), (False, ["AdamW"])])
def test_optimizers_cover_the_model_and_spare_norms_from_decay(use_muon, kinds):
    model = nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 5), nn.LayerNorm(5))
    found = optimizers(model, 0.01, 0.002, weight_decay=0.1, use_muon=use_muon)
    assert [type(o).__name__ for o in found] == kinds
    groups = [group for o in found for group in o.param_groups]
    seen = [id(p) for group in groups for p in group["params"]]
    assert sorted(seen) == sorted(id(p) for p in model.parameters())
    for group in groups:
        assert all((p.ndim >= 2) == (group["weight_decay"] == 0.1) for p in group["params"])
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.arange(7)).square().mul(torch.arange(5)).sum().backward()
    for o in found:
        o.step()
    assert not any(torch.equal(p, old) for p, old in zip(model.parameters(), before))


@pytest.mark.parametrize("model", [nn.Linear(2, 3, bias=False), nn.LayerNorm(3)], ids=["matrices", "vectors"])
def test_optimizers_leave_out_the_one_that_has_nothing_to_do(model):
    assert len(optimizers(model)) == 1


def test_demo_muon_does_not_see_the_rotation_that_adamw_stumbles_over():
    seen = []
    config = muon.Demo(steps=80, muon_lrs=(0.1,), adamw_lrs=(0.1,))
    figures = muon.demo(config, log=lambda step, total, **metrics: seen.append((step, total)))
    assert seen[-1] == (4, 4)
    assert figures["muon_loss_rotated"] < 2 * figures["muon_loss_axes"]
    assert figures["adamw_loss_rotated"] > 10 * figures["adamw_loss_axes"]
    assert figures["muon_loss_rotated"] < figures["adamw_loss_rotated"]
