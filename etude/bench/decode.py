"""`etude bench decode`: tokens per second of both samplers with a network's true widths and few layers, beside what
`etude plan` says.

The rows begin with prompts of random tokens and go on to the end of their contexts: random weights hardly ever sample
the token that ends a turn. Prompts are read before the clock starts: the seconds of a rollout that ends behind the
first sampled token are taken off."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import torch

from etude.bench import machine_with_gpu, write_record
from etude.bench.random_network import config_with_layers, hardware, random_network
from ref.engine.continuous import ContinuousSampler
from ref.engine.sampler import Sampler, uniform

__all__ = ["bench"]


def bench(
    model: str, layers: int, rows: list[int], prompt: int, new: int, out: Path | None = Path("results"), rounds: int = 2
) -> dict:
    """Times both samplers at each number of rows, prints a line per cell and writes out/decode-DEVICE.json. Raises
    RunError for a network that does not exist."""
    config, on_gpu = config_with_layers(model, layers), torch.cuda.is_available()
    device, dtype = torch.device("cuda" if on_gpu else "cpu"), torch.bfloat16 if on_gpu else torch.float32
    network = random_network(config, dtype, device)
    draws, cells = torch.Generator().manual_seed(2), []
    for kind in (Sampler, ContinuousSampler):
        sampler = kind(network, dtype)
        for count in rows:
            prompts = torch.randint(config.vocab_size, (count, prompt), generator=draws).tolist()

            def play(tokens: int, sampler=sampler, prompts=prompts) -> tuple[float, int]:
                start, generator = time.perf_counter(), torch.Generator().manual_seed(3)
                engine = sampler.engine(len(prompts), prompt + tokens)
                running = {
                    engine.add(prompt_ids, [config.vocab_size - 1], uniform(generator, prompt + tokens))
                    for prompt_ids in prompts
                }
                sampled = 0
                while running:
                    for slot in engine.step():
                        sampled += int(engine.remove(slot).sampled.sum())
                        running.remove(slot)
                return time.perf_counter() - start, sampled

            play(new)
            seconds, tokens = [], 0
            for _ in range(rounds):
                (short, short_tokens), (long, long_tokens) = play(1), play(new)
                seconds.append(long - short)
                tokens = long_tokens - short_tokens
            middle = statistics.median(seconds)
            cell = {
                "sampler": kind.__name__,
                "rows": count,
                "seconds": seconds,
                "tokens": tokens,
                "tokens_per_second": tokens / middle,
            }
            if (chip := hardware()) is not None:
                from etude.plan.recipe import Conversations, decoding

                # `decoding` reads half of a conversation's keys and values
                conversations = Conversations(2 * (prompt + new / 2), new - 1, 0, True)
                planned = decoding(config, count, dtype.itemsize, chip, conversations)
                cell |= {"planned_seconds": planned, "planned_over_measured": planned / middle}
            cells.append(cell)
            plan = f"; plan {cell['planned_over_measured']:.3f} of the time" if "planned_seconds" in cell else ""
            print(f"{cell['sampler']:18s} {count:4d} rows: {cell['tokens_per_second']:,.0f} tokens/s{plan}", flush=True)
        del sampler
    sizes = " ".join(f"--rows {number}" for number in rows) + f" --prompt {prompt} --new {new}"
    box = machine_with_gpu()
    record = {
        "what": "sampled tokens per second on one device, random weights, beside the plan's figure; prompts "
        "are read before the clock starts",
        "command": f"etude bench decode --model {model} --layers {layers} {sizes}",
        "machine": box,
        "model": model,
        "layers": layers,
        "dtype": str(dtype).removeprefix("torch."),
        "prompt": prompt,
        "new": new,
        "rounds": rounds,
        "cells": cells,
    }
    return write_record(record, out, "decode", box.get("gpu", box["cpu"]))
