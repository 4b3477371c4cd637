"""The glossary: terms of the field, each with links to pages and lessons that use it."""

import streamlit as st

from etude.explorer.page import PLACES, Page, link
from etude.glossary import TERMS, Term

__all__ = ["PAGE", "anchor"]

WIDTH = 860
"""Width of the text in pixels; screens may be wider."""


def anchor(word: str) -> str:
    """Name of a term in the URL, behind the #."""
    return word.lower().replace(" ", "-")


def show_term(term: Term, linked_words: set[str]) -> None:
    """A term, what it means, and links. `linked_words`: the terms that the page shows; links to others would
    lead nowhere."""
    st.subheader(term.word, anchor=anchor(term.word))
    see_also = ", ".join(f"[{word}](#{anchor(word)})" if word in linked_words else word for word in term.see)
    st.markdown(f"{term.says} See also: {see_also}." if see_also else term.says)
    with st.container(horizontal=True, gap="small"):
        for place in term.places:
            if isinstance(place, int):
                link("lesson", f"Lesson {place}", ":material/school:", n=f"{place:02d}")
            else:
                link(place, PLACES[place].title, ":material/tune:")


def draw() -> None:
    with st.container(width=WIDTH):
        query = st.text_input("Find a term", key="term", bind="query-params").strip().casefold()
        matches = [term for term in TERMS if query in f"{term.word} {' '.join(term.forms)} {term.says}".casefold()]
        if not matches:
            st.info("No term matches.")
        for term in matches:
            show_term(term, {match.word for match in matches})


PAGE = Page(
    name="glossary",
    title="Glossary",
    says="Terms of the field that pages and lessons use, in one or two sentences each, with links to pages and "
    "lessons. The question mark next to a page's introduction explains the terms in it.",
    draw=draw,
)
