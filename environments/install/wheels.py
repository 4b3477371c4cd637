"""pip and setuptools as this environment has them: the root file system that other sandboxes see has neither.

They carry copies of other packages within them, and a task's answer may be one. Here nothing is taken out: a root of
its own has both, and a virtual environment finds them. In the work tree (`.install`) lie pip's settings, and a wheel of
setuptools for packages that are built apart from others."""

from __future__ import annotations

import functools
import io
import sys
import zipfile
from importlib import metadata
from pathlib import Path

from environments.egress.door import Door
from environments.sandbox.root import DISTRIBUTIONS, root_file_system
from kit.settings import RunError

__all__ = ["FOLDER", "INDEX", "make_install_files", "rooted", "wheel"]

FOLDER = ".install"
"""In the work tree."""
INDEX = "pypi.index"
"""What the index is called inside."""
BUILDS = ("setuptools", "wheel")
"""What packages are built with, where this environment has it."""
DATE = (1980, 1, 1, 0, 0, 0)
LEFT_OUT = ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json")
SETTINGS = f"""[global]
find-links = /work/{FOLDER}
disable-pip-version-check = true
no-input = true
no-cache-dir = false
no-compile = false
progress-bar = off
retries = 1
timeout = 150
"""
"""Those that switch something off are switched on by false: pip's way."""
ENVIRONMENT = f"""export PATH=/work/.venv/bin:/work/{FOLDER}/bin:$PATH PIP_CONFIG_FILE=/work/{FOLDER}/pip.conf
export PYTHONDONTWRITEBYTECODE=1 SETUPTOOLS_SCM_PRETEND_VERSION=0
"""
"""What is read before every command. Bytecode would not be the same twice; there is no Git inside to ask for a
version."""
PROGRAM = """#!/bin/sh
exec python -m pip "$@"
"""


def rooted() -> Path:
    """The root file system with pip and, where it is here, setuptools. Raises RunError where this environment has no
    pip."""
    if not _is_installed("pip"):
        raise RunError(
            f"setting a folder up needs pip, which is not installed here; run: {sys.executable} -m ensurepip"
        )
    return root_file_system((*DISTRIBUTIONS, "pip", *(name for name in BUILDS if _is_installed(name))))


def make_install_files(index: str | None) -> dict[str, bytes]:
    """The files that lie in the work tree: wheels, pip's settings, a program for it, and `env`, which is read before
    every command. `index`: the path of the index's pages, such as /simple/; None for no index."""
    files = {
        f"{FOLDER}/{named_wheel[0]}": named_wheel[1] for name in BUILDS if (named_wheel := wheel(name)) is not None
    }
    settings = SETTINGS
    if index is None:
        settings += "no-index = true\n"
    else:
        settings += (
            f"index-url = http://{INDEX}{index}\ntrusted-host = {INDEX}\nproxy = {Door.environment['http_proxy']}\n"
        )
    texts = {"pip.conf": settings, "env": ENVIRONMENT, "bin/pip": PROGRAM}
    return files | {f"{FOLDER}/{name}": text.encode() for name, text in texts.items()}


@functools.cache
def wheel(distribution: str) -> tuple[str, bytes] | None:
    """The name and the bytes of a wheel of an installed distribution; None unless all of it is there, and it is pure
    Python."""
    if not _is_installed(distribution):
        return None
    dist_info = metadata.distribution(distribution)
    files = [file for file in dist_info.files or () if ".." not in file.parts and file.suffix != ".pyc"]
    head = next((file.parts[0] for file in files if file.parts[0].endswith(".dist-info")), None)
    if (
        head is None
        or not any(file.as_posix() == f"{head}/WHEEL" for file in files)
        or any(file.suffix in (".so", ".pyd") for file in files)
    ):
        return None
    rows, out = list[str](), io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for file in sorted(files, key=str):
            path = Path(str(file.locate()))
            if file.parent.as_posix() == head and file.name in LEFT_OUT:
                continue
            if not path.is_file():
                return None
            archive.writestr(zipfile.ZipInfo(file.as_posix(), DATE), path.read_bytes(), zipfile.ZIP_DEFLATED)
            rows.append(f"{file.as_posix()},,\n")
        archive.writestr(zipfile.ZipInfo(f"{head}/RECORD", DATE), "".join([*rows, f"{head}/RECORD,,\n"]))
    return f"{distribution}-{dist_info.version}-py3-none-any.whl", out.getvalue()


def _is_installed(distribution: str) -> bool:
    try:
        return bool(metadata.distribution(distribution).files)
    except metadata.PackageNotFoundError:
        return False
