"""Hints for episodes on real tasks: which reply went wrong and what is said of it, near misses, and what no hint may
tell."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from environments.harness.hint_audit import Secret, refusal
from environments.harness.hints import RULES, SAYS, Fault, find_faults, row
from environments.harness.turns import turns, words_of
from ref import sft
from tests.environments.transcripts import PATH, begin, changed, grade, made, summary, turn

READ = made("read", "def plural(noun):\n    return noun", path=PATH)
EDIT = made("edit", f"replaced 1 place in {PATH}", path=PATH, old="noun", new='noun + "s"')
WRITE = made("write", f"wrote 9 bytes to {PATH}", path=PATH, text="whatever\n")
RED = made(
    "shell",
    "F.\nFAILED tests/test_nouns.py::test_plain\n1 failed, 3 passed in 0.05s",
    exit=1,
    command="python3 -m pytest -q tests",
)
GREEN = made("shell", "....\n4 passed in 0.05s", exit=0, command="python3 -m pytest -q tests")
FINISH = made("finish", "the episode is over", message="done")
LS = made("shell", "words", exit=0, command="ls")
NAMES = "tests/test_nouns.py::test_plain", "tests/test_nouns.py::test_held"

CASES = {
    "no such tool": (
        [turn(made("fly", "there is no tool 'fly'; there are read", broken=True))],
        [(1, "broken", "there is no tool 'fly'")],
    ),
    "no JSON": (
        [turn(made("read", "the arguments of read are no JSON", broken=True, written='{"path": '))],
        [(1, "broken", "are no JSON")],
    ),
    "the second of two calls": (
        [turn(READ, made("read", "read needs path, text", broken=True))],
        [(1, "broken", "read needs path")],
    ),
    "behind the end nothing is broken": (
        [turn(FINISH, made("read", "the episode is over; this call was not made", broken=True, path="a"))],
        [],
    ),
    "late nothing is broken": ([turn(made("read", "the time of the episode is over", broken=True, path="a"))], []),
    "cut off nothing is broken": ([turn(made("read", "are no JSON", broken=True, written='{"pa'), cut=True)], []),
    "no such file": (
        [turn(made("read", "No such file or directory: a", ok=False, path="a"))],
        [(1, "failed", "No such file or directory: a")],
    ),
    "the last line alone": (
        [turn(made("shell", "much\n\nless\n", exit=127, command="x"))],
        [(1, "failed", "would fail: less")],
    ),
    "a command that says nothing": ([turn(made("shell", "", exit=2, command="x"))], [(1, "failed", "exit code 2")]),
    "too slow": (
        [turn(made("shell", "so far", ended="more than 60 seconds", command="x"))],
        [(1, "failed", "more than 60 seconds")],
    ),
    "too much, and nothing said": (
        [turn(made("grep", "", ended="more than 9 MiB", pattern="x"))],
        [(1, "failed", "more than 9 MiB")],
    ),
    "no test is found": (
        [turn(made("shell", "no tests ran in 0.01s", exit=5, command="pytest -q a"))],
        [(1, "failed", "no tests ran")],
    ),
    "nothing is found": ([turn(made("shell", "", exit=1, command="grep x a"))], []),
    "tests fail": ([turn(RED)], []),
    "tests cannot be collected": ([turn(made("shell", "1 error in 0.1s", exit=2, command="pytest -q"))], []),
    "an edit of what nobody read": ([turn(EDIT, diff=changed())], [(1, "unread", f"would change {PATH} without")]),
    "a file replaced": ([turn(WRITE, diff=changed())], [(1, "unread", PATH)]),
    "read in the same reply": ([turn(READ, EDIT, diff=changed())], [(1, "unread", PATH)]),
    "an absolute path": (
        [turn(made("edit", "", path=f"/work/{PATH}", old="a", new="b"), diff=changed())],
        [(1, "unread", PATH)],
    ),
    "read, but forgotten": ([turn(READ), summary(), turn(EDIT, diff=changed())], [(2, "unread", PATH)]),
    "read, and noted": ([turn(READ), summary(f"{PATH} returns a noun"), turn(EDIT, diff=changed())], []),
    "another file was read": (
        [turn(made("read", "VERSION = 1", path="words/other.py")), turn(EDIT, diff=changed())],
        [(2, "unread", PATH)],
    ),
    "lines of the other file that changes": (
        [
            turn(made("shell", "VERSION = 100", exit=0, command="cat words/ot*")),
            turn(EDIT, diff=changed("a.py", "VERSION = 100") + "\n" + changed()),
        ],
        [(2, "unread", PATH)],
    ),
    "a new file": (
        [turn(made("write", "wrote it", path="new.py", text="x"), diff=changed("new.py", was_there=False))],
        [],
    ),
    "a file that it wrote": (
        [
            turn(made("write", "wrote it", path="new.py", text="x"), diff=changed("new.py", was_there=False)),
            turn(EDIT, diff=changed("new.py")),
        ],
        [],
    ),
    "read": ([turn(READ), turn(EDIT, diff=changed())], []),
    "read by an absolute path": (
        [turn(READ), turn(made("edit", "", path=f"/work/{PATH}", old="a", new="b"), diff=changed())],
        [],
    ),
    "found by grep": ([turn(made("grep", f"{PATH}:1:def plural", pattern="plural")), turn(EDIT, diff=changed())], []),
    "printed under another name": (
        [turn(made("shell", "    return noun", exit=0, command="cat words/*")), turn(EDIT, diff=changed())],
        [],
    ),
    "an edit that changed nothing": ([turn(EDIT)], []),
    "read twice": ([turn(READ), turn(READ)], [(2, "again", "call read once more")]),
    "read twice at once": ([turn(READ, READ)], [(1, "again", "call read")]),
    "the same tests on the same code": ([turn(RED), turn(LS), turn(RED)], [(3, "again", "call shell")]),
    "the edit was before both": ([turn(READ), turn(EDIT, LS, READ, LS, diff=changed())], []),
    "only reads in between": (
        [turn(READ), turn(EDIT, READ, made("grep", "", pattern="x"), READ, diff=changed())],
        [(2, "again", "call read")],
    ),
    "made, and refused behind the end": (
        [turn(READ), turn(FINISH, made("read", "the episode is over; this call was not made", broken=True, path=PATH))],
        [],
    ),
    "written twice": ([turn(READ), turn(WRITE, diff=changed()), turn(WRITE)], [(3, "again", "call write")]),
    "arguments in another order": (
        [turn(made("grep", "", pattern="a", path="b")), turn(made("grep", "", path="b", pattern="a"))],
        [(2, "again", "call grep")],
    ),
    "the same tests on other code": ([turn(READ), turn(RED), turn(EDIT, diff=changed()), turn(GREEN)], []),
    "the code changes in the same reply": ([turn(READ), turn(RED), turn(EDIT, RED, diff=changed())], []),
    "the command changes the code": ([turn(LS, diff=changed()), turn(LS)], []),
    "read once more behind a summary": ([turn(READ), summary(), turn(READ)], []),
    "another part": ([turn(READ), turn(made("read", "more", path=PATH, start=9))], []),
    "a broken call put right": (
        [turn(made("read", "no JSON", broken=True, written="")), turn(made("read", "a"))],
        [(1, "broken", "no JSON")],
    ),
    "finish behind red tests": ([turn(RED), turn(FINISH)], [(2, "finish", "while tests fail")]),
    "finish behind green tests": ([turn(GREEN), turn(FINISH)], []),
    "red, then green": ([turn(READ), turn(RED), turn(EDIT, diff=changed()), turn(GREEN), turn(FINISH)], []),
    "a change that nobody tested": ([turn(READ), turn(RED), turn(EDIT, diff=changed()), turn(FINISH)], []),
    "no tests at all": ([turn(LS), turn(FINISH)], []),
    "a pipe hides the exit code": (
        [turn(made("shell", "1 failed in 0.1s", exit=0, command="pytest | tail -1")), turn(FINISH)],
        [(2, "finish", "tests fail")],
    ),
    "a word in a file": (
        [turn(made("shell", "say 1 failed\nand go on", exit=0, command="cat pytest.ini")), turn(FINISH)],
        [],
    ),
    "the grader saw a shown test fail": ([turn(FINISH), [grade(NAMES[0])]], [(1, "finish", "while tests fail")]),
    "the grader saw a hidden test fail": ([turn(FINISH), [grade(NAMES[1])]], []),
    "the grader knows better": ([turn(RED), turn(FINISH), [grade(success=True)]], []),
    "a turn that was not finished": ([turn(made("fly", "no tool", broken=True))[:-1]], []),
    "one that was not finished, and the next": ([turn(made("fly", "no tool", broken=True))[:-1], turn(LS)], []),
    "the first rule that is broken": (
        [turn(made("fly", "no tool", broken=True), EDIT, diff=changed())],
        [(1, "broken", "no tool")],
    ),
}


def of(parts) -> list[dict]:
    return [begin(), *itertools.chain(*parts)]


@pytest.mark.parametrize("case", CASES)
def test_rules_and_near_misses(case):
    parts, wanted = CASES[case]
    found = find_faults(of(parts), NAMES[:1])
    assert [(one.turn.number, one.rule) for one in found] == [(number, rule) for number, rule, _ in wanted]
    assert all(says in one.says for one, (*_, says) in zip(found, wanted, strict=True))


def test_what_the_grader_saw_counts_where_the_tests_are_known():
    red = of([turn(RED), turn(FINISH), [grade(NAMES[1])]])
    assert find_faults(red, NAMES[:1]) == [] and [one.rule for one in find_faults(red)] == ["finish"], (
        "else what the agent saw last"
    )


def test_every_rule_has_its_words():
    assert RULES.keys() == SAYS.keys()
    assert {rule for _, wanted in CASES.values() for _, rule, _ in wanted} == {*RULES}


POOL = [
    READ,
    EDIT,
    WRITE,
    RED,
    GREEN,
    FINISH,
    LS,
    made("fly", "there is no tool 'fly'", broken=True),
    made("read", "no", ok=False, path="a"),
]
TURNS = st.lists(
    st.builds(
        lambda calls, text, cut, diff, note: [
            *(summary("so far") if note else []),
            *turn(*calls, text=text, diff=diff, cut=cut),
        ],
        st.lists(st.sampled_from(POOL), max_size=3),
        st.sampled_from(["", "I look.\n"]),
        st.booleans(),
        st.sampled_from(["", changed()]),
        st.integers(0, 9).map(lambda n: n == 0),
    ),
    max_size=8,
)


@given(TURNS)
def test_without_its_hint_the_teacher_reads_what_the_student_reads(parts):
    """And the reply is the one that was made, under the context that the policy saw; SFT's reader takes both."""
    lines = of(parts)
    by_number = {one.number: one for one in turns(lines)}
    for fault in find_faults(lines):
        found = json.loads(json.dumps(row(lines, fault)))
        assert found["teacher"] == [*found["student"], {"role": "user", "content": found["hint"]}]
        assert by_number[found["turn"]] == fault.turn and [one["role"] for one in found["student"]] == [
            one.role for one in fault.turn.before
        ]
        assert [one["function"]["name"] for one in found["message"].get("tool_calls", ())] == [
            one.name for one in fault.turn.reply.calls
        ]
        for side in ("student", "teacher"):
            read = sft.chat_of({"messages": [*found[side], found["message"]], "tools": found["tools"]})
            assert read.messages[-1].content == fault.turn.reply.text and len(read.messages) == len(found[side]) + 1
        with pytest.raises(ValueError, match="messages"):
            sft.chat_of(found)  # nobody learns the faults by SFT


@given(TURNS, st.integers(0, 8))
def test_a_fault_depends_on_what_came_before(parts, much):
    """So what is told at a reply does not change as the episode goes on. A reply has one hint at most, and one that was
    cut off has none."""
    whole, begun = find_faults(of(parts)), find_faults(of(parts[:much]))
    numbers = [one.turn.number for one in whole]
    assert [one for one in whole if one.turn.number <= much] == begun
    assert numbers == sorted({*numbers}) and not any(one.turn.cut for one in whole)


def test_sampled_tokens_come_along():
    lines = of([turn(READ), turn(READ, token_ids=[5, 6])])
    assert row(lines, find_faults(lines)[0])["token_ids"] == [5, 6]
    assert "token_ids" not in row(of([turn(READ, READ)]), find_faults(of([turn(READ, READ)]))[0])


GONE = '''    # city, cities
    """As people write it, without a dictionary."""
    suffix = "ies" if noun.endswith("y") else ""
    limit = 4711
    if not suffix:
        return noun
    return noun[:-1] + suffix'''
GIVEN = (
    'TABLE = {"man": "men"}\n\n\ndef plural(noun):\n    raise NotImplementedError\n\n\ndef other(noun):\n  '
    "  return noun[:-1] + noun\n"
)
HELD = 'assert plural("lady") == "ladies"'
SECRET = Secret((GONE, HELD), (GIVEN,))


@pytest.mark.parametrize(
    ("hint", "tells"),
    [
        ('Write noun.endswith("y") first.', ". endswith ("),
        ("Write  noun\n.endswith ( 'y' ) first.", ". endswith ("),  # in another layout
        ('# noun.endswith("y")', ". endswith ("),  # as a comment
        ("if not suffix:", "if not suffix :"),
        ("Mind the suffix.", "suffix"),
        ("The limit is 4711.", "limit"),
        ("It is 4711.", "4711"),
        ('"ies" is missing.', "ies"),
        ("It fails for lady.", "lady"),
        ("As people write it, without a dictionary.", "As people write it ,"),
        ("The tests fail.", ""),
        ("You have not read the file without which nobody can write it.", ""),  # words of prose alone are anybody's
        ("plural raises NotImplementedError, and TABLE is there.", ""),
        ("See noun[:-1] + noun.", ""),
        ("The suffixes are wrong.", ""),
        ("Mind what cities are.", ""),  # a word of a comment
    ],
)
def test_what_no_hint_may_tell(hint, tells):
    assert tells in SECRET.find_leak(hint) and bool(tells) == bool(SECRET.find_leak(hint))


@given(
    st.sampled_from([line for line in GONE.splitlines()[2:] if "return noun" != line.strip()]),
    st.sampled_from(["", "Do this: ", "x\n"]),
)
def test_a_line_of_the_solution_is_never_told_unless_the_context_says_it(line, before):
    assert SECRET.find_leak(before + line) and not SECRET.find_leak(before + line, context=GONE)


def test_short_lines_and_nothing_secret():
    assert (
        Secret(("    x += y\n",)).find_leak("x += y") == "x + = y"
        and Secret(("    x += y\n",), ("    x += y\n",)).find_leak("x += y") == ""
    )
    assert Secret(()).find_leak("anything at all, such as this") == ""


def test_refused_hints():
    """An error that tells a name of the solution is refused unless the policy has seen the name; so is one that quotes
    what the reply writes. The words of a rule itself are no secret, whatever the solution calls its variables."""
    error = made("lints", "suffix is not defined", ok=False, path="a")
    (found,) = find_faults(of([turn(error)]))
    assert refusal(found, SECRET) == "it tells of the solution: suffix"
    (found,) = find_faults(of([turn(made("shell", "suffix?", exit=0, command="ls")), turn(error)]))
    assert refusal(found, SECRET) == ""
    (found,) = find_faults(of([turn(FINISH), [grade(NAMES[0])]]), NAMES)
    assert refusal(found, Secret(("reply = tests + finish + 1\nwould_run = can(reply)",))) == ""
    (this,) = turns(
        of([turn(made("write", "", path="a", text="total = price * (1 + tax)"), text="I add the tax to it now.")])
    )
    assert refusal(Fault(this, "judge", "You wrote price * (1 + tax)."), SECRET).startswith("it quotes the reply: ")
    assert refusal(Fault(this, "judge", "You add the tax to it, which is wrong."), SECRET).startswith(
        "it quotes the reply: "
    )
    assert refusal(Fault(this, "judge", "The tax is not known."), SECRET) == ""
    (found,) = find_faults(
        of(
            [
                turn(
                    made(
                        "read", "No such file: a/path/that/nobody/made.py", ok=False, path="a/path/that/nobody/made.py"
                    )
                )
            ]
        )
    )
    assert refusal(found, SECRET) == "", "where a call looked is the fault itself"


def test_words_of_a_message_have_their_line_breaks():
    this = turns(
        of(
            [
                turn(
                    made("write", "", path="a", text="one\ntwo"),
                    made("fly", "", broken=True, written="no JSON"),
                    text="Said.",
                )
            ]
        )
    )[0]
    assert words_of(this.reply) == "Said.\nwrite a\none\ntwo\nfly no JSON"
