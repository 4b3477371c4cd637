"""Watched rollouts in figures and in a picture; as text on a page they are HTML of `etude/play/html.py`, which has no
need of Streamlit."""

from collections.abc import Sequence
from itertools import accumulate

from etude.explorer.drawing import Axis, Drawing, Look, drawing, points, rule
from etude.play.html import EDGES, END, STYLE, box, chance, describe_token, legend, named, render_rollout, spanned
from etude.play.tokens import NUM_ALTERNATIVES, Watched

__all__ = [
    "EDGES",
    "END",
    "STYLE",
    "box",
    "chance",
    "legend",
    "named",
    "picture",
    "rows",
    "render_rollout",
    "spanned",
    "describe_token",
]


def rows(rollouts: Sequence[Watched]) -> list[dict]:
    """Every token in figures."""
    return [
        {"agent": rollout.name, "turn": turn, "token": named(token.text), "probability": token.probability}
        | {f"other {n}": f"{named(text)} {p:.4f}" for n, (text, p) in enumerate(token.alternatives, 1)}
        for rollout in rollouts
        for turn, tokens in enumerate(rollout.turns, 1)
        for token in tokens
    ]


def picture(rollouts: Sequence[Watched]) -> Drawing:
    """How likely each token was, in the order in which they were written; lines part the turns of the last rollout."""
    marks = [row | {"place": place} for rollout in rollouts for place, row in enumerate(rows([rollout]), 1)]
    ends = accumulate(len(turn) for turn in rollouts[-1].turns[:-1])
    looks = [Look("orange", mark="s"), Look("blue")][-len(rollouts) :]
    return drawing(
        "token",
        Axis("probability", lower=-0.03, upper=1.06),
        *(rule(x=end + 0.5, look=Look("grey", ":")) for end in ends),
        points(
            marks,
            "place",
            "probability",
            "agent",
            tell=("token", "turn", *(f"other {n}" for n in range(1, NUM_ALTERNATIVES + 1))),
        ),
        looks={rollout.name: look for rollout, look in zip(rollouts, looks)},
        height=240,
    )
