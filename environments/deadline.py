"""A time by which a server must have given its whole answer: connections, headers, bodies, errors too.

A timeout of a socket bounds one call of it. Who sends a byte each second keeps within it for ever.
"""

from __future__ import annotations

import http.client
import os
import socket
import threading
import urllib.error
import urllib.request
from dataclasses import dataclass

__all__ = ["Answer", "Deadline", "fetch_answer"]


class Deadline:
    """Ends connections when a time is over, whatever they wait for. Use it as a context."""

    def __init__(self, seconds: float) -> None:
        self.lock, self.late = threading.Lock(), False
        self.sockets: list[tuple[socket.socket, int]] = []
        self.timer = threading.Timer(seconds, self._expire)
        self.timer.daemon = True
        self.timer.start()

    def watch(self, connection: socket.socket, direction: int = socket.SHUT_RDWR) -> None:
        """Watches a connection too, also where TLS takes it over later. `direction`: SHUT_RD where it may still be
        written to. Raises TimeoutError where the time is over by now."""
        twin = socket.socket(
            fileno=os.dup(connection.fileno())
        )  # TLS takes the handle out of the object that it is given
        with self.lock:
            self.sockets.append((twin, direction))
        if self.late:
            raise TimeoutError

    def __enter__(self) -> Deadline:
        return self

    def __exit__(self, *_: object) -> None:
        self.timer.cancel()
        with self.lock:
            for twin, direction in self.sockets:
                twin.close()
            self.sockets.clear()

    def _expire(self) -> None:
        with self.lock:
            self.late = True
            for twin, direction in self.sockets:
                try:
                    twin.shutdown(direction)
                except OSError:
                    pass  # it is closed already


class _HttpConnection(http.client.HTTPConnection):
    deadline: Deadline

    def connect(self) -> None:
        super().connect()
        self.deadline.watch(self.sock)


class _HttpsConnection(http.client.HTTPSConnection, _HttpConnection):
    """Its handshake comes behind the connection of `_HttpConnection`."""


class _WatchedHandler(urllib.request.HTTPHandler, urllib.request.HTTPSHandler):
    """Opens connections that a deadline watches."""

    def __init__(self, deadline: Deadline) -> None:
        super().__init__()
        self.deadline = deadline

    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(self._make_http_connection, req)  # pyright: ignore[reportArgumentType]

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(self._make_https_connection, req)  # pyright: ignore[reportArgumentType]

    def _make_http_connection(self, host: str, timeout: float) -> http.client.HTTPConnection:
        connection = _HttpConnection(host, timeout=timeout)
        connection.deadline = self.deadline
        return connection

    def _make_https_connection(self, host: str, timeout: float) -> http.client.HTTPConnection:
        connection = _HttpsConnection(host, timeout=timeout)
        connection.deadline = self.deadline
        return connection


@dataclass(frozen=True)
class Answer:
    """What a server gave."""

    status: int
    kind: str
    """Its type, such as application/json."""
    data: bytes


def fetch_answer(
    request: urllib.request.Request,
    seconds: float,
    max_bytes: int,
    *handlers: urllib.request.BaseHandler,
    silence: float | None = None,
) -> Answer:
    """The whole answer, a refusal too, of at most `max_bytes` bytes. `handlers`: of urllib, in addition to its own.
    `silence`: seconds in which a server may send nothing, by default all that it has. Raises TimeoutError where the
    answer is not there in time, ValueError where it is longer, OSError and http.client.HTTPException. Of a refusal
    whose words do not come, the status is an answer."""
    with Deadline(seconds) as deadline:
        try:
            try:
                response = urllib.request.build_opener(_WatchedHandler(deadline), *handlers).open(
                    request, timeout=silence or seconds
                )
            except urllib.error.HTTPError as error:
                response = error
            status = response.status or 0
            with response:
                try:
                    data = response.read(max_bytes + 1)
                except (OSError, http.client.HTTPException):
                    if status < 400:
                        raise
                    data = b""
        except (OSError, ValueError, http.client.HTTPException):
            if deadline.late:
                raise _make_timeout_error(seconds) from None
            raise
        if deadline.late and status < 400:  # what was read may be the beginning alone
            raise _make_timeout_error(seconds)
    if len(data) > max_bytes:
        raise ValueError(f"the answer has more than {max_bytes >> 20} MiB")
    return Answer(status, response.headers.get_content_type(), data)


def _make_timeout_error(seconds: float) -> TimeoutError:
    return TimeoutError(f"the request timed out: there is no whole answer after {seconds:g} seconds")
