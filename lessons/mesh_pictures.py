"""Two drawings for lesson 11: who holds what on a mesh of four ranks, and what an all-to-all does to rows.

    who_holds(dp=2, cp=2, ep=2)          the ranks with what they hold, beside the batch in their colours
    all_to_all(((2, 0, 1), (3, 0, 2)))   rows of each rank, by the expert that each chose, on their way to it

Who holds which tokens is asked of `scaled.runtime.cut` itself, rank after rank, so that the picture cannot say anything
else than the code."""

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.patches import Rectangle
from torch import Tensor

from scaled.runtime.cut import cut
from scaled.runtime.mesh import Group, Layout, Mesh, set_to

__all__ = ["COLORS", "all_to_all", "journeys", "owners", "who_holds"]

COLORS = ("#0072B2", "#56B4E9", "#D55E00", "#E69F00", "#009E73", "#8FD9C0", "#CC79A7", "#E8BFD3")
"""One for each rank, or expert."""
STATIONS = ("rows as they come", "sorted by expert", "at their expert", "at home again")
"""Columns of the second drawing. Between the second and the third, and between the third and the fourth, rows
travel."""


def owners(layout: Layout, rows: int, tokens: int) -> Tensor:
    """The rank of every token of a batch, [rows, tokens]. ValueError where the batch cannot be cut that way."""
    owner, places = torch.full((rows * tokens,), -1), torch.arange(rows * tokens).view(rows, tokens)
    for rank in range(layout.world):
        groups = {"dp": Group(layout.dp, rank // layout.cp), "cp": Group(layout.cp, rank % layout.cp)}
        with set_to(Mesh(layout, groups=tuple(groups.items()))):
            owner[cut(places).flatten()] = rank
    return owner.view(rows, tokens)


def hide_frame(axes: Axes, title: str) -> None:
    """No frame and no ticks."""
    axes.set_title(title, fontsize=10)
    axes.set_axis_off()


def who_holds(dp: int, cp: int, ep: int, rows: int = 4, tokens: int = 16, experts: int = 4) -> None:
    """Draws the ranks of a mesh as boxes, dp downwards and cp to the right, and the batch in their colours."""
    layout = Layout(dp, cp, ep)
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.4), layout="constrained", width_ratios=(1.15, 1))
    for rank in range(layout.world):
        corner, first = (rank % cp, -(rank // cp)), rank % ep * (experts // ep)
        left.add_patch(Rectangle((corner[0] + 0.04, corner[1] + 0.06), 0.92, 0.88, color=COLORS[rank]))
        label = "\n".join(
            (
                f"rank {rank}: dp {rank // cp}, cp {rank % cp}, ep {rank % ep}",
                f"rows {rank // cp * (rows // dp)} to {(rank // cp + 1) * (rows // dp) - 1}",
                f"chunks {rank % cp} and {2 * cp - 1 - rank % cp} of {2 * cp}",
                f"1/{layout.efsdp} of experts {first} to {first + experts // ep - 1}",
                f"1/{layout.world} of all other weights",
            )
        )
        left.text(
            corner[0] + 0.5,
            corner[1] + 0.5,
            label,
            ha="center",
            va="center",
            fontsize=8.5,
            color="white" if rank % 2 == 0 else "black",
        )
    left.set(xlim=(0, cp), ylim=(1 - dp, 1))
    hide_frame(left, f"dp = {dp} downwards, cp = {cp} to the right, ep = {ep}")
    colormap = ListedColormap(COLORS[: layout.world])
    right.imshow(owners(layout, rows, tokens).numpy(), cmap=colormap, vmin=-0.5, vmax=layout.world - 0.5, aspect="auto")
    right.set(xlabel="token", ylabel="row", yticks=range(rows), xticks=range(0, tokens, tokens // (2 * cp)))
    right.set_title("the batch, in the ranks' colours", fontsize=10)
    plt.show()


def journeys(expert_choices: tuple[tuple[int, ...], ...], experts: int) -> list[list[tuple[int, int]]]:
    """Where every row is at each of the STATIONS, as (rank, place on it); rows in the order of ranks. `expert_choices`:
    for each rank the expert that each of its rows chose. Experts are dealt evenly, in order; an owner has its rows by
    expert, and those of one expert in the order of ranks."""
    rows = [
        (home, place, expert)
        for home, rank_experts in enumerate(expert_choices)
        for place, expert in enumerate(rank_experts)
    ]
    rows_by_expert = sorted(rows, key=lambda row: (row[0], row[2], row[1]))
    rows_at_experts = sorted(rows, key=lambda row: (row[2], row[0], row[1]))

    def locate(
        order: list[tuple[int, int, int]], rank_of: dict[tuple[int, int, int], int]
    ) -> dict[tuple[int, int, int], tuple[int, int]]:
        counts, locations = dict.fromkeys(range(len(expert_choices)), 0), {}
        for row in order:
            locations[row] = rank_of[row], counts[rank_of[row]]
            counts[rank_of[row]] += 1
        return locations

    home, owner = {row: row[0] for row in rows}, {row: row[2] * len(expert_choices) // experts for row in rows}
    stations = locate(rows, home), locate(rows_by_expert, home), locate(rows_at_experts, owner), locate(rows, home)
    return [[station[row] for station in stations] for row in rows]


def all_to_all(expert_choices: tuple[tuple[int, ...], ...], experts: int = 4) -> None:
    """Draws the way of every row to its expert and home. A thick line is a row that leaves its rank."""
    paths, colors = (
        journeys(expert_choices, experts),
        [COLORS[expert] for rank_experts in expert_choices for expert in rank_experts],
    )
    rank_height = max(place for path in paths for _, place in path) + 1.6
    figure, axes = plt.subplots(figsize=(9, 0.45 * rank_height * len(expert_choices) + 0.6), layout="constrained")
    for rank in range(len(expert_choices)):
        axes.add_patch(
            Rectangle((-0.3, -rank_height * rank - rank_height + 0.8), 3.6, rank_height - 0.5, color="0.94", zorder=0)
        )
        own_experts = range(rank * experts // len(expert_choices), (rank + 1) * experts // len(expert_choices))
        axes.text(
            -0.36,
            -rank_height * (rank + 0.5) + 0.5,
            f"rank {rank}\nowns experts\n{', '.join(map(str, own_experts))}",
            ha="right",
            va="center",
            fontsize=9,
        )
    for path, color in zip(paths, colors, strict=True):
        points = [(column, -rank_height * rank - place) for column, (rank, place) in enumerate(path)]
        for (source, target), (start, end) in zip(zip(path, path[1:]), zip(points, points[1:]), strict=True):
            axes.plot(
                *zip(start, end, strict=True), color=color, linewidth=2.6 if source[0] != target[0] else 0.9, zorder=1
            )
        axes.scatter(*zip(*points, strict=True), s=170, color=color, edgecolor="white", zorder=2)
    for path, expert in zip(paths, (expert for rank_experts in expert_choices for expert in rank_experts), strict=True):
        for column, (rank, place) in enumerate(path):
            axes.text(
                column,
                -rank_height * rank - place,
                str(expert),
                ha="center",
                va="center",
                fontsize=8,
                color="white",
                zorder=3,
            )
    for column, name in enumerate(STATIONS):
        axes.text(column, 0.75, name, ha="center", fontsize=9)
    for x in (1.5, 2.5):
        axes.text(x, 0.75, "all-to-all →", ha="center", fontsize=9, style="italic")
    axes.set(xlim=(-0.9, 3.4), ylim=(-rank_height * len(expert_choices) + 0.6, 1.2))
    hide_frame(axes, "")
    plt.show()
