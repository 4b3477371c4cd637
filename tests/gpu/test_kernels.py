"""What only a GPU can show: its casts are the bit code, its programs do not race, and the sizes of the benchmark are
right too."""

import math

import pytest
import torch
import triton
import triton.language as tl

from kernels import (
    bits,
    expert_rows,
    experts,
    gemm,
    grouped_gemm,
    linear_logprob,
    muon,
    quant,
    router_replay,
    weight_sync,
)
from ref import formats

pytestmark = pytest.mark.gpu


@triton.jit
def encode_kernel(x, codes, N, NATIVE: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(codes + i, bits.encode_e4m3(tl.load(x + i, i < N, other=0.0), NATIVE), i < N)


@triton.jit
def decode_kernel(codes, x, native, N, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    code = tl.load(codes + i, i < N, other=0)
    tl.store(x + i, bits.decode_e4m3(code), i < N)
    tl.store(native + i, code.to(tl.float8e4nv, bitcast=True).to(tl.float32), i < N)


def hard_numbers():
    """Every bfloat16, every midpoint of E4M3 and its float32 neighbours, with both signs, and random bits."""
    every = (torch.arange(65536) << 16).int().view(torch.float32)
    grid = formats.e4m3_decode(torch.arange(127, dtype=torch.uint8))
    middle = (grid[1:] + grid[:-1]) / 2
    near = torch.cat([middle, middle.nextafter(torch.tensor(math.inf)), middle.nextafter(torch.tensor(0.0))])
    return torch.cat(
        [every, near, -near, torch.randint(-(2**31), 2**31 - 1, (2**20,), dtype=torch.int64).int().view(torch.float32)]
    )


def test_native_casts_are_the_bit_code():
    x = hard_numbers().cuda()
    found = {}
    for native in (False, True):
        found[native] = torch.empty(len(x), dtype=torch.uint8, device="cuda")
        encode_kernel[(triton.cdiv(len(x), 1024),)](x, found[native], len(x), NATIVE=native, BLOCK=1024)
    nan = x.isnan()
    assert ((found[True] & 0x7F) == 0x7F)[nan].all() and ((found[False] & 0x7F) == 0x7F)[nan].all()
    assert torch.equal(found[True][~nan], found[False][~nan])
    assert torch.equal(found[False].cpu()[~nan.cpu()], formats.e4m3_encode(x.cpu())[~nan.cpu()])


def test_native_decoding_is_the_bit_code():
    codes = torch.arange(256, dtype=torch.uint8, device="cuda")
    x, native = torch.empty(256, device="cuda"), torch.empty(256, device="cuda")
    decode_kernel[(1,)](codes, x, native, 256, BLOCK=256)
    torch.testing.assert_close(x, native, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(x.cpu(), formats.e4m3_decode(codes.cpu()), rtol=0, atol=0, equal_nan=True)


def test_ten_runs_give_the_same_bits():
    """Of sizes that fill a GPU with programs: where two raced, some bit would change."""
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=generator, device="cuda").bfloat16()

    x, w, up = random(4096, 1024), random(16, 768, 1024), random(4096, 768)
    ends = torch.tensor([900, 900, 1500, 1501, *range(1700, 3900, 200), 4096], device="cuda")
    hidden, head = random(512, 256), random(30011, 256)
    targets = torch.randint(30011, (512,), generator=generator, device="cuda")
    scores = random(8192, 128).float()
    chosen = scores.topk(8).indices
    order, place, _ = expert_rows.sort_by_expert(chosen, 128)
    few, rows, gates = random(8192, 256), random(65536, 256), torch.rand(8192, 8, generator=generator, device="cuda")
    old = random(2**22)
    new = torch.where(torch.rand(2**22, generator=generator, device="cuda") < 0.01, -old, old)
    matrices = random(4, 512, 768).float()

    def logprob():
        h, t = hidden.clone().requires_grad_(), head.clone().requires_grad_()
        return torch.autograd.grad(sum(part.sum() for part in linear_logprob.linear_logprob(h, t, targets)), (h, t))

    calls = {
        "mxfp8": lambda: quant.mxfp8_quantize_both(x),
        "nvfp4": lambda: quant.nvfp4_quantize(x),
        "fp8": lambda: quant.blockwise_fp8_quantize(x, (128, 128)),
        "activation": lambda: (experts.activation(x, "mxfp8").data,),
        "log-prob": logprob,
        "route": lambda: router_replay.route(scores, 8, chosen, 0.5),
        "sort": lambda: expert_rows.sort_by_expert(chosen, 128),
        "permute": lambda: (expert_rows.permute(few, order, place),),
        "unpermute": lambda: (expert_rows.unpermute(rows, order, place, gates),),
        "delta": lambda: weight_sync.encode_delta(old, new),
        "newton-schulz": lambda: (muon.newton_schulz(matrices, dtype=torch.bfloat16),),
    }
    for form in ("bfloat16", "fp8", "mxfp8", "nvfp4-token"):
        calls[f"linear, {form}"] = lambda form=form: (gemm.linear(x, w[0], form),)
        calls[f"experts' rows, {form}"] = lambda form=form: (grouped_gemm.grouped_linear(x, w, ends, form, "mxfp8"),)
    w13, w2 = random(128, 128, 256), random(128, 256, 64)
    for form in ("bfloat16", "mxfp8", "nvfp4-token"):
        back = "bfloat16" if form == "bfloat16" else "mxfp8"
        calls[f"layer, {form}"] = lambda form=form, back=back: (
            experts.experts_swiglu(few, gates, w13, w2, chosen, form, back),
        )
    for form in ("bfloat16", "fp8", "mxfp8"):
        calls[f"experts' weights, {form}"] = lambda form=form: (
            grouped_gemm.expert_weights(up, x, ends, form, torch.bfloat16),
        )
    for name, call in calls.items():
        first = [t.clone() for t in call()]
        for _ in range(10):
            for a, b in zip(first, call(), strict=True):
                assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)), name


def test_the_benchmark_is_right_at_its_own_sizes():
    from etude.bench.kernel_cases import cases

    for case in cases("cuda"):
        wrong = case.gate()
        assert wrong is None, f"{case.name}, {case.size}: {wrong}"
        for call in case.kernels.values():
            call()
