"""A rollout on the terminal: turn by turn, coloured by who speaks, then what changed, the tests and the verdict.

`lines` is the one rendering: of a piece while it is said, of a whole rollout, and of each of two that stand side by
side. Where no terminal listens, the same lines come without colours, one below the other, and none is broken.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from environments.sandbox.visible import visible
from etude.play.rollout import Piece, RolloutView, wrong

__all__ = ["LABEL", "lines", "outcome", "render_piece", "show"]

STYLES = {"environment": "cyan", "agent": "green", "summary": "magenta", "context": "dim"}
"""Who speaks → the colour of the words."""
LABEL = 13
"""Characters in front of a line."""
SIDE_BY_SIDE_COLUMNS = 100
"""Columns of a terminal on which two rollouts stand side by side."""


def make_line(label: str, text: str, style: str) -> Text:
    """A line of the rendering. A model may write anything: what a terminal would obey is spelled out."""
    return Text.assemble((f"{label:{LABEL}}", "bold"), (visible(text), style))


def render_piece(piece: Piece) -> Iterator[Text]:
    """The lines of a piece; the first one says whose they are."""
    label = "" if piece.role == "context" else piece.role
    for number, text in enumerate(piece.text.split("\n")):
        yield make_line("" if number else label, f"· {text}" if piece.role == "context" else text, STYLES[piece.role])


def outcome(rollout: RolloutView) -> Iterator[Text]:
    """What changed, which tests pass, and the verdict."""
    for number, text in enumerate(rollout.diff or ("nothing",)):
        yield make_line("" if number else "changed", text, {"+": "green", "-": "red"}.get(text[0], ""))
    for number, (name, tests) in enumerate(rollout.tests.items()):
        first = wrong(tests)
        passed = f"{name}: passed {tests.count(None)} of {len(tests)}" + (f": {first}" if first else "")
        yield make_line("" if number else "tests", passed, "red" if first else "green")
    reward = rollout.reward
    style = "bold green" if rollout.success else "bold red"
    yield make_line(
        "verdict",
        ("solved" if rollout.success else "not solved") + ("" if reward.finished else ", and not ended by itself"),
        style,
    )
    yield make_line(
        "",
        f"{format_count(reward.turns, 'turn')}, {format_count(reward.calls, 'call')}, "
        f"{reward.invalid_calls} of them invalid",
        "",
    )
    yield make_line(
        "", f"{format_count(rollout.own_tokens, 'token')} written, in {format_count(rollout.contexts, 'context')}", ""
    )
    if not rollout.success:
        yield make_line("", f"a right body: {rollout.solution}", "dim")


def format_count(number: int, noun: str) -> str:
    """A number of things."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def lines(rollout: RolloutView) -> Iterator[Text]:
    """A whole rollout."""
    yield Text(visible(rollout.policy_name), "bold underline")
    for piece in rollout.pieces:
        yield from render_piece(piece)
    yield from outcome(rollout)


def show(rollouts: Sequence[RolloutView], console: Console | None = None) -> None:
    """Prints rollouts: side by side on a wide terminal, else one below the other."""
    console = console or Console()
    if len(rollouts) > 1 and console.is_terminal and console.width >= SIDE_BY_SIDE_COLUMNS:
        table = Table.grid(padding=(0, 2), expand=True)
        for _ in rollouts:
            table.add_column(ratio=1, overflow="fold")
        table.add_row(*(Group(*lines(rollout)) for rollout in rollouts))
        console.print(table)
        return
    for number, rollout in enumerate(rollouts):
        if number:
            console.print()
        for text in lines(rollout):
            console.print(text, soft_wrap=True, highlight=False)
