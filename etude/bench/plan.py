"""`etude bench plan`: does the plan predict step times correctly? Tested on this machine's CPUs with gloo, where
everything can be measured.

First it measures the machine, on all ranks at once: matrix products of the network's sizes, memory, latency and
bandwidth of an all-gather. For one shape, it also measures the efficiency of a step without communication, relative to
those products. From these numbers `scaled/plan.py` predicts the step time for every shape and layout. Then the steps
are timed. Nothing is fitted to their times."""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from etude.bench import write_record
from kit.disk import atomic_write, read_json
from kit.process import machine
from kit.settings import RunError
from ref.network import Config
from scaled.plan import Hardware, plan
from scaled.runtime.mesh import Layout

RANKS = 2
"""One rank per core."""
SHAPES = {
    "small": (Config.tiny(512), 8, 256),
    "wide": (
        Config.tiny(
            512,
            hidden_size=256,
            num_attention_heads=8,
            num_key_value_heads=2,
            moe_intermediate_size=256,
            num_hidden_layers=6,
        ),
        8,
        256,
    ),
    "long": (Config.tiny(512, hidden_size=128), 2, 2048),
}
"""Network, rows per step on all ranks together, tokens per row."""
LAYOUTS = (
    {"dp": 2, "cp": 1, "ep": 1},
    {"dp": 2, "cp": 1, "ep": 2},
    {"dp": 1, "cp": 2, "ep": 1},
    {"dp": 1, "cp": 2, "ep": 2},
)
ROUNDS = 9


def bench(out: Path | None = Path("results")) -> dict:
    """Measures, compares, writes out/plan-MACHINE.json. Raises RunError if the ranks fail."""
    from scaled.runtime import launch

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "measured.json"
        if launch.start("etude.bench.plan", [str(path)], RANKS, 0) or not path.exists():
            raise RunError("the ranks of etude bench plan failed; their errors are above")
        results = read_json(path)
    ratios = [row["predicted_s"] / row["measured_s"] for row in results["steps"]]
    record = {
        "what": "seconds of a training step (forward, backward, AdamW), predicted by scaled/plan.py from this "
        "machine's figures, and measured",
        "command": "etude bench plan",
        "machine": machine(),
        "ranks": RANKS,
        "rounds": ROUNDS,
        **results,
        "predicted_over_measured": {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)},
    }
    print("this machine, per rank: " + ", ".join(f"{name} {value:.3g}" for name, value in results["hardware"].items()))
    for row in results["steps"]:
        print(
            f"{row['shape']:6s} dp {row['dp']} cp {row['cp']} ep {row['ep']}: predicted "
            f"{row['predicted_s'] * 1e3:6.0f} ms, measured "
            f"{row['measured_s'] * 1e3:6.0f} ms [{row['least_s'] * 1e3:.0f}, {row['most_s'] * 1e3:.0f}], "
            f"{row['predicted_s'] / row['measured_s']:.2f}"
        )
    print(
        "predicted over measured: median {median:.2f}, from {least:.2f} to {most:.2f}".format(
            **record["predicted_over_measured"]
        )
    )
    return write_record(record, out, "plan", record["machine"]["cpu"])


def time_rounds(call: Callable[[], object], rounds: int = ROUNDS) -> list[float]:
    """Seconds of a call on all ranks together, by the slowest rank, round by round, without the first two."""
    seconds = []
    for _ in range(rounds + 2):
        dist.barrier()
        start = time.perf_counter()
        call()
        elapsed = torch.tensor([time.perf_counter() - start])
        dist.all_reduce(elapsed, dist.ReduceOp.MAX)
        seconds.append(elapsed.item())
    return seconds[2:]


def measure_hardware(config: Config, tokens: int, efficiency: float) -> Hardware:
    """One core of this machine while the other ranks are busy, too: products with the shapes of the projections give
    FLOPs, a copy gives bandwidth, all-gathers of 4 kB and 4 MB give latency and link."""
    D, width = config.hidden_size, 2 * config.num_attention_heads * config.head_dim
    a, b = torch.randn(tokens, D), torch.randn(D, width)
    flops = 2 * tokens * D * width / statistics.median(time_rounds(lambda: a @ b))
    x = torch.randn(16 * 2**20)
    copied = 2 * x.numel() * 4 / statistics.median(time_rounds(lambda: x.clone()))

    def gather(n: int) -> float:
        part, gathered = torch.randn(n), torch.empty(RANKS * n)
        return statistics.median(time_rounds(lambda: dist.all_gather_into_tensor(gathered, part)))

    small, large = gather(1024), gather(2**20)
    link = (RANKS - 1) * (2**20 - 1024) * 4 / max(large - small, 1e-9)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / RANKS
    return Hardware(flops, memory, copied, RANKS, link, link, small, efficiency, 0.0, flops)


def make_step(config: Config, rows: int, length: int) -> Callable[[], None]:
    """A training step on this rank, as in `scaled/pretrain.py`."""
    from scaled import cpt, muon
    from scaled.network.model import Transformer
    from scaled.runtime.cut import cut

    torch.manual_seed(0)
    model = Transformer(config)
    optimizers = muon.optimizers(model, use_muon=False)
    ids = cut(torch.randint(0, config.vocab_size, (rows, length)))

    def step() -> None:
        out = model(ids, logits=False)
        loss, count = cpt.next_token_loss(model, out.hidden, ids)
        (loss / count).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return step


def rank(path: Path) -> None:
    """The work of each rank; rank 0 writes the result."""
    from scaled.runtime import launch
    from scaled.runtime.mesh import mesh

    torch.set_num_threads(1)
    steps, hardware_by_shape = [], {}
    with launch.world("gloo", 300.0) as me:
        config, rows, length = SHAPES["small"]
        alone = statistics.median(time_rounds(make_step(config, rows // RANKS, length)))
        step_plan = plan(config, Layout(), rows // RANKS, length, computed=4, remake=False)
        efficiency = (
            step_plan.seconds(measure_hardware(config, rows * length // RANKS, 1.0), Layout())["compute"] / alone
        )
        for name, (config, rows, length) in SHAPES.items():
            shape_hardware = measure_hardware(config, rows * length // RANKS, efficiency)
            hardware_by_shape[name] = shape_hardware
            for layout in LAYOUTS:
                with mesh(**layout):
                    seconds = time_rounds(make_step(config, rows, length))
                step_plan = plan(config, Layout(**layout), rows, length, computed=4, remake=False)
                parts = step_plan.seconds(shape_hardware, Layout(**layout))
                steps.append(
                    {
                        "shape": name,
                        **layout,
                        "rows": rows,
                        "length": length,
                        "parameters": step_plan.parameters,
                        "predicted_s": parts["network"] + max(parts["compute"], parts["memory"]),
                        "predicted": parts,
                        "measured_s": statistics.median(seconds),
                        "least_s": min(seconds),
                        "most_s": max(seconds),
                    }
                )
        if me == 0:
            small_hardware = hardware_by_shape["small"]
            figures = {
                "GFLOP/s": statistics.median(h.flops for h in hardware_by_shape.values()) / 1e9,
                "GB/s": small_hardware.bandwidth / 1e9,
                "link GB/s": small_hardware.near / 1e9,
                "latency µs": small_hardware.latency * 1e6,
                "efficiency": efficiency,
            }
            atomic_write(path, json.dumps({"hardware": figures, "steps": steps}))


if __name__ == "__main__":
    import sys

    rank(Path(sys.argv[1]))
