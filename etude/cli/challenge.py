"""The command `etude challenge`: the open problems of the course, their leaderboards, and the score of a solution."""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from etude import catalog
from etude.cli import suggestions
from etude.console.options import integer_option
from kit.settings import RunError

if TYPE_CHECKING:
    from lessons.challenges.challenge import Challenge

__all__ = ["challenge"]

FOLDER = Path("runs") / "challenges"
"""Folder for your solutions."""


def number_of(word: str | int) -> int:
    """The number of a challenge, by its number or its name. Raises BadParameter."""
    from lessons.challenges.challenge import CHALLENGES

    if numbers := [candidate.number for candidate in CHALLENGES if candidate.name == str(word).replace("_", "-")]:
        return numbers[0]
    entry = catalog.find(str(word))
    if entry is not None and entry.lesson is None:
        raise typer.BadParameter(f"{entry.name} has no lesson and no challenge; etude challenge lists them")
    try:
        return suggestions.lesson_number(word)
    except typer.BadParameter:
        hint = f"; {suggestions.what_is(str(word))}" if suggestions.what_is(str(word)) else ""
        raise typer.BadParameter(
            f"NUMBER must be the number of a challenge or the name of a technique; got {word!r}{hint}; "
            f"etude challenge lists them"
        ) from None


def challenge(
    number: Annotated[
        int | None,
        typer.Argument(
            help="Number of a challenge, or its technique; without it, list all challenges.",
            parser=number_of,
            metavar="NUMBER",
        ),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Argument(
            help="Your solution.", readable=False, metavar="FILE", show_default="runs/challenges/NN_NAME.py"
        ),
    ] = None,
    score: Annotated[bool, typer.Option("--score", help="Score FILE in a separate process.")] = False,
    seed: Annotated[
        int | None,
        typer.Option(
            help="Seed of the cases; the same seed gives the same score.",
            show_default="random",
            **integer_option(0, 2**31 - 1),
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Work on an open problem of the course, and score your solution.

    Each lesson has one. Without --score, shows the problem and writes a file to start from."""
    from lessons.challenges.challenge import CHALLENGES, find

    if number is None:
        if score or file is not None or seed is not None:
            raise RunError("name a challenge; etude challenge lists them")
        print(json.dumps([describe_challenge(entry) for entry in CHALLENGES])) if as_json else show_all(CHALLENGES)
        return
    entry = find(number)
    path = file or FOLDER / f"{entry.stem}.py"
    if score:
        score_file(entry, path, secrets.randbelow(2**31) if seed is None else seed, as_json)
        return
    if file is not None or seed is not None:
        raise RunError(f"to score a file: etude challenge {number} --score {file or ''}".rstrip())
    if as_json:
        print(json.dumps({**describe_challenge(entry), "says": entry.says}))
        return
    show_challenge(entry, path)


def score_file(entry: Challenge, path: Path, seed: int, as_json: bool) -> None:
    """Scores a file and prints the result; exit code 1 if the bar is not reached. Raises RunError for a file that
    breaks the rules."""
    from lessons.challenges.board import board, place, scored

    if path.exists() and not path.is_file():
        raise RunError(f"{path} is not a file; name the file of your solution")
    if not path.is_file():
        start = (
            f"etude challenge {entry.number} writes a file to start from"
            if path == FOLDER / f"{entry.stem}.py"
            else "check its name"
        )
        raise RunError(f"{path} does not exist; {start}")
    file_score, rows = scored(entry, path, seed), board(entry)
    passed, at = entry.passed(file_score), place(entry, file_score, rows)
    if as_json:
        fields = {
            "challenge": entry.number,
            "name": entry.name,
            "score": file_score,
            "bar": entry.bar,
            "least": entry.least,
            "passed": passed,
        }
        print(json.dumps({**fields, "place": at, "board": len(rows), "seed": seed}, allow_nan=False))
    else:
        best = f", place {at} of {len(rows) + 1} on the board" if rows else ""
        print(
            f"challenge {entry.number}: {file_score:.4g} {entry.measure}; {describe_bar(entry)}: "
            f"{'passed' if passed else 'not passed'}{best} (seed {seed})"
        )
    if not passed:
        raise typer.Exit(1)


def describe_bar(entry: Challenge) -> str:
    """The bar in words."""
    return f"at {'most' if entry.least else 'least'} {entry.bar:g} passes"


def describe_challenge(entry: Challenge) -> dict[str, Any]:
    """A challenge and its leaderboard as plain values."""
    from lessons.challenges.board import board

    rows = [
        {"solution": row.solution, "says": row.says, "score": row.score, "spread": row.spread} for row in board(entry)
    ]
    fields = {
        "number": entry.number,
        "name": entry.name,
        "title": entry.title,
        "measure": entry.measure,
        "bar": entry.bar,
        "least": entry.least,
    }
    return {**fields, "seconds": entry.seconds, "board": rows}


def show_all(challenges: tuple[Challenge, ...]) -> None:
    """A table of all challenges."""
    from rich.console import Console
    from rich.table import Table

    from lessons.challenges.board import best

    table = Table(
        "", "challenge", "technique", "score", "passes", "best here", box=None, header_style="bold", pad_edge=False
    )
    for entry in challenges:
        row = best(entry)
        table.add_row(
            str(entry.number),
            entry.title,
            entry.name,
            entry.measure,
            f"{'≤' if entry.least else '≥'} {entry.bar:g}",
            f"{row.score:.4g}" if row else "–",
        )
    Console().print(table)
    print("Show one: etude challenge NUMBER. Score your solution: etude challenge NUMBER --score")


def prepare_file(path: Path) -> bool:
    """Returns whether the file exists; if not, makes its folder. Raises RunError if neither is possible."""
    if path.is_file():
        return True
    if path.exists() or path.is_symlink():
        obstacle = "is a broken link" if not path.exists() else "is not a file"
        raise RunError(f"{path} {obstacle}; move it away, so that the starting file can be written there")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(
            f"{path.parent} cannot be created: {error.strerror or error}; move away the file in its place"
        ) from None
    return False


def show_challenge(entry: Challenge, path: Path) -> None:
    """Prints a challenge with its leaderboard; writes the starting file if it does not exist yet."""
    from rich.console import Console
    from rich.table import Table

    from lessons.challenges.board import board

    has_file = prepare_file(path)
    stop = "" if entry.title.endswith("?") else "."
    print(
        f"Challenge {entry.number}: {entry.title}{stop}\n\n{entry.says}\n\nThe bar: {describe_bar(entry)}. All calls "
        f"together may take {entry.seconds:g} seconds.\n"
    )
    table = Table("", entry.measure, "solution", "what it does", box=None, header_style="bold", pad_edge=False)
    rows = board(entry)
    for at, row in enumerate(rows, 1):
        table.add_row(str(at), f"{row.score:.4g} ± {row.spread:.2g}", row.solution, row.says)
    if rows:
        Console().print(table)
        print()
    if has_file:
        print(f"{path} already exists and is kept.")
    else:
        with open(path, "x", encoding="utf-8") as file:
            file.write(entry.start.read_text(encoding="utf-8"))
        print(f"{path}: start here.")
    print(f"Score it with: etude challenge {entry.number} --score")
