"""Whose data a page shows: the runs of the recipe that lie on disk, the committed example, a box to choose one, and a line that says which it is.

    folders()          all runs, by the name that pages call them by; the committed example last
    finished()         the finished ones, newest first
    chosen(files)      draws the box and the line; the folder whose examples the page shows

Runs are looked for where the explorer was started. Of a run whose examples nobody has made yet, the page says how they are made and shows
the committed ones.
"""

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import streamlit as st

from etude.explorer import examples
from etude.report.record import STAGES
from sims.examples import PLACE

__all__ = ["EXAMPLE", "RUNS", "TAKEN", "Source", "chosen", "facts", "finished", "folders", "missing", "plain"]

RUNS = Path("runs")
"""Where `etude run` puts them, seen from where the explorer was started."""
EXAMPLE = "committed example"
TAKEN = (EXAMPLE, "stage")
"""What a run cannot be called here: a column of a table, and the example. It keeps its folder's name before its own then."""


@dataclass(frozen=True)
class Source:
    """A finished run."""

    name: str
    folder: Path
    facts: list[str]
    """Seed and machine, in words."""
    ended: float
    """When its last stage ended, seconds since 1970."""


def folders() -> dict[str, Path]:
    """Folders of runs of the recipe by name, and those that cannot be said to be of another; the committed example."""
    found = {}
    for folder in sorted(RUNS.iterdir()) if RUNS.is_dir() else ():
        try:
            if not any((folder / part).exists() for part in ("config.json", "stages", "timings.jsonl")):
                continue
            other = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("technique", "recipe") != "recipe"
        except (OSError, ValueError, AttributeError, RecursionError):
            other = False  # broken, or not to be looked into; the recipe's page says how
        if not other:
            found[f"{RUNS.name}/{folder.name}" if folder.name in TAKEN else folder.name] = folder
    return found | {EXAMPLE: examples.FOLDER / "recipe"}


def facts(record: dict) -> list[str]:
    """Seed, processor and versions out of a config.json, in words. LookupError or TypeError where it does not say them."""
    machine = record["machine"]
    return [
        f"seed {record['config']['seed']}",
        f"{machine['cpu']}, {machine['cores']} cores",
        *(f"{what} {machine[what]}" for what in ("torch", "commit") if machine[what]),
    ]


def finished() -> list[Source]:
    """The user's runs that came to their end, newest first. One that is broken is none; the recipe's page names it."""
    found = []
    for name, folder in folders().items():
        try:
            ends = [(folder / "stages" / f"{stage}.json").stat().st_mtime for stage in STAGES]
            record = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            found.append(Source(name, folder, facts(record), ends[-1]))
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            pass  # not finished, or broken; the committed example has no stages either
    return sorted(found, key=lambda run: -run.ended)


def chosen(*files: str) -> Path:
    """Draws the choice among the finished runs and the committed example, and a line that says whose data follow. Returns the folder with
    the `files` that the page shows."""
    runs = {run.name: run for run in finished()}
    left, right = st.columns([1, 3], vertical_alignment="bottom")
    with left:
        run = runs.get(_choice([*runs, EXAMPLE]))
    with right:
        if run is not None and all((run.folder / PLACE / file).is_file() for file in files):
            st.caption(" · ".join([f"Shown: **{plain(run.name)}**, your run in {plain(str(run.folder))}", *map(plain, run.facts)]))
            return run.folder / PLACE
        if run is not None:
            st.info(
                f"**{plain(run.name)}** has no examples yet. A few minutes make them: `etude examples --run {shlex.quote(str(run.folder))}`. "
                "Until then another run's are shown."
            )
        try:
            known = facts(json.loads((examples.FOLDER / "recipe" / "config.json").read_text(encoding="utf-8")))
        except (OSError, ValueError, LookupError, TypeError):
            known = []
        st.caption(" · ".join([f"Shown: **{EXAMPLE}**, a run played elsewhere", *map(plain, known)]))
    return examples.FOLDER


def _choice(names: list[str]) -> str:
    """The name in the box, one for all pages. A choice is kept in the URL by hand, because a box that is bound to it leaves out whatever is the
    default now, and the same link would show another run once a newer one is finished. Without a choice the URL stays as it is: a page that
    wrote into it when it opens would be one more page to the browser's Back."""
    state, asked = st.session_state.setdefault("examples-state", {"seen": None, "asked": None}), st.query_params.get("examples")
    begins = asked != state["asked"] or "examples" not in st.session_state  # a link, the browser's Back, or another page
    wanted = (asked or state["seen"]) if begins else st.session_state["examples"]
    if wanted and wanted not in names:
        st.warning(missing("finished run", [wanted]))
    if begins or wanted not in names:
        st.session_state["examples"] = wanted if wanted in names else names[0]
    state["seen"], state["asked"] = st.selectbox("Run, newest first", names, key="examples"), asked
    if asked != state["seen"] and (asked or state["seen"] != names[0]):
        st.query_params["examples"] = state["asked"] = state["seen"]
    return state["seen"]


def missing(what: str, names: list[str]) -> str:
    """One line about names that nothing here has, however they are spelt."""
    return f"There is no {what} {', '.join(plain(' '.join(name.split())[:80]) for name in names)} here."


def plain(name: str) -> str:
    """A name in Markdown, as it is spelt."""
    return re.sub(r"([\\`*_{}\[\]()<>#+!|$~:-])", r"\\\1", name)
