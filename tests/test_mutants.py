"""The list of mistakes that the tests must notice: each can still be made, where it says. `make mutants` makes them."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

from tests import mutants
from tests.mutants import MUTANTS, Mutant, mutated

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("file", sorted({m.file for m in MUTANTS}))
def test_every_mistake_of_a_file_can_be_made(file):
    """Its line is there once, and the file with the mistake is another program."""
    source = (ROOT / file).read_text(encoding="utf-8")
    whole = ast.dump(ast.parse(source))
    for mutant in (m for m in MUTANTS if m.file == file):
        assert "\n" not in mutant.old.rstrip("\n") + mutant.new.rstrip("\n"), mutant
        assert ast.dump(ast.parse(mutated(mutant, source))) != whole, f"{mutant} changes nothing"


def test_there_are_enough_of_them_and_each_names_a_test_file():
    assert len(MUTANTS) >= 80 and max(Counter(MUTANTS).values()) == 1
    assert len({m.file for m in MUTANTS}) >= 20
    for test in {m.test for m in MUTANTS}:
        path, _, name = test.partition("::")
        assert Path(path).name.startswith("test_") and (ROOT / path).is_file(), test
        assert not name or re.search(rf"^def {name}\(", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE), (
            f"{test} is not there"
        )
    assert sum(bool(m.same) for m in MUTANTS) <= len(MUTANTS) / 20, (
        "a mutant that no test can tell from the original teaches nothing"
    )


@pytest.mark.parametrize("source, times", [("x = 2\n", 0), ("x = 1\ny = x = 1\n", 2)])
def test_a_line_that_is_not_there_once_is_named(source, times):
    with pytest.raises(ValueError, match=f"found {times} times"):
        mutated(Mutant("ref/a.py", "x = 1", "x = 3", "tests/test_a.py"), source)


@pytest.mark.parametrize(
    "end, same, code, says",
    [
        ("failed", "", 0, "1 killed"),
        ("endless", "", 0, "1 killed"),
        ("passed", "", 1, "SURVIVED"),
        ("passed", "cannot be told", 0, "same "),
        ("failed", "cannot be told", 1, "KILLED"),
        ("broken", "", 1, "BROKEN"),
        ("broken", "cannot be told", 1, "BROKEN"),
    ],
)
def test_what_is_reported(capsys, end, same, code, says):
    mutant = Mutant("ref/a.py", "x = 1", "x = 3", "tests/test_a.py", same)
    assert mutants.report([(mutant, {"end": end, "said": "test_b: wrong"})]) == code
    said = capsys.readouterr().out
    assert says in said and (code == 0 or "test_b: wrong" in said)


def test_an_interrupted_run_goes_on_and_another_tree_begins_anew(tmp_path):
    path = tmp_path / "runs" / "mutants.jsonl"
    mutants.Journal(path, "one", fresh=False).add(key="a", end="failed", said="", seconds=1.0)
    with path.open("a") as file:
        file.write('{"key": "b", "end')  # killed while it wrote
    journal = mutants.Journal(path, "one", fresh=False)
    assert set(journal.found) == {"a"}
    journal.add(key="c", end="passed", said="", seconds=1.0)
    assert set(mutants.Journal(path, "one", fresh=False).found) == {"a", "c"}
    assert (
        not mutants.Journal(path, "another", fresh=False).found and not mutants.Journal(path, "one", fresh=False).found
    )


def test_a_tree_is_another_where_any_file_is_but_a_test(tmp_path):
    for name in ("ref/a.py", "tests/conftest.py", "tests/test_a.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("1")
    first = mutants.digest(tmp_path)
    (tmp_path / "tests" / "test_a.py").write_text("2")
    assert mutants.digest(tmp_path) == first
    (tmp_path / "tests" / "conftest.py").write_text("2")
    assert mutants.digest(tmp_path) != first
