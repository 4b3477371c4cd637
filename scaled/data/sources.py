"""Sources of documents: folders of text, archives, JSONL, Parquet; on this machine or at an fsspec address. `units`
divides a source into what one process reads at a time: some files, a range of bytes of a JSONL file, some row groups of
a Parquet file, an archive."""

import glob
import os
import zipfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Literal

from kit.settings import RunError
from ref.cpt import walk

__all__ = ["INSTALL", "ZIPS", "Source", "Unit", "is_selected", "open_file", "parquet", "remote", "units"]

INSTALL = "pip install -c constraints.txt -e '.[data]'"
ZIPS = (".zip", ".whl")
ARCHIVES = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar", *ZIPS)
LINES = (".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz")


@dataclass(frozen=True)
class Source:
    """Where documents come from."""

    path: str = ""
    """Folder of text files, archive (.tar.gz, .zip, .whl, …), .jsonl, .jsonl.gz, .parquet, or a glob of these; local or
    an fsspec address."""
    name: str = ""
    """Name in statistics and shards; by default the last part of the path without suffixes."""
    weight: float = 1.0
    """Share of the training rows, relative to the other sources."""
    text: str = "content"
    """Column that holds the text (JSONL, Parquet)."""
    title: str = "path"
    """Column that holds the name, if there is one; else a row is called FILE:ROW."""
    suffixes: tuple[str, ...] = ()
    """Read only files with these suffixes, with the dot (folders, archives); none means all."""
    exclude: tuple[str, ...] = ()
    """Folders and files that are left out wherever they lie (folders, archives)."""
    rules: Literal["code", "text", "none"] = "code"
    """Rules for documents: those for code, those of them that also suit prose, or none."""

    def __post_init__(self):
        if not self.path:
            raise ValueError("path must name a folder, file, glob or address")
        if not 0 <= self.weight < float("inf"):
            raise ValueError(f"weight must be finite and not negative, got {self.weight}")

    @property
    def label(self) -> str:
        """The name that files and statistics have."""
        name = self.name or PurePosixPath(self.path.rstrip("/")).name.split(".")[0].split("*")[0]
        return "".join(c if c.isalnum() or c in "-_" else "-" for c in name).strip("-") or "source"


@dataclass(frozen=True)
class Unit:
    """What one process reads at a time."""

    source: int
    kind: Literal["files", "lines", "rows", "archive"]
    address: str
    """Folder of the files, or the file."""
    label: str
    """Name of the file in the source."""
    names: tuple[str, ...] = ()
    """Files below the folder, in order."""
    begin: int = 0
    end: int = -1
    """From which to which byte (lines), row group (rows) or member (zip files); −1: to the end."""
    first: int = 0
    """Number of rows before the unit (rows)."""
    bytes: int = 0
    """Size of what is read."""


def remote(address: str) -> bool:
    return "://" in address


def filesystem(address: str) -> tuple[Any, str]:
    """fsspec's file system of an address, and the path on it. Raises RunError if fsspec or its driver is missing."""
    try:
        import fsspec

        return fsspec.core.url_to_fs(address)
    except ImportError as error:
        raise RunError(f"source {address}: {error}; an address needs fsspec and its driver: {INSTALL}") from None
    except ValueError as error:
        raise RunError(f"source {address}: {' '.join(str(error).split())}") from None


def open_file(address: str) -> BinaryIO:
    """The file, to be read."""
    if not remote(address):
        return open(address, "rb")
    system, path = filesystem(address)
    return system.open(path, "rb")


def units(source: Source, number: int, size: int) -> tuple[list[Unit], int, list[tuple]]:
    """What the processes read of source `number`, at most about `size` bytes at a time; how many folders cannot be
    listed; and a name, size and time for every file, which differ once the source has changed. Raises RunError if
    nothing is there."""
    root, files, num_unlisted = list_files(source)
    if not files:
        raise RunError(f"source {source.label}: nothing to read at {source.path}; see path and suffixes")
    source_units: list[Unit] = []
    file_names: list[str] = []
    total_bytes = 0
    for name, length, _ in files:
        kind = kind_of(name) if root is None else "files"
        if root is not None:
            file_names, total_bytes = [*file_names, name], total_bytes + length
            if total_bytes >= size or len(file_names) == 512:
                source_units.append(Unit(number, "files", root, "", tuple(file_names), bytes=total_bytes))
                file_names, total_bytes = [], 0
        elif kind == "lines" and not name.endswith(".gz"):
            borders = [*range(0, max(length, 1), size), length]
            source_units += [
                Unit(number, kind, name, label(source, name), begin=a, end=b, bytes=b - a)
                for a, b in zip(borders, borders[1:])
            ]
        elif kind == "rows":
            source_units += row_groups(source, number, name, length, size)
        elif name.endswith(ZIPS):
            source_units += members(source, number, name, length, size)
        else:
            source_units.append(Unit(number, kind, name, label(source, name), bytes=length))
    if file_names and root is not None:
        source_units.append(Unit(number, "files", root, "", tuple(file_names), bytes=total_bytes))
    return source_units, num_unlisted, files


def list_files(source: Source) -> tuple[str | None, list[tuple], int]:
    """The folder, if the source is one; every file with size and time, in order; and how many folders could not be
    listed."""
    path = source.path
    if not remote(path):
        if os.path.isdir(path):
            skip_counts: Counter = Counter()
            names = sorted(
                p.relative_to(path).as_posix() for p in walk(Path(path), frozenset(source.exclude), skip_counts)
            )
            matching_names = [name for name in names if is_selected(source, name)]
            return (
                path,
                [(name, *file_state(os.path.join(path, name))) for name in matching_names],
                sum(skip_counts.values()),
            )
        names = (
            sorted(glob.glob(path, recursive=True)) if glob.has_magic(path) else [path] if os.path.exists(path) else []
        )
        return None, [(name, *file_state(name)) for name in names if os.path.isfile(name)], 0
    system, remote_path = filesystem(path)
    try:
        if not glob.has_magic(remote_path) and system.isdir(remote_path):
            infos = system.find(remote_path, detail=True)
            names = sorted((file_path.removeprefix(remote_path).lstrip("/"), info) for file_path, info in infos.items())
            matching_files = [(name, info) for name, info in names if is_selected(source, name)]
            return (
                path.rstrip("/"),
                [
                    (name, info["size"] or 0, str(info.get("mtime", info.get("ETag", ""))))
                    for name, info in matching_files
                ],
                0,
            )
        infos = (
            system.glob(remote_path, detail=True)
            if glob.has_magic(remote_path)
            else {remote_path: system.info(remote_path)}
        )
        scheme = path.partition("://")[0]
        files = [(file_path, info) for file_path, info in sorted(infos.items()) if info["type"] == "file"]
        return (
            None,
            [
                (
                    f"{scheme}://{file_path.lstrip('/')}" if scheme != "file" else f"file://{file_path}",
                    info["size"] or 0,
                    "",
                )
                for file_path, info in files
            ],
            0,
        )
    except FileNotFoundError:
        return None, [], 0
    except (OSError, ImportError, ValueError) as error:
        raise RunError(f"source {source.label}: {path}: {' '.join(str(error).split())}") from None


def file_state(path: str) -> tuple[int, int]:
    """Size and time of a file; −1 for one that has gone."""
    try:
        status = os.stat(path)
    except OSError:
        return 0, -1
    return status.st_size, status.st_mtime_ns


def is_selected(source: Source, name: str) -> bool:
    """Whether a file below a folder or in an archive is wanted."""
    parts = PurePosixPath(name).parts
    if any(part.startswith(".") or part in source.exclude for part in parts):
        return False
    return not source.suffixes or name.endswith(tuple(source.suffixes))


def kind_of(name: str) -> Literal["lines", "rows", "archive", "files"]:
    if name.endswith(LINES):
        return "lines"
    if name.endswith(".parquet"):
        return "rows"
    return "archive" if name.endswith(ARCHIVES) else "files"


def label(source: Source, name: str) -> str:
    """The name of a file in the source: what follows the fixed folders of its path."""
    fixed_parts = [part for part in source.path.split("/")]
    fixed_parts = fixed_parts[
        : next((i for i, part in enumerate(fixed_parts) if glob.has_magic(part)), len(fixed_parts) - 1)
    ]
    return name.removeprefix("/".join(fixed_parts)).lstrip("/")


def row_groups(source: Source, number: int, name: str, length: int, size: int) -> Iterator[Unit]:
    """Row groups of a Parquet file, some to a unit. A damaged file is one unit, and reading it says so."""
    try:
        with open_file(name) as file:
            metadata = parquet(source).ParquetFile(file).metadata
        groups = [
            (metadata.row_group(i).num_rows, metadata.row_group(i).total_byte_size)
            for i in range(metadata.num_row_groups)
        ]
    except (OSError, ValueError, NotImplementedError):
        yield Unit(number, "rows", name, label(source, name), bytes=length)
        return
    begin = first = rows = unit_bytes = 0
    for i, (n, bytes) in enumerate(groups):
        rows, unit_bytes = rows + n, unit_bytes + bytes
        if unit_bytes >= size or i == len(groups) - 1:
            yield Unit(number, "rows", name, label(source, name), (), begin, i + 1, first, unit_bytes)
            begin, first, unit_bytes = i + 1, rows, 0


def members(source: Source, number: int, name: str, length: int, size: int) -> Iterator[Unit]:
    """Members of a zip file, some to a unit. A damaged file is one unit, and reading it says so."""
    try:
        with open_file(name) as file, zipfile.ZipFile(file) as archive:
            sizes = [member.file_size if is_selected(source, member.filename) else 0 for member in archive.infolist()]
    except (OSError, ValueError, zipfile.BadZipFile, NotImplementedError):
        yield Unit(number, "archive", name, label(source, name), bytes=length)
        return
    begin = unit_bytes = 0
    for i, bytes in enumerate(sizes):
        unit_bytes += bytes
        if unit_bytes >= size or i == len(sizes) - 1:
            yield Unit(number, "archive", name, label(source, name), (), begin, i + 1, 0, unit_bytes)
            begin, unit_bytes = i + 1, 0


def parquet(source: Source) -> Any:
    try:
        import pyarrow.parquet

        return pyarrow.parquet
    except ImportError:
        raise RunError(f"source {source.label}: Parquet needs pyarrow: {INSTALL}") from None
