"""Claims of the sources, what was measured here, the verdicts, and the experiments' pictures.

The pictures are static: they are committed next to their records, and no control changes them. The interactive charts
are on the pages of the techniques.
"""

from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path

import streamlit as st

from etude import catalog
from etude.explorer.charts.chart import Axis, Look, boxes, drawing, picked
from etude.explorer.drawing import Drawing
from etude.explorer.files import parse_csv
from etude.explorer.page import ROOT, Page, menu, table
from etude.ledger import figures
from etude.ledger.qualifications import qualified
from etude.ledger.statements import open_statements
from kit.settings import RunError

RESULTS = ROOT / "results"
MARKS = {
    "reproduced": "●",
    "partly": "◐",
    "contradicted": "✕",
    "not at this scale": "○",
    "not tested": "–",
    "stale": "⧖",
}
LAW_MARKS = {"holds": "●", "broken": "✕", "stale": "⧖"}
"""Verdicts differ in shape as well as in colour."""
LOOKS = {
    "reproduced": Look("green"),
    "partly": Look("sky"),
    "contradicted": Look("red"),
    "not at this scale": Look("grey"),
    "not tested": Look("purple"),
    "stale": Look("orange"),
}
NARROW_SCREEN_STYLE = """<style>@media (max-width: 640px) {
  [class*="st-key-wide-"] :is([data-testid="stImage"], [data-testid="stFullScreenFrame"]) {overflow-x: auto}
  [class*="st-key-wide-"] [data-testid="stImage"] img {width: 48rem !important; max-width: none !important}
}</style>"""
"""For pictures on screens without room for them."""


def make_claim_rows(claims: list[dict]) -> list[dict]:
    """Claims as rows of the table. Raises RunError for a claim that is not in the format of `etude claims`."""
    try:
        return [
            {
                "verdict": f"{MARKS[claim['verdict']]} {figures.worded(claim)}",
                "measured": figures.format_measured_value(claim),
                "claim": qualified(claim),
                "source": claim["source"],
                "rule": figures.ruled(claim),
                "how it was decided": claim["note"] or "",
                "run it again": claim["command"],
            }
            for claim in claims
        ]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RunError(
            f"results/claims.json is not in the format of etude claims ({type(error).__name__}: {error}); rebuild it"
        ) from None


def make_law_rows(claims: list[dict]) -> list[dict]:
    """Laws as rows of the table."""
    return [
        {
            "": f"{LAW_MARKS[claim['verdict']]} {figures.worded(claim)}",
            "law": qualified(claim),
            "deviation": figures.format_measured_value(claim),
            "bound": figures.bound(claim),
            "source": claim["source"],
            "how it was decided": claim["note"] or "",
            "run it again": claim["command"],
        }
        for claim in claims
    ]


def make_open_rows(claims: list[dict], words: str) -> list[dict]:
    """Untested statements that contain all these words, as rows of the table."""
    statement_rows = [
        {"statement": statement.says, "section": statement.section, "why it is not tested": reason}
        for statement, reason in open_statements(claims)
    ]
    return [row for row in statement_rows if has_words(" ".join(row.values()), words)]


def has_words(text: str, words: str) -> bool:
    return all(word in text.casefold() for word in words.casefold().split())


def filter_claims(claims: list[dict], verdicts: list[str], experiments: list[str], words: str) -> list[dict]:
    """Claims with these verdicts and experiments (empty: all) whose text contains all these words."""
    return [
        claim
        for claim in claims
        if (not verdicts or claim["verdict"] in verdicts)
        and (not experiments or claim["experiment"] in experiments)
        and has_words(f"{claim['claim']} {claim['source']} {claim['note']}", words)
    ]


def counts(claims: list[dict]) -> list[dict]:
    """How many claims of each experiment have which verdict, experiments and verdicts in order; those that there are
    none of are left out."""
    count_rows = [
        {
            "experiment": name,
            "verdict": verdict,
            "claims": sum(claim["experiment"] == name and claim["verdict"] == verdict for claim in claims),
        }
        for name in dict.fromkeys(claim["experiment"] for claim in claims)
        for verdict in MARKS
    ]
    return [row for row in count_rows if row["claims"]]


def verdicts_drawn(rows: list[dict]) -> Drawing:
    """A bar for each experiment, verdict after verdict. `rows`: those of `counts`."""
    names = list(dict.fromkeys(row["experiment"] for row in rows))
    bars = []
    for place, name in enumerate(names):
        experiment_rows = [row for row in rows if row["experiment"] == name]
        ends = accumulate(row["claims"] for row in experiment_rows)
        bars += [
            row | {"left": end - row["claims"], "right": end, "low": -place - 0.4, "high": 0.4 - place}
            for row, end in zip(experiment_rows, ends)
        ]
    return drawing(
        Axis("claims", lower=0, integer=True),
        Axis("", lower=0.5 - len(names), upper=0.5, ticks={-place: name for place, name in enumerate(names)}),
        boxes(bars, "left", "right", "low", "high", "verdict", tell=("experiment", "claims")),
        looks=LOOKS,
        height=60 + 22 * len(names),
    )


def filter_experiment(row: Mapping) -> None:
    """The experiment of a bar, and no other."""
    st.session_state["experiment"] = [row["experiment"]]


def draw() -> None:
    st.html(NARROW_SCREEN_STYLE)
    everything = figures.load(RESULTS / "claims.json")
    claims, laws = figures.of_sources(everything), figures.laws(everything)
    make_claim_rows(claims)
    entries = {entry.name: entry for entry in catalog.EXPERIMENTS}
    st.markdown(figures.covered(everything))
    st.caption(
        "Shown: the committed records in results/. The page “Training runs” opens an experiment that you ran yourself."
    )
    left, right = st.columns([2, 1])
    with left:
        experiments = st.multiselect(
            "Experiments",
            list(dict.fromkeys(claim["experiment"] for claim in everything)),
            key="experiment",
            bind="query-params",
            placeholder="all",
        )
    with right:
        words = st.text_input("Words", key="words", bind="query-params", placeholder="k1 gradient")
    verdicts = st.pills("Verdicts", list(MARKS), selection_mode="multi", key="verdict", bind="query-params")
    selected_claims = filter_claims(claims, verdicts, experiments, words)
    selected_laws = [] if verdicts else filter_claims(laws, [], experiments, words)
    statement_rows = (
        make_open_rows(everything, words) if not experiments and (not verdicts or "not tested" in verdicts) else []
    )
    count = ", ".join(f"{sum(claim['verdict'] == verdict for claim in selected_claims)} {verdict}" for verdict in MARKS)
    st.markdown(f"{len(selected_claims)} of {len(claims)} claims: {count}.")
    if selected_claims:
        count_rows = counts(filter_claims(claims, verdicts, [], words))
        caption = (
            "Claims of each experiment by verdict. A click on a bar selects its experiment; the box above resets it."
        )
        picked(verdicts_drawn(count_rows), "claims-verdicts", count_rows, caption, on_click=filter_experiment)
        table(make_claim_rows(selected_claims), "claims")
    else:
        st.info("No claim matches; remove a filter.")
    if selected_laws:
        st.subheader("Laws", anchor="laws")
        st.markdown(
            "Closed forms and identities, with the largest measured deviation from each. They do not count as claims."
        )
        table(make_law_rows(selected_laws), "laws")
    if statement_rows:
        st.subheader("Not tested", anchor="not-tested")
        st.markdown(f"{len(statement_rows)} statements of the sources that are not tested here yet.")
        table(statement_rows, "not-tested")
    for name in dict.fromkeys(claim["experiment"] for claim in [*selected_claims, *selected_laws]):
        entry = entries.get(name)
        title = f"{name}: {entry.title} ({entry.source})" if entry else name
        st.subheader(title, anchor=name)
        _show_picture(RESULTS / "figures", name, title)


def _show_picture(folder: Path, name: str, alt: str) -> None:
    """The experiment's picture with its menu. A missing file is reported; the others are still shown."""
    try:
        png, data = (folder / f"{name}.png").read_bytes(), (folder / f"{name}.csv").read_text(encoding="utf-8")
        with st.container(key=f"wide-{name}"):
            # wider than any picture and the page: shown at page width, without another copy in a new size
            st.image(png, width=4000, alt=alt)
    except (OSError, SyntaxError, ValueError) as error:  # a damaged PNG is a SyntaxError to PIL
        st.error(f"the picture of {name} cannot be shown ({error}); draw it again with: etude figure {name}")
        return
    menu(name, lambda: parse_csv(data), lambda: png)


PAGE = Page(
    name="claims",
    title="Claims",
    says="Claims of the sources, the measurements made here, and a verdict for each claim, which a fixed rule derives "
    "from the measurement. The list includes claims that did not reproduce and statements that are not tested yet.",
    question="Which experiment contradicts the sources most often: the one on an agent's habits, on draft layers, or "
    "on engines and weights?",
    look="The one on draft layers, mtp. Nothing is contradicted in async-rl and weight-sync: 8 of their 14 claims "
    "reproduce. Each row of the table has the rule, the reason and the command that repeats the experiment.",
    draw=draw,
    code=(figures.gather,),
)
