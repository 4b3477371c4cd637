"""Group advantages: edit a group's rewards and lengths, and compare the advantages and weights of five algorithms."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import streamlit as st

from etude.explorer.charts.chart import Axis, Look, chart, drawing, picked, points, rule
from etude.explorer.drawing import Drawing
from etude.explorer.page import Page, table
from etude.explorer.pages.groups import LONGEST, PRESETS, Row, checked, columns, decode, encode, family, rows
from kit.settings import RunError
from ref.dr_grpo import family_loss, group_advantages

NAMES = {"dr_grpo": "Dr. GRPO", "grpo": "GRPO", "rloo": "RLOO", "dapo": "DAPO", "gspo": "GSPO"}
LOOKS = {
    "Dr. GRPO": Look("blue", mark="o"),
    "RLOO": Look("green", mark="^"),
    "GRPO": Look("orange", mark="s"),
    "DAPO": Look("purple", mark="D"),
    "GSPO": Look("red", mark="v"),
}
"""Algorithms in the order of their marks: those that often coincide are neighbours."""
HOVER_COLUMNS = ("reward", "length")
"""Further columns that hovering shows."""
DIFFERENCES = """
- **GRPO, DAPO and GSPO** always have equal advantages, (reward − group mean) / standard deviation. They differ in the
  clip range, in the unit of the ratio ρ (a token; in GSPO the whole response) and in the divisor of a token's weight.
- **Dr. GRPO and RLOO** do not divide by the standard deviation. RLOO's baseline is the mean of the *other* rollouts,
  which makes its advantages N/(N − 1) times those of Dr. GRPO in a group of N.
- **Weights** are drawn at ratio one, where the policy is still the one that sampled. Neither the clip nor the unit of
  the ratio has an effect there, so GRPO and GSPO have equal weights. DAPO gives truncated rollouts weight zero.
"""


def edit_group() -> list[Row]:
    """The editable table. If it differs from the preset, the URL stores it. A new link or another preset starts a new
    table. Returning from another page does, too: Streamlit has dropped the edits by then, and only the URL has them."""
    preset = st.selectbox("Preset", list(PRESETS), key="preset", bind="query-params")
    state, group = st.session_state.setdefault("group-state", {"seen": None, "turn": 0}), st.query_params.get("group")
    if (preset, group) != state["seen"] or f"group-{state['turn']}" not in st.session_state:
        # Another preset was chosen, but the URL still has the edits of the old one. A link or the browser's Back brings
        # its own edits.
        if state["seen"] and preset != state["seen"][0] and group == state["seen"][1]:
            group = None
        state["turn"] += 1
        state["begin"] = columns(PRESETS[preset])
        if group is not None:
            try:
                state["begin"] = columns(decode(group))
            except RunError as error:
                st.error(str(error))
    group_rows = rows(
        st.data_editor(
            state["begin"],
            key=f"group-{state['turn']}",
            num_rows="dynamic",
            width="stretch",
            hide_index=True,
            column_config={
                "reward": st.column_config.NumberColumn("reward", format="%.4g", help="reward of the rollout"),
                "length": st.column_config.NumberColumn("length", format="%d", help="tokens sampled from the policy"),
                "cut off": st.column_config.CheckboxColumn(
                    "cut off", default=False, help="truncated at the length limit; DAPO gives it weight zero"
                ),
            },
        )
    )
    code = encode(group_rows)
    code = None if code == encode(PRESETS[preset]) else code
    if code is None:
        st.query_params.pop("group", None)
    elif code != st.query_params.get("group"):
        st.query_params["group"] = code
    state["seen"] = preset, code
    return group_rows


def draw_marks(rows: list[dict], unit: str) -> Drawing:
    """One mark per rollout and algorithm; those of a rollout stand side by side."""
    marks = points(rows, "rollout", unit, "algorithm", tell=HOVER_COLUMNS, dodge=True)
    return drawing(Axis("rollout", names=True), unit, marks, rule(y=0), looks=LOOKS)


def melt_rows(rows: list[dict], unit: str) -> list[dict]:
    """One row per rollout and algorithm of a table with a column per algorithm."""
    return [
        {"algorithm": name, "rollout": row["rollout"], unit: row[name]} | {key: row[key] for key in HOVER_COLUMNS}
        for name in LOOKS
        for row in rows
    ]


def describe_equal(columns: Mapping[str, Sequence[float]]) -> str:
    """The algorithms whose numbers are equal, in words: "Equal here: GRPO = DAPO = GSPO."."""
    groups: list[list[str]] = []
    for name, values in columns.items():
        for group in groups:
            if np.allclose(columns[group[0]], values, rtol=1e-9, atol=1e-15):
                group.append(name)
                break
        else:
            groups.append([name])
    equal = "; ".join(" = ".join(group) for group in groups if len(group) > 1)
    return f"Equal here: {equal}." if equal else "No two algorithms are equal here."


def describe_divisors(lengths: Sequence[int], longest: int) -> dict[str, str]:
    """Algorithm → the number that divides the advantage to give a token's weight, in words."""
    rollouts = f"{len(lengths)} rollouts"
    return {
        "dr_grpo": f"{rollouts} × {longest} tokens",
        "rloo": f"{rollouts} × {longest} tokens",
        "grpo": f"{rollouts} × tokens of its response",
        "dapo": f"{sum(lengths)} tokens of the group",
        "gspo": f"{rollouts} × tokens of its response",
    }


def describe_rollout(row: dict, results: dict[str, tuple[list[float], list[float]]]) -> list[dict]:
    """A rollout, algorithm by algorithm: its advantage, the weight of a token, and the sum over its tokens."""
    index = row["rollout"] - 1
    return [
        {
            "algorithm": NAMES[name],
            "advantage": a[index],
            "weight per token": w[index],
            "sum over its tokens": w[index] * row["length"],
        }
        for name, (a, w) in results.items()
    ]


def draw() -> None:
    left, right = st.columns([2, 3])
    with left:
        group_rows = edit_group()
        longest = st.slider(
            "Longest allowed response, tokens",
            64,
            LONGEST,
            512,
            64,
            key="longest",
            bind="query-params",
            help="Dr. GRPO and RLOO divide by rollouts × this length, whatever the actual lengths. The others do not.",
        )
        relative = st.toggle(
            "Weights relative to the largest",
            True,
            key="relative",
            bind="query-params",
            help="Divides the weights of each algorithm by its largest one. Adam removes most of a constant factor of "
            "the gradient; the ratios between an algorithm's weights remain.",
        )
    rewards, lengths, cut = checked(group_rows)
    if max(lengths) > longest:
        raise RunError(f"a rollout of {max(lengths)} tokens is longer than the longest allowed, {longest}")
    results = family(rewards, lengths, cut, longest)
    scale = {name: (max(map(abs, weights)) or 1.0) if relative else 1.0 for name, (_, weights) in results.items()}
    rollouts = [
        {"rollout": i, "reward": r, "length": n, "cut off": c}
        for i, (r, n, c) in enumerate(zip(rewards, lengths, cut), 1)
    ]
    advantages = [row | {NAMES[name]: a[i] for name, (a, _) in results.items()} for i, row in enumerate(rollouts)]
    weights = [
        row | {NAMES[name]: w[i] / scale[name] for name, (_, w) in results.items()} for i, row in enumerate(rollouts)
    ]
    with right:
        equal_advantages, equal_weights = (
            describe_equal({name: [row[name] for row in numbers] for name in LOOKS})
            for numbers in (advantages, weights)
        )
        first = picked(
            draw_marks(melt_rows(advantages, "advantage"), "advantage"),
            "advantages",
            advantages,
            f"Advantage of each rollout, five algorithms side by side. {equal_advantages} A click on a mark shows its "
            "rollout.",
        )
        unit = "weight per token" + (", relative" if relative else "")
        chart(
            draw_marks(melt_rows(weights, unit), unit),
            "weights-relative" if relative else "weights",
            weights,
            "Weight of each token of the rollout: minus the gradient of the loss with respect to its log-prob. "
            f"{equal_weights}",
        )
        st.markdown(DIFFERENCES)
    if first:
        row = rollouts[first["rollout"] - 1]
        summary = f"reward {row['reward']:g}, {row['length']} tokens" + ", cut off" * row["cut off"]
        st.subheader(f"Rollout {row['rollout']}: {summary}", anchor="rollout")
        table(describe_rollout(row, results), "rollout")
    st.subheader("The group as a whole")
    rollout_count, divisors = len(lengths), describe_divisors(lengths, longest)
    st.markdown(
        "A token's weight is its rollout's advantage over the divisor in the table. The divisors count different "
        "things, so only the weights *within* one algorithm compare; a constant factor between two algorithms acts "
        "like another learning rate. For example, Dr. GRPO and RLOO have the same divisor, and RLOO's weights are "
        f"{rollout_count}/{rollout_count - 1} ≈ {rollout_count / (rollout_count - 1):.3g} times those of Dr. GRPO, "
        "as its advantages are.\n\n“Longest ÷ shortest” is the weight per unit of advantage of the longest rollout, "
        "divided by that of the shortest: 1 if the length has no effect. Rollouts of weight zero are left out; the "
        "cell is empty if fewer than two remain."
    )
    table(
        [
            {
                "algorithm": NAMES[name],
                "sum of advantages": round(math.fsum(a), 12) + 0.0,
                "largest advantage": max(map(abs, a)),
                "advantage divided by": divisors[name],
                "largest weight of a token": max(map(abs, w)),
                "longest ÷ shortest": _compute_length_bias(a, w, lengths),
            }
            for name, (a, w) in results.items()
        ],
        "group",
    )


def _compute_length_bias(advantages: Sequence[float], weights: Sequence[float], lengths: Sequence[int]) -> float | None:
    """Weight per unit of advantage of the longest rollout over that of the shortest, among rollouts with a weight."""
    pushed = [i for i, weight in enumerate(weights) if weight]
    if len(pushed) < 2:
        return None
    short, long = (weights[i] / advantages[i] for i in (end(pushed, key=lengths.__getitem__) for end in (min, max)))
    return long / short


PAGE = Page(
    name="advantages",
    title="Group advantages",
    says="Each prompt gets a group of rollouts, and each rollout is compared with the others. Edit rewards and "
    "lengths, and compare the advantages and the token weights of five algorithms: Dr. GRPO, RLOO, GRPO, DAPO and "
    "GSPO.",
    formula=r"\begin{gathered} A_i = \frac{R_i - b_i}{s} \\"
    r"L = -\frac{1}{\mathrm{budget}}\sum_{i,t} w_{i,t}\,m_{i,t} \\"
    r"m_{i,t} = \min(\rho_{i,t} A_i,\ \mathrm{clip}(\rho_{i,t}) A_i)\end{gathered}",
    symbols={
        "A_i": "advantage of rollout i",
        "R_i": "its reward",
        "b_i": "baseline, the mean reward of the group (in RLOO, of the other rollouts)",
        "s": "standard deviation of the group's rewards in GRPO, DAPO and GSPO, 1 in Dr. GRPO and RLOO",
        "L": "loss",
        r"\mathrm{budget}": "divisor of the whole step: rollouts × longest allowed response in Dr. GRPO and RLOO, "
        "tokens in DAPO, otherwise rollouts",
        "w_{i,t}": "weight of token t: 1; in GRPO and GSPO 1 / (tokens of the response); in DAPO 0 if truncated",
        "m_{i,t}": "clipped surrogate",
        r"\rho_{i,t}": "probability of the token under the policy over its probability when it was sampled",
        r"\mathrm{clip}": "limits ρ to the clip range around 1",
    },
    question="Choose “equally correct”: for which algorithms are the advantages small, and for which are they large? "
    "And in “long wrong answers”, which algorithms penalise a token of the longest answer least?",
    look="In “equally correct” the rewards differ by thousandths. Algorithms that divide by the standard deviation "
    "scale these differences to full size. In “long wrong answers” algorithms that divide by length penalise each "
    "token of a long wrong answer less.",
    draw=draw,
    code=(group_advantages, family_loss),
    technique="dr-grpo",
)
