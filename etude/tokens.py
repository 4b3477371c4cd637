"""Every token that an agent wrote in a rollout: how likely it was, what was likely beside it, and which experts chose it.

The network reads each context once more, in one pass and with the experts that the sampler recorded, so a token has the probability with which it was
sampled. Two float32 engines differ by rounding alone: tests hold the two within 1e-4. A greedy rollout has no distribution; it is shown at
temperature 1. With draft layers, each token knows whether it would have been a draft (`etude/drafted.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from etude import drafted
from etude.drafted import Drafter, Tally
from etude.play import Agent, episode_of
from etude.played import Played, of_episode
from kit.process import one_thread
from ref.network import Transformer
from ref.rollout import Rollout
from ref.self_summary import Segment
from sims.microrepo import Task
from sims.recipe.agent import Language, parted

__all__ = ["OTHERS", "Token", "Watched", "texts", "turns", "watched"]

OTHERS = 3
"""How many other tokens are named."""


@dataclass(frozen=True)
class Token:
    """A token that the policy wrote."""

    text: str | None
    """What it adds to its turn; None for the one that ends it."""
    probability: float
    others: tuple[tuple[str | None, float], ...]
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
    played: Played
    turns: tuple[tuple[Token, ...], ...]
    """Tokens of each turn and summary that the agent wrote."""

    @property
    def tokens(self) -> tuple[Token, ...]:
        """All of them in order."""
        return tuple(token for turn in self.turns for token in turn)

    @property
    def drafts(self) -> Tally:
        """What drafts would have done."""
        return drafted.tally([token.draft for token in turn] for turn in self.turns)


def watched(agent: Agent, task: Task, temperature: float, seed: int, drafts: bool = False) -> Watched:
    """An agent's rollout, that of `play.episode_of`, with its tokens. With `drafts` they know whether they would have been drafts, if the agent has
    draft layers. Raises RunError as `episode_of`."""
    episode, model = episode_of(agent, task, temperature, seed)
    layers = agent.drafts() if drafts else None
    drafter = None if layers is None else Drafter(layers.to(model.norm.weight.dtype), temperature, seed)
    return Watched(
        agent.folder.name, of_episode(agent.name, episode, agent.language), tuple(turns(model, episode, agent.language, temperature, drafter))
    )


def turns(model: Transformer, rollout: Rollout, language: Language, temperature: float, drafter: Drafter | None = None) -> list[tuple[Token, ...]]:
    """The tokens of each turn and summary that the policy wrote, in order. `model`: the network that sampled the episode."""
    every = enumerate(rollout.chain.segments)
    return [turn for number, segment in every for turn in of_segment(model, segment, language, temperature or 1.0, drafter, number)]


@torch.inference_mode()
def of_segment(
    model: Transformer, segment: Segment, language: Language, temperature: float, drafter: Drafter | None, number: int
) -> Iterator[tuple[Token, ...]]:
    """The turns of one context, the rollout's `number`-th."""
    ids, experts = segment.tokens.tolist(), segment.experts.long()
    with one_thread():
        replayed = [*experts.unbind(1)] if experts.shape[1] else None
        out = model(segment.tokens[None, :-1], experts=replayed)
        assert out.logits is not None
        chances = (out.logits[0].float() / temperature).softmax(-1)
        offers = drafter.chances(model, out.prenorm, segment.tokens[None, :-1]) if drafter else []
    draws = drafter.draws(number) if drafter and drafter.temperature else None
    for where, own in parted(segment, language.env):
        if not own:
            continue
        ended = ids[where.stop - 1] == language.env
        said = [*texts(language, ids[where.start : where.stop - ended]), *[None] * ended]
        places = range(where.start, where.stop)
        drafts = drafted.of_turn(chances, offers, ids, places, draws)
        each = zip(places, said, drafts, strict=True)
        yield tuple(token(chances[at - 1], ids[at], text, experts[at - 1], draft, language) for at, text, draft in each)


def token(chances: torch.Tensor, chosen: int, text: str | None, experts: torch.Tensor, draft: int | None, language: Language) -> Token:
    """A token from the distribution [V] that it was drawn from and the experts [L, K] of its position."""
    best = [one for one in chances.topk(min(OTHERS + 1, len(chances))).indices.tolist() if one != chosen][:OTHERS]
    others = tuple((None if one == language.env else language.decode([one]), float(chances[one])) for one in best)
    return Token(text, float(chances[chosen]), others, tuple(map(tuple, experts.tolist())), draft)


def texts(language: Language, ids: Sequence[int]) -> list[str]:
    """What each token adds to the text of all; together they are that text. A character that several tokens spell belongs to the last of them."""
    whole = language.decode(ids)
    ends = [len(language.decode(ids[:n]).rstrip("\ufffd")) for n in range(1, len(ids))] + [len(whole)] * bool(ids)
    return [whole[start:end] for start, end in itertools.pairwise([0, *ends])]
