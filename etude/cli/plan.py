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
    model: Annotated[str, typer.Option(help="qwen3_30b_a3b, tiny, or a Hugging Face folder.")] = "qwen3_30b_a3b",
    gpus: Annotated[
        list[int] | None,
        typer.Option(help="Number of GPUs; repeatable.", show_default="8, 64 and 512", **integer_option(1)),
    ] = None,
    cp: Annotated[int, typer.Option(help="Ranks that split the tokens of each row.", **integer_option(1))] = 2,
    ep: Annotated[int, typer.Option(help="Ranks that split the experts of each layer.", **integer_option(1))] = 8,
    length: Annotated[
        int, typer.Option(help="Tokens per row; at most the network's max_position_embeddings.", **integer_option(1))
    ] = 32_768,
    rows: Annotated[int, typer.Option(help="Rows per step for each group of cp ranks.", **integer_option(1))] = 1,
    hardware: Annotated[str, typer.Option(help="h200 or h100.")] = "h200",
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
            help="With --recipe: Hugging Face folder; only config.json and tokenizer.json are read.",
            show_default="none",
            metavar="FOLDER",
        ),
    ] = None,
    kernels: Annotated[
        bool,
        typer.Option(
            "--kernels",
            help="Launches of quantised products and experts: bytes, FLOPs, lower bounds of the time on four GPUs.",
        ),
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
    run."""
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
    if recipe is not None:
        if conflicts := sorted(option_names & {"cp", "ep", "length", "rows"}):
            raise RunError(
                f"--{conflicts[0]} applies to one step only; the recipe's layouts and rows are set in {recipe}"
            )
        if checkpoint is not None and "model" in option_names:
            raise RunError("--model and --checkpoint both name the network; leave one of them out")
        _plan_recipe(recipe, str(checkpoint or model), gpus or [8, 64, 512], hardware, out)
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


def _plan_recipe(recipe: Path, model: str, gpus: list[int], hardware: str, out: Path | None) -> None:
    from etude.plan import recipe as prices
    from etude.plan import step as planning
    from etude.run import settings as full_settings

    machine, network = planning.hardware_of(hardware), planning.network_of(model)
    config = full_settings.settings("recipe", "nccl", drop_settings(recipe, read_toml(recipe), "the recipe", "study"))
    conversation_lengths = prices.conversations(config, Path(model) if Path(model).is_dir() else None)
    stage_prices = [prices.prices(config, network, n, machine, conversation_lengths) for n in gpus]
    prices.show(stage_prices, config, model, hardware, conversation_lengths)
    if out is not None:
        prices.write(stage_prices, out)
        print(f"plan: {out / 'recipe-plan.json'}")
