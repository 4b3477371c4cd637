"""What may leave a sandbox: a request is read, judged, and written anew from what is known to be good. Nothing here
touches a network.

Names of hosts stand in a list, and each leads to one place outside that the user named. What a sandbox says of a host
is looked up in that list and nowhere else: no name is resolved, and no number, port or tunnel is taken from it. Of a
request only the method, the path and the headers of a short list go on; it has no body and no query. What a sandbox can
still tell the owner of a place are the paths that it asks for. They stand in the log."""

from __future__ import annotations

import ipaddress
import re
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["HEAD", "ProxyRequest", "Host", "Refused", "Rules", "is_number", "check_request"]

HEAD = 8 << 10
"""Bytes of a request's first line and its headers."""
NAME = re.compile(r"(?=.{1,200}\Z)[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")
FIRST = re.compile(r"([A-Z]{1,20}) ([!-~]{1,4000}) HTTP/1\.[01]")
TARGET = re.compile(r"http://([A-Za-z0-9.-]{1,250})(?::80)?(/[^?#]*)?([?#].*)?")
FIELD = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]{1,100}):[ \t]*+([ -~\t]*)")
SEGMENT = re.compile(r"[A-Za-z0-9._~+!@=,-]*")
METHODS = ("GET", "HEAD")
"""Those that an allowlist may hold: they have no body, and change nothing."""
VALUE = 300
"""Characters of a header that goes on."""


@dataclass(frozen=True)
class Host:
    """A place outside, under a name. Raises ValueError."""

    upstream: Path | str
    """A folder of wheels and sdists, which is served as an index; or scheme and host of a server, such as
    https://pypi.org."""
    methods: tuple[str, ...] = METHODS
    private: bool = False
    """Whether the server's name may lead to an address that is not public. A server that is named by its number may be
    anywhere."""

    def __post_init__(self) -> None:
        if not {*self.methods} <= {*METHODS}:
            raise ValueError(f"methods must be of {', '.join(METHODS)}; got {', '.join(self.methods)}")
        if isinstance(self.upstream, str) and not re.fullmatch(r"https?://[A-Za-z0-9.-]+(:[0-9]{1,5})?", self.upstream):
            raise ValueError(
                f"a place outside is a folder, or scheme and host such as https://pypi.org; got {self.upstream!r}"
            )


@dataclass(frozen=True)
class Rules:
    """What a door lets through. Raises ValueError."""

    hosts: Mapping[str, Host]
    """By the name that a sandbox calls it, which need not exist anywhere else."""
    headers: tuple[str, ...] = ("accept",)
    """Of a request, in small letters. All others are dropped."""
    largest: int = 256 << 20
    """Bytes of an answer."""
    total: int = 2 << 30
    """Bytes of all answers."""
    requests: int = 5000
    """Behind so many the door is closed."""
    seconds: float = 120.0
    """From a connection to the end of its answer from outside, and again for the way in."""
    together: int = 8
    """Requests of a sandbox at a time."""

    def __post_init__(self) -> None:
        for name in self.hosts:
            if not NAME.fullmatch(name) or name.rpartition(".")[2].isdigit() or name == "localhost":
                raise ValueError(
                    f"a host's name has small letters, digits, hyphens and dots, and is no number; got {name!r}"
                )
        if min(self.largest, self.total, self.requests, self.seconds, self.together) <= 0:
            raise ValueError("all bounds must be positive")


@dataclass(frozen=True)
class ProxyRequest:
    """A request that may go on."""

    method: str
    host: str
    path: str
    """Without escapes, beginning with a slash."""
    headers: Mapping[str, str]
    dropped: tuple[str, ...] = ()
    """Names of headers that do not go on."""


class Refused(Exception):
    """A request that does not go on, or an answer that does not come in. `about`: what could be read of it, for the
    log."""

    def __init__(self, status: int, reason: str, about: Mapping[str, object] | None = None) -> None:
        super().__init__(reason)
        self.status, self.reason, self.about = status, reason, dict(about or {})


def check_request(head: bytes, rules: Rules) -> ProxyRequest:
    """The request whose head this is, up to the empty line. Raises Refused, and nothing else, for what the rules do not
    allow."""
    first, *lines = head.decode("latin-1").split("\r\n")
    request_line = FIRST.fullmatch(first)
    if request_line is None:
        raise Refused(400, "this is no request", {"said": first[:200]})
    method, target = request_line.groups()
    about: dict[str, object] = {"method": method, "target": target[:300]}
    fields = _parse_fields(lines, about)
    about["dropped"] = [name[:60] for name, _ in fields if name not in rules.headers][:20]
    if method == "CONNECT":
        raise Refused(405, "there are no tunnels through this door; ask for http://, and the door speaks https", about)
    url = TARGET.fullmatch(target)
    if url is None:
        raise Refused(400, "a request names http://HOST/PATH, with a host of the list and no port", about)
    name, path = url[1].lower(), url[2] or "/"
    host = rules.hosts.get(name)
    if host is None:
        raise Refused(403, f"{name} is not on the list", about)
    if method not in host.methods:
        raise Refused(405, f"{method} is not allowed; {' and '.join(host.methods)} are", about)
    if url[3]:
        raise Refused(403, "a query is not allowed", about)
    if any(
        field in ("content-length", "transfer-encoding", "upgrade", "expect") and value not in ("", "0")
        for field, value in fields
    ):
        raise Refused(400, "a request has no body, and asks for no other protocol", about)
    headers = {field: value for field, value in fields if field in rules.headers and len(value) <= VALUE}
    return ProxyRequest(method, name, _parse_path(path, about), headers, tuple(map(str, about["dropped"])))


def _parse_fields(lines: list[str], about: dict[str, object]) -> list[tuple[str, str]]:
    """Names in small letters, and values."""
    fields = []
    for line in lines:
        field = FIELD.fullmatch(line)
        if field is None:
            raise Refused(400, "a header cannot be read", about)
        fields.append((field[1].lower(), field[2].strip()))
    return fields


def _parse_path(text: str, about: Mapping[str, object]) -> str:
    """A path without escapes. Raises Refused where a server could read another one in it than this door does."""
    path = urllib.parse.unquote(text, "latin-1")
    segments = path.split("/")[1:]
    if (
        not all(SEGMENT.fullmatch(segment) for segment in segments)
        or any(segment and not segment.strip(".") for segment in segments)
        or "" in segments[:-1]
    ):
        raise Refused(403, "the path holds what could be read in two ways", about)
    return path


def is_number(host: str) -> bool:
    """Whether a host is named by its address."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
