"""`etude bench contention`: time of a run's parts alone on the machine, and next to as many busy programs as it has
cores.

Every part runs in three ways, in alternation: alone; alone as it used to be, in one process with as many threads as
cores, which wait for each other in every matrix product; and next to the busy programs. A busy program is a loop in its
own session. Linux shares cores evenly between sessions, whatever their priority, as on a desktop. A part with one
process per core gets half of the cores next to as many busy programs, so it takes at least twice as long. A part with
two processes per core gets two thirds, and takes at least 1.5 times as long. The last part, one process per core with
nothing but matrix products, shows how much the machine itself adds to that."""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from etude.bench import write_record
from kit.disk import read_json
from kit.process import cores, keep_freed_memory, machine, one_thread
from kit.settings import RunError, fill

BUSY = "import os, sys\nwhile os.getppid() == int(sys.argv[1]): sum(range(10_000))"
"""A program that stays busy until the benchmark ends, however that happens. Its argument is the process id of the
benchmark."""
WAYS = ("alone", "threads", "crowded")
ROLLOUTS = {"sampling": 128, "evaluation": 2400}
"""Number of rollouts in one step of RL, and in the evaluation of one checkpoint."""
PRODUCTS = 15_000
"""Number of 64 × 256 by 256 × 256 matrix products on each core."""


def bench(run: Path = Path("runs/small"), out: Path | None = Path("results"), rounds: int = 5) -> dict:
    """Seconds of sampling, a step of RL, decoding and evaluation with the policy that `run` holds after SFT, medians of
    `rounds`; prints them and writes out/crowded-CPU.json. Raises RunError if the folder holds no such policy."""
    keep_freed_memory()
    parts = parts_of(Path(run))
    seconds: dict[str, dict[str, list[float]]] = {name: {way: [] for way in WAYS} for name in parts}
    for part in parts.values():
        part()  # computed only once
    for number, (name, part) in itertools.product(range(rounds), parts.items()):
        for way in WAYS[number % 3 :] + WAYS[: number % 3]:
            with busy() if way == "crowded" else threads() if way == "threads" else contextlib.nullcontext():
                start = time.perf_counter()
                part()
                seconds[name][way].append(time.perf_counter() - start)
            print(f"round {number + 1} of {rounds}: {name}, {way}: {seconds[name][way][-1]:.2f} s", flush=True)
    results = {name: {"seconds": part_seconds, **summary(part_seconds)} for name, part_seconds in seconds.items()}
    for name, result in results.items():
        print(
            f"{name:10s} alone {result['alone_s']:6.2f} s, "
            f"{result['faster_than_threads']:.2f} times as fast as with threads; "
            f"next to {cores()} busy programs it takes {result['slower_in_a_crowd']:.2f} times as long"
        )
    record = {
        "what": "seconds of a run's parts alone, alone with threads instead of processes, and beside as many "
        "busy programs as cores",
        "command": "etude bench contention",
        "machine": machine(),
        "busy": cores(),
        "rounds": rounds,
        "rollouts": ROLLOUTS,
        "parts": results,
    }
    return write_record(record, out, "crowded", record["machine"]["cpu"])


def summary(seconds: dict[str, list[float]]) -> dict[str, float]:
    """Medians of the seconds of a part, and of the ratios within a round."""
    ratio = {
        way: [b / a for a, b in zip(seconds["alone"], seconds[way], strict=True)] for way in ("threads", "crowded")
    }
    return {
        **{f"{way}_s": statistics.median(seconds[way]) for way in WAYS},
        "faster_than_threads": statistics.median(ratio["threads"]),
        "slower_in_a_crowd": statistics.median(ratio["crowded"]),
    }


def after_sft(root: Path) -> tuple:
    """Settings, policy and MTP layers that the run in `root` has after SFT. Raises RunError if there are none."""
    from recipe.small.learner import load_checkpoint
    from recipe.small.settings import Recipe

    try:
        config = fill(Recipe, read_json(root / "config.json")["config"])
        return config, *load_checkpoint(root, config, "sft")
    except (OSError, ValueError, KeyError) as error:
        raise RunError(
            f"{root} holds no run with a policy after SFT; make one (make small), or pass another folder"
        ) from error


def parts_of(root: Path) -> dict[str, Callable[[], object]]:
    """Name → function that runs that part of the run in `root` once, always the same."""
    import torch

    from recipe.small import agent, evaluation, reinforcement
    from recipe.small.data import task_stream
    from recipe.small.demonstrations import context
    from recipe.small.learner import Learner, language_of, load_checkpoint
    from ref.engine.continuous import ContinuousSampler
    from ref.engine.sampler import Sampler
    from ref.rl import compute_reward_terms, improve

    config, model, mtp = after_sft(root)
    language, r, dtype = language_of(root), config.rl, getattr(torch, config.training.dtype)
    chain_settings, sampler_dtype = context(language, config), getattr(torch, config.training.sampler_dtype)
    reference, layers = load_checkpoint(root, config, "sft")
    reference, decoded = reference.to(dtype), layers.to(dtype) if layers is not None else None
    in_rl, in_evaluation = ContinuousSampler(reference, sampler_dtype), Sampler(reference, sampler_dtype)
    learner = Learner(config, model, mtp, 0.0, 0.0)
    learner.optimizers = [torch.optim.Adam(learner.trunk.masters.parameters(), lr=0.0)]

    def rollouts(conversations: int, sampler: Sampler = in_rl) -> list:
        tasks = list(itertools.islice(task_stream(config, "rl"), conversations // r.rollouts))
        return agent.play(
            sampler,
            language,
            tasks,
            r.rollouts,
            r.limits(chain_settings),
            r.max_turns,
            torch.Generator().manual_seed(1),
            r.temperature,
        )

    def products(part: int) -> float:
        x, weight = torch.randn(64, 256), torch.randn(256, 256)
        for _ in range(PRODUCTS):
            x = torch.tanh(x @ weight)
        return x.sum().item()

    batch = rollouts(r.prompts * r.rollouts)
    for rollout in batch:
        rollout.terms = compute_reward_terms(rollout, r.payment)
    tasks = list(itertools.islice(task_stream(config, "evaluation"), 8))

    def decode() -> None:
        assert decoded is not None
        with evaluation.one_thread():
            evaluation.measure_decoding(reference, decoded, language, tasks, config, rounds=1)

    @one_thread()  # as in `reinforcement.learn`
    def step() -> None:
        update = improve(
            r,
            learner.model,
            reference,
            batch,
            mtp=learner.drafts(0),
            mtp_weight=learner.mtp_weight,
            map_fn=reinforcement.CORES,
        )
        learner.apply(update, 1.0)

    return {
        "sampling": lambda: rollouts(ROLLOUTS["sampling"]),
        "step": step,
        **({"decoding": decode} if decoded is not None else {}),
        "evaluation": lambda: rollouts(ROLLOUTS["evaluation"], in_evaluation),
        "products": lambda: agent.map_on_cores(products, range(cores())),
    }


@contextlib.contextmanager
def threads() -> Iterator[None]:
    """One process that computes everything with as many threads as there are cores, with rollouts in batches of at most
    800 whose rows share a position. This is how it worked before it used several processes and continuous batching."""
    from unittest import mock

    import torch

    from recipe.small import agent, evaluation, reinforcement
    from ref import rollout
    from ref.engine.continuous import ContinuousSampler
    from ref.engine.sampler import Sampler

    thread_count = torch.get_num_threads()
    torch.set_num_threads(cores())

    def run_serially(
        function: Callable, parts: list, progress: Callable[[int], None] = lambda done: None, **_: object
    ) -> list:
        return [function(part) for part in parts]

    try:
        with (
            mock.patch.object(agent, "map_on_cores", run_serially),
            mock.patch.multiple(rollout, MIN_BATCH=800, MAX_BATCH=800),
            mock.patch.object(ContinuousSampler, "engine", Sampler.engine),
            mock.patch.object(reinforcement, "CORES", run_serially),
            mock.patch.object(evaluation, "one_thread", contextlib.nullcontext),
        ):
            yield
    finally:
        torch.set_num_threads(thread_count)


@contextlib.contextmanager
def busy() -> Iterator[None]:
    """One busy program for each core."""
    programs = [
        subprocess.Popen([sys.executable, "-c", BUSY, str(os.getpid())], start_new_session=True) for _ in range(cores())
    ]
    try:
        time.sleep(0.2)
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()
