"""A GPU that is not there. Inside `gpu()`, tensors may lie on the device "pretend": their numbers are in the computer's
memory, and an operation that mixes them with tensors on the CPU raises what a GPU would. It shows where a tensor was
forgotten on the way to the device, for which the tests would otherwise need one. Kernels do not run here. A process
cannot forget the device again, so tests begin one of their own."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

__all__ = ["gpu"]

NAME = "pretend"
BETWEEN = {"aten::_to_copy", "aten::copy_"}
"""What moves numbers from one device to another."""
INDEXED = {
    "aten::index.Tensor",
    "aten::index_put",
    "aten::index_put_",
    "aten::_index_put_impl_",
    "aten::_unsafe_index.Tensor",
}
"""What takes indices from the CPU on any device."""


class Remote(Tensor):
    """A tensor that says it lies on the GPU."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor):
        one = Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device(NAME, 0),
        )
        one.inner = inner
        return one

    def __repr__(self):
        return f"Remote({self.inner})"

    is_cuda = property(lambda self: True)

    def tolist(self):
        return self.inner.tolist()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})


def run(func, args: tuple, kwargs: dict):
    name = func.name()
    given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    if name in INDEXED:
        given = [args[0], *given[len([x for x in tree_leaves(args[1]) if isinstance(x, Tensor)]) + 1 :]]
    remote = any(isinstance(x, Remote) for x in given)
    stray = [x for x in given if not isinstance(x, Remote) and x.ndim]
    if remote and stray and name not in BETWEEN:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {NAME}:0 and cpu! ({name})"
        )
    wanted = kwargs.get("device")
    to = remote if wanted is None else torch.device(wanted).type == NAME
    if name == "aten::_local_scalar_dense":
        to = False
    if name == "aten::copy_":
        to = isinstance(args[0], Remote)
    if wanted is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    inner_args, inner_kwargs = tree_map(lambda x: x.inner if isinstance(x, Remote) else x, (args, kwargs))
    found = func(*inner_args, **inner_kwargs)
    if not to:
        return found
    known = {id(x.inner): x for x in given if isinstance(x, Remote)}
    return tree_map(lambda x: known[id(x)] if id(x) in known else Remote(x) if isinstance(x, Tensor) else x, found)


class Everywhere(TorchDispatchMode):
    """Sees what makes a tensor from nothing, too."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})


class Backend(_DummyBackendModule):
    """What `torch.utils.checkpoint` asks of a device."""

    def device(self, index):
        return nullcontext()

    def get_rng_state(self, index=0):
        return torch.zeros(0, dtype=torch.uint8)

    def set_rng_state(self, state, index=0):
        pass

    def get_device_index(self, device):
        return 0


@contextmanager
def gpu() -> Iterator[torch.device]:
    """Inside, a rank's device is the pretended one, and a fork fails, as one of a process that has used a GPU does."""
    from kernels import launch
    from ref.network import fast
    from scaled.runtime.mesh import Mesh

    def seen(doc, where=None):
        whole = fast.visible(doc.shape[1], 0, doc, doc.device)
        return whole if whole is None or where is None else whole[:, :, where]

    _setup_privateuseone_for_python_backend(NAME, Backend())
    device, tensor = torch.device(NAME, 0), torch.tensor
    with (
        mock.patch.object(Mesh, "device", property(lambda self: device)),
        mock.patch.object(launch, "triton", None),
        mock.patch.object(fast, "make_block_mask", seen),  # flex attention, which torch compiles
        mock.patch.object(torch, "tensor", lambda *a, device=None, **k: tensor(*a, **k).to(device or "cpu")),
        mock.patch.object(torch.inference_mode, "__enter__", lambda self: torch.set_grad_enabled(False)),
        mock.patch.object(torch.inference_mode, "__exit__", lambda self, *_: torch.set_grad_enabled(True)),
        mock.patch("os.fork", side_effect=RuntimeError("Cannot re-initialize a GPU in a forked process")),
        Everywhere(),
    ):
        yield device
