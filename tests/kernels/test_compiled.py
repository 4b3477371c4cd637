"""What a GPU would run, by what the compiler says of it. results/kernels-compiled.json holds every kernel × use ×
configuration × target, each under a key of its source and arguments. The keys are compared with the source as it is; of
every use, one configuration is compiled again."""

import ast
import contextlib
import json
import re
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.bench import compiled_kernels
from kernels import compiled, launch, unfit, work
from kit.settings import RunError

ROOT = Path(__file__).resolve().parents[2]
NVIDIA = ("sm_90", "sm_100")


@pytest.fixture(scope="session")
def table():
    return json.loads((ROOT / "results" / compiled_kernels.FILE).read_text(encoding="utf-8"))


@pytest.fixture
def shared(one_compiler, monkeypatch):
    """The command takes the process that already runs: a new one needs four seconds to begin."""
    monkeypatch.setattr(compiled_kernels, "compiler", lambda: contextlib.nullcontext(one_compiler))


@pytest.fixture(scope="session")
def jobs(one_compiler):
    return one_compiler.jobs


@pytest.fixture(scope="session")
def offered(table, jobs):
    """Records of all configurations that an autotuner may choose, on every target."""
    keys = {job["key"] for job in jobs if job["offered"]}
    return [one for one in table["results"] if one["key"] in keys]


def test_the_table_is_of_this_source(table, jobs):
    assert table["versions"] == compiled.versions()
    named = ("kernel", "use", "target", "tile", "form", "key")
    there, here = ({tuple(one[name] for name in named): None for one in some} for some in (table["results"], jobs))
    stale = [key for key in [*there, *here] if key not in there or key not in here]
    assert not stale, (
        "compile with `etude kernels`, then write kernels/unfit.py with `python -m etude.bench.compiled_kernels`"
    )
    assert [*there] == [*here]


def test_what_compiles_here_is_what_the_table_says(table):
    """One configuration of every kernel × use on one of NVIDIA's targets in turn, and of every kernel on AMD's: that
    with the fewest registers, which compiles in a second where the largest tile takes ten. The others are the same
    source with other constants, and their keys were compared."""
    records = {one["key"]: one for one in table["results"]}

    def smallest(jobs):
        least, targets = {}, {}
        for job in jobs:
            if job["target"] in NVIDIA:
                targets.setdefault((job["kernel"], job["use"]), {})[job["target"]] = None
        turns = {use: [*there][number % len(there)] for number, (use, there) in enumerate(targets.items())}
        for job in jobs:
            at = job["kernel"], job["use"] if job["target"] in NVIDIA else "", job["target"]
            if job["target"] in NVIDIA and turns[at[:2]] != job["target"]:
                continue
            if at not in least or records[job["key"]]["registers"] < records[least[at]["key"]]["registers"]:
                least[at] = job
        return list(least.values())

    found, versions = compiled_kernels.compile_all(choose=smallest)
    assert {one["target"] for one in found} == set(compiled_kernels.TARGETS)
    assert versions == table["versions"] and {one["use"] for one in found} == {one["use"] for one in records.values()}
    assert found == [records[one["key"]] for one in found]


def test_every_kernel_has_uses_on_every_target(table):
    written = {
        f"{path.stem}.{node.name}"
        for path in (ROOT / "kernels").glob("*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel")
    }
    found = {(one["kernel"], one["target"]) for one in table["results"]}
    # Tensor cores of other GPUs do not scale blocks.
    targets = {name: ("sm_100",) if name.startswith("block_scaled.") else compiled_kernels.TARGETS for name in written}
    assert found == {(name, target) for name in written for target in targets[name]}


def test_what_is_offered_compiles_fits_and_spills_nothing(offered):
    assert [one for one in offered if not one["fits"]] == []
    limit = {"sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx950": 160 * 1024}
    for one in offered:
        assert one["failed"] is None and not one["spilled"] and one["blocks"] and one["shared"] <= limit[one["target"]]


def test_what_is_not_offered_has_a_reason(table):
    assert (ROOT / "kernels" / "unfit.py").read_text(encoding="utf-8") == compiled_kernels.unfit_file(table["results"])
    assert compiled_kernels.unfit(table["results"]) == unfit.UNFIT


def test_the_autotuner_has_something_to_choose_from(table, offered):
    def forms(some):
        return {(one["kernel"], one["form"], one["target"]) for one in some}

    assert forms(offered) == forms(table["results"])


MX = r"tcgen05\.mma\.cta_group::1\.kind::mxf8f6f4\.block_scale\.block32"
NV = r"tcgen05\.mma\.cta_group::1\.kind::mxf4nvf4\.block_scale\.block16"
INSTRUCTIONS = [
    # kernel, use, target, what every offered configuration multiplies with
    ("gemm.matmul_kernel", "product, fp8", "sm_90", r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k32\.f32\.e4m3\.e4m3"),
    ("gemm.matmul_kernel", "product, fp8", "sm_100", r"tcgen05\.mma\.cta_group::1\.kind::f8f6f4"),
    (
        "gemm.matmul_kernel",
        "product, bfloat16",
        "sm_90",
        r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k16\.f32\.bf16\.bf16",
    ),
    ("gemm.matmul_kernel", "product, bfloat16", "sm_100", r"tcgen05\.mma\.cta_group::1\.kind::f16"),
    ("gemm.matmul_kernel", "product, mxfp8", "sm_90", r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k16\.f32\.bf16\.bf16"),
    (
        "gemm.matmul_kernel",
        "product, nvfp4-token",
        "sm_90",
        r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k16\.f32\.bf16\.bf16",
    ),
    (
        "grouped_gemm.rows_kernel",
        "experts' product, fp8",
        "sm_90",
        r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k32\.f32\.e4m3\.e4m3",
    ),
    ("grouped_gemm.rows_kernel", "experts' product, fp8", "sm_100", r"tcgen05\.mma\.cta_group::1\.kind::f8f6f4"),
    (
        "grouped_gemm.weights_kernel",
        "experts' product, fp8, gradient",
        "sm_90",
        r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k32\.f32\.e4m3\.e4m3",
    ),
    (
        "grouped_gemm.weights_kernel",
        "experts' product, fp8, gradient",
        "sm_100",
        r"tcgen05\.mma\.cta_group::1\.kind::f8f6f4",
    ),
    (
        "linear_logprob.forward_kernel",
        "log-prob and entropy, bf16",
        "sm_90",
        r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k16\.f32\.bf16\.bf16",
    ),
    ("linear_logprob.forward_kernel", "log-prob and entropy, bf16", "sm_100", r"tcgen05\.mma\.cta_group::1\.kind::f16"),
    (
        "muon.symmetric_kernel",
        "Newton–Schulz, wide, bf16",
        "sm_90",
        r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k16\.f32\.bf16\.bf16",
    ),
    ("muon.symmetric_kernel", "Newton–Schulz, wide, bf16", "sm_100", r"tcgen05\.mma\.cta_group::1\.kind::f16"),
    ("block_scaled.scaled_matmul_kernel", "product, mxfp8", "sm_100", MX),
    ("block_scaled.scaled_matmul_kernel", "product, nvfp4-token", "sm_100", NV),
    ("block_scaled.scaled_rows_kernel", "experts' product, mxfp8", "sm_100", MX),
    ("block_scaled.scaled_rows_kernel", "experts' product, nvfp4-token", "sm_100", NV),
    ("block_scaled.scaled_weights_kernel", "experts' product, mxfp8, gradient", "sm_100", MX),
    (
        "grouped_gemm.rows_kernel",
        "experts' product, mxfp8",
        "sm_90",
        r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k16\.f32\.bf16\.bf16",
    ),
    (
        "grouped_gemm.rows_kernel",
        "experts' product, nvfp4-token",
        "sm_90",
        r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k16\.f32\.bf16\.bf16",
    ),
    (
        "grouped_gemm.weights_kernel",
        "experts' product, mxfp8, gradient",
        "sm_90",
        r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k16\.f32\.bf16\.bf16",
    ),
]


@pytest.mark.parametrize(("kernel", "use", "target", "pattern"), INSTRUCTIONS)
def test_tensor_cores(offered, kernel, use, target, pattern):
    found = [
        one["instructions"] for one in offered if (one["kernel"], one["use"], one["target"]) == (kernel, use, target)
    ]
    assert found
    for names in found:
        assert len(names) == 1 and re.fullmatch(pattern, names[0]), names


def test_float32_is_multiplied_without_tensor_cores(table):
    """NVIDIA's round float32 to TF32, with 10 bits of mantissa. AMD's take it as it is."""
    for one in table["results"]:
        if one["form"].startswith("float32") and one["kernel"] != "quant.mxfp8_kernel":
            assert all(name.endswith("_f32") and one["target"] == "gfx950" for name in one["instructions"]), one


WIDEN = {"cvt.f32.bf16"}
"""bfloat16 to float32, exactly."""
SWIGLU = {"add.rn.f32", "mul.rn.f32", "ex2.approx.f32", "div.full.f32"}
"""silu: the hardware's exponential and its division. No bits are promised of the activation, but its quantisation is
that of the rest."""
HARDWARE = {"abs.f32", "min.NaN.xorsign.abs.f32", "cvt.rn.satfinite.e4m3x2.f32"}
"""Clamp to ±448, NaN kept, and round to nearest even. The size of a number, by integers in the source, is abs.f32 on
Blackwell."""
MXFP8 = WIDEN | HARDWARE | {"mul.rn.f32"}
NVFP4 = WIDEN | {"abs.f32", "add.rn.f32", "mul.rn.f32", "div.rn.f32", "cvt.rn.f32.u32"}
ARITHMETIC = {
    "quant.mxfp8_kernel": MXFP8,
    "quant.nvfp4_kernel": NVFP4,
    "orientations.both_kernel": MXFP8 | NVFP4 | {"abs.bf16", "cvt.rn.f32.u16"},
    "orientations.swiglu_gradient_kernel": MXFP8 | {"sub.rn.f32"},
    "quant.fp8_kernel": WIDEN | HARDWARE | {"div.rn.f32"},
    "quant.largest_kernel": WIDEN,
    "weight_sync.count_kernel": set(),
    "weight_sync.write_kernel": set(),
    "weight_sync.scatter_kernel": set(),
    "expert_rows.count_kernel": set(),
    "expert_rows.place_kernel": set(),
    "expert_rows.offsets_kernel": set(),
    "expert_rows.gather_kernel": WIDEN | {"mul.rn.f32", "mul.rn.bf16", "cvt.rn.bf16x2.f32"},
    "router_replay.route_kernel": WIDEN | SWIGLU | {"sub.rn.f32", "max.f32"},
}
"""Everything that kernels whose bits are promised may compute in floating point: nothing fused, every division IEEE's,
nothing flushed to zero. The integers of cvt.rn.f32.u32 and u16 are the mantissas of E4M3, 0 to 7. A gather multiplies
by gates, if there are any, and rounds once more. A router promises its experts, which it finds by integers; its gates
are approximate. Blackwell has instructions for two float32 at once, which end in f32x2."""


def test_bits_that_are_promised_can_be_kept(table):
    exact = [one for one in table["results"] if one["exact"] and one["target"] in NVIDIA]
    assert {one["kernel"] for one in exact} == ARITHMETIC.keys()
    for one in exact:
        extra = SWIGLU if "SwiGLU" in one["use"] else set()
        assert {name.removesuffix("x2") for name in one["arithmetic"]} <= ARITHMETIC[one["kernel"]] | extra, one
        assert not any(re.match(r"fma|mad", name) or ".ftz" in name for name in one["arithmetic"])


def test_every_quantiser_divides_or_scales_as_it_says(table):
    """MXFP8 multiplies by powers of two; the others divide by IEEE's rule, the fast variant too, for its
    reciprocals."""
    for one in table["results"]:
        if one["target"] in NVIDIA and one["kernel"] in (
            "quant.mxfp8_kernel",
            "quant.nvfp4_kernel",
            "quant.fp8_kernel",
        ):
            assert ("div.rn.f32" in one["arithmetic"]) == (one["kernel"] != "quant.mxfp8_kernel")
            native = "cvt.rn.satfinite.e4m3x2.f32" in one["arithmetic"]
            assert native == (one["kernel"] != "quant.nvfp4_kernel")  # whose block scales are rounded in integers
        if one["target"] in NVIDIA and one["kernel"] == "orientations.both_kernel":
            assert ("div.rn.f32" in one["arithmetic"]) == ("ROWS 3" in one["form"])
            copied = "SOURCE 4 ROWS 2" in one["form"]  # received codes, whose columns alone are encoded again
            assert ("cvt.rn.satfinite.e4m3x2.f32" in one["arithmetic"]) == (
                "COLUMNS 2" in one["form"] or "ROWS 2" in one["form"] and not copied
            )


def test_the_option_is_what_keeps_fusion_away(in_a_compiler):
    """SwiGLU's gradient is fused, and would not be with the option. Without it the fast variant's product and the sum
    behind it would be `mul.f32` and `add.f32`, which ptxas may fuse; `mul.rn.f32` it may not. Nor does it: a quantiser
    that only multiplies has no FFMA."""
    fused, kept, loose, fast, ieee, sass = in_a_compiler(
        "def job(use, fusion=None):\n"
        "    found = next(j for j in compiled.jobs() if j.launch.use == use and j.target == 'sm_90')\n"
        "    return found if fusion is None else replace(found, launch=replace(found.launch, "
        "options={'enable_fp_fusion': fusion}))\n"
        "swiglu, fast = \"SwiGLU's gradient\", 'NVFP4 per token, fast'\n"
        "jobs = job(swiglu), job(swiglu, False), job(fast, True), job(fast), job('NVFP4 per token, ieee')\n"
        "print(json.dumps([compiled.text(j, 'ptx') for j in jobs] + [compiled.text(job('MXFP8 along "
        "rows, rceil'), 'sass')]))"
    )
    assert "fma.rn.f32" in compiled.arithmetic(fused) and "fma.rn.f32" not in compiled.arithmetic(kept)
    assert {"mul.f32", "add.f32"} <= set(compiled.arithmetic(loose)) and {"mul.rn.f32", "add.rn.f32"} <= set(
        compiled.arithmetic(fast)
    )
    assert "FMUL" in sass and "FFMA" not in sass
    assert (
        0 < fast.count("div.rn.f32") < ieee.count("div.rn.f32") / 4
    )  # a reciprocal per block, not a division per number


@pytest.mark.parametrize(
    ("registers", "warps", "shared", "columns", "blocks"),
    [
        (128, 8, 0, 0, 2),  # 128 registers × 256 threads are half of 65,536
        (129, 8, 0, 0, 1),  # 129 × 32 are rounded up to 4352 per warp
        (96, 1, 0, 0, 20),  # five warps of 3072 on each of four schedulers, though 65,536 would hold 21
        (32, 4, 0, 0, 16),  # 64 warps
        (16, 1, 0, 0, 32),  # 32 blocks
        (32, 4, 75 * 1024, 0, 3),  # 3 × (75 + 1) KB are 228 KB
        (32, 4, 76 * 1024, 0, 2),
        (32, 4, 227 * 1024, 0, 1),
        (32, 4, 227 * 1024 + 1, 0, 0),
        (255, 8, 1024, 0, 1),  # 8192 × 8 are all registers
        (255, 16, 1024, 0, 0),
        (32, 4, 1024, 256, 2),  # 512 columns of tensor memory
    ],
)
def test_blocks_on_a_multiprocessor(registers, warps, shared, columns, blocks):
    assert compiled.blocks_per_unit(compiled.ARCHITECTURES["sm_100"], registers, warps, shared, columns) == blocks


@given(
    st.sampled_from(sorted(compiled.ARCHITECTURES)),
    st.integers(1, 255),
    st.sampled_from([1, 2, 4, 8, 16]),
    st.integers(0, 250_000),
)
def test_blocks_are_as_many_as_fit(target, registers, warps, shared):
    a = compiled.ARCHITECTURES[target]

    def fits(blocks):
        a_warp = next(n for n in range(a.unit, 10**6, a.unit) if n >= registers * a.target.warp_size)
        on_a_scheduler = (blocks * warps + 3) // 4
        space = on_a_scheduler * a_warp <= a.registers // 4 and blocks * (shared + a.reserved) <= a.shared
        return space and blocks * warps <= a.warps and blocks <= a.blocks

    blocks = compiled.blocks_per_unit(a, registers, warps, shared)
    if shared > a.block:
        assert blocks == 0
    else:
        assert fits(blocks) and not fits(blocks + 1)


def test_bytes_and_flops_by_hand(table):
    """x [32768, 2048] times weights [1536, 2048] in FP8, in tiles of 128 × 128; quantised, 8192 × 8192 numbers in tiles
    of 32 × 128."""
    first = {(one["kernel"], one["use"], one["target"]): one for one in reversed(table["results"])}
    one = first["gemm.matmul_kernel", "product, fp8", "sm_90"]
    assert one["tile"].startswith("BM 128 BN 128 ") and one["tile_flops"] == 2 * 128 * 128 * 2048
    assert one["tile_bytes"] == 256 * 2048 * (1 + 4 / 128) + 128 * 128 * 2 and one["intensity"] == 117.0
    assert one["floor_us"] == round(2 * 32768 * 2048 * 1536 / 1979e12 * 1e6, 1)
    one = first["quant.mxfp8_kernel", "MXFP8 along rows, rceil", "sm_100"]
    assert one["tile_bytes"] == 32 * 128 * (2 + 1 + 1 / 32) and one["tile_flops"] == 0
    assert one["floor_us"] == round(8192 * 8192 * (2 + 1 + 1 / 32) / 8e12 * 1e6, 1)
    # Blackwell's own tiles are 128 × 128 too. A row of 2048 numbers has 1024 bytes of codes and 128 of scales in NVFP4,
    # 2048 and 64 in MXFP8.
    one = first["block_scaled.scaled_matmul_kernel", "product, nvfp4-token", "sm_100"]
    assert one["tile_flops"] == 2 * 128 * 128 * 2048 and one["tile_bytes"] == 256 * (1024 + 128) + 128 * 128 * 2
    one = first["block_scaled.scaled_rows_kernel", "experts' product, mxfp8", "sm_100"]
    assert one["tile_flops"] == 2 * 128 * 128 * 2048 and one["tile_bytes"] == 256 * (2048 + 64) + 128 * 128 * 2
    one = first["block_scaled.scaled_weights_kernel", "experts' product, mxfp8, gradient", "sm_100"]
    rows = (262144 // 128 + 128) * 128  # room for any split
    assert one["tile_flops"] == 2 * 128 * 128 * rows // 128
    one = first["linear_logprob.forward_kernel", "log-prob and entropy, bf16", "sm_90"]
    assert one["floor_us"] == round(2 * 8192 * 151936 * 2048 / 989e12 * 1e6, 1)


def test_work_knows_every_kernel_that_multiplies(table):
    assert {one["kernel"].partition(".")[2] for one in table["results"] if one["instructions"]} == work.PRODUCTS.keys()


def test_the_dispatch_of_configurations(monkeypatch):
    """What spills on this GPU is left out; float32 has tiles of its own where there are any."""
    import torch

    offered = launch.configs({"BM": 1}, ({"BM": 64}, 4, 2), ({"BM": 128}, 8, 3), plain=(({"BM": 16}, 4, 2),))
    fit = launch.fitting("gemm.matmul_kernel", "FORM")["early_config_prune"]
    monkeypatch.setattr(launch, "architecture", lambda x: "sm_90")
    monkeypatch.setattr(
        launch, "UNFIT", {("gemm.matmul_kernel", "sm_90", "uint8 FORM 2"): ("BM 128, 8 warps, 3 stages",)}
    )

    def sizes(dtype, **constants):
        return [one.kwargs["BM"] for one in fit(offered, {"n": 3, "a": torch.zeros(1, dtype=dtype)}, **constants)]

    assert (
        sizes(torch.uint8, FORM=2) == [64]
        and sizes(torch.uint8, FORM=1) == [64, 128]
        and sizes(torch.float32, FORM=0) == [16]
    )
    assert [one.kwargs["BM"] for one in offered.large] == [64, 128]
    assert offered.candidates(torch.bfloat16) is offered.large and launch.configs({}, ({}, 4, 2)).candidates(
        torch.float32
    )


def test_instructions_are_read_from_text():
    ptx = """
\t// fma.rn.f32 in a comment
\t@%p1 fma.rn.f32 \t%r1, %r2, %r3, %r4;
\tmul.rn.f32 \t%r1, %r2, %r3;
\tadd.s32 \t%r1, %r2, %r3;
\tcvt.rn.satfinite.e4m3x2.f32 %rs1, %r1, %r2;
\twgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%r1}, %rd1, %rd2;
\t@%p2 tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.block16 [%r1], %rd1;
"""
    assert compiled.arithmetic(ptx) == ("cvt.rn.satfinite.e4m3x2.f32", "fma.rn.f32", "mul.rn.f32")
    found = compiled.instructions(ptx)
    assert found == (
        "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.block16",
        "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3",
    )
    assert [compiled_kernels.short(name) for name in found] == [
        "tcgen05 mxf4nvf4 block_scale block16",
        "wgmma e4m3.e4m3",
    ]
    rates = {
        (): "fp32",
        found[:1]: "4",
        found[1:]: "8",
        ("tcgen05.mma.cta_group::1.kind::f16",): "16",
        ("v_mfma_f32_16x16x32_bf16",): "16",
    }
    for names, rate in rates.items():
        assert compiled.rate_of(names) == rate
    assert compiled.rate_of(("tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale.block32",)) == "8"


# The command.


def test_a_part_is_shown_and_not_written(ask, shared, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = ask("kernels", "weight_sync.count", "--target", "sm_90")
    assert code == 0 and "weight_sync.count_kernel" in out and "what an H100 measured" in out and "compiling 1/1" in err
    assert list(tmp_path.iterdir()) == []


def test_code_is_shown(ask, shared):
    code, out, err = ask("kernels", "weight_sync.count", "--show", "ptx", "--target", "sm_100")
    assert code == 0 and ".target sm_100a" in out and "delta between weights, sm_100" in err
    assert "EXIT" in ask("kernels", "weight_sync.count", "--show", "sass")[1]
    assert "s_endpgm" in ask("kernels", "weight_sync.count", "--show", "amdgcn", "--target", "gfx950")[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--target", "sm_80"], "--target expects sm_90, sm_100, gfx950, got 'sm_80'"),
        (["weight_sync", "--show", "hlo"], "--show expects ptx, sass for sm_90, got 'hlo'"),
        (["weight_sync", "--show", "ptx", "--target", "gfx950"], "--show expects amdgcn for gfx950, got 'ptx'"),
        (["--show", "ptx"], "--show needs the NAME of a kernel or of a use; `etude kernels` lists them"),
        (["weight_sync", "--out", "x"], "--out writes the complete table only; leave out NAME and --target"),
        (["nothing"], "no kernel or use contains 'nothing'; the kernels are block_scaled.scaled_matmul_kernel"),
        (
            ["nothing", "--show", "sass"],
            "no kernel or use contains 'nothing'; the kernels are block_scaled.scaled_matmul_kernel",
        ),
    ],
)
def test_bad_words(ask, shared, words, message):
    code, out, err = ask("kernels", *words)
    assert code == 2 and out == "" and err.startswith(f"error: {message}") and err.count("\n") == 1


def test_a_dead_compiler_is_one_line(monkeypatch):
    monkeypatch.setattr(compiled_kernels.sys, "executable", "/bin/false")
    with pytest.raises(RunError, match="the process that compiles kernels died: no message"):
        compiled_kernels.compile_all()


def test_the_table_is_written_whole(tmp_path, table):
    path = compiled_kernels.write(table["results"], table["versions"], tmp_path / "new")
    again = json.loads(path.read_text(encoding="utf-8"))
    assert again["results"] == table["results"] and again["command"] == "etude kernels" and "commit" in again["machine"]


def test_a_line_for_each_use_says_how_many_fit(table, capsys):
    compiled_kernels.show(table["results"], table["versions"])
    shown = capsys.readouterr().out
    uses = Counter((one["kernel"], one["use"], one["target"]) for one in table["results"])
    assert (
        len(re.findall(r"\d+ of \d+", shown)) == len(uses) and "wgmma e4m3.e4m3" in shown and "tcgen05 f8f6f4" in shown
    )
