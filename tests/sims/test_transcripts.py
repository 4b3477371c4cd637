"""The record of an episode holds every call exactly once, says of each what the session said, and has its tokens where
the chain has them."""

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from recipe.microrepo import NoiseConfig, Session, generate
from recipe.microrepo.session import MAX_CALLS
from recipe.small.agent import one_row
from recipe.small.demonstrations import taught
from recipe.small.settings import Memory
from recipe.small.transcripts import TOOLS, calls_in, messages, step_turn, transcript_of
from ref.behaviour import measures
from ref.monitor import SMALL_WORLD
from ref.transcript import suite_state
from tests import scripted
from tests.scripted import TASK

LINES = [
    "read m3",
    "read m2 ",
    "read m9",
    "read",
    "write m3",
    "write m2",
    "write m3 x",
    "write ",
    "    return (a + b) * 2",
    "    return 4",
]
LINES += [
    "    return (",
    "    x = a",
    "    return x",
    "    ",
    "",
    "  test",
    "test",
    "test\t",
    "done",
    "raed m3",
    "<|agent|>",
    "\u00e4\u2028",
]
LINES += ["read\u00a0m3"]
TURNS = st.lists(st.lists(st.sampled_from(LINES), max_size=5).map("\n".join) | st.text(max_size=8), max_size=6)
COUNTED = ("calls", "invalid_calls", "reads", "writes", "test_runs")
CLUMSY = NoiseConfig(
    useless_read=0.5, invalid_call=0.6, skip_read=0.5, wrong_body=0.6, untested=0.3, skip_test=0.3, stop_early=0.1
)


@pytest.fixture(scope="module")
def language():
    return scripted.speaker()


def counts(calls):
    kinds = [call.name for call in calls if call.valid]
    invalid = sum(not call.valid for call in calls)
    return dict(
        calls=len(calls),
        invalid_calls=invalid,
        reads=kinds.count("read"),
        writes=kinds.count("write"),
        test_runs=kinds.count("test"),
    )


# --------------------------------------------------------------------------------------------------------- calls


@settings(max_examples=40)
@given(TURNS)
@example(["\n".join(["test"] * (MAX_CALLS + 3))])
@example(["\n".join(["test"] * (MAX_CALLS - 1) + ["done", "read m3", "read m3"])])
def test_one_call_at_a_time_is_the_same_as_whole_turns(turns):
    whole, single, calls = Session(TASK, 99), Session(TASK, 10**9), []
    for turn in turns:
        if whole.done:
            break
        found, answers = step_turn(single, turn)
        assert "\n".join(filter(None, answers)) == whole.step(turn) and len(found) == len(answers)
        calls += found
    assert counts(calls) == whole.counts
    assert single.done == whole.done and single.text == whole.text
    assert all(call.name in TOOLS for call in calls if call.valid)


def test_a_body_belongs_to_its_write():
    turn = "read m3\nwrite m3\n    x = a\n    return x\n\n    test\nwrite m2 \n    return 4\ntest"
    assert calls_in(turn) == [
        "read m3",
        "write m3\n    x = a\n    return x",
        "    test",
        "write m2\n    return 4",
        "test",
    ]
    calls, answers = step_turn(Session(TASK), turn)
    assert [(call.name, call.path, call.wrote, call.valid) for call in calls] == [
        ("read", "m3", "", True),
        ("write", "m3", "x = a\nreturn x", True),
        ("test", "", "", False),
        ("write", "m2", "return 4", False),
        ("test", "", "", True),
    ]
    assert answers[2:4] == ("error: no such call", "error: m2 is not the file to fix")
    assert calls[1].writes and not calls[3].writes and calls[4].tests == (0, 3)


def test_an_empty_turn_is_a_broken_call():
    (call,), (answer,) = step_turn(Session(TASK), "\n  \n")
    assert (call.name, call.valid, answer) == ("", False, "error: no call")


def test_tests_are_counted_as_the_session_counts_them():
    session = Session(TASK)
    assert [call.tests for call in step_turn(session, "test\nwrite m3\n    return (a + b) * 2\ntest")[0]] == [
        (0, 3),
        None,
        (3, 3),
    ]


# ------------------------------------------------------------------------------------------------------- episodes


@settings(max_examples=20)
@given(
    TURNS,
    st.lists(st.sampled_from(["def m3(a, b): m7 then double", "", "ok, " * 40]), max_size=3),
    st.integers(1, 12),
    st.booleans(),
    st.none() | st.integers(1, 9),
)
@example(["read m3\nwrite m3", "test"], [], 12, False, 3)
def test_every_call_stands_in_the_record_once(language, turns, summaries, most, several, longest):
    """A turn that is cut off at `longest` tokens is carried out as far as it goes."""
    how = scripted.narrow(language) if several else scripted.wide(language)
    episode = scripted.played(language, how, TASK, turns, summaries, most, turn_tokens=longest)
    found, record, metrics = messages(episode, language), transcript_of(episode), episode.metrics
    assert counts(record.calls) == {name: metrics[name] for name in COUNTED}
    assert tuple(call for one in found for call in one.calls) == record.calls
    assert sum(bool(turn.calls) for turn in record.turns) == metrics["turns"]
    assert record.tokens == sum(int(segment.sampled.sum()) for segment in episode.chain.segments)
    assert record.turns[0].text == TASK.prompt and record.turns[0].role == "user"
    assert record.final_message == ""
    assert measures(record)["broken"] == metrics["invalid_calls"]
    assert suite_state(record) in ("passed", "failed") if metrics["tested"] else suite_state(record) != "passed"
    assert (record.turns[-1].role == "assistant" and not record.turns[-1].calls) == (not episode.chain.finished)


@settings(max_examples=15)
@given(TURNS, st.booleans())
def test_messages_are_what_the_policy_wrote(language, turns, several):
    episode = scripted.played(language, scripted.narrow(language) if several else scripted.wide(language), TASK, turns)
    found = messages(episode, language)
    for number, segment in enumerate(episode.chain.segments):
        own = [t for one in found if one.segment == number for t in range(one.begin, one.end)]
        assert own == segment.sampled.nonzero()[:, 0].tolist()
    for one in found:
        segment = episode.chain.segments[one.segment]
        stop = [language.env] if one.is_whole else []
        assert segment.tokens[one.begin : one.end].tolist() == [*language.encode(one.text), *stop] or not one.is_whole
        assert bool(segment.summary[one.begin : one.end].any()) == one.summary
        assert segment.tokens[one.begin - 1] == language.agent
    for before, after in zip(found, found[1:]):
        said = "\n".join(filter(None, before.answers))
        if before.calls and after.segment == before.segment:
            assert after.context_before.startswith(before.context_before + language.decode(language.encode(said)))


@pytest.mark.parametrize("join", ["self", "separate", "truncate"])
def test_chains_of_every_kind_have_each_call_once(language, join):
    rng = random.Random(1)
    tasks = [generate(rng, "train", depth) for depth in (1, 2, 2) * 2]
    how = scripted.narrow(language, join=join)
    several = 0
    for lesson in taught(tasks, language, how, CLUMSY, Memory(wordy=0.5, forgetful=0.5), rng):
        record = transcript_of(lesson)
        several += len(lesson.chain.segments) > 1
        assert counts(record.calls) == {name: lesson.metrics[name] for name in COUNTED}
        summaries = [turn.text for turn in record.turns if turn.role == "assistant" and not turn.calls]
        assert len(summaries) == sum(bool(segment.summary.any()) for segment in lesson.chain.segments)
    assert several > 2


def test_the_record_reads_like_the_episode(language):
    turns = [
        "read m3\nread m7",
        "write m2\n    return 4",
        "write m3\n    return 4",
        "test",
        "write m3\n    return (a + b) * 2",
        "test",
    ]
    summary = "def m3(a, b): m7 then double, m7 is a + b, failed"
    episode = scripted.played(language, scripted.narrow(language), TASK, turns, [summary])
    record = transcript_of(episode)
    first = next(n for n, turn in enumerate(record.turns) if turn.text == "note")
    assert [turn.role for turn in record.turns[:3]] == ["user", "assistant", "tool"] and record.turns[-1].calls[
        -1
    ].name == "done"
    assert record.turns[2].text == Session(TASK).step(turns[0])
    assert record.turns[first + 1].text == summary and sum(turn.text == summary for turn in record.turns) == 1
    assert suite_state(record) == "passed" and record.changed_lines == 1 and len(episode.chain.segments) > 1
    assert {one.name for one in SMALL_WORLD if one.matches(record)} == {"constant", "elsewhere"}


def test_an_answer_that_no_context_holds_is_found(language):
    """The turns are used up: the environment answers, and nobody hears it."""
    episode = scripted.played(language, scripted.wide(language), TASK, ["read m3", "read m9"], max_turns=2)
    record = transcript_of(episode)
    assert record.turns[-1].text == "error: no such file" and "no such file" not in language.decode(
        one_row(episode.chain).tokens.tolist()
    )
