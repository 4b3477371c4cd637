"""Every setting of the recipe: frozen dataclasses, one docstring a field, filled from TOML and `--set key=value`."""

from dataclasses import dataclass, field
from typing import Literal

from ref.length_penalty import EffortWeights
from ref.mtp import MTPConfig
from ref.network import Config
from sims.microrepo import NoiseConfig, WorldConfig
from sims.recipe.limits import within

__all__ = ["Context", "Data", "Evaluation", "Memory", "Mtp", "Payment", "Recipe", "Rl", "Sft", "Training"]


@dataclass(frozen=True)
class Payment:
    """What an episode is paid for (report §4.2: tests, effort, behaviour)."""

    effort_price: float = 0.0002
    """Reward that a unit of penalised effort costs."""
    k: float = 0.01
    """Curvature of the length penalty C_{k,q} per unit of effort."""
    q: float = 0.5
    """Exponent of the length penalty; 0 is linear, larger bends more."""
    weights: EffortWeights = field(default_factory=lambda: EffortWeights(tool_call_tokens=1.0, tool_output_tokens=0.1, tool_calls=2.0, turns=4.0))
    """Price of tokens, calls and turns in units of effort."""
    invalid_call: float = 0.03
    """Reward that each invalid call costs."""
    kl: float = 0.005
    """β: reward that a nat of k1 against the policy before RL costs, summed over the rollout. That k1 stands in the reward is our
    choice: the report names the estimator and not its place."""


@dataclass(frozen=True)
class Memory:
    """Probabilities with which a scripted summary is not the shortest that will do. All zero: it is."""

    wordy: float = 0.4
    """Also keeps what is not needed: other files, docstrings of helpers, what a passed test has settled."""
    forgetful: float = 0.1
    """Leaves out a file that is needed, which is then read again."""
    longest: int = 42
    """Tokens that a wordy summary may have; else it is the shortest."""


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
