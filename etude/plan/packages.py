"""`etude plan --recipe FILE --tasks RECIPES`: memory, time and price of the stages of a run on packages.

    sft       packed rows of scripted episodes
    measure   held-out tasks with the checkpoint as it came, and after SFT
    rl        gather the sampler's weights, sample (`tasks.slots` rollouts at a time), run tools and tests, train on
              the packed rows, and twice a forward pass for the KL to the reference
    eval      held-out tasks after RL
    with data.corpus the pretraining of `recipe.py` comes before

Lengths of episodes are those of scripted ones in the checkpoint's own tokens and chat format. A rank's peak is that of
whichever phase of a stage needs most:

    sampling  the sampler's weights; keys and values of `rl.max_len` tokens of each rollout of a batch, which
              `ref.engine.sampler.Lockstep` allocates at once; reading the prompts, or the logits of a step, or the copy
              of the keys when finished rollouts leave the batch. Continuous batching (`tasks.engine`) takes less: it
              copies no keys, and reads prompts a few hundred tokens at a time
    training  weights, gradients, moments, activations, and the head's gradients: `kernels/linear_logprob.py` computes
              [own tokens, vocabulary] a sixteenth of the vocabulary at a time
    clipping  weights, gradients, moments, and the largest gradient twice in float64 (`scaled/runtime/sharding.py`)
    loading   a checkpoint, and what the sampler copies from it

Decoding takes a step of all rollouts for each token of the longest one behind its prompt. A step reads the weights or
computes, whichever takes longer, and its kernels are launched from Python one after the other.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np

from environments.tasks.load import list_recipes, read_recipe
from etude.plan.recipe import (
    FULLNESS,
    Conversations,
    Price,
    cache,
    decoding,
    make_price,
    price_microbatch,
    price_supervised,
)
from kit.settings import RunError, fill
from recipe.full.settings import FullRecipe
from recipe.full.stages import layout, rows_of_step, stages_of
from recipe.packages.chat_format import choose_template
from recipe.packages.data import DEMONSTRATIONS, record_scripted
from recipe.packages.tasks import LoadedPackage, load_packages, make_schemas, split_packages
from ref import sft
from ref.cpt import load_tokenizer
from ref.lora import count_parameters
from ref.network import Config
from ref.rollout import MIN_BATCH
from scaled.plan import Hardware, adapter_shapes_of, plan, shapes_of
from scaled.runtime.mesh import Layout

__all__ = [
    "Episodes",
    "advise",
    "describe",
    "fewest_gpus",
    "head_bytes",
    "measure_episodes",
    "plan_run",
    "prices",
    "sampling_bytes",
]

SAMPLE = 4
"""Tasks whose scripted episodes are recorded to measure lengths."""
TOOL_SECONDS = 0.85
"""Seconds of one core for the tools and the grading of an episode: results/sandbox-amd-epyc.json, two cores, 2.34
scripted episodes with their own test runs a second."""
CORES = 8
"""CPU cores beside a GPU: a guess."""
LAYER_SECONDS = 1.1e-3
"""Seconds in which Python launches the kernels of a layer in a decoding step: what results/decode-nvidia-h200.json
measured above the plan, per step and layer of experts. A dense layer launches fewer."""
SLICES = 16
"""Slices of the vocabulary in the head's backward pass (`kernels/linear_logprob.py`)."""
ASSUMPTIONS = (
    "Counted: parameters, state and bytes sent, keys and values of {max_len:,} tokens for each rollout that is "
    "sampled together, logits of the sampler, the head's gradients as the Triton kernel makes them, the norm of "
    "gradients; tests compare them with what a CPU rank allocates. Activations within a tenth. {lengths} Measured "
    "elsewhere: {layer:.2g} ms of launches per layer and decoding step (an H200, layers of experts), {tools:.2g} "
    "s of a core for tools and grading per episode, here on {cores} cores per GPU, a guess. "
    "Assumed: peak, for {dtype} training {peak:.3g} TFLOP/s, bandwidth and links from data sheets; nothing overlaps; "
    "operations between products are kernels of their own; episodes are as long as those, and packed rows "
    "{fullness:.0%} full. Guessed: {efficiency:.0%} of peak for matrix products, {latency:.0f} µs per collective, "
    "{price:g} dollars per GPU hour. No stage was timed on a GPU. Not included: making tasks and scripted episodes, "
    "reading and writing checkpoints, the CUDA context."
)
REMEDIES = (
    ("cluster.micro_rows=1",),
    ("cluster.rematerialise=true",),
    ("training.sampler_dtype=bfloat16",),
    ("rl.payment.kl=0",),
    ("tasks.slots=8",),
    ("rl.max_len={half}", "cluster.agent_length={half}"),
)
"""Settings that need less memory, in the order in which they are tried."""
ADAPTERS = ("sft.lora=16", "rl.lora=16")
"""Tried where those do not suffice: another learning rate belongs to it."""


@dataclass(frozen=True)
class Episodes:
    """Lengths of episodes, in tokens, and how many there are."""

    tokens: float
    """Of all contexts of an episode, on average."""
    own: float
    """Of the agent, on average."""
    longest: int
    """Of the longest context."""
    opening: int
    """Of the shortest prompt, which all rollouts of a batch read in one pass."""
    conversations: int
    """That SFT learns from."""
    heldout: int
    """Held-out tasks that are evaluated."""
    source: str
    """How the lengths are known: a sentence."""

    @property
    def steps(self) -> int:
        """Decoding steps of a batch of rollouts."""
        return self.longest - self.opening


def fewest_gpus(c: FullRecipe) -> int:
    """The smallest number of ranks that the layouts of all stages divide."""
    return math.lcm(c.cluster.cp, c.cluster.long_cp, c.cluster.rl_cp, c.cluster.ep)


def plan_run(
    c: FullRecipe, network: Config, checkpoint: Path | None, gpus: Sequence[int], hardware: Hardware
) -> tuple[list[list[Price]], str, str]:
    """The stages for each number of GPUs, what they rest on, and what helps where one does not fit. Raises RunError as
    `measure_episodes` and `prices`. Without `tasks.recipes` the tasks are some that nobody has made yet."""
    episodes = measure_episodes(c, checkpoint, None if c.tasks.recipes is None else Path(c.tasks.recipes))
    c = replace(c, tasks=replace(c.tasks, recipes=c.tasks.recipes or "tasks"))
    stage_prices = [prices(c, network, n, hardware, episodes) for n in gpus]
    advice = "\n".join(filter(None, (advise(c, network, n, hardware, episodes) for n in gpus)))
    return stage_prices, describe(c, episodes, hardware), advice


def measure_episodes(c: FullRecipe, checkpoint: Path | None, recipes: Path | None) -> Episodes:
    """The lengths of scripted episodes, or of the conversations that the user names: those of the run that `recipes`,
    RUN/data/recipes, belongs to, or else those of `SAMPLE` tasks, recorded now in sandboxes. Without tasks, sandboxes
    or a tokenizer, contexts are as long as they may be. Raises RunError for recipes and chat templates with which a run
    would not begin."""
    training, heldout, reason = list[LoadedPackage](), list[LoadedPackage](), "there are no tasks (--tasks)"
    if recipes is not None:
        for path in list_recipes([recipes]):
            read_recipe(path)
        try:
            packages = load_packages(c.tasks, recipes)
        except (RunError, ValueError) as error:  # tasks that must be made again need sandboxes
            reason = str(error)
        else:
            training, heldout = split_packages(c.tasks, packages)
    tasks = sum(len(package.tasks) for package in training)
    heldout_tasks = min(c.evaluation.tasks, sum(len(package.tasks) for package in heldout)) or c.evaluation.tasks
    # Without tasks, as many as RL draws: each comes once before one comes again.
    conversations = c.tasks.demonstrations or len(c.tasks.styles) * (tasks or max(1, c.rl.steps) * c.rl.prompts)
    if checkpoint is None or not (checkpoint / "tokenizer.json").is_file():
        reason = "there is no --checkpoint" if checkpoint is None else f"{checkpoint} has no tokenizer.json"
        return bound_episodes(c, conversations, heldout_tasks, reason)
    with tempfile.TemporaryDirectory(prefix="etude-plan-") as folder:
        path, label = Path(folder) / DEMONSTRATIONS, "scripted episodes, recorded now"
        stored = None if recipes is None else recipes.resolve().parent / DEMONSTRATIONS
        if c.sft.conversations is not None:
            path = Path(c.sft.conversations)
            label = f"conversations of {path}"
        elif stored is not None and stored.is_file():
            path, label = stored, f"scripted episodes of {stored}"
        elif training:
            try:
                record_sample(c, training, path)
            except RunError as error:
                reason = str(error)
        if not path.is_file():
            return bound_episodes(c, conversations, heldout_tasks, reason)
        lengths = measure_contexts(c, checkpoint, path)
    if not lengths:
        raise RunError(f"{path} has no conversation that the chat template of {checkpoint} can write")
    tokens = float(np.mean([sum(length for length, _, _ in contexts) for contexts in lengths]))
    own = float(np.mean([sum(own for _, own, _ in contexts) for contexts in lengths]))
    longest = max(length for contexts in lengths for length, _, _ in contexts)
    opening = min(opening for contexts in lengths for _, _, opening in contexts)
    if c.sft.conversations is not None:
        conversations = len(lengths)
    source = (
        f"Measured: {len(lengths)} {label}, in the checkpoint's tokens ({tokens:,.0f} each, {own:,.0f} of them the "
        f"agent's own; the longest context has {longest:,})."
    )
    return Episodes(tokens, own, longest, opening, conversations, heldout_tasks, source)


def bound_episodes(c: FullRecipe, conversations: int, heldout: int, reason: str) -> Episodes:
    """Episodes whose contexts are as long as the settings allow."""
    contexts = c.tasks.contexts if c.tasks.summary_at else 1
    source = (
        f"Upper bound: contexts of rl.max_len = {c.rl.max_len:,} tokens, all of them the agent's own, and "
        f"{conversations:,} such conversations in SFT, since {reason}."
    )
    tokens = contexts * c.rl.max_len
    return Episodes(tokens, tokens, c.rl.max_len, 0, conversations, heldout, source)


def record_sample(c: FullRecipe, training: Sequence[LoadedPackage], path: Path) -> None:
    """Writes the scripted episodes of `SAMPLE` tasks, of as many packages as there are. Raises RunError where no
    sandbox can be opened."""
    packages = [training[index * len(training) // SAMPLE] for index in range(min(SAMPLE, len(training)))]
    if len(training) < SAMPLE:
        packages = [*training]
    count = -(-SAMPLE // len(packages))
    samples = [(package.package, dict(islice(package.tasks.items(), count))) for package in packages]
    record_scripted(path, samples, c.tasks)


def measure_contexts(c: FullRecipe, checkpoint: Path, path: Path) -> list[list[tuple[int, int, int]]]:
    """Of each conversation its contexts: tokens, tokens of the agent, tokens before its first turn. Conversations that
    the template cannot write are left out, as SFT does. Raises RunError for a template that no run can use."""
    template, _ = choose_template(checkpoint, make_schemas(c.tasks))
    tokenizer, lengths = load_tokenizer(checkpoint / "tokenizer.json"), []
    for _, chat in sft.read_conversations(path)[0]:
        try:
            contexts = sft.tokens_and_mask(chat, template, tokenizer)
        except ValueError:
            continue
        lengths.append([(len(ids), int(mask.sum()), int(mask.int().argmax())) for ids, mask in contexts])
    return [contexts for contexts in lengths if contexts]


def prices(c: FullRecipe, network: Config, gpus: int, hardware: Hardware, episodes: Episodes) -> list[Price]:
    """The stages that the ranks play, in order. Raises RunError if this number of ranks cannot be split as the settings
    want."""
    config = c.training.stretched(network) if c.has_pretraining else network
    talk = Conversations(episodes.tokens, episodes.own, 1, True)
    price_functions = {
        "sft": lambda: price_sft(c, config, gpus, hardware, episodes),
        "measure": lambda: price_evaluation(c, "measure", 2, config, gpus, hardware, episodes),
        "rl": lambda: price_rl(c, config, gpus, hardware, episodes),
        "eval": lambda: price_evaluation(c, "eval", 1, config, gpus, hardware, episodes),
    }
    return [
        price_functions[stage]()
        if stage in price_functions
        else price_supervised(c, network, gpus, hardware, stage, talk)
        for stage in stages_of(c)
    ]


def price_sft(c: FullRecipe, config: Config, gpus: int, hardware: Hardware, episodes: Episodes) -> Price:
    """Whole epochs of batches of rows, of which some are padding where there are few conversations."""
    _, rows, _, length = rows_of_step(c, "sft")
    ranks = Layout(**layout(c, gpus, "sft"))
    raised = max(rows, ranks.dp)
    raised += -raised % ranks.dp
    packed = math.ceil(episodes.conversations * episodes.tokens / FULLNESS / length)
    steps = max(1, packed // raised) * c.sft.epochs
    micro = min(c.cluster.micro_rows, raised // ranks.dp)
    memory, seconds = price_training(c, config, ranks, micro, hardware, episodes, c.sft.lora, c.has_drafts)
    micros = -(-raised // (ranks.dp * micro))
    raised_rows = raised if raised != rows else 0
    return make_price(c, "sft", gpus, hardware, steps, raised * length, memory, micros * seconds, raised_rows)


def price_training(
    c: FullRecipe,
    config: Config,
    ranks: Layout,
    rows: int,
    hardware: Hardware,
    episodes: Episodes,
    lora: int,
    drafts: bool = False,
) -> tuple[float, float]:
    """Peak bytes of a rank that trains on packed episodes, and seconds of a micro-batch of `rows` rows per dp rank.
    `lora`: rank of the adapters that it trains, or 0."""
    size, length = 2 if c.training.dtype == "bfloat16" else 4, c.agent_length
    memory, seconds = price_microbatch(
        c, config, ranks, rows, length, episodes.tokens, hardware, trunk=True, drafts=drafts, lora=lora
    )
    step = plan(config, ranks, rows * ranks.dp, length, computed=size, remake=c.cluster.rematerialise, lora=lora)
    own = step.tokens * FULLNESS * episodes.own / episodes.tokens
    trained = adapter_shapes_of(config, lora) if lora else shapes_of(config)
    largest = max(map(math.prod, trained.values())) / ranks.world
    state = step.weights + step.gradients + step.moments
    # norm = √Σ g², each gradient in float64, and its squares
    return max(memory + head_bytes(config, own, size, not lora), state + 2 * 8 * largest), seconds


def head_bytes(config: Config, own: float, size: int, is_trained: bool = True) -> float:
    """Bytes of the head's backward pass for so many of the agent's tokens: the gradients of its weights if they are
    trained, of the hidden states in float32, and of the logits of two slices of the vocabulary, the next before the
    last is freed. `size`: bytes per value."""
    V, D = config.vocab_size, config.hidden_size
    return is_trained * V * D * size + own * (4 * D + 2 * -(-V // SLICES) * size)


def price_rl(c: FullRecipe, config: Config, gpus: int, hardware: Hardware, episodes: Episodes) -> Price:
    """A step samples, and then trains: what one of them holds is free for the other."""
    ranks = Layout(**layout(c, gpus, "rl"))
    n, parameters = c.rl.prompts * c.rl.rollouts, config.parameters()
    size = 2 if c.training.sampler_dtype == "bfloat16" else 4
    rows = max(1, math.ceil(n * episodes.tokens / FULLNESS / c.agent_length / ranks.dp))
    training, micro = price_training(c, config, ranks, c.cluster.micro_rows, hardware, episodes, c.rl.lora)
    train_seconds = math.ceil(rows / c.cluster.micro_rows) * micro
    resident = parameters * size  # the sampler's weights, always there
    if c.rl.payment.kl:
        train_seconds *= 1 + 2 / (4 if c.cluster.rematerialise else 3)
        resident += 4 * parameters / gpus
    share = -(-n // gpus)
    batch = count_slots(c, share)
    num_adapted = count_parameters(config, c.rl.lora)
    state = 4 * (parameters + num_adapted) + 8 * (num_adapted or parameters)  # weights and moments
    sampling = sampling_bytes(config, batch, c.rl.max_len, episodes.opening, size) + state / gpus
    link = hardware.node_bandwidth if gpus <= hardware.node else hardware.network_bandwidth
    gather = 4 * parameters * (gpus - 1) / gpus / link
    decode = math.ceil(share / batch) * decode_seconds(c, config, batch, hardware, episodes)
    seconds = gather + decode + n * TOOL_SECONDS / (CORES * gpus) + train_seconds
    memory = resident + max(training, sampling)
    return make_price(c, "rl", gpus, hardware, c.rl.steps, n * episodes.tokens, memory, seconds)


def price_evaluation(
    c: FullRecipe, stage: str, moments: int, config: Config, gpus: int, hardware: Hardware, episodes: Episodes
) -> Price:
    """Of each task `evaluation.samples` rollouts and a greedy one, for some checkpoints."""
    samples, parameters = c.evaluation.samples, config.parameters()
    tasks = -(-episodes.heldout // gpus)
    batch, greedy_batch = count_slots(c, tasks * samples), count_slots(c, tasks)
    size = 2 if c.training.sampler_dtype == "bfloat16" else 4
    sampling = parameters * size + sampling_bytes(config, batch, c.rl.max_len, episodes.opening, size)
    # The checkpoint in float32 is gathered in the dtype of sampling, one whole weight after another; the sampler of the
    # checkpoint before is still there.
    loading = parameters * (4 / gpus + size + (size if moments > 1 else 0))
    loading += 4 * max(map(math.prod, shapes_of(config).values()))
    batches = -(-tasks * samples // batch) - (-tasks // greedy_batch)
    total = moments * episodes.heldout * (samples + 1)
    seconds = moments * batches * decode_seconds(c, config, batch, hardware, episodes)
    seconds += total * TOOL_SECONDS / (CORES * gpus)
    return make_price(c, stage, gpus, hardware, 1, total * episodes.tokens, max(sampling, loading), seconds)


def count_slots(c: FullRecipe, rollouts: int) -> int:
    """How many of a rank's rollouts are sampled at once."""
    return min(rollouts, c.tasks.slots if c.tasks.engine == "continuous" else MIN_BATCH)


def sampling_bytes(config: Config, rows: int, max_len: int, opening: int, size: int) -> float:
    """Bytes that a batch of rollouts takes at the peak, beside the sampler's weights."""
    keys_values = cache(config, rows * max_len, size)
    D, K = config.hidden_size, config.num_experts_per_tok
    # Reading the prompts: the input of a layer, its norm, and what a dense layer or the rows of its experts compute.
    width = K * (2 * D + 3 * config.moe_intermediate_size) if config.num_experts else 3 * config.intermediate_size
    prefill = rows * opening * (2 * D + width) * size
    # `ref.engine.sampler.sample`: logits, their log-softmax in float32, its exponential and the sum of it in float64.
    logits = rows * config.vocab_size * (size + 4 + 8 + 8)
    # `ref.engine.layout.Rows`: attention's weights with the norms folded in, and the rotary tables of every layer, made
    # in float32.
    heads, groups, d = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    layout_numel = config.num_hidden_layers * d * ((heads + 2 * groups) * D + 2 * max_len * (heads + groups))
    # `KVCache.select` copies the keys of all layers, then the values, of at most nine tenths of the rows.
    return keys_values + layout_numel * size + max(layout_numel * 4, prefill, logits, 0.9 * keys_values / 2)


def decode_seconds(c: FullRecipe, config: Config, rows: int, hardware: Hardware, episodes: Episodes) -> float:
    """Seconds in which one rank samples a batch of rollouts."""
    size = 2 if c.training.sampler_dtype == "bfloat16" else 4
    talk = Conversations(episodes.longest, episodes.steps, 1, True)
    computed = decoding(config, rows, size, hardware.computing_in(c.training.sampler_dtype), talk)
    return computed + episodes.steps * config.num_hidden_layers * LAYER_SECONDS


def advise(c: FullRecipe, network: Config, gpus: int, hardware: Hardware, episodes: Episodes) -> str:
    """Where a stage does not fit: which settings make all of them fit, or how many GPUs, or both if the settings are
    those of adapters; empty if all fit."""
    if all(price.fits for price in prices(c, network, gpus, hardware, episodes)):
        return ""
    state, subject = 16 * network.parameters(), "full-parameter training holds"
    if rank := min(c.sft.lora, c.rl.lora):
        state, subject = 4 * network.parameters() + 16 * count_parameters(network, rank), f"LoRA of rank {rank} holds"
    opening = (
        f"On {gpus} × {hardware.memory / 1e9:.0f} GB not every stage fits: {subject} {state / 1e9:.1f} GB of weights, "
        f"gradients and moments in float32 on all ranks together."
    )
    remedies = []
    for settings, ranks in candidates(c, gpus, episodes):
        if remedies and ranks == gpus:
            continue
        try:
            stage_prices = prices(fill(FullRecipe, {}, settings, c), network, ranks, hardware, episodes)
        except RunError:
            continue
        if all(price.fits for price in stage_prices):
            options = [*(f"--set {setting}" for setting in settings), *([f"--nproc {ranks}"] if ranks != gpus else [])]
            remedies.append(" ".join(options))
            if ranks != gpus or not {*ADAPTERS} <= {*settings}:
                break
    if not remedies:
        return f"{opening} No setting here makes it fit: choose a smaller checkpoint or GPUs with more memory."
    return f"{opening} It fits with {', or with '.join(remedies)}."


def candidates(c: FullRecipe, gpus: int, episodes: Episodes) -> Iterator[tuple[list[str], int]]:
    """Changes that need less memory, as settings and a number of GPUs: each alone, all settings together, adapters
    alone and with all settings, and up to eight times as many GPUs. Contexts are halved only where the episodes still
    fit, or their lengths are not known."""
    unit = 2 * c.cluster.rl_cp
    half = c.rl.max_len // 2 // unit * unit
    can_halve = half >= episodes.longest or episodes.longest >= c.rl.max_len
    remedies = [
        [setting.format(half=half) for setting in settings] for settings in REMEDIES[: None if can_halve else -1]
    ]
    yield from ((settings, gpus) for settings in remedies)
    together = [setting for settings in remedies for setting in settings]
    yield together, gpus
    if not (c.sft.lora or c.rl.lora):
        yield from (([*ADAPTERS], gpus), ([*together, *ADAPTERS], gpus))
    yield from (([], gpus * factor) for factor in (2, 4, 8))


def describe(c: FullRecipe, episodes: Episodes, machine: Hardware) -> str:
    """What the prices rest on."""
    return ASSUMPTIONS.format(
        max_len=c.rl.max_len,
        lengths=episodes.source,
        layer=1e3 * LAYER_SECONDS,
        tools=TOOL_SECONDS,
        cores=CORES,
        dtype=c.training.dtype,
        peak=machine.computing_in(c.training.dtype).flops / 1e12,
        fullness=FULLNESS,
        efficiency=machine.efficiency,
        latency=machine.latency * 1e6,
        price=machine.price,
    )
