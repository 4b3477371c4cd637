"""`etude tasks hints`: an episode that was played in a sandbox, hinted from end to end; a judge that leaks; and how far
hints move a checkpoint."""

import json
from dataclasses import replace

import pytest
import torch

from environments.harness.episode import Budget
from environments.harness.hint_audit import make_secret
from environments.harness.turns import turns
from environments.sandbox.cache import cache_folder
from environments.tasks.check import exam_of
from environments.tasks.make import Task, task_id
from environments.tasks.sources import package_of
from environments.tasks.task_cache import save_task
from etude.play.example_agent import FOLDER
from etude.play.play import agent_in
from etude.tasks.episodes import try_task
from etude.tasks.hint_loss import moves, sequences
from recipe.small.chat_template import template_of
from ref.feature_deletion import bodies, difficulty
from tests.environments.homes import home_of
from tests.environments.served import answer, serving
from tests.environments.test_runner import NOUNS
from tests.environments.transcripts import PATH

TESTS = """from words.nouns import plural


def test_men():
    assert plural("man") == "men"


def test_cities():
    assert plural("city") == "cities"


def test_boxes():
    assert plural("box") == "boxes"


def test_unlike():
    assert plural("zebra") == "zebras"
"""
"""The last one is held out."""


@pytest.fixture(scope="module")
def home(root):
    """A folder with a package, the recipe of one task of it, and caches; the root file system is that of all tests.
    Nothing is run to make it."""
    with home_of(root, {PATH: NOUNS, "tests/test_nouns.py": TESTS}) as folder:
        yield folder


@pytest.fixture(scope="module")
def task(home):
    """The file of recipes, the task, and its package."""
    package = package_of(str(home / "words"), cache_folder() / "sdists")
    source = {name: data for name, data in package.files.items() if name.endswith(".py")}
    (piece,) = bodies(source)
    names = tuple(f"tests/test_nouns.py::{name}" for name in ("test_boxes", "test_cities", "test_men"))
    held = ("tests/test_nouns.py::test_unlike",)
    piece = replace(piece, tests=(*names, *held))
    asked = f"In {PATH}: write `plural` again."
    about = task_id(package, piece), package.name, package.version, package.licence, package.origin, piece, asked, asked
    one = Task(*about, names, held, (), difficulty(source, piece, 4))
    save_task(cache_folder() / "tasks", one, package)
    path = home / "words-1.0.json"
    rest = {"left out": [], "slow": [], "flaky": [], "ungradable": []}
    recipe = {"package": {"spec": str(home / "words"), "digest": package.digest, **rest}, "tasks": [{"id": one.id}]}
    path.write_text(json.dumps(recipe))
    return path, one, package


EPISODE = [
    answer("I look.", ("read", {"path": "words/noun.py"}), ("fly", {})),
    answer("", ("edit", {"path": PATH, "old": "raise NotImplementedError", "new": "return word"})),
    answer("", ("shell", {"command": "python3 -m pytest -q tests"})),
    answer("", ("shell", {"command": "frobnicate it"})),
    answer("", ("finish", {"message": "All tests pass."})),
]


@pytest.fixture(scope="module")
def played(home, task):
    """The transcripts of an agent that makes mistakes, and of the original."""
    path, one, _ = task
    rest = "specified", home / "out", False, Budget(), {}, False, "auto", None, 1, 60.0, "bubblewrap", False
    with serving(lambda number, body: EPISODE[number]) as (address, _):
        try_task(one.id, address, "small", [path], *rest)
    try_task(one.id, "oracle", "", [path], "specified", home / "oracle", *rest[2:])
    return home / "out" / f"{one.id}.jsonl", home / "oracle" / f"{one.id}.jsonl"


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_an_episode_from_a_sandbox_is_hinted(task, played, ask, tmp_path):
    """Every fault that was planted is named, and none of the original's replies."""
    (faulty, clean), recipe = played, task[0]
    code, said, wrong = ask(
        "tasks", "hints", clean, faulty, "--recipes", recipe, "--out", tmp_path / "new" / "hints.jsonl"
    )
    assert (code, wrong) == (0, "")
    assert said.splitlines() == [
        f"{clean}: 0 hints",
        f"{faulty}: 4 hints",
        "  reply 1, broken: One of the calls in your next reply would be refused: there is no tool "
        "'fly'; there are read, write, edit, delete, list, "
        "glob, grep, shell, lints, todo, semantic_search, finish",
        f"  reply 2, unread: Your next reply would change {PATH} without having looked at it.",
        "  reply 4, failed: One of the calls in your next reply would fail: /bin/bash: line 1: "
        "frobnicate: command not found",
        "  reply 5, finish: Your next reply would finish while tests fail that you can run.",
        f"{tmp_path}/new/hints.jsonl: 4 hints",
    ]
    found = lines(tmp_path / "new" / "hints.jsonl")
    assert [(row["turn"], row["rule"]) for row in found] == [(1, "broken"), (2, "unread"), (4, "failed"), (5, "finish")]
    assert all(row["teacher"][:-1] == row["student"] and row["task"] == task[1].id for row in found)
    assert (
        found[1]["message"]["tool_calls"][0]["function"]["name"] == "edit"
        and found[0]["tools"][0]["function"]["name"] == "read"
    )
    code, _, wrong = ask("tasks", "hints", faulty, "--recipes", recipe, "--out", tmp_path / "new" / "hints.jsonl")
    assert code == 2 and "already exists; choose another file with --out" in wrong


def test_what_is_secret_of_a_task(task, played):
    """The code that is gone and the test that is held out; not what lies in the agent's tree."""
    _, one, package = task
    secret = make_secret(one, package, exam_of(one, package))
    assert {"stem", "ies", "zebra", "test_unlike"} <= secret.names and not {
        "word",
        "TABLE",
        "city",
        "test_men",
    } & secret.names
    last = turns(lines(played[0]))[-1]
    assert secret.find_leak("Do not use stem.", "\n".join(one.text for one in last.before)) == "stem"


def test_a_judge_that_leaks_is_refused_and_counted(task, played, ask, tmp_path):
    (faulty, clean), recipe = played, task[0]
    how = (
        "tasks",
        "hints",
        faulty,
        clean,
        "--recipes",
        recipe,
        "--source",
        "judge",
        "--name",
        "big",
        "--out",
        tmp_path / "h",
    )
    told = [{"turn": 5, "hint": 'Return stem + "ies" for cities.'}, {"turn": 1, "hint": "It finds no file."}]
    with serving(lambda number, body: answer(json.dumps(told[number]))) as (address, asked):
        code, said, _ = ask(*how, "--model", address)
    assert (
        code == 0
        and f"{faulty}: 0 hints, and 1 refused\n  reply 5, judge: refused, because it tells of the solution: stem + "
        in said
    )
    assert f"{clean}: 1 hint\n  reply 1, judge: It finds no file.\n" in said and said.endswith(
        "1 refused: 1 since it tells of the solution\n"
    )
    assert [row["hint"] for row in lines(tmp_path / "h")] == ["It finds no file."]
    assert all("stem" not in body["messages"][1]["content"] for body, _ in asked[:1]) and len(asked) == 2
    with serving(lambda number, body: answer('{"turn": 0, "hint": ""}')) as (address, asked):
        code, said, _ = ask(*how[:-1], tmp_path / "none", "--model", address, "--shown-gold")
    assert (
        code == 0
        and '+        return stem + "ies"' in asked[0][0]["messages"][1]["content"]
        and not (tmp_path / "none").exists()
    )
    assert said.endswith(f"no hints, so {tmp_path}/none is not written\n")


def test_what_was_found_before_a_judge_fails_is_kept(task, played, ask, tmp_path):
    (faulty, clean), recipe = played, task[0]
    how = "tasks", "hints", clean, faulty, "--recipes", recipe, "--source", "judge", "--name", "big", "--out"
    good = answer('{"turn": 1, "hint": "It finds no file."}')
    with serving(lambda number, body: good if number == 0 else (403, "no more")) as (address, _):
        code, _, wrong = ask(*how, tmp_path / "a", "--model", address)
    assert (
        code == 2
        and "answers 403: no more; 1 hint found before" in wrong
        and wrong.count("\n") == 1
        and len(lines(tmp_path / "a")) == 1
    )
    with serving(lambda number, body: answer("Well.") if number < 2 else good) as (address, _):
        code, _, wrong = ask(*how, tmp_path / "b", "--model", address)
    assert code == 2 and wrong == f"{clean}: the judge gave no valid answer in two attempts: it is no JSON: 'Well.'\n"
    assert len(lines(tmp_path / "b")) == 1


def test_one_line_for_what_cannot_be_hinted(task, played, ask, tmp_path):
    (faulty, _), recipe = played, task[0]
    (tmp_path / "t").write_text("{}\n")
    other = tmp_path / "other.jsonl"
    other.write_text(faulty.read_text().replace(task[1].id, "words-9.9-none"))
    for words, says in (
        ((tmp_path / "nowhere",), f"{tmp_path}/nowhere is no transcript"),
        ((tmp_path / "t",), f"{tmp_path}/t is no transcript"),
        ((other,), f"{other}: no recipe in {recipe} has a task words-9.9-none"),
        ((faulty, "--model", "http://127.0.0.1:1/v1"), "add --source judge"),
        ((faulty, "--shown-gold"), "add --source judge"),
        ((faulty, "--source", "judge"), "--source judge needs --model ADDRESS"),
        ((faulty, "--source", "judge", "--model", "gpt", "--name", "x"), "'gpt' is no address of a model"),
        ((faulty, "--loss", tmp_path), f"{tmp_path} is not a checkpoint"),
    ):
        code, said, wrong = ask("tasks", "hints", *words, "--recipes", recipe)
        assert code == 2 and says in wrong and wrong.count("\n") == 1 and said == "", (words, wrong)
    code, said, wrong = ask("tasks", "hints", tmp_path / "t", faulty, "--recipes", recipe)
    assert code == 2 and "is no transcript" in wrong and f"{faulty}: 4 hints" in said, "the next one comes"


def called(name, text, tool, **arguments):
    """A message with one call."""
    function = {"name": tool, "arguments": json.dumps(arguments)}
    return {
        "role": "assistant",
        "content": text,
        "tool_calls": [{"id": name, "type": "function", "function": function}],
    }


def test_how_far_a_hint_moves_a_checkpoint():
    """The same tokens at other places. Nothing moves where the teacher reads what the student reads."""
    agent = agent_in(FOLDER)
    render, move = template_of(FOLDER, agent.language), moves(FOLDER)
    message, earlier = called("a", "", "read", file="m3"), called("b", "I fly.", "fly", file="<|agent|>")
    student = [
        {"role": "user", "content": "fix m3"},
        earlier,
        {"role": "tool", "tool_call_id": "b", "content": "error: no such tool"},
    ]
    hint = {"role": "user", "content": "error: m3 known"}
    row = {"student": student, "teacher": [*student, hint], "message": message, "tools": []}
    ids, where = sequences(row, render, agent)
    longer = len(where.tokens) - len(ids)
    assert longer > 0 and torch.equal(where.teacher - longer, where.student) and where.student[-1] == len(ids) - 1
    assert (
        torch.equal(ids[where.student], where.tokens[where.teacher])
        and len(where.student) == len(agent.language.encode("read m3")) + 1
    )
    (same,) = move(row | {"teacher": student})
    assert same.startswith("KL 0.0000 nats over ")
    (moved,) = move(row)
    assert float(moved.split()[1]) > 0.001
    (none,) = move(row | {"message": message | {"content": "\ufdd0"}})
    assert none.startswith("no KL, because ") and "U+FDD0" in none
