"""Chains of contexts in the small world, and the scripted agent that demonstrates summaries.

A context that has reached its trigger continues like this (`ref/self_summary.py`):

    … <|env|> answer <|agent|> <|env|> note <|agent|> summary <|env|>                the request, on the running context
    <|env|> prompt <|agent|> summary <|env|> <|agent|> turn <|env|> …                how the next context begins
    instruction <|env|> prompt <|agent|> turn … <|env|> note <|agent|> summary <|env|>  a compaction in a separate call

Demonstrations are rollouts like the policy's, of a script in place of the sampler (`ref.rollout.script_rollout`), so
training and sampling use the same tokens.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Literal

from torch import Tensor

from recipe.microrepo import MicroRepo, NoiseConfig, Session, Task, demonstration
from recipe.microrepo.environment import TextSession
from recipe.small.agent import Language, single
from recipe.small.conversations import batches, kept_rows
from recipe.small.data import task_stream
from recipe.small.learner import language_of, shown_rows
from recipe.small.settings import Memory, Recipe
from ref.messages import Message
from ref.rollout import Limits, Rollout, script_rollout
from ref.self_summary import Chaining

__all__ = ["Lesson", "make_chaining", "context", "lessons", "sft_batches", "make_sft_rollouts", "taught", "unlimited"]

LONGEST = 256
"""Tokens of a context "without limit": the length of the recipe's long-context phase."""
INSTRUCTION = "a repo was worked on; note what is needed to fix it"


def make_chaining(
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
        trigger,
        longest_summary,
        room,
        (env, *language.encode("note"), agent),
        (agent,),
        (env, *language.encode(INSTRUCTION)),
        max_segments,
        join,
    )


def context(language: Language, config: Recipe) -> Chaining:
    """The chain settings of the recipe's agent."""
    c = config.context
    if c.join == "none":
        return single(config.rl.max_len)
    return make_chaining(language, c.trigger, c.room, c.longest_summary, c.max_segments)


def unlimited(chaining: Chaining) -> Chaining:
    """A single context of `LONGEST` tokens, or as many as `chaining` allows if that is more."""
    return replace(chaining, join="none", trigger=max(chaining.trigger, LONGEST - (chaining.limit - chaining.trigger)))


class Lesson:
    """The scripted agent: plays the turns of a demonstration and, on request, summarises what it knows."""

    def __init__(self, language: Language, task: Task, turns: Sequence[str], rng: Random, memory: Memory):
        self.language, self.task, self.turns, self.rng, self.memory = language, task, list(turns), rng, memory
        self.known_files: list[str] = []  # files whose text is in the context
        self.state = ""  # the result of the last write or test of the body
        self.n_messages = 1  # messages so far, the prompt among them

    def say(self, messages: Sequence[Message], summary: bool) -> Sequence[int]:
        """Its next turn, for `ref.rollout.script_rollout`."""
        self.hear(messages)
        return self.language.encode(self.summary() if summary else self.turns.pop(0))

    def hear(self, messages: Sequence[Message]) -> None:
        """Notes what its last turn led to."""
        for turn, answer in zip(messages[self.n_messages :: 2], messages[self.n_messages + 1 :: 2], strict=True):
            text, answer_text = turn.content or "", answer.content or ""
            for line in text.split("\n"):
                verb, _, name = line.partition(" ")
                if verb == "read" and name in self.task.files and name not in self.known_files:
                    self.known_files.append(name)
            if text.startswith(("write ", "test")) and not answer_text.startswith("error"):
                self.state = "ok" if answer_text == "ok" else "passed" if answer_text == "passed 3 of 3" else "failed"
        self.n_messages = len(messages)

    def summary(self) -> str:
        """A short summary of the context; facts that it leaves out are unknown from now on."""
        wordy, forgetful = (self.rng.random() < p for p in (self.memory.wordy, self.memory.forgetful))
        needed_names = [] if self.state == "passed" else self.needed_files()
        forgotten = self.rng.choice(needed_names) if forgetful and needed_names else None
        for keeps_all in (True, False) if wordy else (False,):
            kept_names = [name for name in (self.known_files if keeps_all else needed_names) if name != forgotten]
            parts = [
                self.fact(name, keeps_all) for name in sorted(kept_names, key=lambda name: name != self.task.target)
            ]
            text = ", ".join([*parts, self.state] if self.state else parts) or "nothing"
            if len(self.language.encode(text)) < self.memory.longest:
                break
        self.known_files = kept_names
        if forgotten:
            self.turns.insert(0, f"read {forgotten}")
        return text

    def needed_files(self) -> list[str]:
        """The files in the context that the task still needs. Of a way of references only the last file says where to
        read on."""
        helpers = [name for name in self.known_files if name in self.task.helpers]
        needed = {self.task.target, *(helpers[-1:] if self.task.kind == "multi-hop" else helpers)}
        return [name for name in self.known_files if name in needed]

    def fact(self, name: str, wordy: bool) -> str:
        module = self.task.files[name]
        if name == self.task.target:
            return f"def {name}({', '.join(module.args)}): {module.doc}"
        if not module.expr:
            return f"{name}: {module.doc}"
        return f"{name}: {module.doc} is {module.expr}" if wordy else f"{name} is {module.expr}"


def lessons(
    config: Recipe, language: Language, chaining: Chaining, noise: NoiseConfig, memory: Memory
) -> Iterator[Rollout]:
    """Endless demonstrations for training, played under `chaining`."""
    rng = Random(f"{config.seed}-scripted-chains-{chaining.join}")
    return taught(task_stream(config, "demonstrations"), language, chaining, noise, memory, rng)


def make_sft_rollouts(config: Recipe, language: Language) -> Iterator[Rollout]:
    """The demonstrations of the SFT stage."""
    rollouts = lessons(config, language, context(language, config), config.sft.noise, config.context.memory)
    return itertools.islice(rollouts, config.sft.demonstrations)


def sft_batches(root: Path, config: Recipe, length: int) -> tuple[int, Callable[[int], tuple[Tensor, Tensor, Tensor]]]:
    """Steps per epoch and batches (`recipe.small.conversations.batches`) of the SFT stage in the run folder `root`:
    conversations, or demonstrations in rows of `length` tokens."""
    s = config.sft
    if s.conversations is not None:
        return batches(kept_rows(root), s.rows, [config.seed])
    pieces = [
        (segment.tokens, segment.sampled)
        for rollout in make_sft_rollouts(config, language_of(root))
        for segment in rollout.chain.segments
    ]
    return shown_rows(pieces, length, s.rows, [config.seed])


def taught(
    tasks: Iterable[Task],
    language: Language,
    chaining: Chaining,
    noise: NoiseConfig,
    memory: Memory,
    rng: Random,
    turns: Callable[[Task, Random, NoiseConfig], list[str]] = demonstration,
    open_session: Callable[[Task], TextSession] = Session,
) -> Iterator[Rollout]:
    """Finished rollouts of the scripted agent on tasks, without those that a limit truncated. `turns`: what it does on
    a task; `open_session` begins an episode of one."""
    memory = replace(memory, longest=min(memory.longest, chaining.longest_summary - 1))
    for task in tasks:
        lesson = Lesson(language, task, turns(task, rng, noise), rng, memory)
        rollout = script_rollout(MicroRepo(open_session(task)), language, Limits(chaining), lesson.say)
        if rollout.chain.finished:
            rollout.task = task
            yield rollout
