"""PTX text → instructions: what Triton's compiler writes for one kernel, read without running it.

    parse(text)                the program: parameters, registers, instructions, where labels point
    open_roundings(program)    multiplications and additions that ptxas may fuse, since they do not name their rounding
    contractions(program)      which of them would be fused
    contracted(program)        the program as if ptxas had fused them

PTX is NVIDIA's portable assembly; the GPU's own instructions (SASS) are made from it by ptxas, which this file does not
look at."""

import re
from dataclasses import dataclass, replace

__all__ = [
    "Address",
    "Immediate",
    "Instruction",
    "Program",
    "Register",
    "Vector",
    "contracted",
    "contractions",
    "open_roundings",
    "parse",
]


@dataclass(frozen=True)
class Register:
    """A register, or a special one such as %tid.x, or the name of shared memory."""

    name: str


@dataclass(frozen=True)
class Immediate:
    """A constant, as an integer; floats as their bits."""

    bits: int


@dataclass(frozen=True)
class Vector:
    """Several operands in braces."""

    parts: tuple[Register | Immediate, ...]


@dataclass(frozen=True)
class Address:
    """What stands in brackets: a register, a parameter or shared memory, plus a constant."""

    base: str
    offset: int


Operand = Register | Immediate | Vector | Address


@dataclass(frozen=True)
class Instruction:
    """One instruction."""

    opcode: str
    """With all its modifiers: add.rn.f32."""
    operands: tuple[Operand, ...]
    guard: str = ""
    """The predicate that decides whether a thread takes part; empty for all threads."""
    negated: bool = False
    """Whether a thread takes part if the predicate is false."""
    text: str = ""


@dataclass(frozen=True)
class Program:
    """One kernel."""

    name: str
    parameters: tuple[tuple[str, int], ...]
    """Names and bits."""
    registers: dict[str, int]
    """Bits by name; a name that ends in * stands for all names with a number in its place."""
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]
    """Index of the instruction behind each label."""
    threads: int
    """Threads of a block."""

    def width(self, name: str) -> int | None:
        """Bits of a register; None if there is none of this name."""
        return self.registers.get(name, self.registers.get(name.rstrip("0123456789") + "*"))


OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+")
ADDRESS = re.compile(r"\[\s*([%$\w]+)\s*(?:([+-])\s*(-?\w+)\s*)?\]")


REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+([^;]*);")


def parse_operand(text: str) -> Operand:
    if text[0] == "{":
        parts = tuple(parse_operand(part) for part in OPERAND.findall(text[1:-1]))
        if not all(isinstance(part, Register | Immediate) for part in parts):
            raise ValueError(f"a vector of PTX holds registers and constants; got {text}")
        return Vector(parts)
    if text[0] == "[":
        match = ADDRESS.fullmatch(text)
        if not match:
            raise ValueError(f"cannot read the PTX address {text}")
        return Address(match[1], int(match[3] or "0", 0) * (-1 if match[2] == "-" else 1))
    if text[:2] in ("0f", "0F", "0d", "0D"):
        return Immediate(int(text[2:], 16))
    number = text.rstrip("U")
    if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)", number):
        return Immediate(int(number, 0))
    return Register(text)


def parse(text: str) -> Program:
    """Raises ValueError for text that is not one kernel of PTX."""
    clean = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.S)
    entry = re.search(r"\.entry\s+([\w$]+)\s*\(([^)]*)\)", clean)
    if not entry:
        raise ValueError("the PTX has no .entry: give the text of one compiled kernel")
    parameters = tuple(
        (name, int(width))
        for width, name in re.findall(r"\.param\s+\.[usbf](\d+)[^,]*?([\w$]+)\s*(?:,|$)", entry[2].strip())
    )
    head, _, body = clean[entry.end() :].partition("{")
    threads = re.search(r"\.reqntid\s+(\d+)", head)
    registers, instructions, labels, depth, waiting = {}, [], {}, 1, ""
    for line in body.splitlines():
        for kind, several in REGISTERS.findall(line):
            for name in several.split(","):
                registers[re.sub(r"<\d+>$", "*", name.strip())] = 1 if kind == "pred" else int(kind[1:])
        line = REGISTERS.sub("", line).strip()
        if not waiting and line in ("{", "}"):
            depth += 1 if line == "{" else -1
            if not depth:
                break
            continue
        if not waiting and (line.startswith(".") or not line):
            continue
        if label := re.match(r"([$\w]+):\s*", line):
            labels[label[1]] = len(instructions)
            line = line[label.end() :]
        *statements, waiting = (waiting + " " + line).split(";")
        waiting = waiting.strip()
        instructions += [parse_instruction(statement.strip()) for statement in statements if statement.strip()]
    return Program(entry[1], parameters, registers, tuple(instructions), labels, int(threads[1]) if threads else 1)


def parse_instruction(text: str) -> Instruction:
    match = re.fullmatch(r"(?:@(!?)([%\w$]+)\s+)?([a-z][\w.:]*)\s*(.*)", text, flags=re.S)
    if not match:
        raise ValueError(f"cannot read the PTX instruction {text!r}")
    return Instruction(
        match[3],
        tuple(map(parse_operand, OPERAND.findall(match[4]))),
        match[2] or "",
        bool(match[1]),
        " ".join(text.split()),
    )


OPEN = {f"{base}.{kind}" for base in ("add", "sub", "mul") for kind in ("f32", "f32x2")}
"""Instructions that leave their rounding open. The ISA lets ptxas contract a multiplication with an addition then;
`.rn` forbids it."""


def open_roundings(program: Program) -> list[Instruction]:
    """Additions and multiplications that ptxas may fuse with each other."""
    return [instruction for instruction in program.instructions if instruction.opcode in OPEN]


def contractions(program: Program) -> dict[int, tuple[int, int]]:
    """Index of each addition → which of its operands is the result, or the size of the result, of which multiplication,
    where both leave their rounding open. Registers with one writer are followed, also into pairs and out of them; what
    went through a selection cannot be fused."""
    writers: dict[str, list[int]] = {}
    for i, instruction in enumerate(program.instructions):
        for part in (
            instruction.operands[0].parts
            if instruction.operands and isinstance(instruction.operands[0], Vector)
            else instruction.operands[:1]
        ):
            writers.setdefault(getattr(part, "name", ""), []).append(i)

    def source(value: Operand) -> int | None:
        if isinstance(value, Vector):
            return next((at for part in value.parts if (at := source(part)) is not None), None)
        writer_indices = writers.get(getattr(value, "name", ""), ())
        if len(writer_indices) != 1:
            return None
        instruction = program.instructions[writer_indices[0]]
        if instruction.opcode in ("mul.f32", "mul.f32x2"):
            return writer_indices[0]
        return (
            source(instruction.operands[1])
            if instruction.opcode in ("abs.f32", "neg.f32", "mov.b32", "mov.b64")
            else None
        )

    adds = [
        (i, instruction)
        for i, instruction in enumerate(program.instructions)
        if instruction.opcode in OPEN and not instruction.opcode.startswith("mul")
    ]
    return {
        i: (place, at)
        for i, instruction in adds
        for place in (1, 2)
        if (at := source(instruction.operands[place])) is not None
    }


def contracted(program: Program) -> Program:
    """Each addition of `contractions` as one fused multiply-add: a·b + c, or |a|·|b| + c if the addition takes the
    product's size. Raises ValueError for pairs, subtractions and what takes another way."""
    fusions, out, moved = contractions(program), [], []
    a, b = Register("%fused_a"), Register("%fused_b")
    for i, instruction in enumerate(program.instructions):
        moved.append(len(out))
        if i in fusions:
            place, at = fusions[i]
            multiply, addend = program.instructions[at], instruction.operands[3 - place]
            straight = instruction.operands[place] == multiply.operands[0]
            size = Instruction("abs.f32", (instruction.operands[place], multiply.operands[0]))
            if (instruction.opcode, multiply.opcode) != ("add.f32", "mul.f32") or not (
                straight
                or any((step.opcode, step.operands) == (size.opcode, size.operands) for step in program.instructions)
            ):
                raise ValueError(f"cannot fuse {multiply.text} into {instruction.text}")
            way = "mov.b32" if straight else "abs.f32"
            out += [
                Instruction(way, (name, value), instruction.guard, instruction.negated)
                for name, value in zip((a, b), multiply.operands[1:], strict=True)
            ]
            instruction = replace(
                instruction,
                opcode="fma.rn.f32",
                operands=(instruction.operands[0], a, b, addend),
                text=f"{multiply.text}; {instruction.text}",
            )
        out.append(instruction)
    labels = {name: moved[i] if i < len(moved) else len(out) for name, i in program.labels.items()}
    return replace(
        program, instructions=tuple(out), labels=labels, registers=program.registers | {a.name: 32, b.name: 32}
    )
