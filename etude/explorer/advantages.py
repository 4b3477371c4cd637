"""Group advantages: edit a group's rewards and lengths, and see what each algorithm of the family does with them."""

import math
from collections.abc import Sequence

import streamlit as st

from etude.explorer.charts import Axis, Look, chart, drawing, picked, points, rule
from etude.explorer.drawing import Drawing
from etude.explorer.groups import LONGEST, PRESETS, Row, checked, columns, decode, encode, family, rows
from etude.explorer.page import Page, folded, table
from kit.settings import RunError
from ref.dr_grpo import family_loss, group_advantages

NAMES = {"dr_grpo": "Dr. GRPO", "grpo": "GRPO", "rloo": "RLOO", "dapo": "DAPO", "gspo": "GSPO"}
LOOKS = {
    "Dr. GRPO": Look("blue", mark="o"),
    "GRPO": Look("orange", mark="s"),
    "RLOO": Look("green", mark="^"),
    "DAPO": Look("purple", mark="D"),
    "GSPO": Look("red", mark="v"),
}
HOVER_COLUMNS = ("reward", "length")
"""What hovering tells of a rollout beside what is drawn."""


def edit_group() -> list[Row]:
    """The table. If it differs from the preset, the URL stores it. A new link or another preset starts a new table. So
    does coming back from another page, because Streamlit has dropped the edits by then and only the URL still has
    them."""
    preset = st.selectbox("Begin with", list(PRESETS), key="preset", bind="query-params")
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
                "length": st.column_config.NumberColumn("length", format="%d", help="tokens that the policy wrote"),
                "cut off": st.column_config.CheckboxColumn(
                    "cut off", default=False, help="truncated at the length limit; DAPO drops it"
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
    """One mark per rollout and algorithm."""
    return drawing(
        Axis("rollout", names=True),
        unit,
        points(rows, "rollout", unit, "algorithm", tell=HOVER_COLUMNS),
        rule(y=0),
        looks=LOOKS,
    )


def melt_rows(rows: list[dict], unit: str) -> list[dict]:
    """One row per rollout and algorithm of a table with a column per algorithm."""
    return [
        {"algorithm": name, "rollout": row["rollout"], unit: row[name]} | {key: row[key] for key in HOVER_COLUMNS}
        for name in LOOKS
        for row in rows
    ]


def describe_rollout(row: dict, results: dict[str, tuple[list[float], list[float]]]) -> list[dict]:
    """A rollout, algorithm by algorithm: advantage, push of a token, and of all its tokens."""
    index = row["rollout"] - 1
    return [
        {
            "member": NAMES[name],
            "advantage": a[index],
            "weight per token": w[index],
            "all its tokens": w[index] * row["length"],
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
            help="Dr. GRPO and RLOO divide by rollouts × this length, whatever the real lengths; others do not.",
        )
        relative = st.toggle(
            "Weights relative to the largest",
            True,
            key="relative",
            bind="query-params",
            help="Adam removes most of a common factor; what remains is how an algorithm's weights compare "
            "with each other.",
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
        advantage_rows = melt_rows(advantages, "advantage")
        first = picked(
            draw_marks(advantage_rows, "advantage"),
            "advantages",
            advantages,
            "Advantage of each rollout: reward minus baseline; GRPO, DAPO and GSPO also divide by the "
            "group's standard deviation. A click opens one.",
        )
        folded(advantages, "advantages-table")
        unit = "weight per token" + (", relative" if relative else "")
        chart(
            draw_marks(melt_rows(weights, unit), unit),
            "weights-relative" if relative else "weights",
            weights,
            "How strongly each token of the rollout is pushed: minus the gradient of the loss at ratio one.",
        )
        folded(weights, "weights-table")
    if first:
        row = rollouts[first["rollout"] - 1]
        summary = f"reward {row['reward']:g}, {row['length']} tokens" + ", cut off" * row["cut off"]
        st.subheader(f"Rollout {row['rollout']}: {summary}", anchor="rollout")
        table(describe_rollout(row, results), "rollout")
    st.subheader("The group as a whole")
    st.markdown(
        "The last column: the push per token and unit of advantage on the longest rollout, divided by "
        "that on the shortest; "
        "1 if length does not matter. Rollouts without any push are left out; the cell is empty if "
        "fewer than two remain."
    )
    table(
        [
            {
                "member": NAMES[name],
                "sum of advantages": round(math.fsum(a), 12) + 0.0,
                "largest advantage": max(map(abs, a)),
                "largest weight of a token": max(map(abs, w)),
                "longest ÷ shortest": _compute_length_bias(a, w, lengths),
            }
            for name, (a, w) in results.items()
        ],
        "group",
    )


def _compute_length_bias(advantages: Sequence[float], weights: Sequence[float], lengths: Sequence[int]) -> float | None:
    """Weight per unit of advantage of the longest rollout over that of the shortest, among those with a weight: 1 if
    length does not matter."""
    pushed = [i for i, weight in enumerate(weights) if weight]
    if len(pushed) < 2:
        return None
    short, long = (weights[i] / advantages[i] for i in (end(pushed, key=lengths.__getitem__) for end in (min, max)))
    return long / short


PAGE = Page(
    name="advantages",
    title="Group advantages",
    says="Each prompt gets a group of rollouts, and each rollout is compared with the others. Edit rewards "
    "and lengths, and see what each "
    "algorithm of the family pushes up or down, and how much per token.",
    formula=r"\begin{gathered} A_i = \frac{R_i - b_i}{s} \\"
    r"L = -\frac{1}{\text{budget}}\sum_{i,t} w_{i,t}\,m_{i,t} \\ m_{i,t} = \min(\rho_t "
    r"A_i,\ \mathrm{clip}(\rho_t) A_i)\end{gathered}",
    question="Choose “equally correct”: which algorithms see hardly a difference, and which a large one? And in "
    "“long wrong answers”, who "
    "blames a token of the longest answer least?",
    look="In “equally correct” the rewards differ by thousandths, and algorithms that divide by the "
    "deviation blow that up to full size; in "
    "“long wrong answers” algorithms that divide by length blame a long wrong answer less, token by token.",
    draw=draw,
    code=(group_advantages, family_loss),
    technique="dr-grpo",
)
