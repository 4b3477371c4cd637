"""The command `etude play`."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import Annotated

import typer

from etude.cli import suggestions
from etude.console.options import decimal, integer_option
from kit import settings

__all__ = ["play"]


def task_number(text: str) -> int:
    """The number of a task of the small world. Raises BadParameter as other options with a number."""
    try:
        return integer_option(0, 9999)["parser"](text)
    except typer.BadParameter as error:
        raise typer.BadParameter(error.message, param_hint="'--task'") from None


def play(
    run_or_checkpoint: Annotated[
        Path | None,
        typer.Argument(
            help="A run, or a checkpoint's folder.",
            metavar="RUN|CHECKPOINT",
            show_default="the bundled checkpoint",
            readable=False,
            callback=suggestions.a_run,
        ),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            "--task",
            help="Number of a held-out task of the evaluation; for a run on packages, a task's name or its beginning.",
            show_default="a new task",
            metavar="NUMBER|NAME",
        ),
    ] = None,
    new: Annotated[
        bool, typer.Option("--new", help="Generate a new held-out task; the default without --task.")
    ] = False,
    before: Annotated[
        str | None,
        typer.Option(
            help="Also show this earlier checkpoint: its name in the run, such as sft, or its folder.",
            show_default="none",
            metavar="CHECKPOINT",
        ),
    ] = None,
    greedy: Annotated[bool, typer.Option("--greedy", help="Decode greedily, as with --temperature 0.")] = False,
    temperature: Annotated[
        float | None, typer.Option(help="Sampling temperature; 0 is greedy.", show_default="the recipe's", **decimal())
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            help="Seed of the sampling, and of a new task.",
            show_default="0 with --task, else random",
            **integer_option(0, 2**53),
        ),
    ] = None,
    me: Annotated[
        bool, typer.Option("--me", help="Solve the task yourself, on standard input; an empty line ends a turn.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON per rollout.")] = False,
) -> None:
    """Watch an agent solve a task, or solve it yourself.

    Shows each turn with its tool calls and results, then the changed function, the tests and the verdict."""
    if greedy and temperature is not None:
        raise settings.RunError("--greedy means --temperature 0; leave one of them out")
    if temperature is not None and not 0 <= temperature < math.inf:
        raise settings.RunError(f"--temperature must be finite and not negative, got {temperature}")
    heat = 0.0 if greedy else temperature
    packages = importlib.import_module("etude.play.packages")
    if run_or_checkpoint is not None and packages.find_run(run_or_checkpoint):
        if new or me:
            raise settings.RunError("--new and --me are for the small world; name a task with --task")
        packages.watch(run_or_checkpoint, task, before, heat, seed or 0, as_json)
        return
    number = None if task is None else task_number(task)
    importlib.import_module("etude.play.play").watch(run_or_checkpoint, number, new, before, heat, seed, me, as_json)
