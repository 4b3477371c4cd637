"""Checkpoints that many ranks write together and any other layout can read (torch.distributed.checkpoint).

    FOLDER/step-00000120/      __0_0.distcp, __1_0.distcp, …   each rank's shards
                               .metadata                       the file and offset of each slice of each tensor
                               meta.json                       step, layout, additions by the caller
                               manifest.json                   size and CRC-32 of every file above
    FOLDER/.step-00000140      still being written, not yet a checkpoint

Sharded tensors are DTensors, so a slice knows its position; another layout reads other slices and gets the same bits. A folder gets its
name only when the shards of every rank and the manifest are on disk, so a kill at any moment leaves the previous checkpoint intact.
`.metadata` is a pickle, and a shared folder must not execute code: it is read with the classes that describe tensors, and no others.
A thread writes from copies in the computer's memory, with its own process group; `finish` waits for it, and so does the next `save`.
"""

import io
import json
import os
import pickle
import re
import shutil
import threading
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.tensor import DTensor

from ref.network.checkpoint import CheckpointError, flush, read_json
from scaled.runtime.mesh import current

__all__ = ["CheckpointError", "Checkpoints"]

warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # a single process is what `no_dist` asks for


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: str | Path, keep: int = 2):
        """Creates the folder; all ranks call it together. `keep`: number of checkpoints to keep."""
        self.folder, self.keep = Path(folder), keep
        self.many = dist.is_initialized() and dist.get_world_size() > 1
        self.rank = dist.get_rank() if self.many else 0
        group = dist.new_group(backend="gloo") if self.many else None
        assert not isinstance(group, int)  # every rank is a member
        self.group = group
        self.thread: threading.Thread | None = None
        self.failure: BaseException | None = None
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.rank == 0:
            for fresh in (path for path in self.folder.iterdir() if re.fullmatch(r"\.step-\d+", path.name)):
                step = int(fresh.name.removeprefix(".step-"))
                # Its manifest is written last, so after a kill between the two renames it is complete.
                if (fresh / "manifest.json").exists() and not self.path(step).exists():
                    self._name(fresh, step)
                else:
                    shutil.rmtree(fresh, ignore_errors=True)
        self._together()

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, in ascending order."""
        found = (re.fullmatch(r"step-(\d+)", path.name) for path in self.folder.iterdir())
        return sorted(int(match[1]) for match in found if match)

    def path(self, step: int) -> Path:
        """Folder of the checkpoint of a step."""
        return self.folder / f"step-{step:08d}"

    def save(self, step: int, state: dict[str, Tensor], meta: dict | None = None) -> None:
        """Starts writing; returns once everything is copied. All ranks call it together, with the same keys."""
        self.finish()
        copies = {name: on_host(x) for name, x in state.items()}
        layout = current().layout
        record = {"step": step, "layout": {"dp": layout.dp, "cp": layout.cp, "ep": layout.ep}, **(meta or {})}
        self.thread = threading.Thread(target=self._write, args=(step, copies, record))
        self.thread.start()

    def finish(self) -> None:
        """Waits until the current save is on disk; raises its error, if any."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure

    def _write(self, step: int, state: dict[str, Tensor], record: dict) -> None:
        try:
            fresh = self.path(step).with_name(f".step-{step:08d}")
            if self.rank == 0:
                shutil.rmtree(fresh, ignore_errors=True)
                fresh.mkdir()
            self._together()
            writer = dcp.FileSystemWriter(fresh)
            writer.fs = Disk()
            dcp.save(state, storage_writer=writer, process_group=self.group, no_dist=not self.many)
            if self.rank == 0:
                (fresh / "meta.json").write_text(json.dumps(record, indent=1) + "\n")
                files = sorted(path for path in fresh.iterdir())
                manifest = {path.name: [path.stat().st_size, checksum(path)] for path in files}
                (fresh / ".manifest").write_text(json.dumps(manifest, indent=1) + "\n")
                flush(fresh / ".manifest")
                os.replace(fresh / ".manifest", fresh / "manifest.json")  # it certifies the other files, so it must be complete itself
                for path in [*files, fresh / "manifest.json", fresh]:
                    flush(path)
                self._name(fresh, step)
                for old in [one for one in self.steps() if one <= step][: -self.keep]:
                    shutil.rmtree(self.path(old), ignore_errors=True)
            self._together()
        except dcp.CheckpointException as error:  # raised on every rank, with the traceback of the rank that failed
            self.failure = next(iter(error.failures.values()))[0]
        except BaseException as error:
            self.failure = error

    def _name(self, fresh: Path, step: int) -> None:
        """Renames a complete folder to its final name, replacing an existing one."""
        aside = self.path(step).with_name(f".old-{step:08d}")
        shutil.rmtree(aside, ignore_errors=True)
        if self.path(step).exists():
            os.rename(self.path(step), aside)
        os.rename(fresh, self.path(step))
        flush(self.folder)
        shutil.rmtree(aside, ignore_errors=True)

    def _together(self) -> None:
        if self.many:
            dist.barrier(group=self.group)

    def names(self, step: int | None = None) -> list[str]:
        """Names of the tensors in a checkpoint."""
        return list(read_metadata(self._folder(step)).state_dict_metadata)

    def load(self, state: dict[str, Tensor], step: int | None = None) -> dict:
        """Fills the tensors of `state`, in any layout, from a checkpoint, by default the last; returns its `meta`. All ranks call it
        together. Raises CheckpointError on every rank, naming the missing or damaged file, or the missing tensor."""
        self.finish()
        folder = self._folder(step)
        says, described = "", None
        try:
            files = sorted(read_json(folder / "manifest.json"))
            ranks = dist.get_world_size() if self.many else 1
            self._check(folder, files[self.rank :: ranks])  # one rank reads and checks each file
            described = read_metadata(folder)
            if missing := [name for name in state if name not in described.state_dict_metadata]:
                raise CheckpointError(f"{folder} has no tensor {missing[0]}")
        except CheckpointError as error:
            says = str(error)
        if self.many:
            every: list = [None] * dist.get_world_size()
            dist.all_gather_object(every, says, group=self.group)
            says = next((one for one in every if one), "")
        if says:
            raise CheckpointError(says)
        assert described is not None
        try:
            dcp.load(state, storage_reader=Reader(folder, described), process_group=self.group, no_dist=not self.many)
        except dcp.CheckpointException as error:  # raised on every rank, with the traceback of the rank that failed
            why = next(iter(error.failures.values()))[0]
            raise CheckpointError(f"{folder} cannot be read ({type(why).__name__}): its tensors do not match .metadata") from None
        return read_json(folder / "meta.json")

    def _folder(self, step: int | None) -> Path:
        steps = self.steps()
        if not steps or (step is not None and step not in steps):
            which = "no checkpoint" if step is None else f"no checkpoint of step {step}"
            raise CheckpointError(f"{self.folder} holds {which}" + (f"; it has steps {steps}" if steps else ""))
        return self.path(steps[-1] if step is None else step)

    def _check(self, folder: Path, names: list[str]) -> None:
        manifest, steps = read_json(folder / "manifest.json"), self.steps()
        here = int(folder.name.removeprefix("step-"))
        before = [step for step in steps if step < here]
        other = f"; the previous checkpoint is of step {before[-1]}" if before else ""
        for name in names:
            path, (size, crc) = folder / name, manifest[name]
            if not path.exists():
                raise CheckpointError(f"{path} is missing{other}")
            if path.stat().st_size != size:
                raise CheckpointError(f"{path} is damaged: {path.stat().st_size} of {size} bytes{other}")
            if checksum(path) != crc:
                raise CheckpointError(f"{path} is damaged: its checksum differs from the recorded one{other}")


ADMITTED = {
    (cls.__module__, cls.__qualname__): cls
    for cls in (
        metadata.Metadata,
        metadata.StorageMeta,
        metadata.MetadataIndex,
        metadata.TensorStorageMetadata,
        metadata.TensorProperties,
        metadata.ChunkStorageMetadata,
        metadata._MEM_FORMAT_ENCODING,
        filesystem._StorageInfo,
        torch.Size,
    )
}
"""Classes that may describe tensors. `BytesStorageMetadata` is not one of them, because DCP would unpickle what it names."""
ADMITTED |= {("torch", name): dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)}
ADMITTED |= {("torch.serialization", "_get_layout"): {"torch.strided": torch.strided}.__getitem__}
ADMITTED |= {(module, "PosixPath"): PurePosixPath for module in ("pathlib", "pathlib._local")}  # where it was written


class Description(pickle.Unpickler):
    """Unpickles `.metadata` with the classes in `ADMITTED` only."""

    def find_class(self, module: str, name: str):
        if (module, name) not in ADMITTED:
            raise CheckpointError(f"{module}.{name}")
        return ADMITTED[module, name]


def read_metadata(folder: Path) -> metadata.Metadata:
    """The content of a checkpoint. Raises CheckpointError unless it holds only tensors in its own files."""
    path = folder / ".metadata"
    try:
        with open(path, "rb") as file:
            found = Description(file).load()
    except CheckpointError as error:
        raise CheckpointError(f"{path} refers to {str(error)!r}, which does not describe a tensor; refusing to load it") from None
    except Exception as error:  # damaged bytes can raise any exception
        raise CheckpointError(f"{path} is missing or damaged ({type(error).__name__})") from None
    try:
        tensors = all(type(one) is metadata.TensorStorageMetadata for one in found.state_dict_metadata.values())
        places = list(found.storage_data.values())
        inside = all(type(one) is filesystem._StorageInfo and not one.transform_descriptors for one in places)
        inside = inside and all(re.fullmatch(r"\w+\.distcp", one.relative_path) for one in places)
    except (AttributeError, TypeError):
        tensors = inside = False
    if not (tensors and inside):
        raise CheckpointError(f"{path} describes something other than tensors in files of its folder; refusing to load it")
    return found


class Disk(filesystem.FileSystem):
    """DCP's files. Raises the operating system's error, which torch.save would replace by its own."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[io.IOBase]:
        try:
            with super().create_stream(path, mode) as stream:
                yield stream
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


class Reader(dcp.FileSystemReader):
    """DCP's reader, with given metadata."""

    def __init__(self, folder: Path, described: metadata.Metadata):
        super().__init__(folder)
        self.described = described

    def read_metadata(self) -> metadata.Metadata:
        return self.described


def on_host(x: Tensor) -> Tensor:
    """A copy in the computer's memory: weights and moments once more on a GPU would leave the next step no room."""
    x = x.detach()
    if not isinstance(x, DTensor):
        return x.to("cpu", copy=True)
    local = x.to_local().to("cpu", copy=True)
    return DTensor.from_local(local, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride())


def checksum(path: Path) -> int:
    """CRC-32 of a file."""
    crc = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            crc = zlib.crc32(block, crc)
    return crc
