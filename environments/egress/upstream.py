"""Who answers a request that may go on: a folder of wheels and sdists, or a server.

A folder is served as an index of packages (PEP 503) with a page for each name. Of a server nothing is believed: its
answer is read to its end, within bounds of bytes and time, before any of it goes in. Its address is looked up once for
each request, judged, and connected to as it was judged: a name that leads elsewhere a moment later (DNS rebinding)
gains nothing. A redirect goes in only where it leads to a host of the list, under its name there."""

from __future__ import annotations

import hashlib
import html
import http.client
import ipaddress
import re
import socket
import tempfile
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from environments.egress.rules import ProxyRequest, Refused, Rules, is_number

__all__ = ["Answer", "answer_request"]

FILE = re.compile(
    r"(?P<name>[A-Za-z0-9](?:[A-Za-z0-9._-]*?[A-Za-z0-9])?)-[0-9][A-Za-z0-9.!+_]*"
    r"(?:(?:-[0-9][A-Za-z0-9_.]*)?(?:-[A-Za-z0-9_.]+){3}\.whl|\.tar\.gz|\.zip)"
)
"""Names of wheels and sdists."""
PAGE = "text/html; charset=utf-8"
PAGES = ("text/html", "application/vnd.pypi.simple")
"""Kinds of answers whose links are written anew: they lead to the host's own name."""
LONGEST = 64 << 20
"""Bytes of a page."""
KEPT_HEADERS = ("content-type", "etag", "last-modified")
"""Headers of an answer that go in."""


@dataclass(frozen=True)
class Answer:
    """What goes in."""

    status: int
    headers: Mapping[str, str]
    body: IO[bytes]
    size: int
    """Bytes of the body; with HEAD those that it would have."""


@dataclass
class Body:
    """Collects an answer, in memory while it is small. `max_bytes`: its bound."""

    max_bytes: int
    file: IO[bytes] = field(default_factory=lambda: tempfile.SpooledTemporaryFile(1 << 20))
    size: int = 0

    def add(self, block: bytes) -> None:
        """Raises Refused where that is too much."""
        self.size += len(block)
        if self.size > self.max_bytes:
            self.file.close()
            raise Refused(502, f"the answer has more than {self.max_bytes} bytes")
        self.file.write(block)

    def answer(self, status: int, headers: Mapping[str, str], size: int | None = None) -> Answer:
        self.file.seek(0)
        return Answer(status, headers, self.file, self.size if size is None else size)


def answer_request(
    request: ProxyRequest, rules: Rules, max_bytes: int, watch: Callable[[socket.socket], None]
) -> Answer:
    """The answer, of at most `max_bytes` bytes. `watch` is given each connection, and ends it when the time of the
    request is over. Raises Refused for one that does not go in, and OSError, ValueError or http.client.HTTPException
    where there is none."""
    upstream = rules.hosts[request.host].upstream
    return (
        _answer_from_folder(upstream, request, max_bytes)
        if isinstance(upstream, Path)
        else _answer_from_server(upstream, request, rules, max_bytes, watch)
    )


def normal(name: str) -> str:
    """A package's name as an index has it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _list_packages(folder: Path) -> dict[str, list[Path]]:
    """The regular files of a folder that are wheels and sdists, by the normal name of their package."""
    packages: dict[str, list[Path]] = {}
    for path in sorted(folder.iterdir()):
        if (match := FILE.fullmatch(path.name)) and path.is_file() and not path.is_symlink():
            packages.setdefault(normal(match["name"]), []).append(path)
    return packages


def _answer_from_folder(folder: Path, request: ProxyRequest, max_bytes: int) -> Answer:
    """/simple/, /simple/NAME/ and /files/FILE."""
    packages, body, kind = _list_packages(folder), Body(max_bytes), PAGE
    _, top, *parts = [*request.path.split("/"), ""][:4]
    if request.path == "/simple/":
        body.add(_format_links({f"{name}/": name for name in packages}))
    elif top == "simple" and request.path == f"/simple/{parts[0]}/" and parts[0] in packages:
        body.add(
            _format_links({f"/files/{path.name}#sha256={_hash_file(path)}": path.name for path in packages[parts[0]]})
        )
    elif request.path == f"/files/{parts[0]}" and (
        path := next(
            (candidate for paths in packages.values() for candidate in paths if candidate.name == parts[0]), None
        )
    ):
        kind = "application/octet-stream"
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                body.add(block)
    else:
        body.add(b"nothing of this name is here\n")
        return body.answer(404, {"content-type": "text/plain"})
    return body.answer(200, {"content-type": kind})


def _format_links(links: Mapping[str, str]) -> bytes:
    rows = "".join(f'<a href="{html.escape(address)}">{html.escape(name)}</a><br>\n' for address, name in links.items())
    return f"<!DOCTYPE html>\n<html><body>\n{rows}</body></html>\n".encode()


def _hash_file(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class _PinnedConnection(http.client.HTTPConnection):
    """A connection to an address that was judged before. `context`: of TLS, which asks for a certificate of the
    name."""

    def __init__(
        self, name: str, port: int, addresses: list[str], rules: Rules, context, watch: Callable[[socket.socket], None]
    ) -> None:
        super().__init__(name, port, timeout=rules.seconds)
        self.addresses, self.context, self.watch = addresses, context, watch

    def connect(self) -> None:
        last_error: OSError = OSError("there is no address")
        for address in self.addresses:
            try:
                self.sock = socket.create_connection((address, self.port), self.timeout)
                self.watch(self.sock)
                if self.context is not None:
                    self.sock = self.context.wrap_socket(self.sock, server_hostname=self.host)
                return
            except OSError as error:
                last_error = error
        raise last_error


def addresses(name: str, port: int, private: bool) -> list[str]:
    """Where a server is. Raises Refused unless all of its addresses are public, or `private` is given, and OSError for
    a name without any."""
    ip_strings = [str(row[4][0]) for row in socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)]
    for address in ip_strings:
        ip = ipaddress.ip_address(address.partition("%")[0])
        ip = getattr(ip, "ipv4_mapped", None) or ip
        if not private and (not ip.is_global or ip.is_multicast):
            raise Refused(502, f"{name} leads to {ip}, which is no public address")
    return ip_strings


def _answer_from_server(
    upstream: str, request: ProxyRequest, rules: Rules, max_bytes: int, watch: Callable[[socket.socket], None]
) -> Answer:
    server, host = urllib.parse.urlsplit(upstream), rules.hosts[request.host]
    name, port, context = server.hostname or "", server.port or (443 if server.scheme == "https" else 80), None
    if server.scheme == "https":
        import ssl

        context = ssl.create_default_context()
    pinned_addresses = addresses(name, port, host.private or is_number(name))
    connection = _PinnedConnection(name, port, pinned_addresses, rules, context, watch)
    try:
        headers = {**request.headers, "accept-encoding": "identity", "user-agent": "etude", "connection": "close"}
        connection.request(request.method, urllib.parse.quote(request.path, safe="/+!@=,~"), headers=headers)
        return _read_answer(connection.getresponse(), request, rules, max_bytes)
    finally:
        connection.close()


def _read_answer(response: http.client.HTTPResponse, request: ProxyRequest, rules: Rules, max_bytes: int) -> Answer:
    """The whole answer of a server. Raises Refused."""
    headers = {
        name: value[:1000]
        for name in KEPT_HEADERS
        if (value := response.headers.get(name, "")).isprintable() and value.isascii() and value
    }
    if response.status in (301, 302, 303, 307, 308):
        headers["location"] = _rewrite_redirect(response.headers.get("location", ""), request, rules)
        return Body(max_bytes).answer(response.status, headers)
    length = response.headers.get("content-length", "")
    expected = int(length) if length.isascii() and length.isdigit() and len(length) < 16 else None
    if (expected or 0) > max_bytes:
        raise Refused(502, f"the answer has {expected} bytes, more than {max_bytes}")
    if response.headers.get("content-encoding", "identity") != "identity":
        raise Refused(502, "the answer is encoded, which was not asked for")
    is_page = headers.get("content-type", "").startswith(PAGES)
    body = Body(min(max_bytes, LONGEST) if is_page else max_bytes)
    while block := response.read1(1 << 16):
        body.add(block)
    if request.method != "HEAD" and expected is not None and body.size != expected:
        raise Refused(502, f"the answer ends behind {body.size} of {expected} bytes")
    if is_page and request.method != "HEAD":
        body.file.seek(0)
        data, body = _rewrite_links(body.file.read(), rules), Body(max_bytes)
        body.add(data)
    return body.answer(response.status, headers, expected if request.method == "HEAD" else None)


def _map_servers(rules: Rules) -> dict[str, str]:
    """Server → its name inside."""
    return {
        host.upstream.lower(): f"http://{name}" for name, host in rules.hosts.items() if isinstance(host.upstream, str)
    }


def _rewrite_links(page: bytes, rules: Rules) -> bytes:
    """A page whose links to servers of the list lead to their names inside."""
    for server, name in _map_servers(rules).items():
        page = page.replace(f"{server}/".encode(), f"{name}/".encode())
    return page


def _rewrite_redirect(location: str, request: ProxyRequest, rules: Rules) -> str:
    """Where a redirect leads, as it is called inside. Raises Refused."""
    try:
        target = urllib.parse.urlsplit(
            urllib.parse.urljoin(f"{rules.hosts[request.host].upstream}{request.path}", location)
        )
        name = _map_servers(rules).get(f"{target.scheme}://{target.netloc}".lower())
    except ValueError:
        name = None
    if name is None or not location.isascii() or not location.isprintable():
        raise Refused(502, f"the answer leads to {location[:200]}, which is not on the list")
    return name + target.path
