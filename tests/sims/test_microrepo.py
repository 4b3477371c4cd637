"""The small world: what phrases mean, that its two sides are apart, and that sessions judge rightly."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipe.microrepo import MicroRepo, NoiseConfig, Session, WorldConfig, generate, held_out
from recipe.microrepo.environment import TextSession
from recipe.microrepo.evaluator import parse
from recipe.microrepo.language import translate
from ref.environment import ForkableEnvironment

ROOT = Path(__file__).parents[2]
seeds = st.integers(0, 2**32)
splits = st.sampled_from(["train", "heldout"])
depths = st.sampled_from([0, 1, 2])
argument = st.integers(-50, 50)


def meaning(phrase: str, values: dict[str, int], helpers: dict[str, str]) -> int:
    """What a phrase means, worked out on numbers; owes nothing to the code under test."""

    def operand(word: str) -> int:
        if word in helpers:
            return meaning(helpers[word], values, {})
        return values[word] if word in values else int(word)

    def binary(word: str, x: int, y: int) -> int:
        outcomes = {"plus": x + y, "minus": x - y, "times": x * y, "larger": max(x, y), "smaller": min(x, y)}
        return outcomes[word]

    first, *steps = (part.split() for part in phrase.split(" then "))
    if len(first) == 3:
        operation = first[1] if first[1] in ("plus", "minus", "times") else first[0]
        x = binary(operation, *(operand(word) for word in first if word != operation))
    else:
        x = operand(first[-1])
        steps = ([first[0]] if len(first) == 2 else [], *steps)
    for step in steps:
        if len(step) == 2:
            x = binary(step[0], x, operand(step[1]))
        elif step:
            x = {"double": x + x, "square": x * x, "half": (x - x % 2) // 2}[step[0]]
    return x


@settings(deadline=None)
@given(seeds, splits, depths, st.tuples(argument, argument, argument))
def test_phrase_and_expression_agree(seed, split, depth, numbers):
    task = generate(random.Random(seed), split, depth)
    helpers = {name: task.files[name].doc for name in task.helpers}
    for name, module in task.files.items():
        values = dict(zip(module.args, numbers, strict=False))
        want = meaning(module.doc, values, helpers if name == task.target else {})
        assert eval(module.expr, {"max": max, "min": min}, dict(values)) == want
        assert parse(f"return {module.expr}", module.args).evaluate([values[a] for a in module.args]) == want


def translate_in(task, name):
    helpers = {helper: translate(task.files[helper].doc) for helper in task.helpers}
    return translate(task.files[name].doc, helpers if name == task.target else {})


@pytest.mark.parametrize(
    ("phrase", "code"),
    [
        ("a plus b then double", "(a + b) * 2"),
        ("larger a b then double", "max(a, b) * 2"),
        ("square a then half then smaller c", "min((a * a) // 2, c)"),
        ("3 minus a then square", "(3 - a) ** 2"),
        ("m7", "a + b"),
        ("m7 then square", "(a + b) ** 2"),
        ("m7 times m2 then minus 4", "((a + b) * max(a, 5)) - 4"),
        ("smaller m2 m7 then half", "min(max(a, 5), a + b) // 2"),
    ],
)
def test_translation(phrase, code):
    helpers = {"m7": translate("a plus b"), "m2": translate("larger a 5")}
    assert translate(phrase, helpers).code == code
    assert translate(phrase, helpers).phrase == phrase


@pytest.mark.parametrize("phrase", ["", "a", "a plus", "m7 then double", "a plus b then larger", "a b c", "double 12"])
def test_translation_refuses_what_is_not_of_the_language(phrase):
    with pytest.raises(ValueError):
        translate(phrase)


@settings(deadline=None)
@given(seeds, depths)
def test_training_tasks_hold_nothing_held_out(seed, depth):
    task = generate(random.Random(seed), "train", depth)
    assert not any(held_out(translate_in(task, name)) for name in task.files)


@settings(deadline=None)
@given(seeds, depths)
def test_heldout_tasks_hold_out_target_and_helpers(seed, depth):
    task = generate(random.Random(seed), "heldout", depth)
    needed = {task.target, *task.helpers}
    assert all(held_out(translate_in(task, name)) for name in needed)
    assert len(task.helpers) == depth
    assert all(task.files[name].args == task.files[task.target].args for name in needed)


@settings(deadline=None)
@given(seeds)
def test_the_split_is_by_function_not_by_spelling(seed):
    rng = random.Random(seed)
    x, y = rng.sample(["a", "b", "c", *"0123456789"], 2)
    for one, other in [
        (f"{x} plus {y}", f"{y} plus {x}"),
        (f"{x} times {y} then half", f"{y} times {x} then half"),
        (f"larger {x} {y} then double", f"{y} plus 0 then larger {x} then times 2"),
        (f"{x} minus {y} then square", f"{y} minus {x} then square"),
    ]:
        assert held_out(translate(one)) == held_out(translate(other))


def test_about_a_fifth_of_all_functions_is_held_out():
    values = {}
    rng = random.Random(0)
    for _ in range(1000):
        for split in ("train", "heldout"):
            task = generate(rng, split)
            for name in task.files:
                if name not in (task.target, *task.helpers) and split == "heldout":
                    expression = translate_in(task, name)
                    values[expression.values] = held_out(expression)
    assert len(values) > 1000
    assert abs(sum(values.values()) / len(values) - 0.2) < 0.04


SCRIPT = """
import json, random
from recipe.microrepo import documents, generate
rng = random.Random(7)
tasks = [generate(rng, split) for split in ("train", "heldout") for _ in range(20)]
text = documents(rng)
tests = [t.hidden_tests for t in tasks]
print(json.dumps([[t.key for t in tasks], tests, [next(text) for _ in range(5)]]))
"""


def test_equal_seeds_give_equal_worlds_in_every_process():
    outputs = [
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1]
    assert len(json.loads(outputs[0])[0]) == 40


def test_keys_hardly_ever_repeat():
    rng = random.Random(0)
    keys = {generate(rng, "train").key for _ in range(4000)}
    assert len(keys) > 3990


def test_the_split_of_a_few_functions_is_pinned():
    """A change of the hash would move functions between the sides of worlds that models were trained on."""
    phrases = ["a plus b", "double a", "half b", "a times b", "larger a 3", "a minus b", "square a"]
    assert [phrase for phrase in phrases if held_out(translate(phrase))] == ["a plus b", "half b"]


@settings(deadline=None)
@given(seeds, splits, depths)
def test_prompt_and_first_read_reveal_no_answer(seed, split, depth):
    task = generate(random.Random(seed), split, depth)
    repo, names = task.prompt.split(" fix ")[0].split(" ", 1)
    assert repo == "repo" and set(names.split()) == set(task.files) and 2 <= len(task.files) <= 6
    assert "return" not in Session(task).step(f"read {task.target}")


@settings(deadline=None)
@given(seeds, splits, depths)
def test_hidden_tests_are_many_and_varied_and_hidden(seed, split, depth):
    task = generate(random.Random(seed), split, depth)
    visible = {case.inputs for case in task.visible_tests}
    hidden = {case.inputs for case in task.hidden_tests}
    assert len(visible) == len(task.visible_tests) == 3
    assert len(hidden) == len(task.hidden_tests) >= 24
    assert not visible & hidden
    numbers = {n for inputs in hidden for n in inputs}
    assert 0 in numbers and min(numbers) < -12 and max(numbers) > 12


def test_session_is_an_environment():
    session = Session(generate(random.Random(0), "train"))
    assert isinstance(session, TextSession) and isinstance(MicroRepo(session), ForkableEnvironment)


@pytest.mark.parametrize(
    "wrong",
    [dict(depth_mix=(0, 0, 0)), dict(files=(0, 3)), dict(files=(5, 3)), dict(digits=1.5), dict(operations=(1, 9))],
)
def test_impossible_worlds_are_refused(wrong):
    with pytest.raises(ValueError):
        WorldConfig(**wrong)


def test_unknown_split_depth_and_noise_are_refused():
    with pytest.raises(ValueError, match="split"):
        generate(random.Random(0), "test")
    with pytest.raises(ValueError, match="depth"):
        generate(random.Random(0), "train", 3)
    with pytest.raises(ValueError, match="useless_read"):
        NoiseConfig(useless_read=2)
