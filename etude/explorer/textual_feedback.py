"""Textual feedback: a message in which the agent went wrong, read with and without a hint, token by token, by the agent itself."""

import math
from collections.abc import Mapping

import streamlit as st

from etude.explorer import examples, hint_tokens, provenance, rollouts
from etude.explorer.charts import chart, picked
from etude.explorer.hinting import ITS, KINDS, OTHER, OWN, TOLD, Case, Read, case_of, given_away, read, words_of
from etude.explorer.page import Page, table
from etude.explorer.spans import metrics
from etude.explorer.watch import known, stamps
from etude.play import found as checkpoints
from kit.settings import RunError
from ref import textual_feedback
from sims.hints import RULES

FILE = "hints.json"
LONGEST = 80
"""Characters of a hint of the reader's."""
BEGINS = "unread"
"""The rule with which the page begins: its hint says what to do instead."""
SAYS = {
    "reverse": "KL(student‖teacher): leaves what the teacher would not do",
    "forward": "KL(teacher‖student): covers what the teacher may do",
    "js": "Jensen–Shannon: at most log 2, symmetric",
}


def cases() -> list[Case]:
    """Draws the box of runs. The faults that are shown, and the checkpoint that reads them. Raises RunError."""
    folder = provenance.chosen(FILE, example="agent/record.json")
    told = examples.load("hints", folder)
    run = None if folder == examples.FOLDER else folder.parent
    checkpoint = stamps(checkpoints(run, None)[-1])
    agent = known(*checkpoint)
    try:
        found = [case_of(agent, checkpoint[1], told, number) for number in range(len(told["rollouts"]))]
    except ValueError as error:
        raise examples.unreadable(folder / FILE, error) from None
    if not found:
        raise RunError(f"the agent broke no rule in {told['played']} rollouts, so there is nothing to hint at; choose another run")
    return found


def asked(some: list[Case]) -> tuple[Case, str, str, bool]:
    """Draws the controls. The fault, what the teacher is told, the divergence, and whether positions are shifted."""
    one, two = st.columns([2, 3])
    names = [f"{number}, {case.rule}: {case.says.removeprefix('error: ')}" for number, case in enumerate(some, 1)]
    begins = next((number for number, case in enumerate(some) if case.rule == BEGINS), 0)
    with one:
        case = some[names.index(st.selectbox("Fault, by rule", names, begins, key="fault", bind="query-params"))]
        kind = st.radio("Divergence", KINDS, key="divergence", bind="query-params", horizontal=True, help="; ".join(SAYS.values()))
    with two:
        told = st.radio("What the teacher is told", TOLD, key="told", bind="query-params", horizontal=True)
        own = st.text_input("Your words", case.says, LONGEST, key="words", bind="query-params") if told == OWN else ""
        shift = not st.toggle("Trap: forget that the hint shifts positions", key="unshifted", bind="query-params")
    return case, words_of(case, told, own), kind, shift


def draw() -> None:
    some = cases()
    case, words, kind, shift = asked(some)
    found = read(case, words, shift)
    st.html(rollouts.STYLE + hint_tokens.STYLE)
    if not shift:
        st.warning("The teacher is read at the student's positions. What it says there is about other tokens, and the divergence means nothing.")
    for name, run in given_away(case, words).items():
        st.warning(f"This hint leaks: it shares `{rollouts.named(run)}` with {name}. In training it is not given.")
    facts(found, kind)
    left, right = st.columns([2, 3])
    with left:
        st.subheader("What was said")
        st.html(hint_tokens.context(case, words))
        st.caption(f"The rollout {'solved' if case.success else 'did not solve'} its task; a right body is `{case.answer}`.")
    with right:
        st.subheader("The message, token by token")
        st.html(hint_tokens.readings(found, kind))
        st.caption("Point at a token, or tap it: what both sides say of it.")
        charts(found, kind)
    token(found, kind)
    st.subheader("Who predicts whom")
    chart(
        hint_tokens.positions(case, words),
        "hint-positions",
        [
            {"token": place, "student": s, "teacher": t}
            for place, (s, t) in enumerate(zip(found.where.student.tolist(), found.where.teacher.tolist()), 1)
        ],
        "Both sequences by position. The hint moves the message to the right, and an arc leads from the position that predicts its first token. Who "
        "reads the teacher where the student is asks another token.",
        wide=True,
    )
    everyone(some, kind)


def facts(found: Read, kind: str) -> None:
    """A message in four figures."""
    apart = [word.apart[kind] for word in found.words]
    whole, times = math.fsum(apart), math.exp(found.likelier)
    metrics(
        ("Divergence of the message", f"{whole:.3f} nats", f"{SAYS[kind]}. The sum over its tokens."),
        ("On one token", f"{max(apart) / whole:.0%}" if whole else "–", "Share of the token that the hint changes most."),
        ("Likelihood under the hint", f"{times:.3g}×", "How many times as likely as without it. Below 1 the hint speaks against the message."),
        ("Positions that shift", str(len(found.where.tokens) - 1 - int(found.where.student[-1])), "Tokens of the hint."),
    )


def ranked(found: Read, kind: str) -> list[int]:
    """The tokens of the message by number, from 0 on, those first that the hint changes most."""
    return sorted(range(len(found.words)), key=lambda place: -found.words[place].apart[kind])


def charts(found: Read, kind: str) -> None:
    """The message token by token, in two charts. A click shows both distributions of a token."""
    rows, most = hint_tokens.rows(found), len(found.words)

    def gone(row: Mapping) -> None:
        if most > 1 and "place" in row:
            st.session_state[f"rank-{most}"] = ranked(found, kind).index(row["place"] - 1) + 1

    says = "Probability of each token of the message, without the hint and under it. A click shows what else was likely there, below."
    picked(hint_tokens.probabilities(found), "hint-tokens", rows, says, then=gone)
    picked(hint_tokens.apart(found, kind), "hint-apart", rows, f"{SAYS[kind]}, nats.", then=gone)


def token(found: Read, kind: str) -> None:
    """Both distributions of one token, at first of that which the hint changes most, and all tokens in the order of what it changes."""
    most, order = len(found.words), ranked(found, kind)
    left, right = st.columns([2, 3])
    with left:
        st.subheader("One token, on both sides")
        said = "1 is the token that the hint changes most; the table has their order."
        rank = st.slider("Rank by what the hint changes", 1, most, 1, key=f"rank-{most}", bind="query-params", help=said) if most > 1 else 1
        place = order[rank - 1]
        word = found.words[place]
        says = f"Token {place + 1} of {most}, {word.apart[kind]:.3f} nats apart: what it was, and what else was likely on a side."
        chart(hint_tokens.distributions(word), "hint-token", hint_tokens.both(word), says)
    with right:
        st.subheader("What the hint changes most")
        rows = [{key: value for key, value in row.items() if key not in KINDS or key == kind} for row in hint_tokens.rows(found)]
        table([rows[place] for place in order], "hint-most")


def everyone(some: list[Case], kind: str) -> None:
    """All faults, with their hints and the control."""
    if not st.toggle("All faults, with their hints and with those of other rollouts", key="every-fault", bind="query-params"):
        return
    rows = []
    for number, case in enumerate(some, 1):
        row = {"fault": number, "rule": case.rule, "hint": case.says}
        for told in (ITS, OTHER):
            one = read(case, words_of(case, told, ""))
            row |= {f"nats, {told}": math.fsum(word.apart[kind] for word in one.words), f"likelihood, {told}": math.exp(one.likelier)}
        rows.append(row)
    right = sum(row[f"likelihood, {ITS}"] < row[f"likelihood, {OTHER}"] for row in rows)
    st.markdown(
        f"Of {len(rows)} messages {right} are less likely under their own hint than under that of another rollout. Where that is about half of "
        "them, the agent does not read what a hint says: it was never taught to (`sims/hinted.py` does that)."
    )
    table(rows, "hint-faults")


PAGE = Page(
    name="textual-feedback",
    title="Textual feedback",
    says="A rollout went wrong in one message. A hint is put in front of it, and the agent reads its own words twice: as it wrote them, and knowing "
    "better. Under the hint it is its own teacher. Here a small agent does so while you look; the rules that find "
    f"faults are {', '.join(rule.name for rule in RULES)}.",
    formula=r"\begin{gathered} L = \frac{1}{\text{budget}}\sum_{t \in \text{message}} D(\pi_t,\; \pi^{\text{hint}}_t) \\"
    r"\pi_t = \pi(\cdot \mid c,\, y_{<t}) \\ \pi^{\text{hint}}_t = \pi(\cdot \mid c,\, \text{hint},\, y_{<t})\end{gathered}",
    question="Does the hint change all tokens of the message a little, or few of them much? Which?",
    look="A few tokens carry most of the divergence: those where the agent decides what to do. Then exchange the hint for that of another "
    "rollout, and for the answer.",
    draw=draw,
    code=(textual_feedback.hinted, textual_feedback.predictions, textual_feedback.divergence, textual_feedback.leaked),
    technique="textual-feedback",
)
