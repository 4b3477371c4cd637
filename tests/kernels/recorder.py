"""Watches the interpreter: every kernel that runs, with the bytes that it reads and writes, each counted once."""

from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import interpreter

VIEWS = {
    "view",
    "slice",
    "transpose",
    "t",
    "unsqueeze",
    "select",
    "detach",
    "expand",
    "alias",
    "_unsafe_view",
    "_reshape_alias",
    "permute",
}
FREE = VIEWS | {"empty", "new_empty", "empty_strided", "empty_like", "set_", "copy_"}
"""Operations that launch nothing on a GPU. The interpreter itself copies back what it computed."""
ON_THE_CPU = {"min", "max", "_local_scalar_dense"}
"""What a value is checked with where tensors are on the CPU; on a GPU nobody looks."""


@dataclass
class Seen:
    kernel: str
    reads: list = field(default_factory=list)
    writes: list = field(default_factory=list)

    @staticmethod
    def once(touched: list) -> int:
        places = [np.arange(size)[None, :] + pointers.astype(np.int64)[:, None] for pointers, size in touched]
        return len(np.unique(np.concatenate([p.ravel() for p in places]))) if places else 0

    @property
    def read(self) -> int:
        return self.once(self.reads)

    @property
    def written(self) -> int:
        return self.once(self.writes)


class Others(TorchDispatchMode):
    """What the library computes beside the kernels."""

    def __init__(self, seen: list):
        super().__init__()
        self.seen, self.inside = seen, False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if not self.inside and name not in FREE | ON_THE_CPU:
            one = Seen("fill" if name == "full" else name)
            one.writes.append(
                (result.data_ptr() + result.element_size() * np.arange(result.numel()), result.element_size())
            )
            self.seen.append(one)
        return result


@contextmanager
def recorded():
    seen: list[Seen] = []
    others = Others(seen)
    call, load, store = (
        interpreter.GridExecutor.__call__,
        interpreter.InterpreterBuilder.create_masked_load,
        interpreter.InterpreterBuilder.create_masked_store,
    )

    def called(self, *args, **kwargs):
        seen.append(Seen(self.fn.__name__))
        others.inside = True
        try:
            return call(self, *args, **kwargs)
        finally:
            others.inside = False

    def touched(pointers, mask):
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        return np.unique(
            np.broadcast_to(pointers.data, np.broadcast(pointers.data, mask.data).shape)[
                np.broadcast_to(mask.data, pointers.data.shape)
            ]
        ), size

    def loaded(self, pointers, mask, *rest, **kwargs):
        seen[-1].reads.append(touched(pointers, mask))
        return load(self, pointers, mask, *rest, **kwargs)

    def stored(self, pointers, value, mask, *rest, **kwargs):
        seen[-1].writes.append(touched(pointers, mask))
        return store(self, pointers, value, mask, *rest, **kwargs)

    interpreter.GridExecutor.__call__ = called
    interpreter.InterpreterBuilder.create_masked_load, interpreter.InterpreterBuilder.create_masked_store = (
        loaded,
        stored,
    )
    try:
        with others:
            yield seen
    finally:
        interpreter.GridExecutor.__call__ = call
        interpreter.InterpreterBuilder.create_masked_load, interpreter.InterpreterBuilder.create_masked_store = (
            load,
            store,
        )
