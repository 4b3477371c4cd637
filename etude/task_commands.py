"""The commands `etude tasks …`: words in, one call into a room."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from etude.given import decimal, whole
from kit import process, settings

__all__ = ["tasks_app"]

tasks_app = typer.Typer(
    no_args_is_help=True, help="Coding tasks: features taken out of Python packages, graded in sandboxes."
)
JOBS = typer.Option(help="Sandboxes at a time.", show_default="one a core", **whole(1))
RUN_SECONDS = typer.Option(help="Seconds that a package's tests may take.", **decimal(1.0))
UNCOUNTED = 10**12
"""Tokens: those of a client's model are its own."""
FRESH = typer.Option(help="Ask for answers to inputs that no test has, as the original code gives them.")
SANDBOX = typer.Option(help="What makes the sandboxes: bubblewrap, or a Docker engine of this machine.")
TASK = typer.Argument(help="A task of a recipe, by its id or by what it begins with.")
RECIPES = typer.Option(help="Folder or file of recipes.", show_default="tasks, examples/tasks")
PROMPT = typer.Option(help="With signatures, docstrings and tests, or at most 390 characters.")
EPISODES = typer.Option(help="Folder for the transcript.")
RESUME = typer.Option("--resume", help="Go on with a transcript that was interrupted.")
MINUTES = typer.Option(help="Wall-clock minutes, at most.", **decimal(0.01))
STRICT = typer.Option("--strict", help="Calls must fit their schema exactly.")
CORPUS = typer.Option(help="Folder of pages for web_search; without it the tool is not there.")


@tasks_app.command("make")
def tasks_make(
    packages: Annotated[
        list[str],
        typer.Argument(help="Folders, sdists, or NAME==VERSION, whose sdist is fetched from the package index."),
    ],
    out: Annotated[Path, typer.Option(help="Folder for the recipes, NAME-VERSION.json.")] = Path("tasks"),
    jobs: Annotated[int | None, JOBS] = None,
    seconds: Annotated[float, RUN_SECONDS] = 60.0,
    again: Annotated[bool, typer.Option("--again", help="Make recipes anew that are there already.")] = False,
    join: Annotated[
        int,
        typer.Option(help="Take out up to so many pieces of different files at once, too: harder tasks.", **whole(1)),
    ] = 1,
    sandbox: Annotated[str, SANDBOX] = "bubblewrap",
) -> None:
    """Take features out of packages, one by one, and keep those that make a task. Code of packages runs in sandboxes
    only."""
    if not importlib.import_module("etude.tasks").make_all(
        packages, out, jobs or process.cores(), seconds, again, sandbox, join
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
    """Make the tasks of recipes again, and grade the original code (paid in full) and nothing done (paid nothing)."""
    if not importlib.import_module("etude.tasks").check_all(recipes, jobs or process.cores(), seconds, sandbox, fresh):
        raise typer.Exit(2)


@tasks_app.command("export")
def tasks_export(
    recipes: Annotated[list[Path], typer.Argument(help="Recipes, or folders of them.", readable=False)],
    out: Annotated[Path, typer.Option(help="Folder for the tasks, a folder each.")] = Path("harbor"),
    format: Annotated[str, typer.Option("--format", help="harbor: folders with a task.toml of schema 1.4.")] = "harbor",
    jobs: Annotated[int | None, JOBS] = None,
    seconds: Annotated[float, RUN_SECONDS] = 60.0,
    sandbox: Annotated[str, SANDBOX] = "bubblewrap",
) -> None:
    """Make the tasks of recipes again, and write them for another program, with their grader."""
    if not importlib.import_module("etude.tasks").export_all(
        recipes, out, format, jobs or process.cores(), seconds, sandbox
    ):
        raise typer.Exit(2)


@tasks_app.command("install")
def tasks_install(
    folder: Annotated[
        Path, typer.Argument(help="The folder of a project. It is copied, and not changed.", readable=False)
    ],
    index: Annotated[
        str | None, typer.Option(help="Folder of wheels, or address of an index, such as https://pypi.org/simple.")
    ] = None,
    private_index: Annotated[
        bool, typer.Option("--private-index", help="Its address may be one that is not public.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="File for the steps that worked.", show_default="runs/install/FOLDER.json")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Write the file anew if it is there already.")] = False,
    replay: Annotated[
        Path | None, typer.Option(help="Run the steps of this file once more instead.", readable=False)
    ] = None,
    tries: Annotated[int, typer.Option(help="How often steps are changed and tried, at most.", **whole(1))] = 5,
    model: Annotated[
        str, typer.Option(help="Address of an OpenAI-compatible server; without it a script does both stages.")
    ] = "",
    name: Annotated[str, typer.Option(help="The model's name there.")] = "",
    turns: Annotated[int, typer.Option(help="Replies of each run of the model, at most.", **whole(1))] = 40,
    minutes: Annotated[
        float, typer.Option(help="Wall-clock minutes of each run of the model, at most.", **decimal(0.01))
    ] = 30.0,
    temperature: Annotated[float, typer.Option(help="Of the sampling.", **decimal(0.0))] = 1.0,
    seed: Annotated[int, typer.Option(help="Sent with each request.", **whole())] = 0,
) -> None:
    """Set a folder up in a sandbox: propose commands with checks, and try until the checks pass. Packages come from
    --index alone."""
    from environments.harness.episode import Budget

    install_module = importlib.import_module("etude.install")
    if replay is not None:
        install_module.replay(folder, replay, index, private_index)
        return
    sampling = {"temperature": temperature, "seed": seed}
    policy = install_module.policy_of(model, name, sampling) if model else None
    who = f"{name}, {json.dumps(sampling)}" if model else ""
    out = out or Path("runs/install") / f"{folder.resolve().name}.json"
    install_module.install(
        folder, index, out, tries, policy, who, Budget(turns=turns, seconds=60 * minutes), private_index, again
    )


@tasks_app.command("levels")
def tasks_levels(
    recipes: Annotated[list[Path], typer.Argument(help="Recipes, or folders of them.", readable=False)],
    number: Annotated[int, typer.Option("--number", help="Levels, each with as many tasks.", **whole(1))] = 6,
    level: Annotated[int | None, typer.Option(help="Name the tasks of this level, from 0.", **whole(0))] = None,
) -> None:
    """Sort the tasks of recipes by difficulty, easiest first."""
    importlib.import_module("etude.tasks").show_levels(recipes, number, level)


@tasks_app.command("try")
def tasks_try(
    task: Annotated[str, TASK],
    model: Annotated[
        str,
        typer.Option(
            help="Address of an OpenAI-compatible server, such as http://localhost:8000/v1; or oracle, or fool."
        ),
    ],
    name: Annotated[str, typer.Option(help="The model's name there.")] = "",
    recipes: Annotated[list[Path] | None, RECIPES] = None,
    prompt: Annotated[Literal["specified", "terse"], PROMPT] = "specified",
    out: Annotated[Path, EPISODES] = Path("runs/episodes"),
    resume: Annotated[bool, RESUME] = False,
    turns: Annotated[int, typer.Option(help="Replies, at most.", **whole(1))] = 40,
    tokens: Annotated[int, typer.Option(help="Sampled tokens, at most.", **whole(1))] = 60_000,
    context: Annotated[
        int, typer.Option(help="Tokens of a context; near them the model summarises.", **whole(500))
    ] = 16_000,
    minutes: Annotated[float, MINUTES] = 30.0,
    temperature: Annotated[float, typer.Option(help="Of the sampling.", **decimal(0.0))] = 1.0,
    seed: Annotated[int, typer.Option(help="Sent with each request.", **whole())] = 0,
    strict: Annotated[bool, STRICT] = False,
    tool_choice: Annotated[
        Literal["auto", "required"], typer.Option(help="Whether each reply must call a tool.")
    ] = "auto",
    corpus: Annotated[Path | None, CORPUS] = None,
    jobs: Annotated[int | None, JOBS] = None,
    seconds: Annotated[float, RUN_SECONDS] = 60.0,
    fresh: Annotated[bool, FRESH] = True,
    sandbox: Annotated[str, SANDBOX] = "bubblewrap",
) -> None:
    """Let a model work on a task in a sandbox, grade what it leaves, and keep the transcript. OPENAI_API_KEY is sent if
    it is set."""
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
    importlib.import_module("etude.episodes").try_task(task, model, name, recipes or (), *arguments)


@tasks_app.command("grade")
def tasks_grade(
    task: Annotated[str, TASK],
    folder: Annotated[
        Path, typer.Argument(help="What an agent left: the package, or its changed files alone.", readable=False)
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    recipes: Annotated[list[Path] | None, RECIPES] = None,
    jobs: Annotated[int | None, JOBS] = None,
    seconds: Annotated[float, RUN_SECONDS] = 60.0,
    fresh: Annotated[bool, FRESH] = True,
    sandbox: Annotated[str, SANDBOX] = "bubblewrap",
) -> None:
    """Grade a folder's solution of a task as a trainer would: its reward, what the reward consists of, and flags."""
    arguments = recipes or (), jobs or process.cores(), seconds, sandbox, fresh, as_json
    importlib.import_module("etude.grades").grade_folder(task, folder, *arguments)


@tasks_app.command("serve")
def tasks_serve(
    task: Annotated[str, TASK],
    who: Annotated[str, typer.Option(help="Who plays, for the transcript.")] = "an MCP client",
    recipes: Annotated[list[Path] | None, RECIPES] = None,
    prompt: Annotated[Literal["specified", "terse"], PROMPT] = "specified",
    out: Annotated[Path, EPISODES] = Path("runs/episodes"),
    resume: Annotated[bool, RESUME] = False,
    calls: Annotated[int, typer.Option(help="Calls, at most.", **whole(1))] = 400,
    minutes: Annotated[float, MINUTES] = 60.0,
    strict: Annotated[bool, STRICT] = False,
    corpus: Annotated[Path | None, CORPUS] = None,
    jobs: Annotated[int | None, JOBS] = None,
    seconds: Annotated[float, RUN_SECONDS] = 60.0,
    fresh: Annotated[bool, FRESH] = True,
    sandbox: Annotated[str, SANDBOX] = "bubblewrap",
) -> None:
    """Serve a task's tools to a client of the Model Context Protocol on standard input and output; grade what it
    leaves, and keep the transcript."""
    from environments.harness.episode import Budget

    budget = Budget(calls, UNCOUNTED, 60 * minutes, UNCOUNTED)
    arguments = prompt, out, resume, budget, strict, corpus, jobs or process.cores(), seconds, sandbox, fresh
    importlib.import_module("etude.serve").serve_task(task, who, recipes or (), *arguments)


@tasks_app.command("hints")
def tasks_hints(
    transcripts: Annotated[
        list[Path],
        typer.Argument(help="Transcripts that `etude tasks try` or `etude tasks serve` wrote.", readable=False),
    ],
    source: Annotated[
        Literal["errors", "judge"],
        typer.Option(help="By rules over calls and their answers, or by a model that reads it all."),
    ] = "errors",
    model: Annotated[str, typer.Option(help="Address of the judge, an OpenAI-compatible server.")] = "",
    name: Annotated[str, typer.Option(help="The judge's name there.")] = "",
    shown_gold: Annotated[bool, typer.Option("--shown-gold", help="Show the judge the original code, too.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="File for the hints: JSONL with both contexts and the reply.")
    ] = None,
    loss: Annotated[
        Path | None, typer.Option(help="Say how far each hint moves this checkpoint's prediction of the reply.")
    ] = None,
    recipes: Annotated[list[Path] | None, RECIPES] = None,
    jobs: Annotated[int | None, JOBS] = None,
    seconds: Annotated[float, RUN_SECONDS] = 60.0,
    sandbox: Annotated[str, SANDBOX] = "bubblewrap",
) -> None:
    """Find the replies at which episodes went wrong, with a short hint for each that does not tell the solution."""
    arguments = source, model, name, shown_gold, out, loss, recipes or (), jobs or process.cores(), seconds, sandbox
    if not importlib.import_module("etude.hints").hints(transcripts, *arguments):
        raise typer.Exit(2)
