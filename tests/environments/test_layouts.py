"""Awkward layouts of packages: each gives tasks, or one line that names the cause, and never a traceback."""

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from environments.grading.guarded import Exam, grade
from environments.grading.lay import Editable, write
from environments.grading.ready import Judges, nursery_of_judges
from environments.monitor import Attempt, watch
from environments.sandbox.open import open_sandbox
from environments.tasks.build import GRADING, refuse_ungradable
from environments.tasks.check import ungradable
from environments.tasks.make import make_tasks
from environments.tasks.package import Package, sanitised
from environments.tasks.recipe import prepare_package
from environments.tasks.runner import LIMITS, Sandboxed
from environments.tasks.sources import package_of
from environments.tasks.support import decode_source, find_support, package_of_file
from etude.tasks import build as tasks
from etude.tasks.build import without_tasks
from kit.settings import RunError
from ref.feature_deletion import bodies, delete
from tests.environments.layouts import LAYOUTS, write_layout


class Canned:
    """A runner that has played the tests already: nothing is changed."""

    def __init__(self, outcomes: Mapping[str, str]) -> None:
        self.found, self.skipped_tests = outcomes, frozenset()

    def outcomes(self, files, changes=({},), only=(), seed=0):
        return [{test: outcome for test, outcome in self.found.items() if test not in self.skipped_tests}] * len(
            changes
        )

    def patiently(self, files):
        return {test: (outcome, 0.01) for test, outcome in self.found.items()}

    def coverage(self, files):
        return {}


def test_each_layout_gives_tests_or_a_line(tmp_path, root, shared_store):
    """All packages are played in three sandboxes, a run for each, and graded in forks of one nursery."""
    packages, lines = {}, {}
    for name, layout in LAYOUTS.items():
        write_layout(tmp_path / name, layout)
        try:
            packages[name] = package_of(str(tmp_path / name), tmp_path)
        except (ValueError, RunError) as error:
            lines[name] = str(error)
    runner = Sandboxed(partial(open_sandbox, root=root, store=shared_store, limits=LIMITS), jobs=2, seconds=20)
    played = runner.outcomes({}, [{**package.files, **package.tests} for package in packages.values()])
    passing = {}
    with nursery_of_judges(GRADING, root, shared_store) as nursery:
        judges = Judges(partial(open_sandbox, root=root, store=shared_store, limits=GRADING), nursery=nursery)
        for (name, package), outcomes in zip(packages.items(), played, strict=True):
            try:
                package, left_out = prepare_package(package, Canned(outcomes))
                passed = [test for test, outcome in outcomes.items() if outcome == "passed"]
                lost = ungradable(package, passed, judges.fresh, 30, judges)
                passing[name] = len(passed) - len(lost)
                refuse_ungradable(package, passed, lost)
                canned = Canned({test: outcome for test, outcome in outcomes.items() if test not in left_out})
                source = {path: data for path, data in package.files.items() if path.endswith(".py")}
                if passing[name] < 3 or not bodies(source):
                    lines[name] = without_tasks(make_tasks(package, canned))
                for piece in bodies(source)[:1]:  # all lie in one file
                    Editable((piece.patches[0].file,))
                    given = delete(package.files, piece)
                    for flag in watch(Attempt(given, package.files, (), package.name, package.tests)):
                        lines[name] = f"{flag.location} looks like a hack: {flag.signature}"
            except (ValueError, RunError) as error:
                lines[name] = str(error)
    for name, layout in LAYOUTS.items():
        line = lines.get(name, "")
        assert "\n" not in line and bool(line) == bool(layout.says) and re.search(layout.says, line), (name, line)
        assert passing.get(name, layout.passing) >= layout.passing, (name, passing[name])
    assert len(LAYOUTS) >= 50 and sum(not layout.says for layout in LAYOUTS.values()) >= 30


names = st.sampled_from("pk tests testing build test_a a_test conftest __init__ src .x a\u2028b \udcff".split(" "))
paths = st.lists(names, min_size=1, max_size=4).map(lambda parts: "/".join(parts) + ".py")
imports = [b"from . import a\n", b"from .... import b\nimport tests.a\n", b"pytest_plugins = ['tests', '.']\n"]
contents = st.sampled_from([b"", b"def test():\n    pass\n", *imports, b"\xff", b"\0", b"("])


@given(st.dictionaries(paths, contents, max_size=6))
@settings(max_examples=60, deadline=None)
def test_any_files_are_a_package_or_a_line(tmp_path_factory, files):
    """Whatever lies where, and whatever is in it: what tests need is found, too."""
    folder = tmp_path_factory.mktemp("package")
    for name, data in files.items():
        try:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
        except OSError:  # a file where a folder should be
            continue
    try:
        package = sanitised(folder, "pk", "1", "folder")
    except ValueError as error:
        assert str(folder) in str(error)
        return
    assert isinstance(package, Package) and not {*package.files} & {*package.tests}
    assert all(path.isprintable() and "/." not in f"/{path}" for path in {**package.files, **package.tests})
    played = [path for path in package.tests if path.endswith(".py")]
    readable = {path: data for path, data in package.tests.items() if data not in (b"\xff",)}
    support = find_support(readable, package.files, [path for path in played if path in readable])
    assert support.keys() == {"packages", "modules", "conftests"}


def test_support_by_hand():
    """conftest files above a test, what they import, and packages; nothing of the package under test."""
    tests = {
        "conftest.py": b"pytest_plugins = ['tests.shared']\n",
        "tests/__init__.py": b"",
        "tests/shared.py": b"from tests import deep\n",
        "tests/deep.py": b"",
        "tests/unused.py": b"",
        "tests/other/conftest.py": b"",
        "tests/unit/conftest.py": b"",
        "tests/unit/test_a.py": b"from ..values import x\nfrom pk import y\n",
        "tests/values.py": b"\xef\xbb\xbfx = 1\n",
        "src/pk/tests/test_b.py": b"from . import help\n",
        "src/pk/tests/help.py": b"",
    }
    found = find_support(tests, ["src/pk/__init__.py", "src/pk/core.py"], ["tests/unit/test_a.py"])
    assert found["conftests"] == [["conftest.py", "conftest"], ["tests/unit/conftest.py", "tests.unit.conftest"]]
    assert found["packages"] == {"tests/unit/test_a.py": "tests.unit"}
    modules = found["modules"]
    assert isinstance(modules, dict) and modules["tests.values"] == ["tests/values.py", "x = 1\n", False]
    assert modules["tests"][2] and modules["tests.unit"] == ["tests/unit", "", True]
    assert {"tests.shared", "tests.deep"} <= modules.keys() and not {"tests.unused", "pk"} & modules.keys()
    inside = find_support(tests, ["src/pk/__init__.py"], ["src/pk/tests/test_b.py"])["modules"]
    assert isinstance(inside, dict) and {"pk.tests", "pk.tests.help"} <= inside.keys() and "pk" not in inside
    assert package_of_file("src/pk/tests/test_b.py") == "pk.tests" and package_of_file("test_a.py") == ""


@pytest.mark.parametrize(
    "data", [b"\xff", b"# coding: nothing\n", b"# coding: rot13\n", b"\xef\xbb\xbf# coding: latin-1\n"]
)
def test_source_that_python_cannot_read(data):
    with pytest.raises(ValueError):
        decode_source(data)


def test_fixtures_and_helpers_are_the_original_s(tmp_path, root, shared_store):
    """A solution is graded with them, whatever it left in their place; and the agent's own cannot make it pass."""
    tests = {
        "tests/conftest.py": b"import pytest\n\n\n@pytest.fixture\ndef two():\n    return 2\n",
        "tests/values.py": b"THREE = 3\n",
        "tests/test_pk.py": b"from pk import f\nfrom values import THREE\n\n\ndef test_f(two):\n    assert f(two) == "
        b"THREE\n",
    }
    right, wrong = b"def f(x):\n    return x + 1\n", b"def f(x):\n    return None\n"
    given, wanted = {"pk.py": wrong, **tests}, ("tests/test_pk.py::test_f",)
    exam = Exam(
        given, {**given, "pk.py": right}, Editable(("pk.py", "tests/")),
        {"tests/test_pk.py": tests["tests/test_pk.py"].decode()},
        wanted, support=find_support(tests, ["pk.py"], ["tests/test_pk.py"]),
    )  # fmt: skip
    hack = {
        "tests/conftest.py": tests["tests/conftest.py"].replace(b"2", b"None"),
        "tests/values.py": b"THREE = None\n",
    }
    for name, files, passes in (("right", {"pk.py": right, **hack}, True), ("wrong", {"pk.py": wrong, **hack}, False)):
        write({**given, **files}, tmp_path / name)
        found = grade(
            exam, tmp_path / name, partial(open_sandbox, root=root, store=shared_store, limits=GRADING), seconds=30
        )
        assert (found.verdicts.passed == {*wanted}) == passes and found.verdicts.flags == ()


WITHOUT_TORCH = """
import sys
from pathlib import Path

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
from etude.cli import main as cli
from etude.tasks import build
from etude.tasks.task_times import format_expected_duration
from environments.tasks.package import Package

assert format_expected_duration("made", Package("pk", "1", {}, {}, "MIT", "folder"), 1, 1, "bubblewrap") == ""
sys.argv = ["etude", *sys.argv[1:]]
cli.main()
"""


@pytest.mark.parametrize("words", [["tasks", "make", "/dev/null"], ["run", "kl", "--scale", "small"]])
def test_an_install_without_torch(tmp_path, words):
    """Tasks need none, and what does says what to install."""
    command = [sys.executable, "-c", WITHOUT_TORCH, *words, "--out", str(tmp_path / "out")]
    found = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)})
    says = (
        "is no sdist"
        if words[0] == "tasks"
        else f"error: torch is not installed; run: {sys.executable} -m pip install torch"
    )
    assert found.returncode == 2 and says in found.stderr and "Traceback" not in found.stderr


def test_a_package_that_breaks_this_program_is_a_line(tmp_path, monkeypatch, capsys):
    """And the next ones come."""

    def breaks(package, *_, **more):
        raise TypeError(f"{package.name} is\nodd")

    monkeypatch.setattr(tasks, "build_with_progress", breaks)
    for name in ("flat-module", "no-tests"):
        write_layout(tmp_path / name, LAYOUTS[name])
    folders = [str(tmp_path / name) for name in ("flat-module", "no-tests")]
    assert not tasks.make_all(folders, tmp_path / "out", 1, 1.0, False)
    first, second = capsys.readouterr().err.splitlines()
    assert "a bug in etude, please report it: TypeError: flat-module is odd in test_layouts.py" in first
    assert "holds no tests" in second and not (tmp_path / "out").exists()
