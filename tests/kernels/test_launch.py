"""Where no kernel can run, one line says what to do."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "call",
    ["quant.mxfp8_quantize(x)", "weight_sync.encode_delta(x.bfloat16(), x.bfloat16())", "router_replay.route(x, 1)"],
)
def test_neither_gpu_nor_interpreter(call):
    code = f"import torch\nfrom kernels import quant, router_replay, weight_sync\nx = torch.zeros(2, 2)\n{call}"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "RuntimeError: kernels run on CUDA, or on the CPU with TRITON_INTERPRET=1 in the environment; "
        "this tensor is on cpu"
    )
