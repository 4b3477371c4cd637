"""The layout in which Blackwell's tensor cores take the scales of blocks: swizzled tiles of 128 rows by 4 blocks.

    row r, block b    tile (r // 128, b // 4), byte 16 · (r % 32) + 4 · (r % 128 // 32) + b % 4 of its 512

A tile is contiguous, so a kernel copies it from memory to the tensor core without a look at its order. A quantiser that
writes this layout saves the pass that would rearrange row-major scales. `swizzle` and `unswizzle` say the same in plain
torch; tests compare the kernels with them.

Sources: cuBLAS, "1D block scaling factors layout"; PTX ISA, `tcgen05.mma` with `.block_scale`, and `tcgen05.cp`
`.32x128b.warpx4`."""

import torch
from torch import Tensor

__all__ = ["swizzle", "tiles", "unswizzle"]


def tiles(rows: int, blocks: int) -> tuple[int, int]:
    """How many tiles hold the scales of this many rows and blocks: down and across."""
    return -(-rows // 128), -(-blocks // 4)


def swizzle(scales: Tensor) -> Tensor:
    """Row-major scales [*, R, B] → tiles [*, ⌈R / 128⌉, ⌈B / 4⌉, 32, 4, 4]; the padding is 0. Raises ValueError for
    less than two axes."""
    if scales.ndim < 2:
        raise ValueError(f"scales must have shape [*, R, B]; got {list(scales.shape)}")
    R, B = scales.shape[-2:]
    down, across = tiles(R, B)
    padded_scales = torch.nn.functional.pad(scales, (0, 4 * across - B, 0, 128 * down - R))
    # … down, (4 of 32 rows), across, 4 blocks → … down, across, 32 rows, 4, 4 blocks
    return (
        padded_scales.unflatten(-1, (across, 4))
        .unflatten(-3, (down, 4, 32))
        .movedim(-2, -4)
        .transpose(-2, -3)
        .contiguous()
    )


def unswizzle(tiled: Tensor, rows: int, blocks: int) -> Tensor:
    """The reverse of `swizzle`: tiles [*, ⌈R / 128⌉, ⌈B / 4⌉, 32, 4, 4] → row-major scales [*, R, B]. Raises ValueError
    if the number of tiles is another one."""
    down, across = tiles(rows, blocks)
    if tiled.shape[-5:] != (down, across, 32, 4, 4):
        raise ValueError(
            f"tiled must have shape {['*', down, across, 32, 4, 4]} for {rows} rows of {blocks} "
            f"blocks; got {list(tiled.shape)}"
        )
    padded_scales = tiled.transpose(-2, -3).movedim(-4, -2)
    return padded_scales.flatten(-2).flatten(-4, -2)[..., :rows, :blocks].contiguous()
