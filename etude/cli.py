"""The command line. Thin: words in, one call into a room, a table out.

An error that the user can fix prints one line on stderr and exits with code 2. It leaves everything on disk as it was.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import json
import os
import shlex
import sys
import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer

from etude import __version__, afterwards, catalog, meant
from etude.eval_commands import eval_app
from etude.glossary_commands import glossary
from etude.play_commands import play
from etude.task_commands import tasks_app
from kit import disk, process, settings, tracking

app = typer.Typer(
    cls=meant.Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="The complete Composer 2 recipe at small scale. Start with: etude run recipe --scale small",
)
bench_app = typer.Typer(no_args_is_help=True, help="Measure speed; results go to results/.")
app.add_typer(bench_app, name="bench")
app.add_typer(eval_app, name="eval")
app.add_typer(tasks_app, name="tasks")
app.command("play")(play)
app.command("glossary")(glossary)
LOG = typer.Option(help="Where metrics go beside TensorBoard's files: trackio or wandb.", show_default="nowhere", metavar="NAME")
SMALL = typer.Argument(help="A small run of the recipe; the benchmark uses its policy after SFT.", callback=meant.a_run)


def _say_version(wanted: bool) -> None:
    if wanted:
        from importlib import metadata

        print(f"etude {__version__}, torch {metadata.version('torch')}, Python {sys.version.split()[0]}")
        raise typer.Exit


@app.callback()
def etude(
    version: Annotated[
        bool, typer.Option("--version", help="Show the versions of etude, torch and Python.", is_eager=True, callback=_say_version)
    ] = False,
) -> None:
    """Reads what stands before the command."""


def _techniques() -> list[str]:
    return [entry.name for entry in catalog.TECHNIQUES]


def _experiments() -> list[str]:
    return [entry.name for entry in catalog.EXPERIMENTS]


def commands(context: typer.Context) -> list[str]:
    """The names of all commands."""
    return [*getattr(context.find_root().command, "commands", ())]


@app.command("list")
def list_techniques() -> None:
    """The techniques and their files."""
    from rich.console import Console
    from rich.table import Table

    table = Table("technique", "what", "source", "read", box=None, header_style="bold", pad_edge=False)
    for technique in catalog.TECHNIQUES:
        table.add_row(technique.name, technique.title, technique.source, technique.ref or technique.sim or "–")
    Console().print(table)


@app.command("run", add_help_option=False)
def run_technique(
    context: typer.Context,
    technique: Annotated[str | None, typer.Argument(help="A name from `etude list`; `recipe` runs everything.", autocompletion=_techniques)] = None,
    scale: Annotated[str, typer.Option(help="small: minutes on this machine. full: many ranks.")] = "small",
    out: Annotated[Path | None, typer.Option(help="Output folder.", show_default="runs/TECHNIQUE")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in the output folder.")] = False,
    config: Annotated[Path | None, typer.Option(help="TOML file with settings.", readable=False, metavar="FILE")] = None,
    sets: Annotated[list[str] | None, typer.Option("--set", help="One setting; repeatable; overrides --config.", metavar="KEY=VALUE")] = None,
    seed: Annotated[int | None, typer.Option(help="Same as --set seed=N.")] = None,
    corpus: Annotated[
        Path | None,
        typer.Option(
            help="Folder of code to train on; in a full run also what `etude data` prepared.",
            readable=False,
            show_default="Python's standard library",
        ),
    ] = None,
    checkpoint_seconds: Annotated[float, typer.Option(help="Seconds between resume checkpoints.", min=0.0)] = 20.0,
    log: Annotated[str | None, LOG] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Hugging Face folder that a full run starts from.", readable=False, show_default="none", metavar="FOLDER")
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(help="Folder or address (s3://…) of the weights that services share.", show_default="the output folder", metavar="ADDRESS"),
    ] = None,
    runtime: Annotated[
        str | None, typer.Option(help="Where services run: local (processes of this machine) or ray (a cluster).", show_default="local")
    ] = None,
    engine: Annotated[str | None, typer.Option(help="What services sample with: own or vllm.", show_default="own", metavar="NAME")] = None,
    nproc: Annotated[int | None, typer.Option(help="Number of ranks in a full run.", show_default="every GPU here, or 2 with gloo")] = None,
    backend: Annotated[str, typer.Option(help="nccl: GPUs. gloo: rehearse a full run on CPUs.")] = "nccl",
    help: Annotated[bool, typer.Option("--help", help="Show this help and the settings of TECHNIQUE.")] = False,
) -> None:
    """Run TECHNIQUE and write all its results to the output folder."""
    from kit.settings import RunError, describe

    if technique is None:
        print(context.get_help())
        if not help:
            raise RunError("name a technique; `etude list` shows them")
        return
    entry: catalog.Technique | catalog.Experiment | None = catalog.find(technique)
    shown = catalog.find_experiment(technique)
    if shown is not None and shown.name == "cpt-rl" and scale == "full":
        entry = shown
    if entry is None:
        meant.no_technique(technique, commands(context))
    if scale not in ("small", "full"):
        raise RunError(f"--scale expects small or full, got {scale!r}")
    named = {"store": store, "runtime": runtime, "engine": engine}
    sets = [*(sets or []), *(f"{name}={value}" for name, value in named.items() if value is not None)]
    if backend not in ("nccl", "gloo"):
        raise RunError(f"--backend expects nccl or gloo, got {backend!r}")
    if help:
        print(context.get_help())
        _print_settings(entry, backend if scale == "full" else None)
        return
    if scale == "full":
        with tracking.logged_to(log):
            _play_full(entry, out, config, sets, seed, corpus, checkpoint, resume, nproc, backend, checkpoint_seconds)
        return
    assert isinstance(entry, catalog.Technique)
    if checkpoint is not None:
        raise RunError("--checkpoint is where a full run starts; a small one starts from random weights: leave it out, or add --scale full")
    if out is None:
        out = Path("runs") / entry.name
        out = out if resume or entry.name == "recipe" else _unused(out)  # a demonstration takes seconds, so just run it again
    wanted = _read_toml(config)
    if entry.name == "recipe":
        wanted = _without(config, wanted, "a small run", "checkpoint", "cluster", "study")
    given: list[Any] = list(sets or [])
    if seed is not None:
        given.append(f"seed={seed}")
    if corpus is not None:
        _check_corpus(corpus)
        keys = [key for key, *_ in describe(config_class(entry)) if key.rpartition(".")[2] == "corpus"]
        if not keys:
            raise RunError(f"{entry.name} does not read a corpus; leave out --corpus")
        given.append((keys[0], str(corpus)))
    if resume:
        wanted = _merge(stored_config(out, entry.name), wanted)
    with tracking.logged_to(log):
        play_technique(entry, out, wanted, given, resume, checkpoint_seconds)


@app.command("data")
def data(
    config: Annotated[Path, typer.Argument(help="TOML file with [[source]] tables; examples/data.toml shows all settings.", metavar="FILE")],
    out: Annotated[Path, typer.Option(help="Output folder; --corpus of a full run takes it.")],
    tokenizer: Annotated[
        Path | None, typer.Option(help="tokenizer.json, or a checkpoint's folder.", show_default="that of FILE", metavar="FILE")
    ] = None,
    processes: Annotated[int | None, typer.Option(help="Number of processes.", show_default="one for each core", min=1)] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue in the output folder.")] = False,
) -> None:
    """Prepare training data: read sources, drop duplicates and what nobody wrote, hold a codebase out, tokenise once."""
    from etude import data

    data.play(config, _read_toml(config), out, tokenizer, processes, resume)


@app.command("plan")
def plan(
    context: typer.Context,
    model: Annotated[str, typer.Option(help="qwen3_30b_a3b, tiny, or a Hugging Face folder.")] = "qwen3_30b_a3b",
    gpus: Annotated[list[int] | None, typer.Option(help="Number of GPUs; repeatable.", show_default="8, 64 and 512", min=1)] = None,
    cp: Annotated[int, typer.Option(help="Ranks that split the tokens of each row.", min=1)] = 2,
    ep: Annotated[int, typer.Option(help="Ranks that split the experts of each layer.", min=1)] = 8,
    length: Annotated[int, typer.Option(help="Tokens per row; at most the network's max_position_embeddings.", min=1)] = 32_768,
    rows: Annotated[int, typer.Option(help="Rows per step for each group of cp ranks.", min=1)] = 1,
    hardware: Annotated[str, typer.Option(help="h200 or h100.")] = "h200",
    recipe: Annotated[
        Path | None, typer.Option(help="TOML file of a full recipe: prices all its stages instead of one step.", show_default="none", metavar="FILE")
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="With --recipe: Hugging Face folder; config.json and tokenizer.json suffice.", show_default="none", metavar="FOLDER"),
    ] = None,
    kernels: Annotated[
        bool, typer.Option("--kernels", help="Launches of quantised products and experts: bytes, FLOPs, floors on four GPUs.")
    ] = False,
    launches: Annotated[
        str | None,
        typer.Option(help="nvfp4-token, mxfp8 or bfloat16: lists the kernels of one MoE layer instead.", show_default="none", metavar="FORMAT"),
    ] = None,
    rl: Annotated[bool, typer.Option("--rl", help="Asynchronous RL: the best split of GPUs between sampler and trainer, by staleness.")] = False,
    sets: Annotated[
        list[str] | None, typer.Option("--set", help="With --rl: one setting, such as tool_s=20; repeatable.", metavar="KEY=VALUE")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the plan as JSON, and the picture of a step.", show_default="none")] = None,
) -> None:
    """Estimate the memory, traffic, time and price of one step of a full run, or of all stages of the recipe, on a given number of GPUs."""
    from etude import planning
    from kit.settings import RunError

    given = {name for name in context.params if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"}
    given = {"set" if name == "sets" else name for name in given}
    if kernels:
        if wrong := sorted(given - {"kernels", "out"}):
            raise RunError(f"--{wrong[0]} is not for --kernels, whose shapes and GPUs are fixed; leave one of the two out")
        from etude import kernel_costs

        kernel_costs.show()
        if out is not None:
            kernel_costs.write(out)
            print(f"plan: {out / 'kernels-plan.json'}")
        return
    if launches is not None:
        if wrong := sorted(given - {"launches", "model", "length", "rows"}):
            raise RunError(f"--{wrong[0]} has no part in the list of launches, which is that of one layer on one GPU")
        planning.show_launches(model, rows * length, launches)
        return
    if rl:
        if wrong := sorted(given - {"rl", "model", "gpus", "cp", "ep", "length", "hardware", "set", "out"}):
            raise RunError(f"--{wrong[0]} is not for --rl, which splits GPUs between sampler and trainer; leave one of the two out")
        _plan_rl(model, gpus or [8, 64, 512], cp, ep, length, hardware, sets or [], out)
        return
    if sets:
        raise RunError("--set is for --rl; a step and the recipe have options and a TOML file of their own")
    if recipe is None and checkpoint is not None:
        raise RunError("--checkpoint needs --recipe; for one step use --model FOLDER")
    if recipe is not None:
        if wrong := sorted(given & {"cp", "ep", "length", "rows"}):
            raise RunError(f"--{wrong[0]} is for one step; the recipe's layouts and rows stand in {recipe}")
        if checkpoint is not None and "model" in given:
            raise RunError("--model and --checkpoint both name the network; leave one out")
        _plan_recipe(recipe, str(checkpoint or model), gpus or [8, 64, 512], hardware, out)
        return

    found = planning.plans(model, gpus or [8, 64, 512], cp, ep, length, rows, hardware)
    if found[0]["length"] < length:
        print(
            f"warning: rows are {found[0]['length']:,} tokens long, not {length:,}: max_position_embeddings of the network allows no more",
            file=sys.stderr,
        )
    planning.show(found, model, hardware)
    if out is not None:
        planning.write(found, out)
        print(f"plan: {out / 'plan.json'} and plan.png")


def _plan_recipe(recipe: Path, model: str, gpus: list[int], hardware: str, out: Path | None) -> None:
    from etude import full, planning, prices

    machine, network = planning.hardware_of(hardware), planning.network_of(model)
    config = full.settings("recipe", "nccl", _without(recipe, _read_toml(recipe), "the recipe", "study"))
    talk = prices.conversations(config, Path(model) if Path(model).is_dir() else None)
    found = [prices.prices(config, network, n, machine, talk) for n in gpus]
    prices.show(found, config, model, hardware, talk)
    if out is not None:
        prices.write(found, out)
        print(f"plan: {out / 'recipe-plan.json'}")


def _plan_rl(model: str, gpus: list[int], cp: int, ep: int, length: int, hardware: str, sets: list[str], out: Path | None) -> None:
    from etude import splits
    from kit.settings import fill

    work = fill(splits.Work, None, sets)
    seen = sys.stderr.isatty()

    def told(done: int, of: int, number: int) -> None:
        if seen:
            print(f"\r{done} of {of}, {number} GPUs" + ("\n" if done == of else ""), end="", file=sys.stderr, flush=True)

    found = splits.splits(model, gpus, cp, ep, length, hardware, work, told)
    splits.show(found, model, hardware, work)
    if out is not None:
        splits.write(found, work, out)
        print(f"plan: {out / 'rl-plan.json'}")


@app.command("results")
def results(
    runs: Annotated[list[Path], typer.Argument(help="Finished runs of the recipe, one per seed.", callback=meant.a_run)],
    control: Annotated[list[Path] | None, typer.Option(help="Finished run with shuffled rewards; repeatable.", callback=meant.a_run)] = None,
    out: Annotated[Path, typer.Option(help="JSON file to write.")] = Path("results/recipe-small.json"),
) -> None:
    """Collect what RL gained over several seeds: print a table, write the numbers and a picture to files."""
    from kit.disk import atomic_write
    from sims import gain

    found = gain.gather(runs, control or [])
    out.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(out, json.dumps(found, indent=1) + "\n")
    gain.picture(found, out.with_suffix(".png"))
    print(gain.table(found))
    print(f"results: {out} and {out.with_suffix('.png').name}")


@app.command("export-sft")
def export_sft(
    run: Annotated[Path, typer.Argument(help="A small run of the recipe, at least begun.", callback=meant.a_run)],
    out: Annotated[Path, typer.Option(help="JSONL file to write.")],
) -> None:
    """Write a small run's SFT demonstrations as conversations: JSONL with `messages` and tool calls, as sft.conversations reads it."""
    from kit.settings import RunError, fill
    from sims.recipe.export import export
    from sims.recipe.learner import language_of
    from sims.recipe.settings import Recipe

    if not (run / "data" / "tokenizer.json").is_file() or not (toml := stored_config(run, "recipe")):
        raise RunError(f"{run} is not a small run of the recipe; make one with: etude run recipe --scale small --out FOLDER")
    demonstrations, conversations = export(fill(Recipe, toml), language_of(run), out)
    print(f"{demonstrations} demonstrations, {conversations} conversations: {out}")


@app.command("figure")
def figure(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(help="Name of an experiment; without it, list all experiments.", autocompletion=_experiments)] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Half a minute, to check that it runs; its numbers prove nothing.")] = False,
    seed: Annotated[int | None, typer.Option(help="Same as --set seed=N.")] = None,
    out: Annotated[Path | None, typer.Option(help="Output folder.", show_default="runs/figure/NAME")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the experiment in the output folder.")] = False,
    config: Annotated[Path | None, typer.Option(help="TOML file with settings.", readable=False, metavar="FILE")] = None,
    sets: Annotated[list[str] | None, typer.Option("--set", help="One setting; repeatable; overrides --config.", metavar="KEY=VALUE")] = None,
    checkpoint_seconds: Annotated[float, typer.Option(help="Seconds between resume checkpoints.", min=0.0)] = 20.0,
    log: Annotated[str | None, LOG] = None,
) -> None:
    """Reproduce a figure or claim of the sources; write picture, table and verdict to the output folder."""
    from etude import figures

    if name is None:
        _print_experiments()
        return
    entry = catalog.find_experiment(name)
    if entry is None:
        meant.no_experiment(name, commands(context))
    if out is None:
        out = Path("runs") / "figure" / (entry.name + ("-quick" if quick else ""))
        out = _unused(out) if quick and not resume else out
    toml, given = _read_toml(config), [*(sets or []), *([f"seed={seed}"] if seed is not None else [])]
    process.keep_freed_memory()
    if resume:
        toml = _merge(stored_config(out, f"figure {entry.name}"), toml)
    with tracking.logged_to(log):
        record = figures.play(entry, out, toml, given, quick, resume, checkpoint_seconds)
    if record["quick"]:
        figures.show_quick(entry.name, record["claims"], figures.COMMITTED)
    else:
        figures.show(record["claims"])
        print(f"found:   {figures.counted(record['claims'])}")
    print(f"picture: {out / entry.name}.png\ntable:   {out / entry.name}.csv\nverdict: {out / entry.name}.json")
    afterwards.show(afterwards.of_figure(entry, record["quick"]))


def _print_experiments() -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("experiment", "what", "source", "read", box=None, header_style="bold", pad_edge=False)
    for entry in catalog.EXPERIMENTS:
        table.add_row(entry.name, entry.title, entry.source, entry.sim)
    Console().print(table)


@app.command("claims")
def claims(
    folders: Annotated[
        list[Path] | None, typer.Argument(help="Folders of finished experiments to add; without any, show the file.", callback=meant.a_run)
    ] = None,
    out: Annotated[Path, typer.Option(help="JSON file of claims.")] = Path("results/claims.json"),
    verdict: Annotated[str | None, typer.Option(help="Only claims and laws with this verdict.", show_default="all", metavar="VERDICT")] = None,
    figure: Annotated[
        str | None, typer.Option(help="Only what this experiment measured.", show_default="all", metavar="NAME", autocompletion=_experiments)
    ] = None,
) -> None:
    """Show what the sources claim, what was measured here, and the verdict."""
    from etude import figures

    found = figures.gather(folders, out) if folders else figures.load(out)
    some = figures.chosen(found, verdict, figure)
    figures.show(some)
    if verdict is None and figure is None:
        figures.show_open(found)
    figures.show_total(some)


@app.command("examples")
def examples(
    run: Annotated[Path, typer.Option(help="A finished run of the recipe.", callback=meant.a_run)] = Path("runs/small"),
    out: Annotated[Path | None, typer.Option(help="Folder for the examples.", show_default="RUN/examples")] = None,
) -> None:
    """Record a run's last agent on held-out tasks, for the explorer to show; takes a few minutes."""
    _need_streamlit("etude examples")
    from etude.explorer.examples import write_recipe
    from sims import examples

    out = out or run / examples.PLACE
    for path in [*examples.write(run, out), write_recipe(run, out / "recipe")]:
        print(path)


@app.command("explore")
def explore(
    port: Annotated[int | None, typer.Option(help="Port to listen on.", show_default="8501 or the next free port", min=1, max=65535)] = None,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Only print the address.")] = False,
) -> None:
    """Open the explorer in a browser: techniques with formulas, controls and pictures; Ctrl-C stops it."""
    from kit.settings import RunError

    page = _clone("etude explore") / "app.py"
    _need_streamlit("etude explore")
    if port is not None and not is_free(port):
        raise RunError(f"port {port} is in use; choose another --port")
    port = port or next(filter(is_free, range(8501, 2**16)))
    # If its welcome message is on, Streamlit also shows a notice for developers on every page.
    options = [
        "--server.address",
        "127.0.0.1",
        "--server.port",
        str(port),
        "--server.headless",
        str(no_browser).lower(),
        "--browser.gatherUsageStats",
        "false",
        "--server.showEmailPrompt",
        "false",
        "--logger.hideWelcomeMessage",
        "true",
        "--client.toolbarMode",
        "viewer",
        "--server.fileWatcherType",
        "none",
    ]
    print(f"explorer: http://127.0.0.1:{port} (Ctrl-C stops it)", flush=True)
    os.execv(sys.executable, [sys.executable, "-m", "streamlit", "run", str(page), *options])


def _clone(command: str) -> Path:
    """The clone of the repository that holds this file. Raises RunError for an installed wheel, which holds only the code."""
    root = Path(__file__).resolve().parent.parent
    if not (root / "pyproject.toml").is_file():
        raise settings.RunError(f"{command} needs a clone of the repository, with its notebooks and results; this etude was installed from a wheel")
    return root


def _need_streamlit(command: str) -> None:
    if importlib.util.find_spec("streamlit") is None:
        raise settings.RunError(f"{command} needs Streamlit; in the clone: pip install -e '.[explore]'")


def is_free(port: int) -> bool:
    import socket

    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does: a port that was just released counts as free
        try:
            tried.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


@app.command("lesson")
def lesson(
    number: Annotated[
        int | None,
        typer.Argument(help="Number of a lesson, or its technique; without it, list all lessons.", parser=meant.lesson_number, metavar="NUMBER"),
    ] = None,
) -> None:
    """Open a lesson in Jupyter: your own copy of its notebook, in runs/lessons/."""
    import shutil
    import subprocess

    from kit.settings import RunError
    from lessons import syllabus

    if number is None:
        _print_lessons(syllabus.lessons())
        return
    made = syllabus.notebook(syllabus.find(number).path)
    _clone("etude lesson")
    if not made.is_file():
        raise RunError(f"the notebook of lesson {number} does not exist yet; build it with: make lessons LESSONS={number}")
    if importlib.util.find_spec("jupyterlab") is None:
        raise RunError(f"etude lesson needs Jupyter; in the clone: pip install -e '.[course]'; or open {made} in another program")
    mine = Path("runs") / "lessons" / made.name
    if not mine.exists():
        mine.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(made, mine)
    print(f"lesson {number}: {mine}; delete it to start over", flush=True)
    path = os.pathsep.join(filter(None, (str(syllabus.FOLDER.parent), os.environ.get("PYTHONPATH"))))
    # Jupyter then prints the address of the lesson, which also works in a browser elsewhere.
    words = [f"--ServerApp.root_dir={mine.parent.resolve()}", f"--LabApp.default_url=/lab/tree/{mine.name}"]
    if getattr(os, "geteuid", lambda: 1)() == 0:
        words.append("--allow-root")  # as root, in a container, Jupyter would only ask for this option
    raise typer.Exit(subprocess.call([sys.executable, "-m", "jupyterlab", *words], env={**os.environ, "PYTHONPATH": path}))


def _print_lessons(course: list[Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("lesson", "what", "minutes", "before it", box=None, header_style="bold", pad_edge=False)
    for one in course:
        table.add_row(str(one.number), one.title, str(one.minutes), one.before)
    Console().print(table)


@eval_app.command("base")
def eval_base(
    checkpoints: Annotated[list[str], typer.Argument(help="Hugging Face folders, or smollm2-135m, gemma3-270m.", metavar="CHECKPOINT…")],
    codebase: Annotated[str | None, typer.Option(help="Folder of code for the NLL.", show_default="a part of the standard library")] = None,
    package: Annotated[str | None, typer.Option(help="Installed package to ask about.", show_default="the standard library")] = None,
    repository: Annotated[str | None, typer.Option(help="Git repository whose history gives the diffs.", show_default="edits made by rules")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A minute, to check that it runs; its numbers prove nothing.")] = False,
    out: Annotated[Path, typer.Option(help="Output folder.")] = Path("runs/eval-base"),
    resume: Annotated[bool, typer.Option("--resume", help="Continue the evaluation in the output folder.")] = False,
    config: Annotated[Path | None, typer.Option(help="TOML file with settings.", readable=False, metavar="FILE")] = None,
    sets: Annotated[list[str] | None, typer.Option("--set", help="One setting; repeatable; overrides --config.", metavar="KEY=VALUE")] = None,
    checkpoint_seconds: Annotated[float, typer.Option(help="Seconds between resume checkpoints.", min=0.0)] = 20.0,
) -> None:
    """Coding knowledge, state tracking and codebase NLL of base models: a table and a picture like the report's Table 2."""
    from etude import evaluation

    folders = {"codebase": codebase, "package": package, "repository": repository}
    given: list[Any] = [*(sets or []), *((name, value) for name, value in folders.items() if value is not None)]
    toml = _read_toml(config)
    if resume:
        toml = _merge({k: v for k, v in stored_config(out, evaluation.TECHNIQUE).items() if k != "names"}, toml)
    evaluation.base(checkpoints, out, toml, given, quick, resume, checkpoint_seconds)


@app.command("kernels")
def kernels(
    name: Annotated[str | None, typer.Argument(help="Part of the name of a kernel or of its use.", show_default="all")] = None,
    target: Annotated[str | None, typer.Option(help="sm_90, sm_100 or gfx950.", show_default="all")] = None,
    show: Annotated[str | None, typer.Option(help="Print code instead: ptx or sass; amdgcn for gfx950.", show_default="the table")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the complete table as JSON.", show_default="results")] = None,
) -> None:
    """Compile the GPU kernels without a GPU: instructions, registers, spills, shared memory, occupancy and the roofline's floor."""
    from etude import kernels

    kernels.play(name, target, show, out)


@bench_app.callback()
def bench() -> None:
    """Measure speed; results go to results/."""


@bench_app.command("model")
def bench_model() -> None:
    """Training tokens/s of ref.network and of Qwen3Moe from transformers, timed in alternation."""
    importlib.import_module("etude.bench.training").model()


@bench_app.command("kernels")
def bench_kernels() -> None:
    """Every Triton kernel against the best alternative call, on a CUDA GPU."""
    from kit.settings import RunError

    if importlib.util.find_spec("triton") is None:
        raise RunError("etude bench kernels needs Triton (Linux): pip install triton")
    importlib.import_module("etude.bench.kernels").kernels()


@bench_app.command("plan")
def bench_plan() -> None:
    """The plan's predicted step time against the measured time of two ranks on this machine."""
    importlib.import_module("etude.bench.plan").bench()


@bench_app.command("data")
def bench_data(
    tokenizer: Annotated[Path, typer.Option(help="tokenizer.json, or a checkpoint's folder.", metavar="FILE")] = Path(
        "runs/small/checkpoints/mid-cpt"
    ),
    archives: Annotated[Path, typer.Option(help="Folder for the ten wheels; pip downloads those that are missing.")] = Path("runs/wheels"),
) -> None:
    """Prepare a million lines of ten packages, on one process and on two, with planted duplicates."""
    importlib.import_module("etude.bench.data").bench(tokenizer, archives)


@bench_app.command("delta")
def bench_delta() -> None:
    """Encode and decode weight deltas on one core, beside zstd level 1 on the same bytes."""
    importlib.import_module("etude.bench.delta").bench()


@bench_app.command("sandbox")
def bench_sandbox() -> None:
    """Start, call, store and fork sandboxes over a tree of 25 MB, and weigh idle ones."""
    importlib.import_module("etude.bench.sandboxes").bench()


@app.command("show")
def show(
    transcript: Annotated[Path, typer.Argument(help="A transcript that `etude tasks try` wrote.", readable=False)],
    rows: Annotated[int, typer.Option(help="Lines of each text, at most; 0 for all.", min=0)] = 12,
) -> None:
    """Show a transcript: what was asked, said, called and answered, and what it earned."""
    importlib.import_module("etude.episodes").show(transcript, rows)


@bench_app.command("crowded")
def bench_crowded(run: Annotated[Path, SMALL] = Path("runs/small")) -> None:
    """Parts of a run, timed alone and next to as many busy programs as there are cores."""
    importlib.import_module("etude.bench.crowded").bench(run)


@bench_app.command("engine")
def bench_engine(run: Annotated[Path, SMALL] = Path("runs/small")) -> None:
    """Sampled tokens per second of two samplers: all rows at one position, and continuous batching."""
    importlib.import_module("etude.bench.engine").bench(run)


@bench_app.command("explorer")
def bench_explorer() -> None:
    """Redraw time of every slider in the explorer."""
    _need_streamlit("etude bench explorer")
    importlib.import_module("etude.bench.explorer").bench()


def _play_full(entry, out, config, sets, seed, corpus, checkpoint, resume, nproc, backend, cadence) -> None:
    """Run the scaled path under torchrun."""
    from etude import full

    given: list[Any] = [*(sets or []), *([f"seed={seed}"] if seed is not None else [])]
    if corpus is not None:
        _check_corpus(corpus)
        given.append(("data.corpus" if entry.name in ("recipe", "cpt-rl") else "corpus", str(corpus.resolve())))
    if checkpoint is not None:
        given.append(("checkpoint", str(checkpoint.resolve())))
    out = out or Path("runs") / f"{entry.name}-full"
    toml = _read_toml(config)
    if entry.name == "recipe":
        toml = _without(config, toml, "the recipe", "study")
    if entry.name == "async-rl":  # the small world's services, with a group of ranks as their trainer
        if resume:
            toml = _merge(stored_config(out, entry.name), toml)
            nproc = nproc or toml["trainers"]
        return play_technique(entry, out, toml, given + full.grouped(toml, given, nproc, backend), resume, cadence)
    if resume:
        toml = _merge(stored_config(out, f"{entry.name} full"), toml)
    full.run(entry, out, toml, given, resume, nproc, backend)


def _without(config: Path | None, toml: dict, what: str, *names: str) -> dict:
    """The settings of a file without those of other runs that share it; prints a line if there are any."""
    if left := [name for name in names if name in toml]:
        print(f"{config}: {what} leaves out {' and '.join(left)}, which other runs of this file have")
    return {key: value for key, value in toml.items() if key not in left}


def _unused(out: Path) -> Path:
    """The folder if it is free, otherwise the first free one of OUT-2, OUT-3, …; prints a line if it had to move on."""

    def taken(path: Path) -> bool:
        return path.exists() and not (path.is_dir() and not any(path.iterdir()))

    others = (out.with_name(f"{out.name}-{n}") for n in itertools.count(2))
    found = next(path for path in itertools.chain([out], others) if not taken(path))
    if found != out:
        print(f"{out} is not empty; writing to {found}")
    return found


def config_class(entry: catalog.Technique) -> type:
    """The dataclass of a technique's settings at the small scale."""
    assert entry.module is not None
    module = importlib.import_module(entry.module)
    return getattr(module, {"recipe": "Recipe", "async-rl": "Async"}.get(entry.name, "Demo"))


def play_technique(entry: catalog.Technique, out: Path, toml: dict, sets: list[Any], resume: bool, cadence: float) -> None:
    """Opens the run, runs the technique, prints the result."""
    from etude import expected
    from kit.process import keep_freed_memory
    from kit.runs import Run

    config = settings.fill(config_class(entry), toml, sets)
    _check_unprepared(getattr(getattr(config, "data", config), "corpus", None))
    if entry.name == "recipe":
        from sims.recipe.conversations import check_conversations

        check_conversations(config.sft.conversations)
    keep_freed_memory()
    again = f"etude run {entry.name} --out {shlex.quote(str(out))} --resume"
    with Run.open(out, entry.name, config, resume, cadence) as run, run.told(again):
        assert entry.module is not None
        expected.tell(run)
        module = importlib.import_module(entry.module)
        if entry.name == "recipe":
            from etude import outcome

            module.run(run, config)
            outcome.show(run.root)
        elif entry.ref is None:
            _finish_demo(run, module.run(run, config))
        else:
            _finish_demo(run, _demo(run, module.demo, config))
    if entry.name != "recipe":
        afterwards.show(afterwards.of_technique(entry))


def _demo(run: Any, demo: Any, config: Any) -> dict:
    """Runs a technique's demonstration, shows and logs its progress, and returns its result."""
    from kit.settings import RunError

    stage = run.stage("demo", total=1, unit="steps")
    if stage.finished:
        return stage.result()

    def log(step: int, total: int, **metrics: Any) -> None:
        stage.total = total
        stage.log(step, **metrics)
        stage.progress(step, **metrics)

    try:
        return stage.finish(demo(config, log))
    except ValueError as error:
        if not getattr(config, "corpus", None):
            raise
        raise RunError(f"{run.technique}: {error}") from error


def _finish_demo(run: Any, result: dict) -> None:
    record = {
        "technique": run.technique,
        "config": json.loads((run.root / "config.json").read_text())["config"],
        "machine": process.machine(),
        "seconds": run.seconds(),
        "result": result,
    }
    disk.atomic_write(run.root / "report.json", json.dumps(record, indent=1) + "\n")
    _print_result(run.technique, result)
    print(f"report: {run.root / 'report.json'}")


def _print_result(title: str, result: dict) -> None:
    """Plain entries go into one table; lists of similar dicts and entries named `measure@x` get tables of their own."""
    from rich.console import Console
    from rich.table import Table

    console, plain = (Console(), Table("result", "value", box=None, header_style="bold", title=title, title_justify="left"))
    grids = []
    curves: dict[str, dict[str, Any]] = {}
    for key, value in result.items():
        if "@" in key:
            measure, _, x = key.partition("@")
            curves.setdefault(x, {"at": x})[measure] = value
    plain_entries = {key: value for key, value in result.items() if "@" not in key}
    for key, value in [*([("by value", list(curves.values()))] if curves else []), *plain_entries.items()]:
        if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
            grid = Table(*value[0], box=None, header_style="bold", title_justify="left")
            grid.title = None if key == "by value" else key
            for row in value:
                grid.add_row(*(_cell(row.get(column)) for column in value[0]))
            grids.append(grid)
        elif isinstance(value, dict):
            for name, inner in value.items():
                plain.add_row(f"{key}.{name}", _cell(inner))
        else:
            plain.add_row(key, _cell(value))
    if plain.row_count:
        console.print(plain)
    for grid in grids:
        console.print(grid)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return " ".join(_cell(part) for part in value)
    return "–" if value is None else str(value)


def _print_settings(entry: catalog.Technique | catalog.Experiment, backend: str | None = None) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("setting", "default", "what", box=None, header_style="bold", title="Settings for --set and --config", title_justify="left")
    if backend is not None:
        from etude import full

        cls = full.settings(entry.name, backend)
    else:
        assert isinstance(entry, catalog.Technique)
        cls = config_class(entry)
    for key, kind, default, doc in settings.describe(cls):
        table.add_row(key, _cell(list(default) if isinstance(default, tuple) else default), doc or kind)
    Console().print(table)


def _read_toml(path: Path | None) -> dict:
    from kit.settings import RunError

    if path is None:
        return {}
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RunError(f"{path} is not valid TOML: {error}") from None


def stored_config(out: Path, technique: str) -> dict:
    """The settings the run started with; --resume need not repeat them."""
    try:
        record = json.loads((out / "config.json").read_text())
        return record["config"] if record["technique"] == technique and isinstance(record["config"], dict) else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}  # Run.open says what is wrong with it


def _merge(below: dict, above: dict) -> dict:
    merged = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


def _check_corpus(path: Path) -> None:
    from kit.settings import RunError

    if not path.exists():
        raise RunError(f"corpus {path} does not exist; pass a folder of code with --corpus")
    if not path.is_dir():
        raise RunError(f"corpus {path} is not a folder; pass a folder of code with --corpus")
    if not os.access(path, os.R_OK | os.X_OK):
        raise RunError(f"corpus {path} cannot be read; change its permissions or choose another --corpus")


def _check_unprepared(corpus: str | None) -> None:
    """Raises RunError for a corpus that `etude data` has prepared."""
    if corpus is not None and (Path(corpus) / "data.json").is_file():
        from scaled.data.read import is_prepared

        if is_prepared(corpus):
            raise settings.RunError(f"corpus {corpus} is prepared for full runs (--scale full); a small run reads a folder of code")


def _one_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    said = getattr(error, "format_message", None)
    message = str(error) if said is None else said()
    return " ".join(message.split())


def main() -> None:
    """Entry point: turns errors into one line and an exit code."""
    for stream in (sys.stdout, sys.stderr):  # a path need not be valid text: escape what the terminal cannot show
        if (reconfigure := getattr(stream, "reconfigure", None)) is not None:
            reconfigure(errors="backslashreplace")
    try:
        code = app(standalone_mode=False, prog_name="etude")
        sys.exit(code if isinstance(code, int) else 0)
    except (KeyboardInterrupt, typer.Abort):
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except Exception as error:  # what the user cannot fix is raised again, with its traceback
        from kit.settings import Interrupted, RunError

        if isinstance(error, Interrupted):
            print(error, file=sys.stderr)
            sys.exit(130)
        if not isinstance(error, (RunError, OSError)) and not hasattr(error, "format_message"):
            from ref.network.checkpoint import CheckpointError

            if not isinstance(error, CheckpointError):
                raise
        if message := _one_line(error):  # empty after a bare `etude`, which has already printed its help
            print(f"error: {message}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
