"""A chain of contexts, piece by piece: what each one holds, what the summary kept, and how much credit every token gets."""

from collections.abc import Mapping
from pathlib import Path

import streamlit as st
import torch

from etude.explorer import examples, provenance, spans
from etude.explorer.charts import Axis, Look, drawing, lines, picked, points, rule
from etude.explorer.page import Page, table
from etude.explorer.playing import play
from kit.settings import RunError
from ref import dr_grpo, self_summary
from ref.self_summary import Chain, Segment

WRITTEN = ("turn", "summary")
"""Roles of text that the policy wrote; all other text was given to it."""
KINDS = {"prompt": "given", "answer": "given", "resume": "given"}
"""Style of a role without its own style."""


def segment(given: int, written: int, summary: int) -> Segment:
    """A context with known counts only, given tokens first; the order does not affect sums over it."""
    T = given + written
    sampled = torch.arange(T) >= given
    nothing = torch.zeros(max(T - 1, 0), 0, 1, dtype=torch.int16)
    return Segment(
        torch.zeros(T, dtype=torch.long), sampled, torch.zeros(T), torch.where(sampled, 0, -1), nothing, True, summary=torch.arange(T) >= T - summary
    )


def chain_of(contexts: list[list[int]], saved: int = 0) -> Chain:
    """A chain from the [given, written, summary] token counts of its contexts."""
    return Chain([segment(*counts) for counts in contexts], finished=True, saved=saved)


def counted(pieces: list[dict]) -> list[int]:
    """[given, written, summary] token counts of some pieces of a context; summary tokens also count as written."""
    sizes = [(piece["role"], len(piece["tokens"])) for piece in pieces]
    return [
        sum(n for role, n in sizes if role not in WRITTEN),
        sum(n for role, n in sizes if role in WRITTEN),
        sum(n for role, n in sizes if role == "summary"),
    ]


@examples.remembered("chain.json", most=8)
def group_rows(number: int, folder: Path | None = None) -> list[dict]:
    """One row per rollout of the chain's group: its reward, its advantage, and its advantage under the common mistake."""
    group = examples.load("chain", folder)["chains"][number]["group"]
    rewards = torch.tensor([[one["reward"] for one in group]], dtype=torch.float64)
    chains = [chain_of(one["contexts"]) for one in group]
    advantages = dr_grpo.group_advantages(rewards)[0]
    over_rows = dr_grpo.group_advantages(self_summary.spread(rewards[0], chains)[None])[0]
    rows, at = [], 0
    for place, (one, chain, advantage) in enumerate(zip(group, chains, advantages.tolist(), strict=True)):
        n = len(chain.segments)
        credit = self_summary.spread(advantages, chains)[at : at + n]
        rows.append(
            {
                "rollout": place + 1,
                "success": one["success"],
                "contexts": n,
                "reward": one["reward"],
                "advantage": advantage,
                "credit of each token": ", ".join(f"{c:+.3f}" for c in credit.tolist()),
                "the trap": over_rows[at].item(),
                "tokens written": chain.written,
                **{part: one[part] for part in ("tests", "effort", "invalid", "kl")},
            }
        )
        at += n
    return rows


def sizes(contexts: list[list[dict]]) -> list[dict]:
    """One row per piece of the chain: context, role, tokens, and how full the context is after it."""
    rows = []
    for number, pieces in enumerate(contexts, 1):
        held = 0
        for piece in pieces:
            held += len(piece["tokens"])
            rows.append({"piece": len(rows) + 1, "context": number, "role": piece["role"], "tokens": len(piece["tokens"]), "in the context": held})
    return rows


def picture(rows: list[dict], at: int, trigger: int, key: str) -> None:
    """How full the context is, piece by piece. `key`: of the slider that a click moves."""
    some = [row | {"what": row["role"] if row["role"] in WRITTEN else "given"} for row in rows]

    def gone(row: Mapping) -> None:
        if "piece" in row:
            st.session_state[key] = row["piece"]

    picked(
        drawing(
            Axis("piece of the chain", least=0.5, most=len(rows) + 0.5),
            "tokens in the context",
            lines(some, "piece", "in the context", split="context", tell=("context", "role", "tokens"), look=Look("grey")),
            points(some, "piece", "in the context", "what", tell=("context", "role", "tokens")),
            rule(f"trigger, {trigger}", y=trigger, look=Look("red", ":")),
            rule(x=at),
            looks={"given": Look("grey", mark="o"), "turn": Look("blue", mark="s"), "summary": Look("green", mark="D")},
        ),
        "self-summary",
        rows,
        "How full the context is after each piece of the chain; the upright line marks the current piece. A click goes to another one.",
        wide=True,
        then=gone,
    )


def text(contexts: list[list[dict]], at: int, colouring: str, credit: float) -> None:
    """The pieces up to `at`, under the heading of their context."""
    parts, left, kinds = [], at, []
    for number, pieces in enumerate(contexts, 1):
        if not left:
            break
        shown, left = pieces[:left], left - len(pieces[:left])
        parts.append(f'<div style="font-weight:600;margin:.6rem 0 .2rem">Context {number}: {sum(map(sum, (counted(shown)[:2],)))} tokens</div>')
        for piece in shown:
            role: str = piece["role"]
            mine = role in WRITTEN
            kind = KINDS.get(role, role)
            if colouring == "credit":
                kind = "given" if not mine or credit == 0 else "paid" if credit > 0 else "blamed"
            kinds.append(kind)
            told = f"{role}: {len(piece['tokens'])} tokens" + (f", each credited with {credit:+.3f}" if mine else ", given, no credit")
            parts.append(spans.line(role, spans.spans(piece["tokens"], kind, told)))
    spans.write(parts, dict.fromkeys(kinds))


def fates(notes: list[dict]) -> None:
    """What happened to the facts of the old context."""
    for number, note in enumerate(notes, 1):
        st.markdown(
            f"**Summary {number}** says `{note['summary'] or ' '}`. The scripted agent, which knows what is needed, would have written "
            f"`{note['scripted']}`."
        )
        rows = [
            {"of": f["file"] or "the body", "the old context said": f["fact"] or "nothing", "needed": f["needed"], "in the summary": f["fate"]}
            for f in note["facts"]
        ]
        if rows:
            table(rows, f"self-summary-kept-{number}")


def upto(chain: dict, at: int, trigger: int, colouring: str, credit: float, key: str) -> None:
    """The first `at` pieces of a chain: figures, text, and how full the context is. `key`: of the slider."""
    contexts, rows = chain["contexts"], sizes(chain["contexts"])
    here, whole = rows[at - 1], chain_of([counted(pieces) for pieces in contexts], chain["saved"])
    passed = [
        counted([p for p, row in zip(pieces, (r for r in rows if r["context"] == n), strict=True) if row["piece"] <= at])
        for n, pieces in enumerate(contexts, 1)
    ]
    so_far = chain_of([counts for counts in passed if sum(counts)])
    left, right = st.columns([1, 2])
    with left:
        spans.metrics(
            ("Context", f"{here['context']} of {len(contexts)}", None),
            ("Tokens in it", here["in the context"], f"A summary is requested at {trigger}."),
            ("Prefill", so_far.prefill, f"Given tokens that the engine has processed so far; {whole.prefill} in the complete chain."),
            ("Written", so_far.written, f"So far; {whole.written} in the complete chain, including {whole.summary_tokens} of summary."),
            ("Saved", whole.saved, "Extra prefill that compaction in a separate call would have needed, over the complete chain."),
            ("Credit", f"{credit:+.3f}", "The rollout's full advantage, on every token that the policy wrote."),
        )
    with right:
        text(contexts, at, colouring, credit)
    picture(rows, at, trigger, key)


def draw() -> None:
    folder = provenance.chosen("chain.json")
    found = examples.load("chain", folder)
    chains = found["chains"]
    if not chains:
        raise RunError(
            "no rollout in example chain.json needed a second context; write it from a run with a smaller context.trigger: " + examples.again(folder)
        )
    left, right = st.columns([1, 2])
    with left:
        names = [f"{i}, {'success' if chain['success'] else 'failure'}" for i, chain in enumerate(chains, 1)]
        number = names.index(st.selectbox("Chain", names, key="chain", bind="query-params"))
        chain = chains[number]
        st.caption(f"`{chain['task']}`")
    with right:
        colouring = st.radio("Colour", ("role", "credit"), key="colour", bind="query-params", horizontal=True)
    group, pieces = group_rows(number, folder=folder), sum(map(len, chain["contexts"]))
    credit, key = group[chain["place"]]["advantage"], f"piece-{number + 1}"
    said = "Prompts, turns, tool outputs, requests and summaries, in order."
    play("Piece", key, range(1, pieces + 1), pieces, lambda at: upto(chain, at, found["trigger"], colouring, credit, key), help=said)
    st.subheader("What was kept and lost")
    st.markdown(
        "A fact is kept if the summary states it as the scripted agent would; changed if the summary describes the file in "
        "other words, right or wrong; invented if no context had shown the file."
    )
    fates(chain["notes"])
    st.subheader("Where the credit comes from")
    st.markdown(
        "Each rollout gets one reward, the group mean is the baseline, and every context inherits the full result. The column next to it "
        "shows a mistake: with contexts as rows of the baseline, a rollout would count more the more often it ran out of context."
    )
    table(group, "self-summary-group")


PAGE = Page(
    name="summary",
    title="Self-summary",
    says="A rollout that outgrows its context continues in a new one, after a summary that the policy wrote itself. These are chains by a "
    "run's agent after RL, on tasks it never trained on.",
    formula=r"\begin{gathered} A_c = R_c - \frac1N\sum_{j} R_j \\"
    r"\mathcal L = -\frac{1}{\mathrm{budget}}\sum_c A_c \sum_{s \in c}\;\sum_{t\ \mathrm{sampled\ in}\ s} \rho_t \end{gathered}",
    question="What does the next context know of the one before it? And does a token of the summary get more credit than others, as much, or less?",
    look="The next context knows nothing but the summary, which gets the same credit as every other token that the policy wrote.",
    draw=draw,
    code=(self_summary.spread, self_summary.Chaining, self_summary.ChainBuilder),
    technique="self-summary",
)
