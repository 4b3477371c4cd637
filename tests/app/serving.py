"""The explorer as `etude explore` starts it, for a browser: in a folder, until the block ends."""

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Playwright

from etude.explorer.page import ROOT

__all__ = ["NO_BROWSER", "find_browser", "served"]

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
NO_BROWSER = "no browser is installed; `make test` installs one, or on Debian and Ubuntu: apt-get install chromium"
SECONDS = 60
"""How long it may take to answer."""


def find_browser(playwright: Playwright) -> str | None:
    """Path of the first browser of this machine, otherwise of Playwright's own; None if there is neither."""
    installed = filter(None, map(shutil.which, PROGRAMS))
    own_browser = playwright.chromium.executable_path
    return next(installed, own_browser if Path(own_browser).exists() else None)


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Its address. What it prints goes to `folder`/log."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "etude.cli.main", "explore", "--no-browser", "--port", str(port)]
    with open(folder / "log", "w") as log:
        server = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, env=environment)
    try:
        for _ in range(4 * SECONDS):
            assert server.poll() is None, (folder / "log").read_text()
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/_stcore/health", timeout=5).close()
                break
            except OSError:
                time.sleep(0.25)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(30)
