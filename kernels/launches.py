"""What a layer of experts launches, in order, with the bytes and operations of each: the list of `kernels/experts.py`,
counted without running it.

Bytes are what a launch must at least move between its caches and memory: each number that it reads, once, and each that
it writes, once. A product reads an operand again for every tile that does not find it in the L2 cache any more;
`traffic` counts that for an order of tiles. FLOPs are those of the products, 2 per multiplication and addition, for the
assignments that exist; padding is not counted.

`kernels/cost.py` counts the same layer without what an implementation adds, for GPUs and ratios; tests hold the two
counts together."""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Launch", "launches", "row_tiles", "traffic"]

PAIRS = {("mxfp8", "mxfp8"), ("nvfp4-token", "mxfp8"), ("bfloat16", "bfloat16")}
"""Formats forward and backward whose launches are listed."""


@dataclass(frozen=True)
class Launch:
    """One kernel."""

    name: str
    """What it computes."""
    kernel: str
    """The function in kernels/."""
    backward: bool
    """Whether it belongs to the backward pass."""
    bytes_read: int
    """Bytes."""
    bytes_written: int
    """Bytes."""
    flops: int = 0
    """Floating-point operations of a product."""


def side(form: str, rows: int, size: int, swizzled: bool, has_token_scales: bool = True) -> int:
    """Bytes of `rows` rows of a product's side, `size` numbers each, with their scales; `has_token_scales`: with
    NVFP4's scale per row."""
    if form == "bfloat16":
        return rows * size * 2
    block = 16 if form == "nvfp4-token" else 32
    blocks = -(-size // block)
    if swizzled:
        blocks = -(-blocks // 4) * 4
    return rows * ((-(-size // 2) + 4 * has_token_scales if block == 16 else size) + blocks)


def launches(
    tokens: int,
    hidden: int,
    intermediate: int,
    experts: int,
    top_k: int,
    forward: str = "nvfp4-token",
    backward: str = "mxfp8",
    *,
    native: bool = True,
    rows: int | None = None,
    active: int | None = None,
    sorted_at_once: int | None = None,
    scores: bool = True,
) -> list[Launch]:
    """The launches of a forward and a backward pass of a layer in bfloat16, with float32 scores and gates. `native`:
    scales lie in tiles, as for Blackwell. `rows`: how many rows the experts have, each a multiple of 128 (None:
    assignments spread evenly; bfloat16 needs no padding). `active`: how many experts have some. `sorted_at_once`:
    assignments per program of the sort. `scores`: whether the list begins with the router. Raises ValueError for sizes
    below 1 and for formats that one launch does not quantise along both axes."""
    if (forward, backward) not in PAIRS:
        raise ValueError(
            f"launches are known for {', '.join(' with '.join(p) for p in sorted(PAIRS))}; got "
            f"{forward} with {backward}"
        )
    N, D, I, E, K = tokens, hidden, intermediate, experts, top_k
    if min(N, D, I, E, K) < 1:
        raise ValueError(f"tokens, hidden, intermediate, experts and top_k must be at least 1; got {[N, D, I, E, K]}")
    A, plain = N * K, forward == "bfloat16"
    P = (-(-A // 128) + E) * 128  # what is allocated
    U = A if plain else E * -(-A // (128 * E)) * 128 if rows is None else rows
    active = min(E, A) if active is None else active
    EP = 1 << (E - 1).bit_length()
    programs = -(-A // (sorted_at_once or max(16, min(128, 16384 // EP))))
    tiled = native and not plain
    form, back = forward, backward
    product = "scaled_rows_kernel" if tiled else "rows_kernel"
    weights = "scaled_weights_kernel" if tiled else "weights_kernel"
    limit = 8

    def along_columns(width: int) -> int:
        return side(back, width, U, tiled)

    def matrix(name: str, O: int, size: int) -> list[Launch]:
        """A weight [E, O, size], quantised along both axes."""
        if plain:
            return []
        return [
            Launch(
                f"{name}: {form} rows, {back} columns",
                "both_kernel",
                False,
                2 * E * O * size,
                side(form, E * O, size, tiled) + side(back, E * size, O, tiled),
            )
        ]

    def rows_times(name: str, f: str, size: int, O: int, late: bool) -> Launch:
        """Rows of `size` numbers times their experts' [O, size]. A tile of scales is read with the rows that only pad
        it."""
        weight_bytes = side(f, active * O, size, tiled)
        if tiled:
            blocks = (
                side(f, 1, size, True)
                - side(f, 1, size, True, False)
                + 4 * -(-size // (64 if f == "nvfp4-token" else 128))
            )
            blocks -= 4 if f == "nvfp4-token" else 0
            weight_bytes += active * (-O % 128) * blocks
        return Launch(name, product, late, side(f, U, size, tiled) + weight_bytes + 8 * E, 2 * U * O, 2 * A * size * O)

    def weights_of(name: str, O: int, size: int) -> Launch:
        padded = (-O % 128 + -size % 128) * (U // 32) if tiled else 0
        return Launch(
            name,
            weights,
            True,
            along_columns(O) + along_columns(size) + padded + 8 * (E + 1),
            2 * E * O * size,
            2 * A * O * size,
        )

    result = [Launch("route", "route_kernel", False, 4 * N * E, 12 * A)] if scores else []
    result += [] if plain else [Launch("sort: empty rows", "fill", False, 0, 8 * P)]
    result += [
        Launch("sort: count", "count_kernel", False, 8 * A, 4 * programs * EP),
        Launch("sort: offsets", "offsets_kernel", False, 4 * programs * EP, 8 * programs * EP + 8 * (E + 1)),
        Launch("sort: place", "place_kernel", False, 8 * A + 8 * programs * EP, 16 * A),
    ]
    if plain:
        result.append(Launch("x: gathered", "gather_kernel", False, 8 * A + 2 * N * D, 2 * A * D))
    else:
        name = f"x: gathered, {form} rows, {back} columns"
        result.append(
            Launch(name, "both_kernel", False, 8 * U + limit + 2 * N * D, side(form, U, D, tiled) + along_columns(D))
        )
    result += matrix("w13", 2 * I, D)
    result.append(rows_times("h = x w13ᵀ", form, D, 2 * I, False))
    if plain:
        result.append(Launch("act = silu(gate) · up", "swiglu_kernel", False, 4 * A * I, 2 * A * I))
    else:
        result.append(
            Launch(
                f"act = silu(gate) · up: {form} rows", "both_kernel", False, 4 * U * I + limit, side(form, U, I, tiled)
            )
        )
    result += matrix("w2", D, I)
    result.append(rows_times("y = act w2ᵀ", form, I, D, False))
    result.append(Launch("combine: Σ gate · y", "combine_kernel", False, 12 * A + 2 * A * D, 2 * N * D))
    if plain:
        result.append(Launch("dy = gate · dout: gathered", "gather_kernel", True, 12 * A + 2 * N * D, 2 * A * D))
    else:
        name = f"dy = gate · dout: gathered, {back} rows and columns"
        result.append(
            Launch(
                name, "both_kernel", True, 8 * U + limit + 2 * N * D + 4 * A, side(back, U, D, tiled) + along_columns(D)
            )
        )
    result.append(Launch("gates' gradient", "gate_gradient_kernel", True, 8 * A + 2 * N * D + 2 * A * D, 4 * A))
    result.append(rows_times("d_act = dy w2", back, D, I, True))
    if plain:
        result.append(Launch("dh, act", "swiglu_kernel", True, 6 * A * I, 6 * A * I))
    else:
        bytes_written = side(back, U, 2 * I, tiled) + along_columns(2 * I) + along_columns(I)
        result.append(
            Launch(
                f"dh: {back} rows and columns; act: {back} columns",
                "swiglu_gradient_kernel",
                True,
                6 * U * I + limit,
                bytes_written,
            )
        )
    result.append(weights_of("dw2 = dyᵀ act", D, I))
    result.append(weights_of("dw13 = dhᵀ x", 2 * I, D))
    result.append(rows_times("dx = dh w13", back, 2 * I, D, True))
    result.append(Launch("combine: Σ dx", "combine_kernel", True, 8 * A + 2 * A * D, 2 * N * D))
    return result


def row_tiles(experts: int, down: int, across: int, band: int | None) -> Iterable[tuple[int, int, int]]:
    """(expert, row, column) of each tile, in the order of the launch: every expert's in bands of `band` rows
    (kernels/tiles.py), or with None, as before: all experts' rows of one column, then the next column."""
    if band is None:
        yield from ((e, r, c) for c in range(across) for e in range(experts) for r in range(down))
        return
    for e in range(experts):
        for first in range(0, down, band):
            yield from ((e, r, c) for c in range(across) for r in range(first, min(first + band, down)))


def traffic(order: Iterable[tuple[int, int, int]], left: int, right: int, cache: int) -> int:
    """Bytes that a product reads from memory if tiles run in this order through a cache of `cache` bytes that forgets
    what was used longest ago: `left` bytes for a tile's rows, `right` for its expert's columns. Tiles that run side by
    side on a GPU are neighbours in the order."""
    cached_sizes: OrderedDict[tuple, int] = OrderedDict()
    used = moved = 0
    for expert, row, column in order:
        for key, size in (((expert, "row", row), left), ((expert, "column", column), right)):
            if key in cached_sizes:
                cached_sizes.move_to_end(key)
                continue
            moved, used, cached_sizes[key] = moved + size, used + size, size
            while used > cache:
                used -= cached_sizes.popitem(last=False)[1]
    return moved
