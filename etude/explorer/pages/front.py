"""The overview: the recipe as a diagram, an example of a task, and links for three kinds of readers.

The diagram is HTML, built from `etude/stages.py`: its boxes link to the cards below it, and each card links to page,
lesson and files. Links to other pages are Streamlit's own; HTML links would start a new session.
"""

import html
from pathlib import Path

import streamlit as st

from etude.explorer import examples
from etude.explorer.page import COLOURS, PLACES, Page, link
from etude.explorer.pages import reading
from etude.readme.front import parse_turns, select_rollout
from etude.stages import PARTS, Part, Stage
from kit.settings import RunError

__all__ = ["EDGES", "PAGE", "READERS", "diagram"]

CARDS_PER_ROW = 3
"""Cards beside each other on a wide screen."""
EDGES = dict(zip((part.name for part in PARTS), ("grey", "blue", "orange", "green", "purple", "sky"), strict=True))
"""Part → the colour of its edge."""
LOOP_NOTES = {
    "Reinforcement learning": "↺ each step samples new rollouts with the new weights",
    "Afterwards": "↺ reactions of users become the next rewards",
}
"""Parts with a loop, and what it does."""
STYLE = """<style>
.recipe ol {list-style: none; margin: 0; padding: 0}
.recipe > ol > li {border-left: 5px solid; border-radius: 6px; padding: .35rem .7rem; \
background: rgba(128, 136, 146, .09)}
.recipe > ol > li {margin-top: .3rem}
.recipe > ol > .after {margin-top: 1.3rem}
.recipe > ol > .after::before {content: "↓"; display: block; margin-top: -1.55rem; padding-bottom: .1rem; opacity: .7}
.recipe li li {display: inline-flex; align-items: center; margin: .2rem .35rem .2rem 0}
.recipe li .after::before {content: "→"; margin-right: .35rem; opacity: .7}
.recipe .part {font-weight: 600; margin-right: .6rem}
.recipe .again {font-size: .85rem; opacity: .8; margin: .1rem 0 0}
.recipe li li a {border: 1px solid rgba(128, 136, 146, .6); border-radius: 6px; padding: .2rem .55rem; \
color: inherit; text-decoration: none;
  background: rgba(128, 136, 146, .1)}
.recipe a:hover, .recipe a:focus-visible {outline: 2px solid #0072B2; outline-offset: 1px}
</style>"""
READERS = (
    (
        "In ten minutes",
        (
            ("watch", "Watch the agent repair a function"),
            ("recipe", "Compare success before and after RL"),
            ("claims", "Read which claims were reproduced"),
        ),
    ),
    (
        "To understand the techniques",
        (
            ("course", "Start the course with lesson 0"),
            ("advantages", "Edit a group's rewards and compare advantages"),
            ("kl", "Predict which estimator of the KL can be a loss"),
        ),
    ),
    (
        "To train a model",
        (
            ("recipe", "Run make small, and follow your run"),
            ("episodes", "Read the transcript of an agent"),
            ("async-rl", "Compare the idle times of trainer and sampler"),
        ),
    ),
)
"""Three kinds of readers, each with the first pages to open and what to do there."""


def diagram() -> str:
    """The recipe as a list of parts, each a list of stages, whose links lead to their cards."""
    parts = "".join(map(render_part, PARTS))
    return f'{STYLE}<nav class="recipe" aria-label="Stages of the recipe"><ol>{parts}</ol></nav>'


def render_part(part: Part) -> str:
    """A part of the diagram."""
    boxes = "".join(
        f'<li{" class=after" if stage.after else ""}><a href="#{stage.name}">{html.escape(stage.title)}</a></li>'
        for stage in part.stages
    )
    loop_note = f'<p class="again">{LOOP_NOTES[part.name]}</p>' if part.name in LOOP_NOTES else ""
    edge = COLOURS[EDGES[part.name]]
    class_attribute = ' class="after"' if part.after else ""
    return (
        f'<li{class_attribute} style="border-color: {edge}"><span '
        f'class="part">{html.escape(part.name)}</span><ol>{boxes}</ol>{loop_note}</li>'
    )


def show_card(stage: Stage) -> None:
    """The description of a stage, and links to its page, its lesson and its files."""
    row = stage.paths
    with st.container(border=True, height="stretch"):
        st.subheader(stage.title, anchor=stage.name)
        st.markdown(stage.says)
        with st.container(horizontal=True, gap="small"):
            if row.page:
                link(row.page, f"Page: {PLACES[row.page].title}", ":material/tune:")
            if row.lesson:
                number = Path(row.lesson).name.partition("_")[0]
                link("lesson", f"Lesson {int(number)}", ":material/school:", n=number)
            for kind, word in reading.KINDS.items():
                if path := getattr(row, kind):
                    reading.to(path, f"{word.capitalize()}: {Path(path).name}")


def show_part(part: Part) -> None:
    """The stages of a part."""
    st.header(part.name, anchor=False)
    st.markdown(part.says)
    for first in range(0, len(part.stages), CARDS_PER_ROW):
        for column, stage in zip(st.columns(CARDS_PER_ROW), part.stages[first : first + CARDS_PER_ROW]):
            with column:
                show_card(stage)


def show_readers() -> None:
    """Links for each kind of reader."""
    st.header("Where to start", anchor=False)
    for column, (reader, steps) in zip(st.columns(len(READERS)), READERS, strict=True):
        with column, st.container(border=True, height="stretch"):
            st.markdown(f"**{reader}**")
            for number, (name, action) in enumerate(steps, 1):
                link(name, f"{number}. {action}")
    link("glossary", "Glossary of terms", ":material/dictionary:")


def show_task() -> None:
    """A task, in a recorded rollout. One line with the error if the examples are missing."""
    st.header("An example of a task", anchor=False)
    try:
        rollouts = examples.load("rollouts")["rollouts"]
        rollout = rollouts[select_rollout(rollouts)]
    except (RunError, ValueError, OSError) as error:
        st.error(str(error))
        return
    turns = parse_turns(rollout["text"])
    (_, prompt), (_, remaining_code) = turns[0], turns[2]
    (_, answer) = next(turn for turn in turns if turn[1].startswith("write"))
    st.markdown(
        "1. **The body of a function is missing from a package.** Its name and its docstring are left. The docstring "
        "refers to other functions, its helpers, which the agent has to read.\n2. **The agent makes one call per "
        "turn:** it reads a function, writes a body, runs the tests, or stops.\n3. **The reward comes from hidden "
        "tests.** The agent never sees them. In this rollout, recorded after RL, they "
        f"{'pass' if rollout['success'] else 'fail'} after {rollout['turns']} turns."
    )
    texts = {"Task": prompt, "Function without its body": remaining_code, "Body written by the agent": answer}
    for column, (label, text) in zip(st.columns(3), texts.items(), strict=True):
        with column:
            st.caption(label)
            st.code(text, language=None, wrap_lines=True)


def draw() -> None:
    st.html(diagram())
    show_task()
    show_readers()
    for part in PARTS:
        show_part(part)


PAGE = Page(
    name="start",
    title="Overview of the stages",
    says="From a base model to a coding agent that learns from its users. Each box links to a description of its "
    "stage, with an interactive page, a lesson and the source files.",
    draw=draw,
)
