"""Weight sync: which weights an update changes and what a difference costs, from the law and measured, and how a late reader catches up."""

from functools import lru_cache

import numpy as np
import streamlit as st
import torch
from matplotlib.figure import Figure
from torch import Tensor

from etude.explorer.charts import Axis, Look, chart, drawing, lines, points, rule
from etude.explorer.drawing import Drawing
from etude.explorer.page import COLOURS, Page, figure, folded, png, table
from etude.explorer.spans import metrics
from ref import weight_codec, weight_sync
from sims.weight_sync import sizes

LRS = (1e-7, 3e-7, 1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3)
STDS = (0.005, 0.01, 0.02, 0.05, 0.1)
EVEN, NORMAL = "all of one size", "normal"
WEIGHTS = 100_000
"""Made-up weights behind each figure."""
SMALL, ROWS, VERSIONS = 10_000, 20, 40
"""Weights of the chain, the rows that hold them, and its versions after the first: it is made anew for each setting."""
LAW = "E[min(1, |Δ|/ulp(w))]"
CODINGS = {
    "gap + step": Look("blue", "-", "o"),
    "XOR": Look("red", "--", "s"),
    "index + value": Look("purple", "-.", "^"),
    "law": Look("grey", ":", "x"),
}
FETCHED = {"from nothing": Look("orange", "--"), "delta by delta": Look("grey", ":"), "cheapest way": Look("blue")}


@lru_cache(32)
def drawn(std: float, updates: str, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Masters, and an update of unit size: normal numbers, or ±1 as Adam's first steps are."""
    generator = torch.Generator().manual_seed(seed)
    masters, update = std * torch.randn(WEIGHTS, generator=generator), torch.randn(WEIGHTS, generator=generator)
    return masters, update.sign() if updates == EVEN else update


def entropy_bits(ratio: np.ndarray) -> float:
    """Bits of a changed weight in the best code that takes positions and steps as independent. ratio: |Δ|/ulp of each weight.

    An update of r neighbouring numbers moves a weight by ⌊r⌋ or by one more, this with probability r − ⌊r⌋; both signs are equally likely."""
    whole = np.minimum(np.floor(ratio), 1000).astype(int)
    part = np.minimum(ratio - whole, 1.0)
    longest = int(whole.max()) + 2
    counts = np.bincount(whole, 1 - part, longest) + np.bincount(whole + 1, part, longest)  # weights that move by 0, 1, 2, … numbers
    share = counts[1:].sum() / len(ratio)
    if not 0 < share < 1:
        return 0.0
    positions = -share * np.log2(share) - (1 - share) * np.log2(1 - share)
    p = counts[1:][counts[1:] > 0] / counts[1:].sum()
    return float(positions / share - (p * np.log2(p)).sum() + 1)


@lru_cache(32)
def coded(std: float, updates: str) -> list[dict]:
    """One row for each learning rate: the law's share and bits, and the same measured on one update of made-up weights."""
    masters, unit = drawn(std, updates)
    old, ulp, rows = masters.bfloat16(), weight_sync.ulp(masters).numpy(), []
    for lr in LRS:
        update = lr * unit
        new = (masters + update).bfloat16()
        found, delta = sizes(old, new), weight_codec.pack(*weight_codec.encode_delta(old, new), WEIGHTS)
        changed = max(found["changed"], 1)
        rows.append(
            {
                "learning rate": lr,
                "law, changed share": weight_sync.changed_share(masters, update),
                "changed share": found["changed"] / WEIGHTS,
                "law": entropy_bits(update.double().abs().numpy() / ulp),
                "gap + step": 8 * len(delta) / changed,
                "XOR": 8 * found["xor"] / changed,
                "index + value": 8 * found["index"] / changed,
                "of XOR": len(delta) / found["xor"],
                "times smaller than all weights": 2 * WEIGHTS / len(delta),
            }
        )
    return rows


def shares(rows: list[dict], lr: float) -> Drawing:
    """Share of weights that change, by the law and measured."""
    law = [{"what": LAW, "learning rate": row["learning rate"], "share": row["law, changed share"]} for row in rows]
    found = [{"what": "measured", "learning rate": row["learning rate"], "share": row["changed share"]} for row in rows]
    return drawing(
        Axis("learning rate", log=True),
        Axis("changed share of the weights", log=True),
        rule(x=lr),
        lines(law, "learning rate", "share", "what"),
        points(found, "learning rate", "share", "what"),
        looks={LAW: Look("grey"), "measured": Look("blue", mark="o")},
    )


def bits(rows: list[dict], lr: float) -> Drawing:
    """Bits of a changed weight, coding by coding."""
    some = [{"coding": name, "learning rate": row["learning rate"], "bits": float(row[name])} for name in CODINGS for row in rows]
    both = lines(some, "learning rate", "bits", "coding"), points(some, "learning rate", "bits", "coding")
    return drawing(Axis("learning rate", log=True), Axis("bits for a changed weight", most=60), rule(x=lr), *both, looks=CODINGS)


@lru_cache(32)
def chain(lr: float, std: float, updates: str, anchor_every: int, merge_every: int) -> dict[int, dict]:
    """Manifests of a chain of versions of made-up weights, as `Writer` publishes them: an update after each."""
    masters, _ = drawn(std, updates)
    masters, store = masters[:SMALL].view(ROWS, -1).clone(), dict[str, bytes]()
    writer, generator = weight_sync.Writer(store, anchor_every, merge_every), torch.Generator().manual_seed(1)
    manifests = {}
    for version in range(VERSIONS + 1):
        manifests[version] = writer.publish(version, [weight_sync.Part("w", tuple(masters.shape), 0, masters)])
        update = torch.randn(masters.shape, generator=generator)
        masters += lr * (update.sign() if updates == EVEN else update)
    return manifests


def weight_of(link: dict) -> int:
    """Bytes of a link."""
    return sum(shard["bytes"] for shard in link["shards"])


def way(manifests: dict[int, dict], have: int | None, want: int) -> list[dict]:
    """The links that a reader fetches, in order."""
    if have == want:
        return []
    found = weight_sync.cheapest(manifests, have, want, set())
    assert found is not None, "the first version is an anchor"
    links = [(version, manifests[version]["links"][n]) for version, n in found]
    return [{"version": version, "from": link["base"], "link": link["kind"], "bytes": weight_of(link)} for version, link in links]


def late(manifests: dict[int, dict], want: int) -> list[dict]:
    """Bytes to fetch for a reader that is 1, 2, … versions behind: by the cheapest way, delta by delta, and everything anew."""
    deltas = {version: weight_of(next(link for link in m["links"] if link["kind"] == "delta")) for version, m in manifests.items() if version}
    anew, rows = sum(one["bytes"] for one in way(manifests, None, want)), []
    for behind in range(1, want + 1):
        cheapest = sum(one["bytes"] for one in way(manifests, want - behind, want))
        single = sum(deltas[version] for version in range(want - behind + 1, want + 1))
        rows.append({"versions behind": behind, "cheapest way": cheapest, "delta by delta": single, "from nothing": anew})
    return rows


@lru_cache(64)
def diagram(key: tuple, have: int | None, want: int) -> bytes:
    """Versions on a line; links as arcs above it, anchors as arrows from below; those that are fetched in colour."""
    manifests = chain(*key)
    taken = {(one["version"], one["from"]) for one in way(manifests, have, want)}
    fig = Figure(figsize=(10.0, 2.7))
    ax = fig.add_axes((0.01, 0.14, 0.98, 0.84))
    half = np.linspace(0, np.pi, 24)
    for version in range(want + 1):
        for link in manifests[version]["links"]:
            base, used = link["base"], (version, link["base"]) in taken
            look = {"linewidth": 2.6 if used else 0.9, "zorder": 3 if used else 1}
            if base is None:
                ax.annotate(
                    "",
                    (version, -0.08),
                    (version, -0.75),
                    arrowprops={"arrowstyle": "->", "color": COLOURS["orange" if used else "grey"], "linewidth": look["linewidth"]},
                )
                continue
            span = version - base
            colour = ("green" if link["kind"] == "merged" else "blue") if used else "grey"
            ax.plot(base + span * (1 - np.cos(half)) / 2, np.sin(half) * span**0.5 / 1.6, color=COLOURS[colour], **look)
    ax.plot(range(want + 1), [0] * (want + 1), "o", color=COLOURS["grey"], markersize=3, zorder=4)
    ax.plot([want], [0], "s", color=COLOURS["red"], markersize=8, zorder=5)
    if have is not None:
        ax.plot([have], [0], "D", color="black", markersize=8, zorder=5)
    ax.set(xlim=(-0.6, want + 0.6), ylim=(-0.9, 0.3 + max(1, key[-1]) ** 0.5 / 1.6), yticks=[])
    ax.locator_params(axis="x", integer=True)
    ax.tick_params(labelsize=8)
    ax.spines[["top", "right", "left"]].set_visible(False)
    return png(fig)


def costs(rows: list[dict], behind: int) -> Drawing:
    """Bytes to fetch by how late a reader is."""
    some = [{"way": name, "versions behind": row["versions behind"], "bytes": row[name]} for name in FETCHED for row in rows]
    here = [rule(x=behind)] if behind else []
    return drawing("versions behind", Axis("bytes to fetch", log=True), *here, lines(some, "versions behind", "bytes", "way"), looks=FETCHED)


def draw() -> None:
    one, two, three = st.columns(3)
    lr = one.select_slider("Learning rate", LRS, 1e-6, key="lr", bind="query-params")
    std = two.select_slider("Standard deviation of the weights", STDS, 0.02, key="std", bind="query-params")
    updates = three.selectbox(
        "Updates", (NORMAL, EVEN), key="updates", bind="query-params", help="Of each weight; Adam's are near one size while gradients agree."
    )
    rows = coded(std, updates)
    here = rows[LRS.index(lr)]
    metrics(
        ("Changed, by the law", f"{100 * here['law, changed share']:.3g}%", "E[min(1, |Δ|/ulp(w))]"),
        ("Changed, measured", f"{100 * here['changed share']:.3g}%", f"Of {WEIGHTS:,} made-up weights, by one update."),
        ("Bits for each", f"{here['gap + step']:.1f}", "Gap and step, under zstd level 1."),
        ("Smaller than all weights", f"{here['times smaller than all weights']:.0f}×", None),
        ("Of XOR under zstd", f"{here['of XOR']:.2f}", "Bytes by gap and step over bytes by XOR."),
    )
    left, right = st.columns(2)
    with left:
        chart(shares(rows, lr), "weight-sync-share", rows, "Share of bfloat16 weights whose bits change in one update: the law, and made-up weights.")
    with right:
        chart(
            bits(rows, lr),
            "weight-sync-bits",
            rows,
            "Bits for each changed weight, each coding under zstd level 1. Dotted: the entropy of independent positions and steps, from the law.",
        )
    folded(rows, "weight-sync-codings")
    st.subheader("A reader that is late")
    one, two, three, four = st.columns(4)
    want = one.slider("Newest version", 1, VERSIONS, 30, key="newest", bind="query-params")
    behind = two.slider("Versions behind", 0, VERSIONS, 18, key="behind", bind="query-params", help="At most as many as there are.")
    anchor = three.slider("An anchor every", 5, 40, 25, 5, key="anchor", bind="query-params", help="Versions from one full copy to the next.")
    merge = four.slider("A merged delta every", 2, 16, 8, key="merge", bind="query-params", help="It replaces as many deltas.")
    empty = st.toggle("The reader has nothing yet", False, key="empty", bind="query-params")
    key = lr, std, updates, anchor, merge
    manifests = chain(*key)
    have = None if empty else max(0, want - behind)
    taken = way(manifests, have, want)
    fetched, all_of_it = sum(link["bytes"] for link in taken), 2 * SMALL
    metrics(
        ("Links fetched", len(taken), None),
        ("Bytes", f"{fetched:,}", f"All weights are {all_of_it:,} bytes."),
        ("Of all weights", f"{fetched / all_of_it:.2%}", None),
    )
    figure(
        diagram(key, have, want),
        "weight-sync-chain",
        [
            {"version": version, "from": link["base"], "link": link["kind"], "bytes": weight_of(link), "fetched": (version, link["base"]) in ways}
            for ways in [{(one["version"], one["from"]) for one in taken}]
            for version in range(want + 1)
            for link in manifests[version]["links"]
        ],
        "Versions from left to right. Arcs are deltas and merged deltas, arrows from below are anchors. The reader (diamond, unless it has nothing) "
        "fetches what is drawn thick, blue for deltas, green for merged ones, orange for anchors, and then has the newest version (square).",
        wide=True,
    )
    left, right = st.columns(2)
    with left:
        rows = late(manifests, want)
        chart(
            costs(rows, 0 if have is None else want - have), "weight-sync-late", rows, "What a reader has to fetch by how many versions it is behind."
        )
    with right:
        if taken:
            table(taken, "weight-sync-links")
        else:
            st.markdown("The reader has the newest version.")


PAGE = Page(
    name="weight-sync",
    title="Weight sync",
    says="The trainer publishes the difference of its bfloat16 weights after each step, and engines rebuild the same bits. How many weights change, "
    "what a changed one costs, and what a reader fetches that has missed some versions. Everything is measured while you look, on made-up weights.",
    formula=r"\text{changed share} = \mathbb{E}\left[\min\left(1, \frac{|\Delta|}{\mathrm{ulp}(w)}\right)\right]",
    question="A step of 1e-6: does it change nearly all bfloat16 weights, half of them, or a few percent? From which step size on should a late "
    "reader take everything anew?",
    look="At 1e-6 a few percent of these weights change, and each costs little more than the entropy of its place and step. A late reader takes "
    "merged deltas; from about 1e-4 on an anchor is soon cheaper than many deltas.",
    draw=draw,
    code=(weight_sync.changed_share, weight_codec.encode_delta, weight_codec.pack, weight_sync.cheapest),
    technique="weight-sync",
)
