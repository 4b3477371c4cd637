"""Global sequence packing: who trains on which sequences, and how they lie in rows.

Composer 2 technical report (arXiv:2603.24477v2), §6.1: before each RL step all sequences are packed anew, over all data-parallel
ranks, with attention's quadratic cost counted. A step lasts as long as its slowest rank. Rollouts have heavy-tailed lengths, and two
ranks with as many tokens can differ several times in work: 32 rollouts of 1,000 tokens cost attention a 32nd of one of 32,000.

    cost      c(T) = linear · T + quadratic · T²                                                            (1)
    balance   sequences in falling order of cost, each to the rank that has least so far (LPT)               (2)
    rows      a rank's sequences in falling order of length, each in the fullest row with room (best fit)    (3)

How far (2) can be off. Let M be the mean load of R ranks, and c the cost of the last sequence that the fullest rank got. When it
got it, it was the rank with least, so it had at most the mean of what had been dealt, (R·M − c)/R. Hence

    max load ≤ M + (1 − 1/R) · c                                                                             (4)

and since c is the cheapest of that rank's k sequences, max/M ≤ k / (k − 1 + 1/R): with k = 16 never more than 7% over, and in practice
far less, for the last to be dealt are the short ones. What no dealing can mend is one sequence that costs more than M: it is the
bound itself, and is what context parallelism is for.

Where this file departs from the report, which gives no algorithm
1. LPT (Graham, 1969) is our choice: it needs no solver, its bound is three lines, and it is the same on every rank without a word
   between them once the lengths are known.
2. The cost is of multiply–adds alone: what a row's length does to a kernel's speed is left out.

Run it
    etude run packing --scale small      a second; the same as: python -m ref.packing
    etude run packing --scale full       scaled/packing.py is what a training on many ranks calls

Glossary
    symbol    variable         shape    unit
    T         lengths          S        tokens
    c         costs            S        multiply–adds, twice
    R         ranks            scalar   ranks
    –         row, start       S        where a sequence lies
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ref.checks import expect
from ref.network import Config

__all__ = ["Cost", "balance", "imbalance", "lay", "rows"]


@dataclass(frozen=True)
class Cost:
    """(1): what a sequence costs. ValueError unless both are finite, not negative, and not both zero."""

    linear: float
    """Per token."""
    quadratic: float
    """Per token squared."""

    def __post_init__(self):
        if not (0 <= self.linear < float("inf") and 0 <= self.quadratic < float("inf") and self.linear + self.quadratic > 0):
            raise ValueError(f"linear and quadratic must be finite, not negative, one positive; got {self.linear}, {self.quadratic}")

    @classmethod
    def of(cls, config: Config) -> "Cost":
        """Multiply–adds of a forward pass, twice: 2 · active weights a token (embedding left out), and causal attention's two products,
        4 · T²/2 · heads · head_dim a layer. A backward pass is twice that, and changes nothing between ranks."""
        tables = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
        weights = config.parameters(active=True) - tables + config.vocab_size * config.hidden_size
        return cls(2.0 * weights, 2.0 * config.num_hidden_layers * config.num_attention_heads * config.head_dim)

    def __call__(self, lengths: Int[Tensor, " S"]) -> Float[Tensor, " S"]:
        """Cost of each sequence, float64."""
        T = lengths.double()
        return self.linear * T + self.quadratic * T.square()


def balance(costs: Float[Tensor, " S"], ranks: int) -> Int[Tensor, " S"]:
    """(2): the rank of each sequence. Ties go to the earlier sequence and the lower rank. ValueError for ranks < 1, and for costs that
    are negative or not finite."""
    expect("costs", costs, "float", "S")
    if ranks < 1:
        raise ValueError(f"ranks must be at least 1, got {ranks}")
    if not bool((costs.isfinite() & (costs >= 0)).all()):
        raise ValueError("costs must be finite and not negative")
    heap, rank_of = [(0.0, rank) for rank in range(ranks)], torch.zeros(len(costs), dtype=torch.long)
    for i in (-costs.double()).argsort(stable=True).tolist():
        load, rank = heapq.heappop(heap)
        rank_of[i] = rank
        heapq.heappush(heap, (load + float(costs[i]), rank))
    return rank_of


def imbalance(costs: Float[Tensor, " S"], rank_of: Int[Tensor, " S"], ranks: int) -> float:
    """The fullest rank's load over the mean load: by how much the step is longer than it need be. 1 where nothing costs anything."""
    loads = torch.zeros(ranks, dtype=torch.float64).index_add_(0, rank_of, costs.double())
    most = loads.max()
    return 1 / float((loads / most).mean()) if float(most) else 1.0  # not most / mean: the mean of the least loads is zero


def rows(lengths: Int[Tensor, " S"], width: int) -> tuple[Int[Tensor, " S"], Int[Tensor, " S"]]:
    """(3): row and first place of each sequence in rows of `width` tokens; none is cut. ValueError for a sequence that is empty or
    longer than a row."""
    expect("lengths", lengths, "int", "S")
    if len(lengths) and not 1 <= int(lengths.min()) <= int(lengths.max()) <= width:
        raise ValueError(f"lengths must lie between 1 and the width {width}, got {int(lengths.min())} to {int(lengths.max())}")
    row, start, room = torch.zeros_like(lengths), torch.zeros_like(lengths), []
    for i in (-lengths).argsort(stable=True).tolist():
        size = int(lengths[i])
        fits = [(left, r) for r, left in enumerate(room) if left >= size]
        if fits:
            left, at = min(fits)
        else:
            left, at = width, len(room)
            room.append(width)
        row[i], start[i], room[at] = at, width - left, left - size
    return row, start


def lay(sequences: Sequence[Tensor], row: Int[Tensor, " S"], start: Int[Tensor, " S"], shape: tuple[int, int], fill: int | float) -> Tensor:
    """Per-token data of S sequences, [T, …] each, in rows: [R, width, …], `fill` where nothing lies. For the document numbers of
    attention lay `torch.full((T,), i)` with fill −1. ValueError where sequences reach outside."""
    out = torch.full((*shape, *sequences[0].shape[1:]), fill, dtype=sequences[0].dtype)
    for x, r, at in zip(sequences, row.tolist(), start.tolist(), strict=True):
        if not (0 <= r < shape[0] and 0 <= at <= shape[1] - len(x)):
            raise ValueError(f"shape must hold every sequence, got {list(shape)} for one of {len(x)} in row {r} at {at}")
        out[r, at : at + len(x)] = x
    return out


@dataclass(frozen=True)
class Demo:
    """Heavy-tailed lengths on many ranks: how much longer a step is than it need be, by who deals and how."""

    ranks: int = 64
    """Data-parallel ranks."""
    per_rank: int = 16
    """Sequences of a rank, on average."""
    median: int = 1800
    """Median length, tokens; lengths are lognormal."""
    sigmas: tuple[float, ...] = (0.5, 1.0, 1.5)
    """Standard deviations of the logarithm of the length."""
    longest: int = 262_144
    """Longest length, where others are cut."""
    draws: int = 20
    """Steps that are dealt."""
    seed: int = 0
    """Seed of the lengths."""

    def __post_init__(self):
        for name in ("ranks", "per_rank", "median", "longest", "draws"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


def demo(config: Demo = Demo(), log: Callable[..., None] = lambda *_, **__: None) -> dict[str, float]:
    """Fullest rank over mean, averaged over steps, for costs of Qwen3-30B-A3B: dealt in turn, by tokens (the same rule, attention not
    counted), and by cost; beside them the share of one sequence, the longest, in a rank's mean load."""
    cost, figures = Cost.of(Config.qwen3_30b_a3b()), {}
    draw, S = torch.Generator().manual_seed(config.seed), config.ranks * config.per_rank
    for number, sigma in enumerate(config.sigmas, 1):
        found: dict[str, list[float]] = {"in_turn": [], "by_tokens": [], "by_cost": [], "longest": []}
        for _ in range(config.draws):
            lengths = (config.median * torch.exp(sigma * torch.randn(S, generator=draw))).long().clamp(1, config.longest)
            costs = cost(lengths)
            found["in_turn"].append(imbalance(costs, torch.arange(S) % config.ranks, config.ranks))
            found["by_tokens"].append(imbalance(costs, balance(lengths.double(), config.ranks), config.ranks))
            found["by_cost"].append(imbalance(costs, balance(costs, config.ranks), config.ranks))
            found["longest"].append(float(costs.max() * config.ranks / costs.sum()))
        figures |= {f"{name}@{sigma:g}": sum(values) / len(values) for name, values in found.items()}
        log(number, len(config.sigmas), **{name: figures[f"{name}@{sigma:g}"] for name in found})
    return figures


if __name__ == "__main__":
    print(demo())
