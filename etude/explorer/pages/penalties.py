"""Length penalties: the curve, its slope and its limits; rollouts of a run ranked by reward; serial and parallel
calls."""

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import streamlit as st
import torch

from etude.explorer import examples, provenance
from etude.explorer.charts.chart import Axis, Look, chart, drawing, lines, picked, points, rule
from etude.explorer.drawing import Drawing
from etude.explorer.page import Page, steering, table
from kit.settings import RunError
from recipe.small.settings import RewardCoefficients
from ref.engine.sampler import Segment
from ref.length_penalty import Effort, EffortWeights, effort, length_penalty, marginal_cost
from ref.rl import compute_reward_terms
from ref.rollout import Rollout
from ref.self_summary import Chain

DEFAULT_PAYMENT = RewardCoefficients()
BENDS = (0.0, 1e-6, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0)
PRICES = (0.0, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2)
MAX_WEIGHTS = {
    "thinking_tokens": 5.0,
    "tool_call_tokens": 5.0,
    "tool_output_tokens": 2.0,
    "final_message_tokens": 5.0,
    "tool_calls": 50.0,
    "turns": 200.0,
}
TERM_NAMES = {
    "thinking_tokens": "thinking token",
    "tool_call_tokens": "token of a call",
    "tool_output_tokens": "token of tool output",
    "final_message_tokens": "token of the final message",
    "tool_calls": "tool call",
    "turns": "turn",
}
EFFORT = "effort x, token equivalents"
WAYS = {"one a turn": Look("orange", "--", "s"), "all in one turn": Look("blue", "-", "o")}
CALL, OUTPUT = 12, 300
"""Tokens per call of the example, and tokens of its output."""


def load_rollouts(folder: Path | None = None) -> list[dict]:
    """Rollouts of a run. Raises RunError if the example is missing or invalid."""
    return examples.load("rollouts", folder)["rollouts"]


def compute_effort(rollout: dict, payment: RewardCoefficients) -> tuple[float, dict[str, float]]:
    """Effort of an example rollout in token equivalents, and the terms of its reward
    (`ref.rl.compute_reward_terms`)."""
    own_tokens, given_tokens = rollout["own_tokens"], rollout["given_tokens"]
    sampled = torch.arange(own_tokens + given_tokens) < own_tokens
    no_experts = torch.zeros(len(sampled) - 1, 0, 1, dtype=torch.int16)
    segment = Segment(
        torch.zeros(len(sampled), dtype=torch.long),
        sampled,
        torch.zeros(len(sampled)),
        sampled.long(),
        no_experts,
        True,
    )
    metrics = {name: float(rollout[name]) for name in ("calls", "turns", "invalid_calls")}
    sampled_rollout = Rollout(Chain([segment]), {"tests": float(rollout["success"])}, metrics)
    return (
        -compute_reward_terms(sampled_rollout, replace(payment, effort_price=1.0, k=0.0, q=0.0))["effort"],
        compute_reward_terms(sampled_rollout, payment),
    )


def rank_rollouts(rollouts: list[dict], payment: RewardCoefficients) -> list[dict]:
    """Rollouts by reward, best first, with their rank and its change from the ranking without a length penalty. Equal
    rewards share a rank."""
    unpenalized = replace(payment, effort_price=0.0)
    unpenalized_rewards, penalized_rewards = (
        [sum(compute_effort(rollout, variant)[1].values()) for rollout in rollouts]
        for variant in (unpenalized, payment)
    )
    rows = []
    for number, rollout in enumerate(rollouts):
        x, terms = compute_effort(rollout, payment)
        rank, unpenalized_rank = (
            1 + sum(reward > rewards[number] for reward in rewards)
            for rewards in (penalized_rewards, unpenalized_rewards)
        )
        rows.append(
            {
                "rank": rank,
                "without a penalty": unpenalized_rank,
                "rollout": number + 1,
                "task": rollout["task"],
                "success": rollout["success"],
                "reward": sum(terms.values()),
                "effort": x,
                "C(effort)": length_penalty(x, payment.k, payment.q),
                "next unit costs": marginal_cost(x, payment.k, payment.q),
                "own tokens": rollout["own_tokens"],
                "given tokens": rollout["given_tokens"],
                "calls": rollout["calls"],
                "turns": rollout["turns"],
                "invalid calls": rollout["invalid_calls"],
            }
        )
    return sorted(rows, key=lambda row: (row["rank"], row["rollout"]))


def compare_calls(max_calls: int, weights: EffortWeights, k: float, q: float) -> list[dict]:
    """The same 1 … `max_calls` calls, one per turn or all in one turn: effort and cost of each."""
    rows = []
    for n in range(1, max_calls + 1):
        row = {"calls": n}
        for way, turns in zip(WAYS, (n, 1)):
            x = effort(
                Effort(tool_call_tokens=CALL * n, tool_output_tokens=OUTPUT * n, tool_calls=n, turns=turns), weights
            )
            row |= {f"effort, {way}": x, f"C, {way}": length_penalty(x, k, q)}
        rows.append(row)
    return rows


def list_limits(x: float, k: float, q: float) -> list[dict]:
    """C at effort x, near its limits and at them: it is continuous there."""
    rows = [
        {
            "limit": "q → 1: the logarithm",
            "close by": length_penalty(x, k, 1 + 1e-9),
            "at the limit": length_penalty(x, k, 1.0),
        },
        {
            "limit": "k → 0: the effort itself",
            "close by": length_penalty(x, 1e-12, q),
            "at the limit": length_penalty(x, 0.0, q),
        },
        {
            "limit": "q → 0: the effort itself",
            "close by": length_penalty(x, k, 1e-12),
            "at the limit": length_penalty(x, k, 0.0),
        },
    ]
    if q > 1 and k > 0:
        rows.append(
            {
                "limit": "x → ∞: the bound",
                "close by": length_penalty(1e150 / k, k, q),
                "at the limit": length_penalty(1e290 / k, k, q),
            }
        )
    return rows


def build_penalty_curve(k: float, q: float, max_effort: float) -> tuple[Drawing, list[dict]]:
    """The penalty between its limits, and its figures."""
    x = np.linspace(0, max_effort, 120)
    parameters = {"k → 0: x itself": (0.0, q), "q → 1: logarithm": (k, 1.0), "C(x)": (k, q)}
    rows = [
        {"what": series, "x": a, "C": b}
        for series, (bend, power) in parameters.items()
        for a, b in zip(x.tolist(), length_penalty(x, bend, power).tolist(), strict=True)
    ]
    bound = length_penalty(1e290 / k, k, q) if q > 1 and k > 0 else max_effort
    return drawing(
        Axis(EFFORT, upper=max_effort),
        Axis("C(x)", upper=max_effort),
        lines(rows, "x", "C", "what"),
        *([rule("x → ∞: bound", y=bound, look=Look("purple", "-."))] if bound < max_effort else []),
        looks={"C(x)": Look("blue"), "k → 0: x itself": Look("grey", ":"), "q → 1: logarithm": Look("orange", "--")},
    ), rows


def build_slope(k: float, q: float, max_effort: float, ranking: list[dict]) -> tuple[Drawing, list[dict]]:
    """The price of the next unit, and the rollouts on it."""
    x = np.linspace(0, max_effort, 120)
    curve_rows = [
        {"what": "C'(x)", "x": a, "C'": b} for a, b in zip(x.tolist(), marginal_cost(x, k, q).tolist(), strict=True)
    ]
    mark_rows = [
        {
            "what": "rollout",
            "rollout": row["rollout"],
            "x": row["effort"],
            "C'": row["next unit costs"],
            "task": row["task"],
        }
        for row in ranking
    ]
    return drawing(
        Axis(EFFORT, upper=max_effort),
        Axis("price of the next unit, C'(x)", upper=1.05),
        lines(curve_rows, "x", "C'", "what"),
        points(mark_rows, "x", "C'", "what", tell=("rollout", "task")),
        looks={"C'(x)": Look("blue"), "rollout": Look("red", mark="o")},
    ), curve_rows + mark_rows


def build_call_curves(max_calls: int, weights: EffortWeights, k: float, q: float) -> tuple[Drawing, list[dict]]:
    """The same calls, one per turn or all in one."""
    rows = compare_calls(max_calls, weights, k, q)
    series_rows = [
        {"how": way, "calls": row["calls"], "C": row[f"C, {way}"], "effort": row[f"effort, {way}"]}
        for way in WAYS
        for row in rows
    ]
    layers = lines(series_rows, "calls", "C", "how"), points(series_rows, "calls", "C", "how", tell=("effort",))
    return drawing("calls", "C(effort)", *layers, looks=WAYS), rows


def draw_controls() -> RewardCoefficients:
    """The payment set by the sliders. The six weights are collapsed unless the link sets one of them: on a narrow
    screen they would separate the curve from the sliders that bend it."""
    columns = st.columns(3)
    with columns[0]:
        k = st.select_slider(
            "k: how soon it bends, per unit of effort",
            BENDS,
            DEFAULT_PAYMENT.k,
            key="k",
            bind="query-params",
            format_func=lambda v: f"{v:g}",
        )
    with columns[1]:
        q = st.slider("q: how much it bends", 0.0, 3.0, DEFAULT_PAYMENT.q, 0.05, key="q", bind="query-params")
    with columns[2]:
        price = st.select_slider(
            "Reward that a unit of C costs",
            PRICES,
            DEFAULT_PAYMENT.effort_price,
            key="price",
            bind="query-params",
            format_func=lambda v: f"{v:g}",
        )
    terms, weights = {term.name: term.name.replace("_", "-") for term in fields(EffortWeights)}, {}
    is_expanded = st.session_state.setdefault("weights-opened", any(key in st.query_params for key in terms.values()))
    with st.expander("Weights of the six terms of effort", expanded=is_expanded):
        columns = st.columns(3)
        for index, (name, key) in enumerate(terms.items()):
            with columns[index % 3]:
                default, max_weight = getattr(DEFAULT_PAYMENT.weights, name), MAX_WEIGHTS[name]
                weights[name] = st.slider(
                    f"Weight of a {TERM_NAMES[name]}",
                    0.0,
                    max_weight,
                    default,
                    0.1 if max_weight < 10 else 1.0,
                    key=key,
                    bind="query-params",
                )
    return replace(DEFAULT_PAYMENT, k=k, q=q, effort_price=price, weights=EffortWeights(**weights))


def open_rollout(row: Mapping) -> None:
    """Opens the rollout of a mark."""
    if "rollout" in row:
        st.session_state["read"] = row["rollout"]


def draw() -> None:
    folder = provenance.choose_examples("rollouts.json")
    payment = draw_controls()
    k, q = payment.k, payment.q
    try:
        rollouts, error_message = load_rollouts(folder), ""
    except RunError as error:
        rollouts, error_message = [], str(error)
    rows = rank_rollouts(rollouts, payment)
    max_effort = float(max(*(row["effort"] for row in rows), 100.0) * 1.15) if rows else 1000.0
    left, right = st.columns(2)
    with left:
        picture, picture_rows = build_penalty_curve(k, q, max_effort)
        chart(picture, "penalty", picture_rows, "The penalty. It starts with slope one and flattens.")
    with right:
        picture, picture_rows = build_slope(k, q, max_effort, rows)
        caption = "The slope of the penalty, the price of one more unit of effort, which acts on the policy."
        caption += " A click on a rollout opens it below." * (len(rows) > 1)
        picked(picture, "marginal-cost", picture_rows, caption, on_click=open_rollout)
    left, right = st.columns(2)
    with left:
        max_calls = st.slider("Calls in the example", 1, 12, 6, key="calls", bind="query-params")
        picture, call_rows = build_call_curves(max_calls, payment.weights, k, q)
        chart(
            picture,
            "parallel-calls",
            call_rows,
            f"The same work in many turns or in one: {CALL} tokens per call, {OUTPUT} tokens of output each.",
        )
    last_row = call_rows[-1]
    serial_cost, parallel_cost = last_row["C, one a turn"], last_row["C, all in one turn"]
    with right:
        st.markdown(
            f"**Serial or parallel.** {max_calls} calls, one per turn: effort {last_row['effort, one a turn']:.1f}, "
            f"which costs {serial_cost:.1f}; "
            f"all in one turn: effort {last_row['effort, all in one turn']:.1f}, which costs {parallel_cost:.1f}. "
            f"Parallel calls save {serial_cost - parallel_cost:.1f}, "
            f"{(serial_cost - parallel_cost) / serial_cost if serial_cost else 0:.0%}."
        )
    st.subheader("Rollouts of the run, ranked")
    if error_message:
        st.error(error_message)
    else:
        st.markdown(
            "Reward = success − price · C(effort) − price of invalid calls. The recipe also has a penalty per nat of "
            "KL from the policy before RL; this page leaves it out. All tokens that the agent writes count as tokens "
            "of calls. It has no thinking tokens and no final message, so those two weights have no effect here."
        )
        st.caption("Select a row to read its rollout.")
        steering(rows, "ranking", "read", [row["rollout"] for row in rows])
        number = (
            st.slider("Read rollout", 1, len(rollouts), 1, key="read", bind="query-params") if len(rollouts) > 1 else 1
        )
        st.code(rollouts[number - 1]["text"].replace("<|", "\n<|").strip(), language=None, wrap_lines=True)
    st.subheader("Limits")
    table(list_limits(max_effort, k, q), "limits")


PAGE = Page(
    name="penalties",
    title="Length penalties",
    says="A penalty on effort whose slope falls with the effort: each further unit is expensive on easy tasks and "
    "cheap on hard ones.",
    formula=r"\begin{gathered} C_{k,q}(x) = \frac{(1+kx)^{1-q}-1}{k(1-q)} \\ C'(x) = (1+kx)^{-q}\end{gathered}",
    symbols={
        "C_{k,q}(x)": "penalty of a rollout",
        "x": "its effort in token equivalents, a weighted sum of tokens, calls and turns",
        "k": "curvature scale: at x = 1/k the slope is 2^(−q)",
        "q": "exponent of the slope; 0 gives a linear penalty",
    },
    question="The same calls, made in one turn or in six: which is cheaper? And where is every curve nearly a "
    "straight line?",
    look="Turns have a weight of their own, so the same work in fewer turns is cheaper, until the curve is so flat "
    "that extra effort costs nothing. Where k·x is far below one, every curve is nearly the straight line.",
    draw=draw,
    code=(length_penalty, marginal_cost, Effort, EffortWeights, effort),
    technique="length-penalty",
)
