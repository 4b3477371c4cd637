"""What tests run on the PTX machine: kernels as Triton compiles them for GPUs that are not here.

    python -m tests.kernels.ptx_programs FILE

writes the PTX of every program for every GPU as JSON. It is a program of its own, because tests run under Triton's
interpreter, where nothing can be compiled. Triton keeps what it compiled in its cache, so that only the first time
takes long.
"""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

from kernels.launch import EXACT

GPUS = {"sm_90": 90, "sm_100": 100}
MODES = ("rceil", "floor", "ceil", "even")


@dataclass(frozen=True)
class Compiled:
    """One kernel with its types and constants."""

    kernel: str
    """File and name in kernels/."""
    types: dict[str, str]
    constants: dict[str, object]
    aligned: bool = False
    """As a launch on aligned matrices specialises it: pointers and sizes are multiples of 16, numbers of a row lie side
    by side."""
    options: dict[str, object] = field(default_factory=dict)

    @property
    def signature(self) -> dict[str, str]:
        return self.types | {name: "constexpr" for name in self.constants}

    @property
    def specialised(self) -> dict[str, object]:
        return self.constants | ({"sn": 1} if self.aligned and "sn" in self.types else {})

    @property
    def multiples(self) -> list[str]:
        small = {"rows", "sn", "log_alpha", "changes"}
        return (
            [name for name in self.types if name not in small]
            if self.aligned
            else [n for n, kind in self.types.items() if kind[0] == "*"]
        )


def fused(fusion: bool) -> dict[str, object]:
    """As kernels that promise bits are launched, or as Triton compiles by default."""
    return {} if fusion else EXACT


def mxfp8(
    number: str,
    tile: tuple[int, int],
    mode: str = "rceil",
    rows=True,
    cols=True,
    native=True,
    aligned=False,
    warps=4,
    fusion=False,
) -> Compiled:
    types = {"x": f"*{number}", **{name: "*u8" for name in ("row_codes", "row_scales", "col_codes", "col_scales")}}
    types |= {name: "i32" for name in ("M", "N", "sm", "sn")}
    constants = dict(ROWS=rows, COLS=cols, MODE=MODES.index(mode), NATIVE=native, SWIGLU=False, BM=tile[0], BN=tile[1])
    return Compiled("quant.mxfp8_kernel", types, constants, aligned, {**fused(fusion), "num_warps": warps})


def nvfp4(
    number: str, tile: tuple[int, int], tensor=False, fast=False, aligned=False, fusion=False, swiglu=False
) -> Compiled:
    types = {"x": f"*{number}", "packed": "*u8", "blocks": "*u8", "scales": "*fp32", "tensor_max": "*i32"}
    types |= {name: "i32" for name in ("rows", "N", "half", "sm", "sn")}
    constants = dict(TENSOR=tensor, FAST=fast, SWIGLU=swiglu, BM=tile[0], BN=tile[1])
    return Compiled("quant.nvfp4_kernel", types, constants, aligned, fused(fusion))


def fp8(number: str, block: tuple[int, int], native=True, aligned=False, fusion=False) -> Compiled:
    types = {
        "x": f"*{number}",
        "codes": "*u8",
        "scales": "*fp32",
        **{name: "i32" for name in ("M", "N", "sb", "sm", "sn")},
    }
    wide = [1 << (size - 1).bit_length() for size in block]
    constants = dict(
        BM=block[0], BN=block[1], RM=max(1, 32 // wide[0]), NATIVE=native, SWIGLU=False, PM=wide[0], PN=wide[1]
    )
    return Compiled("quant.fp8_kernel", types, constants, aligned, fused(fusion))


def both(
    number: str, rows: int, tile: tuple[int, int], source: int = 0, swizzle: bool = True, warps: int = 4
) -> Compiled:
    """Rows in MXFP8 (2) or NVFP4 per token (3), and columns in MXFP8, in one launch; source 1 gathers rows."""
    types = {
        "x": f"*{number}",
        "index": "*i64",
        "gates": "*fp32",
        "limit": "*i64",
        "row_codes": "*u8",
        "row_scales": "*u8",
        "row_whole": "*fp32",
    }
    types |= {"column_codes": "*u8", "column_scales": "*u8"}
    types |= {name: "i32" for name in ("M", "N", "sb", "sm", "sn", "row_stride", "column_stride")}
    constants = dict(
        K=1, SOURCE=source, ROWS=rows, COLUMNS=2, SWIZZLE=swizzle, LIMITED=False, NATIVE=True, BM=tile[0], BN=tile[1]
    )
    return Compiled("orientations.both_kernel", types, constants, False, {**EXACT, "num_warps": warps})


def plain(kernel: str, types: dict[str, str], aligned: bool = True, **constants: object) -> Compiled:
    return Compiled(kernel, types, constants, aligned, EXACT)


DELTA = {"old": "*i16", "new": "*i16"}
PROGRAMS = {
    **{f"mxfp8 {mode}": mxfp8("bf16", (32, 128), mode, aligned=True) for mode in MODES},
    "mxfp8 rows": mxfp8("bf16", (64, 128), cols=False, aligned=True),
    "mxfp8 cols": mxfp8("bf16", (32, 256), rows=False, aligned=True),
    "mxfp8 eight warps": mxfp8("bf16", (128, 128), aligned=True, warps=8),
    "mxfp8 float32": mxfp8("fp32", (64, 64)),
    "mxfp8 integers": mxfp8("fp32", (32, 128), native=False),
    "mxfp8 fusion": mxfp8("fp32", (32, 128), native=False, rows=False, fusion=True),
    "nvfp4 token": nvfp4("bf16", (2, 1024), aligned=True),
    "nvfp4 float32": nvfp4("fp32", (8, 256)),
    "nvfp4 fast": nvfp4("bf16", (2, 1024), fast=True, aligned=True),
    "nvfp4 tensor": nvfp4("fp32", (2, 1024), tensor=True),
    "nvfp4 tensor fast": nvfp4("bf16", (1, 2048), tensor=True, fast=True, aligned=True),
    "nvfp4 token fusion": nvfp4("bf16", (2, 1024), aligned=True, fusion=True),
    "nvfp4 fast fusion": nvfp4("bf16", (2, 1024), fast=True, aligned=True, fusion=True),
    "both mxfp8": both("bf16", 2, (32, 128)),
    "both nvfp4": both("bf16", 3, (32, 128), warps=8),
    "both gathered": both("fp32", 3, (32, 128), source=1, swizzle=False, warps=8),
    "fp8 fusion": fp8("bf16", (1, 128), native=False, aligned=True, fusion=True),
    "fp8 1x128": fp8("bf16", (1, 128), aligned=True),
    "fp8 128x128": fp8("fp32", (128, 128)),
    "fp8 3x20": fp8("fp32", (3, 20)),
    "largest bfloat16": plain("quant.largest_kernel", {"x": "*bf16", "parts": "*i32", "total": "i32"}, BLOCK=16384),
    "largest float32": plain(
        "quant.largest_kernel", {"x": "*fp32", "parts": "*i32", "total": "i32"}, False, BLOCK=4096
    ),
    "delta count": plain("weight_sync.count_kernel", {**DELTA, "counts": "*i32", "total": "i32"}, BLOCK=2048),
    "delta write": plain(
        "weight_sync.write_kernel",
        {**DELTA, "first": "*i64", "positions": "*i64", "steps": "*i32", "total": "i32"},
        False,
        BLOCK=2048,
    ),
    "delta scatter": plain(
        "weight_sync.scatter_kernel",
        {"new": "*i16", "positions": "*i64", "steps": "*i32", "changes": "i32"},
        False,
        BLOCK=2048,
    ),
    "experts count": plain(
        "expert_rows.count_kernel", {"experts": "*i64", "counts": "*i32", "total": "i32"}, False, EP=16, BLOCK=128
    ),
    "experts place": plain(
        "expert_rows.place_kernel",
        {"experts": "*i64", "first": "*i64", "order": "*i64", "place": "*i64", "total": "i32"},
        False,
        EP=16,
        BLOCK=128,
    ),
    "route": plain(
        "router_replay.route_kernel",
        {
            "scores": "*fp32",
            "replayed": "*i64",
            "experts": "*i64",
            "gates": "*fp32",
            "N": "i32",
            "E": "i32",
            "log_alpha": "fp32",
        },
        False,
        **dict(K=4, KP=4, EP=16, BM=16, REPLAY=True, FILTER=True, NORMALISE=True),
    ),
    "nvfp4 swiglu": nvfp4("bf16", (2, 1024), swiglu=True, aligned=True),
}
ONLY = {"mxfp8 eight warps": ["sm_100"], "mxfp8 fusion": ["sm_90"], "nvfp4 swiglu": ["sm_90"]}
ONLY |= {name: ["sm_100"] for name in ("nvfp4 token fusion", "nvfp4 fast fusion", "fp8 fusion")}
"""What one GPU is enough for."""


def names() -> list[tuple[str, str]]:
    """Every program and every GPU that it is compiled for."""
    return [(name, gpu) for name in PROGRAMS for gpu in ONLY.get(name, GPUS)]


def compiled() -> dict[str, str]:
    """PTX by "program, GPU"."""
    from importlib import import_module

    from kernels.ptx import ptx

    found = {}
    for name, gpu in names():
        one = PROGRAMS[name]
        module, _, function = one.kernel.partition(".")
        kernel = getattr(import_module(f"kernels.{module}"), function)
        found[f"{name}, {gpu}"] = ptx(kernel, one.signature, one.specialised, GPUS[gpu], one.multiples, **one.options)
    return found


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(compiled()), encoding="utf-8")
