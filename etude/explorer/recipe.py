"""The recipe: the newest run on disk, its stages, its curves, and what RL changed; several runs side by side."""

import json
import time
from functools import lru_cache
from pathlib import Path

import streamlit as st

from etude.explorer import curves
from etude.explorer.curves import Played
from etude.explorer.page import Page, figure, table
from etude.explorer.provenance import EXAMPLE, facts, folders, missing, plain
from etude.report.record import STAGES, as_triple, before_after, collect, evaluation_of
from kit.disk import read_lines, timings
from kit.settings import RunError
from sims.recipe import stages as recipe


def whole(found: dict[str, Path]) -> tuple[list[Played], list[str]]:
    """The current runs in these folders, newest first and the example last, and an error line for each broken run."""
    runs, broken = [], []
    for name, folder in found.items():
        try:
            runs.append(load(name, folder))
        except RunError as error:
            broken.append(str(error))
    return sorted(runs, key=lambda run: (run.name == EXAMPLE, -run.touched)), broken


def _files(folder: Path) -> list[Path]:
    parts = ("config.json", "report.json", "timings.jsonl", "stages/*.json", "metrics/*.jsonl")
    return sorted(path for part in parts for path in folder.glob(part))


def load(name: str, folder: Path) -> Played:
    """A run as it is on disk now. Raises RunError if files are missing or damaged."""
    try:
        stamp = tuple((path, path.stat().st_mtime_ns, path.stat().st_size) for path in _files(folder))
        return _load(name, folder, stamp)
    except (OSError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise RunError(f"{folder} is not in the format of a run ({type(error).__name__}: {error})") from None


@lru_cache(256)
def _load(name: str, folder: Path, stamp: tuple) -> Played:
    config = _object(folder / "config.json")
    if not {"technique", "config", "machine"} <= config.keys():
        raise RunError(f"{folder / 'config.json'} is not the configuration of a run")
    if (folder / "stages").is_dir():
        for path in sorted((folder / "stages").glob("*.json")):
            _object(path)
            if not (folder / "metrics" / f"{path.stem}.jsonl").is_file():
                raise RunError(f"{folder / 'metrics' / path.stem}.jsonl is missing, although its stage is finished")
        record = collect(folder)
    else:
        record = _object(folder / "report.json")  # a trimmed copy
    if not timings(folder) and (folder / "timings.jsonl").exists() and (folder / "timings.jsonl").stat().st_size:
        raise RunError(f"{folder / 'timings.jsonl'} holds no stage times")
    metrics = {path.stem: _lines(path) for path in sorted((folder / "metrics").glob("*.jsonl"))}
    evaluated = evaluation_of(record)
    before, after = (evaluated.get(part) or {} for part in ("before", "after"))
    names = (("success", "sampled"), ("greedy", "greedy"), ("best_of_8", "best of 8"))
    pairs = [(words, as_triple(before.get(key)), as_triple(after.get(key))) for key, words in names]
    missing = [stage for stage in STAGES if stage not in record["stages"]]
    return Played(
        name,
        facts(config),
        _how_far(folder, record),
        before_after(record),
        [(words, first, last) for words, first, last in pairs if first and last],
        curves.points(metrics),
        missing,
        max((ns / 1e9 for _, ns, _ in stamp), default=0.0),
    )


def _how_far(folder: Path, record: dict) -> dict[str, str]:
    last = {line["stage"]: line for line in timings(folder) if "step" in line}
    words = {}
    for stage in STAGES:
        seconds = record["seconds"].get(stage)
        if stage in record["stages"]:
            words[stage] = "done" if seconds is None else f"{seconds:.0f} s"
        elif stage in last:
            words[stage] = f"{seconds:.0f} s so far, at step {last[stage]['step']:g}"
        else:
            words[stage] = "–" if seconds is None else f"{seconds:.0f} s so far"
    return words | {"together": f"{sum(record['seconds'].values()) / 60:.1f} min"}


def _object(path: Path) -> dict:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunError(f"{path} is missing") from None
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read ({error})") from None
    if not isinstance(found, dict):
        raise RunError(f"{path} does not hold a JSON object")
    return found


def _lines(path: Path) -> list[dict]:
    """Complete lines. Skips a line that is still being written or that a kill cut off; a file without complete lines is an error."""
    found = read_lines(path)
    if not found and path.stat().st_size > 0:
        raise RunError(f"{path} holds no metrics")
    return found


def draw() -> None:
    found = folders()
    runs, broken = whole(found)
    for line in broken:
        st.error(line)
    if not runs:
        return
    left, middle, right = st.columns([3, 4, 2])
    with left:
        # Prefer a run that was not abandoned.
        first = next((run.name for run in runs if run.going or not run.missing), runs[0].name)
        chosen = choice([run.name for run in runs], found, first)
    with middle:
        what = st.radio("Curves", list(curves.PANELS), key="curves", bind="query-params", horizontal=True)
    with right:
        smooth = st.slider("Smoothing, points", 1, 31, 9, 2, key="smooth", bind="query-params")
    if not chosen:
        st.info("Choose a run.")
        return
    going = any(run.going for run in runs if run.name in chosen)
    st.fragment(shown, run_every=5.0 if going else None)({name: found[name] for name in chosen}, what, smooth, going)


def choice(names: list[str], found: dict[str, Path], first: str) -> list[str]:
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
    chosen = st.multiselect("Runs, newest first", names, key="run")
    state["shown"], state["seen"] = chosen, chosen or [""]
    if asked != state["seen"]:
        st.query_params["run"] = state["seen"]
    return chosen


def shown(chosen: dict[str, Path], what: str, smooth: int, going: bool) -> None:
    """Everything that comes from files. While a run is in progress, this part is redrawn every few seconds."""
    runs, broken = whole(chosen)
    for line in broken:
        st.error(line)
    if not runs:
        return
    for run in runs:
        st.caption(_about(run))
    columns = st.columns(2)
    for place, panel in enumerate(curves.PANELS[what]):
        with columns[place % 2]:
            rows = curves.rows(panel, runs, smooth)
            if rows:
                figure(curves.drawn(panel, smooth, tuple(runs)), panel.name, rows, panel.words)
            else:
                st.info(f"{panel.title}: nothing yet.")
    st.subheader("Before and after RL")
    changes = [
        dict(zip(("run", "measure", "before RL", "after RL", "difference"), (run.name, *row), strict=True)) for run in runs for row in run.changes
    ]
    if changes:
        st.markdown(
            "On held-out tasks, whose target and helper functions are not in the training data. Brackets are 95% bootstrap intervals over tasks."
        )
        table(changes, "before-after")
    else:
        st.info("No evaluation yet.")
    st.subheader("Stages and their times")
    table([{"stage": stage, **{run.name: run.stages[stage] for run in runs}} for stage in (*STAGES, "together")], "stages")
    if going and not any(run.going for run in runs):
        st.rerun()  # stop refreshing


def _about(run: Played) -> str:
    state = "finished"
    if run.missing:
        minutes = (time.time() - run.touched) / 60
        state = f"running, at {run.missing[0]}" if run.going else f"stopped {minutes:.0f} minutes ago before the end of {run.missing[0]}"
    whose = "a run from another machine" if run.name == EXAMPLE else "your run"
    return " · ".join([f"**{plain(run.name)}**, {whose}", state, *map(plain, run.facts)])


PAGE = Page(
    name="recipe",
    title="The recipe",
    says="From real source code to a trained agent: pretraining, draft layers, long context, demonstrations, reinforcement learning, "
    "evaluation. This is the newest run on this machine, or else a committed one; `make small` makes one in about ten minutes.",
    formula=r"\begin{gathered}\text{data} \to \text{CPT} \to \text{MTP} \to \text{long context} \\"
    r"\to \text{SFT} \to \text{RL} \to \text{evaluation}\end{gathered}",
    question="RL raises sampled success. Does best of 8 rise as much?",
    look="Sampled success rises during RL, but best of 8 hardly does: RL makes likely what was already within reach.",
    draw=draw,
    code=(recipe.run, recipe.pretrain),
    technique="recipe",
)
