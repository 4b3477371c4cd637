"""Which run a page shows: lists the recipe's runs on disk and the committed example, draws a box to choose one and a
line that names it.

    folders(kind)      runs of a kind by display name; the committed example or records last
    finished()         the finished ones, newest first
    newest(record)     the record of an experiment: of the user's own run, or the committed one
    chosen(files)      draws the box and the line; returns the folder whose examples the page shows
    choice(names, key) draws a box alone, and keeps what is chosen in the URL

Runs are searched for where the explorer was started. If the chosen run has no examples yet, the page says how to make
them and shows the committed ones.
"""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import streamlit as st

from etude.explorer import examples
from etude.report.record import STAGES
from kit.disk import read_json
from sims.examples.runs import PLACE

__all__ = [
    "EXAMPLE",
    "KINDS",
    "RUNS",
    "RESERVED_NAMES",
    "Source",
    "choice",
    "choose_examples",
    "facts",
    "finished",
    "folders",
    "known_facts",
    "missing",
    "newest",
    "plain",
    "recorded",
    "technique_of",
]

RUNS = Path("runs")
"""Where `etude run` puts runs, relative to where the explorer was started."""
EXAMPLE = "committed example"
RECORDS = examples.FOLDER.parent / "figures"
RECORD_PREFIX = "committed record "
KINDS = ("recipe", "techniques", "experiments", "all")
"""Kinds of runs. The recipe's are those at both scales."""
RESERVED_NAMES = (EXAMPLE, "stage")
"""Names that a run cannot have here: a table column and the example. Such a run gets the name of its folder as a
prefix."""


@dataclass(frozen=True)
class Source:
    """A finished run."""

    name: str
    folder: Path
    facts: list[str]
    """Seed and machine, in words."""
    end_time: float
    """When its last stage ended, in seconds since 1970."""


def folders(kind: str = "recipe") -> dict[str, Path]:
    """Places of runs by name, for one of `KINDS`. Runs too broken to tell count as the recipe's. The committed ones are
    last: the example, and of experiments the files of their records."""
    paths = {}
    for folder in (
        *_list_folder(RUNS),
        *_list_folder(RUNS / "figure"),
        *(inner for outer in _list_folder(RUNS) for inner in _list_folder(outer / "runs")),
    ):
        try:
            if not any((folder / part).exists() for part in ("config.json", "stages", "timings.jsonl")):
                continue
        except OSError:
            pass  # the recipe page says why
        if kind in ("all", kind_of(folder)):
            name = folder.relative_to(RUNS).as_posix()
            paths[f"{RUNS.name}/{name}" if name in RESERVED_NAMES or name.startswith(RECORD_PREFIX) else name] = folder
    if kind in ("all", "recipe"):
        paths[EXAMPLE] = examples.FOLDER / "recipe"
    if kind in ("all", "experiments"):
        paths |= {f"{RECORD_PREFIX}{path.stem}": path for path in sorted(RECORDS.glob("*.json"))}
    return paths


def _list_folder(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir()) if folder.is_dir() else []
    except OSError:
        return []


def technique_of(folder: Path) -> str | None:
    """What a folder is a run of, such as "recipe full"; None if it is broken or unreadable."""
    try:
        return str(read_json(folder / "config.json").get("technique", "recipe"))
    except (OSError, ValueError, AttributeError, RecursionError):
        return None


def kind_of(folder: Path) -> str:
    """Which of `KINDS` the run in a folder is."""
    technique = technique_of(folder)
    if technique in (None, "recipe", "recipe full"):
        return "recipe"
    return "experiments" if technique.startswith("figure ") else "techniques"


def facts(record: dict) -> list[str]:
    """Seed, processor and versions from a config.json, in words. Raises LookupError or TypeError if they are
    missing."""
    machine = record["machine"]
    return [
        f"seed {record['config']['seed']}",
        f"{machine['cpu']}, {machine['cores']} cores",
        *(f"{key} {machine[key]}" for key in ("torch", "commit") if machine[key]),
    ]


def known_facts(record: dict) -> list[str]:
    """The same, as far as they are there: not every run has a seed."""
    config, machine = (part if isinstance(part, dict) else {} for part in (record.get("config"), record.get("machine")))
    seed = [f"seed {config['seed']}"] if "seed" in config else []
    hardware = [f"{machine['cpu']}, {machine['cores']} cores"] if {"cpu", "cores"} <= machine.keys() else []
    return [*seed, *hardware, *(f"{key} {machine[key]}" for key in ("torch", "commit") if machine.get(key))]


def newest(record: Path) -> Path:
    """Which record of an experiment a page shows: that of the user's newest finished run of it, or else the committed
    one, which is given. What ran with --quick proves nothing and is left out."""
    own_records = []
    for folder in folders("experiments").values():
        path = folder / record.name
        try:
            if technique_of(folder) == f"figure {record.stem}" and read_json(path)["quick"] is False:
                own_records.append((path.stat().st_mtime, path))
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            pass  # not finished, or broken, which the recipe's page says
    return max(own_records)[1] if own_records else record


def recorded(path: Path) -> str:
    """A line about an experiment's record: whose it is, what made it, seed and machine."""
    try:
        record = read_json(path)
        record_facts = known_facts(record if isinstance(record, dict) else {})
    except (OSError, ValueError, RecursionError):
        record_facts = []
    origin = (
        f"your run in {plain(str(path.parent))}"
        if path.is_relative_to(RUNS)
        else f"committed in results/figures/{path.name}"
    )
    return " · ".join([f"{origin}, made by `etude figure {path.stem}`", *map(plain, record_facts)])


def finished() -> list[Source]:
    """The user's finished runs of the small recipe, newest first. Leaves out broken runs, which the recipe page
    reports."""
    runs = []
    for name, folder in folders().items():
        if technique_of(folder) != "recipe":
            continue
        try:
            end_times = [(folder / "stages" / f"{stage}.json").stat().st_mtime for stage in STAGES]
            record = read_json(folder / "config.json")
            runs.append(Source(name, folder, facts(record), end_times[-1]))
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            pass  # not finished, or broken; the committed example has no stages either
    return sorted(runs, key=lambda run: -run.end_time)


def choose_examples(*files: str, example: str = "recipe/config.json") -> Path:
    """Draws a box with the finished runs and the committed example, and a line that names the chosen one. Returns the
    folder with the `files` that the page shows. `example`: the file beside the committed example that says of which run
    it is."""
    runs = {run.name: run for run in finished()}
    left, right = st.columns([1, 3], vertical_alignment="bottom")
    with left:
        run = runs.get(choice([*runs, EXAMPLE], "examples"))
    with right:
        if run is not None and all((run.folder / PLACE / file).is_file() for file in files):
            st.caption(
                " · ".join(
                    [f"Shown: **{plain(run.name)}**, your run in {plain(str(run.folder))}", *map(plain, run.facts)]
                )
            )
            return run.folder / PLACE
        if run is not None:
            st.info(
                f"**{plain(run.name)}** has no examples yet. Make them in a few minutes: `etude "
                f"examples --run {shlex.quote(str(run.folder))}`. "
                "Until then, this page shows the examples of another run."
            )
        try:
            example_facts = facts(read_json(examples.FOLDER / example))
        except (OSError, ValueError, LookupError, TypeError):
            example_facts = []
        st.caption(" · ".join([f"Shown: **{EXAMPLE}**, a run from another machine", *map(plain, example_facts)]))
    return examples.FOLDER


def choice(names: list[str], key: str) -> str:
    """The name in the box, shared by all pages with this key in the URL. The code writes a choice to the URL by hand: a
    box bound to the URL leaves out its current default, and the same link would show another run once a newer one is
    finished. Without a choice the URL does not change, because a page that writes to it on opening would add an entry
    to the browser's history."""
    state, url_name = (
        st.session_state.setdefault(f"{key}-state", {"seen": None, "asked": None}),
        st.query_params.get(key),
    )
    # a link, the browser's Back, or another page
    should_reset = url_name != state["asked"] or key not in st.session_state
    requested_name = (url_name or state["seen"]) if should_reset else st.session_state[key]
    if requested_name and requested_name not in names:
        st.warning(missing("finished run", [requested_name]))
    if should_reset or requested_name not in names:
        st.session_state[key] = requested_name if requested_name in names else names[0]
    state["seen"], state["asked"] = st.selectbox("Run, newest first", names, key=key), url_name
    if url_name != state["seen"] and (url_name or state["seen"] != names[0]):
        st.query_params[key] = state["asked"] = state["seen"]
    return state["seen"]


def missing(kind: str, names: list[str]) -> str:
    """One line about unknown names, whatever characters they contain."""
    return f"There is no {kind} {', '.join(plain(' '.join(name.split())[:80]) for name in names)} here."


def plain(name: str) -> str:
    """A name with its Markdown characters escaped."""
    return re.sub(r"([\\`*_{}\[\]()<>#+!|$~:-])", r"\\\1", name)
