"""Continued pretraining: losses of a run, the learning-rate schedule, a packed row, and loss against success."""

import html
from pathlib import Path

import streamlit as st
import torch

from etude.explorer import examples, provenance
from etude.explorer.charts.chart import Axis, Look, chart, drawing, lines, points, powers
from etude.explorer.files import stamp
from etude.explorer.page import COLOURS, Page
from etude.explorer.pages.pretraining import (
    AFTER,
    PHASES,
    RECORD,
    UNITS,
    coder,
    looks,
    losses,
    packed,
    read,
    schedule,
    scored,
    trainings,
)
from etude.explorer.spans import exact, metrics, tint
from ref import cpt

LENGTHS = (32, 64, 128, 256)
DOCUMENT_COLOURS = ("blue", "orange", "green", "purple", "sky")
"""Documents of a row in turn."""
PHASE_LOOKS = {
    "short context": Look("blue", "-"),
    "long context": Look("green", "--"),
    "demonstrations": Look("orange", ":"),
}
LOSSES = {"loss after SFT": "sft_loss", "loss on the held-out codebase": "codebase_loss"}


def format_value(unit: str, value: float) -> str:
    return f"{value:.1f}" if unit == UNITS[0] else f"{value:.3f}"


def draw() -> None:
    folder = provenance.choose_examples()
    root = examples.FOLDER / "recipe" if folder == examples.FOLDER else folder.parent
    show_run(root)
    show_schedule()
    show_packed_row(root)
    show_reward()


def show_run(root: Path) -> None:
    """Loss and held-out perplexity along the chosen run."""
    st.subheader("Loss and perplexity of the run")
    unit = st.radio("Unit of the held-out codebase", UNITS, key="unit", bind="query-params", horizontal=True)
    metric_lines = read(root)
    loss_rows, codebase_rows = losses(metric_lines), looks(metric_lines)
    if codebase_rows:
        first, last = codebase_rows[0], codebase_rows[-1]
        metrics(
            (
                "Held-out codebase, first look",
                format_value(unit, first[unit]),
                f"{unit}, after {first['tokens']:,} tokens.",
            ),
            ("at the end of pretraining", format_value(unit, last[unit]), f"{unit}, after {last['tokens']:,} tokens."),
            (
                "Bytes in a token",
                f"{last['bits a token'] / last['bits a byte']:.2f}",
                "Of the held-out codebase, with this run's tokenizer.",
            ),
        )
    left, right = st.columns(2)
    with left:
        chart(
            drawing(
                "tokens read",
                Axis("nats a token", zero=False),
                lines(loss_rows, "tokens", "nats a token", "phase"),
                looks=PHASE_LOOKS,
            ),
            "cpt-loss",
            loss_rows,
            "Training loss. Each phase has its own data, so a jump between phases is normal.",
        )
    with right:
        chart(
            drawing(
                "tokens read",
                Axis(unit, log=unit == UNITS[0] and powers(look[unit] for look in codebase_rows), zero=False),
                lines(codebase_rows, "tokens", unit),
                points(codebase_rows, "tokens", unit, tell=UNITS),
            ),
            "cpt-codebase",
            codebase_rows,
            "Measurements on a codebase that is not in the training data. Only bits a byte can be compared between "
            "tokenizers.",
        )


def show_schedule() -> None:
    st.subheader("The learning rate over the phases")
    columns, step_counts = st.columns(len(PHASES)), {}
    for column, (phase, steps) in zip(columns, {"cpt": 254, "long": 75, "sft": 280}.items(), strict=True):
        step_counts[phase] = column.slider(
            f"Steps, {PHASES[phase]}", 10, 400, steps, key=f"steps-{phase}", bind="query-params"
        )
    rows = schedule(step_counts)
    chart(
        drawing(
            "optimiser step",
            "factor of the rate",
            lines(rows, "step", "factor", "phase"),
            looks=PHASE_LOOKS,
            height=220,
        ),
        "cpt-schedule",
        rows,
        "Warm-up and a constant part of any length; the long phase warms up once more and decays to its end. SFT has "
        "its own schedule.",
    )


def render_row(words: list[str], doc: list[int], correct_mask: list[bool], scored_mask: list[bool]) -> str:
    """A row as HTML, token by token. `correct_mask`: what the loss should score; `scored_mask`: what it does."""
    token_spans = []
    for index, (word, number) in enumerate(zip(words, doc, strict=True)):
        token_html = html.escape(word).replace("\n", "↵\n") if number >= 0 else "·"
        previous_word = html.escape(repr(words[index - 1])) if index else ""
        if scored_mask[index]:
            title = f"{html.escape(repr(word))} is predicted from {previous_word} and the tokens before it"
            title += (
                ""
                if correct_mask[index]
                else ", which belongs to another document"
                if number >= 0
                else ", but it is padding"
            )
        else:
            title = "padding: not scored" if number < 0 else "first of its document: not scored"
        style = (
            tint(DOCUMENT_COLOURS[number % len(DOCUMENT_COLOURS)], 0.22) if number >= 0 else f"color:{COLOURS['grey']}"
        )
        if scored_mask[index] and not correct_mask[index]:
            style += f";text-decoration:underline wavy {COLOURS['red']}"
        elif not scored_mask[index] and number >= 0:
            style += f";outline:1px dashed {COLOURS['grey']}"
        token_spans.append(f'<span title="{title}" style="{style};margin-right:1px">{token_html}</span>')
    style = (
        "font-family:'Source Code "
        "Pro',monospace;font-size:.8rem;line-height:1.8;white-space:pre-wrap;overflow-wrap:anywhere"
    )
    return f'<div class="row" style="{style}">{"".join(token_spans)}</div>'


def show_packed_row(root: Path) -> None:
    st.subheader("A packed row")
    col1, col2, col3, col4 = st.columns([3, 2, 2, 3], vertical_alignment="bottom")
    length = col1.select_slider("Row, tokens of context", LENGTHS, 128, key="context", bind="query-params")
    number = col2.slider(
        "Row", 1, 20, 2, key="packed-row", bind="query-params", help="The last one, if there are fewer."
    )
    seed = col3.slider("Seed of the modules", 0, 20, 0, key="modules", bind="query-params")
    trap = col4.toggle("Trap: no document numbers", key="undivided", bind="query-params")
    run_tokenizer = root / "data" / "tokenizer.json"
    key = stamp(run_tokenizer if run_tokenizer.is_file() else examples.FOLDER / "agent" / "tokenizer.json")
    all_ids, all_doc = packed(key, length, seed)
    index = min(number, len(all_ids)) - 1
    ids, doc = (torch.from_numpy(part[index : index + 1]).long() for part in (all_ids, all_doc))
    correct_mask, scored_mask = scored(ids, doc), scored(ids, None if trap else doc)
    metrics(
        ("Documents", int(doc.max()) + 1, "In this row; none is cut unless it is longer than a row."),
        (
            "Tokens scored",
            f"{int(scored_mask.sum())} of {length}",
            "The first token of a document has no context and is not scored.",
        ),
        (
            "Scored from another document, or padding",
            exact(int((scored_mask & ~correct_mask).sum()), "{}"),
            "Tokens predicted from the end of another document, and scored padding.",
        ),
        ("Padding in all rows", f"{(all_doc < 0).mean():.1%}", f"Of {len(all_ids)} rows."),
    )
    tokenizer = coder(*key)
    words = [tokenizer.decode([token], skip_special_tokens=False) for token in ids[0].tolist()]
    st.html(render_row(words, doc[0].tolist(), correct_mask[0].tolist(), scored_mask[0].tolist()))
    st.caption(
        "Each colour is a document, · is padding. Hovering over a token shows the token from which it is predicted. "
        "Framed tokens are not scored. The network needs the document numbers, too, so that attention stays inside a "
        "document: see the page “Sequence packing”."
    )


def show_reward() -> None:
    """The chart of the loss against success."""
    st.subheader("Loss after pretraining and success after RL")
    st.caption(f"Shown: {provenance.recorded(provenance.newest(RECORD))}")
    col1, col2 = st.columns(2)
    loss = col1.radio("Loss", LOSSES, key="of-loss", bind="query-params", horizontal=True)
    after = col2.radio("Against", AFTER, key="after", bind="query-params", horizontal=True)
    rows, claims = trainings()
    column, name = AFTER[after]
    training_rows = [
        {
            loss: row[LOSSES[loss]],
            after: row[column],
            "pretraining": f"{row['budget']:,} tokens",
            "tokens": row["tokens"],
            "seed": row["seed"],
        }
        for row in rows
    ]
    chart(
        drawing(
            Axis(f"{loss}, nats a token"),
            Axis(after, zero=False),
            points(training_rows, loss, after, "pretraining", tell=("tokens", "seed")),
        ),
        "cpt-reward",
        training_rows,
        f"{len(rows)} trainings, each with the same SFT and the same steps of RL after its own pretraining.",
    )
    claim = claims.get(name or "")
    if claim and loss == next(iter(LOSSES)):
        low, high = claim["interval"]
        st.markdown(
            f"The claim: {claim['claim']}. {claim['measured']:.2f} {claim['unit']} [{low:.2f}, "
            f"{high:.2f}], **{claim['verdict']}**."
        )


PAGE = Page(
    name="cpt",
    title="Continued pretraining",
    says="A model is trained on code, most of it in short contexts, the rest in long ones. The page shows the loss on "
    "a held-out codebase in several units, and how the loss relates to success after RL.",
    formula=r"\begin{gathered} L = -\sum_{b,t} w_{b,t} \log p(x_{b,t} \mid d_{b,t}) \\"
    r"\text{perplexity} = \exp(\mathrm{NLL}/n_{\mathrm{tokens}}) \qquad"
    r"\text{bits per byte} = \frac{\mathrm{NLL}}{n_{\mathrm{bytes}}\cdot\ln 2}\end{gathered}",
    symbols={
        "L": "loss of a step, divided by its number of scored tokens",
        "x_{b,t}": "token t of row b",
        "w_{b,t}": "its weight: 0 for padding and for the first token of a document, otherwise 1",
        "d_{b,t}": "the tokens before it in its own document",
        "p": "the model's probability",
        r"\mathrm{NLL}": "negative log-likelihood of the held-out codebase, in nats, summed over its tokens",
        r"n_{\mathrm{tokens}},\ n_{\mathrm{bytes}}": "its length in tokens and in bytes",
    },
    question="Does a lower loss after SFT go with more success after RL? And which tokens of a packed row must not be "
    "scored?",
    look="On the whole, a lower loss after SFT goes with more success after RL. The first token of a document must "
    "not be scored; without document numbers it is.",
    draw=draw,
    code=(cpt.wsd, cpt.pack, cpt.next_token_loss, cpt.CodebaseNLL),
    technique="cpt",
)
