"""The folder that is set up: a copy of what belongs to it, without what a machine has left in it."""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path

from kit.settings import RunError

__all__ = ["copy_folder", "read"]

LEFT_OUT = re.compile(r"__pycache__|node_modules|build|dist|venv|env|[^/]*\.egg-info|[^/]*\.py[co]")
INCLUDED_NAMES = re.compile(
    r"\.github|\.gitlab-ci\.yml|\.coveragerc|\.flake8|\.pre-commit-config\.yaml|\.python-version"
)
"""Of the names that begin with a dot, which are histories, caches, environments and, in .env, secrets."""
LARGEST = 256 << 10
"""Bytes of a file that is read."""


def copy_folder(folder: Path, target: Path, extra_files: Mapping[str, bytes]) -> None:
    """Copies a folder, links as links, and adds files, in a folder that was left out. Raises RunError for what cannot
    be copied."""

    def find_left_out(_: str, names: list[str]) -> set[str]:
        return {
            name
            for name in names
            if LEFT_OUT.fullmatch(name) or (name.startswith(".") and not INCLUDED_NAMES.fullmatch(name))
        }

    special_paths = [
        path
        for path in _list_paths(folder, find_left_out)
        if not (path.is_symlink() or path.is_file() or path.is_dir())
    ]
    if special_paths:
        raise RunError(f"{special_paths[0]} is no file, folder or link, and cannot be copied")
    try:
        shutil.copytree(folder, target, symlinks=True, ignore=find_left_out)
        for path, data in extra_files.items():
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            (target / path).write_bytes(data)
            (target / path).chmod(0o755 if data.startswith(b"#!") else 0o644)
    except (OSError, shutil.Error) as error:
        raise RunError(f"{folder} cannot be copied: {error}") from None


def _list_paths(folder: Path, find_left_out) -> list[Path]:
    paths = []
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted({*folders} - find_left_out(parent, folders))
        paths += [Path(parent, name) for name in (*folders, *{*files} - find_left_out(parent, files))]
    return paths


def read(folder: Path) -> dict[str, bytes]:
    """The regular files of a folder by their paths; of large ones only that they are there."""
    contents = {}
    for parent, folders, files in os.walk(folder):
        folders.sort()
        for name in sorted(files):
            path = Path(parent, name)
            status = path.lstat()
            if stat.S_ISREG(status.st_mode):
                contents[path.relative_to(folder).as_posix()] = path.read_bytes() if status.st_size <= LARGEST else b""
    return contents
