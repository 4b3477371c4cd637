"""Bytes and FLOPs of a launch of kernels/registry.py: of one program, and of the whole.

FLOPs are those of products; what a quantiser or a router computes beside its loads is not counted. A program's bytes
are what it asks of the memory system, so that an operand which eight programs read counts eight times.
`count_launch_work` counts every argument's bytes one time: no kernel can do with less traffic, and the roofline's floor
stands on that.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .registry import Launch

__all__ = ["count_tile_work", "count_launch_work"]

STORED = {0: 1.0, 1: 1.0 + 4 / 128, 2: 1.0 + 1 / 32, 3: 0.5 + 1 / 16}
"""Bytes per number of an operand and its scales, by FORM of kernels/gemm.py; form 0 is counted in numbers of the
operand's own size."""


@dataclass(frozen=True)
class Product:
    """A kernel's program as a product of tiles, [rows, depth] by [depth, columns]."""

    rows: str
    columns: str
    """Names of the tile's constants."""
    depth: Callable[[Launch], float]
    flops: Callable[[Launch], float]
    """Of the whole launch."""
    passes: Callable[[Launch, dict], float] = lambda launch, tile: 1.0
    """Tiles that a program computes one after another."""
    writes: bool = True
    """Whether it stores its tile."""


def size(launch: Launch, tensor: str, axis: int) -> int:
    return launch.tensors[tensor][0][axis]


def heads(launch: Launch) -> int:
    """The summed width of the one or two products behind logits: a divergence needs the other network's too."""
    is_divergence = launch.constants.get("KL") or launch.constants.get("MODE", 0) > 0
    return launch.numbers["D"] + (launch.numbers["C"] if is_divergence else 0)


def packed(launch: Launch) -> int:
    """How many numbers a row has whose bytes K counts: a byte is two of NVFP4."""
    return launch.numbers["K"] * (2 if launch.constants["FORM"] == 3 else 1)


PRODUCTS = {
    "matmul_kernel": Product(
        "BM", "BN", lambda x: x.numbers["K"], lambda x: 2 * x.numbers["M"] * x.numbers["N"] * x.numbers["K"]
    ),
    "rows_kernel": Product(
        "BM", "BN", lambda x: x.numbers["K"], lambda x: 2 * x.numbers["N"] * x.numbers["O"] * x.numbers["K"]
    ),
    "weights_kernel": Product(
        "BM",
        "BN",
        lambda x: size(x, "a", -1) / size(x, "out", 0),
        lambda x: 2 * x.numbers["O"] * x.numbers["D"] * size(x, "a", -1),
    ),
    "scaled_matmul_kernel": Product("BM", "BN", packed, lambda x: 2 * x.numbers["M"] * x.numbers["N"] * packed(x)),
    "scaled_rows_kernel": Product("BM", "BN", packed, lambda x: 2 * size(x, "out", 0) * x.numbers["O"] * packed(x)),
    "scaled_weights_kernel": Product(
        "BM",
        "BN",
        lambda x: size(x, "a", -1) / size(x, "out", 0),
        lambda x: 2 * x.numbers["O"] * x.numbers["D"] * size(x, "a", -1),
    ),
    "forward_kernel": Product(
        "BM",
        "BV",
        heads,
        lambda x: 2 * x.numbers["N"] * x.numbers["V"] * heads(x),
        lambda x, tile: math.ceil(x.numbers["width"] / tile["BV"]),
        False,
    ),
    "backward_kernel": Product("BM", "BV", heads, lambda x: 2 * x.numbers["N"] * x.numbers["width"] * heads(x)),
    "symmetric_kernel": Product(
        "BM",
        "BM",
        lambda x: x.numbers["K"],
        lambda x: size(x, "out", 0) * x.numbers["M"] * (x.numbers["M"] + 1) * x.numbers["K"],
    ),
}


def count_tile_work(launch: Launch, tile: dict[str, Any]) -> tuple[int, int]:
    """Bytes and FLOPs of one program. A kernel that is no product shares its bytes evenly among its programs."""
    product = PRODUCTS.get(launch.kernel.__name__)
    if product is None:
        programs = math.prod(launch.grid({**launch.constants, **tile}))
        return round(count_launch_work(launch)[0] / programs), 0
    tile = {**launch.constants, **tile}
    rows, columns, depth, passes = (
        tile[product.rows],
        tile[product.columns],
        product.depth(launch),
        product.passes(launch, tile),
    )
    operand = next(iter(launch.tensors.values()))[1] * STORED[launch.constants.get("FORM", 0)]
    out = rows * columns * launch.tensors["out"][1] if product.writes else 0
    return round(passes * (rows + columns) * depth * operand + out), round(2 * passes * rows * columns * depth)


def count_launch_work(launch: Launch) -> tuple[int, int]:
    """Bytes of all distinct arguments, each once, and FLOPs of the whole launch."""
    product = PRODUCTS.get(launch.kernel.__name__)
    total = launch.bytes
    if launch.kernel.__name__ == "backward_kernel":  # a launch reads one slice of the vocabulary
        unread = size(launch, "weight", 0) - launch.numbers["width"]
        total -= unread * heads(launch) * launch.tensors["weight"][1]
    return total, 0 if product is None else round(product.flops(launch))
