"""What a finished run of the recipe shows on the terminal."""

from pathlib import Path

from rich.console import Console
from rich.table import Table

from etude.console import expected, next_steps
from etude.report import page, record, rollouts, watched
from kit.disk import read_json, read_lines, sum_stage_seconds

__all__ = ["show"]


def show(root: Path) -> None:
    """Writes the report of the run folder `root`, and prints held-out success before and after RL, what has changed in
    RL, where the files are, how long it took, and what can be done next."""
    page_path, record_path = page.write(root, rollouts.render_rollouts)
    results = read_json(record_path)
    rows = record.before_after(results)
    if rows:
        headings = record.columns(results)
        table = Table("held-out tasks", *headings, box=None, header_style="bold")
        for row in rows:
            table.add_row(*row)
        Console().print(table)
    lines = read_lines(root / "metrics" / "rl.jsonl") if (root / "metrics" / "rl.jsonl").exists() else []
    for sentence in (watched.sentence(lines), record.describe_failed(results, lines)):
        if sentence:
            print(f"RL:     {sentence}")
    print(f"report: {page_path} and {record_path}")
    if (root / "checkpoints" / "final").is_dir():
        print(f"model:  {root / 'checkpoints' / 'final'}")
    print(f"took:   {expected.duration(sum(sum_stage_seconds(root).values()))}")
    next_steps.show(next_steps.of_agent(root))
