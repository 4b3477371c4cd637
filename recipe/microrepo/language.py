"""The phrase language of the small world and the Python that each phrase stands for.

    atom   := a | b | c | 0 ... 9
    first  := A plus B | A minus B | A times B | larger A B | smaller A B | double A | square A | half A
    phrase := first (" then " step)*
    step   := plus X | minus X | times X | larger X | smaller X | double | square | half

A phrase is read strictly from left to right, and the code grows in the same order: `a plus b then double` is
`(a + b) * 2`. A model with under a million parameters can learn that translation. In place of an atom, the
first operation may name another file (`m7 minus m2`), and `m7` alone is a first operation, too: the body of
that file is inlined there.

Every expression stores its values at eight fixed points. They identify the function that it computes,
whatever its spelling: `a + b` and `b + a` are always on the same side of a split (`recipe.microrepo.task.held_out`).
"""

import operator
from collections.abc import Mapping
from functools import lru_cache
from random import Random
from typing import NamedTuple

__all__ = [
    "BINARY",
    "UNARY",
    "Expression",
    "atom",
    "combine",
    "draw_first",
    "draw_step",
    "reference",
    "transform",
    "translate",
]

PROBES = ((3, 8, -6, 0, 13, -7, 1, 25), (5, 2, 1, -9, 13, -12, 0, -3), (7, -4, 4, 11, -2, 6, 20, -15))
COLUMNS = dict(zip("abc", PROBES, strict=True))

INFIX = {"plus": ("+", operator.add), "minus": ("-", operator.sub), "times": ("*", operator.mul)}
CALLS = {"larger": ("max", max), "smaller": ("min", min)}
BINARY = (*INFIX, *CALLS)
UNARY = ("double", "square", "half")
OPERATIONS = (*BINARY, *UNARY)


class Expression(NamedTuple):
    """A phrase, its Python expression, and the values that it computes."""

    phrase: str
    code: str
    kind: str
    """"atom" (a name or a digit), "call" (max or min: needs no parentheses) or "open" (needs them)."""
    values: tuple[int, ...]
    """Values at the eight probe points; equal functions have equal values."""

    @property
    def trivial(self) -> bool:
        """Whether it seems to be a constant or a bare argument, which is too easy for a task."""
        values = self.values
        return values in PROBES or values.count(values[0]) == len(values)


@lru_cache
def atom(text: str) -> Expression:
    """`a`, `b`, `c` or a digit. Raises ValueError for anything else."""
    if text in COLUMNS:
        return Expression(text, text, "atom", COLUMNS[text])
    if len(text) == 1 and text in "0123456789":
        return Expression(text, text, "atom", (int(text),) * len(PROBES[0]))
    raise ValueError(f"not an atom: {text!r}")


def reference(name: str, helper: Expression) -> Expression:
    """The helper in file `name` as another file refers to it: its phrase is just the name."""
    return helper._replace(phrase=name)


def _parenthesize(expression: Expression) -> str:
    return f"({expression.code})" if expression.kind == "open" else expression.code


def combine(operation: str, left: Expression, right: Expression, *, step: bool = False) -> Expression:
    """`left` and `right` joined by one of `BINARY`; `step` only chooses the wording ("... then plus b")."""
    if operation in INFIX:
        sign, function = INFIX[operation]
        code, kind = f"{_parenthesize(left)} {sign} {_parenthesize(right)}", "open"
        phrase = f"{left.phrase} {operation} {right.phrase}"
    else:
        name, function = CALLS[operation]
        code, kind = f"{name}({left.code}, {right.code})", "call"
        phrase = f"{operation} {left.phrase} {right.phrase}"
    if step:
        phrase = f"{left.phrase} then {operation} {right.phrase}"
    return Expression(phrase, code, kind, tuple(map(function, left.values, right.values)))


def transform(operation: str, inner: Expression, *, step: bool = False) -> Expression:
    """One of `UNARY` applied to `inner`; `step` only chooses the wording ("... then double")."""
    if operation == "double":
        code, values = f"{_parenthesize(inner)} * 2", tuple([2 * v for v in inner.values])
    elif operation == "half":
        code, values = f"{_parenthesize(inner)} // 2", tuple([v // 2 for v in inner.values])
    else:
        code = f"{inner.code} * {inner.code}" if inner.kind == "atom" else f"{_parenthesize(inner)} ** 2"
        values = tuple([v * v for v in inner.values])
    phrase = f"{inner.phrase} then {operation}" if step else f"{operation} {inner.phrase}"
    return Expression(phrase, code, "open", values)


def translate(phrase: str, helpers: Mapping[str, Expression] | None = None) -> Expression:
    """The expression for `phrase`, with the named helpers inlined.

    Raises ValueError if the phrase is not in the language or names an unknown file."""
    helpers = helpers or {}

    def operand(word: str) -> Expression:
        return reference(word, helpers[word]) if word in helpers else atom(word)

    first, *steps = (part.split() for part in phrase.split(" then "))
    match first:
        case [word] if word in helpers:
            result = operand(word)
        case [left, operation, right] if operation in INFIX:
            result = combine(operation, operand(left), operand(right))
        case [operation, left, right] if operation in CALLS:
            result = combine(operation, operand(left), operand(right))
        case [operation, inner] if operation in UNARY:
            result = transform(operation, operand(inner))
        case _:
            raise ValueError(f"not a first operation: {' '.join(first)!r}")
    for step in steps:
        match step:
            case [operation, right] if operation in BINARY:
                result = combine(operation, result, atom(right), step=True)
            case [operation] if operation in UNARY:
                result = transform(operation, result, step=True)
            case _:
                raise ValueError(f"not a step: {' '.join(step)!r}")
    return result


@lru_cache
def _list_first_operations(args: tuple[str, ...]) -> dict[str, tuple[tuple[Expression, ...], tuple[Expression, ...]]]:
    """All first operations on `args` by name: those without a digit, and those with one."""
    names = [atom(name) for name in args]
    digits = [atom(str(digit)) for digit in range(10)]
    table = {}
    for operation in BINARY:
        without_digits = [combine(operation, x, y) for x in names for y in names]
        with_digits = [combine(operation, *pair) for x in names for d in digits for pair in ((x, d), (d, x))]
        table[operation] = tuple(tuple(e for e in group if not e.trivial) for group in (without_digits, with_digits))
    for operation in UNARY:
        table[operation] = (tuple(transform(operation, x) for x in names),) * 2
    return table


def draw_first(rng: Random, args: tuple[str, ...], digits: float) -> Expression:
    """A random first operation that is not trivial; one operand is a digit with probability `digits`."""
    operation = OPERATIONS[int(rng.random() * len(OPERATIONS))]
    choices = _list_first_operations(args)[operation][rng.random() < digits]
    return choices[int(rng.random() * len(choices))]


def draw_step(rng: Random, expression: Expression, args: tuple[str, ...], digits: float) -> Expression:
    """`expression` followed by one random step, whose operand is a digit with probability `digits`."""
    operation = OPERATIONS[int(rng.random() * len(OPERATIONS))]
    if operation in UNARY:
        return transform(operation, expression, step=True)
    choices = "0123456789" if rng.random() < digits else args
    return combine(operation, expression, atom(choices[int(rng.random() * len(choices))]), step=True)
