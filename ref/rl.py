"""Reinforcement learning: the loop that everything here trains with, and its step from finished rollouts to a gradient,
on one rank.

Source: Composer 2 technical report (arXiv:2603.24477v2), §4.1, §6.2. Each technique has its own file; here they are
called in the order in which a step of `train` needs them:

    load      the sampler copies the newest weights                                        `ref/engine/sampler.py`
    choose    G tasks                                                                      `Curriculum`
    sample    N rollouts of each; a rollout is a chain of contexts                         `ref/rollout.py`,
                                                                                           `ref/self_summary.py`
    score     terms of effort and behaviour are added, and hints where one went wrong      `score_rollouts`
    improve   the policy gradient:
      micro-batches of contexts of similar length                                          `make_microbatches`
      KL penalty: drift from the policy before RL is subtracted from the reward            `ref/kl.py`
      advantage of an entire chain: its reward minus the mean of its group                 `ref/dr_grpo.py`
      policy gradient on the policy's own tokens, with the sampler's experts               `ref/router_replay.py`
      KL to the same policy under a hint, at the message that the hint corrects            `ref/textual_feedback.py`
    apply     one optimiser step                                                           `Trainer`
    observe   metrics, saved states, curves                                                the caller's

Where this file departs from the report
1. Sampler and trainer take turns, so every step is on-policy, up to numerical differences between the two engines.
2. k1 is subtracted from the reward. The report uses k1 but does not say where (`ref/kl.py`).
3. Contexts of similar length are padded into micro-batches, not packed (`ref/packing.py` packs, and `scaled/rl.py` uses
   it).
4. `mtp` trains draft layers on the same forward pass. The report trains them only before RL.
5. Hints are Composer 2.5's. Under its hint the policy routes tokens with its own experts: no sampler has seen the hint.
6. The report trains with Dr. GRPO. `variant` chooses another member of its family, over the same loop.

The trap: a mean within a micro-batch, or over contexts instead of chains, makes the gradient depend on how the batch
was split. Every sum here is divided by one number of the whole step (for Dr. GRPO a constant, rollouts ·
budget_tokens). Advantages, lengths and GSPO's ratios are those of chains. A rollout whose environment failed is in none
of these.

Run it
    etude run recipe --scale small           `recipe/small/reinforcement.py` runs it in the small world
    etude run dr-grpo --scale full           `scaled/rl.py`, the same on many ranks

Glossary
    symbol      here          shape
    G, N        prompts, rollouts         rollout n belongs to group n // N
    r           `Rollout.reward`          reward of a rollout, the sum of its terms
    r − β·KL    `Step.rewards`    G·N     after the KL penalty
    A           advantages        S       one for each context; the same for all contexts of a chain
    log π       logp              B T−1   the trainer's
    log μ       `Batch.behavior`  B T     the sampler's
    w           weights           G·N     of each token of a chain, Eq. 3 of `ref/dr_grpo.py`
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from ref import dr_grpo, kl
from ref.behaviour import Behaviour, Prices, behaviour
from ref.checks import expect_choice
from ref.cpt import wsd
from ref.engine.sampler import Sampler, Segment
from ref.environment import ChatFormat, EnvironmentFailure, TaskSet
from ref.length_penalty import Effort, EffortWeights, effort, length_penalty
from ref.lora import rank_of
from ref.mtp import MTP, mtp_loss
from ref.network import Output, Transformer
from ref.rollout import Limits, MapFunction, Rollout, RolloutResult, hash_seed, map_in_order, sample_rollouts
from ref.router_replay import compare_experts, replay
from ref.self_summary import Chain, Chaining, spread
from ref.textual_feedback import Hinted, feedback_loss, hinted, predictions

__all__ = [
    "Batch",
    "Curriculum",
    "Done",
    "Feedback",
    "InOrder",
    "RewardCoefficients",
    "Plain",
    "Settings",
    "Step",
    "Trainer",
    "MonitorSettings",
    "make_microbatches",
    "improve",
    "compute_own_logp",
    "pad",
    "compute_reference_kl",
    "compute_reward_terms",
    "make_routing",
    "score_rollouts",
    "train",
]


@dataclass(frozen=True)
class RewardCoefficients:
    """Terms of an episode's reward (report §4.2: tests, effort, behaviour)."""

    effort_price: float = 0.0002
    """Reward subtracted per unit of penalised effort."""
    k: float = 0.01
    """Curvature of the length penalty C_{k,q} per unit of effort."""
    q: float = 0.5
    """Exponent of the length penalty; 0 is linear, larger bends more."""
    weights: EffortWeights = field(
        default_factory=lambda: EffortWeights(tool_call_tokens=1.0, tool_output_tokens=0.1, tool_calls=2.0, turns=4.0)
    )
    """Weights of tokens, calls and turns in units of effort."""
    invalid_call: float = 0.03
    """Reward subtracted for each invalid tool call."""
    kl: float = 0.005
    """β: reward subtracted per nat of k1 against the policy before RL, summed over the rollout. Placing k1 in the
    reward is our choice: the report names the estimator but not its place."""


@dataclass(frozen=True)
class Feedback:
    """Hints that teach beside the policy gradient."""

    weight: float = 0.0
    """Factor of the feedback loss; 0 gives no hints."""
    divergence: Literal["reverse", "forward", "js"] = "reverse"
    """KL of the policy from the hinted policy, of the hinted policy from it, or of both from their mixture."""

    def __post_init__(self):
        if not self.weight >= 0:
            raise ValueError(f"weight must be at least 0, got {self.weight}")


@dataclass(frozen=True)
class MonitorSettings:
    """The monitor beside RL (`ref/monitor.py`). It changes nothing but what is said."""

    on: bool = True
    """Whether rollouts are watched: a line where something has changed, and curves in the report."""
    learn: int = 10
    """Steps at the beginning that tell what is usual. A change is looked for from the next step on."""
    tolerance: float = 0.05
    """What a share may move beyond that before it counts as changed. Training moves most of them a little."""
    error: float = 0.01
    """Probability that a run in which nothing changes ever raises an alarm, however long it is."""

    def __post_init__(self):
        if self.learn < 1:
            raise ValueError(f"learn must be at least 1, got {self.learn}")
        for name in ("tolerance", "error"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"{name} must lie between 0 and 1, got {getattr(self, name)}")


@dataclass(frozen=True)
class Settings:
    """Settings of RL. Small and full runs share them, with the same names and units; the defaults are for plain Dr.
    GRPO on a laptop."""

    steps: int = 110
    """Optimiser steps; 0 skips RL."""
    prompts: int = 16
    """Groups per step (G); no prompt is used twice."""
    rollouts: int = 8
    """Rollouts per group (N)."""
    lr: float = 1e-4
    """Learning rate of Adam."""
    warmup: int = 5
    """Steps over which the learning rate rises."""
    decay: int = 40
    """Final steps over which the learning rate falls; at most half of all steps."""
    max_len: int = 192
    """Maximum tokens of a rollout in a single context: used with `join=none` and in experiments without summaries."""
    temperature: float = 1.0
    """Sampling temperature, in training and in evaluation."""
    variant: Literal["dr-grpo", "grpo", "rloo", "dapo", "gspo"] = "dr-grpo"
    """Policy gradient: a row of the table in `ref/dr_grpo.py` (baseline, scale, ratio, clip, weight and budget). grpo
    has its KL term in the reward (`payment.kl`). dapo masks rollouts that were cut off; it neither resamples groups
    with equal rewards nor penalises nearly overlong rollouts. gspo takes one more forward pass, for its ratios."""
    clip_low: float | None = None
    """Where A < 0, the gradient stops once the ratio falls below 1 − clip_low. none: the variant's own, 0.2 (gspo:
    0.0003)."""
    clip_high: float | None = None
    """Where A > 0, the gradient stops once the ratio rises above 1 + clip_high. none: the variant's own, 0.2 (dapo:
    0.28, gspo: 0.0004)."""
    budget_tokens: int = 40
    """Constant that replaces a rollout's length in the normaliser G·N·budget_tokens (Dr. GRPO does not divide by
    length). grpo and gspo divide by each rollout's length, dapo by the tokens of the step; hints keep the constant."""
    payment: RewardCoefficients = field(
        default_factory=lambda: RewardCoefficients(effort_price=0.0, invalid_call=0.0, kl=0.0)
    )
    """Prices of effort, of invalid calls and of drift from the policy before RL."""
    behaviour: Prices = field(default_factory=Prices.free)
    """Prices of habits (§4.2). The plain small world has no messages, to-do items and lints to price."""
    replay: Literal["none", "plain", "filtered"] = "none"
    """Router replay: experts used in the training pass (none: its own; plain: the sampler's; filtered: the sampler's if
    plausible)."""
    replay_alpha: float = 0.5
    """Plausibility that an expert needs in filtered replay."""
    feedback: Feedback = field(default_factory=Feedback)
    """Hints where a rollout went wrong."""
    monitor: MonitorSettings = field(default_factory=MonitorSettings)
    """What is watched for in the rollouts."""
    shuffle_rewards: bool = False
    """Control: permute the rewards over the batch, so they carry no information about their rollouts."""
    turn_tokens: int = 0
    """Maximum tokens of a turn; a longer one is cut off and answered. 0: as many as the context holds."""
    episode_tokens: int = 0
    """Maximum tokens that the policy writes in an episode. 0: as many as its contexts hold."""
    micro_tokens: int = 0
    """Maximum tokens of a micro-batch, padding included, on one rank. 0: 32 contexts, whatever their length."""
    lora: int = 0
    """Rank of low-rank adapters, which are trained in place of the weights (`ref/lora.py`): at full scale, or with a
    trainer whose network has them. 0: all weights are trained. A good `lr` is about ten times as high with adapters."""
    environment_timeout: float = 3600.0
    """Seconds that one call of a slow environment may take before the episode has failed: more than the environment
    itself allows the policy."""
    environment_tries: int = 2
    """Episodes that are begun where environments fail, before their rollout is left out."""

    def __post_init__(self):
        expect_choice("variant", self.variant, *(name.replace("_", "-") for name in dr_grpo.FAMILY))
        if not self.temperature > 0:
            raise ValueError(
                f"temperature must be above 0, got {self.temperature}: at 0 all rollouts of a group are the same"
            )
        minimums = dict.fromkeys(("prompts", "max_len", "budget_tokens", "environment_tries"), 1) | {"rollouts": 2}
        minimums |= dict.fromkeys(
            (
                "steps",
                "lr",
                "warmup",
                "decay",
                "clip_low",
                "clip_high",
                "turn_tokens",
                "episode_tokens",
                "micro_tokens",
                "lora",
            ),
            0,
        )
        minimums |= {"environment_timeout": 0}
        for name, minimum in minimums.items():
            value = getattr(self, name)
            if value is not None and not value >= minimum:
                raise ValueError(f"{name} must be at least {minimum}, got {value}")
        for name in ("effort_price", "invalid_call", "kl"):
            if not getattr(self.payment, name) >= 0:
                raise ValueError(f"payment.{name} must be at least 0, got {getattr(self.payment, name)}")
        if not 0 <= self.replay_alpha <= 1:
            raise ValueError(f"replay_alpha must lie between 0 and 1, got {self.replay_alpha}")

    @property
    def objective(self) -> dr_grpo.Variant:
        """The member of the family that these settings train, with their clip."""
        clip = {"clip_low": self.clip_low, "clip_high": self.clip_high}
        own_clip = {name: value for name, value in clip.items() if value is not None}
        return replace(dr_grpo.FAMILY[self.variant.replace("-", "_")], **own_clip)

    @property
    def algorithm(self) -> str:
        """The name of the variant in prose."""
        return "Dr. GRPO" if self.variant == "dr-grpo" else self.variant.upper()

    def rate(self, step: int) -> float:
        """Share of the learning rate at a step: up, level, down."""
        return wsd(step, self.steps, self.warmup, min(self.decay, self.steps // 2))

    def limits(self, chaining: Chaining) -> Limits:
        """How long rollouts of such contexts may be, in training and in evaluations."""
        return Limits(
            chaining,
            turn_tokens=self.turn_tokens or None,
            tokens=self.episode_tokens or None,
            seconds=self.environment_timeout,
            tries=self.environment_tries,
        )


@dataclass
class Batch:
    """A micro-batch: contexts of similar length, padded on the right to T tokens, plus padding rows that do not
    count."""

    rows: Tensor
    """[B] number of the context; padding rows are numbered from `len(contexts of all chains)` on."""
    chain: Tensor
    """[B] number of the chain that it belongs to."""
    ids: Tensor
    """[B, T]"""
    own: Tensor
    """[B, T] bool: the tokens that the policy chose."""
    behavior: Tensor
    """[B, T] log μ of those tokens, nats; zero elsewhere."""
    lengths: Tensor
    """[B] tokens of the context."""
    contexts: list[Segment | None]
    """The contexts themselves; None for a padding row."""


@dataclass
class Step:
    """The result of a step. No field is a mean over micro-batches."""

    loss: float
    """The policy loss of the full batch."""
    gradients: list[Tensor | None]
    """d loss / d w for every parameter of the policy, in order; None for a parameter that the loss does not depend
    on."""
    rewards: Tensor
    """[G·N] after the KL penalty; NaN for a rollout whose environment failed, here and in the next two."""
    drift: Tensor
    """[G·N] k1 against the policy before RL, nats per conversation."""
    engine: Tensor
    """[G·N] log μ − log π: the numerical difference between the sampler's engine and the trainer's, nats per
    conversation."""
    gap: Tensor
    """[n] log π − log μ of each of the policy's own tokens."""
    tokens: int
    """Number of the policy's own tokens (n)."""
    nll: float
    """Mean −log μ of those tokens, nats."""
    dropped: float | None = None
    """Share of the replayed decisions that the filter dropped; None if nothing is filtered."""
    mtp_loss: float | None = None
    """Loss of the draft layers, nats per position; None without draft layers."""
    mtp_gradients: list[Tensor | None] | None = None
    distilled: int = 0
    """Number of tokens that hints correct."""
    divergence: float | None = None
    """Mean divergence of those tokens from the hinted policy, nats; None if there are none."""


@runtime_checkable
class Trainer(Protocol):
    """Weights that are trained: `Plain`, or the recipe's with master weights and draft layers
    (`recipe/small/learner.py`)."""

    @property
    def model(self) -> Transformer:
        """The policy."""
        ...

    @property
    def mtp_weight(self) -> float:
        """Weight of the draft layers' loss."""
        ...

    def drafts(self, step: int) -> MTP | None:
        """The draft layers that train along in this step, if any do."""
        ...

    def apply(self, result: "Step", rate: float) -> dict[str, float]:
        """Takes one optimiser step, at this share of the learning rates. Returns metrics."""
        ...


class Plain:
    """A network and Adam, in one dtype. With adapters (`ref/lora.py`) these alone are trained."""

    mtp_weight = 0.0

    def __init__(self, model: Transformer, lr: float):
        self.model, self.lr = model, lr
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.Adam(trained, lr=lr, betas=(0.9, 0.95))

    def drafts(self, step: int) -> None:
        return None

    def apply(self, result: "Step", rate: float) -> dict[str, float]:
        for param, gradient in zip(self.model.parameters(), result.gradients, strict=True):
            param.grad = None if gradient is None else gradient.to(param.dtype)
        self.optimizer.param_groups[0]["lr"] = self.lr * rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {}


@runtime_checkable
class Curriculum(Protocol):
    """Which tasks come next: `InOrder`, or one that follows what the rollouts so far have shown."""

    @property
    def metrics(self) -> dict[str, float]:
        """What is logged of where it stands, such as a level."""
        ...

    def choose(self, step: int, count: int) -> list[Any]:
        """The tasks of a step."""
        ...

    def update(self, tasks: Sequence[Any], outcomes: Sequence[RolloutResult]) -> None:
        """Takes how the rollouts of a step ended; those of a task are adjacent."""
        ...


class InOrder:
    """The tasks of a stream, one after the other."""

    def __init__(self, tasks: TaskSet, stream: str = "rl"):
        self.tasks, self.stream = tasks, stream

    @property
    def metrics(self) -> dict[str, float]:
        return {}

    def choose(self, step: int, count: int) -> list[Any]:
        return [self.tasks.task(self.stream, step * count + n) for n in range(count)]

    def update(self, tasks: Sequence[Any], outcomes: Sequence[RolloutResult]) -> None:
        """The order does not depend on them."""


@dataclass
class Done:
    """What a step of `train` was, for whoever logs, saves or shows it."""

    step: int
    """Counted from 1."""
    tasks: Sequence[Any]
    rollouts: Sequence[Rollout]
    result: "Step"
    metrics: dict[str, float]
    """Of the trainer and of the curriculum."""


def train(
    c: Settings,
    trainer: Trainer,
    sampler: Sampler,
    tasks: TaskSet,
    chat_format: ChatFormat,
    limits: Limits,
    *,
    curriculum: Curriculum | None = None,
    reference: Transformer | None = None,
    seed: int = 0,
    name: str = "rl",
    first: int = 0,
    observe: Callable[[Done], None] = lambda done: None,
    map_fn: MapFunction = map_in_order,
) -> None:
    """The loop. Each step samples G·N rollouts with the newest weights, and updates the weights once. `reference`: the
    policy before RL, from which drift is measured and penalised. `seed`, `name`: of the random numbers.
    `first`: steps that were done before. `map_fn(function, parts)` may compute elsewhere; the bits do not depend on
    where."""
    if c.lora != rank_of(trainer.model):
        raise ValueError(
            f"rl.lora={c.lora}, but the network has adapters of rank {rank_of(trainer.model)}; see ref.lora.adapt"
        )
    curriculum = curriculum or InOrder(tasks)
    for step in range(first, c.steps):
        sampler.load(trainer.model, version=step)
        step_tasks = curriculum.choose(step, c.prompts)
        generator = torch.Generator().manual_seed(hash_seed(seed, name, step))
        rollouts = sample_rollouts(
            sampler,
            tasks.environment,
            step_tasks,
            c.rollouts,
            chat_format,
            limits,
            c.temperature,
            generator,
            map_fn,
            tasks.is_slow,
        )
        score_rollouts(c, tasks, rollouts, hash_seed(seed, "hints", step))
        result = improve(
            c,
            trainer.model,
            reference,
            rollouts,
            mtp=trainer.drafts(step),
            mtp_weight=trainer.mtp_weight,
            seed=hash_seed(seed, "shuffle", step),
            map_fn=map_fn,
        )
        metrics = trainer.apply(result, c.rate(step)) | curriculum.metrics
        curriculum.update(step_tasks, [rollout.outcome for rollout in rollouts])
        observe(Done(step + 1, step_tasks, rollouts, result, metrics))


def score_rollouts(c: Settings, tasks: TaskSet, rollouts: Sequence[Rollout], seed: int) -> None:
    """Adds what reads a finished rollout: its transcript, if anything needs that, the terms of the reward that the
    environment does not know (effort, invalid calls, behaviour), and hints. `seed` is for hints that are drawn."""
    for rollout in rollouts:
        if rollout.failure:
            continue
        if c.behaviour.max_penalty or c.monitor.on:
            rollout.transcript = tasks.transcript(rollout)
        priced_behaviour = (
            behaviour(rollout.transcript, c.behaviour) if c.behaviour.max_penalty and rollout.transcript else None
        )
        rollout.terms = compute_reward_terms(rollout, c.payment, priced_behaviour)
        if priced_behaviour:
            rollout.metrics |= {f"behaviour_{name}": value for name, value in priced_behaviour.parts.items()}
    if c.feedback.weight:
        for rollout, hints in zip(rollouts, tasks.hints(rollouts, seed), strict=True):
            rollout.hints = hints


def compute_reward_terms(
    rollout: Rollout, payment: RewardCoefficients, behaved: Behaviour | None = None
) -> dict[str, float]:
    """The terms of a rollout's reward: the environment's own, minus the priced effort (§4.2), minus a penalty for each
    invalid call, and what its behaviour earned if that is priced. Their sum is the reward, without KL, which needs the
    reference's log-probs."""
    written_tokens, total_tokens = (
        rollout.chain.num_sampled_tokens,
        sum(len(segment.tokens) for segment in rollout.chain.segments),
    )
    effort_units = effort(
        Effort(
            thinking_tokens=0,
            tool_call_tokens=written_tokens,
            tool_output_tokens=total_tokens - written_tokens - rollout.opening,
            final_message_tokens=0,
            tool_calls=rollout.metrics.get("calls", 0),
            turns=rollout.metrics.get("turns", 0),
        ),
        payment.weights,
    )
    # −price · C_{k,q}(effort)
    terms = {**rollout.terms, "effort": -payment.effort_price * length_penalty(effort_units, payment.k, payment.q)}
    if behaved is not None:
        terms["behaviour"] = behaved.total  # b, Eq. 1 of `ref/behaviour.py`
    return terms | {"invalid": -payment.invalid_call * rollout.metrics.get("invalid_calls", 0)}


def improve(
    c: Settings,
    model: Transformer,
    reference: Transformer | None,
    rollouts: Sequence[Rollout],
    *,
    mtp: MTP | None = None,
    mtp_weight: float = 1.0,
    seed: int = 0,
    map_fn: MapFunction = map_in_order,
) -> Step:
    """The policy gradient of a batch of finished rollouts; those of a group are adjacent. The model is not changed.
    Rollouts whose environment failed are in no mean and no sum.

    reference: the policy before RL; with None, drift is neither measured nor penalised. mtp: draft layers that train on
    the same forward pass with weight `mtp_weight`, by a mean over the policy's own tokens; their gradient does not
    reach the trunk. If `feedback.weight` is above 0, the loss of the hints (`Rollout.hints`) is added. `seed`: of the
    permutation, if `shuffle_rewards` is set. `map_fn(function, batches)` may compute micro-batches elsewhere: gradients
    are summed in float32 in a fixed order, so the bits do not depend on where. The losses of Dr. GRPO and of the hints
    are divided by `budget_tokens` times the rollouts that are left, that of another variant by what its budget counts
    of these. Raises EnvironmentFailure if there are none."""
    rollouts = [*rollouts]
    valid = [n for n, rollout in enumerate(rollouts) if not rollout.failure]
    if not valid:
        raise EnvironmentFailure(f"no rollout of this step is left to train on: {rollouts[0].failure}")
    total, rollouts = len(rollouts), [rollouts[n] for n in valid]
    chains = [rollout.chain for rollout in rollouts]
    batches, (own, behavior) = make_microbatches(chains, c.micro_tokens)

    drift, engine = torch.zeros(2, len(chains), dtype=behavior.dtype).unbind()
    if reference is not None:

        def compute_drift(batch: Batch) -> tuple[Tensor, Tensor]:
            return compute_reference_kl(model, reference, batch.ids, batch.own, batch.behavior, c.temperature)

        for batch, parts in zip(batches, map_fn(compute_drift, batches), strict=True):
            for chain_sums, batch_sums in zip((drift, engine), parts, strict=True):
                chain_sums.index_add_(0, batch.chain, batch_sums)
    # r − β·KL
    rewards = torch.tensor([rollout.reward for rollout in rollouts], dtype=behavior.dtype) - c.payment.kl * drift
    if c.shuffle_rewards:
        rewards = rewards[torch.randperm(len(rewards), generator=torch.Generator().manual_seed(seed))]

    objective, groups = c.objective, torch.tensor(valid) // c.rollouts
    parts = rewards.split(torch.bincount(groups, minlength=c.prompts).tolist())
    # Eq. 1 of `ref/dr_grpo.py`
    compute_advantages = functools.partial(dr_grpo.group_advantages, baseline=objective.baseline, scale=objective.scale)
    if len(valid) == total:
        relative = compute_advantages(rewards.view(c.prompts, c.rollouts)).flatten()
    else:  # each group's mean is over those that are left; A = 0 for one that is left alone
        relative = torch.cat([compute_advantages(x[None])[0] if len(x) > 1 else x - x for x in parts if len(x)])
    advantages = spread(relative, chains)  # A for every context of a chain
    advantages = torch.cat((advantages, advantages.new_zeros(len(own) - len(advantages))))  # padding rows
    budget = float(
        len(chains) * c.budget_tokens
    )  # a constant, so the micro-batches' losses add up to that of the full batch
    # The same for the variant's own budget, and the weight w of a chain's tokens (Eq. 3)
    lengths = torch.tensor([chain.num_sampled_tokens for chain in chains])
    policy_budget = objective.budget(len(chains), int(lengths.sum()), c.budget_tokens)
    weights = objective.token_weights(lengths, torch.tensor([chain.finished for chain in chains]))
    hinted_contexts = find_hinted(rollouts) if c.feedback.weight else {}

    def evaluate_policy(batch: Batch) -> tuple[Tensor, Output]:
        experts = make_routing(batch.contexts, batch.ids.shape[1], c.replay, c.replay_alpha)
        out = model(batch.ids, logits=False, experts=experts)
        return compute_own_logp(model, out.hidden, batch.ids, batch.own, c.temperature), out

    @torch.no_grad()
    def sum_log_ratios(batch: Batch) -> Tensor:
        return ((evaluate_policy(batch)[0] - batch.behavior[:, 1:]) * batch.own[:, 1:]).sum(1)

    mean_log_ratio = None
    if objective.ratio == "sequence":  # log ρ of an entire chain, whose contexts lie in several micro-batches
        mean_log_ratio = torch.zeros_like(drift)
        for batch, sums in zip(batches, map_fn(sum_log_ratios, batches), strict=True):
            mean_log_ratio.index_add_(0, batch.chain, sums)
        mean_log_ratio /= lengths.clamp(min=1)

    def compute_microbatch(batch: Batch) -> "MicrobatchResult":
        T = batch.ids.shape[1]
        logp, out = evaluate_policy(batch)
        current_logp, behavior_logp = logp, batch.behavior[:, 1:]
        if mean_log_ratio is not None:  # GSPO-token: the value of the chain's log ρ, with the gradient of this token
            current_logp = logp - logp.detach() + mean_log_ratio[batch.chain][:, None]
            behavior_logp = torch.zeros_like(logp)
        loss = dr_grpo.policy_loss(  # Eq. 3 of `ref/dr_grpo.py`
            current_logp,
            behavior_logp,
            advantages[batch.rows],
            batch.own[:, 1:] * weights[batch.chain][:, None],
            budget=policy_budget,
            clip_low=objective.clip_low,
            clip_high=objective.clip_high,
        )
        result = MicrobatchResult(loss.item(), (logp.detach() - batch.behavior[:, 1:])[batch.own[:, 1:]])
        if c.replay == "filtered" and out.experts:  # the last token of a context predicts nothing, so it was not routed
            is_routed = (torch.arange(T) < batch.lengths[:, None] - 1).flatten()
            expert_pair = (
                [layer_experts[is_routed] for layer_experts in layers]
                for layers in (out.experts, make_routing(batch.contexts, T, "plain", 0.0) or [])
            )
            result.dropped, result.num_routed = compare_experts(*expert_pair)["decisions"], int(is_routed.sum())
        if mtp is not None:
            doc = torch.where(torch.arange(T) < batch.lengths[:, None], 0, -1)
            draft_loss, result.mtp_count, _ = mtp_loss(mtp, model, out, batch.ids, doc, batch.own.float())
            result.mtp_loss, result.mtp_gradients = (
                draft_loss.item(),
                compute_gradients(mtp_weight * draft_loss / own.sum(), mtp, retain_graph=True),
            )
        if hinted_rows := [
            (index, hinted_contexts[row]) for index, row in enumerate(batch.rows.tolist()) if row in hinted_contexts
        ]:
            student, teacher = (
                model.head(x) / c.temperature for x in compute_distilled_states(model, out.hidden, hinted_rows)
            )
            feedback_term = feedback_loss(  # Eq. 1 of `ref/textual_feedback.py`
                student, teacher, torch.ones(len(student)), budget=budget, kind=c.feedback.divergence
            )
            loss = loss + c.feedback.weight * feedback_term
            result.distilled, result.divergence_sum = len(student), feedback_term.item() * budget
        result.gradients = compute_gradients(loss, model)
        return result

    results = map_fn(compute_microbatch, batches)
    count, num_routed, tokens = (
        sum(micro.mtp_count for micro in results),
        sum(micro.num_routed for micro in results),
        int(own.sum()),
    )
    num_distilled = sum(micro.distilled for micro in results)
    valid_index = torch.tensor(valid)

    def scatter(values: Tensor) -> Tensor:
        return values.new_full((total,), math.nan).index_copy(0, valid_index, values)

    return Step(
        loss=sum(micro.loss for micro in results),
        gradients=sum_gradients([micro.gradients for micro in results]),
        rewards=scatter(rewards),
        drift=scatter(drift),
        engine=scatter(engine),
        gap=torch.cat([micro.gap for micro in results]),
        tokens=tokens,
        nll=-(behavior.sum().item() / tokens),
        dropped=sum(micro.dropped * micro.num_routed for micro in results) / num_routed if num_routed else None,
        mtp_loss=sum(micro.mtp_loss for micro in results) / count if count else None,
        mtp_gradients=sum_gradients([micro.mtp_gradients for micro in results]) if count else None,
        distilled=num_distilled,
        divergence=sum(micro.divergence_sum for micro in results) / num_distilled if num_distilled else None,
    )


ROWS, MULTIPLE = 32, 16
"""Rows of a micro-batch, and the multiple that its length is rounded up to: a CPU compiles code for each new shape of a
bfloat16 product."""


def make_microbatches(chains: Sequence[Chain], tokens: int = 0) -> tuple[list[Batch], tuple[Tensor, Tensor]]:
    """Micro-batches of contexts of similar length, which need little padding: `ROWS` of them, or as many as have at
    most `tokens` tokens with their padding, and one at least. The longest come first, so cores that share them finish
    together. Also, for all contexts, padded: which tokens are the policy's own, and their log μ."""
    segments = [segment for chain in chains for segment in chain.segments]
    ids, own, behavior = pad(segments, multiple=MULTIPLE, rows_multiple=1 if tokens else ROWS)
    padding = [0] * (len(ids) - len(segments))
    chain = torch.tensor(
        [chain_number for chain_number, chain_item in enumerate(chains) for _ in chain_item.segments] + padding
    )
    lengths = torch.tensor([len(segment.tokens) for segment in segments] + padding)
    batches = []
    order = lengths.argsort(stable=True)
    for rows in reversed(order.split(ROWS) if not tokens else split_by_tokens(order, lengths, tokens)):
        T = -(-int(lengths[rows].max()) // MULTIPLE) * MULTIPLE
        contexts = [segments[index] if index < len(segments) else None for index in rows.tolist()]
        batches.append(
            Batch(rows, chain[rows], ids[rows, :T], own[rows, :T], behavior[rows, :T], lengths[rows], contexts)
        )
    return batches, (own, behavior)


def split_by_tokens(order: Tensor, lengths: Tensor, tokens: int) -> list[Tensor]:
    """Contexts in order of length, cut into micro-batches whose rows, padded, have at most so many tokens together."""
    batches: list[list[int]] = []
    for row in order.tolist():
        T = -(-int(lengths[row]) // MULTIPLE) * MULTIPLE
        if not batches or (len(batches[-1]) + 1) * T > tokens:
            batches.append([])
        batches[-1].append(row)
    return [torch.tensor(rows) for rows in batches]


def pad(rollouts: Sequence[Segment], multiple: int = 1, rows_multiple: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """ids [B, T], mask [B, T] (True on sampled tokens) and behaviour log-probs [B, T] of rollouts of unequal
    length. T is rounded up to a multiple of `multiple`, and B to one of `rows_multiple` with rows that do not count."""
    T = -(-max(len(rollout.tokens) for rollout in rollouts) // multiple) * multiple
    B = -(-len(rollouts) // rows_multiple) * rows_multiple
    ids = torch.zeros(B, T, dtype=torch.long)
    mask, logp = torch.zeros(B, T, dtype=torch.bool), torch.zeros(B, T, dtype=rollouts[0].logp.dtype)
    for row, rollout in enumerate(rollouts):
        length = len(rollout.tokens)
        ids[row, :length], mask[row, :length], logp[row, :length] = rollout.tokens, rollout.sampled, rollout.logp
    return ids, mask, logp


@torch.no_grad()
def compute_reference_kl(
    policy: Transformer,
    reference: Transformer,
    ids: Tensor,
    mask: Tensor,
    behavior_logp: Tensor,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Two sums over a rollout's own tokens, [B] nats each: k1 = log π − log π_ref, the drift that the reward is
    penalised for, and log μ − log π, which is not drift but the numerical difference between the sampler's engine and
    the trainer's.

    Both networks are evaluated by the same engine here, each with its own experts. So an untrained policy has a drift
    of exactly zero, however coarse its sampler is."""
    policy_logp, reference_logp = (
        compute_own_logp(model, model(ids, logits=False).hidden, ids, mask, temperature)
        for model in (policy, reference)
    )
    # k1 = log π − log π_ref, and log μ − log π
    drift, engine = kl.token_kl(policy_logp, reference_logp, "k1"), behavior_logp[:, 1:] - policy_logp
    return (drift * mask[:, 1:]).sum(1), (engine * mask[:, 1:]).sum(1)


def compute_own_logp(model: Transformer, hidden: Tensor, ids: Tensor, mask: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probs [B, T−1], at the sampling temperature, of the policy's own tokens (`mask` [B, T]) given the tokens
    before them; zero elsewhere, where the head is not run."""
    row, t = mask[:, 1:].nonzero(as_tuple=True)
    logp = model.logprob(hidden[row, t] / temperature, ids[row, t + 1])  # log softmax(z / temperature)
    return logp.new_zeros(len(ids), ids.shape[1] - 1).index_put((row, t), logp)


def make_routing(rollouts: Sequence[Segment | None], T: int, mode: str, alpha: float) -> list | None:
    """The sampler's experts, per layer, for a training pass over these rollouts padded to T tokens (a rollout of None
    is a padding row): indices [B·T, K] ("plain"), functions that filter them by this router's scores ("filtered"), or
    None ("none", and for a dense network)."""
    _, L, K = next(rollout for rollout in rollouts if rollout is not None).experts.shape
    if mode == "none" or not L:
        return None
    # Padding needs K distinct experts too; no gradient comes from it.
    experts = torch.arange(K).expand(len(rollouts), T, L, K).clone()
    for row, rollout in enumerate(rollouts):
        if rollout is not None:
            experts[row, : len(rollout.experts)] = rollout.experts.long()
    layers = experts.flatten(0, 1).unbind(1)
    return (
        list(layers)
        if mode == "plain"
        else [functools.partial(replay, replayed=layer_experts, k=K, alpha=alpha) for layer_experts in layers]
    )


def find_hinted(rollouts: Sequence[Rollout]) -> dict[int, Hinted]:
    """What the teacher reads in place of a context, by the context's number; those without a distilled token are left
    out. Raises ValueError unless a conversation has hints for each of its contexts or none at all, and as `hinted`."""
    contexts: dict[int, Hinted] = {}
    number = 0
    for index, rollout in enumerate(rollouts):
        if rollout.hints and len(rollout.hints) != len(rollout.chain.segments):
            raise ValueError(
                f"hints must be given for all {len(rollout.chain.segments)} contexts of rollout "
                f"{index}, or for none; got {len(rollout.hints)}"
            )
        for segment, hints in zip(rollout.chain.segments, rollout.hints):
            hinted_context = hinted(segment, hints)
            contexts |= {number: hinted_context} if len(hinted_context.student) else {}
            number += 1
        number += 0 if rollout.hints else len(rollout.chain.segments)
    return contexts


def compute_distilled_states(
    model: Transformer, hidden: Tensor, hinted_rows: Sequence[tuple[int, Hinted]]
) -> tuple[Tensor, Tensor]:
    """The hidden states [n, D] that predict the distilled tokens of some rows of a micro-batch, `hidden` [B, T, D]
    being its own: the student's, and without gradient the teacher's, which come from a forward pass on what it
    reads."""
    T = -(-max(len(hinted_context.tokens) for _, hinted_context in hinted_rows) // MULTIPLE) * MULTIPLE
    ids = torch.zeros(-(-len(hinted_rows) // MULTIPLE) * MULTIPLE, T, dtype=torch.long)
    for row, (_, hinted_context) in enumerate(hinted_rows):
        ids[row, : len(hinted_context.tokens)] = hinted_context.tokens
    with torch.no_grad():
        teacher_hidden = model(ids, logits=False).hidden
    student, teacher = zip(
        *(
            predictions(hidden[index], teacher_hidden[row], hinted_context)
            for row, (index, hinted_context) in enumerate(hinted_rows)
        ),
        strict=True,
    )
    return torch.cat(student), torch.cat(teacher)


@dataclass
class MicrobatchResult:
    """A micro-batch's part of the step: its loss, gradients and metrics."""

    loss: float
    gap: Tensor
    """log π − log μ of the policy's own tokens, [n]."""
    gradients: list[Tensor | None] = field(default_factory=list)
    dropped: float = 0.0
    num_routed: int = 0
    """Share of the replayed decisions that the filter dropped, and the number of tokens it refers to."""
    mtp_loss: float = 0.0
    mtp_count: float = 0.0
    mtp_gradients: list[Tensor | None] = field(default_factory=list)
    distilled: int = 0
    divergence_sum: float = 0.0
    """Tokens that hints correct, and the sum of their divergences, nats."""


def compute_gradients(loss: Tensor, model: torch.nn.Module, retain_graph: bool = False) -> list[Tensor | None]:
    """d loss / d w for every parameter, in order; None for a parameter that the loss does not depend on, and for a
    frozen one. `retain_graph`: keep the graph for another backward pass."""
    parameters = list(model.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    gradients = iter(torch.autograd.grad(loss, trained, retain_graph=retain_graph, allow_unused=True))
    return [next(gradients) if parameter.requires_grad else None for parameter in parameters]


def sum_gradients(parts: list[list[Tensor | None]]) -> list[Tensor | None]:
    """The sum over micro-batches for each parameter, in float32 or wider, in the order of the micro-batches."""
    columns = [
        [gradient.to(torch.promote_types(gradient.dtype, torch.float32)) for gradient in column if gradient is not None]
        for column in zip(*parts, strict=True)
    ]
    return [functools.reduce(torch.add, column) if column else None for column in columns]
