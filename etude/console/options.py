"""Helpers of the commands: settings in files and on the command line, folders, and names for shell completion."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from etude import catalog
from kit import settings
from kit.disk import read_json
from kit.disk import read_toml as load_toml

__all__ = [
    "LOG",
    "check_corpus",
    "check_unprepared",
    "commands",
    "decimal",
    "experiments",
    "merge",
    "read_toml",
    "stored_config",
    "techniques",
    "unused",
    "integer_option",
    "drop_settings",
]

LOG = typer.Option(
    help="Also log metrics to trackio or wandb, in addition to TensorBoard's files.",
    show_default="none",
    metavar="NAME",
)


def integer_option(low: int | None = None, high: int | None = None) -> dict[str, Any]:
    """Arguments of `typer.Option` for a whole number between two bounds, in the grammar of settings."""
    return _number(
        low,
        high,
        "a whole number",
        "INTEGER",
        lambda number: isinstance(number, int) or number.is_integer() and abs(number) <= settings.LARGEST_INTEGER,
        int,
    )


def decimal(low: float | None = None, high: float | None = None) -> dict[str, Any]:
    """Arguments of `typer.Option` for a finite number between two bounds, in the grammar of settings."""
    return _number(low, high, "a number", "FLOAT", lambda number: abs(number) <= settings.LARGEST, float)


def _number(low: Any, high: Any, kind: str, metavar: str, fits: Callable[[Any], bool], convert: type) -> dict[str, Any]:
    if low is not None and high is not None:
        kind, metavar = f"{kind} between {low} and {high}", f"{low}…{high}"
    elif low is not None:
        kind, high = f"{kind} of at least {low}", settings.LARGEST_INTEGER

    def parse(word: Any) -> Any:
        number = settings.parse_number(word) if isinstance(word, str) else word
        if (
            number is None
            or not fits(number)
            or (low is not None and number < low)
            or (high is not None and number > high)
        ):
            raise typer.BadParameter(f"expected {kind}, got {settings.quote(word)}")
        return convert(number)

    return {"parser": parse, "metavar": metavar}


def techniques() -> list[str]:
    return [entry.name for entry in catalog.TECHNIQUES]


def experiments() -> list[str]:
    return [entry.name for entry in catalog.EXPERIMENTS]


def commands(context: typer.Context) -> list[str]:
    """The names of all commands."""
    return [*getattr(context.find_root().command, "commands", ())]


def read_toml(path: Path | None) -> dict:
    """The settings in a TOML file, which may be a pipe; none without a file. Raises OSError, and RunError for
    another file."""
    return {} if path is None else load_toml(path)


def stored_config(out: Path, technique: str) -> dict:
    """The settings with which the run started; --resume need not repeat them."""
    try:
        record = read_json(out / "config.json")
        return record["config"] if record["technique"] == technique and isinstance(record["config"], dict) else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}  # Run.open raises the error


def merge(below: dict, above: dict) -> dict:
    merged = dict(below)
    for key, value in above.items():
        are_tables = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = merge(merged[key], value) if are_tables else value
    return merged


def drop_settings(config: Path | None, toml: dict, run_label: str, *names: str) -> dict:
    """The settings of a file without those for other kinds of runs; prints a line if there are any."""
    if left := [name for name in names if name in toml]:
        print(f"{config}: {run_label} ignores {' and '.join(left)}, for other runs with this file")
    return {key: value for key, value in toml.items() if key not in left}


def unused(out: Path) -> Path:
    """The folder if it is free, otherwise the first free one of OUT-2, OUT-3, …; prints a line if it is another one."""

    def is_taken(path: Path) -> bool:
        return path.exists() and not (path.is_dir() and not any(path.iterdir()))

    alternatives = (out.with_name(f"{out.name}-{n}") for n in itertools.count(2))
    folder = next(path for path in itertools.chain([out], alternatives) if not is_taken(path))
    if folder != out:
        print(f"{out} is not empty; writing to {folder}")
    return folder


def check_corpus(path: Path) -> None:
    from kit.settings import RunError

    if not path.exists():
        raise RunError(f"corpus {path} does not exist; pass a folder of code with --corpus")
    if not path.is_dir():
        raise RunError(f"corpus {path} is not a folder; pass a folder of code with --corpus")
    if not os.access(path, os.R_OK | os.X_OK):
        raise RunError(f"corpus {path} cannot be read; change its permissions or choose another --corpus")


def check_unprepared(corpus: str | None) -> None:
    """Raises RunError for a corpus that `etude data` has prepared."""
    if corpus is not None and (Path(corpus) / "data.json").is_file():
        from scaled.data.read import is_prepared

        if is_prepared(corpus):
            raise settings.RunError(
                f"corpus {corpus} is prepared for full runs (--scale full); for a small run pass a folder of code"
            )
