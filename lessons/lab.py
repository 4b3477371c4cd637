"""JupyterLab on all lessons: `make lab`.

    python -m lessons.lab       copies the notebooks that are not there yet into runs/lessons/, and opens JupyterLab on
                                that folder

The notebooks of this repository (lessons/notebooks) stay as they are: `make lessons` writes them anew, and an answer in
one of them would be lost."""

import os
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from kit.settings import RunError
from lessons import syllabus

__all__ = ["copied", "free", "main", "words"]

COPY_FOLDER = Path("runs") / "lessons"
DEFAULT_PORT = 8888
"""Jupyter's usual port."""


def copied(notebooks: Iterable[Path], folder: Path = COPY_FOLDER) -> list[Path]:
    """The reader's own copies of notebooks; one that is there already stays as it is."""
    folder.mkdir(parents=True, exist_ok=True)
    copies = []
    for notebook in notebooks:
        if not (folder / notebook.name).exists():
            shutil.copyfile(notebook, folder / notebook.name)
        copies.append(folder / notebook.name)
    return copies


def free(first: int = DEFAULT_PORT) -> int:
    """The first port from `first` on that nobody listens on."""
    for port in range(first, 2**16):
        with socket.socket() as probe:
            # as the server does: a port that was just released counts as free
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RunError(f"no port from {first} on is free")


def words(port: int, folder: Path = COPY_FOLDER) -> list[str]:
    """The command that serves a folder, to this machine alone."""
    options = [
        f"--ServerApp.root_dir={folder.resolve()}",
        "--ServerApp.ip=127.0.0.1",
        f"--ServerApp.port={port}",
        "--ServerApp.port_retries=0",
    ]
    is_root = getattr(os, "geteuid", lambda: 1)() == 0
    return [sys.executable, "-m", "jupyterlab", *options, *(["--allow-root"] if is_root else [])]


def main() -> int:
    """Copies, prints the address, serves until Ctrl-C. Returns Jupyter's exit code. Raises RunError without Jupyter or
    notebooks."""
    notebooks = [path for path in map(syllabus.notebook, syllabus.scripts()) if path.is_file()]
    if not notebooks:
        raise RunError("there are no notebooks beside these lessons; work in a clone of the repository")
    if find_spec("jupyterlab") is None:
        raise RunError("make lab needs Jupyter; in the clone: pip install -e '.[course]'")
    port, token = free(), secrets.token_hex(16)
    print(f"lab: {len(copied(notebooks))} lessons in {COPY_FOLDER}; delete one to start it over", flush=True)
    print(f"lab: http://127.0.0.1:{port}/lab?token={token} (Ctrl-C stops it)", flush=True)
    path = os.pathsep.join(filter(None, (str(syllabus.FOLDER.parent), os.environ.get("PYTHONPATH"))))
    return subprocess.call(words(port), env={**os.environ, "PYTHONPATH": path, "JUPYTER_TOKEN": token})


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
