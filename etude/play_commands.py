"""The command `etude play`: words in, one call into a room."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import Annotated

import typer

from etude import meant
from etude.given import decimal, whole
from kit import settings

__all__ = ["play"]


def play(
    where: Annotated[
        Path | None,
        typer.Argument(
            help="A run, or a checkpoint's folder.",
            metavar="RUN|CHECKPOINT",
            show_default="the clone's agent",
            readable=False,
            callback=meant.a_run,
        ),
    ] = None,
    task: Annotated[
        int | None,
        typer.Option(
            "--task", help="Number of a held-out task of the evaluation.", show_default="a new one", **whole(0, 9999)
        ),
    ] = None,
    new: Annotated[bool, typer.Option("--new", help="Draw a new held-out task, as without --task.")] = False,
    before: Annotated[
        str | None,
        typer.Option(
            help="Beside it an earlier checkpoint of the run, such as sft, or any other's folder.",
            show_default="none",
            metavar="CHECKPOINT",
        ),
    ] = None,
    greedy: Annotated[bool, typer.Option("--greedy", help="Take the likeliest token each time.")] = False,
    temperature: Annotated[
        float | None, typer.Option(help="Of the sampling; 0 is greedy.", show_default="the recipe's", **decimal())
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            help="Of the sampling, and of a new task.", show_default="0 with --task, else random", **whole(0, 2**53)
        ),
    ] = None,
    me: Annotated[bool, typer.Option("--me", help="You play, on standard input; an empty line ends a turn.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="A line of JSON for each rollout.")] = False,
) -> None:
    """Watch an agent solve a task, turn by turn: calls, answers, what changed, tests and verdict; or solve it
    yourself."""
    if greedy and temperature is not None:
        raise settings.RunError("--greedy is temperature 0; leave out one of --greedy and --temperature")
    if temperature is not None and not 0 <= temperature < math.inf:
        raise settings.RunError(f"--temperature must be finite and not negative, got {temperature}")
    heat = 0.0 if greedy else temperature
    importlib.import_module("etude.play").watch(where, task, new, before, heat, seed, me, as_json)
