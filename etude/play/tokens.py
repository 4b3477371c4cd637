"""Every token that an agent wrote in a rollout: how likely it was, what was likely beside it, and which experts chose
it.

The network reads each context once more, in one pass and with the experts that the sampler recorded, so a token has the
probability with which it was sampled. Two float32 engines differ by rounding alone: tests hold the two within 1e-4. A
greedy rollout has no distribution; it is shown at temperature 1. With draft layers, each token knows whether it would
have been a draft (`etude/play/draft_acceptance.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from etude.play import draft_acceptance
from etude.play.draft_acceptance import Drafter, Tally
from etude.play.play import Agent, episode_of
from etude.play.rollout import RolloutView, of_episode
from kit.process import one_thread
from recipe.microrepo import Task
from recipe.small.agent import Language, parted
from ref.network import Transformer
from ref.rollout import Rollout
from ref.self_summary import Segment

__all__ = ["NUM_ALTERNATIVES", "Token", "Watched", "texts", "turns", "watched"]

NUM_ALTERNATIVES = 3
"""How many other tokens are named."""


@dataclass(frozen=True)
class Token:
    """A token that the policy wrote."""

    text: str | None
    """What it adds to its turn; None for the one that ends it."""
    probability: float
    alternatives: tuple[tuple[str | None, float], ...]
    """The likeliest other tokens and their probabilities, best first."""
    experts: tuple[tuple[int, ...], ...]
    """The experts of each layer at the position that predicted it; empty for a dense network."""
    draft: int | None = None
    """The layer whose draft it was, 0 if a draft was refused for it, None if none was checked."""


@dataclass(frozen=True)
class Watched:
    """A rollout with the tokens of its turns."""

    name: str
    """The checkpoint's, where it stands among others of its run."""
    view: RolloutView
    turns: tuple[tuple[Token, ...], ...]
    """Tokens of each turn and summary that the agent wrote."""

    @property
    def tokens(self) -> tuple[Token, ...]:
        """All of them in order."""
        return tuple(token for turn in self.turns for token in turn)

    @property
    def drafts(self) -> Tally:
        """What drafts would have done."""
        return draft_acceptance.tally([token.draft for token in turn] for turn in self.turns)


def watched(agent: Agent, task: Task, temperature: float, seed: int, drafts: bool = False) -> Watched:
    """An agent's rollout, that of `play.episode_of`, with its tokens. With `drafts` they know whether they would have
    been drafts, if the agent has draft layers. Raises RunError as `episode_of`."""
    episode, model = episode_of(agent, task, temperature, seed)
    layers = agent.drafts() if drafts else None
    drafter = None if layers is None else Drafter(layers.to(model.norm.weight.dtype), temperature, seed)
    return Watched(
        agent.folder.name,
        of_episode(agent.name, episode, agent.language),
        tuple(turns(model, episode, agent.language, temperature, drafter)),
    )


def turns(
    model: Transformer, rollout: Rollout, language: Language, temperature: float, drafter: Drafter | None = None
) -> list[tuple[Token, ...]]:
    """The tokens of each turn and summary that the policy wrote, in order. `model`: the network that sampled the
    episode."""
    numbered_segments = enumerate(rollout.chain.segments)
    return [
        turn
        for number, segment in numbered_segments
        for turn in read_turns(model, segment, language, temperature or 1.0, drafter, number)
    ]


@torch.inference_mode()
def read_turns(
    model: Transformer, segment: Segment, language: Language, temperature: float, drafter: Drafter | None, number: int
) -> Iterator[tuple[Token, ...]]:
    """The turns of one context, the rollout's `number`-th."""
    ids, experts = segment.tokens.tolist(), segment.experts.long()
    with one_thread():
        replayed = [*experts.unbind(1)] if experts.shape[1] else None
        output = model(segment.tokens[None, :-1], experts=replayed)
        assert output.logits is not None
        chances = (output.logits[0].float() / temperature).softmax(-1)
        offers = drafter.chances(model, output.prenorm, segment.tokens[None, :-1]) if drafter else []
    draws = drafter.draws(number) if drafter and drafter.temperature else None
    for span, is_own in parted(segment, language.env):
        if not is_own:
            continue
        has_end = ids[span.stop - 1] == language.env
        token_texts = [*texts(language, ids[span.start : span.stop - has_end]), *[None] * has_end]
        places = range(span.start, span.stop)
        drafts = draft_acceptance.of_turn(chances, offers, ids, places, draws)
        rows = zip(places, token_texts, drafts, strict=True)
        yield tuple(
            make_token(chances[position - 1], ids[position], text, experts[position - 1], draft, language)
            for position, text, draft in rows
        )


def make_token(
    chances: torch.Tensor,
    sampled_index: int,
    text: str | None,
    experts: torch.Tensor,
    draft: int | None,
    language: Language,
) -> Token:
    """A token from the distribution [V] that it was drawn from and the experts [L, K] of its position."""
    best = [
        index
        for index in chances.topk(min(NUM_ALTERNATIVES + 1, len(chances))).indices.tolist()
        if index != sampled_index
    ][:NUM_ALTERNATIVES]
    alternatives = tuple(
        (None if index == language.env else language.decode([index]), float(chances[index])) for index in best
    )
    return Token(text, float(chances[sampled_index]), alternatives, tuple(map(tuple, experts.tolist())), draft)


def texts(language: Language, ids: Sequence[int]) -> list[str]:
    """What each token adds to the text of all; together they are that text. A character that several tokens spell
    belongs to the last of them."""
    text = language.decode(ids)
    ends = [len(language.decode(ids[:n]).rstrip("\ufffd")) for n in range(1, len(ids))] + [len(text)] * bool(ids)
    return [text[start:end] for start, end in itertools.pairwise([0, *ends])]
