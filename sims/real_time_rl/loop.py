"""The loop: a policy is served, users react, their reactions become rewards, and what has learnt from them is looked at
and shipped.

    serve     each user asks once, and the deployed policy answers; every token keeps its log-prob and its experts
    collect   the reactions that are known when the loop ends, with those that came too late for earlier loops
    distil    a reaction becomes a reward, or the session is thrown away                                `rewards.py`
    train     a few steps on them; the importance ratio knows how far the policy has gone since then    `ref/rl.py`
    look      held-out tasks, by the policy that may be shipped and by the deployed one
    gate      it is shipped unless it is worse: unless the 90% bootstrap interval of its gain, over tasks, lies below
              zero
    ship      it is deployed. What is not shipped goes on learning

Where this differs from RL in an environment
1. A user asks once. There is no group for a task, so a reward is compared with the mean of its batch (one group of all
   sessions). On a hard task honest work is therefore below the mean, and on an easy one above it.
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

from kit.process import map_on_cores, one_thread
from kit.runs import Stage
from kit.statistics import bootstrap
from recipe.microrepo import Task
from recipe.small.agent import Language, Rollout, hash_seed, play
from recipe.small.data import task_stream
from recipe.small.demonstrations import context
from recipe.small.learner import Learner
from recipe.small.settings import Recipe
from ref.engine.continuous import ContinuousSampler
from ref.engine.sampler import Sampler
from ref.network import Transformer, load_hf
from ref.rl import improve
from ref.self_summary import Chain, Chaining
from sims.real_time_rl.rewards import Distilling
from sims.real_time_rl.users import HOURS, Reaction, Served, Users
from sims.real_time_rl.world import is_hard, open_session, served

__all__ = ["Sessions", "SessionRecord", "Plan", "Service", "collected", "loops", "compute_session_metrics", "ship"]

Sessions = Sequence[tuple[Rollout, Served, Reaction]]
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
class SessionRecord:
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
    def chaining(self) -> Chaining:
        """Its contexts."""
        return context(self.language, self.recipe)

    def serve(
        self, sampler: Sampler, tasks: Sequence[Task], samples: int, *seed: object
    ) -> list[tuple[Rollout, Served, Reaction]]:
        """`samples` sessions on each task, and what users did about them."""
        rl, generator = self.recipe.rl, torch.Generator().manual_seed(hash_seed("serve", *seed))
        episodes = play(
            sampler,
            self.language,
            tasks,
            samples,
            rl.limits(self.chaining),
            rl.max_turns,
            generator,
            rl.temperature,
            open_session=open_session,
        )
        sessions = []
        for number, episode in enumerate(episodes):
            outcome = served(episode)
            sessions.append((episode, outcome, self.users.react(outcome, Random(hash_seed("user", *seed, number)))))
        return sessions


def collected(
    waiting: Sequence[SessionRecord], loop: int, parts: int
) -> tuple[list[list[SessionRecord]], list[SessionRecord]]:
    """What is known at the end of a loop, in so many parts of equal size, up to one; and what is not known yet."""
    known_sessions = [session for session in waiting if session.loop <= loop]
    return (
        [known_sessions[part::parts] for part in range(parts)],
        [session for session in waiting if session.loop > loop],
    )


def ship(candidate: Sequence[float], deployed: Sequence[float]) -> tuple[bool, float]:
    """Whether a candidate is not worse on held-out tasks, and by how much it is better. Each number is a task's share
    of right sessions."""
    gain = bootstrap(np.subtract(candidate, deployed), level=0.9)
    return gain["high"] >= 0, gain["value"]


def compute_right_shares(sessions: Sessions, samples: int) -> list[float]:
    """Of each task, the share of its sessions that did what is wanted."""
    return np.array([outcome.right for _, outcome, _ in sessions], dtype=float).reshape(-1, samples).mean(1).tolist()


def loops(
    stage: Stage,
    plan: Plan,
    service: Service,
    distil: Distilling,
    every: int,
    start: Path,
    held_out: Sequence[Task],
    seed: int,
) -> tuple[Sampler, Sampler]:
    """Plays the plan from the policy in the folder `start`, with a shipment after `every` loops, and logs a line after
    each loop. Returns samplers of the policy that has learnt last, shipped or not, and of the deployed one."""
    rl = replace(service.recipe.rl, steps=plan.loops * plan.steps, lr=plan.lr)
    service = replace(service, recipe=replace(service.recipe, rl=rl, seed=seed))
    learner, reference = Learner(service.recipe, load_hf(start), None, 0.0, 0.0), load_hf(start)
    learner.optimizers = [torch.optim.Adam(learner.trunk.masters.parameters(), lr=rl.lr, betas=(0.9, 0.95), fused=True)]
    learner.rates = [[g["lr"] for g in o.param_groups] for o in learner.all_optimizers]
    reference = reference.to(learner.dtype)
    deployed_sampler, candidate_sampler = (
        ContinuousSampler(learner.trunk.model, getattr(torch, service.recipe.training.sampler_dtype)) for _ in range(2)
    )
    deployed_sampler.load(learner.trunk.model, version=0)
    tasks = iter(task_stream(service.recipe, "rl"))
    deployed_shares = compute_right_shares(
        service.serve(deployed_sampler, held_out, plan.gate_samples, seed, "gate", 0), plan.gate_samples
    )
    pending_sessions: list[SessionRecord] = []
    deployed_steps = 0  # steps that the deployed policy has made
    for loop in range(plan.loops):
        loop_tasks = list(itertools.islice(tasks, plan.steps * plan.sessions))
        sessions = service.serve(deployed_sampler, loop_tasks, 1, seed, "loop", loop)
        pending_sessions += [
            SessionRecord(e.chain, outcome, reaction, deployed_steps, loop + int(reaction.hours / HOURS))
            for e, outcome, reaction in sessions
        ]
        parts, pending_sessions = collected(pending_sessions, loop, plan.steps)
        step_metrics = [
            train_step(service.recipe, learner, reference, part, distil, loop * plan.steps + n)
            for n, part in enumerate(parts)
        ]
        line = (
            compute_session_metrics(sessions)
            | {name: float(np.mean([metrics[name] for metrics in step_metrics])) for name in step_metrics[0]}
            | {"late": len(pending_sessions)}
        )
        line |= {"shipped": 0.0, "gain": 0.0}
        candidate_sampler.load(learner.trunk.model, version=loop + 1)
        if (loop + 1) % every == 0:
            candidate_shares = compute_right_shares(
                service.serve(candidate_sampler, held_out, plan.gate_samples, seed, "gate", loop + 1), plan.gate_samples
            )
            is_better, line["gain"] = ship(candidate_shares, deployed_shares)
            if is_better:
                deployed_sampler.load(learner.trunk.model, version=loop + 1)
                deployed_shares, deployed_steps, line["shipped"] = candidate_shares, (loop + 1) * plan.steps, 1.0
        stage.log(loop + 1, **line)
        stage.progress(loop + 1, (loop + 1) * len(loop_tasks), right=line["right"], reward=line["reward"])
    return candidate_sampler, deployed_sampler


@one_thread()
def train_step(
    recipe: Recipe,
    learner: Learner,
    reference: Transformer,
    sessions: Sequence[SessionRecord],
    distil: Distilling,
    step: int,
) -> dict[str, float]:
    """One step of RL on sessions with reactions. Fewer than two that are not thrown away teach nothing."""
    rewarded_sessions = [
        (session, reward)
        for session in sessions
        if (reward := distil.reward(session.served, session.reaction)) is not None
    ]
    metrics = {
        "reward": 0.0,
        "age": 0.0,
        "outside_clip": 0.0,
        "thrown": 1 - len(rewarded_sessions) / max(1, len(sessions)),
    }
    if len(rewarded_sessions) < 2:
        return metrics
    rl = replace(recipe.rl, prompts=1, rollouts=len(rewarded_sessions))
    rollouts = [Rollout(session.chain, {"reaction": reward}) for session, reward in rewarded_sessions]
    step_result = improve(rl, learner.model, reference, rollouts, map_fn=partial(map_on_cores, processes_per_core=2))
    learner.apply(step_result, recipe.rl.rate(step))
    ratio, clip = step_result.gap.exp(), rl.objective
    return metrics | {
        "reward": float(np.mean([reward for _, reward in rewarded_sessions])),
        "age": float(np.mean([step - session.step for session, _ in rewarded_sessions])),
        "outside_clip": ((ratio < 1 - clip.clip_low) | (ratio > 1 + clip.clip_high)).double().mean().item(),
    }


def compute_session_metrics(sessions: Sessions) -> dict[str, float]:
    """Shares of sessions: that did what is wanted, that left an edit, that broke a call, the same on hard tasks, with a
    follow-up; of those on clear tasks, needless questions, and of those on open ones, welcome ones; of edits, those
    kept. And mean seconds, of all and of those with an edit."""
    outcomes, reactions = [outcome for _, outcome, _ in sessions], [reaction for _, _, reaction in sessions]

    def mean(values: Sequence[float]) -> float:
        return float(np.mean(values)) if len(values) else 0.0

    return {
        "right": mean([outcome.right for outcome in outcomes]),
        "edited": mean([outcome.edited for outcome in outcomes]),
        "needless": mean([outcome.has_question for outcome in outcomes if not outcome.open]),
        "welcome": mean([outcome.has_question for outcome in outcomes if outcome.open]),
        "broken": mean([outcome.has_broken_call for outcome in outcomes]),
        "broken_hard": mean([outcome.has_broken_call for episode, outcome, _ in sessions if is_hard(episode)]),
        "kept": mean([reaction.is_kept for reaction in reactions if reaction.is_kept is not None]),
        "followed": mean([reaction.followed for reaction in reactions]),
        "seconds": mean([outcome.seconds for outcome in outcomes]),
        "edit_seconds": mean([outcome.seconds for outcome in outcomes if outcome.edited]),
    }
