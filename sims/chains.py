"""Chains of segments in the small world: the scripted agent that shows summaries, and RL on whole chains.

A context that has reached its trigger goes on like this (`ref/self_summary.py`):

    … <|env|> answer <|agent|> <|env|> note <|agent|> summary <|env|>                   the request, on the running context
    <|env|> prompt <|agent|> summary <|env|> <|agent|> turn <|env|> …                   how the next context begins
    instruction <|env|> prompt <|agent|> turn … <|env|> note <|agent|> summary <|env|>  a compaction in a separate call

Demonstrations are played through the same `rollout_chains` as the policy's chains, with a teacher in the sampler's place, so that
what the policy is shown and what it meets are the same tokens.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random

import numpy as np
import torch
from torch import Tensor

from etude.runs import Stage
from ref import cpt, dr_grpo
from ref.model import Transformer
from ref.sampler import Rollout, Sampler
from ref.self_summary import Chain, Chaining, Segment, rollout_chains, spread
from sims.agent import Episode, Language, pad, pay, reference_kl
from sims.corpus import task_stream
from sims.learner import Learner
from sims.microrepo import NoiseConfig, Session, Task, demonstration
from sims.recipe import Recipe
from sims.reinforcement import hash_seed

__all__ = ["Linked", "Memory", "chaining", "improve", "learn", "lessons", "play", "unlimited"]

LONGEST = 256
"""Tokens of a context "without limit": what the recipe's long-context phase trained on."""
INSTRUCTION = "a repo was worked on; note what is needed to fix it"


def chaining(language: Language, trigger: int, room: int, longest_summary: int, join: str = "self") -> Chaining:
    """The chain's settings in this agent's tokens."""
    env, agent = language.env, language.agent
    return Chaining(trigger, longest_summary, room, (env, *language.encode("note"), agent), (agent,),
                    (env, *language.encode(INSTRUCTION)), join=join)  # fmt: skip


def unlimited(how: Chaining) -> Chaining:
    """One context of `LONGEST` tokens, or of as many as `how` allows if those are more."""
    return replace(how, join="none", trigger=max(how.trigger, LONGEST - (how.limit - how.trigger)))


class Linked(Episode):
    """An episode that a chain is played of. After sampling it holds the chain, and as `rollout` its segments one behind the
    other: what it is charged for."""

    chain: Chain

    def take(self, chain: Chain) -> "Linked":
        self.chain = chain
        self.rollout = one_row(chain.segments)
        return self


def one_row(segments: Sequence[Segment]) -> Rollout:
    """Segments as one rollout, but for the experts, which nobody asks of it."""
    columns = {name: torch.cat([getattr(s, name) for s in segments]) for name in ("tokens", "sampled", "logp", "version")}
    nothing = torch.zeros(len(columns["tokens"]) - 1, 0, 1, dtype=torch.int16)
    return Rollout(**columns, experts=nothing, finished=segments[-1].finished)


def play(
    sampler: Sampler, language: Language, tasks: Sequence[Task], samples: int, how: Chaining, max_turns: int,
    generator: torch.Generator, temperature: float = 1.0, batch: int = 256,
) -> list[Linked]:  # fmt: skip
    """`samples` chains of every task, those of a task side by side."""
    episodes = [Linked(language, Session(t, max_turns), g) for g, t in enumerate(tasks) for _ in range(samples)]
    for start in range(0, len(episodes), batch):
        some = episodes[start : start + batch]
        for episode, chain in zip(some, rollout_chains(sampler, some, how, temperature, generator), strict=True):
            episode.take(chain)
    return episodes


# ------------------------------------------------------------------------------------------------- demonstrations


@dataclass(frozen=True)
class Memory:
    """Probabilities with which a scripted summary is not the shortest that will do. All zero: it is."""

    wordy: float = 0.4
    """Also keeps what is not needed: other files, docstrings of helpers, what a passed test has settled."""
    forgetful: float = 0.1
    """Leaves out a file that is needed, which is then read again."""
    longest: int = 42
    """Tokens that a wordy summary may have; else it is the shortest."""


class Lesson(Linked):
    """The scripted agent at work: says a demonstration's turns, and when asked a summary of what it knows."""

    def __init__(self, language: Language, task: Task, turns: Sequence[str], rng: Random, memory: Memory):
        super().__init__(language, Session(task))
        self.task, self.turns, self.rng, self.memory = task, list(turns), rng, memory
        self.known: list[str] = []  # files whose text is in the context
        self.state = ""  # of the body: what the last write or test said

    def turn(self) -> str:
        return self.turns.pop(0)

    def reply(self, turn: list[int]) -> list[int] | None:
        text = self.language.decode(turn)
        answer = super().reply(turn)
        for line in text.split("\n"):
            verb, _, name = line.partition(" ")
            if verb == "read" and name in self.task.files and name not in self.known:
                self.known.append(name)
        if answer is not None and text.startswith(("write ", "test")):
            said = self.language.decode(answer[:-1])
            if not said.startswith("error"):
                self.state = "ok" if said == "ok" else "passed" if said == "passed 3 of 3" else "failed"
        return answer

    def summary(self) -> str:
        """What the context knows in few words; what it leaves out is from now on unknown."""
        wordy, forgetful = (self.rng.random() < p for p in (self.memory.wordy, self.memory.forgetful))
        needed = [] if self.state == "passed" else [n for n in self.known if n == self.task.target or n in self.task.helpers]
        lost = self.rng.choice(needed) if forgetful and needed else None
        for everything in (True, False) if wordy else (False,):
            kept = [name for name in (self.known if everything else needed) if name != lost]
            parts = [self.fact(name, everything) for name in sorted(kept, key=lambda name: name != self.task.target)]
            text = ", ".join([*parts, self.state] if self.state else parts) or "nothing"
            if len(self.language.encode(text)) < self.memory.longest:
                break
        self.known = kept
        if lost:
            self.turns.insert(0, f"read {lost}")
        return text

    def fact(self, name: str, wordy: bool) -> str:
        module = self.task.files[name]
        if name == self.task.target:
            return f"def {name}({', '.join(module.args)}): {module.doc}"
        return f"{name}: {module.doc} is {module.expr}" if wordy else f"{name} is {module.expr}"


class Teacher(Sampler):
    """Stands in the sampler's place without any weights, and lets every lesson speak for itself."""

    def __init__(self, language: Language, request: tuple[int, ...]):
        self.language, self.request = language, list(request)

    def rollout(self, links, max_len: int, temperature: float = 1.0, generator=None) -> list[Rollout]:
        return [self.one(link, max_len) for link in links]

    def one(self, link, max_len: int) -> Rollout:
        lesson: Lesson = link.inner
        tokens, sampled, answer = list(link.prompt), [False] * len(link.prompt), link.prompt
        while answer is not None and len(tokens) < max_len:
            asked = tokens[-len(self.request) :] == self.request
            turn = list(self.language.encode(lesson.summary() if asked else lesson.turn()))
            answer = link.reply(turn)
            tokens += [*turn, link.stop, *(answer or [])]
            sampled += [True] * (len(turn) + 1) + [False] * len(answer or [])
        T = min(len(tokens), max_len)
        ids, own = torch.tensor(tokens[:T]), torch.tensor(sampled[:T])
        finished = answer is None and len(tokens) <= max_len
        return Rollout(ids, own, torch.zeros(T), torch.where(own, 0, -1), torch.zeros(T - 1, 0, 2, dtype=torch.int16), finished)


def lessons(config: Recipe, language: Language, how: Chaining, noise: NoiseConfig, memory: Memory) -> Iterator[Lesson]:
    """Endless demonstrations, played under `how`, their chains finished; those that a limit cut are left out."""
    rng, teacher = Random(f"{config.seed}-scripted-chains-{how.join}"), Teacher(language, how.request)
    for task in task_stream(config, "demonstrations"):
        lesson = Lesson(language, task, demonstration(task, rng, noise), rng, memory)
        (chain,) = rollout_chains(teacher, [lesson], how)
        if chain.finished:
            yield lesson.take(chain)


# --------------------------------------------------------------------------------------------------------------- RL


def learn(
    stage: Stage, config: Recipe, model: Transformer, reference: Transformer, language: Language, how: Chaining, steps: int
) -> Learner:
    """Dr. GRPO as in `sims.reinforcement.learn`, on chains: `steps` Adam steps, each on G·N chains of fresh tasks. Resumes from
    the stage's state. With join="none" a chain is a plain rollout, and this plain RL."""
    r = config.rl
    learner = Learner(config, model, None, 0.0, 0.0)
    learner.optimizers = [torch.optim.Adam(learner.trunk.masters.parameters(), lr=r.lr, betas=(0.9, 0.95), fused=True)]
    learner.rates = [[g["lr"] for g in o.param_groups] for o in learner.all_optimizers]
    reference = reference.to(learner.dtype)
    sampler = Sampler(learner.trunk.model, getattr(torch, config.training.sampler_dtype))
    state = stage.restore()
    first = learner.restore(state) if state else 0
    tasks = itertools.islice(task_stream(config, "rl"), first * r.prompts, None)
    for step in range(first, steps):
        learner.schedule(cpt.wsd(step, steps, min(r.warmup, steps), min(r.decay, steps // 2)))
        sampler.load(learner.trunk.model, version=step)
        generator = torch.Generator().manual_seed(hash_seed(config.seed, stage.name, step))
        chosen = list(itertools.islice(tasks, r.prompts))
        episodes = play(sampler, language, chosen, r.rollouts, how, r.max_turns, generator, r.temperature)
        figures = improve(config, learner, reference, episodes)
        stage.log(step + 1, **figures)
        stage.progress(step + 1, reward=figures["reward"], success=figures["success"])
        if stage.due():
            stage.save(learner.state(step + 1), step + 1)
    return learner


def improve(config: Recipe, learner: Learner, reference: Transformer, episodes: Sequence[Linked]) -> dict[str, float]:
    """One policy-gradient step on finished chains; returns the figures of the batch. Rewards, drift and baseline belong to
    chains, rows are segments, and the budget counts chains."""
    r = config.rl
    chains = [e.chain for e in episodes]
    owner = torch.tensor([c for c, chain in enumerate(chains) for _ in chain.segments])
    segments = [s for chain in chains for s in chain.segments]
    ids, mask, behavior = pad(segments, multiple=32)
    lengths = torch.tensor([len(s.tokens) for s in segments])
    batches = [(rows, -(-int(lengths[rows].max()) // 32) * 32) for rows in lengths.argsort(stable=True).split(32)]
    drift = torch.zeros(len(chains))
    for rows, T in batches:
        drift.index_add_(0, owner[rows], reference_kl(reference, ids[rows, :T], mask[rows, :T], behavior[rows, :T]).float())
    rewards = torch.tensor([pay(e, r.payment)["reward"] for e in episodes]) - r.payment.kl * drift
    advantages = spread(dr_grpo.group_advantages(rewards.view(-1, r.rollouts)).flatten(), chains)
    budget, total = float(len(chains) * r.budget_tokens), 0.0
    for rows, T in batches:
        logp = logprobs(learner.trunk.model, ids[rows, :T])
        loss = dr_grpo.policy_loss(logp, behavior[rows, 1:T], advantages[rows], mask[rows, 1:T], budget=budget,
                                   clip_low=r.clip_low, clip_high=r.clip_high)  # fmt: skip
        loss.backward()
        total += loss.item()
    norm = learner.trunk.step(learner.optimizers)

    def mean(value: Callable[[Linked], float]) -> float:
        return float(np.mean([value(e) for e in episodes]))

    return {
        "reward": rewards.mean().item(), "success": mean(lambda e: e.verdict.tests), "kl": drift.mean().item(), "loss": total,
        "grad_norm": norm.item(), "segments": len(segments) / len(chains), "written": mean(lambda e: e.chain.written),
        "summary_tokens": mean(lambda e: e.chain.summary_tokens), "finished": mean(lambda e: e.chain.finished),
        "turns": mean(lambda e: e.verdict.turns), "invalid_calls": mean(lambda e: e.verdict.invalid_calls),
    }  # fmt: skip


def logprobs(model: Transformer, ids: Tensor, **how) -> Tensor:
    """Log-probabilities [B, T−1] of every token after the first."""
    hidden = model(ids, logits=False, **how).hidden[:, :-1]
    return model.logprob(hidden.flatten(0, 1), ids[:, 1:].flatten()).view(len(ids), -1)
