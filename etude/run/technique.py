"""Techniques at the small scale, played and shown: their settings, their run, and the table of what came of it."""

from __future__ import annotations

import importlib
import json
import shlex
from pathlib import Path
from typing import Any

from etude import catalog
from etude.console import next_steps
from etude.console.options import check_unprepared
from kit import disk, process, settings
from kit.disk import read_json

__all__ = ["config_class", "play_technique", "print_settings"]


def config_class(entry: catalog.Technique) -> type:
    """The dataclass of a technique's settings at the small scale."""
    assert entry.module is not None
    module = importlib.import_module(entry.module)
    return getattr(module, {"recipe": "Recipe", "async-rl": "Async"}.get(entry.name, "Demo"))


def play_technique(
    entry: catalog.Technique, out: Path, toml: dict, sets: list[Any], resume: bool, cadence: float
) -> None:
    """Opens the run, runs the technique, prints the result."""
    from etude.console import expected
    from kit.process import keep_freed_memory
    from kit.runs import Run

    config = settings.fill(config_class(entry), toml, sets)
    check_unprepared(getattr(getattr(config, "data", config), "corpus", None))
    if entry.name == "recipe":
        from recipe.small.conversations import check_conversations

        check_conversations(config.sft.conversations)
        if config.sft.lora or config.rl.lora:
            raise settings.RunError("sft.lora and rl.lora are for full runs: etude run recipe --scale full")
    keep_freed_memory()
    resume_command = f"etude run {entry.name} --out {shlex.quote(str(out))} --resume"
    with Run.open(out, entry.name, config, resume, cadence) as run, run.report_interruption(resume_command):
        assert entry.module is not None
        expected.tell(run)
        module = importlib.import_module(entry.module)
        if entry.name == "recipe":
            from etude.run import summary as run_summary

            module.run(run, config)
            run_summary.show(run.root)
        elif entry.demo is not None or entry.ref is None:
            _finish_demo(run, module.run(run, config))
        else:
            _finish_demo(run, _run_demo(run, module.demo, config))
    if entry.name != "recipe":
        next_steps.show(next_steps.of_technique(entry))


def _run_demo(run: Any, demo: Any, config: Any) -> dict:
    """Runs a technique's demonstration, shows and logs its progress, and returns its result."""
    from kit.settings import RunError

    stage = run.stage("demo", total=1, unit="steps")
    if stage.finished:
        return stage.result()

    def log(step: int, total: int, **metrics: Any) -> None:
        stage.total = total
        stage.log(step, **metrics)
        stage.progress(step, **metrics)

    try:
        return stage.finish(demo(config, log))
    except ValueError as error:
        if not getattr(config, "corpus", None):
            raise
        raise RunError(f"{run.technique}: {error}") from error


def _finish_demo(run: Any, result: dict) -> None:
    record = {
        "technique": run.technique,
        "config": read_json(run.root / "config.json")["config"],
        "machine": process.machine(),
        "seconds": run.seconds(),
        "result": result,
    }
    disk.atomic_write(run.root / "report.json", json.dumps(record, indent=1) + "\n")
    print_result(run.technique, result)
    print(f"report: {run.root / 'report.json'}")


def print_result(title: str, result: dict) -> None:
    """Plain entries go into one table; lists of similar dicts and entries named `measure@x` get tables of their own."""
    from rich.console import Console
    from rich.table import Table

    console, plain = (
        Console(),
        Table("result", "value", box=None, header_style="bold", title=title, title_justify="left"),
    )
    grids = []
    curves: dict[str, dict[str, Any]] = {}
    for key, value in result.items():
        if "@" in key:
            measure, _, x = key.partition("@")
            curves.setdefault(x, {"at": x})[measure] = value
    plain_entries = {key: value for key, value in result.items() if "@" not in key}
    for key, value in [*([("by value", list(curves.values()))] if curves else []), *plain_entries.items()]:
        if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
            grid = Table(*value[0], box=None, header_style="bold", title_justify="left")
            grid.title = None if key == "by value" else key
            for row in value:
                grid.add_row(*(_format_cell(row.get(column)) for column in value[0]))
            grids.append(grid)
        elif isinstance(value, dict):
            for name, inner in value.items():
                plain.add_row(f"{key}.{name}", _format_cell(inner))
        else:
            plain.add_row(key, _format_cell(value))
    if plain.row_count:
        console.print(plain)
    for grid in grids:
        console.print(grid)


def _format_cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return " ".join(_format_cell(part) for part in value)
    return "–" if value is None else str(value)


def print_settings(entry: catalog.Technique | catalog.Experiment, backend: str | None = None) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        "setting",
        "default",
        "what",
        box=None,
        header_style="bold",
        title="Settings for --set and --config",
        title_justify="left",
    )
    if backend is not None:
        from etude.run import settings as full_settings

        cls = full_settings.settings(entry.name, backend)
    else:
        assert isinstance(entry, catalog.Technique)
        cls = config_class(entry)
    for key, kind, default, doc in settings.describe(cls):
        table.add_row(key, _format_cell(list(default) if isinstance(default, tuple) else default), doc or kind)
    Console().print(table)
