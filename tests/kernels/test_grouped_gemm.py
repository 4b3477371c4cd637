"""Products of experts by the three-way rule: Zipf's popularity, empty experts, experts of one token, shapes that are no multiple of a tile."""

import pytest
import torch

from kernels import grouped_gemm as kernels
from ref import quant as ref

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = {
    "one": ([1], 1, 1), "Zipf": ([64, 31, 21, 16, 12, 10, 9, 0], 40, 33), "empty first": ([0, 5, 0, 33], 17, 70),
    "all in the last": ([0, 0, 70], 32, 32), "one each": ([1] * 5, 65, 9), "nothing": ([0, 0], 8, 8),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("counts, O, D", CASES.values(), ids=CASES)
def test_values_and_gradients(counts, O, D, dtype):
    N, E = sum(counts), len(counts)
    ends = torch.tensor(counts).cumsum(0)
    x, w, up = torch.randn(N, D).to(dtype), torch.randn(E, O, D).to(dtype), torch.randn(N, O)

    def run(module, wide, device, forms):
        a, b = x.to(device, wide).requires_grad_(), w.to(device, wide).requires_grad_()
        y = module.grouped_linear(a, b, ends.to(device), *forms)
        return [t.detach().double().cpu() for t in (y, *torch.autograd.grad((y.double() * up.to(device)).sum(), (a, b)))]

    form = (str(dtype).removeprefix("torch."),) * 2
    exact = [torch.cat([p.double() @ e.double().T for p, e in zip(x.split(counts), w, strict=True)])]
    g = up.to(dtype).double()
    exact.append(torch.cat([p @ e.double() for p, e in zip(g.split(counts), w, strict=True)]))
    exact.append(torch.stack([p.T @ q.double() for p, q in zip(g.split(counts), x.split(counts), strict=True)]))
    theirs, ours = run(ref, dtype, "cpu", form), run(kernels, dtype, DEVICE, form)
    for a, b, c in zip(exact, theirs, ours, strict=True):
        if a.numel():
            last = torch.finfo(dtype).eps / 2 * float(a.abs().max())
            assert (c - a).abs().max() <= 2 * (b - a).abs().max() + last


WRONG = {
    "shape": ((torch.zeros(2, 3), torch.zeros(2, 4, 5), torch.tensor([1, 2])), r"\[E, O, D\]"),
    "dtype": ((torch.zeros(2, 3), torch.zeros(2, 4, 3), torch.tensor([1, 2])), "must be the dtype of x and weight"),
    "format": ((torch.zeros(2, 3), torch.zeros(2, 4, 3), torch.tensor([1, 2]), "mxfp8", "mxfp8"), "must be the dtype of x and weight"),
    "ends": ((torch.zeros(2, 3), torch.zeros(2, 4, 3), torch.tensor([1, 3]), "float32", "float32"), "ends must rise to the 2 tokens"),
}


@pytest.mark.parametrize("args, says", WRONG.values(), ids=WRONG)
def test_bad_input(args, says):
    with pytest.raises(ValueError, match=says):
        kernels.grouped_linear(*args)
