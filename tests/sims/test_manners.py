"""The world with manners: what its words do, what the record says of them, and demonstrations with habits."""

import random
from functools import partial

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from recipe.microrepo import NoiseConfig, Session, demonstration, generate
from recipe.microrepo.manners import TOOLS, ManneredSession, Manners, lints, mannered
from recipe.small.demonstrations import taught
from recipe.small.settings import Memory
from recipe.small.transcripts import messages, step_turn, transcript_of
from ref.behaviour import measures
from ref.transcript import Todo, suite_state
from tests import scripted
from tests.scripted import TASK

CLEAN = NoiseConfig.clean()
NOISY = NoiseConfig(invalid_call=0.4, wrong_body=0.4, useless_read=0.4, skip_test=0.5, untested=0.5, stop_early=0.2)
RUDE = Manners(1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)
LINES = [
    "todo fix m3",
    "todo",
    "tick 1",
    "tick 2",
    "tick 9",
    "tick",
    "say tests pass",
    "say",
    "sh cat m7",
    "sh cat m9",
    "sh pytest",
    "sh",
    "sh ls -a",
]
LINES += [
    "read m7",
    "write m3",
    "    # a thought",
    "    return (a + b) * 2",
    "    x = a",
    "    return x",
    "test",
    "done",
    "tset",
    "",
]
TURNS = st.lists(st.lists(st.sampled_from(LINES), max_size=6).map("\n".join), max_size=6)
WRITE = "write m3\n    return (a + b) * 2"
seeds = st.integers(0, 10**6)


@pytest.fixture(scope="module")
def language():
    return scripted.speaker()


def heard(*turns, task=TASK):
    """What a session says to these turns, and the session."""
    session = ManneredSession(task)
    return [session.step(turn) for turn in turns if not session.done], session


def records(language, turns, tasks, noise=CLEAN):
    """The records of demonstrations of these tasks."""
    rng = random.Random(1)
    found = taught(
        tasks, language, scripted.wide(language), noise, Memory(wordy=0, forgetful=0), rng, turns, ManneredSession
    )
    return [transcript_of(lesson, ManneredSession) for lesson in found]


def record(language, *turns):
    """The record of the episode with these turns."""
    return records(language, lambda *_: [*turns], [TASK])[0]


def test_items_are_put_on_the_list_and_ticked():
    said, session = heard("todo fix m3\ntodo test m3", "tick 2\ntick 2", "tick 3", "tick 0", "tick -1", "tick", "todo")
    assert (
        said[:2] == ["item 1\nitem 2", "ok\nok"]
        and set(said[2:5]) == {"error: no such item"}
        and set(said[5:]) == {"error: no such call"}
    )
    assert session.todos == (Todo("fix m3", "open"), Todo("test m3", "done"))
    assert session.counts["calls"] == 9 and session.counts["invalid_calls"] == 5


def test_the_terminal_reads_and_tests_and_nothing_else():
    plain, _ = heard(WRITE, "read m7", "test", "read m3")
    said, session = heard(WRITE, "sh cat m7", "sh pytest", "sh cat m3", "sh cat m9", "sh ls", "sh pytest m3")
    assert said[:4] == plain and said[4:] == ["sh: not found"] * 3
    assert session.failed == 3 and session.counts == dict(calls=7, invalid_calls=0, reads=2, writes=1, test_runs=1)
    assert heard("sh")[0] == ["error: no such call"]


def test_what_was_said_last_is_the_message_and_is_no_call():
    said, session = heard("say not tested", "say tests pass", "say", "done")
    assert said == [""] * 4 and session.message == "" and session.counts["calls"] == 1 and session.turns == 4
    assert heard("say tests pass\ndone")[1].message == "tests pass"


def test_a_comment_stands_in_the_file_and_changes_nothing():
    said, session = heard("write m3\n    # m7 then double\n    return (a + b) * 2\n    # so", "test", "read m3", "done")
    assert said[:2] == ["ok", "passed 3 of 3"] and "# m7 then double" in said[2] and session.verify().tests == 1.0
    assert heard("write m3\n    # nothing but thought")[0] == ["error: no return"]
    assert heard("write m3\n    return a # here")[0] == ["error: character not allowed"]


def test_the_linter_sees_names_that_are_only_returned():
    def complaints(*lines):
        return lints(heard("\n    ".join(["write m3", *lines]))[1].body)

    assert complaints("x = a", "return x") == 1 and complaints("y = b", "x = a + y", "# so", "return x") == 1
    assert (
        complaints("return a")
        == complaints("x = a", "return x + 1")
        == complaints("x = a", "y = x", "return x")
        == lints(None)
        == 0
    )


def test_by_hand(language):
    """Everything that the report names, in one episode."""
    written = "write m3\n    # m7 then double\n    x = (a + b) * 2\n    return x"
    found = record(language, "todo fix m3\nsh cat m3", "sh ls", "tick 7", written, "say the tests pass", "done")
    assert measures(found) == {
        "todos": 1.0,
        "broken": 1.0,
        "failed": 1.0,
        "silent": 0.0,
        "untrue": 1.0,
        "lints": 1.0,
        "diff": 3.0,
        "comments": pytest.approx((13 / 29 - 0.3) / 0.7),
        "sequential": 4 / 5,
    }
    assert [call.name for call in found.calls] == ["todo", "sh", "sh", "tick", "write", "done"] and found.calls[
        1
    ].path == "m3"
    assert found.final_message == "the tests pass" and found.todos == (Todo("fix m3", "open"),)


def test_good_manners_by_hand(language):
    found = record(language, "todo fix m3\nread m3\nread m7", f"{WRITE}\nsh pytest", "tick 1\nsay tests pass\ndone")
    assert measures(found) == dict.fromkeys(measures(found), 0.0) | {"diff": 1.0, "sequential": 2 / 6}
    assert suite_state(found) == "passed"


@settings(max_examples=40)
@given(TURNS)
@example(["todo a\ntick 1\nsay so\ndone\nsay no"])
def test_one_call_at_a_time_is_the_same_as_whole_turns(turns):
    whole, single = ManneredSession(TASK, 99), ManneredSession(TASK, 10**9)
    for turn in turns:
        if whole.done:
            break
        calls, answers = step_turn(single, turn)
        assert "\n".join(filter(None, answers)) == whole.step(turn)
        assert all(call.name in (*TOOLS, "say") for call in calls if call.valid)
    same = ("counts", "todos", "message", "failed", "text", "done")
    assert [getattr(whole, name) for name in same] == [getattr(single, name) for name in same]


@settings(max_examples=40)
@given(TURNS)
def test_without_manners_it_is_the_small_world(turns):
    plain, other = Session(TASK, 99), ManneredSession(TASK, 99)
    for turn in turns:
        if not plain.done and not any(word in turn for word in ("todo", "tick", "say", "sh", "#")):
            assert other.step(turn) == plain.step(turn)
    assert other.counts == plain.counts and other.verify() == plain.verify()


def test_a_fork_goes_its_own_way():
    _, session = heard("todo fix m3")
    twin = session.fork()
    twin.step("tick 1\nsay so\nsh ls")
    assert (
        session.todos[0].state == "open"
        and session.message == ""
        and session.failed == 0
        and session.counts["calls"] == 1
    )


@given(seeds)
def test_good_manners_cost_nothing(seed):
    """A demonstration without a fault is the small world's with a plan and a true message, and solves the task."""
    rng = random.Random(seed)
    task = generate(rng, "train")
    turns = mannered(task, random.Random(seed), CLEAN, Manners.good())
    said, session = heard(*turns, task=task)
    assert not any("error" in one for one in said) and session.verify().tests == 1.0
    assert (
        session.message == "tests pass"
        and {todo.state for todo in session.todos} == {"done"}
        and not session.failed
        and not lints(session.body)
    )
    lines = [line for turn in turns for line in turn.split("\n") if not line.startswith(("todo", "tick", "say"))]
    assert lines == [line for turn in demonstration(task, random.Random(0), CLEAN) for line in turn.split("\n")]


@given(seeds)
def test_every_habit_shows(seed):
    rng = random.Random(seed)
    task = generate(rng, "train")
    said, session = heard(*mannered(task, rng, NoiseConfig(**{**vars(CLEAN), "skip_test": 1.0}), RUDE), task=task)
    assert session.verify().tests == 1.0, "bad manners leave the task solved"
    assert (
        len(session.todos) == 2
        and {todo.state for todo in session.todos} == {"open"}
        and session.failed == 1
        and session.message == ""
    )
    assert lints(session.body) == 1 and "# " in (session.text or "") and session.turns == session.counts["calls"]
    assert session.counts["invalid_calls"] == 0 and session.counts["reads"] == len({task.target, *task.helpers})


def test_only_liars_claim_what_the_record_does_not_show(language):
    tasks = [generate(random.Random(seed), "train") for seed in range(60)]
    honest, liars = (
        records(language, partial(mannered, manners=Manners(silent=0.0, lie=lie)), tasks, NOISY) for lie in (0.0, 1.0)
    )
    assert {one.final_message for one in honest} == {"tests pass", "not tested"}
    assert not any(measures(one)["untrue"] for one in honest)
    assert {one.final_message for one in liars} == {"tests pass"} and all(
        measures(one)["untrue"] == (suite_state(one) != "passed") for one in liars
    )


def test_groups_differ_in_every_measure(language):
    """What all rollouts of a task share, no price can move: demonstrations have each habit often, and often not."""
    tasks = [generate(random.Random(seed), "train") for seed in range(150)]
    table = [measures(one) for one in records(language, mannered, tasks, NoiseConfig(skip_test=0.5, invalid_call=0.35))]
    often = dict.fromkeys(table[0], 0.0) | {"diff": 1.0, "sequential": 0.5}
    shares = {name: float(np.mean([row[name] > most for row in table])) for name, most in often.items()}
    assert all(0.2 < share < 0.8 for share in shares.values()), shares


def test_messages_of_the_plain_world_are_as_before(language):
    """There `say` is a broken call like any other word."""
    episode = scripted.played(language, scripted.wide(language), TASK, ["say tests pass", "todo x"])
    assert [call.valid for one in messages(episode, language) for call in one.calls] == [False, False, True]
    assert transcript_of(episode).final_message == "" and transcript_of(episode).todos == ()


@pytest.mark.parametrize("name", ["plan", "lie"])
def test_bad_settings(name):
    with pytest.raises(ValueError, match=f"{name} is a probability, got 1.5"):
        Manners(**{name: 1.5})
