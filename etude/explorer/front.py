"""The front door: the recipe as a diagram, what a task is, and where to begin.

The diagram is HTML, drawn from `etude/stages.py`: its boxes lead to the cards below it, on the same page, and each card
leads to page, lesson and files. Links to other pages are Streamlit's own, since any other would begin a new session.
"""

import html
from pathlib import Path

import streamlit as st

from etude.explorer import examples, reading
from etude.explorer.page import COLOURS, PLACES, Page, link
from etude.front import parse_turns, select_rollout
from etude.stages import PARTS, Part, Stage
from kit.settings import RunError

__all__ = ["EDGES", "PAGE", "READERS", "diagram"]

CARDS_PER_ROW = 3
"""Cards beside each other on a wide screen."""
EDGES = dict(zip((part.name for part in PARTS), ("grey", "blue", "orange", "green", "purple", "sky"), strict=True))
"""Part → the colour of its edge."""
LOOP_NOTES = {
    "Reinforcement learning": "↺ each step, with new weights, tries the tasks again",
    "Afterwards": "↺ what users do becomes the next reward",
}
"""Parts that lead back, with what they bring."""
STYLE = """<style>
.recipe ol {list-style: none; margin: 0; padding: 0}
.recipe > ol > li {border-left: 5px solid; border-radius: 6px; padding: .35rem .7rem; background: rgba(128, 136, 146, .09)}
.recipe > ol > li {margin-top: .3rem}
.recipe > ol > .after {margin-top: 1.3rem}
.recipe > ol > .after::before {content: "↓"; display: block; margin-top: -1.55rem; padding-bottom: .1rem; opacity: .7}
.recipe li li {display: inline-flex; align-items: center; margin: .2rem .35rem .2rem 0}
.recipe li .after::before {content: "→"; margin-right: .35rem; opacity: .7}
.recipe .part {font-weight: 600; margin-right: .6rem}
.recipe .again {font-size: .85rem; opacity: .8; margin: .1rem 0 0}
.recipe li li a {border: 1px solid rgba(128, 136, 146, .6); border-radius: 6px; padding: .2rem .55rem; color: inherit; text-decoration: none;
  background: rgba(128, 136, 146, .1)}
.recipe a:hover, .recipe a:focus-visible {outline: 2px solid #0072B2; outline-offset: 1px}
</style>"""
READERS = (
    (
        "Has ten minutes",
        (
            ("watch", "Watch the agent repair a function"),
            ("recipe", "See what RL changed"),
            ("claims", "See what was reproduced"),
        ),
    ),
    (
        "Wants to understand",
        (
            ("course", "Begin the course with lesson 0"),
            ("advantages", "Play with a group's advantages"),
            ("kl", "Guess which estimate of the KL may be a loss"),
        ),
    ),
    (
        "Wants to train",
        (
            ("recipe", "Type make small, and see your run"),
            ("episodes", "Read what an agent did"),
            ("async-rl", "See who waits for whom"),
        ),
    ),
)
"""Three readers, each with the pages to begin with and what to do there."""


def diagram() -> str:
    """The recipe as a list of parts, each a list of stages, whose links lead to their cards."""
    return (
        f'{STYLE}<nav class="recipe" aria-label="The recipe, stage by '
        f'stage"><ol>{"".join(map(render_part, PARTS))}</ol></nav>'
    )


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
    """What a stage is, and links to its page, its lesson and its files."""
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
    """Where to begin."""
    st.header("Where to begin", anchor=False)
    for column, (reader, steps) in zip(st.columns(len(READERS)), READERS, strict=True):
        with column, st.container(border=True, height="stretch"):
            st.markdown(f"**{reader}**")
            for number, (name, action) in enumerate(steps, 1):
                link(name, f"{number}. {action}")
    link("glossary", "Words of the field, explained", ":material/dictionary:")


def show_task() -> None:
    """What a task is, on a recorded rollout. Says so in one line where the examples are missing."""
    st.header("What a task is", anchor=False)
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
        "1. **A package has lost the body of a function.** Its name and its docstring are left. The "
        "docstring speaks of other functions, its "
        "helpers, which the agent has to read.\n"
        "2. **The agent makes one call a turn:** it reads a function, writes a body, tests it, or is done.\n"
        "3. **Hidden tests pay.** The agent never sees them. In this rollout, recorded after RL, they "
        f"{'pass' if rollout['success'] else 'fail'} after {rollout['turns']} turns."
    )
    for column, (label, text) in zip(
        st.columns(3),
        (("The task", prompt), ("What is left", remaining_code), ("What the agent wrote", answer)),
        strict=True,
    ):
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
    title="The recipe, stage by stage",
    says="From a base model to a coding agent that learns from its users. Choose a box: it leads to what "
    "the stage does, to a page on which it can "
    "be played with, to its lesson, and to the files to read.",
    draw=draw,
)
