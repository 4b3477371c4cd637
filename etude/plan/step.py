"""`etude plan`: memory, traffic, time and price of one step of a full run, as a table and a picture."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from kit.disk import atomic_write
from kit.settings import RunError

if TYPE_CHECKING:
    from rich.console import Console

    from ref.network import Config
    from scaled.plan import Hardware

__all__ = [
    "ASSUMPTIONS",
    "cells",
    "hardware_of",
    "network_of",
    "picture",
    "plan_steps",
    "show",
    "show_launches",
    "write",
]

ASSUMPTIONS = (
    "Counted, and checked against measurements by tests: parameters, state, activations (flash "
    "attention, blocks recomputed in the backward "
    "pass), bytes sent. FLOPs: 6 per active weight and token, plus causal attention; recomputation "
    "counts in the time but not in the FLOPs. "
    "Assumed: weights, gradients and moments stored in float32, compute in bfloat16; balanced routing; "
    "no overlap; operations between products are "
    "kernels of their own, whose bytes are within a tenth of those counted on a CPU; peak, bandwidth and "
    "links from data sheets. Guessed: {efficiency:.0%} of peak for matrix products, {latency:.0f} µs "
    "per collective, {price:g} dollars per "
    "GPU hour. The memory does not include the head, the loss or the allocator's rounding."
)


SIZES = {1e12: "T", 1e9: "G", 1e6: "M", 1e3: "k", 1.0: "", 1e-3: "m", 1e-6: "µ", 1e-9: "n"}
COUNTS = {1e9: " B", 1e6: " M", 1e3: " k", 1.0: ""}
"""Billions and millions, for counts of parameters."""


def cells(values: Sequence[float], unit: str, digits: int = 2, sizes: Mapping[float, str] = SIZES) -> list[str]:
    """Numbers in one common unit: large enough to be short, small enough that each shows two digits and none reads
    0."""
    scale = _scale(values, digits, sizes)
    return [
        f"{value / scale:,.{digits}f}{'' if sizes is COUNTS else ' '}{sizes[scale]}{unit}" if value else "0"
        for value in values
    ]


def _scale(values: Iterable[float], digits: int = 2, sizes: Mapping[float, str] = SIZES) -> float:
    least = min(filter(None, values), default=1.0)
    return next((scale for scale in sizes if least >= 0.2 * scale * 10 ** (2 - digits)), min(sizes))


def hardware_of(name: str) -> Hardware:
    """Raises RunError for unknown names."""
    from scaled.plan import HARDWARE

    if name not in HARDWARE:
        raise RunError(f"unknown hardware {name!r}; choose from {', '.join(HARDWARE)}")
    return HARDWARE[name]


def network_of(model: str) -> Config:
    """The shape of a network: qwen3_30b_a3b, tiny, or that of a Hugging Face folder. Raises RunError for anything
    else."""
    from ref.network import Config
    from ref.network.model import config_of

    if model in ("qwen3_30b_a3b", "qwen2_5_0_5b", "tiny"):
        return getattr(Config, model)()
    try:
        return config_of(model)
    except ValueError as error:
        raise RunError(
            f"--model expects qwen3_30b_a3b, qwen2_5_0_5b, tiny, or a Hugging Face folder; {error}"
        ) from None


def plan_steps(model: str, gpus: list[int], cp: int, ep: int, length: int, rows: int, hardware: str) -> list[dict]:
    """One record for each number of GPUs. Rows are at most as long as the network has positions. Raises RunError for
    unknown names and for sizes that do not divide evenly."""
    from scaled.plan import plan
    from scaled.runtime.mesh import Layout

    machine = hardware_of(hardware)
    if min(rows, length) < 1:
        raise RunError(f"--rows and --length must be at least 1, got {rows} and {length}")
    config = network_of(model)
    if length > config.max_position_embeddings:  # rounded down to a multiple that cp ranks can split
        length = max(config.max_position_embeddings // (2 * cp), 1) * 2 * cp
    records = []
    for n in gpus:
        if cp < 1 or n % cp:
            raise RunError(f"--cp must divide the number of GPUs: {cp} does not divide {n}")
        if config.num_experts % min(ep, n):
            raise RunError(f"--ep must divide the network's {config.num_experts} experts, got {min(ep, n)}")
        try:
            layout = Layout(dp=n // cp, cp=cp, ep=min(ep, n))
            step = plan(config, layout, rows * layout.dp, length)
        except ValueError as error:
            raise RunError(str(error)) from None
        seconds = step.seconds(machine, layout)
        seconds["compute"] *= 4 / 3  # one extra forward pass: blocks are recomputed
        total = seconds["network"] + max(seconds["compute"], seconds["memory"]) + seconds["eager"]
        tokens = step.tokens * n
        records.append(
            {
                "gpus": n,
                "length": length,
                "layout": asdict(layout),
                **{k: v for k, v in asdict(step).items()},
                "memory": step.memory,
                "seconds": seconds,
                "step_seconds": total,
                "tokens_per_step": tokens,
                "tokens_per_second": tokens / total,
                "share_of_peak": step.flops / total / machine.flops,
                "dollars_per_billion_tokens": 1e9 * n * machine.price * total / tokens / 3600,
                "fits": step.memory <= 0.92 * machine.memory,
                "capacity": machine.memory,
            }
        )
    return records


def show(plans: list[dict], model: str, hardware: str, console: Console | None = None) -> None:
    """Prints the table, and the assumptions under it, on `console` or on the terminal."""
    from rich.console import Console
    from rich.table import Table

    from scaled.plan import HARDWARE

    first = plans[0]
    parameters, active = (cells([first[key]], "", sizes=COUNTS)[0] for key in ("parameters", "active"))
    title = (
        f"{model} on {hardware}: {parameters} parameters, {active} active per token; rows of {first['length']:,} tokens"
    )
    table = Table(
        "per rank and step",
        *(f"{plan['gpus']} GPUs" for plan in plans),
        box=None,
        header_style="bold",
        title=title,
        title_justify="left",
    )

    def row(name: str, texts: Iterable[str]) -> None:
        table.add_row(name, *texts)

    def sizes(name: str, key: str, unit: str = "B", digits: int = 2) -> None:
        row(name, cells([plan[key] for plan in plans], unit, digits))

    row("dp · cp · ep", ["{dp} · {cp} · {ep}".format(**plan["layout"]) for plan in plans])
    row("tokens", [f"{plan['tokens']:,}" for plan in plans])
    for name, key in (
        ("weights, float32", "weights"),
        ("gradients, float32", "gradients"),
        ("AdamW's moments", "moments"),
        ("weights gathered", "gathered"),
        ("activations", "activations"),
    ):
        sizes(name, key)
    memory_cells = cells([plan["memory"] for plan in plans], "B", 1)
    row(
        "memory",
        [cell + ("" if plan["fits"] else ": too much") for cell, plan in zip(memory_cells, plans, strict=True)],
    )
    for name, key in (
        ("sent, weights", "fsdp"),
        ("sent, keys and values", "attention"),
        ("sent, expert rows", "experts"),
    ):
        sizes(name, key)
    sizes("FLOPs", "flops", "", 0)
    for name, key in (
        ("compute", "compute"),
        ("memory traffic", "memory"),
        ("between products", "eager"),
        ("network", "network"),
    ):
        row(f"time, {name}", cells([plan["seconds"][key] for plan in plans], "s"))
    sizes("step", "step_seconds", "s")
    row("tokens/s, all ranks", [f"{plan['tokens_per_second']:,.0f}" for plan in plans])
    row(
        "share of peak",
        [
            f"{share:.0%}" if share >= 0.1 else f"{100 * share:.2g}%"
            for share in (plan["share_of_peak"] for plan in plans)
        ],
    )
    row(
        "dollars per billion tokens",
        [
            f"{price:,.0f}" if price >= 10 else f"{price:.2g}"
            for price in (plan["dollars_per_billion_tokens"] for plan in plans)
        ],
    )
    console, machine = console or Console(), HARDWARE[hardware]
    console.print(table)
    console.print(
        ASSUMPTIONS.format(efficiency=machine.efficiency, latency=machine.latency * 1e6, price=machine.price),
        highlight=False,
    )


def show_launches(model: str, tokens: int, form: str, console: Console | None = None) -> None:
    """Prints what one layer of experts launches on one GPU that holds all of them: forward in a format, backward in
    MXFP8 (bfloat16 if that is the format), with bytes and FLOPs. Raises RunError for a network without experts and for
    formats that are not counted."""
    from rich.console import Console
    from rich.table import Table

    from scaled.runtime.engine import kernel

    config = network_of(model)
    if not config.num_experts:
        raise RunError(f"--launches lists the kernels of a layer of experts, and {model} has none")
    size = tokens, config.hidden_size, config.moe_intermediate_size, config.num_experts, config.num_experts_per_tok
    try:
        launches = kernel("launches").launches(*size, form, "bfloat16" if form == "bfloat16" else "mxfp8")
    except ValueError:
        raise RunError(f"--launches expects nvfp4-token, mxfp8 or bfloat16, got {form!r}") from None
    title = f"{model}: a layer of {size[3]} experts, {size[4]} per token, {tokens:,} tokens on one GPU"
    table = Table(
        "launch", "read", "written", "FLOPs", box=None, header_style="bold", title=title, title_justify="left"
    )
    bytes_read, bytes_written, flops = (
        [*(getattr(launch, key) for launch in launches), sum(getattr(launch, key) for launch in launches)]
        for key in ("bytes_read", "bytes_written", "flops")
    )
    names = [("backward: " if launch.backward else "") + launch.name for launch in launches]
    for row in zip(
        [*names, f"{len(launches)} launches"],
        cells(bytes_read, "B"),
        cells(bytes_written, "B"),
        cells(flops, ""),
        strict=True,
    ):
        table.add_row(*row)
    console = console or Console()
    console.print(table)
    console.print(
        "Bytes: each number that a launch reads or writes, once; the order of tiles lets the cache "
        "serve the rest. Scales lie in Blackwell's tiles. "
        "Assumed: balanced routing. FLOPs: those of the products, without padding. tests/kernels "
        "compare the list with what runs.",
        highlight=False,
    )


def picture(plans: list[dict], path: Path) -> None:
    """Left: what fills the memory of a rank. Right: where the time of a step goes."""
    from kit.plots import COLOURS, GREY, save, sheet

    figure, (left, right) = sheet(2, "A step of the full run")
    names = [f"{plan['gpus']}" for plan in plans]

    def stack(axis, parts: dict[str, list[float]]) -> None:
        base = [0.0] * len(plans)
        for (name, values), colour in zip(parts.items(), [*COLOURS, GREY], strict=False):
            axis.bar(names, values, bottom=base, color=colour, label=name, width=0.6)
            base = [a + b for a, b in zip(base, values, strict=True)]
        axis.set(xlabel="GPUs", ylim=(0, 1.4 * max(base)))
        axis.legend(frameon=False, loc="upper right")

    size = _scale(plan["memory"] for plan in plans)
    stack(
        left,
        {
            key: [plan[key] / size for plan in plans]
            for key in ("weights", "gradients", "moments", "gathered", "activations")
        },
    )
    left.axhline(plans[0]["capacity"] / size, color=GREY, linestyle="--", linewidth=1)
    left.set(ylabel=f"{SIZES[size]}B per rank (dashed: available)", title="Peak memory")
    second = _scale(plan["step_seconds"] for plan in plans)
    stack(
        right,
        {
            "compute": [max(plan["seconds"]["compute"], plan["seconds"]["memory"]) / second for plan in plans],
            "between products": [plan["seconds"]["eager"] / second for plan in plans],
            "network": [plan["seconds"]["network"] / second for plan in plans],
        },
    )
    right.set(ylabel=f"{SIZES[second]}s per step", title="Time, without overlap")
    save(figure, path)


def write(plans: list[dict], out: Path) -> None:
    """Writes plan.json and plan.png to a folder."""
    out.mkdir(parents=True, exist_ok=True)
    atomic_write(out / "plan.json", json.dumps(plans, indent=1) + "\n")
    picture(plans, out / "plan.png")
