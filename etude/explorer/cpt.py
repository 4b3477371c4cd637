"""Continued pretraining: what a run learnt, the schedule over its phases, a packed row, and what the loss is worth to RL."""

import html
from pathlib import Path

import streamlit as st
import torch

from etude.explorer import examples, provenance
from etude.explorer.charts import Axis, Look, chart, drawing, lines, points, powers
from etude.explorer.files import stamp
from etude.explorer.page import COLOURS, Page, folded
from etude.explorer.pretraining import AFTER, PHASES, RECORD, UNITS, coder, looks, losses, packed, read, schedule, scored, trainings
from etude.explorer.spans import exact, metrics, tint
from ref import cpt

LENGTHS = (32, 64, 128, 256)
COLOURED = ("blue", "orange", "green", "purple", "sky")
"""Documents of a row in turn."""
PHASE_LOOKS = {"short context": Look("blue", "-"), "long context": Look("green", "--"), "demonstrations": Look("orange", ":")}
LOSSES = {"loss after SFT": "sft_loss", "loss on the held-out codebase": "codebase_loss"}


def said(unit: str, value: float) -> str:
    return f"{value:.1f}" if unit == UNITS[0] else f"{value:.3f}"


def draw() -> None:
    folder = provenance.chosen()
    root = examples.FOLDER / "recipe" if folder == examples.FOLDER else folder.parent
    run_section(root)
    schedule_section()
    row_section(root)
    reward_section()


def run_section(root: Path) -> None:
    """Loss and held-out perplexity along the chosen run."""
    st.subheader("What the run learnt")
    unit = st.radio("Unit of the held-out codebase", UNITS, key="unit", bind="query-params", horizontal=True)
    lines_ = read(root)
    learnt, seen = losses(lines_), looks(lines_)
    if seen:
        first, last = seen[0], seen[-1]
        metrics(
            ("Held-out codebase, first look", said(unit, first[unit]), f"{unit}, after {first['tokens']:,} tokens."),
            ("at the end of pretraining", said(unit, last[unit]), f"{unit}, after {last['tokens']:,} tokens."),
            ("Bytes in a token", f"{last['bits a token'] / last['bits a byte']:.2f}", "Of the held-out codebase, with this run's tokenizer."),
        )
    left, right = st.columns(2)
    with left:
        chart(
            drawing("tokens read", Axis("nats a token", zero=False), lines(learnt, "tokens", "nats a token", "phase"), looks=PHASE_LOOKS),
            "cpt-loss",
            learnt,
            "Training loss. Each phase has its own data, so a jump between phases is normal.",
        )
    with right:
        chart(
            drawing(
                "tokens read",
                Axis(unit, log=unit == UNITS[0] and powers(look[unit] for look in seen), zero=False),
                lines(seen, "tokens", unit),
                points(seen, "tokens", unit, tell=UNITS),
            ),
            "cpt-codebase",
            seen,
            "Looks at a codebase that was never trained on. Only bits a byte can be compared between tokenizers.",
        )


def schedule_section() -> None:
    st.subheader("The learning rate over the phases")
    places, given = st.columns(len(PHASES)), {}
    for place, (phase, steps) in zip(places, {"cpt": 254, "long": 75, "sft": 280}.items(), strict=True):
        given[phase] = place.slider(f"Steps, {PHASES[phase]}", 10, 400, steps, key=f"steps-{phase}", bind="query-params")
    rows = schedule(given)
    chart(
        drawing("optimiser step", "factor of the rate", lines(rows, "step", "factor", "phase"), looks=PHASE_LOOKS, height=220),
        "cpt-schedule",
        rows,
        "Warm-up and a level part that needs no known end; the long phase warms up once more and decays to its end. SFT has a schedule of its own.",
    )


def pieces(words: list[str], doc: list[int], right: list[bool], taken: list[bool]) -> str:
    """A row as HTML, token by token. `right`: what the loss should score; `taken`: what it does."""
    found = []
    for at, (word, number) in enumerate(zip(words, doc, strict=True)):
        shown = html.escape(word).replace("\n", "↵\n") if number >= 0 else "·"
        before = html.escape(repr(words[at - 1])) if at else ""
        if taken[at]:
            title = f"{html.escape(repr(word))} is predicted from {before} and what is before it"
            title += "" if right[at] else ", which belongs to another document" if number >= 0 else ", but it is padding"
        else:
            title = "padding: not scored" if number < 0 else "first of its document: not scored"
        look = tint(COLOURED[number % len(COLOURED)], 0.22) if number >= 0 else f"color:{COLOURS['grey']}"
        if taken[at] and not right[at]:
            look += f";text-decoration:underline wavy {COLOURS['red']}"
        elif not taken[at] and number >= 0:
            look += f";outline:1px dashed {COLOURS['grey']}"
        found.append(f'<span title="{title}" style="{look};margin-right:1px">{shown}</span>')
    look = "font-family:'Source Code Pro',monospace;font-size:.8rem;line-height:1.8;white-space:pre-wrap;overflow-wrap:anywhere"
    return f'<div class="row" style="{look}">{"".join(found)}</div>'


def row_section(root: Path) -> None:
    st.subheader("A packed row")
    one, two, three, four = st.columns([3, 2, 2, 3], vertical_alignment="bottom")
    length = one.select_slider("Row, tokens of context", LENGTHS, 128, key="context", bind="query-params")
    number = two.slider("Row", 1, 20, 2, key="packed-row", bind="query-params", help="The last one, if there are fewer.")
    seed = three.slider("Seed of the modules", 0, 20, 0, key="modules", bind="query-params")
    trap = four.toggle("Trap: no document numbers", key="undivided", bind="query-params")
    own = root / "data" / "tokenizer.json"
    key = stamp(own if own.is_file() else examples.FOLDER / "agent" / "tokenizer.json")
    all_ids, all_doc = packed(key, length, seed)
    at = min(number, len(all_ids)) - 1
    ids, doc = (torch.from_numpy(part[at : at + 1]).long() for part in (all_ids, all_doc))
    right, taken = scored(ids, doc), scored(ids, None if trap else doc)
    metrics(
        ("Documents", int(doc.max()) + 1, "In this row; none is cut unless it is longer than a row."),
        ("Tokens scored", f"{int(taken.sum())} of {length}", "The first of a document is nobody's to predict."),
        ("Scored from strangers, or padding", exact(int((taken & ~right).sum()), "{}"), "Predicted from another document's end, or empty."),
        ("Padding in all rows", f"{(all_doc < 0).mean():.1%}", f"Of {len(all_ids)} rows."),
    )
    coded = coder(*key)
    words = [coded.decode([token], skip_special_tokens=False) for token in ids[0].tolist()]
    st.html(pieces(words, doc[0].tolist(), right[0].tolist(), taken[0].tolist()))
    st.caption(
        "A colour is a document, · is padding; point at a token: from what is it predicted? Framed ones are not scored. The network needs the "
        "numbers, too, so that attention stays inside a document: see the page of sequence packing."
    )


def reward_section() -> None:
    """The figure: what a lower loss is worth to RL."""
    st.subheader("What the loss is worth to RL")
    st.caption(f"Shown: {provenance.recorded(provenance.newest(RECORD))}")
    one, two = st.columns(2)
    loss = one.radio("Loss", LOSSES, key="of-loss", bind="query-params", horizontal=True)
    after = two.radio("Against", AFTER, key="after", bind="query-params", horizontal=True)
    rows, claims = trainings()
    column, name = AFTER[after]
    shown = [
        {loss: row[LOSSES[loss]], after: row[column], "pretraining": f"{row['budget']:,} tokens", "tokens": row["tokens"], "seed": row["seed"]}
        for row in rows
    ]
    chart(
        drawing(Axis(f"{loss}, nats a token"), Axis(after, zero=False), points(shown, loss, after, "pretraining", tell=("tokens", "seed"))),
        "cpt-reward",
        shown,
        f"{len(rows)} trainings, each with the same SFT and the same steps of RL after its own pretraining.",
    )
    claim = claims.get(name or "")
    if claim and loss == next(iter(LOSSES)):
        low, high = claim["interval"]
        st.markdown(f"The claim: {claim['claim']}. {claim['measured']:.2f} {claim['unit']} [{low:.2f}, {high:.2f}], **{claim['verdict']}**.")
    folded(shown, "cpt-trainings", "The trainings as a table")


PAGE = Page(
    name="cpt",
    title="Continued pretraining",
    says="A model reads code, most of it in short contexts, the rest in long ones. See what it learnt of a codebase that it never read, in which "
    "unit, and what that is worth to RL.",
    formula=r"\begin{gathered} L = -\sum_{b,t} w_{b,t} \log p(x_{b,t} \mid d_{b,t}) \\ d_{b,t}:\ \text{its own document before it} \\"
    r"\text{perplexity} = e^{\mathrm{NLL}/\text{tokens}} \\ \text{bits per byte} = \frac{\mathrm{NLL}}{\text{bytes}\cdot\ln 2}\end{gathered}",
    question="Does a lower loss after SFT go with more success after RL? And which tokens of a packed row has nobody to predict?",
    look="On the whole, a lower loss after SFT goes with more success after RL. The first token of a document is never scored, and without document "
    "numbers it is.",
    draw=draw,
    code=(cpt.wsd, cpt.pack, cpt.next_token_loss, cpt.CodebaseNLL),
    technique="cpt",
)
