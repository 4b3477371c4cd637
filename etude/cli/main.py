"""The command line: parses arguments, calls one function of the project, and prints the result.

An error that the user can fix prints one line on stderr and exits with code 2. It leaves everything on disk as it was.
"""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from etude import __version__, catalog
from etude.cli import results as result_commands
from etude.cli import suggestions
from etude.cli.bench import bench_app
from etude.cli.challenge import challenge
from etude.cli.course import explore, lesson
from etude.cli.evaluate import eval_app
from etude.cli.glossary import glossary
from etude.cli.plan import plan
from etude.cli.play import play
from etude.cli.run import run_technique
from etude.cli.tasks import tasks_app
from etude.console.options import integer_option, read_toml

app = typer.Typer(
    cls=suggestions.Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="The training recipe of Composer 2, end to end, at toy scale. Start with: etude play, then etude run recipe",
)
app.add_typer(eval_app, name="eval")
app.add_typer(tasks_app, name="tasks")
app.add_typer(bench_app, name="bench")
app.command("play")(play)


def _print_version(is_requested: bool) -> None:
    if is_requested:
        from importlib import metadata

        print(f"etude {__version__}, torch {metadata.version('torch')}, Python {sys.version.split()[0]}")
        raise typer.Exit


@app.callback()
def etude(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Show the versions of etude, torch and Python.", is_eager=True, callback=_print_version
        ),
    ] = False,
) -> None:
    """Handles the options before the command."""


@app.command("list")
def list_techniques() -> None:
    """List the techniques, with their sources and files."""
    from rich.console import Console
    from rich.table import Table

    table = Table("technique", "what", "source", "read", box=None, header_style="bold", pad_edge=False)
    for technique in catalog.TECHNIQUES:
        table.add_row(technique.name, technique.title, technique.source, technique.ref or technique.sim or "–")
    Console().print(table)


app.command("glossary")(glossary)
app.command("explore")(explore)
app.command("lesson")(lesson)
app.command("challenge")(challenge)
app.command("run", add_help_option=False)(run_technique)


@app.command("data")
def data(
    config: Annotated[
        Path,
        typer.Argument(help="TOML file with [[source]] tables; examples/data.toml shows all settings.", metavar="FILE"),
    ],
    out: Annotated[Path, typer.Option(help="Output folder; pass it to a full run as --corpus.")],
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="tokenizer.json, or a checkpoint's folder.", show_default="as set in FILE", metavar="FILE"),
    ] = None,
    processes: Annotated[
        int | None, typer.Option(help="Number of processes.", show_default="one per core", **integer_option(1))
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue in the output folder.")] = False,
) -> None:
    """Prepare training data: filter, deduplicate, hold out, tokenise.

    Reads the sources, drops generated files and duplicates, holds a codebase out, and tokenises the rest once."""
    from etude.run import data

    data.play(config, read_toml(config), out, tokenizer, processes, resume)


app.command("plan")(plan)
app.command("export-sft")(result_commands.export_sft)
app.command("examples")(result_commands.examples)
app.command("figure")(result_commands.figure)
app.command("claims")(result_commands.claims)
app.command("results")(result_commands.results)


@app.command("kernels")
def kernels(
    name: Annotated[
        str | None, typer.Argument(help="Part of the name of a kernel or of its use.", show_default="all")
    ] = None,
    target: Annotated[str | None, typer.Option(help="sm_90, sm_100 or gfx950.", show_default="all")] = None,
    show: Annotated[
        str | None,
        typer.Option(
            help="Print the code instead of the table: ptx or sass; amdgcn for gfx950.", show_default="the table"
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the complete table as JSON.", show_default="results")
    ] = None,
) -> None:
    """Compile the GPU kernels without a GPU, and show what they use.

    Shows instructions, registers, spills, shared memory, occupancy and the roofline's lower bound of the time."""
    from etude.bench import compiled_kernels as kernels

    kernels.play(name, target, show, out)


@app.command("show")
def show(
    transcript: Annotated[
        Path, typer.Argument(help="Transcript written by `etude tasks try` or `etude tasks serve`.", readable=False)
    ],
    rows: Annotated[int, typer.Option(help="Maximum number of lines per text; 0 for all.", **integer_option(0))] = 12,
) -> None:
    """Show the transcript of an episode.

    Shows the prompt, the replies, the tool calls with their results, and the reward."""
    importlib.import_module("etude.tasks.episodes").show(transcript, rows)


def _format_error(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    format_message = getattr(error, "format_message", None)
    message = str(error) if format_message is None else format_message()
    return re.sub(r"\S{400,}", lambda word: f"{word[0][:200]}…", " ".join(message.split()))


def _describe_path_error(error: Exception) -> str:
    """The error message for a path that no file can have; empty for other errors. Python raises no OSError for
    these."""
    if isinstance(error, ValueError) and str(error).startswith("embedded null"):
        return "a path must not hold a NUL character; correct it in the command or in its TOML file"
    if isinstance(error, RuntimeError) and str(error).startswith("Symlink loop"):
        return f"{error}; name another path"
    return ""


def _is_project_module(module: str) -> bool:
    """Whether a module belongs to this project. If such a module is missing, that is a bug, and nothing can be
    installed."""
    return (Path(__file__).resolve().parents[2] / module.partition(".")[0]).is_dir()


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
            sys.exit(error.code)
        if path_error := _describe_path_error(error):
            error = RunError(path_error)
        if isinstance(error, ModuleNotFoundError) and error.name and not _is_project_module(error.name):
            package = error.name.partition(".")[0]
            print(f"error: {package} is not installed; run: {sys.executable} -m pip install {package}", file=sys.stderr)
            sys.exit(2)
        if not isinstance(error, (RunError, OSError)) and not hasattr(error, "format_message"):
            from ref.network.checkpoint import CheckpointError

            if not isinstance(error, CheckpointError):
                raise
        if message := _format_error(error):  # empty after a bare `etude`, which has already printed its help
            print(f"error: {message}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
