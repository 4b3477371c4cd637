"""A source file: the reference of a technique, its distributed version, its kernel, or its experiment."""

from dataclasses import astuple

import streamlit as st

from etude.explorer.page import ROOT, link
from etude.stages import PARTS, Stage, files

__all__ = ["KINDS", "draw", "to"]

KINDS = {"ref": "reference", "scaled": "twin", "kernel": "kernel", "sim": "experiment"}
"""What a row of the catalogue calls a file → what a reader calls it."""
MAX_NAME_LENGTH = 60
"""Characters of an unknown name that are shown."""


def to(path: str, label: str) -> None:
    """A link to a file."""
    link("file", label, ":material/code:", file=path)


def draw() -> None:
    """The file named by ?file=, if the diagram names it, too; otherwise all files that there are."""
    file = st.query_params.get("file", "")
    if file not in files():
        st.title("Files")
        if file:
            st.warning(
                f"The recipe has no file {file if len(file) <= MAX_NAME_LENGTH else file[:MAX_NAME_LENGTH] + '…'}."
            )
        for path in files():
            to(path, path)
        return
    st.title(file)
    for stage in (stage for part in PARTS for stage in part.stages if file in astuple(stage.paths)):
        draw_stage(stage, file)
    try:
        st.code((ROOT / file).read_text(encoding="utf-8"), language="python", line_numbers=True, wrap_lines=True)
    except OSError as error:
        st.error(f"{file} cannot be read ({error.strerror}).")


def draw_stage(stage: Stage, current_path: str) -> None:
    """What the stage of a file is, and links to its other files."""
    st.markdown(f"**{stage.title}.** {stage.says}")
    with st.container(horizontal=True):
        link("start", "Overview of the stages", ":material/account_tree:")
        for kind, label in KINDS.items():
            path = getattr(stage.paths, kind)
            if path and path != current_path:
                to(path, f"{label}: {path}")
