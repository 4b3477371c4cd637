"""Unpacks an sdist in a process of its own, with limits on memory, processor time and bytes. Nothing of it is run.

Archives come from strangers. Whatever is wrong with one ends in one line on standard output, and nothing of it reaches
the calling process: neither an exception of a library that reads it, nor a header that fills the memory. Bytes are
counted while they are decompressed, before anything looks at them. Only folders and regular files are written, so no
link can lead out of the folder.

    python3 -I -B unpack.py FILE FOLDER BYTES MEMBERS        prints {"error": null}, or what is wrong
"""

import json
import resource
import sys
import tarfile
import zlib
from typing import Any

MEMORY, SECONDS = 1 << 30, 120
"""Bytes of memory, and seconds of processor time."""
DEEPEST = 100
"""Folders within each other. To list or remove deeper ones may take more stack than there is."""
BLOCK = 1 << 16


class ArchiveError(Exception):
    """What is wrong with an archive, in one line."""


class GzipReader:
    """The decompressed bytes of a gzip file. Raises Broken, with the text `limits`, after `most` of them, and for a
    file that is cut off."""

    def __init__(self, file, max_bytes: int, limits: str) -> None:
        self.file, self.bytes_left, self.limits = file, max_bytes, limits
        self.stream, self.pending, self.out = zlib.decompressobj(31), b"", bytearray()

    def read(self, size: int) -> bytes:
        """`size` bytes, fewer only at the end."""
        while len(self.out) < size and (block := self.next_block()):
            self.bytes_left -= len(block)
            if self.bytes_left < 0:
                raise ArchiveError(self.limits)
            self.out += block
        data = bytes(self.out[:size])
        del self.out[:size]
        return data

    def next_block(self) -> bytes:
        """At most BLOCK bytes; none at the end."""
        while True:
            if self.stream.eof:  # another member may follow, or zeros that pad the file
                self.pending = (self.stream.unused_data or self.file.read(BLOCK)).lstrip(b"\0")
                if not self.pending:
                    return b""
                self.stream = zlib.decompressobj(31)
            data = self.pending or self.file.read(BLOCK)
            if not data:
                raise ArchiveError("it is cut off")
            block = self.stream.decompress(data, BLOCK)
            self.pending = self.stream.unconsumed_tail
            if block:
                return block


def unpack(path: str, folder: str, max_bytes: int, members: int) -> None:
    """Writes the folders and regular files of an archive. Raises Broken, and what the libraries raise."""
    limits = f"it holds more than {members} files or {max_bytes >> 20} MiB"
    with open(path, "rb") as file:
        stream_file: Any = GzipReader(file, max_bytes, limits)  # of a file it has what a stream of tarfile reads
        archive = tarfile.open(fileobj=stream_file, mode="r|", bufsize=BLOCK)
        for number, member in enumerate(archive):
            if number >= members:
                raise ArchiveError(limits)
            if member.name.count("/") > DEEPEST:
                raise ArchiveError(f"it holds more than {DEEPEST} folders within each other")
            safe_member = tarfile.data_filter(member, folder)
            if safe_member.isreg() or safe_member.isdir() or safe_member.islnk():
                archive.extract(safe_member, folder, filter="data")
        # A damaged header ends the list of members without an error. Only the bytes after it show the damage.
        stream: Any = archive.fileobj
        while block := stream.read(BLOCK):
            if block.strip(b"\0"):
                raise ArchiveError("it is damaged")


def fault(path: str, folder: str, max_bytes: int, members: int) -> str | None:
    """Unpacks an archive. What is wrong with it; None where nothing is."""
    try:
        return unpack(path, folder, max_bytes, members)
    except ArchiveError as error:
        return str(error)
    except RecursionError:
        return "its headers lie too deep within each other"
    except MemoryError:
        return f"to read it takes more than {MEMORY >> 20} MiB of memory"
    except Exception as error:  # each library has errors of its own, and no list of them is complete
        return str(error) or type(error).__name__


def main(path: str, folder: str, max_bytes: str, members: str) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(max_bytes), int(max_bytes)))
    print(json.dumps({"error": fault(path, folder, int(max_bytes), int(members))}))


if __name__ == "__main__":
    main(*sys.argv[1:])
