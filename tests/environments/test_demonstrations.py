"""Demonstrations: edits that lead from the given file to the original one, and conversations that SFT learns from."""

import json
import re
import time
from collections import Counter
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from environments.harness import demonstration_file
from environments.harness.demonstration_file import check_styles, read_demonstrations, record_demonstrations
from environments.harness.demonstrations import STYLES, apply, conversation, demonstrate, find_edits
from environments.tasks.load import list_recipes, load_tasks, read_recipe
from kit.disk import read_lines
from kit.settings import RunError
from ref import sft
from tests.chats import QWEN25, bytes_tokenizer, template

LINES = st.lists(st.sampled_from(["a\n", "b\n", "c\n", "\n", "    d\n"]), max_size=12).map("".join)


ROW = json.dumps({"task": "t", "style": "direct", "prompt": "terse", "messages": []})


def test_a_file_is_continued_behind_its_last_whole_line(tmp_path):
    path = tmp_path / "a.jsonl"
    assert read_demonstrations(path, "terse") == (set(), 0)
    path.write_text(f'{ROW}\n{{"task": "a kill has cut th')
    assert read_demonstrations(path, "terse") == ({("t", "direct")}, len(ROW) + 1)


@pytest.mark.parametrize(
    "content, says",
    [
        ("line one\nkeep me", "is no file of demonstrations"),
        ("keep me", "is no file of demonstrations"),
        ("[1, 2]\n", "is no file of demonstrations"),
        (f"\n{ROW}\n", "is no file of demonstrations"),
        (ROW.replace('"direct"', '["direct"]') + "\n", "is no file of demonstrations"),
        (f"{ROW}\n", "has demonstrations with --prompt terse"),
    ],
)
def test_another_file_is_left_alone(tmp_path, content, says):
    path = tmp_path / "a.jsonl"
    path.write_text(content)
    with pytest.raises(RunError, match=says):
        read_demonstrations(path, "specified")
    assert path.read_text() == content


@given(LINES, LINES)
def test_edits_lead_to_the_original(start_text, gold):
    """Each finds its place once, however often the same lines occur."""
    if start_text and start_text != gold:
        assert apply(start_text, find_edits("a.py", start_text, gold)) == gold


@pytest.mark.parametrize(
    "start_text, gold, old, new",
    [
        ("a\nb\n", "a\nc\n", "b", "c"),
        ("a\nb", "a\nc", "b", "c"),
        ("a\nb\n", "a\n", "b\n", ""),  # nothing would be left of the new text that could end otherwise
        ("b\nbb\n", "c\nbb\n", "b\nbb", "c\nbb"),  # b alone occurs three times
        ("bb\nb\n", "bb\nc\n", "bb\nb", "bb\nc"),
        ("ab\nb\nb\n", "ab\nb\nb\nc\n", "ab\nb\nb", "ab\nb\nb\nc"),
        ("a\r\nb\r\n", "a\r\nc\r\n", "b", "c"),
        ("a\nb\r\n", "a\nc\n", "b\r\n", "c\n"),
        ("\n\n", "\n\n\n", "\n\n", "\n\n\n"),
    ],
)
def test_an_edit_needs_no_line_break_at_its_end(start_text, gold, old, new):
    """It is left out where the place is found without it."""
    (edit,) = find_edits("a.py", start_text, gold)
    assert (edit.old, edit.new) == (old, new) and apply(start_text, [edit]) == gold


HOLE = "def above(xs):\n    raise NotImplementedError\n\n\ndef below(xs):\n    return [x for x in xs if x < 3]\n"
GOLD = HOLE.replace("    raise NotImplementedError\n", "    return [x for x in xs if x > 3]\n")
TESTS = b"def test_above():\n    assert above([4])\n"
TASK = (
    "t",
    {"m.py": HOLE.encode(), "test_m.py": TESTS},
    {"m.py": GOLD.encode(), "test_m.py": TESTS},
    ("test_m.py::test_above",),
)


def test_a_mistake_is_made_in_the_new_lines_and_mended():
    name, *files = TASK
    script = demonstrate(name, "repair", *files)
    wrong, right = script.replies[1:3]
    assert script.mistaken_reply == 1 and "must" in right.text or "belong" in right.text
    edits = [json.loads(reply.calls[0].arguments) for reply in (wrong, right)]
    text = HOLE
    for edit in edits:
        assert text.count(edit["old"]) == 1
        text = text.replace(edit["old"], edit["new"])
    assert text == GOLD and edits[0]["new"] != edits[1]["new"] and "x < 3" not in edits[0]["new"]
    assert demonstrate(name, "repair", *files) == script
    blank = {**files[1], "m.py": GOLD.replace("return [x for x in xs if x > 3]", "return xs").encode()}
    assert demonstrate(name, "repair", files[0], blank, files[2]) is None, "nothing there can be mistaken"
    for style in STYLES:
        assert demonstrate(name, style, *files[:2], ("test_m.py::test_hidden",)) is None, "no test fails before"


def test_tests_are_run_by_their_names_or_by_their_files():
    """By name where they are few, unless files are asked for."""
    name, given_files, gold, visible = TASK
    for runs_files, words in ((False, "-q test_m.py::test_above"), (True, "-q --tb=line test_m.py")):
        for style, count in (("direct", 1), ("tests-first", 2), ("repair", 2)):
            script = demonstrate(name, style, given_files, gold, visible, runs_files=runs_files)
            calls = [json.loads(call.arguments) for reply in script.replies for call in reply.calls]
            commands = [args["command"] for args in calls if "command" in args]
            assert commands == [f"python3 -m pytest {words}"] * count
    assert demonstrate(name, "direct", given_files, gold, ("test_m.py::test_hidden",), runs_files=True) is None


def answer(tool, ok=True):
    return {"kind": "answer", "id": "c", "tool": tool, "text": "", "ok": ok}


@pytest.mark.parametrize(
    "style, outcomes, counts",
    [
        ("direct", [("read", True), ("edit", True), ("shell", True), ("finish", True)], True),
        ("direct", [("read", True), ("edit", False), ("shell", True), ("finish", True)], False),
        ("direct", [("read", True), ("edit", True), ("shell", False), ("finish", True)], False),
        ("direct", [("read", True), ("edit", True), ("shell", True)], False),
        ("tests-first", [("shell", False), ("read", True), ("edit", True), ("shell", True), ("finish", True)], True),
        ("tests-first", [("shell", True), ("read", True), ("edit", True), ("shell", True), ("finish", True)], False),
        ("repair", [("edit", True), ("shell", False), ("edit", True), ("shell", True), ("finish", True)], True),
        ("repair", [("edit", True), ("shell", True), ("edit", True), ("shell", True), ("finish", True)], False),
    ],
)
def test_what_counts(style, outcomes, counts):
    name, *files = TASK
    lines = [{"kind": "begin", "system": "s", "prompt": "p", "schemas": []}, *(answer(*one) for one in outcomes)]
    assert (conversation(lines, demonstrate(name, style, *files)) is not None) == counts


@pytest.fixture
def play(monkeypatch):
    """Conversations of no words, in place of episodes in sandboxes: the first ones take longest. Task 1 has none that
    begins with its tests."""

    def play_demonstration(prompt, kind, planned, **how):
        time.sleep(0.02 if planned.task.id == "0" else 0.0)
        return None if (planned.task.id, planned.style) == ("1", "tests-first") else {"messages": [], "tools": []}

    exam = SimpleNamespace(given_tree={}, gold_tree={})
    monkeypatch.setattr(demonstration_file, "exam_of", lambda task, package: exam)
    monkeypatch.setattr(demonstration_file, "play_demonstration", play_demonstration)


def written(path):
    return "".join(row["task"] + row["style"][0] for row in read_lines(path))


def test_a_limit_leaves_many_tasks_and_every_style(play, tmp_path):
    """Task i has style i mod n, then the next ones. What has none leaves its place; a file is continued as if nothing
    had come between; packages are taken when their turn comes."""
    loaded, heard = [], []

    def packages():
        for number, names in enumerate(("012", "23")):  # task 2 is in both
            loaded.append(number)
            yield SimpleNamespace(origin="folder"), {name: SimpleNamespace(id=name, visible=()) for name in names}

    def record(name, limit=None, styles=STYLES):
        return record_demonstrations(
            tmp_path / name, packages(), styles, "terse", 3, "bubblewrap", limit=limit, progress=heard.append
        )

    assert record("new/a.jsonl", 1).total == 1 and written(tmp_path / "new/a.jsonl") == "0d" and loaded == [0]
    counts = record("new/a.jsonl", 6)
    assert written(tmp_path / "new/a.jsonl") == "0d2r3d0t1r2d" and (counts.missing, counts.before) == (1, 1)
    assert counts.by_style == {"direct": 3, "tests-first": 1, "repair": 2} and counts.total == 6
    assert record("new/a.jsonl", 6) == (counts.by_style, 0, 6) == record("new/a.jsonl", 2), "nothing is left to do"
    heard.clear()
    counts = record("new/a.jsonl", 100)
    assert written(tmp_path / "new/a.jsonl") == "0d2r3d0t1r2d3t0r1d2t3r" and counts.missing == 1 and sum(heard) == 12
    assert record("b.jsonl", 100).total == 11
    assert (tmp_path / "b.jsonl").read_bytes() == (tmp_path / "new/a.jsonl").read_bytes()
    heard.clear()
    counts = record("c.jsonl")
    assert written(tmp_path / "c.jsonl") == "0d0t0r1d1r2d2t2r3d3t3r" and counts.missing == 1 and sum(heard) == 15
    assert record("d.jsonl", styles=("repair", "direct", "repair")).by_style == {"direct": 4, "repair": 4}
    assert written(tmp_path / "d.jsonl") == "0d0r1d1r2d2r3d3r"
    with pytest.raises(RunError, match="there is no style 'slow'"):
        check_styles(["direct", "slow"])


def test_sft_learns_all_but_the_mistakes(tmp_path, ask):
    """From a made-up package to tokens that are learned. What is there already is not played again."""
    tasks, out = tmp_path / "tasks", tmp_path / "said.jsonl"
    code, _, error = ask("tasks", "make", "generated:1", "--out", tasks)
    assert code == 0, error
    code, said, error = ask("tasks", "demonstrate", tasks, "--out", out, "--styles", "repair")
    assert code == 0, error
    first = read_lines(out)
    assert first and {row["style"] for row in first} == {"repair"}
    with open(out, "a") as file:
        file.write('{"task": "a kill has cut th')
    code, said, error = ask("tasks", "demonstrate", tasks, "--out", out)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    count = Counter(row["style"] for row in rows)
    assert code == 0 and rows[: len(first)] == first and f"{len(rows)} conversations" in said, error
    assert count["direct"] == count["tests-first"] > count["repair"] == len(first) and set(count) == set(STYLES)
    assert len({(row["task"], row["style"]) for row in rows}) == len(rows)
    chats, refused = sft.read_conversations(out)
    assert not refused and len(chats) == len(rows)
    tokenizer = bytes_tokenizer()
    for (_, chat), row in zip(chats, rows, strict=True):
        ((ids, mask),) = sft.tokens_and_mask(chat, template(QWEN25), tokenizer)
        learned = tokenizer.decode(ids[mask].tolist())
        edits = [
            (message.get("weight", 1), json.loads(call["function"]["arguments"])["new"])
            for message in row["messages"]
            for call in message.get("tool_calls", ())
            if call["function"]["name"] == "edit"
        ]
        for weight, new in edits:
            assert (f'"new": {json.dumps(new)}' in learned) == weight
        assert (0 in [weight for weight, _ in edits]) == (row["style"] == "repair")
    (path,) = list_recipes([tasks])
    few = tmp_path / "few.jsonl"
    record_demonstrations(
        few,
        [load_tasks(path, read_recipe(path), 1, 60.0, "bubblewrap")],
        STYLES,
        "terse",
        1,
        "bubblewrap",
        tools=("read", "edit", "shell", "finish"),
        system="Mend it.",
        hides_times=True,
        limit=9,
    )
    rows = read_lines(few)
    assert len(rows) == 9 and {row["style"] for row in rows} == set(STYLES)
    for row in rows:
        messages, calls = row["messages"], [call for one in row["messages"] for call in one.get("tool_calls", ())]
        assert messages[0]["content"] == "Mend it."
        assert [tool["function"]["name"] for tool in row["tools"]] == ["read", "edit", "shell", "finish"]
        commands = [json.loads(call["function"]["arguments"]).get("command", "-") for call in calls]
        assert all(re.fullmatch(r"-|python3 -m pytest -q --tb=line test_\w+\.py", command) for command in commands)
        assert "in 0.00s" in str(messages)
        assert not re.search(r"in \d+\.\d+s", str(messages).replace("in 0.00s", ""))


@pytest.mark.parametrize(
    "words, says",
    [
        (("--styles", "direct,slow"), "there is no style 'slow'; there are direct, tests-first, repair"),
        (("--out", "a.txt"), "a.txt must be a file of JSON lines, NAME.jsonl"),
        (("--out", "{other}"), "is no file of demonstrations; choose another one with --out"),
    ],
)
def test_bad_words_are_one_line(tmp_path, ask, words, says):
    (tmp_path / "tasks").mkdir()
    other = tmp_path / "other.jsonl"
    other.write_text('{"a": 1}\n')
    words = [word.format(other=other) for word in words]
    code, _, error = ask("tasks", "demonstrate", "examples/tasks", *words)
    assert code == 2 and says in error and error.count("\n") == 1 and other.read_text() == '{"a": 1}\n'
