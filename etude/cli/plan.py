"""The command `etude plan`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from etude.console.options import drop_settings, integer_option, read_toml

__all__ = ["plan"]


def plan(
    context: typer.Context,
    model: Annotated[
        str, typer.Option(help="qwen3_30b_a3b, qwen2_5_0_5b, tiny, or a Hugging Face folder.")
    ] = "qwen3_30b_a3b",
    gpus: Annotated[
        list[int] | None,
        typer.Option(
            help="Number of GPUs; repeatable.",
            show_default="8, 64 and 512; on packages as few as the settings allow",
            **integer_option(1),
        ),
    ] = None,
    cp: Annotated[int, typer.Option(help="Ranks that split the tokens of each row.", **integer_option(1))] = 2,
    ep: Annotated[int, typer.Option(help="Ranks that split the experts of each layer.", **integer_option(1))] = 8,
    length: Annotated[
        int, typer.Option(help="Tokens per row; at most the network's max_position_embeddings.", **integer_option(1))
    ] = 32_768,
    rows: Annotated[int, typer.Option(help="Rows per step for each group of cp ranks.", **integer_option(1))] = 1,
    hardware: Annotated[str, typer.Option(help="h200, h100 or rtx-4090.")] = "h200",
    recipe: Annotated[
        Path | None,
        typer.Option(
            help="TOML file of a full recipe: estimate all its stages instead of one step.",
            show_default="none",
            metavar="FILE",
        ),
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            help="With --recipe: Hugging Face folder; only config.json, the tokenizer and its chat template are read.",
            show_default="none",
            metavar="FOLDER",
        ),
    ] = None,
    tasks: Annotated[
        Path | None,
        typer.Option(
            help="With --recipe: recipe of tasks, or a folder of them, that the run trains on.",
            show_default="those of the file, or else the small world",
            metavar="RECIPES",
        ),
    ] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", help="With --recipe: one setting; repeatable; overrides the file.", metavar="KEY=VALUE"),
    ] = None,
    kernels: Annotated[
        bool,
        typer.Option(
            "--kernels",
            help="Launches of quantised products and experts: bytes, FLOPs, lower bounds of the time on four GPUs.",
        ),
    ] = False,
    published: Annotated[
        bool, typer.Option("--published", help="The plan's tokens per second beside those of published runs.")
    ] = False,
    launches: Annotated[
        str | None,
        typer.Option(
            help="nvfp4-token, mxfp8 or bfloat16: list the kernels of one MoE layer instead.",
            show_default="none",
            metavar="FORMAT",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the plan as JSON, and for the picture of a step.", show_default="none"),
    ] = None,
) -> None:
    """Estimate memory, time and cost of a full run on GPUs.

    Covers one step of training, or with --recipe all stages of the recipe, for several numbers of GPUs. Nothing is
    trained; with --tasks a few scripted episodes run in sandboxes, whose tokens are counted."""
    from etude.plan import step as planning
    from kit.settings import RunError

    option_names = {
        name for name in context.params if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"
    }
    if kernels:
        if conflicts := sorted(option_names - {"kernels", "out"}):
            raise RunError(
                f"--{conflicts[0]} does not apply to --kernels, whose shapes and GPUs are fixed; leave "
                f"one of the two out"
            )
        from etude.plan import kernels as kernel_costs

        kernel_costs.show()
        if out is not None:
            kernel_costs.write(out)
            print(f"plan: {out / 'kernels-plan.json'}")
        return
    if published:
        if conflicts := sorted(option_names - {"published", "out"}):
            raise RunError(
                f"--{conflicts[0]} does not apply to --published, whose runs are fixed; leave one of the two out"
            )
        from etude.plan import published as published_runs

        published_runs.show()
        if out is not None:
            published_runs.write(out)
            print(f"plan: {out / 'published-plan.json'}")
        return
    if launches is not None:
        if conflicts := sorted(option_names - {"launches", "model", "length", "rows"}):
            raise RunError(
                f"--{conflicts[0]} does not apply to --launches, which lists the kernels of one layer "
                f"on one GPU; leave one of the two out"
            )
        planning.show_launches(model, rows * length, launches)
        return
    if recipe is None and checkpoint is not None:
        raise RunError("--checkpoint needs --recipe; for one step use --model FOLDER")
    if recipe is None and sets:
        raise RunError("--set needs --recipe FILE; one step has options of its own, such as --length")
    if recipe is None and tasks is not None:
        raise RunError("--tasks needs --recipe FILE, such as examples/one-gpu.toml")
    if recipe is not None:
        if conflicts := sorted(option_names & {"cp", "ep", "length", "rows"}):
            raise RunError(
                f"--{conflicts[0]} applies to one step only; the recipe's layouts and rows are set in {recipe}"
            )
        if checkpoint is not None and "model" in option_names:
            raise RunError("--model and --checkpoint both name the network; leave one of them out")
        _plan_recipe(recipe, str(checkpoint or model), tasks, sets or [], gpus, hardware, out)
        return

    step_plans = planning.plan_steps(model, gpus or [8, 64, 512], cp, ep, length, rows, hardware)
    if step_plans[0]["length"] < length:
        print(
            f"warning: rows have {step_plans[0]['length']:,} tokens, not {length:,}: the network's "
            f"max_position_embeddings allows no more",
            file=sys.stderr,
        )
    planning.show(step_plans, model, hardware)
    if out is not None:
        planning.write(step_plans, out)
        print(f"plan: {out / 'plan.json'} and plan.png")


def _plan_recipe(
    recipe: Path,
    model: str,
    tasks: Path | None,
    sets: list[str],
    gpus: list[int] | None,
    hardware: str,
    out: Path | None,
) -> None:
    from etude.plan import packages
    from etude.plan import recipe as prices
    from etude.plan import step as planning
    from etude.run import settings as full_settings

    machine, network = planning.hardware_of(hardware), planning.network_of(model)
    toml = drop_settings(recipe, read_toml(recipe), "the recipe", "study")
    overrides = [*sets, *([] if tasks is None else [("tasks.recipes", str(tasks))])]
    config = full_settings.settings("recipe", "nccl", toml, overrides)
    folder, advice = Path(model) if Path(model).is_dir() else None, ""
    if config.on_packages or "tasks" in toml:
        gpus = gpus or [packages.fewest_gpus(config)]
        stage_prices, assumptions, advice = packages.plan_run(config, network, folder, gpus, machine)
    else:
        talk = prices.conversations(config, folder)
        stage_prices = [prices.prices(config, network, n, machine, talk) for n in gpus or [8, 64, 512]]
        assumptions = prices.describe(config, talk, machine)
    prices.show(stage_prices, model, hardware, assumptions, advice)
    if out is not None:
        prices.write(stage_prices, out)
        print(f"plan: {out / 'recipe-plan.json'}")
