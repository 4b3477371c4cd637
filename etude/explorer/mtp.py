"""From acceptance to speed: what drafts gain, and one speculative decode, pass by pass."""

from functools import lru_cache
from pathlib import Path

import numpy as np
import streamlit as st

from etude.explorer import examples, files, provenance, spans
from etude.explorer.charts import Axis, Look, bars, chart, drawing, lines, points, ranges, rule
from etude.explorer.decoded_passes import decode
from etude.explorer.page import Page, folded
from kit.disk import describe_mismatch
from kit.settings import RunError
from ref import mtp
from ref.engine import decoder
from sims import drafting

MEASURED = Path(__file__).resolve().parents[2] / "results" / "figures" / "mtp.json"
MOST = 8
"""Maximum number of drafts per pass on the sliders."""


ROW = {"tasks": int, **dict.fromkeys(("alpha", "draft_cost", "verify_cost", "opening_cost", "speedup", "speedup_low", "speedup_high"), files.NUMBER)}
"""Required keys of a measurement."""


def measured() -> dict[int, dict]:
    """The rows of `etude figure mtp`, the user's or the committed ones, by number of drafts: acceptance, costs in passes over one row, speed-up.
    Raises RunError if there are none."""
    path = provenance.newest(MEASURED)
    try:
        return _measured(*files.stamp(path))
    except (OSError, ValueError, RecursionError) as error:
        where = f"results/figures/{path.name}" if path == MEASURED else path
        raise RunError(f"{where} cannot be read ({error}); measure it again with: etude figure mtp") from None


@lru_cache(4)
def _measured(path: Path, changed: int, size: int) -> dict[int, dict]:
    rows = files.parsed(path, {"rows": [{"part": str}]})["rows"]
    found = {int(way): row for row in rows if row["part"] == "decode" and (way := str(row.get("way"))).isdecimal()}
    if not found:
        raise ValueError("it has no measured decode")
    if wrong := describe_mismatch(list(found.values()), [ROW]):
        raise ValueError(wrong)
    return found


def speeds(alpha: float, cost: float, verify: float, opening: float, folder: Path | None = None) -> list[dict]:
    """One row per number of drafts: tokens per pass and speed-up as predicted by `sims/drafting.py`, and the measured speed-up."""
    known, lengths, rows = measured(), np.array(examples.load("drafting", folder)["turns"]), []
    for drafts in range(1, MOST + 1):
        row = {
            "drafts": drafts,
            "tokens a pass": drafting.predicted(alpha, drafts, 0.0),
            "predicted": drafting.predicted(alpha, drafts, cost),
            "predicted, with turns": drafting.with_turns(alpha, drafts, cost, verify, opening, lengths),
        }
        if drafts in known:
            row |= {"measured": known[drafts]["speedup"], "low": known[drafts]["speedup_low"], "high": known[drafts]["speedup_high"]}
        rows.append(row)
    return rows


def depths(alpha: float, drafts: int, folder: Path | None = None) -> list[dict]:
    """One row per depth: how often a draft and all drafts before it were accepted, counted, and the same for one α at all depths, which is
    the number of tokens that a pass gains from that draft."""
    counted, rows = examples.load("drafting", folder)["drafts"], []
    deepest = counted[str(min(drafts, max(map(int, counted))))]
    for k in range(1, drafts + 1):
        row = {"depth": k, "from α": drafting.predicted(alpha, k, 0.0) - drafting.predicted(alpha, k - 1, 0.0)}
        if k <= len(deepest["drafted"]) and deepest["drafted"][k - 1]:
            offered, stood = deepest["drafted"][k - 1], deepest["accepted"][k - 1]
            row |= {"drafted": offered, "accepted": stood, "share": stood / offered}
        rows.append(row)
    return rows


def by_depth(rows: list[dict], alpha: float) -> None:
    """Acceptance by depth."""
    known, said = [row | {"what": "counted"} for row in rows if "share" in row], f"α = {alpha:g} at every depth"
    line = [row | {"what": said} for row in rows]
    chart(
        drawing(
            Axis("depth of the draft", names=True),
            Axis("share accepted with all before it", most=1.05),
            bars(known, "depth", "share", "what", stacked=True, tell=("drafted", "accepted")),
            lines(line, "depth", "from α", "what"),
            points(line, "depth", "from α", "what"),
            looks={"counted": Look("sky"), said: Look("orange", "--", "s")},
        ),
        "mtp-acceptance",
        rows,
        "How often a draft of each depth was accepted, counted on the agent's rollouts, and what a single α for all depths would give.",
    )


def by_drafts(rows: list[dict], drafts: int) -> None:
    """Speed-up by number of drafts."""
    ways = {"predicted": "predicted", "with turns": "predicted, with turns"}
    theory = [{"how": how, "drafts": row["drafts"], "speed-up": row[key]} for how, key in ways.items() for row in rows]
    known = [{"how": "measured", "speed-up": row["measured"]} | row for row in rows if "measured" in row]
    chart(
        drawing(
            Axis("drafts per pass", least=0.7, most=MOST + 0.3),
            "speed-up over plain decoding",
            rule(x=drafts),
            rule(y=1, look=Look("grey", ":")),
            lines(theory, "drafts", "speed-up", "how"),
            points(theory, "drafts", "speed-up", "how"),
            ranges(known, "drafts", "low", "high", "how"),
            points(known, "drafts", "speed-up", "how", tell=("low", "high")),
            looks={"predicted": Look("orange", "--", "o"), "with turns": Look("blue", "-", "s"), "measured": Look("red", mark="D")},
        ),
        "mtp-speed",
        rows,
        "Speed-up by number of drafts. Dashed: the formula; solid: with short turns and the cost of verifying, both "
        "with the values of the controls; diamonds: measured, with 95% intervals over tasks.",
    )


def draw() -> None:
    folder = provenance.chosen("drafting.json")
    known, found = measured(), examples.load("drafting", folder)
    deepest = known[max(known)]

    def near(key: str, low: float, high: float) -> tuple[float, float, float]:
        """The measured value, clipped to the slider's range: another machine may have measured a value outside it."""
        return low, high, min(max(round(float(deepest[key]), 2), low), high)

    one, two, three, four, five = st.columns(5)
    drafts = one.slider("Drafts per pass (γ)", 1, MOST, min(max(known), MOST), key="drafts", bind="query-params")
    alpha = two.slider("α, probability that a draft is accepted", *near("alpha", 0.0, 1.0), 0.01, key="alpha", bind="query-params")
    cost = three.slider(
        "Cost of a draft (c)",
        *near("draft_cost", 0.0, 1.0),
        0.01,
        key="cost",
        bind="query-params",
        help="In passes of the trunk over one row, like the next two.",
    )
    verify = four.slider(
        "Cost of verifying",
        *near("verify_cost", 1.0, 3.0),
        0.01,
        key="verify",
        bind="query-params",
        help="Cost of one pass over the drafts. The theory assumes 1.",
    )
    opening = five.slider(
        "Cost of an opening",
        *near("opening_cost", 1.0, 4.0),
        0.01,
        key="opening",
        bind="query-params",
        help="The first pass of a turn reads a prompt or tool output and never has drafts to check.",
    )
    rows = speeds(alpha, cost, verify, opening, folder)
    here = rows[drafts - 1]
    spans.metrics(
        ("Tokens per pass, at best", f"{here['tokens a pass']:.2f}", "If the text were one long turn."),
        ("Predicted", f"{here['predicted']:.2f}×", "By the formula."),
        ("Predicted, with turns", f"{here['predicted, with turns']:.2f}×", "With the agent's short turns and the cost of verifying and of openings."),
        (
            "Measured",
            f"{here['measured']:.2f}×" if "measured" in here else "–",
            f"By `etude figure mtp`: {deepest['tasks']} tasks at batch 1, with the measured α and costs.",
        ),
    )
    left, right = st.columns(2)
    with left:
        by_depth(depths(alpha, drafts, folder), alpha)
    with right:
        by_drafts(rows, drafts)
    st.caption(f"Measured values, and the starting values of the sliders: {provenance.recorded(provenance.newest(MEASURED))}.")
    folded(rows, "mtp-speed-up", "Speed-up by number of drafts, as a table")
    st.subheader("One decode, pass by pass")
    st.markdown(
        f"The agent after RL, greedy, on `{found['task']}`. In {found['identical']} of {found['tasks']} tasks, all tokens are the same as in plain "
        "decoding: drafts change the speed and nothing else."
    )
    decode(found, examples.again(folder))


PAGE = Page(
    name="mtp",
    title="Multi-token prediction",
    says="Small layers on top of the trunk draft the tokens after the next one. The trunk checks all drafts in one pass and keeps those that it "
    "would have written itself.",
    formula=r"\text{speed-up} = \frac{1-\alpha^{\gamma+1}}{(1-\alpha)(\gamma c + 1)}",
    question="The formula promises a speed-up. Does an agent that works in short turns get more, as much, or less?",
    look="Less. Where drafts pay, the formula promises more than an agent gets: its turns are short, every turn opens with a pass without "
    "drafts, and a pass over several rows is not free here.",
    draw=draw,
    code=(drafting.predicted, drafting.with_turns, decoder.accept, mtp.MTPLayer),
    technique="mtp",
)
