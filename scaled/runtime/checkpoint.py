"""Checkpoints that many ranks write together and any other layout can read (torch.distributed.checkpoint).

    FOLDER/step-00000120/      __0_0.distcp, __1_0.distcp, …   each rank's shards
                               .metadata                       the file and offset of each slice of each tensor
                               meta.json                       step, layout, additions by the caller
                               manifest.json                   size and CRC-32 of every file above
    FOLDER/.step-00000140      still being written, not yet a checkpoint

Sharded tensors are DTensors, so a slice knows its position; another layout reads other slices and gets the same bits. A
folder gets its name only when the shards of every rank and the manifest are on disk, so a kill at any moment leaves the
previous checkpoint intact. `.metadata` is a pickle, and a shared folder must not execute code: it is read with the
classes that describe tensors, and no others. A thread writes from copies in the computer's memory, with its own process
group; `finish` waits for it, and so does the next `save`."""

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

warnings.filterwarnings(
    "ignore", "torch.distributed is disabled", UserWarning
)  # a single process is what `no_dist` asks for


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: str | Path, keep: int = 2):
        """Creates the folder; all ranks call it together. `keep`: number of checkpoints to keep."""
        self.folder, self.keep = Path(folder), keep
        self.is_distributed = dist.is_initialized() and dist.get_world_size() > 1
        self.rank = dist.get_rank() if self.is_distributed else 0
        group = dist.new_group(backend="gloo") if self.is_distributed else None
        assert not isinstance(group, int)  # every rank is a member
        self.group = group
        self.thread: threading.Thread | None = None
        self.failure: BaseException | None = None
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.rank == 0:
            for temporary in (path for path in self.folder.iterdir() if re.fullmatch(r"\.step-\d+", path.name)):
                step = int(temporary.name.removeprefix(".step-"))
                # Its manifest is written last, so after a kill between the two renames it is complete.
                if (temporary / "manifest.json").exists() and not self.path(step).exists():
                    self._rename(temporary, step)
                else:
                    shutil.rmtree(temporary, ignore_errors=True)
        self._barrier()

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, in ascending order."""
        matches = (re.fullmatch(r"step-(\d+)", path.name) for path in self.folder.iterdir())
        return sorted(int(match[1]) for match in matches if match)

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
            temporary = self.path(step).with_name(f".step-{step:08d}")
            if self.rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir()
            self._barrier()
            writer = dcp.FileSystemWriter(temporary)
            writer.fs = DiskFileSystem()
            dcp.save(state, storage_writer=writer, process_group=self.group, no_dist=not self.is_distributed)
            if self.rank == 0:
                (temporary / "meta.json").write_text(json.dumps(record, indent=1) + "\n")
                files = sorted(path for path in temporary.iterdir())
                manifest = {path.name: [path.stat().st_size, checksum(path)] for path in files}
                (temporary / ".manifest").write_text(json.dumps(manifest, indent=1) + "\n")
                flush(temporary / ".manifest")
                # It certifies the other files, so it must be complete itself.
                os.replace(temporary / ".manifest", temporary / "manifest.json")
                for path in [*files, temporary / "manifest.json", temporary]:
                    flush(path)
                self._rename(temporary, step)
                for old_step in [saved_step for saved_step in self.steps() if saved_step <= step][: -self.keep]:
                    shutil.rmtree(self.path(old_step), ignore_errors=True)
            self._barrier()
        except dcp.CheckpointException as error:  # raised on every rank, with the traceback of the rank that failed
            self.failure = next(iter(error.failures.values()))[0]
        except BaseException as error:
            self.failure = error

    def _rename(self, temporary: Path, step: int) -> None:
        """Renames a complete folder to its final name, replacing an existing one."""
        backup = self.path(step).with_name(f".old-{step:08d}")
        shutil.rmtree(backup, ignore_errors=True)
        if self.path(step).exists():
            os.rename(self.path(step), backup)
        os.rename(temporary, self.path(step))
        flush(self.folder)
        shutil.rmtree(backup, ignore_errors=True)

    def _barrier(self) -> None:
        if self.is_distributed:
            dist.barrier(group=self.group)

    def names(self, step: int | None = None) -> list[str]:
        """Names of the tensors in a checkpoint."""
        return list(read_metadata(self._checkpoint_folder(step)).state_dict_metadata)

    def load(self, state: dict[str, Tensor], step: int | None = None) -> dict:
        """Fills the tensors of `state`, in any layout, from a checkpoint, by default the last; returns its `meta`. All
        ranks call it together. Raises CheckpointError on every rank, naming the missing or damaged file, or the missing
        tensor."""
        self.finish()
        folder = self._checkpoint_folder(step)
        problem, tensor_metadata = "", None
        try:
            files = sorted(read_json(folder / "manifest.json"))
            ranks = dist.get_world_size() if self.is_distributed else 1
            self._check_files(folder, files[self.rank :: ranks])  # one rank reads and checks each file
            tensor_metadata = read_metadata(folder)
            if missing := [name for name in state if name not in tensor_metadata.state_dict_metadata]:
                raise CheckpointError(f"{folder} has no tensor {missing[0]}")
        except CheckpointError as error:
            problem = str(error)
        if self.is_distributed:
            problems: list = [None] * dist.get_world_size()
            dist.all_gather_object(problems, problem, group=self.group)
            problem = next((message for message in problems if message), "")
        if problem:
            raise CheckpointError(problem)
        assert tensor_metadata is not None
        try:
            dcp.load(
                state,
                storage_reader=Reader(folder, tensor_metadata),
                process_group=self.group,
                no_dist=not self.is_distributed,
            )
        except dcp.CheckpointException as error:  # raised on every rank, with the traceback of the rank that failed
            cause = next(iter(error.failures.values()))[0]
            raise CheckpointError(
                f"{folder} cannot be read ({type(cause).__name__}): its tensors do not match .metadata"
            ) from None
        return read_json(folder / "meta.json")

    def _checkpoint_folder(self, step: int | None) -> Path:
        steps = self.steps()
        if not steps or (step is not None and step not in steps):
            description = "no checkpoint" if step is None else f"no checkpoint of step {step}"
            raise CheckpointError(f"{self.folder} holds {description}" + (f"; it has steps {steps}" if steps else ""))
        return self.path(steps[-1] if step is None else step)

    def _check_files(self, folder: Path, names: list[str]) -> None:
        manifest, steps = read_json(folder / "manifest.json"), self.steps()
        this_step = int(folder.name.removeprefix("step-"))
        earlier_steps = [step for step in steps if step < this_step]
        hint = f"; the previous checkpoint is of step {earlier_steps[-1]}" if earlier_steps else ""
        for name in names:
            path, (size, crc) = folder / name, manifest[name]
            if not path.exists():
                raise CheckpointError(f"{path} is missing{hint}")
            if path.stat().st_size != size:
                raise CheckpointError(f"{path} is damaged: {path.stat().st_size} of {size} bytes{hint}")
            if checksum(path) != crc:
                raise CheckpointError(f"{path} is damaged: its checksum differs from the recorded one{hint}")


ALLOWED_CLASSES = {
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
"""Classes that may describe tensors. `BytesStorageMetadata` is not one of them, because DCP would unpickle what it
names."""
ALLOWED_CLASSES |= {("torch", name): dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)}
ALLOWED_CLASSES |= {("torch.serialization", "_get_layout"): {"torch.strided": torch.strided}.__getitem__}
# The path where it was written.
ALLOWED_CLASSES |= {(module, "PosixPath"): PurePosixPath for module in ("pathlib", "pathlib._local")}


class RestrictedUnpickler(pickle.Unpickler):
    """Unpickles `.metadata` with the classes in `ALLOWED_CLASSES` only."""

    def find_class(self, module: str, name: str):
        if (module, name) not in ALLOWED_CLASSES:
            raise CheckpointError(f"{module}.{name}")
        return ALLOWED_CLASSES[module, name]


def read_metadata(folder: Path) -> metadata.Metadata:
    """The content of a checkpoint. Raises CheckpointError unless it holds only tensors in its own files."""
    path = folder / ".metadata"
    try:
        with open(path, "rb") as file:
            content = RestrictedUnpickler(file).load()
    except CheckpointError as error:
        raise CheckpointError(
            f"{path} refers to {str(error)!r}, which does not describe a tensor; refusing to load it"
        ) from None
    except Exception as error:  # damaged bytes can raise any exception
        raise CheckpointError(f"{path} is missing or damaged ({type(error).__name__})") from None
    try:
        has_only_tensors = all(
            type(entry) is metadata.TensorStorageMetadata for entry in content.state_dict_metadata.values()
        )
        storage_infos = list(content.storage_data.values())
        has_only_own_files = all(
            type(entry) is filesystem._StorageInfo and not entry.transform_descriptors for entry in storage_infos
        )
        has_only_own_files = has_only_own_files and all(
            re.fullmatch(r"\w+\.distcp", entry.relative_path) for entry in storage_infos
        )
    except (AttributeError, TypeError):
        has_only_tensors = has_only_own_files = False
    if not (has_only_tensors and has_only_own_files):
        raise CheckpointError(
            f"{path} describes something other than tensors in files of its folder; refusing to load it"
        )
    return content


class DiskFileSystem(filesystem.FileSystem):
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

    def __init__(self, folder: Path, tensor_metadata: metadata.Metadata):
        super().__init__(folder)
        self.tensor_metadata = tensor_metadata

    def read_metadata(self) -> metadata.Metadata:
        return self.tensor_metadata


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
