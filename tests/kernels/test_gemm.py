"""Products of quantised operands by the three-way rule: exact sums of the very same rounded numbers, the reference, the
kernel."""

import pytest
import torch

from kernels import gemm as kernels
from kernels.gate import compute_missing_share, excess
from ref import quant as ref

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = {
    "one": (1, 1, 1),
    "odd": (33, 17, 150),
    "a tile": (32, 32, 128),
    "two blocks of a weight": (40, 130, 129),
    "many": (140, 3, 40),
    "empty": (0, 4, 8),
}
FORMS = [
    ("fp8", "fp8"),
    ("mxfp8", "mxfp8"),
    ("nvfp4-token", "nvfp4-token"),
    ("nvfp4-token", "mxfp8"),
    ("bfloat16", "float32"),
]


def run(module, x, weight, up, forward, backward, device="cpu"):
    a, b = x.to(device).requires_grad_(), weight.to(device).requires_grad_()
    y = module.linear(a, b, forward, backward)
    return y, *torch.autograd.grad(y, (a, b), up.to(device))


@pytest.fixture
def exact(exactly):
    """y, dx and dw in float64, of operands rounded as the reference rounds them."""
    return lambda x, weight, up, forward, backward: (
        exactly(x, forward, 1) @ exactly(weight, forward, 1, True).T,
        exactly(up, backward, 1) @ exactly(weight, backward, 0, True),
        exactly(up, backward, 0).T @ exactly(x, backward, 0),
    )


CASES = {
    f"{name}, {forward}, {backward}": (*shape, forward, backward, torch.float32)
    for name, shape in SHAPES.items()
    for forward, backward in FORMS
    # NVFP4 has no scale for a sum over nothing, and its quantiser, a program a row, takes its time under the
    # interpreter.
    if backward != "nvfp4-token" or name in ("one", "odd", "a tile")
} | {
    f"bfloat16, {forward}, {backward}": (*SHAPES["odd"], forward, backward, torch.bfloat16)
    for forward, backward in FORMS
    if backward != "nvfp4-token"
}


@pytest.mark.parametrize("N, O, D, forward, backward, dtype", CASES.values(), ids=CASES)
def test_values_and_gradients(exact, N, O, D, forward, backward, dtype):
    x, weight, up = (torch.randn(*shape).to(dtype) for shape in ((N, D), (O, D), (N, O)))
    arguments = x, weight, up, forward, backward
    sizes = exact(x.abs(), weight.abs(), up.abs(), forward, backward)
    shares = [compute_missing_share(form, torch.empty(0, device=DEVICE)) for form in (forward, backward, backward)]
    for ours, theirs, true, size, share in zip(
        run(kernels, *arguments, DEVICE), run(ref, *arguments), exact(*arguments), sizes, shares, strict=True
    ):
        assert excess(ours, theirs, true, share * max(size.flatten().tolist(), default=0.0)) <= 1


@pytest.mark.parametrize("form", ["fp8", "mxfp8", "nvfp4-token"])
def test_unlike_rows_and_columns(exact, form):
    """Scales differ by powers of ten between tokens, channels and blocks, and some blocks are zeros: every one is
    applied where it belongs."""
    x = torch.randn(20, 150) * 10 ** torch.linspace(-4, 4, 20)[:, None]
    weight = torch.randn(40, 150) * 10 ** torch.linspace(-3, 3, 150)
    x[:, 64:96], weight[3:9] = 0, 0
    up = torch.randn(20, 40) * 10 ** torch.linspace(3, -3, 40)
    arguments, share = (x, weight, up, form, form), compute_missing_share(form, torch.empty(0, device=DEVICE))
    sums = exact(x.abs(), weight.abs(), up.abs(), form, form)
    for ours, theirs, true, most in zip(
        run(kernels, *arguments, DEVICE), run(ref, *arguments), exact(*arguments), sums, strict=True
    ):
        # Every row and column by its own size, so that the largest do not hide the others.
        size = true.abs().amax(1, True)
        size = size * (true / size).nan_to_num().abs().amax(0, True)
        ours, theirs, most = (
            (t.detach().cpu().double() / size.clamp(min=1e-30)).abs().max()
            for t in (ours.cpu() - true, theirs - true, most)
        )
        assert ours <= 2 * theirs + torch.finfo(torch.float32).eps / 2 + share * most


def test_a_token_with_nan_spoils_its_own_row_only():
    x, weight = torch.randn(9, 64), torch.randn(5, 64)
    x[4, 7] = torch.nan
    for form in ("fp8", "mxfp8", "nvfp4-token"):
        y = kernels.linear(x.to(DEVICE), weight.to(DEVICE), form).cpu()
        assert y[4].isnan().all() and y[[0, 1, 2, 3, 5, 6, 7, 8]].isfinite().all()


WRONG = {
    "shape": ((torch.zeros(2, 3), torch.zeros(4, 5)), r"weight must be a float tensor of shape \[O, 3\]"),
    "dtype": ((torch.zeros(2, 3).int(), torch.zeros(4, 3)), "x must be a float tensor"),
    "format": ((torch.zeros(2, 3), torch.zeros(4, 3), "int4"), "forward and backward must each be one of"),
}


@pytest.mark.parametrize("args, says", WRONG.values(), ids=WRONG)
def test_bad_input(args, says):
    with pytest.raises(ValueError, match=says):
        kernels.linear(*args)
