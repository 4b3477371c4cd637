"""The list of a layer's launches is what runs: the same kernels in the same order, and byte for byte what they read and
write."""

import pytest
import torch

from kernels import experts as kernels
from kernels.launches import launches, row_tiles, traffic
from tests.kernels.recorder import recorded

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter counts")
SIZES = {"N": 37, "D": 96, "I": 80, "E": 3, "K": 2}
"""Odd ones: widths that fill no tile of scales, and an expert without a token."""


def played(forward, backward):
    """What a layer's forward and backward pass did, the rows that its experts took, and how many experts had any."""
    N, D, I, E, K = SIZES.values()
    x = torch.randn(N, D).bfloat16().requires_grad_()
    w13, w2 = (torch.randn(*shape).bfloat16().requires_grad_() for shape in ((E, 2 * I, D), (E, D, I)))
    # The first expert takes every token, the last one none.
    scores = torch.tensor([9.0, 2.0, -50.0]) + torch.rand(N, E)
    up = torch.randn(N, D).bfloat16()
    gates, chosen = kernels.route(scores, K)
    gates = gates.detach().requires_grad_()
    with recorded() as seen:
        y = kernels.experts_swiglu(x, gates, w13, w2, chosen, forward, backward)
        y.backward(up)
    used = chosen.flatten().bincount(minlength=E)
    return seen, int((-(-used // 128) * 128).sum()), int((used > 0).sum())


@pytest.mark.parametrize(
    "way, forms",
    [
        ("expanded", ("nvfp4-token", "mxfp8")),
        ("native", ("nvfp4-token", "mxfp8")),
        ("native", ("mxfp8", "mxfp8")),
        ("expanded", ("bfloat16", "bfloat16")),
    ],
    ids=str,
)
def test_the_list_is_what_runs(way, forms, request):
    if way == "native":
        request.getfixturevalue("native")
    seen, rows, active = played(*forms)
    N, D, I, E, K = SIZES.values()
    told = launches(
        N, D, I, E, K, *forms, native=way == "native", rows=rows, active=active, sorted_at_once=64, scores=False
    )
    assert [one.kernel for one in seen] == [one.kernel for one in told]
    assert [(one.read, one.written) for one in seen] == [(one.bytes_read, one.bytes_written) for one in told], [
        one.name for one in told
    ]


def test_the_router():
    scores = torch.randn(37, 3)
    with recorded() as seen:
        kernels.route(scores, 2)
    (told, *_), ran = launches(37, 96, 80, 3, 2), seen[-1]  # before it come checks of the scores, which a GPU skips
    assert (ran.kernel, ran.read, ran.written) == (told.kernel, told.bytes_read, told.bytes_written)


def test_by_hand():
    """One expert, 128 tokens, width 128: a product of 128 × 256 × 128, whose left side is 128 rows of 64 bytes, 8
    scales and a float32."""
    told = {one.name: one for one in launches(128, 128, 128, 1, 1)}
    h = told["h = x w13ᵀ"]
    assert h.flops == 2 * 128 * 256 * 128 and h.bytes_written == 2 * 128 * 256
    assert h.bytes_read == 128 * (64 + 8 + 4) + 256 * (64 + 8 + 4) + 8
    x = told["x: gathered, nvfp4-token rows, mxfp8 columns"]
    assert x.bytes_written == 128 * (64 + 8 + 4) + 128 * (128 + 4)
    # Six products forward and back: three of [N, D] × [D, 2I] and three of [N, I] × [I, D].
    assert sum(one.flops for one in told.values()) == 3 * 2 * 128 * 128 * 256 + 3 * 2 * 128 * 128 * 128


def test_formats_cut_the_bytes():
    """Qwen3-30B-A3B's layer at 32,768 tokens: FLOPs are the same in any format; NVFP4 forward moves less than MXFP8."""
    size = 32768, 2048, 768, 128, 8
    lists = {
        forms: launches(*size, *forms)
        for forms in (("bfloat16", "bfloat16"), ("mxfp8", "mxfp8"), ("nvfp4-token", "mxfp8"))
    }
    assert len({sum(one.flops for one in told) for told in lists.values()}) == 1
    moved = [sum(one.bytes_read + one.bytes_written for one in told if not one.backward) for told in lists.values()]
    assert moved[2] < moved[1]


@pytest.mark.parametrize("cache", [50e6, 126e6], ids=["50 MB", "126 MB"])
def test_the_order_of_tiles_reads_every_operand_about_once(cache):
    """x w13ᵀ of that layer, MXFP8, tiles of 128 × 128: 16 by 12 of each of 128 experts. Expert by expert, in bands,
    rows and weights are read once. All experts' rows for one column after the other, rows are read for each of the
    twelve columns."""
    left = right = 128 * (2048 + 64)
    once = 128 * (16 * left + 12 * right)
    assert traffic(row_tiles(128, 16, 12, 8), left, right, int(cache)) == once
    assert traffic(row_tiles(128, 16, 12, None), left, right, int(cache)) == 128 * (12 * 16 * left + 12 * right)


def test_traffic_by_hand():
    """A cache of two pieces: a row and a column. Down one column, every tile brings its row; the column stays."""
    assert traffic([(0, 0, 0), (0, 1, 0), (0, 0, 1)], 1, 1, 2) == 2 + 1 + 2
    assert traffic([(0, 0, 0), (0, 1, 0), (0, 0, 1)], 1, 1, 10) == 2 + 1 + 1


def test_bad_input():
    with pytest.raises(ValueError, match="launches are known for bfloat16 with bfloat16, mxfp8 with mxfp8"):
        launches(1, 1, 1, 1, 1, "fp8", "fp8")
    with pytest.raises(ValueError, match="must be at least 1"):
        launches(0, 1, 1, 1, 1)
