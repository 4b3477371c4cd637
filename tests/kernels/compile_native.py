"""Compiles products for GPUs that are not here, in a process without the interpreter, and tells what their PTX has: for test_compiled_native.py."""

import json
import re
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels import block_scaled, gemm

E4M3, BYTES, FLOAT, INT = "*fp8e4nv", "*u8", "*fp32", "*i64"


def compiled(kernel, form: int, capability: int, tile: dict, warps: int, stages: int) -> dict:
    """What is in the code of a kernel, native for capability 100 and expanded for 90: how often each instruction, and the shared memory. All sizes
    are multiples of 16."""
    data, scales = {2: (E4M3, BYTES), 3: (BYTES, E4M3)}[form] if capability >= 100 else (BYTES, FLOAT if form == 1 else BYTES)
    types = {"a": data, "b": data, "a_scales": scales, "b_scales": scales, "a_whole": FLOAT, "b_whole": FLOAT}
    types |= {"ends": INT, "out_ends": INT, "bounds": INT, "out": "*bf16"}
    function = kernel.fn
    fixed = {"FORM": form, "UPCAST": False, "BM": block_scaled.BM, "EP": 128, "BBLOCK": 128 if form == 1 else 1} | tile
    fixed = {name: value for name, value in fixed.items() if name in function.arg_names}
    signature = {name: "constexpr" if name in fixed else types.get(name, "i32") for name in function.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(function.arg_names) if name not in fixed}
    source = ASTSource(fn=function, signature=signature, constexprs=fixed, attrs=aligned)
    done = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps, "num_stages": stages})
    found: dict[str, int] = {}
    for name in re.findall(r"(?:tcgen05|wgmma)\.[\w.:]+|cp\.async\.c[ag]", done.asm["ptx"]):
        found[name] = found.get(name, 0) + 1
    return {"instructions": found, "shared": done.metadata.shared}


if __name__ == "__main__":
    every = []
    for name in ("scaled_matmul_kernel", "scaled_rows_kernel", "scaled_weights_kernel"):
        for form in (2,) if name == "scaled_weights_kernel" else (2, 3):
            # Every tile of the plain product; of the others, which have the same loop, the first.
            for tile, warps, stages in block_scaled.TILES[1 : None if name == "scaled_matmul_kernel" else 2]:
                one = compiled(getattr(block_scaled, name), form, 100, tile, warps, stages)
                every.append({"kernel": name, "form": form, "tile": [tile, warps, stages]} | one)
    for form in (1, 2, 3):
        tile = {"BM": 128, "BN": 128, "BK": 64}
        every.append({"kernel": "matmul_kernel", "form": form, "tile": tile} | compiled(gemm.matmul_kernel, form, 90, tile, 8, 3))
    json.dump(every, sys.stdout)
