"""Messages between processes: frames of a length and that many bytes, over sockets of the file system on one machine,
and TCP between several.

Who may open a socket's folder may speak, so it is the user's alone. Any process may connect to a port, so the first
frame that comes there must be the run's token; the hub welcomes who knows it, and hangs up on all others. A frame is at
most `MAX_FRAME_BYTES` bytes: a message names what is large, and does not hold it. A peer that dies is an end of its
line, at once; one whose machine is cut off, after some seconds in which it takes nothing."""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import selectors
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Hub", "Line", "ConnectionLost", "Port", "meeting_place", "meeting_port"]

MAX_FRAME_BYTES = 1 << 24
"""Largest frame, bytes."""


WELCOME = b"welcome"
WAIT = 5.0
"""Seconds for a connection over TCP, and for its welcome."""


class ConnectionLost(ConnectionError):
    """The other side is gone."""


@dataclass(frozen=True)
class Port:
    """Where services of several machines meet."""

    host: str
    number: int
    token: bytes = field(repr=False)
    """What whoever connects must say first."""

    def __str__(self) -> str:
        return f"{self.host}:{self.number}"


@contextlib.contextmanager
def meeting_place() -> Iterator[Path]:
    """A socket's path in a folder of its own, which only this user can enter. A run's own folder may have too long a
    name for a socket."""
    folder = Path(tempfile.mkdtemp(prefix="etude-"))
    try:
        yield folder / "hub"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def meeting_port(host: str) -> Iterator[Port]:
    """A free port of an address of this machine, kept for hubs of this user's until the end: one may follow another
    there."""
    with bind_socket(host, 0) as reserved_socket:  # it never listens, so nothing ever comes to it
        yield Port(host, reserved_socket.getsockname()[1], secrets.token_hex(16).encode())


def bind_socket(host: str, number: int) -> socket.socket:
    """A TCP socket at an address that other sockets of this user may have as well."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind((host, number))
    return listener


class Line:
    """One end of a connection. max_bytes: the largest frame that is taken, bytes."""

    def __init__(self, peer: socket.socket, max_bytes: int = MAX_FRAME_BYTES):
        self.peer, self.buffer, self.max_bytes = peer, bytearray(), max_bytes
        peer.setblocking(False)

    @classmethod
    def to(cls, at: Path | Port, seconds: float) -> Line:
        """Connects to a hub, which may not be there yet. Raises Lost after some seconds, also if the hub does not know
        the token."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                return open_line(at) if isinstance(at, Port) else cls(connect_socket(at))
            except (FileNotFoundError, ConnectionError, TimeoutError) as error:
                if time.monotonic() > deadline:
                    raise ConnectionLost(f"nobody listens at {at}: {error}") from None
                time.sleep(0.02)

    def say(self, data: bytes, seconds: float = 10.0) -> None:
        """Sends a frame. Raises Lost if the other side is gone, or takes nothing for some seconds."""
        if len(data) > MAX_FRAME_BYTES:
            raise ValueError(f"a frame may have {MAX_FRAME_BYTES} bytes, got {len(data)}")
        try:
            self.peer.settimeout(seconds)
            self.peer.sendall(len(data).to_bytes(4, "big") + data)
            self.peer.setblocking(False)
        except OSError as error:
            raise ConnectionLost(str(error)) from None

    def receive(self, seconds: float = 0.0) -> list[bytes]:
        """Complete frames that have come, waiting for the first one at most this long. Raises Lost if the other side is
        gone."""
        frames = self._frames()
        if not frames and seconds > 0:
            with selectors.DefaultSelector() as selector:
                selector.register(self.peer, selectors.EVENT_READ)
                selector.select(seconds)
        while True:
            try:
                data = self.peer.recv(1 << 16)
            except BlockingIOError:
                break
            except OSError as error:
                raise ConnectionLost(str(error)) from None
            if not data:
                if frames or (frames := self._frames()):
                    return frames  # what was said before the end
                raise ConnectionLost("the other side has closed the line")
            self.buffer += data
        return frames + self._frames()

    def _frames(self) -> list[bytes]:
        frames = []
        while len(self.buffer) >= 4 and len(self.buffer) >= 4 + (size := int.from_bytes(self.buffer[:4], "big")):
            frames.append(bytes(self.buffer[4 : 4 + size]))
            del self.buffer[: 4 + size]
        if len(self.buffer) >= 4 and int.from_bytes(self.buffer[:4], "big") > self.max_bytes:
            raise ConnectionLost("the other side does not send frames")
        return frames

    def close(self) -> None:
        self.peer.close()


def connect_socket(path: Path) -> socket.socket:
    peer = socket.socket(socket.AF_UNIX)
    try:
        peer.connect(str(path))
    except OSError:
        peer.close()
        raise
    return peer


def open_line(port: Port) -> Line:
    """A line to a hub that knows the token."""
    try:
        line = Line(with_keepalive(socket.create_connection((port.host, port.number), WAIT)))
    except OSError as error:  # a machine that cannot be reached may be so again
        raise ConnectionLost(str(error)) from None
    try:
        line.say(port.token)
        if line.receive(WAIT) != [WELCOME]:
            raise ConnectionLost("it has no welcome")
    except ConnectionLost:
        line.close()
        raise
    return line


def with_keepalive(peer: socket.socket) -> socket.socket:
    """A TCP connection that sends at once, and ends if the other machine is silent for about half a minute."""
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 30_000}.items():
        if hasattr(socket, name):  # not everywhere
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return peer


class Hub:
    """Listens at a path or a port. Whoever listened there before is dead: there is one hub at a time."""

    def __init__(self, at: Path | Port):
        self.token, self.strangers = b"", set[Line]()
        if isinstance(at, Port):
            self.token, self.listener = at.token, bind_socket(at.host, at.number)
        else:
            at.unlink(missing_ok=True)
            self.listener = socket.socket(socket.AF_UNIX)
            self.listener.bind(str(at))
            os.chmod(at, 0o600)
        self.listener.listen()
        self.listener.setblocking(False)
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.listener, selectors.EVENT_READ)

    def receive(self, seconds: float) -> list[tuple[Line, bytes | None]]:
        """Frames that have come, with the line that each came from; None: the line has ended. Waits at most some
        seconds."""
        messages: list[tuple[Line, bytes | None]] = []
        for key, _ in self.selector.select(seconds):
            if key.data is None:
                self.accept()
                continue
            line: Line = key.data
            is_known = line not in self.strangers
            try:
                frames = line.receive()
                if not is_known and frames:
                    self.welcome(line, frames)
                elif is_known:
                    messages += [(line, data) for data in frames]
            except ConnectionLost:
                self.end(line)
                if is_known:
                    messages.append((line, None))
        return messages

    def accept(self) -> None:
        try:
            peer, _ = self.listener.accept()
        except OSError:
            return  # it has gone already
        if self.token:
            self.strangers.add(line := Line(with_keepalive(peer), max_bytes=len(self.token)))
        else:
            line = Line(peer)
        self.selector.register(peer, selectors.EVENT_READ, line)

    def welcome(self, line: Line, frames: list[bytes]) -> None:
        """Raises Lost for whoever does not know the token."""
        if len(frames) > 1 or not hmac.compare_digest(frames[0], self.token):
            raise ConnectionLost("it does not know the token")
        self.strangers.discard(line)
        line.max_bytes = MAX_FRAME_BYTES
        line.say(WELCOME)

    def end(self, line: Line) -> None:
        """Close a line; closing it again does nothing."""
        self.strangers.discard(line)
        with contextlib.suppress(KeyError, ValueError):
            self.selector.unregister(line.peer)
        line.close()

    def close(self) -> None:
        for key in list(self.selector.get_map().values()):
            if key.data is not None:
                key.data.close()
        self.selector.close()
        self.listener.close()
