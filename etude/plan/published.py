"""`etude plan --published`: the plan's tokens per second beside what others have measured on Qwen3-30B-A3B.

The runs are of code whose operations between products are fused, so the plan is compared without the time of those
operations (`scaled.plan.eager_bytes`). The column beside it has them, as this project launches them.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from etude.plan.step import hardware_of, network_of
from kit.disk import atomic_write
from scaled.plan import plan
from scaled.runtime.mesh import Layout

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["FACTOR", "RUNS", "PublishedRun", "compare", "show", "write"]

FACTOR = 1.5
"""The plan claims to be within this factor of tuned code."""


@dataclass(frozen=True)
class PublishedRun:
    """A training run on Qwen3-30B-A3B, as its authors describe it."""

    name: str
    source: str
    gpus: int
    cp: int
    ep: int
    rows: int
    """Of each group of cp ranks in a micro-batch."""
    length: int
    tokens_per_second: float
    """Of each GPU."""


RUNS = (
    PublishedRun(
        "NeMo AutoModel",
        "https://docs.nvidia.com/nemo/automodel/performance/performance-summary.md",
        8, 1, 8, 4, 4096, 12_040,
    ),
    PublishedRun(
        "Megatron Bridge, FP8",
        "https://docs.nvidia.com/nemo/megatron-bridge/latest/performance-summary.html",
        16, 1, 8, 2, 4096, 5275,
    ),
    PublishedRun(
        "Pai-Megatron, H800", "https://github.com/alibaba/Pai-Megatron-Patch/issues/643", 16, 1, 8, 1, 8192, 6325
    ),
    PublishedRun(
        "transformers",
        "https://github.com/huggingface/transformers/issues/45436",
        64, 1, 64, 1, 16_384, 3602,
    ),
    PublishedRun(
        "TRL", "https://github.com/huggingface/trl/issues/6845", 8, 8, 8, 1, 2**20, 2**20 / 483 / 8
    ),
)  # fmt: skip
"""All on H100 but for one on H800, which is planned as an H100."""


def compare() -> list[dict]:
    """A row for each run: its fields, and of the plan on H100 `planned` (tokens per second of each GPU), `ratio`
    (planned to published) and `eager`, the plan with the operations between products."""
    rows, hardware, network = [], hardware_of("h100"), network_of("qwen3_30b_a3b")
    for run in RUNS:
        config = replace(network, max_position_embeddings=max(run.length, network.max_position_embeddings))
        layout = Layout(run.gpus // run.cp, run.cp, run.ep)
        step = plan(config, layout, run.rows * layout.dp, run.length)
        seconds = step.seconds(hardware, layout)
        # One extra forward pass: blocks are recomputed.
        tuned = seconds["network"] + max(4 / 3 * seconds["compute"], seconds["memory"])
        planned, eager = step.tokens / tuned, step.tokens / (tuned + seconds["eager"])
        rows.append({**asdict(run), "planned": planned, "ratio": planned / run.tokens_per_second, "eager": eager})
    return rows


def show(console: Console | None = None) -> None:
    """Prints the table."""
    from rich.console import Console
    from rich.table import Table

    console, rows = console or Console(), compare()
    table = Table(
        box=None, header_style="bold", title="Qwen3-30B-A3B on H100: tokens/s of each GPU", title_justify="left"
    )
    table.add_column("run")
    for heading in ("GPUs", "length", "published", "planned", "ratio", "eager"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        numbers = (f"{row[key]:,.0f}" for key in ("gpus", "length", "tokens_per_second", "planned"))
        table.add_row(row["name"], *numbers, f"{row['ratio']:.2f}", f"{row['eager']:,.0f}")
    console.print(table)
    num_close = sum(1 / FACTOR <= row["ratio"] <= FACTOR for row in rows)
    console.print(
        f"{num_close} of {len(rows)} within a factor of {FACTOR:g}. Planned: without the operations between products, "
        "which these runs fuse; eager: with them, as this project launches them. Sources: results/published-plan.json.",
        highlight=False,
    )


def write(out: Path) -> None:
    """Writes published-plan.json to a folder."""
    out.mkdir(parents=True, exist_ok=True)
    atomic_write(out / "published-plan.json", json.dumps(compare(), indent=1, ensure_ascii=False) + "\n")
