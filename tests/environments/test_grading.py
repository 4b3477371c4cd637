"""What is laid onto the graded tree, which verdicts count, which half is held out, and what is paid."""

import ast
import json
import os
import re
import socket
import subprocess
import sys
import unittest
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from environments.grading import lay as lay_files
from environments.grading.halves import halves
from environments.grading.lay import FORBIDDEN_FILES, Collected, Editable, collect, lay, write
from environments.grading.rewards import Weights, added, changed, conformance, reward, succinctness
from environments.grading.verdicts import disguised, insert_canaries, read, seal

# G2: what is laid.

PRISTINE = {
    "words/__init__.py": b"",
    "words/cases.py": b"x = 1\n",
    "tests/test_cases.py": b"def test(): pass\n",
    ".github/ci.yml": b"on: push\n",
}
EDITABLE = Editable(("words/cases.py", "words/parts/"))


def left(folder, **files: bytes):
    write({**PRISTINE, **{name.replace("__", "/").replace("_py", ".py"): data for name, data in files.items()}}, folder)
    return folder


def test_only_the_editable_set_is_laid(tmp_path):
    """Tests, configuration and new files elsewhere stay as they were, and are named."""
    root = left(tmp_path / "left")
    (root / "words/cases.py").write_bytes(b"x = 2\n")
    (root / "words/parts").mkdir()
    (root / "words/parts/new.py").write_bytes(b"y = 1\n")
    (root / "words/parts/data.json").write_bytes(b"{}")
    (root / "words/parts/conftest.py").write_bytes(b"import os")
    (root / "tests/test_cases.py").write_bytes(b"def test(): assert True\n")
    (root / "conftest.py").write_bytes(b"")
    (root / ".git").mkdir()
    found = collect(root, EDITABLE, PRISTINE)
    assert found.files == {"words/cases.py": b"x = 2\n", "words/parts/new.py": b"y = 1\n"} and found.refused == ()
    assert tuple(found.ignored) == (
        ".git",
        "conftest.py",
        "tests/test_cases.py",
        "words/parts/conftest.py",
        "words/parts/data.json",
    )
    assert lay(PRISTINE, found, EDITABLE) == {**PRISTINE, **found.files}
    (root / "words/cases.py").unlink()
    assert "words/cases.py" not in lay(PRISTINE, collect(root, EDITABLE, PRISTINE), EDITABLE)
    with pytest.raises(ValueError, match="tests/test_cases.py is not editable"):
        lay(PRISTINE, replace(found, files={"tests/test_cases.py": b""}), EDITABLE)


def symbolic(path):
    path.symlink_to("/etc/hostname")


def inside(path):
    path.symlink_to("__init__.py")


def hard(path):
    (path.parent.parent / "other.py").write_bytes(b"x")
    path.hardlink_to(path.parent.parent / "other.py")


def fifo(path):
    os.mkfifo(path)


def listening(path):
    with socket.socket(socket.AF_UNIX) as one:
        before = os.getcwd()
        os.chdir(path.parent)  # names of sockets are short
        try:
            one.bind(path.name)
        finally:
            os.chdir(before)


def folder(path):
    path.mkdir()


def large(path):
    with open(path, "wb") as file:
        file.truncate((1 << 20) + 1)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (symbolic, "it is a symbolic link"),
        (inside, "it is a symbolic link"),
        (hard, "it is a hard link"),
        (fifo, "it is a FIFO"),
        (listening, "it is a socket"),
        (large, "it has more than 1048576 bytes"),
    ],
)
def test_what_is_no_plain_file_is_refused(make, why, tmp_path):
    root = left(tmp_path / "left")
    (root / "words/cases.py").unlink()
    make(root / "words/cases.py")
    found = collect(root, EDITABLE, PRISTINE)
    assert found.files == {} and found.refused == (("words/cases.py", why),)


def test_a_folder_in_a_file_s_place_and_links_of_folders(tmp_path):
    root = left(tmp_path / "left")
    (root / "words/cases.py").unlink()
    (root / "words/cases.py").mkdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/a.py").write_bytes(b"secret")
    (root / "words/parts").symlink_to(tmp_path / "outside")
    found = collect(root, EDITABLE, PRISTINE)
    assert found.files == {} and found.ignored == {"words/parts": b""}
    (root / "words/parts").unlink()
    root.rename(tmp_path / "moved")
    (tmp_path / "left").symlink_to(tmp_path / "moved")
    with pytest.raises(ValueError, match="root must be a folder"):
        collect(tmp_path / "left", EDITABLE, PRISTINE)


@pytest.mark.parametrize(
    "name", ["a\nb.py", "a b.py", "\x1b[2J.py", "-rf.py", "é.py", "a" * 101 + ".py", "\udc80.py", "a\\b.py", "..a.py"]
)
def test_odd_names_are_refused(name, tmp_path):
    root = left(tmp_path / "left")
    (root / "words/parts").mkdir()
    (root / "words/parts" / name).write_bytes(b"")
    found = collect(root, EDITABLE, PRISTINE)
    assert found.files == {"words/cases.py": b"x = 1\n"} and len(found.refused) == 1
    assert found.refused[0][0].isprintable() and found.refused[0][0].isascii()


def test_names_that_differ_by_capitals_and_too_many_files(tmp_path):
    root = left(tmp_path / "left")
    (root / "words/parts").mkdir()
    for name in ("a.py", "A.py", "b.py"):
        (root / "words/parts" / name).write_bytes(b"")
    found = collect(root, EDITABLE, PRISTINE)
    assert set(found.files) == {"words/cases.py", "words/parts/A.py", "words/parts/b.py"}
    assert found.refused == (("words/parts/a.py", "it differs from words/parts/A.py by capital letters alone"),)
    few = collect(root, replace(EDITABLE, files=2), PRISTINE)
    assert len(few.files) == 2 and few.refused[0][1] == "more than 2 files would be laid"
    cut = collect(root, EDITABLE, PRISTINE, entries=4)
    assert (".", "the folder has more than 4 entries") in cut.refused and len(cut.files) < len(found.files)


def test_many_large_files_outside_of_the_editable_set_are_not_all_read(tmp_path, monkeypatch):
    """Their names are seen; of their contents so much that several trees can be graded at a time."""
    monkeypatch.setattr(lay_files, "MAX_IGNORED", 2500)
    root = left(tmp_path / "left")
    for number in range(4):
        (root / f"a{number}.txt").write_bytes(b"x" * 1000)
    ignored = collect(root, EDITABLE, PRISTINE).ignored
    assert [len(ignored[f"a{number}.txt"]) for number in range(4)] == [1000, 1000, 0, 0]


@pytest.mark.parametrize(
    "name",
    [
        "conftest.py",
        "a/conftest.py",
        "pytest.ini",
        "a/setup.cfg",
        "sitecustomize.py",
        "x.pth",
        "a/__pycache__/b.py",
        "C.PYC",
    ],
)
def test_what_runners_obey_is_never_editable(name):
    assert FORBIDDEN_FILES.fullmatch(name) and name not in Editable(("a/",))
    with pytest.raises(ValueError, match="cannot be editable"):
        Editable((name,))


@pytest.mark.parametrize("name", ["/etc/passwd", "../a.py", "a//b.py", "", "a/./b.py", "-a.py"])
def test_what_cannot_be_editable(name):
    with pytest.raises(ValueError, match="cannot be editable"):
        Editable((name,))


def test_a_tree_without_end(tmp_path):
    """Deeper than the system's longest path, and than Python's stack."""
    root = left(tmp_path / "left")
    (root / "words/parts").mkdir()
    here = os.open(root / "words/parts", os.O_RDONLY)
    try:
        for _ in range(3000):
            os.mkdir("a", dir_fd=here)
            inner = os.open("a", os.O_RDONLY, dir_fd=here)
            os.close(here)
            here = inner
        found = collect(root, EDITABLE, PRISTINE)
        assert len(found.refused) == 1 and found.refused[0][1] == "it lies more than 40 folders deep"
    finally:
        os.close(here)
        subprocess.run(["rm", "-rf", str(root)], check=True)


def test_writing_a_tree(tmp_path):
    write(PRISTINE, tmp_path / "a")
    assert {
        path.relative_to(tmp_path / "a").as_posix(): path.read_bytes()
        for path in (tmp_path / "a").rglob("*")
        if path.is_file()
    } == PRISTINE
    with pytest.raises(ValueError, match="must be empty"):
        write(PRISTINE, tmp_path / "a")
    for name in ("../b.py", "/b.py", "a//b.py"):
        with pytest.raises(ValueError, match="leads out of the folder"):
            write({name: b""}, tmp_path / "c")


@given(
    st.dictionaries(st.sampled_from(["words/cases.py", "words/parts/a.py", "words/parts/b.py"]), st.binary(max_size=5))
)
def test_laying_changes_nothing_else(files):
    graded = lay(PRISTINE, Collected(files, (), {}), EDITABLE)
    assert {name: data for name, data in graded.items() if name not in EDITABLE} == {
        n: data for n, data in PRISTINE.items() if n not in EDITABLE
    }
    assert {name: data for name, data in graded.items() if name in EDITABLE} == files


# G4 and G5: what counts.

KEY = b"k" * 16
names = st.sampled_from(["a", "b", "c", "d"])
outcomes = st.sampled_from(["passed", "failed", "skipped", "error"])


def test_verdicts_by_hand():
    lines = [seal(KEY, "a", "passed"), seal(KEY, "b", "failed"), seal(KEY, "c", "skipped")]
    found = read(lines, KEY, ["a", "b", "c", "d"])
    assert (
        found.passed == {"a"}
        and found.failed == {"b": "failed", "c": "skipped", "d": "missing"}
        and found.flags == ()
        and not found.all_passed
    )
    assert read(lines, KEY, ["a"]).flags == ("nobody asked for b",)
    assert read(lines[:1], KEY, ["a"]).all_passed
    with pytest.raises(ValueError, match="tests must not be empty"):
        read(lines, KEY, [])


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\n",
        b"a passed\n",
        seal(b"other", "b", "passed"),
        seal(KEY, "b", "failed").replace(b"failed", b"passed"),
        b"\xff" * 64 + b" x\n",
    ],
)
def test_a_wrong_seal_ends_all_belief(line):
    """Also where the right lines came first: who can write to the pipe might have written them."""
    found = read([seal(KEY, "a", "passed"), line], KEY, ["a"])
    assert (
        found.passed == frozenset()
        and found.flags == ("line 2 of the verdicts has a wrong seal",)
        and not found.all_passed
    )


def test_the_first_line_counts_and_a_second_one_is_told():
    found = read([seal(KEY, "a", "failed"), seal(KEY, "a", "passed")], KEY, ["a"])
    assert found.failed == {"a": "failed"} and found.flags == ("a was first failed and then passed",)
    assert read([seal(KEY, "a", "passed"), seal(KEY, "a", "passed")], KEY, ["a"]).all_passed


@given(st.lists(st.tuples(names, outcomes)), st.sets(names, min_size=1))
def test_laws_of_verdicts(said, tests):
    found = read([seal(KEY, *one) for one in said], KEY, tests)
    assert found.passed | found.failed.keys() == tests and not found.passed & found.failed.keys()
    first: dict[str, str] = {}
    for test, outcome in said:
        first.setdefault(test, outcome)
    assert found.all_passed == (not found.flags and all(first.get(test) == "passed" for test in tests))
    assert all(first[test] == "passed" for test in found.passed)


def test_canaries_must_fail():
    lines = [seal(KEY, "a", "passed"), seal(KEY, "c", "failed")]
    assert read(lines, KEY, ["a"], ["c"]).all_passed
    for outcome in ("passed", "skipped"):
        found = read([lines[0], seal(KEY, "c", outcome)], KEY, ["a"], ["c"])
        assert found.flags == (f"the canary c must fail; it is {outcome}",) and not found.all_passed
    assert read(lines[:1], KEY, ["a"], ["c"]).flags == ("the canary c must fail; it is missing",)
    # A tree that cannot be imported fails everything and claims nothing: it is wrong, and no hack.
    broken = read([], KEY, ["a"], ["c"])
    assert broken.flags == () and broken.failed == {"a": "missing"}


TESTS = """import pytest
from words import split

def test_one():
    assert split("a b") == ["a", "b"]
    assert split("a")

def test_two():
    with pytest.raises(TypeError):
        split(1)

@pytest.mark.skipif(True, reason="x")
def test_skipped():
    assert split("") == []

def test_leaves():
    if not split("a"):
        return
    assert split("a") == ["a"]

class TestMore:
    def test_three(self):
        assert split("a") == ["a"]
"""


def play(source: str, function: object) -> dict[str, bool]:
    """Runs the module's tests, with what they import from `words` in its place."""
    space: dict = {"split": function}
    exec(re.sub(r"^from words.*$", "", source, flags=re.MULTILINE), space)
    passed = {}
    tests = {name: value for name, value in space.items() if name.startswith("test")}
    for name, owner in space.items():
        if name.startswith("Test"):
            tests |= {f"{name}::{test}": getattr(owner(), test) for test in dir(owner) if test.startswith("test")}
    for name, test in tests.items():
        try:
            test()
            passed[name] = True
        except BaseException:  # pytest's own failure is no Exception
            passed[name] = False
    return passed


class Anything:
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


def test_canaries_fail_for_all_solutions():
    """For the right one and for wrong ones. What is equal to everything passes a real test, and a canary as well."""
    source, copies = insert_canaries(TESTS, KEY)
    wanted = r"(test_(one|two)|TestMore::test_three)_[0-9a-f]{12}"
    assert len(copies) == 3 and all(re.fullmatch(wanted, name) for name in copies)
    rest = iter(source.split("\n"))
    assert all(line in rest for line in TESTS.split("\n")) and ast.parse(
        source
    )  # nothing of it is lost, and its order is the same
    for function in (lambda text: text.split(" "), lambda text: 0, lambda text: None, lambda text: [text]):
        passed = play(source, function)
        assert not any(passed[copy] for copy in copies)
    assert play(source, lambda text: text.split(" "))["test_one"]


class Text(str):
    """Equal to every text, and to nothing else."""

    def __eq__(self, other: object) -> bool:
        return type(other) is str or type(other) is Text

    __hash__ = str.__hash__


class Begins(str):
    """Equal to every text that begins as it does."""

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self[:1], str(other)[:1])

    __hash__ = str.__hash__


class Ends(list):
    """Equal to every list that ends as it does."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, list) and self[-1:] == other[-1:]


@pytest.mark.parametrize(
    ("source", "cheats"),
    [
        ("def test_a():\n    assert split(1) == 'cities'\n", [Anything(), Text(), Begins("c")]),
        ("def test_a():\n    assert 'cities' == split(1)\n", [Anything(), Text(), Begins("c")]),
        ("def test_a():\n    assert split(1) == [1, 2, 3]\n", [Anything(), Ends([3])]),
        ("def test_a():\n    assert split(1) == [[1, 2], ['ab']]\n", [Anything(), [[1, 2], [Begins("a")]]]),
        ("def test_a():\n    assert split(1) == ['a', (1, 'b')]\n", [Anything(), [Text(), (Anything(), Text())]]),
        ("def test_a():\n    assert split(1) == {'a': 1.5}\n", [Anything(), {"a": Anything()}]),
        ("def test_a():\n    assert split(1) == b'ab'\n", [Anything()]),
        ("def test_a():\n    assert split(1) == []\n", [Anything()]),
        ("def test_a():\n    assert split(1) == ''\n", [Anything(), Text()]),
        ("def test_a():\n    assert split(1) is not None\n    assert split(1) == {1, 2}\n", [Anything()]),
        ("def test_a():\n    x, said = split(1), 'b'\n    assert x == said\n    assert x\n", [Anything()]),
        ("def test_a():\n    assert split(1) == None\n", [Anything()]),
    ],
)
def test_a_canary_of_equality(source, cheats):
    """What it asks for has the type and the shape of what was expected: an object that is equal to every text is seen
    as one equal to everything."""
    text, (name,) = insert_canaries(source, KEY)
    for cheat in cheats:
        passed = play(text, lambda value, cheat=cheat: cheat)
        assert passed["test_a"] and passed[name]
    for honest in (0, None, "", "a", "cities", ["a", (1, "b")], {"a": 1.5}, b"ab", [], {1, 2}, "b", 1001):
        assert not play(text, lambda value, honest=honest: honest)[name]


@pytest.mark.parametrize(
    "line",
    [
        "self.assertEqual(split('a'), 'cities')",
        "self.assertEqual('cities', split('a'))",
        "assert split('a') == 'cities'",
    ],
)
def test_a_canary_of_a_method(line):
    """It stands in the method's class, in the manner of unittest as well."""
    source = f"import unittest\n\n\nclass TestA(unittest.TestCase):\n    def test_a(self):\n        {line}\n"
    text, (name,) = insert_canaries(source, KEY)
    owner, _, method = name.partition("::")
    for answer, passes in ((Text(), True), (Anything(), True), ("cities", False), ("city", False), (None, False)):
        space: dict = {"split": lambda value, answer=answer: answer}
        exec(text, space)
        result = unittest.TestResult()
        space[owner](method).run(result)
        assert result.testsRun == 1 and result.wasSuccessful() == passes, (line, answer)


def test_a_canary_with_cases():
    """Each case counts, and one that passes is enough."""
    lines = [seal(KEY, "a", "passed"), seal(KEY, "c[1]", "failed"), seal(KEY, "c[2]", "passed")]
    assert read(lines, KEY, ["a"], ["c"]).flags == ("the canary c[2] must fail; it is passed",)
    assert read(lines[:2], KEY, ["a"], ["c"]).all_passed
    assert read([*lines[:2], seal(KEY, "cc", "failed")], KEY, ["a"], ["c"]).flags == ("nobody asked for cc",)


def test_canaries_by_key():
    assert (
        insert_canaries(TESTS, KEY) == insert_canaries(TESTS, KEY)
        and insert_canaries(TESTS, KEY)[1] != insert_canaries(TESTS, b"other")[1]
    )
    assert len(insert_canaries(TESTS, KEY, max_canaries=1)[1]) == 1
    assert insert_canaries("x = 1\n", KEY) == ("x = 1\n", ())
    four = "".join(f"def test_{n}():\n    assert split({n}) == {n}\n\n\n" for n in range(9))
    text, names = insert_canaries(four, KEY)
    assert len(names) == 4 and text.count("assert nearly_") == 2 and text.count("assert False") == 2
    with pytest.raises(SyntaxError):
        insert_canaries("def", KEY)


INDENTED = '''class TestA:
\t@staticmethod
\tdef test_a():
\t\tassert split("""a
b""") == """c
  d"""
\tx = 1
'''


@given(st.binary(min_size=1, max_size=4), st.integers(1, 4))
def test_laws_of_canaries(key, most):
    """Whatever the key: the lines of the source stay in their order, and canaries stand on both sides of their tests
    where there are several."""
    many = "".join(f"def test_{n}():\n    assert split({n}) == {n}\r\n" for n in range(6)) + INDENTED
    text, names = insert_canaries(many, key, most)
    rest = iter(text.split("\n"))
    assert all(line in rest for line in many.replace("\r\n", "\n").rstrip("\n").split("\n")) and len(names) == most
    order = [found[1] for found in re.finditer(r"^\s*def (test_\w+)", text, re.MULTILINE)]
    before = [
        order.index(name.rpartition("::")[2]) < order.index(re.sub("_[0-9a-f]{12}$", "", name.rpartition("::")[2]))
        for name in names
    ]
    assert most == 1 or {*before} == {True, False}
    passed = play(text, lambda value: value)
    assert not any(passed[name] for name in names) and all(passed[f"test_{n}"] for n in range(6))
    passed = play(text, lambda value: "c\n  d")
    assert not any(passed[name] for name in names) and passed["TestA::test_a"]


WORDS = st.text("-+InfNa", min_size=1, max_size=5)


@given(st.binary(min_size=2, max_size=2), st.sampled_from(["-Inf", ["+Inf", "b"], {"a": "NaN"}, ("c",)]), WORDS)
@example(b"\x00\x10", "-Inf", "-inf")
def test_a_plain_answer_is_wrong_and_nothing_more(key, wanted, other):
    """Whatever the key: it may be what a canary asks for by chance, as "-inf" once was where "-Inf" was wanted."""

    def beside(value):
        """Every value that differs from it in one text."""
        if isinstance(value, str):
            return [other, *(value[:at] + letter + value[at + 1 :] for at in range(len(value)) for letter in "abfinxz")]
        if isinstance(value, dict):
            return [{"a": one} for one in beside(value["a"])]
        return [type(value)([one, *value[1:]]) for one in beside(value[0])]

    text, names = insert_canaries(f"def test_0():\n    assert split(0) == {wanted!r}\n", key)
    assert text.count("assert nearly_") == 1
    for answer in beside(wanted):
        assert not play(text, lambda _, answer=answer: answer)[names[0]], answer
    assert play(text, lambda _: Anything())[names[0]]


@given(
    st.binary(min_size=1, max_size=4),
    st.sets(st.sampled_from([*(f"test_{n}" for n in range(6)), "TestA::test_a"])),
    st.integers(1, 4),
)
def test_canaries_are_copies_of_the_tests_that_ask_first(key, first, most):
    """And one of those asks for another value, so that who answers them alone with something equal to everything is
    seen."""
    many = "".join(f"def test_{n}():\n    assert split({n}) == {n}\n" for n in range(6)) + INDENTED
    text, names = insert_canaries(many, key, most, first)
    assert len({name.rpartition("_")[0] for name in names} & first) == min(most, len(first))
    asks = {str(n): f"test_{n}" in first for n in range(6)}
    passed = play(text, lambda value: Anything() if asks.get(str(value), "TestA::test_a" in first) else value)
    assert any(passed[name] for name in names) == bool(first)


@given(st.lists(st.text("abc:[]", min_size=1, max_size=8), unique=True))
def test_laws_of_disguises(tests):
    """Every test has a name of its own, cases of a function share theirs, and no name is a canary's."""
    found = disguised(tests, KEY)
    assert list(found) == tests and len({*found.values()}) == len(tests)
    for test, name in found.items():
        head, bracket, case = test.partition("[")
        assert re.fullmatch(re.escape(head) + "_[0-9a-f]{12}" + re.escape(bracket + case), name)
    assert disguised(["a[1]"], KEY)["a[1]"].partition("[")[0] == disguised(["a[2]"], KEY)["a[2]"].partition("[")[0]
    names = insert_canaries(TESTS, KEY)[1]
    assert not {*names} & {*disguised([name.rpartition("_")[0] for name in names], KEY).values()}


# G6: which half.

many = st.sets(st.text("abcdef[]0", min_size=1, max_size=6), min_size=2, max_size=30)


@given(many, st.text(min_size=1, max_size=8))
def test_laws_of_halves(tests, task):
    visible, held = halves(tests, task)
    assert sorted(visible + held) == sorted(tests) and not set(visible) & set(held)
    assert visible and held
    assert halves(sorted(tests, reverse=True), task) == (visible, held)
    groups = {test.partition("[")[0] for test in tests}
    if len(groups) > 1:
        assert not {test.partition("[")[0] for test in visible} & {test.partition("[")[0] for test in held}
        parts = [len({test.partition("[")[0] for test in half}) for half in (visible, held)]
        assert 0 <= parts[1] - parts[0] <= 1


def test_halves_by_hand():
    tests = [f"t{n}" for n in range(20)]
    splits = {halves(tests, f"task {n}") for n in range(20)}
    assert len(splits) > 15 and halves(tests, "a") != halves(tests, "a", b"key")
    visible, held = halves(["t[1]", "t[2]", "t[3]"], "a")
    assert len(visible) == 1 and len(held) == 2
    for tests, task in ((["t"], "a"), (["t", "t"], "a"), (["t", "u"], "")):
        with pytest.raises(ValueError, match="needs an id and at least two tests"):
            halves(tests, task)


# Rewards.

BEFORE = {"m.py": b"def f():\n    raise NotImplementedError\n\n\ndef g():\n    return 1\n"}
GOLD = {"m.py": b"def f():\n    x = 1\n    return x\n\n\ndef g():\n    return 1\n"}


def test_changed_lines_by_hand():
    assert changed(BEFORE, GOLD) == 3 == changed(GOLD, BEFORE) and changed(GOLD, GOLD) == 0
    assert changed(BEFORE, {**BEFORE, "n.py": b"a\n\nb\n"}) == 2
    assert added(b"a\nb\nc\n", b"a\nx\nb\nc\ny\n") == {2: "x", 5: "y"}
    assert added(b"", b"a\n") == {1: "a"} and added(b"a\n", b"") == {}


@given(st.lists(st.sampled_from("abc"), max_size=12), st.lists(st.sampled_from("abc"), max_size=12))
def test_laws_of_added_lines(old, new):
    """What is not new is left of the old text in its order."""
    one, other = "".join(f"{x}\n" for x in old).encode(), "".join(f"{x}\n" for x in new).encode()
    fresh = added(one, other)
    assert all(new[number - 1] == line for number, line in fresh.items())
    kept = iter(old)
    assert all(line in kept for number, line in enumerate(new, 1) if number not in fresh)
    assert bool(fresh or added(other, one)) == (old != new)


def test_many_lines_take_no_long_time():
    """Twenty thousand lines against as many: compared in pairs, they would take minutes."""
    long = {"m.py": b"a\nb\n" * 10_000}
    assert changed({"m.py": b"b\na\n" * 10_000}, long) == 2
    assert reward(True, BEFORE, long, GOLD).total == pytest.approx(0.9, abs=1e-3)


def test_depth_breaks_no_reward():
    for text in ("x = a" + ".b" * 3000 + "()", "x = " + "1 + " * 3000 + "1"):
        assert conformance({"m.py": b""}, {"m.py": text.encode() + b"\n"}).score == 0


def test_succinctness_by_hand():
    assert succinctness(BEFORE, GOLD, GOLD) == 1.0 == succinctness(BEFORE, BEFORE, GOLD)
    long = {"m.py": GOLD["m.py"].replace(b"    x = 1\n", b"    x = 1\n" * 5)}
    assert changed(BEFORE, long) == 7 and succinctness(BEFORE, long, GOLD) == pytest.approx(1.2 * 3 / 7)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("    return 1 ", "space at the end of the line"),
        ("\treturn 1", "tabs where the file has spaces"),
        (f"    return {'1' * 100}", "the line has 111 characters; no other has more than 100"),
        ("    print(1)", "print is left"),
        ("    breakpoint()", "breakpoint is left"),
        ("    import os", "os is imported and not used"),
        ("    from os import path as p, sep", "p is imported and not used"),
        ("    return None == 1 or 1 == None", "a comparison with None by =="),
        ("    def someThing(): pass", "someThing is not written as the file writes names"),
        ("    def some(x=[]): pass", "a default that can be changed"),
        ("    return (", "the file cannot be parsed"),
    ],
)
def test_problems_of_new_lines(line, problem):
    after = {"m.py": BEFORE["m.py"].replace(b"    raise NotImplementedError", line.encode())}
    found = conformance(BEFORE, after)
    assert any(said.partition(": ")[2] == problem for said in found.problems), found
    assert found.score < 1
    # The same line where it already stood is nobody's fault.
    assert conformance(after, after).problems == ()


def test_conformance_by_hand():
    assert conformance(BEFORE, GOLD).problems == () and conformance(BEFORE, GOLD).score == 1.0
    bare = {"m.py": GOLD["m.py"].replace(b"    x = 1\n", b"    try:\n        x = 1\n    except:\n        x = 2\n")}
    assert conformance(BEFORE, bare).problems == ("m.py:4: a bare except",) and conformance(
        BEFORE, bare
    ).score == pytest.approx(1 - 3 / 5)
    thoughts = {"m.py": GOLD["m.py"].replace(b"    x = 1\n", b"    # hm\n" * 9 + b"    x = 1\n")}
    assert conformance(BEFORE, thoughts).problems == ("m.py:2: 9 lines of comments for 2 of code",)
    assert conformance(BEFORE, {"m.py": GOLD["m.py"].rstrip()}).problems == (
        "m.py:7: no line end at the end of the file",
    )
    assert (
        conformance(BEFORE, {"m.py": GOLD["m.py"].replace(b"\n", b"\r\n")}).problems[0]
        == "m.py:1: other line ends than before"
    )
    tabs = {"m.py": b"def f():\n\treturn 1\n"}
    assert conformance(tabs, {"m.py": b"def f():\n    return 2\n"}).problems == (
        "m.py:2: spaces where the file has tabs",
    )
    assert conformance(BEFORE, {**BEFORE, "notes.txt": b"print( \n"}).lines == 0


def test_rewards_by_hand():
    whole = reward(True, BEFORE, GOLD, GOLD)
    assert (whole.success, whole.succinctness, whole.conformance, whole.total) == (True, 1.0, 1.0, 1.0)
    assert reward(False, BEFORE, GOLD, GOLD).total == 0.0
    flagged = reward(True, BEFORE, GOLD, GOLD, ("changes conftest",))
    assert flagged.total == 0.0 and flagged.success and flagged.flags == ("changes conftest",)
    long = {"m.py": GOLD["m.py"].replace(b"    x = 1\n", b"    x = 1\n" * 5)}
    assert reward(True, BEFORE, long, GOLD).total == pytest.approx(0.8 + 0.1 * 1.2 * 3 / 7 + 0.1)
    assert reward(True, BEFORE, long, GOLD, weights=Weights(1.0, 0.0, 0.0)).total == 1.0
    for parts in ((0.5, 0.5, 0.5), (1.2, -0.1, -0.1)):
        with pytest.raises(ValueError, match="weights must not be negative and must make 1"):
            Weights(*parts)


def test_a_seal_is_one_line_of_ascii():
    line = seal(KEY, "t[é\n]", "passed")
    assert line.isascii() and line.count(b"\n") == 1 and json.loads(line.partition(b" ")[2]) == ["t[é\n]", "passed"]


ARGUMENTS = """
import functools, inspect, sys, _pytest.compat
sys.path.insert(0, sys.argv[1])
import play

class A:
    def method(self, a, b=1): ...
    @staticmethod
    def static(a): ...
    @classmethod
    def of_class(cls, a): ...
    def none(): ...

def plain(a, /, b, c=1, *rest, d, e=2, **more): ...
def rest(*rest, **more): ...
def only(*, a): ...
@functools.wraps(plain)
def wrapped(): ...
def signed(): ...
signed.__signature__ = inspect.signature(lambda x, y: 0)
functions = [plain, rest, only, wrapped, signed, lambda: 0, lambda a: 0, lambda a=1: 0, lambda *, a: 0, len, A().method]
for function in functions:
    assert play.argument_names(function) == _pytest.compat.getfuncargnames(function), function
for name in ("method", "static", "of_class", "none"):
    given = {"name": name, "cls": A}
    function = getattr(A, name)
    assert play.argument_names(function, **given) == _pytest.compat.getfuncargnames(function, **given), name
"""


def test_arguments_are_found_as_pytest_finds_them():
    inside = Path(__file__).resolve().parents[2] / "environments" / "grading" / "inside"
    subprocess.run([sys.executable, "-c", ARGUMENTS, str(inside)], check=True)
