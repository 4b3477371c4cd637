"""`etude data CONFIG.toml --out FOLDER`: prepares training data with `scaled/data/prepare.py`, and prints a table."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from kit.process import cores
from kit.settings import RunError, fill
from scaled.data.prepare import Settings, prepare
from scaled.data.read import Prepared
from scaled.data.sources import Source

__all__ = ["play", "show"]


def parse_settings(toml: dict[str, Any], folder: Path) -> tuple[list[Source], Settings]:
    """Sources and settings of a file; relative paths start from where the command is given. Raises RunError as
    `kit.settings.fill`."""
    tables = toml.pop("source", [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise RunError(f"{folder}: source must be a list of tables: [[source]]")
    sources = []
    for number, table in enumerate(tables, 1):
        try:
            sources.append(fill(Source, table))
        except RunError as error:
            raise RunError(f"{folder}: source {number}: {error}") from None
    return sources, fill(Settings, toml)


def play(
    config: Path, toml: dict[str, Any], out: Path, tokenizer: Path | None, processes: int | None, resume: bool
) -> None:
    """Prepares the data and shows the table."""
    sources, options = parse_settings(toml, config)
    path = tokenizer or (Path(options.tokenizer) if options.tokenizer else None)
    if path is None:
        raise RunError(
            "name a tokenizer: --tokenizer FILE, or tokenizer = … in the settings; the folder of a "
            "checkpoint contains one"
        )
    path = path / "tokenizer.json" if path.is_dir() else path
    command = ["etude", "data", str(config), "--out", str(out), *(["--tokenizer", str(tokenizer)] if tokenizer else [])]
    command += [*(["--processes", str(processes)] if processes else []), "--resume"]
    record = prepare(out, sources, options, path, processes or cores(), resume, shlex.join(command))
    show(record, out)


def show(record: dict[str, Any], out: Path) -> None:
    """A line for each source, what was dropped, and the held-out codebase."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for name, side in (
        ("source", "left"),
        ("weight", "right"),
        *((name, "right") for name in ("documents", "lines", "MB", "kept", "tokens")),
    ):
        table.add_column(name, justify=side)  # pyright: ignore[reportArgumentType]
    table.add_column("dropped", overflow="fold")
    for source in record["sources"]:
        read_counts, kept_counts = source["read"], source["kept"]
        dropped = ", ".join(f"{drop['count']:,} {reason}" for reason, drop in source["dropped"].items()) or "–"
        table.add_row(
            source["name"],
            f"{source['weight']:g}",
            f"{read_counts['documents']:,}",
            f"{read_counts['lines']:,}",
            f"{read_counts['bytes'] / 1e6:,.1f}",
            f"{kept_counts['documents']:,}",
            f"{kept_counts['tokens']:,}",
            dropped,
        )
    console = Console()
    console.print(table)
    for source in record["sources"]:
        console.print(
            f"licences of {source['name']}: "
            + (", ".join(f"{n:,} {name}" for name, n in source["licences"].items()) or "–"),
            highlight=False,
        )
        if source["weight"] and not source["kept"]["documents"]:
            console.print(f"no documents of {source['name']} are left: it gets no rows", highlight=False)
    heldout = record["heldout"]
    near_note = f"{heldout['near']:,} near duplicates of it dropped from training"
    print(
        f"held out: {heldout['name']}, {heldout['documents']:,} documents, "
        f"{heldout['bytes_of_text'] / 1e6:,.2f} MB; {near_note}"
    )
    data = Prepared(out)
    print(f"data: {out}, {data.tokens:,} tokens in {data.documents:,} documents; dropped ones: {out / 'dropped.jsonl'}")
