"""RL on the small world: rollouts of fresh tasks with the newest weights, one policy-gradient step on them, again.

The loop that `sims/recipe.py` plays once and the experiments play under changed settings.
"""

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from kit.process import on_cores
from kit.runs import Stage
from kit.settings import RunError
from ref import cpt, dr_grpo
from ref.engine.sampler import Rollout, Sampler
from ref.mtp import MTP, mtp_loss
from ref.network.model import Transformer
from ref.router_replay import differing, replay
from ref.self_summary import Chaining, spread
from sims.agent import Language, hash_seed, own_logp, pad, pay, play, reference_kl
from sims.chains import context
from sims.corpus import task_stream
from sims.learner import Learner
from sims.microrepo import Task
from sims.rounding import fp8_rows

if TYPE_CHECKING:
    from sims.recipe import Recipe

__all__ = ["choose", "gate", "improve", "kept", "learn", "routing"]

KINDS = 3
"""Kinds of tasks, by depth: how many helpers a task's docstring refers to."""


def learn(
    stage: Stage,
    config: "Recipe",
    model: Transformer,
    mtp: MTP | None,
    reference: Transformer,
    language: Language,
    look: Callable[[int, Learner, Sampler], dict] | None = None,
    how: Chaining | None = None,
) -> tuple[Learner, dict[str, int]]:
    """Dr. GRPO: every step samples G·N rollouts of fresh tasks with the newest weights and takes one Adam step on them.
    A rollout is a chain of contexts under `how`, by default the recipe's. In the later steps (`rl.later`) harder tasks are
    upsampled: kinds of tasks are the world's depths, and which are hard the rollouts so far say (`kept`).

    model and mtp begin where SFT ended; `reference` prices drift; `look(step, learner, sampler)` is called before the first
    step and after each, and what it returns is logged with the step's figures. Resumes from the stage's state. Returns the
    learner and what was consumed. RunError where the policy succeeds too rarely to begin with (`rl.gate`)."""
    r, t, how = config.rl, config.training, how or context(language, config)
    learner = Learner(config, model, mtp, 0.0, 0.0)
    learner.optimizers = [torch.optim.Adam(learner.trunk.masters.parameters(), lr=r.lr, betas=(0.9, 0.95), fused=True)]
    learner.rates = [[g["lr"] for g in o.param_groups] for o in learner.all_optimizers]
    reference = reference.to(learner.dtype)
    rounding = fp8_rows if t.sampler_weights == "fp8" else None
    sampler = Sampler(learner.trunk.model, getattr(torch, t.sampler_dtype), rounding=rounding)

    state = stage.restore()
    first = learner.restore(state) if state else 0
    seen, consumed, played = (state[name] for name in ("seen", "consumed", "played")) if state else (0, 0, np.zeros((KINDS, 3)))
    if not state:
        success = gate(config, sampler, language, how)
        if success < r.gate:
            raise RunError(
                f"sampled success after SFT is {success:.3f}, below rl.gate={r.gate}: penalties would only teach the "
                "policy to stop; train longer (--set training.tokens=…) or lower --set rl.gate=…"
            )
        if look and (found := look(0, learner, sampler)):
            stage.log(0, **found)
    tasks = itertools.islice(task_stream(config, "rl"), consumed, None)
    for step in range(first, r.steps):
        learner.schedule(cpt.wsd(step, r.steps, r.warmup, min(r.decay, r.steps // 2)))
        sampler.load(learner.trunk.model, version=step)
        keep = kept(played, r.upsampling) if step >= r.steps * (1 - r.later) else np.ones(KINDS)
        chosen, passed = choose(tasks, r.prompts, keep, random.Random(hash_seed(config.seed, "harder", step)))
        generator = torch.Generator().manual_seed(hash_seed(config.seed, "rl", step))
        episodes = play(sampler, language, chosen, r.rollouts, how, r.max_turns, generator, r.temperature)
        figures = improve(config, learner, reference, episodes, step)
        consumed += len(chosen) + passed
        seen += sum(len(e.rollout.tokens) for e in episodes)
        for kind, e in zip(np.repeat([task.depth for task in chosen], r.rollouts), episodes, strict=True):
            played[kind] += 1, e.verdict.turns, e.chain.written
        figures["depth"] = float(np.mean([task.depth for task in chosen]))
        if look:
            sampler.load(learner.trunk.model, version=step + 1)
            figures |= look(step + 1, learner, sampler)
        stage.log(step + 1, **figures)
        stage.progress(step + 1, seen, reward=figures["reward"], success=figures["success"])
        if stage.due():
            stage.save(learner.state(step + 1, seen=seen, consumed=consumed, played=played), step + 1)
    prompts = r.steps * r.prompts
    return learner, {"steps": r.steps, "prompts": prompts, "rollouts": prompts * r.rollouts, "tokens": seen}


def kept(played: np.ndarray, power: float) -> np.ndarray:
    """The chance with which a task of each kind is kept, 1 for the hardest. How hard a kind is, its rollouts say (§4.1: "number of
    turns, thinking tokens"): their turns and tokens over those of all kinds, the two averaged.

    played: [kinds, (rollouts, turns, tokens)], sums. A kind that was never played is kept."""
    known = played[:, 0] > 0
    if not known.any():
        return np.ones(len(played))
    each = played[known, 1:] / played[known, :1]
    hard = (each / each.mean(0).clip(min=1e-9)).mean(1)
    found = np.ones(len(played))
    found[known] = (hard / hard.max().clip(min=1e-9)) ** power
    return found


def choose(tasks: Iterator[Task], n: int, keep: np.ndarray, rng: random.Random) -> tuple[list[Task], int]:
    """The next n tasks, each kept with the chance of its kind, and how many were passed over for good."""
    chosen, passed = [], 0
    while len(chosen) < n:
        task = next(tasks)
        if rng.random() < keep[task.depth]:
            chosen.append(task)
        else:
            passed += 1
    return chosen, passed


def gate(config: "Recipe", sampler: Sampler, language: Language, how: Chaining) -> float:
    """Sampled success on 64 training tasks that RL will not use."""
    tasks = list(itertools.islice(task_stream(config, "gate"), 64))
    generator = torch.Generator().manual_seed(hash_seed(config.seed, "gate"))
    episodes = play(sampler, language, tasks, 4, how, config.rl.max_turns, generator)
    return float(np.mean([e.verdict.tests for e in episodes]))


def improve(config: "Recipe", learner: Learner, reference: Transformer, episodes: list, step: int) -> dict[str, float]:
    """One policy-gradient step on a batch of finished episodes; returns the figures of the batch. Rewards, drift and baseline
    belong to chains, rows of the batch are their segments, and the budget counts chains. Micro-batches are computed on all cores, one
    thread each, and their gradients added up in float32 in one order: the bits are the same on any number of cores. `kl` is the
    policy's drift from the reference, `engine_kl` what its sampler computes otherwise, nats a rollout; `dropped`, of the replayed
    experts, what the filter took."""
    r = config.rl
    G, N = r.prompts, r.rollouts
    paid, chains = [pay(e, r.payment) for e in episodes], [e.chain for e in episodes]
    segments = [s for chain in chains for s in chain.segments]
    # Micro-batches of like length waste little padding; few distinct shapes, because each new one costs its compilation: all
    # have 32 rows, and rows of which nothing counts fill the first.
    ids, mask, behavior = pad(segments, multiple=16, rows_multiple=32)
    fill = [0] * (len(ids) - len(segments))
    owner = torch.tensor([c for c, chain in enumerate(chains) for _ in chain.segments] + fill)
    lengths = torch.tensor([len(s.tokens) for s in segments] + fill)
    batches = [(rows, -(-int(lengths[rows].max()) // 16) * 16) for rows in lengths.argsort(stable=True).split(32)]
    batches.reverse()  # the longest are dealt first, so that the cores end together
    model, mtp = learner.trunk.model, learner.mtp if step % config.mtp.rl_every == 0 else None

    def drifted(batch: tuple[Tensor, int]) -> tuple[Tensor, Tensor]:
        rows, T = batch
        return reference_kl(model, reference, ids[rows, :T], mask[rows, :T], behavior[rows, :T], r.temperature)

    drift, engine = torch.zeros(len(episodes)), torch.zeros(len(episodes))
    for (rows, _), parts in zip(batches, on_cores(drifted, batches), strict=True):
        for whole, part in zip((drift, engine), parts, strict=True):
            whole.index_add_(0, owner[rows], part)
    rewards = torch.tensor([p["reward"] for p in paid]) - r.payment.kl * drift
    if r.shuffle_rewards:
        generator = torch.Generator().manual_seed(hash_seed(config.seed, "shuffle", step))
        rewards = rewards[torch.randperm(len(rewards), generator=generator)]
    advantages = spread(dr_grpo.group_advantages(rewards.view(G, N)).flatten(), chains)
    advantages = torch.cat((advantages, torch.zeros(len(fill))))
    budget = float(G * N * r.budget_tokens)  # constant, so that the micro-batches' losses add up to the whole batch's

    def pressed(batch: tuple[Tensor, int]) -> "Pressed":
        rows, T = batch
        some, keep = ids[rows, :T], mask[rows, :T]
        contexts = [segments[i] if i < len(segments) else None for i in rows.tolist()]
        out = model(some, logits=False, experts=routing(contexts, T, r.replay, r.replay_alpha))
        logp = own_logp(model, out.hidden, some, keep, r.temperature)
        loss = dr_grpo.policy_loss(
            logp, behavior[rows, 1:T], advantages[rows], keep[:, 1:], budget=budget, clip_low=r.clip_low, clip_high=r.clip_high
        )
        found = Pressed(loss.item(), (logp.detach() - behavior[rows, 1:T])[keep[:, 1:]])
        if r.replay == "filtered" and out.experts:  # the last token of a context predicts nothing, and was not routed
            known = (torch.arange(T) < lengths[rows, None] - 1).flatten()
            pair = ([e[known] for e in layers] for layers in (out.experts, routing(contexts, T, "plain", 0.0)))
            found.dropped, found.known = differing(*pair)["decisions"], int(known.sum())
        if mtp is not None:
            doc = torch.where(torch.arange(T) < lengths[rows, None], 0, -1)
            distilled, found.mtp_count, _ = mtp_loss(mtp.model, model, out, some, doc, keep.float())
            found.mtp_loss, found.mtp_gradients = distilled.item(), gradients_of(config.mtp.weight * distilled / mask.sum(), mtp.model, again=True)
        found.gradients = gradients_of(loss, model)
        return found

    found = on_cores(pressed, batches)
    norm = learner.trunk.step(learner.optimizers, gradients=total_of([f.gradients for f in found]))
    if mtp is not None and sum(f.mtp_count for f in found):
        mtp.step(learner.mtp_optimizers, gradients=total_of([f.mtp_gradients for f in found]))

    verdicts = [e.verdict for e in episodes]
    own, gap = mask.sum().item(), torch.cat([f.gap for f in found])
    mtp_count, known = sum(f.mtp_count for f in found), sum(f.known for f in found)
    ratio, size = gap.exp(), gap.abs()

    def mean(values: Iterable[float]) -> float:
        values = list(values)
        return float(sum(values) / len(values))

    return {
        "reward": mean(rewards.tolist()),
        "success": mean(v.tests for v in verdicts),
        "best": mean(max(v.tests for v in verdicts[g * N : (g + 1) * N]) for g in range(G)),
        "tokens": own / len(episodes),
        "turns": mean(v.turns for v in verdicts),
        "invalid_calls": mean(v.invalid_calls for v in verdicts),
        "tested": mean(float(v.tested) for v in verdicts),
        "effort": mean(p["effort"] for p in paid),
        "kl": mean(drift.tolist()),
        "engine_kl": mean(engine.tolist()),
        "loss": sum(f.loss for f in found),
        "nll": -(behavior.sum().item() / own),
        "grad_norm": norm.item(),
        "mismatch": size.mean().item(),
        "mismatch_p99": float(np.quantile(size.numpy(), 0.99)),
        "mismatch_max": size.max().item(),
        "outside_clip": ((ratio < 1 - r.clip_low) | (ratio > 1 + r.clip_high)).double().mean().item(),
        "finished": mean(float(c.finished) for c in chains),
        "segments": len(segments) / len(chains),
        "summary_tokens": mean(c.summary_tokens for c in chains),
        **({"mtp_loss": sum(f.mtp_loss for f in found) / mtp_count} if mtp_count else {}),
        **({"dropped": sum(f.dropped * f.known for f in found) / known} if known else {}),
    }


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
    """The sum over micro-batches, in float32 and in their order, parameter by parameter."""
    columns = [[g.float() for g in column if g is not None] for column in zip(*parts, strict=True)]
    return [sum(column[1:], column[0]) if column else None for column in columns]


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
    return list(layers) if how == "plain" else [partial(replay, replayed=e, k=K, alpha=alpha) for e in layers]
