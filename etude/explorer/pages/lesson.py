"""A lesson as it is in the repository: its executed notebook, or the script that the notebook is made from."""

import base64
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import streamlit as st

from etude import catalog
from etude.explorer.page import PLACES, Page, link
from kit.disk import parse_json, read_json
from kit.settings import RunError
from lessons import syllabus

ANSI = re.compile(r"\x1b\[[0-9;]*m")
SOURCE = re.compile(r"```python\n(.*?)\n*```\s*", re.DOTALL)
"""What `lessons.course.source` displays."""
WIDTH = 860
"""Width of the text in pixels; screens may be wider."""
LONGEST = 12
"""Maximum number of characters of the URL's lesson number that are shown in an error."""


@dataclass
class Cell:
    """One cell of a lesson."""

    kind: str
    """markdown or code."""
    text: str
    """Its text."""
    tags: list[str] = field(default_factory=list)
    """Tags from the script: exercise, check, solution."""
    outputs: list[dict] = field(default_factory=list)
    """Outputs as in the notebook."""


def join_lines(text: str | list[str]) -> str:
    """A text; a notebook may store it as a list of lines."""
    return text if isinstance(text, str) else "".join(text)


@lru_cache(32)
def of_notebook(path: Path, changed: float) -> list[Cell]:
    """The cells of a notebook with their outputs. `changed`: modification time, part of the cache key. Raises RunError
    for a broken notebook."""
    try:
        cells = read_json(path)["cells"]
        all_cells = (
            Cell(c["cell_type"], join_lines(c["source"]), c.get("metadata", {}).get("tags", []), c.get("outputs", []))
            for c in cells
        )
        # those of lessons/badges.py are for readers elsewhere
        return [cell for cell in all_cells if "colab" not in cell.tags]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"notebook {path.name} cannot be read ({error!r}); rebuild it with: make lessons") from None


def of_script(text: str) -> list[Cell]:
    """The cells of a percent script."""
    cells: list[Cell] = []
    for part in re.split(r"^# %%", text, flags=re.MULTILINE)[1:]:
        head, _, body = part.partition("\n")
        tags = re.search(r"tags=(\[[^\]]*\])", head)
        markdown = "[markdown]" in head
        body = re.sub(r"^# ?", "", body, flags=re.MULTILINE) if markdown else body
        cells.append(Cell("markdown" if markdown else "code", body.strip("\n"), parse_json(tags[1]) if tags else []))
    return cells


def show_output(output: dict) -> None:
    """One output: a picture, or text."""
    if output["output_type"] == "stream":
        st.code(ANSI.sub("", join_lines(output["text"])).rstrip("\n"), language=None)
        return
    if output["output_type"] == "error":
        st.error(f"{output['ename']}: {output['evalue']}")
        return
    data = output.get("data", {})
    if "image/png" in data:
        st.image(base64.b64decode(join_lines(data["image/png"])), width="content")
    elif "text/markdown" in data:
        markdown = join_lines(data["text/markdown"])
        code = SOURCE.fullmatch(markdown)
        if code:
            st.code(code[1], language="python", wrap_lines=True)
        else:
            st.markdown(markdown)
    elif "text/plain" in data:
        st.code(join_lines(data["text/plain"]), language=None)


def show_cell(cell: Cell) -> None:
    """One cell with its outputs below. Solutions are collapsed."""
    if cell.kind == "markdown":
        st.markdown(drawable(cell.text))
        return
    if cell.kind != "code":
        return
    with st.expander("Solution") if "solution" in cell.tags else st.container():
        if cell.text.strip():
            st.code(cell.text, language="python", wrap_lines=True)
        for output in cell.outputs:
            show_output(output)


def drawable(text: str) -> str:
    """Markdown for Streamlit. Links to files of the repository would lead nowhere, so only the file names stay. The $$
    of a displayed equation get lines of their own; otherwise Streamlit does not recognise an equation of several
    lines."""
    text = re.sub(r"\$\$(.+?)\$\$", lambda m: f"\n$$\n{m[1].strip()}\n$$\n", text, flags=re.DOTALL)
    return re.sub(r"\[([^\]]+)\]\((?!https?://|#)([^)]+)\)", lambda m: m[1] if "`" in m[1] else f"`{m[1]}`", text)


def find_neighbours(course: list[syllabus.Lesson], number: int) -> Iterator[syllabus.Lesson | None]:
    """The previous lesson and the next one."""
    index = [lesson.number for lesson in course].index(number)
    yield course[index - 1] if index else None
    yield course[index + 1] if index + 1 < len(course) else None


def link_lesson(lesson: syllabus.Lesson, label: str) -> None:
    """A link to a lesson."""
    link("lesson", label, ":material/school:", n=f"{lesson.number:02d}")


def show_contents(course: list[syllabus.Lesson]) -> None:
    """All lessons, each with a link, and with links to the pages on which its technique can be played with."""
    pages = {row.lesson: row.page for row in catalog.TECHNIQUES if row.page}
    hours = sum(lesson.minutes for lesson in course) / 60
    st.markdown(f"{len(course)} lessons, about {hours:.0f} hours, best read in this order.")
    for lesson in course:
        with st.container(horizontal=True):
            link_lesson(lesson, f"{lesson.number:02d} · {lesson.title}")
            if page := PLACES.get(pages.get(f"lessons/{lesson.path.name}", "")):
                link(page.url_path, page.title, ":material/tune:")
        st.caption(f"About {lesson.minutes} minutes. Prerequisites: {lesson.before}. After it you can {lesson.can}")


def show_overview() -> None:
    """The course as a page of its own."""
    with st.container(width=WIDTH):
        show_contents(syllabus.lessons())
        st.caption("`etude lesson N` opens a copy of a lesson in Jupyter, for you to edit.")


def draw() -> None:
    """The lesson named by ?n=NN, or the list of all lessons."""
    try:
        with st.container(width=WIDTH):
            show_lesson(syllabus.lessons(), st.query_params.get("n", ""))
    except (RunError, OSError) as error:
        st.error(str(error))


def show_lesson(course: list[syllabus.Lesson], number_text: str) -> None:
    lessons_by_number = {lesson.number: lesson for lesson in course}
    # Short, because int() refuses thousands of digits.
    if not (
        len(number_text) <= LONGEST
        and number_text.isascii()
        and number_text.isdigit()
        and int(number_text) in lessons_by_number
    ):
        if number_text:
            st.warning(
                f"There is no lesson {number_text if len(number_text) <= LONGEST else number_text[:LONGEST] + '…'}."
            )
        st.title("The course")
        show_contents(course)
        return
    lesson = lessons_by_number[int(number_text)]
    path = syllabus.notebook(lesson.path)
    if path.is_file():
        cells = of_notebook(path, path.stat().st_mtime)
    else:
        st.info("This lesson has not been executed here, so it has no outputs. To execute it: make lessons.")
        cells = of_script(lesson.path.read_text(encoding="utf-8"))
    link("course", "The course", ":material/arrow_back:")
    for cell in cells:
        show_cell(cell)
    st.divider()
    st.caption(f"`etude lesson {lesson.number}` opens it in Jupyter. Source: {lesson.source}.")
    for label, neighbour in zip(("Previous", "Next"), find_neighbours(course, lesson.number), strict=True):
        if neighbour:
            link_lesson(neighbour, f"{label}: {neighbour.number:02d} · {neighbour.title}")


PAGE = Page(
    name="course",
    title="The course",
    says="One lesson for each technique of the recipe: the idea, the code step by step, a live experiment, a "
    "demonstration of the typical mistake, and exercises with automatic checks. This page shows them; `etude lesson "
    "0` opens the first one in Jupyter.",
    draw=show_overview,
)
