"""`etude data CONFIG.toml --out FOLDER`: settings in, prepared data and a table out. The work is that of `scaled/data/prepare.py`."""

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


def settings(toml: dict[str, Any], folder: Path) -> tuple[list[Source], Settings]:
    """Sources and settings of a file; relative paths start from where the command is given. Raises RunError as `kit.settings.fill`."""
    tables = toml.pop("source", [])
    if not isinstance(tables, list) or not all(isinstance(one, dict) for one in tables):
        raise RunError(f"{folder}: source must be a list of tables: [[source]]")
    sources = []
    for number, one in enumerate(tables, 1):
        try:
            sources.append(fill(Source, one))
        except RunError as error:
            raise RunError(f"{folder}: source {number}: {error}") from None
    return sources, fill(Settings, toml)


def play(config: Path, toml: dict[str, Any], out: Path, tokenizer: Path | None, processes: int | None, resume: bool) -> None:
    """Prepares the data and shows the table."""
    sources, chosen = settings(toml, config)
    path = tokenizer or (Path(chosen.tokenizer) if chosen.tokenizer else None)
    if path is None:
        raise RunError("name a tokenizer: --tokenizer FILE, or tokenizer = … in the settings; a checkpoint's folder has one")
    path = path / "tokenizer.json" if path.is_dir() else path
    words = ["etude", "data", str(config), "--out", str(out), *(["--tokenizer", str(tokenizer)] if tokenizer else [])]
    words += [*(["--processes", str(processes)] if processes else []), "--resume"]
    record = prepare(out, sources, chosen, path, processes or cores(), resume, shlex.join(words))
    show(record, out)


def show(record: dict[str, Any], out: Path) -> None:
    """A line for each source, what was dropped, and the held-out codebase."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for name, side in (("source", "left"), ("weight", "right"), *((name, "right") for name in ("documents", "lines", "MB", "kept", "tokens"))):
        table.add_column(name, justify=side)  # pyright: ignore[reportArgumentType]
    table.add_column("dropped", overflow="fold")
    for one in record["sources"]:
        read, kept = one["read"], one["kept"]
        dropped = ", ".join(f"{some['count']:,} {why}" for why, some in one["dropped"].items()) or "–"
        table.add_row(
            one["name"],
            f"{one['weight']:g}",
            f"{read['documents']:,}",
            f"{read['lines']:,}",
            f"{read['bytes'] / 1e6:,.1f}",
            f"{kept['documents']:,}",
            f"{kept['tokens']:,}",
            dropped,
        )
    console = Console()
    console.print(table)
    for one in record["sources"]:
        console.print(f"licences of {one['name']}: " + (", ".join(f"{n:,} {name}" for name, n in one["licences"].items()) or "–"), highlight=False)
        if one["weight"] and not one["kept"]["documents"]:
            console.print(f"nothing is left of {one['name']}: it gets no rows", highlight=False)
    held = record["heldout"]
    near = f"{held['near']:,} training documents near it dropped"
    print(f"held out: {held['name']}, {held['documents']:,} documents, {held['bytes_of_text'] / 1e6:,.2f} MB; {near}")
    data = Prepared(out)
    print(f"data: {out}, {data.tokens:,} tokens in {data.documents:,} documents; what was dropped: {out / 'dropped.jsonl'}")
