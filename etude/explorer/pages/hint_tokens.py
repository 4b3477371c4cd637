"""A message under a hint as HTML and drawings: the context with the hint, both readings token by token, one token's
distributions, and positions."""

import html
from collections.abc import Callable, Iterator, Sequence

from environments.sandbox.visible import visible
from etude.explorer.drawing import COLOURS, Axis, Drawing, Layer, Look, boxes, drawing, points, ranges, words
from etude.explorer.pages.hinting import NAMED, Case, Outcome, Read, Word, encoded
from etude.explorer.pages.rollouts import EDGES, END, box, chance, named
from etude.play.rollout import split
from recipe.small.agent import Language, parted

__all__ = [
    "STYLE",
    "draw_divergences",
    "make_outcome_rows",
    "context",
    "distributions",
    "placed",
    "positions",
    "probabilities",
    "readings",
    "rows",
]

SIDES: dict[str, Callable[[Outcome], float]] = {
    "student": lambda outcome: outcome.student,
    "teacher": lambda outcome: outcome.teacher,
}
STUDENT, TEACHER, DIVERGENCE = "blue", "orange", "purple"
SIDE = {"student": STUDENT, "teacher": TEACHER}
NAMES = {"student": "student", "teacher": "teacher, under the hint"}
LOOKS = {"student": Look(STUDENT), "teacher, under the hint": Look(TEACHER, mark="s")}
TRAP = "trap: the same position"
STYLE = f"""<style>
.said.fault {{outline: 2px solid {COLOURS["red"]}; outline-offset: 1px}}
.said.hint {{border-left-style: dashed !important; background: rgba(204,121,167,.12)}}
.said .token .two {{display: grid; grid-template-columns: auto auto; gap: 0 1.2rem}}
</style>"""
MAX_SHOWN_TOKENS = 6
"""Tokens of the message in the drawing of positions, and at most so many in front of its hint."""


def context(case: Case, words: str) -> str:
    """What was said, as HTML: the message with the fault has a frame, and its hint stands in front of it."""
    language, parts = case.agent.language, []
    for span, is_own in parted(case.segment, language.env):
        ids = list(case.tokens[span])
        if not is_own:
            environment_texts = (
                language.decode([token for token in part if token != language.env])
                for part in split(ids, language.agent)
            )
            parts += [
                box(html.escape(visible(text)), EDGES["environment"], "environment")
                for text in environment_texts
                if text
            ]
            continue
        has_end = ids[-1] == language.env
        text = html.escape(visible(language.decode(ids[:-1] if has_end else ids))) + END * has_end
        if span.start != case.begin:
            parts.append(box(text, EDGES["agent"], "agent"))
            continue
        if words:
            parts.append(add_class(box(html.escape(visible(words)), "purple", "hint, for the teacher only"), "hint"))
        parts.append(add_class(box(text, EDGES["agent"], f"agent, with a fault: {case.rule}"), "fault"))
    return "".join(parts)


def add_class(piece: str, name: str) -> str:
    """A box of one more class."""
    return piece.replace('class="said"', f'class="said {name}"', 1)


def readings(reading: Read, kind: str) -> str:
    """The message three times as HTML: as the student reads it, as the teacher does, and how far they are apart. A
    token tells of both sides."""
    max_divergence = max(word.divergences[kind] for word in reading.words)
    sides = (
        ("student (stronger colour: less likely)", STUDENT, [1 - word.outcome.student for word in reading.words]),
        (
            "teacher, under the hint (stronger colour: less likely)",
            TEACHER,
            [1 - word.outcome.teacher for word in reading.words],
        ),
        (
            "divergence (stronger colour: larger)",
            DIVERGENCE,
            [word.divergences[kind] / max_divergence if max_divergence else 0.0 for word in reading.words],
        ),
    )
    return "".join(
        box(
            "".join(
                render_token(word, kind, colour, strength)
                for word, strength in zip(reading.words, strengths, strict=True)
            ),
            colour,
            label,
        )
        for label, colour, strengths in sides
    )


def render_token(word: Word, kind: str, colour: str, strength: float) -> str:
    """A token with a background of this strength, in [0, 1], and what both sides say of it."""
    red, green, blue = (int(COLOURS[colour][i : i + 2], 16) for i in (1, 3, 5))
    text = END if word.outcome.text is None else html.escape(visible(word.outcome.text)).replace("\n", "↵\n") or "∅"
    style = f"background:rgba({red},{green},{blue},{0.05 + 0.6 * strength:.2f})"
    columns = "".join(f"<span>{html.escape(side)}</span>" for side in describe_sides(word))
    head = html.escape(f"{named(word.outcome.text)}: {word.divergences[kind]:.3f} nats apart")
    return (
        f'<span class="token" style="{style}" tabindex="-1">{text}<span class="more">{head}<span '
        f'class="two">{columns}</span></span></span>'
    )


def describe_sides(word: Word) -> Iterator[str]:
    """What the student says of a token, and what the teacher does: its probability and what else is likely there."""
    for name, side in SIDES.items():
        likeliest = sorted(word.alternatives, key=side, reverse=True)[:NAMED]
        yield "\n".join(
            [
                name,
                f"{chance(side(word.outcome))} {named(word.outcome.text)}",
                "else:",
                *(f"{chance(side(o))} {named(o.text)}" for o in likeliest),
            ]
        )


def rows(reading: Read) -> list[dict]:
    """Every token in figures, in order."""
    return [
        {
            "place": place,
            "token": named(word.outcome.text),
            "student": word.outcome.student,
            "teacher": word.outcome.teacher,
        }
        | word.divergences
        | {
            f"{name}'s likeliest": named(max((word.outcome, *word.alternatives), key=side).text)
            for name, side in SIDES.items()
        }
        for place, word in enumerate(reading.words, 1)
    ]


def make_token_axis(reading: Read) -> Axis:
    """The tokens of the message, side by side."""
    return Axis(
        "",
        lower=0.4,
        upper=len(reading.words) + 0.6,
        ticks={place: format_token(word.outcome.text) for place, word in enumerate(reading.words, 1)},
    )


def format_token(text: str | None) -> str:
    """A token's name below a picture."""
    return END if text is None else named(text) or "∅"


def probabilities(reading: Read) -> Drawing:
    """Probability of every token on both sides."""
    token_rows = rows(reading)
    marks = [row | {"side": name, "probability": row[side]} for side, name in NAMES.items() for row in token_rows]
    return drawing(
        make_token_axis(reading),
        Axis("probability", lower=-0.04, upper=1.04),
        ranges(token_rows, "place", "student", "teacher"),
        points(marks, "place", "probability", "side", tell=("token",)),
        looks=LOOKS,
        height=260,
    )


def draw_divergences(reading: Read, kind: str) -> Drawing:
    """How far both sides are apart at every token."""
    bar_rows = [row | {"left": row["place"] - 0.3, "right": row["place"] + 0.3, "low": 0.0} for row in rows(reading)]
    bars = boxes(bar_rows, "left", "right", "low", kind, tell=("token", "place", kind), look=Look(DIVERGENCE))
    return drawing(make_token_axis(reading), f"{kind}, nats", bars, height=190)


def make_outcome_rows(word: Word) -> list[dict]:
    """What a token may be, the written one first, and how likely that is on each side."""
    return [
        {
            "token": format_token(outcome.text) + " (written)" * (outcome is word.outcome),
            "student": outcome.student,
            "teacher": outcome.teacher,
        }
        for outcome in (word.outcome, *word.alternatives)
    ]


def distributions(word: Word) -> Drawing:
    """One token's alternatives on both sides: two bars each, with their probabilities behind them."""
    outcome_rows = make_outcome_rows(word)
    bars = [
        row | {"side": name, "low": low - place, "high": low + 0.36 - place, "left": 0.0, "right": row[side]}
        for (side, name), low in zip(NAMES.items(), (0.02, -0.38), strict=True)
        for place, row in enumerate(outcome_rows)
    ]
    labels = [
        row | {"says": chance(row["right"]), "behind": row["right"] + 0.1, "middle": row["low"] + 0.18} for row in bars
    ]
    return drawing(
        Axis("probability", lower=0, upper=1.2),
        Axis(
            "",
            lower=0.5 - len(outcome_rows),
            upper=0.5,
            ticks={-place: row["token"] for place, row in enumerate(outcome_rows)},
        ),
        boxes(bars, "left", "right", "low", "high", "side", tell=("token", "student", "teacher")),
        words(labels, "behind", "middle", "says", tell=("side", "token")),
        looks=LOOKS,
        height=50 + 42 * len(outcome_rows),
    )


def positions(case: Case, hint_text: str) -> Drawing:
    """Both sequences around the hint, and which position predicts the message's first token in each."""
    hint, language = encoded(case, hint_text), case.agent.language
    begin, first = case.begin, max(0, case.begin - 1 - MAX_SHOWN_TOKENS // 2)
    context_tokens = [
        format_context_token(language, token) for token in case.tokens[first : min(case.end, begin + MAX_SHOWN_TOKENS)]
    ]
    return placed(context_tokens, begin - 1 - first, [format_context_token(language, token) for token in hint], first)


def format_context_token(language: Language, token: int) -> str:
    """A token by itself; those that hand the word over have short names."""
    return {language.env: "env", language.agent: "agent"}.get(token) or format_token(language.decode([token]))


def placed(context_tokens: Sequence[str], at: int, hint: Sequence[str], first: int) -> Drawing:
    """`context_tokens`: tokens from position `first` on. The hint stands in front of number `at`, and the message
    begins one later."""
    tokens, arcs, heads = list[dict](), list[dict](), list[Layer]()
    for height, side, row, shift in (
        (1, "student", context_tokens, 0),
        (0, "teacher", [*context_tokens[:at], *hint, *context_tokens[at:]], len(hint)),
    ):
        for place, text in enumerate(row):
            owner = (
                "message" if place > at + shift else "hint" if not height and at <= place < at + shift else "before it"
            )
            x, y = first + place, float(height)
            edges = {"left": x - 0.45, "right": x + 0.45, "low": y - 0.3, "high": y + 0.3}
            tokens.append(
                {
                    "who": side,
                    "position": x,
                    "token": text,
                    "short": text[:9],
                    "whose": owner,
                    "y": y,
                    "shade": 0.25,
                    **edges,
                }
            )
        last = first + at + shift
        arc_facts = {"predicts": f"{side}: position {last} predicts {last + 1}", "who": side}
        bend = [(n / 8, 0.32 + 1.2 * n / 8 * (1 - n / 8)) for n in range(9)]
        arcs += [arc_facts | {"x": last + along, "y": height + up} for along, up in bend]
        heads.append(
            Layer(
                "point",
                [arcs[-1] | {"y": height + 0.36}],
                "x",
                "y",
                tell=("predicts",),
                look=Look(SIDE[side], mark="v"),
                size=90,
            )
        )
    lines = [
        Layer("line", [row for row in arcs if row["who"] == side], "x", "y", tell=("predicts",), look=Look(SIDE[side]))
        for side in SIDE
    ]
    trap = [{"x": first + at, "y": y, "trap": TRAP} for y in (0.7, 0.3)] if hint else []
    total = len(context_tokens) + len(hint)
    return drawing(
        Axis("position", lower=first - 0.7, upper=first + total - 0.3, integer=True),
        Axis("", lower=-0.45, upper=1.75, ticks={0: "teacher", 1: "student"}),
        boxes(tokens, "left", "right", "low", "high", "whose", tell=("token", "who", "position"), shade="shade"),
        words(tokens, "position", "y", "short", tell=("token", "who", "position"), angle=300),
        Layer("line", trap, "x", "y", tell=("trap",), look=Look("red", ":")),
        words(
            [row | {"x": first + at + 0.11 * total, "y": 0.5} for row in trap[:1]], "x", "y", "trap", look=Look("red")
        ),
        *lines,
        *heads,
        looks={"before it": Look("grey"), "hint": Look("purple"), "message": Look("green")},
        height=300,
    )
