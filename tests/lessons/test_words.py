"""What lessons say: Markdown that is taken into a notebook without executing it, and the parts of prose that every
lesson has."""

import json
import os
import subprocess
import sys

import nbformat
import pytest

from kit.settings import RunError
from lessons import build, syllabus

SCRIPT = """# %% [markdown]
# The first words.

# %%
import random

print(random.random())

# %% [markdown]
# Words between.

# %% tags=["exercise"]
answer = 41

# %%
answer + 1
"""


@pytest.fixture
def lesson(tmp_path):
    """A lesson whose notebook holds outputs that no second execution would give."""
    script = tmp_path / "07_nothing.py"
    script.write_text(SCRIPT, encoding="utf-8")
    book = build.unexecuted(script)
    for number, cell in enumerate(cell for cell in book.cells if cell.cell_type == "code"):
        cell.execution_count = number + 1
        cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text=f"0.5{number}\n  two lines, é\n")]
    build.write(script, book)
    return script


def outputs(script):
    """Every code cell of the notebook as its file has it: source, tags, outputs."""
    book = json.loads(syllabus.notebook(script).read_text(encoding="utf-8"))
    return [{**cell, "id": ""} for cell in book["cells"] if cell["cell_type"] == "code"]


def test_changed_words_are_taken_over_and_outputs_stay(lesson):
    """Also where Markdown cells are added and dropped, so that the cells below get other numbers."""
    before, made = outputs(lesson), build.made_from(lesson)
    text = SCRIPT.replace("The first words.", "Other words.").replace("# %% [markdown]\n# Words between.\n\n", "")
    lesson.write_text(text + "\n# %% [markdown]\n# A last word.\n\n# %% [markdown]\n# And another.\n", encoding="utf-8")
    assert build.differs(lesson) and build.made_from(lesson) == made, "what was executed is what it was"
    build.write(lesson, build.reworded(lesson))
    assert outputs(lesson) == before and not build.differs(lesson) and not build.changed(lesson)
    book = nbformat.read(syllabus.notebook(lesson), as_version=4)
    assert [cell.source for cell in book.cells if cell.cell_type == "markdown"] == [
        "Other words.",
        "A last word.",
        "And another.",
    ]
    nbformat.validate(book)


def test_the_record_of_what_was_executed_stays(lesson):
    """Outputs that are older than a file which the lesson imports do not become current by new words."""
    book = nbformat.read(syllabus.notebook(lesson), as_version=4)
    book.metadata["etude"] = {"made_from": "older"}
    build.write(lesson, book)
    lesson.write_text(SCRIPT.replace("first", "last"), encoding="utf-8")
    build.write(lesson, build.reworded(lesson))
    assert nbformat.read(syllabus.notebook(lesson), as_version=4).metadata.etude == {"made_from": "older"}
    assert not build.differs(lesson) and build.changed(lesson)


FIRST, SECOND = SCRIPT.index("# %% tags"), SCRIPT.rindex("# %%")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (SCRIPT.replace("answer = 41", "answer = 43"), "code cell 2 is not the one that was executed"),
        (SCRIPT.replace('tags=["exercise"]', 'tags=["check"]'), "code cell 2 is not the one that was executed"),
        (
            SCRIPT[:FIRST] + SCRIPT[SECOND:] + "\n" + SCRIPT[FIRST:SECOND],
            "code cell 2 is not the one that was executed",
        ),
        (SCRIPT + "\n# %%\nprint(answer)\n", "has 4 code cells, and 3 were executed"),
        (SCRIPT[:SECOND], "has 2 code cells, and 3 were executed"),
    ],
    ids=["source", "tags", "order", "added", "dropped"],
)
def test_changed_code_has_to_be_executed(lesson, text, says):
    before = syllabus.notebook(lesson).read_bytes()
    lesson.write_text(text.replace("first words", "new words"), encoding="utf-8")
    with pytest.raises(RunError, match=rf"07_nothing:? {says}; execute it: python -m lessons.build 07"):
        build.reworded(lesson)
    assert syllabus.notebook(lesson).read_bytes() == before and build.changed(lesson)


def test_code_without_outputs_has_to_be_executed(lesson):
    build.write(lesson, build.unexecuted(lesson))
    with pytest.raises(RunError, match="never executed; execute it"):
        build.reworded(lesson)
    for text in ("{", None):
        syllabus.notebook(lesson).unlink() if text is None else syllabus.notebook(lesson).write_text(text)
        with pytest.raises(RunError, match="has no notebook that can be read .*; execute it"):
            build.reworded(lesson)


def test_the_builder_takes_words_and_executes_nothing(lesson, monkeypatch, capsys):
    """One line for each notebook that has changed; an error and exit code 1 where code has."""
    monkeypatch.setattr(build, "scripts", lambda: [lesson])
    monkeypatch.setattr(build, "executed", lambda script: pytest.fail("executed"))
    monkeypatch.setattr(sys, "argv", ["build", "--words"])
    assert build.main() == 0 and capsys.readouterr().out == ""
    lesson.write_text(SCRIPT.replace("first", "last"), encoding="utf-8")
    assert build.main() == 0 and capsys.readouterr().out == "07_nothing: words\n"
    assert not build.differs(lesson)
    lesson.write_text(SCRIPT.replace("41", "42"), encoding="utf-8")
    assert build.main() == 1
    error = capsys.readouterr().err
    assert error.startswith("error: 07_nothing: code cell 2") and error.count("\n") == 1


every = pytest.mark.parametrize("script", syllabus.scripts(), ids=lambda script: script.stem)


@every
def test_a_lesson_asks_first_answers_later_and_ends_with_a_challenge(script):
    """One question to predict, before the first code; one answer, after code that was executed in between; and the
    command of a challenge."""
    cells = json.loads(syllabus.notebook(script).read_text(encoding="utf-8"))["cells"]
    words = {number: "".join(cell["source"]) for number, cell in enumerate(cells) if cell["cell_type"] == "markdown"}

    def starts(opening):
        """Where a paragraph begins with these words: number of the cell, the paragraph."""
        return [
            (number, part) for number, text in words.items() for part in text.split("\n\n") if part.startswith(opening)
        ]

    ((asked, question),), ((answered, answer),) = starts("**Predict first.**"), starts("**Your prediction:**")
    assert "?" in question and len(answer) > 40
    assert not any(cell["cell_type"] == "code" for cell in cells[:asked]), "the question comes before the first code"
    assert any(cell.get("outputs") for cell in cells[asked:answered]), "between question and answer lies an experiment"
    challenge, _, rest = words[len(cells) - 1].partition("## Open challenge\n")[2].partition("\n## Where to read on")
    assert f"`etude challenge {int(script.name[:2])}`" in challenge and len(challenge) > 80 and rest


def test_a_lesson_runs_as_a_script(tmp_path):
    """From any folder, where etude is installed or on the path. The lessons' folder is then the first in which modules
    are looked for, so no file there may bear the name of one of Python's own."""
    assert not {path.stem for path in syllabus.FOLDER.glob("*.py")} & set(sys.stdlib_module_names)
    script = syllabus.find(17).path
    environment = {**os.environ, "PYTHONPATH": str(syllabus.FOLDER.parent), "ETUDE_QUICK": "1", "MPLBACKEND": "Agg"}
    done = subprocess.run([sys.executable, script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(f"Exercise {number}: solved" in done.stdout for number in (1, 2, 3)) and not any(tmp_path.iterdir())
