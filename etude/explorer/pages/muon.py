"""Muon: singular values through Newton–Schulz, one step of three optimisers, and experts without gradients."""

from functools import lru_cache

import streamlit as st
import torch
from torch import Tensor, nn

from etude.explorer.charts.chart import Axis, Look, chart, drawing, lines, points, rule
from etude.explorer.page import COLOURS, Page, table
from etude.explorer.playing import play
from etude.explorer.spans import exact, metrics, tint
from ref import muon

SHAPES = {"8 × 8": (8, 8), "8 × 16, wide": (8, 16), "16 × 8, tall": (16, 8), "16 × 32": (16, 32)}
DECADES = (0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
MAX_ROUNDS = 10
"""Rounds of Newton–Schulz that the page follows."""
STEPS, SIDE = 500, 16
"""Steps of the experts, and the side of their square matrices."""
EXPERTS = ("visited at every step", "visited once", "never visited")


@lru_cache(64)
def gradient(shape: tuple[int, int], decades: float, seed: int) -> Tensor:
    """A matrix [m, n], float64, with random directions, whose singular values fall evenly in their logarithm by this
    many powers of ten."""
    generator = torch.Generator().manual_seed(seed)
    m, n = shape
    left = torch.linalg.qr(torch.randn(m, m, dtype=torch.float64, generator=generator)).Q
    right = torch.linalg.qr(torch.randn(n, n, dtype=torch.float64, generator=generator)).Q
    least = min(m, n)
    values = torch.logspace(0, -decades, least, dtype=torch.float64)
    return left[:, :least] @ torch.diag(values) @ right[:least]


@lru_cache(64)
def rounds(shape: tuple[int, int], decades: float, seed: int, dtype: str) -> list[list[float]]:
    """Singular values, largest first, after 0, 1, … MAX_ROUNDS rounds. After none the matrix is only divided by its
    norm."""
    G = gradient(shape, decades, seed).to(DTYPES[dtype])
    return [torch.linalg.svdvals(muon.newton_schulz(G, steps).double()).tolist() for steps in range(MAX_ROUNDS + 1)]


@lru_cache(16)
def curve(steps: int, dtype: str) -> list[dict]:
    """What so many rounds make of a singular value, by its share of the norm: that of a 2 × 2 matrix whose other one
    fills the norm up."""
    share = torch.cat(
        (torch.logspace(-4, -1, 90, dtype=torch.float64), torch.linspace(0.1, 1, 150, dtype=torch.float64)[1:])
    )
    pairs = torch.stack((share, (1 - share.square()).clamp(min=0).sqrt()), 1)
    outputs = muon.newton_schulz(torch.diag_embed(pairs), steps, dtype=DTYPES[dtype])[:, 0, 0]
    return [{"share of ‖G‖": x, "after": y} for x, y in zip(share.tolist(), outputs.tolist(), strict=True)]


def own(G: Tensor, steps: int, dtype: str) -> list[dict]:
    """What the rounds make of each singular value of G: on a diagonal matrix each keeps its place, whatever its size
    becomes."""
    values = torch.linalg.svdvals(G)
    outputs = muon.newton_schulz(torch.diag(values), steps, dtype=DTYPES[dtype]).diagonal()
    return [
        {"share of ‖G‖": x, "after": y}
        for x, y in zip((values / values.norm()).tolist(), outputs.tolist(), strict=True)
    ]


def stepped(G: Tensor, steps: int, dtype: str) -> dict[str, Tensor]:
    """How one step from zero at learning rate 1 moves a weight whose gradient is G, under SGD, Adam and Muon without
    momentum's past; and the exact UVᵀ, negated."""
    updates = {}
    for name in ("SGD", "Adam", "Muon"):
        weight = nn.Parameter(torch.zeros_like(G))
        optimiser: torch.optim.Optimizer
        if name == "Muon":
            optimiser = muon.Muon([weight], lr=1.0, steps=steps, ns_dtype=DTYPES[dtype])
        else:
            optimiser = torch.optim.SGD([weight], lr=1.0) if name == "SGD" else torch.optim.Adam([weight], lr=1.0)
        weight.grad = G.clone()
        optimiser.step()
        updates[name] = weight.detach()
    U, _, Vh = torch.linalg.svd(G, full_matrices=False)
    return updates | {"exact −UVᵀ": -U @ Vh}


def compared(G: Tensor, steps: int, dtype: str) -> list[dict]:
    """One row for each step: its spectral norm (the largest singular value), its smallest, their ratio, and how much it
    lowers the loss to first order, ⟨−step, G⟩, for a spectral norm of one; no step can do more than the sum of G's
    singular values."""
    rows, max_descent = [], torch.linalg.svdvals(G).sum().item()
    for name, update in stepped(G, steps, dtype).items():
        values = torch.linalg.svdvals(update)
        norm = values[0].item()
        rows.append(
            {
                "step": name,
                "spectral norm": norm,
                "smallest": values[-1].item(),
                "ratio": norm / values[-1].item() if values[-1] else None,
                "of the best descent": -(update * G).sum().item() / norm / max_descent if norm else None,
                "a weight moves by": update.square().mean().sqrt().item(),
            }
        )
    return rows


@lru_cache(4)
def experts(momentum: float) -> list[dict]:
    """Size of each step of a stack of three experts under Muon and under Adam, over their first steps: one is visited
    at every step, one at the first step only, one never. "of its first step": beside the first step of the expert that
    is always visited."""
    generator = torch.Generator().manual_seed(4)
    gradients = torch.stack([torch.outer(*torch.randn(2, SIDE, generator=generator)) for _ in range(3)])
    weights = {name: nn.Parameter(torch.zeros(3, SIDE, SIDE)) for name in ("Muon", "Adam")}
    optimisers = {
        "Muon": muon.Muon([weights["Muon"]], lr=1.0, momentum=momentum, ns_dtype=None),
        "Adam": torch.optim.Adam([weights["Adam"]], lr=1.0, betas=(momentum, 0.95), fused=True),
    }
    rows, first_sizes = [], {}
    for step in range(STEPS):
        visits = torch.tensor([1.0, float(step == 0), 0.0])[:, None, None]
        for name, weight in weights.items():
            weight.detach().zero_()  # so that what it holds is the step
            weight.grad = gradients * visits
            optimisers[name].step()
            sizes = weight.detach().flatten(1).norm(dim=1).tolist()
            first_sizes.setdefault(name, sizes[0])
            rows += [
                {
                    "step": step + 1,
                    "optimiser": name,
                    "expert": expert,
                    "moves by": size,
                    "of its first step": size / first_sizes[name],
                }
                for expert, size in zip(EXPERTS, sizes, strict=True)
            ]
    return rows


def list_singular_values(shape: tuple[int, int], decades: float, seed: int, dtype: str, steps: int) -> list[dict]:
    """The singular values after every round up to `steps`, one row each."""
    values_by_round = rounds(shape, decades, seed, dtype)[: steps + 1]
    return [
        {
            "rank": rank,
            "rounds": round_,
            "singular value": value,
            "series": "gradient / ‖G‖" if not round_ else f"after round {round_}",
        }
        for round_, values in enumerate(values_by_round)
        for rank, value in enumerate(values, 1)
    ]


def render_matrix(tensor: Tensor) -> str:
    """A matrix as HTML: blue is positive, orange negative, the stronger the larger beside its largest entry."""
    max_abs = tensor.abs().max().item() or 1.0
    cells = "".join(
        f'<span title="row {r}, column {c}: {value:.4g}" '
        f'style="{tint("blue" if value > 0 else "orange", abs(value) / max_abs)}"></span>'
        for r, entries in enumerate(tensor.tolist(), 1)
        for c, value in enumerate(entries, 1)
    )
    rows, columns = tensor.shape
    shape = (
        f"grid-template-columns:repeat({columns},1fr);aspect-ratio:{columns}/{rows};max-width:{14 * columns}px;"
        f"border:1px solid {COLOURS['grey']}"
    )
    return f'<div class="matrix" style="display:grid;{shape}">{cells}</div>'


def draw() -> None:
    shape_column, decades_column, dtype_column, seed_column = st.columns([3, 5, 3, 2])
    shape = SHAPES[
        shape_column.selectbox("Gradient", SHAPES, 1, key="shape", bind="query-params", help="Outputs × inputs.")
    ]
    decades = decades_column.select_slider(
        "Powers of ten from its largest singular value to its smallest",
        DECADES,
        3.0,
        key="decades",
        bind="query-params",
    )
    dtype = dtype_column.selectbox("Computed in", DTYPES, key="dtype", bind="query-params")
    seed = seed_column.slider("Seed of the gradient", 0, 20, 0, key="matrix-seed", bind="query-params")
    play(
        "Rounds of Newton–Schulz",
        "rounds",
        range(MAX_ROUNDS + 1),
        5,
        lambda steps: draw_rounds(shape, decades, seed, dtype, steps),
    )
    draw_experts()


def draw_rounds(shape: tuple[int, int], decades: float, seed: int, dtype: str, steps: int) -> None:
    """What so many rounds make of the gradient: singular values, and a step beside those of other optimisers."""
    G, rows = gradient(shape, decades, seed), list_singular_values(shape, decades, seed, dtype, steps)
    values_before, values_after = (
        [row["singular value"] for row in rows if row["rounds"] == round_count] for round_count in (0, steps)
    )
    metrics(
        (
            "Largest over smallest, before",
            f"{values_before[0] / values_before[-1]:.3g}",
            "Of the gradient's singular values.",
        ),
        ("after", f"{values_after[0] / values_after[-1]:.3g}", "After the chosen rounds."),
        ("Smallest singular value", f"{values_after[-1]:.3f}", "After the chosen rounds."),
        ("Largest", f"{values_after[0]:.3f}", "Not exactly 1: the coefficients trade exactness for slope at zero."),
    )
    left, right = st.columns(2)
    middle_rows, end_rows = (
        [row for row in rows if (row["rounds"] in (0, steps)) == is_end] for is_end in (False, True)
    )
    with left:
        chart(
            drawing(
                "singular value, by rank",
                Axis("size", log=True),
                lines(
                    middle_rows,
                    "rank",
                    "singular value",
                    split="rounds",
                    thin=True,
                    tell=("rounds",),
                    look=Look("grey"),
                ),
                lines(end_rows, "rank", "singular value", "series"),
                points(end_rows, "rank", "singular value", "series", tell=("rounds",)),
                rule("1", y=1.0),
            ),
            "muon-singular-values",
            rows,
            "Singular values of the gradient, divided by its norm, and after the chosen rounds; faint, "
            "the rounds between.",
        )
    with right:
        curve_rows = curve(steps, dtype)
        chart(
            drawing(
                Axis("singular value over ‖G‖", log=True),
                Axis("after the rounds", upper=1.3),
                lines(curve_rows, "share of ‖G‖", "after"),
                points(own(G, steps, dtype), "share of ‖G‖", "after", look=Look("orange", mark="s")),
                *(rule(f"{y}", y=y) for y in (0.68, 1.21)),
            ),
            "muon-curve",
            curve_rows,
            "Singular value after the rounds, as a function of the one before: a polynomial applied repeatedly. "
            "Squares: this gradient's values.",
        )
    st.subheader("One step, three optimisers")
    updates = stepped(G.float(), steps, dtype)
    matrices = {"gradient": G, **{f"{name}'s step, negated": -updates[name] for name in ("SGD", "Adam", "Muon")}}
    for column, (name, tensor) in zip(st.columns(4), matrices.items(), strict=True):
        with column:
            st.caption(name)
            st.html(render_matrix(tensor))
    table(compared(G.float(), steps, dtype), "muon-steps")
    st.caption(
        "Each is the first step from zero at learning rate 1. Adam keeps the signs of entries, Muon "
        "the singular directions. Of all steps of one "
        "spectral norm, −UVᵀ lowers the loss most, to first order."
    )


def draw_experts() -> None:
    """A stack of experts, one of which is never visited."""
    st.subheader("An expert without tokens")
    momentum = st.select_slider("Momentum", (0.8, 0.9, 0.95, 0.98), 0.95, key="momentum", bind="query-params")
    rows = experts(momentum)
    once_rows = [{**row, "series": f"{row['optimiser']}, visited once"} for row in rows if row["expert"] == EXPERTS[1]]
    never_rows = [
        {**row, "series": "both, never visited"}
        for row in rows
        if row["expert"] == EXPERTS[2] and row["optimiser"] == "Muon"
    ]
    max_unvisited_size = max(row["moves by"] for row in rows if row["expert"] == EXPERTS[2])
    paths = {
        name: [row["of its first step"] for row in once_rows if row["optimiser"] == name] for name in ("Muon", "Adam")
    }
    metrics(
        ("Never visited, moves by", exact(max_unvisited_size), f"The largest of {STEPS} steps, Muon's and Adam's."),
        *(
            (f"Visited once, {name}", f"{sum(path):.3g} first steps", f"Sum of {STEPS} steps after a single gradient.")
            for name, path in paths.items()
        ),
    )
    chart(
        drawing(
            "step", "size of a step, first = 1", lines([*once_rows, *never_rows], "step", "of its first step", "series")
        ),
        "muon-experts",
        rows,
        "Three experts in one stack. Muon ignores the size of a gradient, so an expert with a single gradient keeps "
        "moving, at 1 to 1.7 times its first step, until its momentum is about a thousandth of ε = 1e-7. An expert "
        "without gradients has exact zeros and does not move.",
    )


PAGE = Page(
    name="muon",
    title="Muon",
    says="Muon keeps the singular directions of a gradient and makes all singular values nearly equal. The page shows "
    "the singular values round by round, compares Muon's step with those of SGD and Adam, and follows an expert to "
    "which no token is routed.",
    formula=r"\begin{gathered} A \leftarrow XX^\top \qquad X \leftarrow aX + (bA + cA^2)X \\"
    r"(a, b, c) = (3.4445,\; -4.7750,\; 2.0315)\end{gathered}",
    symbols={
        "X": "the gradient (in training, its momentum) divided by its norm, and then the result of each round",
        "A": "Gram matrix of X",
        "a, b, c": "coefficients of the polynomial",
    },
    question="A gradient has singular values from 1 down to 0.001. What are they after Muon's five rounds? And what "
    "becomes of an exact zero?",
    look="After five rounds all values above 0.002 of the norm lie between 0.68 and 1.21. Smaller values are only "
    "partly raised: 0.001 to about 0.44. A zero stays exactly zero.",
    draw=draw,
    code=(muon.newton_schulz, muon.Muon),
    technique="muon",
)
