"""Writes the board, results/challenges.json: python -m lessons.challenges [NUMBER …]"""

from typing import Annotated

import typer

from kit.settings import RunError
from lessons.challenges.board import write


def main(
    numbers: Annotated[list[int] | None, typer.Argument(help="Challenges to measure anew.", show_default="all")] = None,
) -> None:
    """Score the starting file and the baselines of each challenge, and write the record."""
    try:
        print(write(numbers or []))
    except RunError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    typer.run(main)
