"""Made-up packages whose features are known: each function has some, each feature has tests, and functions share
helpers and call each other.

A package is drawn from a seed. It has a module of helpers, three to five modules of a kind (styles of a text, options
of a list, numbers with their errors, a class of methods), one that calls others, and a file of tests for each. What a
test expects is worked out here in Python, from the same operations that the source spells: nothing of a package is run.
The first part of a test's name says its feature."""

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
WORDS = (
    "apple",
    "bread",
    "candle",
    "dragon",
    "eagle",
    "fabric",
    "garden",
    "hammer",
    "island",
    "jacket",
    "kettle",
    "ladder",
    "magnet",
    "needle",
)


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
    rng = random.Random(f"feature-programs-{seed}")
    package, names = Program(), rng.sample(NAMES, 6)
    package.files["made/base.py"] = BASE.encode()
    exported_cases, callables = [], []
    for name in names[: rng.randint(3, 5)]:
        source, cases, call = rng.choice(
            (make_style_function, make_option_function, make_number_function, make_method_class)
        )(rng, name)
        exported_cases.append((name, cases))
        callables += [(name, *call)]
        package.files[f"made/{name}s.py"] = source.encode()
    source, cases = make_caller(rng, names[5], callables)
    package.files[f"made/{names[5]}s.py"] = source.encode()
    for name, feature_cases in [*exported_cases, (names[5], cases)]:
        package.tests[f"tests/test_{name}s.py"] = write_tests(
            name, feature_cases, by_attribute=rng.random() < 0.5
        ).encode()
    exported_names = [name for name, _ in exported_cases] + [names[5]]
    lines = [f"from made.{name}s import {name}" for name in exported_names] + ["", f"__all__ = {exported_names!r}"]
    package.files["made/__init__.py"] = ("\n".join(lines) + "\n").encode()
    return package


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


def write_tests(name: str, cases: Cases, by_attribute: bool) -> str:
    """A file of tests: it names what it tests in an import, or as an attribute of the package."""
    lines = ["import pytest", "", "import made" if by_attribute else f"from made import {name}", ""]
    for feature, feature_cases in cases.items():
        is_error = isinstance(feature_cases[0][1], type)
        calls = [
            (call.replace("CALL", f"made.{name}" if by_attribute else name), expected)
            for call, expected in feature_cases
        ]
        lines += ["", f"@pytest.mark.parametrize('number', range({len(calls)}))", f"def test_{feature}(number):"]
        for number, (call, expected) in enumerate(calls):
            lines.append(f"    if number == {number}:")
            if is_error:
                lines += [f"        with pytest.raises({getattr(expected, '__name__', '')}):", f"            {call}"]
            else:
                lines.append(f"        assert {call} == {expected!r}")
    return "\n".join(lines) + "\n"


def make_phrases(rng: random.Random, n: int) -> list[str]:
    return [" ".join(rng.sample(WORDS, rng.randint(2, 3))) for _ in range(n)]


def make_style_function(rng: random.Random, name: str) -> tuple[str, Cases, tuple[str, Callable[[str], str]]]:
    """A function with a branch for each style, and an error for any other one."""
    style_names = rng.sample(("plain", "loud", "short", "mirror", "framed", "wide"), rng.randint(3, 5))
    lines = [
        "from made.base import clean, known",
        "",
        f"STYLES = {style_names!r}",
        "",
        "",
        f"def {name}(text, style):",
        f'    """A text in a style: {", ".join(style_names)}."""',
    ]
    lines += ["    known(style, STYLES)", "    words = clean(text).split()"]
    cases: Cases = {}
    first_function: Callable[[str], str] | None = None
    for style in style_names:
        (first_source, f), (second_source, g), sep = (
            rng.choice([*OPERATIONS.items()]),
            rng.choice([*OPERATIONS.items()]),
            rng.choice(("-", "_", " ", "/")),
        )
        lines.append(f'    if style == "{style}":')
        if rng.random() < 0.5:
            lines.append(f'        return "{sep}".join({first_source.format(x="word")} for word in words)')
            compute = lambda text, f=f, sep=sep: sep.join(map(f, text.split()))  # noqa: E731
        else:
            lines += [
                f"        head = {first_source.format(x='words[0]')}",
                f"        rest = [{second_source.format(x='word')} for word in words[1:]]",
            ]
            lines.append(f'        return "{sep}".join([head, *rest])')
            compute = (  # noqa: E731
                lambda text, f=f, g=g, sep=sep: sep.join([f(text.split()[0]), *map(g, text.split()[1:])])
            )
        first_function = first_function or compute
        cases[style] = [(f"CALL({text!r}, {style!r})", compute(text)) for text in make_phrases(rng, rng.randint(3, 5))]
    cases["unknown"] = [(f"CALL({text!r}, 'none of them')", LookupError) for text in make_phrases(rng, 3)]
    assert first_function is not None
    return "\n".join(lines) + "\n", cases, (f"{name}({{x}}, {style_names[0]!r})", first_function)


def make_option_function(rng: random.Random, name: str) -> tuple[str, Cases, tuple[str, Callable[[str], str]]]:
    """A function whose options each do something to a list."""
    kinds = {
        "unique": (
            "False",
            "if unique:",
            "items = list(dict.fromkeys(items))",
            "True",
            lambda items: [*dict.fromkeys(items)],
        ),
        "turned": ("False", "if turned:", "items.reverse()", "True", lambda items: items[::-1]),
        "limit": ("None", "if limit is not None:", "items = items[:limit]", "2", lambda items: items[:2]),
        "prefix": (
            "None",
            "if prefix is not None:",
            "items = [prefix + one for one in items]",
            "'x-'",
            lambda items: ["x-" + item for item in items],
        ),
        "ranked": (
            "False",
            "if ranked:",
            "items = sorted(items, key=len)",
            "True",
            lambda items: sorted(items, key=len),
        ),
    }
    option_names, sep = rng.sample([*kinds], rng.randint(3, 5)), rng.choice((", ", "; ", " + "))
    arguments = ", ".join(f"{option}={kinds[option][0]}" for option in option_names)
    lines = [
        "from made.base import clean",
        "",
        "",
        f"def {name}(items, {arguments}):",
        '    """Items in a row."""',
        "    items = [clean(one) for one in items]",
    ]
    cases: Cases = {}
    for option in option_names:
        _, head, body, value, change = kinds[option]
        lines += [f"    {head}", f"        {body}"]
        item_lists = [[rng.choice(WORDS) for _ in range(4)] for _ in range(rng.randint(3, 5))]
        cases[option] = [
            (f"CALL({items + items[:1]!r}, {option}={value})", sep.join(change(items + items[:1])))
            for items in item_lists
        ]
    lines += ["    if not items:", '        return "nothing"', f'    return "{sep}".join(items)']
    cases["empty"] = [("CALL([])", "nothing"), ("CALL(())", "nothing"), ("CALL({})", "nothing")]
    return "\n".join(lines) + "\n", cases, (f"{name}({{x}}.split())", lambda text: sep.join(text.split()))


def make_number_function(rng: random.Random, name: str) -> tuple[str, Cases, tuple[str, Callable[[str], str]]]:
    """A function that reads a number: what is negative, what is none, and what stands for it then."""
    factor, offset = rng.randint(2, 9), rng.randint(1, 9)
    lines = [
        "from made.base import clean",
        "",
        "",
        f"def {name}(text, default=None):",
        '    """The number that a text tells, or the default."""',
    ]
    lines += [
        "    try:",
        "        found = int(clean(text))",
        "    except ValueError:",
        "        if default is not None:",
    ]
    lines += [
        f"            return default - {offset}",
        "        shown = text[:20]",
        "        raise ValueError(f'no number: {shown}') from None",
    ]
    lines += [
        "    if found < 0:",
        f"        found = abs(found) - {offset}",
        "        return -found",
        f"    return {factor} * found",
    ]
    samples = rng.sample(range(10, 99), 12)
    cases: Cases = {
        "positive": [(f"CALL(' {n} ')", factor * n) for n in samples[:4]],
        "negative": [(f"CALL('-{n}')", offset - n) for n in samples[4:8]],
        "default": [
            (f"CALL({word!r}, default={n})", n - offset)
            for word, n in zip(rng.sample(WORDS, 4), samples[8:], strict=True)
        ],
        "refused": [(f"CALL({word!r})", ValueError) for word in rng.sample(WORDS, 3)],
    }
    return "\n".join(lines) + "\n", cases, (f"str({name}(str(len({{x}}))))", lambda text: str(factor * len(text)))


def make_method_class(rng: random.Random, name: str) -> tuple[str, Cases, tuple[str, Callable[[str], str]]]:
    """A class whose methods each do something with what it holds."""
    (source, f), sep = rng.choice([*OPERATIONS.items()]), rng.choice((", ", "; ", "|"))
    kinds = {
        "longest": (["best = max(self.items, key=len)", "return best"], "longest()", lambda items: max(items, key=len)),
        "joined": ([f'return "{sep}".join(self.items)'], "joined()", lambda items: sep.join(items)),
        "changed": (
            [f"return [{source.format(x='one')} for one in self.items]"],
            "changed()",
            lambda items: [f(item) for item in items],
        ),
        "total": (
            ["total = 0", "for one in self.items:", "    total += len(one)", "return total"],
            "total()",
            lambda items: sum(map(len, items)),
        ),
        "starts": (
            ["found = {one[0] for one in self.items}", "return sorted(found)"],
            "starts()",
            lambda items: sorted({item[0] for item in items}),
        ),
    }
    lines = [
        "from made.base import clean",
        "",
        "",
        f"class {name}:",
        '    """A bag of texts."""',
        "",
        "    def __init__(self, items):",
    ]
    lines += ["        self.items = [clean(one) for one in items]"]
    cases: Cases = {}
    for method in rng.sample([*kinds], rng.randint(3, 5)):
        body, call, compute = kinds[method]
        lines += [
            "",
            f"    def {method}(self):",
            f'        """What is {method}."""',
            *(f"        {line}" for line in body),
        ]
        item_lists = [rng.sample(WORDS, rng.randint(2, 4)) for _ in range(rng.randint(3, 5))]
        cases[method] = [(f"CALL({items!r}).{call}", compute(items)) for items in item_lists]
    return (
        "\n".join(lines) + "\n",
        cases,
        (f"str(len({name}({{x}}.split()).items))", lambda text: str(len(text.split()))),
    )


def make_caller(
    rng: random.Random, name: str, callables: list[tuple[str, str, Callable[[str], str]]]
) -> tuple[str, Cases]:
    """A function that calls two of the others, and one option that calls one."""
    (first_name, first, f), (second_name, second, g) = rng.sample(callables, 2)
    lines = [
        f"from made.{first_name}s import {first_name}",
        f"from made.{second_name}s import {second_name}",
        "",
        "",
        f"def {name}(text, twice=False):",
        '    """A report."""',
    ]
    lines += [
        f"    left = {first.format(x='text')}",
        f"    right = {second.format(x='text')}",
        "    if twice:",
        '        left = left + " " + left',
    ]
    lines += ['    return f"{left}: {right}"']
    plain, twice = make_phrases(rng, 3), make_phrases(rng, 4)
    return "\n".join(lines) + "\n", {
        "plain": [(f"CALL({text!r})", f"{f(text)}: {g(text)}") for text in plain],
        "twice": [(f"CALL({text!r}, twice=True)", f"{f(text)} {f(text)}: {g(text)}") for text in twice],
    }
