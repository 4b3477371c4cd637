"""Length penalties: the curve, its slope and its limits; rollouts of a run ranked by reward; serial and parallel calls."""

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import streamlit as st
import torch

from etude.explorer import examples, provenance
from etude.explorer.charts import Axis, Look, chart, drawing, lines, picked, points, rule
from etude.explorer.drawing import Drawing
from etude.explorer.page import Page, steering, table
from kit.settings import RunError
from ref.engine.sampler import Segment
from ref.length_penalty import Effort, EffortWeights, effort, length_penalty, marginal_cost
from ref.rl import reward_terms
from ref.rollout import Rollout
from ref.self_summary import Chain
from sims.recipe.settings import Payment

RECIPE = Payment()
BENDS = (0.0, 1e-6, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0)
PRICES = (0.0, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2)
HIGHEST = {
    "thinking_tokens": 5.0,
    "tool_call_tokens": 5.0,
    "tool_output_tokens": 2.0,
    "final_message_tokens": 5.0,
    "tool_calls": 50.0,
    "turns": 200.0,
}
WORDS = {
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


def rollouts(folder: Path | None = None) -> list[dict]:
    """Rollouts of a run. Raises RunError if the example is missing or invalid."""
    return examples.load("rollouts", folder)["rollouts"]


def spent(rollout: dict, payment: Payment) -> tuple[float, dict[str, float]]:
    """Effort of an example rollout in token equivalents, and the terms of its reward (`ref.rl.reward_terms`)."""
    own, given = rollout["own_tokens"], rollout["given_tokens"]
    taken = torch.arange(own + given) < own
    nothing = torch.zeros(len(taken) - 1, 0, 1, dtype=torch.int16)
    segment = Segment(torch.zeros(len(taken), dtype=torch.long), taken, torch.zeros(len(taken)), taken.long(), nothing, True)
    metrics = {name: float(rollout[name]) for name in ("calls", "turns", "invalid_calls")}
    whole = Rollout(Chain([segment]), {"tests": float(rollout["success"])}, metrics)
    return -reward_terms(whole, replace(payment, effort_price=1.0, k=0.0, q=0.0))["effort"], reward_terms(whole, payment)


def ranked(found: list[dict], payment: Payment) -> list[dict]:
    """Rollouts by reward, best first, with their rank and its change from the ranking without a length penalty. Equal rewards share a rank."""
    free = replace(payment, effort_price=0.0)
    before, after = ([sum(spent(r, p)[1].values()) for r in found] for p in (free, payment))
    rows = []
    for number, r in enumerate(found):
        x, parts = spent(r, payment)
        rank, was = (1 + sum(other > rewards[number] for other in rewards) for rewards in (after, before))
        rows.append(
            {
                "rank": rank,
                "without a penalty": was,
                "rollout": number + 1,
                "task": r["task"],
                "success": r["success"],
                "reward": sum(parts.values()),
                "effort": x,
                "C(effort)": length_penalty(x, payment.k, payment.q),
                "next unit costs": marginal_cost(x, payment.k, payment.q),
                "own tokens": r["own_tokens"],
                "given tokens": r["given_tokens"],
                "calls": r["calls"],
                "turns": r["turns"],
                "invalid calls": r["invalid_calls"],
            }
        )
    return sorted(rows, key=lambda row: (row["rank"], row["rollout"]))


def ways(most: int, weights: EffortWeights, k: float, q: float) -> list[dict]:
    """The same 1 … `most` calls, one per turn or all in one turn: effort and cost of each."""
    rows = []
    for n in range(1, most + 1):
        row = {"calls": n}
        for name, turns in zip(WAYS, (n, 1)):
            x = effort(Effort(tool_call_tokens=CALL * n, tool_output_tokens=OUTPUT * n, tool_calls=n, turns=turns), weights)
            row |= {f"effort, {name}": x, f"C, {name}": length_penalty(x, k, q)}
        rows.append(row)
    return rows


def limits(x: float, k: float, q: float) -> list[dict]:
    """C at effort x, near its limits and at them: it is continuous there."""
    rows = [
        {"limit": "q → 1: the logarithm", "close by": length_penalty(x, k, 1 + 1e-9), "at the limit": length_penalty(x, k, 1.0)},
        {"limit": "k → 0: the effort itself", "close by": length_penalty(x, 1e-12, q), "at the limit": length_penalty(x, 0.0, q)},
        {"limit": "q → 0: the effort itself", "close by": length_penalty(x, k, 1e-12), "at the limit": length_penalty(x, k, 0.0)},
    ]
    if q > 1 and k > 0:
        rows.append({"limit": "x → ∞: the bound", "close by": length_penalty(1e150 / k, k, q), "at the limit": length_penalty(1e290 / k, k, q)})
    return rows


def curve(k: float, q: float, most: float) -> tuple[Drawing, list[dict]]:
    """The penalty between its limits, and its figures."""
    x = np.linspace(0, most, 120)
    ways = {"k → 0: x itself": (0.0, q), "q → 1: logarithm": (k, 1.0), "C(x)": (k, q)}
    rows = [
        {"what": what, "x": a, "C": b}
        for what, (bend, power) in ways.items()
        for a, b in zip(x.tolist(), length_penalty(x, bend, power).tolist(), strict=True)
    ]
    bound = length_penalty(1e290 / k, k, q) if q > 1 and k > 0 else most
    return drawing(
        Axis(EFFORT, most=most),
        Axis("C(x)", most=most),
        lines(rows, "x", "C", "what"),
        *([rule("x → ∞: bound", y=bound, look=Look("purple", "-."))] if bound < most else []),
        looks={"C(x)": Look("blue"), "k → 0: x itself": Look("grey", ":"), "q → 1: logarithm": Look("orange", "--")},
    ), rows


def slope(k: float, q: float, most: float, ranking: list[dict]) -> tuple[Drawing, list[dict]]:
    """The price of the next unit, and the rollouts on it."""
    x = np.linspace(0, most, 120)
    line = [{"what": "C'(x)", "x": a, "C'": b} for a, b in zip(x.tolist(), marginal_cost(x, k, q).tolist(), strict=True)]
    marks = [{"what": "rollout", "rollout": row["rollout"], "x": row["effort"], "C'": row["next unit costs"], "task": row["task"]} for row in ranking]
    return drawing(
        Axis(EFFORT, most=most),
        Axis("price of the next unit, C'(x)", most=1.05),
        lines(line, "x", "C'", "what"),
        points(marks, "x", "C'", "what", tell=("rollout", "task")),
        looks={"C'(x)": Look("blue"), "rollout": Look("red", mark="o")},
    ), line + marks


def calls_drawn(most: int, weights: EffortWeights, k: float, q: float) -> tuple[Drawing, list[dict]]:
    """The same calls, one per turn or all in one."""
    rows = ways(most, weights, k, q)
    some = [{"how": how, "calls": row["calls"], "C": row[f"C, {how}"], "effort": row[f"effort, {how}"]} for how in WAYS for row in rows]
    both = lines(some, "calls", "C", "how"), points(some, "calls", "C", "how", tell=("effort",))
    return drawing("calls", "C(effort)", *both, looks=WAYS), rows


def controls() -> Payment:
    """The payment set by the sliders. The six weights are collapsed unless the link sets one of them: on a narrow screen they would
    separate the curve from the sliders that bend it."""
    places = st.columns(3)
    with places[0]:
        k = st.select_slider(
            "k: how soon it bends, per unit of effort", BENDS, RECIPE.k, key="k", bind="query-params", format_func=lambda v: f"{v:g}"
        )
    with places[1]:
        q = st.slider("q: how much it bends", 0.0, 3.0, RECIPE.q, 0.05, key="q", bind="query-params")
    with places[2]:
        price = st.select_slider(
            "Reward that a unit of C costs", PRICES, RECIPE.effort_price, key="price", bind="query-params", format_func=lambda v: f"{v:g}"
        )
    terms, chosen = {term.name: term.name.replace("_", "-") for term in fields(EffortWeights)}, {}
    opened = st.session_state.setdefault("weights-opened", any(key in st.query_params for key in terms.values()))
    with st.expander("Weights of the six terms of effort", expanded=opened):
        places = st.columns(3)
        for place, (name, key) in enumerate(terms.items()):
            with places[place % 3]:
                default, top = getattr(RECIPE.weights, name), HIGHEST[name]
                chosen[name] = st.slider(f"Weight of a {WORDS[name]}", 0.0, top, default, 0.1 if top < 10 else 1.0, key=key, bind="query-params")
    return replace(RECIPE, k=k, q=q, effort_price=price, weights=EffortWeights(**chosen))


def opened(row: Mapping) -> None:
    """Opens the rollout of a mark."""
    if "rollout" in row:
        st.session_state["read"] = row["rollout"]


def draw() -> None:
    folder = provenance.chosen("rollouts.json")
    payment = controls()
    k, q = payment.k, payment.q
    try:
        found, lacks = rollouts(folder), ""
    except RunError as error:
        found, lacks = [], str(error)
    rows = ranked(found, payment)
    reach = float(max(*(row["effort"] for row in rows), 100.0) * 1.15) if rows else 1000.0
    left, right = st.columns(2)
    with left:
        drawn, figures = curve(k, q, reach)
        chart(drawn, "penalty", figures, "The penalty. It starts with slope one and flattens.")
    with right:
        drawn, figures = slope(k, q, reach, rows)
        words = "What moves the policy: the price of one more unit." + " A click on a rollout opens it below." * (len(rows) > 1)
        picked(drawn, "marginal-cost", figures, words, then=opened)
    left, right = st.columns(2)
    with left:
        most = st.slider("Calls in the example", 1, 12, 6, key="calls", bind="query-params")
        drawn, calls = calls_drawn(most, payment.weights, k, q)
        chart(drawn, "parallel-calls", calls, f"The same work in many turns or in one: {CALL} tokens per call, {OUTPUT} tokens of output each.")
    last = calls[-1]
    serial, parallel = last["C, one a turn"], last["C, all in one turn"]
    with right:
        st.markdown(
            f"**Serial or parallel.** {most} calls, one per turn: effort {last['effort, one a turn']:.1f}, which costs {serial:.1f}; "
            f"all in one turn: effort {last['effort, all in one turn']:.1f}, which costs {parallel:.1f}. Parallel calls save "
            f"{serial - parallel:.1f}, {(serial - parallel) / serial if serial else 0:.0%}."
        )
    st.subheader("Rollouts of the run, ranked")
    if lacks:
        st.error(lacks)
    else:
        st.markdown(
            "Reward = success − price · C(effort) − price of invalid calls. The recipe also charges for drift, a price for each nat of KL "
            "from the policy before RL; this page leaves it out. Everything the agent writes counts as tokens of calls. It neither "
            "thinks nor sends a final message, so those two weights have no effect here."
        )
        st.caption("Choose a row to read its rollout.")
        steering(rows, "ranking", "read", [row["rollout"] for row in rows])
        number = st.slider("Read rollout", 1, len(found), 1, key="read", bind="query-params") if len(found) > 1 else 1
        st.code(found[number - 1]["text"].replace("<|", "\n<|").strip(), language=None, wrap_lines=True)
    st.subheader("Limits")
    table(limits(reach, k, q), "limits")


PAGE = Page(
    name="penalties",
    title="Length penalties",
    says="The more effort a task has already taken, the less each further unit costs: easy tasks are hurried, hard tasks keep room to think.",
    formula=r"\begin{gathered} C_{k,q}(x) = \frac{(1+kx)^{1-q}-1}{k(1-q)} \\ C'(x) = (1+kx)^{-q}\end{gathered}",
    question="The same calls, made in one turn or in six: which is cheaper? And where is every curve nearly a straight line?",
    look="Turns have their own price, so the same work in fewer turns is cheaper, until the curve is so flat that extra effort is free. Where "
    "k·x is far below one, every curve is nearly the straight line.",
    draw=draw,
    code=(length_penalty, marginal_cost, Effort, EffortWeights, effort),
    technique="length-penalty",
)
