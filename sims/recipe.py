"""The whole recipe, small: data → continued pretraining → multi-token prediction → long context → SFT → RL → evaluation.

The order is the report's (Composer 2, §3–§5): the MTP layers are cut from the middle of pretraining and then trained jointly
in the long-context and SFT phases; RL follows SFT; every number of the evaluation is taken before and after RL on tasks whose
target and helper functions no training ever saw. From SFT on the agent works in short contexts joined by its own summaries
(§4.1); RL's sampler and trainer compute in different dtypes, and the trainer replays the sampler's experts (§6.2).

    etude run recipe --scale small --out runs/small

Each stage is a function of the configuration and of what earlier stages left on disk. All randomness comes from generators
seeded by (seed, stage, step): a resumed run repeats the dead one bit for bit, and a state is only weights, moments and a step.
"""

import itertools
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch

from kit.runs import Run
from ref import cpt
from ref.mtp import MTP, MTPConfig
from ref.network.model import Config, Transformer
from sims import evaluation, reinforcement
from sims.agent import Payment
from sims.chains import Memory, context, lessons
from sims.corpus import data, task_stream
from sims.learner import Learner, checkpoint, language_of, load_checkpoint, perplexity_look, rows_of, shown_rows, train
from sims.limits import within
from sims.microrepo import NoiseConfig, WorldConfig

__all__ = ["Recipe", "run"]


@dataclass(frozen=True)
class Data:
    """What is read."""

    corpus: str | None = None
    """Folder of code; none: the source of the running Python's standard library."""
    vocab_size: int = 1024
    """Byte-level BPE tokens, three special ones included."""
    world_share: float = 0.75
    """Share of pretraining tokens that are modules of the small world, the "internal codebase"."""
    heldout_share: float = 0.03
    """Size aimed at for the held-out codebase, as a share of the corpus."""

    def __post_init__(self):
        within(self, least={"vocab_size": 260}, shares=("world_share", "heldout_share"))


@dataclass(frozen=True)
class Training:
    """Optimisation of the supervised phases."""

    tokens: int = 1_000_000
    """Tokens of the short-context phase."""
    length: int = 128
    """Context of the short phase."""
    long_tokens: int = 300_000
    """Tokens of the long-context phase."""
    long_length: int = 256
    """Context of the long phase, and of the rolling perplexity window."""
    batch_tokens: int = 4096
    """Tokens per optimiser step."""
    optimizer: Literal["muon", "adamw"] = "muon"
    """Muon for matrices with AdamW for the rest, or AdamW alone."""
    muon_lr: float = 0.02
    """Learning rate of Muon: spectral norm of a step."""
    adamw_lr: float = 3e-3
    """Learning rate of AdamW."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Compute dtype of training; masters are float32."""
    threads: int = 2
    """Threads of torch in training. A sum in float32 depends on them, so that they are part of a run, whatever the machine and
    OMP_NUM_THREADS say; rollouts are played by one thread each, on all cores."""
    sampler_dtype: Literal["bfloat16", "float32"] = "float32"
    """Dtype of the sampler's copy of the weights. On a CPU the products of one decoding step are so small that float32 is faster."""
    sampler_weights: Literal["full", "fp8"] = "full"
    """The sampler's weight matrices in RL: those that training computes with (rounded to `dtype`), or FP8 E4M3 with a scale per
    output channel."""
    perplexity_every: int = 60
    """Steps between two looks at codebase perplexity."""
    perplexity_tokens: int = 16_384
    """Tokens of the held-out codebase that each look scores; the evaluation scores all."""

    def __post_init__(self):
        one = ("tokens", "long_tokens", "batch_tokens", "threads", "perplexity_every")
        two = ("length", "long_length", "perplexity_tokens")
        within(self, least={name: 1 for name in one} | {name: 2 for name in two})


@dataclass(frozen=True)
class Context:
    """What the agent works in. A task that outgrows a context goes on in another, behind the agent's own summary; lengths in tokens."""

    join: Literal["self", "none"] = "self"
    """What joins contexts: self-summaries, or nothing, which leaves one of `rl.max_len`."""
    trigger: int = 120
    """Length at which a summary is asked for, once the turn and its answer are over."""
    room: int = 28
    """By how much that turn and answer may pass the trigger."""
    longest_summary: int = 43
    """Longest summary, its stop token included."""
    max_segments: int = 2
    """Contexts of one rollout at most."""
    memory: Memory = field(default_factory=lambda: Memory(wordy=0.2, forgetful=0.05))
    """How imperfect the summaries are that SFT shows."""


@dataclass(frozen=True)
class Sft:
    """Supervised fine-tuning on imperfect demonstrations."""

    demonstrations: int = 1400
    """Episodes of the scripted agent."""
    epochs: int = 5
    """Passes over them."""
    depth_mix: tuple[float, float, float] = (0.3, 0.5, 0.2)
    """Shares of depth 0, 1 and 2 among their tasks; depth 0 needs the least teaching."""
    rows: int = 10
    """Packed rows of `training.long_length` tokens per optimiser step; a row holds about three episodes."""
    muon_lr: float = 0.005
    """Learning rate of Muon."""
    adamw_lr: float = 1e-3
    """Learning rate of AdamW."""
    noise: NoiseConfig = field(default_factory=lambda: NoiseConfig(wrong_body=0.25, invalid_call=0.15))
    """How imperfect the scripted agent is."""

    def __post_init__(self):
        within(self, least=dict.fromkeys(("demonstrations", "epochs", "rows"), 1), mixes=("depth_mix",))


@dataclass(frozen=True)
class Mtp:
    """Multi-token prediction."""

    layers: MTPConfig = field(default_factory=MTPConfig)
    """Shape of the layers."""
    tokens: int = 400_000
    """Tokens of the first distillation, on a frozen trunk cut from mid-CPT."""
    lr: float = 3e-3
    """AdamW's learning rate, there and in the joint phases."""
    muon_lr: float = 0.02
    """Muon's learning rate for the layers' matrices."""
    weight: float = 1.0
    """Weight of the distillation loss in the joint phases."""
    detach_trunk: bool = True
    """In the joint phases the trunk stays out of that loss; off: it learns from it, too (`etude figure mtp` plays both)."""
    rl_every: int = 2
    """The layers follow the policy in every so many RL steps."""

    def __post_init__(self):
        within(self, least={"tokens": 1, "rl_every": 1})


@dataclass(frozen=True)
class Rl:
    """Dr. GRPO in the small world."""

    steps: int = 110
    """Optimiser steps; 0 leaves RL out."""
    prompts: int = 16
    """Groups per step (G); a prompt is never used twice."""
    rollouts: int = 8
    """Rollouts per group (N)."""
    lr: float = 1e-4
    """Adam's learning rate; at 1.5e-4 some policies unlearned testing, 1e-3 destroys the policy."""
    warmup: int = 5
    """Steps over which the learning rate rises."""
    decay: int = 40
    """Steps at the end, half of all at most, over which it falls."""
    max_len: int = 192
    """Tokens of a rollout in a single context: with `context.join` none, and in experiments that play without summaries."""
    max_turns: int = 10
    """Turns after which the environment closes."""
    temperature: float = 1.0
    """Sampling temperature, in training and in evaluation."""
    clip_low: float = 0.2
    """PPO clip below one."""
    clip_high: float = 0.2
    """PPO clip above one."""
    budget_tokens: int = 40
    """Constant that stands for a rollout's length in the normaliser G·N·budget_tokens (Dr. GRPO divides by no length)."""
    payment: Payment = field(default_factory=Payment)
    """Prices of effort, invalid calls and drift."""
    later: float = 0.5
    """Share of the steps, at the end, in which harder tasks are upsampled (report §4.1); before, tasks come in the world's mix."""
    upsampling: float = 1.0
    """How much: a kind of task is kept in proportion to this power of its rollouts' turns and tokens so far; 0 keeps all alike."""
    replay: Literal["none", "plain", "filtered"] = "filtered"
    """Router replay: whose experts the training pass takes (its own, the sampler's, the sampler's where they are plausible)."""
    replay_alpha: float = 0.5
    """Plausibility that filtered replay asks of an expert."""
    shuffle_rewards: bool = False
    """Control: rewards are permuted over the batch, so that they say nothing about the rollout they are given to."""
    gate: float = 0.10
    """Sampled success after SFT below which RL is not begun: penalties would only teach it to stop at once."""

    def __post_init__(self):
        if not self.temperature > 0:
            raise ValueError(f"temperature must be above 0, got {self.temperature}: at 0 all rollouts of a group are the same")
        one = ("prompts", "max_len", "max_turns", "budget_tokens")
        within(self, least=dict.fromkeys(one, 1) | {"rollouts": 2, "upsampling": 0}, shares=("later", "replay_alpha", "gate"))


@dataclass(frozen=True)
class Evaluation:
    """Held-out measurements."""

    tasks: int = 300
    """Held-out tasks."""
    samples: int = 8
    """Rollouts of each (best-of-8)."""
    decode_tasks: int = 24
    """Tasks on which speculative and plain decoding are timed, at batch 1."""
    resamples: int = 2000
    """Bootstrap resamples, over tasks."""

    def __post_init__(self):
        within(self, least=dict.fromkeys(("tasks", "samples", "decode_tasks", "resamples"), 1))


@dataclass(frozen=True)
class Recipe:
    """The recipe at a size for two cores and ten minutes."""

    seed: int = 0
    """Seed of everything random."""
    data: Data = field(default_factory=Data)
    """Corpus, tokenizer, mix."""
    model: Config = field(default_factory=Config.tiny)
    """The network."""
    world: WorldConfig = field(default_factory=WorldConfig)
    """The small world."""
    training: Training = field(default_factory=Training)
    """Pretraining."""
    mtp: Mtp = field(default_factory=Mtp)
    """Multi-token prediction."""
    context: Context = field(default_factory=Context)
    """Contexts and self-summaries, from SFT on."""
    sft: Sft = field(default_factory=Sft)
    """Supervised fine-tuning."""
    rl: Rl = field(default_factory=Rl)
    """Reinforcement learning."""
    evaluation: Evaluation = field(default_factory=Evaluation)
    """Held-out measurements."""


def run(run: Run, config: Recipe) -> None:
    """All stages in order; those that an earlier process finished are passed over."""
    torch.set_num_threads(config.training.threads)
    data(run, config)
    pretrain(run, config)
    distil(run, config)
    lengthen(run, config)
    finetune(run, config)
    reinforce(run, config)
    evaluation.evaluate(run, config, task_stream(config, "evaluation"))


def pretrain(run: Run, config: Recipe) -> None:
    """Short-context phase: warm-up and the stable part of the schedule; its end is "mid-CPT"."""
    t = config.training
    (rows, length), read = rows_of(run, "short")
    B = max(1, t.batch_tokens // length)
    steps = max(1, rows // B)
    stage = run.stage("cpt", total=steps)
    if stage.finished:
        return
    torch.manual_seed(config.seed)
    vocabulary = language_of(run.root).tokenizer.get_vocab_size()
    learner = Learner(config, Transformer(replace(config.model, vocab_size=vocabulary)), None, t.muon_lr, t.adamw_lr)
    train(
        stage,
        config,
        learner,
        lambda step: read(np.arange(step * B, min((step + 1) * B, rows))),
        steps,
        lambda step: cpt.wsd(step, 10 * steps, steps // 10, 0),
        "short",
        look=perplexity_look(run, config, learner, steps),
    )
    files = checkpoint(run, "mid-cpt", learner.trunk.masters, None)
    stage.finish(
        {
            "steps": steps,
            "parameters": learner.trunk.masters.config.parameters(),
            "active_parameters": learner.trunk.masters.config.parameters(active=True),
        },
        files,
    )


def distil(run: Run, config: Recipe) -> None:
    """MTP layers from scratch atop the frozen mid-CPT trunk, on the same data."""
    t = config.training
    (rows, length), read = rows_of(run, "short")
    B = max(1, t.batch_tokens // length)
    steps = max(1, min(rows // B, config.mtp.tokens // t.batch_tokens))
    stage = run.stage("mtp", total=steps)
    if stage.finished:
        return
    torch.manual_seed(config.seed + 1)
    model, _ = load_checkpoint(run.root, config, "mid-cpt")
    learner = Learner(config, model, MTP(model.config, config.mtp.layers), t.muon_lr, t.adamw_lr)
    train(
        stage,
        config,
        learner,
        lambda step: read(np.arange(step * B, min((step + 1) * B, rows))),
        steps,
        lambda step: cpt.wsd(step, steps, steps // 10, 0),
        "mtp",
        trunk=False,
    )
    assert learner.mtp is not None
    files = checkpoint(run, "mtp", learner.trunk.masters, learner.mtp.masters)
    stage.finish({"steps": steps, "parameters": sum(p.numel() for p in learner.mtp.masters.parameters())}, files)


def lengthen(run: Run, config: Recipe, start: str = "mtp") -> None:
    """Long-context phase from the checkpoint `start`, trunk and MTP layers together; the learning rate decays. From "mid-cpt",
    without `distil`, this and the phases after it train the trunk alone, the same trunk: none of its gradient is the layers'."""
    t = config.training
    (rows, length), read = rows_of(run, "long")
    B = max(1, t.batch_tokens // length)
    steps = max(1, rows // B)
    stage = run.stage("long", total=steps)
    if stage.finished:
        return
    learner = Learner(config, *load_checkpoint(run.root, config, start), t.muon_lr, t.adamw_lr)
    train(
        stage,
        config,
        learner,
        lambda step: read(np.arange(step * B, min((step + 1) * B, rows))),
        steps,
        lambda step: cpt.wsd(step, steps, 5, steps),
        "long",
        look=perplexity_look(run, config, learner, steps),
    )
    files = checkpoint(run, "cpt", learner.trunk.masters, learner.mtp and learner.mtp.masters)
    stage.finish({"steps": steps}, files)


def finetune(run: Run, config: Recipe) -> None:
    """SFT on demonstrations, summaries among them, loss on the agent's own tokens; MTP layers go along."""
    s = config.sft
    language, length = language_of(run.root), config.training.long_length
    shown = itertools.islice(lessons(config, language, context(language, config), s.noise, config.context.memory), s.demonstrations)
    pieces = [(segment.tokens, segment.sampled) for lesson in shown for segment in lesson.chain.segments]
    per_epoch, batch = shown_rows(pieces, length, s.rows, [config.seed])
    steps = per_epoch * s.epochs
    stage = run.stage("sft", total=steps)
    if stage.finished:
        return

    learner = Learner(config, *load_checkpoint(run.root, config, "cpt"), s.muon_lr, s.adamw_lr)
    train(stage, config, learner, batch, steps, lambda step: cpt.wsd(step, steps, 5, steps // 2), "sft")
    files = checkpoint(run, "sft", learner.trunk.masters, learner.mtp and learner.mtp.masters)
    stage.finish({"steps": steps, "demonstrations": s.demonstrations}, files)


def reinforce(run: Run, config: Recipe) -> None:
    """RL from the end of SFT. The MTP layers keep learning from the policy's own rollouts, so that drafts follow it where
    it goes (ours: the report trains them in the long-context and SFT phases only)."""
    stage = run.stage("rl", total=max(config.rl.steps, 1), unit="tokens")
    if stage.finished:
        return
    model, mtp = load_checkpoint(run.root, config, "sft")
    reference = load_checkpoint(run.root, config, "sft", with_mtp=False)[0]
    learner, spent = reinforcement.learn(stage, config, model, mtp, reference, language_of(run.root))
    files = checkpoint(run, "final", learner.trunk.masters, learner.mtp and learner.mtp.masters)
    stage.finish(spent, files)
