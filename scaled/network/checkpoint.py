"""Saving and loading: training state for any layout, and Hugging Face folders, without the complete network on any rank.

    state(model, optimizers)      every tensor of a training run by name, as slices with their positions: for `runtime/checkpoint.py`
    load_folder, save_folder      `ref.network.model.load_hf` and `save_hf`, each rank reading or writing its own part

A folder has the format of `ref/network/checkpoint.py`. When loading, a rank reads the experts that it owns and one other tensor at a time.
When saving, the tensors of each layer are gathered on the ranks in turn, one tensor at a time, and every rank writes its own files.
Besides its own part, a rank never holds more than one file (`max_shard_bytes`).
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from ref.network import Config
from ref.network import checkpoint as ref
from scaled.runtime import sharding
from scaled.runtime.mesh import current

__all__ = ["begun", "load_folder", "save_folder", "state"]


def placed(name: str, x: Tensor) -> Tensor:
    """A tensor like parameter `name`, as a slice of the full tensor over all ranks: experts are split over ep and over efsdp."""
    if not sharding.owned(name) or not isinstance(x, DTensor):
        return x
    shape = sharding.whole_shape(name, x)
    stride = torch.empty(shape, device="meta").stride()
    placements = [Shard(0), x.placements[0]]
    return DTensor.from_local(x.to_local(), current().experts, placements, shape=torch.Size(shape), stride=stride, run_check=False)


def state(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer] = (), prefix: str = "model") -> dict[str, Tensor]:
    """Weights, and each optimiser's tensors: "model.NAME", "optimizer.NAME.KEY". They share memory with the model and optimisers,
    so filling them loads a checkpoint. An optimiser without a step has no tensors: `begun` creates them."""
    names = {id(p): name for name, p in model.named_parameters()}
    found = {f"{prefix}.{name}": placed(name, p.detach()) for name, p in model.named_parameters()}
    for optimizer in optimizers:
        for p, values in optimizer.state.items():
            name = names[id(p)]
            for key, x in values.items():
                if isinstance(x, Tensor):
                    found[f"optimizer.{prefix}.{name}.{key}"] = placed(name, x) if x.shape == p.shape else x
    return found


def begun(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer], names: Iterable[str], prefix: str = "model") -> None:
    """Creates the tensors in a checkpoint's `names` for optimisers without a step, so they can be filled."""
    held = {name.removeprefix(f"optimizer.{prefix}.") for name in names if name.startswith(f"optimizer.{prefix}.")}
    of = {id(p): name for name, p in model.named_parameters()}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for p in group["params"]:
                name = of[id(p)]
                keys = [one.removeprefix(name + ".") for one in held if one.rpartition(".")[0] == name]
                for key in sorted(keys):
                    optimizer.state[p][key] = (
                        torch.zeros((), device=p.device) if key == "step" else torch.zeros_like(p, memory_format=torch.preserve_format)
                    )


def load_folder(model: nn.Module, folder: str | Path, dtype: torch.dtype = torch.float32) -> None:
    """Loads this rank's part of a Hugging Face folder into a sharded network. Raises CheckpointError as `ref.network.model.load_hf`."""
    folder, names = Path(folder), dict(model.named_parameters())
    shapes = {name: sharding.whole_shape(name, p) for name, p in names.items()}
    files, places, tied = ref.matched(folder, shapes)
    ep, parts = current().group("ep"), {}
    for there, (name, index) in places.items():
        parts.setdefault(name, []).append((there, index))
    for name, p in names.items():
        shape, mine = shapes[name], sharding.owned(name)
        own = shape[0] // ep.size if mine else shape[0]
        first = ep.rank * own if mine else 0
        part = torch.empty(own, *shape[1:], dtype=dtype)
        for there, index in parts[name]:
            if mine and index:  # one expert's matrix
                if not first <= index[0] < first + own:
                    continue
                index = (index[0] - first, *index[1:])
            [(_, tensor)] = ref.read_file(folder / files[there], [there])
            whole = mine and not index  # all experts in one tensor
            ref.fit(part[index], tensor[first : first + own] if whole else tensor, folder / files[there], there)
        if tied and name == "embed_tokens.weight":
            ref.check_tied(folder, files, part)
        sharding.place(name, p, part)


def save_folder(
    model: nn.Module,
    config: Config,
    folder: str | Path,
    max_shard_bytes: int = 5 * 2**30,
    extra: Mapping[str, Tensor] | None = None,
    beside: Mapping[str, bytes] | None = None,
) -> None:
    """Saves a sharded network as a Hugging Face folder on a shared file system, completely or not at all; all ranks call it together.
    Raises CheckpointError on every rank, as `ref.network.model.save_hf`."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    sharding.rest(model)
    told: list = [None]
    if rank == 0:
        try:
            told = [ref.begin(folder, beside or ())]
        except ref.CheckpointError as error:  # the others would wait forever
            told = [str(error)]
    dist.broadcast_object_list(told, 0)
    if isinstance(told[0], str):
        raise ref.CheckpointError(told[0])
    target, fresh = told[0]
    ep, efsdp = current().group("ep"), current().group("efsdp")
    held: dict[str, Tensor] = {}
    written: list[tuple[str, dict[str, int]]] = []

    def write() -> None:
        if held:
            name = f"part-{rank}-{len(written)}.safetensors"
            save_file({part: x.contiguous().cpu() for part, x in held.items()}, fresh / name, metadata={"format": "pt"})
            written.append((name, {part: x.nbytes for part, x in held.items()}))
            held.clear()

    for number, (name, p) in enumerate(model.named_parameters()):
        x = p.detach()
        x = x.full_tensor() if isinstance(x, DTensor) else x  # over all ranks, or over those that own these experts
        if sharding.owned(name):
            mine, first = efsdp.rank == number % efsdp.size, ep.rank * len(x)
        else:
            mine, first = rank == number % ranks, 0
        for part, index in ref.tensor_parts(name, sharding.whole_shape(name, p)).items() if mine else ():
            if sharding.owned(name):
                if not first <= index[0] < first + len(x):
                    continue
                index = (index[0] - first, *index[1:])
            if sum(y.nbytes for y in held.values()) + x[index].nbytes > max_shard_bytes:
                write()
            held[part] = x[index].clone()
    write()
    every: list = [None] * ranks
    dist.all_gather_object(every, written)
    if rank == 0:
        files = [one for some in every for one in some]
        index, total = {}, 0
        for i, (name, sizes) in enumerate(files, 1):
            final = f"model-{i:05d}-of-{len(files):05d}.safetensors" if len(files) > 1 else "model.safetensors"
            os.rename(fresh / name, fresh / final)
            index |= dict.fromkeys(sizes, final)
            total += sum(sizes.values())
        if len(files) > 1:
            ref.write_index(fresh, index, total)
        ref.finish(target, fresh, asdict(config), next(model.parameters()).dtype, extra, beside)
    dist.barrier()
