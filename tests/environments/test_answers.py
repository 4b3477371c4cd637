"""What a package's tests answer is checked: a run that lies, or does not end, is in error, and nothing else is."""

import json
import os
import subprocess
import sys
import time
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from environments.grading import guarded
from environments.grading.guarded import Grade
from environments.grading.inside import judge
from environments.grading.lay import Collected
from environments.grading.rewards import Reward
from environments.grading.verdicts import Verdicts
from environments.sandbox.open import open_sandbox
from environments.tasks.answers import OUTCOMES, SILENT, parse_answer, parse_answers
from environments.tasks.check import TaskCheck
from environments.tasks.inside import run as program
from environments.tasks.make import label, make_tasks
from environments.tasks.runner import LIMITS, Sandboxed
from tests.environments.test_runner import FILES, NOUNS
from tests.environments.test_tasks import PACKAGE, Player

ERROR = {"outcomes": {SILENT: "error"}, "lines": {}, "took": {}}
LIES = """
import os

for number in range(40):
    for name in (f"/tmp/said-{number}", f"/tmp/said-{number}.json"):
        with open(name, "w") as file:
            file.write("3")
parent = os.getppid()
for pid in (parent, "self"):
    for handle in range(1, 64):
        try:
            os.write(os.open(f"/proc/{pid}/fd/{handle}", os.O_WRONLY), b'["lie"]\\n' * 9)
        except OSError:
            pass
"""
EMPTY = (
    "import os\n\nfor handle in range(3, 64):\n    try:\n        os.write(handle, b'{}')\n    except "
    "OSError:\n        pass\n"
)
CUT = (
    "import os\n\nfor handle in range(3, 64):\n    try:\n        os.close(handle)\n    except OSError:\n        pass\n"
)


def test_a_run_that_lies_spoils_its_own_answer_alone(root, shared_store):
    """Files where answers used to lie, pipes that are found and written to or closed, and the parent's own output."""
    runner = Sandboxed(partial(open_sandbox, root=root, store=shared_store, limits=LIMITS), jobs=2, seconds=20)
    changes = [{"words/nouns.py": (text + NOUNS).encode()} for text in (LIES, "", EMPTY, "", CUT, "")]
    lies, first, empty, second, cut, third = runner.outcomes(FILES, changes)
    assert first == second == third and first["tests/test_nouns.py::test_men"] == "passed" and len(first) == 12
    assert empty == cut == {SILENT: "error"} and lies in ({SILENT: "error"}, first)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from([*OUTCOMES, "", "a\n", "\ud800"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["", "t", "a\n"]), inner, max_size=3),
    max_leaves=8,
)
shaped = st.fixed_dictionaries({name: anything for name in ERROR})


@given(st.one_of(anything, shaped), st.text(max_size=5))
@settings(max_examples=50, deadline=None)
def test_an_answer_has_its_shape_or_is_an_error(value, text):
    """Whatever it is: JSON of another shape, or none."""
    for answer in (parse_answer(json.dumps(value)), parse_answer(text), parse_answer(value)):
        assert answer == ERROR or answer == value
        assert all(outcome in OUTCOMES and test.isprintable() for test, outcome in answer["outcomes"].items())
        assert all(
            type(line) is int for files in answer["lines"].values() for lines in files.values() for line in lines
        )
        assert all(0 <= seconds < float("inf") for seconds in answer["took"].values())
    found = parse_answers(json.dumps([json.dumps(value), None]), 2)
    assert found is not None and found[1] == ERROR and parse_answers(json.dumps(value), 99) is None
    assert parse_answers("[" * 100_000, 1) is None and parse_answer("[" * 100_000) == ERROR


def test_answers_by_hand():
    good = {"outcomes": {"a.py::t": "passed"}, "lines": {"": {"a.py": [1, 2]}}, "took": {"a.py::t": 0.5}}
    assert parse_answer(json.dumps(good)) == good
    for name, wrong in (
        ("outcomes", {"t": "good"}),
        ("lines", {"t": {"a.py": [1.5]}}),
        ("took", {"t": -1}),
        ("took", 3),
    ):
        assert parse_answer(json.dumps({**good, name: wrong})) == ERROR
    assert parse_answer(json.dumps({**good, "more": 1})) == ERROR and parse_answer("3") == ERROR


# Runs that do not end.


@given(st.floats(0.1, 100), st.floats(0, 2000), st.floats(0, 1))
@settings(max_examples=50, deadline=None)
def test_time_is_that_of_the_processor(seconds, waited, share):
    """A crowded machine ends no run, a loop is ended after its seconds, and what only waits is not waited for."""
    run = program.Run.__new__(program.Run)
    run.pid, run.seconds, run.since = 1, seconds, time.monotonic() - waited
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program.time, "clock_gettime", lambda clock: share * waited)
        late = run.is_late()
    if share * waited > 1.01 * seconds or waited > 1.01 * program.PATIENCE * seconds:
        assert late
    elif (
        waited < 0.99 * seconds
        or 0.06 < share
        and share * waited < 0.99 * seconds
        and waited < 0.99 * program.PATIENCE * seconds
    ):
        assert not late


@given(st.floats(0.1, 100), st.floats(0, 2000), st.floats(0, 2))
@settings(max_examples=50, deadline=None)
def test_the_judges_time_is_that_of_the_processor(seconds, waited, share):
    """As above, for a solution that is graded. It has its seconds by the wall clock in any case."""
    clock = judge.Clock(seconds)
    clock.since, clock.used = time.monotonic() - waited, lambda: share * waited
    over = clock.is_over()
    if (
        waited > 1.01 * seconds
        and (share * waited > 1.01 * seconds or share < 0.04)
        or waited > 1.01 * judge.PATIENCE * seconds
    ):
        assert over
    elif (
        waited < 0.99 * seconds
        or 0.06 < share
        and share * waited < 0.99 * seconds
        and waited < 0.99 * judge.PATIENCE * seconds
    ):
        assert not over


def test_the_judge_counts_the_time_of_processes_that_have_ended(monkeypatch):
    """Whoever was waited for counts with who waited, to the tick of what the system says of children."""
    monkeypatch.setattr(judge.os, "listdir", lambda folder: [str(os.getpid()), "uptime"])
    hertz = os.sysconf("SC_CLK_TCK")

    def count_children() -> int:
        times = os.times()
        return round(hertz * times.children_user) + round(hertz * times.children_system)

    clock, before = judge.Clock(1.0), count_children()
    loop = "import time\nwhile time.process_time() < 0.3:\n    pass"
    subprocess.run([sys.executable, "-S", "-c", loop], check=True)
    assert 0 < count_children() - before <= round(hertz * clock.used())
    assert guarded.PATIENCE == judge.PATIENCE


@given(st.integers(0, 10**10), st.integers(0, 10**5))
@settings(max_examples=50, deadline=None)
def test_the_judges_clock_is_exact_at_any_uptime(before, ticks):
    """Processor time is a difference of whole ticks: 29 ticks are 0.29 s, never a hair less."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(judge.Clock, "count_ticks", lambda self: before)
        clock = judge.Clock(1.0)
        patch.setattr(judge.Clock, "count_ticks", lambda self: before + ticks)
        assert clock.used() == ticks / os.sysconf("SC_CLK_TCK")


def test_a_run_that_does_not_end_makes_no_task():
    """Its tests have not failed: nobody knows what they would have done."""

    class Hangs(Player):
        def one(self, files):
            return super().one(files) if files == {**PACKAGE.files, **PACKAGE.tests} else {SILENT: "error"}

    made, normal = make_tasks(PACKAGE, Hangs()), make_tasks(PACKAGE, Player())
    assert made.tasks == () and made.piece_count == normal.piece_count and normal.tasks
    reasons = {made.reasons[label(task.piece)] for task in normal.tasks}
    assert reasons == {("tests: the run does not end without it",)}


def test_nothing_done_must_be_played_to_its_end():
    """Nothing is paid where a run does not end, and so it would look as if the feature were needed."""
    tests = {f"t.py::test_{name}" for name in "abcde"}

    def graded(total, passed, why="failed"):
        failed = {test: why for test in tests - passed}
        verdicts = Verdicts(frozenset(passed), failed, ())
        return Grade(Reward(not failed, 1.0, 1.0, (), total), verdicts, Collected({}, (), {}), ())

    gold, keep = graded(1.0, tests), tuple(sorted(tests))[1:]
    assert TaskCheck(gold, graded(0.0, {*keep}), 0, keep=keep).faults == ()
    assert TaskCheck(gold, graded(0.0, {*keep[:2]}), 0, keep=keep).faults == (), "half of them"
    few = TaskCheck(gold, graded(0.0, {keep[0]}), 0, keep=keep).faults
    assert few == ("with nothing done, 1 of the 4 tests pass that do not need the feature",)
    late = TaskCheck(gold, graded(0.0, {*keep}, "missing"), 0, keep=keep).faults
    assert late == ("with nothing done, the run does not end: t.py::test_a was not played",)
