"""The vocabulary kernel against float64 and against `ref/network/linear_logprob.py` in the same dtype: its error at
most twice the reference's, values and gradients. And the reference against its closed forms."""

import importlib.util
import math

import pytest
import torch

from kernels import linear_logprob as kernels
from ref.network import linear_logprob as ref

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(1, 1, 1), (5, 7, 3), (33, 130, 40), (40, 215, 65), (2, 700, 16)]
FORMS = ("logprob", "teacher", "reference")


def values(module, form, tensors):
    hidden, weight, targets, x, w = tensors
    if form == "logprob":
        return module.linear_logprob(hidden, weight, targets)
    return (module.linear_kl(hidden, weight, x, w, form),)


def run(module, form, tensors, upstream, dtype, device="cpu"):
    """Values and gradients, float64."""
    hidden, weight, targets, x, w = (t.to(device) if t.dtype == torch.long else t.to(device, dtype) for t in tensors)
    hidden.requires_grad_(), weight.requires_grad_()
    found = values(module, form, (hidden, weight, targets, x, w))
    total = sum((v * u.to(device)).sum() for v, u in zip(found, upstream, strict=False))
    return [t.detach().double().cpu() for t in (*found, *torch.autograd.grad(total, (hidden, weight)))]


def drawn(N, V, D, dtype, sharp):
    tensors = [
        torch.randn(N, D) * sharp,
        torch.randn(V, D),
        torch.randint(0, V, (N,)),
        torch.randn(N, D + 2),
        torch.randn(V, D + 2),
    ]
    return [t if t.dtype == torch.long else t.to(dtype) for t in tensors], (torch.randn(N), torch.randn(N))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("N, V, D", SHAPES)
def test_error_is_at_most_twice_the_references(form, dtype, N, V, D):
    tensors, upstream = drawn(N, V, D, dtype, 1.0)
    exact = run(ref, form, tensors, upstream, torch.float64)
    theirs = run(ref, form, tensors, upstream, dtype)
    ours = run(kernels, form, tensors, upstream, dtype, DEVICE)
    # Where the reference happens to be exact: the last rounding of a result is nobody's error, nor is that of the
    # largest logit.
    largest = max(
        float((h.detach().double() @ w.detach().double().T).abs().max()) for h, w in (tensors[:2], tensors[3:])
    )
    gradients = len(exact) - 2
    for i, (a, b, c) in enumerate(zip(exact, theirs, ours, strict=True)):
        last = torch.finfo(dtype if i >= gradients else torch.float32).eps / 2 * float(a.abs().max())
        assert (c - a).abs().max() <= 2 * (b - a).abs().max() + last + 4 * torch.finfo(torch.float32).eps * largest


def test_sure_tokens_keep_their_gradient():
    """Of a token with log-prob −1e-4 what is left to learn is 1e-4, not what rounding leaves of 1 − p."""
    hidden, weight = torch.tensor([[1.0]], device=DEVICE), torch.tensor([[math.log(1e4)], [0.0]], device=DEVICE)
    hidden.requires_grad_()
    logp, _ = kernels.linear_logprob(hidden, weight, torch.tensor([0], device=DEVICE))
    logp.sum().backward()
    p = 1e-4 / (1 + 1e-4)
    assert logp.item() == pytest.approx(-p, rel=2e-3) and hidden.grad.item() == pytest.approx(
        p * math.log(1e4), rel=2e-3
    )


@pytest.mark.parametrize("form", FORMS)
def test_far_logits_overflow_nothing(form):
    tensors, upstream = drawn(9, 300, 8, torch.float32, 1e3)
    assert all(t.isfinite().all() for t in run(kernels, form, tensors, upstream, torch.float32, DEVICE))


def test_no_tokens():
    hidden, weight = (
        torch.zeros(0, 4, device=DEVICE, requires_grad=True),
        torch.randn(9, 4, device=DEVICE, requires_grad=True),
    )
    logp, entropy = kernels.linear_logprob(hidden, weight, torch.zeros(0, dtype=torch.long, device=DEVICE))
    (logp.sum() + entropy.sum()).backward()
    assert logp.shape == (0,) and (weight.grad == 0).all()


def test_closed_forms_of_the_reference():
    """Uniform logits: log-prob −log V, entropy log V; equal networks: no divergence; two tokens by hand."""
    hidden, weight = torch.zeros(2, 3), torch.randn(11, 3)
    logp, entropy = ref.linear_logprob(hidden, weight, torch.tensor([0, 10]))
    torch.testing.assert_close(logp, torch.full((2,), -math.log(11))), torch.testing.assert_close(entropy, -logp)
    same = torch.randn(4, 3)
    for other in ("teacher", "reference"):
        torch.testing.assert_close(ref.linear_kl(same, weight, same, weight, other), torch.zeros(4))
    # p = (¾, ¼) and q = (½, ½)
    p, q = torch.tensor([[math.log(3.0)]]), torch.zeros(1, 1)
    two = torch.tensor([[1.0], [0.0]])
    assert ref.linear_kl(p, two, q, two, "teacher").item() == pytest.approx(0.5 * math.log(4 / 3))
    assert ref.linear_kl(p, two, q, two, "reference").item() == pytest.approx(0.75 * math.log(1.5) - 0.25 * math.log(2))


WRONG = {
    "targets": (
        lambda m: m.linear_logprob(torch.zeros(2, 3), torch.zeros(5, 3), torch.tensor([0, 5])),
        "targets must be tokens 0 to 4",
    ),
    "how many": (
        lambda m: m.linear_logprob(torch.zeros(2, 3), torch.zeros(5, 3), torch.tensor([0])),
        r"targets must be an int tensor of shape \[2\]",
    ),
    "width": (
        lambda m: m.linear_logprob(torch.zeros(2, 3), torch.zeros(5, 4), torch.tensor([0, 1])),
        r"weight must be .*\[5, 4\]",
    ),
    "other": (
        lambda m: m.linear_kl(*[torch.zeros(2, 3)] * 4, "student"),
        "target_kind must be teacher or reference, got 'student'",
    ),
    "vocabulary": (lambda m: m.linear_kl(*[torch.zeros(2, 3)] * 3, torch.zeros(4, 3)), r"other_weight must .*"),
}


def untyped():
    """The reference as a user imports it: without the tests' own shape checks, which would come first."""
    spec = importlib.util.spec_from_file_location("untyped_linear_logprob", ref.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("module", [untyped(), kernels], ids=["ref", "kernel"])
@pytest.mark.parametrize("call, says", WRONG.values(), ids=WRONG)
def test_bad_input(call, says, module):
    """Tensors on the CPU, on any machine: kernels look at what they are given before they ask where it is."""
    with pytest.raises(ValueError, match=says):
        call(module)
