"""What k1, k2, k3 mean: closed forms by quadrature, expected gradients by enumeration, forbidden tokens."""

import math

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ref import kl

NODES, WEIGHTS = (torch.from_numpy(a) for a in np.polynomial.hermite_e.hermegauss(120))
WEIGHTS = WEIGHTS / WEIGHTS.sum()


@pytest.mark.parametrize("m", [0.0, 0.01, 0.1, 0.5, 1.0, 1.1, 1.7, -0.9, 2.5])
@pytest.mark.parametrize("kind", kl.KINDS)
def test_gaussian_moments_are_those_of_quadrature(kind, m):
    x = NODES
    estimate = kl.token_kl(-(x**2) / 2, -((x - m) ** 2) / 2, kind)
    mean = (WEIGHTS * estimate).sum()
    variance = (WEIGHTS * (estimate - mean) ** 2).sum()
    want_mean, want_variance = kl.gaussian_oracle(m)[kind]
    torch.testing.assert_close(mean.item(), want_mean, rtol=1e-10, atol=1e-13)
    torch.testing.assert_close(variance.item(), want_variance, rtol=1e-9, atol=1e-13)


def test_k1_and_k3_are_unbiased_and_k2_is_not():
    oracle = kl.gaussian_oracle(0.8)
    assert oracle["k1"][0] == oracle["k3"][0] == oracle["exact"][0] == pytest.approx(0.32)
    assert oracle["k2"][0] == pytest.approx(0.32 + 0.64**2 / 8)


def test_k3_beats_k1_exactly_below_the_crossing():
    u = 2 * kl.crossing()
    assert math.exp(u) == pytest.approx(1 + 2 * u, rel=1e-14)
    assert kl.crossing() == pytest.approx(0.6282, abs=5e-5)
    for factor, better in ((0.999, True), (1.001, False)):
        oracle = kl.gaussian_oracle(math.sqrt(u * factor))
        assert (oracle["k3"][1] < oracle["k1"][1]) is better


def test_far_apart_gaussians_do_not_overflow():
    assert kl.gaussian_oracle(30.0)["k3"] == (450.0, math.inf)


def _pair(seed, vocab=5):
    generator = torch.Generator().manual_seed(seed)
    logits, ref_logits = torch.randn(2, vocab, dtype=torch.float64, generator=generator)
    return logits.requires_grad_(), ref_logits


def _gradient(scalar, logits):
    return torch.autograd.grad(scalar, logits)[0]


def _kl(p_logp, q_logp):
    return (p_logp.exp() * (p_logp - q_logp)).sum()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind, target", [("k1", "zero"), ("k2", "forward"), ("k3", "reverse")])
def test_expected_gradient_of_each_estimator_as_a_loss(kind, target, seed):
    logits, ref_logits = _pair(seed)
    logp, ref_logp = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    got = _gradient((logp.detach().exp() * kl.token_kl(logp, ref_logp, kind)).sum(), logits)
    want = {
        "zero": torch.zeros_like(logits),
        "forward": _gradient(_kl(logits.log_softmax(-1), ref_logp), logits),
        "reverse": _gradient(_kl(ref_logp, logits.log_softmax(-1)), logits),
    }
    torch.testing.assert_close(got, want[target], rtol=1e-12, atol=1e-14)
    assert all((got - other).norm() > 1e-3 for name, other in want.items() if name != target)


@given(seed=st.integers(0, 2**31), vocab=st.integers(2, 9), spread=st.sampled_from([0.1, 1.0, 4.0]))
@settings(max_examples=40, deadline=None)
def test_over_all_tokens_k1_and_k3_have_the_mean_of_the_exact_kl_and_k2_is_positive(seed, vocab, spread):
    """By enumeration, for any two distributions over a few tokens: no sampling."""
    generator = torch.Generator().manual_seed(seed)
    logits, ref_logits = spread * torch.randn(2, vocab, dtype=torch.float64, generator=generator)
    logp, ref_logp = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    exact = kl.exact_kl(logits, ref_logits).item()
    mean = {kind: (logp.exp() * kl.token_kl(logp, ref_logp, kind)).sum().item() for kind in kl.KINDS}
    assert mean["k1"] == pytest.approx(exact, rel=1e-9, abs=1e-12)
    assert mean["k3"] == pytest.approx(exact, rel=1e-9, abs=1e-12)
    # Jensen: E[(log r)²] ≥ E[log r]². So k2 may lie on either side of the KL, but not below half its square.
    assert mean["k2"] >= exact**2 / 2 - 1e-12


@given(log_ratio=st.floats(-20, 20), kind=st.sampled_from(kl.KINDS))
@settings(max_examples=60, deadline=None)
def test_signs_of_the_slopes_and_all_of_it_zero_at_a_ratio_of_one(log_ratio, kind):
    """In log π: k1 always one, which pulls nowhere in particular; k2 and k3 towards the reference, from
    either side; at a ratio of one their value and their slope vanish."""
    logp = torch.tensor(-30.0, dtype=torch.float64, requires_grad=True)
    ref_logp = logp.detach() + log_ratio
    value = kl.token_kl(logp, ref_logp, kind)
    slope = torch.autograd.grad(value, logp)[0].item()
    if kind == "k1":
        assert slope == 1
    else:
        away = logp.item() - ref_logp.item()
        assert value >= 0 and (slope > 0) == (away > 0) and (slope < 0) == (away < 0)
    assert kl.token_kl(ref_logp, ref_logp, kind) == 0


@pytest.mark.parametrize("kind", ["k1", "k3"])
@pytest.mark.parametrize("seed", range(3))
def test_in_the_reward_or_under_a_live_ratio_the_gradient_is_that_of_the_kl(kind, seed):
    logits, ref_logits = _pair(seed)
    logp, ref_logp = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    want = _gradient(kl.exact_kl(logits, ref_logits), logits)
    estimate = kl.token_kl(logp, ref_logp, kind)
    ratio = (logp - logp.detach()).exp()
    live = _gradient((logp.detach().exp() * ratio * estimate).sum(), logits)
    torch.testing.assert_close(live, want, rtol=1e-12, atol=1e-14)
    if kind == "k1":
        logp = logits.log_softmax(-1)
        reward = _gradient((logp.detach().exp() * estimate.detach() * logp).sum(), logits)
        torch.testing.assert_close(reward, want, rtol=1e-12, atol=1e-14)


@given(
    vocab=st.integers(1, 9),
    batch=st.lists(st.integers(0, 3), max_size=2),
    seed=st.integers(0, 2**32 - 1),
    scale=st.sampled_from([0.0, 1e-3, 1.0, 30.0]),
    forbid=st.integers(0, 8),
)
@settings(max_examples=60, deadline=None)
def test_exact_kl_is_the_sum_over_the_vocabulary(vocab, batch, seed, scale, forbid):
    generator = torch.Generator().manual_seed(seed)
    logits, ref_logits = scale * torch.randn(2, *batch, vocab, dtype=torch.float64, generator=generator)
    forbid = min(forbid, vocab - 1)
    logits[..., :forbid], ref_logits[..., : forbid // 2] = -math.inf, -math.inf
    logits.requires_grad_()
    got = kl.exact_kl(logits, ref_logits)
    assert got.shape == tuple(batch)
    got.sum().backward()
    assert logits.grad.isfinite().all() and (logits.grad[..., :forbid] == 0).all()
    with torch.no_grad():
        logp, ref_logp = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    rows = zip(logp.reshape(-1, vocab).tolist(), ref_logp.reshape(-1, vocab).tolist(), got.flatten().tolist())
    for p_row, q_row, value in rows:
        terms = [math.exp(p) * (p - q) for p, q in zip(p_row, q_row) if p > -math.inf]
        assert value == pytest.approx(math.fsum(terms), rel=1e-12, abs=1e-13)
        assert value >= -1e-13


def test_exact_kl_edges():
    logits = torch.tensor([0.3, -0.2, 1.0])
    assert kl.exact_kl(logits, logits + 7) == pytest.approx(0.0, abs=1e-6)
    assert kl.exact_kl(logits, torch.tensor([0.0, -math.inf, 0.0])) == math.inf
    assert kl.exact_kl(torch.tensor([0.0, -1e4]), torch.tensor([0.0, -math.inf])) == math.inf
    half = kl.exact_kl(logits.bfloat16(), torch.zeros(3).bfloat16())
    assert half.dtype == torch.float32
    assert half == kl.exact_kl(logits.bfloat16().float(), torch.zeros(3))


@given(
    logits=st.lists(st.sampled_from([-math.inf, -2e4, -800.0, -110.0, -1.0, 0.0]), min_size=1, max_size=5),
    ref_logits=st.lists(st.sampled_from([-math.inf, -300.0, 0.0]), min_size=5, max_size=5),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64]),
)
@settings(max_examples=80, deadline=None)
def test_exact_kl_is_infinite_where_and_only_where_the_reference_forbids_what_is_allowed(logits, ref_logits, dtype):
    """Whatever the dtype makes of the token's probability; such a position has no gradient, and spoils none."""
    logits, ref_logits = [0.0, *logits], [0.0, *ref_logits[: len(logits)]]
    beside = [[0.0, 1.0, *[-math.inf] * (len(logits) - 2)], [0.0] * len(logits)]
    x = torch.tensor([logits, beside[0]], dtype=dtype, requires_grad=True)
    found = kl.exact_kl(x, torch.tensor([ref_logits, beside[1]], dtype=dtype))
    infinite = any(p > -math.inf and q == -math.inf for p, q in zip(logits, ref_logits))
    assert (found[0].item() == math.inf) is infinite and found[1].isfinite()
    found[1].backward() if infinite else found.sum().backward()
    assert x.grad.isfinite().all() and x.grad[1].any()
    if infinite:
        found = kl.exact_kl(x, torch.tensor([ref_logits, beside[1]], dtype=dtype))
        (total,) = torch.autograd.grad(found.sum(), x)
        assert not total[0].any() and torch.equal(total[1], x.grad[1])


@given(st.floats(-40, 40), st.sampled_from([torch.float32, torch.float64]))
@settings(max_examples=200, deadline=None)
def test_k3_is_accurate_near_one_and_never_negative_beyond_rounding(log_ratio, dtype):
    x = torch.tensor(log_ratio, dtype=dtype)
    got = kl.token_kl(torch.zeros_like(x), x, "k3").item()
    exact = mpmath.mpf(x.item())
    with mpmath.workdps(50):
        error = abs(mpmath.expm1(exact) - exact - got)
        allowed = 4 * torch.finfo(dtype).eps * max(abs(exact), mpmath.exp(exact) - 1, 0)
        assert error <= allowed
    assert got >= -4 * torch.finfo(dtype).eps * abs(x.item())


def test_k3_keeps_digits_that_the_printed_form_loses():
    log_ratio = torch.tensor(1e-4)
    printed = log_ratio.exp() - 1 - log_ratio
    exact = 5e-9
    assert kl.token_kl(torch.tensor(0.0), log_ratio, "k3").item() == pytest.approx(exact, rel=1e-2)
    assert abs(printed.item() - exact) > exact


@pytest.mark.parametrize("kind", kl.KINDS)
def test_nothing_is_clamped(kind):
    assert kl.token_kl(torch.tensor([-1.0]), torch.tensor([-math.inf]), kind).item() == math.inf
    logp = torch.tensor([-60.0], dtype=torch.float64)
    far = kl.token_kl(logp, torch.zeros_like(logp), kind)
    assert far.item() == pytest.approx({"k1": -60, "k2": 1800, "k3": math.expm1(60) - 60}[kind])


@pytest.mark.parametrize("kind", ["K1", "", "k4", "forward"])
def test_unknown_kind_is_an_error(kind):
    with pytest.raises(ValueError, match="k1, k2, k3"):
        kl.token_kl(torch.zeros(1), torch.zeros(1), kind)


def test_demo_finds_the_crossing_and_the_trap():
    seen = []
    figures = kl.demo(kl.Demo(samples=200_000), log=lambda step, total, **metrics: seen.append((step, total)))
    assert seen[-1] == (9, 9)
    assert figures["crossing_measured"] == pytest.approx(figures["crossing_exact"], abs=0.02)
    assert figures["loss_gradient_k1_norm"] < 1e-12 and figures["loss_gradient_k2_error"] < 1e-12
    assert figures["loss_gradient_k3_error"] > 0.1 and figures["reward_gradient_k1_error"] < 1e-12
    assert kl.demo(kl.Demo(samples=1000)) == kl.demo(kl.Demo(samples=1000))
