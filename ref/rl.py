"""One step of reinforcement learning, from finished conversations to a gradient, and the loop around it, on one rank.

Source: Composer 2 technical report (arXiv:2603.24477v2), §4.1, §6.2. The techniques have files of their own; here they are called in the
order in which a step needs them:

    load     the sampler takes the newest weights                                        `ref/engine/sampler.py`
    play     N conversations about each of G tasks; a conversation is a chain of contexts `ref/self_summary.py`
    deal     contexts of like length make a micro-batch                                  `deal`
    charge   drift from the policy before RL is taken from the reward                    `ref/kl.py`
    compare  a reward less the mean of its group is the advantage of the whole chain     `ref/dr_grpo.py`
    press    the policy's own tokens, with the experts that the sampler chose            `ref/router_replay.py`

Where this file departs from the report
1. Sampler and trainer take turns: but for what the two engines compute otherwise, every step is on-policy.
2. k1 is charged to the reward. The report uses k1 and does not say where (`ref/kl.py`).
3. Contexts are padded into micro-batches of like length, not packed (`ref/packing.py` packs; `scaled/rl.py` does so).
4. `mtp` lets draft layers learn from the same forward pass. The report trains them before RL only.

The trap: a mean that is taken within a micro-batch, or over contexts instead of chains, makes the gradient depend on how the batch was
cut. Every sum here is divided by one constant, G·N·budget_tokens, and advantages are taken over chains.

Run it
    etude run recipe --scale small           `sims/recipe/reinforcement.py` plays it in the small world
    etude run dr-grpo --scale full           `scaled/rl.py`, the same on many ranks

Glossary
    symbol      here          shape
    G, N        prompts, rollouts         conversation n is of group n // N
    r           `Played.reward`           what a conversation was worth
    r − β·KL    `Step.rewards`    G·N     after drift was charged
    A           advantages        S       one for each context; all of a chain have the same
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
from ref.engine.sampler import Rollout, Sampler
from ref.mtp import MTP, mtp_loss
from ref.network import Transformer
from ref.router_replay import differing, replay
from ref.self_summary import Chain, spread

__all__ = ["Batch", "Played", "Settings", "Step", "World", "deal", "improve", "learn", "own_logp", "pad", "reference_kl", "routing"]


@dataclass(frozen=True)
class Settings:
    """What a step is told."""

    prompts: int = 16
    """Groups of a step (G)."""
    rollouts: int = 8
    """Conversations of a group (N)."""
    temperature: float = 1.0
    """Temperature that the tokens were sampled at."""
    budget_tokens: int = 40
    """Constant that stands for a rollout's length in the normaliser G·N·budget_tokens (Dr. GRPO divides by no length)."""
    clip_low: float = 0.2
    """Where A < 0, ratios below 1 − clip_low no longer count."""
    clip_high: float = 0.2
    """Where A > 0, ratios above 1 + clip_high no longer count."""
    kl: float = 0.0
    """β: reward that a nat of k1 against the policy before RL costs, summed over the conversation."""
    replay: Literal["none", "plain", "filtered"] = "none"
    """Whose experts the training pass takes: its own, the sampler's, the sampler's where they are plausible."""
    replay_alpha: float = 0.5
    """Plausibility that filtered replay asks of an expert."""


@dataclass
class Played:
    """A conversation that is over."""

    chain: Chain
    """What was sampled."""
    reward: float
    """What it was worth, before drift is charged for."""
    figures: dict[str, float] = field(default_factory=dict)
    """What else is to be told of it; of all conversations the mean is shown. All have the same names, "success" among them."""


@runtime_checkable
class World(Protocol):
    """What the policy talks to."""

    def play(self, sampler: Sampler, stream: str, tasks: Sequence[int], generator: torch.Generator) -> list[Played]:
        """One conversation about each of these tasks, by their numbers in one of the world's streams, "rl" or "heldout"."""
        ...


@dataclass
class Batch:
    """Contexts of like length, padded on the right to T tokens: a micro-batch. Rows of which nothing counts fill it up."""

    rows: Tensor
    """[B] number of the context, from `len(contexts of all chains)` on for a row that only fills."""
    chain: Tensor
    """[B] number of the chain that it belongs to."""
    ids: Tensor
    """[B, T]"""
    own: Tensor
    """[B, T] bool: the tokens that the policy chose."""
    behavior: Tensor
    """[B, T] log μ of those, nats; zero elsewhere."""
    lengths: Tensor
    """[B] tokens of the context."""
    contexts: list[Rollout | None]
    """The contexts themselves; None for a row that only fills."""


@dataclass
class Step:
    """What a step found. Nothing of it is a mean over micro-batches."""

    loss: float
    """The policy loss of the whole batch."""
    gradients: list[Tensor | None]
    """d loss / d w for every parameter of the policy, in their order; None for a parameter that the loss does not ask."""
    rewards: Tensor
    """[G·N] after drift was charged."""
    drift: Tensor
    """[G·N] k1 against the policy before RL, nats a conversation."""
    engine: Tensor
    """[G·N] log μ − log π: what the sampler's engine computes otherwise than the trainer's, nats a conversation."""
    gap: Tensor
    """[n] log π − log μ of each of the policy's own tokens."""
    tokens: int
    """The policy's own tokens (n)."""
    nll: float
    """−log μ of one of them, nats, on average."""
    dropped: float | None = None
    """Share of the replayed decisions that the filter dropped; None where nothing is filtered."""
    mtp_loss: float | None = None
    """Loss of the draft layers, nats a position; None where they were not asked."""
    mtp_gradients: list[Tensor | None] | None = None


def one_by_one(function: Callable[[Any], Any], parts: Sequence[Any]) -> list:
    """[function(part) for part in parts]"""
    return [function(part) for part in parts]


def learn(
    c: Settings, model: Transformer, sampler: Sampler, world: World, optimizer: torch.optim.Optimizer, steps: int, seed: int = 0
) -> Iterator[Step]:
    """The loop, plainly: each step plays G·N conversations with the newest weights and moves the weights once. Yields what it found.
    Drift is charged against the policy as it was handed in. `sims/recipe/reinforcement.py` adds what a long run needs: states, a schedule of
    the learning rate, harder tasks in the later half, draft layers, all cores."""
    reference = copy.deepcopy(model).requires_grad_(False)
    for step in range(steps):
        sampler.load(model, version=step)
        tasks = [step * c.prompts + n // c.rollouts for n in range(c.prompts * c.rollouts)]
        played = world.play(sampler, "rl", tasks, torch.Generator().manual_seed(seed + step))
        found = improve(c, model, reference, played)
        for p, gradient in zip(model.parameters(), found.gradients, strict=True):
            p.grad = None if gradient is None else gradient.to(p.dtype)
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
    """The policy gradient of a batch of finished conversations, those of a group side by side. The model is left as it is.

    reference: the policy before RL; None: no drift is measured, and none charged. mtp: draft layers that learn from the same forward
    pass with weight `mtp_weight`, by a mean over the policy's own tokens; the trunk has none of their gradient. `rearranged`: a control
    may permute the rewards. `each(function, batches)` may compute micro-batches elsewhere: gradients are added up in float32 in one
    order, so that the bits do not depend on where."""
    chains = [p.chain for p in played]
    batches, (own, behavior) = deal(chains)

    drift, engine = torch.zeros(2, len(chains), dtype=behavior.dtype).unbind()
    if reference is not None:

        def drifted(batch: Batch) -> tuple[Tensor, Tensor]:
            return reference_kl(model, reference, batch.ids, batch.own, batch.behavior, c.temperature)

        for batch, parts in zip(batches, each(drifted, batches), strict=True):
            for whole, part in zip((drift, engine), parts, strict=True):
                whole.index_add_(0, batch.chain, part)
    rewards = rearranged(torch.tensor([p.reward for p in played], dtype=behavior.dtype) - c.kl * drift)

    groups = dr_grpo.group_advantages(rewards.view(c.prompts, c.rollouts))
    advantages = spread(groups.flatten(), chains)
    advantages = torch.cat((advantages, advantages.new_zeros(len(own) - len(advantages))))  # rows that only fill
    budget = float(len(chains) * c.budget_tokens)  # a constant, so that the micro-batches' losses add up to the whole batch's

    def pressed(batch: Batch) -> "Pressed":
        T = batch.ids.shape[1]
        out = model(batch.ids, logits=False, experts=routing(batch.contexts, T, c.replay, c.replay_alpha))
        logp = own_logp(model, out.hidden, batch.ids, batch.own, c.temperature)
        loss = dr_grpo.policy_loss(
            logp, batch.behavior[:, 1:], advantages[batch.rows], batch.own[:, 1:], budget=budget, clip_low=c.clip_low, clip_high=c.clip_high
        )
        found = Pressed(loss.item(), (logp.detach() - batch.behavior[:, 1:])[batch.own[:, 1:]])
        if c.replay == "filtered" and out.experts:  # the last token of a context predicts nothing, and was not routed
            known = (torch.arange(T) < batch.lengths[:, None] - 1).flatten()
            pair = ([e[known] for e in layers] for layers in (out.experts, routing(batch.contexts, T, "plain", 0.0) or []))
            found.dropped, found.known = differing(*pair)["decisions"], int(known.sum())
        if mtp is not None:
            doc = torch.where(torch.arange(T) < batch.lengths[:, None], 0, -1)
            distilled, found.mtp_count, _ = mtp_loss(mtp, model, out, batch.ids, doc, batch.own.float())
            found.mtp_loss, found.mtp_gradients = distilled.item(), gradients_of(mtp_weight * distilled / own.sum(), mtp, again=True)
        found.gradients = gradients_of(loss, model)
        return found

    found = each(pressed, batches)
    count, known, tokens = sum(f.mtp_count for f in found), sum(f.known for f in found), int(own.sum())
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
    )


ROWS, MULTIPLE = 32, 16
"""Rows of a micro-batch, and what its length is a multiple of: on a CPU code is compiled for each new shape of a bfloat16 product."""


def deal(chains: Sequence[Chain]) -> tuple[list[Batch], tuple[Tensor, Tensor]]:
    """Micro-batches of `ROWS` contexts of like length, which waste little padding, the longest first, so that cores that share them end
    together; and of all contexts, padded, which tokens are the policy's own and their log μ."""
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
    length; T is rounded up to `multiple`, B to `rows_multiple` by rows of which nothing counts."""
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
    """Two sums over a rollout's own tokens, [B] nats each: k1 = log π − log π_ref, what the reward is charged for drifting, and
    log μ − log π, which is nobody's drift: it is what the sampler's engine computes otherwise than the trainer's.

    Both networks compute alike here, with their own experts. A policy that has not been trained has not drifted, exactly,
    however coarse its sampler is."""
    now, before = (own_logp(model, model(ids, logits=False).hidden, ids, mask, temperature) for model in (policy, reference))
    drift, engine = kl.token_kl(now, before, "k1"), behavior_logp[:, 1:] - now
    return (drift * mask[:, 1:]).sum(1), (engine * mask[:, 1:]).sum(1)


def own_logp(model: Transformer, hidden: Tensor, ids: Tensor, mask: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probs [B, T−1], at the temperature that they were sampled at, of the tokens that `mask` [B, T] calls the policy's own, given those
    before them; zero elsewhere, where the head is not asked."""
    row, t = mask[:, 1:].nonzero(as_tuple=True)
    logp = model.logprob(hidden[row, t] / temperature, ids[row, t + 1])
    return logp.new_zeros(len(ids), ids.shape[1] - 1).index_put((row, t), logp)


def routing(rollouts: Sequence[Rollout | None], T: int, how: str, alpha: float) -> list | None:
    """The experts of the sampler, per layer, for a training pass over these rollouts padded to T tokens (None: a row that only
    pads): indices [B·T, K] ("plain"), functions that filter them by this router's scores ("filtered"), None ("none")."""
    if how == "none":
        return None
    _, L, K = next(rollout for rollout in rollouts if rollout is not None).experts.shape
    # What pads has to be K distinct experts; no gradient comes from there.
    chosen = torch.arange(K).expand(len(rollouts), T, L, K).clone()
    for row, rollout in enumerate(rollouts):
        if rollout is not None:
            chosen[row, : len(rollout.experts)] = rollout.experts.long()
    layers = chosen.flatten(0, 1).unbind(1)
    return list(layers) if how == "plain" else [functools.partial(replay, replayed=e, k=K, alpha=alpha) for e in layers]


@dataclass
class Pressed:
    """What a micro-batch says to the step: its part of the loss and of the gradients, and of the figures."""

    loss: float
    gap: Tensor
    """log π − log μ of the policy's own tokens, [n]."""
    gradients: list[Tensor | None] = field(default_factory=list)
    dropped: float = 0.0
    known: int = 0
    """Share of the replayed decisions that the filter dropped, and the tokens that it is a share of."""
    mtp_loss: float = 0.0
    mtp_count: float = 0.0
    mtp_gradients: list[Tensor | None] = field(default_factory=list)


def gradients_of(loss: Tensor, model: torch.nn.Module, again: bool = False) -> list[Tensor | None]:
    """d loss / d w for every parameter, in their order; None where the loss does not ask a parameter. `again`: the graph will be
    asked once more."""
    return list(torch.autograd.grad(loss, list(model.parameters()), retain_graph=again, allow_unused=True))


def total_of(parts: list[list[Tensor | None]]) -> list[Tensor | None]:
    """The sum over micro-batches, in float32 or wider and in their order, parameter by parameter."""
    columns = [[g.to(torch.promote_types(g.dtype, torch.float32)) for g in column if g is not None] for column in zip(*parts, strict=True)]
    return [functools.reduce(torch.add, column) if column else None for column in columns]
