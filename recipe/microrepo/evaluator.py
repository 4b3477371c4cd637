"""Evaluates code from an untrusted policy without running Python.

A body is simple assignments followed by one `return`. It is checked as text (length, alphabet, nesting, long
numbers), parsed to a syntax tree, checked against a whitelist of nodes, and then walked; nothing is ever
compiled or passed to `eval`. There are no loops and every node is visited at most once, so the number of
nodes bounds the work, and the size of each number is bounded before it is computed. For any text,
the result is an integer or an `EvaluationError` with a message short enough to show to the agent.
"""

import ast
import operator
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Body", "EvaluationError", "parse"]

MAX_CHARACTERS = 400
MAX_NESTING = 20
MAX_DEPTH = 40
MAX_NODES = 200
MAX_DIGITS = 12
MAX_BITS = 4096

ALPHABET = re.compile(r"[A-Za-z0-9_+\-*/%()<>=!,. \n]*")
FILE_NAME = re.compile(r"m\d+")
FUNCTIONS = {"max": max, "min": min, "abs": abs}
ARITHMETIC = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
COMPARISONS = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


class EvaluationError(ValueError):
    """The body is not allowed, or has no value for these arguments. The message is one short line."""


@dataclass(frozen=True)
class Body:
    """A checked function body, ready to be evaluated."""

    args: tuple[str, ...]
    statements: tuple[ast.Assign | ast.Return, ...]

    def evaluate(self, inputs: Sequence[int]) -> int:
        """The return value for `inputs` (one integer per argument); Booleans count as 0 and 1.

        Raises EvaluationError if Python would raise, or if a number exceeds 4,096 bits."""
        values = dict(zip(self.args, inputs, strict=True))
        for statement in self.statements:
            assert statement.value is not None
            value = _evaluate(statement.value, values)
            if isinstance(statement, ast.Return):
                return value
            target = statement.targets[0]
            assert isinstance(target, ast.Name)
            values[target.id] = value
        raise EvaluationError("no return")


def parse(text: str, args: Sequence[str]) -> Body:
    """Checks `text`, a function body without its indentation, for a function of `args`.

    Raises EvaluationError unless it consists of assignments and a final return of integer arithmetic."""
    _check_text(text)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            statements = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise EvaluationError("does not parse") from None
    if not statements or not isinstance(statements[-1], ast.Return):
        raise EvaluationError("no return")
    if sum(1 for statement in statements for _ in ast.walk(statement)) > MAX_NODES:
        raise EvaluationError("too long")
    names = set(args)
    for statement in statements[:-1]:
        if not isinstance(statement, ast.Assign):
            raise EvaluationError(f"{_node_name(statement)} is not allowed")
        if len(statement.targets) != 1 or not isinstance(statement.targets[0], ast.Name):
            raise EvaluationError("assign to one name")
        if statement.targets[0].id in FUNCTIONS:
            raise EvaluationError(f"{statement.targets[0].id} is a function")
        _check_expression(statement.value, names, 0)
        names.add(statement.targets[0].id)
    _check_expression(statements[-1].value, names, 0)
    return Body(
        tuple(args), tuple(statement for statement in statements if isinstance(statement, ast.Assign | ast.Return))
    )


def _check_text(text: str) -> None:
    if len(text) > MAX_CHARACTERS:
        raise EvaluationError("too long")
    if not ALPHABET.fullmatch(text):
        raise EvaluationError("character not allowed")
    nesting = 0
    for character in text:
        nesting += (character == "(") - (character == ")")
        if nesting > MAX_NESTING:
            raise EvaluationError("too deep")
    if re.search(rf"[0-9_]{{{MAX_DIGITS + 1}}}", text):
        raise EvaluationError("number too large")


def _node_name(node: ast.AST | None) -> str:
    return "nothing" if node is None else type(node).__name__.lower()


def _check_expression(node: ast.expr | None, names: set[str], depth: int) -> None:
    if depth > MAX_DEPTH:
        raise EvaluationError("too deep")
    match node:
        case ast.Constant(value=value) if type(value) is int:
            if value >= 10**MAX_DIGITS:  # hexadecimal passes the check of the text
                raise EvaluationError("number too large")
            parts = []
        case ast.Name(id=name):
            if name not in names:
                raise EvaluationError(f"unknown name {name[:12]}")
            parts = []
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in ARITHMETIC:
            parts = [left, right]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            parts = [operand]
        case ast.Compare(left=left, ops=signs, comparators=operands) if {*map(type, signs)} <= COMPARISONS.keys():
            parts = [left, *operands]
        case ast.IfExp(test=test, body=body, orelse=orelse):
            parts = [test, body, orelse]
        case ast.Call(func=ast.Name(id=name), args=parts, keywords=[]):
            if FILE_NAME.fullmatch(name):
                raise EvaluationError(f"calls {name[:12]}")
            if name not in FUNCTIONS:
                raise EvaluationError(f"unknown name {name[:12]}")
            if (name == "abs") != (len(parts) == 1) or not parts:
                raise EvaluationError(f"{name} of {len(parts)}")
        case _:
            raise EvaluationError(f"{_node_name(node)} is not allowed")
    for part in parts:
        _check_expression(part, names, depth + 1)


def _evaluate(node: ast.expr, values: dict[str, int]) -> int:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.Name(id=name):
            return values[name]
        case ast.BinOp(left=left, op=sign, right=right):
            return _apply_operator(type(sign), _evaluate(left, values), _evaluate(right, values))
        case ast.UnaryOp(operand=operand):
            return -_evaluate(operand, values)
        case ast.Compare(left=left, ops=signs, comparators=operands):
            x = _evaluate(left, values)
            for sign, part in zip(signs, operands, strict=True):
                y = _evaluate(part, values)
                if not COMPARISONS[type(sign)](x, y):
                    return 0
                x = y
            return 1
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return _evaluate(body if _evaluate(test, values) else orelse, values)
        case ast.Call(func=ast.Name(id=name), args=parts):
            return FUNCTIONS[name](*[_evaluate(part, values) for part in parts])
    raise EvaluationError(f"{_node_name(node)} is not allowed")


def _apply_operator(sign: type[ast.operator], x: int, y: int) -> int:
    """`x sign y`; the size of the result is bounded before it is computed."""
    bits = max(x.bit_length(), y.bit_length()) + 1
    if sign is ast.Mult:
        bits = x.bit_length() + y.bit_length()
    elif sign is ast.Pow:
        if y < 0:
            raise EvaluationError("negative power")
        bits = x.bit_length() * y
    if bits > MAX_BITS:
        raise EvaluationError("number too large")
    try:
        return ARITHMETIC[sign](x, y)
    except ZeroDivisionError:
        raise EvaluationError("division by zero") from None
