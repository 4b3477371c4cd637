"""The commands `etude eval …`."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from etude.cli import suggestions
from etude.console.options import decimal, integer_option, merge, read_toml, stored_config

__all__ = ["eval_app"]


class OrAgent(TyperGroup):
    """Commands with a default: `etude eval RUN` is `etude eval agent RUN`, and `etude eval` is `etude eval agent`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # while a shell completes a command
        has_command = args[0] in self.commands or args[0] == "--help" if args else ctx.resilient_parsing
        return super().parse_args(ctx, args if has_command else ["agent", *args])


eval_app = typer.Typer(
    cls=OrAgent,
    help="Evaluate an agent, or base models.\n\n`etude eval RUN` is `etude eval agent RUN`; the default is "
    "the bundled checkpoint.",
)


@eval_app.command("agent")
def eval_agent(
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
    before: Annotated[
        str | None,
        typer.Option(
            help="Compare with this earlier checkpoint: its name in the run, such as sft, or its folder.",
            show_default="none",
            metavar="CHECKPOINT",
        ),
    ] = None,
    tasks: Annotated[int, typer.Option(help="Number of held-out tasks.", **integer_option(1, 10_000))] = 100,
    samples: Annotated[int, typer.Option(help="Rollouts per task.", **integer_option(1, 64))] = 4,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.", **integer_option(0, 2**53))] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print all metrics as one line of JSON.")] = False,
) -> None:
    """Evaluate an agent on held-out tasks: success, turns, tokens."""
    importlib.import_module("etude.evaluate.agent").evaluate(run_or_checkpoint, before, tasks, samples, seed, as_json)


@eval_app.command("base")
def eval_base(
    checkpoints: Annotated[
        list[str], typer.Argument(help="Hugging Face folders, or smollm2-135m, gemma3-270m.", metavar="CHECKPOINT…")
    ],
    codebase: Annotated[
        str | None, typer.Option(help="Folder of code for the NLL.", show_default="part of the standard library")
    ] = None,
    package: Annotated[
        str | None,
        typer.Option(help="Installed package for the knowledge questions.", show_default="the standard library"),
    ] = None,
    repository: Annotated[
        str | None, typer.Option(help="Git repository whose history gives the diffs.", show_default="rule-based edits")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A short run that checks the code; not for results.")] = False,
    out: Annotated[Path, typer.Option(help="Output folder.")] = Path("runs/eval-base"),
    resume: Annotated[bool, typer.Option("--resume", help="Continue the evaluation in the output folder.")] = False,
    config: Annotated[
        Path | None, typer.Option(help="TOML file with settings.", readable=False, metavar="FILE")
    ] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", help="One setting; repeatable; overrides --config.", metavar="KEY=VALUE"),
    ] = None,
    checkpoint_seconds: Annotated[
        float, typer.Option(help="Seconds between resume checkpoints.", **decimal(0.0))
    ] = 20.0,
) -> None:
    """Evaluate base models: coding knowledge, state tracking, codebase NLL.

    Writes a table and a picture like the report's Table 2."""
    from etude.evaluate import base as evaluation

    folders = {"codebase": codebase, "package": package, "repository": repository}
    overrides: list[Any] = [*(sets or []), *((name, value) for name, value in folders.items() if value is not None)]
    toml = read_toml(config)
    if resume:
        toml = merge({k: v for k, v in stored_config(out, evaluation.TECHNIQUE).items() if k != "names"}, toml)
    evaluation.base(checkpoints, out, toml, overrides, quick, resume, checkpoint_seconds)
