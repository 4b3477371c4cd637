"""Conversations in tokens, sampled as rollouts are: `talks` have a prompt, a stop token, and answers to turns."""

from collections.abc import Sequence
from functools import partial

import torch

from lessons.talks import Ids, Talk
from ref.engine.sampler import Sampler, Segment
from ref.rollout import Limits, rollout
from ref.self_summary import Chain, Chaining

STOP = 0


def whole(max_len: int) -> Chaining:
    """A single context of at most `max_len` tokens."""
    return (
        Chaining(max_len - 1, longest_summary=1, room=0, join="none") if max_len > 1 else Chaining(1, 1, 0, join="none")
    )


def chains_of(
    sampler: Sampler,
    talks: Sequence,
    chaining: Chaining,
    temperature: float = 1.0,
    generator: torch.Generator | Sequence[torch.Generator] | None = None,
    **limits,
) -> list[Chain]:
    """The chains of some talks, in order."""
    stops = tuple({getattr(talk, "stop", STOP): None for talk in talks}) or (STOP,)
    make = [partial(Talk, talk) for talk in talks]
    return [one.chain for one in rollout(sampler, make, Ids(stops), Limits(chaining, **limits), temperature, generator)]


def contexts_of(
    sampler: Sampler,
    talks: Sequence,
    max_len: int,
    temperature: float = 1.0,
    generator: torch.Generator | Sequence[torch.Generator] | None = None,
) -> list[Segment]:
    """The contexts of some talks, in order, cut off at `max_len` tokens."""
    return [chain.segments[0] for chain in chains_of(sampler, talks, whole(max_len), temperature, generator)]
