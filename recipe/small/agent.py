"""The tiny coding agent: connects a policy over tokens with an environment of texts, and scores a batch of
rollouts.

A context is `<|env|> prompt <|agent|> turn <|env|> answer <|agent|> turn <|env|> …`; the agent ends its turn
with the environment's token. Demonstrations (SFT), sampling and training share this encoding,
so the policy sees the same tokens that it was trained on.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch

from kit.process import map_on_cores
from kit.settings import RunError
from recipe.microrepo import MicroRepo, Session, Task
from recipe.microrepo.environment import TextSession
from ref import cpt
from ref.engine.sampler import Sampler, Segment
from ref.messages import Message
from ref.rollout import Limits, Rollout, hash_seed, sample_rollouts
from ref.self_summary import Chain, Chaining

__all__ = ["Language", "hash_seed", "one_row", "parted", "play", "single"]

SPEAKERS = (cpt.SPECIAL_TOKENS[1:], ("<|im_end|>", "<|im_start|>"), ("<|eot_id|>", "<|start_header_id|>"))
"""Tokens with which the environment and the agent begin to speak: this project's own; for a network from elsewhere,
those that end and begin a turn in the chats of Qwen and SmolLM2, or of Llama 3."""
ENDS = (cpt.SPECIAL_TOKENS[0], "<|end_of_text|>", "</s>")
"""Tokens that end a document."""


class Language:
    """Texts to tokens and back, with the three special tokens by name; a text that spells a special token is encoded as
    plain text. Caches the encodings of repeated texts. A tokenizer that has none of `SPEAKERS` has None in their
    place."""

    end: int
    env: int
    agent: int

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer = cpt.as_text(tokenizer)
        self.speakers = next((pair for pair in SPEAKERS if None not in map(tokenizer.token_to_id, pair)), SPEAKERS[0])
        end = next((name for name in ENDS if tokenizer.token_to_id(name) is not None), ENDS[0])
        self.end, self.env, self.agent = map(tokenizer.token_to_id, (end, *self.speakers))
        self.stop_ids = (self.env,)
        self.encode = lru_cache(100_000)(lambda text: tuple(tokenizer.encode(text).ids))

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=False)

    # `ref.environment.ChatFormat`: <|env|> opens each message of the environment and ends each turn of the agent.

    def encode_opening(self, messages: Sequence[Message]) -> list[int]:
        return [self.env, *self.encode_answer((), messages)]

    def encode_answer(self, history: Sequence[Message], messages: Sequence[Message]) -> list[int]:
        return [*self.encode("\n".join(message.content or "" for message in messages)), self.agent]

    def decode_turn(self, tokens: Sequence[int]) -> Message:
        return Message("assistant", self.decode(tokens))


def one_row(chain: Chain) -> Segment:
    """The segments of a chain as one; if there are several, without their experts."""
    if len(chain.segments) == 1:
        return chain.segments[0]
    names = ("tokens", "sampled", "logp", "version", "summary")
    columns = {name: torch.cat([getattr(s, name) for s in chain.segments]) for name in names}
    no_experts = torch.zeros(len(columns["tokens"]) - 1, 0, 1, dtype=torch.int16)
    return Segment(**columns, experts=no_experts, finished=chain.finished)


def parted(rollout: Segment, stop: int) -> Iterator[tuple[slice, bool]]:
    """Where the pieces of a rollout lie, in order, and whether the policy wrote them. What it wrote is a turn, which
    ends with `stop` unless a limit cut it, also where the next turn follows at once; what it was given between two
    turns is one piece."""
    ids, is_sampled, start = rollout.tokens.tolist(), rollout.sampled.tolist(), 0
    for end in range(1, len(ids) + 1):
        if end == len(ids) or is_sampled[end] != is_sampled[end - 1] or is_sampled[end - 1] and ids[end - 1] == stop:
            yield slice(start, end), is_sampled[start]
            start = end


def single(max_len: int) -> Chaining:
    """A single context, truncated at `max_len` tokens."""
    return Chaining(max_len - 1, longest_summary=1, room=0, join="none")


def play(
    sampler: Sampler,
    language: Language,
    tasks: Sequence[Task],
    samples: int,
    limits: Limits,
    max_turns: int,
    generator: torch.Generator | None,
    temperature: float = 1.0,
    progress: Callable[[int], None] = lambda done: None,
    open_session: Callable[[Task, int], TextSession] = Session,
) -> list[Rollout]:
    """`samples` rollouts of every task on all cores, each a chain of contexts under these limits
    (`ref.rollout.sample_rollouts`). `progress` is called with the number of finished rollouts. `open_session` begins an
    episode of a task with so many turns at most. Raises RunError if an environment fails again and again: a mean over
    the rest would be another one."""
    # A forked process cannot use the GPU of its parent.
    processes = None if all(p.device.type == "cpu" for p in sampler.model.parameters()) else 1

    def map_parts(function: Callable[[Any], Any], parts: Sequence[Any]) -> list:
        totals = [*itertools.accumulate(map(len, parts))]
        return map_on_cores(
            function, parts, lambda count: progress(totals[count - 1]), processes_per_core=2, processes=processes
        )

    def make_environment(task: Task, number: int) -> MicroRepo:
        return MicroRepo(open_session(task, max_turns))

    rollouts = sample_rollouts(
        sampler, make_environment, tasks, samples, language, limits, temperature, generator, map_parts
    )
    if failures := [rollout.failure for rollout in rollouts if rollout.failure]:
        raise RunError(
            f"{len(failures)} of {len(rollouts)} rollouts of an evaluation have no result, the first "
            f"one because {failures[0]}; run it again"
        )
    return rollouts
