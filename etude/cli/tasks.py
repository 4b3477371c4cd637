"""The commands `etude tasks …`."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from etude.console.options import decimal, integer_option
from kit import process, settings

__all__ = ["tasks_app"]

tasks_app = typer.Typer(no_args_is_help=True, help="Make coding tasks from Python packages, and grade agents on them.")
JOBS = typer.Option(help="Number of concurrent sandboxes.", show_default="one per core", **integer_option(1))
RUN_SECONDS = typer.Option(help="Time limit of a package's tests, in seconds.", **decimal(1.0))
UNCOUNTED = 10**12
"""No limit on tokens: the tokens of a client's model are not known here."""
FRESH = typer.Option(help="Also grade on inputs that no test uses; the original code gives the expected results.")
SANDBOX = typer.Option(help="Sandbox backend: bubblewrap, or docker (an engine on this machine).")
TASK = typer.Argument(help="Id of a task of a recipe, or a unique prefix of it.")
RECIPES = typer.Option(help="Folder or file of recipes.", show_default="tasks, examples/tasks")
PROMPT = typer.Option(help="specified: signatures, docstrings and tests. terse: at most 390 characters.")
EPISODES = typer.Option(help="Folder for the transcript.")
RESUME = typer.Option("--resume", help="Continue an interrupted episode.")
MINUTES = typer.Option(help="Time limit in wall-clock minutes.", **decimal(0.01))
STRICT = typer.Option("--strict", help="Tool calls must match their schema exactly.")
CORPUS = typer.Option(help="Folder of pages for the tool web_search.", show_default="no such tool")


@tasks_app.command("make")
def tasks_make(
    packages: Annotated[
        list[str],
        typer.Argument(
            help="Folder, sdist, NAME==VERSION to download from the package index, or generated:N, a made-up package."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder for the recipes, NAME-VERSION.json.")] = Path("tasks"),
    jobs: Annotated[int | None, JOBS] = None,
    seconds: Annotated[float, RUN_SECONDS] = 60.0,
    overwrite: Annotated[bool, typer.Option("--again", help="Overwrite existing recipes.")] = False,
    join: Annotated[
        int,
        typer.Option(
            help="Also delete up to this many pieces of different files at once, for harder tasks.", **integer_option(1)
        ),
    ] = 1,
    statements: Annotated[
        bool, typer.Option("--statements", help="Also delete single statements of functions, for easier tasks.")
    ] = False,
    sandbox: Annotated[str, SANDBOX] = "bubblewrap",
) -> None:
    """Make tasks from packages: delete a feature, keep its tests.

    Code of packages runs in sandboxes only."""
    if not importlib.import_module("etude.tasks.build").make_all(
        packages, out, jobs or process.cores(), seconds, overwrite, sandbox, join, statements
    ):
        raise typer.Exit(2)


@tasks_app.command("check")
def tasks_check(
    recipes: Annotated[list[Path], typer.Argument(help="Recipes, or folders of them.", readable=False)],
    jobs: Annotated[int | None, JOBS] = None,
    seconds: Annotated[float, RUN_SECONDS] = 60.0,
    fresh: Annotated[bool, FRESH] = True,
    sandbox: Annotated[str, SANDBOX] = "bubblewrap",
) -> None:
    """Check tasks: the original code must get reward 1, no change 0.

    The tasks are made again from their recipes."""
    if not importlib.import_module("etude.tasks.build").check_all(
        recipes, jobs or process.cores(), seconds, sandbox, fresh
    ):
        raise typer.Exit(2)


@tasks_app.command("export")
def tasks_export(
    recipes: Annotated[list[Path], typer.Argument(help="Recipes, or folders of them.", readable=False)],
    out: Annotated[Path, typer.Option(help="Folder for the tasks, one folder per task.")] = Path("harbor"),
    format: Annotated[
        str, typer.Option("--format", help="harbor: a folder with a task.toml of schema 1.4.")
    ] = "harbor",
    jobs: Annotated[int | None, JOBS] = None,
    seconds: Annotated[float, RUN_SECONDS] = 60.0,
    sandbox: Annotated[str, SANDBOX] = "bubblewrap",
) -> None:
    """Export tasks, with their grader, for another program.

    The tasks are made again from their recipes."""
    if not importlib.import_module("etude.tasks.build").export_all(
        recipes, out, format, jobs or process.cores(), seconds, sandbox
    ):
        raise typer.Exit(2)


@tasks_app.command("install")
def tasks_install(
    folder: Annotated[Path, typer.Argument(help="Folder of a project; it is copied and not changed.", readable=False)],
    index: Annotated[
        str | None,
        typer.Option(help="Folder of wheels, or address of a package index, such as https://pypi.org/simple."),
    ] = None,
    private_index: Annotated[
        bool, typer.Option("--private-index", help="Allow an index at an address that is not public.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="File for the steps that succeeded.", show_default="runs/install/FOLDER.json")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--again", help="Overwrite the file if it exists.")] = False,
    replay: Annotated[
        Path | None, typer.Option(help="Run the steps of this file again instead.", readable=False)
    ] = None,
    tries: Annotated[int, typer.Option(help="Maximum number of attempts.", **integer_option(1))] = 5,
    model: Annotated[
        str, typer.Option(help="Address of an OpenAI-compatible server.", show_default="a script, no model")
    ] = "",
    name: Annotated[str, typer.Option(help="Name of the model on the server.")] = "",
    turns: Annotated[int, typer.Option(help="Maximum number of replies per stage.", **integer_option(1))] = 40,
    minutes: Annotated[
        float, typer.Option(help="Time limit per stage, in wall-clock minutes.", **decimal(0.01))
    ] = 30.0,
    temperature: Annotated[float, typer.Option(help="Sampling temperature.", **decimal(0.0))] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed, sent with each request.", **integer_option())] = 0,
) -> None:
    """Install a project in a sandbox, step by step.

    Proposes commands with checks, and tries until the checks pass. Packages come only from --index."""
    from environments.harness.episode import Budget

    install_module = importlib.import_module("etude.tasks.install")
    if replay is not None:
        install_module.replay(folder, replay, index, private_index)
        return
    sampling = {"temperature": temperature, "seed": seed}
    policy = install_module.policy_of(model, name, sampling) if model else None
    policy_name = f"{name}, {json.dumps(sampling)}" if model else ""
    out = out or Path("runs/install") / f"{folder.resolve().name}.json"
    install_module.install(
        folder,
        index,
        out,
        tries,
        policy,
        policy_name,
        Budget(turns=turns, seconds=60 * minutes),
        private_index,
        overwrite,
    )


@tasks_app.command("levels")
def tasks_levels(
    recipes: Annotated[list[Path], typer.Argument(help="Recipes, or folders of them.", readable=False)],
    number: Annotated[
        int, typer.Option("--number", help="Number of levels; all have about as many tasks.", **integer_option(1))
    ] = 6,
    level: Annotated[
        int | None, typer.Option(help="List the tasks of this level, from 0.", **integer_option(0))
    ] = None,
) -> None:
    """Sort the tasks of recipes by difficulty, easiest first."""
    importlib.import_module("etude.tasks.build").show_levels(recipes, number, level)


@tasks_app.command("demonstrate")
def tasks_demonstrate(
    recipes: Annotated[list[Path] | None, typer.Argument(help="Folders or files of recipes.")] = None,
    out: Annotated[Path, typer.Option(help="JSONL file for the conversations; continued if it exists.")] = Path(
        "runs/demonstrations.jsonl"
    ),
    styles: Annotated[str, typer.Option(help="Styles of the episodes, with commas.")] = "direct,tests-first,repair",
    prompt: Annotated[Literal["specified", "terse"], PROMPT] = "specified",
    jobs: Annotated[int | None, JOBS] = None,
    seconds: Annotated[float, RUN_SECONDS] = 60.0,
    sandbox: Annotated[str, SANDBOX] = "bubblewrap",
) -> None:
    """Write scripted episodes on tasks as conversations for SFT.

    Some make a mistake and mend it when a test fails; the mistake is not learned."""
    importlib.import_module("etude.tasks.demonstrations").write_demonstrations(
        recipes or [Path("tasks")], out, styles.split(","), prompt, jobs or process.cores(), seconds, sandbox
    )


@tasks_app.command("try")
def tasks_try(
    task: Annotated[str, TASK],
    model: Annotated[
        str,
        typer.Option(
            help="Address of an OpenAI-compatible server, such as http://localhost:8000/v1; or oracle, or fool."
        ),
    ],
    name: Annotated[str, typer.Option(help="Name of the model on the server.")] = "",
    recipes: Annotated[list[Path] | None, RECIPES] = None,
    prompt: Annotated[Literal["specified", "terse"], PROMPT] = "specified",
    out: Annotated[Path, EPISODES] = Path("runs/episodes"),
    resume: Annotated[bool, RESUME] = False,
    turns: Annotated[int, typer.Option(help="Maximum number of replies.", **integer_option(1))] = 40,
    tokens: Annotated[int, typer.Option(help="Maximum number of sampled tokens.", **integer_option(1))] = 60_000,
    context: Annotated[
        int,
        typer.Option(help="Context length in tokens; close to it, the model writes a summary.", **integer_option(500)),
    ] = 16_000,
    minutes: Annotated[float, MINUTES] = 30.0,
    temperature: Annotated[float, typer.Option(help="Sampling temperature.", **decimal(0.0))] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed, sent with each request.", **integer_option())] = 0,
    strict: Annotated[bool, STRICT] = False,
    tool_choice: Annotated[
        Literal["auto", "required"], typer.Option(help="required: each reply must call a tool.")
    ] = "auto",
    corpus: Annotated[Path | None, CORPUS] = None,
    jobs: Annotated[int | None, JOBS] = None,
    seconds: Annotated[float, RUN_SECONDS] = 60.0,
    fresh: Annotated[bool, FRESH] = True,
    sandbox: Annotated[str, SANDBOX] = "bubblewrap",
) -> None:
    """Run a model on a task in a sandbox, and grade the result.

    Writes a transcript. The environment variable OPENAI_API_KEY is sent to the server if it is set."""
    from environments.harness.episode import Budget

    try:
        budget = Budget(turns, tokens, 60 * minutes, context)
    except ValueError as error:
        raise settings.RunError(str(error)) from None
    sampling = {"temperature": temperature, "seed": seed}
    arguments = (
        prompt,
        out,
        resume,
        budget,
        sampling,
        strict,
        tool_choice,
        corpus,
        jobs or process.cores(),
        seconds,
        sandbox,
        fresh,
    )
    importlib.import_module("etude.tasks.episodes").try_task(task, model, name, recipes or (), *arguments)


@tasks_app.command("grade")
def tasks_grade(
    task: Annotated[str, TASK],
    folder: Annotated[Path, typer.Argument(help="Solution: the package, or only its changed files.", readable=False)],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    recipes: Annotated[list[Path] | None, RECIPES] = None,
    jobs: Annotated[int | None, JOBS] = None,
    seconds: Annotated[float, RUN_SECONDS] = 60.0,
    fresh: Annotated[bool, FRESH] = True,
    sandbox: Annotated[str, SANDBOX] = "bubblewrap",
) -> None:
    """Grade a folder as the solution of a task.

    Prints the reward that a trainer would use, its terms, and flags."""
    arguments = recipes or (), jobs or process.cores(), seconds, sandbox, fresh, as_json
    importlib.import_module("etude.tasks.grades").grade_folder(task, folder, *arguments)


@tasks_app.command("serve")
def tasks_serve(
    task: Annotated[str, TASK],
    policy_name: Annotated[str, typer.Option(help="Name of the player in the transcript.")] = "an MCP client",
    recipes: Annotated[list[Path] | None, RECIPES] = None,
    prompt: Annotated[Literal["specified", "terse"], PROMPT] = "specified",
    out: Annotated[Path, EPISODES] = Path("runs/episodes"),
    resume: Annotated[bool, RESUME] = False,
    calls: Annotated[int, typer.Option(help="Maximum number of calls.", **integer_option(1))] = 400,
    minutes: Annotated[float, MINUTES] = 60.0,
    strict: Annotated[bool, STRICT] = False,
    corpus: Annotated[Path | None, CORPUS] = None,
    jobs: Annotated[int | None, JOBS] = None,
    seconds: Annotated[float, RUN_SECONDS] = 60.0,
    fresh: Annotated[bool, FRESH] = True,
    sandbox: Annotated[str, SANDBOX] = "bubblewrap",
) -> None:
    """Serve a task's tools to an MCP client, and grade the result.

    The server speaks the Model Context Protocol on standard input and output, and writes a transcript."""
    from environments.harness.episode import Budget

    budget = Budget(calls, UNCOUNTED, 60 * minutes, UNCOUNTED)
    arguments = prompt, out, resume, budget, strict, corpus, jobs or process.cores(), seconds, sandbox, fresh
    importlib.import_module("etude.tasks.serve").serve_task(task, policy_name, recipes or (), *arguments)


@tasks_app.command("hints")
def tasks_hints(
    transcripts: Annotated[
        list[Path],
        typer.Argument(help="Transcripts written by `etude tasks try` or `etude tasks serve`.", readable=False),
    ],
    source: Annotated[
        Literal["errors", "judge"],
        typer.Option(help="errors: rules over calls and their results. judge: a model reads the transcript."),
    ] = "errors",
    model: Annotated[str, typer.Option(help="Address of the judge, an OpenAI-compatible server.")] = "",
    name: Annotated[str, typer.Option(help="Name of the judge on the server.")] = "",
    shown_gold: Annotated[bool, typer.Option("--shown-gold", help="Also show the judge the original code.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="JSONL file for the hints, with both contexts and the reply.")
    ] = None,
    loss: Annotated[
        Path | None, typer.Option(help="Checkpoint: print how far each hint moves its prediction of the reply.")
    ] = None,
    recipes: Annotated[list[Path] | None, RECIPES] = None,
    jobs: Annotated[int | None, JOBS] = None,
    seconds: Annotated[float, RUN_SECONDS] = 60.0,
    sandbox: Annotated[str, SANDBOX] = "bubblewrap",
) -> None:
    """Find replies at which episodes went wrong, with a hint for each.

    A hint is short and does not contain the solution."""
    arguments = source, model, name, shown_gold, out, loss, recipes or (), jobs or process.cores(), seconds, sandbox
    if not importlib.import_module("etude.tasks.hints").hints(transcripts, *arguments):
        raise typer.Exit(2)
