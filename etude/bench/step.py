"""`etude bench step`: a training step of a network's true widths with few layers, on one device, beside what `etude
plan` says of it.

Weights, gradients and AdamW's moments are in one dtype (bfloat16 on a GPU): a single rank gathers nothing, so the
float32 state of a full run is not part of what is measured, nor is communication. Rows are packed from documents. Each
cell is timed after warm-up steps, then once more under the profiler, which counts launches and says which of them take
the time.

    MFU = FLOPs of forward and backward / (seconds · peak)      recomputed blocks count in the seconds, not in the FLOPs
                                                                (arXiv:2204.02311)
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from etude.bench import machine_with_gpu, write_record
from etude.bench.random_network import config_with_layers, hardware, random_network
from kit.settings import RunError
from ref.network import Config
from ref.packing import Cost
from scaled import cpt, muon
from scaled.network.model import load_balancing_loss
from scaled.plan import saved
from scaled.runtime.mesh import computing

__all__ = ["bench", "measure"]

DOCUMENT = 2048
"""Tokens of a document; the last one of a row is cut."""
CELLS = ({"rematerialise": False}, {"rematerialise": True}, {"rematerialise": True, "experts": "mxfp8"})
"""Formats of `scaled.runtime.mesh.Compute`, one after the other. Quantised experts are left out where the network has
none."""


def bench(
    model: str, layers: int, tokens: int, length: int, out: Path | None = Path("results"), rounds: int = 6
) -> dict:
    """Times a step of `tokens` tokens in rows of `length`, prints a line per cell and writes out/step-DEVICE.json.
    Raises RunError for sizes that do not divide, and for a network that does not exist."""
    if length < 2 or tokens < length or tokens % length:
        raise RunError(f"--tokens must be a multiple of --length, and --length at least 2; got {tokens} and {length}")
    config, cells = config_with_layers(model, layers), []
    for formats in CELLS:
        if not config.num_experts and "experts" in formats:
            continue
        cells.append(measure(config, tokens // length, length, formats, rounds))
        print(format_cell(cells[-1]), flush=True)
    box = machine_with_gpu()
    record = {
        "what": "a training step (forward, backward, AdamW) on one device, random weights, beside the plan's "
        "figures; medians of rounds",
        "command": f"etude bench step --model {model} --layers {layers} --tokens {tokens} --length {length}",
        "machine": box,
        "model": model,
        "layers": layers,
        "parameters": config.parameters(),
        "active": config.parameters(active=True),
        "tokens": tokens,
        "length": length,
        "document": DOCUMENT,
        "rounds": rounds,
        "cells": cells,
    }
    return write_record(record, out, "step", box.get("gpu", box["cpu"]))


def measure(config: Config, rows: int, length: int, formats: dict, rounds: int) -> dict:
    """One cell: seconds of each round, launches, bytes and the plan's figures."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = random_network(config, dtype, device)
    optimizers = muon.optimizers(model, use_muon=False, adamw_lr=1e-5)
    generator = torch.Generator(device).manual_seed(1)
    ids = torch.randint(config.vocab_size, (rows, length), generator=generator, device=device)
    documents = (torch.arange(length, device=device) // DOCUMENT).expand(rows, length).contiguous()

    def step() -> Tensor:
        out = model(ids, doc=documents, logits=False)
        loss, count = cpt.next_token_loss(model, out.hidden, ids, documents)
        loss = loss / count
        if out.router_logits:
            loss = loss + config.router_aux_loss_coef * load_balancing_loss(out.router_logits, out.experts)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    with computing(**formats):
        for _ in range(3):
            loss = step()
        state = sum(x.numel() * x.element_size() for x in model.parameters())
        moments = sum(
            x.numel() * x.element_size()
            for adamw in optimizers
            for s in adamw.state.values()
            for x in s.values()
            if isinstance(x, Tensor)
        )
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        seconds = []
        for _ in range(rounds):
            start = time.perf_counter()
            loss = step()
            loss.item()
            seconds.append(time.perf_counter() - start)
        peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
        launch_counts = count_launches(step, device)
    cost, chip = Cost.of(config), hardware()
    document = min(DOCUMENT, length)
    forward = rows * length * (cost.linear + cost.quadratic * document)
    middle = statistics.median(seconds)
    # On one rank nothing is gathered. Beyond the plan: the head, the loss, and what the allocator rounds up.
    activations = saved(config, rows * length, formats["rematerialise"], dtype.itemsize)
    cell = {
        "formats": formats,
        "dtype": str(dtype).removeprefix("torch."),
        "seconds": seconds,
        "tokens_per_second": rows * length / middle,
        "flops": 3 * forward,
        "loss": loss.item(),
        "weights_bytes": state,
        "moments_bytes": moments,
        "planned_bytes": {"weights": state, "gradients": state, "moments": moments, "activations": activations},
        "peak_bytes": peak,
        **launch_counts,
    }
    if chip is not None and peak is not None:
        executed = forward * (4 if formats["rematerialise"] else 3)
        planned = executed / (chip.flops * chip.efficiency)
        cell |= {
            "hardware": asdict(chip),
            "mfu": 3 * forward / middle / chip.flops,
            "planned_seconds": planned,
            "planned_over_measured": planned / middle,
            "planned_over_peak": (2 * state + moments + activations) / peak,
        }
    return cell


def count_launches(step, device: torch.device) -> dict:
    """How many kernels a step launches, and the ten that take most of its time; nothing on a CPU."""
    if device.type != "cuda":
        return {}
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiled:
        step().item()
    kernels: dict[str, list[float]] = {}
    for event in profiled.events() or []:
        if event.device_type == DeviceType.CUDA:
            kernels.setdefault(event.name, []).append(event.self_device_time_total / 1e6)
    slow = sorted(kernels.items(), key=lambda item: -sum(item[1]))
    return {
        "launches": sum(map(len, kernels.values())),
        "kernel_seconds": sum(map(sum, kernels.values())),
        "slowest": [{"kernel": name[:120], "launches": len(times), "seconds": sum(times)} for name, times in slow[:10]],
    }


def format_cell(cell: dict) -> str:
    """The cell in a line."""
    name = ", ".join(f"{key} {json.dumps(value)}" for key, value in cell["formats"].items())
    text = f"{name}: {statistics.median(cell['seconds']):.3f} s, {cell['tokens_per_second']:,.0f} tokens/s"
    if "mfu" in cell:
        text += (
            f", MFU {cell['mfu']:.1%}, {cell['launches']:,} launches; plan "
            f"{cell['planned_over_measured']:.2f} of the time, "
            f"{cell['planned_over_peak']:.2f} of {cell['peak_bytes'] / 1e9:.1f} GB"
        )
    return text
