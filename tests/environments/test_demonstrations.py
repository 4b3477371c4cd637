"""Demonstrations: edits that lead from the given file to the original one, and conversations that SFT learns from."""

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from environments.harness.demonstrations import STYLES, apply, conversation, demonstrate, find_edits
from etude.tasks.demonstrations import read_demonstrations
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
