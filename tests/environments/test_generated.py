"""Packages that are made up: the same everywhere, right, split by what their functions do, and material for tasks."""

import ast
import json
import random
import re
import sys
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from environments.tasks.generated import compositions, generated_package, split
from environments.tasks.sources import package_of
from kit.settings import RunError


def functions(package):
    """Module and definition of each function."""
    for name, data in package.files.items():
        for node in ast.parse(data).body:
            assert isinstance(node, ast.FunctionDef)
            yield name.removesuffix(".py"), node


def meaning(node):
    """A docstring without what is drawn: constants, and the argument's name."""
    return re.sub(r"\d+|\b" + node.args.args[0].arg + r"\b", "_", ast.get_docstring(node))


@settings(max_examples=30)
@given(st.integers(0, 10**9 - 1), st.booleans())
def test_its_tests_pass_and_see_what_they_test(number, heldout):
    """Each function has its tests, of which no constant passes more than half."""
    package = generated_package(number, heldout)
    assert package == generated_package(number, heldout)
    assert len(package.files) == len(package.tests) == 3 and len({*map(meaning_of, functions(package))}) == 6
    modules = {name: ModuleType(name) for name, _ in functions(package)}
    for name, module in modules.items():
        exec(package.files[f"{name}.py"], vars(module))
    with pytest.MonkeyPatch.context() as patch:
        for name, module in modules.items():
            patch.setitem(sys.modules, name, module)
        for data in package.tests.values():
            space = {}
            exec(data, space)
            for test in [value for name, value in space.items() if name.startswith("test_")]:
                test()
    for name, node in functions(package):
        tests = re.findall(rf"assert {node.name}\(.*\) == (.*)\n", package.tests[f"test_{name}.py"].decode())
        assert len(tests) == 8 and max(map(tests.count, tests)) <= 4


def meaning_of(pair):
    return meaning(pair[1])


def test_what_is_held_out_occurs_nowhere_else():
    """Functions of 150 packages to train on, and of 50 that are held out. Nor does one do the same in other words: on
    lists that the split has not seen, no two have the same results."""
    seen, heldout = (
        {meaning_of(pair) for number in range(count) for pair in functions(generated_package(number, where))}
        for count, where in ((150, False), (50, True))
    )
    assert not seen & heldout and len(seen) > 300 and len(heldout) > 150
    training, kept_back = split()
    assert 0.2 < len(kept_back) / len(compositions()) < 0.3 and len(training) > 450
    rng = random.Random(0)
    numbers = [[rng.randint(-12, 12) for _ in range(rng.randint(0, 7))] for _ in range(300)]
    words = [
        ["".join(rng.choices("aeinorst", k=rng.randint(1, 6))) for _ in range(rng.randint(0, 7))] for _ in range(300)
    ]

    def results(count, where):
        for number in range(count):
            package = generated_package(number, where)
            for name, node in functions(package):
                space = {}
                exec(package.files[f"{name}.py"], space)
                lists = words if "word" in ast.get_docstring(node) else numbers
                yield repr([space[node.name](one) for one in lists])

    assert not {*results(60, False)} & {*results(40, True)}


@pytest.mark.parametrize("spec", ["generated:", "generated:-1", "generated:01", "generated:held:1", "generated:１"])
def test_no_package_has_this_number(spec, tmp_path):
    with pytest.raises(RunError, match="generated:N"):
        package_of(spec, tmp_path)


def test_a_model_can_be_given_its_tasks(tmp_path, ask):
    """Made and checked as those of any package: the grader asks for fresh inputs, too."""
    out = tmp_path / "tasks"
    code, _, error = ask("tasks", "make", "generated:heldout:0", "--out", out)
    assert code == 0, error
    (recipe,) = [json.loads(path.read_text()) for path in out.iterdir()]
    assert recipe["package"]["spec"] == "generated:heldout:0" and recipe["package"]["licence"] == "CC0-1.0"
    assert len(recipe["tasks"]) >= 4
    assert all(min(task["tests"]["visible"], task["tests"]["held out"]) >= 2 for task in recipe["tasks"])
    code, said, error = ask("tasks", "check", out)
    assert code == 0 and f"{len(recipe['tasks'])} have fresh inputs" in said, error
