"""The loop: a policy is served, users react, their reactions become rewards, and what has learnt from them is looked at and shipped.

    serve     each user asks once, and the deployed policy answers; every token keeps its log-prob and its experts
    collect   the reactions that are known when the loop ends, with those that came too late for earlier loops
    distil    a reaction becomes a reward, or the session is thrown away                                          `rewards.py`
    train     a few steps on them; the importance ratio knows how far the policy has gone since it served them    `ref/rl.py`
    look      held-out tasks, by the policy that may be shipped and by the deployed one
    gate      it is shipped unless it is worse: unless the 90% bootstrap interval of its gain, over tasks, lies below zero
    ship      it is deployed. What is not shipped goes on learning

Where this differs from RL in an environment
1. A user asks once. There is no group for a task, so a reward is compared with the mean of its batch (one group of all sessions). On a hard task
   honest work is therefore below the mean, and on an easy one above it.
2. The rewards are reactions. Nothing here sees the hidden tests but the users, and the look before the gate.
3. Data are as old as the deployed policy. With `every` loops to a shipment they are up to that many loops old.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random

import numpy as np
import torch

from kit.process import on_cores, one_thread
from kit.runs import Stage
from ref.engine.continuous import ContinuousSampler
from ref.engine.sampler import Sampler
from ref.network import Transformer, load_hf
from ref.rl import improve
from ref.self_summary import Chain, Chaining
from sims.microrepo import Task
from sims.real_time_rl.rewards import Distilling
from sims.real_time_rl.users import HOURS, Reaction, Served, Users
from sims.real_time_rl.world import is_hard, opened, served
from sims.recipe.agent import Language, Rollout, hash_seed, play
from sims.recipe.data import task_stream
from sims.recipe.demonstrations import context
from sims.recipe.learner import Learner
from sims.recipe.settings import Recipe
from sims.statistics import bootstrap

__all__ = ["Found", "Known", "Plan", "Service", "collected", "loops", "said", "ship"]

Found = Sequence[tuple[Rollout, Served, Reaction]]
"""Sessions, what came of them, and what users did about it."""


@dataclass(frozen=True)
class Plan:
    """How long the loop goes on, and how often it ships. Raises ValueError for a number below 1."""

    loops: int = 12
    """Loops of five hours."""
    steps: int = 2
    """Steps of RL in each."""
    sessions: int = 64
    """Sessions for each of those steps."""
    lr: float = 3e-4
    """Learning rate."""
    gate_tasks: int = 40
    """Held-out tasks before a shipment."""
    gate_samples: int = 2
    """Sessions on each."""

    def __post_init__(self):
        for name in ("loops", "steps", "sessions", "gate_tasks", "gate_samples"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True)
class Known:
    """A session with the reaction to it."""

    chain: Chain
    served: Served
    reaction: Reaction
    step: int
    """Steps that the policy has made that served it."""
    loop: int
    """The loop, from 0, at whose end the reaction is known."""


@dataclass(frozen=True)
class Service:
    """Whom a policy serves, and how it is asked."""

    recipe: Recipe
    language: Language
    users: Users

    @property
    def how(self) -> Chaining:
        """Its contexts."""
        return context(self.language, self.recipe)

    def serve(self, sampler: Sampler, tasks: Sequence[Task], samples: int, *seed: object) -> list[tuple[Rollout, Served, Reaction]]:
        """`samples` sessions on each task, and what users did about them."""
        rl, generator = self.recipe.rl, torch.Generator().manual_seed(hash_seed("serve", *seed))
        episodes = play(sampler, self.language, tasks, samples, rl.limits(self.how), rl.max_turns, generator, rl.temperature, opened=opened)
        found = []
        for number, episode in enumerate(episodes):
            seen = served(episode)
            found.append((episode, seen, self.users.react(seen, Random(hash_seed("user", *seed, number)))))
        return found


def collected(waiting: Sequence[Known], loop: int, parts: int) -> tuple[list[list[Known]], list[Known]]:
    """What is known at the end of a loop, in so many parts of equal size, up to one; and what is not known yet."""
    known = [one for one in waiting if one.loop <= loop]
    return [known[part::parts] for part in range(parts)], [one for one in waiting if one.loop > loop]


def ship(candidate: Sequence[float], deployed: Sequence[float]) -> tuple[bool, float]:
    """Whether a candidate is not worse on held-out tasks, and by how much it is better. Each number is a task's share of right sessions."""
    gain = bootstrap(np.subtract(candidate, deployed), level=0.9)
    return gain["high"] >= 0, gain["value"]


def right(found: Found, samples: int) -> list[float]:
    """Of each task, the share of its sessions that did what is wanted."""
    return np.array([seen.right for _, seen, _ in found], dtype=float).reshape(-1, samples).mean(1).tolist()


def loops(
    stage: Stage, plan: Plan, service: Service, distil: Distilling, every: int, start: Path, held_out: Sequence[Task], seed: int
) -> tuple[Sampler, Sampler]:
    """Plays the plan from the policy in the folder `start`, with a shipment after `every` loops, and logs a line after each loop. Returns samplers
    of the policy that has learnt last, shipped or not, and of the deployed one."""
    rl = replace(service.recipe.rl, steps=plan.loops * plan.steps, lr=plan.lr)
    service = replace(service, recipe=replace(service.recipe, rl=rl, seed=seed))
    learner, reference = Learner(service.recipe, load_hf(start), None, 0.0, 0.0), load_hf(start)
    learner.optimizers = [torch.optim.Adam(learner.trunk.masters.parameters(), lr=rl.lr, betas=(0.9, 0.95), fused=True)]
    learner.rates = [[g["lr"] for g in o.param_groups] for o in learner.all_optimizers]
    reference = reference.to(learner.dtype)
    deployed, candidate = (ContinuousSampler(learner.trunk.model, getattr(torch, service.recipe.training.sampler_dtype)) for _ in range(2))
    deployed.load(learner.trunk.model, version=0)
    tasks = iter(task_stream(service.recipe, "rl"))
    gated = right(service.serve(deployed, held_out, plan.gate_samples, seed, "gate", 0), plan.gate_samples)
    waiting: list[Known] = []
    at = 0  # steps that the deployed policy has made
    for loop in range(plan.loops):
        chosen = list(itertools.islice(tasks, plan.steps * plan.sessions))
        found = service.serve(deployed, chosen, 1, seed, "loop", loop)
        waiting += [Known(e.chain, seen, reaction, at, loop + int(reaction.hours / HOURS)) for e, seen, reaction in found]
        parts, waiting = collected(waiting, loop, plan.steps)
        figures = [trained(service.recipe, learner, reference, part, distil, loop * plan.steps + n) for n, part in enumerate(parts)]
        line = said(found) | {name: float(np.mean([one[name] for one in figures])) for name in figures[0]} | {"late": len(waiting)}
        line |= {"shipped": 0.0, "gain": 0.0}
        candidate.load(learner.trunk.model, version=loop + 1)
        if (loop + 1) % every == 0:
            now = right(service.serve(candidate, held_out, plan.gate_samples, seed, "gate", loop + 1), plan.gate_samples)
            better, line["gain"] = ship(now, gated)
            if better:
                deployed.load(learner.trunk.model, version=loop + 1)
                gated, at, line["shipped"] = now, (loop + 1) * plan.steps, 1.0
        stage.log(loop + 1, **line)
        stage.progress(loop + 1, (loop + 1) * len(chosen), right=line["right"], reward=line["reward"])
    return candidate, deployed


@one_thread()
def trained(recipe: Recipe, learner: Learner, reference: Transformer, known: Sequence[Known], distil: Distilling, step: int) -> dict[str, float]:
    """One step of RL on sessions with reactions. Fewer than two that are not thrown away teach nothing."""
    paid = [(one, reward) for one in known if (reward := distil.reward(one.served, one.reaction)) is not None]
    figures = {"reward": 0.0, "age": 0.0, "outside_clip": 0.0, "thrown": 1 - len(paid) / max(1, len(known))}
    if len(paid) < 2:
        return figures
    rl = replace(recipe.rl, prompts=1, rollouts=len(paid))
    rollouts = [Rollout(one.chain, {"reaction": reward}) for one, reward in paid]
    found = improve(rl, learner.model, reference, rollouts, each=partial(on_cores, each=2))
    learner.apply(found, recipe.rl.rate(step))
    ratio = found.gap.exp()
    return figures | {
        "reward": float(np.mean([reward for _, reward in paid])),
        "age": float(np.mean([step - one.step for one, _ in paid])),
        "outside_clip": ((ratio < 1 - rl.clip_low) | (ratio > 1 + rl.clip_high)).double().mean().item(),
    }


def said(found: Found) -> dict[str, float]:
    """Shares of sessions: that did what is wanted, that left an edit, that broke a call, the same on hard tasks, with a follow-up; of those on clear
    tasks, needless questions, and of those on open ones, welcome ones; of edits, those kept. And mean seconds, of all and of those with an edit."""
    seen, reactions = [one for _, one, _ in found], [one for _, _, one in found]

    def mean(some: Sequence[float]) -> float:
        return float(np.mean(some)) if len(some) else 0.0

    return {
        "right": mean([one.right for one in seen]),
        "edited": mean([one.edited for one in seen]),
        "needless": mean([one.asked for one in seen if not one.open]),
        "welcome": mean([one.asked for one in seen if one.open]),
        "broken": mean([one.broken for one in seen]),
        "broken_hard": mean([one.broken for episode, one, _ in found if is_hard(episode)]),
        "kept": mean([one.kept for one in reactions if one.kept is not None]),
        "followed": mean([one.followed for one in reactions]),
        "seconds": mean([one.seconds for one in seen]),
        "edit_seconds": mean([one.seconds for one in seen if one.edited]),
    }
