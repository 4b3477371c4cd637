"""What each instruction of PTX does to the threads of the machine: loads and stores, exchanges in a warp, moves,
arithmetic, barriers.

Threads    the registers of all threads of some blocks
step_of    an instruction → a function of the threads, or the instruction that it jumps to
"""

from collections.abc import Callable, Mapping

import numpy as np

from .ptx_floats import operation
from .ptx_integers import UNSIGNED, WIDTHS, Operation, UnknownInstruction
from .ptx_memory import Fault, Memory, Shared, reduced, shuffle
from .ptx_program import Address, Immediate, Instruction, Operand, Program, Register, Vector

__all__ = ["Step", "Threads", "step_of"]

HINTS = {"ca", "cg", "cs", "cv", "wb", "wt", "nc", "L1::evict_first", "L1::evict_last", "L1::no_allocate"}
"""Words of loads and stores that do not change what is loaded or stored."""
Step = Callable[["Threads", np.ndarray | None], None]


class Threads:
    """Registers of all threads of some blocks: an array per register, with a number per thread."""

    def __init__(
        self,
        program: Program,
        blocks: np.ndarray,
        grid: tuple[int, int, int],
        parameters: Mapping[str, int],
        memory: Memory,
        shared: int,
        garbage: int,
    ):
        self.program, self.parameters, self.memory, self.garbage = program, parameters, memory, garbage
        self.count = len(blocks) * program.threads
        thread = np.tile(np.arange(program.threads), len(blocks))
        self.block = np.repeat(np.arange(len(blocks)), program.threads)
        self.warp = np.arange(self.count) // 32
        self.shared = Shared(len(blocks), shared)
        self.registers: dict[str, np.ndarray] = {}
        special = {
            "%tid.x": thread,
            "%ntid.x": program.threads,
            "%laneid": thread % 32,
            "%tid.y": 0,
            "%tid.z": 0,
            "%ntid.y": 1,
            "%ntid.z": 1,
        }
        for i, axis in enumerate("xyz"):
            special |= {f"%ctaid.{axis}": blocks[self.block, i], f"%nctaid.{axis}": grid[i]}
        self.special = {
            name: np.broadcast_to(np.asarray(value, np.uint32), self.count) for name, value in special.items()
        }
        self.special["global_smem"] = np.zeros(self.count, np.uint32)

    def read(self, operand: Operand, width: int, mask: np.ndarray | None) -> np.ndarray:
        """The operand's low `width` bits in every thread."""
        form = UNSIGNED[width]
        if isinstance(operand, Immediate):
            return np.full(self.count, bool(operand.bits) if width == 1 else operand.bits & (2**width - 1), form)
        if not isinstance(operand, Register):
            raise Fault(f"{operand} is no number")
        value = self.registers.get(operand.name, self.special.get(operand.name))
        if value is None:
            value = self.registers[operand.name] = self.unwritten(operand.name)
        if value.dtype.itemsize * 8 < width:
            raise Fault(f"{operand.name} has fewer than {width} bits")
        return value if value.dtype == form else value.astype(form)

    def unwritten(self, name: str) -> np.ndarray:
        """What a register holds before anything is written to it."""
        width = self.program.width(name)
        if width is None:
            raise Fault(f"{name} is no register")
        return np.full(self.count, self.garbage % 2**width, UNSIGNED[width])

    def write(self, operand: Operand, value: np.ndarray, mask: np.ndarray | None) -> None:
        """Into a register as wide as the value or wider, in the threads of the mask."""
        name = getattr(operand, "name", "")
        if name == "_":  # the sink: nobody wants this part
            return
        width = self.program.width(name)
        if width is None:
            raise Fault(f"{operand} is no register")
        if value.shape != (self.count,) or value.dtype != UNSIGNED[width]:
            value = np.broadcast_to(value, self.count).astype(UNSIGNED[width])
        if mask is None:
            self.registers[name] = value
            return
        old = self.registers[name] if name in self.registers else self.unwritten(name)
        self.registers[name] = np.where(mask, value, old)

    def addresses(self, address: Address, width: int, mask: np.ndarray | None) -> np.ndarray:
        return self.read(Register(address.base), width, mask) + UNSIGNED[width](address.offset % 2**width)

    def warps(self, mask: np.ndarray | None, text: str) -> None:
        """Raises Fault unless every warp takes part with all its lanes or not at all."""
        if mask is not None and (mask.reshape(-1, 32).any(1) != mask.reshape(-1, 32).all(1)).any():
            raise Fault(f"not all lanes of a warp take part in {text}")


def widened(value: np.ndarray, kind: str, width: int) -> np.ndarray:
    """Into a register of more bits, with the sign for signed types."""
    if kind[0] == "s" and value.dtype.itemsize * 8 < width:
        return value.view(value.dtype.str.replace("u", "i")).astype(f"i{width // 8}").view(UNSIGNED[width])
    return value


def memory_step(program: Program, instruction: Instruction) -> Step | None:
    """Loads and stores."""
    base, *words = instruction.opcode.split(".")
    if base not in ("ld", "st") or not words or words[-1] not in WIDTHS or len(instruction.operands) != 2:
        return None
    kind, spaces = words[-1], [word for word in words if word in ("param", "global", "shared", "shared::cta")]
    parts = next((int(word[1]) for word in words if word in ("v2", "v4", "v8")), 1)
    if len(spaces) != 1 or set(words[:-1]) - HINTS - set(spaces) - {"v2", "v4", "v8"}:
        return None
    width, space = WIDTHS[kind], spaces[0].partition("::")[0]
    place, data = instruction.operands if base == "st" else instruction.operands[::-1]
    names = data.parts if isinstance(data, Vector) else (data,)
    if not isinstance(place, Address) or len(names) != parts or (space == "param" and base == "st"):
        return None

    def step(threads: Threads, mask: np.ndarray | None) -> None:
        if space == "param":
            value = np.full(
                threads.count, threads.parameters[place.base] >> 8 * place.offset & (2**width - 1), UNSIGNED[width]
            )
            threads.write(names[0], widened(value, kind, program.width(names[0].name) or width), mask)
            return
        active_indices = np.arange(threads.count) if mask is None else np.flatnonzero(mask)
        at = threads.addresses(place, 64 if space == "global" else 32, mask)[active_indices]
        block_and_warp = () if space == "global" else (threads.block[active_indices], threads.warp[active_indices])
        room = threads.memory if space == "global" else threads.shared
        if base == "st":
            room.store(
                at,
                width,
                np.stack([threads.read(name, width, mask)[active_indices] for name in names], 1),
                *block_and_warp,
            )
            return
        for name, column in zip(names, room.load(at, width, parts, *block_and_warp).T, strict=True):
            full = np.zeros(threads.count, UNSIGNED[width])
            full[active_indices] = column
            threads.write(name, widened(full, kind, program.width(name.name) or width), mask)

    return step


def matrix_step(instruction: Instruction) -> Step | None:
    """ldmatrix and stmatrix: 8 × 8 numbers of 16 bits, whose rows lie where lanes 8i to 8i + 7 say; lane t holds
    numbers 2(t mod 4) and the next of row t / 4."""
    variant = {
        f"{name}matrix.sync.aligned.m8n8.x{n}.shared.b16": (name, n) for name in ("ld", "st") for n in (1, 2, 4)
    }.get(instruction.opcode)
    if variant is None:
        return None
    name, count = variant
    place, data = instruction.operands if name == "st" else instruction.operands[::-1]
    if not isinstance(place, Address) or not isinstance(data, Vector) or len(data.parts) != count:
        return None
    row, column = np.arange(32) // 4, np.arange(32) % 4

    def step(threads: Threads, mask: np.ndarray | None) -> None:
        threads.warps(mask, instruction.text)
        active_indices = np.arange(threads.count) if mask is None else np.flatnonzero(mask)
        at = threads.addresses(place, 32, mask)[active_indices].reshape(-1, 32)
        block, warp = (
            threads.block[active_indices].reshape(-1, 32)[:, :8],
            threads.warp[active_indices].reshape(-1, 32)[:, :8],
        )
        for i, part in enumerate(data.parts):
            rows = at[:, 8 * i : 8 * i + 8].reshape(-1), block.reshape(-1), warp.reshape(-1)
            if name == "st":
                values = threads.read(part, 32, mask)[active_indices].reshape(-1, 8, 4)
                threads.shared.store(rows[0], 32, values.reshape(-1, 4), *rows[1:])
            else:
                full = np.zeros(threads.count, np.uint32)
                full[active_indices] = (
                    threads.shared.load(rows[0], 32, 4, *rows[1:]).reshape(-1, 8, 4)[:, row, column].reshape(-1)
                )
                threads.write(part, full, mask)

    return step


REDUCTIONS = {(name, kind) for name in ("add", "min", "max") for kind in ("s32", "u32")} | {
    (name, "b32") for name in ("and", "or", "xor")
}
REDUCTIONS |= {(name, "f32", *words) for name in ("min", "max") for words in ((), ("NaN",))}


def warp_step(instruction: Instruction) -> Step | None:
    """What lanes of a warp exchange."""
    base, *words = instruction.opcode.split(".")
    ops = instruction.operands
    if (
        base == "shfl"
        and len(words) == 3
        and (words[0], words[2]) == ("sync", "b32")
        and words[1] in ("up", "down", "bfly", "idx")
        and len(ops) == 5
    ):
        names = [Register(name) for name in ops[0].name.split("|")] if isinstance(ops[0], Register) else []
        if len(names) != 1:
            return None

        def step(threads: Threads, mask: np.ndarray | None) -> None:
            threads.warps(mask, instruction.text)
            value, by, limits, members = (threads.read(operand, 32, mask).reshape(-1, 32) for operand in ops[1:])
            if not (members == 0xFFFFFFFF).all():
                raise Fault(f"{instruction.text} leaves lanes out")
            threads.write(ops[0], shuffle(words[1], value, by, limits)[0].reshape(-1), mask)

        return step
    is_reduction = base == "redux" and len(words) >= 3 and words[0] == "sync" and len(ops) == 3
    if is_reduction and (words[1], words[-1], *words[2:-1]) in REDUCTIONS:

        def step(threads: Threads, mask: np.ndarray | None) -> None:
            threads.warps(mask, instruction.text)
            value, members = (threads.read(operand, 32, mask).reshape(-1, 32) for operand in ops[1:])
            is_mutual = (members[:, None, :] == members[:, :, None]) | (
                (members[:, :, None] >> np.arange(32, dtype=np.uint32)) & 1 == 0
            )
            if not is_mutual.all() or not ((members >> np.arange(32, dtype=np.uint32)) & 1).all():
                raise Fault(f"lanes that {instruction.text} names do not name each other")
            threads.write(ops[0], reduced(words[1], words[-1], value, members, "NaN" in words).reshape(-1), mask)

        return step
    return None


def move_step(program: Program, instruction: Instruction) -> Step | None:
    """mov, also from one register to several and back."""
    base, *words = instruction.opcode.split(".")
    if base != "mov" or len(words) != 1 or words[0] not in WIDTHS or len(instruction.operands) != 2:
        return None
    width, (to, of) = WIDTHS[words[0]], instruction.operands

    def step(threads: Threads, mask: np.ndarray | None) -> None:
        if isinstance(of, Vector):
            part_width = width // len(of.parts)
            value = np.zeros(threads.count, UNSIGNED[width])
            for i, part in enumerate(of.parts):
                value = value | (
                    threads.read(part, part_width, mask).astype(UNSIGNED[width]) << UNSIGNED[width](i * part_width)
                )
            threads.write(to, value, mask)
        elif isinstance(to, Vector):
            part_width = width // len(to.parts)
            value = threads.read(of, width, mask)
            for i, part in enumerate(to.parts):
                threads.write(part, (value >> UNSIGNED[width](i * part_width)).astype(UNSIGNED[part_width]), mask)
        else:
            threads.write(to, threads.read(of, width, mask), mask)

    return step


def arithmetic_step(program: Program, instruction: Instruction) -> Step:
    """What computes a register from registers."""
    try:
        model = operation(instruction.opcode)
    except UnknownInstruction as error:
        raise UnknownInstruction(f"{error}: {instruction.text}") from None
    to, *of = instruction.operands
    if (
        instruction.opcode in ("min.f32", "max.f32", "min.NaN.f32", "max.NaN.f32") and len(of) == 3
    ):  # Blackwell compares three
        model = Operation(32, (32, 32, 32), lambda a, b, c, two=model.compute: two(two(a, b), c))
    if len(of) != len(model.sources) or not isinstance(to, Register) or program.width(to.name) is None:
        raise UnknownInstruction(f"no model of this form of {instruction.opcode}: {instruction.text}")
    kind = instruction.opcode.split(".")[-2] if instruction.opcode.startswith("cvt.") else "b"
    room = program.width(to.name) or model.width

    def step(threads: Threads, mask: np.ndarray | None) -> None:
        value = model.compute(*(threads.read(x, width, mask) for x, width in zip(of, model.sources, strict=True)))
        threads.write(to, widened(np.asarray(value), kind, room), mask)

    return step


def barrier_step(instruction: Instruction) -> Step | None:
    """bar.sync 0: all threads of a block meet, or none does."""
    if instruction.opcode not in ("bar.sync", "barrier.sync", "barrier.sync.aligned") or instruction.operands != (
        Immediate(0),
    ):
        return None

    def step(threads: Threads, mask: np.ndarray | None) -> None:
        if mask is None:
            threads.shared.barrier(np.arange(len(threads.shared.epochs)))
            return
        arrival_mask = mask.reshape(len(threads.shared.epochs), -1)
        if (arrival_mask.any(1) != arrival_mask.all(1)).any():
            raise Fault("not all threads of a block reach a barrier")
        threads.shared.barrier(np.flatnonzero(arrival_mask.any(1)))

    return step


def approximate_step(instruction: Instruction, bits: int) -> Step | None:
    """An approximate instruction, replaced by one that always gives `bits`."""
    if not {"approx", "full"} & set(instruction.opcode.split(".")) or not instruction.opcode.endswith(".f32"):
        return None
    return lambda threads, mask: threads.write(instruction.operands[0], np.full(threads.count, bits, np.uint32), mask)


def step_of(program: Program, instruction: Instruction, approximate: int | None = None) -> Step | int:
    """How an instruction is executed, or where it jumps to. Raises UnknownInstruction if it is not modelled."""
    if approximate is not None and (step := approximate_step(instruction, approximate)):
        return step
    if instruction.opcode in ("bra", "bra.uni"):
        (to,) = instruction.operands
        return program.labels[getattr(to, "name", "")]
    if instruction.opcode in ("ret", "exit"):
        return len(program.instructions)
    for make in (
        lambda: memory_step(program, instruction),
        lambda: matrix_step(instruction),
        lambda: warp_step(instruction),
        lambda: move_step(program, instruction),
    ):
        if step := make():
            return step
    return barrier_step(instruction) or arithmetic_step(program, instruction)
