"""What lesson 0 shows first: an agent that solves a task, and one that it does not solve. It is the attempt that `etude
play` shows."""

import nbformat

from etude.play.example_agent import FOLDER
from etude.play.play import agent_in, play_one, task_of
from lessons import syllabus


def said() -> list[str]:
    """What the code cells of lesson 0 print, in order."""
    book = nbformat.read(syllabus.notebook(syllabus.find(0).path), as_version=4)
    printed = ["".join(out.get("text", "") for out in cell.outputs) for cell in book.cells if cell.cell_type == "code"]
    return [text for text in printed if text]


def test_lesson_0_begins_with_an_agent_that_solves_a_task():
    first, then, *_ = said()
    assert first.splitlines()[-1].startswith("solved: 100% of the hidden tests pass")
    assert then.splitlines()[-1].startswith("not solved:")


def test_the_first_attempt_is_that_of_etude_play():
    agent = agent_in(FOLDER)
    played = play_one(agent, task_of(agent.recipe, 4, None), 0.0, 0)
    assert played.success
    shown = [line.partition("│ ")[2] for line in said()[0].splitlines() if "│ " in line]
    assert shown == [line for piece in played.pieces for line in piece.text.split("\n")]
