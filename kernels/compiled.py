"""What a GPU would run, without one: Triton compiles ahead of time for a device that is not there.

`compiled` compiles one launch of kernels/registry.py in one configuration for one target, and returns what the compiler
says of it: the tensor-core instructions and the arithmetic of its PTX, registers, spills, shared memory, and what
follows from them. Nothing here is measured on a device, and nothing tells how fast a kernel is.

Compiled code lies in Triton's cache (TRITON_CACHE_DIR, else ~/.triton/cache), so that the second time is quick.
Triton's interpreter replaces every kernel, so this needs a process without TRITON_INTERPRET: `python -m …compiled`
serves one, and etude/bench/compiled_kernels.py runs several."""

import ast
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.runtime.jit import JITFunction

from .launch import tile as named
from .registry import Launch, launches
from .unfit import UNFIT
from .work import count_launch_work, count_tile_work

__all__ = ["ARCHITECTURES", "Architecture", "Job", "Record", "blocks_per_unit", "compiled", "jobs", "text", "versions"]


@dataclass(frozen=True)
class Architecture:
    """What bounds a kernel on a target, and on the card that its floor is for."""

    target: GPUTarget
    registers: int
    """32-bit registers of a multiprocessor (AMD: of a compute unit), for all threads together."""
    unit: int
    """Registers are given to a warp in multiples of this."""
    shared: int
    """Bytes of shared memory of a multiprocessor."""
    block: int
    """Bytes of shared memory that one block may use."""
    reserved: int
    """Bytes of shared memory that the system takes for every block."""
    warps: int
    blocks: int
    card: str
    bandwidth: float
    """Bytes per second."""
    flops: dict[str, float]
    """Dense FLOP/s by the operands of the instruction."""
    columns: int = 0
    """Columns of tensor memory of a multiprocessor."""


ARCHITECTURES = {
    "sm_90": Architecture(
        GPUTarget("cuda", 90, 32), 65536, 256, 228 * 1024, 227 * 1024, 1024, 64, 32, "H200", 4.8e12,
        {"fp32": 67e12, "16": 989e12, "8": 1979e12}
    ),
    "sm_100": Architecture(
        GPUTarget("cuda", 100, 32), 65536, 256, 228 * 1024, 227 * 1024, 1024, 64, 32, "B200", 8e12,
        {"fp32": 80e12, "16": 2250e12, "8": 4500e12, "4": 9000e12}, 512,
    ),
    "gfx950": Architecture(
        GPUTarget("hip", "gfx950", 64), 131072, 512, 160 * 1024, 160 * 1024, 0, 32, 32, "MI355X", 8e12,
        {"fp32": 157e12, "16": 2500e12, "8": 5000e12}
    ),
}  # fmt: skip
"""Limits: CUDA C++ Programming Guide, compute capabilities 9.0 and 10.0; AMD CDNA4 ISA. Cards: data sheets of H200, HGX
B200 (1000 W) and MI355X."""


SCHEDULERS = 4
"""Of a multiprocessor; each has a quarter of its registers, and runs a quarter of its warps."""


@dataclass(frozen=True)
class Job:
    """One launch, one configuration, one target."""

    launch: Launch
    tile: triton.Config
    target: str

    @property
    def offered(self) -> bool:
        """Whether the autotuner may choose it on this target."""
        return named(self.tile) not in UNFIT.get((self.launch.name, self.target, self.launch.form), ())

    def names(self) -> dict[str, str]:
        """What identifies it in a table."""
        launch = self.launch
        return {
            "kernel": launch.name,
            "use": launch.use,
            "target": self.target,
            "tile": named(self.tile),
            "form": launch.form,
            "key": self.key(),
        }

    def key(self) -> str:
        """See `Record.key`."""
        launch = self.launch
        parts = (
            sources(launch.kernel),
            launch.signature,
            launch.constants,
            launch.attributes,
            launch.options,
            named(self.tile),
            self.target,
        )
        return hashlib.sha256(repr((triton.__version__, *parts)).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Record:
    """What is known of a compiled kernel. Bytes and FLOPs: kernels/work.py."""

    kernel: str
    use: str
    target: str
    tile: str
    form: str
    """What kernels/unfit.py calls the launch."""
    key: str
    """Of the source, the arguments, the configuration, the target and the compiler: equal keys compile to equal
    code."""
    exact: bool
    """Whether bits are promised: compiled without fused multiply-add."""
    fits: bool = False
    """Whether it compiles, spills nothing, and a block finds enough shared memory."""
    failed: str | None = None
    """The compiler's message, if it refused."""
    instructions: tuple[str, ...] = ()
    """Tensor-core instructions in the PTX, or in AMD's assembly."""
    arithmetic: tuple[str, ...] = ()
    """Every instruction in the PTX that computes or converts floating-point numbers outside of the tensor cores."""
    registers: int = 0
    """Per thread."""
    spilled: int = 0
    """Bytes per thread that did not fit into registers."""
    shared: int = 0
    """Bytes per block."""
    columns: int = 0
    """Columns of tensor memory per block."""
    blocks: int = 0
    """Blocks that fit on a multiprocessor."""
    occupancy: float = 0.0
    """Their warps over the most that it holds."""
    tile_bytes: int = 0
    tile_flops: int = 0
    intensity: float = 0.0
    """FLOPs per byte of a tile."""
    floor_us: float = 0.0
    """No card of the target's kind can be faster at the registry's size: all bytes once at full bandwidth, or all FLOPs
    at the full rate."""


def jobs() -> list[Job]:
    """Every launch × target × configuration; what one use launches may hang on the target."""
    every: dict[tuple[str, str], list[Job]] = {}
    for target, architecture in ARCHITECTURES.items():
        for launch in registered((10, 0) if architecture.columns else (9, 0)):
            every.setdefault((launch.name, launch.use), []).extend(Job(launch, tile, target) for tile in launch.tiles)
    return [job for group in every.values() for job in group]


@cache
def registered(capability: tuple[int, int]) -> list[Launch]:
    return launches(capability)


@cache
def sources(function: JITFunction) -> str:
    """A kernel's code, with that of all functions that it calls on the device, and the constants of its file that it
    names. Comments, docstrings and line breaks are left out."""
    tree = ast.parse(function.src)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    parts = [ast.dump(tree)]
    for name in sorted({node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}):
        value = function.fn.__globals__.get(name)
        if isinstance(value, JITFunction):
            parts.append(sources(value))
        elif isinstance(value, triton.language.constexpr | int | float):
            parts.append(f"{name} = {value!r}")
    return "\n".join(parts)


def binary(job: Job) -> CompiledKernel:
    """Compiles it, or takes it from Triton's cache."""
    launch, tile, architecture = job.launch, job.tile, ARCHITECTURES[job.target]
    nvidia = architecture.target.backend == "cuda"
    constants = {
        (at,): {**launch.constants, **tile.kwargs}.get(name) for at, name in enumerate(launch.kernel.arg_names)
    }
    constants = {at: value for at, value in constants.items() if value is not None}
    attributes = {
        at: [pair for pair in properties if not nvidia or pair[0] != "tt.pointer_range"]
        for at, properties in launch.attributes.items()
    }
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages, **launch.options}
    return triton.compile(
        ASTSource(launch.kernel, launch.signature, constants, attributes), target=architecture.target, options=options
    )


def text(job: Job, code_kind: str) -> str:
    """The code itself; code_kind: "ptx" or "sass" for NVIDIA, "amdgcn" for AMD."""
    return binary(job).asm[code_kind]


def compiled(job: Job) -> Record:
    """Compiles it and collects what can be known."""
    launch, architecture = job.launch, ARCHITECTURES[job.target]
    fields = dict(**job.names(), exact=launch.exact)
    try:
        kernel = binary(job)
    except Exception as error:
        return Record(**fields, failed=reason(error))
    nvidia = architecture.target.backend == "cuda"
    code = kernel.asm["ptx" if nvidia else "amdgcn"]
    tensor_instructions = instructions(code)
    registers, spilled = resources(kernel.asm["cubin"]) if nvidia else resources_amd(code)
    if nvidia and spilled and not re.search(r"\bSTL\b", kernel.asm["sass"]):
        spilled = 0  # ptxas reserves 8 bytes of stack in places, and then stores nothing there
    warps, columns = kernel.metadata.num_warps, getattr(kernel.metadata, "tmem_size", None) or 0
    blocks = blocks_per_unit(architecture, registers, warps, kernel.metadata.shared, columns)
    tile_bytes, tile_flops = count_tile_work(launch, job.tile.kwargs)
    total_bytes, total_flops = count_launch_work(launch)
    rate = architecture.flops[rate_of(tensor_instructions)]
    return Record(
        **fields,
        fits=not spilled and blocks > 0,
        instructions=tensor_instructions,
        arithmetic=arithmetic(code) if nvidia else (),
        registers=registers,
        spilled=spilled,
        shared=kernel.metadata.shared,
        columns=columns,
        blocks=blocks,
        occupancy=blocks * warps / architecture.warps,
        tile_bytes=tile_bytes,
        tile_flops=tile_flops,
        intensity=round(tile_flops / tile_bytes, 1) if tile_bytes else 0.0,
        floor_us=round(1e6 * max(total_bytes / architecture.bandwidth, total_flops / rate), 1),
    )


def reason(error: BaseException) -> str:
    """The last line of the innermost error: Triton quotes the source above it."""
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).strip().splitlines() or [type(error).__name__])[-1][:200]


def instructions(code: str) -> tuple[str, ...]:
    """The distinct tensor-core instructions of PTX or of AMD's assembly."""
    return tuple(sorted(set(re.findall(r"\b(?:wgmma\.mma_async|tcgen05\.mma|mma\.sync)[\w.:]*|\bv_s?mfma_\w+", code))))


def arithmetic(ptx: str) -> tuple[str, ...]:
    """The distinct instructions of PTX that compute or convert floating-point numbers."""
    verbs = "add|sub|mul|fma|mad|div|rcp|sqrt|rsqrt|ex2|lg2|sin|cos|tanh|cvt|min|max|abs|neg"
    return tuple(
        sorted(
            set(
                re.findall(
                    rf"^\s+(?:@%?\S+\s+)?((?:{verbs})\.[\w.:]*(?:f32|f64|f16|bf16|e4m3|e5m2|e2m1|ue8m0)[\w.:]*)",
                    ptx,
                    re.M,
                )
            )
        )
    )


def rate_of(tensor_instructions: tuple[str, ...]) -> str:
    """Which of an architecture's rates the narrowest instruction can reach."""
    names = " ".join(tensor_instructions)
    for key, pattern in (("4", r"mxf4"), ("8", r"f8f6f4|e4m3|fp8"), ("16", r"bf16|kind::f16|f16")):
        if re.search(pattern, names):
            return key
    return "fp32"


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack of a thread, by cuobjdump. A kernel without arrays of its own stores there only what
    it spills."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        output = subprocess.run(
            [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    match = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", output)
    if match is None:
        raise RuntimeError(f"cuobjdump named no registers; it said: {output.strip()[-200:]}")
    registers, stack, local = map(int, match.groups())
    return registers, stack + local


def resources_amd(code: str) -> tuple[int, int]:
    """Vector registers and spilled bytes of a thread, by the metadata of the assembly."""
    counts = {
        name: int(n) for name, n in re.findall(r"\.(vgpr_count|agpr_count|private_segment_fixed_size):\s+(\d+)", code)
    }
    return max(counts["vgpr_count"], counts.get("agpr_count", 0)), counts["private_segment_fixed_size"]


def blocks_per_unit(architecture: Architecture, registers: int, warps: int, shared: int, columns: int = 0) -> int:
    """Blocks that a multiprocessor holds at a time; 0 if not even one fits.

    registers: per thread. shared: bytes of a block. columns: of tensor memory, of a block."""
    if shared > architecture.block:
        return 0
    lanes = architecture.target.warp_size
    a_warp = -(-max(registers, 1) * lanes // architecture.unit) * architecture.unit
    limits = [
        architecture.blocks,
        architecture.warps // warps,
        architecture.registers // SCHEDULERS // a_warp * SCHEDULERS // warps,
        architecture.shared // max(shared + architecture.reserved, 1),
    ]
    return min(limits + ([architecture.columns // columns] if columns else []))


def versions() -> dict[str, str]:
    """Of Triton and its ptxas."""
    output = subprocess.run(
        [knobs.nvidia.ptxas_blackwell.path, "--version"], capture_output=True, text=True, check=True
    ).stdout
    match = re.search(r"V([\d.]+)", output)
    return {"triton": triton.__version__, "ptxas": match.group(1) if match else "unknown"}


def serve(requests: Iterator[str]) -> Iterator[dict[str, Any]]:
    """First the list of jobs; then one answer for each line: a job's number, and perhaps which text of it is wanted."""
    every = jobs()
    yield {"jobs": [{**job.names(), "offered": job.offered} for job in every], "versions": versions()}
    for line in requests:
        number, *code_kinds = line.split()
        job = every[int(number)]
        yield {"text": text(job, code_kinds[0])} if code_kinds else asdict(compiled(job))


if __name__ == "__main__":
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the compiler prints is no answer
    for answer in serve(iter(sys.stdin.readline, "")):
        print(json.dumps(answer), file=out, flush=True)
