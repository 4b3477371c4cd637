"""One step of reinforcement learning, from finished conversations to a gradient, and the loop around it, on one rank.

Source: Composer 2 technical report (arXiv:2603.24477v2), §4.1, §6.2. Each technique has its own file; here they are called in the
order in which a step needs them:

    load     the sampler copies the newest weights                                       `ref/engine/sampler.py`
    play     N conversations for each of G tasks; a conversation is a chain of contexts  `ref/self_summary.py`
    deal     contexts of similar length form a micro-batch                               `deal`
    charge   drift from the policy before RL is subtracted from the reward               `ref/kl.py`
    compare  a reward minus the mean of its group is the advantage of the entire chain   `ref/dr_grpo.py`
    press    policy gradient on the policy's own tokens, with the sampler's experts      `ref/router_replay.py`
    teach    KL to the same policy under a hint, at the message that the hint corrects    `ref/textual_feedback.py`

Where this file departs from the report
1. Sampler and trainer take turns, so every step is on-policy, up to numerical differences between the two engines.
2. k1 is subtracted from the reward. The report uses k1 but does not say where (`ref/kl.py`).
3. Contexts of similar length are padded into micro-batches, not packed (`ref/packing.py` packs, and `scaled/rl.py` uses it).
4. `mtp` trains draft layers on the same forward pass. The report trains them only before RL.
5. Hints are Composer 2.5's. Under its hint the policy routes tokens with its own experts: no sampler has seen the hint.

The trap: a mean within a micro-batch, or over contexts instead of chains, makes the gradient depend on how the batch was split. Every
sum here is divided by one constant, G·N·budget_tokens, and advantages are computed over chains.

Run it
    etude run recipe --scale small           `sims/recipe/reinforcement.py` runs it in the small world
    etude run dr-grpo --scale full           `scaled/rl.py`, the same on many ranks

Glossary
    symbol      here          shape
    G, N        prompts, rollouts         conversation n belongs to group n // N
    r           `Played.reward`           reward of a conversation
    r − β·KL    `Step.rewards`    G·N     after the KL penalty
    A           advantages        S       one for each context; the same for all contexts of a chain
    log π       logp              B T−1   the trainer's
    log μ       `Batch.behavior`  B T     the sampler's
"""

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from ref import dr_grpo, kl
from ref.behaviour import Prices
from ref.cpt import wsd
from ref.engine.sampler import Rollout, Sampler
from ref.length_penalty import EffortWeights
from ref.mtp import MTP, mtp_loss
from ref.network import Transformer
from ref.router_replay import differing, replay
from ref.self_summary import Chain, spread
from ref.textual_feedback import Hint, Hinted, feedback_loss, hinted, predictions

__all__ = [
    "Batch",
    "Feedback",
    "Payment",
    "Played",
    "Settings",
    "Step",
    "World",
    "deal",
    "improve",
    "learn",
    "own_logp",
    "pad",
    "reference_kl",
    "routing",
]


@dataclass(frozen=True)
class Payment:
    """Terms of an episode's reward (report §4.2: tests, effort, behaviour)."""

    effort_price: float = 0.0002
    """Reward subtracted per unit of penalised effort."""
    k: float = 0.01
    """Curvature of the length penalty C_{k,q} per unit of effort."""
    q: float = 0.5
    """Exponent of the length penalty; 0 is linear, larger bends more."""
    weights: EffortWeights = field(default_factory=lambda: EffortWeights(tool_call_tokens=1.0, tool_output_tokens=0.1, tool_calls=2.0, turns=4.0))
    """Weights of tokens, calls and turns in units of effort."""
    invalid_call: float = 0.03
    """Reward subtracted for each invalid tool call."""
    kl: float = 0.005
    """β: reward subtracted per nat of k1 against the policy before RL, summed over the rollout. Placing k1 in the reward is our
    choice: the report names the estimator but not its place."""


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
class Settings:
    """Settings of RL. Small and full runs share them, with the same names and units; the defaults are for plain Dr. GRPO on a laptop."""

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
    clip_low: float = 0.2
    """Where A < 0, the gradient stops once the ratio falls below 1 − clip_low."""
    clip_high: float = 0.2
    """Where A > 0, the gradient stops once the ratio rises above 1 + clip_high."""
    budget_tokens: int = 40
    """Constant that replaces a rollout's length in the normaliser G·N·budget_tokens (Dr. GRPO does not divide by length)."""
    payment: Payment = field(default_factory=lambda: Payment(effort_price=0.0, invalid_call=0.0, kl=0.0))
    """Prices of effort, of invalid calls and of drift from the policy before RL."""
    behaviour: Prices = field(default_factory=Prices.free)
    """Prices of habits (§4.2). With none no record of a rollout is made. The plain small world has no messages, to-do items and lints to price."""
    replay: Literal["none", "plain", "filtered"] = "none"
    """Router replay: experts used in the training pass (none: its own; plain: the sampler's; filtered: the sampler's if plausible)."""
    replay_alpha: float = 0.5
    """Plausibility that an expert needs in filtered replay."""
    feedback: Feedback = field(default_factory=Feedback)
    """Hints where a rollout went wrong."""

    def __post_init__(self):
        if not self.temperature > 0:
            raise ValueError(f"temperature must be above 0, got {self.temperature}: at 0 all rollouts of a group are the same")
        least = dict.fromkeys(("prompts", "max_len", "budget_tokens"), 1) | {"rollouts": 2}
        least |= dict.fromkeys(("steps", "lr", "warmup", "decay", "clip_low", "clip_high"), 0)
        for name, smallest in least.items():
            if not getattr(self, name) >= smallest:
                raise ValueError(f"{name} must be at least {smallest}, got {getattr(self, name)}")
        for name in ("effort_price", "invalid_call", "kl"):
            if not getattr(self.payment, name) >= 0:
                raise ValueError(f"payment.{name} must be at least 0, got {getattr(self.payment, name)}")
        if not 0 <= self.replay_alpha <= 1:
            raise ValueError(f"replay_alpha must lie between 0 and 1, got {self.replay_alpha}")

    def rate(self, step: int) -> float:
        """Share of the learning rate at a step: up, level, down."""
        return wsd(step, self.steps, self.warmup, min(self.decay, self.steps // 2))


@dataclass
class Played:
    """A finished conversation."""

    chain: Chain
    """What was sampled."""
    reward: float
    """Its reward, before the KL penalty."""
    figures: dict[str, float] = field(default_factory=dict)
    """Further metrics; the mean over all conversations is shown. All conversations have the same names, including "success"."""
    hints: Sequence[Sequence[Hint]] = ()
    """The hints of every context of the chain, in order; empty if there are none. Without `feedback.weight` nobody reads them."""


@runtime_checkable
class World(Protocol):
    """The environment that the policy talks to."""

    def play(self, sampler: Sampler, stream: str, tasks: Sequence[int], generator: torch.Generator) -> list[Played]:
        """Run one conversation for each of these tasks, given by number in one of the world's streams, "rl" or "heldout"."""
        ...


@dataclass
class Batch:
    """A micro-batch: contexts of similar length, padded on the right to T tokens, plus padding rows that do not count."""

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
    contexts: list[Rollout | None]
    """The contexts themselves; None for a padding row."""


@dataclass
class Step:
    """The result of a step. No field is a mean over micro-batches."""

    loss: float
    """The policy loss of the full batch."""
    gradients: list[Tensor | None]
    """d loss / d w for every parameter of the policy, in order; None for a parameter that the loss does not depend on."""
    rewards: Tensor
    """[G·N] after the KL penalty."""
    drift: Tensor
    """[G·N] k1 against the policy before RL, nats per conversation."""
    engine: Tensor
    """[G·N] log μ − log π: the numerical difference between the sampler's engine and the trainer's, nats per conversation."""
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


def one_by_one(function: Callable[[Any], Any], parts: Sequence[Any]) -> list:
    """[function(part) for part in parts]"""
    return [function(part) for part in parts]


def learn(c: Settings, model: Transformer, sampler: Sampler, world: World, seed: int = 0) -> Iterator[Step]:
    """The plain loop: each step runs G·N conversations with the newest weights, updates the weights once, and yields its result. Drift
    is measured against the policy that was passed in. `sims/recipe/reinforcement.py` adds what a long run needs: saved states, harder
    tasks in the second half, draft layers, and use of all cores."""
    reference = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.9, 0.95))
    for step in range(c.steps):
        sampler.load(model, version=step)
        tasks = [step * c.prompts + n // c.rollouts for n in range(c.prompts * c.rollouts)]
        played = world.play(sampler, "rl", tasks, torch.Generator().manual_seed(seed + step))
        found = improve(c, model, reference, played)
        for p, gradient in zip(model.parameters(), found.gradients, strict=True):
            p.grad = None if gradient is None else gradient.to(p.dtype)
        optimizer.param_groups[0]["lr"] = c.lr * c.rate(step)
        optimizer.step()
        optimizer.zero_grad()
        yield found


def improve(
    c: Settings,
    model: Transformer,
    reference: Transformer | None,
    played: Sequence[Played],
    *,
    mtp: MTP | None = None,
    mtp_weight: float = 1.0,
    rearranged: Callable[[Tensor], Tensor] = lambda rewards: rewards,
    each: Callable[[Callable[[Any], Any], Sequence[Any]], list] = one_by_one,
) -> Step:
    """The policy gradient of a batch of finished conversations; those of a group are adjacent. The model is not changed.

    reference: the policy before RL; with None, drift is neither measured nor penalised. mtp: draft layers that train on the same
    forward pass with weight `mtp_weight`, by a mean over the policy's own tokens; their gradient does not reach the trunk. If
    `feedback.weight` is above 0, the loss of the hints (`Played.hints`) is added, with the same denominator.
    `rearranged`: a control experiment may permute the rewards. `each(function, batches)` may compute micro-batches elsewhere: gradients
    are summed in float32 in a fixed order, so the bits do not depend on where."""
    chains = [p.chain for p in played]
    batches, (own, behavior) = deal(chains)

    drift, engine = torch.zeros(2, len(chains), dtype=behavior.dtype).unbind()
    if reference is not None:

        def drifted(batch: Batch) -> tuple[Tensor, Tensor]:
            return reference_kl(model, reference, batch.ids, batch.own, batch.behavior, c.temperature)

        for batch, parts in zip(batches, each(drifted, batches), strict=True):
            for whole, part in zip((drift, engine), parts, strict=True):
                whole.index_add_(0, batch.chain, part)
    rewards = rearranged(torch.tensor([p.reward for p in played], dtype=behavior.dtype) - c.payment.kl * drift)

    groups = dr_grpo.group_advantages(rewards.view(c.prompts, c.rollouts))
    advantages = spread(groups.flatten(), chains)
    advantages = torch.cat((advantages, advantages.new_zeros(len(own) - len(advantages))))  # padding rows
    budget = float(len(chains) * c.budget_tokens)  # a constant, so the micro-batches' losses add up to that of the full batch
    told = corrected(played) if c.feedback.weight else {}

    def pressed(batch: Batch) -> "Pressed":
        T = batch.ids.shape[1]
        out = model(batch.ids, logits=False, experts=routing(batch.contexts, T, c.replay, c.replay_alpha))
        logp = own_logp(model, out.hidden, batch.ids, batch.own, c.temperature)
        loss = dr_grpo.policy_loss(
            logp, batch.behavior[:, 1:], advantages[batch.rows], batch.own[:, 1:], budget=budget, clip_low=c.clip_low, clip_high=c.clip_high
        )
        found = Pressed(loss.item(), (logp.detach() - batch.behavior[:, 1:])[batch.own[:, 1:]])
        if c.replay == "filtered" and out.experts:  # the last token of a context predicts nothing, so it was not routed
            known = (torch.arange(T) < batch.lengths[:, None] - 1).flatten()
            pair = ([e[known] for e in layers] for layers in (out.experts, routing(batch.contexts, T, "plain", 0.0) or []))
            found.dropped, found.known = differing(*pair)["decisions"], int(known.sum())
        if mtp is not None:
            doc = torch.where(torch.arange(T) < batch.lengths[:, None], 0, -1)
            distilled, found.mtp_count, _ = mtp_loss(mtp, model, out, batch.ids, doc, batch.own.float())
            found.mtp_loss, found.mtp_gradients = distilled.item(), gradients_of(mtp_weight * distilled / own.sum(), mtp, again=True)
        if some := [(at, told[row]) for at, row in enumerate(batch.rows.tolist()) if row in told]:
            student, teacher = (model.head(x) / c.temperature for x in pairs(model, out.hidden, some))
            apart = feedback_loss(student, teacher, torch.ones(len(student)), budget=budget, kind=c.feedback.divergence)
            loss = loss + c.feedback.weight * apart
            found.distilled, found.apart = len(student), apart.item() * budget
        found.gradients = gradients_of(loss, model)
        return found

    found = each(pressed, batches)
    count, known, tokens = sum(f.mtp_count for f in found), sum(f.known for f in found), int(own.sum())
    distilled = sum(f.distilled for f in found)
    return Step(
        loss=sum(f.loss for f in found),
        gradients=total_of([f.gradients for f in found]),
        rewards=rewards,
        drift=drift,
        engine=engine,
        gap=torch.cat([f.gap for f in found]),
        tokens=tokens,
        nll=-(behavior.sum().item() / tokens),
        dropped=sum(f.dropped * f.known for f in found) / known if known else None,
        mtp_loss=sum(f.mtp_loss for f in found) / count if count else None,
        mtp_gradients=total_of([f.mtp_gradients for f in found]) if count else None,
        distilled=distilled,
        divergence=sum(f.apart for f in found) / distilled if distilled else None,
    )


ROWS, MULTIPLE = 32, 16
"""Rows of a micro-batch, and the multiple that its length is rounded up to: a CPU compiles code for each new shape of a bfloat16 product."""


def deal(chains: Sequence[Chain]) -> tuple[list[Batch], tuple[Tensor, Tensor]]:
    """Micro-batches of `ROWS` contexts of similar length, which need little padding. The longest come first, so cores that share them
    finish together. Also, for all contexts, padded: which tokens are the policy's own, and their log μ."""
    segments = [s for chain in chains for s in chain.segments]
    ids, own, behavior = pad(segments, multiple=MULTIPLE, rows_multiple=ROWS)
    fill = [0] * (len(ids) - len(segments))
    chain = torch.tensor([n for n, one in enumerate(chains) for _ in one.segments] + fill)
    lengths = torch.tensor([len(s.tokens) for s in segments] + fill)
    batches = []
    for rows in reversed(lengths.argsort(stable=True).split(ROWS)):
        T = -(-int(lengths[rows].max()) // MULTIPLE) * MULTIPLE
        contexts = [segments[i] if i < len(segments) else None for i in rows.tolist()]
        batches.append(Batch(rows, chain[rows], ids[rows, :T], own[rows, :T], behavior[rows, :T], lengths[rows], contexts))
    return batches, (own, behavior)


def pad(rollouts: Sequence[Rollout], multiple: int = 1, rows_multiple: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """ids [B, T], mask [B, T] (True on sampled tokens) and behaviour log-probs [B, T] of rollouts of unequal
    length. T is rounded up to a multiple of `multiple`, and B to one of `rows_multiple` with rows that do not count."""
    T = -(-max(len(r.tokens) for r in rollouts) // multiple) * multiple
    B = -(-len(rollouts) // rows_multiple) * rows_multiple
    ids = torch.zeros(B, T, dtype=torch.long)
    mask, logp = torch.zeros(B, T, dtype=torch.bool), torch.zeros(B, T, dtype=rollouts[0].logp.dtype)
    for row, r in enumerate(rollouts):
        n = len(r.tokens)
        ids[row, :n], mask[row, :n], logp[row, :n] = r.tokens, r.sampled, r.logp
    return ids, mask, logp


@torch.no_grad()
def reference_kl(
    policy: Transformer, reference: Transformer, ids: Tensor, mask: Tensor, behavior_logp: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Two sums over a rollout's own tokens, [B] nats each: k1 = log π − log π_ref, the drift that the reward is penalised for, and
    log μ − log π, which is not drift but the numerical difference between the sampler's engine and the trainer's.

    Both networks are evaluated by the same engine here, each with its own experts. So an untrained policy has a drift of exactly
    zero, however coarse its sampler is."""
    now, before = (own_logp(model, model(ids, logits=False).hidden, ids, mask, temperature) for model in (policy, reference))
    drift, engine = kl.token_kl(now, before, "k1"), behavior_logp[:, 1:] - now
    return (drift * mask[:, 1:]).sum(1), (engine * mask[:, 1:]).sum(1)


def own_logp(model: Transformer, hidden: Tensor, ids: Tensor, mask: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probs [B, T−1], at the sampling temperature, of the policy's own tokens (`mask` [B, T]) given the tokens before them; zero
    elsewhere, where the head is not run."""
    row, t = mask[:, 1:].nonzero(as_tuple=True)
    logp = model.logprob(hidden[row, t] / temperature, ids[row, t + 1])
    return logp.new_zeros(len(ids), ids.shape[1] - 1).index_put((row, t), logp)


def routing(rollouts: Sequence[Rollout | None], T: int, how: str, alpha: float) -> list | None:
    """The sampler's experts, per layer, for a training pass over these rollouts padded to T tokens (a rollout of None is a padding
    row): indices [B·T, K] ("plain"), functions that filter them by this router's scores ("filtered"), or None ("none", and for a dense
    network)."""
    _, L, K = next(rollout for rollout in rollouts if rollout is not None).experts.shape
    if how == "none" or not L:
        return None
    # Padding needs K distinct experts too; no gradient comes from it.
    chosen = torch.arange(K).expand(len(rollouts), T, L, K).clone()
    for row, rollout in enumerate(rollouts):
        if rollout is not None:
            chosen[row, : len(rollout.experts)] = rollout.experts.long()
    layers = chosen.flatten(0, 1).unbind(1)
    return list(layers) if how == "plain" else [functools.partial(replay, replayed=e, k=K, alpha=alpha) for e in layers]


def corrected(played: Sequence[Played]) -> dict[int, Hinted]:
    """What the teacher reads in place of a context, by the context's number; those without a distilled token are left out. Raises ValueError
    unless a conversation has hints for each of its contexts or none at all, and as `hinted`."""
    found: dict[int, Hinted] = {}
    number = 0
    for n, p in enumerate(played):
        if p.hints and len(p.hints) != len(p.chain.segments):
            raise ValueError(f"hints must be given for all {len(p.chain.segments)} contexts of conversation {n}, or for none; got {len(p.hints)}")
        for segment, hints in zip(p.chain.segments, p.hints):
            where = hinted(segment, hints)
            found |= {number: where} if len(where.student) else {}
            number += 1
        number += 0 if p.hints else len(p.chain.segments)
    return found


def pairs(model: Transformer, hidden: Tensor, told: Sequence[tuple[int, Hinted]]) -> tuple[Tensor, Tensor]:
    """The hidden states [n, D] that predict the distilled tokens of some rows of a micro-batch, `hidden` [B, T, D] being its own: the student's,
    and without gradient the teacher's, which come from a forward pass on what it reads."""
    T = -(-max(len(where.tokens) for _, where in told) // MULTIPLE) * MULTIPLE
    ids = torch.zeros(-(-len(told) // MULTIPLE) * MULTIPLE, T, dtype=torch.long)
    for row, (_, where) in enumerate(told):
        ids[row, : len(where.tokens)] = where.tokens
    with torch.no_grad():
        taught = model(ids, logits=False).hidden
    student, teacher = zip(*(predictions(hidden[at], taught[row], where) for row, (at, where) in enumerate(told)), strict=True)
    return torch.cat(student), torch.cat(teacher)


@dataclass
class Pressed:
    """A micro-batch's part of the step: its loss, gradients and metrics."""

    loss: float
    gap: Tensor
    """log π − log μ of the policy's own tokens, [n]."""
    gradients: list[Tensor | None] = field(default_factory=list)
    dropped: float = 0.0
    known: int = 0
    """Share of the replayed decisions that the filter dropped, and the number of tokens it refers to."""
    mtp_loss: float = 0.0
    mtp_count: float = 0.0
    mtp_gradients: list[Tensor | None] = field(default_factory=list)
    distilled: int = 0
    apart: float = 0.0
    """Tokens that hints correct, and the sum of their divergences, nats."""


def gradients_of(loss: Tensor, model: torch.nn.Module, again: bool = False) -> list[Tensor | None]:
    """d loss / d w for every parameter, in order; None for a parameter that the loss does not depend on. `again`: keep the graph for
    another backward pass."""
    return list(torch.autograd.grad(loss, list(model.parameters()), retain_graph=again, allow_unused=True))


def total_of(parts: list[list[Tensor | None]]) -> list[Tensor | None]:
    """The sum over micro-batches for each parameter, in float32 or wider, in the order of the micro-batches."""
    columns = [[g.to(torch.promote_types(g.dtype, torch.float32)) for g in column if g is not None] for column in zip(*parts, strict=True)]
    return [functools.reduce(torch.add, column) if column else None for column in columns]
