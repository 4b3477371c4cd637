"""The memories of the machine that runs PTX, and what threads of a warp exchange.

    Memory    global memory: arrays at addresses with gaps between them; a load or store outside of an array is an error
    Shared    the shared memory of every block, which knows who wrote and read each byte since the last barrier
    shuffle, reduced    what shfl and redux give each thread of a warp

Between two barriers warps may run in any order. So a byte that one warp writes and another one reads or writes without
a barrier between is an error, unless the second writes what is there.
"""

import numpy as np

from .ptx_floats import NAN, operation
from .ptx_integers import SIGNED, UNSIGNED

__all__ = ["Fault", "Memory", "Shared", "reduced", "shuffle"]

BASE, GAP = 0x7F0000000000, 256
"""Address of the first array; bytes between arrays, and what addresses are multiples of."""


class Fault(RuntimeError):
    """The program did what a GPU does not allow, or what it leaves open."""


class Memory:
    """Global memory."""

    def __init__(self):
        self.bytes, self.mapped = np.zeros(0, np.uint8), np.zeros(0, np.bool_)

    def place(self, array: np.ndarray) -> int:
        """Copies an array into memory; its address, a multiple of 256."""
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        at, room = len(self.bytes), -(-(len(flat) + GAP) // GAP) * GAP
        self.bytes = np.concatenate([self.bytes, flat, np.zeros(room - len(flat), np.uint8)])
        self.mapped = np.concatenate([self.mapped, np.arange(room) < len(flat)])
        return BASE + at

    def array(self, address: int, like: np.ndarray) -> np.ndarray:
        """A copy of what lies at an address now, in the shape and type of `like`."""
        return self.bytes[address - BASE :][: like.nbytes].view(like.dtype).reshape(like.shape).copy()

    def cells(self, addresses: np.ndarray, width: int, parts: int) -> np.ndarray:
        """[threads, parts]: indices of numbers of `width` bits. Raises Fault for addresses that are not of one array,
        or not aligned."""
        size = width // 8 * parts
        at = addresses.astype(np.int64) - BASE
        inside = (at >= 0) & (at + size <= len(self.mapped))
        inside &= (
            self.mapped[np.where(inside, at, 0)] & self.mapped[np.where(inside, at + size - 1, 0)]
            if len(self.mapped)
            else False
        )
        if (at % size).any():
            raise Fault(f"{int(addresses[at % size != 0][0]):#x} is not a multiple of {size}")
        if not inside.all():
            raise Fault(f"{size} bytes at {int(addresses[~inside][0]):#x} are not in any array")
        return (at // (width // 8))[:, None] + np.arange(parts)

    def load(self, addresses: np.ndarray, width: int, parts: int) -> np.ndarray:
        return self.bytes.view(UNSIGNED[width])[self.cells(addresses, width, parts)]

    def store(self, addresses: np.ndarray, width: int, values: np.ndarray) -> None:
        """values [threads, parts]. Raises Fault if two threads give one address different numbers."""
        cells = self.cells(addresses, width, values.shape[1])
        self.bytes.view(UNSIGNED[width])[cells] = values
        if not np.array_equal(self.bytes.view(UNSIGNED[width])[cells], values):
            raise Fault("two threads store different numbers at one address")


class Shared:
    """`size` bytes of shared memory for each of `blocks` blocks."""

    def __init__(self, blocks: int, size: int):
        self.size = -(-size // 16) * 16
        room = blocks * self.size
        self.bytes, self.epochs = np.zeros(room, np.uint8), np.zeros(blocks, np.int64)
        # The barrier count at which a byte was last written and read, and by which warp: −1 nobody, −2 several.
        self.write_epochs, self.writer = np.full(room, -1), np.full(room, -1)
        self.read_epochs, self.reader = np.full(room, -1), np.full(room, -1)

    def barrier(self, blocks: np.ndarray) -> None:
        """All threads of these blocks have met."""
        self.epochs[blocks] += 1

    def cells(self, addresses: np.ndarray, block: np.ndarray, size: int) -> np.ndarray:
        """[threads, size]: indices of bytes."""
        if (addresses.astype(np.int64) + size > self.size).any():
            raise Fault(f"shared memory ends at {self.size}; {size} bytes at {int(addresses.max())} do not fit")
        if (addresses % size).any():
            raise Fault(f"a shared address is not a multiple of {size}")
        return (block * self.size + addresses.astype(np.int64))[:, None] + np.arange(size)

    def load(self, addresses: np.ndarray, width: int, parts: int, block: np.ndarray, warp: np.ndarray) -> np.ndarray:
        """[threads, parts] numbers of `width` bits; block and warp of each thread."""
        cells, epoch, warp = (
            self.cells(addresses, block, width // 8 * parts),
            self.epochs[block][:, None],
            warp[:, None],
        )
        if (self.write_epochs[cells] < 0).any():
            raise Fault("shared memory is read that nobody wrote")
        if ((self.write_epochs[cells] == epoch) & (self.writer[cells] != warp)).any():
            raise Fault("shared memory is read that another warp wrote, and no barrier is between")
        several = (self.read_epochs[cells] == epoch) & (self.reader[cells] != warp)
        self.read_epochs[cells], self.reader[cells] = epoch, warp
        self.reader[cells[several | (self.reader[cells] != warp)]] = -2
        return self.bytes[cells].view(UNSIGNED[width])

    def store(self, addresses: np.ndarray, width: int, values: np.ndarray, block: np.ndarray, warp: np.ndarray) -> None:
        """values [threads, parts]."""
        cells, epoch, warp = (
            self.cells(addresses, block, width // 8 * values.shape[1]),
            self.epochs[block][:, None],
            warp[:, None],
        )
        new = np.ascontiguousarray(values).view(np.uint8)
        changes = self.bytes[cells] != new
        if (
            (
                (self.write_epochs[cells] == epoch) & (self.writer[cells] != warp)
                | (self.read_epochs[cells] == epoch) & (self.reader[cells] != warp)
            )
            & changes
        ).any():
            raise Fault("shared memory is written that another warp used, and no barrier is between")
        self.bytes[cells] = new
        if not np.array_equal(self.bytes[cells], new):
            raise Fault("two threads store different numbers at one shared address")
        self.write_epochs[cells], self.writer[cells] = epoch, warp


def shuffle(mode: str, value: np.ndarray, by: np.ndarray, limits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """shfl for whole warps, all arrays [warps, 32]: what each lane gets, and the lane that it comes from. A lane whose
    partner lies outside of its segment keeps its own."""
    lane = np.arange(32)
    by, clamp, segment = by.astype(np.int64) & 31, limits.astype(np.int64) & 31, (limits.astype(np.int64) >> 8) & 31
    highest, lowest = (lane & segment) | (clamp & ~segment), lane & segment
    partner = {"up": lane - by, "down": lane + by, "bfly": lane ^ by, "idx": lowest | (by & ~segment)}[mode]
    partner = np.where(partner >= highest if mode == "up" else partner <= highest, partner, lane)
    return np.take_along_axis(value, np.broadcast_to(partner, value.shape), 1), partner


def reduced(name: str, kind: str, value: np.ndarray, members: np.ndarray, nan: bool = False) -> np.ndarray:
    """redux for whole warps: value [warps, 32] over the lanes that each lane's mask names. Of floats, NaN counts if
    `nan`, or if all are NaN."""
    inside = (members[:, :, None] >> np.arange(32, dtype=np.uint32)) & np.uint32(1) == 1
    if kind == "f32":
        result = np.full(value.shape, NAN, np.uint32)
        pick = operation(f"{name}.NaN.f32" if nan else f"{name}.f32").compute
        for lane in range(32):
            is_member = inside[..., lane]
            lane_values = np.broadcast_to(value[:, lane, None], result.shape)
            first = is_member & ~inside[..., :lane].any(-1)
            result = np.where(first, lane_values, np.where(is_member, pick(result, lane_values), result))
        return result
    x = value.view((SIGNED if kind[0] == "s" else UNSIGNED)[32])
    info = np.iinfo(x.dtype)
    function, nothing = {
        "add": (np.add, 0),
        "min": (np.minimum, info.max),
        "max": (np.maximum, info.min),
        "and": (np.bitwise_and, info.max if kind[0] == "u" else -1),
        "or": (np.bitwise_or, 0),
        "xor": (np.bitwise_xor, 0),
    }[name]
    return function.reduce(np.where(inside, x[:, None, :], x.dtype.type(nothing)), 2).astype(x.dtype).view(np.uint32)
