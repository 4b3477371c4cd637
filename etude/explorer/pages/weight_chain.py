"""A chain of versions of synthetic weights, and the links that a late reader fetches."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import streamlit as st
import torch
from torch import Tensor

from etude.explorer.charts.chart import Axis, Look, chart, drawing, lines, rule
from etude.explorer.drawing import Drawing, Layer
from etude.explorer.page import table
from etude.explorer.playing import play
from etude.explorer.spans import metrics
from ref import weight_sync

__all__ = [
    "EVEN",
    "NORMAL",
    "ROWS",
    "SMALL",
    "VERSIONS",
    "WEIGHTS",
    "chain",
    "diagram",
    "sample_weights",
    "late",
    "late_reader",
    "links",
    "way",
]

EVEN, NORMAL = "all of one size", "normal"
WEIGHTS = 100_000
"""Made-up weights behind each figure."""
SMALL, ROWS, VERSIONS = 10_000, 20, 40
"""Weights of the chain, the rows that hold them, and its versions after the first: it is made anew for each setting."""
FETCH_LOOKS = {"from nothing": Look("orange", "--"), "delta by delta": Look("grey", ":"), "cheapest way": Look("blue")}
KINDS = {"anchor": "orange", "merged": "green", "delta": "blue"}
"""A link that is fetched → its colour."""
TOOLTIP_COLUMNS = ("link", "version", "from", "bytes", "fetched")
"""What hovering tells of a link."""


@lru_cache(32)
def sample_weights(std: float, updates: str, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Masters, and an update of unit size: normal numbers, or ±1 as Adam's first steps are."""
    generator = torch.Generator().manual_seed(seed)
    masters, update = std * torch.randn(WEIGHTS, generator=generator), torch.randn(WEIGHTS, generator=generator)
    return masters, update.sign() if updates == EVEN else update


@lru_cache(32)
def chain(lr: float, std: float, updates: str, anchor_every: int, merge_every: int) -> dict[int, dict]:
    """Manifests of a chain of versions of made-up weights, as `Writer` publishes them: an update after each."""
    masters, _ = sample_weights(std, updates)
    masters, store = masters[:SMALL].view(ROWS, -1).clone(), dict[str, bytes]()
    writer, generator = weight_sync.Writer(store, anchor_every, merge_every), torch.Generator().manual_seed(1)
    manifests = {}
    for version in range(VERSIONS + 1):
        manifests[version] = writer.publish(version, [weight_sync.Part("w", tuple(masters.shape), 0, masters)])
        update = torch.randn(masters.shape, generator=generator)
        masters += lr * (update.sign() if updates == EVEN else update)
    return manifests


def count_bytes(link: dict) -> int:
    """Bytes of a link."""
    return sum(shard["bytes"] for shard in link["shards"])


def way(manifests: dict[int, dict], have: int | None, want: int) -> list[dict]:
    """The links that a reader fetches, in order."""
    if have == want:
        return []
    cheapest_links = weight_sync.cheapest(manifests, have, want, set())
    assert cheapest_links is not None, "the first version is an anchor"
    links = [(version, manifests[version]["links"][n]) for version, n in cheapest_links]
    return [
        {"version": version, "from": link["base"], "link": link["kind"], "bytes": count_bytes(link)}
        for version, link in links
    ]


def late(manifests: dict[int, dict], want: int) -> list[dict]:
    """Bytes to fetch for a reader that is 1, 2, … versions behind: by the cheapest way, delta by delta, and everything
    anew."""
    deltas = {
        version: count_bytes(next(link for link in manifest["links"] if link["kind"] == "delta"))
        for version, manifest in manifests.items()
        if version
    }
    full_bytes, rows = sum(fetched_link["bytes"] for fetched_link in way(manifests, None, want)), []
    for behind in range(1, want + 1):
        cheapest_bytes = sum(fetched_link["bytes"] for fetched_link in way(manifests, want - behind, want))
        delta_bytes = sum(deltas[version] for version in range(want - behind + 1, want + 1))
        rows.append(
            {
                "versions behind": behind,
                "cheapest way": cheapest_bytes,
                "delta by delta": delta_bytes,
                "from nothing": full_bytes,
            }
        )
    return rows


def links(manifests: dict[int, dict], have: int | None, want: int) -> list[dict]:
    """All links of the versions up to `want`, and which of them the reader fetches."""
    fetched_keys = {(fetched_link["version"], fetched_link["from"]) for fetched_link in way(manifests, have, want)}
    return [
        {
            "version": version,
            "from": link["base"],
            "link": link["kind"],
            "bytes": count_bytes(link),
            "fetched": (version, link["base"]) in fetched_keys,
        }
        for version in range(want + 1)
        for link in manifests[version]["links"]
    ]


def make_arc(link: dict) -> list[dict]:
    """A link as points of a line: an arc above the versions, or for an anchor an arrow's shaft from below."""
    row = link | {
        "from": "nothing" if link["from"] is None else link["from"],
        "arc": f"{link['version']} from {link['from']}",
    }
    if link["from"] is None:
        return [row | {"x": link["version"], "y": y} for y in (-0.75, -0.42, -0.2)]
    span = link["version"] - link["from"]
    angles = np.linspace(0, np.pi, 9 if span == 1 else 21).tolist()
    return [
        row | {"x": link["from"] + span * (1 - np.cos(angle)) / 2, "y": np.sin(angle) * span**0.5 / 1.6}
        for angle in angles
    ]


def diagram(link_rows: Sequence[dict], have: int | None, want: int, merge_every: int) -> Drawing:
    """Versions on a line; links as arcs above it, anchors as arrows from below; those that are fetched in colour.
    `link_rows`: those of `links`."""
    layers = []
    for kind, fetched in ((None, False), *((kind, True) for kind in KINDS)):
        rows = [
            row
            for link in link_rows
            if link["fetched"] == fetched and kind in (None, link["link"])
            for row in make_arc(link)
        ]
        look = Look(KINDS[kind] if kind else "grey", mark="^")
        heads = [row for row in rows if row["link"] == "anchor" and row["y"] == -0.2]
        layers.append(Layer("line", rows, "x", "y", tell=TOOLTIP_COLUMNS, split="arc", thin=not fetched, look=look))
        layers.append(Layer("point", heads, "x", "y", tell=TOOLTIP_COLUMNS, look=look, size=70 if fetched else 25))
    stops = [{"version": version, "y": 0.0} for version in range(want + 1)]
    marks = (("held by the reader", have, Look("purple", mark="D")), ("newest", want, Look("red", mark="s")))
    for label, version, look in (("published", None, Look("grey")), *(mark for mark in marks if mark[1] is not None)):
        rows = [row | {"this version": label} for row in stops if version in (None, row["version"])]
        layers.append(
            Layer(
                "point",
                rows,
                "version",
                "y",
                tell=("version", "this version"),
                look=look,
                size=15 if version is None else 110,
            )
        )
    return drawing(
        Axis("version", lower=-0.6, upper=VERSIONS + 0.6, integer=True),
        Axis("", lower=-0.9, upper=0.3 + max(1, merge_every) ** 0.5 / 1.6, ticks={}),
        *layers,
        height=240,
    )


def build_cost_chart(rows: list[dict], behind: int) -> Drawing:
    """Bytes to fetch by how late a reader is."""
    series_rows = [
        {"way": name, "versions behind": row["versions behind"], "bytes": row[name]}
        for name in FETCH_LOOKS
        for row in rows
    ]
    marker_layers = [rule(x=behind)] if behind else []
    return drawing(
        "versions behind",
        Axis("bytes to fetch", log=True),
        *marker_layers,
        lines(series_rows, "versions behind", "bytes", "way"),
        looks=FETCH_LOOKS,
    )


def late_reader(lr: float, std: float, updates: str) -> None:
    """Draws the section: what the reader fetches, as the chain grows."""
    st.subheader("A late reader")
    behind_column, anchor_column, merge_column = st.columns(3)
    behind = behind_column.slider(
        "Versions behind", 0, VERSIONS, 18, key="behind", bind="query-params", help="At most as many as there are."
    )
    anchor = anchor_column.slider(
        "An anchor every",
        5,
        40,
        25,
        5,
        key="anchor",
        bind="query-params",
        help="Versions from one full copy to the next.",
    )
    merge = merge_column.slider(
        "A merged delta every", 2, 16, 8, key="merge", bind="query-params", help="It replaces as many deltas."
    )
    empty = st.toggle("The reader has no weights yet", False, key="empty", bind="query-params")
    manifests = chain(lr, std, updates, anchor, merge)
    versions = range(1, VERSIONS + 1)
    play(
        "Newest version",
        "newest",
        versions,
        30,
        lambda want: draw_catch_up(manifests, None if empty else max(0, want - behind), want, merge),
    )


def draw_catch_up(manifests: dict[int, dict], have: int | None, want: int, merge_every: int) -> None:
    """What a reader with version `have` fetches to have version `want`."""
    fetched_links, all_links = way(manifests, have, want), links(manifests, have, want)
    fetched_bytes, total_bytes = sum(link["bytes"] for link in fetched_links), 2 * SMALL
    metrics(
        ("Links fetched", len(fetched_links), None),
        ("Bytes", f"{fetched_bytes:,}", f"All weights are {total_bytes:,} bytes."),
        ("Of all weights", f"{fetched_bytes / total_bytes:.2%}", None),
    )
    chart(
        diagram(all_links, have, want, merge_every),
        "weight-sync-chain",
        all_links,
        "Versions from left to right. Arcs are deltas and merged deltas, arrows from below are anchors. The reader "
        "(diamond, unless it has no weights) fetches the thick links, blue for deltas, green for merged ones, orange "
        "for anchors, to reach the newest version (square).",
        wide=True,
    )
    left, right = st.columns(2)
    with left:
        rows = late(manifests, want)
        chart(
            build_cost_chart(rows, 0 if have is None else want - have),
            "weight-sync-late",
            rows,
            "Bytes that a reader fetches, by the number of versions that it is behind.",
        )
    with right:
        if fetched_links:
            table(fetched_links, "weight-sync-links")
        else:
            st.markdown("The reader has the newest version.")
