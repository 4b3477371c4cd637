"""Tests of a package that run in a sandbox: outcomes, lines, changes that do not meet each other, and what never
ends."""

import time
from dataclasses import replace
from functools import partial

import pytest

from environments.sandbox.open import open_sandbox
from environments.tasks.check import check, exam_of
from environments.tasks.make import baseline, make_tasks
from environments.tasks.package import Package
from environments.tasks.runner import LIMITS, TEST_SECONDS, Sandboxed
from kit.settings import RunError
from ref.feature_deletion import delete, undelete

NOUNS = '''"""Plurals."""

TABLE = {"man": "men"}


def plural(word):
    """The plural of a noun."""
    if word in TABLE:
        return TABLE[word]
    if word.endswith("y") and word[-2:-1] not in "aeiou":
        # city, cities
        stem = word[:-1]
        return stem + "ies"
    if word.endswith(("s", "x", "ch")):
        return word + "es"
    return word + "s"
'''
TESTS = """import pytest

from words.nouns import plural


@pytest.mark.parametrize(("word", "said"), [("city", "cities"), ("sky", "skies"), ("fly", "flies"), ("lady", "ladies")])
def test_cities(word, said):
    assert plural(word) == said


@pytest.mark.parametrize("word", ["cat", "dog", "day", "key", "car", "cup"])
def test_plain(word):
    assert plural(word) == word + "s"


@pytest.mark.skip
def test_skipped():
    assert False


@pytest.fixture
def man():
    return plural("man")


def test_men(man):
    assert man == "men"
"""
FILES = {"words/__init__.py": b"", "words/nouns.py": NOUNS.encode(), "tests/test_nouns.py": TESTS.encode()}


@pytest.fixture(scope="module")
def runner(root, shared_store):
    return Sandboxed(partial(open_sandbox, root=root, store=shared_store, limits=LIMITS), seconds=10)


@pytest.fixture(scope="module")
def plain(runner):
    """What becomes of the tests of FILES, as nothing is changed."""
    return runner.outcomes(FILES)[0]


def test_outcomes_and_changes(runner):
    """Each run sees its own change: what one of them breaks, the next one has."""
    broken, wrong = (
        {"words/nouns.py": b"def plural(word:\n"},
        {"words/nouns.py": NOUNS.replace('"men"', '"mans"').encode()},
    )
    stuck = {"words/nouns.py": b"while True:\n    pass\n"}
    leaves = {"words/nouns.py": b"import os\nos._exit(0)\n"}
    whole, cut, other, again, ended = runner.outcomes(FILES, [{}, broken, wrong, {}, leaves])
    assert whole == again and len(whole) == 12
    assert (
        whole["tests/test_nouns.py::test_cities[city-cities]"] == "passed"
        and whole["tests/test_nouns.py::test_skipped"] == "skipped"
    )
    assert cut == {"tests/test_nouns.py": "error"} and ended == {"the run": "error"}
    assert {test for test in whole if other[test] != whole[test]} == {"tests/test_nouns.py::test_men"}
    runner.seconds, before = 0.5, runner.seconds
    assert runner.outcomes(FILES, [stuck]) == [{"the run": "error"}]
    runner.seconds = before


def test_a_run_takes_no_other_with_it(root, shared_store):
    """Neither one that leaves processes behind, in its session or in one of their own, nor one that takes all
    memory."""
    small = Sandboxed(
        partial(open_sandbox, root=root, store=shared_store, limits=replace(LIMITS, memory=200 << 20)), seconds=20
    )
    leaves = (
        "import os, time\nif os.fork() == 0:\n    {}time.sleep(60)\n    os._exit(0)\n\n\ndef "
        "plural(word):\n    return word\n"
    )
    changes = [leaves.format(""), leaves.format("os.setsid()\n    "), "x = bytearray(b'x') * (1 << 29)\n", NOUNS]
    found = small.outcomes(FILES, [{"words/nouns.py": text.encode()} for text in changes])
    assert found[2] == {"the run": "error"} and found[3]["tests/test_nouns.py::test_men"] == "passed"
    assert found[0] == found[1] and {*found[0].values()} == {"failed", "skipped"}


@pytest.fixture
def hasty(monkeypatch):
    """EACH, shorter than it is, since a test must wait for it."""
    monkeypatch.setattr("environments.tasks.runner.TEST_SECONDS", 1.0)
    return 1.0


def test_a_test_that_never_ends_costs_seconds(runner, hasty):
    """What is left of a loop may never end. A test that takes EACH seconds of processor time ends its run, which waits
    for no longer limit."""
    stuck = NOUNS.replace(
        "return TABLE[word]",
        "while True:\n            try:\n                pass\n            except BaseException:\n                pass",
    )
    runner.seconds, before, since = 300.0, runner.seconds, time.monotonic()
    try:
        assert runner.outcomes(FILES, [{"words/nouns.py": stuck.encode()}]) == [{"the run": "error"}]
    finally:
        runner.seconds = before
    assert hasty <= time.monotonic() - since < 60 and hasty < TEST_SECONDS


def test_some_of_the_tests(runner):
    men, cat = "tests/test_nouns.py::test_men", "tests/test_nouns.py::test_plain[cat]"
    some, whole = runner.outcomes(FILES, [{}, {}], [{men, cat}, None])
    assert some == {men: "passed", cat: "passed"} and len(whole) == 12
    runner.skipped_tests = frozenset({cat})
    try:
        assert runner.outcomes(FILES, [{}, {}], [{men, cat}, None]) == [
            {men: "passed"},
            {test: said for test, said in whole.items() if test != cat},
        ]
        assert cat not in runner.coverage(FILES) and cat not in runner.patiently(FILES)
    finally:
        runner.skipped_tests = frozenset()


def test_the_order_of_sets_is_given(runner, plain):
    """Python draws it anew for each process. Here it is the same for every piece, and another one in each run of the
    baseline."""
    named = (
        "import pytest\n\n\n@pytest.mark.parametrize('n', [[*{*'abcdefghij'}].index('a')])\ndef "
        "test_set(n):\n    pass\n"
    )
    files = {**FILES, "tests/test_sets.py": named.encode()}
    runs = [runner.outcomes(files, seed=seed) for seed in range(4)]
    assert runner.outcomes(files) == runs[0] and runner.outcomes(files, seed=1) == runs[1]
    found = {test for run in runs for test in run[0] if "test_set[" in test}
    known, flaky = baseline(runner, files)
    assert len(found) > 1 and flaky and found >= {*flaky} and known == plain
    assert {*runs[0][0]} >= {*runner.coverage(files)} - {""}


def test_seconds_of_tests(runner, hasty, plain):
    """Of the whole test, fixtures included, however long it takes."""
    slow = TESTS.replace(
        "def man():\n",
        f"def man():\n    import time\n    until = time.process_time() + {hasty + 0.5}\n    while "
        f"time.process_time() < until: pass\n",
    )
    found = runner.patiently({**FILES, "tests/test_nouns.py": slow.encode()})
    assert {test: said for test, (said, _) in found.items()} == plain
    assert [test.rpartition("::")[2] for test, (_, seconds) in found.items() if seconds > hasty] == ["test_men"]


def test_coverage_that_is_cut_is_no_coverage(root, shared_store):
    late = Sandboxed(partial(open_sandbox, root=root, store=shared_store, limits=LIMITS), seconds=0.05)
    with pytest.raises(RunError, match="do not end within 0.5 seconds"):
        late.coverage({**FILES, "words/nouns.py": b"while True:\n    pass\n"})


def test_coverage_by_hand(runner):
    """Fixtures belong to the test that asks for them, and what runs at import to the empty name."""
    found = runner.coverage(FILES)
    nouns = {test: sorted(line for file, line in lines if file == "words/nouns.py") for test, lines in found.items()}
    assert nouns["tests/test_nouns.py::test_cities[city-cities]"] == [8, 10, 12, 13]
    assert nouns["tests/test_nouns.py::test_plain[cat]"] == [8, 10, 14, 16]
    assert nouns["tests/test_nouns.py::test_men"] == [8, 9]
    assert nouns[""] == [1, 3, 6]


def test_tasks_of_a_package(runner):
    """From source to tasks, twice, in sandboxes."""
    package = Package(
        "words",
        "1.0",
        {name: data for name, data in FILES.items() if "test" not in name},
        {"tests/test_nouns.py": TESTS.encode()},
        "MIT",
        "test",
    )
    made = make_tasks(package, runner, min_tests=3)
    again = make_tasks(package, runner, min_tests=3)
    assert made == again and made.tasks and made.flaky == ()
    cities = next(task for task in made.tasks if task.piece.way == "slice")
    assert {*cities.visible, *cities.held_out} == {
        f"tests/test_nouns.py::test_cities[{pair}]" for pair in ("city-cities", "sky-skies", "fly-flies", "lady-ladies")
    }
    gone = delete(package.files, cities.piece)
    assert b"ies" not in gone["words/nouns.py"] and undelete(gone, cities.piece) == package.files
    checked = check(cities, package, runner.fresh, 20)
    assert checked.faults == () and checked.oracle.reward.total == 1.0 and checked.nop.reward.total == 0.0
    exam = exam_of(cities, package)
    assert (
        b"def test_cities" not in exam.given_tree["tests/test_nouns.py"]
        and b"def test_plain" in exam.given_tree["tests/test_nouns.py"]
    )
    (outcomes,) = runner.outcomes(FILES, [{"words/nouns.py": gone["words/nouns.py"]}])
    assert {test for test, outcome in outcomes.items() if outcome == "failed"} == {*cities.visible, *cities.held_out}


def test_a_sandbox_that_cannot_run_tests(root, shared_store):
    class Closed:
        def __init__(self, folder):
            self.sandbox = open_sandbox(folder, root=root, store=shared_store)
            self.sandbox.close()

        def call(self, *args, **more):
            return self.sandbox.call(*args, **more)

        def close(self):
            self.sandbox.close()

    with pytest.raises(RunError, match="the tests cannot be run: the sandbox is closed"):
        Sandboxed(Closed).outcomes(FILES)
