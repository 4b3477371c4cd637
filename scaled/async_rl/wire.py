"""Messages between processes of one machine: frames of a length and that many bytes, over sockets of the file system.

Who may open the socket's folder may speak, so it is the user's alone. A frame is at most `MOST` bytes: a message names what is large, and does not
hold it. A peer that dies is an end of its line, at once.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["Hub", "Line", "Lost", "meeting_place"]

MOST = 1 << 24
"""Largest frame, bytes."""


class Lost(ConnectionError):
    """The other side is gone."""


@contextlib.contextmanager
def meeting_place() -> Iterator[Path]:
    """A socket's path in a folder of its own, which only this user can enter. A run's own folder may have too long a name for a socket."""
    folder = Path(tempfile.mkdtemp(prefix="etude-"))
    try:
        yield folder / "hub"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Line:
    """One end of a connection."""

    def __init__(self, peer: socket.socket):
        self.peer, self.got = peer, bytearray()
        peer.setblocking(False)

    @classmethod
    def to(cls, path: Path, seconds: float) -> Line:
        """Connects to a hub, which may not be there yet. Raises Lost after some seconds."""
        until = time.monotonic() + seconds
        while True:
            peer = socket.socket(socket.AF_UNIX)
            try:
                peer.connect(str(path))
                return cls(peer)
            except (FileNotFoundError, ConnectionError):
                peer.close()
                if time.monotonic() > until:
                    raise Lost(f"nobody listens at {path}") from None
                time.sleep(0.02)

    def say(self, data: bytes, seconds: float = 10.0) -> None:
        """Sends a frame. Raises Lost if the other side is gone, or takes nothing for some seconds."""
        if len(data) > MOST:
            raise ValueError(f"a frame may have {MOST} bytes, got {len(data)}")
        try:
            self.peer.settimeout(seconds)
            self.peer.sendall(len(data).to_bytes(4, "big") + data)
            self.peer.setblocking(False)
        except OSError as error:
            raise Lost(str(error)) from None

    def heard(self, seconds: float = 0.0) -> list[bytes]:
        """Complete frames that have come, waiting for the first one at most this long. Raises Lost if the other side is gone."""
        found = self._frames()
        if not found and seconds > 0:
            with selectors.DefaultSelector() as selector:
                selector.register(self.peer, selectors.EVENT_READ)
                selector.select(seconds)
        while True:
            try:
                data = self.peer.recv(1 << 16)
            except BlockingIOError:
                break
            except OSError as error:
                raise Lost(str(error)) from None
            if not data:
                if found or (found := self._frames()):
                    return found  # what was said before the end
                raise Lost("the other side has closed the line")
            self.got += data
        return found + self._frames()

    def _frames(self) -> list[bytes]:
        found = []
        while len(self.got) >= 4 and len(self.got) >= 4 + (size := int.from_bytes(self.got[:4], "big")):
            found.append(bytes(self.got[4 : 4 + size]))
            del self.got[: 4 + size]
        if len(self.got) >= 4 and int.from_bytes(self.got[:4], "big") > MOST:
            raise Lost("the other side does not send frames")
        return found

    def close(self) -> None:
        self.peer.close()


class Hub:
    """Listens at a path. Whoever listened there before is dead: there is one hub to a path."""

    def __init__(self, path: Path):
        path.unlink(missing_ok=True)
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(path))
        os.chmod(path, 0o600)
        self.listener.listen()
        self.listener.setblocking(False)
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.listener, selectors.EVENT_READ)

    def heard(self, seconds: float) -> list[tuple[Line, bytes | None]]:
        """Frames that have come, with the line that each came from; None: the line has ended. Waits at most some seconds."""
        found: list[tuple[Line, bytes | None]] = []
        for key, _ in self.selector.select(seconds):
            if key.data is None:
                peer, _ = self.listener.accept()
                self.selector.register(peer, selectors.EVENT_READ, Line(peer))
                continue
            line: Line = key.data
            try:
                found += [(line, data) for data in line.heard()]
            except Lost:
                self.end(line)
                found.append((line, None))
        return found

    def end(self, line: Line) -> None:
        """Close a line; closing it again does nothing."""
        with contextlib.suppress(KeyError, ValueError):
            self.selector.unregister(line.peer)
        line.close()

    def close(self) -> None:
        for key in list(self.selector.get_map().values()):
            if key.data is not None:
                key.data.close()
        self.selector.close()
        self.listener.close()
