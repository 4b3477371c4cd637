"""What Triton compiled for Hopper and Blackwell computes, instruction by instruction: the codes and scales of `ref`,
bit for bit.

The PTX is compiled in another process, without Triton's interpreter, and run on the machine of kernels/ptx.py, whose
arithmetic tests/kernels/test_ptx_machine.py checks by itself."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import ptx_floats
from kernels import quant as quantisers
from kernels.gate import same_bits
from kernels.ptx import Fault, Memory, UnknownInstruction, parse, ptx, run
from kernels.ptx_program import contracted, contractions, open_roundings
from kernels.swizzle import tiles, unswizzle
from ref import expert_rows, quant, router_replay, weight_codec
from ref.formats import E2M1
from tests.kernels.hard_numbers import E4M3, every_bfloat16, hard, ties
from tests.kernels.ptx_programs import GPUS, MODES, PROGRAMS, names

QUANTISERS = [
    (name, gpu) for name, gpu in names() if name.startswith(("mxfp8", "nvfp4", "fp8")) and name != "nvfp4 swiglu"
]


@pytest.fixture(scope="session")
def programs(tmp_path_factory):
    """programs("mxfp8 rceil", "sm_90"): the parsed program; text=True: its PTX."""
    file = tmp_path_factory.mktemp("ptx") / "programs.json"
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(root)}
    subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.kernels.ptx_programs", file],
        env=environment,
        cwd=root,
        check=True,
    )
    texts, parsed = json.loads(file.read_text()), {}

    def program(name, gpu, text=False):
        key = f"{name}, {gpu}"
        if key not in parsed:
            parsed[key] = parse(texts[key])
        return texts[key] if text else parsed[key]

    return program


def bits(x):
    """A tensor of any dtype as numpy, with its strides."""
    return {2: lambda: x.view(torch.int16), 4: lambda: x.view(torch.int32)}.get(x.element_size(), lambda: x)().numpy()


class Play:
    """One launch: outputs are full of other numbers before it."""

    def __init__(self, program, **how):
        self.program, self.how, self.memory, self.out = program, how, Memory(), []

    def give(self, x):
        """An input, in its own strides."""
        return self.memory.place(bits(torch.as_strided(x, (x.untyped_storage().size() // x.element_size(),), (1,), 0)))

    def take(self, shape, dtype):
        address = self.memory.place(np.full(shape, 0xAB, np.uint8).repeat(dtype.itemsize, -1))
        self.out.append((address, shape, dtype))
        return address

    def run(self, grid, *arguments):
        run(self.program, grid, arguments, self.memory, **self.how)
        raw = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}
        return [
            torch.from_numpy(self.memory.array(at, np.zeros(shape, raw[dtype.itemsize]))).view(dtype)
            for at, shape, dtype in self.out
        ]


def at(x):
    """Bytes from the start of a view's memory to its first number."""
    return x.storage_offset() * x.element_size()


def play(program, name, x, **how):
    """What the wrappers in kernels/quant.py launch, for a matrix x [M, N]; and what `ref` gives."""
    one = PROGRAMS[name]
    c, (M, N), kind = one.constants, x.shape, one.kernel
    stride = (x.stride(0),) if one.aligned else x.stride()
    go = Play(program, **how)
    given = go.give(x) + at(x)
    if "mxfp8" in kind:
        mode = MODES[c["MODE"]]
        shapes = ((M, N), (M, -(-N // 32)), (N, M), (N, -(-M // 32)))
        places = [go.take(shape, torch.uint8) for shape in shapes]
        found = go.run((-(-M // c["BM"]), -(-N // c["BN"])), given, *places, M, N, *stride)
        found = [*found[:2], *(t.T for t in found[2:])]
        wanted = quant.mxfp8_quantize_both(x, mode)
        keep = [i for i in range(4) if c["ROWS" if i < 2 else "COLS"]]
        return [found[i] for i in keep], [wanted[i] for i in keep]
    if "nvfp4" in kind:
        wanted = list(quant.nvfp4_quantize(x, "tensor" if c["TENSOR"] else "token", "fast" if c["FAST"] else "ieee"))
        places = [
            go.take((M, -(-N // 2)), torch.uint8),
            go.take((M, -(-N // 16)), torch.uint8),
            go.take((M, 1), torch.float32),
        ]
        top = (x.float().view(torch.int32) & 0x7FFFFFFF).max().view(1)
        found = go.run((-(-M // c["BM"]),), given, *places, go.give(top), M, N, -(-N // 2), *stride)
        return (found[:2], wanted[:2]) if c["TENSOR"] else (found, wanted)
    down, across = -(-M // c["BM"]), -(-N // c["BN"])
    places = [go.take((M, N), torch.uint8), go.take((down, across), torch.float32)]
    found = go.run((-(-down // c["RM"]), across, 1), given, *places, M, N, M * N, *stride)
    return found, list(quant.blockwise_fp8_quantize(x, (c["BM"], c["BN"])))


def cases(name, seed=0):
    """1024 blocks of the format and more, but for FP8's large ones; and for one program of each format every
    bfloat16."""
    generator, one = torch.Generator().manual_seed(seed), PROGRAMS[name]
    dtype = torch.bfloat16 if one.types["x"] == "*bf16" else torch.float32
    size = 32 if "mxfp8" in name else 16 if "nvfp4" in name else 64 if name == "fp8 3x20" else 128
    values, largest = (E2M1, 6) if "nvfp4" in name else (E4M3, 448)
    yield hard(size, dtype, generator)
    yield ties(values, largest, size, dtype, generator)
    if name in ("mxfp8 rceil", "nvfp4 token", "fp8 1x128"):
        yield every_bfloat16().to(dtype)


@pytest.mark.parametrize(("name", "gpu"), QUANTISERS)
def test_compiled_quantisers_give_the_bits_of_ref(programs, name, gpu):
    for x in cases(name):
        found, wanted = play(programs(name, gpu), name, x)
        assert same_bits(tuple(found), tuple(wanted))


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("name", ["both mxfp8", "both nvfp4", "both gathered"])
def test_a_layers_quantiser_gives_the_bits_of_ref_both_ways(programs, name, gpu):
    """What `kernels/experts.py` launches: rows and columns of one operand in one pass, with scales in Blackwell's
    tiles, or of gathered rows."""
    c, generator = PROGRAMS[name].constants, torch.Generator().manual_seed(3)
    near = ties(E4M3, 448, 32, torch.bfloat16, generator)
    x = torch.cat(
        [hard(32, torch.bfloat16, generator), near.repeat(1, 4), near.view(256, 32).T.repeat(1, 4)]
    )  # ties along rows, and along columns
    if c["SOURCE"]:
        x = x.float()
    index = (
        torch.randperm(len(x), generator=generator).repeat(2)[: len(x) + 7]
        if c["SOURCE"]
        else torch.zeros(1, dtype=torch.int64)
    )
    index[::9] = -1 if c["SOURCE"] else 0  # padding between experts
    v = torch.where((index >= 0)[:, None], x[index.clamp(min=0)], 0.0) if c["SOURCE"] else x
    (M, N), fp4, swizzled = v.shape, c["ROWS"] == 3, c["SWIZZLE"]
    blocks, down = -(-N // (16 if fp4 else 32)), -(-M // 32)
    room = (lambda rows, wide: (*tiles(rows, wide), 32, 4, 4)) if swizzled else lambda rows, wide: (rows, wide)
    go = Play(programs(name, gpu))
    given = go.give(x), go.give(index), go.give(torch.zeros(1)), go.give(torch.zeros(1, dtype=torch.int64))
    codes, scales = go.take((M, -(-N // 2) if fp4 else N), torch.uint8), go.take(room(M, blocks), torch.uint8)
    places = (
        codes,
        scales,
        go.take((M,), torch.float32),
        go.take((N, M), torch.uint8),
        go.take(room(N, down), torch.uint8),
    )
    last = -(-M // 128) * 128 if swizzled else M
    found = go.run(
        (-(-last // c["BM"]), 1 if fp4 else -(-N // c["BN"]), 1), *given, *places, M, N, 0, *x.stride(), 0, 0
    )
    rows, row_scales, whole, columns, column_scales = found
    if swizzled:
        row_scales, column_scales = unswizzle(row_scales, M, blocks), unswizzle(column_scales, N, down)
    wanted = quant.nvfp4_quantize(v) if fp4 else quant.mxfp8_quantize(v)
    assert M * N // 32 >= 1000
    assert same_bits((rows, row_scales, *((whole[:, None],) if fp4 else ())), tuple(wanted))
    assert same_bits((columns, column_scales), quant.mxfp8_quantize(v.T.contiguous()))


@settings(max_examples=12)
@given(st.data())
def test_any_shape_and_any_view(programs, data):
    name = data.draw(st.sampled_from(["mxfp8 float32", "mxfp8 integers", "nvfp4 float32", "fp8 3x20", "nvfp4 tensor"]))
    M, N = data.draw(st.integers(1, 70)), data.draw(st.integers(1, 300))
    step, offset = data.draw(st.sampled_from([(1, 0), (2, 3)]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    whole = torch.randn(M * 2, N * step + offset, generator=generator) * torch.exp2(
        torch.randint(-60, 60, (2 * M, 1), generator=generator).float()
    )
    x = whole[::2, offset::step]
    x = x.T if data.draw(st.booleans()) else x
    found, wanted = play(programs(name, data.draw(st.sampled_from(sorted(GPUS)))), name, x)
    assert same_bits(tuple(found), tuple(wanted))


@pytest.mark.parametrize("name", ["mxfp8 rceil", "nvfp4 token", "nvfp4 tensor", "fp8 1x128"])
def test_nothing_depends_on_what_the_isa_leaves_open(programs, name, monkeypatch):
    """Neither on the bits of a NaN, nor on registers that nobody wrote, nor on how many blocks run side by side."""
    monkeypatch.setattr(ptx_floats, "NAN", 0xFF812345)
    x = next(cases(name, 1))
    found, wanted = play(programs(name, "sm_100"), name, x, garbage=0xA5A5A5A5A5A5A5A5, threads=1)
    assert same_bits(tuple(found), tuple(wanted))


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize(("name", "block"), [("largest bfloat16", 16384), ("largest float32", 4096)])
def test_largest(programs, name, block, gpu):
    x = next(cases(name))[1::4].contiguous()
    go = Play(programs(name, gpu))
    (parts,) = go.run((-(-x.numel() // block),), go.give(x), go.take((-(-x.numel() // block),), torch.int32), x.numel())
    assert parts.max().view(torch.float32) == x.abs().max().float() and x.isfinite().all()


@pytest.mark.parametrize("gpu", GPUS)
def test_weight_deltas(programs, gpu):
    old = torch.randn(5000).bfloat16()
    new = torch.where(torch.rand(5000) < 0.05, (old.view(torch.int16) + 1).view(torch.bfloat16), old)
    wanted = weight_codec.encode_delta(old, new)
    a, b, blocks = old.view(torch.int16), new.view(torch.int16), 3
    go = Play(programs("delta count", gpu))
    (counts,) = go.run((blocks,), go.give(a), go.give(b), go.take((blocks,), torch.int32), 5000)
    assert counts.sum() == len(wanted[0])
    go = Play(programs("delta write", gpu))
    places = [go.take((len(wanted[0]),), dtype) for dtype in (torch.int64, torch.int32)]
    positions, steps = go.run(
        (blocks,), go.give(a), go.give(b), go.give((counts.cumsum(0) - counts).contiguous()), *places, 5000
    )
    assert all(torch.equal(x, y) for x, y in zip((positions, steps), wanted, strict=True))
    go = Play(programs("delta scatter", gpu))
    place = go.give(a)
    go.out.append((place, (5000,), torch.int16))
    (applied,) = go.run((1,), place, go.give(positions), go.give(steps), len(positions))
    assert torch.equal(applied, b)


@pytest.mark.parametrize("gpu", GPUS)
def test_tokens_to_experts(programs, gpu):
    experts = torch.randint(0, 11, (100, 4))
    total, blocks, E = 400, 4, 16
    go = Play(programs("experts count", gpu))
    (counts,) = go.run((blocks,), go.give(experts), go.take((blocks, E), torch.int32), total)
    assert torch.equal(counts.sum(0), experts.flatten().bincount(minlength=E).int())
    ends = counts.sum(0).cumsum(0)
    before = (counts.cumsum(0) - counts + (ends - counts.sum(0))).long()
    go = Play(programs("experts place", gpu))
    order, place = go.run(
        (blocks,), go.give(experts), go.give(before), *(go.take((total,), torch.int64) for _ in range(2)), total
    )
    wanted = expert_rows.sort_by_expert(experts, E)
    assert torch.equal(order, wanted[0]) and torch.equal(place.view(100, 4), wanted[1]) and torch.equal(ends, wanted[2])


@pytest.mark.parametrize("gpu", GPUS)
def test_a_router_picks_its_experts_without_approximations(programs, gpu):
    """Gates take an approximate exponential and an approximate division. Experts are those of `ref` whatever both
    give."""
    scores = torch.randn(50, 16)
    scores[3, ::2] = -torch.inf
    scores[7] = scores[7].round()
    replayed = torch.rand(50, 16).argsort(1)[:, :4].contiguous()
    wanted = router_replay.route(scores, 4, replayed, 0.5)[1]
    arguments = 50, 16, int(np.float32(np.log(0.5)).view(np.uint32))
    for approximate in (0x7FC00000, 0):
        go = Play(programs("route", gpu), approximate=approximate)
        places = [go.take((50, 4), dtype) for dtype in (torch.int64, torch.float32)]
        experts, _ = go.run((4,), go.give(scores), go.give(replayed), *places, *arguments)
        assert torch.equal(experts, wanted)
    with pytest.raises(UnknownInstruction, match=r"ex2\.approx\.f32|div\.full\.f32"):
        run(programs("route", gpu), (4,), (), Memory())


@pytest.mark.parametrize(("name", "gpu"), QUANTISERS)
def test_where_bits_are_promised_nothing_can_be_fused_or_approximated(programs, name, gpu):
    opcodes = {one.opcode for one in programs(name, gpu).instructions}
    assert not any(word in opcode for opcode in opcodes for word in ("approx", "full", "ftz", "fma"))
    assert not open_roundings(programs(name, gpu)) or "fusion" in name
    assert ("div.rn.f32" in opcodes) == (not name.startswith("mxfp8"))
    assert ("cvt.rn.satfinite.e4m3x2.f32" in opcodes) == PROGRAMS[name].constants.get("NATIVE", False)


@pytest.mark.parametrize("name", ["nvfp4 token fusion", "nvfp4 fast fusion", "fp8 fusion"])
def test_nothing_of_nvfp4_and_fp8_can_be_fused(programs, name):
    """Even with fusion on: no product goes straight into an addition."""
    program = programs(name, "sm_100")
    assert not contractions(program) and contracted(program) == replace(
        program, registers=contracted(program).registers
    )


def test_ptxas_may_fuse_a_rounding_of_mxfp8_and_the_bits_stay(programs):
    """With fusion on, |x · 2^k| + 2^14, which rounds subnormal codes, may become one instruction with one rounding. A
    product with a power of two is exact, or far below what the addition sees: so the codes are the same."""
    program = programs("mxfp8 fusion", "sm_90")
    fused = contracted(program)
    number = len(contractions(program))
    assert (
        open_roundings(program)
        and number == 32
        and sum(one.opcode == "fma.rn.f32" for one in fused.instructions) == number
    )
    for x in cases("mxfp8 fusion"):
        found, wanted = play(fused, "mxfp8 fusion", x)
        assert same_bits(tuple(found), tuple(wanted))


FUSIBLE = """
.visible .entry axpy(.param .u64 p0) .reqntid 32
{
.reg .b32 %r<9>; .reg .b64 %rd<2>;
ld.param.b64 %rd1, [p0];
mov.b32 %r1, 0f3F800800;
mov.b32 %r4, 0fBF801000;
mul.f32 %r2, %r1, %r1;
add.f32 %r3, %r2, %r4;
st.global.b32 [%rd1], %r3;
}
"""


def test_one_rounding_is_not_two():
    """(1 + 2^-12)² − (1 + 2^-11) is 2^-24: kept by a fused multiply-add, lost if the product is rounded first."""
    found = []
    for program in (parse(FUSIBLE), contracted(parse(FUSIBLE))):
        go = Play(program)
        found += go.run((1,), go.take((1,), torch.float32))
    assert [x.item() for x in found] == [0.0, 2.0**-24]


def test_under_the_interpreter_nothing_is_compiled(monkeypatch):
    monkeypatch.setattr("kernels.ptx.INTERPRETED", True)
    one = PROGRAMS["largest float32"]
    with pytest.raises(
        RuntimeError,
        match="cannot be compiled with TRITON_INTERPRET=1 in the environment; compile them in a process without it",
    ):
        ptx(quantisers.largest_kernel, one.signature, one.constants, 90)


def test_activations_are_refused(programs):
    """silu's exponential is approximate on a GPU: its bits are not known here."""
    with pytest.raises(
        UnknownInstruction, match=r"no model of the PTX instruction (ex2\.approx|div\.full|rcp\.approx)"
    ):
        run(programs("nvfp4 swiglu", "sm_90"), (1,), (), Memory())


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("name", ["mxfp8 rceil", "nvfp4 token", "nvfp4 float32"])
def test_a_missing_barrier_is_noticed(programs, name, gpu):
    """Every barrier of these programs is needed but the last: without it a warp would read or overwrite what another
    one is using."""
    program = programs(name, gpu)
    x = next(cases(name))[:16]
    barriers = [i for i, one in enumerate(program.instructions) if one.opcode == "bar.sync"]
    noticed = 0
    for i in barriers:
        nothing = replace(
            program.instructions[i],
            opcode="mov.b32",
            operands=(program.instructions[0].operands[0],) * 2,
            text="nothing",
        )
        broken = replace(program, instructions=(*program.instructions[:i], nothing, *program.instructions[i + 1 :]))
        try:
            play(broken, name, x)
        except Fault as error:
            assert "no barrier is between" in str(error)
            noticed += 1
    assert barriers and noticed == len(barriers)


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("nvfp4 token", "setp.ge.f32", "setp.gt.f32"),
        ("nvfp4 token", "div.rn.f32", "mul.rn.f32"),
        ("fp8 1x128", "min.NaN.xorsign.abs", "min.xorsign.abs"),
        ("mxfp8 rceil", "shfl.sync.bfly", "shfl.sync.down"),
        ("mxfp8 rceil", "cvt.rn.satfinite.e4m3x2.f32", "cvt.rn.bf16x2.f32"),
        ("mxfp8 integers", "add.rn.f32", "sub.rn.f32"),
        ("fp8 1x128", "max.s32", "min.s32"),
    ],
)
def test_other_instructions_give_other_bits(programs, name, right, wrong):
    """Or threads that should agree no longer do."""
    text = programs(name, "sm_90", text=True)
    assert right in text
    program, noticed = parse(text.replace(right, wrong)), False
    for x in cases(name):
        try:
            found, wanted = play(program, name, x)
            noticed |= not same_bits(tuple(found), tuple(wanted))
        except Fault as error:
            assert "two threads store different numbers" in str(error)
            noticed = True
    assert noticed
