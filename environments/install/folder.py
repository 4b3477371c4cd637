"""The folder that is set up: a copy of what belongs to it, without what a machine has left in it."""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path

from kit.settings import RunError

__all__ = ["copied", "read"]

LEFT_OUT = re.compile(r"__pycache__|node_modules|build|dist|venv|env|[^/]*\.egg-info|[^/]*\.py[co]")
KEPT = re.compile(r"\.github|\.gitlab-ci\.yml|\.coveragerc|\.flake8|\.pre-commit-config\.yaml|\.python-version")
"""Of the names that begin with a dot, which are histories, caches, environments and, in .env, secrets."""
LARGEST = 256 << 10
"""Bytes of a file that is read."""


def copied(folder: Path, target: Path, more: Mapping[str, bytes]) -> None:
    """Copies a folder, links as links, and adds files, in a folder that was left out. Raises RunError for what cannot be copied."""

    def left_out(_: str, names: list[str]) -> set[str]:
        return {name for name in names if LEFT_OUT.fullmatch(name) or (name.startswith(".") and not KEPT.fullmatch(name))}

    special = [path for path in _walked(folder, left_out) if not (path.is_symlink() or path.is_file() or path.is_dir())]
    if special:
        raise RunError(f"{special[0]} is no file, folder or link, and cannot be copied")
    try:
        shutil.copytree(folder, target, symlinks=True, ignore=left_out)
        for path, data in more.items():
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            (target / path).write_bytes(data)
            (target / path).chmod(0o755 if data.startswith(b"#!") else 0o644)
    except (OSError, shutil.Error) as error:
        raise RunError(f"{folder} cannot be copied: {error}") from None


def _walked(folder: Path, left_out) -> list[Path]:
    found = []
    for below, folders, files in os.walk(folder):
        folders[:] = sorted({*folders} - left_out(below, folders))
        found += [Path(below, name) for name in (*folders, *{*files} - left_out(below, files))]
    return found


def read(folder: Path) -> dict[str, bytes]:
    """The regular files of a folder by their paths; of large ones only that they are there."""
    found = {}
    for below, folders, files in os.walk(folder):
        folders.sort()
        for name in sorted(files):
            path = Path(below, name)
            what = path.lstat()
            if stat.S_ISREG(what.st_mode):
                found[path.relative_to(folder).as_posix()] = path.read_bytes() if what.st_size <= LARGEST else b""
    return found
