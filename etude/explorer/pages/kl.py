"""KL estimators: value, bias, variance, and the actual gradient of each."""

from functools import lru_cache
from pathlib import Path

import numpy as np
import streamlit as st
import torch
from torch import Tensor

from etude.explorer import examples, provenance
from etude.explorer.charts.chart import Axis, Look, bars, brushed, chart, drawing, lines, points, rule
from etude.explorer.drawing import Drawing
from etude.explorer.page import Page, table
from etude.explorer.pages import kl_gradients
from etude.explorer.spans import exact
from ref import kl

FAMILIES = ("Gaussians", "categorical", "tokens of the tiny model")
LOOKS = {"k1": Look("blue", "-", "o"), "k2": Look("orange", "--", "s"), "k3": Look("green", ":", "^")}
BINS = 60
GAUSSIANS = "two Gaussians"
VOCABULARY = 32
UNBIASED = ("k1", "k3")
"""Estimators whose mean is the KL itself, whatever the distributions: what a sum over the vocabulary leaves is
rounding."""


@lru_cache(64)
def make_categorical(divergence: float, seed: int) -> tuple[Tensor, Tensor]:
    """Two softmax heads, float64 log-probs [V], whose KL is `divergence` nats: the reference is moved away until they
    differ that much."""
    generator = torch.Generator().manual_seed(seed)
    policy, push = torch.randn(2, VOCABULARY, dtype=torch.float64, generator=generator)
    low, high = 0.0, 64.0
    for _ in range(60):
        middle = (low + high) / 2
        below = kl.exact_kl(policy, policy + middle * push).item() < divergence
        low, high = (middle, high) if below else (low, middle)
    return policy.log_softmax(-1), (policy + low * push).log_softmax(-1)


def sample_pair(
    family: str, divergence: float, samples: int, seed: int, folder: Path | None = None
) -> tuple[Tensor, Tensor, float]:
    """log π and log π_ref of tokens sampled from π, [samples], and the exact KL in nats."""
    generator = torch.Generator().manual_seed(seed)
    if family == FAMILIES[0]:
        m = (2 * divergence) ** 0.5
        x = torch.randn(samples, dtype=torch.float64, generator=generator)
        return -x.square() / 2, -(x - m).square() / 2, divergence
    if family == FAMILIES[1]:
        policy, reference = make_categorical(divergence, seed)
        sampled_tokens = torch.multinomial(policy.exp(), samples, replacement=True, generator=generator)
        return policy[sampled_tokens], reference[sampled_tokens], kl.exact_kl(policy, reference).item()
    policy, reference = token_heads(folder=folder)
    row = torch.randint(len(policy), (samples,), generator=generator)
    sampled_tokens = torch.multinomial(policy[row].exp(), 1, generator=generator)[:, 0]
    return policy[row, sampled_tokens], reference[row, sampled_tokens], kl.exact_kl(policy, reference).mean().item()


@examples.remembered("token-distributions.npz")
def token_heads(folder: Path | None = None) -> tuple[Tensor, Tensor]:
    """Log-probs [positions, V] of a run's agent after RL and before, at positions where it chose a token."""
    archive = examples.arrays("token-distributions", folder)
    policy, reference = (
        torch.from_numpy(archive[name].astype(np.float64)).log_softmax(-1) for name in ("policy", "reference")
    )
    return policy, reference


def moments(family: str, divergence: float, seed: int, folder: Path | None = None) -> dict[str, tuple[float, float]]:
    """Exact mean in nats and variance in nats² of each estimator, without sampling: in closed form, or summed over the
    vocabulary."""
    if family == FAMILIES[0]:
        return kl.gaussian_oracle((2 * divergence) ** 0.5)
    return (
        compute_categorical_moments(divergence, seed) if family == FAMILIES[1] else compute_token_moments(folder=folder)
    )


@lru_cache(64)
def compute_categorical_moments(divergence: float, seed: int) -> dict[str, tuple[float, float]]:
    return enumerate_moments(*make_categorical(divergence, seed))


@examples.remembered("token-distributions.npz", max_results=4)
def compute_token_moments(folder: Path | None = None) -> dict[str, tuple[float, float]]:
    return enumerate_moments(*token_heads(folder=folder))


def enumerate_moments(policy: Tensor, reference: Tensor) -> dict[str, tuple[float, float]]:
    """Moments for log-probs [V] or [positions, V], summed over the vocabulary."""
    policy, reference = (x.view(-1, x.shape[-1]) for x in (policy, reference))
    weights, moments_by_kind = policy.exp() / len(policy), {}
    for kind in kl.KINDS:
        value = kl.token_kl(policy, reference, kind)
        mean = (weights * value).sum().item()
        moments_by_kind[kind] = mean, (weights * (value - mean).square()).sum().item()
    return moments_by_kind


def estimates(
    family: str, divergence: float, samples: int, seed: int, folder: Path | None = None
) -> tuple[list[dict], dict[str, np.ndarray]]:
    """One row per estimator, and its values."""
    logp, ref_logp, exact_value = sample_pair(family, divergence, samples, seed, folder)
    exact_moments = moments(family, divergence, seed, folder)
    rows, values = [], {}
    for kind in kl.KINDS:
        value, (mean, variance) = kl.token_kl(logp, ref_logp, kind).numpy(), exact_moments[kind]
        values[kind] = value
        rows.append(
            {
                "estimator": kind,
                "mean": value.mean(),
                "standard error": value.std(ddof=1) / len(value) ** 0.5,
                "variance": value.var(ddof=1),
                "exact KL": exact_value,
                "bias, exact": mean - exact_value,
                "mean, exact": mean,
                "variance, exact": variance,
            }
        )
    return rows, values


def format_exact_biases(rows: list[dict]) -> list[dict]:
    """The rows of `estimates`, whose exact bias is in words: zero where it is that by law."""
    return [
        row | {"bias, exact": exact(0.0 if row["estimator"] in UNBIASED else row["bias, exact"], "{:.4g}")}
        for row in rows
    ]


@lru_cache(1)
def closed_form() -> tuple[np.ndarray, dict[str, list[float]]]:
    """KLs of two Gaussians in nats, and the variance of each estimator at each KL."""
    across = np.linspace(0.01, 1.5, 100)
    return across, {kind: [kl.gaussian_oracle((2 * x) ** 0.5)[kind][1] for x in across] for kind in kl.KINDS}


def bin_values(values: dict[str, np.ndarray]) -> list[dict]:
    """Shares of the tokens by value, without the rarest values."""
    low, high = np.quantile(np.concatenate(list(values.values())), (0.002, 0.998)).tolist()
    bin_rows = []
    for kind, value in values.items():
        shares, edges = np.histogram(value, BINS, range=(low, high), weights=np.full(len(value), 1 / len(value)))
        intervals = zip(edges.tolist(), edges[1:].tolist(), shares.tolist())
        bin_rows += [{"estimator": kind, "from": begin, "to": end, "share": share} for begin, end, share in intervals]
    return bin_rows


def draw_histogram(values: dict[str, np.ndarray], exact: float) -> Drawing:
    """Values per token, estimator by estimator."""
    layer = bars(bin_values(values), "from", "share", "estimator", to="to")
    return drawing("value per token, nats", "share of tokens", layer, rule("exact KL", x=exact), looks=LOOKS)


def summarize_part(values: dict[str, np.ndarray], part: tuple[float, float]) -> list[dict]:
    """One row per estimator: the tokens whose value lies in this part, and their share of what all values sum to."""
    rows = []
    for kind, value in values.items():
        part_values = value[(value >= part[0]) & (value <= part[1])]
        squared_deviations = (value - value.mean()) ** 2
        part_deviations = squared_deviations[(value >= part[0]) & (value <= part[1])]
        rows.append(
            {
                "estimator": kind,
                "tokens": len(part_values),
                "share of tokens": len(part_values) / len(value),
                "mean": float(part_values.mean()) if len(part_values) else None,
                "adds to the mean": float(part_values.sum() / len(value)),
                "share of the variance": float(part_deviations.sum() / squared_deviations.sum())
                if squared_deviations.sum()
                else None,
            }
        )
    return rows


def make_mark_rows(family: str, rows: list[dict]) -> list[dict]:
    """Variance against the KL: of two Gaussians in closed form, of this pair exactly, and of the samples."""
    across, variances = closed_form()
    mark_rows = []
    for row in rows:
        kind = row["estimator"]
        mark_rows += [
            {"estimator": kind, "what": GAUSSIANS, "KL": x, "variance": y}
            for x, y in zip(across.tolist(), variances[kind])
        ]
        for source, key in (("exact", "variance, exact"), ("samples", "variance")):
            mark_rows.append(
                {"estimator": kind, "what": f"{family}, {source}", "KL": row["exact KL"], "variance": float(row[key])}
            )
    return mark_rows


def draw_curves(family: str, rows: list[dict]) -> Drawing:
    """Variance of each estimator against the KL."""
    mark_rows = make_mark_rows(family, rows)
    parts = {
        source: [row for row in mark_rows if row["what"] == source]
        for source in (GAUSSIANS, f"{family}, exact", f"{family}, samples")
    }
    gaussian_rows, exact_rows, sample_rows = parts.values()
    return drawing(
        "KL, nats",
        Axis("variance per token, nats²", log=True),
        lines(gaussian_rows, "KL", "variance", "estimator", tell=("what",)),
        points(exact_rows, "KL", "variance", "estimator", tell=("what",), hollow=True),
        points(sample_rows, "KL", "variance", "estimator", tell=("what",)),
        rule(f"Gaussians' k1 and k3\ncross at {kl.crossing():.3f}", x=kl.crossing(), low=True),
        looks=LOOKS,
    )


def draw() -> None:
    first, second, third, fourth = st.columns(4)
    with first:
        family = st.selectbox("Distributions", FAMILIES, key="family", bind="query-params")
    with second:
        divergence = st.slider(
            "KL(π‖π_ref), nats", 0.01, 1.5, 0.2, 0.01, key="kl", bind="query-params", disabled=family == FAMILIES[2]
        )
    with third:
        samples = st.select_slider(
            "Samples", (100, 300, 1000, 3000, 10_000, 30_000), 3000, key="samples", bind="query-params"
        )
    with fourth:
        seed = st.slider("Seed", 0, 99, 0, key="seed", bind="query-params")
    folder = provenance.choose_examples("token-distributions.npz") if family == FAMILIES[2] else None
    rows, values = estimates(family, divergence, samples, seed, folder)
    left, right = st.columns(2)
    with left:
        part = brushed(
            draw_histogram(values, rows[0]["exact KL"]),
            "kl-values",
            bin_values(values),
            "Values of each estimator, token by token, without the rarest ones. A drag selects a range for the table "
            "below.",
        )
    with right:
        chart(
            draw_curves(family, rows),
            "kl-estimators",
            make_mark_rows(family, rows),
            "Variance against the KL. Lines: two Gaussians; hollow marks: this pair, exact; filled "
            "marks: these samples. "
            "Where hollow and filled marks differ, rare tokens dominate the variance and are missing from the samples.",
        )
    if part:
        st.markdown(
            f"Tokens whose value lies between {part[0]:.3g} and {part[1]:.3g} nats, and their share of mean "
            "and variance:"
        )
        table(summarize_part(values, part), "kl-part")
    with st.expander("Mean, bias and variance of each estimator"):
        table(rows, "kl-estimates", format_exact_biases(rows))
    kl_gradients.section()


PAGE = Page(
    name="kl",
    title="KL estimators",
    says="Three estimators of the KL divergence between a policy and its reference, computed from sampled tokens: "
    "their values, bias and variance, and the gradient of each as a loss term. The estimator with the best values "
    "does not have the right gradient.",
    formula=r"\begin{gathered} k_1 = -\log r \qquad k_2 = \tfrac12(\log r)^2 \\"
    r"k_3 = (r-1)-\log r \qquad r = \pi_{\mathrm{ref}}(x)/\pi(x)\end{gathered}",
    symbols={
        r"k_1,\ k_2,\ k_3": "estimators of KL(π‖π_ref) in nats, for one token",
        "r": "ratio of the token's probabilities",
        "x": "token, sampled from π",
        r"\pi": "policy being trained",
        r"\pi_{\mathrm{ref}}": "reference policy, fixed",
    },
    question="The estimator k3 is never negative and has no bias. Does it always vary less than k1? And what is the "
    "gradient of k1 as a loss term?",
    look="For two Gaussians, k3 has the lowest variance while they are close, and more than k1 beyond 0.628 "
    "nats. On the agent's own tokens its "
    "variance is far above that of k1 at much smaller KL. As a loss term, k1 has zero expected gradient.",
    draw=draw,
    code=(kl.token_kl, kl.exact_kl, kl.gaussian_oracle),
    technique="kl",
)
