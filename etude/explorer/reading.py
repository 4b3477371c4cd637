"""A file of the repository to read: the reference of a technique, its twin, its kernel, or its experiment."""

from dataclasses import astuple

import streamlit as st

from etude.explorer.page import ROOT, link
from etude.stages import PARTS, Stage, files

__all__ = ["KINDS", "draw", "to"]

KINDS = {"ref": "reference", "scaled": "twin", "kernel": "kernel", "sim": "experiment"}
"""What a row of the catalogue calls a file → what a reader calls it."""
LONGEST = 60
"""Characters of an unknown name that are shown."""


def to(path: str, label: str) -> None:
    """A link to a file."""
    link("file", label, ":material/code:", file=path)


def draw() -> None:
    """The file named by ?file=, if the diagram names it, too; otherwise all files that there are."""
    wanted = st.query_params.get("file", "")
    if wanted not in files():
        st.title("Files")
        if wanted:
            st.warning(f"The recipe has no file {wanted if len(wanted) <= LONGEST else wanted[:LONGEST] + '…'}.")
        for path in files():
            to(path, path)
        return
    st.title(wanted)
    for stage in (stage for part in PARTS for stage in part.stages if wanted in astuple(stage.paths)):
        around(stage, wanted)
    try:
        st.code((ROOT / wanted).read_text(encoding="utf-8"), language="python", line_numbers=True, wrap_lines=True)
    except OSError as error:
        st.error(f"{wanted} cannot be read ({error.strerror}).")


def around(stage: Stage, here: str) -> None:
    """What the stage of a file is, and links to its other files."""
    st.markdown(f"**{stage.title}.** {stage.says}")
    with st.container(horizontal=True):
        link("start", "The recipe", ":material/account_tree:")
        for kind, word in KINDS.items():
            path = getattr(stage.paths, kind)
            if path and path != here:
                to(path, f"{word}: {path}")
