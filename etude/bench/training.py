"""Training speed, compared with the library that a reader would otherwise use, in one process, in alternation.

`model` times a training step (forward and backward pass of the mean next-token loss) of `ref.network` in its fast and
its plain form, and of transformers' Qwen3-MoE with the same weights, for each of its CPU settings. A number is printed
only when
losses and gradients agree.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from etude.bench import write_record
from kit.process import keep_freed_memory, machine
from kit.settings import RunError

ATTENTION, EXPERTS = ("sdpa", "eager"), ("grouped_mm", "eager")
FAST, PLAIN = "etude", "etude, plain"
BATCHES = {"new": "a new batch every step, as in training", "same": "the same batch every step"}


def model(
    out: Path | None = Path("results"),
    batch: int = 32,
    length: int = 128,
    dtypes: tuple[str, ...] = ("bfloat16", "float32"),
    rounds: int = 15,
) -> dict:
    """Times training steps of `batch` rows of `length` tokens, prints a table and writes out/model-CPU.json.

    In a round, every contender takes one step; the order rotates from round to round. Returns what was written.
    Raises RunError if transformers is missing, or if a contender computes something else (then no speed is
    reported)."""
    try:
        import transformers
    except ImportError:
        raise RunError("etude bench model needs transformers: pip install transformers") from None
    import torch

    from ref.network import Config

    # Six networks take turns in one process; oneDNN caches the code of 1024 products, enough for one network.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16384")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    keep_freed_memory()
    torch.manual_seed(0)
    config = Config.tiny()
    results = []
    for dtype in dtypes:
        if dtype not in ("bfloat16", "float32"):
            raise RunError(f"dtype expects bfloat16 or float32, got {dtype!r}")
        steps, gate = make_contenders(config, batch, length, getattr(torch, dtype))
        for kind in BATCHES:
            seconds = take_turns(steps, batches(config.vocab_size, batch, length, fresh=kind == "new"), rounds)
            results.append({"dtype": dtype, "batches": kind, "gate": gate, **summarize(seconds, batch * length)})
            show(results[-1])
    record = {
        "what": "tokens/s of a training step (forward and backward), ref.network beside transformers' Qwen3Moe",
        "command": "etude bench model",
        "machine": machine() | {"transformers": transformers.__version__},
        "config": asdict(config),
        "batch": batch,
        "length": length,
        "rounds": rounds,
        "onednn_primitive_cache": os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"],
        "results": results,
    }
    return write_record(record, out, "model", record["machine"]["cpu"])


def make_contenders(config, batch: int, length: int, dtype) -> tuple[dict[str, Callable], dict]:
    """Name → one training step on ids [B, T], all with the same weights, and the differences between them.

    The gate: every contender's loss lies within 1 % (bfloat16) or 1e-5 (float32) of the float64 loss, and our
    gradient's error against float64 is at most twice the smallest error of the others."""
    import torch
    from transformers import AutoModelForCausalLM

    from ref.network import Transformer, load_hf, save_hf
    from ref.network.model import load_hf as load_plain

    def our_step(network) -> Callable:
        def step(ids):
            hidden = network(ids, logits=False).hidden[:, :-1]
            loss = -network.logprob(hidden.flatten(0, 1), ids[:, 1:].flatten()).mean()
            loss.backward()
            return loss.item()

        return step

    def their_step(network) -> Callable:
        def step(ids):
            loss = network(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            return loss.item()

        return step

    networks, steps = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        save_hf(Transformer(config).to(dtype), folder)
        networks[FAST] = load_hf(folder, dtype)
        networks[PLAIN] = load_plain(folder, dtype)
        steps |= {name: our_step(networks[name]) for name in (FAST, PLAIN)}
        for attention in ATTENTION:
            for experts in EXPERTS:
                name = f"transformers, {attention}, {experts}"
                networks[name] = AutoModelForCausalLM.from_pretrained(
                    folder, dtype=dtype, attn_implementation=attention, experts_implementation=experts
                )
                steps[name] = their_step(networks[name])
        exact = load_hf(folder, torch.float64)
    ids = next(batches(config.vocab_size, batch, length, fresh=False))
    loss = our_step(exact)(ids)
    losses = {name: steps[name](ids) for name in steps}
    truth = collect_gradients(exact)
    size = sum(g.square().sum() for g in truth.values()) ** 0.5
    errors = {
        name: (sum((g - truth[k]).square().sum() for k, g in collect_gradients(network).items()) ** 0.5 / size).item()
        for name, network in networks.items()
    }
    tolerance = 0.01 if dtype == torch.bfloat16 else 1e-5
    wrong = [name for name in losses if not abs(losses[name] / loss - 1) <= tolerance]
    if wrong:
        raise RunError(
            f"no speed reported: the loss of {wrong[0]} is {losses[wrong[0]]:.6f}; in float64 it is {loss:.6f}"
        )
    best = min(error for name, error in errors.items() if name not in (FAST, PLAIN))
    if not errors[FAST] <= 2 * best:
        raise RunError(
            f"no speed reported: the relative error of our gradient is {errors[FAST]:.2e}, the best "
            f"other one {best:.2e}"
        )
    for network in networks.values():
        network.zero_grad()
    gate = {"loss_float64": loss, "loss": losses, "gradient_error": errors}

    def cleared(name: str) -> Callable:
        def step(ids) -> float:
            start = time.perf_counter()
            steps[name](ids)
            seconds = time.perf_counter() - start
            networks[name].zero_grad()
            return seconds

        return step

    return {name: cleared(name) for name in steps}, gate


def collect_gradients(network) -> dict:
    """Our parameter name → gradient in float64."""
    return {
        name.removeprefix("model.").replace("mlp.experts.", "mlp."): parameter.grad.double()
        for name, parameter in network.named_parameters()
    }


def batches(vocab_size: int, batch: int, length: int, fresh: bool) -> Iterator:
    """Random tokens: new in every step, or always the same."""
    import torch

    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, vocab_size, (batch, length), generator=generator)
    while True:
        yield ids
        if fresh:
            ids = torch.randint(0, vocab_size, (batch, length), generator=generator)


def take_turns(steps: dict[str, Callable], ids: Iterator, rounds: int) -> dict[str, list[float]]:
    """Seconds of every contender's steps, after two warm-up rounds. All contenders see the same batch in a
    round."""
    names, seconds = list(steps), {name: [] for name in steps}
    for turn in range(rounds + 2):
        batch_ids = next(ids)
        for name in names:
            step_seconds = steps[name](batch_ids)
            if turn >= 2:
                seconds[name].append(step_seconds)
        names.append(names.pop(0))
    return seconds


def summarize(seconds: dict[str, list[float]], tokens: int) -> dict:
    """Tokens/s of every contender, and ours over the fastest other library's and over our plain network's, round by
    round."""
    rates = {name: [tokens / s for s in times] for name, times in seconds.items()}
    middle = {name: statistics.median(values) for name, values in rates.items()}
    fastest = max((name for name in rates if name not in (FAST, PLAIN)), key=lambda name: middle[name])

    def compute_ratios(baseline: str) -> list[float]:
        return sorted(
            own_rate / baseline_rate for own_rate, baseline_rate in zip(rates[FAST], rates[baseline], strict=True)
        )

    ratios, quarter = compute_ratios(fastest), len(rates[FAST]) // 4
    return {
        "tokens_per_second": {
            name: {"median": round(middle[name], 1), "min": round(min(values), 1), "max": round(max(values), 1)}
            for name, values in rates.items()
        },
        "their_fastest": fastest,
        "ratio": round(statistics.median(ratios), 3),
        "ratio_middle_half": [round(ratios[quarter], 3), round(ratios[-1 - quarter], 3)],
        "over_plain": round(statistics.median(compute_ratios(PLAIN)), 3),
    }


def show(result: dict) -> None:
    """Prints one result as a table."""
    from rich.console import Console
    from rich.table import Table

    title = f"training step, {result['dtype']}, {BATCHES[result['batches']]}"
    table = Table("", "tokens/s", "min – max", box=None, header_style="bold", title=title, title_justify="left")
    for name, rate in result["tokens_per_second"].items():
        table.add_row(name, f"{rate['median']:,.0f}", f"{rate['min']:,.0f} – {rate['max']:,.0f}")
    low, high = result["ratio_middle_half"]
    console = Console()
    console.print(table)
    console.print(
        f"{result['ratio']:.2f} times the fastest of theirs (middle half of the rounds: {low:.2f} – {high:.2f}), ",
        end="",
    )
    console.print(f"{result['over_plain']:.2f} times the plain network\n")
