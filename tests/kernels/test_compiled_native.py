"""Products of MXFP8 and NVFP4, compiled for Blackwell and for Hopper on a machine without either: which instructions multiply, and how scales get
to them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MMA = {2: "tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale.block32", 3: "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.block16"}


@pytest.fixture(scope="module")
def everything():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("compile_native.py"))]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def found(everything):
    return [one for one in everything if one["kernel"] != "matmul_kernel"]


def test_every_product_is_scaled_by_the_tensor_core(found):
    """Plain, grouped, and of the weights. MXFP8 with a scale per 32, NVFP4 with one per 16."""
    assert {(one["kernel"], one["form"]) for one in found} == {
        ("scaled_matmul_kernel", 2),
        ("scaled_matmul_kernel", 3),
        ("scaled_rows_kernel", 2),
        ("scaled_rows_kernel", 3),
        ("scaled_weights_kernel", 2),
    }
    for one in found:
        products = {name for name in one["instructions"] if name.startswith(("tcgen05.mma", "wgmma"))}
        assert products == {MMA[one["form"]]}, one


def test_scales_are_copied_as_they_lie(found):
    """From shared to tensor memory by `tcgen05.cp`, as many as a step of the loop has tiles; only the sum's zeros are stored from registers,
    which in tensor memory are 128 columns. Loads are asynchronous, and a tile fits in the 227 KB of a program."""
    for one in found:
        copies = [n for name, n in one["instructions"].items() if name.startswith("tcgen05.cp")]
        stores = {name: n for name, n in one["instructions"].items() if name.startswith("tcgen05.st")}
        assert len(copies) == 1 and copies[0] >= 2, one
        assert sum(stores.values()) == 1, one
        assert sum(n for name, n in one["instructions"].items() if name.startswith("cp.async")) > 0, one
        assert one["shared"] <= 227 * 1024, one


def test_hopper_multiplies_fp8_codes_and_expands_the_others(everything):
    products = {
        one["form"]: {name.rpartition("n128k")[2] for name in one["instructions"] if name.startswith("wgmma.mma")}
        for one in everything
        if one["kernel"] == "matmul_kernel"
    }
    assert products == {1: {"32.f32.e4m3.e4m3"}, 2: {"16.f32.bf16.bf16"}, 3: {"16.f32.bf16.bf16"}}
