"""`etude tasks try` and `etude show`: an agent on a task, its transcript, its reward, and one that goes on after it was
interrupted."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from environments.grading.guarded import Trust
from environments.harness.remote import Remote
from environments.sandbox.cache import cache_folder
from environments.tasks import load
from environments.tasks.make import make_tasks
from environments.tasks.task_cache import load_task, save_task
from etude.tasks import build as tasks
from etude.tasks import episodes
from tests.environments.homes import home_of
from tests.environments.served import CUT, answer, serving
from tests.environments.test_runner import NOUNS, TESTS
from tests.environments.test_tasks import PACKAGE, Player


@pytest.fixture(scope="module")
def home(root):
    """A folder with a package, in which caches lie, too; the root file system is that of all tests."""
    with home_of(root, {"words/nouns.py": NOUNS, "tests/test_nouns.py": TESTS}) as folder:
        yield folder


@pytest.fixture(scope="module")
def made_once(home):
    """What was made, and how it was asked for again: that the same comes out is shown by test_recipe.py, for
    seconds."""
    real, asked = tasks.build_with_progress, []

    def first(*how, **more):
        asked.append(real(*how, **more))
        return asked[0]

    def again(package, jobs, seconds, kind, known, join, single_statements, progress):
        asked.append((package.digest, known, join))
        return asked[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tasks, "build_with_progress", first)
        patch.setattr(load, "build_tasks", again)
        yield asked


@pytest.fixture
def recipe(home, ask, made_once):
    """A file of recipes, and the id of its task about the function's body."""
    path = home / "tasks" / "words-1.0.json"
    if not path.exists():
        code, said, wrong = ask("tasks", "make", home / "words", "--out", home / "tasks")
        assert code == 0, said + wrong
    return path, next(row["id"] for row in json.loads(path.read_text())["tasks"] if row["way"] == "body")


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_folder_is_graded(recipe, ask, tmp_path):
    """As a trainer would: the original in full, the tree as it was given nothing; what is ignored is named. JSON is one
    object."""
    path, name = recipe
    task, package = episodes.task_of(name, (path,), 1, 60.0, "bubblewrap")
    exam = episodes.exam_of(task, package)
    whole, given = tmp_path / "whole", tmp_path / "given"
    for folder, tree in ((whole, exam.gold_tree), (given, exam.given_tree)):
        for file in exam.editable.names:
            (folder / file).parent.mkdir(parents=True)
            (folder / file).write_bytes(tree[file])
    (given / "tests").mkdir()
    (given / "tests/test_nouns.py").write_text("def test_any():\n    pass\n")
    code, said, wrong = ask("tasks", "grade", name, whole, "--recipes", path)
    assert code == 0 and "reward 1.00" in said and Trust.SEPARATE.value in said, said + wrong
    code, said, wrong = ask("tasks", "grade", name, given, "--recipes", path, "--json")
    found = json.loads(said)
    assert code == 0 and found["reward"] == 0.0 and found["failed"] and found["trust"] == "separate", said + wrong
    assert found["ignored"] == ["tests/test_nouns.py"] and any("changes tests" in flag for flag in found["flags"])
    assert (
        found["passed"] < found["of"] == len(exam.required_tests) and found["refused"] == {} and found["missing"] == []
    )


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (None, "does not exist"),
        ({}, "is empty; expected the files of a solution"),
        ({"notes.txt": "x"}, "contains none of the files that .* may change: words/nouns.py"),
    ],
)
def test_a_folder_that_cannot_be_graded_is_said_in_one_line(made, why, recipe, ask, tmp_path):
    path, name = recipe
    folder = tmp_path / "left"
    if made is not None:
        folder.mkdir()
        for file, text in made.items():
            (folder / file).write_text(text)
    code, said, wrong = ask("tasks", "grade", name, folder, "--recipes", path)
    assert code != 0 and said == "" and wrong.count("\n") == 1 and re.search(why, wrong), (said, wrong)


def test_grade_names_a_task_that_there_is_not_and_a_file_that_is_no_folder(recipe, ask, tmp_path):
    (tmp_path / "a.py").write_text("x = 1\n")
    for task, folder, why in (
        ("nothing-1.0", tmp_path, "has a task nothing-1.0"),
        (recipe[1], tmp_path / "a.py", "is not a folder"),
    ):
        code, said, wrong = ask("tasks", "grade", task, folder, "--recipes", recipe[0])
        assert code != 0 and wrong.count("\n") == 1 and why in wrong, (said, wrong)


def test_oracle_and_fool(recipe, ask, tmp_path, made_once):
    """The original is paid in full and nothing done is paid nothing, through the tools of an agent; a person can read
    what happened."""
    path, name = recipe
    (cache_folder() / "tasks" / f"{name}.json").unlink()  # as on a machine that has the recipe only
    for who, reward in (("oracle", 1.0), ("fool", 0.0)):
        code, said, wrong = ask("tasks", "try", name, "--model", who, "--recipes", path, "--out", tmp_path / who)
        assert code == 0, said + wrong
        assert ("making its tasks again, once; they are stored for later" in said) == (who == "oracle")
        found = lines(tmp_path / who / f"{name}.jsonl")
        assert found[-1]["kind"] == "grade" and found[-1]["reward"] == reward and found[-1]["flags"] == []
        assert ("agreed" in found[-1]) == (who == "oracle") and (
            "48 of 48 fresh inputs give the result of the original" in said
        ) == (who == "oracle")
        assert f"reward {reward:.2f}" in said and f"etude show {tmp_path / who / name}.jsonl" in said
    (package, *_), again = made_once
    unused = load.unused_tests(json.loads(path.read_text()))
    assert again == (package.digest, unused, 1), (
        "made again of the same files, without the tests that the recipe does not use"
    )
    code, said, _ = ask("show", tmp_path / "oracle" / f"{name}.jsonl")
    assert (
        code == 0
        and "→ write\n    path: words/nouns.py\n    text: " in said
        and "← shell ok" in said
        and "reward 1.00" in said
    )
    assert "stem + " not in found[0]["prompt"] and 'return stem + "ies"' in said
    short = ask("show", tmp_path / "oracle" / f"{name}.jsonl", "--rows", 2)[1]
    assert (
        len(short) < len(said) < len(ask("show", tmp_path / "oracle" / f"{name}.jsonl", "--rows", 0)[1])
        and "lines more" in short
    )


def test_a_model_over_http_that_is_interrupted_and_goes_on(recipe, ask, tmp_path):
    """It makes two calls at once, a malformed one, and loses its server in the middle; the episode goes on where it
    was, in the same tree."""
    path, name = recipe
    hole = json.loads((cache_folder() / "tasks" / f"{name}.json").read_text())
    assert hole["task"]["id"] == name
    said_by = [
        answer("", ("read", {"path": "words/nouns.py"}), ("write", '{"path": "words/nouns.py", "text": "')),
        answer("", ("write", {"path": "words/nouns.py", "text": NOUNS})),
        answer("", ("shell", {"command": "python3 -m pytest -q tests"})),
        answer("", ("finish", {"message": "done"})),
    ]
    out = tmp_path / "out"
    how = "tasks", "try", name, "--recipes", path, "--out", out, "--prompt", "terse", "--name", "small", "--seed", 5
    with serving(lambda number, body: said_by[number] if number < 2 else (403, "no more")) as (address, asked):
        code, _, wrong = ask(*how, "--model", address)
        assert code == 2 and "answers 403: no more; --resume continues from turn 2" in wrong and wrong.count("\n") == 1
    assert (
        asked[0][0]["seed"] == 5
        and asked[0][0]["model"] == "small"
        and len(asked[0][0]["messages"][1]["content"]) <= 390
    )
    code, _, wrong = ask(*how, "--model", address)
    assert code == 2 and "already exists; --resume continues it" in wrong
    with serving(lambda number, body: CUT if number == 0 else said_by[number + 1]) as (address, asked):
        code, said, wrong = ask(*how, "--model", address, "--resume")
    assert code == 0 and "asked again in 1 s" in wrong and "reward 1.00" in said
    found = lines(out / f"{name}.jsonl")
    assert [line["kind"] for line in found].count("reply") == 4 and [
        line.get("broken", False) for line in found if line["kind"] == "answer"
    ][:2] == [False, True]
    assert (
        "stop" not in [line["kind"] for line in found]
        and [one["role"] for one in asked[0][0]["messages"]][-1] == "tool"
    )
    code, _, wrong = ask(*how[:-1], 6, "--model", address, "--resume")
    assert code == 2 and "was begun by small, " in wrong and wrong.count("\n") == 1
    code, said, _ = ask(*how, "--model", address, "--resume")
    assert code == 0 and "reward 1.00" in said and lines(out / f"{name}.jsonl") == found, "what is over is only shown"


def test_an_interrupted_episode_says_how_to_go_on(recipe, ask, tmp_path, monkeypatch):
    path, name = recipe

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Remote, "reply", interrupted)
    code, _, wrong = ask(
        "tasks",
        "try",
        name,
        "--recipes",
        path,
        "--out",
        tmp_path / "out",
        "--name",
        "small",
        "--model",
        "http://127.0.0.1:1/v1",
    )
    assert code == 130 and wrong == "interrupted; --resume continues from turn 0\n"
    assert [line["kind"] for line in lines(tmp_path / "out" / f"{name}.jsonl")] == ["begin"]


def test_one_line_for_what_cannot_be_tried(recipe, ask, tmp_path):
    path, name = recipe
    (tmp_path / "t").write_text("{}\n")
    for words, says in (
        (
            ("tasks", "try", "words-1.0-none", "--model", "oracle", "--recipes", path),
            "has a task words-1.0-none; `etude tasks make PACKAGE`",
        ),
        (
            ("tasks", "try", "words", "--model", "oracle", "--recipes", path),
            "tasks begin with words; choose one: words-1.0-",
        ),
        (("tasks", "try", name, "--model", "gpt", "--name", "x", "--recipes", path), "oracle and fool need no model"),
        (
            ("tasks", "try", name, "--model", "http://127.0.0.1:1/v1", "--recipes", path),
            "needs its name there: --name NAME",
        ),
        (("tasks", "try", name, "--model", "oracle", "--recipes", tmp_path / "nowhere"), "nowhere"),
        (
            ("tasks", "try", name, "--model", "oracle", "--recipes", path, "--corpus", tmp_path / "none"),
            "contains no pages",
        ),
        (("show", tmp_path / "nowhere"), "is no transcript: `etude tasks try` writes them"),
        (("show", tmp_path / "t"), "is no transcript"),
    ):
        code, said, wrong = ask(*words, *(("--out", tmp_path / "out") if words[0] == "tasks" else ()))
        assert code == 2 and says in wrong and wrong.count("\n") == 1, (words, wrong)


COMMAND = "import sys; sys.argv[0] = 'etude'; from etude.cli.main import main; main()"


class Client:
    """Of the Model Context Protocol, of which it speaks a few words. The server has a group of processes, as clients
    give it one."""

    def __init__(self, *words):
        command = [sys.executable, "-c", COMMAND, "tasks", "serve", *map(str, words)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.server = subprocess.Popen(command, start_new_session=True, **pipes)
        self.number = 0

    def ask(self, method, **params):
        """What the server answers: its result, or its error. Standard output holds nothing else."""
        self.number += 1
        asked = {"jsonrpc": "2.0", "id": self.number, "method": method, "params": params}
        self.server.stdin.write(json.dumps(asked).encode() + b"\n")
        self.server.stdin.flush()
        said = json.loads(self.server.stdout.readline())
        assert said["jsonrpc"] == "2.0" and said["id"] == self.number
        return said.get("result") or said["error"]

    def call(self, tool, **arguments):
        """What a tool says, and whether it is an error."""
        result = self.ask("tools/call", name=tool, arguments=arguments)
        return result["content"][0]["text"], result["isError"]


def test_a_client_over_mcp_is_graded_when_it_goes(recipe, ask, tmp_path):
    """Even if the server is killed meanwhile. Its transcript is read as any other, and an interrupted one goes on."""
    path, name = recipe
    how = name, "--recipes", path, "--out", tmp_path, "--jobs", 1
    client = Client(*how)
    assert (
        name.startswith("words-1.0")
        and "Write it again" in client.ask("initialize", protocolVersion="2025-11-25")["instructions"]
    )
    tools = [tool["name"] for tool in client.ask("tools/list")["tools"]]
    assert "finish" in tools and "web_search" not in tools
    text, failed = client.call("read", path="words/nouns.py")
    assert "raise NotImplementedError" in text and not failed
    assert client.call("write", path=3) == ("path of write must be text; got 3", True)
    assert client.call("write", path="words/nouns.py", text=NOUNS)[1] is False
    os.killpg(client.server.pid, signal.SIGKILL)
    client.server.communicate()
    assert lines(tmp_path / f"{name}.jsonl")[-1]["kind"] == "turn"
    client = Client(*how, "--resume")
    client.ask("initialize", protocolVersion="2025-11-25")
    assert NOUNS.splitlines()[0] in client.call("read", path="words/nouns.py")[0]
    assert client.call("shell", command="cat; python3 -m pytest -q tests | tail -1")[1] is False, (
        "no tool reads what the client writes"
    )
    assert client.call("finish", message="done") == ("the episode is over", False)
    assert client.call("list") == ("the episode is over; this call was not made", True)
    os.killpg(client.server.pid, signal.SIGKILL)  # the grader has a group of its own
    client.server.communicate()
    until = time.monotonic() + 60
    while (found := lines(tmp_path / f"{name}.jsonl"))[-1]["kind"] != "grade" and time.monotonic() < until:
        time.sleep(0.05)
    assert found[-1]["reward"] == 1.0 and found[-1]["flags"] == [] and found[0]["who"] == "an MCP client"
    code, said, wrong = ask("tasks", "serve", *how)
    assert code == 2 and said == "" and "already exists; --resume continues it" in wrong
    assert ask("tasks", "serve", *how, "--resume")[0] == 0 and lines(tmp_path / f"{name}.jsonl") == found, (
        "nobody is there, and all is done"
    )


def test_what_is_kept_comes_back_or_is_none(tmp_path):
    made = make_tasks(PACKAGE, Player())
    for task in made.tasks:
        save_task(tmp_path, task, PACKAGE)
        assert load_task(tmp_path, task.id, PACKAGE) == task
    path = tmp_path / f"{made.tasks[0].id}.json"
    whole = path.read_text()
    other = replace(PACKAGE, tests={"tests/test_other.py": b""})
    assert (
        load_task(tmp_path, made.tasks[0].id, other) is None and load_task(tmp_path, "words-1.0-none", PACKAGE) is None
    )
    swapped = whole.replace(made.tasks[0].id, made.tasks[1].id)
    for text in ("", "{}", whole[:-9], swapped, whole.replace('"first": ', '"first": 1')):
        path.write_text(text)
        assert load_task(tmp_path, made.tasks[0].id, PACKAGE) is None
