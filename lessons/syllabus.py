"""What the course has: read from the heads of the percent scripts, told by `etude lesson` and lessons/README.md.

    python -m lessons.syllabus       writes the table in lessons/README.md anew

The head of a lesson is its first cell:

    # # 5 · KL: three estimates, and two places to put them
    #
    # **After this lesson you can** say what k1, k2 and k3 estimate; ...
    #
    # *About 40 minutes. Prerequisites: lesson 4. Source: Composer 2 technical report, §4.1 and Figure 4.*
"""

import re
from dataclasses import dataclass
from pathlib import Path

from kit.disk import atomic_write
from kit.settings import RunError
from lessons.address import Address, stored

__all__ = ["FOLDER", "Lesson", "badge", "filled", "find", "lessons", "notebook", "read", "scripts"]

FOLDER = Path(__file__).resolve().parent
HEAD = re.compile(
    r"# (?P<number>\d+) · (?P<title>.+?)\n\n\*\*After this lesson you can\*\* (?P<can>.+?)\n\n"
    r"\*About (?P<minutes>\d+) minutes\. Prerequisites: (?P<before>.+?)\. Source: (?P<source>.+?)\*\n",
    re.DOTALL,
)


@dataclass(frozen=True)
class Lesson:
    """One lesson, as its head announces it."""

    path: Path
    """The percent script."""
    number: int
    """Its place in the course."""
    title: str
    """What it is about."""
    can: str
    """What one can do after it."""
    minutes: int
    """How long it takes."""
    before: str
    """What one should have read."""
    source: str
    """Whose idea it is."""


def scripts(folder: Path = FOLDER) -> list[Path]:
    """The percent scripts, in order."""
    return sorted(folder.glob("[0-9][0-9]_*.py"))


def notebook(script: Path) -> Path:
    """Where the notebook of a script lies."""
    return script.parent / "notebooks" / f"{script.stem}.ipynb"


def read(script: Path) -> Lesson:
    """The lesson of a percent script. RunError when its head is not that of a lesson, or bears another number than its
    name."""
    comment = script.read_text(encoding="utf-8").removeprefix("# %% [markdown]\n").partition("\n# %%")[0]
    match = HEAD.match(re.sub(r"^# ?", "", comment, flags=re.MULTILINE))
    if match is None:
        raise RunError(
            f"{script.name} has no head of a lesson: title, after this lesson you can, about N "
            f"minutes, prerequisites, source"
        )
    fields = {name: " ".join(value.split()) for name, value in match.groupdict().items()}
    if int(fields["number"]) != int(script.name[:2]):
        raise RunError(f"{script.name} calls itself lesson {fields['number']}")
    return Lesson(script, int(fields.pop("number")), minutes=int(fields.pop("minutes")), **fields)


def lessons(folder: Path = FOLDER) -> list[Lesson]:
    """The course, in order."""
    return [read(script) for script in scripts(folder)]


def find(number: int) -> Lesson:
    """A lesson by its number. RunError when there is none."""
    lessons_by_number = {lesson.number: lesson for lesson in lessons()}
    if number not in lessons_by_number:
        raise RunError(f"there is no lesson {number}; there are {', '.join(map(str, lessons_by_number))}")
    return lessons_by_number[number]


def badge(script: Path, address: Address) -> str:
    """A picture, in Markdown, that opens the notebook of a script in Colab."""
    url = address.opens(f"lessons/notebooks/{notebook(script).name}")
    return f"[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]({url})"


def render_table(folder: Path) -> str:
    """The course as a Markdown table."""
    rows = ["| | lesson | after it you can | prerequisites | minutes |", "|---|---|---|---|---|"]
    course, address = lessons(folder), stored(folder)
    for lesson in course:
        path = notebook(lesson.path).relative_to(folder).as_posix()
        badge_text = f" {badge(lesson.path, address)}" if address else ""
        rows.append(
            f"| {lesson.number:02d} | [{lesson.title}]({path}) ([script]({lesson.path.name})){badge_text} | "
            f"{lesson.can} | {lesson.before} | {lesson.minutes} |"
        )
    hours = sum(lesson.minutes for lesson in course) / 60
    return "\n".join([*rows, "", f"All of it: about {hours:.0f} hours."])


def filled(text: str, folder: Path = FOLDER) -> str:
    """The text of lessons/README.md with the table made anew."""
    block = f"<!-- syllabus -->\n{render_table(folder)}\n<!-- /syllabus -->"
    return re.sub(r"<!-- syllabus -->\n.*?<!-- /syllabus -->", lambda _: block, text, flags=re.DOTALL)


if __name__ == "__main__":
    readme = FOLDER / "README.md"
    atomic_write(readme, filled(readme.read_text(encoding="utf-8")))
