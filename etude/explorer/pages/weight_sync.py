"""Weight sync: the share of weights that an update changes and the size of a delta, by the formula and measured.
`weight_chain.py` has the late reader."""

from functools import lru_cache

import numpy as np
import streamlit as st

from etude.explorer.charts.chart import Axis, Look, chart, drawing, lines, points, rule
from etude.explorer.drawing import Drawing
from etude.explorer.page import Page
from etude.explorer.pages.weight_chain import EVEN, NORMAL, WEIGHTS, late_reader, sample_weights
from etude.explorer.spans import metrics
from ref import weight_codec, weight_sync
from sims.weight_sync.experiment import sizes

LRS = (1e-7, 3e-7, 1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3)
STDS = (0.005, 0.01, 0.02, 0.05, 0.1)
LAW = "E[min(1, |Δ|/ulp(w))]"
CODINGS = {
    "gap + step": Look("blue", "-", "o"),
    "XOR": Look("red", "--", "s"),
    "index + value": Look("purple", "-.", "^"),
    "law": Look("grey", ":", "x"),
}


def entropy_bits(ratio: np.ndarray) -> float:
    """Bits of a changed weight in the best code that takes positions and steps as independent. ratio: |Δ|/ulp of each
    weight.

    An update of r neighbouring numbers moves a weight by ⌊r⌋ or by one more, this with probability r − ⌊r⌋; both signs
    are equally likely."""
    whole_steps = np.minimum(np.floor(ratio), 1000).astype(int)
    fraction = np.minimum(ratio - whole_steps, 1.0)
    longest = int(whole_steps.max()) + 2
    # weights that move by 0, 1, 2, … numbers
    counts = np.bincount(whole_steps, 1 - fraction, longest) + np.bincount(whole_steps + 1, fraction, longest)
    share = counts[1:].sum() / len(ratio)
    if not 0 < share < 1:
        return 0.0
    positions = -share * np.log2(share) - (1 - share) * np.log2(1 - share)
    p = counts[1:][counts[1:] > 0] / counts[1:].sum()
    return float(positions / share - (p * np.log2(p)).sum() + 1)


@lru_cache(32)
def coded(std: float, updates: str) -> list[dict]:
    """One row for each learning rate: the law's share and bits, and the same measured on one update of made-up
    weights."""
    masters, unit = sample_weights(std, updates)
    old, ulp, rows = masters.bfloat16(), weight_sync.ulp(masters).numpy(), []
    for lr in LRS:
        update = lr * unit
        new = (masters + update).bfloat16()
        delta_sizes, delta = sizes(old, new), weight_codec.pack(*weight_codec.encode_delta(old, new), WEIGHTS)
        changed_count = max(delta_sizes["changed"], 1)
        rows.append(
            {
                "learning rate": lr,
                "law, changed share": weight_sync.changed_share(masters, update),
                "changed share": delta_sizes["changed"] / WEIGHTS,
                "law": entropy_bits(update.double().abs().numpy() / ulp),
                "gap + step": 8 * len(delta) / changed_count,
                "XOR": 8 * delta_sizes["xor"] / changed_count,
                "index + value": 8 * delta_sizes["index"] / changed_count,
                "of XOR": len(delta) / delta_sizes["xor"],
                "times smaller than all weights": 2 * WEIGHTS / len(delta),
            }
        )
    return rows


def build_share_chart(rows: list[dict], lr: float) -> Drawing:
    """Share of weights that change, by the law and measured."""
    law_rows = [
        {"what": LAW, "learning rate": row["learning rate"], "share": row["law, changed share"]} for row in rows
    ]
    measured_rows = [
        {"what": "measured", "learning rate": row["learning rate"], "share": row["changed share"]} for row in rows
    ]
    return drawing(
        Axis("learning rate", log=True),
        Axis("changed share of the weights", log=True),
        rule(x=lr),
        lines(law_rows, "learning rate", "share", "what"),
        points(measured_rows, "learning rate", "share", "what"),
        looks={LAW: Look("grey"), "measured": Look("blue", mark="o")},
    )


def build_bits_chart(rows: list[dict], lr: float) -> Drawing:
    """Bits of a changed weight, coding by coding."""
    series_rows = [
        {"coding": name, "learning rate": row["learning rate"], "bits": float(row[name])}
        for name in CODINGS
        for row in rows
    ]
    layers = (
        lines(series_rows, "learning rate", "bits", "coding"),
        points(series_rows, "learning rate", "bits", "coding"),
    )
    return drawing(
        Axis("learning rate", log=True), Axis("bits for a changed weight", upper=60), rule(x=lr), *layers, looks=CODINGS
    )


def draw() -> None:
    lr_column, std_column, updates_column = st.columns(3)
    lr = lr_column.select_slider("Learning rate", LRS, 1e-5, key="lr", bind="query-params")
    std = std_column.select_slider("Standard deviation of the weights", STDS, 0.02, key="std", bind="query-params")
    updates = updates_column.selectbox(
        "Updates",
        (NORMAL, EVEN),
        key="updates",
        bind="query-params",
        help="Of each weight; Adam's are near one size while gradients agree.",
    )
    rows = coded(std, updates)
    row = rows[LRS.index(lr)]
    metrics(
        ("Changed, by the formula", f"{100 * row['law, changed share']:.3g}%", "E[min(1, |Δ|/ulp(w))]"),
        (
            "Changed, measured",
            f"{100 * row['changed share']:.3g}%",
            f"Of {WEIGHTS:,} synthetic weights, in one update.",
        ),
        ("Bits for each", f"{row['gap + step']:.1f}", "Gap and step, under zstd level 1."),
        ("All weights over the delta", f"{row['times smaller than all weights']:.0f}×", "Ratio of their bytes."),
        ("Of XOR under zstd", f"{row['of XOR']:.2f}", "Bytes by gap and step over bytes by XOR."),
    )
    left, right = st.columns(2)
    with left:
        chart(
            build_share_chart(rows, lr),
            "weight-sync-share",
            rows,
            "Share of bfloat16 weights whose bits change in one update: the formula, and synthetic weights.",
        )
    with right:
        chart(
            build_bits_chart(rows, lr),
            "weight-sync-bits",
            rows,
            "Bits for each changed weight, for codings under zstd level 1. Law: entropy of independent positions and "
            "steps, by the formula.",
        )
    late_reader(lr, std, updates)


PAGE = Page(
    name="weight-sync",
    title="Weight sync",
    says="The trainer publishes the difference of its bfloat16 weights after each step, and inference engines rebuild "
    "the same bits. The page measures on synthetic weights how many change, how many bytes a changed weight takes, "
    "and what a reader fetches after missing versions.",
    formula=r"\text{changed share} = \mathbb{E}\left[\min\left(1, \frac{|\Delta|}{\mathrm{ulp}(w)}\right)\right]",
    symbols={
        r"\mathbb{E}": "mean over the weights",
        r"\Delta": "update of a weight in float32",
        "w": "the weight",
        r"\mathrm{ulp}(w)": "distance of neighbouring bfloat16 numbers at w",
    },
    question="A step of 1e-6: does it change nearly all bfloat16 weights, half of them, or a few percent? From "
    "which step size on should a late "
    "reader fetch all weights?",
    look="At 1e-6 a few percent of these weights change, and each takes little more than the entropy of its position "
    "and step. A late reader fetches merged deltas; from about 1e-4 on an anchor is smaller than a few deltas.",
    draw=draw,
    code=(weight_sync.changed_share, weight_codec.encode_delta, weight_codec.pack, weight_sync.cheapest),
    technique="weight-sync",
)
