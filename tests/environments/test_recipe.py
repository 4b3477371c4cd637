"""`etude tasks`: recipes of tasks are written, made again with the same ids, and graded; what is no material is a
line."""

import json
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest

from environments.tasks.load import read_recipe, ways_of
from environments.tasks.make import make_tasks
from environments.tasks.recipe import SLOW, compare_recipe, make_recipe, prepare_package
from etude.tasks import build as tasks
from kit.settings import RunError
from tests.environments.test_runner import NOUNS, TESTS
from tests.environments.test_tasks import PACKAGE, Player


def test_a_recipe_by_hand():
    """It holds ids and names, and no line of code."""
    made = make_tasks(PACKAGE, Player())
    recipe = json.loads(
        json.dumps(
            make_recipe(
                "words==1.0", PACKAGE, {"left out": ["tests/test_slow.py"], "slow": {"b", "a"}, "ungradable": ()}, made
            )
        )
    )
    assert recipe["package"]["left out"] == ["tests/test_slow.py"] and recipe["package"]["digest"] == PACKAGE.digest
    assert recipe["package"]["slow"] == ["a", "b"] and recipe["package"]["ungradable"] == []
    assert [row["id"] for row in recipe["tasks"]] == sorted(task.id for task in made.tasks) and recipe["pieces"][
        "tried"
    ] == made.piece_count
    text = json.dumps(recipe)
    for task in made.tasks:
        for line in (
            line.strip() for one in task.piece.patches for edit in one.edits for line in edit.old.decode().splitlines()
        ):
            assert len(line) < 12 or line not in text
    assert compare_recipe(recipe, PACKAGE, made) == ()
    gone = recipe["tasks"].pop(0)["id"]
    recipe["tasks"].append({"id": "words-1.0-other"})
    assert compare_recipe(recipe, PACKAGE, made) == ("words-1.0-other is not made any more", f"{gone} is new")
    recipe["package"]["digest"] = "other"
    assert "the files of words 1.0 are others" in compare_recipe(recipe, PACKAGE, made)[0]


def test_a_recipe_says_whether_single_statements_are_taken_out(tmp_path):
    made = make_tasks(PACKAGE, Player(), single_statements=True)
    unused = {"left out": (), "slow": (), "ungradable": ()}
    recipe = make_recipe("words", PACKAGE, unused, made, single_statements=True)
    assert ways_of(recipe) == {"join": 1, "single_statements": True}
    assert ways_of(make_recipe("words", PACKAGE, unused, made)) == {"join": 1, "single_statements": False}
    path = tmp_path / "words.json"
    path.write_text(json.dumps(recipe))
    assert read_recipe(path) == recipe
    path.write_text(json.dumps(recipe | {"single_statements": "yes"}))
    with pytest.raises(RunError, match="is not a recipe of tasks"):
        read_recipe(path)


def test_files_that_cannot_be_collected_are_left_out():
    name = next(iter(PACKAGE.tests))
    package, left_out = prepare_package(PACKAGE, Player(extra={name: "error", "words.py": "error"}))
    assert left_out == (name,) and package.tests == {} and package.files == PACKAGE.files
    assert prepare_package(PACKAGE, Player()) == (PACKAGE, ())

    class Says(Player):
        def one(self, files):
            return self.extra

    late = Player()
    late.slow = dict.fromkeys(late.one(PACKAGE.files), 2.0)
    with pytest.raises(ValueError, match=r"words 1.0: all tests are slow; nothing"):
        prepare_package(PACKAGE, late)
    for extra, why in (
        ({name: "error"}, f"{name} cannot be collected"),
        ({"a": "failed"}, "no test passes"),
        ({"the run": "error"}, "its tests do not end"),
    ):
        with pytest.raises(ValueError, match=f"words 1.0: {why}; nothing can be made of it"):
            prepare_package(PACKAGE, Says(extra=extra))


def test_slow_tests_are_left_out():
    """One that takes longer than SLOW is played no more, and no task has it. A recipe says which ones: measured anew,
    they could be others."""
    quick, late, told = Player(), Player(), Player()
    for player in (late, told):
        player.slow = {"camel 0": SLOW + 0.1, "snake 1": SLOW}
    assert (
        prepare_package(PACKAGE, quick)
        == prepare_package(PACKAGE, late)
        == prepare_package(PACKAGE, told, ["hiss 0"])
        == (PACKAGE, ())
    )
    assert (quick.skipped_tests, late.skipped_tests, told.skipped_tests) == (frozenset(), {"camel 0"}, {"hiss 0"})
    for player in (late, told):
        made = make_tasks(PACKAGE, player)
        assert made.tasks and not any(
            player.skipped_tests & {*task.visible, *task.held_out, *task.keep} for task in made.tasks
        )


def test_tasks_are_made_and_graded_without_torch():
    """Each process that grades would take seconds to import it, and its memory."""
    program = "import sys, etude.tasks.build; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


@pytest.fixture
def words(open_folder, monkeypatch, root):
    """A checkout with a file of tests that needs what is not there; caches of its own, and the root file system of all
    tests."""
    (open_folder / "cache" / "etude").mkdir(parents=True)
    (open_folder / "cache" / "etude" / "roots").symlink_to(root.parent)
    monkeypatch.setenv("XDG_CACHE_HOME", str(open_folder / "cache"))
    for name, text in {
        "words/__init__.py": "",
        "words/nouns.py": NOUNS,
        "tests/test_nouns.py": TESTS,
        "tests/test_other.py": "import nothing_of_this_name\n",
        "tests/test_near.py": "from pathlib import Path\n\n\ndef test_near():\n    assert "
        "Path(__file__).with_name('test_nouns.py').read_text()\n",
        "pyproject.toml": '[project]\nname = "words"\nversion = "1.0"\n',
    }.items():
        (open_folder / "words" / name).parent.mkdir(parents=True, exist_ok=True)
        (open_folder / "words" / name).write_text(text)
    return open_folder / "words"


@pytest.fixture
def made_once(monkeypatch):
    """What is made of the same files in the same way is remembered: the real command makes it each time, for
    seconds."""
    real, seen = tasks.build_with_progress, {}

    def build_with_progress(package, jobs, seconds, kind, known=None, **ways):
        what = (package.digest, known is None, *sorted(ways.items()))
        if what not in seen:
            seen[what] = real(package, jobs, seconds, kind, known, **ways)
        return seen[what]

    monkeypatch.setattr(tasks, "build_with_progress", build_with_progress)
    return seen


def test_make_and_check(words, ask, tmp_path, made_once):
    """The commands, on a folder: a recipe, the same again, every task graded, and grading that goes on where it was."""
    out = tmp_path / "tasks"
    code, said, _ = ask("tasks", "make", words, "--out", out)
    path = out / "words-1.0.json"
    recipe = json.loads(path.read_text())
    assert code == 0 and f"{path}: {len(recipe['tasks'])} tasks of {recipe['pieces']['tried']} pieces" in said
    assert (
        recipe["tasks"]
        and "left out: tests/test_other.py, 1 ungradable tests" in said
        and recipe["package"]["left out"] == ["tests/test_other.py"]
    )
    code, said, _ = ask("tasks", "make", words, "--out", out)
    assert code == 0 and "already exists; --again overwrites it" in said
    log, number = out / "words-1.0.checks.jsonl", len(recipe["tasks"])
    code, said, _ = ask("tasks", "check", out, "--fresh", "--jobs", 1)
    assert (
        code == 0
        and f"{path}: {number} tasks, made again and graded: the original code gets reward 1, no change 0; "
        f"{number} have fresh"
        in said
    )
    assert re.search(r"\n  a grading takes \d+\.\d\d s \(median\)\n", said)
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert len(made_once) == 2, "the check has made them again"
    assert [row["faults"] for row in rows] == [[]] * number and all(row["fresh"] >= 8 for row in rows)
    assert "tasks in all" not in said, "the recipe's own line says it"
    for one in (path, log):
        shutil.copy(one, out / one.name.replace("words-1.0", "words-again"))
    code, said, _ = ask("tasks", "check", out, "--fresh", "--jobs", 1)
    assert code == 0 and re.search(rf"\n{2 * number} tasks in all: a grading takes \d+\.\d\d s \(median\)\n", said)
    kept = [json.dumps(row) for row in [{**rows[0], "faults": ["as it was"]}, *rows[2:]]]
    foreign = ["{}", '{"id": 3, "faults": [], "digest": ""}', json.dumps({**rows[0], "faults": "none"})]
    log.write_text("\n".join([*kept, *foreign, json.dumps(rows[1])[:30]]))  # a kill has cut the last line off
    code, said, _ = ask("tasks", "check", path, "--jobs", 1, "--no-fresh")
    assert code == 2 and f"1 wrong\n  {rows[0]['id']}: as it was\n" in said, "what was graded is not graded again"
    again = json.loads(log.read_text().splitlines()[-1])
    assert number >= 2 and again.pop("seconds") > 0 < rows[1].pop("seconds")
    del rows[1]["fresh"]  # this check does not ask
    assert again == rows[1]
    (words / "words" / "nouns.py").write_text(NOUNS.replace("Plurals", "Some plurals"))
    code, said, _ = ask("tasks", "check", path, "--jobs", 1)
    assert code == 2 and "the files of words 1.0 are others than those that the recipe was made of" in said
    assert len(made_once) == 2, "nothing is made of other files"


def test_bad_input_is_one_line(words, ask, tmp_path, monkeypatch):
    """Beside lines of progress, which a crowded machine would add after 20 seconds."""
    monkeypatch.setattr("etude.console.progress_line.time", SimpleNamespace(monotonic=lambda: 0.0))
    (words / "tests" / "test_nouns.py").write_text("def test_a():\n    assert False\n")
    code, said, wrong = ask("tasks", "make", words, tmp_path / "nowhere-1.0.tar.gz", "--out", tmp_path / "tasks")
    assert code == 2 and said == "" and wrong.count("\n") == 2 and "nowhere-1.0.tar.gz is no sdist" in wrong
    assert "words 1.0: " in wrong and "nothing can be made of it" in wrong and not (tmp_path / "tasks").exists()
    (tmp_path / "x.json").write_text("{}")
    for path, says in (
        (tmp_path / "x.json", "is not a recipe of tasks"),
        (tmp_path / "missing", "does not exist; `etude tasks make PACKAGE`"),
    ):
        code, _, wrong = ask("tasks", "check", path)
        assert code == 2 and says in wrong and wrong.count("\n") == 1
