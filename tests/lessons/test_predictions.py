"""A lesson asks before it tells: nothing above the question gives its answer away."""

import re

import pytest

from lessons import syllabus

QUESTION = "**Predict first.**"
TOLD = {
    3: ("without changing what comes out", "no test of equality"),
    5: ("not there", "no gradient"),
    6: ("give up", "almost free"),
    10: ("future", "what this lesson is about"),
    12: ("almost every", "hundredth"),
    14: ("without doing anything",),
    15: ("can be faked",),
    17: ("is nothing", "overline", "linear"),
}
"""Lesson → what its answer says, in words that once stood above its question."""


def prose(number: int) -> str:
    """The script of a lesson as one line, without the signs of comments."""
    text = syllabus.find(number).path.read_text(encoding="utf-8")
    return " ".join(re.sub(r"^# ?", "", text, flags=re.MULTILINE).split())


@pytest.mark.parametrize("number", TOLD)
def test_nothing_above_the_question_gives_its_answer_away(number):
    above, asked, _ = prose(number).partition(QUESTION)
    assert asked
    assert not [words for words in TOLD[number] if words in above]
