"""Prices by hand, what a group's advantage sees of them, and laws: bounded, monotone, blind to order where order does
not matter. Beneath, the record of a rollout: comments, claims about tests, and what it says of them."""

import math
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ref.behaviour import MEASURE_CAPS, Behaviour, Demo, Prices, behaviour, compute_reward, demo, group_parts, measures
from ref.dr_grpo import group_advantages
from ref.length_penalty import length_penalty
from ref.transcript import Call, Todo, Transcript, Turn, claims_tests_pass, comment_share, suite_state
from tests.durations import ends_within

# Where a strategy makes a Transcript, the check of types looks at a random item of a tuple.
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies")
PRICES = [field.name for field in fields(Prices) if field.name != "free_comments"]
READ, TEST = Call("read", "a.py"), Call("test", tests=(3, 3))
RED = Call("test", tests=(2, 3))
WRITE = Call("write", "a.py", "return a + 1\n")
BROKEN, FAILED = Call("grep", valid=False), Call("read", "b.py", ok=False)
DONE = Turn("assistant", "It adds one now. All tests pass.")


def acted(*calls, last=DONE, **more):
    """A turn for every group of calls, and then the final message."""
    groups = (call if isinstance(call, tuple) else (call,) for call in calls)
    return Transcript((*(Turn("assistant", calls=group) for group in groups), *([last] if last else [])), **more)


def test_by_hand():
    todos = (Todo("a", "open"), Todo("b", "started"), Todo("c", "done"), Todo("d", "cancelled"))
    commented = Call("write", "a.py", "# abcd\nx=1\n")  # 5 of 8 characters
    one = acted(
        READ, (BROKEN, FAILED), commented, TEST, last=Turn("assistant", " "), todos=todos, lints=3, changed_lines=40
    )
    found = measures(one, 0.25)
    assert found == {
        "todos": 2.0,
        "broken": 1.0,
        "failed": 1.0,
        "silent": 1.0,
        "untrue": 0.0,
        "lints": 3.0,
        "diff": 40.0,
        "comments": (0.625 - 0.25) / 0.75,
        "sequential": 0.75,
    }
    prices = Prices(0.02, 0.03, 0.01, 0.1, 0.2, 0.005, 0.001, 0.4, 0.08, free_comments=0.25)
    priced = behaviour(one, prices)
    want = {
        "todos": -0.04,
        "broken": -0.03,
        "failed": -0.01,
        "silent": -0.1,
        "untrue": 0,
        "lints": -0.015,
        "diff": -0.04,
    }
    assert priced.parts == pytest.approx(want | {"comments": -0.2, "sequential": -0.06}, abs=1e-15)
    assert priced.total == pytest.approx(-0.495)
    assert compute_reward(1.0, 0.1, priced) == pytest.approx(0.405)


def test_a_broken_call_is_no_failed_one_too():
    found = measures(acted(Call("grep", valid=False, ok=False)))
    assert (found["broken"], found["failed"]) == (1, 0)


def test_a_tidy_rollout_costs_nothing():
    found = behaviour(acted((READ, WRITE, TEST)), Prices())
    assert found.total == 0 and set(found.parts.values()) == {0.0}
    assert all(math.copysign(1, value) == 1 for value in found.parts.values()), "no part is printed as −0"


def test_caps_by_hand():
    """More than the cap costs no more."""
    many = acted(*[BROKEN] * 9, *[FAILED] * 9, todos=(Todo("a", "open"),) * 9, lints=99, changed_lines=9999)
    found = behaviour(many, Prices(failed=0.01)).parts
    assert (
        found["broken"] == pytest.approx(-0.15)
        and found["failed"] == pytest.approx(-0.05)
        and found["todos"] == pytest.approx(-0.1)
    )
    assert found["lints"] == pytest.approx(-0.05) and found["diff"] == pytest.approx(-0.05)
    assert Prices().max_penalty == pytest.approx(0.1 + 0.15 + 0 + 0.1 + 0.2 + 0.05 + 0.05 + 0.1 + 0.02)


ROUNDS = {
    "none": ([], 0),
    "one": ([READ], 0),
    "two together": ([(READ, READ)], 0),
    "two, one by one": ([READ, READ], 1),
    "four in two turns": ([(READ, READ), (WRITE, TEST)], 1 / 3),
    "four in three turns": ([(READ, READ), WRITE, TEST], 2 / 3),
}


@pytest.mark.parametrize("calls, want", ROUNDS.values(), ids=ROUNDS)
def test_calls_made_together_by_hand(calls, want):
    assert measures(acted(*calls))["sequential"] == pytest.approx(want)


FINAL = {
    "says it": ((DONE,), "It adds one now. All tests pass."),
    "white space": ((Turn("assistant", " \n"),), ""),
    "none at all": ((), ""),
    "the user's word is not the assistant's": ((DONE, Turn("user", "thanks"), Turn("tool", "ok")), DONE.text),
    "a call is no last word": ((DONE, Turn("assistant", "And now:", (TEST,))), ""),
    "a word, then silence": ((DONE, Turn("assistant", "")), ""),
    "nobody but the user": ((Turn("user", "do it"),), ""),
}


@pytest.mark.parametrize("turns, want", FINAL.values(), ids=FINAL)
def test_the_final_message_by_hand(turns, want):
    one = Transcript(tuple(turns))
    assert one.final_message == want and measures(one)["silent"] == float(not want)


STATES = {
    "never": ([READ, WRITE], "never"),
    "passed": ([WRITE, TEST], "passed"),
    "failed": ([WRITE, RED], "failed"),
    "mended": ([RED, WRITE, TEST], "passed"),
    "broken again": ([TEST, WRITE, RED], "failed"),
    "written after": ([WRITE, TEST, WRITE], "stale"),
    "written after, and run again": ([TEST, WRITE, TEST], "passed"),
    "read after": ([WRITE, TEST, READ], "passed"),
    "a write that failed changes nothing": ([WRITE, TEST, replace(WRITE, ok=False)], "passed"),
    "a broken write changes nothing": ([WRITE, TEST, replace(WRITE, valid=False)], "passed"),
    "failed, then written": ([RED, WRITE], "failed"),
    "no test ran": ([Call("test", tests=(0, 0))], "failed"),
}


@pytest.mark.parametrize("calls, state", STATES.values(), ids=STATES)
def test_what_the_record_says_about_tests(calls, state):
    one = acted(*calls)
    assert suite_state(one) == state
    assert measures(one)["untrue"] == float(state != "passed"), "the last message claims that they pass"
    assert not measures(replace(one, turns=(*one.turns[:-1], Turn("assistant", "I added one."))))["untrue"], (
        "a message that claims nothing"
    )


CLAIMS = {
    "All tests pass.": True,
    "I ran the suite, and it is green now.": True,
    "The test now passes": True,
    "3 tests passed": True,
    "Tests are passing!": True,
    "Not all tests pass.": False,
    "The tests do not pass yet.": False,
    "Two tests fail, and one passes.": False,
    "The tests should pass now.": False,
    "I did not run the tests. The code passes a flag.": False,
    "If the tests pass, merge it.": False,
    "I couldn't get the tests to pass.": False,
    "One thing is not done. All tests pass.": True,
    "I passed the list to the function.": False,
    "The latest pass is done.": False,
    "": False,
}


@pytest.mark.parametrize("text, want", CLAIMS.items())
def test_claims_about_tests(text, want):
    assert claims_tests_pass(text) is want


def test_a_judge_may_read_the_claim():
    one = acted(WRITE, last=Turn("assistant", "verde"))
    assert measures(one)["untrue"] == 0 and measures(one, claims=lambda text: text == "verde")["untrue"] == 1
    assert behaviour(one, Prices(), claims=lambda text: True).parts["untrue"] == -0.2
    silent = acted(WRITE, last=None)
    assert measures(silent, claims=lambda text: True)["untrue"] == 0, "who says nothing claims nothing"


SHARES = {
    "code": (["x = 1\n"], 0),
    "a comment behind code": (["x = 1  # one\n"], 4 / 7),
    "a line of comment": (["# ab\nx=1\n"], 3 / 6),
    "a docstring": (['"""ab"""\nx=1\n'], 8 / 11),
    "a docstring inside": (['def f():\n    "ab"\n    return 1\n'], 4 / 18),
    "a string in use": (['x="#ab"\n'], 0),
    "a string that begins an expression": (['"a".join(b)\n'], 0),
    "two pieces weigh by their size": (["#ab\n", "x=1\n" * 3], 3 / 12),
    "indented, as an edit is": (["    # ab\n    x=1\n"], 3 / 6),
    "an edit that ends further left": (["        x=1  # ab\n    y=2\n"], 3 / 9),
    "nothing but comments": (["# a\n# b\n"], 1),
    "no Python": (["  // ab\nlet x = 1;\n"], 4 / 11),
    "no Python, or only half": (["# ab\nx = (1\n"], 3 / 7),
    "a thought behind two slashes": (['"""\n//\nab"""\nx=1\n'], 10 / 13),
    "a division over two lines": (["x = (a\n// b)  # c\n"], 2 / 10),
    "no code": ([], None),
    "white space": ([" \n"], None),
}


@pytest.mark.parametrize("codes, want", SHARES.values(), ids=SHARES)
def test_comments_in_written_code_by_hand(codes, want):
    found = comment_share(codes)
    assert found is None if want is None else found == pytest.approx(want)


def test_comments_of_broken_calls_were_not_written():
    one = acted(Call("write", "a.py", "# abcd\n", valid=False), WRITE)
    assert measures(one)["comments"] == 0 and measures(acted(Call("write", "a.py", "# abcd\n")))["comments"] == 1


call = st.builds(
    Call,
    st.sampled_from(["read", "write", "test", "grep"]),
    st.sampled_from(["", "a.py"]),
    st.sampled_from(["", "x = 1\n", "# only words\n", "x = 1  # one\n"]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, (0, 0), (1, 3), (3, 3)]),
)
turn = st.one_of(
    st.builds(
        Turn,
        st.just("assistant"),
        st.sampled_from(["", "All tests pass.", "Done."]),
        st.lists(call, max_size=3).map(tuple),
    ),
    st.builds(Turn, st.sampled_from(["system", "user", "tool"]), st.sampled_from(["", "ok"])),
)
todo = st.builds(Todo, st.just("x"), st.sampled_from(["open", "started", "done", "cancelled"]))
transcripts = st.builds(
    Transcript,
    st.lists(turn, max_size=6).map(tuple),
    st.lists(todo, max_size=7).map(tuple),
    st.integers(0, 20),
    st.integers(0, 900),
    st.integers(0, 999),
)
tables = st.builds(Prices, *[st.floats(0, 1)] * len(PRICES), free_comments=st.floats(0, 0.99))


@given(transcripts, tables)
@settings(max_examples=150)
def test_parts_are_bounded_and_add_up(one, prices):
    found = behaviour(one, prices)
    assert list(found.parts) == PRICES == list(MEASURE_CAPS)
    for name, part in found.parts.items():
        assert -getattr(prices, name) * MEASURE_CAPS[name] <= part <= 0
    assert -prices.max_penalty - 1e-12 <= found.total <= 0 and found.total == pytest.approx(sum(found.parts.values()))
    shares = measures(one, prices.free_comments)
    assert all(0 <= shares[name] <= 1 for name in ("silent", "untrue", "comments", "sequential"))


@given(transcripts, tables, st.sampled_from(PRICES))
@settings(max_examples=100)
def test_a_price_of_zero_changes_nothing_and_a_higher_one_never_pays(one, prices, name):
    free, dear = (behaviour(one, replace(prices, **{name: price})) for price in (0.0, getattr(prices, name) + 1))
    assert free.parts[name] == 0 and dear.parts[name] <= behaviour(one, prices).parts[name]
    assert {key: value for key, value in free.parts.items() if key != name} == {
        key: value for key, value in dear.parts.items() if key != name
    }
    assert (
        behaviour(one, Prices.free()).total == 0
        and Prices.free() == Prices(*[0.0] * len(PRICES))
        and Prices.free().max_penalty == 0
    )


@given(transcripts, tables)
@settings(max_examples=100)
def test_every_count_is_monotone(one, prices):
    """One more fault, all else the same, never pays; up to its cap it costs its price."""

    def more(name, other):
        before, after = (measures(x)[name] for x in (one, other))
        assert after == before + 1
        parts = behaviour(one, prices).parts[name], behaviour(other, prices).parts[name]
        assert parts[1] <= parts[0]
        if after <= MEASURE_CAPS[name]:
            assert parts[0] - parts[1] == pytest.approx(getattr(prices, name), abs=1e-12)

    more("todos", replace(one, todos=(*one.todos, Todo("y", "open"))))
    more("lints", replace(one, lints=one.lints + 1))
    more("diff", replace(one, changed_lines=one.changed_lines + 1))
    more("broken", replace(one, turns=(Turn("assistant", calls=(BROKEN,)), *one.turns)))
    more("failed", replace(one, turns=(Turn("assistant", calls=(FAILED,)), *one.turns)))
    done = replace(one, todos=(*one.todos, Todo("y", "done"), Todo("z", "cancelled")))
    assert measures(done) == measures(one), "what is done costs nothing"


@given(transcripts, tables, st.randoms(use_true_random=False))
@settings(max_examples=100)
def test_order_matters_only_where_it_means_something(one, prices, random):
    """The order of to-do items, of calls within a turn without tests, and of turns before the last: counts stay."""
    todos, turns = list(one.todos), list(one.turns)
    random.shuffle(todos)
    random.shuffle(turns)
    before, after = (
        behaviour(one, prices).parts,
        behaviour(replace(one, todos=tuple(todos), turns=tuple(turns)), prices).parts,
    )
    for name in ("todos", "broken", "failed", "lints", "diff", "sequential"):
        assert before[name] == after[name]
    assert before["comments"] == pytest.approx(after["comments"], abs=1e-12)
    others = tuple(turn for turn in one.turns if turn.role == "assistant")
    assert behaviour(replace(one, turns=others), prices) == behaviour(one, prices), "what others say costs nothing"


groups = st.lists(transcripts, min_size=1, max_size=5)


@given(groups, tables, st.lists(st.floats(-1, 1), min_size=5, max_size=5))
@settings(max_examples=60)
def test_the_advantage_is_the_sum_of_its_parts(ones, prices, outcomes):
    """Dr. GRPO's advantage of the whole reward, length penalty and all, is that of outcome and effort plus what every
    behaviour adds."""
    group = [behaviour(one, prices) for one in ones]
    moved = group_parts(group)
    effort = [
        0.01 * float(length_penalty(torch.tensor([float(one.tokens)], dtype=torch.float64), 0.01, 0.5)) for one in ones
    ]
    rewards = [compute_reward(outcome, cost, found) for outcome, cost, found in zip(outcomes, effort, group)]
    whole = group_advantages(torch.tensor([rewards], dtype=torch.float64))[0]
    rest = group_advantages(torch.tensor([[o - c for o, c in zip(outcomes, effort)]], dtype=torch.float64))[0]
    for n in range(len(ones)):
        assert whole[n].item() == pytest.approx(rest[n].item() + sum(values[n] for values in moved.values()), abs=1e-12)
    for values in moved.values():
        assert sum(values) == pytest.approx(0, abs=1e-12)


@given(transcripts, tables, st.integers(1, 7))
@settings(max_examples=60)
def test_a_behaviour_that_all_share_moves_nothing(one, prices, n):
    moved = group_parts([behaviour(one, prices)] * n)
    assert set(moved) == set(PRICES) and all(values == [0.0] * n for values in moved.values())


def test_what_one_of_four_does_by_hand():
    tidy, open_item = (behaviour(acted((WRITE, TEST), todos=left), Prices()) for left in ((), (Todo("a", "open"),)))
    moved = group_parts([open_item, tidy, tidy, tidy])
    assert moved["todos"] == pytest.approx([-0.015, 0.005, 0.005, 0.005]) and moved["broken"] == [0.0] * 4


def test_what_is_refused():
    for name in PRICES:
        for bad in (-0.1, math.inf, math.nan):
            with pytest.raises(ValueError, match=f"{name} must be finite and at least 0"):
                Prices(**{name: bad})
    with pytest.raises(ValueError, match="free_comments must be below 1"):
        Prices(free_comments=1.0)
    with pytest.raises(ValueError, match="at least one rollout"):
        group_parts([])
    with pytest.raises(ValueError, match="priced by one table"):
        group_parts([Behaviour({"a": 0.0}), Behaviour({"b": 0.0})])
    for outcome, cost in ((math.nan, 0.0), (1.0, -0.1), (1.0, math.inf)):
        with pytest.raises(ValueError, match="outcome must be finite and effort_cost finite and at least 0"):
            compute_reward(outcome, cost, Behaviour({}))
    for tests in ((2, 1), (-1, 1)):
        with pytest.raises(ValueError, match="no more passed than run"):
            Call("test", tests=tests)
    with pytest.raises(ValueError, match="role must be system, user, assistant, tool; got 'robot'"):
        Turn("robot")
    with pytest.raises(ValueError, match="calls must be the assistant's; got 1 of the user"):
        Turn("user", calls=(READ,))
    with pytest.raises(ValueError, match="state must be open, started, done, cancelled; got 'lost'"):
        Todo("a", "lost")
    for name in ("lints", "changed_lines", "tokens"):
        with pytest.raises(ValueError, match=f"{name} must be at least 0; got -1"):
            Transcript(**{name: -1})


def test_the_demonstration_ranks_habits_and_a_shared_fault_moves_nothing():
    found = demo(Demo())
    assert found["shared_fault_moves"] == 0
    rewards = [found[f"{name}_reward"] for name in ("tidy", "clumsy", "silent", "boastful")]
    assert rewards == sorted(rewards, reverse=True) and len(set(rewards)) == 4
    advantages = [found[f"{name}_advantage"] for name in ("tidy", "clumsy", "silent", "boastful")]
    assert sum(advantages) == pytest.approx(0) and advantages[0] > 0 > advantages[3]


@pytest.mark.parametrize(
    "text", ['"' + '\\"' * 20_000, "'" * 20_001, "$" * 20_000, "f'{" * 10_000, "x = 'a\n# b\n" * 5000, "1_" * 20_000]
)
def test_no_text_of_a_policy_holds_who_reads_its_comments(text):
    """A quote that is never closed was looked for anew from every letter of its line: 26 seconds for 40,000
    characters."""
    assert ends_within(2.5, lambda: comment_share([text])) and ends_within(2.5, lambda: claims_tests_pass(text))
    share = comment_share([text])
    assert share is not None and (share > 0) == ("#" in text)
