"""A policy over short words, small enough to enumerate, and every group of rollouts that it can produce.

Words of a few letters and an end, or truncated at the length limit. Three prompts: any finished word is right, it must
contain letter 0, it must contain letters 0 and 1. The loss of a group depends only on reward, length and end of each
rollout, so groups are multisets of such outcomes: thousands instead of billions.
"""

import itertools
import math

import torch
from torch import Tensor

from ref.dr_grpo import Variant, family_loss

__all__ = ["PROMPTS", "Groups", "World"]

PROMPTS = 3


class World:
    """Every word [W, T] with its mask, length [W] and end [W]; which prompts it answers [P, W]."""

    def __init__(self, letters: int, length: int):
        rows = []
        for n in range(length + 1):
            rows += [word + (letters,) * (length - n) for word in itertools.product(range(letters), repeat=n)]
        self.words, self.symbols = torch.tensor(rows), letters + 1
        self.mask = (self.words == letters).cumsum(1) <= 1
        self.length, self.finished = self.mask.sum(1), (self.words == letters).any(1)
        has_first, has_second = ((self.words == letter).any(1) for letter in (0, 1))
        self.right = torch.stack([self.finished, self.finished & has_first, self.finished & has_first & has_second])

    def policies(self, number: int, seed: int) -> Tensor:
        """Logits [S, P, T, previous, symbol] of random policies."""
        shape = (number, PROMPTS, self.words.shape[1], self.symbols, self.symbols)
        return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))

    def symbol_logp(self, logits: Tensor, words: Tensor) -> Tensor:
        """log π of each symbol [S·P, W, T] of words [W, T], or [S·P, W, T]; a word starts after an end."""
        previous = torch.cat([torch.full_like(words[..., :1], self.symbols - 1), words[..., :-1]], -1)
        indices = (torch.arange(words.shape[-1]) * self.symbols + previous) * self.symbols + words
        table = logits.log_softmax(-1).flatten(0, 1).flatten(1)
        indices = indices.expand(len(table), *indices.shape[-2:])
        return table.gather(1, indices.flatten(1)).view(indices.shape)

    def logp(self, logits: Tensor) -> Tensor:
        """log π of every word, [S, P, W]."""
        return (self.symbol_logp(logits, self.words) * self.mask).sum(-1).view(len(logits), PROMPTS, -1)

    def reward(self, price: float) -> Tensor:
        """[P, W]: 1 for a right word, minus the price of its tokens."""
        return self.right.double() - price * self.length.double()  # an integer tensor times a price would be float32

    def measure(self, logits: Tensor) -> dict[str, Tensor]:
        """Exact expectations, [S] each, averaged over prompts: reward without price, share truncated, length; length
        given right and given wrong on the two harder prompts (on the easy one, only truncated words are wrong, all of
        one length)."""
        q = self.logp(logits).exp()

        def length(mask: Tensor) -> Tensor:
            joint = (q * mask)[:, 1:]
            return ((joint * self.length).sum(2) / joint.sum(2)).mean(1)

        return {
            "reward": (q * self.right).sum(2).mean(1),
            "cut": (q * ~self.finished).sum(2).mean(1),
            "length": (q * self.length).sum(2).mean(1),
            "right": length(self.right),
            "wrong": length(~self.right),
        }


class Groups:
    """All groups of N rollouts for one prompt, as multisets of outcomes (right, length, finished)."""

    def __init__(self, world: World, prompt: int, size: int, price: float):
        outcome_rows = torch.stack([world.right[prompt], world.length, world.finished], 1)
        self.outcomes, self.outcome_of = torch.unique(outcome_rows.long(), dim=0, return_inverse=True)
        self.limit, self.size, number = world.words.shape[1], size, len(self.outcomes)
        self.members = torch.tensor(list(itertools.combinations_with_replacement(range(number), size)))
        self.counts = torch.zeros(len(self.members), number, dtype=torch.float64)
        self.counts.scatter_add_(1, self.members, torch.ones_like(self.members, dtype=torch.float64))
        self.log_orders = math.lgamma(size + 1) - torch.lgamma(self.counts + 1).sum(1)
        right, self.length, finished = self.outcomes.T
        self.rewards, self.finished = (
            (right.double() - price * self.length.double())[self.members],
            finished.bool()[self.members],
        )
        self.all_right = right.bool()[self.members].all(1)

    def chances(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """From probabilities of words [S, W]: those of outcomes [S, K] and of groups [S, M] (multinomial)."""
        outcomes = torch.zeros(len(q), len(self.outcomes), dtype=torch.float64).index_add_(1, self.outcome_of, q)
        return outcomes, (self.log_orders + outcomes.log() @ self.counts.T).exp()

    def pushes(self, variant: Variant, by_tokens: bool = False) -> Tensor:
        """[M, K]: what a variant's loss adds to the log-probability of each outcome in each group: the negative
        gradient of `family_loss` at ratio one. It does not depend on the policy."""
        mask = (torch.arange(self.limit) < self.length[self.members][..., None]).double()
        if by_tokens:
            mask = mask * (self.size / mask.sum((1, 2), keepdim=True))
        logp = torch.zeros(mask.flatten(0, 1).shape, dtype=torch.float64, requires_grad=True)
        options = {"budget": self.size, "finished": self.finished.flatten()}
        loss = family_loss(variant, logp, logp.detach(), self.rewards, mask.flatten(0, 1), **options)
        (gradient,) = torch.autograd.grad(
            -loss, logp
        )  # the same at each token of a rollout, and every rollout has a first token
        return torch.zeros_like(self.counts).scatter_add_(1, self.members, gradient[:, 0].view_as(self.members))
