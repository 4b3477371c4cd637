"""`etude plan --kernels`: what the launches of `kernels/cost.py` cost on four GPUs at least, and which ratios of the
kernels post that explains.

The post is Cursor's, on a layer of experts in MXFP8 (cursor.com/blog/kernels). Its figures are of B200 and H100, and of
shapes that it does not name. A ratio is explained if the model, with no number fitted to it, comes within a tenth;
nearly, if within a quarter. Two ratios need the width of the product, which is our assumption.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kit.disk import atomic_write
from scaled.runtime.engine import kernel

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["FORMATS", "QWEN3", "Cost", "Ratio", "costs", "ratios", "show", "write"]

QWEN3 = {"tokens": 32_768, "hidden": 2048, "width": 768, "experts": 128, "top": 8}
"""A layer of experts of Qwen3-30B-A3B on one GPU, at 32,768 tokens."""
FORMATS = (("bfloat16", "bfloat16"), ("fp8", "fp8"), ("mxfp8", "mxfp8"), ("nvfp4-token", "mxfp8"))
"""Formats of the products of the forward pass, and of those of both gradients."""


@dataclass(frozen=True)
class Cost:
    """What some launches cost at least."""

    work: str
    format: str
    launches: int
    bytes: float
    flops: float
    microseconds: dict[str, float]
    """The floor on each GPU."""
    quantisers: dict[str, float]
    """Time of launches that quantise over that of products, on each GPU."""


@dataclass(frozen=True)
class Ratio:
    """A figure of the kernels post, and the same from the model."""

    name: str
    post: float
    model: float
    reason: str
    """How the model comes by its figure, or why it is another."""

    @property
    def explained(self) -> str:
        deviation = abs(self.model / self.post - 1)
        return "yes" if deviation <= 0.1 else "nearly" if deviation <= 0.25 else "no"


def make_cost(work: str, form: str, launches: list) -> Cost:
    model = kernel("cost")
    return Cost(
        work,
        form,
        len(launches),
        sum(launch.bytes for launch in launches),
        sum(launch.flops for launch in launches),
        {name: 1e6 * model.floor(launches, gpu) for name, gpu in model.GPUS.items()},
        {name: model.share_of_quantisers(launches, gpu) for name, gpu in model.GPUS.items()},
    )


def costs() -> list[Cost]:
    """8192³, and the layer of Qwen3-30B-A3B: its quantisers fused with what makes their numbers, and apart."""
    model, rows = kernel("cost"), []
    for form in ("bfloat16", "fp8", "mxfp8", "nvfp4-token"):
        rows.append(make_cost("8192³", form, model.quantised_product(8192, 8192, 8192, form)))
    for fused in (True, False):
        for forward, backward in FORMATS[0 if fused else 1 :]:
            forward_launches, backward_launches = model.moe(**QWEN3, forward=forward, backward=backward, fused=fused)
            way = "" if fused else ", apart"
            rows.append(make_cost(f"experts forward{way}", forward, forward_launches))
            rows.append(make_cost(f"experts backward{way}", backward, backward_launches))
    # NVFP4's backward pass is MXFP8's.
    return list({(row.work, row.format): row for row in rows}.values())


def ratios() -> list[Ratio]:
    """The post's figures that are ratios, or become one by division."""
    model = kernel("cost")
    b200, h100 = model.GPUS["b200"], model.GPUS["h100"]
    (single_launch,), (double_launch,) = (
        model.quantised("x", 131_072, 7168, *forms) for forms in (("mxfp8",), ("mxfp8", "mxfp8"))
    )

    def share(columns: int) -> float:
        return model.floor(single_launch, b200) / (2 * 131_072 * 7168 * columns / b200.fp8)

    def layer(forward: str, backward: str, gpu) -> float:
        return sum(model.floor(part, gpu) for part in model.moe(**QWEN3, forward=forward, backward=backward))

    def step(backward: float) -> float:
        """Speed-up of a step whose backward pass takes `backward` times the forward pass, if experts become 3.5 times
        as fast."""
        return (1 + backward) / (1 + backward - (0.53 + 0.27 * backward) * (1 - 1 / 3.5))

    narrow = share(2048)
    return [
        Ratio(
            "expanding codes on ordinary cores over the product, B200",
            1.76,
            b200.fp8 / b200.float32 / 32,
            "one multiply-add per 32 products: FP8 peak over float32 peak, by 32",
        ),
        Ratio(
            "the same, H100",
            1.03,
            h100.fp8 / h100.float32 / 32,
            "the same; the data sheet's 67 TFLOP/s of float32. With 60, an early figure, it is 1.03",
        ),
        Ratio(
            "2.9 GB quantised in 0.44 ms: share of the bandwidth",
            2.9e9 / 0.44e-3 / 8e12,
            1.0,
            "the floor is 0.36 ms at 8 TB/s",
        ),
        Ratio(
            "quantisation over the product, forward",
            0.40,
            narrow,
            f"both at their peaks, if the product has 2048 columns; {share(1536):.2f} for 1536, "
            f"{share(8192):.2f} for 8192",
        ),
        Ratio(
            "quantisation, backward over forward",
            0.88 / 0.44,
            2.0,
            f"a pass for each orientation; one pass for both takes {double_launch.bytes / single_launch.bytes:.2f}",
        ),
        Ratio("quantisation over the product, backward", 0.76, 2 * narrow, "twice the forward's; the same assumption"),
        Ratio(
            "bandwidth of its quantiser over others'",
            6.2 / 4.5,
            1.0,
            "both move the same bytes; the model does not distinguish better and worse code",
        ),
        Ratio(
            "the layer in MXFP8 over bfloat16, B200",
            3.5,
            layer("bfloat16", "bfloat16", b200) / layer("mxfp8", "mxfp8", b200),
            "peaks differ by 2, and quantisation costs; the rest is the old code's distance from its floor",
        ),
        Ratio(
            "a step, from the layer's 3.5",
            1.5,
            step(2),
            f"53% of forward, 27% of backward, which takes twice as long; {step(0):.2f} for forward alone",
        ),
        Ratio(
            "a step in MXFP8 on B200 over bfloat16 on H100",
            2.0,
            layer("bfloat16", "bfloat16", h100) / layer("mxfp8", "mxfp8", b200),
            "for experts alone; a step has more than experts",
        ),
    ]


def show(console: Console | None = None) -> None:
    """Prints both tables, and what they leave out, on `console` or on the terminal."""
    from rich.console import Console
    from rich.table import Table

    console, gpus = console or Console(), kernel("cost").GPUS
    table = Table(
        "work",
        "format",
        "launches",
        "GB",
        "TFLOP",
        *(f"µs {gpu}" for gpu in gpus),
        "quantise",
        box=None,
        header_style="bold",
    )
    table.title, table.title_justify = (
        "Floors in microseconds; 'quantise': time of quantisers over time of products, B200",
        "left",
    )
    for column in table.columns[2:]:
        column.justify = "right"
    for cost in costs():
        times = (f"{time:,.0f}" for time in cost.microseconds.values())
        share = f"{cost.quantisers['b200']:.0%}" if cost.quantisers["b200"] else "–"
        table.add_row(
            cost.work,
            cost.format,
            f"{cost.launches}",
            f"{cost.bytes / 1e9:.2f}",
            f"{cost.flops / 1e12:.2f}",
            *times,
            share,
        )
    console.print(table)
    ratio_table = Table("the kernels post's ratio", "post", "model", "explained", "how", box=None, header_style="bold")
    for ratio in ratios():
        ratio_table.add_row(ratio.name, f"{ratio.post:.2f}", f"{ratio.model:.2f}", ratio.explained, ratio.reason)
    console.print()
    console.print(ratio_table)
    console.print(
        "\nCounted: bytes that each launch reads and writes once, weights' quantisation among them, "
        "and FLOPs of products. Peaks and bandwidths "
        "are those of data sheets, dense. Not counted: starting a launch, tiles that are not full, "
        "uneven experts, caches, and how far code "
        "stays from its floor. docs/speed.md has what an H100 measured.",
        highlight=False,
    )


def write(out: Path) -> None:
    """Writes kernels-plan.json to a folder."""
    out.mkdir(parents=True, exist_ok=True)
    record = {
        "costs": [asdict(row) for row in costs()],
        "ratios": [{**asdict(row), "explained": row.explained} for row in ratios()],
    }
    atomic_write(out / "kernels-plan.json", json.dumps(record, indent=1) + "\n")
