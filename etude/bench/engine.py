"""`etude bench engine`: tokens per second of the sampler whose rows share a position, and of continuous batching, one
thread each.

Both play the same conversations of the small world with the same random numbers, one after the other, in alternation. A
chain of contexts continues at once in continuous batching, and with the next wave in the other. Time in the environment
is included; it is microseconds. Nobody asks for rewards: hidden tests take longer than that, and are no part of a
sampler.
"""

from __future__ import annotations

import itertools
import statistics
import time
from functools import partial
from pathlib import Path

from etude.bench import write_record
from etude.bench.crowded import after_sft
from kit.process import keep_freed_memory, machine, one_thread

SLOTS = (32, 64, 128)
"""Numbers of conversations, all side by side."""


def bench(run: Path = Path("runs/small"), out: Path | None = Path("results"), rounds: int = 5) -> dict:
    """Seconds and sampled tokens per second of both samplers with the policy that `run` holds after SFT, medians of
    `rounds`; prints them and writes out/engine-CPU.json. Raises RunError if the folder holds no such policy."""
    import torch

    from recipe.microrepo import MicroRepo, Session
    from recipe.small.data import task_stream
    from recipe.small.demonstrations import context
    from recipe.small.learner import language_of
    from ref.engine.continuous import ContinuousSampler
    from ref.engine.sampler import Sampler
    from ref.environment import Reward
    from ref.rollout import Limits, hash_seed, rollout

    keep_freed_memory()
    root = Path(run)
    config, model, _ = after_sft(root)
    language, chain_settings = language_of(root), context(language_of(root), config)
    samplers = {"one position": Sampler, "continuous": ContinuousSampler}
    samplers = {name: kind(model, getattr(torch, config.training.sampler_dtype)) for name, kind in samplers.items()}

    class WithoutReward(MicroRepo):
        def reward(self) -> Reward:
            return Reward()

    def play(name: str, slots: int) -> tuple[float, list]:
        tasks = itertools.islice(task_stream(config, "rl"), slots)
        make = [partial(WithoutReward, Session(task, config.rl.max_turns)) for task in tasks]
        seeds = [hash_seed("bench", number) for number in range(slots)]
        start = time.perf_counter()
        rollouts = rollout(samplers[name], make, language, Limits(chain_settings), config.rl.temperature, seeds)
        return time.perf_counter() - start, [conversation.chain for conversation in rollouts]

    cells = []
    with one_thread():
        for slots in SLOTS:
            seconds: dict[str, list[float]] = {name: [] for name in samplers}
            chains = {name: play(name, slots)[1] for name in samplers}
            for number in range(rounds):
                for name in [*samplers][:: 1 if number % 2 else -1]:
                    seconds[name].append(play(name, slots)[0])
            same_count = sum(
                len(a.segments) == len(b.segments)
                and all(x.tokens.equal(y.tokens) for x, y in zip(a.segments, b.segments, strict=True))
                for a, b in zip(*chains.values(), strict=True)
            )
            tokens = {
                name: sum(chain.num_sampled_tokens for chain in own_chains) for name, own_chains in chains.items()
            }
            rates = {name: [tokens[name] / s for s in seconds[name]] for name in samplers}
            ratios = [b / a for a, b in zip(*rates.values(), strict=True)]
            cells.append(
                {
                    "slots": slots,
                    "seconds": seconds,
                    "sampled_tokens": tokens,
                    "tokens_per_second": {name: statistics.median(round_rates) for name, round_rates in rates.items()},
                    "ratio": statistics.median(ratios),
                    "ratio_range": [min(ratios), max(ratios)],
                    "conversations_with_the_same_tokens": same_count,
                }
            )
            base_rate, continuous_rate = cells[-1]["tokens_per_second"].values()
            ratio = f"{statistics.median(ratios):.2f} times [{min(ratios):.2f}, {max(ratios):.2f}]"
            summary = (
                f"{base_rate:6,.0f} tokens/s at one position, {continuous_rate:6,.0f} with continuous batching, {ratio}"
            )
            print(f"{slots:4d} conversations: {summary}; {same_count} of {slots} have the same tokens", flush=True)
    record = {
        "what": "sampled tokens per second of two samplers, one thread, the same conversations in alternation; "
        "ratio: median of rounds",
        "command": "etude bench engine",
        "machine": machine(),
        "dtype": config.training.sampler_dtype,
        "rounds": rounds,
        "cells": cells,
    }
    return write_record(record, out, "engine", record["machine"]["cpu"])
