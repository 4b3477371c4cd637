"""Multi-token prediction: acceptance and speed-up of drafts, and one speculative decode, pass by pass."""

from functools import lru_cache
from pathlib import Path

import numpy as np
import streamlit as st

from etude.explorer import examples, files, provenance, spans
from etude.explorer.charts.chart import Axis, Look, bars, chart, drawing, lines, points, ranges, rule
from etude.explorer.page import Page
from etude.explorer.pages.decoded_passes import decode
from kit.disk import describe_mismatch
from kit.settings import RunError
from ref import mtp
from ref.engine import decoder
from sims.mtp import drafting

RECORD_PATH = Path(__file__).resolve().parents[3] / "results" / "figures" / "mtp.json"
MAX_DRAFTS = 8
"""Maximum number of drafts per pass on the sliders."""


MEASUREMENT_KEYS = {
    "tasks": int,
    **dict.fromkeys(
        ("alpha", "draft_cost", "verify_cost", "opening_cost", "speedup", "speedup_low", "speedup_high"), files.NUMBER
    ),
}
"""Required keys of a measurement."""


def load_measurements() -> dict[int, dict]:
    """The rows of `etude figure mtp`, the user's or the committed ones, by number of drafts: acceptance, costs in
    passes over one row, speed-up. Raises RunError if there are none."""
    path = provenance.newest(RECORD_PATH)
    try:
        return _load_measurements(*files.stamp(path))
    except (OSError, ValueError, RecursionError) as error:
        location = f"results/figures/{path.name}" if path == RECORD_PATH else path
        raise RunError(f"{location} cannot be read ({error}); measure it again with: etude figure mtp") from None


@lru_cache(4)
def _load_measurements(path: Path, mtime_ns: int, size: int) -> dict[int, dict]:
    rows = files.parsed(path, {"rows": [{"part": str}]})["rows"]
    measurements = {
        int(way): row for row in rows if row["part"] == "decode" and (way := str(row.get("way"))).isdecimal()
    }
    if not measurements:
        raise ValueError("it has no measured decode")
    if mismatch := describe_mismatch(list(measurements.values()), [MEASUREMENT_KEYS]):
        raise ValueError(mismatch)
    return measurements


def speeds(alpha: float, cost: float, verify: float, opening: float, folder: Path | None = None) -> list[dict]:
    """One row per number of drafts: tokens per pass and speed-up as predicted by `sims/mtp/drafting.py`, and the
    measured speed-up."""
    measurements, lengths, rows = load_measurements(), np.array(examples.load("drafting", folder)["turns"]), []
    for drafts in range(1, MAX_DRAFTS + 1):
        row = {
            "drafts": drafts,
            "tokens a pass": drafting.predicted(alpha, drafts, 0.0),
            "predicted": drafting.predicted(alpha, drafts, cost),
            "predicted, with turns": drafting.with_turns(alpha, drafts, cost, verify, opening, lengths),
        }
        if drafts in measurements:
            row |= {
                "measured": measurements[drafts]["speedup"],
                "low": measurements[drafts]["speedup_low"],
                "high": measurements[drafts]["speedup_high"],
            }
        rows.append(row)
    return rows


def depths(alpha: float, drafts: int, folder: Path | None = None) -> list[dict]:
    """One row per depth: how often a draft and all drafts before it were accepted, counted, and the same for one α at
    all depths, which is the number of tokens that a pass gains from that draft."""
    counts, rows = examples.load("drafting", folder)["drafts"], []
    deepest = counts[str(min(drafts, max(map(int, counts))))]
    for k in range(1, drafts + 1):
        row = {"depth": k, "from α": drafting.predicted(alpha, k, 0.0) - drafting.predicted(alpha, k - 1, 0.0)}
        if k <= len(deepest["drafted"]) and deepest["drafted"][k - 1]:
            drafted_count, accepted_count = deepest["drafted"][k - 1], deepest["accepted"][k - 1]
            row |= {"drafted": drafted_count, "accepted": accepted_count, "share": accepted_count / drafted_count}
        rows.append(row)
    return rows


def draw_acceptance_by_depth(rows: list[dict], alpha: float) -> None:
    """Acceptance by depth."""
    count_rows, alpha_label = (
        [row | {"what": "counted"} for row in rows if "share" in row],
        f"α = {alpha:g} at every depth",
    )
    alpha_rows = [row | {"what": alpha_label} for row in rows]
    chart(
        drawing(
            Axis("depth of the draft", names=True),
            Axis("share accepted with all before it", upper=1.05),
            bars(count_rows, "depth", "share", "what", stacked=True, tell=("drafted", "accepted")),
            lines(alpha_rows, "depth", "from α", "what"),
            points(alpha_rows, "depth", "from α", "what"),
            looks={"counted": Look("sky"), alpha_label: Look("orange", "--", "s")},
        ),
        "mtp-acceptance",
        rows,
        "Share of drafts accepted at each depth, counted on the agent's rollouts, and the prediction with one α for "
        "all depths.",
    )


def draw_speed_by_drafts(rows: list[dict], drafts: int) -> None:
    """Speed-up by number of drafts."""
    ways = {"predicted": "predicted", "with turns": "predicted, with turns"}
    theory = [
        {"how": series, "drafts": row["drafts"], "speed-up": row[key]} for series, key in ways.items() for row in rows
    ]
    measured_rows = [{"how": "measured", "speed-up": row["measured"]} | row for row in rows if "measured" in row]
    chart(
        drawing(
            Axis("drafts per pass", lower=0.7, upper=MAX_DRAFTS + 0.3),
            "speed-up over plain decoding",
            rule(x=drafts),
            rule(y=1, look=Look("grey", ":")),
            lines(theory, "drafts", "speed-up", "how"),
            points(theory, "drafts", "speed-up", "how"),
            ranges(measured_rows, "drafts", "low", "high", "how"),
            points(measured_rows, "drafts", "speed-up", "how", tell=("low", "high")),
            looks={
                "predicted": Look("orange", "--", "o"),
                "with turns": Look("blue", "-", "s"),
                "measured": Look("red", mark="D"),
            },
        ),
        "mtp-speed",
        rows,
        "Speed-up by number of drafts. Dashed: the formula; solid: with short turns and the cost of verifying, both "
        "with the values of the controls; diamonds: measured, with 95% intervals over tasks.",
    )


def draw() -> None:
    folder = provenance.choose_examples("drafting.json")
    measurements, example = load_measurements(), examples.load("drafting", folder)
    deepest = measurements[max(measurements)]

    def clip_measurement(key: str, low: float, high: float) -> tuple[float, float, float]:
        """The measured value, clipped to the slider's range: another machine may have measured a value outside it."""
        return low, high, min(max(round(float(deepest[key]), 2), low), high)

    drafts_column, alpha_column, cost_column, verify_column, opening_column = st.columns(5)
    drafts = drafts_column.slider(
        "Drafts per pass (γ)", 1, MAX_DRAFTS, min(max(measurements), MAX_DRAFTS), key="drafts", bind="query-params"
    )
    alpha = alpha_column.slider(
        "α, probability that a draft is accepted",
        *clip_measurement("alpha", 0.0, 1.0),
        0.01,
        key="alpha",
        bind="query-params",
    )
    cost = cost_column.slider(
        "Cost of a draft (c)",
        *clip_measurement("draft_cost", 0.0, 1.0),
        0.01,
        key="cost",
        bind="query-params",
        help="In passes of the trunk over one row, like the next two.",
    )
    verify = verify_column.slider(
        "Cost of verifying",
        *clip_measurement("verify_cost", 1.0, 3.0),
        0.01,
        key="verify",
        bind="query-params",
        help="Cost of one pass over the drafts. The theory assumes 1.",
    )
    opening = opening_column.slider(
        "Cost of an opening",
        *clip_measurement("opening_cost", 1.0, 4.0),
        0.01,
        key="opening",
        bind="query-params",
        help="The first pass of a turn reads a prompt or tool output and never has drafts to check.",
    )
    rows = speeds(alpha, cost, verify, opening, folder)
    row = rows[drafts - 1]
    spans.metrics(
        ("Tokens per pass, at best", f"{row['tokens a pass']:.2f}", "For a text of one long turn."),
        ("Predicted", f"{row['predicted']:.2f}×", "By the formula."),
        (
            "Predicted, with turns",
            f"{row['predicted, with turns']:.2f}×",
            "With the agent's short turns and the cost of verifying and of openings.",
        ),
        (
            "Measured",
            f"{row['measured']:.2f}×" if "measured" in row else "–",
            f"By `etude figure mtp`: {deepest['tasks']} tasks at batch 1, with the measured α and costs.",
        ),
    )
    left, right = st.columns(2)
    with left:
        draw_acceptance_by_depth(depths(alpha, drafts, folder), alpha)
    with right:
        draw_speed_by_drafts(rows, drafts)
    st.caption(
        f"Measured values, and the starting values of the sliders: "
        f"{provenance.recorded(provenance.newest(RECORD_PATH))}."
    )
    st.subheader("One decode, pass by pass")
    st.markdown(
        f"The agent after RL, greedy, on `{example['task']}`. In {example['identical']} of {example['tasks']} tasks, "
        "all tokens are the same as in plain decoding: drafts change only the speed."
    )
    decode(example, examples.format_write_command(folder))


PAGE = Page(
    name="mtp",
    title="Multi-token prediction",
    says="Small layers on top of the trunk draft the tokens after the next one. The trunk checks all drafts in one "
    "pass and keeps those that agree with its own output.",
    formula=r"\text{speed-up} = \frac{1-\alpha^{\gamma+1}}{(1-\alpha)(\gamma c + 1)}",
    symbols={
        r"\alpha": "probability that a draft is accepted",
        r"\gamma": "drafts per pass of the trunk",
        "c": "cost of a draft, in passes of the trunk over one row",
    },
    question="The formula predicts a speed-up. Does an agent that works in short turns get more, as much, or less?",
    look="Less. An agent's turns are short, every turn starts with a pass without drafts, and a pass over several "
    "rows costs more than a pass over one.",
    draw=draw,
    code=(drafting.predicted, drafting.with_turns, decoder.accept, mtp.MTPLayer),
    technique="mtp",
)
