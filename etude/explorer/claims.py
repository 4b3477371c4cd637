"""What the sources claim, what was measured here, the verdict, and the experiments' pictures.

Those pictures stay still: they are committed beside the records that they were drawn from, and no control changes them. What a reader may ask of them
is on the pages of their techniques.
"""

from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path

import streamlit as st

from etude import catalog, figures
from etude.explorer.charts import Axis, Look, boxes, drawing, picked
from etude.explorer.drawing import Drawing
from etude.explorer.page import ROOT, Page, download, table
from etude.limits import qualified
from etude.statements import open_statements
from kit.settings import RunError

RESULTS = ROOT / "results"
MARKS = {"reproduced": "●", "partly": "◐", "contradicted": "✕", "not at this scale": "○", "not tested": "–", "stale": "⧖"}
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
NARROW = """<style>@media (max-width: 640px) {
  [class*="st-key-wide-"] :is([data-testid="stImage"], [data-testid="stFullScreenFrame"]) {overflow-x: auto}
  [class*="st-key-wide-"] [data-testid="stImage"] img {width: 48rem !important; max-width: none !important}
}</style>"""
"""For pictures on screens without room for them."""


def rows(claims: list[dict]) -> list[dict]:
    """Claims as rows of the table. Raises RunError for a claim that is not in the format of `etude claims`."""
    try:
        return [
            {
                "verdict": f"{MARKS[c['verdict']]} {figures.worded(c)}",
                "measured": figures.measured(c),
                "claim": qualified(c),
                "source": c["source"],
                "rule": figures.ruled(c),
                "how it was decided": c["note"] or "",
                "run it again": c["command"],
            }
            for c in claims
        ]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RunError(f"results/claims.json is not in the format of etude claims ({type(error).__name__}: {error}); rebuild it") from None


def law_rows(claims: list[dict]) -> list[dict]:
    """Laws as rows of the table."""
    return [
        {
            "": f"{LAW_MARKS[c['verdict']]} {figures.worded(c)}",
            "law": qualified(c),
            "deviation": figures.measured(c),
            "bound": figures.bound(c),
            "source": c["source"],
            "how it was decided": c["note"] or "",
            "run it again": c["command"],
        }
        for c in claims
    ]


def open_rows(claims: list[dict], words: str) -> list[dict]:
    """Untested statements that contain all these words, as rows of the table."""
    found = [{"statement": statement.says, "section": statement.section, "why it is not tested": why} for statement, why in open_statements(claims)]
    return [row for row in found if has(" ".join(row.values()), words)]


def has(text: str, words: str) -> bool:
    return all(word in text.casefold() for word in words.casefold().split())


def chosen(claims: list[dict], verdicts: list[str], experiments: list[str], words: str) -> list[dict]:
    """Claims with these verdicts and experiments (empty: all) whose text contains all these words."""
    return [
        c
        for c in claims
        if (not verdicts or c["verdict"] in verdicts)
        and (not experiments or c["experiment"] in experiments)
        and has(f"{c['claim']} {c['source']} {c['note']}", words)
    ]


def counts(claims: list[dict]) -> list[dict]:
    """How many claims of each experiment have which verdict, experiments and verdicts in order; those that there are none of are left out."""
    some = [
        {"experiment": name, "verdict": verdict, "claims": sum(c["experiment"] == name and c["verdict"] == verdict for c in claims)}
        for name in dict.fromkeys(c["experiment"] for c in claims)
        for verdict in MARKS
    ]
    return [row for row in some if row["claims"]]


def verdicts_drawn(rows: list[dict]) -> Drawing:
    """A bar for each experiment, verdict after verdict. `rows`: those of `counts`."""
    names = list(dict.fromkeys(row["experiment"] for row in rows))
    bars = []
    for place, name in enumerate(names):
        mine = [row for row in rows if row["experiment"] == name]
        ends = accumulate(row["claims"] for row in mine)
        bars += [row | {"left": end - row["claims"], "right": end, "low": -place - 0.4, "high": 0.4 - place} for row, end in zip(mine, ends)]
    return drawing(
        Axis("claims", least=0, whole=True),
        Axis("", least=0.5 - len(names), most=0.5, ticks={-place: name for place, name in enumerate(names)}),
        boxes(bars, "left", "right", "low", "high", "verdict", tell=("experiment", "claims")),
        looks=LOOKS,
        height=60 + 22 * len(names),
    )


def only(row: Mapping) -> None:
    """The experiment of a bar, and no other."""
    st.session_state["experiment"] = [row["experiment"]]


def draw() -> None:
    st.html(NARROW)
    everything = figures.load(RESULTS / "claims.json")
    claims, laws = figures.of_sources(everything), figures.laws(everything)
    rows(claims)
    known = {entry.name: entry for entry in catalog.EXPERIMENTS}
    st.markdown(figures.covered(everything))
    st.caption("Shown: the committed records in results/. An experiment that you ran yourself is opened on the page of the recipe.")
    left, right = st.columns([2, 1])
    with left:
        experiments = st.multiselect(
            "Experiments", list(dict.fromkeys(c["experiment"] for c in everything)), key="experiment", bind="query-params", placeholder="all"
        )
    with right:
        words = st.text_input("Words", key="words", bind="query-params", placeholder="k1 gradient")
    verdicts = st.pills("Verdicts", list(MARKS), selection_mode="multi", key="verdict", bind="query-params")
    found = chosen(claims, verdicts, experiments, words)
    exact = [] if verdicts else chosen(laws, [], experiments, words)
    untried = open_rows(everything, words) if not experiments and (not verdicts or "not tested" in verdicts) else []
    count = ", ".join(f"{sum(c['verdict'] == verdict for c in found)} {verdict}" for verdict in MARKS)
    st.markdown(f"{len(found)} of {len(claims)} claims: {count}.")
    if found:
        drawn = counts(chosen(claims, verdicts, [], words))
        said = "Claims of each experiment by their verdict. A click keeps those of one experiment; the box above brings all back."
        picked(verdicts_drawn(drawn), "claims-verdicts", drawn, said, then=only)
        table(rows(found), "claims")
    else:
        st.info("No claim matches; remove a filter.")
    if exact:
        st.subheader("Laws", anchor="laws")
        st.markdown("Closed forms and identities, with the largest deviation from each. They do not count as claims.")
        table(law_rows(exact), "laws")
    if untried:
        st.subheader("Not tested", anchor="not-tested")
        st.markdown(f"{len(untried)} statements of the sources that are not tested here yet.")
        table(untried, "not-tested")
    for name in dict.fromkeys(c["experiment"] for c in [*found, *exact]):
        entry = known.get(name)
        title = f"{name}: {entry.title} ({entry.source})" if entry else name
        st.subheader(title, anchor=name)
        _picture(RESULTS / "figures", name, title)


def _picture(folder: Path, name: str, alt: str) -> None:
    """The experiment's picture and table, with downloads. A missing file is reported; the others are still shown."""
    try:
        drawn, data = (folder / f"{name}.png").read_bytes(), (folder / f"{name}.csv").read_bytes()
        with st.container(key=f"wide-{name}"):
            st.image(drawn, width=4000, alt=alt)  # wider than any picture and the page: shown at page width, without another copy in a new size
    except (OSError, SyntaxError, ValueError) as error:  # a damaged PNG is a SyntaxError to PIL
        st.error(f"the picture of {name} cannot be shown ({error}); draw it again with: etude figure {name}")
        return
    with st.container(horizontal=True):
        download("Picture (PNG)", lambda: drawn, f"{name}.png", "image/png")
        download("Data (CSV)", lambda: data, f"{name}.csv", "text/csv")


PAGE = Page(
    name="claims",
    title="Claims",
    says="What the sources claim, what was measured here, and a verdict that follows only from a rule and the measurement. Claims that did "
    "not reproduce are listed, too, and so are statements that are not tested yet.",
    formula="",
    question="Which experiment contradicts the sources most often: on an agent's habits, on draft layers, or on engines and weights?",
    look="The one on draft layers, mtp. Nothing is contradicted in async-rl and weight-sync: 8 of their 14 claims "
    "reproduce. The table gives rule and reason, and every row names the command that runs it again.",
    draw=draw,
    code=(figures.gather,),
)
