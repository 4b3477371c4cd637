"""Both orientations in one launch: every code and scale is that of `ref`, row-major and in tiles, from a matrix,
gathered, weighted, computed from gate and up, or received as codes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from kernels.gate import same_bits
from kernels.orientations import quantise_both, quantise_swiglu_gradient
from kernels.swizzle import swizzle, unswizzle
from ref import quant as ref

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMS = [("mxfp8", "mxfp8"), ("nvfp4-token", "mxfp8"), ("mxfp8", None), ("nvfp4-token", None), (None, "mxfp8")]


def plain(found, rows, block, swizzled):
    """Codes and scales as `ref` has them: row-major, rows that are used."""
    codes, scales, *whole = (t.cpu() for t in found)
    if swizzled:
        scales = unswizzle(scales, codes.shape[1], -(-codes.shape[2] * (2 if block == 16 else 1) // block))
    return codes[:, :rows], scales[:, :rows], *(w[:, :rows] for w in whole)


def agree(found, v, rows, columns, swizzled):
    """`found`, of quantise_both, has the bits of `ref` for v [B, M, N]."""
    M, N = v.shape[1:]
    if rows == "mxfp8":
        assert same_bits(plain(found[0][:2], M, 32, swizzled), ref.mxfp8_quantize(v))
    if rows == "nvfp4-token":
        packed, scales, whole = (t.cpu() for t in found[0])
        scales = unswizzle(scales, M, -(-N // 16)) if swizzled else scales
        assert same_bits((packed, scales, whole[..., None]), ref.nvfp4_quantize(v))
    if columns:
        assert same_bits(plain(found[1], N, 32, swizzled), ref.mxfp8_quantize(v.mT.contiguous()))


def wide(*shape):
    """Sizes between 2^-30 and 2^30, rows of zeros and of NaN."""
    x = torch.randn(shape) * torch.exp2(torch.randint(-30, 31, (*shape[:-1], 1)).float())
    x.view(-1, shape[-1])[0] = 0
    x.view(-1, shape[-1])[-1, 0] = torch.nan
    return x


@settings(max_examples=12)
@given(
    st.integers(1, 3),
    st.integers(1, 150),
    st.integers(1, 150),
    st.sampled_from(FORMS),
    st.booleans(),
    st.integers(0, 2**20),
)
def test_matrices(B, M, N, forms, swizzled, seed):
    torch.manual_seed(seed)
    x = wide(B, M, N)
    agree(quantise_both("matrix", x.to(DEVICE), *forms, swizzled), x, *forms, swizzled)


@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize("forms", FORMS[:2], ids=str)
@pytest.mark.parametrize("source", ["gathered", "weighted", "codes", "swiglu"])
def test_sources(source, forms, swizzled):
    """Rows of a table with gaps: padding is quantised zeros, and rows from the limit on are left alone."""
    T, K, N, M, used = 11, 2, 70, 256, 128
    index = torch.full((M,), -1)
    index[:20] = torch.randperm(T * K)[:20]
    x, gates, limit = wide(T, N), torch.rand(T, K), torch.tensor([used])
    real = (index[:used] >= 0)[:, None]
    given = {"index": index.to(DEVICE), "K": K}
    if source == "swiglu":
        x = torch.randn(M, 2 * N)
        v, given = F.silu(x[:used, :N]) * x[:used, N:], {}
    elif source == "codes":
        codes, scales = ref.mxfp8_quantize(x)
        v = torch.where(real, ref.mxfp8_dequantize(codes, scales)[index[:used] // K], 0.0)
        x, given = codes, given | {"gates": scales.to(DEVICE)}
    else:
        v = x[index[:used] // K]
        if source == "weighted":
            v, given = v * gates.flatten()[index[:used]][:, None], given | {"gates": gates.to(DEVICE)}
        v = torch.where(real, v, 0.0)
    found = quantise_both(source, x.to(DEVICE), *forms, swizzled, limit=limit.to(DEVICE), **given)
    cut = [t.cpu()[:, : -(-used // 128)] if t.ndim == 6 else t.cpu()[:, :used] for t in found[0]]
    columns = [
        found[1][0].cpu()[..., :used],
        found[1][1].cpu()[:, :, :1] if swizzled else found[1][1].cpu()[..., : used // 32],
    ]
    if source == "swiglu":  # now and then a last place of exp moves a value across a midpoint
        wanted = ref.mxfp8_quantize(v) if forms[0] == "mxfp8" else ref.nvfp4_quantize(v)
        assert (cut[0][0] != wanted[0]).double().mean() <= 0.002
        return
    if source == "codes" and forms[0] == "mxfp8":  # copied, not encoded again
        scales = unswizzle(cut[1], used, -(-N // 32)) if swizzled else cut[1]
        empty = (
            torch.where(real, codes[index[:used] // K], 0),
            torch.where(real, given["gates"].cpu()[index[:used] // K], 0),
        )
        assert same_bits((cut[0][0], scales[0]), empty)
        cut[:2] = [t[None] for t in ref.mxfp8_quantize(v)]
        if swizzled:
            cut[1] = swizzle(cut[1])
    agree((cut[: 2 if forms[0] == "mxfp8" else 3], columns), v[None], *forms, swizzled)


@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize("I", [5, 64, 130])
def test_gradient_of_swiglu(I, swizzled):
    """dh along both axes and the activation along columns: the codes of autograd's numbers, but for a last place of exp
    here and there."""
    M, used = 256, 128
    h, d = torch.randn(M, 2 * I), torch.randn(M, I)
    wide = h[:used].double().requires_grad_()
    act = F.silu(wide[:, :I]) * wide[:, I:]
    (dh,) = torch.autograd.grad(act, wide, d[:used].double())
    found = quantise_swiglu_gradient(h.to(DEVICE), d.to(DEVICE), torch.tensor([used], device=DEVICE), swizzled)
    for (codes, scales), v, blocks in zip(found, (dh, dh.T, act.detach().T), (-(-2 * I // 32), 4, 4), strict=True):
        wanted = ref.mxfp8_quantize(v.float().contiguous())
        codes, scales = codes[0].cpu()[: len(v), : v.shape[1]], scales[0].cpu()
        scales = (
            unswizzle(scales, scales.shape[0] * 128, scales.shape[1] * 4)[: len(v), :blocks]
            if swizzled
            else scales[: len(v), :blocks]
        )
        assert (codes != wanted[0]).double().mean() <= 0.002 and (scales != wanted[1]).double().mean() <= 0.01
