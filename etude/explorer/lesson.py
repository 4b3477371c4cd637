"""A lesson as it stands in the repository: its executed notebook, or the script that the notebook is made from."""

import base64
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import streamlit as st

from etude.explorer.page import LESSON
from kit.settings import RunError
from lessons import syllabus

ANSI = re.compile(r"\x1b\[[0-9;]*m")
SOURCE = re.compile(r"```python\n(.*?)\n*```\s*", re.DOTALL)
"""What `lessons.course.source` displays."""
WIDTH = 860
"""Pixels of a line of text; screens may be wider."""
LONGEST = 12
"""Characters of the URL's number that are looked at."""


@dataclass
class Cell:
    """One cell of a lesson."""

    kind: str
    """markdown or code."""
    text: str
    """What is in it."""
    tags: list[str] = field(default_factory=list)
    """As the script gives them: exercise, check, solution."""
    outputs: list[dict] = field(default_factory=list)
    """As the notebook holds them."""


def joined(text: str | list[str]) -> str:
    """A text that a notebook may hold as a list of lines."""
    return text if isinstance(text, str) else "".join(text)


@lru_cache(32)
def of_notebook(path: Path, changed: float) -> list[Cell]:
    """The cells of a notebook with their outputs; `changed`: when the file was, so that a new one is read. RunError where it is broken."""
    try:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        return [Cell(c["cell_type"], joined(c["source"]), c.get("metadata", {}).get("tags", []), c.get("outputs", [])) for c in cells]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"notebook {path.name} cannot be read ({error!r}); make it again with: make lessons") from None


def of_script(text: str) -> list[Cell]:
    """The cells of a percent script."""
    cells: list[Cell] = []
    for part in re.split(r"^# %%", text, flags=re.MULTILINE)[1:]:
        head, _, body = part.partition("\n")
        tags = re.search(r"tags=(\[[^\]]*\])", head)
        markdown = "[markdown]" in head
        body = re.sub(r"^# ?", "", body, flags=re.MULTILINE) if markdown else body
        cells.append(Cell("markdown" if markdown else "code", body.strip("\n"), json.loads(tags[1]) if tags else []))
    return cells


def show_output(output: dict) -> None:
    """One output: a picture, or text."""
    if output["output_type"] == "stream":
        st.code(ANSI.sub("", joined(output["text"])).rstrip("\n"), language=None)
        return
    if output["output_type"] == "error":
        st.error(f"{output['ename']}: {output['evalue']}")
        return
    data = output.get("data", {})
    if "image/png" in data:
        st.image(base64.b64decode(joined(data["image/png"])), width="content")
    elif "text/markdown" in data:
        shown = joined(data["text/markdown"])
        code = SOURCE.fullmatch(shown)
        if code:
            st.code(code[1], language="python", wrap_lines=True)
        else:
            st.markdown(shown)
    elif "text/plain" in data:
        st.code(joined(data["text/plain"]), language=None)


def show_cell(cell: Cell) -> None:
    """One cell, its outputs below it. Solutions are folded."""
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
    """Markdown as Streamlit draws it: links to files of the repository, which lead nowhere from here, are the names of those files; dollars
    of a displayed equation stand on lines of their own, else one of several lines would not be seen as one."""
    text = re.sub(r"\$\$(.+?)\$\$", lambda m: f"\n$$\n{m[1].strip()}\n$$\n", text, flags=re.DOTALL)
    return re.sub(r"\[([^\]]+)\]\((?!https?://|#)([^)]+)\)", lambda m: m[1] if "`" in m[1] else f"`{m[1]}`", text)


def numbers(course: list[syllabus.Lesson], number: int) -> Iterator[syllabus.Lesson | None]:
    """The lesson before that one, and the one after it."""
    at = [one.number for one in course].index(number)
    yield course[at - 1] if at else None
    yield course[at + 1] if at + 1 < len(course) else None


def link(one: syllabus.Lesson, label: str) -> None:
    st.page_link(LESSON[0], label=label, query_params={"n": f"{one.number:02d}"}, icon=":material/school:")


def contents(course: list[syllabus.Lesson]) -> None:
    """All lessons, each with a link."""
    st.title("The course")
    for one in course:
        link(one, f"{one.number:02d} · {one.title}")
        st.caption(f"After it you can {one.can} About {one.minutes} minutes; before it: {one.before}.")
    if not course:
        st.markdown("There is no lesson yet.")


def draw() -> None:
    """The lesson that ?n=NN names, or the list of all."""
    try:
        with st.container(width=WIDTH):
            show(syllabus.lessons(), st.query_params.get("n", ""))
    except (RunError, OSError) as error:
        st.error(str(error))


def show(course: list[syllabus.Lesson], wanted: str) -> None:
    known = {one.number: one for one in course}
    # Short, because int() refuses thousands of digits.
    if not (len(wanted) <= LONGEST and wanted.isascii() and wanted.isdigit() and int(wanted) in known):
        if wanted:
            st.warning(f"There is no lesson {wanted if len(wanted) <= LONGEST else wanted[:LONGEST] + '…'}.")
        contents(course)
        return
    one = known[int(wanted)]
    path = syllabus.notebook(one.path)
    if path.is_file():
        cells = of_notebook(path, path.stat().st_mtime)
    else:
        st.info("This lesson has not been executed here: it is shown without its outputs. make lessons executes it.")
        cells = of_script(one.path.read_text(encoding="utf-8"))
    for cell in cells:
        show_cell(cell)
    st.divider()
    st.caption(f"etude lesson {one.number} opens it in Jupyter. Source: {one.source}.")
    for label, other in zip(("Before it", "After it"), numbers(course, one.number), strict=True):
        if other:
            link(other, f"{label}: {other.number:02d} · {other.title}")
