"""Global sequence packing: which rank trains on which sequences, and how sequences are packed into rows.

Composer 2 technical report (arXiv:2603.24477v2), §6.1: before each RL step all sequences are repacked across all
data-parallel ranks, taking attention's quadratic cost into account. A step takes as long as its slowest rank. Rollouts
have heavy-tailed lengths, and two ranks with equally many tokens can differ several-fold in work: for attention, 32
rollouts of 1,000 tokens cost 1/32 of one of 32,000.

    cost      c(T) = linear · T + quadratic · T²                                                                    (1)
    balance   sequences in descending order of cost, each to the rank with the least load so far (LPT)              (2)
    rows      a rank's sequences in descending order of length, each into the fullest row with room (best fit)      (3)

How far off can (2) be? Let M be the mean load of R ranks, and c the cost of the last sequence that the most loaded rank
received. At that moment it was the least loaded rank, so its load was at most the mean of what had been assigned, (R·M
− c)/R. Hence

    max load ≤ M + (1 − 1/R) · c                                                                             (4)

and since c is the cheapest of that rank's k sequences, max/M ≤ k / (k − 1 + 1/R). With k = 16 that is never more than
7% over, and in practice far less, because the shortest sequences are assigned last. No assignment can fix a single
sequence that costs more than M: its cost is itself a lower bound. That case is what context parallelism is for.

Where this file departs from the report, which gives no algorithm
1. LPT (Graham, 1969) is our choice: it needs no solver, its bound takes three lines to prove, and once the lengths are
   known, every rank computes the same result without communication.
2. The cost counts only multiply–adds. It ignores how a row's length affects the speed of a kernel.

Run it
    etude run packing --scale small      a second; the same as: python -m ref.packing
    etude run packing --scale full       scaled/packing.py, which training on many ranks calls

Glossary
    symbol    variable         shape    unit
    T         lengths          S        tokens
    c         costs            S        multiply–adds, twice
    R         ranks            scalar   ranks
    –         row, start       S        position of a sequence
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
    """(1): what a sequence costs. Raises ValueError unless both factors are finite and not negative, and one is
    positive."""

    linear: float
    """Per token."""
    quadratic: float
    """Per token squared."""

    def __post_init__(self):
        if not (
            0 <= self.linear < float("inf") and 0 <= self.quadratic < float("inf") and self.linear + self.quadratic > 0
        ):
            raise ValueError(
                f"linear and quadratic must be finite and not negative, and one positive; got "
                f"{self.linear} and {self.quadratic}"
            )

    @classmethod
    def of(cls, config: Config) -> "Cost":
        """Twice the multiply–adds of a forward pass: 2 · active weights per token (without the embedding), plus causal
        attention's two products, 4 · T²/2 · heads · head_dim per layer. A backward pass costs twice that, which does
        not change the balance."""
        tables = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
        weights = config.parameters(active=True) - tables + config.vocab_size * config.hidden_size
        return cls(2.0 * weights, 2.0 * config.num_hidden_layers * config.num_attention_heads * config.head_dim)

    def __call__(self, lengths: Int[Tensor, " S"]) -> Float[Tensor, " S"]:
        """Cost of each sequence, float64."""
        T = lengths.double()
        return self.linear * T + self.quadratic * T.square()  # Eq. 1: c(T)


def balance(costs: Float[Tensor, " S"], ranks: int) -> Int[Tensor, " S"]:
    """(2): the rank of each sequence. Ties go to the earlier sequence and the lower rank. Raises ValueError for ranks <
    1, and for costs that are negative or not finite."""
    expect("costs", costs, "float", "S")
    if ranks < 1:
        raise ValueError(f"ranks must be at least 1; got {ranks}")
    if not bool((costs.isfinite() & (costs >= 0)).all()):
        raise ValueError("costs must be finite and not negative")
    heap, rank_of = [(0.0, rank) for rank in range(ranks)], torch.zeros(len(costs), dtype=torch.long)
    for index in (-costs.double()).argsort(stable=True).tolist():  # Eq. 2: descending cost
        load, rank = heapq.heappop(heap)  # Eq. 2: the least load so far
        rank_of[index] = rank
        heapq.heappush(heap, (load + float(costs[index]), rank))
    return rank_of


def imbalance(costs: Float[Tensor, " S"], rank_of: Int[Tensor, " S"], ranks: int) -> float:
    """The highest load of a rank over the mean load: how much longer the step takes than it has to. 1 if all costs are
    zero."""
    loads = torch.zeros(ranks, dtype=torch.float64).index_add_(0, rank_of, costs.double())
    max_load = loads.max()
    # Not max_load / mean: the mean of tiny loads underflows to zero
    return 1 / float((loads / max_load).mean()) if float(max_load) else 1.0  # max load / M


def rows(lengths: Int[Tensor, " S"], width: int) -> tuple[Int[Tensor, " S"], Int[Tensor, " S"]]:
    """(3): the row and start of each sequence in rows of `width` tokens; no sequence is cut. Raises ValueError for a
    sequence that is empty or longer than a row."""
    expect("lengths", lengths, "int", "S")
    if len(lengths) and not 1 <= int(lengths.min()) <= int(lengths.max()) <= width:
        raise ValueError(
            f"lengths must lie between 1 and the width {width}; got {int(lengths.min())} to {int(lengths.max())}"
        )
    row, start, free_tokens = torch.zeros_like(lengths), torch.zeros_like(lengths), []
    for index in (-lengths).argsort(stable=True).tolist():  # Eq. 3: descending length
        size = int(lengths[index])
        candidates = [(space, candidate) for candidate, space in enumerate(free_tokens) if space >= size]
        if candidates:
            space, row_index = min(candidates)  # Eq. 3: the fullest row with room
        else:
            space, row_index = width, len(free_tokens)
            free_tokens.append(width)
        row[index], start[index], free_tokens[row_index] = row_index, width - space, space - size
    return row, start


def lay(
    sequences: Sequence[Tensor],
    row: Int[Tensor, " S"],
    start: Int[Tensor, " S"],
    shape: tuple[int, int],
    fill: int | float,
) -> Tensor:
    """Lay the per-token data of S sequences, [T, …] each, into rows: [R, width, …], with `fill` as padding. For
    attention's document numbers, lay `torch.full((T,), i)` with fill −1. Raises ValueError if a sequence does not
    fit."""
    out = torch.full((*shape, *sequences[0].shape[1:]), fill, dtype=sequences[0].dtype)
    for sequence, row_index, offset in zip(sequences, row.tolist(), start.tolist(), strict=True):
        if not (0 <= row_index < shape[0] and 0 <= offset <= shape[1] - len(sequence)):
            raise ValueError(
                f"shape must hold every sequence; got {list(shape)} for a sequence of {len(sequence)} "
                f"tokens in row {row_index} at {offset}"
            )
        out[row_index, offset : offset + len(sequence)] = sequence
    return out


@dataclass(frozen=True)
class Demo:
    """Heavy-tailed lengths on many ranks: how much longer a step takes than it has to under each way of assigning
    sequences."""

    ranks: int = 64
    """Data-parallel ranks."""
    per_rank: int = 16
    """Average number of sequences per rank."""
    median: int = 1800
    """Median length in tokens; lengths are lognormal."""
    sigmas: tuple[float, ...] = (0.5, 1.0, 1.5)
    """Standard deviations of the logarithm of the length."""
    longest: int = 262_144
    """Longest length; longer draws are cut to it."""
    draws: int = 20
    """Number of steps to average over."""
    seed: int = 0
    """Seed of the lengths."""

    def __post_init__(self):
        for name in ("ranks", "per_rank", "median", "longest", "draws"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}")


def demo(config: Demo = Demo(), log: Callable[..., None] = lambda *_, **__: None) -> dict[str, float]:
    """Highest load over mean load, averaged over steps, for costs of Qwen3-30B-A3B: dealt in turn, by tokens (the same
    rule without attention's cost), and by cost. Also the cost of the longest sequence over a rank's mean load."""
    cost, metrics = Cost.of(Config.qwen3_30b_a3b()), {}
    rng, S = torch.Generator().manual_seed(config.seed), config.ranks * config.per_rank
    for number, sigma in enumerate(config.sigmas, 1):
        imbalances: dict[str, list[float]] = {"in_turn": [], "by_tokens": [], "by_cost": [], "longest": []}
        for _ in range(config.draws):
            lengths = (config.median * torch.exp(sigma * torch.randn(S, generator=rng))).long().clamp(1, config.longest)
            costs = cost(lengths)
            imbalances["in_turn"].append(imbalance(costs, torch.arange(S) % config.ranks, config.ranks))
            imbalances["by_tokens"].append(imbalance(costs, balance(lengths.double(), config.ranks), config.ranks))
            imbalances["by_cost"].append(imbalance(costs, balance(costs, config.ranks), config.ranks))
            imbalances["longest"].append(float(costs.max() * config.ranks / costs.sum()))
        metrics |= {f"{name}@{sigma:g}": sum(values) / len(values) for name, values in imbalances.items()}
        log(number, len(config.sigmas), **{name: metrics[f"{name}@{sigma:g}"] for name in imbalances})
    return metrics


if __name__ == "__main__":
    print(demo())
