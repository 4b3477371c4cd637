"""KL estimators: value, bias, variance, and the actual gradient of each."""

from functools import lru_cache
from pathlib import Path

import numpy as np
import streamlit as st
import torch
from torch import Tensor

from etude.explorer import examples, kl_gradients, provenance
from etude.explorer.charts import Axis, Look, bars, brushed, chart, drawing, lines, points, rule
from etude.explorer.drawing import Drawing
from etude.explorer.page import Page, table
from etude.explorer.spans import exact
from ref import kl

FAMILIES = ("Gaussians", "categorical", "tokens of the tiny model")
LOOKS = {"k1": Look("blue", "-", "o"), "k2": Look("orange", "--", "s"), "k3": Look("green", ":", "^")}
BINS = 60
GAUSSIANS = "two Gaussians"
VOCABULARY = 32
UNBIASED = ("k1", "k3")
"""Estimators whose mean is the KL itself, whatever the distributions: what a sum over the vocabulary leaves is rounding."""


@lru_cache(64)
def categorical(divergence: float, seed: int) -> tuple[Tensor, Tensor]:
    """Two softmax heads, float64 log-probs [V], whose KL is `divergence` nats: the reference is moved away until they differ that much."""
    generator = torch.Generator().manual_seed(seed)
    policy, push = torch.randn(2, VOCABULARY, dtype=torch.float64, generator=generator)
    low, high = 0.0, 64.0
    for _ in range(60):
        middle = (low + high) / 2
        below = kl.exact_kl(policy, policy + middle * push).item() < divergence
        low, high = (middle, high) if below else (low, middle)
    return policy.log_softmax(-1), (policy + low * push).log_softmax(-1)


def pair(family: str, divergence: float, samples: int, seed: int, folder: Path | None = None) -> tuple[Tensor, Tensor, float]:
    """log π and log π_ref of tokens sampled from π, [samples], and the exact KL in nats."""
    generator = torch.Generator().manual_seed(seed)
    if family == FAMILIES[0]:
        m = (2 * divergence) ** 0.5
        x = torch.randn(samples, dtype=torch.float64, generator=generator)
        return -x.square() / 2, -(x - m).square() / 2, divergence
    if family == FAMILIES[1]:
        policy, reference = categorical(divergence, seed)
        drawn = torch.multinomial(policy.exp(), samples, replacement=True, generator=generator)
        return policy[drawn], reference[drawn], kl.exact_kl(policy, reference).item()
    policy, reference = token_heads(folder=folder)
    row = torch.randint(len(policy), (samples,), generator=generator)
    drawn = torch.multinomial(policy[row].exp(), 1, generator=generator)[:, 0]
    return policy[row, drawn], reference[row, drawn], kl.exact_kl(policy, reference).mean().item()


@examples.remembered("token-distributions.npz")
def token_heads(folder: Path | None = None) -> tuple[Tensor, Tensor]:
    """Log-probs [positions, V] of a run's agent after RL and before, at positions where it chose a token."""
    stored = examples.arrays("token-distributions", folder)
    policy, reference = (torch.from_numpy(stored[name].astype(np.float64)).log_softmax(-1) for name in ("policy", "reference"))
    return policy, reference


def moments(family: str, divergence: float, seed: int, folder: Path | None = None) -> dict[str, tuple[float, float]]:
    """Exact mean in nats and variance in nats² of each estimator, without sampling: in closed form, or summed over the vocabulary."""
    if family == FAMILIES[0]:
        return kl.gaussian_oracle((2 * divergence) ** 0.5)
    return categorical_moments(divergence, seed) if family == FAMILIES[1] else token_moments(folder=folder)


@lru_cache(64)
def categorical_moments(divergence: float, seed: int) -> dict[str, tuple[float, float]]:
    return enumerated(*categorical(divergence, seed))


@examples.remembered("token-distributions.npz", most=4)
def token_moments(folder: Path | None = None) -> dict[str, tuple[float, float]]:
    return enumerated(*token_heads(folder=folder))


def enumerated(policy: Tensor, reference: Tensor) -> dict[str, tuple[float, float]]:
    """Moments for log-probs [V] or [positions, V], summed over the vocabulary."""
    policy, reference = (x.view(-1, x.shape[-1]) for x in (policy, reference))
    chances, found = policy.exp() / len(policy), {}
    for kind in kl.KINDS:
        value = kl.token_kl(policy, reference, kind)
        mean = (chances * value).sum().item()
        found[kind] = mean, (chances * (value - mean).square()).sum().item()
    return found


def estimates(family: str, divergence: float, samples: int, seed: int, folder: Path | None = None) -> tuple[list[dict], dict[str, np.ndarray]]:
    """One row per estimator, and its values."""
    logp, ref_logp, exact = pair(family, divergence, samples, seed, folder)
    known = moments(family, divergence, seed, folder)
    rows, values = [], {}
    for kind in kl.KINDS:
        value, (mean, variance) = kl.token_kl(logp, ref_logp, kind).numpy(), known[kind]
        values[kind] = value
        rows.append(
            {
                "estimator": kind,
                "mean": value.mean(),
                "standard error": value.std(ddof=1) / len(value) ** 0.5,
                "variance": value.var(ddof=1),
                "exact KL": exact,
                "bias, exact": mean - exact,
                "mean, exact": mean,
                "variance, exact": variance,
            }
        )
    return rows, values


def said(rows: list[dict]) -> list[dict]:
    """The rows of `estimates`, whose exact bias is in words: zero where it is that by law."""
    return [row | {"bias, exact": exact(0.0 if row["estimator"] in UNBIASED else row["bias, exact"], "{:.4g}")} for row in rows]


@lru_cache(1)
def closed_form() -> tuple[np.ndarray, dict[str, list[float]]]:
    """KLs of two Gaussians in nats, and the variance of each estimator at each KL."""
    across = np.linspace(0.01, 1.5, 100)
    return across, {kind: [kl.gaussian_oracle((2 * x) ** 0.5)[kind][1] for x in across] for kind in kl.KINDS}


def bins(values: dict[str, np.ndarray]) -> list[dict]:
    """Shares of the tokens by value, without the rarest values."""
    low, high = np.quantile(np.concatenate(list(values.values())), (0.002, 0.998)).tolist()
    found = []
    for kind, value in values.items():
        shares, edges = np.histogram(value, BINS, range=(low, high), weights=np.full(len(value), 1 / len(value)))
        some = zip(edges.tolist(), edges[1:].tolist(), shares.tolist())
        found += [{"estimator": kind, "from": begin, "to": end, "share": share} for begin, end, share in some]
    return found


def histogram(values: dict[str, np.ndarray], exact: float) -> Drawing:
    """Values per token, estimator by estimator."""
    some = bars(bins(values), "from", "share", "estimator", to="to")
    return drawing("value per token, nats", "share of tokens", some, rule("exact KL", x=exact), looks=LOOKS)


def within(values: dict[str, np.ndarray], part: tuple[float, float]) -> list[dict]:
    """One row per estimator: the tokens whose value lies in this part, and their share of what all values sum to."""
    rows = []
    for kind, value in values.items():
        some = value[(value >= part[0]) & (value <= part[1])]
        far = (value - value.mean()) ** 2
        own = far[(value >= part[0]) & (value <= part[1])]
        rows.append(
            {
                "estimator": kind,
                "tokens": len(some),
                "share of tokens": len(some) / len(value),
                "mean": float(some.mean()) if len(some) else None,
                "adds to the mean": float(some.sum() / len(value)),
                "share of the variance": float(own.sum() / far.sum()) if far.sum() else None,
            }
        )
    return rows


def marks(family: str, rows: list[dict]) -> list[dict]:
    """Variance against the KL: of two Gaussians in closed form, of this pair exactly, and of the samples."""
    across, variances = closed_form()
    found = []
    for row in rows:
        kind = row["estimator"]
        found += [{"estimator": kind, "what": GAUSSIANS, "KL": x, "variance": y} for x, y in zip(across.tolist(), variances[kind])]
        for what, key in (("exact", "variance, exact"), ("samples", "variance")):
            found.append({"estimator": kind, "what": f"{family}, {what}", "KL": row["exact KL"], "variance": float(row[key])})
    return found


def curves(family: str, rows: list[dict]) -> Drawing:
    """Variance of each estimator against the KL."""
    found = marks(family, rows)
    parts = {what: [row for row in found if row["what"] == what] for what in (GAUSSIANS, f"{family}, exact", f"{family}, samples")}
    known, exact, sampled = parts.values()
    return drawing(
        "KL, nats",
        Axis("variance per token, nats²", log=True),
        lines(known, "KL", "variance", "estimator", tell=("what",)),
        points(exact, "KL", "variance", "estimator", tell=("what",), hollow=True),
        points(sampled, "KL", "variance", "estimator", tell=("what",)),
        rule(f"Gaussians' k1 and k3\ncross at {kl.crossing():.3f}", x=kl.crossing(), low=True),
        looks=LOOKS,
    )


def draw() -> None:
    first, second, third, fourth = st.columns(4)
    with first:
        family = st.selectbox("Distributions", FAMILIES, key="family", bind="query-params")
    with second:
        divergence = st.slider("KL(π‖π_ref), nats", 0.01, 1.5, 0.2, 0.01, key="kl", bind="query-params", disabled=family == FAMILIES[2])
    with third:
        samples = st.select_slider("Samples", (100, 300, 1000, 3000, 10_000, 30_000), 3000, key="samples", bind="query-params")
    with fourth:
        seed = st.slider("Seed", 0, 99, 0, key="seed", bind="query-params")
    folder = provenance.chosen("token-distributions.npz") if family == FAMILIES[2] else None
    rows, values = estimates(family, divergence, samples, seed, folder)
    left, right = st.columns(2)
    with left:
        part = brushed(
            histogram(values, rows[0]["exact KL"]),
            "kl-values",
            bins(values),
            "Values of each estimator, token by token; rare values lie outside the picture. Drag over a part of it.",
        )
    with right:
        chart(
            curves(family, rows),
            "kl-estimators",
            marks(family, rows),
            "Variance against the KL. Lines: two Gaussians; hollow marks: this pair, exact; filled marks: these samples. "
            "Where hollow and filled marks differ, rare tokens dominate and the samples missed them.",
        )
    if part:
        st.markdown(f"Tokens whose value lies between {part[0]:.3g} and {part[1]:.3g} nats, and what they make of mean and variance:")
        table(within(values, part), "kl-part")
    with st.expander("The same as a table"):
        kl_gradients.worded(said(rows), rows, "kl-estimates")
    kl_gradients.section()


PAGE = Page(
    name="kl",
    title="KL estimators",
    says="How far has the policy moved from its reference? Three estimates from sampled tokens, and why the one that looks best is not the "
    "one to differentiate.",
    formula=r"\begin{gathered} k_1 = -\log r \qquad k_2 = \tfrac12(\log r)^2 \\"
    r"k_3 = (r-1)-\log r \qquad r = \pi_{\mathrm{ref}}(x)/\pi(x)\end{gathered}",
    question="The estimate k3 is never negative and has no bias. Does it always vary less than k1? And on what does k1 pull as a loss term?",
    look="For two Gaussians, k3 has the lowest variance while they are close, and more than k1 beyond 0.628 nats. On the agent's own tokens its "
    "variance is far above that of k1 long before that. As a loss term, k1 has zero expected gradient.",
    draw=draw,
    code=(kl.token_kl, kl.exact_kl, kl.gaussian_oracle),
    technique="kl",
)
