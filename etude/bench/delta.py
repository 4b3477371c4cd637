"""`etude bench delta`: how fast one core encodes and decodes weight deltas, beside zstd level 1 on the same bytes.

Two versions of the same bfloat16 weights, of which a share differs by one step. Three ways to send the second to who
has the first:

    gap + step   `scaled/weight_sync.py`: compare, pack; unpack, apply to a copy
    XOR          XOR of all bits under zstd level 1, as others do
    all          the second version itself under zstd level 1

Bandwidth is bytes of weights a second: of what is synchronised, not of what travels. Ways take turns, and a round whose
bits differ after the round trip ends the benchmark. Digests are measured apart: they are the same whatever is sent.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zstandard

from etude.bench import write_record
from kit.process import machine
from kit.settings import RunError
from scaled.weight_sync import Part, apply_delta, digest, encode_delta, pack, unpack

SHARES = (0.003, 0.012, 0.02, 0.14)
"""Shares of changed weights: AdamW at 1e-6, the middle, the report's 2%, and AdamW at 1e-4."""
TARGET = 0.7
"""Of zstd's bandwidth, both ways."""


def make_versions(n: int, share: float, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """n weights, and the same after a step."""
    generator = torch.Generator().manual_seed(seed)
    old = (0.02 * torch.randn(n, generator=generator)).bfloat16()
    new, at = old.clone(), (torch.rand(n, generator=generator) < share).nonzero()[:, 0]
    new.view(torch.int16)[at] += 2 * torch.randint(0, 2, (len(at),), generator=generator).to(torch.int16) - 1
    return old, new


def make_codecs(
    old: torch.Tensor, new: torch.Tensor
) -> dict[str, tuple[Callable[[], bytes], Callable[[bytes], np.ndarray]]]:
    """Encoder and decoder by name."""
    a, b = (x.view(torch.int16).numpy() for x in (old, new))

    def compress(x: np.ndarray) -> bytes:
        return zstandard.ZstdCompressor(level=1).compress(x.data)

    def decompress(blob: bytes) -> np.ndarray:
        return np.frombuffer(zstandard.ZstdDecompressor().decompress(blob), dtype=np.int16)

    return {
        "gap + step": (
            lambda: pack(*encode_delta(old, new), len(old)),
            lambda blob: apply_delta(old, *unpack(blob, len(old))).view(torch.int16).numpy(),
        ),
        "XOR": (lambda: compress(a ^ b), lambda blob: a ^ decompress(blob)),
        "all": (lambda: compress(b), decompress),
    }


def bench(out: Path | None = Path("results"), weights: int = 2**25, rounds: int = 7) -> dict[str, Any]:
    """Prints a table and writes out/delta-CPU.json. Raises RunError if a round trip changes a bit."""
    thread_count, rows, loads = torch.get_num_threads(), [], []
    torch.set_num_threads(1)
    try:
        for share in SHARES:
            old, new = make_versions(weights, share)
            expected, codecs = new.view(torch.int16).numpy(), make_codecs(old, new)
            seconds: dict[tuple[str, str], list[float]] = {
                (name, part): [] for name in codecs for part in ("encode", "decode")
            }
            sizes: dict[str, int] = {}
            for number in range(rounds):
                loads.append(os.getloadavg()[0])
                for name, (encode, decode) in list(codecs.items())[:: 1 if number % 2 else -1]:
                    start = time.perf_counter()
                    blob = encode()
                    middle = time.perf_counter()
                    decoded = decode(blob)
                    end = time.perf_counter()
                    if not np.array_equal(decoded, expected):
                        raise RunError(f"{name} does not give the weights back; that is a fault of the program")
                    seconds[name, "encode"].append(middle - start)
                    seconds[name, "decode"].append(end - middle)
                    sizes[name] = len(blob)
            for name in codecs:
                row: dict[str, Any] = {"share": share, "way": name, "times_smaller": 2 * weights / sizes[name]}
                for part in ("encode", "decode"):
                    part_seconds = seconds[name, part]
                    row |= {
                        f"{part}_gb_s": 2e-9 * weights / statistics.median(part_seconds),
                        f"{part}_spread": max(part_seconds) / min(part_seconds),
                    }
                    for baseline in ("XOR", "all"):
                        row[f"{part}_of_{baseline}"] = statistics.median(
                            b / a for a, b in zip(part_seconds, seconds[baseline, part], strict=True)
                        )
                rows.append(row)
                print(
                    f"{100 * share:5.1f}% changed, {name:10}  {row['times_smaller']:6.1f} times "
                    f"smaller   encode {row['encode_gb_s']:5.2f} GB/s, "
                    f"{row['encode_of_XOR']:.2f} of XOR's   decode {row['decode_gb_s']:5.2f} GB/s, "
                    f"{row['decode_of_XOR']:.2f} of XOR's",
                    flush=True,
                )
        part = Part("w", (weights // 2048, 2048), 0, make_versions(weights, 0.0)[0].view(-1, 2048))
        start = time.perf_counter()
        digest(part)
        hashing = 2e-9 * weights / (time.perf_counter() - start)
        print(f"digest of rows of 2048: {hashing:.2f} GB/s")
    finally:
        torch.set_num_threads(thread_count)
    delta_rows = [row for row in rows if row["way"] == "gap + step" and row["share"] <= 0.02]
    least = min(
        row[f"{part}_of_{baseline}"]
        for row in delta_rows
        for part in ("encode", "decode")
        for baseline in ("XOR", "all")
    )
    print(f"least ratio to zstd level 1 up to 2% changed: {least:.2f} (target {TARGET})")
    result = {
        "what": "bytes of bfloat16 weights a second, encoded and decoded on one core, by the way they are sent",
        "command": "etude bench delta",
        "machine": machine(),
        "weights": weights,
        "rounds": rounds,
        "seed": 0,
        "load": loads,
        "rows": rows,
        "digest_gb_s": hashing,
        "least_ratio": least,
        "target": TARGET,
        "note": "medians over rounds in which ways take turns; spread: the slowest round over the fastest; "
        "load: of the machine before each round",
    }
    return write_record(result, out, "delta", result["machine"]["cpu"])
