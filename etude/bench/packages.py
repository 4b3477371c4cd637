"""`etude bench packages`: how fast a network samples and trains on tasks of packages, and how long it waits for their
sandboxes.

For each engine and each number of rollouts at once:

    prefill   tokens of the tasks' openings a second, until each context has its first token
    decode    sampled tokens a second after that, DECODED for each context
    waiting   the share of the time of sampling in which the engine does not compute: (wall time of all rollouts, from
              the first sandbox's start to the last grade − time inside calls of the engine) / that wall time
    train     tokens of these rollouts a second in a policy-gradient step, the optimiser's included

Sandboxes, tools and graders are those of a run. The network need not have learned to call tools: every turn has
`turn_tokens` sampled tokens, and in its place the environment gets the next turn of a scripted episode that solves the
task (`environments/harness/demonstrations.py`). So the figures depend on the network's shape, not on its weights.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from environments.harness.demonstrations import demonstrate
from environments.harness.environment import HarnessEnvironment, HarnessTask
from environments.tasks.load import list_recipes
from etude.bench import write_record
from etude.tasks.build import make_all
from kit.disk import parse_json
from kit.process import keep_freed_memory, machine
from kit.settings import RunError
from recipe.packages.chat_format import choose_template
from recipe.packages.settings import PackageSettings
from recipe.packages.tasks import PackageTasks, make_schemas
from recipe.small.agent import single
from ref.chat_format import TemplateFormat
from ref.cpt import load_tokenizer
from ref.engine.continuous import make_sampler
from ref.engine.sampler import Engine, Sampler, Segment
from ref.environment import StepResult
from ref.messages import Message, ToolCall
from ref.network import Transformer, load_hf
from ref.rl import Settings, improve
from ref.rollout import Limits, Rollout, rollout
from sims.real_agent.experiment import LastBlocks, make_tiny_checkpoint

__all__ = ["COUNTS", "ENGINES", "bench"]

COUNTS = (8, 16, 32)
"""Rollouts at once."""
ENGINES = ("lockstep", "continuous")
DECODED = 32
"""Tokens of a context in the measurement of decoding."""
TARGET = 0.2
"""The share of waiting: at most."""
MICRO_TOKENS = 2048
"""Of a micro-batch in training."""


@dataclass(frozen=True)
class Scripted:
    """An `Environment` in which a scripted episode is played, whatever the policy writes."""

    environment: HarnessEnvironment
    replies: list[Message]

    def reset(self) -> list[Message]:
        return self.environment.reset()

    def step(self, message: Message) -> StepResult:
        return self.environment.step(self.replies.pop(0))

    def reward(self) -> Any:
        return self.environment.reward()

    def close(self) -> None:
        self.environment.close()


class TimedEngine:
    """An `Engine` that measures the seconds inside its calls, and whose turns end by their length alone."""

    def __init__(self, engine: Engine):
        self.engine, self.seconds = engine, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def _time(self, method: Callable[..., Any], *arguments: Any) -> Any:
        start = time.perf_counter()
        try:
            return method(*arguments)
        finally:
            self.seconds += time.perf_counter() - start

    def add(self, prompt: Sequence[int], stop_ids: Any, draws: Any = None, longest_turn: int | None = None) -> int:
        return self._time(self.engine.add, prompt, (), draws, longest_turn)

    def step(self) -> list[int]:
        return self._time(self.engine.step)

    def extend(self, slot: int, tokens: Sequence[int], longest_turn: int | None = None) -> None:
        self._time(self.engine.extend, slot, tokens, longest_turn)

    def remove(self, slot: int, finished: bool = True) -> Segment:
        return self._time(self.engine.remove, slot, finished)


class TimedSampler(Sampler):
    """Another sampler, whose engines are timed; `engines` are those that it has made. Weights are not copied."""

    def __init__(self, sampler: Sampler):
        self.sampler, self.model, self.engines = sampler, sampler.model, list[TimedEngine]()

    def engine(self, slots: int, max_len: int, temperature: float = 1.0) -> TimedEngine:
        self.engines.append(TimedEngine(self.sampler.engine(slots, max_len, temperature)))
        return self.engines[-1]


def script_of(task: HarnessTask) -> list[Message] | None:
    """The turns of a scripted episode that solves the task; None if there is none."""
    trees = task.exam.given_tree, task.exam.gold_tree
    demonstration = demonstrate(task.key, "direct", *trees, sorted(task.visible_tests), runs_files=True)
    if demonstration is None:
        return None
    return [
        Message(
            "assistant",
            reply.text,
            tool_calls=tuple(ToolCall(call.name, parse_json(call.arguments), call.id) for call in reply.calls),
        )
        for reply in demonstration.replies
    ]


def measure_decoding(sampler: Sampler, prompts: Sequence[Sequence[int]], max_len: int) -> tuple[float, float]:
    """Tokens a second of prefill and of decoding, all prompts side by side and as long as the shortest."""
    count, length = len(prompts), min(map(len, prompts))
    engine, rates = sampler.engine(count, max_len), []
    for prompt in prompts:
        engine.add(prompt[:length], (), torch.rand(max_len, dtype=torch.float64), 1)
    for num_tokens in (count * length, count * DECODED):
        start, over = time.perf_counter(), list[int]()
        while len(over) < count:
            over += engine.step()
        rates.append(num_tokens / (time.perf_counter() - start))
        for slot in over:
            engine.extend(slot, (), DECODED)
    for slot in range(count):
        engine.remove(slot)
    return rates[0], rates[1]


def measure_sampling(
    sampler: Sampler, tasks: PackageTasks, scripts: Sequence[tuple[HarnessTask, list[Message]]], limits: Limits
) -> tuple[dict[str, float], list[Rollout]]:
    """Wall time, seconds of the engine and the share of waiting of one rollout for each script, all at once."""
    timed = TimedSampler(sampler)
    make = [
        partial(lambda task, number, replies: Scripted(tasks.environment(task, number), [*replies]), task, n, replies)
        for n, (task, replies) in enumerate(scripts)
    ]
    start = time.perf_counter()
    seeds = [*range(len(make))]
    rollouts = rollout(timed, make, tasks.chat_format, limits, 1.0, seeds, threads=tasks.is_slow)
    seconds = time.perf_counter() - start
    if failures := [part.failure for part in rollouts if part.failure]:
        raise RunError(f"{len(failures)} of {len(rollouts)} rollouts have no result: {failures[0]}")
    engine_seconds = sum(engine.seconds for engine in timed.engines)
    solved = sum(part.metrics["success"] for part in rollouts)
    return {
        "seconds": seconds,
        "engine_seconds": engine_seconds,
        "waiting": (seconds - engine_seconds) / seconds,
        "sampled_tokens": sum(part.chain.num_sampled_tokens for part in rollouts),
        "tokens": sum(len(segment.tokens) for part in rollouts for segment in part.chain.segments),
        "solved": solved,
    }, rollouts


def measure_training(model: Transformer, rollouts: Sequence[Rollout], blocks: int, dtype: torch.dtype) -> float:
    """Tokens a second of a policy-gradient step. All scripts are equally good, so rewards are made up."""
    for number, part in enumerate(rollouts):
        part.terms = {"reward": float(number % 2)}
    settings = Settings(prompts=1, rollouts=len(rollouts), micro_tokens=MICRO_TOKENS)
    trainer = LastBlocks(model, blocks, settings.lr, dtype)
    start = time.perf_counter()
    trainer.apply(improve(settings, trainer.model, None, rollouts), 1.0)
    num_tokens = sum(len(segment.tokens) for part in rollouts for segment in part.chain.segments)
    return num_tokens / (time.perf_counter() - start)


def bench(
    checkpoint: Path | None = None,
    recipes: Path | None = None,
    counts: Sequence[int] = COUNTS,
    blocks: int = 0,
    turn_tokens: int = 64,
    max_len: int = 2048,
    dtype: str = "float32",
    out: Path | None = Path("results"),
) -> dict[str, Any]:
    """Prints a line for each engine and each of `counts`, and writes out/packages-CPU.json. `checkpoint`: None is a
    tiny network that has learned nothing. `recipes`: None are two made-up packages. `blocks`: trained ones, from the
    last; 0 is all weights. Raises RunError."""
    if checkpoint is not None and not (checkpoint / "tokenizer.json").is_file():
        raise RunError(f"checkpoint {checkpoint} is not a folder with config.json, weights and tokenizer.json")
    keep_freed_memory()
    with tempfile.TemporaryDirectory(prefix="etude-bench-") as folder:
        root = Path(folder)
        (root / "data" / "recipes").mkdir(parents=True)
        if recipes is None:
            make_all(("generated:0", "generated:heldout:0"), root / "data" / "recipes", 1, 60.0, overwrite=False)
        else:
            for path in list_recipes([recipes]):
                shutil.copyfile(path, root / "data" / "recipes" / path.name)
        source = make_tiny_checkpoint(root / "tiny") if checkpoint is None else checkpoint
        settings = PackageSettings(recipes=str(root / "data" / "recipes"))
        schemas = make_schemas(settings)
        chat_format = TemplateFormat(
            load_tokenizer(source / "tokenizer.json"), choose_template(source, schemas)[0], schemas
        )
        tasks = PackageTasks(settings, root, chat_format, 0)
        cells = measure_cells(source, tasks, counts, blocks, turn_tokens, max_len, getattr(torch, dtype))
    record = {
        "what": "tokens a second of prefill, decoding and training on tasks of packages, and the share of the time of "
        "sampling in which the engine does not compute",
        "command": "etude bench packages",
        "machine": machine(),
        "model": "tiny" if checkpoint is None else checkpoint.name,
        "dtype": dtype,
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],
        "blocks": blocks,
        "turn_tokens": turn_tokens,
        "max_len": max_len,
        "target": TARGET,
        "cells": cells,
    }
    return write_record(record, out, "packages", record["machine"]["cpu"])


def measure_cells(
    source: Path,
    tasks: PackageTasks,
    counts: Sequence[int],
    blocks: int,
    turn_tokens: int,
    max_len: int,
    dtype: torch.dtype,
) -> list[dict[str, Any]]:
    """A row for each engine and number of rollouts. Each task is graded once before, which prepares its exam."""
    model, scripts = load_hf(source), list[tuple[HarnessTask, list[Message]]]()
    for task in tasks.streams["rl"]:
        if len(scripts) < max(counts) and (replies := script_of(task)) is not None:
            scripts.append((task, replies))
    if not scripts:
        raise RunError("no task of the training packages has a scripted episode; take recipes of other packages")
    limits = Limits(single(max_len), turn_tokens=turn_tokens, seconds=3600.0)
    cells = []
    chosen_scripts = [scripts[number % len(scripts)] for number in range(max(counts))]
    samplers = {name: make_sampler(name, model, dtype, max(counts)) for name in ENGINES}
    for task, _ in scripts:
        tasks.grade(task, task.job.tree, [])
    prompts = [
        tasks.chat_format.encode_opening([Message("system", task.job.system), Message("user", task.prompt)])
        for task, _ in chosen_scripts
    ]
    for count in counts:
        rollouts = list[Rollout]()
        for name, sampler in samplers.items():
            prefill, decode = measure_decoding(sampler, prompts[:count], max_len)
            sampling, rollouts = measure_sampling(sampler, tasks, chosen_scripts[:count], limits)
            cells.append({"engine": name, "rollouts": count, "prefill": prefill, "decode": decode, **sampling})
            print(
                f"{count:3d} rollouts, {name:10s} {prefill:7,.0f} tokens/s prefill, {decode:6,.0f} decode; sampling "
                f"{sampling['seconds']:6.1f} s, {sampling['waiting']:4.0%} of it waiting (target {TARGET:.0%} at most)",
                flush=True,
            )
        train = measure_training(load_hf(source), rollouts, blocks, dtype)
        for cell in cells[-len(samplers) :]:
            cell["train"] = train
        print(f"{count:3d} rollouts, training   {train:7,.0f} tokens/s", flush=True)
    return cells
