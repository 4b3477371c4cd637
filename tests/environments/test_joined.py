"""Tasks of several files at once: which pieces go together, what they become, and that recipes without them stay as
they are."""

import json
import sys
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from environments.tasks.check import exam_of
from environments.tasks.make import make_tasks, task_id, unions
from environments.tasks.package import Package
from environments.tasks.recipe import compare_recipe, make_recipe
from environments.tasks.task_cache import load_task, save_task
from ref.feature_deletion import (
    CHECKS,
    FILE,
    PROGRAM,
    Piece,
    are_independent,
    bodies,
    delete,
    difficulty,
    joined,
    undelete,
)
from ref.source_text import Edit, Patch
from tests.environments.test_tasks import MIT

OTHER = "clock.py"
CLOCK = b'''
def seconds(text):
    """The seconds of a time that is written as 1:02:03."""
    total = 0
    for part in text.strip().split(":"):
        total = 60 * total + int(part)
    return total

def spoken(total):
    """A number of seconds in words."""
    minutes, rest = divmod(total, 60)
    if not minutes:
        unit = "second" if rest == 1 else "seconds"
        return f"{rest} {unit}"
    if rest == 0 and minutes != 1:
        return f"{minutes} minutes sharp"
    return f"{minutes} min {rest} s"
'''
TIMES = {
    **{
        f"read {n}": ("seconds", (text,), said)
        for n, (text, said) in enumerate([("7", 7), ("1:00", 60), ("1:02:03", 3723), (" 0:09", 9)])
    },
    **{
        f"short {n}": ("spoken", (total,), said)
        for n, (total, said) in enumerate([(1, "1 second"), (2, "2 seconds"), (0, "0 seconds")])
    },
    **{f"sharp {n}": ("spoken", (60 * n,), f"{n} minutes sharp") for n in (2, 3, 4)},
    **{f"long {n}": ("spoken", (60 + n,), f"1 min {n} s") for n in (0, 1, 2)},
}
PACKAGE = Package(
    "words",
    "1.0",
    {FILE: PROGRAM, OTHER: CLOCK, "LICENSE": MIT},
    {"tests/test_words.py": b"# both tables"},
    "MIT",
    "folder",
)


class Player:
    """The tests of both files, in this process: they are ours. `shares`: tests of the second file also call the first
    one."""

    without = frozenset()

    def __init__(self, shares=False):
        self.shares = shares

    def outcomes(self, files, changes=({},), only=(), seed=0):
        runs = zip(changes, only or [None] * len(changes), strict=True)
        return [
            {test: said for test, said in self.played({**files, **change})[0].items() if tests is None or test in tests}
            for change, tests in runs
        ]

    def coverage(self, files):
        return self.played(files)[1]

    def played(self, files):
        outcomes, coverage, spaces = {}, {"": set()}, {}
        for file in (FILE, OTHER):
            exec(compile(files[file], file, "exec"), spaces.setdefault(file, {}))

        def trace(frame, event, _):
            if frame.f_code.co_filename in spaces and event == "line":
                coverage[test].add((frame.f_code.co_filename, frame.f_lineno))
            return trace if frame.f_code.co_filename in spaces else None

        before = sys.gettrace()
        try:
            for file, table in ((FILE, CHECKS), (OTHER, TIMES)):
                for test, (name, arguments, said) in table.items():
                    coverage[test] = set()
                    sys.settrace(trace)
                    try:
                        also = not self.shares or file == FILE or spaces[FILE]["plural"]("cat") == "cats"
                        outcomes[test] = "passed" if also and spaces[file][name](*arguments) == said else "failed"
                    except Exception:
                        outcomes[test] = "failed"
                    finally:
                        sys.settrace(before)
        finally:
            sys.settrace(before)
        return outcomes, coverage


def test_joined_tasks_by_hand():
    """Each is one piece of each file, fails the tests of both and no others, comes back byte for byte, and is harder
    than its parts."""
    made = make_tasks(PACKAGE, Player(), join=2)
    alone = make_tasks(PACKAGE, Player())
    assert made.tasks[: len(alone.tasks)] == alone.tasks and made.piece_count > alone.piece_count, (
        "the tasks of before are there, and stay the same"
    )
    several = made.tasks[len(alone.tasks) :]
    assert (
        len(several) >= 4
        and {task.piece.way for task in several} == {"several"}
        and len({task.id for task in made.tasks}) == len(made.tasks)
    )
    parts = {one.file: {} for task in alone.tasks for one in task.piece.patches}
    for task in alone.tasks:
        parts[task.piece.patches[0].file][task.piece.patches] = task
    for task in several:
        assert [one.file for one in task.piece.patches] == [OTHER, FILE] and undelete(
            delete(PACKAGE.files, task.piece), task.piece
        ) == PACKAGE.files
        both = [parts[one.file][(one,)] for one in task.piece.patches]
        assert {*task.visible, *task.held_out} == {test for part in both for test in (*part.visible, *part.held_out)}
        assert all({*task.visible} & {*part.piece.tests} and {*task.held_out} & {*part.piece.tests} for part in both), (
            "each part shows itself"
        )
        assert task.id == task_id(PACKAGE, task.piece) and task.difficulty.files == 2
        assert task.difficulty.bits > max(part.difficulty.bits for part in both) and task.difficulty.lines == sum(
            p.difficulty.lines for p in both
        )
        assert "Bring them back" in task.terse and f"In {FILE}:" in task.specified and f"In {OTHER}:" in task.specified
        assert f"Change only {OTHER}, {FILE}." in task.specified and FILE in exam_of(task, PACKAGE).editable
    assert (
        make_tasks(PACKAGE, Player(), join=2) == made and make_tasks(PACKAGE, Player(), join=3).tasks == made.tasks
    ), "there are two files"


def test_a_recipe_says_how_many_are_joined(tmp_path):
    """And one without joins is what it was, byte for byte."""
    alone, made = make_tasks(PACKAGE, Player()), make_tasks(PACKAGE, Player(), join=2)
    unused = {"left out": (), "slow": (), "ungradable": ()}
    before, after = make_recipe("words", PACKAGE, unused, alone), make_recipe("words", PACKAGE, unused, made, 2)
    assert [*before] == ["package", "pieces", "tasks"] and after["join"] == 2
    assert (
        before == make_recipe("words", PACKAGE, unused, alone, 1)
        and [row for row in after["tasks"] if row["way"] != "several"] == before["tasks"]
    )
    assert compare_recipe(after, PACKAGE, made) == () and len(compare_recipe(after, PACKAGE, alone)) == len(
        made.tasks
    ) - len(alone.tasks)
    save_task(tmp_path, made.tasks[-1], PACKAGE)
    assert load_task(tmp_path, made.tasks[-1].id, PACKAGE) == made.tasks[-1]


def test_pieces_whose_tests_overlap_are_not_joined():
    """Every test of the clock also asks for a plural: with that gone, all of them fail, and no piece of the clock is
    independent of it."""
    made = make_tasks(PACKAGE, Player(shares=True), join=2)
    several = [task for task in made.tasks if task.piece.way == "several"]
    assert several and not any("plural" in task.piece.name for task in several)


def test_a_join_that_breaks_another_test_is_no_task():
    """The checks are those of all pieces: here a test fails only where something of both files is gone."""

    class Either(Player):
        def played(self, files):
            outcomes, coverage = super().played(files)
            lost = [
                any(said == "failed" for test, said in outcomes.items() if test in table) for table in (CHECKS, TIMES)
            ]
            return {**outcomes, "either": "failed" if all(lost) else "passed"}, {**coverage, "either": set()}

    made = make_tasks(PACKAGE, Either(), join=2)
    assert made.tasks and not any(task.piece.way == "several" for task in made.tasks)
    reasons = [why for name, why in made.reasons.items() if name.startswith("several")]
    assert reasons and all(why == ("tests: either fails, although it never executed the piece",) for why in reasons)


# The functions alone.


def piece(number, files, tests):
    patches = tuple(Patch(file, (Edit(1, b"x\n", b"\n"),), f"{file}-{number}", "after") for file in sorted(files))
    return Piece("slice", "+".join(f"{file}:f{number}" for file in sorted(files)), patches, tuple(sorted(tests)))


ROWS = st.lists(st.tuples(st.text("abcd", min_size=1, max_size=2), st.text("uvwxyz", max_size=3)), max_size=6)


@given(ROWS, st.integers(2, 4))
def test_unions_are_independent_and_each_once(rows, most):
    """At most so many, and none where nothing goes together. In another order the same ones."""
    pieces = [piece(number, {*files}, {*tests}) for number, (files, tests) in enumerate(rows)]
    found = unions(pieces, most)
    assert {*found} == {*unions(pieces[::-1], most)} and len({one.patches for one in found}) == len(found) <= len(
        pieces
    )
    for one in found:
        parts = [part for part in pieces if {*part.patches} <= {*one.patches}]
        assert 2 <= len(parts) <= most and all(
            are_independent(a, b) and are_independent(b, a) for a, b in combinations(parts, 2)
        )
        assert joined(parts) == joined(parts[::-1]) == one and {*one.tests} == {
            test for part in parts for test in part.tests
        }
        assert [patch.file for patch in one.patches] == sorted({patch.file for patch in one.patches})
    assert bool(found) == any(are_independent(a, b) for a, b in combinations(pieces, 2))


def test_a_join_has_more_of_everything():
    """Of bodies of both files: lines, functions and files add up."""
    tree = {FILE: PROGRAM, OTHER: CLOCK}
    for a in (one for one in bodies(tree) if one.patches[0].file == FILE):
        for b in (one for one in bodies(tree) if one.patches[0].file == OTHER):
            whole, first, second = (difficulty(tree, one, 6) for one in (joined([a, b]), a, b))
            assert whole.lines == first.lines + second.lines and whole.functions == 2 and whole.files == 2
            assert whole.bits > max(first.bits, second.bits) and json.dumps(joined([a, b]).name)
