"""The machine that runs PTX: loops, branches, blocks, vectors, exchanges in a warp, memory; what it refuses, and what
it notices."""

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.ptx import Fault, Memory, UnknownInstruction, parse, run

NAN = 0x7FFFFFFF


def bits(x):
    return struct.unpack("<I", struct.pack("<f", x))[0]


def play(body, arguments=(), outputs=64, threads=64, grid=(1,), shared=1024, together=8192):
    """Run a body with a pointer `out` to `outputs` words in %rd0 and the thread in %r0; the words."""
    text = f""".visible .entry test(.param .u64 out, .param .u32 n)
    .reqntid {threads}
    {{
    .reg .pred %p<9>; .reg .b16 %rs<9>;
    .reg .b32 %r<40>;
    .reg .b64 %rd<9>;
    ld.param.b64 %rd0, [out];
    mov.u32 %r0, %tid.x;
    mad.wide.u32 %rd0, %r0, 4, %rd0;
    {body}
    ret;
    }}"""
    memory = Memory()
    like = np.full(outputs, 0xABABABAB, np.uint32)
    address = memory.place(like)
    run(parse(text), grid, (address, *arguments), memory, shared=shared, threads=together)
    return memory.array(address, like).tolist()


def test_a_loop_that_threads_leave_at_different_times():
    """Thread t adds up 1 … t; then all meet, and even threads take another branch than odd ones."""
    body = """
    mov.b32 %r1, 0;
    mov.b32 %r2, 0;
    $again:
    setp.ge.s32 %p1, %r2, %r0;
    @%p1 bra $done;
    add.s32 %r2, %r2, 1;
    add.s32 %r1, %r1, %r2;
    bra.uni $again;
    $done:
    and.b32 %r3, %r0, 1;
    setp.eq.b32 %p2, %r3, 0;
    @%p2 bra $even;
    add.s32 %r1, %r1, 1000;
    bra $store;
    $even:
    add.s32 %r1, %r1, 2000;
    $store:
    bar.sync 0;
    @!%p2 add.s32 %r1, %r1, 5;
    st.global.b32 [%rd0], %r1;"""
    wanted = [t * (t + 1) // 2 + (1005 if t % 2 else 2000) for t in range(64)]
    assert play(body) == wanted
    assert play(body, threads=32, grid=(1,))[:32] == wanted[:32]


def test_blocks_and_parameters():
    body = """
    mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, %ctaid.y;
    mov.u32 %r3, %nctaid.x;
    ld.param.s32 %rd1, [n];
    cvt.u32.u64 %r4, %rd1;
    mad.lo.s32 %r5, %r2, %r3, %r1;
    mul.wide.u32 %rd2, %r5, 128;
    add.s64 %rd3, %rd0, %rd2;
    add.s32 %r6, %r4, %r5;
    st.global.b32 [%rd3], %r6;
    shr.u64 %rd4, %rd1, 32;
    cvt.u32.u64 %r7, %rd4;
    setp.ne.b32 %p1, %r7, -1;
    @%p1 st.global.b32 [%rd3], 0;"""
    for together in (1, 64, 10_000):
        assert play(body, (2**32 - 3,), 6 * 32, 32, (3, 2), together=together) == [
            (block - 3) % 2**32 for block in range(6) for _ in range(32)
        ]


def test_vectors_parts_and_signs():
    body = """
    mov.b64 %rd1, {%r0, 0x12345678};
    mov.b64 {%r1, %r2}, %rd1;
    mov.b64 {_, %r3}, %rd1;
    mov.b32 {%rs1, %rs2}, %r2;
    mov.b32 %r4, {%rs2, %rs1};
    and.b32 %r5, %r0, 3;
    setp.eq.b32 %p1, %r5, 0;
    @%p1 st.global.v4.b32 [%rd0], {%r0, %r2, %r3, %r4};
    ld.global.s8 %r6, [%rd0+3];
    @%p1 ld.global.v2.b32 {%r7, %r8}, [%rd0+8];
    setp.eq.b32 %p2, %r0, 0;
    @%p2 st.global.b32 [%rd0], %r6;
    @%p2 st.global.b32 [%rd0+4], %r8;"""
    found = play(body)
    assert found[:4] == [0, 0x56781234, 0x12345678, 0x56781234] and found[4:8] == [
        4,
        0x12345678,
        0x12345678,
        0x56781234,
    ]
    assert play("ld.global.s8 %r6, [%rd0];\n st.global.b32 [%rd0], %r6;") == [0xFFFFFFAB] * 64


def test_exchanges_in_a_warp():
    def of(mode, by, limits):
        return play(
            f"shfl.sync.{mode}.b32 %r1, %r0, {by}, {limits}, -1;\n st.global.b32 [%rd0], %r1;", threads=32, outputs=32
        )

    assert of("bfly", 1, 31) == [t ^ 1 for t in range(32)]
    assert of("up", 2, 0) == [0, 1, *range(30)]
    assert of("down", 3, 31) == [*range(3, 32), 29, 30, 31]
    assert of("idx", 5, 31) == [5] * 32
    assert of("idx", 1, 0x181F) == [t // 8 * 8 + 1 for t in range(32)] and of("down", 4, 0x181F) == [
        t + 4 if t % 8 < 4 else t for t in range(32)
    ]
    reduce = "add.s32 %r2, %r0, -40;\n redux.sync.{}.{} %r1, %r2, {};\n st.global.b32 [%rd0], %r1;"
    assert play(reduce.format("max", "s32", -1)) == [2**32 - 9] * 32 + [23] * 32
    assert (
        play(reduce.format("max", "u32", -1)) == [2**32 - 9] * 32 + [2**32 - 1] * 32
        and play(reduce.format("min", "s32", -1))[0] == 2**32 - 40
    )
    assert play(reduce.format("add", "s32", -1))[:1] == [(sum(range(32)) - 32 * 40) % 2**32]
    halves = (
        "and.b32 %r3, %r0, 16;\n shl.b32 %r4, 0xFFFF, %r3;\n redux.sync.add.u32 %r1, %r0, %r4;\n "
        "st.global.b32 [%rd0], %r1;"
    )
    assert play(halves, threads=32, outputs=32) == [sum(range(16))] * 16 + [sum(range(16, 32))] * 16
    floats = (
        "cvt.rn.f32.u32 %r2, %r0;\n setp.eq.b32 %p1, %r0, 9;\n @%p1 mov.b32 %r2, 0x7FC00000;\n "
        "redux.sync.max{}.f32 %r1, %r2, -1;\n"
    )
    store = " st.global.b32 [%rd0], %r1;"
    assert (
        play(floats.format("") + store, threads=32, outputs=32) == [bits(31.0)] * 32
        and play(floats.format(".NaN") + store)[0] == NAN
    )


MATRIX = """
shl.b32 %r1, %r0, 4;
and.b32 %r1, %r1, 511;
shl.b32 %r2, %r0, 1;
add.s32 %r3, %r2, 1;
shl.b32 %r3, %r3, 16;
or.b32 %r4, %r3, %r2;
stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r1], {%r4};
bar.sync 0;
"""


def test_matrices_of_a_warp():
    """Lane t holds numbers 2t and 2t + 1 of an 8 × 8 matrix, row by row: memory then counts 0 … 63, and loads give back
    what was stored."""
    assert play(
        MATRIX + "shl.b32 %r5, %r0, 2;\n ld.shared.b32 %r6, [%r5];\n st.global.b32 [%rd0], %r6;", threads=32, outputs=32
    ) == [2 * t | (2 * t + 1) << 16 for t in range(32)]
    both = MATRIX + "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r6}, [%r1];\n st.global.b32 [%rd0], %r6;"
    assert play(both, threads=32, outputs=32) == [2 * t | (2 * t + 1) << 16 for t in range(32)]


SHARED = (
    "shl.b32 %r1, %r0, 2;\n xor.b32 %r2, %r1, {};\n st.shared.b32 [%r1], %r0;\n {}\n ld.shared.b32 %r3, "
    "[%r2];\n st.global.b32 [%rd0], %r3;"
)


def test_shared_memory():
    assert play(SHARED.format(128, "bar.sync 0;")) == [t ^ 32 for t in range(64)]
    assert play(SHARED.format(4, "")) == [t ^ 1 for t in range(64)], "within a warp no barrier is between"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (SHARED.format(128, ""), "another warp wrote, and no barrier is between, in ld.shared"),
        (
            SHARED.format(128, "bar.sync 0;") + "\n st.shared.b32 [%r1], %r2;",
            "another warp used, and no barrier is between",
        ),
        ("mov.b32 %r1, 16;\n ld.shared.b32 %r2, [%r1];", "nobody wrote"),
        ("mov.b32 %r1, 2048;\n st.shared.b32 [%r1], %r0;", "shared memory ends at 1024"),
        ("mov.b32 %r1, 16;\n st.shared.b32 [%r1], %r0;", "different numbers at one shared address"),
        ("ld.param.b64 %rd1, [out];\n st.global.b32 [%rd1], %r0;", "different numbers at one address"),
        ("ld.global.b32 %r1, [%rd0+256];", "are not in any array"),
        ("mov.b64 %rd1, 0;\n ld.global.b8 %rs1, [%rd1];", "are not in any array"),
        ("ld.global.b32 %r1, [%rd0+2];", "is not a multiple of 4"),
        ("ld.global.v2.b32 {%r1, %r2}, [%rd0];", "is not a multiple of 8"),
        ("setp.lt.s32 %p1, %r0, 5;\n @%p1 bar.sync 0;", "not all threads of a block reach a barrier"),
        ("setp.lt.s32 %p1, %r0, 5;\n @%p1 bra $x;\n bar.sync 0;\n $x:", "not all threads of a block reach a barrier"),
        ("setp.lt.s32 %p1, %r0, 5;\n @%p1 redux.sync.max.s32 %r1, %r0, -1;", "not all lanes of a warp take part"),
        ("shfl.sync.bfly.b32 %r1, %r0, 1, 31, 0xFFFF;", "leaves lanes out"),
        ("redux.sync.max.s32 %r1, %r0, 0xFFFF;", "do not name each other"),
        ("add.s64 %rd1, %rd0, %r1;", "fewer than 64 bits"),
    ],
)
def test_faults(body, said):
    with pytest.raises(Fault, match=said):
        play(body)


@pytest.mark.parametrize(
    "text",
    [
        "add.rz.f32 %r1, %r1, %r1",
        "add.rn.sat.f32 %r1, %r1, %r1",
        "fma.rz.f32 %r1, %r1, %r1, %r1",
        "fma.f32 %r1, %r1, %r1, %r1",
        "div.approx.f32 %r1, %r1, %r1",
        "div.full.f32 %r1, %r1, %r1",
        "ex2.approx.ftz.f32 %r1, %r1",
        "cvt.rn.satfinite.e5m2x2.f32 %rs1, %r1, %r1",
        "cvt.rn.e4m3x2.f32 %rs1, %r1, %r1",
        "cvt.rz.bf16.f32 %rs1, %r1",
        "cvt.rzi.s32.f32 %r1, %r1",
        "min.xorsign.f32 %r1, %r1, %r1",
        "setp.lt.b32 %p1, %r1, %r1",
        "setp.lt.s32 %p1|%p2, %r1, %r1",
        "shl.s32 %r1, %r1, %r1",
        "bar.sync 1",
        "bar.red.popc.u32 %r1, 0, %p1",
        "ld.acquire.gpu.global.b32 %r1, [%rd0]",
        "ld.local.b32 %r1, [%rd0]",
        "atom.global.add.u32 %r1, [%rd0], 1",
        "cp.async.bulk.commit_group",
        "wgmma.fence.sync.aligned",
        "tcgen05.mma.cta_group::1.kind::mxf8f6f4 [%r1], %rd1, %rd1, %r1, %p1",
        "ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%r1}, [%r1]",
        "redux.sync.max.abs.f32 %r1, %r1, -1",
        "add.s32 %r1, %r1",
        "brx.idx %r1, table",
        "mul24.lo.s32 %r1, %r1, %r1",
    ],
)
def test_what_is_not_modelled_is_named_before_anything_runs(text):
    memory = Memory()
    like = np.zeros(64, np.uint32)
    body = (
        ".entry k(.param .u64 out) .reqntid 32\n{\n.reg .b32 %r<9>;\n.reg .b64 %rd<9>;\n.reg .pred %p<9>;\n"
        ".reg .b16 %rs<9>;\n"
    )
    body += f"ld.param.b64 %rd0, [out];\nst.global.b32 [%rd0], 1;\n{text};\n}}"
    address = memory.place(like)
    with pytest.raises(UnknownInstruction, match=text.split()[0].replace(".", r"\.")):
        run(parse(body), (1,), (address,), memory)
    assert np.array_equal(memory.array(address, like), like)


def test_texts_that_are_no_program():
    with pytest.raises(ValueError, match=r"no \.entry"):
        parse("add.s32 %r1, %r1, %r1;")
    with pytest.raises(ValueError, match="cannot read the PTX address"):
        parse(".entry k()\n{\nld.global.b32 %r1, [%r1+%r2];\n}")
    with pytest.raises(ValueError, match="2 parameters"):
        play("ret;", (1, 2))
    with pytest.raises(ValueError, match="holds registers and constants"):
        parse(".entry k()\n{\nmov.b64 %rd1, {[%r1], %r2};\n}")


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**16 - 1))
def test_memory_gives_back_what_was_placed(word, short):
    memory = Memory()
    arrays = [np.array([word] * 3, np.uint32), np.array([[short], [1]], np.uint16), np.array([1.5])]
    places = [memory.place(array) for array in arrays]
    assert all(place % 256 == 0 for place in places) and len(set(places)) == 3
    for place, array in zip(places, arrays, strict=True):
        assert np.array_equal(memory.array(place, array), array)
