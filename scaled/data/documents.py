"""The documents of a unit, and a `UnreadableDocument` with a reason for everything that cannot be read. No bad row or
file ends the reading of others.

Nothing that a source holds is run, and no archive is unpacked: members are read as a stream, links are not followed,
and sizes are bounded."""

import bz2
import gzip
import lzma
import os
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO, NamedTuple

from kit.disk import parse_json
from kit.settings import RunError
from scaled.data.sources import ZIPS, Source, Unit, is_selected, open_file, parquet, remote

__all__ = ["UnreadableDocument", "Document", "read"]

UNPACKED = 8 << 30
"""Most bytes that an archive may unpack to; what comes after them is left out and named."""
MAX_ROW_BYTES = 64 << 20
"""Most bytes of a row of JSONL."""
READ_ERRORS = (
    OSError,
    EOFError,
    ValueError,
    RuntimeError,
    zlib.error,
    lzma.LZMAError,
    tarfile.TarError,
    zipfile.BadZipFile,
)
"""What the readers of archives raise for what they cannot read; RuntimeError for an encrypted member, and for an
unknown way of packing."""


class Document(NamedTuple):
    """A text and its name in the source: a path, or the number of its row in the unit, counted from 1."""

    name: str | int
    text: str


class UnreadableDocument(NamedTuple):
    """What cannot be read: a file, a member or a row, and why."""

    name: str | int
    reason: str


def read(unit: Unit, source: Source, max_bytes: int) -> Iterator[Document | UnreadableDocument]:
    """The documents of a unit, and what cannot be read. Texts have at most `max_bytes` bytes."""
    reader = {"files": read_files, "lines": read_lines, "rows": read_rows, "archive": read_archive}[unit.kind]
    return reader(unit, source, max_bytes)


def text_of(name: str | int, data: bytes, max_bytes: int) -> Document | UnreadableDocument:
    """A document from the bytes of a file: UTF-8, no NUL, not empty; \\r\\n becomes \\n."""
    if len(data) > max_bytes:
        return UnreadableDocument(name, "too large")
    if not data.strip():
        return UnreadableDocument(name, "empty")
    if b"\0" in data:
        return UnreadableDocument(name, "binary")
    try:
        return Document(name, data.decode("utf-8").replace("\r\n", "\n"))
    except UnicodeDecodeError:
        return UnreadableDocument(name, "not UTF-8")


def read_files(unit: Unit, source: Source, max_bytes: int) -> Iterator[Document | UnreadableDocument]:
    for name in unit.names or (unit.label,):
        address = f"{unit.address.rstrip('/')}/{name}" if unit.names else unit.address
        try:
            with open_file(address) as file:
                if not remote(address) and not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    yield UnreadableDocument(name, "unreadable")
                    continue
                data = file.read(max_bytes + 1)
        except OSError as error:
            refuse_broken(unit, error)
            yield UnreadableDocument(name, "unreadable")
            continue
        yield text_of(name, data, max_bytes)


def read_lines(unit: Unit, source: Source, max_bytes: int) -> Iterator[Document | UnreadableDocument]:
    """Rows of JSONL whose first byte lies in the unit."""
    position, row = unit.begin, 0
    try:
        with open_file(unit.address) as raw:
            file: Any = gzip.GzipFile(fileobj=raw) if unit.address.endswith(".gz") else raw
            if position:
                file.seek(position - 1)
                position += sum(map(len, pieces(file))) - 1  # the end of a row that began before
            while unit.end < 0 or position < unit.end:
                line_pieces = list(pieces(file, keep=MAX_ROW_BYTES))
                if not line_pieces:
                    return
                position, row = position + sum(map(len, line_pieces)), row + 1
                line = line_pieces[0]
                yield (
                    UnreadableDocument(row, "row too long")
                    if len(line_pieces) > 1
                    else row_of(row, line, source, max_bytes)
                )
    except (OSError, EOFError, zlib.error) as error:
        yield UnreadableDocument(unit.label, describe_damage(unit, error))


def pieces(file: Any, keep: int = 1 << 20) -> Iterable[bytes]:
    """One line in pieces of at most `keep` bytes."""
    while block := file.readline(keep):
        yield block
        if block.endswith(b"\n"):
            return


def row_of(row: int, line: bytes, source: Source, max_bytes: int) -> Document | UnreadableDocument:
    if not line.strip():
        return UnreadableDocument(row, "empty row")
    try:
        value = parse_json(line.decode("utf-8"))
    except UnicodeDecodeError:
        return UnreadableDocument(row, "not UTF-8")
    except (ValueError, RecursionError):
        return UnreadableDocument(row, "broken JSON")
    if not isinstance(value, dict):
        return UnreadableDocument(row, "not an object")
    return cell(row, value.get(source.text), value.get(source.title), source, max_bytes)


def cell(row: int, text: Any, title: Any, source: Source, max_bytes: int) -> Document | UnreadableDocument:
    """A document from a column's value."""
    name = title if isinstance(title, str) and title else row
    if text is None:
        return UnreadableDocument(name, f"no {source.text}")
    if not isinstance(text, str):
        return UnreadableDocument(name, f"{source.text} is no text")
    try:
        str(name).encode("utf-8")
        return text_of(name, text.encode("utf-8"), max_bytes)
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can spell
        return UnreadableDocument(row, "not UTF-8")


def read_rows(unit: Unit, source: Source, max_bytes: int) -> Iterator[Document | UnreadableDocument]:
    row = 0
    try:
        with open_file(unit.address) as file:
            table = parquet(source).ParquetFile(file)
            column_names = set(table.schema_arrow.names)
            if source.text not in column_names:
                yield UnreadableDocument(unit.label, f"no column {source.text}")
                return
            columns = [source.text, *({source.title} & column_names - {source.text})]
            groups = range(unit.begin, table.metadata.num_row_groups if unit.end < 0 else unit.end)
            for batch in table.iter_batches(256, list(groups), columns, use_threads=False):
                texts = batch.column(source.text)
                titles = batch.column(source.title) if source.title in columns else None
                for i in range(len(texts)):
                    row += 1
                    try:
                        yield cell(
                            row, texts[i].as_py(), titles[i].as_py() if titles is not None else None, source, max_bytes
                        )
                    except UnicodeDecodeError:
                        yield UnreadableDocument(row, "not UTF-8")
    except (OSError, ValueError, NotImplementedError) as error:  # the last for a codec that pyarrow was built without
        yield UnreadableDocument(unit.label, describe_damage(unit, error))


def describe_damage(unit: Unit, error: BaseException) -> str:
    """What is wrong with a file, in a few words that are the same in every run. Raises RunError as `refuse_broken`."""
    refuse_broken(unit, error)
    return f"damaged file: {(' '.join(str(error).split()) or type(error).__name__)[:80]}"


def refuse_broken(unit: Unit, error: BaseException) -> None:
    """Raises RunError for a connection that broke. Its file is not damaged: skipped now, it would be there the next
    time."""
    if isinstance(error, (ConnectionError, TimeoutError)):
        raise RunError(
            f"source {unit.address}: the connection broke ({' '.join(str(error).split()) or type(error).__name__})"
        ) from None


class BoundedStream:
    """A stream that ends with an error after `UNPACKED` bytes."""

    def __init__(self, file: Any):
        self.file, self.bytes_left = file, UNPACKED

    def read(self, size: int = -1) -> bytes:
        block = self.file.read(size)
        self.bytes_left -= len(block)
        if self.bytes_left < 0:
            raise OSError("it unpacks to too many bytes")
        return block


def read_archive(unit: Unit, source: Source, max_bytes: int) -> Iterator[Document | UnreadableDocument]:
    """Members in the order of the archive. A damaged archive gives what stands before the damage."""
    try:
        with open_file(unit.address) as file:
            if unit.address.endswith(ZIPS):
                yield from read_zip(file, unit, source, max_bytes)
                return
            magic = file.read(6)
            file.seek(0)
            decompressors: dict[bytes, Any] = {b"\x1f\x8b": gzip.GzipFile, b"BZ": bz2.BZ2File, b"\xfd7": lzma.LZMAFile}
            decompressor = decompressors.get(magic[:2], lambda file: file)
            plain_file = decompressor(fileobj=file) if decompressor is gzip.GzipFile else decompressor(file)
            # tarfile only reads here, whatever its types ask for.
            with tarfile.open(  # pyright: ignore[reportCallIssue]
                fileobj=BoundedStream(plain_file),  # pyright: ignore[reportArgumentType]
                mode="r|",
            ) as tar:
                for member in tar:
                    if member.isdir() or not is_selected(source, member.name):
                        continue
                    if not member.isreg():
                        yield UnreadableDocument(member.name, "a link or device")
                    elif member.size > max_bytes:
                        yield UnreadableDocument(member.name, "too large")
                    elif (member_file := tar.extractfile(member)) is not None:
                        yield with_valid_name(
                            member.name, text_of(member.name, member_file.read(max_bytes + 1), max_bytes)
                        )
    except READ_ERRORS as error:
        yield UnreadableDocument(unit.label, describe_damage(unit, error))


def with_valid_name(name: str, document: Document | UnreadableDocument) -> Document | UnreadableDocument:
    """The same, if the name is text that files can hold."""
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return document._replace(name=os.fsencode(name).decode("utf-8", "replace"))
    return document


def read_zip(file: BinaryIO, unit: Unit, source: Source, max_bytes: int) -> Iterator[Document | UnreadableDocument]:
    bytes_left = UNPACKED
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        for member in members[unit.begin : len(members) if unit.end < 0 else unit.end]:
            if member.is_dir() or not is_selected(source, member.filename):
                continue
            if stat.S_ISLNK(member.external_attr >> 16):
                yield UnreadableDocument(member.filename, "a link or device")
                continue
            if member.file_size > max_bytes:
                yield UnreadableDocument(member.filename, "too large")
                continue
            try:
                with archive.open(member) as member_file:
                    data = member_file.read(max_bytes + 1)
            except READ_ERRORS as error:
                yield UnreadableDocument(member.filename, describe_damage(unit, error))
                continue
            bytes_left -= len(data)
            if bytes_left < 0:
                raise OSError("it unpacks to too many bytes")
            yield with_valid_name(member.filename, text_of(member.filename, data, max_bytes))
