"""The pages of the explorer, by section and within a section in the order of the recipe."""

import streamlit as st
from streamlit import config

from etude.explorer.page import PLACES, Page, show
from etude.explorer.pages import (
    advantages,
    async_rl,
    claims,
    cpt,
    episodes,
    feature_deletion,
    front,
    glossary,
    kl,
    lesson,
    low_precision,
    mtp,
    muon,
    packing,
    penalties,
    reading,
    real_time_rl,
    recipe,
    replay,
    summary,
    textual_feedback,
    watch,
    weight_sync,
)
from etude.stages import PARTS, stage_of

__all__ = ["PAGES", "Page", "start"]

PAGES: tuple[Page, ...] = tuple(
    module.PAGE
    for module in (
        watch,
        front,
        glossary,
        recipe,
        cpt,
        muon,
        mtp,
        advantages,
        kl,
        penalties,
        summary,
        replay,
        packing,
        async_rl,
        weight_sync,
        low_precision,
        feature_deletion,
        textual_feedback,
        real_time_rl,
        episodes,
        lesson,
        claims,
    )
)


START, COURSE, CLAIMS = "Start", "Course", "Claims"
SECTIONS = {"watch": START, "start": START, "glossary": START, "course": COURSE, "claims": CLAIMS}
"""Pages that belong to no part of the recipe → their section. All others stand where their technique does."""
HEADINGS = (START, *dict.fromkeys(part.section for part in PARTS), COURSE, CLAIMS)
"""Sections in the order of the sidebar."""


def section(page: Page) -> str:
    """The section of the navigation in which a page stands."""
    placement = stage_of(page.technique or page.name)
    return SECTIONS.get(page.name) or (placement[0].section if placement else CLAIMS)


def start(first: str = "watch") -> None:
    """Draws the page that the URL names, or the page called `first` if the URL names no page."""
    # A click may set a control that has a default, and links need the default: Streamlit would warn of it, with a
    # stack.
    config.set_option("global.disableWidgetStateDuplicationWarning", True)
    st.set_page_config(page_title="etude", page_icon="🎼", layout="wide")
    PLACES.update(
        {page.name: st.Page(lambda page=page: show(page), title=page.title, url_path=page.name) for page in PAGES}
    )
    # Both say by their query what they show, so the sidebar cannot lead to them.
    PLACES["lesson"] = st.Page(lesson.draw, title="Lesson", url_path="lesson", visibility="hidden")
    PLACES["file"] = st.Page(reading.draw, title="File", url_path="file", visibility="hidden")
    # The page at the root has no name in the URL, but every page should be reachable by its name.
    begin = next(page for page in PAGES if page.name == first)
    root = st.Page(lambda: show(begin), title=begin.title, url_path="begin", default=True, visibility="hidden")
    sections = {name: [PLACES[page.name] for page in PAGES if section(page) == name] for name in HEADINGS}
    sections[START] = [root, *sections[START], PLACES["lesson"], PLACES["file"]]
    st.navigation(sections, expanded=True).run()
