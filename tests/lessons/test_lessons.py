"""Every lesson runs, has its parts, checks its exercises, and is the notebook that is committed.

Lessons are played in this process, quick: a kernel for each would take longer to start than most take to run. That a
notebook is executed as well is shown with one of them. While a lesson is played its checks also hear the answers of
`answers.py`: mistakes, which they have to refuse, and other ways to be right.
"""

import ast
import contextlib
import functools
import io
import json
import linecache
import shutil
import sys
import types
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import nbformat
import pytest
import torch

from kit.disk import seal_record
from kit.settings import RunError
from lessons import build, course, syllabus
from tests.lessons import answers

matplotlib.use("Agg")
ROOT = Path(__file__).resolve().parents[2]
LESSONS = syllabus.scripts()
KINDS = ("exercise", "check", "solution")
every = pytest.mark.parametrize("script", LESSONS, ids=lambda script: script.stem)


@dataclass(frozen=True)
class Heard:
    """What a check said."""

    kind: str
    """Tag of the cell that called it; for one of `answers.py` its kind."""
    number: int
    """The exercise."""
    solved: bool
    """Its verdict."""
    said: str
    """Its sentence."""
    answer: str = ""
    """Name of the answer, for one of `answers.py`."""


def kind_of(cell: nbformat.NotebookNode) -> str:
    return next((kind for kind in KINDS if kind in build.tags(cell)), "")


def walk(script: Path, runs: Path, given: dict[int, list[answers.Answer]]) -> list[Heard]:
    """Runs the cells of a lesson one after the other in a fresh namespace; all checks in order. After the solution of
    an exercise its check hears every answer that is given to it, each in place of the stub; the cells that follow see
    the solution again."""
    heard: list[Heard] = []
    check, module = course.check, types.ModuleType(f"lesson_{script.stem}")
    kind, answer, stub, asked = "", "", "", None

    def listen(number, test):
        nonlocal asked
        asked = number, test
        with contextlib.redirect_stdout(io.StringIO()) as said:
            solved = check(number, test)
        heard.append(Heard(kind, number, bool(solved), said.getvalue().strip(), answer))
        return solved

    def run(source, part):
        name = f"<{script.name}, {part}>"  # one for each: ranks are sent the text that stands under the name
        linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
        exec(compile(source, name, "exec"), module.__dict__)

    def hear(exercise, test):
        nonlocal kind, answer
        solved = dict(module.__dict__)
        for one in given.get(exercise, []):
            kind, answer = one.kind, one.name
            with torch.random.fork_rng([]):  # the cells that follow draw what they draw without answers
                torch.manual_seed(0)
                run(
                    stub, f"stub of exercise {exercise}"
                )  # an answer that defines something else is not taken for the solution
                run(one.source, f"exercise {exercise}, {one.name}")
                listen(exercise, test)
            module.__dict__.clear()
            module.__dict__.update(solved)
        answer = ""

    with pytest.MonkeyPatch.context() as patch, matplotlib.rc_context():
        patch.setattr(course, "check", listen)
        patch.setattr(course, "QUICK", True)
        patch.setattr(course, "RUNS", runs)
        patch.setattr(plt, "show", lambda *_, **__: None)  # Agg cannot, and says so
        patch.setenv("ETUDE_QUICK", "1")
        patch.setitem(sys.modules, module.__name__, module)
        for number, cell in enumerate(build.unexecuted(script).cells):
            if cell.cell_type == "code":
                kind = kind_of(cell)
                run(cell.source, f"cell {number}")
                stub = cell.source if kind == "exercise" else stub
                if kind == "solution" and asked:
                    hear(*asked)
        plt.close("all")
    return heard


def faults(script: Path, heard: list[Heard]) -> list[str]:
    """What is wrong with the exercises: cells out of order, a stub that passes, a solution that does not."""
    cells = [kind_of(cell) for cell in build.unexecuted(script).cells]
    found = [kind for kind in cells if kind]
    exercises = found.count("exercise")
    wrong = [f"{exercises} exercises are fewer than three"] if exercises < 3 else []
    if found != [*KINDS] * exercises:
        wrong.append(f"exercise, check and solution do not follow one another: {found}")
    heard = [one for one in heard if not one.answer]
    numbers = [(one.kind, one.number) for one in heard]
    if numbers != [(kind, number) for number in range(1, exercises + 1) for kind in KINDS[1:]]:
        wrong.append(f"not every exercise is checked once before and once after its solution: {numbers}")
    for one in heard:
        if one.kind == "check" and (one.solved or "not begun" not in one.said):
            wrong.append(f"the stub of exercise {one.number} should not be begun; its check says: {one.said}")
        if one.kind == "solution" and not one.solved:
            wrong.append(f"the solution of exercise {one.number} fails: {one.said}")
    return wrong


def misjudged(heard: list[Heard], given: dict[int, list[answers.Answer]]) -> list[str]:
    """What is wrong with the checks and with the answers given to them: a mistake that passes or that the check says
    nothing about, a right answer that does not pass, an exercise with too few answers or answers without their
    exercise."""
    wrong = []
    exercises = {one.number for one in heard if one.kind == "solution"}
    for number in sorted(exercises | set(given)):
        mistakes = [one for one in given.get(number, []) if one.kind != "right"]
        fine = len(given.get(number, [])) - len(mistakes)
        if number not in exercises:
            wrong.append(f"there is no exercise {number} for its answers")
        elif len(mistakes) < 2 or not fine:
            wrong.append(
                f"exercise {number} has {len(mistakes)} wrong and {fine} right answers; two and one are the least"
            )
    for one in (one for one in heard if one.answer):
        sentence = one.said.rpartition(": not yet.")[2].strip()
        if "not begun" in one.said:
            wrong.append(f"exercise {one.number}, {one.answer!r}: the answer leaves the stub, or calls one")
        elif one.kind == "right" and not one.solved:
            wrong.append(f"exercise {one.number} refuses {one.answer!r}, which is right: {one.said}")
        elif one.kind != "right" and one.solved:
            wrong.append(f"exercise {one.number} accepts {one.answer!r}, which is wrong")
        elif one.kind == "wrong" and (
            not sentence or sentence.startswith(("It stopped with", "The check does not hold."))
        ):
            wrong.append(f"exercise {one.number} does not say what is wrong with {one.answer!r}: {one.said}")
    return wrong


def names_of_ref() -> set[str]:
    """What the files of ref/ offer: every `__all__`."""
    names: set[str] = set()
    for path in (ROOT / "ref").glob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                names |= set(ast.literal_eval(node.value))
    return names


def redefined(script: Path) -> set[str]:
    """Functions and classes of a lesson, methods left out, that have the name of something in ref/."""
    tree, defined = ast.parse(script.read_text(encoding="utf-8")), set()
    methods = {part for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for part in node.body}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node not in methods:
            defined.add(node.name)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda):
            defined |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return defined & names_of_ref()


def missing(script: Path) -> list[str]:
    """Parts of a lesson that are not there."""
    cells = build.unexecuted(script).cells
    text = "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    code = "\n".join(cell.source for cell in cells if cell.cell_type == "code")
    headings = [line for line in text.splitlines() if line.startswith("## ")]
    lack = [
        part
        for part in ("## The idea", "## How it breaks", "## Where to read on")
        if not any(line.startswith(part) for line in headings)
    ]
    lack += [] if sum(line.startswith("## Exercise ") for line in headings) >= 3 else ["three headings ## Exercise N"]
    lack += [part for part in ("source(", "plt.", "check(") if part not in code]
    lack += [] if "$" in text else ["an equation"]
    lack += (
        []
        if headings and headings[-1].startswith("## Where to read on")
        else ["its last section says where to read on"]
    )
    return lack


def test_the_course_has_no_gap():
    assert [lesson.number for lesson in syllabus.lessons()] == [*range(19)]
    assert all(0 < lesson.minutes <= 120 for lesson in syllabus.lessons())


@pytest.fixture(scope="session")
def runs(tiny_run, tmp_path_factory):
    """Where lessons find their tiny run: that of all tests, which differs from theirs in the corpus alone."""
    folder = tmp_path_factory.mktemp("lessons")
    root = folder / course.tiny_folder().name
    shutil.copytree(tiny_run, root)
    record = json.loads((root / "config.json").read_text())
    record["config"]["data"]["corpus"] = None
    (root / "config.json").write_text(json.dumps(seal_record(record)))
    return folder


@pytest.fixture(scope="session")
def played(runs):
    """What is heard in a lesson; it is played once."""
    return functools.cache(lambda script: walk(script, runs, answers.of(script.stem)))


@every
def test_a_lesson_runs_and_its_checks_know_stub_from_solution(script, played):
    assert not faults(script, played(script))


@every
def test_checks_know_wrong_answers_from_right_ones(script, played):
    wrong = misjudged(played(script), answers.of(script.stem))
    assert not wrong, "\n".join(wrong)


def test_answers_are_those_of_the_lessons():
    assert answers.stems() == {script.stem for script in LESSONS}


@pytest.mark.parametrize("text", ["def one(): ...", "# wrong: empty\n", "# wrong: twice\na = 1\n# right: twice\na = 2"])
def test_a_text_that_is_no_list_of_answers(text):
    with pytest.raises(ValueError, match="no list of answers"):
        answers.read(text)


@every
def test_a_lesson_has_its_parts(script):
    assert not missing(script)
    assert syllabus.read(script).number == int(script.name[:2])


@every
def test_a_lesson_defines_nothing_that_ref_defines(script):
    assert not redefined(script)


@every
def test_the_notebook_is_its_script_executed(script):
    assert not build.differs(script)
    book = nbformat.read(syllabus.notebook(script), as_version=4)
    nbformat.validate(book)
    outputs = [(cell, out) for cell in book.cells if cell.cell_type == "code" for out in cell.outputs]
    assert not [out for _, out in outputs if out.output_type == "error" or out.get("name") == "stderr"]
    assert any("image/png" in out.get("data", {}) for _, out in outputs), "no figure"
    for cell in book.cells:
        if "solution" in build.tags(cell):
            assert cell.metadata.jupyter.source_hidden and any("solved" in out.get("text", "") for out in cell.outputs)
        assert not cell.metadata.get("execution"), "a time stamp"


def test_a_notebook_is_executed_as_the_lesson_says():
    """The kernel's way, on one lesson, quick: outputs, a figure, solved exercises, nothing of stderr."""
    script = next(script for script in LESSONS if script.stem == "05_kl")
    book = build.executed(script, quick=True)
    outputs = [out for cell in book.cells if cell.cell_type == "code" for out in cell.outputs]
    said = "".join(out.get("text", "") for out in outputs)
    assert all(f"Exercise {n}: not begun" in said and f"Exercise {n}: solved" in said for n in (1, 2, 3))
    assert any("image/png" in out.get("data", {}) for out in outputs) and all(
        out.get("name") != "stderr" for out in outputs
    )
    assert [cell.source for cell in book.cells] == [cell.source for cell in build.unexecuted(script).cells]


BROKEN = '''# %% [markdown]
# # 7 · Nothing
#
# **After this lesson you can** do nothing.
#
# *About 5 minutes. Prerequisites: nothing. Source: nowhere.*

# %%
from lessons.course import check, source

source(check)


# %%
def token_kl():
    """The name of something in ref."""


# %% tags=["exercise"]
def one():
    return 1


# %% tags=["check"]
def check_1():
    assert one() == 1


check(1, check_1)

# %% tags=["solution"]
def one():
    return 2


check(1, check_1)
'''

GIVEN = """
# wrong: what the check wants
def one():
    return 1

# wrong: another number
def one():
    return 3

# wrong: no number
def one():
    return int("one")

# wrong: nothing
def one():
    raise NotImplementedError

# stops: no number, as is said
def one():
    return int("one")

# right: what it should want
def one():
    return 2
"""


def test_what_is_wrong_with_a_lesson_is_seen(tmp_path):
    """A stub that passes, a solution that does not, a check that knows neither mistakes nor what is right, too few
    exercises and answers, missing parts, a name of ref's, another notebook."""
    script = tmp_path / "07_nothing.py"
    script.write_text(BROKEN, encoding="utf-8")
    wrong = "\n".join(faults(script, walk(script, tmp_path, {})))
    assert "1 exercises are fewer than three" in wrong
    assert "stub of exercise 1 should not be begun; its check says: Exercise 1: solved" in wrong
    assert "solution of exercise 1 fails: Exercise 1: not yet" in wrong
    given = {1: answers.read(GIVEN), 2: []}
    script.write_text(
        BROKEN + "\n# %%\nassert one() == 2\n", encoding="utf-8"
    )  # the cells that follow see the solution, not an answer
    assert [wrong.partition(": Exercise")[0] for wrong in misjudged(walk(script, tmp_path, given), given)] == [
        "there is no exercise 2 for its answers",
        "exercise 1 accepts 'what the check wants', which is wrong",
        "exercise 1 does not say what is wrong with 'another number'",
        "exercise 1 does not say what is wrong with 'no number'",
        "exercise 1, 'nothing': the answer leaves the stub, or calls one",
        "exercise 1 refuses 'what it should want', which is right",
    ]
    script.write_text(BROKEN, encoding="utf-8")
    assert misjudged(walk(script, tmp_path, {}), {}) == [
        "exercise 1 has 0 wrong and 0 right answers; two and one are the least"
    ]
    assert redefined(script) == {"token_kl"}
    script.write_text(
        BROKEN.replace("def token_kl():\n", "token_kl = lambda: None\n\n\ndef fine():\n"), encoding="utf-8"
    )
    assert redefined(script) == {"token_kl"}
    lack = missing(script)
    assert {
        "## The idea",
        "## How it breaks",
        "## Where to read on",
        "three headings ## Exercise N",
        "plt.",
        "an equation",
    } <= set(lack)
    assert build.differs(script) == "there is no notebook"
    made = syllabus.notebook(script)
    made.parent.mkdir()
    book = build.unexecuted(script)
    made.write_text(nbformat.writes(book), encoding="utf-8")
    assert build.differs(script) == "cell 1 of the notebook was not executed"
    for cell in book.cells:
        if cell.cell_type == "code":
            cell.execution_count = 1
    made.write_text(nbformat.writes(book), encoding="utf-8")
    assert not build.differs(script) and not build.changed(script)
    script.write_text(BROKEN.replace("return 2", "return 3"), encoding="utf-8")
    assert "is not the script's" in build.differs(script) and build.changed(script)
    made.write_text("{", encoding="utf-8")
    assert "cannot be read" in build.differs(script)
    book.cells.pop()
    made.write_text(nbformat.writes(book), encoding="utf-8")
    assert "cells" in build.differs(script)


@pytest.mark.parametrize(
    ("was", "now", "says"),
    [("# # 7 ·", "# # 8 ·", "calls itself lesson 8"), ("*About 5 minutes.", "*A while.", "no head of a lesson")],
)
def test_a_head_that_is_none(tmp_path, was, now, says):
    script = tmp_path / "07_nothing.py"
    script.write_text(BROKEN.replace(was, now), encoding="utf-8")
    with pytest.raises(RunError, match=says):
        syllabus.read(script)


def test_a_solution_that_solves_nothing_is_not_written(tmp_path):
    script = tmp_path / "07_nothing.py"
    script.write_text(BROKEN.replace('"check"', '"else"'), encoding="utf-8")
    with pytest.raises(RunError, match="does not solve its exercise: Exercise 1: not yet"):
        build.executed(script)


def test_solutions_are_folded(tmp_path):
    """Also where a script forgets to say so."""
    script = tmp_path / "07_nothing.py"
    script.write_text(BROKEN, encoding="utf-8")
    (solution,) = [cell for cell in build.unexecuted(script).cells if "solution" in build.tags(cell)]
    assert solution.metadata.jupyter.source_hidden
    for lesson in LESSONS:
        text = lesson.read_text(encoding="utf-8")
        assert text.count('tags=["solution"]') == text.count('tags=["solution"] jupyter={"source_hidden": true}')


def test_a_lesson_is_executed_again_when_what_it_imports_has_changed(tmp_path):
    script = tmp_path / "07_nothing.py"
    script.write_text("from ref import kl\n", encoding="utf-8")
    first = build.made_from(script)
    script.write_text("from ref import muon as kl\n", encoding="utf-8")
    assert len({first, build.made_from(script)}) == 2
    kinds = {build.made_from(path) for path in LESSONS}
    assert len(kinds) == len(LESSONS)


def test_the_syllabus_is_what_the_lessons_say():
    text = (ROOT / "lessons" / "README.md").read_text(encoding="utf-8")
    assert text == syllabus.filled(text), "write it again: python -m lessons.syllabus"
    assert all(f"({lesson.path.name})" in text for lesson in syllabus.lessons())
