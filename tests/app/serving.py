"""The explorer as `etude explore` starts it, for a browser: in a folder, until the block ends."""

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from etude.explorer.page import ROOT

__all__ = ["PROGRAMS", "served"]

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
"""Browsers, the first that is installed."""
SECONDS = 60
"""How long it may take to answer."""


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Its address. What it prints goes to `folder`/log."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "etude.cli", "explore", "--no-browser", "--port", str(port)]
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
