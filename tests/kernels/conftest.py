"""What tests of kernels share."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from triton.runtime import interpreter

from etude.bench.compiled_kernels import compiler
from kernels import launch
from ref import quant
from ref.formats import e4m3_decode


@pytest.fixture
def native(monkeypatch):
    """Products as on Blackwell, by `tl.dot_scaled`. Triton 3.9's interpreter reads every scale as E8M0, also NVFP4's,
    whose scales are E4M3 (test_native.py shows it); here these are decoded as what they are."""
    monkeypatch.setattr(launch, "path", lambda x: "native")
    if torch.cuda.is_available():  # a GPU that does not scale blocks expands them inside of `tl.dot_scaled`
        return
    real = interpreter._dot_scaled_scale_to_f32

    def decoded(handle, kind):
        return real(handle, kind) if handle.dtype.is_int() else e4m3_decode(torch.from_numpy(handle.data)).numpy()

    monkeypatch.setattr(interpreter, "_dot_scaled_scale_to_f32", decoded)


@pytest.fixture(scope="session")
def exactly():
    """x as a product over `axis` sees it in a format, in float64: codes times scales without another rounding."""

    def wide(x, form, axis, weight=False):
        if form == "fp8":
            last = x.movedim(axis, -1)
            block = (128, 128) if weight else (1, 128)
            codes, scale = quant.blockwise_fp8_quantize(last, block)
            return quant.blockwise_fp8_dequantize(codes, scale.double(), block).movedim(-1, axis)
        if form == "nvfp4-token":
            last = x.movedim(axis, -1)
            packed, blocks, scale = quant.nvfp4_quantize(last)
            return quant.nvfp4_dequantize(packed, blocks, scale.double(), last.shape[-1]).movedim(-1, axis)
        return quant.rounded(x, form, axis, weight).double()

    return wide


@pytest.fixture(scope="session")
def one_compiler():
    """The process that `etude kernels` asks, which needs four seconds to begin."""
    with compiler() as one:
        yield one


@pytest.fixture(scope="session")
def in_a_compiler():
    """What a program prints as JSON, in a process where kernels are compiled: without the interpreter."""

    def ask(program: str):
        root = str(Path(__file__).resolve().parents[2])
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": root}
        code = f"import json\nfrom dataclasses import replace\nfrom kernels import compiled\n{program}"
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code], env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout)

    return ask
