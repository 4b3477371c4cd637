"""The commands `etude eval`: words in, one call into a room."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from etude import meant

__all__ = ["eval_app"]


class OrAgent(TyperGroup):
    """Commands; where none is named, the words are those of `agent`: etude eval RUN."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        named = not args or args[0] in self.commands or args[0] == "--help"
        return super().parse_args(ctx, args if named else ["agent", *args])


eval_app = typer.Typer(cls=OrAgent, no_args_is_help=True, help="Evaluate checkpoints: `etude eval RUN` is `etude eval agent RUN`.")


@eval_app.command("agent")
def eval_agent(
    where: Annotated[Path, typer.Argument(help="A run, or a checkpoint's folder.", metavar="RUN|CHECKPOINT", readable=False, callback=meant.a_run)],
    before: Annotated[
        str | None,
        typer.Option(
            help="Beside it an earlier checkpoint of the run, such as sft, or any other's folder.", show_default="none", metavar="CHECKPOINT"
        ),
    ] = None,
    tasks: Annotated[int, typer.Option(help="Held-out tasks.", min=1, max=10_000)] = 100,
    samples: Annotated[int, typer.Option(help="Rollouts of each.", min=1, max=64)] = 4,
    seed: Annotated[int, typer.Option(help="Of the sampling.", min=0, max=2**53)] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="All figures, as one line of JSON.")] = False,
) -> None:
    """How often an agent solves held-out tasks, and in how many turns and tokens."""
    importlib.import_module("etude.evaluating").evaluate(where, before, tasks, samples, seed, as_json)
