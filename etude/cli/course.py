"""The commands that open a browser: `etude explore` and `etude lesson`."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from etude.cli import suggestions
from etude.console.options import integer_option
from kit import settings

__all__ = ["explore", "is_free", "lesson", "need_streamlit"]


def explore(
    port: Annotated[
        int | None,
        typer.Option(help="Port to listen on.", show_default="8501 or the next free port", **integer_option(1, 65535)),
    ] = None,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Print the address and open no browser.")] = False,
) -> None:
    """Open the explorer, with a page for each technique, in a browser.

    The pages have formulas, controls and pictures. Ctrl-C stops the server."""
    from kit.settings import RunError

    page = find_clone("etude explore") / "app.py"
    need_streamlit("etude explore")
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


def find_clone(command: str) -> Path:
    """The clone of the repository that contains this file. Raises RunError for an installed wheel, which contains only
    the code."""
    root = Path(__file__).resolve().parents[2]
    if not (root / "pyproject.toml").is_file():
        raise settings.RunError(
            f"{command} needs a clone of the repository, with its notebooks and results; this etude "
            f"was installed from a wheel"
        )
    return root


def need_streamlit(command: str) -> None:
    if importlib.util.find_spec("streamlit") is None:
        raise settings.RunError(f"{command} needs Streamlit; in the clone: pip install -e '.[explore]'")


def is_free(port: int) -> bool:
    import socket

    with socket.socket() as sock:
        # as the server does: a port that was just released counts as free
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def lesson(
    number: Annotated[
        int | None,
        typer.Argument(
            help="Number of a lesson, or its technique; without it, list all lessons.",
            parser=suggestions.lesson_number,
            metavar="NUMBER",
        ),
    ] = None,
) -> None:
    """Open a lesson of the course in Jupyter.

    Opens your own copy of its notebook, in runs/lessons/."""
    import shutil
    import subprocess

    from kit.settings import RunError
    from lessons import syllabus

    if number is None:
        _print_lessons(syllabus.lessons())
        return
    notebook = syllabus.notebook(syllabus.find(number).path)
    find_clone("etude lesson")
    if not notebook.is_file():
        raise RunError(
            f"the notebook of lesson {number} does not exist yet; build it with: make lessons LESSONS={number}"
        )
    if importlib.util.find_spec("jupyterlab") is None:
        raise RunError(
            f"etude lesson needs Jupyter; in the clone: pip install -e '.[course]'; or open {notebook} "
            f"in another program"
        )
    own_copy = Path("runs") / "lessons" / notebook.name
    if not own_copy.exists():
        own_copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(notebook, own_copy)
    print(f"lesson {number}: {own_copy}; delete it to start over", flush=True)
    path = os.pathsep.join(filter(None, (str(syllabus.FOLDER.parent), os.environ.get("PYTHONPATH"))))
    # Jupyter then prints the address of the lesson, which also works in a browser elsewhere.
    options = [f"--ServerApp.root_dir={own_copy.parent.resolve()}", f"--LabApp.default_url=/lab/tree/{own_copy.name}"]
    if getattr(os, "geteuid", lambda: 1)() == 0:
        options.append("--allow-root")  # as root, in a container, Jupyter would only ask for this option
    raise typer.Exit(
        subprocess.call([sys.executable, "-m", "jupyterlab", *options], env={**os.environ, "PYTHONPATH": path})
    )


def _print_lessons(course: list[Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("lesson", "what", "minutes", "prerequisites", box=None, header_style="bold", pad_edge=False)
    for entry in course:
        table.add_row(str(entry.number), entry.title, str(entry.minutes), entry.before)
    Console().print(table)
