"""What the agent may say, what it hears, and that nothing it writes can do harm."""

import random
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from recipe.microrepo import EvaluationError, Session
from recipe.microrepo.evaluator import MAX_BITS, parse
from tests.durations import ends_within
from tests.scripted import TASK

RIGHT = "write m3\n    return (a + b) * 2"


def test_an_episode():
    session = Session(TASK)
    assert session.prompt == "repo m2 m3 m7 fix m3"
    assert session.step("read m3") == 'def m3(a, b):\n    """m7 then double"""'
    assert session.step("read m7") == 'def m7(a, b):\n    """a plus b"""\n    return a + b'
    assert session.step("write m3\n    return a + b") == "ok"
    inputs, want = TASK.visible_tests[0]
    complaint = f"m3({inputs[0]}, {inputs[1]}) is {want // 2}, want {want}"
    assert session.step("test") == f"passed 0 of 3: {complaint}"
    assert session.verify().passed < 0.2
    assert session.step(RIGHT) == "ok"
    assert not session.verify().tested
    assert session.step("read m3").endswith('"""\n    return (a + b) * 2')
    assert session.step("test") == "passed 3 of 3"
    assert not session.done
    assert session.step("done") == ""
    assert session.done
    reward = session.verify()
    assert (reward.tests, reward.passed, reward.tested, reward.finished) == (1.0, 1.0, True, True)
    assert (reward.turns, reward.calls, reward.invalid_calls) == (8, 8, 0)
    assert (reward.reads, reward.writes, reward.test_runs) == (3, 2, 2)
    with pytest.raises(RuntimeError):
        session.step("test")


def test_several_calls_in_one_turn_are_answered_in_order():
    session = Session(TASK)
    answer = session.step(f"read m7\n{RIGHT}\ntest\ndone\nread m3")
    assert answer == 'def m7(a, b):\n    """a plus b"""\n    return a + b\nok\npassed 3 of 3'
    reward = session.verify()
    assert (reward.turns, reward.calls, reward.tests) == (1, 4, 1.0)


@pytest.mark.parametrize(
    ("turn", "answer"),
    [
        ("", "error: no call"),
        ("  \n\n", "error: no call"),
        ("raed m3", "error: no such call"),
        ("read", "error: no such call"),
        ("read  m3", "error: no such call"),
        ("read m3 m7", "error: no such call"),
        ("    return a", "error: no such call"),
        ("test m3", "error: no such call"),
        ("read m5", "error: no such file"),
        ("write m5\n    return a", "error: no such file"),
        ("write m7\n    return a", "error: m7 is not the file to fix"),
        ("write m3", "error: no return"),
        ("write m3\nreturn a", "error: no return\nerror: no such call"),
        ("write m3\n    return a +", "error: does not parse"),
        ("write m3\n      return a", "error: does not parse"),
        ("write m3\n    return c", "error: unknown name c"),
        ("write m3\n    return m7(a, b) * 2", "error: calls m7"),
        ("write m3\n    return open(a)", "error: unknown name open"),
    ],
)
def test_calls_that_cannot_be_followed(turn, answer):
    session = Session(TASK)
    assert session.step(turn) == answer
    assert session.verify().invalid_calls == len(answer.split("\n"))
    assert session.verify().tests == 0.0


def test_a_refused_body_leaves_the_old_one():
    session = Session(TASK)
    session.step(RIGHT)
    assert session.step("write m3\n    return") == "error: nothing is not allowed"
    assert session.verify().tests == 1.0


def test_tests_without_a_body_and_with_a_failing_one():
    session = Session(TASK)
    assert session.step("test") == "passed 0 of 3: no body"
    assert not session.verify().tested
    assert session.step("write m3\n    return a // 0\ntest").endswith(") fails, division by zero")
    assert session.verify().tested


def test_turns_run_out():
    session = Session(TASK, max_turns=2)
    session.step(RIGHT)
    session.step("test")
    assert session.done
    assert session.verify().tests == 1.0 and not session.verify().finished
    with pytest.raises(ValueError):
        Session(TASK, max_turns=0)


def test_a_flood_of_calls_is_cut():
    session = Session(TASK)
    answer = session.step("read m7\n" * 1000)
    assert answer.count("def m7") == 16 and answer.endswith("error: too many calls")
    assert session.verify().calls == 17


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(max_size=40) | st.sampled_from([RIGHT, "test", "read m3", "write m3\n    "])))
def test_no_text_breaks_a_session(turns):
    session = Session(TASK)
    for turn in turns:
        if not session.done:
            assert len(session.step(turn)) < 1000
    assert 0 <= session.verify().passed <= 1
    assert session.turns <= 12


BOMBS = [
    "return " + "(" * 300,
    "(" * 10**6,
    "return " + "-" * 390 + "a",
    "return " + "a+" * 190 + "a",
    "return " + "a**" * 100 + "a",
    "return 9**9**9**9",
    "return (9**999)**999",
    "return " + "9" * 300,
    "return 0x" + "F" * 300,
    "return 1e999",
    "return 9999999 ** 99999999",
    "return a ** -1",
    "return a % 0",
    "x = 99 ** 99\ny = x * x\nz = y ** 99\nreturn z ** 99",
    "return __import__('os').system('true')",
    "return a.__class__",
    "return (lambda: 1)()",
    "return [x for x in (1, 2)]",
    'return f"{a}"',
    "return a\x00",
    "return \uff41",
    "return a; return b",
    "return max",
    "return max()",
    "return max(a)",
    "return max(*a)",
    "return max(a, key=b)",
    "return abs(a, b)",
    "return 1.5",
    "return 1j",
    "return True",
    "return None",
    "return a < b < (a, b)",
    "return a and b",
    "return not a",
    "return ~a",
    "return a / b",
    "return a if b",
    "return (yield)",
    "return (x := 3)",
    "max = 3\nreturn max(a, b)",
    "a, b = b\nreturn a",
    "a = b = 3\nreturn a",
    "return a\nx = 3",
    "import os\nreturn a",
    "del a\nreturn b",
    "while a: a = 1\nreturn a",
    "x = x\nreturn x",
    "return 1if a else 2 is 3",
    "",
    "\n",
    "return",
]


def evaluate_any(text, a, b):
    """A number, or None where the text is refused."""
    try:
        return parse(text, ("a", "b")).evaluate((a, b))
    except EvaluationError:
        return None


@pytest.mark.parametrize("text", BOMBS, ids=lambda text: repr(text[:30]))
def test_bombs_and_escapes_are_refused(text):
    with pytest.raises(EvaluationError) as refusal:
        parse(text, ("a", "b")).evaluate((5, 7))
    assert ends_within(2, lambda: evaluate_any(text, 5, 7))
    assert len(str(refusal.value)) < 40


words = st.sampled_from(
    [*"abcx()+-*%<>=,.0123456789 \n", "**", "//", "max(", "min(", "abs(", "return ", " if ", " else ", "x = "]
)


@settings(max_examples=400, deadline=None)
@given(st.text() | st.lists(words).map("".join) | st.lists(words).map("".join).map("return {}".format))
@example("return ()")
@example("return a<b<0")
def test_any_text_is_a_number_or_a_refusal(text):
    since = time.thread_time()
    value = evaluate_any(text, -3, 1000)
    assert time.thread_time() - since < 2 or ends_within(2, lambda: evaluate_any(text, -3, 1000))
    assert value is None or type(value) is int and value.bit_length() <= MAX_BITS


def trees() -> st.SearchStrategy[str]:
    """Integer expressions over a and b, fully parenthesised."""
    leaves = st.sampled_from(["a", "b", "0", "1", "2", "7", "abs(a)", "-b", "(-a) ** 3", "a ** 2"])
    signs = st.sampled_from(["+", "-", "*", "//", "%", "<", ">=", "=="])
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.builds("({} {} {})".format, inner, signs, inner),
            st.builds("max({}, {}, 1)".format, inner, inner),
            st.builds("({} if {} else {})".format, inner, inner, inner),
            st.builds("(a < {} <= {})".format, inner, inner),
        ),
        max_leaves=8,
    )


@settings(deadline=None)
@given(trees(), st.integers(-20, 20), st.integers(-20, 20))
def test_the_evaluator_agrees_with_python(text, a, b):
    try:
        want = eval(text, {"max": max, "min": min, "abs": abs}, {"a": a, "b": b})
    except ZeroDivisionError:
        want = "division by zero"
    try:
        got = parse(f"x = {text}\nreturn x", ("a", "b")).evaluate((a, b))
    except EvaluationError as error:
        got = str(error)
    assert got == want


def test_powers_are_bounded_before_they_are_computed():
    body = parse("return a ** b", ("a", "b"))
    assert body.evaluate((2, 2000)) == 2**2000
    assert body.evaluate((random.Random(0).randint(-9, 9), 0)) == 1
    with pytest.raises(EvaluationError, match="number too large"):
        body.evaluate((2, 10**18))
    with pytest.raises(EvaluationError, match="number too large"):
        parse("x = a ** 999\ny = x * x\nreturn y * y", ("a",)).evaluate((9,))
