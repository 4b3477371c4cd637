"""Times kernels on a GPU against the best alternative calls (`etude/bench/kernel_cases.py`), behind a gate: a wrong
result gets no number.

Contenders take turns. Each number is the median over rounds of a ratio within a round.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path

import torch

from etude.bench import machine_with_gpu, write_record
from etude.bench.kernel_cases import Case, cases
from kit.settings import RunError


def kernels(out: Path | None = Path("results"), rounds: int = 15) -> dict:
    """Times every kernel on the first GPU and writes out/kernels-DEVICE.json. Raises RunError without a GPU. A case
    that fails its gate is named and gets no number."""
    if not torch.cuda.is_available():
        raise RunError(
            "etude bench kernels needs a CUDA GPU; on this machine, `make test` runs the kernels in the interpreter"
        )
    import triton

    results = []
    for case in cases("cuda"):
        wrong = case.gate()
        line = {"case": case.name, "size": case.size, "wrong": wrong}
        if wrong is None:
            line |= summary(case, take_turns(case.kernels | case.baselines, rounds))
        results.append(line)
        print(sentence(line))
        del case
        torch.cuda.empty_cache()
    box = machine_with_gpu() | {"triton": triton.__version__}
    record = {
        "what": "kernels beside what one would otherwise call, seconds and ratios",
        "command": "etude bench kernels",
        "machine": box,
        "rounds": rounds,
        "results": results,
    }
    return write_record(record, out, "kernels", box["gpu"])


def take_turns(contenders: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of every contender, round by round; the L2 cache is overwritten between calls."""
    flush = torch.empty(256 * 2**20, dtype=torch.int8, device="cuda")
    names, seconds = list(contenders), {name: [] for name in contenders}
    for turn in range(rounds + 3):
        for name in names:
            flush.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            contenders[name]()
            end.record()
            torch.cuda.synchronize()
            if turn >= 3:
                seconds[name].append(begin.elapsed_time(end) / 1000)
        names.append(names.pop(0))
    return seconds


def summary(case: Case, seconds: dict[str, list[float]]) -> dict:
    """Medians, and the speed of every kernel over every baseline; for memory-bound kernels, bytes/s over those of the
    copy."""
    ratios = {}
    for kernel in case.kernels:
        for name in case.baselines:
            speedups = sorted(
                baseline_seconds / kernel_seconds
                for kernel_seconds, baseline_seconds in zip(seconds[kernel], seconds[name], strict=True)
            )
            quarter = len(speedups) // 4
            ratios[f"{kernel} / {name}"] = [
                round(v, 3) for v in (statistics.median(speedups), speedups[quarter], speedups[-1 - quarter])
            ]
    middle = {name: statistics.median(values) for name, values in seconds.items()}
    rate = {"TB/s": case.bytes / 1e12} if case.bytes else {"TFLOP/s": case.flops / 1e12} if case.flops else {}
    rates = {unit: {name: round(amount / s, 3) for name, s in middle.items()} for unit, amount in rate.items()}
    return {"seconds": middle, "ratio_and_middle_half": ratios, **rates, **case.note}


def sentence(line: dict) -> str:
    head = f"{line['case']}, {line['size']}"
    if line["wrong"]:
        return f"{head}: no speed reported, {line['wrong']}"
    return f"{head}: " + "; ".join(
        f"{name} {low:.2f} [{a:.2f}, {b:.2f}]" for name, (low, a, b) in line["ratio_and_middle_half"].items()
    )
