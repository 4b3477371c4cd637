"""Training runs: any run on disk, its stages and curves, and what training changed; several runs side by side, and one that is going on, live."""

from collections.abc import Sequence
from pathlib import Path

import streamlit as st

from etude import expected
from etude.explorer import beside, curves, run_choice, run_files, run_rollouts, run_state
from etude.explorer.charts import chart
from etude.explorer.page import ROOT, Page, download, folded, table
from etude.explorer.panels import PANELS, Panel
from etude.explorer.provenance import EXAMPLE, plain
from etude.explorer.run_kinds import Played
from etude.figures import bound, laws, measured, of_sources
from etude.report.record import STAGES
from sims.recipe import stages as recipe

EVERY = "Every metric"
FEW = 8
"""Curves of one metric that are drawn unless more are asked for."""
SECONDS = 2.0
"""Between two looks into the files of a run that is going on."""


def took() -> str:
    """How long a small run takes, in the words of the committed record of one; empty without it."""
    found = expected.read(ROOT / "results" / "recipe-small.json")
    if not found:
        return ""
    minutes = found["runs"][0]["seconds"] / 60
    return f"`make small` makes a run. It took {minutes:.1f} minutes on {expected.told(found['machine'])}, says results/recipe-small.json."


def draw() -> None:
    st.caption(took())
    runs, known = run_choice.chosen()
    if not runs:
        return
    left, right = st.columns([4, 2])
    with left:
        what = st.radio("Curves", _groups(runs), key="curves", bind="query-params", horizontal=True)
    with right:
        smooth = st.slider("Smoothing, points", 1, 31, 9, 2, key="smooth", bind="query-params")
    metric, parts = _metric(runs) if what == EVERY else ("", [])
    going = any(map(run_state.going, runs))
    places = {run.name: run.place for run in runs}
    st.fragment(shown, run_every=SECONDS if going else None)(places, known, what, smooth, metric, parts, going)


def _groups(runs: Sequence[Played]) -> list[str]:
    """What can be drawn. A run of the recipe has, or will have, all of it."""
    return [group for group in PANELS if any(run.recipe or curves.has(run, group) for run in runs)] + [EVERY]


def _metric(runs: Sequence[Played]) -> tuple[str, list[str]]:
    """Draws the boxes for one metric and the stages or arms in which it was logged."""
    names = curves.metrics_of(runs)
    if not names:
        return "", []
    left, right = st.columns([1, 3])
    with left:
        metric = st.selectbox("Metric", names, key="metric", bind="query-params")
    parts = curves.parts_of(runs, metric)
    with right:
        return metric, st.multiselect("Stages or arms", parts, parts[:FEW], key="parts", bind="query-params")


def shown(places: dict[str, Path], known: Sequence[Played], what: str, smooth: int, metric: str, parts: Sequence[str], going: bool) -> None:
    """Everything that comes from files. While a run is in progress, this part is redrawn every few seconds."""
    runs, broken = run_files.whole(places)
    for line in broken:
        st.error(line)
    if not runs:
        return
    for run in runs:
        _about(run, known)
    if what == EVERY:
        _one_metric(runs, smooth, metric, parts)
    else:
        columns = st.columns(1 if len(runs) > 1 else 2)  # several runs have longer names
        for place, panel in enumerate(PANELS[what]):
            with columns[place % len(columns)]:
                _panel(panel, runs, smooth)
    for run in runs:
        _experiment(run)
    _success(runs)
    if different := beside.differences(runs):
        with st.expander(f"Settings that differ: {len(different)}"):
            table(different, "settings")
    _rollouts(runs)
    st.subheader("Stages and their times")
    stages = list(dict.fromkeys([*(STAGES if any(run.recipe for run in runs) else ()), *(s for run in runs for s in run.stages if s != "together")]))
    table([{"stage": stage, **{run.name: run.stages.get(stage, "–") for run in runs}} for stage in (*stages, "together")], "stages")
    if going and not any(map(run_state.going, runs)):
        st.rerun()  # stop refreshing


def _about(run: Played, known: Sequence[Played]) -> None:
    """Whose run this is, and in which state."""
    where = "a committed record" if run.place.suffix == ".json" else "a run from another machine" if run.name == EXAMPLE else "your run"
    kind = "" if run.technique == "recipe" else f" of {plain(run.technique)}"
    words = " · ".join([f"**{plain(run.name)}**, {where}{kind}", run_state.said(run, known), *map(plain, run.facts)])
    with st.container(horizontal=True, vertical_alignment="center"):
        if run_state.going(run):
            st.badge("live", icon=":material/sensors:", color="green", width="content")
        st.caption(words)


def _of(runs: Sequence[Played]) -> str:
    """Whose figures these are, for a caption."""
    return f"Of {', '.join(curves.label(run) for run in runs)}."


def _panel(panel: Panel, runs: Sequence[Played], smooth: int) -> None:
    have = [run for run in runs if curves.rows(panel, [run], smooth)]
    lacking = [run.name for run in runs if run not in have]
    if have:
        st.markdown(f"**{panel.title}**")
        rows = curves.rows(panel, have, smooth)
        chart(curves.drawn(panel, smooth, tuple(have)), panel.name, rows, f"{panel.words} {_of(have)}", wide=len(have) > 1)
    if lacking:
        ended = all(not run.missing for run in runs if run.name in lacking)
        st.info(f"{panel.title}: {'not recorded by' if ended else 'nothing yet of'} {plain(', '.join(lacking))}.")


def _one_metric(runs: Sequence[Played], smooth: int, metric: str, parts: Sequence[str]) -> None:
    rows = curves.metric_rows(metric, parts, runs, smooth)
    if rows:
        chart(curves.metric_drawn(metric, tuple(parts), smooth, tuple(runs)), "metric", rows, f"{metric}, as it was logged. {_of(runs)}", wide=True)
    else:
        st.info(f"{plain(', '.join(run.name for run in runs))}: no metrics along steps are recorded.")


def _experiment(run: Played) -> None:
    """An experiment's picture and verdicts, or what a technique's run reported."""
    if run.picture:
        st.image(run.picture, caption=f"The picture of {run.name}.")
        if (data := run.picture.with_suffix(".csv")).is_file():
            download("Data (CSV)", data.read_bytes, f"{run.name.replace('/', '-')}.csv", "text/csv")
    if run.claims:
        st.subheader(f"Verdicts of {plain(run.name)}")
        claims = [{"claim": c["claim"], "measured": measured(c), "verdict": c["verdict"]} for c in of_sources(run.claims)]
        bounds = [{"claim": c["claim"], "measured": f"{measured(c)}, {bound(c)}", "verdict": c["verdict"]} for c in laws(run.claims)]
        table(claims + bounds, f"verdicts-{run.name}")
    figures = {key: value for key, value in run.result.items() if isinstance(value, int | float | str)}
    if figures:
        with st.expander(f"What {plain(run.name)} reported"):
            table(
                [{"figure": key, "value": f"{value:.4g}" if isinstance(value, float) else str(value)} for key, value in figures.items()],
                f"report-{run.name}",
            )


def _success(runs: Sequence[Played]) -> None:
    if not any(run.recipe or run.successes for run in runs):
        return
    st.subheader("Before and after RL")
    names = ("run", "measure", "before RL", "after RL", "difference")
    changes = [dict(zip(names, (run.name, *row), strict=True)) for run in runs for row in run.changes]
    if not changes:
        st.info("No evaluation yet.")
        return
    st.markdown("On held-out tasks, whose target and helper functions are not in the training data. Brackets are 95% intervals over tasks.")
    if len(runs) > 1 and (ends := beside.reached(runs)):
        if said := beside.comparable(runs):
            st.markdown(said)
        table(ends, "success-beside")
        folded(changes, "before-after", "Every measure, before and after")
    else:
        folded(changes, "before-after", "Every measure, before and after")


def _rollouts(runs: Sequence[Played]) -> None:
    """The last rollouts of each run, folded, or why there are none."""
    for run in runs:
        of, some = run_rollouts.last(run)
        if some:
            with st.expander(f"Last rollouts of {plain(run.name)}, {of}"):
                for one in some:
                    st.caption(plain(one.says))
                    st.code(one.text, language=None, wrap_lines=True)
        elif run_state.going(run):
            st.caption(f"{plain(run.name)}: {run_rollouts.silence(run)}")


PAGE = Page(
    name="recipe",
    title="The recipe",
    says="From real source code to a trained agent: pretraining, draft layers, long context, demonstrations, reinforcement learning, "
    "evaluation. This is the newest run on this machine, or else a committed one. Any other run opens here too: "
    "at full scale, of a technique, or of an experiment.",
    formula=r"\begin{gathered}\text{data} \to \text{CPT} \to \text{MTP} \to \text{long context} \\"
    r"\to \text{SFT} \to \text{RL} \to \text{evaluation}\end{gathered}",
    question="RL raises sampled success. Does best of 8 rise as much?",
    look="Sampled success rises during RL, but best of 8 hardly does: RL makes likely what was already within reach.",
    draw=draw,
    code=(recipe.run, recipe.pretrain),
    technique="recipe",
)
