"""Textual feedback: probabilities of a wrong message with and without a hint, token by token."""

import math
from collections.abc import Mapping

import streamlit as st

from etude.explorer import examples, provenance
from etude.explorer.charts.chart import chart, picked
from etude.explorer.page import Page, table
from etude.explorer.pages import hint_tokens, rollouts
from etude.explorer.pages.hinting import (
    FAULT_HINT,
    HINT_SOURCES,
    KINDS,
    OTHER_HINT,
    OWN,
    Case,
    Read,
    case_of,
    given_away,
    read,
    words_of,
)
from etude.explorer.pages.watch import load_agent, stamps
from etude.explorer.spans import metrics
from etude.play.play import find_checkpoints as checkpoints
from kit.settings import RunError
from recipe.small.hints import RULES
from ref import textual_feedback

FILE = "hints.json"
MAX_HINT_LENGTH = 80
"""Characters of a hint of the reader's."""
INITIAL_RULE = "unread"
"""The rule with which the page begins: its hint says what to do instead."""
DIVERGENCES = {
    "reverse": "KL(student‖teacher): large where the student's likely tokens are unlikely for the teacher",
    "forward": "KL(teacher‖student): large where the teacher's likely tokens are unlikely for the student",
    "js": "Jensen–Shannon: at most log 2, symmetric",
}


def load_cases() -> list[Case]:
    """Draws the box of runs. The faults that are shown, and the checkpoint that reads them. Raises RunError."""
    folder = provenance.choose_examples(FILE, example="agent/record.json")
    hints = examples.load("hints", folder)
    run = None if folder == examples.FOLDER else folder.parent
    checkpoint = stamps(checkpoints(run, None)[-1])
    agent = load_agent(*checkpoint)
    try:
        cases = [case_of(agent, checkpoint[1], hints, number) for number in range(len(hints["rollouts"]))]
    except ValueError as error:
        raise examples.unreadable(folder / FILE, error) from None
    if not cases:
        raise RunError(
            f"the agent broke no rule in {hints['played']} rollouts, so there are no hints; choose another run"
        )
    return cases


def draw_controls(cases: list[Case]) -> tuple[Case, str, str, bool]:
    """Draws the controls. The fault, what the teacher is told, the divergence, and whether positions are shifted."""
    fault_column, hint_column = st.columns([2, 3])
    names = [f"{number}, {case.rule}: {case.says.removeprefix('error: ')}" for number, case in enumerate(cases, 1)]
    initial_index = next((number for number, case in enumerate(cases) if case.rule == INITIAL_RULE), 0)
    with fault_column:
        case = cases[
            names.index(st.selectbox("Fault, by rule", names, initial_index, key="fault", bind="query-params"))
        ]
        kind = st.radio(
            "Divergence",
            KINDS,
            key="divergence",
            bind="query-params",
            horizontal=True,
            help="; ".join(DIVERGENCES.values()),
        )
    with hint_column:
        hint_source = st.radio("Hint to the teacher", HINT_SOURCES, key="told", bind="query-params", horizontal=True)
        own_words = (
            st.text_input("Your words", case.says, MAX_HINT_LENGTH, key="words", bind="query-params")
            if hint_source == OWN
            else ""
        )
        shift = not st.toggle("Trap: ignore that the hint shifts positions", key="unshifted", bind="query-params")
    return case, words_of(case, hint_source, own_words), kind, shift


def draw() -> None:
    cases = load_cases()
    case, words, kind, shift = draw_controls(cases)
    reading = read(case, words, shift)
    st.html(rollouts.STYLE + hint_tokens.STYLE)
    if not shift:
        st.warning(
            "The teacher's logits are taken at the student's positions, where they predict other tokens. The "
            "divergence is meaningless."
        )
    for name, run in given_away(case, words).items():
        st.warning(f"This hint leaks: it shares `{rollouts.named(run)}` with {name}. In training it is not used.")
    draw_metrics(reading, kind)
    left, right = st.columns([2, 3])
    with left:
        st.subheader("The context")
        st.html(hint_tokens.context(case, words))
        st.caption(
            f"The rollout {'solved' if case.success else 'did not solve'} its task; a right body is `{case.answer}`."
        )
    with right:
        st.subheader("The message, token by token")
        st.html(hint_tokens.readings(reading, kind))
        st.caption(
            "Hover over a token, or tap it, to see its probability and its alternatives for student and teacher."
        )
        draw_charts(reading, kind)
    draw_token(reading, kind)
    st.subheader("Positions")
    chart(
        hint_tokens.positions(case, words),
        "hint-positions",
        [
            {"token": place, "student": s, "teacher": t}
            for place, (s, t) in enumerate(
                zip(reading.alignment.student.tolist(), reading.alignment.teacher.tolist()), 1
            )
        ],
        "Both sequences by position. The hint shifts the message to the right. Each arc starts at the position that "
        "predicts the first token of the message. At the student's position the teacher predicts another token.",
        wide=True,
    )
    draw_all_faults(cases, kind)


def draw_metrics(reading: Read, kind: str) -> None:
    """A message in four figures."""
    divergences = [word.divergences[kind] for word in reading.words]
    total, likelihood_ratio = math.fsum(divergences), math.exp(reading.likelier)
    metrics(
        ("Divergence of the message", f"{total:.3f} nats", f"{DIVERGENCES[kind]}. The sum over its tokens."),
        (
            "On one token",
            f"{max(divergences) / total:.0%}" if total else "–",
            "Share of the token that the hint changes most.",
        ),
        (
            "Likelihood under the hint",
            f"{likelihood_ratio:.3g}×",
            "Likelihood of the message with the hint over that without it. Below 1 the hint makes the message less "
            "likely.",
        ),
        (
            "Positions that shift",
            str(len(reading.alignment.tokens) - 1 - int(reading.alignment.student[-1])),
            "Tokens of the hint.",
        ),
    )


def rank_tokens(reading: Read, kind: str) -> list[int]:
    """The tokens of the message by number, from 0 on, those first that the hint changes most."""
    return sorted(range(len(reading.words)), key=lambda place: -reading.words[place].divergences[kind])


def draw_charts(reading: Read, kind: str) -> None:
    """The message token by token, in two charts. A click shows both distributions of a token."""
    rows, token_count = hint_tokens.rows(reading), len(reading.words)

    def select_token(row: Mapping) -> None:
        if token_count > 1 and "place" in row:
            st.session_state[f"rank-{token_count}"] = rank_tokens(reading, kind).index(row["place"] - 1) + 1

    caption = "Probability of each token of the message, without the hint and under it. A click shows its alternatives."
    picked(hint_tokens.probabilities(reading), "hint-tokens", rows, caption, on_click=select_token)
    picked(
        hint_tokens.draw_divergences(reading, kind),
        "hint-apart",
        rows,
        f"{DIVERGENCES[kind]}, nats.",
        on_click=select_token,
    )


def draw_token(reading: Read, kind: str) -> None:
    """Both distributions of one token, at first of that which the hint changes most, and all tokens in the order of
    what it changes."""
    token_count, order = len(reading.words), rank_tokens(reading, kind)
    left, right = st.columns([2, 3])
    with left:
        st.subheader("One token, for student and teacher")
        help_text = "1 is the token that the hint changes most; the table has their order."
        rank = (
            st.slider(
                "Rank by what the hint changes",
                1,
                token_count,
                1,
                key=f"rank-{token_count}",
                bind="query-params",
                help=help_text,
            )
            if token_count > 1
            else 1
        )
        place = order[rank - 1]
        word = reading.words[place]
        nats = f"{word.divergences[kind]:.3f} nats"
        caption = f"Token {place + 1} of {token_count} and its likeliest alternatives; divergence {nats}."
        chart(hint_tokens.distributions(word), "hint-token", hint_tokens.make_outcome_rows(word), caption)
    with right:
        st.subheader("Tokens by divergence")
        rows = [
            {key: value for key, value in row.items() if key not in KINDS or key == kind}
            for row in hint_tokens.rows(reading)
        ]
        table([rows[place] for place in order], "hint-most")


def draw_all_faults(cases: list[Case], kind: str) -> None:
    """All faults, with their hints and the control."""
    if not st.toggle(
        "All faults, with their hints and with those of other rollouts", key="every-fault", bind="query-params"
    ):
        return
    rows = []
    for number, case in enumerate(cases, 1):
        row = {"fault": number, "rule": case.rule, "hint": case.says}
        for hint_source in (FAULT_HINT, OTHER_HINT):
            reading = read(case, words_of(case, hint_source, ""))
            row |= {
                f"nats, {hint_source}": math.fsum(word.divergences[kind] for word in reading.words),
                f"likelihood, {hint_source}": math.exp(reading.likelier),
            }
        rows.append(row)
    right = sum(row[f"likelihood, {FAULT_HINT}"] < row[f"likelihood, {OTHER_HINT}"] for row in rows)
    st.markdown(
        f"Of {len(rows)} messages {right} are less likely under their own hint than under that of another rollout. If "
        "that is about half of them, the content of the hint has no effect: this agent was not trained on hints "
        "(`sims/textual_feedback/hinted.py` does that)."
    )
    table(rows, "hint-faults")


PAGE = Page(
    name="textual-feedback",
    title="Textual feedback",
    says="A rollout has a fault in one message. A hint is inserted in front of it, and the same tokens are scored "
    "twice: without the hint (student) and with it (teacher). The page computes both with a small agent. Faults are "
    f"found by the rules {', '.join(rule.name for rule in RULES)}.",
    formula=r"\begin{gathered} L = \frac{1}{\mathrm{budget}}\sum_{t \in \text{message}} D(\pi_t,\; \pi^h_t) \\"
    r"\pi_t = \pi(\cdot \mid c,\, y_{<t}) \qquad \pi^h_t = \pi(\cdot \mid c,\, h,\, y_{<t})\end{gathered}",
    symbols={
        "L": "loss, added to the RL loss",
        r"\mathrm{budget}": "constant divisor of the step",
        "t": "token of the message",
        "D": "divergence of the two distributions in nats, chosen below",
        r"\pi_t": "student, the policy's distribution of token t",
        r"\pi^h_t": "teacher, the same policy with the hint, without gradient",
        "c": "context before the message",
        "h": "hint",
        "y_{<t}": "tokens of the message before t",
    },
    question="Does the hint change all tokens of the message a little, or few of them much? Which?",
    look="A few tokens have most of the divergence: those where the agent chooses an action. For comparison, choose "
    "the hint of another rollout, and the answer.",
    draw=draw,
    code=(textual_feedback.hinted, textual_feedback.predictions, textual_feedback.divergence, textual_feedback.leaked),
    technique="textual-feedback",
)
