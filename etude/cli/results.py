"""The commands that run experiments, and show and collect their results."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer

from etude import catalog
from etude.cli import suggestions
from etude.cli.course import need_streamlit
from etude.console import next_steps
from etude.console.options import (
    LOG,
    commands,
    decimal,
    experiments,
    integer_option,
    merge,
    read_toml,
    stored_config,
    unused,
)
from kit import process, tracking
from kit.settings import RunError

__all__ = ["claims", "examples", "export_sft", "figure", "results"]


def results(
    runs: Annotated[
        list[Path], typer.Argument(help="Finished runs of the recipe, one per seed.", callback=suggestions.a_run)
    ],
    control: Annotated[
        list[Path] | None,
        typer.Option(help="Finished run with shuffled rewards (the control); repeatable.", callback=suggestions.a_run),
    ] = None,
    out: Annotated[Path, typer.Option(help="JSON file to write.")] = Path("results/recipe-small.json"),
) -> None:
    """Summarise the gain by RL over runs with several seeds.

    Prints a table, and writes the numbers and a picture to files."""
    from etude.ledger import gain
    from kit.disk import atomic_write

    gains = gain.gather(runs, control or [])
    out.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(out, json.dumps(gains, indent=1) + "\n")
    gain.picture(gains, out.with_suffix(".png"))
    print(gain.table(gains))
    print(f"results: {out} and {out.with_suffix('.png').name}")


def export_sft(
    run: Annotated[
        Path, typer.Argument(help="Small run of the recipe; it need not be finished.", callback=suggestions.a_run)
    ],
    out: Annotated[Path, typer.Option(help="JSONL file to write.")],
) -> None:
    """Export a small run's SFT demonstrations as JSONL.

    Each line is a conversation with `messages` and tool calls, in the format of the setting sft.conversations."""
    from kit.settings import fill
    from recipe.small.export import export
    from recipe.small.learner import language_of
    from recipe.small.settings import Recipe

    if not (run / "data" / "tokenizer.json").is_file() or not (toml := stored_config(run, "recipe")):
        raise RunError(
            f"{run} is not a small run of the recipe; make one with: etude run recipe --scale small --out FOLDER"
        )
    demonstrations, conversations = export(fill(Recipe, toml), language_of(run), out)
    print(f"{demonstrations} demonstrations, {conversations} conversations: {out}")


def figure(
    context: typer.Context,
    name: Annotated[
        str | None,
        typer.Argument(help="Name of an experiment; without it, list all experiments.", autocompletion=experiments),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="A short run, about half a minute, that checks the code; it gives no verdicts."),
    ] = False,
    seed: Annotated[int | None, typer.Option(help="Same as --set seed=N.", **integer_option())] = None,
    out: Annotated[Path | None, typer.Option(help="Output folder.", show_default="runs/figure/NAME")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the experiment in the output folder.")] = False,
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
    log: Annotated[str | None, LOG] = None,
) -> None:
    """Run an experiment that reproduces a figure or claim.

    Writes picture, table and verdicts to the output folder."""
    from etude.ledger import figures

    if name is None:
        _print_experiments()
        return
    entry = catalog.find_experiment(name)
    if entry is None:
        suggestions.no_experiment(name, commands(context))
    if out is None:
        out = Path("runs") / "figure" / (entry.name + ("-quick" if quick else ""))
        out = unused(out) if quick and not resume else out
    toml, overrides = read_toml(config), [*(sets or []), *([f"seed={seed}"] if seed is not None else [])]
    process.keep_freed_memory()
    if resume:
        toml = merge(stored_config(out, f"figure {entry.name}"), toml)
    with tracking.logged_to(log):
        record = figures.play(entry, out, toml, overrides, quick, resume, checkpoint_seconds)
    if record["quick"]:
        figures.show_quick(entry.name, record["claims"], figures.COMMITTED)
    else:
        figures.show([claim | {"experiment": entry.name} for claim in record["claims"]])
        print(f"found:   {figures.format_counts(record['claims'])}")
    print(f"picture: {out / entry.name}.png\ntable:   {out / entry.name}.csv\nverdict: {out / entry.name}.json")
    if violations := figures.broken_laws(record["claims"]):
        typer.echo(
            f"broken: {'; '.join(violations)}. A law must hold at any size: either the code or the law is wrong.",
            err=True,
        )
        raise typer.Exit(1)
    next_steps.show(next_steps.of_figure(entry, record["quick"]))


def _print_experiments() -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("experiment", "what", "source", "read", box=None, header_style="bold", pad_edge=False)
    for entry in catalog.EXPERIMENTS:
        table.add_row(entry.name, entry.title, entry.source, entry.sim)
    Console().print(table)


def claims(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(help="Folders of finished experiments to add to the file.", callback=suggestions.a_run),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="JSON file of claims.", show_default="results/claims.json; outside a clone, the bundled one"),
    ] = None,
    figure: Annotated[
        str | None,
        typer.Option(help="Show the claims and laws of this experiment.", metavar="NAME", autocompletion=experiments),
    ] = None,
    verdict: Annotated[
        str | None, typer.Option(help="Show the claims and laws with this verdict.", metavar="VERDICT")
    ] = None,
    all_rows: Annotated[bool, typer.Option("--all", help="Show all claims and laws, and what is not tested.")] = False,
) -> None:
    """Show the verdicts on the claims of the sources.

    Shows how many claims and laws have which verdict, in total and for each experiment. --figure, --verdict and --all
    show the claims themselves. If the output is not a terminal, each claim is one line."""
    from etude.ledger import figures

    if all_rows and (figure is not None or verdict is not None):
        raise RunError("--all shows everything; leave it out, or --figure and --verdict")
    all_claims = (
        figures.gather(folders, out or figures.LOCAL_CLAIMS)
        if folders
        else figures.load(out or figures.find_claims_file())
    )
    selected_claims = figures.select_claims(all_claims, verdict, figure)
    if not all_rows and figure is None and verdict is None:
        figures.show_summary(all_claims)
        return
    figures.show(selected_claims)
    if all_rows:
        figures.show_open(all_claims)
    figures.show_total(selected_claims)


def examples(
    run: Annotated[Path, typer.Option(help="A finished run of the recipe.", callback=suggestions.a_run)] = Path(
        "runs/small"
    ),
    out: Annotated[Path | None, typer.Option(help="Folder for the examples.", show_default="RUN/examples")] = None,
) -> None:
    """Record rollouts of a run's agent for the explorer.

    The last agent of the run is sampled on held-out tasks, which takes a few minutes."""
    need_streamlit("etude examples")
    from etude.console import command_times
    from etude.explorer.examples import write_recipe
    from sims.examples import runs as examples

    out, settings, start_time = out or run / examples.PLACE, stored_config(run, "recipe"), time.monotonic()
    if time_hint := command_times.format_expected_duration("examples", settings):
        print(time_hint, flush=True)

    def print_part(part: str) -> None:
        print(
            f"part {examples.PARTS.index(part) + 1} of {len(examples.PARTS)}: {part}, "
            f"{time.monotonic() - start_time:.0f} s",
            flush=True,
        )

    for path in [*examples.write(run, out, progress=print_part), write_recipe(run, out / "recipe")]:
        print(path)
    command_times.remember("examples", settings, time.monotonic() - start_time)
    next_steps.show(next_steps.of_examples(run, out))
