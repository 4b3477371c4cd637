"""Log-probability, entropy and both divergences by their sums over the vocabulary, and their slopes by the table that
the file opens with."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ref.network.linear_logprob import linear_kl, linear_logprob


def drawn(seed, N=4, V=7, D=3, size=1.0):
    """Hidden states and heads of a policy and of another one, float64."""
    g = torch.Generator().manual_seed(seed)
    return [
        size * torch.randn(*shape, dtype=torch.float64, generator=g)
        for shape in ((N, D), (V, D), (N, D + 1), (V, D + 1))
    ]


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31), size=st.sampled_from([0.1, 1.0, 5.0]))
def test_values_and_slopes_in_the_logits_are_those_of_the_table(seed, size):
    hidden, weight, other, table = drawn(seed, size=size)
    targets = torch.randint(0, 7, (4,), generator=torch.Generator().manual_seed(seed))
    z, q = hidden @ weight.T, (other @ table.T).softmax(-1)
    p = z.softmax(-1)
    one = torch.eye(7, dtype=torch.float64)[targets]
    H = -(p * p.log()).sum(-1, keepdim=True)
    back = (p * (p / q).log()).sum(-1, keepdim=True)
    wanted = {
        "logprob": ((one * p.log()).sum(-1), one - p),
        "entropy": (H[:, 0], -p * (p.log() + H)),
        "teacher": ((q * (q / p).log()).sum(-1), p - q),
        "reference": (back[:, 0], p * ((p / q).log() - back)),
    }
    for name, (value, slope) in wanted.items():
        # Under an identity for a head the hidden states are the logits.
        logits, head = z.clone().requires_grad_(), torch.eye(7, dtype=torch.float64)
        if name in ("logprob", "entropy"):
            found = linear_logprob(logits, head, targets)[name == "entropy"]
        else:
            found = linear_kl(logits, head, other, table, name)
        torch.testing.assert_close(found, value, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(torch.autograd.grad(found.sum(), logits)[0], slope, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("which", ["teacher", "reference"])
def test_the_other_gets_no_gradient_and_both_sides_of_the_policy_do(which):
    leaves = [x.requires_grad_() for x in drawn(0)]
    linear_kl(*leaves, which).sum().backward()
    assert [x.grad is not None for x in leaves] == [True, True, False, False]


def test_a_divergence_is_positive_and_of_two_kinds():
    hidden, weight, other, table = drawn(1)
    teacher, reference = (linear_kl(hidden, weight, other, table, which) for which in ("teacher", "reference"))
    assert (teacher > 0).all() and (reference > 0).all() and (teacher - reference).abs().min() > 1e-3
    torch.testing.assert_close(linear_kl(other, table, hidden, weight, "reference"), teacher)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_results_are_float32_or_wider(dtype):
    hidden, weight, other, table = (x.to(dtype) for x in drawn(2))
    wide = torch.promote_types(dtype, torch.float32)
    assert {x.dtype for x in linear_logprob(hidden, weight, torch.zeros(4, dtype=torch.long))} == {wide}
    assert linear_kl(hidden, weight, other, table).dtype == wide
