"""Episodes: turns, budgets, summaries, broken calls, and one that goes on after a kill at any byte of its
transcript."""

import hashlib
import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from environments.harness import record as records
from environments.harness.episode import NUDGE, Budget, Episode, size
from environments.harness.messages import Called, PolicyError, Reply
from environments.harness.record import Record, calls, context
from environments.harness.scripted import Script, call
from environments.harness.workspace import Job, difference
from environments.sandbox.interface import Observation
from environments.sandbox.manifest import Entry
from environments.sandbox.open import open_sandbox
from kit.settings import RunError


class Paper:
    """A sandbox of files in this process: `write` writes, `read` reads, and snapshots are kept in `trees`."""

    trees: dict[str, dict[str, str]] = {}

    def __init__(self, tree):
        self.files = dict(self.trees[tree])

    def call(self, tool, args, timeout=None):
        if tool == "write":
            self.files[args["path"]] = args["text"]
            return Observation("wrote it", True)
        if tool == "read" and args["path"] in self.files:
            return Observation(self.files[args["path"]], True)
        return Observation("", True) if tool == "list" else Observation("there is nothing", False, 3)

    def snapshot(self):
        name = hashlib.sha256(json.dumps(self.files, sort_keys=True).encode()).hexdigest()
        self.trees[name] = dict(self.files)
        return name

    def close(self):
        pass


class Shelf:
    """The store of such trees."""

    def manifest(self, tree):
        return {name: Entry("file", 0o644, len(text), text) for name, text in Paper.trees[tree].items()}

    def content(self, entry):
        return entry.value.encode()


BUDGET = Budget()
EMPTY = hashlib.sha256(b"{}").hexdigest()
Paper.trees[EMPTY] = {}
TREE = Paper(EMPTY).snapshot()


def job(**more):
    return Job(**{"task": "a-task", "prompt": "Write it.", "tree": TREE, "given_files": {}, **more})


def episode(path, replies, budget=BUDGET, said=0, sandbox=Paper, **more):
    """Who plays them, and their transcript."""
    journal = Record(path)
    policy = replies if hasattr(replies, "reply") else Script(replies, reply_count=said)
    return Episode(job(**more), policy, journal, sandbox, Shelf(), budget), journal


def say(text="", *made):
    return Reply(text, made)


FINISH = call("finish", message="done")


def kinds(lines):
    return [line["kind"] for line in lines]


def test_turns_by_hand(tmp_path):
    """Two calls in one reply are answered in order, and the tree behind each turn is named."""
    replies = [say("I write.", call("write", path="a", text="1"), call("read", path="a")), say("", FINISH)]
    played, journal = episode(tmp_path / "t", replies)
    tree = played.play()
    assert Paper.trees[tree] == {"a": "1"}
    assert kinds(journal.lines) == ["begin", "reply", "answer", "answer", "turn", "reply", "answer", "turn", "end"]
    assert [line["text"] for line in journal.lines if line["kind"] == "answer"] == [
        "wrote it",
        "1",
        "the episode is over",
    ]
    assert (
        journal.lines[4]["diff"].splitlines() == ["--- a/a", "+++ b/a", "@@ -0,0 +1 @@", "+1"]
        and "diff" not in journal.lines[7]
    )
    assert journal.lines[-1]["why"] == "finish" and journal.lines[4]["tree"] == journal.lines[7]["tree"] == tree
    shown = context(journal.lines)
    assert [one.role for one in shown] == ["system", "user", "assistant", "tool", "tool", "assistant", "tool"]
    assert shown[1].text == "Write it." and shown[3].answers == shown[2].calls[0].id
    assert [(one.tool, one.args) for one in calls(journal.lines)][0] == ("write", {"path": "a", "text": "1"})
    assert records.read(tmp_path / "t") == journal.lines
    assert played.play() == tree and kinds(journal.lines).count("end") == 1, "what is over is not played again"


def test_broken_calls_are_answers_and_no_errors(tmp_path):
    broken = [
        Called("1", "fly", "{}"),
        Called("2", "write", '{"path": "a"'),
        Called("3", "write", '{"path": "a"}'),
        Called("4", "read", '{"path": "nowhere"}'),
    ]
    played, journal = episode(tmp_path / "t", [say("", *broken), say("", FINISH, call("write", path="b", text="late"))])
    tree = played.play()
    answers = [line for line in journal.lines if line["kind"] == "answer"]
    assert [line.get("broken", False) for line in answers] == [True, True, True, False, False, True] and not any(
        line["ok"] for line in answers[:4]
    )
    assert "there is no tool 'fly'; there are read, write" in answers[0]["text"] and "no JSON" in answers[1]["text"]
    assert (
        answers[2]["text"] == "write needs text, text"
        and answers[3]["text"] == "there is nothing\n[exit code 3]"
        and answers[3]["exit"] == 3
    )
    assert "this call was not made" in answers[5]["text"] and Paper.trees[tree] == {}
    assert [one.tool for one in calls(journal.lines)] == ["read", "finish"], "what was no call is none of the monitor's"


def test_strict_and_lenient(tmp_path):
    for strict in (False, True):
        _, journal = made = episode(
            tmp_path / str(strict),
            [say("", Called("1", "read", '{"path": "a", "lines": "2"}')), say("", FINISH)],
            strict=strict,
        )
        made[0].play()
        assert journal.lines[2].get("broken", False) == strict
        assert [one["function"].get("strict", False) for one in journal.lines[0]["schemas"]] == [strict] * len(
            journal.lines[0]["tools"]
        )


def test_who_calls_nothing_is_asked_once(tmp_path):
    played, journal = episode(tmp_path / "t", [say("Hm."), say("", call("list")), say("Hm."), say("Well.")])
    played.play()
    assert kinds(journal.lines)[1:4] == ["reply", "nudge", "turn"] and journal.lines[-1]["why"] == "nothing was called"
    assert [one.text for one in context(journal.lines) if one.role == "user"][1:] == [NUDGE] * 3


def endless(text="", **more):
    return Script([Reply(text, (call("list"),), **more)] * 100)


@pytest.mark.parametrize(
    ("budget", "policy", "why", "replies"),
    [
        (Budget(turns=3), endless(), "3 turns", 3),
        (Budget(tokens=10), endless(tokens=4), "10 tokens", 3),
        (Budget(tokens=10), endless("x" * 14), "10 tokens", 3),
        (Budget(seconds=1e-9), endless(), "1e-09 seconds", 0),
    ],
)
def test_budgets(tmp_path, budget, policy, why, replies):
    """Where a policy does not tell its tokens, four characters count as one: 14 of text and 2 of arguments are 4."""
    played, journal = episode(tmp_path / "t", policy, budget)
    played.play()
    assert journal.lines[-1]["why"] == why and kinds(journal.lines).count("reply") == replies


def test_the_calls_of_a_reply_are_bounded(tmp_path):
    """In number, and by the time of the episode; no call may take longer than what is left of it."""
    played, journal = episode(tmp_path / "t", [say("", *[call("list")] * 40), say("", FINISH)])
    played.play()
    assert sum(line.get("broken", False) for line in journal.lines if line["kind"] == "answer") == 8
    waited = []

    class Slow(Paper):
        def call(self, tool, args, timeout=None):
            waited.append(timeout)
            time.sleep(0.2)
            return super().call(tool, args, timeout)

    played, journal = episode(tmp_path / "u", [say("", *[call("list")] * 5)], Budget(seconds=0.5), sandbox=Slow)
    played.play()
    assert journal.lines[-1]["why"] == "0.5 seconds" and len(waited) == 3 and max(waited) <= 0.5


def test_a_reply_has_the_room_that_is_left(tmp_path):
    """In the context, and in the tokens of the episode; a summary, too."""
    asked = []

    class Asked(Script):
        def reply(self, messages, tools, most):
            asked.append((bool(tools), most))
            return super().reply(messages, tools, most)

    replies = [Reply("", (call("list"),), 700, 10), Reply("", (call("list"),), 800, 10), Reply("", (FINISH,), 90, 10)]
    played, _ = episode(
        tmp_path / "t", Asked(replies), Budget(context=1000, reply=500, tokens=400), tools=("list", "finish")
    )
    played.play()
    assert (
        [tools for tools, _ in asked] == [True, True, False, True]
        and asked[0][1] == 400
        and asked[1][1] in range(280, 291)
    )
    assert asked[2][1] == 250 and asked[3][1] < 400


def test_a_context_that_is_too_full_for_a_summary_loses_the_oldest_answers(tmp_path):
    asked = []

    class Strict(Script):
        """As a server that refuses what is longer than its context."""

        def reply(self, messages, tools, most):
            asked.append(list(messages))
            if size(messages) + most > 1000:
                raise PolicyError("too long")
            return super().reply(messages, tools, most)

    class Loud(Paper):
        def call(self, tool, args, timeout=None):
            return Observation("x" * 2000, True)

    replies = [say("", *[call("list")] * 6), say("", FINISH)]
    played, journal = episode(
        tmp_path / "t", Strict(replies), Budget(context=1000, reply=100), sandbox=Loud, tools=("list", "finish")
    )
    played.play()
    assert journal.lines[-1]["why"] == "finish" and kinds(journal.lines).count("summary") == 1
    answers = [one.text for one in asked[1] if one.role == "tool"]
    assert "[left out" in answers[0] and "x" in answers[-1] and asked[1][1].text == "Write it."


def test_no_answer_is_longer_than_a_model_can_read(tmp_path):
    class Loud(Paper):
        def call(self, tool, args, timeout=None):
            return Observation("x" * 10**6, True)

    pages = {"a": "word " * 10**6}
    replies = [say("", call("list"), call("web_search", query="word")), say("", FINISH)]
    played, journal = episode(tmp_path / "t", replies, Budget(context=10**6), sandbox=Loud, pages=pages)
    played.play()
    assert all(len(line["text"]) < 17_000 for line in journal.lines if line["kind"] == "answer")


def test_what_changed_is_compared_in_bounded_time(tmp_path):
    """Many lines, and many files: a line that says so, and no minutes."""
    lines = "\n".join(str(n * n % 151) for n in range(40_000))
    old = {"a": lines, **{f"f{n}": "" for n in range(300)}}
    new = {"a": lines.replace("7", "8"), **{f"f{n}": "y\n" * 1000 for n in range(300)}}
    names = []
    for files in (old, new):
        paper = Paper(EMPTY)
        paper.files = files
        names.append(paper.snapshot())
    since = time.perf_counter()
    said = difference(Shelf(), *names)
    assert "a: too many lines to compare" in said and len(said) < 17_000 and time.perf_counter() - since < 20


def test_a_full_context_is_summarised(tmp_path):
    """Told sizes count where there are any; the summary takes the place of all but what was asked; the next context is
    small again."""
    asked = []

    class Wordy(Script):
        def reply(self, messages, tools, most):
            asked.append((list(messages), [tool.name for tool in tools]))
            return super().reply(messages, tools, most)

    replies = [Reply("a", (call("list"),), 100, 5), Reply("b", (call("list"),), 900, 5), Reply("c", (FINISH,), 120, 5)]
    played, journal = episode(tmp_path / "t", Wordy(replies, "I have looked twice."), Budget(context=1000))
    played.play()
    assert kinds(journal.lines) == [
        "begin",
        "reply",
        "answer",
        "turn",
        "reply",
        "answer",
        "turn",
        "summary",
        "reply",
        "answer",
        "turn",
        "end",
    ]
    assert asked[2][1] == [] and "Write a summary" in asked[2][0][-1].text and len(asked[2][0]) == 7
    assert [one.role for one in asked[3][0]] == ["system", "user", "user"] and "I have looked twice." in asked[3][0][
        2
    ].text
    assert asked[3][0][1].text == "Write it." and journal.lines[7]["text"] == "I have looked twice."


def test_a_context_of_one_turn_is_not_summarised_for_ever(tmp_path):
    """What was asked fills the context alone: a summary would free nothing."""
    played, journal = episode(tmp_path / "t", [say("", FINISH)], Budget(context=10), prompt="x" * 1000)
    played.play()
    assert "summary" not in kinds(journal.lines)


def test_a_policy_that_gives_no_answer_stops_the_episode_and_it_goes_on_later(tmp_path):
    replies = [say("", call("write", path="a", text="1")), say("", call("write", path="b", text="2")), say("", FINISH)]
    played, journal = episode(tmp_path / "t", replies[:1])
    with pytest.raises(PolicyError):
        played.play()
    assert kinds(journal.lines)[-1] == "stop"
    journal.close()
    played, journal = episode(tmp_path / "t", replies, said=1)
    assert kinds(journal.lines)[-1] == "turn" and Paper.trees[played.play()] == {"a": "1", "b": "2"}


def facts(lines):
    """A transcript without its times."""
    return [{name: value for name, value in line.items() if name not in ("seconds", "spent")} for line in lines]


class Brittle(Paper):
    """Cannot be stored while it has a file called pipe, as a FIFO."""

    def snapshot(self):
        if "pipe" in self.files:
            raise RunError("pipe is a FIFO")
        return super().snapshot()


REPLIES = [
    say("a tree that cannot be stored", call("write", path="gone", text="1"), call("write", path="pipe", text="")),
    say("first", call("write", path="a", text="1")),
    say("hm"),
    Reply("second", (call("write", path="b", text="2"), call("read", path="a")), 5000, 7, (1, 2), (-0.5, -0.25)),
    say("third", call("write", path="c", text="3")),
    say("", FINISH),
]


@settings(max_examples=60)
@given(cut=st.floats(0, 1))
def test_a_kill_at_any_byte_changes_nothing(tmp_path_factory, cut):
    folder = tmp_path_factory.mktemp("killed")
    played, journal = episode(folder / "whole", REPLIES, Budget(context=6000), sandbox=Brittle)
    tree = played.play()
    journal.close()
    data = (folder / "whole").read_bytes()
    first = data.index(b"\n") + 1
    (folder / "cut").write_bytes(data[: first + round(cut * (len(data) - first))])
    with Record(folder / "cut") as kept:
        said = sum(line["kind"] == "reply" for line in kept.lines)
    again, other = episode(folder / "cut", REPLIES, said=said, sandbox=Brittle)
    assert "gone" not in Paper.trees[tree]
    assert again.play() == tree and facts(other.lines) == facts(journal.lines)
    assert facts(records.read(folder / "cut")) == facts(journal.lines)


def test_a_budget_is_that_of_all_parts_of_an_episode_together(tmp_path):
    """By hand: 1,000 of 1,800 seconds, 40 tokens of a reply and 50 of a summary are spent; the rest is left, and what
    all have spent is told."""
    played, journal = episode(tmp_path / "t", [], Budget(seconds=1800.0, tokens=100, turns=9))
    journal.add("reply", text="", calls=[], tokens=40, seconds=1.0)
    journal.add("nudge", text=NUDGE)
    journal.add("turn", tree=TREE, spent=500.0)
    journal.add("summary", text="so far", tokens=50, prompt_tokens=None, tree=TREE, spent=1000.0, seconds=1.0)
    journal.close()
    asked = []

    class Wordy(Script):
        def reply(self, messages, tools, most):
            asked.append(most)
            return super().reply(messages, tools, most)

    again, other = episode(
        tmp_path / "t", Wordy([Reply("", (call("list"),), 10, 10)] * 5), Budget(seconds=9e9, tokens=10**9)
    )
    assert (again.turns, again.tokens) == (1, 90)  # and it is the first one's budget that counts
    again.play()
    assert other.lines[-1]["why"] == "100 tokens" and len(asked) == 1 and 1000 <= other.lines[-1]["seconds"] < 1100
    assert 1000 <= other.lines[-2]["spent"] < 1100
    other.close()
    late, journal = episode(tmp_path / "late", [], Budget(seconds=1000.0))
    journal.add("turn", tree=TREE, spent=1000.0)
    journal.close()
    late, journal = episode(tmp_path / "late", endless())
    late.play()
    assert journal.lines[-1]["why"] == "1000 seconds" and kinds(journal.lines) == ["begin", "turn", "end"]


def test_another_tasks_transcript_is_refused(tmp_path):
    played, journal = episode(tmp_path / "t", [say("", FINISH)])
    played.play()
    journal.close()
    with pytest.raises(RunError, match="was begun by nobody, not by another"):
        episode(tmp_path / "t", [], policy_name="another")
    for more in ({"task": "other"}, {"prompt": "Other."}, {"strict": True}, {"tools": ("read", "finish")}):
        with pytest.raises(
            RunError, match="is a transcript of a-task, or was begun with another prompt or other tools"
        ):
            episode(tmp_path / "t", [], **more)


@pytest.mark.parametrize(
    "text",
    [b"", b"some text\n", b'{"kind": "reply"}\n', b'{"kind": "begin"}\n', b"\xff\n", b'{"kind": "begin", "task": 3}\n'],
)
def test_what_is_no_transcript_is_refused_and_left(tmp_path, text):
    (tmp_path / "t").write_bytes(text)
    with pytest.raises(RunError, match="is no transcript|is none of a transcript"):
        records.read(tmp_path / "t")
    if text and b"begin" not in text:
        with pytest.raises(RunError, match="is no transcript|is none of a transcript"):
            Record(tmp_path / "t")
    assert (tmp_path / "t").read_bytes() == text


@pytest.mark.parametrize("wrong", [{"turns": 0}, {"seconds": -1.0}, {"context": 0}])
def test_budgets_are_positive(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be positive"):
        Budget(**wrong)


# In a sandbox.

GIVEN = {
    "a.py": b"def f(x):\n    return x\n",
    "notes.md": b"# Reading dates\n\nDates are read by parseDate.\n",
    "data.bin": b"\0\xff",
}


def test_in_a_sandbox(tmp_path, start, shared_store):
    """Tools of the harness beside those of the sandbox; a tree that cannot be stored is the agent's to mend; a sandbox
    that dies ends the episode."""
    tree = start({name: data.decode("latin-1") for name, data in GIVEN.items()}).snapshot()
    bad = "import os\n\n\ndef f(x):\n    return x == None\n"
    todo = call("todo", items=[{"text": "look", "state": "done"}, {"text": "write", "state": "open"}])
    replies = [
        say("", todo, call("semantic_search", query="parse date")),
        say(
            "",
            call("write", path="a.py", text=bad),
            *(call("lints", path=path) for path in ("./a.py", "b.py", "notes.md")),
        ),
        say("", call("shell", command="mkfifo pipe"), call("web_search", query="dates"), call("lints", path="a.py")),
        say(
            "",
            call("shell", command="rm pipe; echo 1 > new; mkdir -p d/__pycache__ && echo 2 > d/__pycache__/x"),
            call("web_search", query="nothing of this"),
        ),
        say("", call("shell", command="exit 3")),
        say("", FINISH),
    ]
    journal = Record(tmp_path / "t")

    def fork(name):
        return open_sandbox(name, store=shared_store)

    played = Episode(
        job(tree=tree, given_files=GIVEN, pages={"dates.md": "how dates are written"}),
        Script(replies),
        journal,
        fork,
        shared_store,
    )
    left = shared_store.tree(played.play())
    said = [line["text"] for line in journal.lines if line["kind"] == "answer"]
    assert said[0] == "2 items, 1 done" and said[1].startswith("notes.md:1\n# Reading dates")
    assert "a.py:1: os is imported and not used" in said[3] and "a.py:5: a comparison with None by ==" in said[3]
    assert "is no file of Python" in said[4] and "is no file of Python" in said[5]
    assert (
        said[7].startswith("dates.md:1\nhow dates")
        and "FIFO" in said[8]
        and said[10] == "nothing is found"
        and said[11] == "[exit code 3]"
    )
    nudges = [line["text"] for line in journal.lines if line["kind"] == "nudge"]
    assert len(nudges) == 1 and "cannot be stored, and is again as it was before" in nudges[0]
    trees = [line["tree"] for line in journal.lines if line["kind"] == "turn"]
    changes = [line.get("diff", "") for line in journal.lines if line["kind"] == "turn"]
    assert (
        "+import os" in changes[1].splitlines()
        and "-    return x" in changes[1].splitlines()
        and changes[3].splitlines() == ["--- a/new", "+++ b/new", "@@ -0,0 +1 @@", "+1"]
        and not any(changes[4:])
    )
    assert trees[0] == tree and trees[1] == trees[2] != trees[3] == trees[4] == trees[5]
    assert (left / "a.py").read_text() == bad and (left / "new").read_text() == "1\n" and not (left / "pipe").exists()


def test_a_sandbox_that_dies_ends_the_episode(tmp_path, start, shared_store):
    tree, opened = start({"a": "1"}).snapshot(), []

    def fork(name):
        opened.append(open_sandbox(name, store=shared_store))
        return opened[-1]

    class Kills(Script):
        def reply(self, messages, tools, most):
            if self.reply_count == 1:
                opened[0].close()
            return super().reply(messages, tools, most)

    journal = Record(tmp_path / "t")
    played = Episode(
        job(tree=tree), Kills([say("", call("write", path="b", text="2"))] * 9), journal, fork, shared_store
    )
    left = played.play()
    assert (
        journal.lines[-1]["why"] == "the sandbox ended: the sandbox is closed"
        and kinds(journal.lines).count("reply") == 2
    )
    assert (shared_store.tree(left) / "b").read_text() == "2"
