"""Made tasks in the user's cache: to make them takes minutes, and to try one of them seconds.

They hold code, so they stay on this machine; a recipe does not. What lies there is compared with its id, and with the package.
"""

from __future__ import annotations

import base64
import json
from dataclasses import asdict, fields
from pathlib import Path

from environments.tasks.make import Task, task_id
from environments.tasks.package import Package
from kit.disk import atomic_write, read_json
from ref.feature_deletion import Difficulty, Piece, delete
from ref.source_text import Edit, Patch

__all__ = ["keep", "kept"]


def _bytes(value: object) -> object:
    """Bytes as text, for JSON."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    raise TypeError(type(value).__name__)


def keep(folder: Path, task: Task, package: Package) -> None:
    """Keeps a task of a package. Raises OSError where it does not fit onto the disk."""
    folder.mkdir(parents=True, exist_ok=True)
    atomic_write(folder / f"{task.id}.json", json.dumps({"package": package.digest, "task": asdict(task)}, default=_bytes))


def kept(folder: Path, name: str, package: Package) -> Task | None:
    """A task that was kept, if it is one of these files."""
    try:
        found = read_json(folder / f"{name}.json")
        row, piece = found["task"], found["task"]["piece"]
        edits = [[Edit(e["first"], base64.b64decode(e["old"]), base64.b64decode(e["new"])) for e in one["edits"]] for one in piece["patches"]]
        patches = [Patch(one["file"], tuple(made), one["before"], one["after"]) for one, made in zip(piece["patches"], edits, strict=True)]
        whole = Piece(piece["way"], piece["name"], tuple(patches), tuple(piece["tests"]))
        rest = {one.name: row[one.name] for one in fields(Task) if one.name not in ("piece", "difficulty")}
        lists = {key: tuple(value) for key, value in rest.items() if isinstance(value, list)}
        task = Task(**{**rest, **lists, "piece": whole, "difficulty": Difficulty(**row["difficulty"])})
        delete(package.files, whole)
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return task if found["package"] == package.digest and task.id == name == task_id(package, whole) else None
