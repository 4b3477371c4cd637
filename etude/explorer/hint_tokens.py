"""A message under a hint as HTML and pictures: the context with the hint, both readings token by token, one token's distributions, and positions."""

import html
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch

from environments.sandbox.visible import visible
from etude.explorer.hinting import NAMED, Case, Outcome, Read, Word, encoded
from etude.explorer.page import COLOURS, axes, png
from etude.explorer.rollouts import EDGES, END, box, chance, named
from etude.played import split
from sims.recipe.agent import Language, parted

__all__ = ["STYLE", "context", "distributions", "legend", "positions", "probabilities", "readings", "rows"]

SIDES: dict[str, Callable[[Outcome], float]] = {"student": lambda one: one.student, "teacher": lambda one: one.teacher}
STUDENT, TEACHER, APART = "blue", "orange", "purple"
STYLE = f"""<style>
.said.fault {{outline: 2px solid {COLOURS["red"]}; outline-offset: 1px}}
.said.hint {{border-left-style: dashed !important; background: rgba(204,121,167,.12)}}
.said .token .two {{display: grid; grid-template-columns: auto auto; gap: 0 1.2rem}}
.both {{display: grid; grid-template-columns: minmax(4.5rem, max-content) 1fr; gap: .25rem .7rem; align-items: center; font-size: .85rem}}
.both .name {{font-family: 'Source Code Pro', monospace; overflow-wrap: anywhere}}
.both .bar {{display: flex; align-items: center; gap: .4rem; line-height: 1.25}}
.both .bar i {{display: block; height: .7rem; min-width: 1px; border-radius: 2px}}
</style>"""
MOST = 6
"""Tokens of the message in the drawing of positions, and at most so many in front of its hint."""


def context(case: Case, words: str) -> str:
    """What was said, as HTML: the message with the fault has a frame, and its hint stands in front of it."""
    language, parts = case.agent.language, []
    for where, own in parted(case.segment, language.env):
        ids = list(case.tokens[where])
        if not own:
            given = (language.decode([one for one in part if one != language.env]) for part in split(ids, language.agent))
            parts += [box(html.escape(visible(text)), EDGES["environment"], "environment") for text in given if text]
            continue
        ended = ids[-1] == language.env
        text = html.escape(visible(language.decode(ids[:-1] if ended else ids))) + END * ended
        if where.start != case.begin:
            parts.append(box(text, EDGES["agent"], "agent"))
            continue
        if words:
            parts.append(marked(box(html.escape(visible(words)), "purple", "hint, which the teacher alone reads"), "hint"))
        parts.append(marked(box(text, EDGES["agent"], f"agent, and its fault: {case.rule}"), "fault"))
    return "".join(parts)


def marked(piece: str, name: str) -> str:
    """A box of one more class."""
    return piece.replace('class="said"', f'class="said {name}"', 1)


def readings(found: Read, kind: str) -> str:
    """The message three times as HTML: as the student reads it, as the teacher does, and how far they are apart. A token tells of both sides."""
    most = max(word.apart[kind] for word in found.words)
    sides = (
        ("student: the less likely, the stronger the colour", STUDENT, [1 - word.written.student for word in found.words]),
        ("teacher, under the hint: the same", TEACHER, [1 - word.written.teacher for word in found.words]),
        ("divergence: the more the hint changes, the stronger the colour", APART, [word.apart[kind] / most if most else 0.0 for word in found.words]),
    )
    return "".join(
        box("".join(spanned(word, kind, colour, one) for word, one in zip(found.words, strengths, strict=True)), colour, who)
        for who, colour, strengths in sides
    )


def spanned(word: Word, kind: str, colour: str, strength: float) -> str:
    """A token with a background of this strength, in [0, 1], and what both sides say of it."""
    red, green, blue = (int(COLOURS[colour][i : i + 2], 16) for i in (1, 3, 5))
    text = END if word.written.text is None else html.escape(visible(word.written.text)).replace("\n", "↵\n") or "∅"
    look = f"background:rgba({red},{green},{blue},{0.05 + 0.6 * strength:.2f})"
    columns = "".join(f"<span>{html.escape(side)}</span>" for side in told(word))
    head = html.escape(f"{named(word.written.text)}: {word.apart[kind]:.3f} nats apart")
    return f'<span class="token" style="{look}" tabindex="-1">{text}<span class="more">{head}<span class="two">{columns}</span></span></span>'


def told(word: Word) -> Iterator[str]:
    """What the student says of a token, and what the teacher does: its probability and what else is likely there."""
    for name, side in SIDES.items():
        others = sorted(word.others, key=side, reverse=True)[:NAMED]
        yield "\n".join(
            [name, f"{chance(side(word.written))} {named(word.written.text)}", "else:", *(f"{chance(side(o))} {named(o.text)}" for o in others)]
        )


def distributions(word: Word) -> str:
    """One token's alternatives on both sides, as bars."""
    return f'<div class="both">{bars(word.written, " <small>(written)</small>")}{"".join(map(bars, word.others))}</div>'


def bars(outcome: Outcome, more: str = "") -> str:
    """One outcome: its name and two bars."""
    both = "".join(
        f'<div class="bar"><i style="width:{78 * p:.2f}%;background:{COLOURS[colour]}"></i>{html.escape(chance(p))}</div>'
        for p, colour in ((outcome.student, STUDENT), (outcome.teacher, TEACHER))
    )
    return f'<span class="name">{html.escape(named(outcome.text))}{more}</span><div>{both}</div>'


def legend() -> str:
    """What the colours of both sides mean."""
    look = "border-left:.8rem solid {};padding:0 .8rem 0 .4rem"
    sides = {STUDENT: "student, without the hint", TEACHER: "teacher, under the hint"}
    spans = "".join(f'<span style="{look.format(COLOURS[colour])}">{who}</span>' for colour, who in sides.items())
    return f'<div style="font-size:.85rem">{spans}</div>'


def rows(found: Read) -> list[dict]:
    """Every token in figures, in order."""
    return [
        {"place": place, "token": named(word.written.text), "student": word.written.student, "teacher": word.written.teacher}
        | word.apart
        | {f"{name}'s likeliest": named(max((word.written, *word.others), key=side).text) for name, side in SIDES.items()}
        for place, word in enumerate(found.words, 1)
    ]


def probabilities(found: Read, kind: str) -> bytes:
    """Probability of every token on both sides, and below how far they are apart."""
    return drawn(tuple((tick(one.written.text), one.written.student, one.written.teacher, one.apart[kind]) for one in found.words), kind)


def tick(text: str | None) -> str:
    """A token's name below a picture, where a dollar would begin a formula."""
    return (END if text is None else named(text) or "∅").replace("$", r"\$")


@lru_cache(64)
def drawn(columns: tuple[tuple[str, float, float, float], ...], kind: str) -> bytes:
    names, student, teacher, apart = zip(*columns, strict=True)
    fig = Figure(figsize=(7.0, 4.2))
    above, below = fig.add_axes((0.1, 0.5, 0.885, 0.42)), fig.add_axes((0.1, 0.17, 0.885, 0.26))
    places = range(1, len(names) + 1)
    above.vlines(places, student, teacher, color=COLOURS["grey"], linewidth=1)
    above.plot(places, student, "o", color=COLOURS[STUDENT], markersize=6, label="student")
    above.plot(places, teacher, "s", color=COLOURS[TEACHER], markersize=5, label="teacher, under the hint")
    above.set(ylabel="probability", ylim=(-0.04, 1.04), xticks=[])
    above.legend(frameon=False, fontsize=8, ncols=2, loc="lower left", bbox_to_anchor=(0, 1.0))
    below.bar(places, apart, 0.6, color=COLOURS[APART])
    below.set_ylabel(f"{kind}, nats")
    below.set_xticks(places, names, rotation=60 if len(names) > 8 else 0, ha="right" if len(names) > 8 else "center", fontsize=8)
    for one in (above, below):
        one.spines[["top", "right"]].set_visible(False)
        one.set_xlim(0.4, len(names) + 0.6)
    below.locator_params(axis="y", nbins=4)
    return png(fig)


def positions(case: Case, words: str) -> bytes:
    """Both sequences around the hint, and which position predicts the message's first token in each."""
    hint, language = encoded(case, words), case.agent.language
    begin, front = case.begin, max(0, case.begin - 1 - MOST // 2)
    spelt = [tick(spoken(language, one)) for one in case.tokens[front : min(case.end, begin + MOST)]]
    return placed(tuple(spelt), begin - 1 - front, tuple(tick(spoken(language, one)) for one in hint), front)


def spoken(language: Language, one: int) -> str:
    """A token by itself; those that hand the word over have short names."""
    return {language.env: "env", language.agent: "agent"}.get(one) or language.decode([one])


@lru_cache(64)
def placed(words: Sequence[str], at: int, hint: Sequence[str], first: int) -> bytes:
    """`words` from position `first` on; the hint stands in front of number `at`, and the message begins one later."""
    fig, ax = axes("position", "", 9.2, 3.0, fixed=True)
    ax.grid(False)
    teacher = [*words[:at], *hint, *words[at:]]
    for y, row, shift in ((1, words, 0), (0, teacher, len(hint))):
        for place, text in enumerate(row):
            own, told = place > at + shift, y == 0 and at <= place < at + shift
            colour = COLOURS["purple"] if told else COLOURS["green"] if own else COLOURS["grey"]
            look = {"boxstyle": "round,pad=0.25", "facecolor": f"{colour}30", "edgecolor": colour, "linestyle": "--" if told else "-"}
            ax.text(first + place, y, text[:9], ha="center", va="center", rotation=60, fontsize=9, bbox=look)
        arrow(ax, (first + at + shift, y), (first + at + shift + 1, y), COLOURS[STUDENT if y else TEACHER])
    if hint:
        ax.plot((first + at, first + at), (0.72, 0.28), ":", color=COLOURS["red"], linewidth=2)
        ax.text(first + at + 0.15, 0.5, "trap: the same position", color=COLOURS["red"], fontsize=8, va="center")
    ax.set(ylim=(-0.45, 1.7), xlim=(first - 0.7, first + len(teacher) - 0.3))
    ax.set_yticks((0, 1), ("teacher", "student"))
    ax.tick_params(axis="y", length=0)
    return png(fig)


def arrow(ax, begin: tuple[float, float], end: tuple[float, float], colour: str) -> None:
    """An arc over two boxes: who predicts whom."""
    (x, y), (to, _) = begin, end
    look = {"arrowstyle": "-|>", "mutation_scale": 14, "linewidth": 2, "color": colour, "connectionstyle": "arc3,rad=-0.9"}
    ax.add_patch(FancyArrowPatch((x, y + 0.3), (to, y + 0.3), **look))
