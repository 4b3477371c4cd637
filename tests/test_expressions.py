"""Every regular expression of the repository is linear in the length of its text: agents, models, packages and servers
choose those texts.

An expression that is not linear would let one of them hold the process that reads it. All are attacked, of every room,
with texts that are made from their own pieces. The roof, `etude/`, and the kernels read nobody's texts but the
repository's own.
"""

import ast
import dataclasses
import importlib
import re
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.backtracking import attacks, is_linear, matches

ROOT = Path(__file__).parents[1]
ROOMS = ("environments", "ref", "kit", "scaled", "recipe", "sims")
CALLS = {"compile", "search", "match", "fullmatch", "findall", "finditer", "sub", "subn", "split"}
"""Functions of re whose first argument is a pattern."""


def value(node: ast.expr, module: dict) -> object:
    """What an expression is that builds a pattern. Names that are no constants of the module stand for a word."""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(value(part, module)) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return value(node.value, module)
    if isinstance(node, ast.BinOp):
        left, right = value(node.left, module), value(node.right, module)
        if isinstance(left, int) and isinstance(right, int):
            return left | right
        return str(left) + str(right)
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "re":
        return getattr(re, node.attr)
    if isinstance(node, ast.Name) and isinstance(module.get(node.id), str | re.Pattern):
        return module[node.id]
    return "word"


def flags_of(call: ast.Call, module: dict) -> int:
    rest = [*call.args[1:], *(word.value for word in call.keywords if word.arg == "flags")]
    known = [value(node, module) for node in rest if isinstance(node, ast.Attribute | ast.BinOp)]
    return next((int(flag) for flag in known if isinstance(flag, re.RegexFlag)), 0)


def patterns_in(constant: object) -> list[re.Pattern]:
    """Also those in tuples and in dataclasses."""
    if isinstance(constant, re.Pattern):
        return [constant]
    is_record = dataclasses.is_dataclass(constant) and not isinstance(constant, type)
    parts = vars(constant).values() if is_record else constant if isinstance(constant, tuple | list) else ()
    return [pattern for part in parts for pattern in patterns_in(part)]


def calls_of_re(source: str) -> Iterator[tuple[str, ast.Call]]:
    """Name of the function, and the call."""
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
        ):
            if node.func.value.id == "re" and node.func.attr in CALLS:
                yield node.func.attr, node


@lru_cache
def expressions(room: str) -> list[tuple[str, str, int, bool]]:
    """File, pattern, flags, and whether it is only ever matched from the beginning of a text."""
    rows: dict[tuple[str, str | bytes, int], bool] = {}
    for path in sorted((ROOT / room).rglob("*.py")):
        source, name = path.read_text(), path.relative_to(ROOT).as_posix()
        if "import re\n" not in source:
            continue
        dotted = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        module = vars(importlib.import_module(dotted))
        for variable, constant in module.items():
            uses = set(re.findall(rf"\b{variable}\.(\w+)\(", source))
            for pattern in patterns_in(constant):
                rows[name, pattern.pattern, pattern.flags & ~re.UNICODE] = bool(uses) and uses <= {"match", "fullmatch"}
        compiled = {pattern for _, pattern, _ in rows}
        for function, call in calls_of_re(source):
            pattern = value(call.args[0], module)
            if (
                isinstance(pattern, str | bytes)
                and pattern != "word"
                and not (function == "compile" and pattern in compiled)
            ):
                rows[name, pattern, flags_of(call, module)] = function in ("match", "fullmatch")
    return [
        (name, pattern if isinstance(pattern, str) else pattern.decode("latin-1"), flags, anchored)
        for (name, pattern, flags), anchored in rows.items()
    ]


@pytest.fixture(autouse=True)
def deep_stack():
    """The matcher goes deeper with each character."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(200_000)
    yield
    sys.setrecursionlimit(limit)


@pytest.mark.parametrize("room", ROOMS)
def test_every_expression_is_linear(room):
    slow = {
        f"{name}: {pattern[:80]}": attack
        for name, pattern, flags, anchored in expressions(room)
        if (attack := is_linear(pattern, flags, anchored))
    }
    assert not slow, "\n".join(f"{place}\n    {attack}" for place, attack in slow.items())


@pytest.mark.parametrize(
    "pattern",
    [
        r"\bgit\s+(?:-[Cc]\s+\S+\s+|--?[\w-]+(?:=\S+)?\s+)*(show|log)\b",
        r"(>|tee|cp|mv).*\breward\.(txt|json)",
        r"<[^>]*>",
        r"\s+$",
        r"(a+)+b",
        r"(a|a)*b",
        r"\d+ passed",
        r"x*x*y",
    ],
)
def test_an_expression_that_is_not_linear_is_seen(pattern):
    assert is_linear(pattern)


@given(st.data())
@settings(max_examples=60)
def test_the_matcher_agrees_with_pythons(data):
    """On the expressions of the monitor and of servers, over texts of their own pieces."""
    rows = [row for room in ("environments", "kit") for row in expressions(room)]
    _, pattern, flags, _ = data.draw(st.sampled_from(rows))
    parts = [part for attack in attacks(pattern, flags)[:60] for part in attack] or [""]
    text = "".join(data.draw(st.lists(st.sampled_from(parts), max_size=4)))[:60]
    assert matches(pattern, text, flags) == (re.search(pattern, text, flags) is not None), (pattern, text)
