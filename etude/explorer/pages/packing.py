"""Packing: the assignment of sequences to ranks, their places in rows, and the attention mask of a row."""

from collections.abc import Callable
from functools import lru_cache

import streamlit as st
import torch
from torch import Tensor

from etude.explorer.charts.chart import Axis, Look, chart, drawing, lines, points, rule
from etude.explorer.page import Page, folded, table
from etude.explorer.pages.packed_rows import mask, mask_drawn, pairs, place_sequences, rows_drawn, seen_by_strangers
from etude.explorer.spans import exact, metrics
from ref import packing
from ref.network import Config

COUNTS = (4, 8, 16, 32, 64, 128, 256, 512, 1024)
RANKS = (1, 2, 4, 8, 16, 32, 64)
WIDTHS = (2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072, 262_144)
SIGMAS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0)
COSTS: dict[str, Callable[[], packing.Cost]] = {
    "Qwen3-30B-A3B": lambda: packing.Cost.of(Config.qwen3_30b_a3b()),
    "tokens alone": lambda: packing.Cost(1.0, 0.0),
    "attention alone": lambda: packing.Cost(0.0, 1.0),
}
"""What a sequence costs, by the name of the control's option."""
LOOKS = {"in turn": Look("orange", ":", "^"), "by tokens": Look("blue", "--", "s"), "by cost": Look("green", "-", "o")}


@lru_cache(64)
def sample_lengths(count: int, median: int, sigma: float, width: int, seed: int) -> Tensor:
    """Lognormal lengths [count] in tokens, from 1 to a row's width, as in the demonstration of `ref/packing.py`."""
    generator = torch.Generator().manual_seed(seed)
    return (median * torch.exp(sigma * torch.randn(count, generator=generator))).long().clamp(1, width)


INITIAL_RANKS = 16
"""The ranks with which the page begins: enough to tell the ways of dealing apart, and few enough for the longest
sequence."""
INITIAL_ROW = 2
"""The row with which the page begins: the first of the first rank with three sequences."""


def assign_ranks(lengths: Tensor, costs: Tensor, ranks: int) -> dict[str, Tensor]:
    """The rank of each sequence under each way of dealing: in turn, evenly by tokens, and evenly by cost."""
    return {
        "in turn": torch.arange(len(lengths)) % ranks,
        "by tokens": packing.balance(lengths.double(), ranks),
        "by cost": packing.balance(costs, ranks),
    }


def compute_loads(costs: Tensor, rank_of: Tensor, ranks: int) -> Tensor:
    """What the sequences of each rank cost together, [ranks]."""
    return torch.zeros(ranks, dtype=torch.float64).index_add_(0, rank_of, costs)


def compute_bound(costs: Tensor, rank_of: Tensor, ranks: int) -> float:
    """Equation (4) of `ref/packing.py` for sequences dealt by cost: what the fullest rank has at most, over the mean
    load."""
    rank_loads = compute_loads(costs, rank_of, ranks)
    last = costs[rank_of == rank_loads.argmax()].min()
    return float((rank_loads.mean() + (1 - 1 / ranks) * last) / rank_loads.mean())


def ways(lengths: Tensor, cost: packing.Cost, ranks: int) -> list[dict]:
    """One row for each way of dealing. Loads are over their mean; a step takes as long as its slowest rank."""
    costs, rows = cost(lengths), []
    for name, rank_of in assign_ranks(lengths, costs, ranks).items():
        rank_loads = compute_loads(costs, rank_of, ranks)
        rows.append(
            {
                "dealt": name,
                "slowest rank": packing.imbalance(costs, rank_of, ranks),
                "at most, proven": compute_bound(costs, rank_of, ranks) if name == "by cost" else None,
                "fastest rank": float(rank_loads.min() / rank_loads.mean()),
                "waiting": 1 - 1 / packing.imbalance(costs, rank_of, ranks),
                "tokens, slowest over mean": packing.imbalance(lengths.double(), rank_of, ranks),
            }
        )
    return rows


def bars(lengths: Tensor, cost: packing.Cost, ranks: int) -> list[dict]:
    """One row for each rank and way of dealing, ranks ordered by their load."""
    costs, rows = cost(lengths), []
    for name, rank_of in assign_ranks(lengths, costs, ranks).items():
        rank_loads = compute_loads(costs, rank_of, ranks)
        tokens, count = compute_loads(lengths.double(), rank_of, ranks), rank_of.bincount(minlength=ranks)
        for place, rank in enumerate(rank_loads.argsort(descending=True, stable=True).tolist(), 1):
            share = float(rank_loads[rank] / rank_loads.mean())
            rows.append(
                {
                    "dealt": name,
                    "place": place,
                    "rank": rank,
                    "load": share,
                    "tokens": int(tokens[rank]),
                    "sequences": int(count[rank]),
                }
            )
    return rows


def draw_controls() -> tuple[Tensor, packing.Cost, int, int]:
    """Draws the controls. Lengths, cost, ranks and a row's width."""
    count_column, sigma_column, median_column = st.columns(3)
    count = count_column.select_slider("Sequences", COUNTS, 256, key="sequences", bind="query-params")
    sigma = sigma_column.select_slider(
        "Spread: σ of the logarithm of the length", SIGMAS, 1.0, key="spread", bind="query-params"
    )
    median = median_column.slider("Median length, tokens", 200, 8000, 1800, 200, key="median", bind="query-params")
    ranks_column, width_column, cost_column, seed_column = st.columns([3, 3, 4, 2])
    ranks = ranks_column.select_slider("Ranks", RANKS, INITIAL_RANKS, key="ranks", bind="query-params")
    width = width_column.select_slider("Row, tokens", WIDTHS, 16_384, key="width", bind="query-params")
    cost = cost_column.selectbox("What a sequence costs", COSTS, key="pay", bind="query-params")
    seed = seed_column.slider("Seed of the lengths", 0, 20, 0, key="lengths-seed", bind="query-params")
    return sample_lengths(count, median, sigma, width, seed), COSTS[cost](), ranks, width


def draw() -> None:
    lengths, cost, ranks, width = draw_controls()
    costs, rows = cost(lengths), ways(lengths, cost, ranks)
    longest_ratio = float(costs.max() * ranks / costs.sum())
    metrics(
        *(
            (
                f"Slowest rank, {row['dealt']}",
                f"{row['slowest rank']:.3f}×",
                "Its load over the mean: how much longer the step takes.",
            )
            for row in rows
        ),
        (
            "At most, by cost",
            f"{rows[-1]['at most, proven']:.3f}×",
            "Proven for assignment by cost: M + (1 − 1/R) · c_last.",
        ),
        (
            "Longest sequence alone",
            f"{longest_ratio:.3f}×",
            "Its cost over the mean load. Above 1 no assignment is even.",
        ),
    )
    rank_rows = bars(lengths, cost, ranks)
    left, right = st.columns(2)
    with left:
        chart(
            drawing(
                "ranks, by their load",
                Axis("load over the mean", zero=False),
                lines(rank_rows, "place", "load", "dealt", tell=("rank", "sequences", "tokens")),
                rule("even", y=1.0),
                looks=LOOKS,
            ),
            "packing-loads",
            rank_rows,
            "Load of each rank, the largest first. All ranks wait for the slowest one.",
        )
    with right:
        chart(
            drawing(
                Axis("tokens of a rank"),
                Axis("load over the mean", zero=False),
                points(rank_rows, "tokens", "load", "dealt", tell=("rank", "sequences")),
                rule("even", y=1.0),
                looks=LOOKS,
            ),
            "packing-tokens",
            rank_rows,
            "Tokens and load of each rank.",
        )
    folded(rows, "packing-ways", "Load, bound and waiting by assignment")
    draw_rows(lengths, assign_ranks(lengths, costs, ranks)["by cost"], ranks, width)


def draw_rows(lengths: Tensor, rank_of: Tensor, ranks: int, width: int) -> None:
    """The rows of one rank, and the mask of one of them."""
    st.subheader("A rank's rows")
    rank_column, row_column, _ = st.columns(3)
    rank = min(
        rank_column.slider(
            "Rank", 1, RANKS[-1], 1, key="rank", bind="query-params", help="The last one, if there are fewer."
        ),
        ranks,
    )
    pieces = place_sequences(lengths, (rank_of == rank - 1).nonzero()[:, 0], width)
    if not pieces:
        st.info(f"Rank {rank} has no sequence: there are fewer of them than ranks.")
        return
    count = pieces[-1]["row"] + 1
    row = min(
        row_column.slider(
            "Row of the mask",
            1,
            16,
            INITIAL_ROW,
            key="row",
            bind="query-params",
            help="The last one, if there are fewer.",
        ),
        count,
    )
    tokens = sum(piece["tokens"] for piece in pieces)
    metrics(
        ("Sequences", len(pieces), f"Of rank {rank}, dealt by cost."),
        ("Rows", count, f"Of {width:,} tokens each."),
        (
            "Padding",
            f"{1 - tokens / count / width:.1%}",
            f"With one sequence a row it would be {1 - tokens / len(pieces) / width:.1%}.",
        ),
    )
    st.html(rows_drawn(pieces, width))
    st.caption("Each bar is a row, each colour a sequence; hovering shows its length. Empty parts are padding.")
    row_pieces = [piece for piece in pieces if piece["row"] == row - 1]
    own_pairs, all_pairs = pairs(row_pieces)
    st.subheader(f"Attention in row {row}")
    left, right = st.columns(2)
    with left:
        st.html(mask_drawn(mask(row_pieces, width)))
    with right:
        stranger_pairs = all_pairs - own_pairs
        metrics(
            (
                "Pairs within a sequence",
                f"{own_pairs:,}",
                "Pairs of a query and a key at or before it, which attention has to compute.",
            ),
            (
                "Pairs across sequences",
                exact(stranger_pairs, "{:,}"),
                f"{stranger_pairs / all_pairs:.1%} of all, without a mask.",
            ),
        )
        st.markdown(
            "Without a mask the network reads the row as one text, and no error is raised. The table has three "
            "sequences in one row of a small random network: the difference, in nats, between a log-prob and that of "
            "the same sequence in a row of its own."
        )
        table(seen_by_strangers(), "packing-strangers")
        st.caption(
            "The first sequence of a row has no other before it. With a mask, the remaining difference is "
            "rounding in float64."
        )


PAGE = Page(
    name="packing",
    title="Sequence packing",
    says="A step takes as long as its slowest rank, and attention makes one long sequence more expensive than many "
    "short ones. The page assigns sequences to ranks, packs them into rows, and shows the attention mask of a row.",
    formula=r"\begin{gathered} c(T) = \mathrm{linear}\cdot T + \mathrm{quadratic}\cdot T^2 \\"
    r"\max\ \mathrm{load} \le M + \left(1-\frac1R\right) c_{\mathrm{last}}\end{gathered}",
    symbols={
        "c(T)": "cost of a sequence of T tokens, in multiply–adds",
        r"\mathrm{linear},\ \mathrm{quadratic}": "cost per token, and per token squared (attention)",
        r"\mathrm{load}": "sum of the costs of a rank's sequences",
        "M": "mean load",
        "R": "number of ranks",
        r"c_{\mathrm{last}}": "cost of the last sequence assigned to the rank with the largest load",
    },
    question="Sequences are assigned to ranks so that each rank has the same number of tokens. Do all ranks then take "
    "equally long?",
    look="Assigning by tokens is even in tokens and not in work. Assigning by cost is even, unless one sequence costs "
    "more than a rank's share.",
    draw=draw,
    code=(packing.Cost, packing.balance, packing.imbalance, packing.rows),
    technique="packing",
)
