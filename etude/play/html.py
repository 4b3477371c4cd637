"""A rollout of the small world as HTML: who said what, each token that the agent wrote with its probability, what
changed, tests and verdict.

The explorer shows it, and so does the report, which has no scripts. Words and their order are those of the terminal
(`etude/play/terminal.py`). The less likely a token was, the stronger is its colour. Who points at one, or taps it,
reads how likely it was and what else was."""

import html
from collections.abc import Iterator

from environments.sandbox.visible import visible
from etude.play.rollout import Piece, RolloutView
from etude.play.terminal import LABEL, outcome
from etude.play.tokens import Token, Watched
from kit.plots import BY_NAME as COLOURS

__all__ = [
    "EDGES",
    "END",
    "STYLE",
    "box",
    "chance",
    "legend",
    "named",
    "plain",
    "render_rollout",
    "spanned",
    "describe_token",
]

AGENT_ROLES = ("agent", "summary")
EDGES = {"environment": "sky", "agent": "green", "summary": "purple", "context": "grey"}
"""Who speaks → the colour of the edge, as on a terminal."""
OUTCOME_COLOURS = {"green": "green", "red": "red", "bold green": "green", "bold red": "red"}
"""A style of the terminal → a colour here."""
END = "▪"
"""Stands for the token that ends a turn."""
STYLE = f"""<style>
.said {{position: relative; border-left: 4px solid; padding: .1rem .6rem; margin: .25rem 0; \
white-space: pre-wrap; overflow-wrap: anywhere;
  font-family: 'Source Code Pro', monospace; font-size: .85rem; line-height: 1.7}}
.said:hover, .said:focus-within {{z-index: 9}}
.said .who {{display: block; font-family: sans-serif; font-size: .75rem; opacity: .75; line-height: 1.3}}
.said .token {{border-radius: 3px; cursor: help}}
.said .token.kept {{box-shadow: inset 0 -.16em {COLOURS["green"]}}}
.said .token.refused {{box-shadow: inset 0 -.16em {COLOURS["red"]}}}
.said .token.rare {{border-bottom: 2px dotted {COLOURS["orange"]}}}
.said .more {{display: none; position: absolute; left: .6rem; top: 100%; z-index: 1; \
max-width: 100%; padding: .35rem .6rem; border-radius: 6px;
  background: #20252b; color: #f5f6f7; font-size: .8rem; line-height: 1.5; white-space: pre-line; pointer-events: none}}
.said .token:hover .more, .said .token:focus .more {{display: block}}
.said .token:hover, .said .token:focus {{outline: 2px solid {COLOURS["blue"]}}}
</style>"""


def render_rollout(watched: Watched, max_messages: int) -> str:
    """A rollout as HTML, up to the agent's message `max_messages`, a turn or a summary; behind the last one what came
    of it."""
    parts = [*render_pieces(watched, max_messages)]
    if max_messages >= len(watched.turns):
        parts.append(("".join(render_outcome(watched.view)), "grey", ""))
    return f'<div class="rollout">{"".join(box(*part) for part in parts)}</div>'


def render_pieces(watched: Watched, max_messages: int) -> Iterator[tuple[str, str, str]]:
    """The pieces in order, each with a colour and with who said it; what the agent wrote is its tokens."""
    messages, message_count, turns = iter(watched.turns), 0, 0
    for piece in watched.view.pieces:
        if piece.role in AGENT_ROLES:
            if message_count == max_messages:
                return
            message_count, turns = message_count + 1, turns + (piece.role == "agent")
            # a summary is no turn, and the verdict does not count it
            speaker = f"agent, turn {turns}" if piece.role == "agent" else piece.role
            yield "".join(map(spanned, next(messages))), EDGES[piece.role], speaker
        else:
            yield render_context_piece(piece), EDGES[piece.role], "" if piece.role == "context" else piece.role


def box(inner: str, colour: str, speaker: str) -> str:
    """Something that was said, with an edge in the colour of who said it."""
    label = f'<span class="who">{html.escape(speaker)}</span>' if speaker else ""
    return f'<div class="said" style="border-color:{COLOURS[colour]}">{label}{inner}</div>'


def render_context_piece(piece: Piece) -> str:
    """What was given to the agent."""
    return plain(piece.text) if piece.role != "context" else f"<em>{plain(piece.text)}</em>"


def plain(text: str) -> str:
    """Text that stays text: neither a page nor a terminal obeys it."""
    return html.escape(visible(text))


def spanned(token: Token) -> str:
    """A token; the less likely it was, the stronger is its colour."""
    red, green, blue = (int(COLOURS["orange"][i : i + 2], 16) for i in (1, 3, 5))
    text = END if token.text is None else plain(token.text).replace("\n", "↵\n")
    draft_class = "" if token.draft is None else " kept" if token.draft else " refused"
    classes = "token" + " rare" * (token.probability < 0.5) + draft_class
    style = f"background:rgba({red},{green},{blue},{0.06 + 0.5 * (1 - token.probability):.2f})"
    return (
        f'<span class="{classes}" style="{style}" tabindex="-1">{text}<span '
        f'class="more">{html.escape(describe_token(token))}</span></span>'
    )


def describe_token(token: Token) -> str:
    """A token's probability, and what else was likely."""
    alternatives = [f"{chance(p)} {named(text)}" for text, p in token.alternatives]
    drafts = (
        []
        if token.draft is None
        else [f"kept: a draft of layer {token.draft}" if token.draft else "a draft was refused here"]
    )
    return "\n".join([f"{chance(token.probability)} {named(token.text)}", "else:", *alternatives, *drafts])


def chance(probability: float) -> str:
    """A probability in percent."""
    return "< 0.1%" if probability < 0.001 else f"{probability:.1%}"


def named(text: str | None) -> str:
    """A token by itself: spaces and line breaks can be seen."""
    return "end of the turn" if text is None else visible(text).replace(" ", "␣").replace("\n", "↵")


def render_outcome(rollout: RolloutView) -> Iterator[str]:
    """What changed, tests and verdict, in the words of the terminal."""
    for line in outcome(rollout):
        label, text = line.plain[:LABEL].strip(), line.plain[LABEL:]
        style = next((str(span.style) for span in line.spans if span.start >= LABEL), "")
        strong = "font-weight:700;" if style.startswith("bold") else ""
        colour = f"border-bottom:2px solid {COLOURS[OUTCOME_COLOURS[style]]}" if style in OUTCOME_COLOURS else ""
        heading = f'<span class="who">{label}</span>' if label else ""
        yield f'<div>{heading}<span style="{strong}{colour}">{html.escape(text)}</span></div>'


def legend(drafts: bool = False) -> str:
    """What the colours mean, those of drafts too if they are shown."""
    look = "border-left:4px solid {};padding:0 .8rem 0 .4rem"
    edges = "".join(
        f'<span style="{look.format(COLOURS[colour])}">{role}</span>'
        for role, colour in EDGES.items()
        if role != "context"
    )
    words = (
        "The less likely a token was, the stronger is its colour; one with dots below it had less than "
        "50%. Point at a token, or tap it."
    )
    if drafts:
        words += " Green below: a kept draft. Red below: the network's own token, in place of a refused draft."
    return f'<div style="font-size:.85rem">{edges}{words}</div>'
