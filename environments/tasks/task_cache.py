"""Made tasks in the user's cache: to make them takes minutes, and to try one of them seconds.

They hold code, so they stay on this machine; a recipe does not. What lies there is compared with its id, and with the
package."""

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

__all__ = ["save_task", "load_task"]


def _encode_bytes(value: object) -> object:
    """Bytes as text, for JSON."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    raise TypeError(type(value).__name__)


def save_task(folder: Path, task: Task, package: Package) -> None:
    """Keeps a task of a package. Raises OSError where it does not fit onto the disk."""
    folder.mkdir(parents=True, exist_ok=True)
    atomic_write(
        folder / f"{task.id}.json", json.dumps({"package": package.digest, "task": asdict(task)}, default=_encode_bytes)
    )


def load_task(folder: Path, name: str, package: Package) -> Task | None:
    """A task that was kept, if it is one of these files."""
    try:
        document = read_json(folder / f"{name}.json")
        row, piece = document["task"], document["task"]["piece"]
        edits = [
            [
                Edit(edit_row["first"], base64.b64decode(edit_row["old"]), base64.b64decode(edit_row["new"]))
                for edit_row in patch_row["edits"]
            ]
            for patch_row in piece["patches"]
        ]
        patches = [
            Patch(patch_row["file"], tuple(patch_edits), patch_row["before"], patch_row["after"])
            for patch_row, patch_edits in zip(piece["patches"], edits, strict=True)
        ]
        loaded_piece = Piece(piece["way"], piece["name"], tuple(patches), tuple(piece["tests"]))
        plain_fields = {
            task_field.name: row[task_field.name]
            for task_field in fields(Task)
            if task_field.name not in ("piece", "difficulty")
        }
        lists = {key: tuple(value) for key, value in plain_fields.items() if isinstance(value, list)}
        task = Task(**{**plain_fields, **lists, "piece": loaded_piece, "difficulty": Difficulty(**row["difficulty"])})
        delete(package.files, loaded_piece)
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return task if document["package"] == package.digest and task.id == name == task_id(package, loaded_piece) else None
