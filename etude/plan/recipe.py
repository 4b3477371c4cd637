"""`etude plan --recipe`: layout, memory, time and price of every stage of the full recipe, for several numbers of GPUs.

    cpt, long, sft   micro-batches of `cluster.micro_rows` rows per dp rank, each a step of `scaled/plan.py`; draft
                     layers in long and sft
    mtp              the trunk forward only, the draft layers forward and backward
    rl               gather the sampler's weights, sample, train on the packed rows, and twice a forward pass for the KL
                     to the reference
    eval             sample held-out tasks before and after RL
    decode           rank 0 times speculative decoding on its CPU, while the others wait

Decoding reads the weights once per token of the longest conversation, or computes, whichever takes longer. Lengths of
conversations are those of the small world's demonstrations in the network's own tokens. `packages.py` prices the stages
of a run on packages.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from etude.plan.step import COUNTS, cells
from kit.disk import atomic_write
from kit.settings import RunError
from recipe.full.settings import FullRecipe
from recipe.full.stages import layout, rows_of_step, stages_of, trained
from recipe.small.agent import Language
from recipe.small.demonstrations import context, lessons
from recipe.small.evaluation import WAYS
from ref import cpt
from ref.mtp import MTP
from ref.network import Config
from ref.packing import Cost
from scaled.plan import HARDWARE, Hardware, flops, plan, saved
from scaled.runtime.mesh import Layout

if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    "ASSUMPTIONS",
    "Conversations",
    "Price",
    "cache",
    "conversations",
    "decoding",
    "describe",
    "draft_layers",
    "flops_of_drafts",
    "make_price",
    "price_microbatch",
    "price_supervised",
    "prices",
    "show",
    "write",
]

FULLNESS = 0.95
"""Share of a packed row that is not padding: a guess."""
HOST_SIZE, HOST_BANDWIDTH = 4, 10e9
"""Bytes of a weight in the stage decode, and bytes a second that one thread of a CPU reads: a guess."""
BYTES_PER_TOKEN = 3.5
"""Bytes of code per token, if there is no tokenizer to count with: a guess."""
ASSUMPTIONS = (
    "Counted: parameters, state and bytes sent, which tests compare with measurements on CPU ranks; "
    "activations within a tenth. Measured: {tokens}. "
    "Assumed: peak, bandwidth and links from data sheets; nothing overlaps; operations between products are kernels of "
    "their own; routing is balanced; "
    "pretraining's documents fill their rows; "
    "conversations are as long as demonstrations, and their rows {fullness:.0%} full; each rank "
    "samples alone with all weights in {sampler}. "
    "Guessed: {efficiency:.0%} of peak for matrix products, {latency:.0f} µs per collective, {price:g} "
    "dollars per GPU hour. Nothing was measured "
    "on a GPU. Not included: reading and writing checkpoints, perplexity during training, running "
    "tests, the head's logits."
)


@dataclass(frozen=True)
class Conversations:
    """Lengths of the small world's conversations, in tokens."""

    tokens: float
    """All tokens, on average."""
    longest: float
    """The agent's own tokens of the longest: the number of decoding steps."""
    demonstrations: int
    """Number of demonstrations that were counted."""
    has_tokenizer: bool
    """Whether they were counted with the network's tokenizer."""
    own: float = 0.0
    """The agent's own tokens, on average."""


@dataclass(frozen=True)
class Price:
    """A stage on a number of GPUs."""

    stage: str
    gpus: int
    layout: Layout
    steps: int
    """Optimiser steps; in the evaluation, 1."""
    tokens: float
    """Tokens of a step, on all ranks."""
    memory: float
    """Bytes of a rank at the peak."""
    fits: bool
    seconds: float
    """Of the stage."""
    dollars: float
    raised: int = 0
    """Rows per step if the settings have fewer than one for each dp rank and micro-batch; 0 if they have enough."""


def conversations(c: FullRecipe, folder: Path | None, count: int = 200) -> Conversations:
    """Measures some demonstrations with the tokenizer of a folder, or, without one, in bytes."""
    file = (folder or Path()) / "tokenizer.json"
    has_tokenizer = folder is not None and file.is_file()
    if has_tokenizer:
        tokenizer, size = cpt.load_tokenizer(file), 1.0
    else:
        tokenizer, size = cpt.train_tokenizer([""], len(cpt.SPECIAL_TOKENS) + 256), BYTES_PER_TOKEN
    language = Language(tokenizer)
    if None in (language.env, language.agent):
        raise RunError(
            f"{file} has neither the tokens {' and '.join(language.speakers)} nor those of a chat; "
            f"choose another --checkpoint"
        )
    lengths, own_lengths = [], []
    for demonstration in itertools.islice(
        lessons(c.small, language, context(language, c.small), c.sft.noise, c.context.memory), count
    ):
        lengths.append(sum(len(segment.tokens) for segment in demonstration.chain.segments) / size)
        own_lengths.append(sum(int(segment.sampled.sum()) for segment in demonstration.chain.segments) / size)
    return Conversations(
        float(np.mean(lengths)), float(np.max(own_lengths)), count, has_tokenizer, float(np.mean(own_lengths))
    )


def prices(c: FullRecipe, network: Config, gpus: int, hardware: Hardware, talk: Conversations) -> list[Price]:
    """The stages in order. Raises RunError if this number of ranks cannot be split as the settings want."""
    t, stretched = c.training, c.training.stretched(network)
    stage_prices = [price_supervised(c, network, gpus, hardware, stage, talk) for stage in trained(c)[:-1]]
    n = c.rl.prompts * c.rl.rollouts
    memory, seconds = price_rl_step(c, stretched, gpus, hardware, talk)
    stage_prices.append(make_price(c, "rl", gpus, hardware, c.rl.steps, n * talk.tokens, memory, seconds))
    tasks, size = c.evaluation.tasks * c.evaluation.samples, 2 if t.sampler_dtype == "bfloat16" else 4
    memory = stretched.parameters() * size + cache(stretched, -(-tasks // gpus) * talk.tokens, size)
    seconds = 2 * decoding(stretched, -(-tasks // gpus), size, hardware.computing_in(t.sampler_dtype), talk)
    stage_prices.append(make_price(c, "eval", gpus, hardware, 1, 2 * tasks * talk.tokens, memory, seconds))
    if "decode" in stages_of(c):
        tokens = len(WAYS) * c.evaluation.decode_tasks * talk.own
        seconds = tokens * HOST_SIZE * stretched.parameters() / HOST_BANDWIDTH
        stage_prices.append(make_price(c, "decode", gpus, hardware, c.evaluation.decode_rounds, tokens, 0.0, seconds))
    return stage_prices


def make_price(
    c: FullRecipe,
    stage: str,
    gpus: int,
    hardware: Hardware,
    steps: int,
    tokens: float,
    memory: float,
    step: float,
    raised: int = 0,
) -> Price:
    """The price of a stage from the tokens and seconds of a step, and the bytes of a rank at the peak."""
    seconds, ranks_layout = steps * step, Layout(**layout(c, gpus, stage))
    dollars = seconds / 3600 * gpus * hardware.price
    fits = memory <= 0.92 * hardware.memory
    return Price(stage, gpus, ranks_layout, steps, tokens, memory, fits, seconds, dollars, raised)


def price_supervised(
    c: FullRecipe, network: Config, gpus: int, hardware: Hardware, stage: str, talk: Conversations
) -> Price:
    """cpt, mtp, long or the small world's sft."""
    t = c.training
    _, rows, _, length = rows_of_step(c, stage)
    ranks_layout = Layout(**layout(c, gpus, stage))
    micros = max(1, -(-rows // (ranks_layout.dp * c.cluster.micro_rows)))
    raised_rows = max(rows, ranks_layout.dp)
    raised_rows += -raised_rows % ranks_layout.dp
    micro = min(c.cluster.micro_rows, raised_rows // ranks_layout.dp)
    memory, seconds = price_microbatch(
        c,
        network if stage in ("cpt", "mtp") else t.stretched(network),
        ranks_layout,
        micro,
        length,
        talk.tokens if stage == "sft" else length,
        hardware,
        trunk=stage != "mtp",
        drafts=stage != "cpt" and c.has_drafts,
        lora=c.sft.lora if stage == "sft" else 0,
    )
    tokens = raised_rows * length
    if stage == "sft":
        total_tokens = c.sft.demonstrations * c.sft.epochs * talk.tokens / FULLNESS
    else:
        total_tokens = {"cpt": t.tokens, "mtp": c.mtp.tokens, "long": t.long_tokens}[stage]
    steps = max(1, int(total_tokens / tokens))
    raised = raised_rows if raised_rows != rows else 0
    return make_price(c, stage, gpus, hardware, steps, tokens, memory, micros * seconds, raised)


def price_microbatch(
    c: FullRecipe,
    config: Config,
    ranks_layout: Layout,
    rows: int,
    length: int,
    document: float,
    hardware: Hardware,
    *,
    trunk: bool,
    drafts: bool,
    lora: int,
) -> tuple[float, float]:
    """Peak bytes of a rank, and seconds of a micro-batch of `rows` rows per dp rank, packed from documents of so many
    tokens. `trunk`: whether the network is trained, or else read. `lora`: rank of its adapters, or 0."""
    size, remake = 2 if c.training.dtype == "bfloat16" else 4, c.cluster.rematerialise
    try:
        step = plan(config, ranks_layout, rows * ranks_layout.dp, length, computed=size, remake=remake, lora=lora)
    except ValueError as error:
        raise RunError(str(error)) from None
    computed = flops(config, step.tokens, document, remake, lora)
    memory, seconds = float(step.memory), step.seconds(hardware, ranks_layout)
    network, eager = seconds["network"], seconds["eager"]
    if not trunk:  # one forward pass, of which nothing is kept
        share = 1 / (4 if remake else 3)
        computed, network, eager = computed * share, network * share, eager * share
        memory = step.weights + step.gathered + saved(config, step.tokens, True, size, ranks_layout.ep, ranks_layout.cp)
    if drafts:
        shape, rank_parameters, all_parameters = draft_layers(c, config, ranks_layout.world)
        computed += flops_of_drafts(config, shape, all_parameters, step.tokens, document)
        memory += (
            rank_parameters * (4 + 4 + 8)
            + all_parameters * size
            + saved(shape, step.tokens, False, size, 1, ranks_layout.cp)
        )
        link = hardware.node_bandwidth if ranks_layout.world <= hardware.node else hardware.network_bandwidth
        network += 2 * (ranks_layout.world - 1) * rank_parameters * size / link
    compute = computed / (hardware.computing_in(c.training.dtype).flops * hardware.efficiency)
    return memory, network + max(compute, 3 * memory / hardware.bandwidth) + eager


def draft_layers(c: FullRecipe, config: Config, ranks: int) -> tuple[Config, float, int]:
    """The draft layers as a dense network, their parameters on a rank, and all of them."""
    m = c.mtp.layers
    with torch.device("meta"):
        all_parameters = sum(p.numel() for p in MTP(config, m).parameters())
    shape = replace(
        config, num_hidden_layers=m.depth, num_experts=0, num_experts_per_tok=0, intermediate_size=m.intermediate_size
    )
    return shape, -(-all_parameters // ranks), all_parameters


def flops_of_drafts(config: Config, shape: Config, parameters: int, tokens: int, document: float) -> float:
    """Forward and backward of the layers, and per layer the head's product forward and back to its input; the teacher's
    once more forward."""
    head = config.vocab_size * config.hidden_size
    attention = 3 * Cost.of(shape).quadratic * document
    return tokens * (6 * parameters + attention + (4 * shape.num_hidden_layers + 2) * head)


def price_rl_step(
    c: FullRecipe, config: Config, gpus: int, hardware: Hardware, lengths: Conversations
) -> tuple[float, float]:
    """Peak bytes of a rank, and seconds of a step."""
    ranks_layout = Layout(**layout(c, gpus, "rl"))
    n, length = c.rl.prompts * c.rl.rollouts, c.agent_length
    size = 2 if c.training.sampler_dtype == "bfloat16" else 4
    rows = max(1, math.ceil(n * lengths.tokens / FULLNESS / length / ranks_layout.dp))
    memory, micro = price_microbatch(
        c,
        config,
        ranks_layout,
        c.cluster.micro_rows,
        length,
        lengths.tokens,
        hardware,
        trunk=True,
        drafts=False,
        lora=c.rl.lora,
    )
    training = math.ceil(rows / c.cluster.micro_rows) * micro
    link = hardware.node_bandwidth if gpus <= hardware.node else hardware.network_bandwidth
    parameters = config.parameters()
    gather = 4 * parameters * (gpus - 1) / gpus / link
    sampler_hardware = hardware.computing_in(c.training.sampler_dtype)
    sampling = decoding(config, -(-n // gpus), size, sampler_hardware, lengths)
    memory += parameters * size + cache(config, -(-n // gpus) * lengths.tokens, size)
    if c.rl.payment.kl:
        training *= 1 + 2 / (4 if c.cluster.rematerialise else 3)
        memory += 4 * parameters / gpus
    return memory, gather + sampling + training


def decoding(config: Config, rows: int, size: int, hardware: Hardware, talk: Conversations) -> float:
    """Seconds in which one rank samples so many conversations at once."""
    active, all_parameters = config.parameters(active=True), config.parameters()
    touched_share = min(1.0, rows * config.num_experts_per_tok / config.num_experts) if config.num_experts else 1.0
    bytes_read = (active + (all_parameters - active) * touched_share) * size + cache(
        config, rows * talk.tokens / 2, size
    )
    compute = 2 * active * rows / (hardware.flops * hardware.efficiency)
    return talk.longest * max(bytes_read / hardware.bandwidth, compute)


def cache(config: Config, tokens: float, size: int) -> float:
    """Bytes of the keys and values of so many tokens."""
    return tokens * 2 * config.num_key_value_heads * config.head_dim * config.num_hidden_layers * size


def show(
    prices_by_gpus: Sequence[Sequence[Price]],
    name: str,
    hardware: str,
    assumptions: str,
    advice: str = "",
    console: Console | None = None,
) -> None:
    """Prints a table for each number of GPUs, and under them the advice, if there is any, and the assumptions."""
    from rich.console import Console
    from rich.table import Table

    console, machine = console or Console(), HARDWARE[hardware]
    for stages in prices_by_gpus:
        dollars, seconds = sum(price.dollars for price in stages), sum(price.seconds for price in stages)
        title = f"{name} on {stages[0].gpus} × {hardware}: {span(seconds)}, {dollars:,.0f} dollars"
        table = Table("stage", box=None, header_style="bold", title=title, title_justify="left")
        for heading in ("dp·cp·ep", "steps", "tokens/step", "memory", "time/step", "time", "dollars"):
            table.add_column(heading, justify="right", no_wrap=True)
        for price in stages:
            memory = cells([price.memory], "B", 1)[0] + ("" if price.fits else "!")
            layout_cell = f"{price.layout.dp}·{price.layout.cp}·{price.layout.ep}"
            tokens = cells([price.tokens], "", 2, COUNTS)[0] + ("*" if price.raised else "")
            table.add_row(
                price.stage,
                layout_cell,
                f"{price.steps:,}",
                tokens,
                memory,
                span(price.seconds / price.steps),
                span(price.seconds),
                f"{price.dollars:,.0f}",
            )
        console.print(table)
        if any(not price.fits for price in stages):
            console.print(f"! more than 92% of {machine.memory / 1e9:.0f} GB")
        if any(price.raised for price in stages):
            console.print("* more than in the settings: each group of cp ranks needs at least one row")
        console.print()
    console.print("\n\n".join(filter(None, (advice, assumptions))), highlight=False)


def describe(c: FullRecipe, talk: Conversations, machine: Hardware) -> str:
    """What the prices of the small world's stages rest on."""
    unit = "the tokens" if talk.has_tokenizer else f"the bytes, at {BYTES_PER_TOKEN} to a token,"
    length_source = (
        f"{unit} of {talk.demonstrations} demonstrations ({talk.tokens:,.0f} each, at most {talk.longest:,.0f} "
        f"of them the agent's own)"
    )
    numbers: dict[str, Any] = {
        "efficiency": machine.efficiency,
        "latency": machine.latency * 1e6,
        "price": machine.price,
    }
    text = ASSUMPTIONS.format(tokens=length_source, fullness=FULLNESS, sampler=c.training.sampler_dtype, **numbers)
    if "decode" in stages_of(c):
        text += (
            f" The stage decode runs on one CPU thread, which is guessed to read {HOST_BANDWIDTH / 1e9:g} GB/s, and "
            f"holds {len(WAYS)} copies of the network in float32 there; evaluation.decode_rounds=0 leaves it out."
        )
    return text


def span(seconds: float) -> str:
    """A duration, in a unit that shows two digits."""
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s" if seconds >= 0.1 else f"{1000 * seconds:.2g} ms"


def write(prices_by_gpus: Sequence[Sequence[Price]], out: Path) -> None:
    """Writes recipe-plan.json to a folder."""
    out.mkdir(parents=True, exist_ok=True)
    atomic_write(
        out / "recipe-plan.json",
        json.dumps([asdict(price) for stages in prices_by_gpus for price in stages], indent=1) + "\n",
    )
