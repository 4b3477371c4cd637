"""`etude bench tools`: what slow tools cost an engine beside which they run, as `ref.rollout.Driver` runs them.

The same rollouts are sampled in four ways, in alternation: tools that answer at once in SLOTS slots; tools of SECONDS in as many slots, and in twice
as many; and these with a tool that hangs, time after time, until its limit. Weights are random: a network of the size of the small recipe's. Turns
are cut off at TURN tokens, so that each way decodes as much.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from etude.bench import written
from kit.process import keep_freed_memory, machine
from ref.engine.continuous import Continuous
from ref.engine.sampler import Sampler
from ref.environment import Reward, StepResult
from ref.messages import Message
from ref.network import Config, Transformer
from ref.rollout import Driver, Limits
from ref.self_summary import Chaining

__all__ = ["WAYS", "Waits", "bench"]

SLOTS, SECONDS, LIMIT = 32, 0.3, 2.0
"""`LIMIT`: seconds behind which a tool that hangs is given up."""
TURN, TURNS, PROMPT, ANSWER = 16, 6, 24, 8
"""Tokens of a turn, turns of an episode, tokens of a prompt and of an answer."""
WARM, WINDOW = 4.0, 12.0
"""Seconds before tokens are counted, and in which they are."""
WAYS = {"at once": (1, 0.0, False), "slow": (1, SECONDS, False), "slow, twice the slots": (2, SECONDS, False), "one hangs": (2, SECONDS, True)}
"""Name → times SLOTS, seconds of a tool, whether one hangs."""


class FixedFormat:
    """A `ref.environment.ChatFormat` of a few fixed tokens: what is said does not matter here."""

    stop_ids: tuple[int, ...] = (0,)

    def encode_opening(self, messages: Sequence[Message]) -> list[int]:
        return [1] * PROMPT

    def encode_answer(self, history: Sequence[Message], messages: Sequence[Message]) -> list[int]:
        return [2] * ANSWER

    def decode_turn(self, tokens: Sequence[int]) -> Message:
        return Message("assistant", "")


@dataclass
class Waits:
    """An `Environment` whose tools take a while, in each of its turns. One that `hangs` does not answer before 600 seconds are over."""

    seconds: float
    hangs: bool = False
    turns: int = 0

    def reset(self) -> list[Message]:
        return [Message("user", "")]

    def step(self, message: Message) -> StepResult:
        if self.seconds or self.hangs:
            time.sleep(600 if self.hangs else self.seconds)
        self.turns += 1
        return StepResult([Message("tool", "")], self.turns == TURNS)

    def reward(self) -> Reward:
        return Reward({}, {"success": 0.0})

    def close(self) -> None:
        """Nothing is held."""


def measure_rate(sampler: Sampler, slots: int, seconds: float, hangs: bool) -> tuple[float, int]:
    """Tokens that rollouts wrote, by the second, and how many environments failed."""
    length = PROMPT + TURNS * (TURN + ANSWER) + 1
    limits = Limits(Chaining(length - 1, longest_summary=1, room=0, join="none"), turn_tokens=TURN, seconds=LIMIT, tries=1)
    driver, numbers = Driver(Continuous(sampler, slots, length), FixedFormat(), limits, threads=True), itertools.count()
    start, counted, under_way, hung = time.perf_counter(), 0, 0, False
    while (elapsed := time.perf_counter() - start) < WARM + WINDOW:
        while under_way < slots + 8:
            key = (next(numbers), hangs and not hung)
            hung = hung or key[1]
            driver.add(key, partial(Waits, seconds, key[1]), seed=key[0])
            under_way += 1
        for key, rollout in driver.step():
            under_way, hung = under_way - 1, hung and not key[1]
            counted += rollout.chain.written if elapsed > WARM else 0
        driver.wait(0.1)
    return counted / WINDOW, driver.failures


def bench(out: Path | None = Path("results"), rounds: int = 3) -> dict:
    """Tokens a second of each way, medians of `rounds`, and their ratios to tools that answer at once; prints them and writes out/tools-CPU.json."""
    keep_freed_memory()
    torch.manual_seed(0)
    sampler = Sampler(Transformer(Config.tiny(512, hidden_size=128, num_hidden_layers=4)), torch.float32)
    speeds_by_way: dict[str, list[float]] = {name: [] for name in WAYS}
    failures = dict.fromkeys(WAYS, 0)
    for number in range(rounds):
        for name, (times, seconds, hangs) in WAYS.items():
            speed, failed = measure_rate(sampler, times * SLOTS, seconds, hangs)
            speeds_by_way[name].append(speed)
            failures[name] += failed
            print(f"round {number + 1} of {rounds}: {name}, {times * SLOTS} slots: {speed:.0f} tokens/s, {failed} failed", flush=True)
    parts = {}
    for name, speeds in speeds_by_way.items():
        ratio = statistics.median(speed_of_round / base for speed_of_round, base in zip(speeds, speeds_by_way["at once"], strict=True))
        parts[name] = {"tokens_per_second": speeds, "ratio": ratio, "failed": failures[name]}
        print(f"{name:22s} {statistics.median(speeds):6.0f} tokens/s, {ratio:.2f} of tools that answer at once; {failures[name]} environments failed")
    record = {
        "what": f"tokens a second of rollouts whose tools answer at once, and after {SECONDS} s, beside the engine",
        "command": "etude bench tools",
        "machine": machine(),
        "slots": SLOTS,
        "rounds": rounds,
        "parts": parts,
    }
    return written(record, out, "tools", record["machine"]["cpu"])
