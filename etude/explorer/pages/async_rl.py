"""Asynchronous RL: trainer and workers over time, in a simulation with controls and in a real run."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import streamlit as st

from etude.explorer import provenance
from etude.explorer.charts.chart import Axis, Look, bars, chart, drawing
from etude.explorer.drawing import Drawing
from etude.explorer.files import stamp
from etude.explorer.page import Page, table
from etude.explorer.pages.async_strips import clock, strips
from etude.explorer.spans import metrics
from kit.disk import read_json
from kit.settings import RunError
from recipe.asynchronous import timeline
from recipe.asynchronous.timeline import Timeline
from ref import async_rl

MODES = ("synchronous", "one-step-off", "asynchronous", "in-flight")
ALL = "all four"
STYLES = {"synchronous": "grey", "one-step-off": "purple", "asynchronous": "sky", "in-flight": "blue"}
STEPS, TURNS, TOKENS = 8, 4, 20
"""Of the simulated run: optimiser steps, mean turns of a rollout, mean tokens of a turn."""


def token_s(rows: int) -> float:
    """Seconds of an engine's step in which each row samples a token: 4 ms, and 50 µs more for each row."""
    return 0.004 + 0.00005 * rows


@lru_cache(128)
def simulated(
    mode: str,
    staleness: int,
    latency: float,
    sigma: float,
    slots: int,
    groups: int,
    rollouts: int,
    train: float,
    publish: float,
) -> Timeline:
    load = async_rl.Load(
        async_rl.heavy_tailed(latency, turns=TURNS, tokens=TOKENS, sigma=sigma),
        rollouts=rollouts,
        slots=slots,
        token_s=token_s,
        train_s=train,
        publish_s=publish,
    )
    return timeline.simulated(
        mode,
        async_rl.simulate(mode, async_rl.Rules(groups, staleness, STEPS), load),  # pyright: ignore[reportArgumentType]
    )


def summarize_run(run: Timeline) -> dict:
    """The metrics of a run."""
    return {
        "run": run.name,
        "steps per minute": run.steps_per_minute,
        "trainer idle": run.trainer_idle,
        "workers idle": run.sampler_idle,
        "mean age": run.mean_age,
        "oldest": max(run.ages, default=0),
        "dropped groups": run.dropped,
    }


def compute_age_shares(timelines: Sequence[Timeline]) -> list[dict]:
    """Share of each run's tokens at each age."""
    oldest = max(max(run.ages, default=0) for run in timelines)
    return [
        {"run": run.name, "age": age, "tokens": run.ages[age], "share": run.ages[age] / max(1, run.ages.total())}
        for run in timelines
        for age in range(oldest + 1)
    ]


def draw_histogram(rows: list[dict]) -> Drawing:
    """Share of tokens by their age, a colour a run."""
    looks = {row["run"]: Look(STYLES.get(row["run"], "green")) for row in rows}
    layer = bars(rows, "age", "share", "run", tell=("tokens",))
    return drawing(
        Axis("age of a token when it is trained on, updates", names=True),
        Axis("share of tokens", upper=1.0),
        layer,
        looks=looks,
    )


def show_pictures(timelines: tuple[Timeline, ...], name: str) -> None:
    """Timeline, ages, idle shares and figures of some runs."""

    def draw_strips(seconds: float) -> None:
        chart(
            strips(timelines, seconds),
            f"{name}-timeline",
            timeline.rows(timelines),
            "Top strip: steps of the trainer, each with the number and colour of the version that it makes. Below, "
            "for each worker: a thin line in the colour of the version that it holds, and the shares of its slots "
            "that decode, wait for a tool, or are free.",
            wide=True,
        )

    clock(timelines, name, draw_strips)
    left, right = st.columns(2)
    with left:
        rows = compute_age_shares(timelines)
        chart(
            draw_histogram(rows),
            f"{name}-ages",
            rows,
            "Number of updates between the sampling of a token and its training.",
        )
    with right:
        st.caption(
            "Idle: the share of the time in which the trainer waits for groups, and in which no slot of a "
            "worker decodes."
        )
        table([summarize_run(run) for run in timelines], f"{name}-figures")


def runs() -> dict[str, Path]:
    """Runs of `etude run async-rl` that have begun, newest first, by name."""
    dated_folders = []
    for folder in sorted(provenance.RUNS.iterdir()) if provenance.RUNS.is_dir() else ():
        try:
            config = read_json(folder / "config.json")
            if config["technique"] == "async-rl":
                dated_folders.append(((folder / "services" / "events" / "trainer.jsonl").stat().st_mtime, folder))
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            pass  # another technique's, or not begun
    return {folder.name: folder for _, folder in sorted(dated_folders, key=lambda entry: -entry[0])}


def load_timeline(folder: Path) -> Timeline:
    """A run so far; read again only when its files have changed. Raises RunError if they are missing or damaged, or no
    step is done."""
    services_folder = folder / "services"
    try:
        files = [services_folder / "journal.jsonl", *sorted((services_folder / "events").glob("*.jsonl"))]
        return read_timeline(folder.name, services_folder, tuple(map(stamp, files)))
    except (OSError, LookupError, TypeError, ValueError) as error:
        raise RunError(
            f"{folder} is not in the format of a run of async-rl ({type(error).__name__}: "
            f"{' '.join(str(error).split())})"
        ) from None


@lru_cache(4)
def read_timeline(name: str, folder: Path, stamps: tuple) -> Timeline:
    return timeline.make_run_timeline(name, folder)


def show_real_run() -> None:
    """The same pictures of a run on this machine."""
    folders = runs()
    if not folders:
        st.info(
            f"There is no such run in `{provenance.RUNS}/` yet. `etude run async-rl` makes one in a few minutes, "
            "after `make small`."
        )
        return
    left, right = st.columns([1, 3], vertical_alignment="bottom")
    with left:
        folder = folders[provenance.choice(list(folders), "async-run")]
    with right:
        try:
            facts = provenance.facts(read_json(folder / "config.json"))
        except (OSError, ValueError, LookupError, TypeError):
            facts = []
        names = provenance.plain(folder.name), provenance.plain(str(folder))
        st.caption(" · ".join([f"Shown: **{names[0]}**, your run in {names[1]}", *map(provenance.plain, facts)]))
    try:
        run = load_timeline(folder)
    except RunError as error:
        st.error(str(error))
        return
    show_pictures((run,), "async-run")


def draw() -> None:
    col1, col2, col3 = st.columns(3)
    mode = col1.selectbox("How the services run", (ALL, *MODES), key="mode", bind="query-params")
    staleness = col2.slider(
        "S, oldest age in updates",
        0,
        8,
        2,
        key="staleness",
        bind="query-params",
        help="Of asynchronous and in-flight. Synchronous means 0, one-step-off 1.",
    )
    slots = col3.slider(
        "Slots", 4, 128, 32, 4, key="slots", bind="query-params", help="Rollouts that may run or wait for a tool."
    )
    col1, col2, col3, col4, col5, col6 = st.columns(6)
    latency = col1.slider("Mean time of a tool, s", 0.0, 2.0, 0.2, 0.05, key="latency", bind="query-params")
    sigma = col2.slider(
        "Its tail, σ",
        0.0,
        2.0,
        1.0,
        0.1,
        key="tail",
        bind="query-params",
        help="Of the log-normal time. 0: all take the same time.",
    )
    groups = col3.slider("Groups of a step", 1, 8, 4, key="groups", bind="query-params")
    rollouts = col4.slider("Rollouts of a group", 1, 6, 4, key="per-group", bind="query-params")
    train = col5.slider("Time of a step, s", 0.1, 5.0, 1.0, 0.1, key="step-time", bind="query-params")
    publish = col6.slider(
        "Time to publish, s",
        0.0,
        3.0,
        0.0,
        0.1,
        key="publish",
        bind="query-params",
        help="From the end of a step until workers can load its weights. Neither trainer nor workers wait for it.",
    )
    modes = MODES if mode == ALL else (mode,)
    timelines = tuple(
        simulated(name, staleness, latency, sigma, slots, groups, rollouts, train, publish) for name in modes
    )
    first, last = timelines[0], timelines[-1]
    workload_note = f"{STEPS} steps of {groups} × {rollouts} rollouts."
    metrics(
        (f"Steps per minute, {last.name}", f"{last.steps_per_minute:.1f}", workload_note),
        *(
            [("Over synchronous", f"{last.steps_per_minute / first.steps_per_minute:.2f}×", workload_note)]
            if len(timelines) > 1
            else []
        ),
        ("Trainer idle", f"{last.trainer_idle:.0%}", None),
        ("Mean age", f"{last.mean_age:.2f}", "Of the tokens that were trained on, in updates."),
        ("Dropped groups", last.dropped, "Groups that were too old when a step could have taken them."),
    )
    show_pictures(timelines, "async")
    st.caption(
        f"Simulation: {STEPS} steps, one worker that shares no hardware with the trainer, rollouts of about {TURNS} "
        f"turns with {TOKENS} tokens each. A decoding step of the worker, one token for each of its rows, takes 4 ms "
        "plus 50 µs per row."
    )
    st.subheader("A real run")
    show_real_run()


PAGE = Page(
    name="async-rl",
    title="Asynchronous RL",
    says="Waiting times of sampler and trainer, simulated on a virtual clock for four schedules: synchronous, one "
    "step off, asynchronous, and in flight, with new weights in the middle of a rollout. Below are the same charts of "
    "a run with real processes.",
    formula=r"\begin{gathered}\text{start a group while } "
    r"n_{\mathrm{trained}} + n_{\mathrm{ready}} + n_{\mathrm{running}} < (S + v + 1)\,G \\"
    r"\text{drop it if } v - u > S\end{gathered}",
    symbols={
        r"n_{\mathrm{trained}},\ n_{\mathrm{ready}},\ n_{\mathrm{running}}": "groups already trained on, sampled and "
        "waiting, and being sampled",
        "S": "staleness, the largest allowed age in updates",
        "v": "number of updates made so far",
        "G": "groups per step",
        "u": "version of the weights that sampled the group's oldest token",
    },
    question="With slow tools, how much of its time does the trainer of the synchronous loop wait? And what "
    "does sampling in flight gain over "
    "one step off where there are no tools?",
    look="With slow tools the trainer of the synchronous loop waits most of the time; in flight with S = 2 it waits "
    "much less. Without tools one step off is as fast as in flight. A longer tail makes groups late, and late groups "
    "are dropped.",
    draw=draw,
    code=(async_rl.Life, async_rl.simulate),
    technique="async-rl",
)
