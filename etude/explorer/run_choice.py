"""Which runs the recipe page shows: a box for the kind, and one for the runs, kept in the URL."""

from collections.abc import Sequence
from pathlib import Path

import streamlit as st

from etude.explorer import run_files
from etude.explorer.provenance import KINDS, RUNS, folders, missing
from etude.explorer.run_kinds import Played
from etude.explorer.run_state import going

__all__ = ["chosen"]

MAKES = {"techniques": "`etude run TECHNIQUE`", "experiments": "`etude figure NAME`"}


def chosen() -> tuple[list[Played], list[Played]]:
    """Draws the boxes, and a line for each broken run. Returns the runs to show, and all that were read."""
    every = folders("all")
    left, right = st.columns([1, 3])
    with left:
        kind = st.selectbox("Runs of", KINDS, key="kind", bind="query-params")
    asked = _asked(kind, every)
    found = folders(kind) | {name: every[name] for name in asked}
    runs, broken = run_files.whole(found)
    with right:
        names = _choice([run.name for run in runs], every, _first(runs)) if runs else []
    for line in broken:
        st.error(line)
    if not runs:
        st.info(f"There is no such run in `{RUNS}/` yet. {MAKES.get(kind, '`make small`')} leaves one.")
    elif not names:
        st.info("Choose a run.")
    by_name = {run.name: run for run in runs}
    return [by_name[name] for name in names], runs


def _first(runs: Sequence[Played]) -> str:
    """The newest run that was not abandoned."""
    return next((run.name for run in runs if not run.missing or going(run)), runs[0].name) if runs else ""


def _asked(kind: str, every: dict[str, Path]) -> list[str]:
    """The runs that a link asks for, whatever their kind. Another kind is chosen: they go."""
    state, asked = st.session_state.setdefault("kind-state", {"kind": kind, "asked": []}), st.query_params.get_all("run")
    if state["kind"] != kind:
        state["kind"], state["asked"] = kind, []
    elif asked != st.session_state.get("run-state", {}).get("seen"):
        state["asked"] = asked
    return [name for name in dict.fromkeys(state["asked"]) if name in every]


def _choice(names: list[str], found: dict[str, Path], first: str) -> list[str]:
    """The runs to show; `first` if nothing is chosen. The code writes the choice to the URL by hand: a box bound to the URL leaves out its
    default, and the same link would show another run once a newer one is finished."""
    state, asked = st.session_state.setdefault("run-state", {"seen": None, "shown": []}), st.query_params.get_all("run")
    begins = asked != state["seen"] or "run" not in st.session_state  # a link, the browser's Back, or back from another page
    wanted = list(dict.fromkeys(asked or state["shown"])) if begins else st.session_state["run"]
    there, lacking = [name for name in wanted if name in names], [name for name in wanted if name and name not in found]
    if lacking:
        st.warning(missing("run", lacking))
    if begins or there != wanted:
        st.session_state["run"] = there or ([] if wanted == [""] else [first])
    shown = st.multiselect("Newest first; choose several to compare them", names, key="run")
    state["shown"], state["seen"] = shown, shown or [""]
    if asked != state["seen"]:
        st.query_params["run"] = state["seen"]
    return shown
