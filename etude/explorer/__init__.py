"""The pages of the explorer, in the order of the recipe."""

import streamlit as st

from etude.explorer import (
    advantages,
    async_rl,
    claims,
    cpt,
    episodes,
    feature_deletion,
    kl,
    lesson,
    low_precision,
    mtp,
    muon,
    packing,
    penalties,
    real_time_rl,
    recipe,
    replay,
    summary,
    textual_feedback,
    watch,
    weight_sync,
)
from etude.explorer.page import LESSON, Page, show

__all__ = ["PAGES", "Page", "start"]

PAGES: tuple[Page, ...] = tuple(
    module.PAGE
    for module in (
        watch,
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
        claims,
    )
)


def start(first: str = "watch") -> None:
    """Draws the page that the URL names, or the page called `first` if the URL names no page."""
    st.set_page_config(page_title="etude", page_icon="🎼", layout="wide")
    found = [st.Page(lambda page=page: show(page), title=page.title, url_path=page.name) for page in PAGES]
    LESSON[:] = [st.Page(lesson.draw, title="Lesson", url_path="lesson")]
    # The page at the root has no name in the URL, but every page should be reachable by its name.
    begin = next(page for page in PAGES if page.name == first)
    root = st.Page(lambda: show(begin), title=begin.title, url_path="begin", default=True, visibility="hidden")
    st.navigation([root, *found, *LESSON]).run()
