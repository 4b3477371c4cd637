"""Training runs: stages, curves and results of any run on disk; several runs side by side; a run in progress, live."""

from collections.abc import Sequence
from pathlib import Path

import streamlit as st

from etude.console import expected
from etude.explorer.charts.chart import chart
from etude.explorer.files import parse_csv
from etude.explorer.page import ROOT, Page, folded, menu, table
from etude.explorer.provenance import EXAMPLE, plain
from etude.explorer.runs import choice as run_choice
from etude.explorer.runs import comparison as run_comparison
from etude.explorer.runs import curves
from etude.explorer.runs import files as run_files
from etude.explorer.runs import rollouts as run_rollouts
from etude.explorer.runs import state as run_state
from etude.explorer.runs.kinds import RunData
from etude.explorer.runs.panels import PANELS, SPEED, Panel
from etude.ledger.figures import bound, format_measured_value, laws, of_sources
from etude.report.record import STAGES
from recipe.small import stages as recipe

EVERY = "Every metric"
DEFAULT_PARTS = 8
"""Curves of one metric that are drawn unless more are asked for."""
SECONDS = 2.0
"""Between two looks into the files of a run that is going on."""


def took() -> str:
    """A sentence about the duration of a small run, from the committed record of one; empty without it."""
    record = expected.read(ROOT / "results" / "recipe-small.json")
    if not record:
        return ""
    minutes = record["runs"][0]["seconds"] / 60
    machine = expected.describe_machine(record["machine"])
    return f"`make small` starts a run. It took {minutes:.1f} minutes on {machine}, see results/recipe-small.json."


def draw() -> None:
    st.caption(took())
    runs, all_runs = run_choice.choose_runs()
    if not runs:
        return
    left, right = st.columns([4, 2])
    with left:
        group = st.radio("Curves", _list_groups(runs), key="curves", bind="query-params", horizontal=True)
    with right:
        smooth = st.slider("Smoothing, points", 1, 31, 9, 2, key="smooth", bind="query-params")
    metric, parts = _draw_metric_controls(runs) if group == EVERY else ("", [])
    is_live = any(map(run_state.going, runs))
    places = {run.name: run.place for run in runs}
    st.fragment(draw_results, run_every=SECONDS if is_live else None)(
        places, all_runs, group, smooth, metric, parts, is_live
    )


def _list_groups(runs: Sequence[RunData]) -> list[str]:
    """The groups of curves that can be drawn. A run of the recipe has, or will have, all of them, but for the speed of
    steps: small runs have none."""
    return [
        group for group in PANELS if any(run.recipe and group != SPEED or curves.has(run, group) for run in runs)
    ] + [EVERY]


def _draw_metric_controls(runs: Sequence[RunData]) -> tuple[str, list[str]]:
    """Draws the boxes for one metric and the stages or arms in which it was logged."""
    names = curves.metrics_of(runs)
    if not names:
        return "", []
    left, right = st.columns([1, 3])
    with left:
        metric = st.selectbox("Metric", names, key="metric", bind="query-params")
    parts = curves.parts_of(runs, metric)
    with right:
        return metric, st.multiselect("Stages or arms", parts, parts[:DEFAULT_PARTS], key="parts", bind="query-params")


def draw_results(
    places: dict[str, Path],
    all_runs: Sequence[RunData],
    group: str,
    smooth: int,
    metric: str,
    parts: Sequence[str],
    is_live: bool,
) -> None:
    """Everything that comes from files. While a run is in progress, this part is redrawn every few seconds."""
    runs, error_messages = run_files.load_runs(places)
    for message in error_messages:
        st.error(message)
    if not runs:
        return
    for run in runs:
        _draw_description(run, all_runs)
    if group == EVERY:
        _draw_metric(runs, smooth, metric, parts)
    else:
        columns = st.columns(1 if len(runs) > 1 else 2)  # several runs have longer names
        for index, panel in enumerate(PANELS[group]):
            with columns[index % len(columns)]:
                _draw_panel(panel, runs, smooth)
    for run in runs:
        _draw_experiment(run)
    _draw_success(runs)
    if differences := run_comparison.differences(runs):
        with st.expander(f"Settings that differ: {len(differences)}"):
            table(differences, "settings")
    _draw_rollouts(runs)
    st.subheader("Stages and their times")
    stages = list(
        dict.fromkeys(
            [
                *(STAGES if any(run.recipe for run in runs) else ()),
                *(s for run in runs for s in run.stages if s != "together"),
            ]
        )
    )
    table(
        [{"stage": stage, **{run.name: run.stages.get(stage, "–") for run in runs}} for stage in (*stages, "together")],
        "stages",
    )
    if is_live and not any(map(run_state.going, runs)):
        st.rerun()  # stop refreshing


def _draw_description(run: RunData, all_runs: Sequence[RunData]) -> None:
    """The origin of the run and its state."""
    origin = (
        "a committed record"
        if run.place.suffix == ".json"
        else "a run from another machine"
        if run.name == EXAMPLE
        else "your run"
    )
    kind = "" if run.technique == "recipe" else f" of {plain(run.technique)}"
    words = " · ".join(
        [f"**{plain(run.name)}**, {origin}{kind}", run_state.describe_state(run, all_runs), *map(plain, run.facts)]
    )
    with st.container(horizontal=True, vertical_alignment="center"):
        if run_state.going(run):
            st.badge("live", icon=":material/sensors:", color="green", width="content")
        st.caption(words)


def _describe_runs(runs: Sequence[RunData]) -> str:
    """The runs of a chart, for its caption."""
    return f"{'Runs' if len(runs) > 1 else 'Run'}: {', '.join(curves.label(run) for run in runs)}."


def _draw_panel(panel: Panel, runs: Sequence[RunData], smooth: int) -> None:
    drawable_runs = [run for run in runs if curves.rows(panel, [run], smooth)]
    missing_names = [run.name for run in runs if run not in drawable_runs]
    if drawable_runs:
        st.markdown(f"**{panel.title}**")
        rows = curves.rows(panel, drawable_runs, smooth)
        chart(
            curves.draw_panel(panel, smooth, tuple(drawable_runs)),
            panel.name,
            rows,
            f"{panel.words} {_describe_runs(drawable_runs)}",
            wide=len(drawable_runs) > 1,
        )
    if missing_names:
        is_finished = all(not run.missing for run in runs if run.name in missing_names)
        st.info(
            f"{panel.title}: {'not recorded by' if is_finished else 'nothing yet of'} "
            f"{plain(', '.join(missing_names))}."
        )


def _draw_metric(runs: Sequence[RunData], smooth: int, metric: str, parts: Sequence[str]) -> None:
    rows = curves.metric_rows(metric, parts, runs, smooth)
    if rows:
        chart(
            curves.metric_drawn(metric, tuple(parts), smooth, tuple(runs)),
            "metric",
            rows,
            f"{metric}, as it was logged. {_describe_runs(runs)}",
            wide=True,
        )
    else:
        st.info(f"{plain(', '.join(run.name for run in runs))}: no metrics along steps are recorded.")


def _draw_experiment(run: RunData) -> None:
    """An experiment's picture and verdicts, or what a technique's run reported."""
    if run.picture:
        st.image(run.picture, caption=f"The picture of {run.name}.")
        if (path := run.picture.with_suffix(".csv")).is_file():
            name = run.name.replace("/", "-")
            menu(name, lambda: parse_csv(path.read_text(encoding="utf-8")), run.picture.read_bytes)
    if run.claims:
        st.subheader(f"Verdicts of {plain(run.name)}")
        claims = [
            {"claim": claim["claim"], "measured": format_measured_value(claim), "verdict": claim["verdict"]}
            for claim in of_sources(run.claims)
        ]
        bounds = [
            {
                "claim": claim["claim"],
                "measured": f"{format_measured_value(claim)}, {bound(claim)}",
                "verdict": claim["verdict"],
            }
            for claim in laws(run.claims)
        ]
        table(claims + bounds, f"verdicts-{run.name}")
    reported = {key: value for key, value in run.result.items() if isinstance(value, int | float | str)}
    if reported:
        with st.expander(f"What {plain(run.name)} reported"):
            table(
                [
                    {"figure": key, "value": f"{value:.4g}" if isinstance(value, float) else str(value)}
                    for key, value in reported.items()
                ],
                f"report-{run.name}",
            )


def _draw_success(runs: Sequence[RunData]) -> None:
    if not any(run.recipe or run.successes for run in runs):
        return
    st.subheader("Before and after RL")
    names = ("run", "measure", "before RL", "after RL", "difference")
    changes = [dict(zip(names, (run.name, *row), strict=True)) for run in runs for row in run.changes]
    if not changes:
        st.info("No evaluation yet.")
        return
    st.markdown(
        "On held-out tasks, whose target and helper functions are not in the training data. Brackets "
        "are 95% intervals over tasks."
    )
    if len(runs) > 1 and (reached_rows := run_comparison.reached(runs)):
        if comparison := run_comparison.comparable(runs):
            st.markdown(comparison)
        table(reached_rows, "success-beside")
    folded(changes, "before-after", "Every measure, before and after")


def _draw_rollouts(runs: Sequence[RunData]) -> None:
    """The last rollouts of each run, folded, or why there are none."""
    for run in runs:
        source, rollouts = run_rollouts.last(run)
        if rollouts:
            with st.expander(f"Last rollouts of {plain(run.name)}, {source}"):
                for rollout in rollouts:
                    st.caption(plain(rollout.says))
                    st.code(rollout.text, language=None, wrap_lines=True)
        elif run_state.going(run):
            st.caption(f"{plain(run.name)}: {run_rollouts.silence(run)}")


PAGE = Page(
    name="recipe",
    title="Training runs",
    says="Curves and results of a training run. The whole recipe goes from source code to a trained agent: "
    "pretraining, draft layers, long context, demonstrations, reinforcement learning, evaluation. The page shows the "
    "newest run on this machine, or else a committed one. It also opens any other run: at full scale, of a technique, "
    "or of an experiment.",
    formula=r"\begin{gathered}\text{data} \to \mathrm{CPT} \to \mathrm{MTP} \to \text{long context} \\"
    r"\to \mathrm{SFT} \to \mathrm{RL} \to \text{evaluation}\end{gathered}",
    symbols={
        r"\mathrm{CPT}": "continued pretraining on code",
        r"\mathrm{MTP}": "training of the draft layers (multi-token prediction)",
        r"\mathrm{SFT}": "supervised fine-tuning on demonstrations",
        r"\mathrm{RL}": "reinforcement learning on tasks with hidden tests",
    },
    question="RL raises sampled success. Does best of 8 rise as much?",
    look="Sampled success rises during RL, but best of 8 hardly does: RL makes likely what was already within reach.",
    draw=draw,
    code=(recipe.run, recipe.pretrain),
    technique="recipe",
)
