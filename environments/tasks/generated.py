"""Packages that are made up: small modules of functions that do what their docstrings say, with tests. They are
material for the easiest tasks, for models that cannot solve those of real packages yet.

    etude tasks make generated:0 generated:1 generated:heldout:0

A function composes three steps over a list of numbers or of words: it keeps some (`Kind.filters`), changes each
(`maps`), and makes one value of all (`reductions`). A quarter of the compositions, by a hash, is held out: it occurs in
the packages `generated:heldout:N` and in no other. Nor do others have a composition that does the same in other words,
judged by what both make of `PROBES` lists with any constants. Constants, names, and the way to write a function (an
expression or a loop) are drawn by the package's number, so the same number gives the same files everywhere.

    "Return the sum of the squares of the even numbers in values."
     reduction      map            filter
"""

from __future__ import annotations

import hashlib
import itertools
import random
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from environments.tasks.package import Package

__all__ = ["SPEC", "compositions", "generated_package", "split"]

SPEC = re.compile(r"generated:(?P<heldout>heldout:)?(?P<number>0|[1-9]\d{0,8})", re.ASCII)
"""How a package is asked for."""
MODULES, FUNCTIONS, TESTS, PROBES = 3, 2, 8, 60
"""Modules of a package, functions of a module, tests of a function, and lists on which compositions are compared."""


@dataclass(frozen=True)
class Kind:
    """Functions over lists of one type. The words of a step → its code; `x` is an item, `k` a constant."""

    filters: Mapping[str, str]
    maps: Mapping[str, str]
    """The words have a place for what is changed."""
    constants: tuple[int, ...]
    draw_item: Callable[[random.Random], Any]
    module_names: tuple[str, ...]


NUMBERS = Kind(
    {
        "the even numbers": "x % 2 == 0",
        "the odd numbers": "x % 2 == 1",
        "the numbers above {k}": "x > {k}",
        "the numbers of at most {k}": "x <= {k}",
        "the numbers that {k} divides": "x % {k} == 0",
        "the numbers that are not {k}": "x != {k}",
        "the numbers whose absolute value is below {k}": "abs(x) < {k}",
        "all numbers": "",
    },
    {
        "{}": "x",
        "the squares of {}": "x * x",
        "the doubles of {}": "2 * x",
        "the absolute values of {}": "abs(x)",
        "the last digits of {}": "abs(x) % 10",
        "the halves, rounded down, of {}": "x // 2",
        "the negatives of {}": "-x",
        "the distances to 7 of {}": "abs(x - 7)",
    },
    (2, 3, 4, 5, 6, 9),
    lambda rng: rng.randint(-12, 12),
    ("numbers_in_lists", "figures", "statistics_of_lists", "amounts"),
)
WORDS = Kind(
    {
        "the words of more than {k} letters": "len(x) > {k}",
        "the words of at most {k} letters": "len(x) <= {k}",
        "the words that begin with a vowel": 'x[0] in "aeiou"',
        "the words that contain an e": '"e" in x',
        "the words that end as they begin": "x[0] == x[-1]",
        "the words that read the same backwards": "x == x[::-1]",
        "the words without an a": '"a" not in x',
        "all words": "",
    },
    {
        "{}": "x",
        "the upper case of {}": "x.upper()",
        "the reverse of {}": "x[::-1]",
        "the first letters of {}": "x[0]",
        "the last two letters of {}": "x[-2:]",
        "the rest after the first letter of {}": "x[1:]",
        "the capitalised forms of {}": "x.capitalize()",
        "the doublings (ab to abab) of {}": "x + x",
    },
    (2, 3, 4),
    lambda rng: "".join(rng.choice("aeinorst") for _ in range(rng.randint(1, 6))),
    ("words_in_lists", "labels", "texts", "vocabulary"),
)
KINDS = {"numbers": NUMBERS, "words": WORDS}


@dataclass(frozen=True)
class Reduction:
    """One value of many. `{inner}` is a generator without its brackets."""

    expression: str
    start: str = ""
    """Of a loop, which has a start, a line for each item, and an end; empty where only an expression is written."""
    update: str = ""
    end: str = "result"
    kinds: tuple[str, ...] = ("numbers", "words")


REDUCTIONS = {
    "a list of {}": Reduction("[{inner}]", "[]", "result.append({map})"),
    "a sorted list of {}": Reduction("sorted({inner})", "[]", "result.append({map})", "sorted(result)"),
    "a list of {}, sorted, largest first": Reduction("sorted(({inner}), reverse=True)"),
    "the number of different values among {}": Reduction(
        "len({{{inner}}})", "set()", "result.add({map})", "len(result)"
    ),
    "the largest of {}, or None": Reduction("max(({inner}), default=None)"),
    "the smallest of {}, or None": Reduction("min(({inner}), default=None)"),
    "the sum of {}": Reduction("sum({inner})", "0", "result += {map}", kinds=("numbers",)),
    "the sum of {}, at most 50": Reduction(
        "min(50, sum({inner}))", "0", "result += {map}", "min(50, result)", ("numbers",)
    ),
    "a string of {}, joined with commas": Reduction(
        '",".join({inner})', "[]", "result.append({map})", '",".join(result)', ("words",)
    ),
    "the number of letters of {}": Reduction(
        "sum(len(x) for x in [{inner}])", "0", "result += len({map})", kinds=("words",)
    ),
}
VERBS = ("collect", "measure", "gather", "summarise", "pick", "reduce", "digest", "extract", "compute", "derive")
OBJECTS = ("items", "values", "entries", "parts", "pieces", "members")

Composition = tuple[str, str, str, str]
"""Kind, and the words of filter, map and reduction."""


def compositions() -> list[Composition]:
    """All of them."""
    return [
        (name, *words)
        for name, kind in KINDS.items()
        for words in itertools.product(
            kind.filters, kind.maps, [words for words, reduction in REDUCTIONS.items() if name in reduction.kinds]
        )
    ]


@cache
def split() -> tuple[tuple[Composition, ...], tuple[Composition, ...]]:
    """Compositions of packages to train on, and those that are held out."""
    heldout = [composition for composition in compositions() if _hash(composition) < 64]
    known_results = set().union(*map(_results, heldout))
    training = [composition for composition in compositions() if _hash(composition) >= 64]
    return tuple(c for c in training if not known_results & _results(c)), tuple(heldout)


def _hash(composition: Composition) -> int:
    return hashlib.sha256("\0".join(composition).encode()).digest()[0]


def _results(composition: Composition) -> set[str]:
    """What the functions of a composition make of the same lists, for each constant."""
    kind_name, filter_words, map_words, reduction_words = composition
    kind, rng, results = KINDS[kind_name], random.Random(kind_name), set()
    inputs = [[kind.draw_item(rng) for _ in range(rng.randint(0, 7))] for _ in range(PROBES)]
    for constant in kind.constants if "{k}" in filter_words else (0,):
        condition = kind.filters[filter_words].format(k=constant)
        body = write_body(REDUCTIONS[reduction_words], kind.maps[map_words], condition, "xs", is_loop=False)
        function = _compile(f"def f(xs):\n{body}", "f")
        results.add(repr([function(list(values)) for values in inputs]))
    return results


def _compile(code: str, name: str) -> Callable[[list], Any]:
    namespace: dict[str, Any] = {}
    exec(code, namespace)  # it is ours: no text of anybody else goes into it
    return namespace[name]


def generated_package(number: int, heldout: bool = False) -> Package:
    """The package of a number."""
    version = f"heldout.{number}" if heldout else str(number)
    rng = random.Random(f"etude generated {version}")
    candidates = list(split()[heldout])
    names = [f"{verb}_{noun}" for verb, noun in itertools.product(VERBS, OBJECTS)]
    rng.shuffle(candidates)
    rng.shuffle(names)
    module_names = {kind: rng.sample(KINDS[kind].module_names, len(KINDS[kind].module_names)) for kind in KINDS}
    files, tests = dict[str, bytes](), dict[str, bytes]()
    while len(files) < MODULES:
        kind = rng.choice(list(KINDS))
        module = module_names[kind].pop()
        own = [composition for composition in candidates if composition[0] == kind][:FUNCTIONS]
        candidates = [composition for composition in candidates if composition not in own]
        functions = [write_function(rng, composition, names.pop()) for composition in own]
        files[f"{module}.py"] = "\n\n".join(code for _, code, _ in functions).encode()
        imports = f"from {module} import {', '.join(sorted(name for name, _, _ in functions))}\n\n\n"
        tests[f"test_{module}.py"] = (imports + "\n\n".join(cases for _, _, cases in functions)).encode()
    return Package("generated", version, files, tests, "CC0-1.0", "generated")


def write_function(rng: random.Random, composition: Composition, name: str) -> tuple[str, str, str]:
    """Name, code and tests of a function. No constant passes more than half of them."""
    kind_name, filter_words, map_words, reduction_words = composition
    kind, reduction, argument = KINDS[kind_name], REDUCTIONS[reduction_words], rng.choice(OBJECTS)
    while True:
        constant = rng.choice(kind.constants)
        condition = kind.filters[filter_words].format(k=constant)
        subject = f"{map_words.format(filter_words.format(k=constant))} in {argument}"
        body = write_body(reduction, kind.maps[map_words], condition, argument, is_loop=rng.random() < 0.5)
        body = re.sub(r"\bx\b", "number" if kind is NUMBERS else "word", body)
        code = f'def {name}({argument}):\n    """Return {reduction_words.format(subject)}."""\n{body}'
        function = _compile(code, name)
        inputs = [[kind.draw_item(rng) for _ in range(rng.randint(0, 7))] for _ in range(TESTS)]
        results = [function(list(values)) for values in inputs]
        counts = Counter(map(repr, results))
        if len(counts) > 2 and max(counts.values()) <= TESTS // 2:
            break
    cases = [
        f"def test_{name}_{number}():\n    assert {name}({values!r}) == {result!r}\n"
        for number, (values, result) in enumerate(zip(inputs, results, strict=True))
    ]
    return name, code, "\n\n".join(cases)


def write_body(reduction: Reduction, change: str, condition: str, argument: str, is_loop: bool) -> str:
    """The lines below the docstring."""
    if not (is_loop and reduction.start):
        inner = f"{change} for x in {argument}" + (f" if {condition}" if condition else "")
        return f"    return {reduction.expression.format(inner=inner)}\n"
    indent = " " * (12 if condition else 8)
    lines = [f"    result = {reduction.start}", f"    for x in {argument}:"]
    lines += [f"        if {condition}:"] if condition else []
    lines += [indent + reduction.update.format(map=change), f"    return {reduction.end}"]
    return "\n".join(lines) + "\n"
