"""Tasks from a package: what goes into its tree, what is asked, which pieces stand the checks, and that three makings
agree."""

import os
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from environments.grading.rewards import Conformance
from environments.monitor import Flag
from environments.tasks import check as check_module
from environments.tasks.check import drop_flagged_tasks, exam_of, without_tests
from environments.tasks.make import baseline, fools, label, make_tasks
from environments.tasks.package import Package, is_test, licence_of, sanitised
from environments.tasks.prompts import TERSE, specified, terse
from ref.feature_deletion import FILE, PROGRAM, Piece, bodies, delete, play, slices, symbols, undelete

MIT = b"MIT License\n\nPermission is hereby granted, free of charge, to any\nperson obtaining a copy of this software\n"
PACKAGE = Package(
    "words",
    "1.0",
    {FILE: PROGRAM, "LICENSE": MIT},
    {"tests/test_words.py": b"# the checks of the demonstration"},
    "MIT",
    "folder",
)


class Player:
    """The tests of the demonstration's little package, which is ours: it runs in this process. `unsteady`: tests that
    fail in every second run."""

    def __init__(self, *unsteady: str, extra: dict[str, str] | None = None):
        self.runs, self.unsteady, self.extra, self.skipped_tests, self.slow = 0, unsteady, extra or {}, frozenset(), {}

    def outcomes(self, files, changes=({},), only=(), seed=0):
        runs = zip(changes, only or [None] * len(changes), strict=True)
        return [self.played(self.one({**files, **change}), tests) for change, tests in runs]

    def played(self, outcomes, tests):
        return {
            test: said
            for test, said in outcomes.items()
            if test not in self.skipped_tests and (tests is None or test in tests)
        }

    def patiently(self, files):
        return {test: (outcome, self.slow.get(test, 0.01)) for test, outcome in self.one(files).items()}

    def one(self, files):
        self.runs += 1
        found, _ = play(files[FILE])
        return {**found, **{test: "failed" for test in self.unsteady if self.runs % 2 == 0}, **self.extra}

    def coverage(self, files):
        return play(files[FILE])[1]


def test_tasks_of_single_statements():
    """They come beside the others, whose ids stay, and are the easiest; nothing is joined with them."""
    before, made = make_tasks(PACKAGE, Player()), make_tasks(PACKAGE, Player(), single_statements=True)
    added = [task for task in made.tasks if task.piece.way == "statement"]
    assert [task for task in made.tasks if task not in added] == [*before.tasks] and len(added) == 2
    for task in added:
        (edit,) = task.piece.patches[0].edits
        assert b"raise NotImplementedError" in edit.new and b"raise" not in edit.old
        assert undelete(delete(PACKAGE.files, task.piece), task.piece) == PACKAGE.files
        assert "lacks one statement. Bring it back" in task.terse and len(task.visible) and len(task.held_out)
        assert task.difficulty.functions == task.difficulty.files == 1
    bodies_bits = {task.piece.name: task.difficulty.bits for task in before.tasks if task.piece.way == "body"}
    easier = [task.difficulty.bits < bodies_bits[task.piece.name] for task in added if task.piece.name in bodies_bits]
    assert easier and all(easier)
    assert not any("several" == task.piece.way for task in make_tasks(PACKAGE, Player(), single_statements=True).tasks)


def test_making_by_hand():
    """Slices find what bodies and symbols cannot; all of them put back are the package again."""
    made = make_tasks(PACKAGE, Player())
    assert made.flaky == () and made.piece_count == len(made.tasks) + len(made.reasons)
    assert len({task.id for task in made.tasks}) == len(made.tasks) >= 8
    assert {task.piece.way for task in made.tasks} == {"slice", "body", "symbol"}
    for task in made.tasks:
        gone = delete(PACKAGE.files, task.piece)
        assert undelete(gone, task.piece) == PACKAGE.files
        outcomes, _ = play(gone[FILE])
        failing = {test for test, outcome in outcomes.items() if outcome == "failed"}
        assert (
            {*task.visible, *task.held_out} == failing and len(failing) >= 3 and not {*task.visible} & {*task.held_out}
        )
        assert {*task.keep} == outcomes.keys() - failing and task.difficulty.tests == len(failing)
        assert len(task.terse) <= TERSE and task.licence == "MIT" and task.id.startswith("words-1.0-")


def test_three_makings_agree():
    assert make_tasks(PACKAGE, Player()) == make_tasks(PACKAGE, Player()) == make_tasks(PACKAGE, Player())
    other = Package("words", "1.0", {FILE: PROGRAM.replace(b"The plural of", b"A plural of")}, {}, "MIT", "folder")
    assert not {task.id for task in make_tasks(other, Player()).tasks} & {
        task.id for task in make_tasks(PACKAGE, Player()).tasks
    }


def test_flaky_tests_are_dropped():
    """No task shows, hides or keeps one."""
    player = Player("camel 0")
    made = make_tasks(PACKAGE, player)
    assert made.flaky == ("camel 0",) and made.tasks
    assert not any("camel 0" in (*task.visible, *task.held_out, *task.keep) for task in made.tasks)
    known, flaky = baseline(Player("camel 0", extra={"slow": "skipped"}), PACKAGE.files, 4)
    assert flaky == ("camel 0",) and known["slow"] == "skipped" and "camel 0" not in known
    steady, none = baseline(Player("camel 0"), PACKAGE.files, 1)
    assert none == () and len(steady) == 18


def test_why_pieces_are_no_tasks():
    made = make_tasks(PACKAGE, Player())
    assert set(made.why_not) <= {"short", "tests", "fool", "again", "leak"} and sum(made.why_not.values()) == len(
        made.reasons
    )
    assert made.why_not["short"] >= 1  # `return word + "s"` is what anybody would write
    leaking = Package("words", "1.0", {**PACKAGE.files, "docs/words.txt": PROGRAM}, {}, "MIT", "folder")
    assert make_tasks(leaking, Player()).tasks == () and make_tasks(leaking, Player()).why_not["leak"] >= 8


def test_a_list_of_names_is_no_copy():
    """A symbol that goes takes its name out of `__all__`. The other names stay there, and tell nothing of it."""
    names = (
        b"__all__ = ["
        + b", ".join(b'"%s"' % name for name in (b"words", b"case", b"plural", b"a", b"b", b"c"))
        + b"]\n"
    )
    package = Package("words", "1.0", {FILE: names + PROGRAM}, {}, "MIT", "folder")
    made = make_tasks(package, Player())
    assert not any("leak" in reason for reasons in made.reasons.values() for reason in reasons)
    assert [task.piece.name for task in made.tasks if task.piece.way == "symbol"] == [
        f"{FILE}:case",
        f"{FILE}:plural",
        f"{FILE}:words",
    ]


def test_fools_play_what_matters():
    """Only the tests that fail without a piece, since no others are asked about."""
    asked = []

    class Asked(Player):
        def outcomes(self, files, changes=({},), only=(), seed=0):
            asked.extend(only)
            return super().outcomes(files, changes, only, seed)

    made = make_tasks(PACKAGE, Asked())
    assert len(asked) >= 8 and all(3 <= len(tests) < 18 for tests in asked) and made == make_tasks(PACKAGE, Player())


def test_a_package_that_is_no_material():
    class Fails(Player):
        def one(self, files):
            return {"a": "failed", "b": "passed"}

    with pytest.raises(ValueError, match="words 1.0: fewer than 3 of its tests pass every time"):
        make_tasks(PACKAGE, Fails())
    with pytest.raises(ValueError, match="test_x.py cannot be collected"):
        make_tasks(PACKAGE, Player(extra={"test_x.py": "error"}))


def test_fools_by_hand():
    """Where what was given is the answer half of the time, the piece is no task."""
    piece = next(piece for piece in bodies({FILE: PROGRAM}) if piece.name.endswith(":plural"))
    found = dict(fools(PACKAGE.files, piece))
    space: dict = {}
    exec(found["nothing"][FILE], space)
    assert space["plural"]("cat") is None
    exec(found["what it is given"][FILE], space)
    assert space["plural"]("cat") == "cat"
    hole = next(
        piece for piece in slices({FILE: PROGRAM}, play(PROGRAM)[1]) if piece.tests == ("camel 0", "camel 1", "camel 2")
    )
    assert dict(fools(PACKAGE.files, hole)) == {}

    class Easy(Player):
        """Most of the words have no plural of their own."""

        def one(self, files):
            space: dict = {}
            exec(files[FILE], space)

            def same(word):
                try:
                    return "passed" if space["plural"](word) == word else "failed"
                except Exception:
                    return "failed"

            found = {f"same {word}": same(word) for word in ("sheep", "fish", "deer")}
            return {**found, "other": "passed" if "raise NotImplementedError" not in files[FILE].decode() else "failed"}

    easy = (
        b'def plural(word):\n    """The plural."""\n    kept = {"sheep": 1, "fish": 2, "deer": 3}\n    '
        b'return word if word in kept else word + "s"\n'
    )
    package = Package("easy", "1", {FILE: easy}, {}, "MIT", "folder")

    class Covers(Easy):
        def coverage(self, files):
            return {test: {(FILE, 3), (FILE, 4)} for test in ("same sheep", "same fish", "same deer", "other")}

    made = make_tasks(package, Covers())
    assert made.tasks == () or all(task.piece.way == "symbol" for task in made.tasks)
    assert any("fool: an answer of what it is given passes" in reasons[0] for reasons in made.reasons.values())


def test_tests_that_are_held_out_are_cut_out():
    """By their functions; what stays, stays as it was."""
    source = (
        b"import pytest\r\n\r\n# about a\r\n@pytest.mark.x\r\ndef test_a():\r\n    assert 1\r\n\r\ndef "
        b"test_b(): assert 2\r\n"
    )
    assert without_tests(source, ["test_a"]) == b"import pytest\r\n\r\n\r\ndef test_b(): assert 2\r\n"
    assert without_tests(source, ["test_c", "TestA::test_a"]) == source
    inside = (
        b"class TestA:\n    def test_a(self):\n        assert 1\n\n    def test_b(self):\n        assert "
        b"2\n\ndef test_a(): pass\n"
    )
    assert (
        without_tests(inside, ["TestA::test_a"])
        == b"class TestA:\n\n    def test_b(self):\n        assert 2\n\ndef test_a(): pass\n"
    )
    assert (
        without_tests(inside, ["TestA::test_a", "TestA::test_b"]) == b"class TestA:\n\n    pass\n\ndef test_a(): pass\n"
    )


def test_an_exam_by_hand():
    """The tree that is given lacks the piece and the held-out tests; the grader has all."""
    source = b"import words\n\ndef test_a(): pass\n\ndef test_b(): pass\n"
    package = Package(
        "words", "1.0", PACKAGE.files, {"tests/test_words.py": source, "tests/data.json": b"{}"}, "MIT", "folder"
    )
    task = replace(
        make_tasks(PACKAGE, Player()).tasks[0],
        visible=("tests/test_words.py::test_a",),
        held_out=("tests/test_words.py::test_b",),
        keep=(),
    )
    exam = exam_of(task, package)
    assert exam.given_tree == {
        **delete(PACKAGE.files, task.piece),
        "tests/test_words.py": source.replace(b"def test_b(): pass\n", b""),
        "tests/data.json": b"{}",
    }
    assert exam.gold_tree == {**exam.given_tree, **PACKAGE.files} and exam.tests == {
        "tests/test_words.py": source.decode()
    }
    assert (
        exam.required_tests == ("tests/test_words.py::test_a", "tests/test_words.py::test_b") and FILE in exam.editable
    )
    assert (
        exam.target_tests == exam.required_tests
        and exam_of(replace(task, held_out=(), keep=task.held_out), package).target_tests == task.visible
    )


# What is asked.


def test_prompts_by_hand():
    piece = next(piece for piece in bodies({FILE: PROGRAM}) if piece.name.endswith(":case"))
    assert (
        terse(piece, ["t.py::test_camel[a]"])
        == "`case` in words.py is not implemented any more. Bring it back; see test_camel[a]."
    )
    text = specified(piece, PACKAGE.files, ["t.py::test_camel"], ["words.py"])
    assert (
        "- `def case(text, style)`: Write words in a style: snake, camel or title." in text
        and "- t.py::test_camel" in text
    )
    assert "Change only words.py." in text and "capitalize" not in text


@given(
    st.lists(st.text("ab_", min_size=1, max_size=200), min_size=1, max_size=5),
    st.lists(st.text("ab_[]", max_size=200), max_size=9),
)
def test_terse_is_terse(names, tests):
    piece = Piece("slice", "+".join(f"{name}.py:{name},g" for name in names), ())
    assert len(terse(piece, [f"t.py::{test}" for test in tests])) <= TERSE


def test_no_prompt_tells_deleted_code():
    for piece in (*slices({FILE: PROGRAM}, play(PROGRAM)[1]), *bodies({FILE: PROGRAM}), *symbols({FILE: PROGRAM})):
        text = terse(piece, ["t"]) + specified(piece, PACKAGE.files, ["t"], [FILE])
        for line in (line for one in piece.patches for edit in one.edits for line in edit.old.decode().splitlines()):
            told = line.strip().startswith(("def ", '"""', "else:", "if ")) and len(line.strip()) < 80
            assert told or len(line.strip()) < 12 or line.strip() not in text


# What goes into a tree.


def test_a_tree_is_chosen(tmp_path):
    for name in (
        "words/__init__.py", "words/cases.py", "words/data.json", "words/py.typed", "tests/test_cases.py",
        "tests/conftest.py", "README.rst",
        "LICENSE", "setup.py", "pyproject.toml", "docs/index.rst",
        "words/__pycache__/cases.cpython-311.pyc", ".git/config", ".mypy_cache/a.json", "build/lib/words/cases.py",
        "words.egg-info/PKG-INFO",
        "words/cases.py~", "words/cases.py.orig", "docs/_build/words.html", "docs/words.html", "PKG-INFO",
        "tags", "dist/words.whl", "words/fast.so",
        "venv/lib/x.py", ".coverage", "fix.patch", "try.ipynb",
    ):  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(MIT if name == "LICENSE" else b"x = 1\n")
    (tmp_path / "words/link.py").symlink_to("cases.py")
    (tmp_path / "words/large.py").write_bytes(b"#" * 2_000_000)
    os.mkfifo(tmp_path / "words/pipe.py")
    found = sanitised(tmp_path, "words", "1.0", "folder")
    assert set(found.files) == {
        "words/__init__.py", "words/cases.py", "words/data.json", "words/py.typed", "README.rst", "LICENSE",
        "setup.py", "pyproject.toml",
        "docs/index.rst",
    }  # fmt: skip
    assert (
        set(found.tests) == {"tests/test_cases.py", "tests/conftest.py"}
        and found.licence == "MIT"
        and len(found.digest) == 64
    )
    (tmp_path / "words/cases.py").write_bytes(b"x = 2\n")
    assert sanitised(tmp_path, "words", "1.0", "folder").digest != found.digest
    for name in found.tests:
        (tmp_path / name).unlink()
    with pytest.raises(ValueError, match="holds no tests; tasks need some"):
        sanitised(tmp_path, "words", "1.0", "folder")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no source of Python"):
        sanitised(tmp_path / "empty", "words", "1.0", "folder")


@pytest.mark.parametrize(
    ("text", "licence"),
    [
        (MIT, "MIT"),
        (b"   Apache License\n   Version 2.0, January 2004\n", "Apache-2.0"),
        (
            b"Redistribution and use in source and binary forms, with or without\nmodification ... "
            b"Neither the name of the copyright",
            "BSD-3-Clause",
        ),
        (b"Redistribution and use in source and binary forms, with or without", "BSD-2-Clause"),
        (b"All rights reserved.", "unknown"),
    ],
)
def test_licences(text, licence):
    assert licence_of({"LICENSE.txt": text}) == licence and licence_of({"README": text}) == "unknown"


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("tests/a.py", True),
        ("a/test_b.py", True),
        ("conftest.py", True),
        ("a/testing_b.py", False),
        ("latest.py", False),
    ],
)
def test_which_files_are_tests(name, found):
    assert is_test(name) == found


def test_an_original_that_looks_like_a_hack_is_no_task(monkeypatch):
    """Whoever wrote it again would not be paid."""
    made, seen = make_tasks(PACKAGE, Player()), []
    suspect = made.tasks[0]

    def watched(episode):
        seen.append(episode)
        gone = delete(PACKAGE.files, suspect.piece)
        return (Flag("table of expected values", f"{FILE}:3", "x"),) if episode.before[FILE] == gone[FILE] else ()

    monkeypatch.setattr(check_module, "watch", watched)
    left = drop_flagged_tasks(made, PACKAGE)
    assert left.tasks == made.tasks[1:] and left.piece_count == made.piece_count
    assert left.why_not["flag"] == 1 and left.reasons[label(suspect.piece)] == (
        f"flag: {FILE}:3 looks like a hack: table of expected values",
    )
    assert all(one.after[FILE] == PACKAGE.files[FILE] for one in seen) and len(seen) == len(made.tasks)
    monkeypatch.undo()
    assert drop_flagged_tasks(made, PACKAGE) == made, "nothing is wrong with these"
    monkeypatch.setattr(
        check_module,
        "conformance",
        lambda before, after: Conformance(("a line is long",) * (before[FILE] == gone[FILE]), 3),
    )
    gone = delete(PACKAGE.files, suspect.piece)
    left = drop_flagged_tasks(made, PACKAGE)
    assert left.tasks == made.tasks[1:] and left.reasons[label(suspect.piece)] == ("style: a line is long",)
