"""Coding knowledge (Appendix B): questions whose answers stand in a library's source, made by rules and checked by
running.

The report's questions come from turns in which an agent had to look something up. These ask what a programmer looks up
most often:

    signature   def shorten(                          → text, width, **kwargs):
    default     # textwrap.wrap: default of width …   → 70
    value       >>> posixpath.join('a', '/b')         → '/b'
    error       >>> math.isqrt(-1) … Traceback …      → ValueError

Signatures and defaults are read from the source with `ast`, without importing it, and checked by running the header
alone, with an empty body. Values and errors come from calls on random literals, in a process that can do nothing else
(`sims/base_evaluations/isolated.py`), and are run a second time.

Each question has four answers. The three wrong ones are right answers of other questions of the same kind, or results
of the same function on other arguments. An answer may be right in at most a quarter of a kind's questions, or else
naming None every time would pay. The model's choice is the answer with the highest log-prob *per byte*: without that
division the shortest answer wins too often. The model also writes an answer itself, greedily, up to the end of the
line: `exact`.

Chance is 25%, and says little: some answers look right whatever was asked. So every model also chooses without the
question, after the worked example alone (`unasked`). What it gets right then, it owes to the form of the answers.

The trap: a base that saw the library while training knows it. The same holds for the report's bases, and it is what is
measured."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import random
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kit.settings import RunError
from sims.base_evaluations.isolated import PURE, called

__all__ = ["KINDS", "Question", "choose_answer", "modules_of", "questions", "verified"]

KINDS = ("signature", "default", "value", "error")
WORKED_EXAMPLES = {
    "signature": "# copy\ndef deepcopy(x, memo=None, _nil=[]):\n\n",
    "default": "# builtins.sorted: default of the parameter reverse\nreverse=False\n\n",
    "value": ">>> len('abc')\n3\n",
    "error": ">>> int('x')\nTraceback (most recent call last):\n  ...\nValueError\n",
}
"""One answered question of each kind stands before every question, so that a base knows the form of an answer."""


@dataclass(frozen=True)
class Question:
    """One question with four answers."""

    kind: str
    """One of `KINDS`."""
    subject: str
    """module.function, with its arguments or its parameter."""
    prompt: str
    answers: tuple[str, ...]
    """Four different texts without line breaks, in random order."""
    right: int
    """Index of the right one."""
    check: tuple[str, ...] = ()
    """What verifies it: the header of the function, or module, function and arguments of a call."""

    @property
    def unasked(self) -> str:
        """The prompt without the question: the worked example alone."""
        return WORKED_EXAMPLES[self.kind]


@dataclass(frozen=True)
class Fact:
    """A question before its wrong answers."""

    kind: str
    subject: str
    prompt: str
    answer: str
    check: tuple[str, ...]
    near: tuple[str, ...] = ()
    """Wrong answers that lie near: other results of the same function."""


def modules_of(package: str | None) -> dict[str, str]:
    """Module → source. None: the modules of `PURE` in the standard library; else an installed package, found without
    running it. Raises RunError if it is not installed or has no Python source."""
    if package is None:
        root = Path(sysconfig.get_path("stdlib"))
        places = {name: root / (name.replace(".", "/") + ".py") for name in PURE}
        places |= {name: root / name / "__init__.py" for name in PURE if not places[name].is_file()}
    else:
        try:
            spec = importlib.util.find_spec(package.partition(".")[0])
        except (ImportError, ValueError):
            spec = None
        holders = [Path(place) for place in (spec.submodule_search_locations or [])] if spec else []
        places = {}
        for holder in holders:
            for path in sorted(holder.rglob("*.py")):
                name = ".".join(
                    [package.partition(".")[0], *path.relative_to(holder).with_suffix("").parts]
                ).removesuffix(".__init__")
                if not any(part.startswith(("_", "test")) for part in name.split(".")):
                    places[name] = path
        if spec and not holders and spec.origin and spec.origin.endswith(".py"):
            places[package] = Path(spec.origin)
    sources = {}
    for name, path in places.items():
        if path.is_file():
            try:
                sources[name] = path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue
    if not sources:
        raise RunError(f"package {package!r} is not installed here as Python source; choose another --package")
    return sources


def parse_headers(module: str, source: str) -> Iterator[tuple[str, ast.arguments]]:
    """Name and parameters of each public function at the top of a module."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            for parameter in ast.walk(node.args):
                if isinstance(parameter, ast.arg):
                    parameter.annotation = None
            yield node.name, node.args


def extract_facts(modules: dict[str, str]) -> list[Fact]:
    """Signatures, and defaults that are literals."""
    facts = []
    for module, source in modules.items():
        for name, arguments in parse_headers(module, source):
            text = ast.unparse(arguments)
            if 3 <= len(text) <= 80 and "\n" not in text:
                header = f"def {name}({text}):"
                facts.append(Fact("signature", f"{module}.{name}", f"# {module}\ndef {name}(", f"{text}):", (header,)))
                positional = [*arguments.posonlyargs, *arguments.args]
                pairs = list(
                    zip(positional[len(positional) - len(arguments.defaults) :], arguments.defaults, strict=True)
                )
                pairs += [
                    (a, d) for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if d is not None
                ]
                for parameter, default in pairs:
                    if isinstance(default, (ast.Constant, ast.UnaryOp)) and len(ast.unparse(default)) <= 30:
                        prompt = f"# {module}.{name}: default of the parameter {parameter.arg}\n{parameter.arg}="
                        facts.append(
                            Fact(
                                "default",
                                f"{module}.{name} {parameter.arg}",
                                prompt,
                                ast.unparse(default),
                                (header, parameter.arg),
                            )
                        )
    return facts


def literal(draw: random.Random) -> str:
    """The text of a random literal, of the sorts that such functions take."""
    number, word = draw.randrange(-3, 30), draw.choice(WORDS)
    return draw.choice(
        (
            str(number),
            str(number),
            f"{draw.randrange(0, 12) / 4}",
            repr(word),
            repr(word),
            repr(
                draw.choice(
                    (
                        "/usr/lib",
                        "a/b.txt",
                        "../c",
                        "/",
                        "a//b",
                        "C:\\x\\y.py",
                        "*.py",
                        "a b, c",
                        "x=1&y=2",
                        "<b>&amp;",
                        "  two words ",
                    )
                )
            ),
            repr([draw.randrange(20) for _ in range(draw.randrange(1, 6))]),
            repr(sorted(draw.randrange(20) for _ in range(5))),
            repr([draw.choice(WORDS) for _ in range(draw.randrange(1, 4))]),
            repr(draw.choice(WORDS).encode()),
            draw.choice(("True", "None", "[]", "''", "{}")),
        )
    )


WORDS = ("apple", "class", "a", "Hello", "x", "lambda", "zoo", "data.json", "caf", "Two Words")


def make_call_facts(tries: int, seed: int) -> list[Fact]:
    """Values and errors of the functions of `PURE` on random literals, `tries` calls of each."""
    rng, calls = random.Random(seed), []
    for module, names in PURE.items():
        for name in names.split():
            calls += [
                (module, name, "(" + "".join(f"{literal(rng)}, " for _ in range(rng.randrange(1, 4))).rstrip() + ")")
                for _ in range(tries)
            ]
    calls = list(dict.fromkeys(calls))
    outcomes, repeated_outcomes = called(calls), called(calls)
    results: dict[tuple[str, str], list[str]] = {}
    for (module, name, _), outcome in zip(calls, outcomes, strict=True):
        if outcome and "value" in outcome:
            results.setdefault((module, name), []).append(outcome["value"])
    facts = []
    for (module, name, arguments), outcome, repeated_outcome in zip(calls, outcomes, repeated_outcomes, strict=True):
        if not outcome or outcome != repeated_outcome:
            continue
        call_text = arguments.removesuffix(",)") + (")" if arguments.endswith(",)") else "")
        call_prompt = f">>> import {module}\n>>> {module}.{name}{call_text}\n"
        if "error" in outcome:
            if outcome["error"] == "Error":  # several modules call theirs so
                continue
            prompt = call_prompt + "Traceback (most recent call last):\n  ...\n"
            facts.append(
                Fact("error", f"{module}.{name}{call_text}", prompt, outcome["error"], (module, name, arguments))
            )
        elif outcome["value"] != "None" and len(outcome["value"]) <= 40 and "\\n" not in outcome["value"]:
            near_answers = tuple(
                v
                for v in dict.fromkeys(results[module, name])
                if v != outcome["value"] and v != "None" and len(v) <= 60
            )
            facts.append(
                Fact(
                    "value",
                    f"{module}.{name}{call_text}",
                    call_prompt,
                    outcome["value"],
                    (module, name, arguments),
                    near_answers,
                )
            )
    return facts


def questions(package: str | None, count: int, seed: int, tries: int = 40) -> list[Question]:
    """`count` questions, as many of each kind as the source gives, in an order drawn from the seed. A package other
    than the standard library is never imported, and gives signatures and defaults alone. Raises RunError if the source
    gives fewer than half of them."""
    facts = extract_facts(modules_of(package)) + (make_call_facts(tries, seed) if package is None else [])
    kinds = [kind for kind in KINDS if any(fact.kind == kind for fact in facts)]
    rng, question_list = random.Random(seed), []
    for n, kind in enumerate(kinds):
        share = count // len(kinds) + (n < count % len(kinds))
        question_list += make_questions([fact for fact in facts if fact.kind == kind], share, rng)
    if len(question_list) * 2 < count:
        raise RunError(
            f"{package or 'the standard library'} gives only {len(question_list)} questions, not "
            f"{count}; ask for fewer, or choose another --package"
        )
    rng.shuffle(question_list)
    return question_list


def make_questions(facts: list[Fact], share: int, rng: random.Random) -> list[Question]:
    """Up to `share` questions: at most a quarter with the same answer (but one at least), and functions in turn."""
    rng.shuffle(facts)
    function_counts: Counter[str] = Counter()
    numbered_facts = []
    for fact in facts:  # the first question of every function, then the second of every function, …
        function = fact.subject.partition("(")[0].partition(" ")[0]
        function_counts[function] += 1
        numbered_facts.append((function_counts[function], fact))
    facts = [fact for _, fact in sorted(numbered_facts, key=lambda turn: turn[0])]
    pool = list(dict.fromkeys(fact.answer for fact in facts))
    if facts and facts[0].kind == "error":  # errors are few: those that are right somewhere
        pool = list(dict.fromkeys([*pool, "TypeError", "ValueError", "IndexError", "KeyError", "ZeroDivisionError"]))
    question_list, answer_counts, prompts = [], Counter(), set()
    for fact in facts:
        if len(question_list) == share:
            break
        if answer_counts[fact.answer] >= max(1, share // 4) or fact.prompt in prompts:
            continue
        near_answers = rng.sample(fact.near, min(3, len(fact.near)))
        rank = {
            a: (literal_type(a) != literal_type(fact.answer), abs(len(a) - len(fact.answer)) // 8, rng.random())
            for a in pool
        }
        candidates = sorted((a for a in pool if a != fact.answer and a not in near_answers), key=rank.__getitem__)
        wrong_answers = [*near_answers, *candidates][:3]
        if len(wrong_answers) < 3:
            continue
        answers = [fact.answer, *wrong_answers]
        rng.shuffle(answers)
        question_list.append(
            Question(
                fact.kind,
                fact.subject,
                WORKED_EXAMPLES[fact.kind] + fact.prompt,
                tuple(answers),
                answers.index(fact.answer),
                fact.check,
            )
        )
        answer_counts[fact.answer] += 1
        prompts.add(fact.prompt)
    return question_list


def literal_type(answer: str) -> str:
    """The type of a literal, so that wrong answers have the right one's where they can."""
    try:
        return type(ast.literal_eval(answer)).__name__
    except (SyntaxError, ValueError):
        return ""


def verified(question_list: Sequence[Question]) -> list[bool]:
    """Whether the right answer of each question is what running says: the header of a signature or default, a call of a
    value or error."""
    calls = [
        (question.check[0], question.check[1], question.check[2])
        for question in question_list
        if question.kind in ("value", "error")
    ]
    outcomes, results = iter(called(calls) if calls else []), []
    for question in question_list:
        answer = question.answers[question.right]
        if question.kind in ("value", "error"):
            results.append((next(outcomes) or {}).get(question.kind) == answer)
            continue
        tree = ast.parse(question.check[0] + "\n    pass")
        assert isinstance(tree.body[0], ast.FunctionDef)
        arguments = tree.body[0].args
        if question.kind == "signature":
            # Defaults may name what only the module has: the text is compared, and the form by running it with 0 in
            # their place.
            is_same_text = f"{ast.unparse(arguments)}):" == answer
            arguments.defaults = [ast.Constant(0) for _ in arguments.defaults]
            arguments.kw_defaults = [default and ast.Constant(0) for default in arguments.kw_defaults]
            results.append(
                is_same_text and len(inspect.signature(run(tree)).parameters) == len(list_parameters(arguments))
            )
        else:
            arguments.defaults = [
                d if isinstance(d, (ast.Constant, ast.UnaryOp)) else ast.Constant(0) for d in arguments.defaults
            ]
            arguments.kw_defaults = [
                d if d is None or isinstance(d, (ast.Constant, ast.UnaryOp)) else ast.Constant(0)
                for d in arguments.kw_defaults
            ]
            default = inspect.signature(run(tree)).parameters[question.check[1]].default
            results.append(repr(default) == repr(ast.literal_eval(answer)))
    return results


def list_parameters(arguments: ast.arguments) -> list[ast.arg]:
    return [node for node in ast.walk(arguments) if isinstance(node, ast.arg)]


def run(tree: ast.Module):
    """The function that a header defines; its body is `pass`, and its defaults are literals."""
    scope: dict = {}
    exec(compile(ast.fix_missing_locations(tree), "<header>", "exec"), {"__builtins__": {}}, scope)
    return next(iter(scope.values()))


def choose_answer(logp: Sequence[float], answers: Sequence[str]) -> int:
    """The index of the answer with the highest log-prob (nats) per byte; the first of equals."""
    rates = [value / max(1, len(answer.encode())) for value, answer in zip(logp, answers, strict=True)]
    return max(range(len(rates)), key=rates.__getitem__)
