"""`etude eval base`: the report's Table 2 for any checkpoints, as JSON, CSV, a picture and a table on the screen."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etude.console import expected
from etude.ledger import figures
from kit.disk import atomic_write, read_json
from kit.process import keep_freed_memory, machine
from kit.runs import Run
from kit.settings import fill
from sims.base_evaluations import table, tracking
from sims.base_evaluations.experiment import Experiment

__all__ = ["TECHNIQUE", "base"]

TECHNIQUE = "eval base"


@dataclass(frozen=True)
class BaseEvalConfig(table.Settings):
    """Which models are asked what."""

    names: tuple[str, ...] = ()
    """The checkpoints."""


def base(
    names: Sequence[str], out: Path, toml: dict, sets: Iterable[Any], quick: bool, resume: bool, cadence: float
) -> dict:
    """Evaluates the checkpoints in the run folder `out`, or goes on with it, and writes base.json, base.csv and
    base.png there. Returns the content of base.json. Raises RunError as `Run.open`, `fill` and
    `sims.base_evaluations.models.open_base` do."""
    field_names = {field.name for field in dataclasses.fields(table.Settings)}
    small = (
        {name: value for name, value in dataclasses.asdict(Experiment.quick()).items() if name in field_names}
        if quick
        else {}
    )
    settings = fill(table.Settings, small | toml, sets)
    config = BaseEvalConfig(**dataclasses.asdict(settings), names=tuple(names))
    resume_command = f"etude eval base {shlex.join(names)} --out {shlex.quote(str(out))} --resume"
    keep_freed_memory()
    with Run.open(out, TECHNIQUE, config, resume, cadence) as run, run.report_interruption(resume_command):
        expected.tell(run)
        results = table.measure_models(run, names, settings)
        rows = table.rows_of(results, tracking.baselines(table.asked_chains(run)), settings)
        record = {
            "command": resume_command.removesuffix(" --resume"),
            "config": read_json(out / "config.json")["config"],
            "machine": machine(),
            "seconds": run.seconds(),
            "rows": rows,
        }
        atomic_write(out / "base.csv", figures.as_csv(rows))
        table.picture(rows, out / "base.png")
        atomic_write(out / "base.json", json.dumps(record, indent=1) + "\n")
    show(rows)
    print(f"table: {out / 'base.json'} and base.csv; picture: base.png; questions, chains and files: {out / 'data'}")
    return record


def show(rows: Sequence[dict]) -> None:
    """Prints the table: value and 95% interval; behind knowledge, what is right without the question; exact match."""
    from rich.console import Console
    from rich.table import Table

    def cell(row: dict, name: str, stem: str = "", form: str = ".1f") -> str:
        if name not in row:
            return ""
        low = row.get(f"{stem or name}_low")
        return f"{row[name]:{form}}" + ("" if low is None else f" [{low:{form}}, {row[f'{stem or name}_high']:{form}}]")

    grid = Table(
        "model",
        "knowledge, %",
        "without question",
        "exact",
        "state tracking",
        "exact",
        "NLL, nats",
        "bits per byte",
        box=None,
        header_style="bold",
        pad_edge=False,
    )
    for row in rows:
        form, *exact = [
            f"{row[name]:.0f}%" if name in row else ""
            for name in ("knowledge_form", "knowledge_exact", "tracking_exact")
        ]
        nll, bits = cell(row, "nats", form=",.0f"), cell(row, "bits_per_byte", "bits", ".3f")
        grid.add_row(row["model"], cell(row, "knowledge"), form, exact[0], cell(row, "tracking"), exact[1], nll, bits)
    Console().print(grid)
