"""A machine that runs PTX without a GPU: what Triton compiled for one, executed by an independent reading of the ISA.

    ptx(kernel, …)         compile a kernel for a GPU that is not here, and give its PTX
    Memory                 global memory: arrays at addresses
    run(program, …)        all threads of all blocks, instruction by instruction, as arrays over threads

Triton's interpreter runs a kernel's Python. This runs what the compiler made of it: layouts, shuffles, shared memory,
packed conversions and the divisions that it chose. Threads that take different branches run in turn, those that are
furthest behind first, and so meet again. Errors are loud: an instruction that is not modelled, memory that nobody
placed or aligned, shared memory that nobody wrote, a barrier that not every thread reaches, and shared memory that two
warps use without a barrier between.

What this does not model: the memory model (other orders of threads, lanes of a warp that drift apart, blocks that meet
in global memory), tensor cores, asynchronous copies, approximate instructions, and ptxas, which makes the GPU's own
instructions from PTX."""

from collections.abc import Mapping, Sequence

import numpy as np

from .launch import INTERPRETED
from .ptx_integers import UnknownInstruction
from .ptx_memory import Fault, Memory
from .ptx_program import Program, Register, parse
from .ptx_steps import Step, Threads, step_of

__all__ = ["Fault", "Memory", "UnknownInstruction", "parse", "ptx", "run"]


def ptx(
    kernel,
    signature: Mapping[str, str],
    constants: Mapping[str, object],
    capability: int,
    multiples: Sequence[str] = (),
    **options,
) -> str:
    """The PTX of a @triton.jit kernel. signature: each parameter's type (*bf16, i32) or "constexpr"; constants: the
    values of constexprs and of parameters that a launch specialises; multiples: parameters that are multiples of 16, as
    Triton's launches find out; options: num_warps, enable_fp_fusion and others of Triton's. capability: 90 for Hopper,
    100 for Blackwell. No GPU is needed. Raises RuntimeError under Triton's interpreter, where kernels cannot be
    compiled."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if INTERPRETED:
        raise RuntimeError(
            "kernels cannot be compiled with TRITON_INTERPRET=1 in the environment; compile them in a "
            "process without it"
        )
    function = kernel if isinstance(kernel, triton.runtime.JITFunction) else kernel.fn  # an autotuned kernel wraps one
    types = {name: "constexpr" if name in constants else kind for name, kind in signature.items()}
    attributes = {(list(types).index(name),): [["tt.divisibility", 16]] for name in multiples}
    source = ASTSource(fn=function, signature=types, constexprs=dict(constants), attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm["ptx"]


def run(
    program: Program,
    grid: Sequence[int],
    arguments: Sequence[int],
    memory: Memory,
    shared: int = 49_152,
    threads: int = 8192,
    garbage: int = 0,
    approximate: int | None = None,
) -> None:
    """Run a kernel on `grid` blocks. arguments: addresses and integers in the order of the parameters, floats as their
    bits; those that Triton adds behind them are 0. shared: bytes of shared memory per block. threads: how many run at
    once, in whole blocks; the result does not depend on it. garbage: what registers hold that nobody wrote; compilers
    read them where the number does not matter, so a result may not depend on it. approximate: bits that approximate
    instructions give, to show what does not depend on them. Raises UnknownInstruction before anything runs, and Fault
    for what a GPU does not allow; memory is then half written."""
    steps = [step_of(program, instruction, approximate) for instruction in program.instructions]
    size = (*grid, 1, 1)[:3]
    if len(arguments) > len(program.parameters) or len(grid) > 3:
        raise ValueError(
            f"{program.name} has {len(program.parameters)} parameters and at most 3 axes; got "
            f"{len(arguments)} and {len(grid)}"
        )
    values = [*arguments, *(0 for _ in program.parameters[len(arguments) :])]
    parameters = {name: value % 2**width for (name, width), value in zip(program.parameters, values, strict=True)}
    blocks = np.stack(np.unravel_index(np.arange(size[0] * size[1] * size[2]), size[::-1])[::-1], 1)
    together = max(1, threads // program.threads)
    for first in range(0, len(blocks), together):
        part = Threads(program, blocks[first : first + together], size, parameters, memory, shared, garbage)
        try:
            play(program, steps, part)
        except Fault as error:
            raise Fault(f"{program.name}: {error}") from None


def play(program: Program, steps: list[Step | int], threads: Threads) -> None:
    """From the first instruction to the end of every thread."""
    end, at = len(steps), np.zeros(threads.count, np.int64)
    while (program_counter := int(at.min())) < end:
        active = at == program_counter
        everyone = bool(active.all())
        behind = end if everyone else int(at[~active].min())
        while program_counter < end:
            instruction, step = program.instructions[program_counter], steps[program_counter]
            mask = None if everyone else active
            if instruction.guard:
                guard = threads.read(Register(instruction.guard), 1, mask) ^ instruction.negated
                mask = guard if everyone else guard & active
                mask = None if mask.all() else mask
            program_counter += 1
            if isinstance(step, int):
                branch_mask = active if mask is None else mask
                at[active] = program_counter
                at[branch_mask] = step
                break
            if mask is None or mask.any():
                try:
                    step(threads, mask)
                except Fault as error:
                    raise Fault(f"{error}, in {instruction.text}") from None
            if program_counter == behind:
                at[active] = program_counter
                break
        else:
            at[active] = program_counter
