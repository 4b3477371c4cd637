"""Chains of contexts in the small world, and the scripted agent that demonstrates summaries.

A context that has reached its trigger continues like this (`ref/self_summary.py`):

    … <|env|> answer <|agent|> <|env|> note <|agent|> summary <|env|>                   the request, on the running context
    <|env|> prompt <|agent|> summary <|env|> <|agent|> turn <|env|> …                   how the next context begins
    instruction <|env|> prompt <|agent|> turn … <|env|> note <|agent|> summary <|env|>  a compaction in a separate call

Demonstrations use the same `rollout_chains` as the policy's chains, with a teacher in place of the sampler, so training and sampling use
the same tokens.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Literal

import torch
from torch import Tensor

from ref.engine.sampler import Rollout, Sampler
from ref.self_summary import Chaining, rollout_chains
from sims.microrepo import Environment, NoiseConfig, Session, Task, demonstration
from sims.recipe.agent import Episode, Language, single
from sims.recipe.conversations import batches, kept_rows
from sims.recipe.data import task_stream
from sims.recipe.learner import language_of, shown_rows
from sims.recipe.settings import Memory, Recipe

__all__ = ["Lesson", "chaining", "context", "lessons", "sft_batches", "shown", "taught", "unlimited"]

LONGEST = 256
"""Tokens of a context "without limit": the length of the recipe's long-context phase."""
INSTRUCTION = "a repo was worked on; note what is needed to fix it"


def chaining(
    language: Language,
    trigger: int,
    room: int,
    longest_summary: int,
    max_segments: int = 8,
    join: Literal["self", "separate", "truncate", "none"] = "self",
) -> Chaining:
    """The chain's settings, in this agent's tokens."""
    env, agent = language.env, language.agent
    return Chaining(
        trigger, longest_summary, room, (env, *language.encode("note"), agent), (agent,), (env, *language.encode(INSTRUCTION)), max_segments, join
    )


def context(language: Language, config: Recipe) -> Chaining:
    """The chain settings of the recipe's agent."""
    c = config.context
    if c.join == "none":
        return single(config.rl.max_len)
    return chaining(language, c.trigger, c.room, c.longest_summary, c.max_segments)


def unlimited(how: Chaining) -> Chaining:
    """A single context of `LONGEST` tokens, or as many as `how` allows if that is more."""
    return replace(how, join="none", trigger=max(how.trigger, LONGEST - (how.limit - how.trigger)))


class Lesson(Episode):
    """The scripted agent: plays the turns of a demonstration and, on request, summarises what it knows."""

    def __init__(
        self, language: Language, task: Task, turns: Sequence[str], rng: Random, memory: Memory, opened: Callable[[Task], Environment] = Session
    ):
        super().__init__(language, opened(task))
        self.task, self.turns, self.rng, self.memory = task, list(turns), rng, memory
        self.known: list[str] = []  # files whose text is in the context
        self.state = ""  # the result of the last write or test of the body

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
        """A short summary of the context; facts that it leaves out are unknown from now on."""
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
    """Replaces the sampler, without weights: each lesson provides its own tokens."""

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
            tokens += [*turn, link.stop]
            sampled += [True] * (len(turn) + 1)
            if len(tokens) > max_len:
                break  # full within the turn, which nobody sees, as when a policy is sampled
            answer = link.reply(turn)
            tokens += answer or []
            sampled += [False] * len(answer or [])
        T = min(len(tokens), max_len)
        ids, own = torch.tensor(tokens[:T]), torch.tensor(sampled[:T])
        finished = answer is None and len(tokens) <= max_len
        return Rollout(ids, own, torch.zeros(T), torch.where(own, 0, -1), torch.zeros(T - 1, 0, 2, dtype=torch.int16), finished)


def lessons(config: Recipe, language: Language, how: Chaining, noise: NoiseConfig, memory: Memory) -> Iterator[Lesson]:
    """Endless demonstrations for training, played under `how`."""
    rng = Random(f"{config.seed}-scripted-chains-{how.join}")
    return taught(task_stream(config, "demonstrations"), language, how, noise, memory, rng)


def shown(config: Recipe, language: Language) -> Iterator[Lesson]:
    """The demonstrations of the SFT stage."""
    every = lessons(config, language, context(language, config), config.sft.noise, config.context.memory)
    return itertools.islice(every, config.sft.demonstrations)


def sft_batches(root: Path, config: Recipe, length: int) -> tuple[int, Callable[[int], tuple[Tensor, Tensor, Tensor]]]:
    """Steps per epoch and batches (`sims.recipe.conversations.batches`) of the SFT stage in the run folder `root`: conversations, or demonstrations
    in rows of `length` tokens."""
    s = config.sft
    if s.conversations is not None:
        return batches(kept_rows(root), s.rows, [config.seed])
    pieces = [(segment.tokens, segment.sampled) for lesson in shown(config, language_of(root)) for segment in lesson.chain.segments]
    return shown_rows(pieces, length, s.rows, [config.seed])


def taught(
    tasks: Iterable[Task],
    language: Language,
    how: Chaining,
    noise: NoiseConfig,
    memory: Memory,
    rng: Random,
    turns: Callable[[Task, Random, NoiseConfig], list[str]] = demonstration,
    opened: Callable[[Task], Environment] = Session,
) -> Iterator[Lesson]:
    """Finished chains of the scripted agent on tasks, without those that a limit truncated. `turns`: what it does on a task; `opened` begins an
    episode of one."""
    teacher = Teacher(language, how.request)
    memory = replace(memory, longest=min(memory.longest, how.longest_summary - 1))
    for task in tasks:
        lesson = Lesson(language, task, turns(task, rng, noise), rng, memory, opened)
        (chain,) = rollout_chains(teacher, [lesson], how)
        if chain.finished:
            lesson.take(chain)
            yield lesson
