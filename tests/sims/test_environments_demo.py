"""`etude run environments`: nothing gets out, forks stand apart, hacks are paid by one grader and not by the other;
what is refused is one line."""

import json
from pathlib import Path

import pytest

from environments.harness import record
from kit.runs import Run
from kit.settings import RunError
from sims.environments import demo as environments_demo
from sims.environments import words_task

ORACLE = Path(__file__).resolve().parents[2] / "results" / "episodes" / "oracle.jsonl"


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """The folder of a run, and what it has found."""
    folder = tmp_path_factory.mktemp("environments") / "run"
    with Run.open(folder, "environments", environments_demo.Demo()) as run:
        return folder, environments_demo.run(run, environments_demo.Demo())


def test_what_succeeds_here_fails_in_a_sandbox(played):
    """Both, else the second half would show nothing."""
    rows = played[1]["what gets out"]
    assert len(rows) == 5 and all(
        (row["on this machine"], row["in a sandbox"]) == ("succeeds", "fails") for row in rows
    ), rows


def test_the_same_calls_leave_the_same_tree_and_nobody_reaches_another_s(played):
    finishes, deletes, again, left = played[1]["who goes on from one tree"]
    assert (
        finishes["begins with"]
        == deletes["begins with"]
        == again["begins with"]
        == left["leaves"]
        != left["begins with"]
    )
    assert finishes["leaves"] == again["leaves"] and len({row["leaves"] for row in (finishes, deletes, left)}) == 3
    assert [row["its tests"] for row in (finishes, deletes, again, left)] == ["pass", "fail", "pass", "fail"]


def test_a_grader_that_believes_the_exit_code_pays_what_the_guarded_one_does_not(played):
    rows = {row["agent"]: row for row in played[1]["who is paid"]}
    paid = {who: (row["by the exit code"], row["guarded"]) for who, row in rows.items()}
    assert paid == {"oracle": (1, 1), "fool": (0, 0), "conftest": (1, 0), "exit": (1, 0), "equal": (1, 0)}
    said = {
        "oracle": "34 of 34",
        "fool": "13 of 34 tests pass",
        "conftest": "changes conftest",
        "exit": "leaves the process",
        "equal": "canaries pass",
    }
    assert all(words in rows[who]["seen"] for who, words in said.items()), rows


def test_the_task_is_the_one_that_etude_tasks_makes(played):
    """Its name, its prompt, the tree and the calls of the oracle are those of the committed transcript, which was made
    with all checks."""
    mine, committed = record.read(played[0] / "episodes" / "oracle.jsonl"), record.read(ORACLE)
    assert [mine[0][name] for name in ("task", "prompt", "tree")] == [
        committed[0][name] for name in ("task", "prompt", "tree")
    ]
    # Ids are left out: the committed transcript is of a version that gave equal calls equal ids.
    calls = [
        [[(call["name"], call["arguments"]) for call in line["calls"]] for line in one if line["kind"] == "reply"]
        for one in (mine, committed)
    ]
    assert calls[0] == calls[1] != []
    ids = [call["id"] for line in mine if line["kind"] == "reply" for call in line["calls"]]
    assert len({*ids}) == len(ids) > 2
    assert {path.stem: record.read(path)[-1]["reward"] for path in (played[0] / "episodes").iterdir()} == {
        row["agent"]: row["guarded"] for row in played[1]["who is paid"]
    }


def test_what_was_played_is_not_played_again(played, monkeypatch):
    monkeypatch.setattr(environments_demo, "open_sandbox", None)
    with Run.open(played[0], "environments", environments_demo.Demo(), resume=True) as run:
        assert environments_demo.run(run, environments_demo.Demo()) == played[1]


def test_the_command_prints_it(played, ask):
    code, said, _ = ask("run", "environments", "--out", played[0], "--resume")
    assert code == 0 and "canaries pass" in said and "in a sandbox" in said
    assert json.loads((played[0] / "report.json").read_text())["result"] == played[1]


def test_what_is_refused_is_one_line(ask, tmp_path, monkeypatch):
    """And leaves nothing: no sandboxes, no package, no seconds, no full run."""
    monkeypatch.chdir(tmp_path)
    code, _, error = ask("run", "environments", "--scale", "full")
    assert (
        code == 2
        and error.startswith("error: environments has no full run; use --scale small.")
        and error.count("\n") == 1
    )
    code, _, error = ask("run", "environments", "--set", "seconds=0")
    assert code == 2 and "seconds must be above 0, got 0" in error and error.count("\n") == 1
    monkeypatch.setenv("PATH", str(tmp_path))
    code, _, error = ask("run", "environments")
    assert (
        code == 2
        and "apt-get install bubblewrap" in error
        and error.count("\n") == 1
        and not any(tmp_path.rglob("*.json*"))
    )
    monkeypatch.setattr(words_task, "WORDS", tmp_path / "words")
    with pytest.raises(RunError, match="needs a clone of the repository"):
        words_task.task_of(environments_demo.Demo().fresh)
