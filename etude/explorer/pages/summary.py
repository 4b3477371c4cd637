"""A chain of contexts, piece by piece: the content of each, the facts in its summary, and the credit of every token."""

from collections.abc import Mapping
from pathlib import Path

import streamlit as st
import torch

from etude.explorer import examples, provenance, spans
from etude.explorer.charts.chart import Axis, Look, drawing, lines, picked, points, rule
from etude.explorer.page import Page, table
from etude.explorer.playing import play
from kit.settings import RunError
from ref import dr_grpo, self_summary
from ref.self_summary import Chain, Segment

POLICY_ROLES = ("turn", "summary")
"""Roles of text that the policy wrote; all other text was given to it."""
ROLE_KINDS = {"prompt": "given", "answer": "given", "resume": "given"}
"""Style of a role without its own style."""


def make_segment(given_tokens: int, written_tokens: int, summary_tokens: int) -> Segment:
    """A context with known counts only, given tokens first; the order does not affect sums over it."""
    T = given_tokens + written_tokens
    sampled = torch.arange(T) >= given_tokens
    no_experts = torch.zeros(max(T - 1, 0), 0, 1, dtype=torch.int16)
    return Segment(
        torch.zeros(T, dtype=torch.long),
        sampled,
        torch.zeros(T),
        torch.where(sampled, 0, -1),
        no_experts,
        True,
        summary=torch.arange(T) >= T - summary_tokens,
    )


def chain_of(contexts: list[list[int]], saved: int = 0) -> Chain:
    """A chain from the [given, written, summary] token counts of its contexts."""
    return Chain([make_segment(*counts) for counts in contexts], finished=True, saved=saved)


def count_tokens(pieces: list[dict]) -> list[int]:
    """[given, written, summary] token counts of some pieces of a context; summary tokens also count as written."""
    role_sizes = [(piece["role"], len(piece["tokens"])) for piece in pieces]
    return [
        sum(n for role, n in role_sizes if role not in POLICY_ROLES),
        sum(n for role, n in role_sizes if role in POLICY_ROLES),
        sum(n for role, n in role_sizes if role == "summary"),
    ]


@examples.remembered("chain.json", max_results=8)
def group_rows(number: int, folder: Path | None = None) -> list[dict]:
    """One row per rollout of the chain's group: its reward, its advantage, and its advantage under the common
    mistake."""
    group = examples.load("chain", folder)["chains"][number]["group"]
    rewards = torch.tensor([[rollout["reward"] for rollout in group]], dtype=torch.float64)
    chains = [chain_of(rollout["contexts"]) for rollout in group]
    advantages = dr_grpo.group_advantages(rewards)[0]
    over_rows = dr_grpo.group_advantages(self_summary.spread(rewards[0], chains)[None])[0]
    rows, offset = [], 0
    for index, (rollout, chain, advantage) in enumerate(zip(group, chains, advantages.tolist(), strict=True)):
        n = len(chain.segments)
        credit = self_summary.spread(advantages, chains)[offset : offset + n]
        rows.append(
            {
                "rollout": index + 1,
                "success": rollout["success"],
                "contexts": n,
                "reward": rollout["reward"],
                "advantage": advantage,
                "credit of each token": ", ".join(f"{value:+.3f}" for value in credit.tolist()),
                "the trap": over_rows[offset].item(),
                "tokens written": chain.num_sampled_tokens,
                **{key: rollout[key] for key in ("tests", "effort", "invalid", "kl")},
            }
        )
        offset += n
    return rows


def measure_pieces(contexts: list[list[dict]]) -> list[dict]:
    """One row per piece of the chain: context, role, tokens, and how full the context is after it."""
    rows = []
    for number, pieces in enumerate(contexts, 1):
        context_tokens = 0
        for piece in pieces:
            context_tokens += len(piece["tokens"])
            rows.append(
                {
                    "piece": len(rows) + 1,
                    "context": number,
                    "role": piece["role"],
                    "tokens": len(piece["tokens"]),
                    "in the context": context_tokens,
                }
            )
    return rows


def draw_context_sizes(rows: list[dict], piece_count: int, trigger: int, key: str) -> None:
    """How full the context is, piece by piece. `key`: of the slider that a click moves."""
    point_rows = [row | {"what": row["role"] if row["role"] in POLICY_ROLES else "given"} for row in rows]

    def select_piece(row: Mapping) -> None:
        if "piece" in row:
            st.session_state[key] = row["piece"]

    picked(
        drawing(
            Axis("piece of the chain", lower=0.5, upper=len(rows) + 0.5),
            "tokens in the context",
            lines(
                point_rows,
                "piece",
                "in the context",
                split="context",
                tell=("context", "role", "tokens"),
                look=Look("grey"),
            ),
            points(point_rows, "piece", "in the context", "what", tell=("context", "role", "tokens")),
            rule(f"trigger, {trigger}", y=trigger, look=Look("red", ":")),
            rule(x=piece_count),
            looks={"given": Look("grey", mark="o"), "turn": Look("blue", mark="s"), "summary": Look("green", mark="D")},
        ),
        "self-summary",
        rows,
        "Tokens in the context after each piece of the chain; the vertical line marks the current piece. A click "
        "selects another one.",
        wide=True,
        on_click=select_piece,
    )


def draw_text(contexts: list[list[dict]], piece_count: int, colouring: str, credit: float) -> None:
    """The pieces up to `piece_count`, under the heading of their context."""
    parts, remaining, kinds = [], piece_count, []
    for number, pieces in enumerate(contexts, 1):
        if not remaining:
            break
        visible_pieces, remaining = pieces[:remaining], remaining - len(pieces[:remaining])
        parts.append(
            f'<div style="font-weight:600;margin:.6rem 0 .2rem">Context {number}: '
            f"{sum(map(sum, (count_tokens(visible_pieces)[:2],)))} tokens</div>"
        )
        for piece in visible_pieces:
            role: str = piece["role"]
            is_written = role in POLICY_ROLES
            kind = ROLE_KINDS.get(role, role)
            if colouring == "credit":
                kind = "given" if not is_written or credit == 0 else "paid" if credit > 0 else "blamed"
            kinds.append(kind)
            tooltip = f"{role}: {len(piece['tokens'])} tokens" + (
                f", each credited with {credit:+.3f}" if is_written else ", given, no credit"
            )
            parts.append(spans.line(role, spans.spans(piece["tokens"], kind, tooltip)))
    spans.write(parts, dict.fromkeys(kinds))


def draw_fates(notes: list[dict]) -> None:
    """What happened to the facts of the old context."""
    for number, note in enumerate(notes, 1):
        st.markdown(
            f"**Summary {number}**: `{note['summary'] or ' '}`. The summary of the scripted agent, which has all the "
            f"facts needed: `{note['scripted']}`."
        )
        rows = [
            {
                "of": fact["file"] or "the body",
                "the old context said": fact["fact"] or "nothing",
                "needed": fact["needed"],
                "in the summary": fact["fate"],
            }
            for fact in note["facts"]
        ]
        if rows:
            table(rows, f"self-summary-kept-{number}")


def draw_beginning(chain: dict, piece_count: int, trigger: int, colouring: str, credit: float, key: str) -> None:
    """The first `piece_count` pieces of a chain: figures, text, and how full the context is. `key`: of the slider."""
    contexts, rows = chain["contexts"], measure_pieces(chain["contexts"])
    current_row, full_chain = (
        rows[piece_count - 1],
        chain_of([count_tokens(pieces) for pieces in contexts], chain["saved"]),
    )
    visible_counts = [
        count_tokens(
            [
                piece
                for piece, row in zip(
                    pieces, (context_row for context_row in rows if context_row["context"] == number), strict=True
                )
                if row["piece"] <= piece_count
            ]
        )
        for number, pieces in enumerate(contexts, 1)
    ]
    partial_chain = chain_of([counts for counts in visible_counts if sum(counts)])
    left, right = st.columns([1, 2])
    with left:
        spans.metrics(
            ("Context", f"{current_row['context']} of {len(contexts)}", None),
            ("Tokens in it", current_row["in the context"], f"A summary is requested at {trigger}."),
            (
                "Prefill",
                partial_chain.prefill,
                f"Given tokens that the engine has processed so far; {full_chain.prefill} in the complete chain.",
            ),
            (
                "Written",
                partial_chain.num_sampled_tokens,
                f"So far; {full_chain.num_sampled_tokens} in the complete chain, including "
                f"{full_chain.summary_tokens} of summary.",
            ),
            (
                "Saved",
                full_chain.saved,
                "Extra prefill that compaction in a separate call would have needed, over the complete chain.",
            ),
            ("Credit", f"{credit:+.3f}", "The rollout's full advantage, on every token that the policy wrote."),
        )
    with right:
        draw_text(contexts, piece_count, colouring, credit)
    draw_context_sizes(rows, piece_count, trigger, key)


def draw() -> None:
    folder = provenance.choose_examples("chain.json")
    example = examples.load("chain", folder)
    chains = example["chains"]
    if not chains:
        raise RunError(
            "no rollout in example chain.json needed a second context; write it from a run with a "
            "smaller context.trigger: " + examples.format_write_command(folder)
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
    help_text = "Prompts, turns, tool outputs, requests and summaries, in order."
    play(
        "Piece",
        key,
        range(1, pieces + 1),
        pieces,
        lambda piece_count: draw_beginning(chain, piece_count, example["trigger"], colouring, credit, key),
        help=help_text,
    )
    st.subheader("Facts kept and lost")
    st.markdown(
        "A fact is kept if the summary states it in the scripted agent's words; changed if the summary describes the "
        "file in other words, right or wrong; invented if no context had shown the file."
    )
    draw_fates(chain["notes"])
    st.subheader("Credit of each rollout")
    st.markdown(
        "Each rollout has one reward, the group mean is the baseline, and every context gets the full advantage. The "
        "column “the trap” shows a mistake: with contexts as rows of the baseline, a rollout with more contexts has a "
        "larger weight."
    )
    table(group, "self-summary-group")


PAGE = Page(
    name="summary",
    title="Self-summary",
    says="A rollout that exceeds its context continues in a new one, after a summary written by the policy itself. "
    "The page shows chains by a run's agent after RL, on tasks that are not in its training data.",
    formula=r"\begin{gathered} A_c = R_c - \frac1N\sum_{j} R_j \\"
    r"L = -\frac{1}{\mathrm{budget}}\sum_c A_c \sum_{s \in c}\;\sum_{t\ \text{sampled in}\ s} \rho_t \end{gathered}",
    symbols={
        "A_c": "advantage of chain c, a rollout with all its contexts",
        "R_c": "its reward",
        "N": "chains in the group",
        "j": "a chain of the group",
        "L": "loss, without its clip",
        r"\mathrm{budget}": "constant divisor of the step",
        "s": "segment, one context of the chain",
        "t": "token",
        r"\rho_t": "probability of the token under the policy over its probability when it was sampled",
    },
    question="Which part of a context is in the next one? And does a token of the summary get more credit than "
    "others, as much, or less?",
    look="Of the context, only the summary is in the next one. Its tokens get the same credit as all other tokens "
    "that the policy wrote.",
    draw=draw,
    code=(self_summary.spread, self_summary.Chaining, self_summary.ChainBuilder),
    technique="self-summary",
)
