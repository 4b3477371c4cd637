"""The command `etude run`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from etude import catalog
from etude.cli import suggestions
from etude.console.options import (
    LOG,
    check_corpus,
    commands,
    decimal,
    drop_settings,
    integer_option,
    merge,
    read_toml,
    stored_config,
    techniques,
    unused,
)
from etude.run import technique as technique_run
from kit import tracking

__all__ = ["run_technique"]


def run_technique(
    context: typer.Context,
    technique: Annotated[
        str | None,
        typer.Argument(help="A name from `etude list`; `recipe` runs all stages.", autocompletion=techniques),
    ] = None,
    scale: Annotated[
        str, typer.Option(help="small: minutes on this machine. full: one or more ranks, on GPUs or CPUs.")
    ] = "small",
    out: Annotated[Path | None, typer.Option(help="Output folder.", show_default="runs/TECHNIQUE")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in the output folder.")] = False,
    resume_or_begin: Annotated[
        bool,
        typer.Option("--resume-or-begin", help="Continue the run in the output folder, or begin it if there is none."),
    ] = False,
    config: Annotated[
        Path | None, typer.Option(help="TOML file with settings.", readable=False, metavar="FILE")
    ] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", help="One setting; repeatable; overrides --config.", metavar="KEY=VALUE"),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Same as --set seed=N.", **integer_option())] = None,
    corpus: Annotated[
        Path | None,
        typer.Option(
            help="Folder of code to train on; for a full run also a folder that `etude data` prepared.",
            readable=False,
            show_default="Python's standard library",
        ),
    ] = None,
    checkpoint_seconds: Annotated[
        float, typer.Option(help="Seconds between resume checkpoints.", **decimal(0.0))
    ] = 20.0,
    log: Annotated[str | None, LOG] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            help="Hugging Face folder that a full run starts from.",
            readable=False,
            show_default="none",
            metavar="FOLDER",
        ),
    ] = None,
    tasks: Annotated[
        Path | None,
        typer.Option(
            help="Recipe of tasks, or a folder of them, that a full run of the recipe trains on, in sandboxes.",
            readable=False,
            show_default="the small world",
            metavar="RECIPES",
        ),
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(
            help="Folder or address (s3://…) for the weights that services share.",
            show_default="the output folder",
            metavar="ADDRESS",
        ),
    ] = None,
    runtime: Annotated[
        str | None,
        typer.Option(
            help="Where services run: local (processes of this machine) or ray (a cluster).", show_default="local"
        ),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(help="Inference engine of the services: own or vllm.", show_default="own", metavar="NAME"),
    ] = None,
    nproc: Annotated[
        int | None,
        typer.Option(
            help="Number of ranks of a full run, on each machine.",
            show_default="one per GPU; 2 with gloo",
            **integer_option(),
        ),
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(
            help="Number of machines of a full run. All start the same command; they share the output folder.",
            show_default="1",
            **integer_option(),
        ),
    ] = None,
    node: Annotated[
        int | None,
        typer.Option(
            help="Number of this machine, from 0. Node 0 prepares the data and shows the result.",
            show_default="none",
            **integer_option(),
        ),
    ] = None,
    rendezvous: Annotated[
        str | None,
        typer.Option(
            help="Address of node 0 and a free port of it, where all machines meet.",
            show_default="none",
            metavar="HOST:PORT",
        ),
    ] = None,
    backend: Annotated[str, typer.Option(help="nccl: GPUs. gloo: CPUs, to rehearse a full run.")] = "nccl",
    help: Annotated[bool, typer.Option("--help", help="Show this help and the settings of TECHNIQUE.")] = False,
) -> None:
    """Run a technique, or the whole recipe.

    All results go to the output folder. --help after TECHNIQUE lists its settings."""
    from kit.settings import RunError, describe

    if technique is None:
        print(context.get_help())
        if not help:
            raise RunError("name a technique; `etude list` shows them")
        return
    entry: catalog.Technique | catalog.Experiment | None = catalog.find(technique)
    experiment = catalog.find_experiment(technique)
    if experiment is not None and experiment.name == "cpt-rl" and scale == "full":
        entry = experiment
    if entry is None:
        suggestions.no_technique(technique, commands(context))
    if scale not in ("small", "full"):
        raise RunError(f"--scale expects small or full, got {scale!r}")
    service_options = {"store": store, "runtime": runtime, "engine": engine}
    sets = [*(sets or []), *(f"{name}={value}" for name, value in service_options.items() if value is not None)]
    if backend not in ("nccl", "gloo"):
        raise RunError(f"--backend expects nccl or gloo, got {backend!r}")
    if help:
        print(context.get_help())
        technique_run.print_settings(entry, backend if scale == "full" else None)
        return
    if tasks is not None and (scale != "full" or entry.name != "recipe"):
        raise RunError("--tasks is for full runs of the recipe: etude run recipe --scale full --tasks RECIPES")
    if resume_or_begin:
        if resume:
            raise RunError("leave out --resume: --resume-or-begin continues a run, too")
        resume = (
            (out or Path("runs") / (f"{entry.name}-full" if scale == "full" else entry.name)) / "config.json"
        ).exists()
    if scale == "full":
        paths = {"checkpoint": checkpoint, "tasks.recipes": tasks}
        with tracking.logged_to(log):
            _run_full(
                entry,
                out,
                config,
                sets,
                seed,
                corpus,
                paths,
                resume,
                nproc,
                backend,
                checkpoint_seconds,
                (nodes, node, rendezvous),
            )
        return
    assert isinstance(entry, catalog.Technique)
    if checkpoint is not None:
        raise RunError(
            "--checkpoint is for full runs; a small run starts from random weights: leave it out, or add --scale full"
        )
    if nproc is not None:
        raise RunError("--nproc is for full runs; leave it out, or add --scale full")
    if (nodes, node, rendezvous) != (None, None, None):
        raise RunError("--nodes, --node and --rendezvous are for full runs; leave them out, or add --scale full")
    if out is None:
        out = Path("runs") / entry.name
        out = (
            out if resume or entry.name == "recipe" else unused(out)
        )  # a demonstration takes seconds, so just run it again
    toml = read_toml(config)
    if entry.name == "recipe":
        toml = drop_settings(config, toml, "a small run", "checkpoint", "cluster", "study", "tasks")
    overrides: list[Any] = list(sets or [])
    if seed is not None:
        overrides.append(f"seed={seed}")
    if corpus is not None:
        check_corpus(corpus)
        keys = [key for key, *_ in describe(technique_run.config_class(entry)) if key.rpartition(".")[2] == "corpus"]
        if not keys:
            raise RunError(f"{entry.name} does not read a corpus; leave out --corpus")
        overrides.append((keys[0], str(corpus)))
    if resume:
        toml = merge(stored_config(out, entry.name), toml)
    with tracking.logged_to(log):
        technique_run.play_technique(entry, out, toml, overrides, resume, checkpoint_seconds)


def _run_full(entry, out, config, sets, seed, corpus, paths, resume, nproc, backend, cadence, machines) -> None:
    """Run the distributed version under torchrun. `paths`: setting → the path that an option gives it, or None;
    `machines`: --nodes, --node and --rendezvous."""
    from etude.run import full
    from etude.run import settings as full_settings
    from scaled.runtime import preemption

    this_node = full_settings.node_of(entry.name, *machines)
    overrides: list[Any] = [*(sets or []), *([f"seed={seed}"] if seed is not None else [])]
    if corpus is not None:
        check_corpus(corpus)
        overrides.append(("data.corpus" if entry.name in ("recipe", "cpt-rl") else "corpus", str(corpus.resolve())))
    overrides += [(name, str(path.resolve())) for name, path in paths.items() if path is not None]
    out = out or Path("runs") / f"{entry.name}-full"
    toml = read_toml(config)
    if entry.name == "recipe":
        toml = drop_settings(config, toml, "the recipe", "study")
    if entry.name == "async-rl":  # the small world's services, with a group of ranks as their trainer
        if resume:
            toml = merge(stored_config(out, entry.name), toml)
            nproc = nproc or toml["trainers"]
        return technique_run.play_technique(
            entry, out, toml, overrides + full_settings.grouped(toml, overrides, nproc, backend), resume, cadence
        )
    if resume:
        toml = merge(stored_config(out, f"{entry.name} full"), toml)
    with preemption.leaving():
        full.run(entry, out, toml, overrides, resume, nproc, backend, this_node)
