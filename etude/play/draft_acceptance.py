"""Which of the tokens that an agent wrote would have come from a draft, had its draft layers drafted (speculative
decoding, arXiv:2211.17192).

A pass of the network checks as many drafts as there are layers, keeps those up to the first that is refused, and writes
one token of its own. A turn opens with a pass that has no drafts to check, as in `ref/engine/decoder.py`.

Here the tokens are given, so they are looked back upon. With p of the network and q of a draft layer, a draft is x with
probability q(x) and is kept with probability min(1, p(x)/q(x)). Tokens that come out x are kept drafts in min(p(x),
q(x)) of cases, and x in p(x), hence

    P(kept draft | token x) = min(1, q(x)/p(x))

A random number decides. A greedy draft is the layer's likeliest token, and is kept if that is what the agent wrote. As
long as drafts are kept, they are the tokens of the rollout, so one pass of all layers over those gives every q that is
needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random

from jaxtyping import Float
from torch import Tensor

from ref.mtp import MTP
from ref.network import Transformer

__all__ = ["Drafter", "Tally", "of_turn", "tally"]


@dataclass(frozen=True)
class Drafter:
    """Draft layers with the random numbers that decide."""

    mtp: MTP
    temperature: float
    """That of the rollout; 0 is greedy."""
    seed: int

    def chances(self, model: Transformer, prenorm: Float[Tensor, "1 T D"], ids: Tensor) -> list[Float[Tensor, "T V"]]:
        """q of each layer k at every position i, for token i+k+1; for a greedy rollout, at temperature 1. `ids`: tokens
        [1, T]."""
        hidden_states = self.mtp(prenorm, model.embed_tokens(ids))
        return [(model.head(hidden[0]).float() / (self.temperature or 1.0)).softmax(-1) for hidden in hidden_states]

    def draws(self, context: int) -> Random:
        """Random numbers for a context of the rollout."""
        return Random(f"{self.seed}-{context}-drafts")


@dataclass(frozen=True)
class Tally:
    """What drafts would have done for a rollout."""

    tokens: int
    checked: int
    """Drafts that were compared with what the agent wrote; those behind a refused one never are."""
    accepted: int
    passes: int
    """Passes of the network that gave the tokens; without drafts each gives one."""


def of_turn(
    p: Float[Tensor, "T V"],
    q: Sequence[Float[Tensor, "T V"]],
    ids: Sequence[int],
    positions: range,
    draws: Random | None,
) -> list[int | None]:
    """For each token of a turn: the layer whose draft it was, 0 if a draft was refused for it, None if none was
    checked.

    p: the network's distributions, row i for token i+1. q: those of the layers, layer k in row i for token i+k+1.
    `positions`: the turn's places in `ids`. `draws` decides; None is greedy."""
    draft_layers: list[int | None] = [None]
    while len(draft_layers) < len(positions):
        first = positions.start + len(draft_layers)  # the network has read up to first − 2, and knows one token more
        for layer, place in zip(range(1, len(q) + 1), range(first, positions.stop)):
            chances, token = q[layer - 1][first - 2], ids[place]
            if draws is None:
                is_accepted = int(chances.argmax()) == token
            else:
                is_accepted = draws.random() * float(p[place - 1][token]) < float(chances[token])
            draft_layers.append(layer if is_accepted else 0)
            if not is_accepted:
                break
        else:
            draft_layers += [None] * (len(draft_layers) < len(positions))
    return draft_layers


def tally(turns: Iterable[Sequence[int | None]]) -> Tally:
    """Counts over the turns of a rollout. A turn that ends with a kept draft took a pass that wrote no token of its
    own."""
    filled_turns = [[*turn] for turn in turns if turn]
    flat = [layer for turn in filled_turns for layer in turn]
    passes = sum(not layer for layer in flat) + sum(bool(turn[-1]) for turn in filled_turns)
    return Tally(len(flat), len(flat) - flat.count(None), sum(map(bool, flat)), passes)
