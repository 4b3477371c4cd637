"""`etude bench tools`: what slow tools cost an engine beside which they run, as `ref.rollout.Driver` runs them.

Rollouts are sampled in four ways, in alternation: tools that answer at once in SLOTS slots; tools of SECONDS in as many
slots, and in twice as many; and these with a tool that hangs, time after time, until its limit. Weights are random: a
network of the size of the small recipe's. Lengths of turns are geometric, as every token may end a turn with the same
probability, so contexts do not wait in step.

How much of a wait can be hidden depends on how long a turn decodes: twice the slots give at most twice the tokens. So
the ways are timed for every mean length of LENGTHS, and this bound is printed with them.
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

from etude.bench import write_record
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
LENGTHS = {16: "a call of the small world", 48: "a call as JSON, a path or a command in it, and a sentence before it"}
"""Tokens of a turn, in the mean → what is as long."""
VOCAB, TURNS, PROMPT, ANSWER = 512, 6, 24, 8
"""Turns of an episode, tokens of a prompt and of an answer."""
WARM, WINDOW = 4.0, 8.0
"""Seconds before tokens are counted, and in which they are."""
WAYS = {
    "at once": (1, 0.0, False),
    "slow": (1, SECONDS, False),
    "slow, twice the slots": (2, SECONDS, False),
    "one hangs": (2, SECONDS, True),
}
"""Name → times SLOTS, seconds of a tool, whether one hangs."""


class FixedFormat:
    """A `ref.environment.ChatFormat` of a few fixed tokens: what is said does not matter here. The network is
    indifferent, so turns have about `length` tokens in the mean."""

    def __init__(self, length: int):
        self.stop_ids = tuple(range(round(VOCAB / length)))

    def encode_opening(self, messages: Sequence[Message]) -> list[int]:
        return [1] * PROMPT

    def encode_answer(self, history: Sequence[Message], messages: Sequence[Message]) -> list[int]:
        return [2] * ANSWER

    def decode_turn(self, tokens: Sequence[int]) -> Message:
        return Message("assistant", "")


@dataclass
class Waits:
    """An `Environment` whose tools take a while, in each of its turns. One that `hangs` does not answer before 600
    seconds are over."""

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


def measure_rate(sampler: Sampler, length: int, slots: int, seconds: float, hangs: bool) -> tuple[float, int]:
    """Tokens that rollouts wrote, by the second, and how many environments failed. `length`: tokens of a turn, in the
    mean."""
    max_len = PROMPT + TURNS * (4 * length + ANSWER) + 1
    limits = Limits(
        Chaining(max_len - 1, longest_summary=1, room=0, join="none"), turn_tokens=4 * length, seconds=LIMIT, tries=1
    )
    driver = Driver(Continuous(sampler, slots, max_len), FixedFormat(length), limits, threads=True)
    start, numbers, token_count, under_way, hung = time.perf_counter(), itertools.count(), 0, 0, False
    while (elapsed := time.perf_counter() - start) < WARM + WINDOW:
        while under_way < slots + 8:
            key = (next(numbers), hangs and not hung)
            hung = hung or key[1]
            driver.add(key, partial(Waits, seconds, key[1]), seed=key[0])
            under_way += 1
        for key, rollout in driver.step():
            under_way, hung = under_way - 1, hung and not key[1]
            token_count += rollout.chain.num_sampled_tokens if elapsed > WARM else 0
        driver.wait(0.1)
    driver.close()
    return token_count / WINDOW, driver.failures


def bench(out: Path | None = Path("results"), rounds: int = 5) -> dict:
    """Tokens a second of each way and length, medians of `rounds`, and the medians of their ratios to tools that answer
    at once; prints them and writes out/tools-CPU.json."""
    keep_freed_memory()
    torch.manual_seed(0)
    sampler = Sampler(Transformer(Config.tiny(VOCAB, hidden_size=128, num_hidden_layers=4)), torch.float32)
    parts = {}
    for length, example in LENGTHS.items():
        speeds_by_way: dict[str, list[float]] = {name: [] for name in WAYS}
        failures = dict.fromkeys(WAYS, 0)
        for number in range(rounds):
            for name, (times, seconds, hangs) in WAYS.items():
                speed, failed = measure_rate(sampler, length, times * SLOTS, seconds, hangs)
                speeds_by_way[name].append(speed)
                failures[name] += failed
                print(
                    f"turns of {length}, round {number + 1} of {rounds}: {name}: {speed:.0f} tokens/s, {failed} failed",
                    flush=True,
                )
        print(f"turns of {length} tokens ({example}):")
        ways = {}
        for name, speeds in speeds_by_way.items():
            ratio = statistics.median(
                speed / base for speed, base in zip(speeds, speeds_by_way["at once"], strict=True)
            )
            ways[name] = {
                "slots": WAYS[name][0] * SLOTS,
                "tokens_per_second": speeds,
                "ratio": ratio,
                "failed": failures[name],
            }
            print(
                f"  {name:22s} {statistics.median(speeds):6.0f} tokens/s, {ratio:.2f} of tools that "
                f"answer at once; {failures[name]} failed"
            )
        print(
            f"  at most {min(1.0, 2 * ways['slow']['ratio']):.2f} with twice the slots, or as fast as "
            f"tools that answer at once"
        )
        parts[str(length)] = {"example": example, "ways": ways}
    record = {
        "what": f"tokens a second of rollouts whose tools answer at once, and after {SECONDS} s, beside the "
        f"engine, by tokens of a turn",
        "command": "etude bench tools",
        "machine": machine(),
        "rounds": rounds,
        "parts": parts,
    }
    return write_record(record, out, "tools", record["machine"]["cpu"])
