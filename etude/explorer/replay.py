"""The experts that a coarse sampler chose, those that an exact trainer would choose, and what replay uses."""

from pathlib import Path

import numpy as np
import streamlit as st
import torch
from torch import Tensor

from etude.explorer import examples, provenance, spans
from etude.explorer.charts import Axis, Look, boxes, chart, drawing, lines, points, rule
from etude.explorer.drawing import Drawing
from etude.explorer.page import Page, folded, steering, table
from ref import router_replay

WINDOW = 20
"""Tokens in the picture."""
FILES = ("routing.json", "routing.npz")
CHOICES = {"sampler": 210, "trainer's own": 90, "replayed": 45}
"""Whose choice of experts, and the size of its marks, square pixels."""


@examples.remembered(*FILES, most=16)
def stored(rollout: int, folder: Path | None = None) -> dict[str, Tensor]:
    """The arrays of a rollout (`sims/examples.py`), experts as integer indices. Raises RunError if they do not belong to routing.json, for
    example because only one of the two files was rewritten."""
    arrays, told = examples.arrays("routing", folder), examples.load("routing", folder)
    alphas, T = len(told["alphas"]), len(told["rollouts"][rollout]["tokens"]) - 1
    shapes = {
        "scores": (None, T, None, None),
        "sampler": (T, None, None),
        "own": (T, None, None),
        "pass": (alphas,),
        "behavior": (T,),
        "logp": (alphas + 1, T),
    }
    found: dict[str, np.ndarray] = {}
    for name, shape in shapes.items():
        x = arrays.get(f"{rollout}/{name}")
        if x is None or x.ndim != len(shape) or any(n not in (None, size) for n, size in zip(shape, x.shape)):
            raise examples.unreadable((folder or examples.FOLDER) / "routing.npz", f"{rollout}/{name} does not belong to routing.json")
        found[name] = x
    return {name: torch.from_numpy(x.astype(np.int64) if name in ("sampler", "own", "pass") else x) for name, x in found.items()}


@examples.remembered(*FILES, most=512)
def taken(rollout: int, alpha: int, folder: Path | None = None) -> tuple[Tensor, Tensor]:
    """Experts [T−1, L, K] used by replay at the α with this index, and the scores [T−1, L, E] of that pass: the input of a layer depends on
    the experts used in the layers before it."""
    s = stored(rollout, folder=folder)
    scores, value = s["scores"][s["pass"][alpha]], examples.load("routing", folder)["alphas"][alpha]
    layers = zip(scores.unbind(1), s["sampler"].unbind(1), strict=True)
    return torch.stack([router_replay.replay(x, theirs, theirs.shape[-1], value) for x, theirs in layers], 1), scores


def other(ours: Tensor, theirs: Tensor) -> Tensor:
    """Where the expert sets [..., K] of two engines differ."""
    return (ours.sort(-1)[0] != theirs.sort(-1)[0]).any(-1)


def beginning(rollout: int, folder: Path | None = None) -> int:
    """Start of a window in which the engines differ on the last layer; 0 if they never do."""
    s = stored(rollout, folder=folder)
    apart = other(s["sampler"][:, -1], s["own"][:, -1]).nonzero()[:, 0].tolist()
    return max(0, min(apart[0] - WINDOW // 2, len(s["sampler"]) - WINDOW)) if apart else 0


@examples.remembered(*FILES)
def quantiles(folder: Path | None = None) -> list[dict]:
    """One row per method, over the sampled tokens of all rollouts: `router_replay.mismatch`."""
    columns, alphas = examples.arrays("routing", folder), examples.load("routing", folder)["alphas"]
    behavior = torch.from_numpy(columns["behavior"])
    ways, rows = ["own", *(f"α = {a:g}" for a in alphas)], []
    for way, logp in zip(ways, torch.from_numpy(columns["logp"]), strict=True):
        found = router_replay.mismatch(logp, behavior, torch.ones_like(behavior, dtype=torch.bool))
        rows.append({"experts": way, "p50": found["p50"], "p99": found["p99"], "max": found["max"], "mean log μ − log π": found["kl"]})
    return rows


@examples.remembered(*FILES, most=16)
def dropped(rollout: int, folder: Path | None = None) -> list[dict]:
    """One row per α: the share of the sampler's experts that the filter drops, and the share of used experts that the router did not choose."""
    s, rows = stored(rollout, folder=folder), []
    for place, alpha in enumerate(examples.load("routing", folder)["alphas"]):
        ours = taken(rollout, place, folder=folder)[0].unbind(1)
        rows.append(
            {
                "α": alpha,
                "dropped": router_replay.differing(ours, s["sampler"].unbind(1))["decisions"],
                "not its own": router_replay.differing(ours, s["own"].unbind(1))["decisions"],
            }
        )
    return rows


def token_rows(rollout: int, layer: int, alpha: int, alphas: list[float], folder: Path | None = None) -> list[dict]:
    """One row per position: the token, the next token, the experts of one layer for all three, and the gap |log π − log μ| of the next
    token in nats, if the agent sampled it."""
    s, told = stored(rollout, folder=folder), examples.load("routing", folder)["rollouts"][rollout]
    chosen = taken(rollout, alpha, folder=folder)[0][:, layer]
    sampler, own = s["sampler"][:, layer], s["own"][:, layer]
    apart, filtered = other(sampler, own), other(sampler, chosen)
    gap = (s["logp"] - s["behavior"]).abs()
    rows = []
    for t in range(len(sampler)):
        drawn = bool(told["sampled"][t + 1])
        row = {"position": t, "token": told["tokens"][t], "next": told["tokens"][t + 1]}
        for name, experts in (("sampler", sampler), ("trainer's own", own), ("replayed", chosen)):
            row[name] = " ".join(map(str, sorted(experts[t].tolist())))
        for way, name in ((0, "own"), (1, "plain replay"), (alpha + 1, f"α = {alphas[alpha]:g}")):
            row[f"gap, {name}"] = gap[way, t].item() if drawn else None
        rows.append(row | {"engines differ": bool(apart[t]), "filter dropped": bool(filtered[t])})
    return rows


def fields(rollout: int, layer: int, alpha: int, first: int, rows: list[dict], folder: Path | None = None) -> list[dict]:
    """One row per token of the window and expert: the router's probability, and whose choice it is. `rows`: those of `token_rows`."""
    scores = taken(rollout, alpha, folder=folder)[1][:, layer].softmax(-1)
    found = []
    for told in rows[first : first + WINDOW]:
        place = told["position"]
        for expert, p in enumerate(scores[place].tolist()):
            chosen = {name: str(expert) in told[name].split() for name in CHOICES}
            box = {"left": place - 0.5, "right": place + 0.5, "low": expert - 0.5, "high": expert + 0.5}
            found.append({"position": place, "token": told["token"], "next": told["next"], "expert": expert, "probability": p} | chosen | box)
    return found


def picture(rows: list[dict], layer: int, alpha: float) -> Drawing:
    """Router probabilities for some tokens, with the three choices on top. `rows`: those of `fields`."""
    words = {row["position"]: repr(row["token"])[1:-1] for row in rows}
    experts = sorted({row["expert"] for row in rows})
    told = ("token", "next", "expert", "probability", *CHOICES)
    names = dict(zip(CHOICES, ("sampler", "trainer's own", f"replayed, α = {alpha:g}"), strict=True))
    marks = [
        points(
            [row | {"whose": names[name]} for row in rows if row[name]],
            "position",
            "expert",
            "whose",
            tell=told,
            hollow=name != "replayed",
            size=size,
        )
        for name, size in CHOICES.items()
    ]
    looks = (Look("orange", mark="s"), Look("blue", mark="o"), Look("red", mark="x"))
    return drawing(
        Axis("", least=min(words) - 0.5, most=max(words) + 0.5, ticks=words),
        Axis(f"expert of layer {layer + 1}", least=-0.5, most=experts[-1] + 0.5, ticks={expert: str(expert) for expert in experts}),
        boxes(rows, "left", "right", "low", "high", tell=("position", *told), shade="probability", look=Look("grey")),
        *marks,
        looks=dict(zip(names.values(), looks, strict=True)),
        height=130 + 24 * len(experts),
    )


def curve(alphas: list[float], rows: list[dict], at: int) -> Drawing:
    """p99 of the mismatch against α, over all rollouts."""
    some = [row | {"α": alpha, "what": "replayed"} for alpha, row in zip(alphas, rows[1:], strict=True)]
    return drawing(
        "α",
        "p99 of |log π − log μ|, nats",
        rule("trainer's own", y=rows[0]["p99"], look=Look("grey", "--")),
        rule(x=alphas[at]),
        lines(some, "α", "p99"),
        points(some, "α", "p99", tell=("p50", "max")),
    )


def draw() -> None:
    folder = provenance.chosen(*FILES)
    told = examples.load("routing", folder)
    alphas, rollouts = told["alphas"], told["rollouts"]
    one, two, three, four = st.columns(4)
    names = [f"{i}, {'success' if told['success'] else 'failure'}" for i, told in enumerate(rollouts, 1)]
    rollout = names.index(one.selectbox("Rollout", names, key="rollout", bind="query-params"))
    one.caption(f"`{rollouts[rollout]['task']}`")
    layers, T = stored(rollout, folder=folder)["sampler"].shape[1], len(stored(rollout, folder=folder)["sampler"])
    layer = two.slider("Layer", 1, layers, layers, key="layer", bind="query-params") - 1
    middle = min(alphas, key=lambda a: abs(a - 0.5))
    value = three.select_slider("α, required plausibility", alphas, middle, key="plausibility", bind="query-params")
    first = four.slider("First token shown", 0, max(T - WINDOW, 1), beginning(rollout, folder), key=f"first-{rollout + 1}", bind="query-params")
    alpha = alphas.index(value)
    rows, drops = token_rows(rollout, layer, alpha, alphas, folder), dropped(rollout, folder=folder)[alpha]
    shown = rows[first : first + WINDOW]
    chart(
        picture(fields(rollout, layer, alpha, first, rows, folder), layer, alphas[alpha]),
        "router-replay",
        shown,
        f"Probability of each expert for {len(shown)} tokens by the trainer's router; the fuller the grey, the higher. Squares are the "
        "sampler's choice, circles the trainer's own, crosses what replay uses.",
        wide=True,
    )
    spans.metrics(
        ("Tokens that differ", f"{sum(row['engines differ'] for row in rows)} of {len(rows)}", "The engines' own choices, on this layer."),
        ("Sampler's experts dropped", spans.exact(drops["dropped"], "{:.2%}"), "By the filter, over all layers."),
        ("Used, but not the trainer's own", spans.exact(drops["not its own"], "{:.2%}"), "What replay changes in the trainer, over all layers."),
    )
    only = st.toggle("Only tokens where the choices differ", True, key="only", bind="query-params")
    some = [row for row in rows if row["engines differ"] or row["filter dropped"]] if only else rows
    st.caption("gap: |log π − log μ| of the next token in nats, if the agent sampled that token.")
    if some:
        st.caption("Choose a row to see the experts around its token.")
        last = max(T - WINDOW, 1)
        steering(some, "router-replay-tokens", f"first-{rollout + 1}", [min(max(row["position"] - WINDOW // 2, 0), last) for row in some])
    else:
        st.markdown("On this layer they agree everywhere.")
    st.subheader("Mismatch by method")
    st.markdown(
        f"|log π − log μ| of the {len(examples.arrays('routing', folder)['behavior'])} tokens that the agent sampled in {told['played']} rollouts of "
        f"held-out tasks, nats. Sampler: {told['sampler']}; trainer: {told['trainer']}. α = 0 is plain replay, α = 1 the router's own choice. The "
        f"{len(rollouts)} rollouts above are {told['chosen']}."
    )
    (left, right), ways = st.columns([1, 1]), quantiles(folder=folder)
    with left:
        chart(
            curve(alphas, ways, alpha),
            "router-mismatch",
            ways,
            f"99th percentile of the mismatch against α, over all rollouts; at α = {value:g} it is {ways[alpha + 1]['p99']:.3f} nats.",
        )
    with right:
        folded(ways, "router-replay-mismatch")
    st.subheader("What the filter drops")
    st.markdown(
        "In the rollout above, over all layers: the share of the sampler's experts that are dropped, and the share of used experts that are not the "
        "trainer's own."
    )
    table(dropped(rollout, folder=folder), "router-replay-dropped")


PAGE = Page(
    name="replay",
    title="Router replay",
    says="Sampler and trainer round differently. If two experts have nearly equal scores, rounding decides which one gets the token. Replay gives "
    "the trainer the sampler's experts; the filter removes those that the trainer's router finds implausible.",
    formula=r"\begin{gathered}\text{keep } e \in R \iff p_e \ge \alpha\, p_{(K)} \\"
    r"p = \mathrm{softmax}(s) \qquad g_e = \frac{\exp s_e}{\sum_{j \in R}\exp s_j}\end{gathered}",
    question="Is the mismatch spread over all tokens, or is it on few? From which α on does the filter drop many of the sampler's experts?",
    look="Most of the mismatch is on few tokens, and plain replay removes much of it. The filter drops next to nothing until α is near 1, where "
    "it is no longer replay.",
    draw=draw,
    code=(router_replay.replay, router_replay.gates, router_replay.mismatch),
    technique="router-replay",
)
