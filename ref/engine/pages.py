"""Keys and values in pages: what they take in memory is what the contexts of an engine hold, not what they could.

Attention reads a row of the cache as one stretch of memory (`ref/engine/ragged.py`). Pages that lie anywhere would have
to be gathered first, in every layer and step. So the memory is virtual, as in vAttention (arXiv:2405.04437): every row
has addresses for its longest context, and the operating system puts a page of memory behind them when it is first
written. Attention is the same products on the same shapes as without pages, bit for bit. A page goes back to the
operating system as soon as its row is over, or has become shorter.

On a CPU only: a GPU's memory is allocated at once, and pages are counted and no more.
"""

import math
import mmap
import sys

import torch
from jaxtyping import Float
from torch import Tensor

from ref.network import Config

__all__ = ["MIN_SIZE", "Pages"]

MIN_SIZE = 64
"""Positions of a page, at least."""
NORESERVE = 0x4000 if sys.platform == "linux" else 0
"""MAP_NORESERVE: addresses may be more than there is memory. Python has no name for it before 3.13."""


class Pages:
    """The keys and values of `rows` contexts of at most `max_len` tokens, and how many pages each of them holds. A page
    has `size` positions of one row: their keys and values in all layers. What is not held reads as zeros, or as
    something older that is finite."""

    def __init__(self, config: Config, rows: int, max_len: int, dtype: torch.dtype, device: torch.device):
        head_bytes = config.head_dim * dtype.itemsize
        # A page begins where one of the operating system's begins.
        step = mmap.PAGESIZE // math.gcd(mmap.PAGESIZE, head_bytes)
        self.size = -(-MIN_SIZE // step) * step
        length = self.count(max_len) * self.size
        # Keys, then values, of every layer: 2 L rows G length d
        shape = (2, config.num_hidden_layers, rows, config.num_key_value_heads, length, config.head_dim)
        self.stretch_bytes, self.head_page_bytes = length * head_bytes, self.size * head_bytes
        self.page_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * self.head_page_bytes
        self.counts = [0] * rows
        """Pages of each row."""
        self.map: mmap.mmap | None = None
        self.memory: Float[Tensor, "two L rows G T d"]
        if device.type == "cpu" and hasattr(mmap.mmap, "madvise"):
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE
            self.map = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=flags)
            if hasattr(mmap, "MADV_NOHUGEPAGE"):  # a huge page would hold positions of several rows
                self.map.madvise(mmap.MADV_NOHUGEPAGE)
            self.memory = torch.frombuffer(self.map, dtype=dtype).view(shape)
        else:
            self.memory = torch.zeros(shape, dtype=dtype, device=device)

    def count(self, length: int) -> int:
        """Pages of a context of `length` tokens."""
        return -(-length // self.size)

    @property
    def in_use(self) -> int:
        """Pages that all rows hold together, of `page_bytes` each."""
        return sum(self.counts)

    def resize(self, row: int, length: int) -> None:
        """Lets a row hold the pages of its first `length` positions, and no others."""
        num_pages, num_before = self.count(length), self.counts[row]
        self.counts[row] = num_pages
        if num_pages < num_before:
            self._release(row, num_pages, num_before)

    def exchange(self, a: int, length_a: int, b: int, length_b: int) -> None:
        """Lets two rows change places, of which the first positions matter, `length_a` of row a and `length_b` of row
        b."""
        memory, counts = self.memory, self.counts
        row_a = memory[:, :, a, :, :length_a].clone()
        memory[:, :, a, :, :length_b] = memory[:, :, b, :, :length_b]
        memory[:, :, b, :, :length_a] = row_a
        for row, partner in ((a, b), (b, a)):
            if counts[partner] < counts[row]:
                self._release(row, counts[partner], counts[row])
        counts[a], counts[b] = counts[b], counts[a]

    def copy(self, source: int, row: int, length: int) -> None:
        """Gives a row the first `length` positions of another one, in pages of its own."""
        self.resize(row, length)
        self.memory[:, :, row, :, :length] = self.memory[:, :, source, :, :length]

    def _release(self, row: int, first: int, end: int) -> None:
        """Gives pages `first` to `end` − 1 of a row back to the operating system."""
        if self.map is None:
            return
        kinds, layers, rows, groups = self.memory.shape[:4]
        offset, size = first * self.head_page_bytes, (end - first) * self.head_page_bytes
        for number in range(kinds * layers):
            row_start = (number * rows + row) * groups * self.stretch_bytes
            if first == 0:  # the heads of a row lie one behind the other
                self.map.madvise(mmap.MADV_DONTNEED, row_start, groups * self.stretch_bytes)
                continue
            for head in range(groups):
                self.map.madvise(mmap.MADV_DONTNEED, row_start + head * self.stretch_bytes + offset, size)
