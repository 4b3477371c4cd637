"""Grading sandboxes that wait: they hold nothing of a tree, serve one grading, are closed when nobody needs them, and
are replaced when they end."""

import os
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from environments.grading import guarded
from environments.grading.guarded import grade
from environments.grading.lay import packed, write
from environments.grading.ready import JUDGE, Judges, open_judge_sandbox
from environments.sandbox.interface import Limits, Observation
from environments.sandbox.open import open_sandbox
from tests.environments.hacks import GOLD
from tests.environments.test_hacks import EXAM


@pytest.fixture(scope="module")
def fresh(root, shared_store):
    """Opens grading sandboxes, and keeps a list of them."""
    found = []

    def one(tree):
        found.append(open_sandbox(tree, root=root, store=shared_store, limits=Limits(output=1 << 20)))
        return found[-1]

    one.opened = found
    return one


@pytest.fixture(scope="module")
def solved(tmp_path_factory):
    """The folder that the original code leaves."""
    folder = tmp_path_factory.mktemp("left") / "tree"
    write({**EXAM.given_tree, **{name: text.encode() for name, text in GOLD.items()}}, folder)
    return folder


def closed(sandbox):
    return bool(sandbox.call("list", {}).end_reason)


def test_it_holds_the_grader_s_programs_and_nothing_else(fresh, shared_store):
    sandbox = open_judge_sandbox(fresh)
    assert sandbox.waits()
    held = {path for path in shared_store.manifest(sandbox.snapshot()) if path}
    programs = {f"exam/{name}.py" for name in ("remote", "fresh", "examinee", "play", "judge")}
    assert held == {"exam", "exam/tests"} | programs
    sandbox.close()


def test_one_grading_has_one_sandbox_and_nobody_else_gets_it(fresh, solved):
    before = len(fresh.opened)
    with Judges(fresh) as judges:
        judges.expect()
        judges.settle()
        found = [grade(EXAM, solved, fresh, judges=judges) for _ in range(2)]
        assert [one.reward.total for one in found] == [1.0, 1.0]
        assert len(fresh.opened) == before + 2 and all(map(closed, fresh.opened[before:]))


def test_what_nobody_needs_is_closed(fresh):
    before = len(fresh.opened)
    with Judges(fresh) as judges:
        judges.expect()
        judges.settle()
        assert len(fresh.opened) == before + 1 and fresh.opened[-1].waits()
    assert closed(fresh.opened[-1])
    judges.close()


@pytest.mark.parametrize(
    "end",
    [
        lambda sandbox: sandbox.close(),
        lambda sandbox: sandbox.call("list", {}),
        lambda sandbox: os.kill(sandbox.first, 9),
    ],
)
def test_one_that_has_ended_is_replaced(end, fresh, solved):
    before = len(fresh.opened)
    with Judges(fresh) as judges:
        judges.expect()
        judges.settle()
        end(fresh.opened[-1])
        assert grade(EXAM, solved, fresh, judges=judges).reward.total == 1.0
    assert len(fresh.opened) == before + 2 and all(map(closed, fresh.opened[before:]))


def test_a_large_tree_is_graded_alike(fresh, solved, monkeypatch):
    """It lies there before the judge begins, and none that waits is taken for it."""
    monkeypatch.setattr(guarded, "LARGEST", 10)
    with Judges(fresh) as judges:
        judges.expect()
        judges.settle()
        waiting = fresh.opened[-1]
        assert grade(EXAM, solved, fresh, judges=judges).reward.total == 1.0
        assert waiting.waits()


def test_a_tree_without_room_is_said(root, shared_store, solved):
    """It is nobody's fault but the limits', and no verdict."""
    tight = partial(open_sandbox, root=root, store=shared_store, limits=Limits(disk=64 << 10))
    with pytest.raises(RuntimeError, match="takes no tree: .*No space left"):
        grade(replace(EXAM, given_tree={**EXAM.given_tree, "data.bin": os.urandom(200_000)}), solved, tight)


def test_names_that_lead_out_are_not_packed():
    assert packed({"a/b.py": b"x"}) == {"a/b.py": "eA=="}
    for name in ("../b.py", "/b.py", "a//b.py"):
        with pytest.raises(ValueError, match="leads out of the folder"):
            packed({name: b""})


SPY = """import glob, os
FOUND = []
for path in glob.glob("/proc/[0-9]*"):
    for part in ("fd/0", "mem", "environ", "root", "maps"):
        try:
            if path != f"/proc/{os.getpid()}":
                os.close(os.open(f"{path}/{part}", os.O_RDONLY | os.O_NONBLOCK))
                FOUND.append(f"{path}/{part}")
        except OSError:
            pass
"""


def test_who_is_graded_cannot_look_into_the_judge(fresh, tmp_path):
    """Its plan comes through its standard input: neither that, nor its memory, can be opened by the code that is
    graded."""
    write(
        {**EXAM.given_tree, **{name: text.encode() for name, text in GOLD.items()}, "words/nouns.py": SPY.encode()},
        tmp_path / "left",
    )
    exam = replace(
        EXAM,
        tests={"spy.py": "from words.nouns import FOUND\n\ndef test_spy():\n    assert FOUND == []\n"},
        required_tests=("spy.py::test_spy",),
    )
    found = grade(exam, tmp_path / "left", fresh)
    assert found.verdicts.passed == {"spy.py::test_spy"}, found.verdicts
    own = SPY.replace('path != f"/proc/{os.getpid()}"', "True")
    (tmp_path / "left/words/nouns.py").write_text(own)
    assert grade(exam, tmp_path / "left", fresh).verdicts.failed == {"spy.py::test_spy": "failed"}, (
        "else the test above would show nothing"
    )


class Fake:
    """A sandbox that only counts."""

    def __init__(self, folder):
        self.judge, self.over = False, 0

    def begin(self, command, timeout=None):
        self.judge = command == JUDGE
        return Observation("ready", True)

    def waits(self):
        return self.judge and not self.over

    def close(self):
        self.over += 1


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 3), st.lists(st.sampled_from(["expect", "take", "settle", "close", "end"]), max_size=30))
def test_each_is_given_once_or_closed_once(most, steps):
    """Whatever is asked in whatever order."""
    made, taken = [], []

    def fresh(folder):
        made.append(Fake(folder))
        return made[-1]

    with Judges(fresh, most) as judges:
        for step in steps:
            if step == "take":
                taken.append(judges.take())
                assert taken[-1].waits()
            elif step == "end" and made:
                judges.settle()
                made[-1].judge = False
            elif step != "end":
                getattr(judges, step)()
            judges.settle()
            waiting = [one for one in made if one not in taken and not one.over]
            assert len(waiting) <= most
    assert len({*map(id, taken)}) == len(taken) and not any(one.over for one in taken)
    assert all(one.over == 1 for one in made if one not in taken)


def test_none_is_opened_ahead_unless_one_is_expected():
    made = []
    judges = Judges(lambda folder: made.append(Fake(folder)) or made[-1], 2)
    first = judges.take()
    assert made == [first]
    for _ in range(5):
        judges.expect()
    judges.settle()
    assert len(made) == 3, "two at a time"
    for _ in range(5):
        judges.take()
    judges.settle()
    assert len(made) == 6, "one for each that was expected"
    with pytest.raises(ValueError, match="most must be at least 1; got 0"):
        Judges(open_sandbox, 0)


def test_a_forked_process_has_its_own():
    """Pipes that two processes read from belong to neither."""
    made = []
    judges = Judges(lambda folder: made.append(Fake(folder)) or made[-1])
    judges.expect()
    judges.settle()
    child = os.fork()
    if not child:
        judges.close()
        os._exit(0 if made[0].over == 0 and judges.take() is made[1] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert judges.take() is made[0]


def test_a_failure_ahead_is_seen_by_who_takes_one():
    def fresh(folder):
        raise RuntimeError("there is no room")

    with Judges(fresh) as judges:
        judges.expect()
        judges.settle()
        with pytest.raises(RuntimeError, match="there is no room"):
            judges.take()


def test_a_judge_that_cannot_begin_leaves_no_sandbox(monkeypatch):
    made = []
    monkeypatch.setattr(Fake, "begin", lambda *_: Observation("pytest is not there", False))
    with pytest.raises(RuntimeError, match="the grading sandbox has no judge: pytest is not there"):
        open_judge_sandbox(lambda folder: made.append(Fake(folder)) or made[-1])
    assert made[0].over == 1
