"""Which runs the recipe page shows: a box for the kind, and one for the runs, kept in the URL."""

from collections.abc import Sequence
from pathlib import Path

import streamlit as st

from etude.explorer.provenance import KINDS, RUNS, folders, missing
from etude.explorer.runs import files as run_files
from etude.explorer.runs.kinds import RunData
from etude.explorer.runs.state import going

__all__ = ["choose_runs"]

MAKES = {"techniques": "`etude run TECHNIQUE`", "experiments": "`etude figure NAME`"}


def choose_runs() -> tuple[list[RunData], list[RunData]]:
    """Draws the boxes, and a line for each broken run. Returns the runs to show, and all that were read."""
    all_folders = folders("all")
    left, right = st.columns([1, 3])
    with left:
        kind = st.selectbox("Runs of", KINDS, key="kind", bind="query-params")
    url_names = _read_url_names(kind, all_folders)
    listed_folders = folders(kind) | {name: all_folders[name] for name in url_names}
    runs, error_messages = run_files.load_runs(listed_folders)
    with right:
        names = _draw_choice([run.name for run in runs], all_folders, _find_newest(runs)) if runs else []
    for message in error_messages:
        st.error(message)
    if not runs:
        st.info(f"There is no such run in `{RUNS}/` yet. {MAKES.get(kind, '`make small`')} makes one.")
    elif not names:
        st.info("Choose a run.")
    by_name = {run.name: run for run in runs}
    return [by_name[name] for name in names], runs


def _find_newest(runs: Sequence[RunData]) -> str:
    """The newest run that was not abandoned."""
    return next((run.name for run in runs if not run.missing or going(run)), runs[0].name) if runs else ""


def _read_url_names(kind: str, all_folders: dict[str, Path]) -> list[str]:
    """The runs that a link asks for, whatever their kind. Another kind is chosen: they go."""
    state, url_names = (
        st.session_state.setdefault("kind-state", {"kind": kind, "asked": []}),
        st.query_params.get_all("run"),
    )
    if state["kind"] != kind:
        state["kind"], state["asked"] = kind, []
    elif url_names != st.session_state.get("run-state", {}).get("seen"):
        state["asked"] = url_names
    return [name for name in dict.fromkeys(state["asked"]) if name in all_folders]


def _draw_choice(names: list[str], all_folders: dict[str, Path], default_name: str) -> list[str]:
    """The runs to show; `default_name` if nothing is chosen. The code writes the choice to the URL by hand: a box bound
    to the URL leaves out its default, and the same link would show another run once a newer one is finished."""
    state, url_names = (
        st.session_state.setdefault("run-state", {"seen": None, "shown": []}),
        st.query_params.get_all("run"),
    )
    # a link, the browser's Back, or back from another page
    should_reset = url_names != state["seen"] or "run" not in st.session_state
    requested_names = list(dict.fromkeys(url_names or state["shown"])) if should_reset else st.session_state["run"]
    available_names, unknown_names = (
        [name for name in requested_names if name in names],
        [name for name in requested_names if name and name not in all_folders],
    )
    if unknown_names:
        st.warning(missing("run", unknown_names))
    if should_reset or available_names != requested_names:
        st.session_state["run"] = available_names or ([] if requested_names == [""] else [default_name])
    selection = st.multiselect("Newest first; choose several to compare them", names, key="run")
    state["shown"], state["seen"] = selection, selection or [""]
    if url_names != state["seen"]:
        st.query_params["run"] = state["seen"]
    return selection
