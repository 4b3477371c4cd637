"""A judge that reads an episode: what it is told and what it is not, its answers in the one form that counts, and in
others."""

import itertools
import json

import pytest

from environments.harness.hint_judge import BadAnswer, find_fault, make_judge_prompt
from environments.harness.messages import PolicyError
from environments.harness.remote import Remote
from tests.environments.served import CUT, answer, serving
from tests.environments.transcripts import PATH, begin, grade, made, turn

READ = turn(made("read", "def plural(noun):", path=PATH), text="I look.")
FINISH = turn(made("finish", "the episode is over", message="done"))
LINES = [begin(), *READ, *FINISH, grade("tests/test_nouns.py::test_plain", "tests/test_nouns.py::test_held")]
SHOWN = ("tests/test_nouns.py::test_plain",)


def says(turn, hint):
    return answer(json.dumps({"turn": turn, "hint": hint}))


def ask(*answers, lines=LINES, gold=""):
    """What comes of these answers, and what was asked: bodies of requests."""
    with serving(lambda number, body: answers[number]) as (address, requests):
        try:
            found = find_fault(Remote(address, "a-judge", sleep=lambda seconds: None), lines, SHOWN, gold)
        except (BadAnswer, PolicyError) as error:
            found = error
    return found, [body["messages"] for body, _ in requests]


def test_a_good_answer():
    """It says where and what; of the tests that are held out no word is told, and of the original only where somebody
    wants it."""
    found, ((system, told),) = ask(says(2, "You finish without\n having changed anything."))
    assert (found.turn.number, found.rule, found.says) == (2, "judge", "You finish without having changed anything.")
    assert system["role"] == "system" and "no code" in system["content"]
    for wanted in (
        begin()["prompt"],
        "## Reply 1\nI look.\ncalls read:",
        "def plural(noun):",
        "## Reply 2",
        "The reward is 0.00. 1 of 2 tests pass.",
    ):
        assert wanted in told["content"]
    assert (
        "test_plain" in told["content"]
        and "test_held" not in told["content"]
        and "original code" not in told["content"]
    )
    _, (_, told) = "", make_judge_prompt(LINES, SHOWN, "+    return noun + 's'")
    assert told.text.endswith("# The original code. Nothing of it may be in the hint.\n\n+    return noun + 's'")
    assert ask(says(0, ""))[0] is None and "Nobody has graded it." in make_judge_prompt(LINES[:-1])[1].text


BAD = {
    "no JSON": (answer("Reply 2 is wrong."), "it is no JSON: 'Reply 2 is wrong.'"),
    "JSON among words": (answer('Here: {"turn": 2, "hint": "x"}'), "it is no JSON"),
    "a list": (answer("[2]"), "no object with turn and hint"),
    "more than asked": (answer('{"turn": 2, "hint": "x", "fix": "y"}'), "no object with turn and hint"),
    "no number": (says("2", "x"), "turn must be a whole number"),
    "a truth value": (says(True, "x"), "turn must be a whole number"),
    "no such reply": (says(3, "x"), "there is no reply 3"),
    "no hint": (says(2, " \n"), "a hint must have 1 to 300 characters"),
    "a long hint": (says(2, "x" * 301), "a hint must have 1 to 300 characters"),
    "cut off": (answer('{"turn": 2, "hint": "x"}', finish_reason="length"), "it was cut off"),
}


@pytest.mark.parametrize("case", BAD)
def test_another_form_is_asked_for_once_more(case):
    bad, why = BAD[case]
    found, (_, again) = ask(bad, says(1, "You look at the wrong file."))
    assert found.turn.number == 1
    assert [one["role"] for one in again] == ["system", "user", "assistant", "user"] and why in again[-1]["content"]
    found, requests = ask(bad, bad)
    assert isinstance(found, BadAnswer) and why in str(found) and "\n" not in str(found) and len(requests) == 2


def test_a_server_that_breaks():
    """A connection that is cut is tried again as for any policy; one that refuses ends it."""
    assert ask(CUT, says(1, "You look."))[0].turn.number == 1
    found, requests = ask((403, "no more"))
    assert isinstance(found, PolicyError) and "403" in str(found) and len(requests) == 1


def test_a_long_episode_fits():
    turns = itertools.chain(*(turn(made("read", "x" * 9000, path=PATH), text="y" * 9000) for _ in range(200)))
    _, told = make_judge_prompt([begin(), *turns])
    assert (
        len(told.text) < 100 << 10
        and "## Reply 1\n" in told.text
        and "## Reply 200\n" in told.text
        and "bytes left out" in told.text
    )


def test_no_reply_at_all():
    assert "there are no replies" in str(ask(says(1, "x"), says(1, "x"), lines=[begin()])[0])
