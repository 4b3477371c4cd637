"""The penalty against its printed formula at 700 digits, its limits and shape, the six terms of effort."""

import math

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ref.length_penalty import Demo, Effort, EffortWeights, demo, effort, length_penalty, marginal_cost


def oracle(x: float, k: float, q: float) -> mpmath.mpf:
    """The formula as printed. 700 digits, because k = 1e-300 hides the answer 300 digits behind 1 + kx."""
    with mpmath.workdps(700):
        x, k, q = mpmath.mpf(x), mpmath.mpf(k), mpmath.mpf(q)
        if k == 0 or q == 0:
            return x
        if q == 1:
            return mpmath.log(1 + k * x) / k
        return ((1 + k * x) ** (1 - q) - 1) / (k * (1 - q))


def powers(low: float, high: float) -> st.SearchStrategy[float]:
    return st.one_of(st.just(0.0), st.floats(low, high).map(lambda e: 10.0**e))


NEAR_ONE = [1.0, 1 + 1e-15, 1 - 1e-15, math.nextafter(1, 2), math.nextafter(1, 0), 1 + 1e-9, 1 - 1e-6]
exponents = st.one_of(st.sampled_from([0.0, 5e-324, 1e-300, *NEAR_ONE]), st.floats(0, 6))


@given(x=powers(-9, 9), k=powers(-300, 6), q=exponents)
@example(x=1e9, k=1e6, q=1e-15)
@example(x=1e5, k=1e-300, q=0.5)
@example(x=1e5, k=5e-324, q=2.0)
@example(x=1e-9, k=1e-315, q=1 + 1e-15)
@settings(max_examples=300, deadline=None)
def test_twelve_digits_everywhere(x, k, q):
    got, want = length_penalty(x, k, q), oracle(x, k, q)
    assert isinstance(got, float)
    assert abs(mpmath.mpf(got) - want) <= 1e-12 * want


@given(x=st.lists(powers(-9, 9), min_size=1, max_size=8), k=powers(-300, 6), q=exponents)
@example(x=[1.0], k=1e-294, q=1 + 1e-15)
@example(x=[1e9, 1e-9], k=1e-160, q=1 + 1e-15)
@settings(max_examples=100, deadline=None)
def test_gradient_is_the_marginal_cost(x, k, q):
    x = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    length_penalty(x, k, q).sum().backward()
    want = [float((1 + mpmath.mpf(k) * mpmath.mpf(v)) ** -mpmath.mpf(q)) for v in x.tolist()]
    np.testing.assert_allclose(marginal_cost(x.detach(), k, q).numpy(), want, rtol=1e-12)
    # The two halves of the product rule cancel where the slope is small, so their error is one of C(x)/x.
    slope = length_penalty(x.detach(), k, q) / x.detach().clamp_min(1e-300)
    assert (abs(x.grad.numpy() - np.array(want)) <= 1e-12 * np.maximum(slope.numpy(), want)).all()


@pytest.mark.parametrize("q", [0.0, 0.3, 1.0, 1 + 1e-15, 2.0, 3.5])
@pytest.mark.parametrize("k", [0.0, 1e-300, 1e-3, 1.0, 50.0])
def test_zero_costs_nothing_and_the_curve_rises_ever_more_slowly(k, q):
    x = torch.linspace(0, 500, 251, dtype=torch.float64)
    cost = length_penalty(x, k, q)
    assert cost[0] == 0
    steps = cost.diff()
    assert (steps > 0).all() and (steps.diff() <= 1e-12 * cost.max()).all()
    assert (cost <= x * (1 + 1e-14)).all()
    if q > 1 and k > 1e-6:
        assert (cost < 1 / (k * (q - 1))).all()


def test_limits():
    assert length_penalty(37.0, 0, 2) == 37.0
    assert length_penalty(37.0, 5.0, 0) == pytest.approx(37.0, rel=1e-15)
    assert length_penalty(37.0, 5.0, 1) == pytest.approx(math.log(186) / 5, rel=1e-15)
    assert length_penalty(1e300, 0.5, 3.0) == pytest.approx(1.0, rel=1e-15)
    assert length_penalty(3.0, 1.0, 2.0) == 0.75
    assert marginal_cost(3.0, 1.0, 2.0) == pytest.approx(1 / 16)


@given(x=st.floats(0, 1e6), k=powers(-12, 3), q=st.floats(0, 6), e=st.floats(-12, -0.5).map(lambda e: 10.0**e))
@settings(max_examples=100, deadline=None)
def test_limits_are_reached_as_fast_as_the_integral_says(x, k, q, e):
    """C is the integral of (1 + kt)^−q. Hence x − C ≤ qkx²/2 as k → 0; and as q → 1 the distance from
    ln(1 + kx)/k is at most |q − 1| ln(1 + kx) times C on the steeper side, smaller for larger q."""
    rounding = 1e-12 * x
    assert -rounding <= x - length_penalty(x, k, q) <= q * k * x * x / 2 + rounding
    below, one, above = (length_penalty(x, k, at) for at in (1 - e, 1.0, 1 + e))
    assert below + rounding >= one >= above - rounding
    assert below - above <= 2 * e * math.log1p(k * x) * below + rounding
    assert one == pytest.approx(math.log1p(k * x) / k if k else x, rel=1e-12)


def test_returns_what_it_was_given():
    xs = [0.0, 1.5, 40.0]
    want = [length_penalty(x, 0.1, 1.5) for x in xs]
    array = length_penalty(np.array(xs), 0.1, 1.5)
    assert isinstance(array, np.ndarray) and array.tolist() == want
    assert length_penalty(torch.tensor(xs, dtype=torch.float64), 0.1, 1.5).tolist() == want
    assert length_penalty(torch.tensor(xs), 0.1, 1.5).dtype == torch.float32
    assert length_penalty(torch.tensor([4]), 0, 1).dtype == torch.float64
    assert length_penalty(np.float64(1.5), 0.1, 1.5) == length_penalty(1.5, 0.1, 1.5)
    assert length_penalty(2, 1, 2) == pytest.approx(2 / 3)
    assert length_penalty(torch.zeros(0), 0.1, 1.5).shape == (0,)


@pytest.mark.parametrize("function", [length_penalty, marginal_cost])
@pytest.mark.parametrize(
    "x, k, q",
    [
        (-1.0, 1.0, 1.0),
        (1.0, -1e-9, 1.0),
        (1.0, 1.0, -0.5),
        (math.nan, 1.0, 1.0),
        (1.0, math.nan, 1.0),
        (1.0, 1.0, math.inf),
    ],
)
def test_arguments_out_of_range_are_errors(function, x, k, q):
    with pytest.raises(ValueError):
        function(x, k, q)


def test_one_negative_entry_of_a_tensor_is_an_error():
    with pytest.raises(ValueError, match="effort"):
        length_penalty(torch.tensor([1.0, -1e-9]), 0.1, 1.0)


def test_effort_is_the_weighted_sum_of_six_terms():
    counts = Effort(1, 2, 3, 4, 5, 6)
    assert effort(counts, EffortWeights(1.0, 10.0, 100.0, 1000.0, 1e4, 1e5)) == 654321
    assert effort(Effort()) == 0
    assert effort(Effort(turns=1)) == EffortWeights().turns


@pytest.mark.parametrize("name", ["thinking_tokens", "tool_output_tokens", "turns"])
def test_negative_counts_and_weights_are_errors(name):
    with pytest.raises(ValueError, match=name):
        effort(Effort(**{name: -1}))
    with pytest.raises(ValueError, match=name):
        effort(Effort(), EffortWeights(**{name: -1.0}))


def test_fewer_turns_for_the_same_work_is_cheaper_and_matters_most_when_little_was_spent():
    work = dict(tool_call_tokens=60, tool_output_tokens=900, tool_calls=5)

    def saving(thinking):
        serial = effort(Effort(thinking_tokens=thinking, turns=5, **work))
        parallel = effort(Effort(thinking_tokens=thinking, turns=1, **work))
        return length_penalty(serial, 0.01, 1.0) - length_penalty(parallel, 0.01, 1.0)

    assert saving(0) > saving(1000) > saving(100_000) > 0


def test_demo_shows_why_the_printed_formula_is_not_used():
    figures = demo(Demo())
    assert figures["printed_formula_error_near_q1"] > 1e-6
    assert figures["cost_q2@100"] == pytest.approx(50.0)
    assert figures["parallel_saving_q0"] == pytest.approx(500.0)


@pytest.mark.parametrize(
    "term, price",
    [
        ("thinking_tokens", 1),
        ("tool_call_tokens", 1),
        ("tool_output_tokens", 0.1),
        ("final_message_tokens", 1),
        ("tool_calls", 20),
        ("turns", 100),
    ],
)
def test_the_price_of_each_term(term, price):
    """In token equivalents: whatever is generated costs one, what is only read a tenth, a call 20, a round trip 100."""
    assert effort(Effort(**{term: 30})) == pytest.approx(30 * price)
