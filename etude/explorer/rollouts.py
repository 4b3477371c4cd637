"""Watched rollouts in figures and in a picture; as text on a page they are HTML of `etude/rendering.py`, which has no need of Streamlit."""

from collections.abc import Sequence
from functools import lru_cache

from etude.explorer.page import COLOURS, axes, png
from etude.rendering import EDGES, END, STYLE, box, chance, legend, named, shown, spanned, told
from etude.tokens import Watched

__all__ = ["EDGES", "END", "STYLE", "box", "chance", "legend", "named", "picture", "rows", "shown", "spanned", "told"]


def rows(beside: Sequence[Watched]) -> list[dict]:
    """Every token in figures."""
    return [
        {"agent": one.name, "turn": turn, "token": named(token.text), "probability": token.probability}
        | {f"other {n}": f"{named(text)} {p:.4f}" for n, (text, p) in enumerate(token.others, 1)}
        for one in beside
        for turn, tokens in enumerate(one.turns, 1)
        for token in tokens
    ]


def picture(beside: Sequence[Watched]) -> bytes:
    """How likely each token was, in the order in which they were written; lines part the turns of the last rollout."""
    return drawn(tuple((one.name, tuple(token.probability for token in one.tokens)) for one in beside), tuple(map(len, beside[-1].turns)))


@lru_cache(32)
def drawn(series: tuple[tuple[str, tuple[float, ...]], ...], turns: tuple[int, ...]) -> bytes:
    fig, ax = axes("token", "probability", 7.0, 2.6, fixed=True)
    for at in range(len(turns) - 1):
        ax.axvline(sum(turns[: at + 1]) + 0.5, color=COLOURS["grey"], linewidth=0.8, linestyle=":")
    looks = [("blue", "o"), ("orange", "s")] if len(series) == 1 else [("orange", "s"), ("blue", "o")]
    for (name, chances), (colour, mark) in zip(series, looks):
        ax.plot(range(1, len(chances) + 1), chances, mark, color=COLOURS[colour], markersize=4, label=name)
    ax.set_ylim(-0.03, 1.06)
    ax.legend(frameon=False, fontsize=8, loc="lower left")
    return png(fig)
