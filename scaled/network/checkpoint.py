"""Saving and loading: training state for any layout, and Hugging Face folders, without the complete network on any
rank.

    state(model, optimizers)      every tensor of a training run by name, as slices with their positions: for
                                  `runtime/checkpoint.py`
    load_folder, save_folder      `ref.network.model.load_hf` and `save_hf`, each rank reading or writing its own part

A folder has the format of `ref/network/checkpoint.py`. When loading, a rank reads from each tensor on disk its own
slice. When saving, it writes the experts that it holds, and other tensors are gathered one at a time, for the ranks in
turn. Each rank writes its own files, tensor by tensor. Besides its own part of the network, a rank never holds more
than one tensor of the folder.
"""

import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ref.lora import is_adapter
from ref.network import Config
from ref.network import checkpoint as ref
from scaled.runtime import sharding
from scaled.runtime.mesh import current

__all__ = ["create_optimizer_state", "load_folder", "save_folder", "state"]


def as_global_slice(name: str, x: Tensor) -> Tensor:
    """A tensor like parameter `name`, as a slice of the full tensor over all ranks: experts are split over ep and over
    efsdp."""
    if not sharding.owned(name) or not isinstance(x, DTensor):
        return x
    shape = sharding.whole_shape(name, x)
    stride = torch.empty(shape, device="meta").stride()
    placements = [Shard(0), x.placements[0]]
    return DTensor.from_local(
        x.to_local(), current().experts, placements, shape=torch.Size(shape), stride=stride, run_check=False
    )


def state(
    model: nn.Module, optimizers: Iterable[torch.optim.Optimizer] = (), prefix: str = "model"
) -> dict[str, Tensor]:
    """Weights that are not frozen, and each optimiser's tensors: "model.NAME", "optimizer.NAME.KEY". They share memory
    with the model and optimisers, so filling them loads a checkpoint. An optimiser without a step has no tensors:
    `create_optimizer_state` creates them."""
    names = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    tensors = {
        f"{prefix}.{name}": as_global_slice(name, p.detach()) for name, p in model.named_parameters() if p.requires_grad
    }
    for optimizer in optimizers:
        for p, values in optimizer.state.items():
            name = names[id(p)]
            for key, x in values.items():
                if isinstance(x, Tensor):
                    tensors[f"optimizer.{prefix}.{name}.{key}"] = as_global_slice(name, x) if x.shape == p.shape else x
    return tensors


def create_optimizer_state(
    model: nn.Module, optimizers: Iterable[torch.optim.Optimizer], names: Iterable[str], prefix: str = "model"
) -> None:
    """Creates the tensors in a checkpoint's `names` for optimisers without a step, so they can be filled."""
    saved_names = {
        name.removeprefix(f"optimizer.{prefix}.") for name in names if name.startswith(f"optimizer.{prefix}.")
    }
    name_of = {id(p): name for name, p in model.named_parameters()}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for p in group["params"]:
                name = name_of[id(p)]
                keys = [
                    saved_name.removeprefix(name + ".")
                    for saved_name in saved_names
                    if saved_name.rpartition(".")[0] == name
                ]
                for key in sorted(keys):
                    optimizer.state[p][key] = (
                        torch.zeros((), device=p.device)
                        if key == "step"
                        else torch.zeros_like(p, memory_format=torch.preserve_format)
                    )


def load_folder(model: nn.Module, folder: str | Path, dtype: torch.dtype = torch.float32) -> None:
    """Loads this rank's part of a Hugging Face folder into a sharded network, and reads nothing else. All ranks call it
    together. Raises CheckpointError on every rank, as `ref.network.model.load_hf`."""
    folder, problem = Path(folder), None
    try:
        load_part(model, folder, dtype)
    except ref.CheckpointError as error:  # another rank may have read its part without one
        problem = str(error)
    problems: list = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    if messages := [message for message in problems if message]:
        raise ref.CheckpointError(messages[0])


@torch.no_grad()
def load_part(model: nn.Module, folder: Path, dtype: torch.dtype) -> None:
    """This rank's part of `load_folder`."""
    names = {name: p for name, p in model.named_parameters() if not is_adapter(name)}
    files, locations, tied = ref.matched(folder, {name: sharding.whole_shape(name, p) for name, p in names.items()})
    for disk_name, (name, index) in locations.items():
        full_shape = sharding.whole_shape(name, names[name])
        offset, local = sharding.slice_of(name, names[name])
        # Per dimension of the parameter: what this tensor on disk covers of it, and what of that is this rank's.
        spans = [
            (i, i + 1) if type(i) is int else (i.start or 0, i.stop or n)
            for i, n in zip((*index, *[slice(None)] * len(full_shape)), full_shape)
        ]
        overlaps = [(max(a, f), min(b, f + n)) for (a, b), f, n in zip(spans, offset, local.shape)]
        if any(a >= b for a, b in overlaps):
            continue
        # Dimensions of the tensor on disk.
        disk_dims = [i for i in range(len(full_shape)) if i >= len(index) or type(index[i]) is not int]
        shape = [spans[i][1] - spans[i][0] for i in disk_dims]
        inside = [slice(overlaps[i][0] - spans[i][0], overlaps[i][1] - spans[i][0]) for i in disk_dims]
        target = local[tuple(slice(a - f, b - f) for (a, b), f in zip(overlaps, offset))]
        part = read_tensor_part(folder / files[disk_name], disk_name, shape, inside).to(dtype)
        target.copy_(part.view(target.shape))
        if tied and name == "embed_tokens.weight":
            head = read_tensor_part(folder / files["lm_head.weight"], "lm_head.weight", shape, inside)
            ref.check_tied(folder, head, part)


def read_tensor_part(path: Path, name: str, shape: list[int], inside: list[slice]) -> Tensor:
    """A part of a tensor on disk, of which nothing else is read. Raises CheckpointError unless the tensor holds finite
    floats of this shape."""
    with ref.open_safetensors(path) as file:
        if name in file.keys():
            tensor_slice = file.get_slice(name)
            if list(tensor_slice.get_shape()) == shape and tensor_slice.get_dtype() in DTYPES.values():
                return ref.check_finite(tensor_slice[tuple(inside)], path, name)
    [(_, tensor)] = ref.read_file(path, [name])  # says what is wrong with it
    ref.fit(torch.empty(shape, device="meta"), tensor, path, name)
    return tensor[tuple(inside)]


DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""How safetensors calls them."""


@dataclass
class Piece:
    """A tensor of the folder that this rank writes, or helps to gather."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_writer: bool
    """Whether this rank writes it."""
    make: Callable[[], Tensor]
    """The tensor. The ranks that hold parts of it call this together."""

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def pieces(model: nn.Module) -> Iterator[Piece]:
    """Every tensor that this rank has to do with, in the same order on all ranks that gather it together. An expert
    whose matrices one rank holds is written there; all other tensors are gathered one at a time, for the ranks in
    turn. Adapters are merged then."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    named_weights = ((name, p) for name, p in model.named_parameters() if not is_adapter(name))
    for number, (name, p) in enumerate(named_weights):
        x, full_shape = p.detach(), sharding.whole_shape(name, p)
        parts = ref.tensor_parts(name, full_shape)
        if len(parts) == 1:
            [part] = parts
            yield Piece(
                part,
                full_shape,
                x.dtype,
                rank == number % ranks,
                lambda name=name, p=p: sharding.gathered_tensor(sharding.merged(model, name, p)),
            )
            continue
        offset, local = sharding.slice_of(name, x)
        for part, (e, *rows) in parts.items():
            if not offset[0] <= e < offset[0] + len(local):
                continue
            shape = (len(range(*rows[0].indices(full_shape[1]))) if rows else full_shape[1], *full_shape[2:])
            expert, row_slices = local[e - offset[0]], tuple(rows)
            if not isinstance(x, DTensor) or x.placements[0] == Shard(0):
                yield Piece(part, shape, x.dtype, True, lambda expert=expert, row_slices=row_slices: expert[row_slices])
            else:  # every rank of the mesh has some rows of the expert
                mesh = x.device_mesh
                yield Piece(
                    part,
                    shape,
                    x.dtype,
                    mesh.get_local_rank() == e % mesh.size(),
                    partial(gather_rows, expert, mesh, row_slices),
                )


def gather_rows(part: Tensor, mesh: DeviceMesh, row_slices: tuple[slice, ...]) -> Tensor:
    """Some rows of a matrix whose rows are split over a mesh."""
    x = DTensor.from_local(part, mesh, [Shard(0)], run_check=False)
    assert isinstance(x, DTensor)
    return x.full_tensor()[row_slices]


class FolderWriter:
    """This rank's files of a folder. A file's header is written first, from names and shapes; then the tensors, one at
    a time."""

    def __init__(self, folder: Path, stem: str, own_pieces: Iterable[Piece], max_bytes: int):
        self.files: list[tuple[str, list[Piece]]] = []
        room = 0
        for piece in own_pieces:
            if not self.files or piece.bytes > room:
                self.files.append((f"{stem}-{len(self.files)}.safetensors", []))
                room = max_bytes
            self.files[-1][1].append(piece)
            room -= piece.bytes
        self.folder, self.pending = (
            folder,
            [(name, i, piece) for name, file_pieces in self.files for i, piece in enumerate(file_pieces)],
        )
        self.open_file: BinaryIO | None = None

    def header(self, name: str) -> bytes:
        record: dict = {"__metadata__": {"format": "pt"}}
        end = 0
        for piece in dict(self.files)[name]:
            record[piece.name] = {
                "dtype": DTYPES[piece.dtype],
                "shape": piece.shape,
                "data_offsets": [end, end := end + piece.bytes],
            }
        text = json.dumps(record).encode()
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text

    def write(self, piece: Piece, x: Tensor) -> None:
        """The next tensor."""
        name, number, expected_piece = self.pending.pop(0)
        assert piece is expected_piece and x.shape == piece.shape and x.dtype == piece.dtype, piece.name
        if number == 0:
            self.close()
            self.open_file = open(self.folder / name, "xb")
            self.open_file.write(self.header(name))
        assert self.open_file is not None
        self.open_file.write(x.contiguous().cpu().view(torch.uint8).numpy().data)

    def close(self) -> None:
        if self.open_file is not None:
            self.open_file.close()


def save_folder(
    model: nn.Module,
    config: Config,
    folder: str | Path,
    max_shard_bytes: int = 5 * 2**30,
    extra: Mapping[str, Tensor] | None = None,
    sidecar_files: Mapping[str, bytes] | None = None,
) -> None:
    """Saves a sharded network as a Hugging Face folder on a shared file system, completely or not at all; all ranks
    call it together. Raises CheckpointError on every rank, as `ref.network.model.save_hf`."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    sharding.reshard(model)
    begin_result: list = [None]
    if rank == 0:
        try:
            begin_result = [ref.prepare_folder(folder, sidecar_files or ())]
        except ref.CheckpointError as error:  # the others would wait forever
            begin_result = [str(error)]
    dist.broadcast_object_list(begin_result, 0)
    if isinstance(begin_result[0], str):
        raise ref.CheckpointError(begin_result[0])
    target, temporary = begin_result[0]
    todo = list(pieces(model))
    writer = FolderWriter(temporary, f"part-{rank}", (piece for piece in todo if piece.is_writer), max_shard_bytes)
    for piece in todo:
        x = piece.make()
        if piece.is_writer:
            writer.write(piece, x)
        del x
    writer.close()
    files_by_rank: list = [None] * ranks
    dist.all_gather_object(
        files_by_rank,
        [(name, {piece.name: piece.bytes for piece in file_pieces}) for name, file_pieces in writer.files],
    )
    if rank == 0:
        files = [file for rank_files in files_by_rank for file in rank_files]
        index, total = {}, 0
        for i, (name, sizes) in enumerate(files, 1):
            final = f"model-{i:05d}-of-{len(files):05d}.safetensors" if len(files) > 1 else "model.safetensors"
            os.rename(temporary / name, temporary / final)
            index |= dict.fromkeys(sizes, final)
            total += sum(sizes.values())
        if len(files) > 1:
            ref.write_index(temporary, index, total)
        ref.finish_folder(target, temporary, asdict(config), next(model.parameters()).dtype, extra, sidecar_files)
    dist.barrier()
