"""Made-up packages whose features are known: each function has some, each feature has tests, and functions share helpers and call each other.

A package is drawn from a seed. It has a module of helpers, three to five modules of a kind (styles of a text, options of a list, numbers with their
errors, a class of methods), one that calls others, and a file of tests for each. What a test expects is worked out here in Python, from the same
operations that the source spells: nothing of a package is run. The first part of a test's name says its feature.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = ["Program", "feature_of", "program"]

OPERATIONS: dict[str, Callable[[str], str]] = {
    "{x}.upper()": str.upper,
    "{x}[::-1]": lambda x: x[::-1],
    "{x}.capitalize()": str.capitalize,
    "{x} + {x}": lambda x: x + x,
    "{x}[1:]": lambda x: x[1:],
    "{x}[:2]": lambda x: x[:2],
    '"<" + {x} + ">"': lambda x: "<" + x + ">",
    '{x}.replace("a", "o")': lambda x: x.replace("a", "o"),
    "{x}.ljust(6, '.')": lambda x: x.ljust(6, "."),
}
NAMES = (
    "amber",
    "birch",
    "cedar",
    "delta",
    "ember",
    "fjord",
    "grove",
    "heron",
    "islet",
    "jolly",
    "knoll",
    "lilac",
    "maple",
    "north",
    "ocean",
    "pearl",
)
WORDS = ("apple", "bread", "candle", "dragon", "eagle", "fabric", "garden", "hammer", "island", "jacket", "kettle", "ladder", "magnet", "needle")


@dataclass
class Program:
    """Files of the package, and files of its tests."""

    files: dict[str, bytes] = field(default_factory=dict)
    tests: dict[str, bytes] = field(default_factory=dict)


Cases = dict[str, list[tuple[str, object]]]
"""Feature → calls, and what each gives; the name of an exception's class where it raises."""


def feature_of(test: str) -> str:
    """The feature of a test, by the name that pytest gives it."""
    return test.partition("[")[0]


def program(seed: int) -> Program:
    """The package of a seed."""
    draw = random.Random(f"feature-programs-{seed}")
    made, names = Program(), draw.sample(NAMES, 6)
    made.files["made/base.py"] = BASE.encode()
    exported, callable_ = [], []
    for name in names[: draw.randint(3, 5)]:
        source, cases, call = draw.choice((styles, options, numbers, methods))(draw, name)
        exported.append((name, cases))
        callable_ += [(name, *call)]
        made.files[f"made/{name}s.py"] = source.encode()
    source, cases = calling(draw, names[5], callable_)
    made.files[f"made/{names[5]}s.py"] = source.encode()
    for name, some in [*exported, (names[5], cases)]:
        made.tests[f"tests/test_{name}s.py"] = tests_of(name, some, by_attribute=draw.random() < 0.5).encode()
    listed = [name for name, _ in exported] + [names[5]]
    lines = [f"from made.{name}s import {name}" for name in listed] + ["", f"__all__ = {listed!r}"]
    made.files["made/__init__.py"] = ("\n".join(lines) + "\n").encode()
    return made


BASE = '''"""What the other modules share."""


def clean(text):
    """A text without space at its ends, and without double spaces."""
    return " ".join(text.split())


def known(name, names):
    """Raises where a name is none of those that are known."""
    if name not in names:
        raise LookupError(name)
    return name
'''


def tests_of(name: str, cases: Cases, by_attribute: bool) -> str:
    """A file of tests: it names what it tests in an import, or as an attribute of the package."""
    lines = ["import pytest", "", "import made" if by_attribute else f"from made import {name}", ""]
    for feature, some in cases.items():
        raising = isinstance(some[0][1], type)
        calls = [(call.replace("CALL", f"made.{name}" if by_attribute else name), said) for call, said in some]
        lines += ["", f"@pytest.mark.parametrize('number', range({len(calls)}))", f"def test_{feature}(number):"]
        for number, (call, said) in enumerate(calls):
            lines.append(f"    if number == {number}:")
            if raising:
                lines += [f"        with pytest.raises({getattr(said, '__name__', '')}):", f"            {call}"]
            else:
                lines.append(f"        assert {call} == {said!r}")
    return "\n".join(lines) + "\n"


def phrases(draw: random.Random, n: int) -> list[str]:
    return [" ".join(draw.sample(WORDS, draw.randint(2, 3))) for _ in range(n)]


def styles(draw: random.Random, name: str) -> tuple[str, Cases, tuple[str, Callable[[str], str]]]:
    """A function with a branch for each style, and an error for any other one."""
    known = draw.sample(("plain", "loud", "short", "mirror", "framed", "wide"), draw.randint(3, 5))
    lines = [
        "from made.base import clean, known",
        "",
        f"STYLES = {known!r}",
        "",
        "",
        f"def {name}(text, style):",
        f'    """A text in a style: {", ".join(known)}."""',
    ]
    lines += ["    known(style, STYLES)", "    words = clean(text).split()"]
    cases: Cases = {}
    first: Callable[[str], str] | None = None
    for style in known:
        (one, f), (other, g), sep = draw.choice([*OPERATIONS.items()]), draw.choice([*OPERATIONS.items()]), draw.choice(("-", "_", " ", "/"))
        lines.append(f'    if style == "{style}":')
        if draw.random() < 0.5:
            lines.append(f'        return "{sep}".join({one.format(x="word")} for word in words)')
            says = lambda text, f=f, sep=sep: sep.join(map(f, text.split()))  # noqa: E731
        else:
            lines += [f"        head = {one.format(x='words[0]')}", f"        rest = [{other.format(x='word')} for word in words[1:]]"]
            lines.append(f'        return "{sep}".join([head, *rest])')
            says = lambda text, f=f, g=g, sep=sep: sep.join([f(text.split()[0]), *map(g, text.split()[1:])])  # noqa: E731
        first = first or says
        cases[style] = [(f"CALL({text!r}, {style!r})", says(text)) for text in phrases(draw, draw.randint(3, 5))]
    cases["unknown"] = [(f"CALL({text!r}, 'none of them')", LookupError) for text in phrases(draw, 3)]
    assert first is not None
    return "\n".join(lines) + "\n", cases, (f"{name}({{x}}, {known[0]!r})", first)


def options(draw: random.Random, name: str) -> tuple[str, Cases, tuple[str, Callable[[str], str]]]:
    """A function whose options each do something to a list."""
    kinds = {
        "unique": ("False", "if unique:", "items = list(dict.fromkeys(items))", "True", lambda items: [*dict.fromkeys(items)]),
        "turned": ("False", "if turned:", "items.reverse()", "True", lambda items: items[::-1]),
        "limit": ("None", "if limit is not None:", "items = items[:limit]", "2", lambda items: items[:2]),
        "prefix": ("None", "if prefix is not None:", "items = [prefix + one for one in items]", "'x-'", lambda items: ["x-" + one for one in items]),
        "ranked": ("False", "if ranked:", "items = sorted(items, key=len)", "True", lambda items: sorted(items, key=len)),
    }
    chosen, sep = draw.sample([*kinds], draw.randint(3, 5)), draw.choice((", ", "; ", " + "))
    arguments = ", ".join(f"{one}={kinds[one][0]}" for one in chosen)
    lines = [
        "from made.base import clean",
        "",
        "",
        f"def {name}(items, {arguments}):",
        '    """Items in a row."""',
        "    items = [clean(one) for one in items]",
    ]
    cases: Cases = {}
    for one in chosen:
        _, head, body, value, change = kinds[one]
        lines += [f"    {head}", f"        {body}"]
        some = [[draw.choice(WORDS) for _ in range(4)] for _ in range(draw.randint(3, 5))]
        cases[one] = [(f"CALL({items + items[:1]!r}, {one}={value})", sep.join(change(items + items[:1]))) for items in some]
    lines += ["    if not items:", '        return "nothing"', f'    return "{sep}".join(items)']
    cases["empty"] = [("CALL([])", "nothing"), ("CALL(())", "nothing"), ("CALL({})", "nothing")]
    return "\n".join(lines) + "\n", cases, (f"{name}({{x}}.split())", lambda text: sep.join(text.split()))


def numbers(draw: random.Random, name: str) -> tuple[str, Cases, tuple[str, Callable[[str], str]]]:
    """A function that reads a number: what is negative, what is none, and what stands for it then."""
    factor, less = draw.randint(2, 9), draw.randint(1, 9)
    lines = ["from made.base import clean", "", "", f"def {name}(text, default=None):", '    """The number that a text tells, or the default."""']
    lines += ["    try:", "        found = int(clean(text))", "    except ValueError:", "        if default is not None:"]
    lines += [f"            return default - {less}", "        shown = text[:20]", "        raise ValueError(f'no number: {shown}') from None"]
    lines += ["    if found < 0:", f"        found = abs(found) - {less}", "        return -found", f"    return {factor} * found"]
    some = draw.sample(range(10, 99), 12)
    cases: Cases = {
        "positive": [(f"CALL(' {n} ')", factor * n) for n in some[:4]],
        "negative": [(f"CALL('-{n}')", less - n) for n in some[4:8]],
        "default": [(f"CALL({word!r}, default={n})", n - less) for word, n in zip(draw.sample(WORDS, 4), some[8:], strict=True)],
        "refused": [(f"CALL({word!r})", ValueError) for word in draw.sample(WORDS, 3)],
    }
    return "\n".join(lines) + "\n", cases, (f"str({name}(str(len({{x}}))))", lambda text: str(factor * len(text)))


def methods(draw: random.Random, name: str) -> tuple[str, Cases, tuple[str, Callable[[str], str]]]:
    """A class whose methods each do something with what it holds."""
    (source, f), sep = draw.choice([*OPERATIONS.items()]), draw.choice((", ", "; ", "|"))
    kinds = {
        "longest": (["best = max(self.items, key=len)", "return best"], "longest()", lambda items: max(items, key=len)),
        "joined": ([f'return "{sep}".join(self.items)'], "joined()", lambda items: sep.join(items)),
        "changed": ([f"return [{source.format(x='one')} for one in self.items]"], "changed()", lambda items: [f(one) for one in items]),
        "total": (["total = 0", "for one in self.items:", "    total += len(one)", "return total"], "total()", lambda items: sum(map(len, items))),
        "starts": (["found = {one[0] for one in self.items}", "return sorted(found)"], "starts()", lambda items: sorted({one[0] for one in items})),
    }
    lines = ["from made.base import clean", "", "", f"class {name}:", '    """A bag of texts."""', "", "    def __init__(self, items):"]
    lines += ["        self.items = [clean(one) for one in items]"]
    cases: Cases = {}
    for one in draw.sample([*kinds], draw.randint(3, 5)):
        body, call, says = kinds[one]
        lines += ["", f"    def {one}(self):", f'        """What is {one}."""', *(f"        {line}" for line in body)]
        some = [draw.sample(WORDS, draw.randint(2, 4)) for _ in range(draw.randint(3, 5))]
        cases[one] = [(f"CALL({items!r}).{call}", says(items)) for items in some]
    return "\n".join(lines) + "\n", cases, (f"str(len({name}({{x}}.split()).items))", lambda text: str(len(text.split())))


def calling(draw: random.Random, name: str, others: list[tuple[str, str, Callable[[str], str]]]) -> tuple[str, Cases]:
    """A function that calls two of the others, and one option that calls one."""
    (one, first, f), (other, second, g) = draw.sample(others, 2)
    lines = [f"from made.{one}s import {one}", f"from made.{other}s import {other}", "", "", f"def {name}(text, twice=False):", '    """A report."""']
    lines += [f"    left = {first.format(x='text')}", f"    right = {second.format(x='text')}", "    if twice:", '        left = left + " " + left']
    lines += ['    return f"{left}: {right}"']
    plain, twice = phrases(draw, 3), phrases(draw, 4)
    return "\n".join(lines) + "\n", {
        "plain": [(f"CALL({text!r})", f"{f(text)}: {g(text)}") for text in plain],
        "twice": [(f"CALL({text!r}, twice=True)", f"{f(text)} {f(text)}: {g(text)}") for text in twice],
    }
