"""Tokens as text. Colour shows what each piece is; for readers who cannot see it, so do underline, strikethrough or
frame."""

import html
from collections.abc import Iterable, Sequence

import streamlit as st

from etude.explorer.page import COLOURS

__all__ = ["LOOKS", "exact", "legend", "line", "metrics", "spans", "write"]


def tint(colour: str, strength: float) -> str:
    """One of the project's colours as a transparent background; the text keeps the colour of the theme."""
    red, green, blue = (int(COLOURS[colour][i : i + 2], 16) for i in (1, 3, 5))
    return f"background:rgba({red},{green},{blue},{strength:.2f})"


LOOKS = {
    "given": ("given", "opacity:.72"),
    "turn": ("written by the agent", f"{tint('blue', 0.16)};border-bottom:2px solid {COLOURS['blue']}"),
    "request": ("request for a summary", f"opacity:.85;border-bottom:2px dotted {COLOURS['grey']}"),
    "summary": ("summary, written", f"{tint('green', 0.20)};border-bottom:4px double {COLOURS['green']}"),
    "summary, given": (
        "summary, given to the next context",
        f"{tint('green', 0.10)};border-bottom:2px dashed {COLOURS['green']}",
    ),
    "accepted": ("drafted, accepted", f"{tint('green', 0.20)};border-bottom:2px solid {COLOURS['green']}"),
    "rejected": ("drafted, rejected", f"{tint('orange', 0.28)};text-decoration:line-through 2px {COLOURS['red']}"),
    "added": ("added by the trunk", f"border:1px solid {COLOURS['blue']};border-radius:3px"),
    "paid": ("advantage above 0", f"{tint('blue', 0.22)};border-bottom:2px solid {COLOURS['blue']}"),
    "blamed": ("advantage below 0", f"{tint('orange', 0.28)};text-decoration:underline wavy {COLOURS['red']}"),
}
"""Kind of a token: what the legend calls it, and its CSS."""


def spans(tokens: Sequence[str], kind: str, title: str = "") -> str:
    """Tokens of one kind as HTML. A newline is shown as ↵ and a line break; `title` is the tooltip."""
    style, parts = LOOKS[kind][1], []
    for token in tokens:
        text = html.escape(token).replace("\n", "↵\n")
        parts.append(f'<span style="{style};margin-right:1px" title="{html.escape(title)}">{text}</span>')
    return "".join(parts)


def line(label: str, text: str) -> str:
    """A line of text next to its label, or below it on a narrow screen."""
    return (
        '<div style="display:flex;flex-wrap:wrap;column-gap:.8rem">'
        f'<span style="flex:0 0 7.5rem;opacity:.75;font-size:.8em">{html.escape(label)}</span>'
        f'<span style="flex:1 1 15rem">{text}</span></div>'
    )


def exact(value: float, form: str = "{:.3g}") -> str:
    """A figure in words; zero is said to be exact only where it is."""
    return "exactly 0" if value == 0 else form.format(value)


def metrics(*numbers: tuple[str, int | float | str, str | None]) -> None:
    """Numbers side by side, as many per line as fit: (label, value, explanation)."""
    with st.container(horizontal=True, gap="medium"):
        for label, value, explanation in numbers:
            st.metric(label, value, help=explanation, width="content")


def legend(kinds: Iterable[str]) -> str:
    """The legend, on one line."""
    return " &ensp; ".join(f'<span style="{LOOKS[kind][1]};padding:0 3px">{LOOKS[kind][0]}</span>' for kind in kinds)


def write(parts: Iterable[str], kinds: Iterable[str]) -> None:
    """A legend, and below it the parts in a monospace font."""
    body = "".join(parts)
    st.html(
        f'<div style="font-size:.85rem;margin-bottom:.4rem;line-height:1.9">{legend(kinds)}</div>'
        "<div style=\"font-family:'Source Code Pro',monospace;"
        f'font-size:.85rem;line-height:1.8;white-space:pre-wrap;overflow-wrap:anywhere">{body}</div>'
    )
