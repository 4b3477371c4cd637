"""Products of experts in every format by the three-way rule: Zipf's popularity, empty experts, experts of one token,
shapes that are no multiple of a tile."""

import pytest
import torch

from kernels import grouped_gemm as kernels
from kernels.gate import compute_missing_share, excess
from ref import quant as ref

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = {
    "one": ([1], 1, 1),
    "Zipf": ([64, 31, 21, 16, 0], 40, 33),
    "empty first": ([0, 5, 0, 33], 17, 70),
    "all in the last": ([0, 0, 70], 32, 32),
    "one each": ([1] * 3, 65, 9),
    "nothing": ([0, 0], 8, 8),
}


FORMS = [("float32", "float32"), ("bfloat16", "bfloat16"), ("fp8", "fp8"), ("mxfp8", "mxfp8"), ("nvfp4-token", "mxfp8")]


def run(module, x, w, ends, up, forms, device="cpu"):
    a, b = x.to(device).requires_grad_(), w.to(device).requires_grad_()
    y = module.grouped_linear(a, b, ends.to(device), *forms)
    return y, *torch.autograd.grad(y, (a, b), up.to(device))


def exact(exactly, x, w, counts, up, forward, backward):
    """y, dx and dw in float64, every expert's operands rounded as the reference rounds them."""
    y, dx, dw = [], [], []
    for a, b, g in zip(x.split(counts), w, up.split(counts), strict=True):
        y.append(exactly(a, forward, 1) @ exactly(b, forward, 1, True).T)
        dx.append(exactly(g, backward, 1) @ exactly(b, backward, 0, True))
        dw.append(exactly(g, backward, 0).T @ exactly(a, backward, 0))
    return torch.cat(y), torch.cat(dx), torch.stack(dw)


@pytest.mark.parametrize("forms", FORMS, ids=lambda f: "-".join(f))
@pytest.mark.parametrize("counts, O, D", CASES.values(), ids=CASES)
def test_values_and_gradients(exactly, counts, O, D, forms):
    dtype = torch.float32 if forms[0] == "float32" else torch.bfloat16
    ends = torch.tensor(counts).cumsum(0)
    x, w, up = (torch.randn(*shape).to(dtype) for shape in ((sum(counts), D), (len(counts), O, D), (sum(counts), O)))
    true = exact(exactly, x, w, counts, up, *forms)
    for ours, theirs, t in zip(
        run(kernels, x, w, ends, up, forms, DEVICE), run(ref, x, w, ends, up, forms), true, strict=True
    ):
        assert excess(ours, theirs, t) <= 1


@pytest.mark.parametrize("counts", [[0], [1], [128], [129, 0, 127], [0, 300, 1, 0]], ids=str)
def test_padded_rows(counts):
    """Every row stands in its expert's own blocks of 128, in order, and every other place is empty."""
    ends = torch.tensor(counts).cumsum(0)
    rows, bounds = kernels.padded(ends, sum(counts))
    begin = 0
    for e, count in enumerate(counts):
        mine = rows[bounds[e] : bounds[e + 1]]
        assert bounds[e] % 128 == 0 and len(mine) == -(-count // 128) * 128
        assert mine[:count].tolist() == list(range(begin, begin + count)) and (mine[count:] == -1).all()
        begin += count
    assert (rows[bounds[-1] :] == -1).all()


WRONG = {
    "shape": (
        (torch.zeros(2, 3), torch.zeros(2, 4, 5), torch.tensor([1, 2])),
        r"weight must be a float tensor of shape \[E, O, 3\]",
    ),
    "ends": ((torch.zeros(2, 3), torch.zeros(2, 4, 3), torch.tensor([1, 3])), "ends must rise to the 2 tokens"),
    "format": (
        (torch.zeros(2, 3), torch.zeros(2, 4, 3), torch.tensor([1, 2]), "int4"),
        "forward and backward must each be one of",
    ),
    "backward": (
        (torch.zeros(2, 3), torch.zeros(2, 4, 3), torch.tensor([1, 2]), "mxfp8", "nvfp4-token"),
        "backward must be",
    ),
}


@pytest.mark.parametrize("args, says", WRONG.values(), ids=WRONG)
def test_bad_input(args, says):
    with pytest.raises(ValueError, match=says):
        kernels.grouped_linear(*args)


@pytest.mark.parametrize("form", ["fp8", "mxfp8"])
@pytest.mark.parametrize("unlike", [-2, -1], ids=["rows", "columns"])
def test_each_product_is_quantised_along_its_own_sum_where_sizes_differ(exactly, unlike, form):
    """By 2^±20, as in tests/ref/test_quant.py; every number of a result by the size of its row and column, so that the
    largest do not hide the others."""
    counts, O, D = [5, 0, 35], 40, 34
    tensors = [torch.randn(sum(counts), D), torch.randn(len(counts), O, D), torch.randn(sum(counts), O)]
    for t in tensors:
        t.mul_(
            torch.exp2(
                torch.randint(-20, 21, [n if axis == t.ndim + unlike else 1 for axis, n in enumerate(t.shape)]).float()
            )
        )
    x, w, up = tensors
    ends, true = torch.tensor(counts).cumsum(0), exact(exactly, x, w, counts, up, form, form)
    sums, share = (
        exact(exactly, x.abs(), w.abs(), counts, up.abs(), form, form),
        compute_missing_share(form, torch.empty(0, device=DEVICE)),
    )
    found = run(kernels, x, w, ends, up, (form, form), DEVICE), run(ref, x, w, ends, up, (form, form))
    for ours, theirs, t, most in zip(*found, true, sums, strict=True):
        size = t.abs().amax(-1, True)
        size = (size * (t / size).nan_to_num().abs().amax(-2, True)).clamp(min=1e-30)
        ours, theirs, most = (
            (found.detach().double() / size).abs().max() for found in (ours.cpu() - t, theirs - t, most)
        )
        assert ours <= 2 * theirs + torch.finfo(torch.float32).eps / 2 + share * most
