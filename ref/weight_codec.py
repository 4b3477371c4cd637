"""The codec beneath `ref/weight_sync.py`: where bits differ and how far, and that as bytes.

A delta of n weights, C of which have other bits, is two lists of whole numbers, in streams of bytes (`varint`), each
under zstd:

    gap     unchanged weights since the last changed one, as a varint       1 or 2 bytes, before zstd
    step    new − old, counted in bfloat16 numbers, zig-zag, as a varint    1 byte: nine of ten steps are ±1

Where many weights change, a bitmask takes less than the gaps: without zstd from one weight in eight on, since a gap
takes a byte and the mask an eighth of one for each weight; under zstd from about one in six. `pack` tries both there
and keeps the shorter.
"""

import struct
from collections.abc import Sequence

import numpy as np
import torch
import zstandard
from jaxtyping import Int, Shaped
from torch import Tensor

from ref.checks import expect

__all__ = [
    "SyncError",
    "apply_delta",
    "check_delta",
    "check_versions",
    "encode_delta",
    "merge_deltas",
    "ordered",
    "pack",
    "pack_full",
    "unpack",
]
__all__ += ["unpack_full"]


class SyncError(ValueError):
    """A version cannot be published or read: damaged, cut short, missing, pruned, or out of order. The version held
    before stays."""


# Where bits differ, and how far.


def ordered(bits: Tensor) -> Tensor:
    """int16 bit patterns of floats as places on one line, and back: negative ones run downwards from −0 at −1."""
    return bits ^ ((bits >> 15) & 0x7FFF)  # negative patterns run downwards


def encode_delta(
    old: Shaped[Tensor, "*shape"], new: Shaped[Tensor, "*shape"]
) -> tuple[Int[Tensor, " C"], Int[Tensor, " C"]]:
    """Where the bits of `new` differ from those of `old`: positions in the flattened tensor, ascending, int64, and
    steps along the line of all floats, int32. Raises ValueError if shapes or dtypes differ, and for dtypes other than
    bfloat16 and float16."""
    check_versions(old, new)
    a, b = (x.flatten().view(torch.int16) for x in (old, new))
    positions = (a != b).nonzero()[:, 0]
    return positions, ordered(b[positions]).int() - ordered(a[positions]).int()  # step = new − old


def apply_delta(
    old: Shaped[Tensor, "*shape"], positions: Int[Tensor, " C"], steps: Int[Tensor, " C"]
) -> Shaped[Tensor, "*shape"]:
    """The new version, bit for bit; `old` is not changed. Raises ValueError for positions that are out of range or do
    not ascend, for steps of another dtype or length, and for steps that leave the line of floats: then `old` is not the
    base."""
    check_delta(old, positions, steps)
    positions, new = positions.long(), old.flatten().clone()
    bits = new.view(torch.int16)  # floating-point hardware may change a NaN's payload; a copy of bits does not
    target_places = ordered(bits.index_select(0, positions)).int() + steps  # new = old + step
    if not old.is_cuda and bool((target_places != target_places.short()).any()):
        raise ValueError("steps lead beyond the last float; old is not the version that the delta was made from")
    bits.scatter_(0, positions, ordered(target_places.short()))
    return new.view(old.shape)


def merge_deltas(
    deltas: Sequence[tuple[Int[Tensor, " _"], Int[Tensor, " _"]]],
) -> tuple[Int[Tensor, " C"], Int[Tensor, " C"]]:
    """One delta that does what these, one or more, do in turn: steps at the same position add up, and those that cancel
    are gone."""
    positions, index = torch.cat([delta_positions for delta_positions, _ in deltas]).unique(return_inverse=True)
    steps = torch.zeros(len(positions), dtype=torch.int32, device=positions.device)
    steps.index_add_(0, index, torch.cat([steps for _, steps in deltas]))  # steps at one position add up
    return positions[steps != 0], steps[steps != 0]


def check_versions(old: Tensor, new: Tensor) -> None:
    if old.shape != new.shape or old.dtype != new.dtype or old.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(
            f"old and new must be bfloat16 or float16 of the same shape; got {old.dtype} "
            f"{list(old.shape)} and {new.dtype} {list(new.shape)}"
        )


def check_delta(old: Tensor, positions: Tensor, steps: Tensor) -> None:
    """Positions are checked only on the CPU: checking them on a GPU would wait for it, and the GPU raises by itself."""
    expect("positions", positions, "int", "C")
    if steps.dtype != torch.int32 or steps.shape != positions.shape:
        raise ValueError(
            f"steps must be torch.int32 of shape {list(positions.shape)}; got {steps.dtype} of shape "
            f"{list(steps.shape)}"
        )
    if old.is_cuda or not len(positions):
        return
    if bool((positions[1:] <= positions[:-1]).any()):
        raise ValueError("positions must ascend, each one named once")
    if not 0 <= int(positions[0]) <= int(positions[-1]) < old.numel():
        raise ValueError(
            f"positions must lie in the {old.numel()} weights; got {int(positions[0])} to {int(positions[-1])}"
        )


# Bytes.

HEAD = struct.Struct("<4sBBBBQ")
"""Magic, kind, whether under zstd, streams of positions and of steps, changed weights. The lengths of the streams
follow, eight bytes each."""
KINDS = ("gap", "mask", "full")


def varint(values: np.ndarray) -> list[np.ndarray]:
    """Whole numbers below 2^63 as bytes of seven bits each, the lowest first; the highest bit says that more follow.
    All first bytes are one stream, the second bytes of those numbers that have one are the next, and so on: bytes of
    one kind compress better together."""
    streams = []
    while len(values) or not streams:
        has_more = values >= 0x80
        streams.append((values & 0x7F | has_more.astype(np.int64) << 7).astype(np.uint8))
        values = values[has_more] >> 7
    return streams


def unvarint(streams: Sequence[np.ndarray]) -> np.ndarray:
    """The numbers that `varint` wrote, int64. Raises SyncError where one is cut, or longer than 63 bits."""
    values, open_indices = np.zeros(len(streams[0]), dtype=np.int64), np.arange(len(streams[0]))
    for byte_number, stream in enumerate(streams):
        if len(stream) != len(open_indices) or byte_number > 8:
            raise SyncError("a number in the delta is cut short, or too long")
        values[open_indices] |= (stream & 0x7F).astype(np.int64) << 7 * byte_number
        open_indices = open_indices[stream >= 0x80]
    if len(open_indices):
        raise SyncError("a number in the delta is cut short, or too long")
    return values


def pack(positions: Int[Tensor, " C"], steps: Int[Tensor, " C"], size: int, level: int = 1) -> bytes:
    """A delta of `size` weights as bytes: gaps or a bitmask, whichever is shorter, then steps. level: that of zstd; 0
    does not compress."""
    places, distances = positions.cpu().numpy(), steps.cpu().numpy().astype(np.int64)
    step_streams = varint((distances << 1) ^ (distances >> 63))  # zig-zag
    # gap = position − the one before − 1
    candidates = [pack_streams("gap", len(places), level, varint(np.diff(places, prepend=-1) - 1), step_streams)]
    if 16 * len(places) > size:
        mask = np.zeros(size, dtype=bool)
        mask[places] = True
        candidates.append(pack_streams("mask", len(places), level, [np.packbits(mask)], step_streams))
    return min(candidates, key=len)


def pack_streams(kind: str, count: int, level: int, first: Sequence[np.ndarray], second: Sequence[np.ndarray]) -> bytes:
    data = [np.ascontiguousarray(x).tobytes() for x in (*first, *second)]
    if level:
        data = [zstandard.ZstdCompressor(level=level).compress(x) for x in data]
    head = HEAD.pack(b"SYNC", KINDS.index(kind), level > 0, len(first), len(second), count)
    return head + struct.pack(f"<{len(data)}Q", *map(len, data)) + b"".join(data)


def unpack_streams(blob: bytes) -> tuple[str, int, list[np.ndarray], list[np.ndarray]]:
    """Kind, count and streams of what `pack_streams` made. Raises SyncError for anything else."""
    try:
        magic, kind, compressed, first, second, count = HEAD.unpack_from(blob)
        sizes = struct.unpack_from(f"<{first + second}Q", blob, HEAD.size)
        ends = np.cumsum([HEAD.size + 8 * len(sizes), *sizes]).tolist()
        if magic != b"SYNC" or kind >= len(KINDS) or compressed > 1 or not (first and second) or len(blob) != ends[-1]:
            raise SyncError("these bytes are no delta, or are cut short")
        data = [blob[a:b] for a, b in zip(ends, ends[1:])]
        if compressed:
            data = [zstandard.ZstdDecompressor().decompress(x) for x in data]
    except (struct.error, zstandard.ZstdError, MemoryError, OverflowError) as error:
        raise SyncError(f"these bytes are no delta ({error})") from None
    streams = [np.frombuffer(x, dtype=np.uint8) for x in data]
    return KINDS[kind], count, streams[:first], streams[first:]


def unpack(blob: bytes, size: int) -> tuple[Int[Tensor, " C"], Int[Tensor, " C"]]:
    """The delta that `pack` wrote. Raises SyncError for bytes that are no delta of `size` weights."""
    kind, count, position_streams, step_streams = unpack_streams(blob)
    distances = unvarint(step_streams)
    distances = (distances >> 1) ^ -(distances & 1)  # zig-zag, back
    if kind == "gap":
        places = np.cumsum(unvarint(position_streams) + 1) - 1  # position = the one before + gap + 1
    elif kind == "mask" and len(position_streams[0]) == -(-size // 8):
        places = np.flatnonzero(np.unpackbits(position_streams[0], count=size))
    else:
        raise SyncError(f"these bytes are no delta of {size} weights")
    if (
        not len(places) == len(distances) == count
        or count
        and not (0 <= places[0] and places[-1] < size and (places[1:] > places[:-1]).all())
    ):
        raise SyncError(f"these bytes are no delta of {size} weights")
    if count and np.abs(distances).max() > 0xFFFF:
        raise SyncError("a step in the delta is longer than the line of floats")
    return torch.from_numpy(places), torch.from_numpy(distances.astype(np.int32))


def pack_full(rows: Sequence[Tensor], level: int) -> bytes:
    """All bits, high bytes before low ones: alike ones together compress better."""
    flat = (
        torch.cat([torch.zeros(0, dtype=torch.bfloat16), *(x.cpu() for x in rows)])
        .view(torch.int16)
        .numpy()
        .view(np.uint8)
        .reshape(-1, 2)
    )
    return pack_streams("full", len(flat), level, [flat[:, 1]], [flat[:, 0]])


def unpack_full(blob: bytes, size: int) -> Tensor:
    kind, count, (high, *_), (low, *_) = unpack_streams(blob)
    if kind != "full" or not count == size == len(high) == len(low):
        raise SyncError(f"these bytes are no anchor of {size} weights")
    return torch.from_numpy(np.stack((low, high), 1).view(np.int16)[:, 0].copy()).view(torch.bfloat16)
