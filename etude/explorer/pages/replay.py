"""Router replay: the experts chosen by a low-precision sampler, by an exact trainer, and by replay."""

from pathlib import Path

import numpy as np
import streamlit as st
import torch
from torch import Tensor

from etude.explorer import examples, provenance, spans
from etude.explorer.charts.chart import Axis, Look, boxes, chart, drawing, lines, points, rule
from etude.explorer.drawing import Drawing
from etude.explorer.page import Page, steering, table
from ref import router_replay

WINDOW = 20
"""Tokens in the picture."""
FILES = ("routing.json", "routing.npz")
CHOICES = {"sampler": 210, "trainer's own": 90, "replayed": 45}
"""Whose choice of experts, and the size of its marks, square pixels."""


@examples.remembered(*FILES, max_results=16)
def stored(rollout: int, folder: Path | None = None) -> dict[str, Tensor]:
    """The arrays of a rollout (`sims/examples/runs.py`), experts as integer indices. Raises RunError if they do not
    belong to routing.json, for example because only one of the two files was rewritten."""
    arrays, routing = examples.arrays("routing", folder), examples.load("routing", folder)
    alpha_count, T = len(routing["alphas"]), len(routing["rollouts"][rollout]["tokens"]) - 1
    shapes = {
        "scores": (None, T, None, None),
        "sampler": (T, None, None),
        "own": (T, None, None),
        "pass": (alpha_count,),
        "behavior": (T,),
        "logp": (alpha_count + 1, T),
    }
    rollout_arrays: dict[str, np.ndarray] = {}
    for name, shape in shapes.items():
        array = arrays.get(f"{rollout}/{name}")
        if (
            array is None
            or array.ndim != len(shape)
            or any(n not in (None, size) for n, size in zip(shape, array.shape))
        ):
            raise examples.unreadable(
                (folder or examples.FOLDER) / "routing.npz", f"{rollout}/{name} does not belong to routing.json"
            )
        rollout_arrays[name] = array
    return {
        name: torch.from_numpy(array.astype(np.int64) if name in ("sampler", "own", "pass") else array)
        for name, array in rollout_arrays.items()
    }


@examples.remembered(*FILES, max_results=512)
def replay_experts(rollout: int, alpha: int, folder: Path | None = None) -> tuple[Tensor, Tensor]:
    """Experts [T−1, L, K] used by replay at the α with this index, and the scores [T−1, L, E] of that pass: the input
    of a layer depends on the experts used in the layers before it."""
    arrays = stored(rollout, folder=folder)
    scores, threshold = arrays["scores"][arrays["pass"][alpha]], examples.load("routing", folder)["alphas"][alpha]
    layers = zip(scores.unbind(1), arrays["sampler"].unbind(1), strict=True)
    return torch.stack(
        [
            router_replay.replay(layer_scores, layer_experts, layer_experts.shape[-1], threshold)
            for layer_scores, layer_experts in layers
        ],
        1,
    ), scores


def find_differences(experts: Tensor, reference: Tensor) -> Tensor:
    """Where the expert sets [..., K] of two engines differ."""
    return (experts.sort(-1)[0] != reference.sort(-1)[0]).any(-1)


def beginning(rollout: int, folder: Path | None = None) -> int:
    """Start of a window in which the engines differ on the last layer; 0 if they never do."""
    arrays = stored(rollout, folder=folder)
    positions = find_differences(arrays["sampler"][:, -1], arrays["own"][:, -1]).nonzero()[:, 0].tolist()
    return max(0, min(positions[0] - WINDOW // 2, len(arrays["sampler"]) - WINDOW)) if positions else 0


@examples.remembered(*FILES)
def quantiles(folder: Path | None = None) -> list[dict]:
    """One row per method, over the sampled tokens of all rollouts: `router_replay.mismatch`."""
    columns, alphas = examples.arrays("routing", folder), examples.load("routing", folder)["alphas"]
    behavior = torch.from_numpy(columns["behavior"])
    ways, rows = ["own", *(f"α = {a:g}" for a in alphas)], []
    for way, logp in zip(ways, torch.from_numpy(columns["logp"]), strict=True):
        mismatch = router_replay.mismatch(logp, behavior, torch.ones_like(behavior, dtype=torch.bool))
        rows.append(
            {
                "experts": way,
                "p50": mismatch["p50"],
                "p99": mismatch["p99"],
                "max": mismatch["max"],
                "mean log μ − log π": mismatch["kl"],
            }
        )
    return rows


@examples.remembered(*FILES, max_results=16)
def dropped(rollout: int, folder: Path | None = None) -> list[dict]:
    """One row per α: the share of the sampler's experts that the filter drops, and the share of used experts that the
    router did not choose."""
    arrays, rows = stored(rollout, folder=folder), []
    for index, alpha in enumerate(examples.load("routing", folder)["alphas"]):
        used_experts = replay_experts(rollout, index, folder=folder)[0].unbind(1)
        rows.append(
            {
                "α": alpha,
                "dropped": router_replay.compare_experts(used_experts, arrays["sampler"].unbind(1))["decisions"],
                "not its own": router_replay.compare_experts(used_experts, arrays["own"].unbind(1))["decisions"],
            }
        )
    return rows


def token_rows(rollout: int, layer: int, alpha: int, alphas: list[float], folder: Path | None = None) -> list[dict]:
    """One row per position: the token, the next token, the experts of one layer for all three, and the gap |log π − log
    μ| of the next token in nats, if the agent sampled it."""
    arrays, rollout_record = stored(rollout, folder=folder), examples.load("routing", folder)["rollouts"][rollout]
    replayed_experts = replay_experts(rollout, alpha, folder=folder)[0][:, layer]
    sampler_experts, trainer_experts = arrays["sampler"][:, layer], arrays["own"][:, layer]
    engines_differ, filter_dropped = (
        find_differences(sampler_experts, trainer_experts),
        find_differences(sampler_experts, replayed_experts),
    )
    gap = (arrays["logp"] - arrays["behavior"]).abs()
    rows = []
    for t in range(len(sampler_experts)):
        is_sampled = bool(rollout_record["sampled"][t + 1])
        row = {"position": t, "token": rollout_record["tokens"][t], "next": rollout_record["tokens"][t + 1]}
        for name, experts in (
            ("sampler", sampler_experts),
            ("trainer's own", trainer_experts),
            ("replayed", replayed_experts),
        ):
            row[name] = " ".join(map(str, sorted(experts[t].tolist())))
        for way, name in ((0, "own"), (1, "plain replay"), (alpha + 1, f"α = {alphas[alpha]:g}")):
            row[f"gap, {name}"] = gap[way, t].item() if is_sampled else None
        rows.append(row | {"engines differ": bool(engines_differ[t]), "filter dropped": bool(filter_dropped[t])})
    return rows


def fields(
    rollout: int, layer: int, alpha: int, first: int, rows: list[dict], folder: Path | None = None
) -> list[dict]:
    """One row per token of the window and expert: the router's probability, and whose choice it is. `rows`: those of
    `token_rows`."""
    scores = replay_experts(rollout, alpha, folder=folder)[1][:, layer].softmax(-1)
    cells = []
    for row in rows[first : first + WINDOW]:
        position = row["position"]
        for expert, p in enumerate(scores[position].tolist()):
            choices = {name: str(expert) in row[name].split() for name in CHOICES}
            box = {"left": position - 0.5, "right": position + 0.5, "low": expert - 0.5, "high": expert + 0.5}
            cells.append(
                {"position": position, "token": row["token"], "next": row["next"], "expert": expert, "probability": p}
                | choices
                | box
            )
    return cells


def picture(rows: list[dict], layer: int, alpha: float) -> Drawing:
    """Router probabilities for some tokens, with the three choices on top. `rows`: those of `fields`."""
    tick_labels = {row["position"]: repr(row["token"])[1:-1] for row in rows}
    experts = sorted({row["expert"] for row in rows})
    columns = ("token", "next", "expert", "probability", *CHOICES)
    names = dict(zip(CHOICES, ("sampler", "trainer's own", f"replayed, α = {alpha:g}"), strict=True))
    marks = [
        points(
            [row | {"whose": names[name]} for row in rows if row[name]],
            "position",
            "expert",
            "whose",
            tell=columns,
            hollow=name != "replayed",
            size=size,
        )
        for name, size in CHOICES.items()
    ]
    looks = (Look("orange", mark="s"), Look("blue", mark="o"), Look("red", mark="x"))
    return drawing(
        Axis("", lower=min(tick_labels) - 0.5, upper=max(tick_labels) + 0.5, ticks=tick_labels),
        Axis(
            f"expert of layer {layer + 1}",
            lower=-0.5,
            upper=experts[-1] + 0.5,
            ticks={expert: str(expert) for expert in experts},
        ),
        boxes(
            rows, "left", "right", "low", "high", tell=("position", *columns), shade="probability", look=Look("grey")
        ),
        *marks,
        looks=dict(zip(names.values(), looks, strict=True)),
        height=130 + 24 * len(experts),
    )


def build_mismatch_curve(alphas: list[float], rows: list[dict], alpha_index: int) -> Drawing:
    """p99 of the mismatch against α, over all rollouts."""
    curve_rows = [row | {"α": alpha, "what": "replayed"} for alpha, row in zip(alphas, rows[1:], strict=True)]
    return drawing(
        "α",
        "p99 of |log π − log μ|, nats",
        rule("trainer's own", y=rows[0]["p99"], look=Look("grey", "--")),
        rule(x=alphas[alpha_index]),
        lines(curve_rows, "α", "p99"),
        points(curve_rows, "α", "p99", tell=("p50", "max")),
    )


def draw() -> None:
    folder = provenance.choose_examples(*FILES)
    routing = examples.load("routing", folder)
    alphas, rollouts = routing["alphas"], routing["rollouts"]
    rollout_column, layer_column, alpha_column, first_column = st.columns(4)
    names = [
        f"{i}, {'success' if rollout_record['success'] else 'failure'}" for i, rollout_record in enumerate(rollouts, 1)
    ]
    rollout = names.index(rollout_column.selectbox("Rollout", names, key="rollout", bind="query-params"))
    rollout_column.caption(f"`{rollouts[rollout]['task']}`")
    layers, T = stored(rollout, folder=folder)["sampler"].shape[1], len(stored(rollout, folder=folder)["sampler"])
    layer = layer_column.slider("Layer", 1, layers, layers, key="layer", bind="query-params") - 1
    middle_alpha = min(alphas, key=lambda a: abs(a - 0.5))
    value = alpha_column.select_slider(
        "α, required plausibility", alphas, middle_alpha, key="plausibility", bind="query-params"
    )
    first = first_column.slider(
        "First token shown",
        0,
        max(T - WINDOW, 1),
        beginning(rollout, folder),
        key=f"first-{rollout + 1}",
        bind="query-params",
    )
    alpha = alphas.index(value)
    rows, drops = token_rows(rollout, layer, alpha, alphas, folder), dropped(rollout, folder=folder)[alpha]
    window_rows = rows[first : first + WINDOW]
    chart(
        picture(fields(rollout, layer, alpha, first, rows, folder), layer, alphas[alpha]),
        "router-replay",
        window_rows,
        f"Probability of each expert for {len(window_rows)} tokens by the trainer's router, as the depth of the grey. "
        "Squares: the sampler's experts; circles: the trainer's own; crosses: the experts that replay uses.",
        wide=True,
    )
    spans.metrics(
        (
            "Tokens that differ",
            f"{sum(row['engines differ'] for row in rows)} of {len(rows)}",
            "The engines' own choices, on this layer.",
        ),
        ("Sampler's experts dropped", spans.exact(drops["dropped"], "{:.2%}"), "By the filter, over all layers."),
        (
            "Used, but not the trainer's own",
            spans.exact(drops["not its own"], "{:.2%}"),
            "Share of the experts used by replay, over all layers.",
        ),
    )
    should_filter = st.toggle("Only tokens where the choices differ", True, key="only", bind="query-params")
    table_rows = [row for row in rows if row["engines differ"] or row["filter dropped"]] if should_filter else rows
    st.caption("gap: |log π − log μ| of the next token in nats, if the agent sampled that token.")
    if table_rows:
        st.caption("Select a row to show the experts around its token.")
        max_first = max(T - WINDOW, 1)
        steering(
            table_rows,
            "router-replay-tokens",
            f"first-{rollout + 1}",
            [min(max(row["position"] - WINDOW // 2, 0), max_first) for row in table_rows],
        )
    else:
        st.markdown("On this layer sampler and trainer choose the same experts for every token.")
    st.subheader("Mismatch by method")
    st.markdown(
        f"|log π − log μ| of the {len(examples.arrays('routing', folder)['behavior'])} tokens that the agent sampled "
        f"in {routing['played']} rollouts of "
        f"held-out tasks, nats. Sampler: {routing['sampler']}; trainer: {routing['trainer']}. α = 0 is plain replay, "
        "α = 1 the router's own choice. The "
        f"{len(rollouts)} rollouts above are {routing['chosen']}."
    )
    mismatch_rows = quantiles(folder=folder)
    chart(
        build_mismatch_curve(alphas, mismatch_rows, alpha),
        "router-mismatch",
        mismatch_rows,
        f"99th percentile of the mismatch against α, over all rollouts; at α = {value:g} it is "
        f"{mismatch_rows[alpha + 1]['p99']:.3f} nats.",
    )
    st.subheader("Experts dropped by the filter")
    st.markdown(
        "In the rollout above, over all layers: the share of the sampler's experts that are dropped, "
        "and the share of used experts that are not the "
        "trainer's own."
    )
    table(dropped(rollout, folder=folder), "router-replay-dropped")


PAGE = Page(
    name="replay",
    title="Router replay",
    says="Sampler and trainer round differently. If two experts have nearly equal scores, rounding decides which one "
    "gets the token. With replay the trainer uses the sampler's experts; a filter removes those with a low "
    "probability under the trainer's router.",
    formula=r"\begin{gathered}\text{keep } e \in R \iff p_e \ge \alpha\, p_{(K)} \\"
    r"p = \mathrm{softmax}(s) \qquad g_e = \frac{\exp s_e}{\sum_{j \in R}\exp s_j}\end{gathered}",
    symbols={
        "e,\\ j": "experts",
        "R": "experts that the sampler chose for the token; in the gates, those that remain",
        "s": "logits of the trainer's router",
        r"\mathrm{softmax}": "exp of each logit over the sum of all",
        "p_e": "router probability of expert e",
        "p_{(K)}": "the K-th largest one; K experts are used for each token",
        r"\alpha": "plausibility threshold from 0 to 1",
        "g_e": "gate, the weight of expert e in the layer's output",
    },
    question="Is the mismatch spread over all tokens, or is it on few? From which α on does the filter drop "
    "many of the sampler's experts?",
    look="Most of the mismatch is on few tokens, and plain replay removes much of it. The filter drops almost nothing "
    "until α is near 1, where the trainer's own experts are used.",
    draw=draw,
    code=(router_replay.replay, router_replay.gates, router_replay.mismatch),
    technique="router-replay",
)
